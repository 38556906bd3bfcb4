//! Tests of the paths that the check finds in sources, and of those that it ignores.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::*;

#[test]
fn a_forbidden_path_is_found_wherever_it_is_named() {
    for (file, text, path) in [
        ("mirror-core/src/plan", "use std::{fmt, time::{Duration, Instant}};", "std::time::Instant"),
        ("mirror-core/src/select", "fn f() { let t = std::env::var(\"X\"); }", "std::env::var"),
        ("mirror-core/src/select", "fn f() { assert!(std::fs::exists(p)); }", "std::fs::exists"),
        ("mirror-core/src/plan", "fn f() { m!(a && (std::thread::spawn(b))); }", "std::thread::spawn"),
        ("mirror-core/src/plan", "#[cfg(test)] mod t; use std::net::*;", "std::net::"),
        ("mirror-core/src/select", "async fn f() {}", "async"),
        ("mirror-core/src/select", "fn f() { g(async {}); }", "async"),
        ("mirror-agent/src/report/metrics", "use aya::{maps::HashMap as Map};", "aya::maps::HashMap"),
        ("mirror-agent/src/report/admin", "fn f(h: &rtnetlink::Handle) {}", "rtnetlink::Handle"),
        ("mirror-agent/src/reconcile", "fn f() { g(\"/proc/self\"); }", "\"/proc/self\""),
        ("mirror-agent/src/kernel/dataplane/bpf", "use netlink_sys::Socket;", "netlink_sys::Socket"),
        ("mirror-agent/src/kernel/dataplane/hooks", "use clap::Args;", "clap::Args"),
        ("mirror-agent/src/kernel/links/netlink", "use crate::select::Node;", "crate::select::Node"),
        ("mirror-agent/src/sources/file", "use kube::Api;", "kube::Api"),
        ("mirror-agent/src/report", "use crate::kernel::links::Netlink;", "crate::kernel::links::Netlink"),
        (
            "mirror-agent/src/report/health",
            "use crate::reconcile::Reconciler;",
            "crate::reconcile::Reconciler",
        ),
        ("mirror-agent/src/capture/readers/reports", "use crate::{cli, util::pace};", "crate::cli"),
        ("mirror-agent/src/apiserver/agents", "use crate::report::Reports;", "crate::report::Reports"),
    ] {
        let violations = violations_in(&format!("{file}.rs"), text).unwrap();
        assert!(violations.iter().any(|line| line.contains(&format!("`{path}`"))), "{path}: {violations:?}");
    }
}

#[test]
fn what_an_edge_owns_and_code_for_tests_are_free() {
    for (file, text) in [
        ("mirror-agent/src/kernel/links/procfs", "fn f() { open(\"/proc/self/ns/net\"); }"),
        ("mirror-agent/src/kernel/links/netlink", "use {crate::model::Peer, rtnetlink::Handle};"),
        ("mirror-agent/src/kernel/dataplane/hooks/filters", "use netlink_packet_route::tc::TcMessage;"),
        ("mirror-agent/src/kernel/dataplane/bpf", "use aya::Ebpf;"),
        ("mirror-agent/src/report/admin", "use crate::{kernel::dataplane::readout::Reader, report::Report};"),
        ("mirror-agent/src/apiserver/agents", "use crate::capture::readers::PATH;"),
        ("mirror-agent/src/reconcile", "use crate::{kernel::cpu, reconcile::log, report::TICK};"),
        ("mirror-agent/src/main", "use mirror_agent::cli;"),
        ("mirror-agent/src/sources/kube/tests/fake", "use hyper::body::Bytes;"),
        ("mirror-core/src/plan", "//! aya::Ebpf, /proc\n/// std::time\nfn f() {}"),
        ("mirror-core/src/plan/tests", "use std::time::Instant;"),
        ("mirror-core/src/plan", "#[cfg(test)] mod tests { use std::time::Instant; }"),
        ("mirror-core/src/plan", "use std::{time::Duration, timeless::X}; fn f() { let kube = 1; }"),
    ] {
        assert_eq!(violations_in(&format!("{file}.rs"), text).unwrap(), [""; 0], "{file}");
    }
}

#[test]
fn a_room_names_rooms_above_it_and_every_file_has_one() {
    for (at, (room, may_name)) in ROOMS.iter().enumerate() {
        for other in *may_name {
            assert!(ROOMS[..at].iter().any(|(name, _)| name == other), "{room} names {other}");
        }
    }
    let stray = violations_in("mirror-agent/src/helpers.rs", "fn f() {}").unwrap();
    assert_eq!(stray, ["mirror-agent/src/helpers.rs is in no room of the agent"]);
}

/// A module that moves leaves no rule behind that checks nothing.
#[test]
fn a_rule_is_for_sources_that_exist() {
    let mut sources = workspace::files(&["*.rs"]).unwrap();
    assert_eq!(missing(&sources), [""; 0]);
    sources.retain(|file| !file.starts_with("kubectl-mirror/src/jsonpath"));
    assert_eq!(missing(&sources), ["a rule is for kubectl-mirror/src/jsonpath.rs, where no source is"]);
}
