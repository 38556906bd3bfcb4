//! Captures next to other mirrors: they get the pods and interfaces that they name, and no mirror changes.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use proptest::{collection::vec, option, prelude::*, sample};

use super::*;
use crate::{
    model::{IfIndex, PodLinks, Request, Selector},
    select::{
        MIRROR, choose, select,
        tests::{mk_node, mk_pod},
    },
};

fn capture(number: u32, pods: &[&str], interfaces: &[&str]) -> Capture {
    Capture {
        ring: RingId(number),
        origin: Origin::Capture,
        wants: Wants::Named {
            pods: pods.iter().map(|name| ("default".to_owned(), (*name).to_owned())).collect(),
            interfaces: interfaces.iter().map(|name| (*name).to_owned()).collect(),
        },
        directions: Directions::Both,
        settings: Settings::default(),
    }
}

/// A reader of the API that selects all pods.
fn reader(number: u32) -> Capture {
    let of_all = Resource::of_reader(Some("default".into()), None, Selector::default(), Request::default());
    Capture { origin: Origin::Reader, wants: Wants::Reader(Box::new(of_all)), ..capture(number, &[], &[]) }
}

#[test]
fn a_program_that_ends_leaves_the_others() {
    let [of_web, of_eth1] = [capture(1, &["web"], &[]), capture(2, &[], &["eth1"])];
    let streams = ["live", "ids"].map(|name| TargetName(name.parse().unwrap()));
    let readers = Readers {
        captures: vec![of_web, of_eth1.clone()],
        streams: streams.iter().cloned().zip([3, 4].map(RingId)).collect(),
    };
    let others = readers.without(RingId(1)).without(RingId(4));
    assert_eq!(
        others,
        Readers { captures: vec![of_eth1], streams: [(streams[0].clone(), RingId(3))].into() }
    );
}

/// The selection for pods and captures on a node where each pod has one NIC: `veth100` and so on.
fn selected(pods: &[Pod], captures: &[Capture], policy: &Policy) -> Selection {
    let nics: Vec<_> = (100..).zip(pods).map(|(outside, pod)| (pod, 2, outside)).collect();
    let links = mk_node(&nics);
    let choice = choose(pods, &[], captures, policy, &mut Default::default());
    let mut selection = select(&choice.wanted, captures, &links, policy);
    selection.skipped.extend(choice.refused);
    selection
}

fn why(selection: &Selection) -> Vec<&'static str> {
    selection.skipped.iter().map(|skipped| skipped.why.name()).collect()
}

#[test]
fn a_capture_is_one_more_session_of_the_pods_tap() {
    let (web, db) = (mk_pod("web", &[(MIRROR, "true")]), mk_pod("db", &[]));
    // The pods by name, and the device of one of them by the device's name.
    let captures = [capture(1, &["web", "db"], &[]), capture(2, &[], &["veth100"])];
    let selection = selected(&[web, db], &captures, &Policy::default());
    assert_eq!(selection.skipped, []);
    let mirrors = |ifindex| {
        let tap = &selection.taps[&Device::on_node(IfIndex(ifindex))];
        assert_eq!(tap.head.kind, TapKind::HostVeth);
        tap.sessions.keys().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(mirrors(100), ["capture.1", "capture.2", "default"]);
    assert_eq!(mirrors(101), ["capture.1"]);
}

/// The directions behind a veth are the same whether or not the pod is known.
#[test]
fn a_veth_into_another_namespace_is_seen_from_its_other_end() {
    let web = mk_pod("web", &[]);
    let mut links = mk_node(&[(&web, 2, 100)]);
    links.host.insert(IfIndex(5), Link { peer: None, ..links.host[&IfIndex(100)].clone() });
    let physical = links.host.get_mut(&IfIndex(5)).unwrap();
    (physical.ifindex, physical.name, physical.kind) =
        (IfIndex(5), "eth0".into(), LinkKind::Other(String::new()));
    let selection = select(&[], &[capture(1, &[], &["veth100", "eth0"])], &links, &Policy::default());
    let tun = Link {
        is_ethernet: false,
        name: "wg0".into(),
        ifindex: IfIndex(6),
        ..links.host[&IfIndex(5)].clone()
    };
    links.host.insert(IfIndex(6), tun);
    assert_eq!(why(&select(&[], &[capture(1, &[], &["wg0"])], &links, &Policy::default())), ["NotEthernet"]);
    let kinds: Vec<_> =
        selection.taps.values().map(|tap| (tap.head.owner.nic.as_str(), tap.head.kind)).collect();
    assert_eq!(kinds, [("eth0", TapKind::Interface), ("veth100", TapKind::HostVeth)]);
}

#[test]
fn what_a_capture_cannot_have_is_told() {
    let policy = Policy { exclude_namespaces: ["secret".to_owned()].into(), ..Policy::default() };
    let mut hidden = mk_pod("hidden", &[]);
    hidden.id.namespace = "secret".into();
    let names: Vec<String> = (0..8).map(|number| format!("{MIRROR}.m{number}")).collect();
    let full: Vec<_> = names.iter().map(|name| (name.as_str(), "true")).collect();
    let pods = [hidden, mk_pod("full", &full)];
    let secret = [("secret".into(), "hidden".into())].into();
    let wants = Wants::Named { pods: secret, interfaces: BTreeSet::new() };
    let of_hidden = Capture { wants, ..capture(1, &[], &[]) };
    for (capture, reason) in [
        (of_hidden, "NamespaceExcluded"),
        (capture(1, &["nosuch"], &[]), "NoSuchPod"),
        (capture(1, &["full"], &[]), "TooManyMirrors"),
        (capture(1, &[], &["veth101"]), "TooManyMirrors"),
        (capture(1, &[], &["nosuch0"]), "NoSuchInterface"),
    ] {
        let without = selected(&pods, &[], &policy);
        let with = selected(&pods, &[capture], &policy);
        assert_eq!((why(&with), &with.taps), (vec![reason], &without.taps));
        assert!(with.skipped.iter().all(|skipped| skipped.mirror.is_some()), "{:?}", with.skipped);
    }
}

/// Root and a reader of the API name the same interface. Limits apply to the reader alone.
#[test]
fn a_reader_of_an_interface_has_an_origin_of_its_own() {
    let web = mk_pod("web", &[]);
    let of_api = Capture { origin: Origin::Reader, ..capture(2, &[], &["veth100"]) };
    let captures = [capture(1, &[], &["veth100"]), of_api];
    let selection = select(&[], &captures, &mk_node(&[(&web, 2, 100)]), &Policy::default());
    let sessions = selection.taps[&Device::on_node(IfIndex(100))].sessions.values();
    let origins: Vec<_> = sessions.map(|session| (session.target.clone(), session.origin)).collect();
    let expected = [Origin::Capture, Origin::Reader];
    assert_eq!(origins, [0, 1].map(|at| (captures[at].target(), expected[at])));
}

/// A pod has two mirrors and six readers. Root captures it by its name and by its device, and the newest readers leave.
#[test]
fn captures_of_root_come_before_readers() {
    let ids = format!("{MIRROR}.ids");
    let pods = [mk_pod("web", &[(MIRROR, "true"), (ids.as_str(), "true")]), mk_pod("db", &[])];
    let captures: Vec<_> = (5..=10).map(reader).collect();
    let mirrors = |selection: &Selection, ifindex| {
        let sessions = &selection.taps[&Device::on_node(IfIndex(ifindex))].sessions;
        sessions.keys().map(ToString::to_string).collect::<Vec<_>>().join(" ")
    };
    let readers = "capture.10 capture.5 capture.6 capture.7 capture.8 capture.9";
    let selection = selected(&pods, &captures, &Policy::default());
    assert_eq!(mirrors(&selection, 100), format!("{readers} default ids"));
    assert_eq!(selection.skipped, []);

    let of_root = [capture(11, &["web"], &[]), capture(12, &[], &["veth100"])];
    let selection = selected(&pods, &[captures, of_root.to_vec()].concat(), &Policy::default());
    let left = "capture.11 capture.12 capture.5 capture.6 capture.7 capture.8 default ids";
    assert_eq!((mirrors(&selection, 100), mirrors(&selection, 101)), (left.to_owned(), readers.to_owned()));
    let skipped: BTreeSet<_> = selection.skipped.into_iter().collect();
    let leaves = |(number, nic): (u32, Option<&str>)| Skipped {
        pod: Some(pods[0].id.clone()),
        nic: nic.map(str::to_owned),
        ..reader(number).skip(Why::TooManyMirrors)
    };
    assert_eq!(skipped, [(9, Some("eth0")), (10, None)].map(leaves).into());
}

/// Processes of several pods are in one namespace, so each of the pods claims its device.
#[test]
fn a_shared_device_is_that_of_the_mirrored_pod_or_else_that_of_root() {
    let captures = [reader(5), capture(6, &["db"], &[])];
    for (annotations, captures, owner) in [
        (&[(MIRROR, "true")][..], &captures[..], "web"),
        (&[(MIRROR, "true")], &captures[..1], "web"),
        (&[], &captures, "db"),
        (&[], &captures[..1], "api"),
    ] {
        let pods = [mk_pod("api", &[]), mk_pod("db", &[]), mk_pod("web", annotations)];
        let mut links = mk_node(&[(&pods[0], 2, 100)]);
        let inside = links.pods[&pods[0].id.uid].clone();
        links.pods.extend(pods.iter().map(|pod| (pod.id.uid.clone(), inside.clone())));
        let choice = choose(&pods, &[], captures, &Policy::default(), &mut Default::default());
        let selection = select(&choice.wanted, captures, &links, &Policy::default());
        let owners: Vec<_> =
            selection.taps.values().map(|tap| tap.head.owner.pod.as_ref().unwrap()).collect();
        assert_eq!(owners, [&pods.iter().find(|pod| pod.id.name == owner).unwrap().id]);
    }
}

/// Opt-outs and namespaces bind a reader of interfaces, too. Root reads the same interfaces.
#[test]
fn an_interface_that_leads_into_a_barred_pod_is_for_root_alone() {
    let mut hidden = mk_pod("hidden", &[]);
    hidden.id.namespace = "secret".into();
    let pods = [mk_pod("web", &[]), mk_pod("db", &[(MIRROR, "false")]), hidden];
    let policy = Policy { exclude_namespaces: ["secret".to_owned()].into(), ..Policy::default() };
    let [web, db, hidden] = &pods;
    let mut links = mk_node(&[(web, 2, 100), (db, 2, 101), (hidden, 2, 102)]);
    let devices = ["veth100", "veth101", "veth102"];
    let captures =
        [capture(1, &[], &devices), Capture { origin: Origin::Reader, ..capture(2, &[], &devices) }];
    let barred = |captures: &[Capture], links: &LinkSnapshot| {
        let choice = choose(&pods, &[], captures, &policy, &mut Default::default());
        let mut selection = select(&choice.wanted, captures, links, &policy);
        selection.bar(&choice.barred, captures, links);
        let sessions: Vec<_> = selection.taps.values().map(|tap| tap.sessions.len()).collect();
        (sessions, why(&selection))
    };
    let reasons = vec!["OptedOut", "NamespaceExcluded"];
    assert_eq!(barred(&captures, &links), (vec![2, 1, 1], reasons.clone()));
    assert_eq!(barred(&captures[1..], &links), (vec![1], reasons.clone()));
    // Each of the interfaces could be this pod's.
    let inside = links.pods[&db.id.uid].clone().unwrap();
    let unread = PodLinks { nsid: None, links: Vec::new(), stale: Some("no right".into()), ..inside.clone() };
    for unread in [Err("no right".into()), Ok(unread)] {
        links.pods.insert(db.id.uid.clone(), unread);
        assert_eq!(barred(&captures, &links), (vec![1, 1, 1], vec!["OptedOut"; 3]));
    }
    // Its interface can exist before its processes, and is none of those of the others.
    links.pods.remove(&db.id.uid);
    assert_eq!(barred(&captures, &links), (vec![2, 1, 1], reasons));
    // A pod with the node's network has no interface, and its devices are not read.
    let mut on_host = mk_pod("agent", &[(MIRROR, "false")]);
    on_host.host_network = true;
    let on_node = PodLinks { nsid: None, is_host: true, stale: Some("no right".into()), ..inside };
    let agent = mk_pod("agent", &[]);
    let link = &links.by_name("veth100").unwrap().clone();
    assert!(!leads_into(link, &on_host, &mk_node(&[])));
    links.pods.insert(agent.id.uid.clone(), Ok(on_node));
    assert!(!leads_into(link, &agent, &links));
}

proptest! {
    /// Every mirror has the same sessions at the same taps, with or without captures.
    #[test]
    fn captures_change_no_mirror(
        asked in vec(option::of(sample::select(vec!["true", "ingress", "false"])), 1..6),
        captures in vec((vec(0..6usize, 0..4), vec(100..106u32, 0..3)), 0..5),
        readers in 0..4u32, enable_mirror: bool,
    ) {
        let pods: Vec<_> = asked.iter().enumerate().map(|(number, asked)| {
            let annotations: Vec<_> = asked.iter().map(|asked| (MIRROR, *asked)).collect();
            mk_pod(&format!("pod{number}"), &annotations)
        }).collect();
        let captures = (1..).zip(captures).map(|(number, (of, devices))| {
            let names: Vec<_> = of.iter().map(|number| format!("pod{number}")).collect();
            let devices: Vec<_> = devices.iter().map(|number| format!("veth{number}")).collect();
            let names: Vec<_> = names.iter().map(String::as_str).collect();
            let devices: Vec<_> = devices.iter().map(String::as_str).collect();
            capture(number, &names, &devices)
        });
        let captures: Vec<_> = captures.chain((6..6 + readers).map(reader)).collect();
        let policy = Policy { enable_mirror, ..Policy::default() };
        let before = selected(&pods, &[], &policy);
        let mut after = selected(&pods, &captures, &policy);
        for tap in after.taps.values_mut() {
            prop_assert!(tap.sessions.len() <= MAX_SESSIONS_PER_TAP);
            tap.sessions.retain(|mirror, _| !mirror.0.is_capture());
        }
        after.taps.retain(|_, tap| !tap.sessions.is_empty());
        prop_assert_eq!(after.taps, before.taps);
    }
}
