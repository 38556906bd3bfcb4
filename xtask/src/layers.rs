//! Checks which modules may name which crates and modules, where the manifests and the compiler do not check it.
//!
//! It reads the tokens of the sources, so it finds grouped imports, paths in code and paths in macros, and it ignores
//! comments. Code for tests may name everything.

use std::{collections::BTreeSet, fs, path::Path};

use anyhow::{Context as _, Result, anyhow, ensure};
use proc_macro2::{Delimiter, TokenStream, TokenTree};

use crate::workspace;

/// These files must not name these paths. A file pattern is the beginning of a path in the work tree; `!` excepts files.
/// A path pattern is the beginning of a Rust path, with `*` for the rest of a name; `async` means the keyword.
struct Rule {
    files: &'static [&'static str],
    paths: &'static [&'static str],
    why: &'static str,
}

impl Rule {
    fn is_for(&self, file: &str) -> bool {
        let excepted = |pattern: &&str| pattern.strip_prefix('!').is_some_and(|path| file.starts_with(path));
        self.files.iter().any(|path| file.starts_with(path)) && !self.files.iter().any(excepted)
    }
}

const RULES: &[Rule] = &[
    Rule {
        files: &[
            "kubectl-mirror/src/check/judge",
            "kubectl-mirror/src/check/network.rs",
            "kubectl-mirror/src/jsonpath.rs",
            "kubectl-mirror/src/sysdump/choice.rs",
            "kubectl-mirror/src/sysdump/redact.rs",
            "kubectl-mirror/src/tail/course.rs",
            "mirror-agent/src/apiserver/limits.rs",
            "mirror-agent/src/apiserver/query.rs",
            "mirror-api/src/",
            "mirror-capture/src/",
            "mirror-core/src/",
            "pcap-filter/src/",
            "tests/traffic/src/",
            "!tests/traffic/src/bin/",
        ],
        paths: &[
            "async",
            "kube::Api",
            "kube::Client",
            "libc",
            "nix",
            "std::env",
            "std::fs",
            "std::io::std*",
            "std::net",
            "std::os",
            "std::process",
            "std::thread",
            "std::time::Instant",
            "std::time::SystemTime",
            "tokio",
        ],
        why: "it is a pure function: no clock, no environment, no I/O (`core::net` has the addresses)",
    },
    Rule {
        files: &["mirror-agent/src/kernel/links", "mirror-agent/src/sources/"],
        paths: &[
            "crate::mirror_iface",
            "crate::plan",
            "crate::select",
            "mirror_core::mirror_iface",
            "mirror_core::plan",
            "mirror_core::select",
        ],
        why: "an edge reads and changes what it is given; it decides nothing",
    },
    Rule {
        files: &["mirror-agent/src/reconcile"],
        paths: &[
            "inotify",
            "nix",
            "libc",
            "std::fs",
            "crate::sources::file",
            "crate::sources::kube",
            "crate::kernel::links::netlink",
            "crate::kernel::dataplane::bpf",
            "crate::kernel::dataplane::hooks",
        ],
        why: "the loop knows the three edges by their traits only",
    },
    Rule {
        files: &["mirror-agent/src/capture/recording"],
        paths: &["tokio", "crate::capture::control", "crate::kernel", "async"],
        why: "it makes files of the records that it is given, and knows neither the ring nor the flags",
    },
    Rule {
        files: &[
            "mirror-agent/src/controller",
            "mirror-agent/src/report",
            "!mirror-agent/src/report/status.rs",
        ],
        paths: &[
            "nix",
            "libc",
            "std::fs",
            "std::process",
            "crate::kernel::links",
            "crate::kernel::dataplane::bpf",
            "crate::kernel::dataplane::hooks",
            "crate::kernel::dataplane::maps",
            "crate::kernel::dataplane::pins",
            "crate::kernel::dataplane::Dataplane",
        ],
        why: "it tells, and can change nothing: it reads reports and `dataplane::readout`",
    },
    Rule {
        files: &["mirror-agent/src/apiserver"],
        paths: &[
            "nix",
            "libc",
            "crate::capture::control",
            "crate::capture::recording",
            "crate::capture::tail",
            "crate::report::Report",
            "crate::report::Reports",
            "crate::report::notes",
            "crate::report::status",
        ],
        why: "it runs on any node, and knows the others by the API server and by their agents alone",
    },
    Rule {
        files: &[
            "mirror-agent/src/",
            "!mirror-agent/src/apiserver",
            "!mirror-agent/src/capture/control",
            "!mirror-agent/src/capture/readers",
            "!mirror-agent/src/cli/crds.rs",
            "!mirror-agent/src/controller",
            "!mirror-agent/src/report/events",
            "!mirror-agent/src/report/mirror_node",
            "!mirror-agent/src/sources/kube",
        ],
        paths: &["kube*", "k8s_openapi", "mirror_api"],
        why: "only the source of pods that is Kubernetes knows Kubernetes, what writes Events, conditions, MirrorNodes and \
              statuses, and what passes on requests of the API of packets; the rest knows resources by `model::Resource`",
    },
    Rule {
        // aya cannot list the filters of a clsact qdisc.
        files: &[
            "mirror-agent/src/",
            "!mirror-agent/src/kernel/links/",
            "!mirror-agent/src/kernel/dataplane/hooks/",
        ],
        paths: &["rtnetlink", "netlink_*"],
        why: "only the edge to the devices speaks netlink",
    },
    Rule {
        files: &["mirror-agent/src/", "!mirror-agent/src/kernel/links/", "!mirror-agent/src/kernel/netns.rs"],
        paths: &["nix::sched", "libc::setns", "libc::ioctl", "procfs", "\"/proc"],
        why: "only the edge to the devices looks into namespaces and /proc, and asks by ioctl",
    },
    Rule {
        files: &[
            "mirror-agent/src/",
            "!mirror-agent/src/kernel/",
            "!mirror-agent/src/cli/",
            "!mirror-agent/src/report/status.rs",
        ],
        paths: &["crate::kernel::netns"],
        why: "only the edges to the devices and to BPF enter namespaces",
    },
    Rule {
        files: &["mirror-agent/src/", "!mirror-agent/src/kernel/dataplane/"],
        paths: &["aya*"],
        why: "only the edge to BPF knows BPF",
    },
    Rule {
        files: &["mirror-agent/src/", "!mirror-agent/src/report/metrics"],
        paths: &["prometheus"],
        why: "one module decides what is counted, and under which name",
    },
    Rule {
        files: &[
            "mirror-agent/src/",
            "!mirror-agent/src/apiserver",
            "!mirror-agent/src/capture/readers",
            "!mirror-agent/src/report/admin.rs",
        ],
        paths: &["hyper*", "http_body_util"],
        why: "only the edges to HTTP clients and servers know HTTP",
    },
    Rule {
        files: &["mirror-agent/src/", "!mirror-agent/src/cli", "!mirror-agent/src/main.rs"],
        paths: &["clap"],
        why: "the other rooms take values, and not flags",
    },
];

/// The rooms of the agent, each with the rooms that it may name. They are above it, so there is no circle.
const ROOMS: &[(&str, &[&str])] = &[
    ("util", &[]),
    ("kernel", &["util"]),
    ("sources", &["util"]),
    ("report", &["util", "kernel", "sources"]),
    ("reconcile", &["util", "kernel", "sources", "report"]),
    ("capture", &["util", "kernel", "sources", "report"]),
    ("controller", &["util", "sources", "report"]),
    ("apiserver", &["util", "report", "capture"]),
    ("cli", &["util", "kernel", "sources", "report", "reconcile", "capture", "controller", "apiserver"]),
];

/// The eBPF programs are glue code. If they need more lines, the logic belongs into `mirror-common`.
const EBPF_LINES: usize = 1300;
/// The most lines that a reader can comfortably read in one file.
const FILE_LINES: usize = 400;

/// Checks every source of the work tree. Prints long files, which are no error.
pub(crate) fn check(root: &Path) -> Result<()> {
    let sources = workspace::files(&["*.rs"])?;
    let mut violations = missing(&sources);
    let mut ebpf_lines = 0;
    for file in &sources {
        let text = fs::read_to_string(root.join(file)).with_context(|| file.clone())?;
        violations.extend(violations_in(file, &text)?);
        let lines = text.lines().count();
        if lines > FILE_LINES {
            println!("    warning: {file} has {lines} lines, more than {FILE_LINES}");
        }
        if file.starts_with("mirror-ebpf/src/") && !file.ends_with("/probes.rs") {
            ebpf_lines += lines;
        }
    }
    if ebpf_lines >= EBPF_LINES {
        violations.push(format!("mirror-ebpf/src has {ebpf_lines} lines, {EBPF_LINES} or more"));
    }
    ensure!(violations.is_empty(), "the layers are broken:\n  {}", violations.join("\n  "));
    Ok(())
}

/// The paths in rules that no source has: such a path checks nothing.
fn missing(sources: &[String]) -> Vec<String> {
    let paths = RULES.iter().flat_map(|rule| rule.files).map(|path| path.trim_start_matches('!'));
    let missing = paths.filter(|path| !sources.iter().any(|file| file.starts_with(*path)));
    missing.map(|path| format!("a rule is for {path}, where no source is")).collect()
}

/// The forbidden paths in `file`. Files of tests may name everything.
fn violations_in(file: &str, text: &str) -> Result<Vec<String>> {
    if file.ends_with("/tests.rs") || file.contains("/tests/") {
        return Ok(Vec::new());
    }
    let mut forbidden: Vec<(String, String)> = Vec::new();
    for rule in RULES.iter().filter(|rule| rule.is_for(file)) {
        forbidden.extend(rule.paths.iter().map(|path| ((*path).to_owned(), rule.why.to_owned())));
    }
    let room = file.strip_prefix("mirror-agent/src/").and_then(|path| path.split(['/', '.']).next());
    if let Some(room) = room.filter(|name| !["lib", "main"].contains(name)) {
        let Some((_, may_name)) = ROOMS.iter().find(|(name, _)| *name == room) else {
            return Ok(vec![format!("{file} is in no room of the agent")]);
        };
        let rooms = ROOMS.iter().map(|(name, _)| *name);
        let others = rooms.filter(|name| *name != room && !may_name.contains(name));
        let why = format!("its room may name only {may_name:?}");
        forbidden.extend(others.map(|name| (format!("crate::{name}"), why.clone())));
    }
    if forbidden.is_empty() {
        return Ok(Vec::new());
    }
    let mut named = BTreeSet::new();
    let tokens = text.parse::<TokenStream>().map_err(|why| anyhow!("{file}: {why}"))?;
    collect(tokens, "", &mut named);
    // Another name alone is local or imported.
    named.retain(|path| path.contains("::") || path.starts_with('"') || path == "async");
    let mut violations = Vec::new();
    for path in &named {
        let rules = forbidden.iter().filter(|(pattern, _)| matches(pattern, path));
        violations.extend(rules.map(|(_, why)| format!("{file} names `{path}`: {why}")));
    }
    Ok(violations)
}

/// Whether `path` matches `pattern`. The pattern of a string literal begins with a quotation mark.
fn matches(pattern: &str, path: &str) -> bool {
    if pattern.starts_with('"') {
        return path.starts_with(pattern);
    }
    match pattern.strip_suffix('*') {
        Some(start) => path.starts_with(start),
        None => path.strip_prefix(pattern).is_some_and(|rest| rest.is_empty() || rest.starts_with("::")),
    }
}

/// Collects the names and paths in tokens, and the literals. `prefix` is the path before a group of imports. Every token
/// sequence that looks like a path counts as a path.
fn collect(tokens: TokenStream, prefix: &str, named: &mut BTreeSet<String>) {
    let mut path = prefix.to_owned();
    // In an item for tests, to its body or its semicolon.
    let mut is_of_tests = false;
    for token in tokens {
        match token {
            TokenTree::Group(body) if is_of_tests && body.delimiter() == Delimiter::Brace => {
                is_of_tests = false;
            }
            TokenTree::Punct(end) if is_of_tests && end.as_char() == ';' => is_of_tests = false,
            _ if is_of_tests => {}
            TokenTree::Ident(name) if path.is_empty() || path.ends_with("::") => path += &name.to_string(),
            TokenTree::Punct(colon) if colon.as_char() == ':' && !path.is_empty() => path.push(':'),
            TokenTree::Group(imports) if path.ends_with("::") => {
                collect(imports.stream(), &path, named);
                path = prefix.to_owned();
            }
            other => {
                named.insert(path);
                path = prefix.to_owned();
                match other {
                    TokenTree::Ident(name) => path = name.to_string(),
                    TokenTree::Group(group) => {
                        let is_attribute = group.delimiter() == Delimiter::Bracket;
                        is_of_tests =
                            is_attribute && group.stream().to_string().replace(' ', "") == "cfg(test)";
                        collect(group.stream(), "", named);
                    }
                    TokenTree::Literal(literal) => {
                        named.insert(literal.to_string());
                    }
                    TokenTree::Punct(_) => {}
                }
            }
        }
    }
    named.insert(path);
}

#[cfg(test)]
mod tests;
