//! Checks which modules may name which crates and modules, where the manifests and the compiler do not check it.
//!
//! It also checks the dependencies of `mirror-common`, `pcap-filter`, `mirror-capture`, `mirror-core` and `mirror-api`.
//! It parses the sources, so it finds grouped imports, paths in code and paths in macros, and it ignores comments. Test
//! modules may name everything.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, bail};
use proc_macro2::{TokenStream, TokenTree};
use serde_json::Value;
use syn::{
    UseTree,
    visit::{self, Visit},
};

use crate::workspace;

/// These files must not name these paths. A file pattern is the beginning of a path in the work tree. A path pattern is
/// the beginning of a Rust path, with `*` for the rest of a name; `async` means the keyword.
struct Forbidden {
    files: &'static [&'static str],
    paths: &'static [&'static str],
    why: &'static str,
}

/// In the agent, only these files may name these paths.
struct Reserved {
    paths: &'static [&'static str],
    files: &'static [&'static str],
    why: &'static str,
}

const FORBIDDEN: &[Forbidden] = &[
    Forbidden {
        files: &["mirror-capture/src/", "mirror-core/src/", "pcap-filter/src/"],
        paths: &[
            "std::env",
            "std::fs",
            "std::io",
            "std::net",
            "std::os",
            "std::process",
            "std::thread",
            "std::time::Instant",
            "std::time::SystemTime",
            "async",
        ],
        why: "it decides, as a pure function: no clock, no environment, no I/O (`core::net` has the addresses)",
    },
    Forbidden {
        files: &[
            "tests/traffic/src/figures.rs",
            "tests/traffic/src/plan",
            "tests/traffic/src/plots.rs",
            "tests/traffic/src/published.rs",
            "tests/traffic/src/report.rs",
            "tests/traffic/src/results.rs",
            "tests/traffic/src/tools.rs",
        ],
        paths: &["std::env", "std::fs", "std::net", "std::os", "std::process", "std::thread", "std::time"],
        why: "it computes with samples, as a pure function: the binary `traffic` takes them",
    },
    Forbidden {
        files: &[
            "kubectl-mirror/src/check/judge",
            "kubectl-mirror/src/check/judge.rs",
            "kubectl-mirror/src/check/network.rs",
            "kubectl-mirror/src/jsonpath.rs",
            "kubectl-mirror/src/sysdump/choice.rs",
            "kubectl-mirror/src/sysdump/redact.rs",
            "kubectl-mirror/src/tail/course.rs",
            "mirror-api/src/labels.rs",
            "mirror-agent/src/apiserver/limits.rs",
            "mirror-agent/src/apiserver/query.rs",
        ],
        paths: &[
            "kube::Api",
            "kube::Client",
            "tokio",
            "std::env",
            "std::fs",
            "std::io",
            "std::net",
            "std::thread",
            "std::time::Instant",
            "std::time::SystemTime",
            "async",
        ],
        why: "it is a pure function of bytes, texts and times",
    },
    Forbidden {
        files: &["mirror-agent/src/sources/"],
        paths: &["crate::select", "mirror_core::select", "crate::plan", "mirror_core::plan"],
        why: "a source of pods tells what there is, and knows nothing of what is made of it",
    },
    Forbidden {
        files: &["mirror-agent/src/kernel/links"],
        paths: &["crate::select", "crate::mirror_iface", "mirror_core::select", "mirror_core::mirror_iface"],
        why: "the edge to the devices reads and changes what it is given; it decides nothing",
    },
    Forbidden {
        files: &["mirror-agent/src/kernel/dataplane"],
        paths: &["clap"],
        why: "the edge to BPF takes values, and not flags",
    },
    Forbidden {
        files: &["mirror-agent/src/reconcile.rs", "mirror-agent/src/reconcile/"],
        paths: &[
            "rtnetlink",
            "netlink_*",
            "aya*",
            "kube*",
            "k8s_openapi",
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
    Forbidden {
        files: &["mirror-agent/src/capture/recording.rs", "mirror-agent/src/capture/recording/"],
        paths: &["tokio", "aya*", "clap", "crate::capture::control", "crate::kernel", "async"],
        why: "it makes files of the records that it is given, and knows neither the ring nor the flags",
    },
    Forbidden {
        files: &[
            "mirror-agent/src/report/admin.rs",
            "mirror-agent/src/controller",
            "mirror-agent/src/report/metrics",
            "mirror-agent/src/report/health.rs",
            "mirror-agent/src/report.rs",
            "mirror-agent/src/report/notes.rs",
            "mirror-agent/src/report/events",
            "mirror-agent/src/report/mirror_node",
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
    Forbidden {
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
];

const RESERVED: &[Reserved] = &[
    Reserved {
        paths: &["kube*", "k8s_openapi"],
        files: &[
            "mirror-agent/src/apiserver",
            "mirror-agent/src/sources/kube",
            "mirror-agent/src/report/events",
            "mirror-agent/src/report/mirror_node",
            "mirror-agent/src/controller",
            "mirror-agent/src/capture/readers",
        ],
        why: "only the source of pods that is Kubernetes knows Kubernetes, what writes Events, conditions, MirrorNodes and \
              statuses, and the two ends of the API of packets",
    },
    Reserved {
        paths: &["mirror_api"],
        files: &[
            "mirror-agent/src/apiserver",
            "mirror-agent/src/sources/kube",
            "mirror-agent/src/report/mirror_node",
            "mirror-agent/src/controller",
            "mirror-agent/src/capture/readers",
            "mirror-agent/src/cli/crds.rs",
        ],
        why: "the rest of the agent knows resources by `model::Resource` alone",
    },
    Reserved {
        paths: &["rtnetlink", "netlink_*"],
        // aya cannot list the filters of a clsact qdisc.
        files: &["mirror-agent/src/kernel/links/", "mirror-agent/src/kernel/dataplane/hooks/"],
        why: "only the edge to the devices speaks netlink",
    },
    Reserved {
        paths: &["nix::sched", "libc::setns", "libc::ioctl", "procfs", "\"/proc"],
        files: &["mirror-agent/src/kernel/links/", "mirror-agent/src/kernel/netns.rs"],
        why: "only the edge to the devices looks into namespaces and /proc, and asks by ioctl",
    },
    Reserved {
        paths: &["crate::kernel::netns"],
        files: &["mirror-agent/src/kernel/", "mirror-agent/src/cli/", "mirror-agent/src/report/status.rs"],
        why: "only the edges to the devices and to BPF enter namespaces",
    },
    Reserved {
        paths: &["aya*"],
        files: &["mirror-agent/src/kernel/dataplane/"],
        why: "only the edge to BPF knows BPF",
    },
    Reserved {
        paths: &["prometheus"],
        files: &["mirror-agent/src/report/metrics"],
        why: "one module decides what is counted, and under which name",
    },
    Reserved {
        paths: &["hyper*", "http_body_util"],
        files: &[
            "mirror-agent/src/report/admin.rs",
            "mirror-agent/src/apiserver",
            "mirror-agent/src/capture/readers",
        ],
        why: "only the edges to HTTP clients and servers know HTTP",
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

/// A member, and all crates that it may depend on.
type MadeOf = (&'static str, &'static [&'static str]);

/// The members that must use neither the system nor a runtime. `mirror-common` is also `no_std`, so the compiler
/// refuses the rest.
const MADE_OF: [MadeOf; 5] = [
    ("mirror-common", &["zerocopy"]),
    ("pcap-filter", &["thiserror"]),
    ("mirror-capture", &[]),
    ("mirror-core", &["mirror-common", "pcap-filter", "serde", "thiserror", "zerocopy"]),
    ("mirror-api", &["k8s-openapi", "kube", "mirror-core", "schemars", "serde", "serde_json"]),
];

/// The eBPF programs are glue code. If they need more lines, the logic belongs into `mirror-common`.
const EBPF_LINES: usize = 1350;
/// The most lines that a reader can comfortably read in one file.
const FILE_LINES: usize = 400;

/// Checks every source of the work tree. Prints long files, which are no error.
pub(crate) fn check(root: &Path) -> Result<()> {
    let sources = sources(root)?;
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
    let metadata = workspace::metadata()?;
    violations.extend(MADE_OF.iter().flat_map(|made_of| beyond(&metadata, made_of)));
    if ebpf_lines >= EBPF_LINES {
        violations.push(format!("mirror-ebpf/src has {ebpf_lines} lines, {EBPF_LINES} or more"));
    }
    if !violations.is_empty() {
        bail!("the layers are broken:\n  {}", violations.join("\n  "));
    }
    Ok(())
}

/// The paths in rules that no source has: such a path checks nothing.
fn missing(sources: &[String]) -> Vec<String> {
    let rules = FORBIDDEN.iter().map(|rule| rule.files).chain(RESERVED.iter().map(|rule| rule.files));
    let paths = rules.flatten().chain(&["mirror-agent/src/", "mirror-ebpf/src/"]);
    let missing = paths.filter(|path| !sources.iter().any(|file| file.starts_with(**path)));
    missing.map(|path| format!("a rule is for {path}, where no source is")).collect()
}

/// The forbidden dependencies of a member. Its tests may use any crate.
fn beyond(metadata: &Value, (member, may_use): &MadeOf) -> Vec<String> {
    let mut packages = metadata["packages"].as_array().into_iter().flatten();
    let Some(own) = packages.find(|package| package["name"] == *member) else {
        return vec![format!("a rule is for {member}, which is no member")];
    };
    let dependencies = own["dependencies"].as_array().into_iter().flatten();
    let of_the_product = dependencies.filter(|dependency| dependency["kind"].is_null());
    let names = of_the_product.filter_map(|dependency| dependency["name"].as_str());
    let refused = names.filter(|name| !may_use.contains(name));
    refused.map(|name| format!("{member} depends on `{name}`, which is not among {may_use:?}")).collect()
}

/// Every Rust file of the members, by its path in the work tree.
fn sources(root: &Path) -> Result<Vec<String>> {
    let mut files = Vec::new();
    let mut dirs = vec![root.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if path.is_dir() && name != "target" && !name.starts_with('.') {
                dirs.push(path);
            } else if name.ends_with(".rs") {
                files.push(path.strip_prefix(root)?.to_string_lossy().into_owned());
            }
        }
    }
    files.sort();
    Ok(files)
}

/// The forbidden paths in `file`. Files of tests and fakes may name everything.
fn violations_in(file: &str, text: &str) -> Result<Vec<String>> {
    if ["/tests.rs", "/fake.rs"].iter().any(|name| file.ends_with(name)) || file.contains("/tests/") {
        return Ok(Vec::new());
    }
    let is_in = |files: &[&str]| files.iter().any(|prefix| file.starts_with(prefix));
    let mut rules: Vec<_> =
        FORBIDDEN.iter().filter(|rule| is_in(rule.files)).map(|rule| (rule.paths, rule.why)).collect();
    if file.starts_with("mirror-agent/src/") {
        rules.extend(RESERVED.iter().filter(|rule| !is_in(rule.files)).map(|rule| (rule.paths, rule.why)));
    }
    let in_agent = file.strip_prefix("mirror-agent/src/").and_then(|path| path.split(['/', '.']).next());
    let room = in_agent.filter(|name| !["lib", "main"].contains(name));
    let may_name = ROOMS.iter().find(|(name, _)| room == Some(*name)).map(|(_, rooms)| *rooms);
    if room.is_some() && may_name.is_none() {
        return Ok(vec![format!("{file} is in no room of the agent")]);
    }
    if rules.is_empty() {
        return Ok(Vec::new());
    }
    let mut named = Named::default();
    named.visit_file(&syn::parse_file(text).with_context(|| file.to_owned())?);
    named.paths.sort();
    named.paths.dedup();
    let mut violations = Vec::new();
    for path in &named.paths {
        for (patterns, why) in &rules {
            if patterns.iter().any(|pattern| matches(pattern, path)) {
                violations.push(format!("{file} names `{path}`: {why}"));
            }
        }
        let other = ROOMS.iter().find(|(name, _)| matches(&format!("crate::{name}"), path));
        if let (Some(may_name), Some((other, _))) = (may_name, other)
            && room != Some(*other)
            && !may_name.contains(other)
        {
            violations.push(format!("{file} names `{path}`: its room may name only {may_name:?}"));
        }
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

/// Collects the paths that a file names, its string literals (preceded by a quotation mark), and the keyword `async`.
#[derive(Default)]
struct Named {
    paths: Vec<String>,
}

impl Named {
    fn import(&mut self, prefix: &str, tree: &UseTree) {
        let join = |name: &syn::Ident| {
            if prefix.is_empty() { name.to_string() } else { format!("{prefix}::{name}") }
        };
        match tree {
            UseTree::Path(path) => self.import(&join(&path.ident), &path.tree),
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.import(prefix, tree)),
            UseTree::Name(name) => self.paths.push(join(&name.ident)),
            UseTree::Rename(rename) => self.paths.push(join(&rename.ident)),
            UseTree::Glob(_) => self.paths.push(prefix.to_owned()),
        }
    }

    /// Reads the arguments of a macro, which are not parsed. Every token sequence that looks like a path counts as a
    /// path.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut path = String::new();
        for token in tokens {
            match &token {
                TokenTree::Ident(name) if path.is_empty() || path.ends_with("::") => {
                    path += &name.to_string()
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' && !path.is_empty() => path.push(':'),
                _ => {
                    self.end(&mut path);
                    match token {
                        TokenTree::Ident(name) => path = name.to_string(),
                        TokenTree::Group(group) => self.tokens(group.stream()),
                        TokenTree::Literal(literal) => self.paths.push(literal.to_string()),
                        TokenTree::Punct(_) => {}
                    }
                }
            }
        }
        self.end(&mut path);
    }

    fn end(&mut self, path: &mut String) {
        if path.contains("::") || path == "async" {
            self.paths.push(path.clone());
        }
        path.clear();
    }
}

impl<'ast> Visit<'ast> for Named {
    fn visit_item_mod(&mut self, module: &'ast syn::ItemMod) {
        let for_tests = |attribute: &syn::Attribute| {
            attribute.path().is_ident("cfg")
                && matches!(&attribute.meta, syn::Meta::List(list) if list.tokens.to_string() == "test")
        };
        if !module.attrs.iter().any(for_tests) {
            visit::visit_item_mod(self, module);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.import("", &item.tree);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Vec<_> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        // A single name is local or imported.
        if names.len() > 1 {
            self.paths.push(names.join("::"));
        }
        visit::visit_path(self, path);
    }

    fn visit_lit_str(&mut self, text: &'ast syn::LitStr) {
        self.paths.push(format!("\"{}", text.value()));
    }

    fn visit_attribute(&mut self, attribute: &'ast syn::Attribute) {
        // A doc comment is an attribute with a string.
        if !attribute.path().is_ident("doc") {
            visit::visit_attribute(self, attribute);
        }
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.tokens(call.tokens.clone());
        visit::visit_macro(self, call);
    }

    fn visit_signature(&mut self, signature: &'ast syn::Signature) {
        if signature.asyncness.is_some() {
            self.paths.push("async".into());
        }
        visit::visit_signature(self, signature);
    }

    fn visit_expr_async(&mut self, block: &'ast syn::ExprAsync) {
        self.paths.push("async".into());
        visit::visit_expr_async(self, block);
    }
}

#[cfg(test)]
mod tests;
