//! [`Helper`]: the credential helper of a kubeconfig (`exec`).
//!
//! kube would run it, too, but panics on a token that is invalid in a header, and does not send a token beside a
//! certificate. kubectl refuses the former, does not trim it, and sends the latter. A certificate is not renewed.

use std::{
    collections::HashMap,
    pin::Pin,
    process::{Command, Stdio},
    sync::Arc,
};

use anyhow::{Context as _, anyhow, bail, ensure};
use http::{HeaderValue, Request, header::AUTHORIZATION};
use k8s_openapi::{
    ByteString,
    jiff::{SignedDuration, Timestamp},
};
use kube::config::{AuthInfo, ExecConfig, ExecInteractiveMode};
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

/// The output of a helper: a token, and the certificate of the client with its key, in PEM.
type Credentials = (Option<Token>, Option<[String; 2]>);

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
    /// Runs the helper, and adds its certificate to the user. `None`: it has returned no token.
    pub(crate) fn start(exec: ExecConfig, user: &mut AuthInfo) -> anyhow::Result<Option<Self>> {
        let (token, certificate) = credentials(&exec)?;
        if let Some(certificate) = certificate {
            let in_base64 = |pem: String| serde_json::to_value(ByteString(pem.into_bytes()));
            let [certificate, key] = certificate.map(in_base64);
            user.client_certificate_data = certificate?.as_str().map(str::to_owned);
            user.client_key_data = key?.as_str().map(Into::into);
        }
        Ok(token.map(|token| Self { exec, token: Arc::new(Mutex::new(token)) }))
    }

    /// The header with the token; runs the helper again if the last token expires soon.
    async fn header(&self) -> anyhow::Result<HeaderValue> {
        let mut held = self.token.lock().await;
        if !held.is_current() {
            let exec = self.exec.clone();
            let (next, _) = spawn_blocking(move || credentials(&exec)).await??;
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

/// Runs the helper and returns its credentials. An error names the helper, and contains its install hint.
fn credentials(exec: &ExecConfig) -> anyhow::Result<Credentials> {
    run(exec).and_then(|output| read(&output).context("cannot be used")).map_err(|why| {
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

/// Reads an `ExecCredential`, which some helpers write as YAML.
fn read(output: &[u8]) -> anyhow::Result<Credentials> {
    let credential: Value =
        serde_saphyr::from_slice(output).map_err(|_| anyhow!("its output is not an ExecCredential"))?;
    let text = |field: &str| credential["status"][field].as_str().filter(|text| !text.is_empty());
    let certificate = match [text("clientCertificateData"), text("clientKeyData")] {
        [Some(certificate), Some(key)] => Some([certificate, key].map(str::to_owned)),
        [None, None] => None,
        _ => bail!("it returned a certificate or a key, but not both"),
    };
    let end = text("expirationTimestamp").map(str::parse).transpose();
    let end = end.map_err(|_| anyhow!("its expirationTimestamp is not a time"))?;
    let header = text("token").map(token::header).transpose()?;
    ensure!(header.is_some() || certificate.is_some(), "it returned neither a token nor a certificate");
    Ok((header.map(|header| Token { header, end }), certificate))
}
