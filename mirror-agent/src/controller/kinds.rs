//! The kinds that the controller aggregates: their specs, the nodes' reports on them, and their statuses.
//!
//! Pure. [`book`](super::book) aggregates by [`Summed`].

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::discovery::ApiResource;
use mirror_api::{
    ClusterMirror, Mirror, MirrorNodeStatus, MirrorStatus, MirrorSummary, MirrorTarget, MirrorTargetStatus,
    Refusal, TargetSummary,
    sum::{self, Asked},
};
use mirror_core::{destination::Destination, tunnel::Kind as TunnelKind};

use super::{
    book::{Key, Summed},
    tell::{self, Said},
};
use crate::{
    model::{Resource, TargetResource},
    select,
};

/// Mirrors and ClusterMirrors.
impl Summed for Resource {
    type Report = MirrorSummary;
    type Status = MirrorStatus;

    fn kind(key: &Key) -> ApiResource {
        match key.namespace {
            Some(_) => ApiResource::erase::<Mirror>(&()),
            None => ApiResource::erase::<ClusterMirror>(&()),
        }
    }

    fn asked(read: Result<Self, String>) -> Asked {
        let refused = match read {
            Ok(resource) => select::refusal(&resource).map(|(reason, why)| Refusal::new(reason, &why)),
            Err(problem) => Some(invalid(&problem)),
        };
        Asked { refused, ..Asked::default() }
    }

    fn take(node: &mut MirrorNodeStatus) -> (Vec<MirrorSummary>, bool) {
        (std::mem::take(&mut node.mirrors), node.more_mirrors.is_some())
    }

    fn key(report: &MirrorSummary) -> Key {
        Key { namespace: report.namespace.clone(), name: report.name.clone() }
    }

    fn uid(report: &MirrorSummary) -> &str {
        &report.uid
    }

    fn is_news(before: &MirrorSummary, now: &MirrorSummary) -> bool {
        let expiration_time = before.expiration_time.clone();
        MirrorSummary { packets: before.packets, expiration_time, ..now.clone() } != *before
    }

    fn sum(
        asked: &Asked,
        reports: Vec<(&str, &MirrorSummary)>,
        before: Option<&MirrorStatus>,
        now: &Time,
    ) -> MirrorStatus {
        sum::sum(asked, reports, before, now)
    }

    fn reported(status: &MirrorStatus) -> Option<&Time> {
        status.last_report_time.as_ref()
    }

    fn said<'s>(before: Option<&MirrorStatus>, status: &'s MirrorStatus) -> Vec<Said<'s>> {
        tell::said(before, status)
    }
}

/// MirrorTargets.
impl Summed for TargetResource {
    type Report = TargetSummary;
    type Status = MirrorTargetStatus;

    fn kind(_: &Key) -> ApiResource {
        ApiResource::erase::<MirrorTarget>(&())
    }

    fn asked(read: Result<Self, String>) -> Asked {
        let destination = read.and_then(|target| target.destination);
        Asked {
            destination: destination.as_ref().ok().map(in_short),
            refused: destination.err().as_deref().map(invalid),
            ..Asked::default()
        }
    }

    fn take(node: &mut MirrorNodeStatus) -> (Vec<TargetSummary>, bool) {
        (std::mem::take(&mut node.targets), node.more_targets.is_some())
    }

    fn key(report: &TargetSummary) -> Key {
        Key { namespace: None, name: report.name.clone() }
    }

    fn uid(report: &TargetSummary) -> &str {
        &report.uid
    }

    fn is_news(before: &TargetSummary, now: &TargetSummary) -> bool {
        now != before
    }

    fn sum(
        asked: &Asked,
        reports: Vec<(&str, &TargetSummary)>,
        before: Option<&MirrorTargetStatus>,
        now: &Time,
    ) -> MirrorTargetStatus {
        sum::target::sum(asked, reports, before, now)
    }

    fn reported(status: &MirrorTargetStatus) -> Option<&Time> {
        status.last_report_time.as_ref()
    }
}

/// The kind of a destination, and the rest of its text.
fn in_short(destination: &Destination) -> (String, String) {
    let kind = match destination {
        Destination::Device(_) | Destination::Stream => "Device",
        Destination::Pod(_) => "Pod",
        Destination::Tunnel(tunnel) => match tunnel.kind {
            TunnelKind::Vxlan => "VXLAN",
            TunnelKind::Geneve => "GENEVE",
            TunnelKind::Gre => "GRE",
            TunnelKind::Erspan => "ERSPAN",
        },
    };
    let text = destination.to_string();
    let rest = text.split_once(':').map(|(_, rest)| rest.to_owned());
    (kind.to_owned(), rest.unwrap_or(text))
}

fn invalid(message: &str) -> Refusal {
    Refusal::new("InvalidSpec", message)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests panic")]

    use k8s_openapi::jiff::Timestamp;
    use serde_json::json;

    use super::*;
    use crate::sources::kube::ResourceObject;

    /// What the controller keeps of an object: its name, what its status depends on, and its status.
    fn kept(object: &serde_json::Value) -> (Key, Asked, Option<MirrorStatus>) {
        let read: ResourceObject<Mirror, _> = serde_json::from_str(&object.to_string()).unwrap();
        let kept = (Key::of(&read.metadata), Resource::asked(read.read), read.status);
        assert!(format!("{kept:?}").len() < 4000, "{kept:?}");
        kept
    }

    /// An object from before the bounds of the CRDs is refused, as by the agents, and none of its text is kept.
    #[test]
    fn an_object_that_is_too_large_is_refused_and_not_kept() {
        let much = vec!["x".repeat(100); 13_000];
        let status = sum::sum(&Asked::default(), [], None, &Time(Timestamp::UNIX_EPOCH));
        let object = json!({
            "metadata": {"name": "old", "namespace": "shop", "uid": "1", "generation": 3, "annotations": {"a": "b"}},
            "spec": {"nics": much, "limits": {"duration": "y".repeat(1_000_000)}},
            "status": status,
        });
        let (key, asked, kept) = kept(&object);
        assert_eq!(key, Key { namespace: Some("shop".into()), name: "old".into() });
        let refused = asked.refused.unwrap();
        assert!(refused.message.contains("more than 128 KiB"), "{refused:?}");
        assert_eq!(kept, Some(status));
    }

    /// Texts within the bound of a spec, and statuses that no controller has written, can be long too.
    #[test]
    fn texts_are_cut_and_what_no_controller_has_written_is_no_status() {
        for (spec, status) in [
            (json!({"podSelector": {}, "limits": {"duration": "9".repeat(60_000)}}), json!("none")),
            (json!({"podSelector": {}, "filter": "z".repeat(60_000)}), json!({"conditions": 7})),
            (json!("none"), json!(vec!["x".repeat(100); 13_000])),
        ] {
            let object =
                json!({"metadata": {"name": "old", "namespace": "shop"}, "spec": spec, "status": status});
            let (_, asked, status) = kept(&object);
            assert!(asked.refused.is_some() && status.is_none(), "{asked:?} {status:?}");
        }
    }
}
