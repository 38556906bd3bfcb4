//! Wireshark's extcap: each context of the kubeconfig is an interface in Wireshark, whose packets `tail` reads.
//!
//! Wireshark runs each program in its extcap folder, for example a link to this one. The options say what Wireshark
//! wants:
//!
//! * `--extcap-interfaces`, `--extcap-dlts` and `--extcap-config`: the contexts, and for each interface its link type and
//!   its options. Wireshark asks for them at each start, so they send no request.
//! * `--extcap-config --extcap-reload-option OPTION`: the values that the cluster has for an option.
//! * `--extcap-capture-filter` without `--capture`: the mistake in a filter.
//! * `--capture`: packets for the pipe `--fifo`, until SIGTERM.
//!
//! Answers are sentences on standard output. Wireshark shows standard error as a failure, when the capture has ended.
//! Source: <https://www.wireshark.org/docs/wsdg_html_chunked/ChCaptureExtcap.html>

use std::{collections::BTreeMap, env, ffi::OsString, fs::File, process::ExitCode};

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Namespace;
use kube::{config::Kubeconfig, core::ApiResource};
use mirror_client::{Environment, Options, read_kubeconfig};
use mirror_core::settings::parse_filter;

use crate::{
    cli::{self, Cli, Command},
    cluster::{Cluster, lacks_right},
    complete, execute, print, runtime,
    workload::Type,
};

/// The first version of Wireshark that has lists with free text (`editselector`).
const HAS_LISTS: [u32; 2] = [4, 2];
/// The beginning of the name of an interface for such a version, and for an older one. No device has such a name.
const PREFIXES: [&str; 2] = ["podmirror:", "podmirror/"];
/// The types of the workloads in a list.
const LISTED: [&str; 6] = ["deploy", "sts", "ds", "job", "svc", "pod"];
/// The workload that is all pods of the namespace.
const ALL: &str = "*";

/// Whether Wireshark has started this program.
pub(crate) fn is_asked() -> bool {
    let first = env::args_os().nth(1).unwrap_or_default();
    first == "--capture" || first.as_encoded_bytes().starts_with(b"--extcap-")
}

/// Answers the question of these words.
pub(crate) fn run(words: impl Iterator<Item = OsString>) -> anyhow::Result<ExitCode> {
    let call = Call::parse(words.map(|word| word.to_string_lossy().into_owned()));
    if call.0.contains_key("capture") {
        return call.capture();
    }
    let answer = if let Some(option) = call.get("extcap-reload-option") {
        // Wireshark's window is blocked meanwhile.
        let connection = call.command("status", ["--request-timeout=5s".to_owned()])?.connection;
        let read = async { values(option, &Cluster::connect(&connection, false).await?).await };
        runtime()?.block_on(read)?
    } else {
        call.answer(&read_kubeconfig(&Options::default(), &Environment::of_process())?)?
    };
    print(&answer).map(|()| ExitCode::SUCCESS)
}

/// A question: the options without their dashes, and their values.
struct Call(BTreeMap<String, String>);

impl Call {
    /// Newer versions of Wireshark can have more options.
    fn parse(words: impl Iterator<Item = String>) -> Self {
        let (mut words, mut options) = (words.peekable(), BTreeMap::new());
        while let Some(word) = words.next() {
            let (option, value) = word.split_once('=').unwrap_or((&word, ""));
            let next = words.next_if(|next| value.is_empty() && !next.starts_with("--"));
            let value = next.unwrap_or_else(|| value.to_owned());
            options.insert(option.trim_start_matches('-').to_owned(), value);
        }
        Self(options)
    }

    /// The value of an option, unless it is empty.
    fn get(&self, option: &str) -> Option<&str> {
        self.0.get(option).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// The answer that needs no cluster.
    fn answer(&self, kubeconfig: &Kubeconfig) -> anyhow::Result<String> {
        if self.0.contains_key("extcap-interfaces") {
            return Ok(self.interfaces(kubeconfig));
        }
        let (context, has_lists) = self.interface()?;
        Ok(if self.0.contains_key("extcap-dlts") {
            "dlt {number=1}{name=EN10MB}{display=Ethernet}\n".to_owned()
        } else if self.0.contains_key("extcap-config") {
            config(kubeconfig, context, has_lists)
        } else {
            // The answer for a valid filter is empty.
            let mistake = self.get("extcap-capture-filter").and_then(|filter| parse_filter(filter).err());
            mistake.map(|why| why + "\n").unwrap_or_default()
        })
    }

    fn interfaces(&self, kubeconfig: &Kubeconfig) -> String {
        let version = self.get("extcap-version").unwrap_or_default().split('.');
        let is_old = version.map_while(|number| number.parse::<u32>().ok()).lt(HAS_LISTS);
        let prefix = PREFIXES[usize::from(is_old)];
        let mut text = format!("extcap {{version={}}}{{display=podmirror}}\n", env!("CARGO_PKG_VERSION"));
        for context in kubeconfig.contexts.iter().map(|named| &named.name) {
            text += &format!("interface {{value={prefix}{context}}}{{display=Kubernetes: {context}}}\n");
        }
        text
    }

    /// The context of the interface, and whether Wireshark has lists with free text.
    fn interface(&self) -> anyhow::Result<(&str, bool)> {
        let name = self.get("extcap-interface").unwrap_or_default();
        let [new, old] = PREFIXES.map(|prefix| name.strip_prefix(prefix));
        Ok((new.or(old).with_context(|| format!("no interface {name:?}"))?, new.is_some()))
    }

    /// The command line with a command of the plugin, for the context and the namespace.
    fn command(&self, command: &str, words: impl IntoIterator<Item = String>) -> anyhow::Result<Cli> {
        let context = format!("--context={}", self.interface()?.0);
        let mut all = vec!["kubectl-mirror".to_owned(), command.to_owned(), context];
        all.extend(self.get("namespace").map(|namespace| format!("--namespace={namespace}")));
        all.extend(words);
        Ok(cli::read(all.into_iter().map(OsString::from)).unwrap_or_else(|usage| usage.exit()))
    }

    /// The command line for the packets. Usually Wireshark ends them earlier.
    fn tail(&self, fifo: &str) -> anyhow::Result<Cli> {
        let workload = self.get("workload").context("choose a workload in the options of the interface")?;
        let mut words = vec![format!("--write={fifo}"), "--duration=24h".to_owned()];
        match workload.trim() {
            ALL => words.push("--selector=".to_owned()),
            labels if labels.contains(['=', '!', '(']) => words.push(format!("--selector={labels}")),
            objects => words.extend(objects.split_whitespace().map(str::to_owned)),
        }
        let filter = self.get("extcap-capture-filter").into_iter();
        words.extend(filter.flat_map(|filter| ["--", filter]).map(str::to_owned));
        self.command("tail", words)
    }

    fn capture(&self) -> anyhow::Result<ExitCode> {
        let fifo = self.get("fifo").context("--capture needs --fifo")?;
        // First, because Wireshark waits for this before it shows a failure.
        let pipe = File::options().write(true).open(fifo).with_context(|| format!("cannot open {fifo}"))?;
        let mut cli = self.tail(fifo)?;
        if let Command::Tail(args) = &mut cli.command {
            args.pipe = Some(pipe);
        }
        execute(cli)
    }
}

/// The options of an interface.
fn config(kubeconfig: &Kubeconfig, context: &str, has_lists: bool) -> String {
    let named = kubeconfig.contexts.iter().find(|named| named.name == context);
    let namespace = named.and_then(|named| named.context.as_ref()?.namespace.as_deref()).unwrap_or("default");
    let kind = if has_lists { "{type=editselector}{reload=true}" } else { "{type=string}" };
    let options = format!(
        "arg {{number=0}}{{call=--namespace}}{{display=Namespace}}{kind}{{default={namespace}}}\n\
         arg {{number=1}}{{call=--workload}}{{display=Workload}}{kind}{{required=true}}\
         {{tooltip=deploy/web, web-0 (a pod), app=web (labels) or {ALL} (all pods)}}\n"
    );
    options + &value(0, namespace) + &value(1, ALL)
}

/// A value for the option with this number.
fn value(option: u8, value: &str) -> String {
    format!("value {{arg={option}}}{{value={value}}}{{display={value}}}\n")
}

/// The values for an option, as the cluster has them.
async fn values(option: &str, cluster: &Cluster) -> anyhow::Result<String> {
    if option == "namespace" {
        let names = complete::names(cluster, &ApiResource::erase::<Namespace>(&()), false).await?;
        return Ok(names.iter().map(|name| value(0, name)).collect());
    }
    let mut values = value(1, ALL);
    for type_ in LISTED.iter().filter_map(|word| Type::named(word)) {
        let names = complete::names(cluster, &type_.resource(), true).await;
        // This user may read objects of other types.
        if !names.as_ref().is_err_and(lacks_right) {
            values.extend(names?.iter().map(|name| value(1, &format!("{type_}/{name}"))));
        }
    }
    Ok(values)
}

#[cfg(test)]
mod tests;
