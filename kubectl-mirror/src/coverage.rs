//! `kubectl mirror coverage`: compares the packets seen by the taps with those carried by the NICs, for all nodes.
//!
//! [`Report`] is pure: answers in, text out. The agents evaluate the coverage, not this module.

use std::collections::BTreeMap;

use mirror_core::status::{DirectionCoverage, NicCoverage, NodeStatus, columns, printable};
use serde::Serialize;

use crate::{
    cli::CoverageArgs,
    cluster::Cluster,
    nodes::{self, Answer, Unanswered},
    screen::{Screen, age, named, object},
};

/// The state that needs no reason.
const COVERED: &str = "Covered";
/// Maximum number of rows of the table, and of NICs listed with a reason. JSON has all of them.
const MOST_ROWS: usize = 1000;
const MOST_NAMED: usize = 3;

/// Asks the nodes once, and prints their answers.
pub(crate) async fn coverage(args: CoverageArgs, cluster: &Cluster) -> anyhow::Result<()> {
    let scope = cluster.scope(args.all_namespaces);
    let answers = nodes::ask(cluster, scope).await?;
    let asked = answers.len();
    let report = Report::of(answers, scope);
    let output = args.output.as_ref();
    let text = output.map_or_else(|| Ok(report.table()), |output| object(&report, output))?;
    Screen::new(false, output, scope).show(&text)?;
    nodes::tell_unanswered(&report.unanswered, asked)
}

/// The answers of the nodes.
#[derive(Debug, Default, PartialEq, Serialize)]
struct Report {
    /// The tapped NICs, in the order of namespaces, pods, NICs and nodes.
    nics: Vec<Nic>,
    /// The nodes that have not answered: their NICs are missing here.
    unanswered: Vec<Unanswered>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Nic {
    namespace: String,
    pod: String,
    nic: String,
    node: String,
    device: String,
    /// Why ingress is seen inside the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    why_inside: Option<String>,
    /// Packets that reach the pod.
    ingress: DirectionCoverage,
    /// Packets that leave the pod.
    egress: DirectionCoverage,
}

impl Nic {
    fn of(node: &str, coverage: NicCoverage) -> Self {
        let NicCoverage { pod, nic, device, why_inside, ingress, egress } = coverage;
        let (namespace, pod) = pod.split_once('/').unwrap_or(("", &pod));
        let [namespace, pod, node] = [namespace, pod, node].map(str::to_owned);
        Self { namespace, pod, nic, node, device, why_inside, ingress, egress }
    }

    fn directions(&self) -> [(&'static str, &DirectionCoverage); 2] {
        [("ingress", &self.ingress), ("egress", &self.egress)]
    }
}

impl Report {
    fn of(answers: Vec<Answer>, scope: Option<&str>) -> Self {
        let mut report = Self::default();
        for Answer { node, status, .. } in answers {
            match status.and_then(compared) {
                Ok(compared) => {
                    let nics = compared.into_iter().map(|coverage| Nic::of(&node, coverage));
                    report.nics.extend(nics.filter(|nic| nodes::is_within(scope, &nic.namespace)));
                }
                Err(why) => report.unanswered.push(Unanswered { node, why }),
            }
        }
        let key = |nic: &Nic| [&nic.namespace, &nic.pod, &nic.nic, &nic.node].map(Clone::clone);
        report.nics.sort_by_cached_key(key);
        report
    }

    /// Formats the table for people, with the reasons for missing coverage. Empty without NICs.
    fn table(&self) -> String {
        if self.nics.is_empty() {
            return String::new();
        }
        let head =
            ["NAMESPACE", "POD", "NIC", "NODE", "INGRESS", "FOR", "SEEN/NIC", "EGRESS", "FOR", "SEEN/NIC"];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        for nic in self.nics.iter().take(MOST_ROWS) {
            let mut row = [&nic.namespace, &nic.pod, &nic.nic, &nic.node].map(Clone::clone).to_vec();
            for (_, DirectionCoverage { state, message: _, seconds, seen, carried }) in nic.directions() {
                row.extend([state.clone(), age(*seconds), format!("{seen}/{carried}")]);
            }
            rows.push(row);
        }
        let mut text = columns(&rows);
        if self.nics.len() > MOST_ROWS {
            text +=
                &format!("{MOST_ROWS} of {} NICs are shown; `-o json` has all of them\n", self.nics.len());
        }
        text + &self.reasons()
    }

    /// The reasons, each with some of the affected NICs.
    fn reasons(&self) -> String {
        let mut reasons = BTreeMap::<_, Vec<_>>::new();
        for nic in &self.nics {
            for (direction, of) in nic.directions().into_iter().filter(|(_, of)| of.state != COVERED) {
                let Nic { namespace, pod, nic, .. } = nic;
                let about = format!("{namespace}/{pod} {nic} {direction}");
                reasons.entry((&of.state, &of.message)).or_default().push(about);
            }
        }
        let mut text = String::new();
        for ((state, message), about) in reasons {
            let named = printable(&named(about, MOST_NAMED));
            text += &format!("\n{}\n  {named}\n", printable(&format!("{state}: {message}")));
        }
        text
    }
}

/// The comparison by the agent of a node.
///
/// # Errors
///
/// The agent does not run or does not answer: only a running agent compares.
fn compared(status: NodeStatus) -> Result<Vec<NicCoverage>, String> {
    let is_running = status.agent_running;
    status.notes.map(|notes| notes.coverage).ok_or_else(|| match is_running {
        true => "its agent is running, but did not report the coverage; try again".to_owned(),
        false => "its agent is not running, so coverage is unknown".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use mirror_core::status::Notes;
    use proptest::prelude::*;
    use serde_json::json;
    use tokio::time::Instant;

    use super::*;

    fn direction(state: &str, message: &str, seen: u64, carried: u64) -> DirectionCoverage {
        DirectionCoverage { state: state.into(), message: message.into(), seconds: 120, seen, carried }
    }

    fn covered() -> DirectionCoverage {
        direction("Covered", "podmirror's program sees what the NIC carries", 512, 512)
    }

    fn nic(pod: &str, ingress: DirectionCoverage, egress: DirectionCoverage) -> NicCoverage {
        NicCoverage {
            pod: pod.into(),
            nic: "eth0".into(),
            device: "veth1".into(),
            why_inside: None,
            ingress,
            egress,
        }
    }

    fn answer(node: &str, coverage: Option<Vec<NicCoverage>>) -> Answer {
        let status = NodeStatus {
            version: "1".into(),
            agent_running: coverage.is_some(),
            targets: Vec::new(),
            taps: Vec::new(),
            notes: coverage.map(|coverage| Notes { coverage, ..Notes::default() }),
        };
        Answer { node: node.into(), at: Instant::now(), status: Ok(status) }
    }

    #[test]
    fn all_nodes_are_one_table_with_each_reason_once() {
        let idle = || direction("Unknown", "too few packets", 0, 2);
        let mut nics: Vec<_> =
            (1..=4).map(|pod| nic(&format!("shop/idle-{pod}"), covered(), idle())).collect();
        nics.push(nic("tools/other", idle(), idle()));
        let around = nic("shop/web", direction("Bypassed", "around the node's end", 12, 40_312), covered());
        let answers = vec![answer("b", Some(nics)), answer("a", Some(vec![around])), answer("c", None)];
        let report = Report::of(answers.clone(), Some("shop"));
        assert_eq!(
            report.table(),
            "NAMESPACE  POD     NIC   NODE  INGRESS   FOR  SEEN/NIC  EGRESS   FOR  SEEN/NIC\n\
             shop       idle-1  eth0  b     Covered   2m   512/512   Unknown  2m   0/2\n\
             shop       idle-2  eth0  b     Covered   2m   512/512   Unknown  2m   0/2\n\
             shop       idle-3  eth0  b     Covered   2m   512/512   Unknown  2m   0/2\n\
             shop       idle-4  eth0  b     Covered   2m   512/512   Unknown  2m   0/2\n\
             shop       web     eth0  a     Bypassed  2m   12/40312  Covered  2m   512/512\n\
             \n\
             Bypassed: around the node's end\n  \
               shop/web eth0 ingress\n\
             \n\
             Unknown: too few packets\n  \
               shop/idle-1 eth0 egress, shop/idle-2 eth0 egress, shop/idle-3 eth0 egress and 1 more\n"
        );
        let silent =
            Unanswered { node: "c".into(), why: "its agent is not running, so coverage is unknown".into() };
        assert_eq!(report.unanswered, [silent]);
        assert_eq!(Report::of(answers, None).nics.len(), 6);
    }

    #[test]
    fn json_has_each_nic_and_each_node_without_an_answer() {
        let mut silent = answer("b", None);
        silent.status = Err("no agent".into());
        let report =
            Report::of(vec![answer("a", Some(vec![nic("shop/web", covered(), covered())])), silent], None);
        let covered = json!({
            "state": "Covered", "message": "podmirror's program sees what the NIC carries", "seconds": 120, "seen": 512,
            "carried": 512,
        });
        let nic = json!({
            "namespace": "shop", "pod": "web", "nic": "eth0", "node": "a", "device": "veth1", "ingress": covered,
            "egress": covered,
        });
        assert_eq!(
            serde_json::to_value(&report).unwrap(),
            json!({ "nics": [nic], "unanswered": [{ "node": "b", "why": "no agent" }] })
        );
        assert_eq!(Report::of(vec![], None).table(), "");
    }

    proptest! {
        #[test]
        fn a_table_is_bounded_and_has_no_control_characters(
            count in prop_oneof![1..9_usize, MOST_ROWS - 2..MOST_ROWS + 3], name in any::<String>(), message in any::<String>(),
        ) {
            let states = direction("Hidden", &message, 1, 2);
            let nics = vec![nic(&format!("shop/{name}"), states.clone(), states); count];
            let text = Report::of(vec![answer("a", Some(nics))], None).table();
            // The header, the rows, the line about further rows, and three lines for one reason.
            let more = usize::from(count > MOST_ROWS);
            prop_assert_eq!(text.lines().count(), 1 + count.min(MOST_ROWS) + more + 3, "{}", text);
            prop_assert!(text.chars().all(|char| char == '\n' || !char.is_control()));
        }
    }
}
