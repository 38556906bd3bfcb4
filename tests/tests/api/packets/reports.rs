//! Reports about pods: what kubectl shows of them, and what the nodes themselves show.

use mirror_tests::{SOON, check, eventually, pod_object, while_talking};
use serde_json::Value;

use super::Packets;
use crate::Node;

#[test]
fn kubectl_shows_of_the_pods_of_two_nodes_what_their_agents_show() {
    let node = Node::new("packets-reports");
    let other = Node::new("packets-reports-b");
    let ([web, client], [db]) = (node.pods(["web", "client"]), other.pods(["db"]));
    let Node { api, lab } = &node;
    let packets = Packets::start(api, 1, &[]);
    let _web = api.run(lab, &web, &[("podmirror.io/mirror", "true")]);
    api.apply(&other.api.object("db", &[]));
    let _db = api.start(&other.lab, &db);
    api.apply(&pod_object("new", "exec sleep 3600"));
    let labs = [lab, &other.lab];
    labs.iter().for_each(|lab| packets.connect(lab));
    let [agent, of_other] = labs.map(|lab| packets.agent(lab, &[]));
    packets.wait_connected(&labs);
    lab.wait_mirrored(&[&web]);
    client.ping(web.v4(), 5, 56);

    let [first, second] = labs.map(|lab| lab.node().name());
    eventually(SOON, || {
        let table = api.try_kubectl("get podreports")?;
        // Beside the pods of the story, each agent has one, for its token.
        let rows = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let rows: Vec<_> = rows.filter(|row| !row[0].starts_with("agent-")).collect();
        let copied = lab.try_status()?.tap(web.veth_host()).total("copied").to_string();
        let coverage = lab.coverage()?;
        let coverage = coverage.first().ok_or("no coverage yet")?;
        let [ingress, egress] = ["ingress", "egress"].map(|of| coverage[of]["state"].as_str().unwrap());
        let expected = [
            ["NAME", "NIC", "NODE", "MIRRORS", "INGRESS", "EGRESS", "COPIED", "LOST"],
            ["db", "<none>", second, "<none>", "<unknown>", "<unknown>", "0", "0"],
            ["web", "eth0", first, "default", ingress, egress, &copied, "0"],
        ];
        check(rows == expected, || format!("not {expected:?}: {table}"))
    });
    eventually(SOON, || {
        let told = api.try_kubectl("get podreports web -o jsonpath={.explanation}")?;
        let shown = lab.agent_exit(&["explain", "--pod", &format!("{}/web", api.namespace())]);
        // Both have times in seconds.
        check(told == shown.stdout && told.contains("is mirrored"), || format!("{told}\n{shown:?}"))
    });
    let wide = api.kubectl("get podreports db -o wide");
    let lines: Vec<_> = wide.lines().collect();
    let [head, row] = lines[..] else { panic!("{wide}") };
    let head: Vec<_> = head.split_whitespace().collect();
    assert!(head.ends_with(&["LOST", "DEVICE", "FOR", "MESSAGE"]) && row.contains(" NoRequest: "), "{wide}");
    let name = "podreport.packets.podmirror.io/web\n";
    assert_eq!(api.kubectl("get podreports --selector=app=web -o name"), name);
    let everywhere = api.kubectl("get podreports --all-namespaces --field-selector=metadata.name=web");
    let mut rows = everywhere.lines().map(|line| line.split_whitespace().take(3).collect::<Vec<_>>());
    assert_eq!(rows.next().unwrap(), ["NAMESPACE", "NAME", "NIC"]);
    assert!(rows.any(|row| row == [api.namespace(), "web", "eth0"]), "{everywhere}");
    for (name, why) in [("nosuch", "no such pod"), ("new", "it is not assigned to a node yet")] {
        let refused = api.try_kubectl(&format!("get podreports {name}")).unwrap_err();
        assert!(refused.contains("(NotFound)") && refused.contains(why), "{refused}");
    }

    // Each ping and each answer is copied.
    let uri = packets.uri("podreports/web?interval=1s");
    let rates = while_talking(&client, &web, || {
        eventually(SOON, || {
            let report: Value = serde_json::from_str(&api.try_kubectl(&format!("get --raw {uri}"))?).unwrap();
            let rates = &report["nics"][0]["rates"];
            let rate = |kind: &str| rates[kind]["packets"].as_f64();
            let rates = ["ingress", "egress", "copied", "lost"].map(rate);
            check(rates[0] > Some(10.0), || format!("{report:#}"))?;
            Ok(rates.map(Option::unwrap))
        })
    });
    let [ingress, egress, copied, lost] = rates;
    assert!((ingress - egress).abs() < 10.0 && (ingress + egress - copied).abs() < 0.1, "{rates:?}");
    assert_eq!(lost, 0.0);

    of_other.stop();
    eventually(SOON, || {
        let output = api.command("get podreports").output().unwrap();
        let [shown, told] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        let warning = format!("Warning: node {second}: no agent of the node is connected\n");
        check(told == warning && shown.contains("eth0") && !shown.contains(second), || {
            format!("{shown}\n{told}")
        })
    });
    agent.stop();
}
