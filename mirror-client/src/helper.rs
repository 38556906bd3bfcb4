//! [`Helper`]: the credential helper of a kubeconfig (`exec`).
//!
//! kube would run it, too, but panics on a token that is invalid in a header. kubectl refuses such a token, and does
//! not trim it. A helper that returns a certificate is left to kube's TLS.

use std::{
    collections::HashMap,
    pin::Pin,
    process::{Command, Stdio},
    sync::Arc,
};

use anyhow::{Context as _, anyhow, bail};
use http::{HeaderValue, Request, header::AUTHORIZATION};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::config::{ExecConfig, ExecInteractiveMode};
use serde_json::{Value, json};
use tokio::{sync::Mutex, task::spawn_blocking};
use tower::{BoxError, filter::AsyncPredicate};

use crate::token;

/// How long before its expiry a token is replaced.
const AHEAD: SignedDuration = SignedDuration::from_secs(60);

/// A helper, and its last token.
#[derive(Clone)]
pub(crate) struct Helper {
    exec: ExecConfig,
    token: Arc<Mutex<Token>>,
}

/// A token, and its expiry.
struct Token {
    header: HeaderValue,
    end: Option<Timestamp>,
}

impl Token {
    fn is_current(&self) -> bool {
        self.end.is_none_or(|end| Timestamp::now() + AHEAD < end)
    }
}

impl Helper {
    /// Runs the helper. `None`: it has returned a certificate, and no token.
    pub(crate) fn start(exec: &ExecConfig) -> anyhow::Result<Option<Self>> {
        let token = token(exec)?;
        Ok(token.map(|token| Self { exec: exec.clone(), token: Arc::new(Mutex::new(token)) }))
    }

    /// The header with the token; runs the helper again if the last token expires soon.
    async fn header(&self) -> anyhow::Result<HeaderValue> {
        let mut held = self.token.lock().await;
        if !held.is_current() {
            let exec = self.exec.clone();
            let next = spawn_blocking(move || token(&exec)).await??;
            *held = next.context("the credential helper of the kubeconfig no longer returns a token")?;
        }
        Ok(held.header.clone())
    }
}

impl<B: Send + 'static> AsyncPredicate<Request<B>> for Helper {
    type Future = Pin<Box<dyn Future<Output = Result<Request<B>, BoxError>> + Send>>;
    type Request = Request<B>;

    fn check(&mut self, mut request: Request<B>) -> Self::Future {
        let helper = self.clone();
        Box::pin(async move {
            request.headers_mut().insert(AUTHORIZATION, helper.header().await?);
            Ok(request)
        })
    }
}

/// Runs the helper and returns its token. An error names the helper, and contains its install hint.
fn token(exec: &ExecConfig) -> anyhow::Result<Option<Token>> {
    run(exec).and_then(|output| read(&output)).map_err(|why| {
        let command = exec.command.as_deref().unwrap_or_default();
        let hint = exec.install_hint.as_deref().map(|hint| format!("\n\n{}", hint.trim_end()));
        anyhow!("the credential helper {command:?} of the kubeconfig {why:#}{}", hint.unwrap_or_default())
    })
}

/// Runs the helper, and returns its output.
fn run(exec: &ExecConfig) -> anyhow::Result<Vec<u8>> {
    let mut helper = Command::new(exec.command.as_deref().context("has no command")?);
    helper.args(exec.args.iter().flatten());
    let pair = |of: &HashMap<String, String>| Some((of.get("name")?.clone(), of.get("value")?.clone()));
    helper.envs(exec.env.iter().flatten().filter_map(pair));
    let is_interactive = exec.interactive_mode != Some(ExecInteractiveMode::Never);
    let mut spec = json!({ "interactive": is_interactive });
    if exec.provide_cluster_info {
        spec["cluster"] = serde_json::to_value(&exec.cluster)?;
    }
    let info = json!({ "apiVersion": exec.api_version, "kind": "ExecCredential", "spec": spec });
    helper.env("KUBERNETES_EXEC_INFO", info.to_string());
    if is_interactive {
        helper.stdin(Stdio::inherit()).stderr(Stdio::inherit());
    } else {
        helper.stdin(Stdio::null());
    }
    let output = helper.output().map_err(|why| anyhow!("cannot be run: {why}"))?;
    if !output.status.success() {
        let told = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        bail!("failed ({}){}{told}", output.status, if told.is_empty() { "" } else { ": " });
    }
    Ok(output.stdout)
}

/// Reads the token of an `ExecCredential`, which some helpers write as YAML.
fn read(output: &[u8]) -> anyhow::Result<Option<Token>> {
    const WHAT: &str = "cannot be used";
    let credential: Value = serde_saphyr::from_slice(output)
        .map_err(|_| anyhow!("its output is not an ExecCredential"))
        .context(WHAT)?;
    let text = |field: &str| credential["status"][field].as_str().filter(|text| !text.is_empty());
    if text("clientCertificateData").is_some() && text("clientKeyData").is_some() {
        return Ok(None);
    }
    let token = text("token").context("it returned neither a token nor a certificate").context(WHAT)?;
    let end = text("expirationTimestamp").map(str::parse).transpose();
    let end = end.map_err(|_| anyhow!("its expirationTimestamp is not a time")).context(WHAT)?;
    Ok(Some(Token { header: token::header(token).context(WHAT)?, end }))
}
