//! The API of packets, `packets.podmirror.io/v1alpha1`, and the messages between its server and the agents.
//!
//! The messages are JSON, without a form for other versions: server and agents compare their versions when they connect.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::core::ObjectList;
pub use mirror_core::status::PodReport;
use serde::{Deserialize, Serialize};

use crate::{Direction, SettingsSpec};

/// The API group, which is also the audience of the agents' tokens.
pub const GROUP: &str = "packets.podmirror.io";
/// The version of the API.
pub const VERSION: &str = "v1alpha1";

/// A request for the packets of a node. The server sends it to the agent of that node.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct ReadRequest {
    /// Whose packets.
    pub of: ReadOf,
    /// Direction of the packets. `None`: both.
    pub direction: Option<Direction>,
    /// Selection of packets, and limits.
    pub settings: SettingsSpec,
    /// Whether super-frames are kept as the kernel has them.
    pub super_frames: bool,
    /// Age in seconds of the oldest packets, which the node's recorder has. `None`: no packets of the past.
    pub since_seconds: Option<u64>,
    /// Whether packets of the present follow.
    pub follow: bool,
    /// The user, for the log.
    pub reader: String,
}

/// The pods or the interface whose packets are read.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub enum ReadOf {
    /// Pods of the node.
    Pods {
        /// Their namespace. `None`: all.
        namespace: Option<String>,
        /// The name of the only pod. `None`: all pods.
        name: Option<String>,
        /// Their labels. Empty: any.
        labels: LabelSelector,
        /// Their NICs, by their names inside the pod. `None`: all.
        nics: Option<Vec<String>>,
    },
    /// An interface of the node, by name.
    Interface(String),
}

/// A request for the reports about pods of a node. The agent answers with [`PodReport`]s.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct ReportRequest {
    /// Namespace of the pods. `None`: all.
    pub namespace: Option<String>,
    /// Name of the only pod. `None`: all pods.
    pub name: Option<String>,
    /// Time in milliseconds over which rates are measured. `None`: no rates.
    pub interval_millis: Option<u64>,
}

/// The answer of the API to a request for the reports about several pods.
pub type PodReportList = ObjectList<PodReport>;

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use serde_json::{from_value, json, to_value};

    use super::*;

    #[test]
    fn a_request_is_read_as_it_was_written_and_with_no_other_field() {
        let pods = ReadOf::Pods {
            namespace: Some("shop".to_owned()),
            name: None,
            labels: LabelSelector {
                match_labels: Some([("app".to_owned(), "web".to_owned())].into()),
                ..LabelSelector::default()
            },
            nics: Some(vec!["eth0".to_owned()]),
        };
        for of in [pods, ReadOf::Interface("eth0".to_owned())] {
            let request = ReadRequest {
                of,
                direction: Some(Direction::Ingress),
                settings: SettingsSpec { filter: Some("tcp".to_owned()), ..SettingsSpec::default() },
                super_frames: true,
                since_seconds: Some(300),
                follow: true,
                reader: "alice".to_owned(),
            };
            let mut written = to_value(&request).unwrap();
            assert_eq!(from_value::<ReadRequest>(written.clone()).unwrap(), request);
            // An agent that ignored the field would send more than the user wants.
            written["sampleOneIn"] = json!(10);
            let error = from_value::<ReadRequest>(written).unwrap_err();
            assert!(error.to_string().contains("sampleOneIn"), "{error}");
        }
    }
}
