//! [`load`]: finds the cluster and the user by the rules of client-go. kube's own loader refuses a KUBECONFIG that
//! names a missing file, falls back to the in-cluster API if a file is broken, treats empty strings as values, and
//! parses a server without a scheme as a path.

use std::{
    env, io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, anyhow, bail};
use http::Uri;
use kube::{
    Config,
    config::{
        AuthInfo, Cluster, Context, KubeConfigOptions, Kubeconfig, KubeconfigError, NamedAuthInfo,
        NamedCluster, NamedContext,
    },
};
use serde_json::Value;

use crate::{Environment, Options, proxy, token};

/// Reads `--kubeconfig`, or the files of `KUBECONFIG`, or `~/.kube/config`. Empty without a file.
///
/// # Errors
///
/// A file cannot be read or is invalid, or the file of `--kubeconfig` does not exist.
pub fn read(options: &Options, environment: &Environment) -> anyhow::Result<Kubeconfig> {
    let mut merged = Kubeconfig::default();
    for file in &files(options, environment) {
        let read = match Kubeconfig::read_from(file) {
            Err(KubeconfigError::ReadConfig(why, _))
                if why.kind() == io::ErrorKind::NotFound && options.kubeconfig.is_none() =>
            {
                continue;
            }
            Err(KubeconfigError::ReadConfig(why, _)) => {
                bail!("cannot read the kubeconfig {}: {why}", file.display())
            }
            Err(why) => bail!("the kubeconfig {}: {}", file.display(), first_line(&why)),
            Ok(read) => without_empty(read, file)?,
        };
        merged = merged.merge(read).with_context(|| format!("the kubeconfig {}", file.display()))?;
    }
    Ok(merged)
}

/// Finds the cluster and the route to it: that of the kubeconfig, or the one that this process runs in.
pub(crate) async fn load(options: &Options, environment: &Environment) -> anyhow::Result<Config> {
    let mut merged = read(options, environment)?;
    let context = options.context.clone().or_else(|| merged.current_context.clone());
    let Some(context) = context.or_else(|| without_context(&mut merged, options)) else {
        let mut config = Config::incluster().with_context(|| nothing(&files(options, environment)))?;
        config.proxy_url = proxy::of(&config.cluster_url, None, environment)?;
        return Ok(config);
    };
    let (of_context, proxy_url) = prepare(&mut merged, context, options)?;
    // Its errors repeat those of their sources.
    let mut config =
        Config::from_custom_kubeconfig(merged, &of_context).await.map_err(|why| anyhow!("{why}"))?;
    config.proxy_url = proxy::of(&config.cluster_url, proxy_url.as_deref(), environment)?;
    Ok(config)
}

/// The reason of an error, without the lines of the file.
fn first_line(error: &KubeconfigError) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

/// The kubeconfig files to read.
fn files(options: &Options, environment: &Environment) -> Vec<PathBuf> {
    if let Some(file) = &options.kubeconfig {
        return vec![file.clone()];
    }
    let named = environment.first(&["KUBECONFIG"]).unwrap_or_default();
    let named: Vec<PathBuf> = env::split_paths(named).filter(|path| *path != Path::new("")).collect();
    if !named.is_empty() {
        return named;
    }
    environment.home.iter().map(|home| home.join(".kube").join("config")).collect()
}

fn nothing(files: &[PathBuf]) -> String {
    let files: Vec<_> = files.iter().map(|file| file.display().to_string()).collect();
    format!(
        "cannot find the Kubernetes API: no current context in {}, and this is not a pod with a service account; \
         set KUBECONFIG or use --kubeconfig",
        files.join(", ")
    )
}

/// A kubeconfig without its empty strings, which client-go treats as absent. An empty path was made absolute.
fn without_empty(kubeconfig: Kubeconfig, file: &Path) -> anyhow::Result<Kubeconfig> {
    fn drop_empty(value: &mut Value, directory: &str) {
        match value {
            Value::Object(fields) => {
                fields.retain(|_, field| field != "" && field != directory);
                fields.values_mut().for_each(|field| drop_empty(field, directory));
            }
            Value::Array(items) => items.iter_mut().for_each(|item| drop_empty(item, directory)),
            _ => {}
        }
    }
    let directory = file.parent().map(|parent| parent.join("").display().to_string()).unwrap_or_default();
    let mut value = serde_json::to_value(kubeconfig)?;
    drop_empty(&mut value, &directory);
    Ok(serde_json::from_value(value)?)
}

/// Adds a context without a name for options that name a cluster or its server. Returns the name.
fn without_context(kubeconfig: &mut Kubeconfig, options: &Options) -> Option<String> {
    options.cluster.as_ref().or(options.cluster_fields.server.as_ref())?;
    kubeconfig.contexts.push(NamedContext { context: Some(Context::default()), ..NamedContext::default() });
    Some(String::new())
}

/// Applies the options and client-go's defaults to the context's cluster and user, and refuses what client-go refuses.
/// Returns their names, and `proxy-url`.
fn prepare(
    kubeconfig: &mut Kubeconfig,
    context: String,
    options: &Options,
) -> anyhow::Result<(KubeConfigOptions, Option<String>)> {
    let Kubeconfig { contexts, clusters, auth_infos, .. } = kubeconfig;
    let named = contexts.iter().find(|named| named.name == context);
    let named = named.and_then(|named| named.context.clone());
    let named = named.with_context(|| format!("the kubeconfig has no context {context:?}"))?;
    let cluster_name = options.cluster.clone().unwrap_or(named.cluster);
    if options.cluster.is_none() && options.cluster_fields.server.is_some() {
        // The first one of this name counts.
        let (name, cluster) = (cluster_name.clone(), Some(Cluster::default()));
        clusters.push(NamedCluster { name, cluster, ..NamedCluster::default() });
    }
    let cluster = clusters.iter_mut().find(|cluster| cluster.name == cluster_name);
    let cluster = cluster.and_then(|cluster| cluster.cluster.as_mut());
    let cluster = cluster.with_context(|| format!("the kubeconfig has no cluster {cluster_name:?}"))?;
    replace_cluster(cluster, &options.cluster_fields);
    let is_encrypted =
        complete(cluster).with_context(|| format!("the cluster {cluster_name:?} of the kubeconfig"))?;
    // Removed, because kube's loader has other rules for it.
    let proxy_url = cluster.proxy_url.take();
    let user_name = match &options.user {
        Some(user) if !auth_infos.iter().any(|named| named.name == *user) => {
            bail!("the kubeconfig has no user {user:?}")
        }
        user => user.clone().or(named.user).unwrap_or_default(),
    };
    auth_infos.push(NamedAuthInfo { name: user_name.clone(), ..NamedAuthInfo::default() });
    let user = auth_infos.iter_mut().find(|user| user.name == user_name);
    if let Some(auth_info) = user.map(|user| user.auth_info.get_or_insert_default()) {
        replace_user(auth_info, &options.user_fields);
        if is_encrypted {
            check_user(auth_info).with_context(|| format!("the user {user_name:?} of the kubeconfig"))?;
        } else {
            // Unencrypted credentials could be read on the way.
            *auth_info = AuthInfo {
                impersonate: auth_info.impersonate.take(),
                impersonate_uid: auth_info.impersonate_uid.take(),
                impersonate_groups: auth_info.impersonate_groups.take(),
                impersonate_user_extra: auth_info.impersonate_user_extra.take(),
                ..AuthInfo::default()
            };
        }
    }
    let names =
        KubeConfigOptions { context: Some(context), cluster: Some(cluster_name), user: Some(user_name) };
    Ok((names, proxy_url))
}

/// Replaces fields of a cluster as client-go does: another server has its own name in the certificate, and there is one
/// kind of verification.
fn replace_cluster(cluster: &mut Cluster, fields: &Cluster) {
    if fields.server.is_some() {
        cluster.tls_server_name = None;
    }
    replace(&mut cluster.server, &fields.server);
    replace(&mut cluster.tls_server_name, &fields.tls_server_name);
    if fields.insecure_skip_tls_verify == Some(true) || fields.certificate_authority.is_some() {
        cluster.insecure_skip_tls_verify = fields.insecure_skip_tls_verify;
        cluster.certificate_authority.clone_from(&fields.certificate_authority);
        cluster.certificate_authority_data = None;
    }
}

fn replace_user(user: &mut AuthInfo, fields: &AuthInfo) {
    if fields.token.is_some() {
        user.token_file = None;
    }
    replace(&mut user.client_certificate, &fields.client_certificate);
    replace(&mut user.client_key, &fields.client_key);
    replace(&mut user.token, &fields.token);
    replace(&mut user.impersonate, &fields.impersonate);
    replace(&mut user.impersonate_uid, &fields.impersonate_uid);
    replace(&mut user.impersonate_groups, &fields.impersonate_groups);
}

fn replace<T: Clone>(field: &mut Option<T>, by: &Option<T>) {
    if by.is_some() {
        field.clone_from(by);
    }
}

/// client-go prefers the token file, because it contains the newest token, and sends a user name without a password.
fn check_user(user: &mut AuthInfo) -> anyhow::Result<()> {
    let has_both = [
        ("client-certificate", user.client_certificate.is_some() && user.client_certificate_data.is_some()),
        ("client-key", user.client_key.is_some() && user.client_key_data.is_some()),
    ];
    if let Some((name, _)) = has_both.into_iter().find(|(_, has_both)| *has_both) {
        bail!("{name} and {name}-data are both given");
    }
    if user.token_file.is_some() {
        user.token = None;
    }
    if user.username.is_some() {
        user.password.get_or_insert_default();
    }
    // kube's client panics on a token with characters that are invalid in a header.
    let value = serde_json::to_value(&*user)?;
    for token in [&value["token"], &value["auth-provider"]["config"]["id-token"]] {
        token.as_str().map(token::header).transpose()?;
    }
    Ok(())
}

/// Completes `server` as client-go does: the default scheme is HTTP. Returns whether the connection is encrypted.
fn complete(cluster: &mut Cluster) -> anyhow::Result<bool> {
    let has_authority =
        cluster.certificate_authority.is_some() || cluster.certificate_authority_data.is_some();
    if cluster.insecure_skip_tls_verify == Some(true) && has_authority {
        bail!("insecure-skip-tls-verify and a certificate-authority exclude each other");
    }
    let Some(server) = &cluster.server else { bail!("it has no server") };
    let whole = |text: &str| {
        let uri = text.parse::<Uri>().ok().filter(|uri| uri.host().is_some_and(|host| !host.is_empty()));
        uri.filter(|uri| matches!(uri.scheme_str(), Some("http" | "https")))
    };
    if let Some(uri) = whole(server) {
        return Ok(uri.scheme_str() == Some("https"));
    }
    let completed = format!("http://{server}");
    if server.contains("://") || whole(&completed).is_none_or(|uri| uri.path() != "/") {
        bail!("server {server:?} is neither a URL nor a host and a port, as in https://10.0.0.1:6443");
    }
    cluster.server = Some(completed);
    Ok(false)
}
