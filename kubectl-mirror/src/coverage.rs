//! `kubectl mirror coverage`: compares the packets seen by the taps with those carried by the NICs, for all nodes.
//!
//! [`table`] is pure: reports in, text out. The agents evaluate the coverage, not this module.

use std::collections::BTreeMap;

use mirror_api::packets::PodReport;
use mirror_core::status::{DirectionCoverage, NicReport, columns, printable};

use crate::{
    cluster::Cluster,
    reports::{Reports, UNKNOWN, nics, place},
    screen::{Output, Screen, age, named, object},
};

/// The state that needs no reason.
const COVERED: &str = "Covered";
/// Maximum number of rows of the table, and of NICs listed with a reason. JSON has all of them.
const MOST_ROWS: usize = 1000;
const MOST_NAMED: usize = 3;

/// Prints the coverage of each tapped NIC.
pub(crate) async fn coverage(
    all_namespaces: bool,
    output: Option<Output>,
    cluster: &Cluster,
) -> anyhow::Result<()> {
    let scope = cluster.scope(all_namespaces);
    let reports = Reports::get(cluster, scope, "podreports", &[]).await?;
    let text = match &output {
        None => table(&reports.pods()?),
        Some(output) => object(&reports.object, output)?,
    };
    Screen::new(false, output.as_ref(), scope).show(&text)?;
    reports.warn();
    Ok(())
}

fn directions(nic: &NicReport) -> [(&'static str, Option<&DirectionCoverage>); 2] {
    [("ingress", nic.ingress.as_ref()), ("egress", nic.egress.as_ref())]
}

/// Formats the table for people, with the reasons for missing coverage. Empty without NICs.
fn table(pods: &[PodReport]) -> String {
    let nics = nics(pods);
    if nics.is_empty() {
        return String::new();
    }
    let head = ["NAMESPACE", "POD", "NIC", "NODE", "INGRESS", "FOR", "SEEN/NIC", "EGRESS", "FOR", "SEEN/NIC"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for &(pod, nic) in nics.iter().take(MOST_ROWS) {
        let mut row = place((pod, nic));
        for (_, of) in directions(nic) {
            row.extend(match of {
                Some(of) => [of.state.clone(), age(of.seconds), format!("{}/{}", of.seen, of.carried)],
                None => [UNKNOWN; 3].map(str::to_owned),
            });
        }
        rows.push(row);
    }
    let mut text = columns(&rows);
    if nics.len() > MOST_ROWS {
        text += &format!("{MOST_ROWS} of {} NICs are shown; `-o json` has all of them\n", nics.len());
    }
    text + &reasons(&nics)
}

/// The reasons, each with some of the affected NICs.
fn reasons(nics: &[(&PodReport, &NicReport)]) -> String {
    let mut reasons = BTreeMap::<_, Vec<_>>::new();
    for (PodReport { metadata, .. }, nic) in nics {
        for (direction, of) in directions(nic) {
            if let Some(of) = of.filter(|of| of.state != COVERED) {
                let about = format!("{}/{} {} {direction}", metadata.namespace, metadata.name, nic.name);
                reasons.entry((&of.state, &of.message)).or_default().push(about);
            }
        }
    }
    let mut text = String::new();
    for ((state, message), about) in reasons {
        let named = printable(&named(about, MOST_NAMED));
        text += &format!("\n{}\n  {named}\n", printable(&format!("{state}: {message}")));
    }
    text
}

#[cfg(test)]
mod tests {
    use mirror_core::status::PodMetadata;
    use proptest::prelude::*;

    use super::*;

    fn direction(state: &str, message: &str, seen: u64, carried: u64) -> Option<DirectionCoverage> {
        let [state, message] = [state, message].map(str::to_owned);
        Some(DirectionCoverage { state, message, seconds: 120, seen, carried })
    }

    fn covered() -> Option<DirectionCoverage> {
        direction("Covered", "podmirror's program sees what the NIC carries", 512, 512)
    }

    fn nic(ingress: Option<DirectionCoverage>, egress: Option<DirectionCoverage>) -> NicReport {
        NicReport { name: "eth0".to_owned(), ingress, egress, ..NicReport::default() }
    }

    fn pod(name: &str, node: &str, nics: Vec<NicReport>) -> PodReport {
        let metadata = PodMetadata { namespace: "shop".to_owned(), name: name.to_owned() };
        PodReport { metadata, node: node.to_owned(), nics, ..PodReport::default() }
    }

    #[test]
    fn all_nodes_are_one_table_with_each_reason_once() {
        let idle = || direction("Unknown", "too few packets", 0, 2);
        let mut pods: Vec<_> =
            (1..=4).map(|number| pod(&format!("idle-{number}"), "b", vec![nic(covered(), idle())])).collect();
        let around = direction("Bypassed", "around the node's end", 12, 40_312);
        pods.push(pod("new", "a", vec![nic(None, None)]));
        pods.push(pod("other", "a", Vec::new()));
        pods.push(pod("web", "a", vec![nic(around, covered())]));
        assert_eq!(
            table(&pods),
            "NAMESPACE  POD     NIC   NODE  INGRESS    FOR        SEEN/NIC   EGRESS     FOR        SEEN/NIC\n\
             shop       idle-1  eth0  b     Covered    2m         512/512    Unknown    2m         0/2\n\
             shop       idle-2  eth0  b     Covered    2m         512/512    Unknown    2m         0/2\n\
             shop       idle-3  eth0  b     Covered    2m         512/512    Unknown    2m         0/2\n\
             shop       idle-4  eth0  b     Covered    2m         512/512    Unknown    2m         0/2\n\
             shop       new     eth0  a     <unknown>  <unknown>  <unknown>  <unknown>  <unknown>  <unknown>\n\
             shop       web     eth0  a     Bypassed   2m         12/40312   Covered    2m         512/512\n\
             \n\
             Bypassed: around the node's end\n  \
               shop/web eth0 ingress\n\
             \n\
             Unknown: too few packets\n  \
               shop/idle-1 eth0 egress, shop/idle-2 eth0 egress, shop/idle-3 eth0 egress and 1 more\n"
        );
        assert_eq!(table(&[pod("other", "a", Vec::new())]), "");
    }

    proptest! {
        #[test]
        fn a_table_is_bounded_and_has_no_control_characters(
            count in prop_oneof![1..9_usize, MOST_ROWS - 2..MOST_ROWS + 3], name in any::<String>(), message in any::<String>(),
        ) {
            let states = direction("Hidden", &message, 1, 2);
            let text = table(&[pod(&name, "a", vec![nic(states.clone(), states); count])]);
            // The header, the rows, the line about further rows, and three lines for one reason.
            let more = usize::from(count > MOST_ROWS);
            prop_assert_eq!(text.lines().count(), 1 + count.min(MOST_ROWS) + more + 3, "{}", text);
            prop_assert!(text.chars().all(|char| char == '\n' || !char.is_control()));
        }
    }
}
