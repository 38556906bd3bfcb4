//! Shell completion. kubectl runs the program `kubectl_complete-mirror`, a link to this one, with the words after
//! `kubectl mirror`. It prints the candidates for the last word, and a directive to the shell, as cobra does.

use std::{
    env,
    ffi::{OsStr, OsString},
    path::Path,
    sync::mpsc,
    thread,
    time::Duration,
};

use clap::{CommandFactory as _, FromArgMatches as _};
use clap_complete::engine::{self, CompletionCandidate};
use kube::{
    Api, ResourceExt as _,
    api::{DynamicObject, ListParams},
    config::Kubeconfig,
    core::ApiResource,
};
use mirror_api::{Mirror, MirrorTarget};
use mirror_client::{Environment, Options};

use crate::{
    cli::Cli,
    cluster::{Cluster, Connection},
    runtime,
    workload::{TYPES, Type},
};

/// The name of the link.
const NAME: &str = "kubectl_complete-mirror";
/// Timeout of the cluster.
const PATIENCE: Duration = Duration::from_secs(2);
/// Maximum number of names.
const MOST: u32 = 500;
/// cobra's directives: the shell adds no space, and proposes no files.
const NO_SPACE: u8 = 2;
const NO_FILES: u8 = 4;

/// Whether this program was started by that name.
pub(crate) fn is_asked() -> bool {
    let name = env::args_os().next().unwrap_or_default();
    Path::new(&name).file_stem() == Some(OsStr::new(NAME))
}

/// The candidates for the last of these words, each with its help, and the directive.
pub(crate) fn candidates(words: Vec<OsString>) -> String {
    let last = words.len().saturating_sub(1);
    let is_filter = words.iter().take(last).any(|word| word == "--");
    let is_flag = words.last().is_some_and(|word| word.to_string_lossy().starts_with('-'));
    let found = engine::complete(&mut Cli::command(), words, last, env::current_dir().ok().as_deref());
    let mut found = found.unwrap_or_default();
    found.retain(|of| !is_filter && (is_flag || !of.get_value().to_string_lossy().starts_with('-')));
    let goes_on = |of: &CompletionCandidate| of.get_value().to_string_lossy().ends_with(['/', '=']);
    let is_open = !found.is_empty() && found.iter().all(goes_on);
    let directive = if is_open { NO_FILES | NO_SPACE } else { NO_FILES };
    let mut text = String::new();
    for candidate in found {
        let value = candidate.get_value().to_string_lossy();
        let help = candidate.get_help().map(ToString::to_string).unwrap_or_default();
        let help = help.lines().next().map(|help| format!("\t{help}")).unwrap_or_default();
        text += &format!("{value}{help}\n");
    }
    format!("{text}:{directive}\n")
}

/// Types, and names of objects: `deploy`, `deploy/web`, or `web` after `deploy`. A name alone is a pod.
pub(crate) fn objects(word: &OsStr) -> Vec<CompletionCandidate> {
    let Some(typed) = Typed::read() else { return Vec::new() };
    let word = word.to_string_lossy();
    let (prefix, type_, types) = match (word.split_once('/'), typed.objects.first()) {
        (Some((type_, _)), _) => (format!("{type_}/"), Type::named(type_), &[][..]),
        (None, Some(first)) => {
            // `tail` takes several pods.
            let pods = TYPES.first().filter(|_| typed.is_tail && !first.contains('/'));
            (String::new(), Type::named(first).or(pods), &[][..])
        }
        (None, None) => (String::new(), TYPES.first(), &TYPES[..]),
    };
    let names = type_.map(|type_| typed.names(type_.resource(), true)).unwrap_or_default();
    let names = names.into_iter().map(|name| format!("{prefix}{name}"));
    matching(&word, names.chain(types.iter().map(Type::to_string)))
}

pub(crate) fn contexts(word: &OsStr) -> Vec<CompletionCandidate> {
    of_kubeconfig(word, |of| of.contexts.into_iter().map(|named| named.name).collect())
}

pub(crate) fn clusters(word: &OsStr) -> Vec<CompletionCandidate> {
    of_kubeconfig(word, |of| of.clusters.into_iter().map(|named| named.name).collect())
}

pub(crate) fn users(word: &OsStr) -> Vec<CompletionCandidate> {
    of_kubeconfig(word, |of| of.auth_infos.into_iter().map(|named| named.name).collect())
}

fn of_kubeconfig(word: &OsStr, names: fn(Kubeconfig) -> Vec<String>) -> Vec<CompletionCandidate> {
    let kubeconfig = Typed::read().and_then(|typed| typed.connection.kubeconfig);
    let options = Options { kubeconfig, ..Options::default() };
    let read = mirror_client::read_kubeconfig(&options, &Environment::of_process());
    matching(&word.to_string_lossy(), read.map(names).unwrap_or_default())
}

pub(crate) fn mirrors(word: &OsStr) -> Vec<CompletionCandidate> {
    named(word, ApiResource::erase::<Mirror>(&()), true)
}

pub(crate) fn targets(word: &OsStr) -> Vec<CompletionCandidate> {
    named(word, ApiResource::erase::<MirrorTarget>(&()), false)
}

pub(crate) fn namespaces(word: &OsStr) -> Vec<CompletionCandidate> {
    named(word, ApiResource::erase::<k8s_openapi::api::core::v1::Namespace>(&()), false)
}

fn named(word: &OsStr, resource: ApiResource, is_namespaced: bool) -> Vec<CompletionCandidate> {
    let names = Typed::read().map(|typed| typed.names(resource, is_namespaced));
    matching(&word.to_string_lossy(), names.unwrap_or_default())
}

fn matching(word: &str, names: impl IntoIterator<Item = String>) -> Vec<CompletionCandidate> {
    names.into_iter().filter(|name| name.starts_with(word)).map(CompletionCandidate::new).collect()
}

/// The words before the one to complete, as far as they can be read.
struct Typed {
    connection: Connection,
    is_tail: bool,
    objects: Vec<String>,
}

impl Typed {
    fn read() -> Option<Self> {
        let mut words: Vec<_> = env::args_os().collect();
        words.pop();
        let matches = Cli::command().ignore_errors(true).try_get_matches_from(words).ok()?;
        let command = matches.subcommand();
        let objects = command.and_then(|(_, of)| of.try_get_many::<String>("objects").ok()?);
        let objects = objects.into_iter().flatten().cloned().collect();
        let is_tail = command.is_some_and(|(name, _)| name == "tail");
        Some(Self { connection: Connection::from_arg_matches(&matches).ok()?, is_tail, objects })
    }

    /// The names of objects of the cluster. The credential helper of a kubeconfig may block, so a thread waits for it.
    fn names(self, resource: ApiResource, is_namespaced: bool) -> Vec<String> {
        let (sender, receiver) = mpsc::channel();
        let read = async move {
            let cluster = Cluster::connect(&self.connection, false).await.ok()?;
            names(&cluster, &resource, is_namespaced).await.ok()
        };
        thread::spawn(move || sender.send(runtime().ok()?.block_on(read)?).ok());
        receiver.recv_timeout(PATIENCE).unwrap_or_default()
    }
}

/// The names of objects of the cluster, or of the namespace.
pub(crate) async fn names(
    cluster: &Cluster,
    resource: &ApiResource,
    is_namespaced: bool,
) -> anyhow::Result<Vec<String>> {
    let Cluster { client, namespace, .. } = cluster.clone();
    let api = match is_namespaced {
        true => Api::<DynamicObject>::namespaced_with(client, &namespace, resource),
        false => Api::all_with(client, resource),
    };
    let found = api.list_metadata(&ListParams::default().limit(MOST)).await?;
    Ok(found.items.iter().map(|object| object.name_any()).collect())
}

#[cfg(test)]
mod tests {
    #![expect(clippy::panic, reason = "a test fails by panicking")]

    use super::*;

    fn completed(words: &str) -> Vec<String> {
        let words = ["kubectl_complete-mirror"].into_iter().chain(words.split(' '));
        let text = candidates(words.map(OsString::from).collect());
        text.lines().map(|line| line.split('\t').next().unwrap_or_default().to_owned()).collect()
    }

    #[test]
    fn commands_flags_and_values_are_completed_as_by_kubectl() {
        assert_eq!(completed("o"), ["on", "off", ":4"]);
        assert_eq!(completed("on --sn"), ["--snaplen", ":4"]);
        assert_eq!(completed("status -o "), ["json", "yaml", "name", "wide", "jsonpath=", ":4"]);
        assert_eq!(completed("status -o jsonp"), ["jsonpath=", ":6"]);
        assert_eq!(completed("status --watch -o=w"), ["-o=wide", ":4"]);
        assert_eq!(completed("coverage --output=y"), ["--output=yaml", ":4"]);
        assert_eq!(completed("on --dry-run=s"), ["--dry-run=server", ":4"]);
        let [first, .., last] = &completed("")[..] else { panic!("nothing") };
        assert_eq!([first.as_str(), last], ["tail", ":4"]);
        let flags = completed("tail --");
        assert!(flags.iter().all(|flag| flag.starts_with('-') || flag == ":4"), "{flags:?}");
        assert!(flags.contains(&"--namespace".to_owned()), "{flags:?}");
        // Words of a filter.
        assert_eq!(completed("tail web -- tcp po"), [":4"]);
    }
}
