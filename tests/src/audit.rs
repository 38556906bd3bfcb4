//! Reads the audit log of the API server that `mirror-test-cluster` has started.

use std::fs;

use mirror_test_cluster::built::AUDIT_LOG;
use serde_json::Value;

use crate::{SOON, eventually};

/// Returns the events (`audit.k8s.io/v1`) that `is_one` selects, oldest first. The log has the requests of all stories
/// for resources of `packets.podmirror.io`.
pub fn audited(is_one: impl Fn(&Value) -> bool) -> Vec<Value> {
    let log = fs::read_to_string(AUDIT_LOG).unwrap_or_else(|error| panic!("{AUDIT_LOG}: {error}"));
    // The API server may be writing the last line.
    let lines = log.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    lines.map(|line| serde_json::from_str(line).unwrap()).filter(is_one).collect()
}

/// Waits until `is_one` selects an event, and returns the newest one. A client can have its answer before the log has
/// the event.
#[track_caller]
pub fn wait_audited(is_one: impl Fn(&Value) -> bool) -> Value {
    eventually(SOON, || audited(&is_one).pop().ok_or_else(|| "no such event in the audit log".into()))
}
