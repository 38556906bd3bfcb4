//! Tests of the paths that the check finds in sources, and of those that it ignores.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::*;

#[track_caller]
fn names(file: &str, text: &str, path: &str) {
    let violations = violations_in(file, text).unwrap();
    assert!(violations.iter().any(|line| line.contains(&format!("`{path}`"))), "{violations:?}");
}

#[track_caller]
fn is_clean(file: &str, text: &str) {
    assert_eq!(violations_in(file, text).unwrap(), Vec::<String>::new());
}

#[test]
fn a_path_in_a_group_of_imports_is_found() {
    names(
        "mirror-core/src/plan.rs",
        "use std::{collections::BTreeMap, time::Instant};",
        "std::time::Instant",
    );
    names("mirror-agent/src/report/metrics.rs", "use aya::{maps::HashMap as Map};", "aya::maps::HashMap");
}

#[test]
fn a_path_in_code_is_found() {
    names("mirror-core/src/select.rs", "fn f() { let t = std::env::var(\"X\"); }", "std::env::var");
    names("mirror-agent/src/report/admin.rs", "fn f(h: &rtnetlink::Handle) {}", "rtnetlink::Handle");
}

#[test]
fn a_path_in_a_macro_is_found() {
    names("mirror-core/src/select.rs", "fn f() { assert!(std::fs::exists(p)); }", "std::fs::exists");
    names(
        "mirror-core/src/plan.rs",
        "fn f() { assert!(a && (std::time::Instant::now() > b)); }",
        "std::time::Instant::now",
    );
}

#[test]
fn async_code_is_found() {
    names("mirror-core/src/select.rs", "async fn f() {}", "async");
    names("mirror-core/src/select.rs", "fn f() { g(async {}); }", "async");
}

#[test]
fn a_text_that_names_proc_is_found_outside_of_links() {
    let text = "fn f() { open(\"/proc/self/ns/net\"); }";
    names("mirror-agent/src/reconcile.rs", text, "\"/proc/self/ns/net");
    is_clean("mirror-agent/src/kernel/links/procfs.rs", text);
}

#[test]
fn an_edge_may_use_what_is_its_own() {
    is_clean("mirror-agent/src/kernel/links/netlink.rs", "use rtnetlink::Handle;");
    is_clean(
        "mirror-agent/src/kernel/dataplane/hooks/filters.rs",
        "use netlink_packet_route::tc::TcMessage;",
    );
    is_clean("mirror-agent/src/kernel/dataplane/bpf.rs", "use aya::Ebpf;");
    names(
        "mirror-agent/src/kernel/dataplane/bpf.rs",
        "use netlink_packet_route::tc::TcMessage;",
        "netlink_packet_route::tc::TcMessage",
    );
    names("mirror-agent/src/sources/file.rs", "use kube::Api;", "kube::Api");
}

#[test]
fn an_edge_neither_decides_nor_reads_flags() {
    for (file, path) in [
        ("kernel/links/offloads", "crate::mirror_iface::Change"),
        ("kernel/links/netlink", "mirror_core::select::Node"),
        ("sources/parse", "crate::select::Place"),
        ("kernel/dataplane/hooks", "crate::cli::args::AttachFlag"),
    ] {
        names(&format!("mirror-agent/src/{file}.rs"), &format!("use {path};"), path);
    }
    is_clean("mirror-agent/src/kernel/links/cache.rs", "use crate::model::Peer;");
}

#[test]
fn who_tells_cannot_change() {
    for file in ["report/admin", "report/metrics", "report/health", "report"] {
        let file = format!("mirror-agent/src/{file}.rs");
        names(&file, "use crate::kernel::dataplane::{maps::Maps};", "crate::kernel::dataplane::maps::Maps");
        names(&file, "use crate::kernel::links::netlink::Netlink;", "crate::kernel::links::netlink::Netlink");
        is_clean(&file, "use crate::{kernel::dataplane::readout::Reader, report::Report};");
    }
    names("mirror-agent/src/apiserver/agents.rs", "use crate::report::Reports;", "crate::report::Reports");
    is_clean("mirror-agent/src/apiserver/agents.rs", "use crate::capture::readers::PATH;");
    names("mirror-agent/src/reconcile.rs", "use prometheus::Histogram;", "prometheus::Histogram");
    names("mirror-agent/src/report/metrics.rs", "use hyper_util::rt::TokioIo;", "hyper_util::rt::TokioIo");
}

#[test]
fn a_room_names_rooms_above_it_and_every_file_has_one() {
    for (at, (room, may_name)) in ROOMS.iter().enumerate() {
        for other in *may_name {
            assert!(ROOMS[..at].iter().any(|(name, _)| name == other), "{room} names {other}");
        }
    }
    names(
        "mirror-agent/src/report/health.rs",
        "use crate::reconcile::Reconciler;",
        "crate::reconcile::Reconciler",
    );
    names("mirror-agent/src/capture/readers/reports.rs", "use crate::{cli, util::pace::rest};", "crate::cli");
    names(
        "mirror-agent/src/util.rs",
        "fn f() { crate::report::health::alive(); }",
        "crate::report::health::alive",
    );
    is_clean("mirror-agent/src/reconcile.rs", "use crate::{kernel::cpu, reconcile::log, report::TICK};");
    is_clean("mirror-agent/src/main.rs", "use mirror_agent::cli;");
    let stray = violations_in("mirror-agent/src/helpers.rs", "fn f() {}").unwrap();
    assert_eq!(stray, ["mirror-agent/src/helpers.rs is in no room of the agent"]);
}

#[test]
fn the_core_is_made_of_what_is_pure_and_its_tests_of_anything() {
    let metadata = serde_json::json!({ "packages": [
        { "name": "mirror-agent", "dependencies": [{ "name": "tokio", "kind": null }] },
        { "name": "mirror-core", "dependencies": [
            { "name": "thiserror", "kind": null },
            { "name": "aya", "kind": null },
            { "name": "proptest", "kind": "dev" },
        ] },
    ] });
    let core = MADE_OF.iter().find(|(name, _)| *name == "mirror-core").unwrap();
    let found = beyond(&metadata, core);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("`aya`"), "{found:?}");
    let nobody = beyond(&serde_json::json!({ "packages": [] }), core);
    assert_eq!(nobody, ["a rule is for mirror-core, which is no member"]);
}

/// A module that moves leaves no rule behind that checks nothing.
#[test]
fn a_rule_is_for_sources_that_exist() {
    let mut sources = sources(&workspace::root()).unwrap();
    assert_eq!(missing(&sources), Vec::<String>::new());
    sources.retain(|file| !file.starts_with("mirror-agent/src/report/health"));
    assert_eq!(missing(&sources), ["a rule is for mirror-agent/src/report/health.rs, where no source is"]);
}

#[test]
fn comments_tests_and_names_that_only_begin_alike_are_free() {
    is_clean("mirror-core/src/plan.rs", "//! aya::Ebpf, /proc\n/// std::time\nfn f() {}");
    is_clean("mirror-agent/src/sources/kube/fake.rs", "use hyper::body::Bytes;");
    is_clean("mirror-core/src/plan/tests.rs", "use std::time::Instant;");
    is_clean("mirror-core/src/plan.rs", "#[cfg(test)] mod tests { use std::time::Instant; }");
    is_clean("mirror-core/src/plan.rs", "use std::{time::Duration, timeless::X}; fn f() { let kube = 1; }");
}
