//! The text about a pod: complete texts for the main cases. [`any`] is a property test that nothing about the pod is
//! missing, and [`runbooks`] makes a page of the same words.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod any;
mod runbooks;

use mirror_common::verdict::{Misfit, Verdict};

use super::*;
use crate::{
    coverage::{Reason, State, Way},
    model::{Place, PodId},
    select::BadAnnotation,
    settings::Settings,
    status::{CounterStatus, DirectionCoverage, LeftStatus, MisfitStatus, NicCoverage, TargetStatus},
};

fn target(name: &str, destination: &str, ifindex: Option<u32>, up: bool) -> TargetStatus {
    let stream = destination == "stream";
    let device = if stream { "" } else { destination };
    TargetStatus {
        name: name.into(),
        destination: destination.into(),
        device: device.into(),
        ifindex,
        up,
        stream,
        dropped: None,
        when_read: false,
    }
}

fn counter(direction: &str, verdict: Verdict, packets: u64) -> CounterStatus {
    let (direction, result) = (direction.into(), verdict.name().into());
    CounterStatus { direction, result, packets, bytes: packets * 100 }
}

fn session(mirror: &str, target: &str, settings: &[(&'static str, &str)]) -> SessionStatus {
    let mut of = Settings::default();
    settings.iter().for_each(|(key, value)| of.set(key, value).unwrap());
    let left = of.budget.into();
    SessionStatus {
        mirror: mirror.into(),
        target: target.into(),
        serial: 1,
        tunnel_key: None,
        origin: Origin::Annotation(Place::Pod).name().into(),
        direction: "both".into(),
        settings: of.texts(),
        ended: None,
        left,
        counters: Vec::new(),
        misfits: Vec::new(),
    }
}

fn tap(name: &str, sessions: &[SessionStatus]) -> TapStatus {
    TapStatus {
        ifindex: 12,
        device: format!("veth-{name}"),
        inside: false,
        pod: Some(PodId { uid: "1".into(), namespace: "shop".into(), name: name.into() }),
        nic: "eth0".into(),
        network: None,
        attached: AttachedStatus { ingress: "tcx".into(), egress: "tcx".into() },
        pod_side: None,
        sessions: sessions.to_vec(),
    }
}

/// A node with an agent that has listed the pods `web`, for which a mirror is requested, and `db`.
fn node(taps: &[TapStatus]) -> NodeStatus {
    let db = PodId { uid: "2".into(), namespace: "shop".into(), name: "db".into() };
    let why = Why::NoRequest;
    let (reason, message, remedy) = (why.name().into(), why.to_string(), why.remedy_unasked(&db));
    let not_asked = Some(Finding { reason, message, remedy, ..Finding::default() });
    let pods = vec![
        KnownPod { pod: "shop/web".into(), not_asked: None },
        KnownPod { pod: "shop/db".into(), not_asked },
    ];
    NodeStatus {
        version: "1".into(),
        agent_running: true,
        targets: vec![target("default", "mirror0", Some(6), true)],
        taps: taps.to_vec(),
        notes: Some(Notes { pods: Some(pods), ..Notes::default() }),
    }
}

fn skipped(mirror: Option<&str>, reason: &str) -> Finding {
    Finding {
        pod: Some("shop/web".into()),
        mirror: mirror.map(str::to_owned),
        reason: reason.into(),
        message: "the reason".into(),
        remedy: "The remedy.".into(),
        ..Finding::default()
    }
}

#[test]
fn a_pod_is_mirrored() {
    let mut of = session("default", "default", &[("filter", "icmp")]);
    of.direction = "egress".into();
    of.counters = vec![
        counter("ingress", Verdict::OtherDirection, 9),
        counter("egress", Verdict::Copied, 3),
        counter("egress", Verdict::Filtered, 6),
    ];
    let status = node(&[tap("web", &[of]), tap("other", &[session("default", "default", &[])])]);
    assert_eq!(
        status.explain("shop/web").unwrap(),
        "\
shop/web is mirrored.

NIC eth0
  It is tapped at the node side of its veth, veth-web (ifindex 12).
  Podmirror's programs run at its hooks: egress (tcx) for what reaches the pod, ingress (tcx) for what leaves the pod.
  The agent sees no other program before them.

  Mirror default
    Requested by the annotation podmirror.io/mirror (or ovn.kubernetes.io/mirror, with --kube-ovn-annotations) of the pod.
    It copies what leaves the pod (egress).
    Filter of the packets to copy: \"icmp\".
    The target default is the mirror interface mirror0 (ifindex 6). It accepts copies now.
    The mirror has seen 9 packets that reach the pod and 9 that leave it:
      copied: egress 3 packets (300 bytes)
        The target accepted a copy.
      other_direction: ingress 9 packets (900 bytes)
        The mirror does not include this direction. The value \"true\" or \"both\" includes both.
      filtered: egress 6 packets (600 bytes)
        The mirror does not select the packet, for example because its filter does not match. `mirror-agent filter check --pcap` tries a filter on a capture.
"
    );
}

#[test]
fn copies_that_are_not_as_asked_for_are_counted_and_explained() {
    let misfit = |direction: &str, kind: Misfit, packets, bytes| MisfitStatus {
        direction: direction.into(),
        kind: kind.name().into(),
        packets,
        bytes,
    };
    let mut of = session("default", "default", &[]);
    of.counters = vec![counter("egress", Verdict::Copied, 9)];
    let text =
        |of: &SessionStatus| node(&[tap("web", std::slice::from_ref(of))]).explain("shop/web").unwrap();
    assert!(!text(&of).contains("of these copies"), "{}", text(&of));
    of.misfits = vec![
        misfit("ingress", Misfit::Cut, 2, 2000),
        misfit("egress", Misfit::Cut, 3, 500),
        misfit("egress", Misfit::Long, 1, 40),
    ];
    let text = text(&of);
    let told = "\
      cut: 5 of these copies, by 2500 bytes
        They did not fit into a packet of the tunnel, or into a record of the stream, and were cut. oversize=segment and \
                a larger MTU on the way leave tunnels more room.
      long: 1 of these copies, by 40 bytes
        They are longer than the snap length, because the kernel cuts no packet within its headers.
";
    assert!(text.contains(told), "{text}");
}

#[test]
fn a_pod_is_not_asked_for() {
    assert_eq!(
        node(&[]).explain("shop/db").unwrap(),
        "\
shop/db is not mirrored.
No mirror is requested: neither the pod nor its namespace has podmirror.io/mirror, and the agent runs without \
--enable-mirror. (NoRequest)
To mirror it: kubectl annotate --overwrite --namespace shop pod db podmirror.io/mirror=true; for a pod from a file, \
write this annotation there.
"
    );
}

#[test]
fn a_pod_is_asked_for_in_vain() {
    let mut status = node(&[]);
    assert_eq!(
        status.explain("shop/web").unwrap(),
        "\
shop/web is not mirrored.
A mirror of it is requested, but not installed yet. The agent retries.
"
    );
    let notes = status.notes.as_mut().unwrap();
    notes.failures = vec!["no device".into()];
    assert!(status.explain("shop/web").unwrap().ends_with(
        "
This failed in the agent's last round, and the agent retries it:
  no device
"
    ));
    let notes = status.notes.as_mut().unwrap();
    notes.not_mirrored = vec![skipped(None, "BadSetting"), skipped(Some("ids"), "NoSuchTarget")];
    let (message, remedy) = ("yes; it is ignored".into(), BadAnnotation::REMEDY.into());
    notes.bad_annotations = vec![Finding { message, remedy, ..skipped(None, BadAnnotation::REASON) }];
    assert_eq!(
        status.explain("shop/web").unwrap(),
        "\
shop/web is not mirrored.

Not as requested:
  BadSetting: the reason
    The remedy.
  NoSuchTarget, mirror ids: the reason
    The remedy.
  BadAnnotation: yes; it is ignored
    Correct the annotation, or remove it.
"
    );
}

#[test]
fn nothing_is_copied_any_more_and_no_agent_runs() {
    let mut ended =
        session("default", "default", &[("packets", "2"), ("duration", "1h"), ("sample", "1/100")]);
    ended.ended = Some("packets".into());
    ended.left = LeftStatus { duration: Some(3600.0 - 77.04), packets: Some(0), bytes: None };
    ended.origin = Origin::Policy.name().into();
    let mut ids = session("ids", "ids", &[("rate", "10kpps,50Mbit"), ("snaplen", "96")]);
    ids.counters = vec![counter("egress", Verdict::TargetDown, 7)];
    let mut tap = tap("web", &[ended, ids]);
    tap.attached.egress = AttachedStatus::NONE.into();
    let mut status = node(&[tap]);
    status.targets.push(target("ids", "ids0", Some(8), false));
    (status.agent_running, status.notes) = (false, None);
    assert_eq!(
        status.explain("shop/web").unwrap(),
        "\
shop/web has a mirror, but nothing is copied now. See the reasons below.
No agent is running on this node. Installed mirrors continue; changes take effect when an agent runs again.

NIC eth0
  It is tapped at the node side of its veth, veth-web (ifindex 12).
  Podmirror's programs run at its hooks: ingress (tcx) for what leaves the pod.
  Without an answer of the agent, it is unknown whether other programs run before them.
  No podmirror program runs at its hook egress, so what reaches the pod is not seen.
  A running agent attaches it again. If it cannot, its log says why.

  Mirror default
    Requested by --enable-mirror of the agent.
    It copies both directions: what reaches the pod, and what leaves the pod.
    Share of the flows to copy: 1%.
    End after this time: 1h; 3523 s are left.
    End after this many copies of each NIC: 2; 0 are left.
    It has ended, because its budget of packets is used up: nothing is copied. All its budgets restart when its \
settings change.
    The target default is the mirror interface mirror0 (ifindex 6). It accepts copies now.
    The mirror has seen no packet yet.

  Mirror ids
    Requested by the annotation podmirror.io/mirror.ids of the pod.
    It copies both directions: what reaches the pod, and what leaves the pod.
    Maximum copies per second of each NIC: 10kpps,50Mbit.
    Bytes to copy of each packet: 96.
    The target ids is the mirror interface ids0 (ifindex 8). It is down, so nothing is copied.
    Bring it up on the node: ip link set ids0 up.
    The mirror has seen 0 packets that reach the pod and 7 that leave it:
      target_down: egress 7 packets (700 bytes)
        The target was down when the packet passed.
"
    );
}

#[test]
fn the_message_for_an_unknown_pod_says_where_to_look() {
    let mut status = node(&[]);
    let told = |status: &NodeStatus| status.explain("shop/nobody").unwrap_err();
    assert_eq!(
        told(&status),
        "the agent of this node has no pod shop/nobody: check the name, and run the command on the node of the pod; \
         `kubectl get pod --namespace shop nobody --output wide` names its node. A pod from a file must be in the \
         file. The agent's log lists the pods that it skips"
    );
    status.notes = Some(Notes::default());
    assert!(
        told(&status)
            .starts_with("pod shop/nobody is unknown: the agent of this node has no list of pods yet")
    );
    status.notes = None;
    assert!(told(&status).ends_with("the running agent does not answer; try again"));
    status.agent_running = false;
    assert!(told(&status).contains("no agent is running: start it"));
}

#[test]
fn a_capture_alone_is_no_mirror() {
    let mut of = session("capture.7", "capture.7", &[]);
    of.origin = Origin::Capture.name().into();
    let mut status = node(&[tap("db", &[of])]);
    let mut stream = target("capture.7", "stream", None, true);
    stream.destination.clear();
    status.targets.push(stream);
    let text = status.explain("shop/db").unwrap();
    assert!(
        text.starts_with(
            "shop/db is not mirrored, but a capture reads its packets.\nNo mirror is requested:"
        ),
        "{text}"
    );
    assert!(text.contains("\n    A command reads its packets now.\n"), "{text}");
    assert!(text.contains("\n    It has no filter or limit: "), "{text}");
}

/// Each direction is seen on a different side, and the text says where and why.
#[test]
fn a_tap_with_two_sides_says_where_it_sees_each_direction() {
    let mut of = tap("web", &[session("default", "default", &[])]);
    of.attached.egress = AttachedStatus::NONE.to_owned();
    of.pod_side = Some(PodSideStatus { ifindex: 2, attached: "tcx".into() });
    let mut status = node(&[of]);
    let covered = DirectionCoverage {
        state: State::Covered.name().into(),
        message: State::Covered.to_string(),
        seconds: 5,
        seen: 1,
        carried: 1,
    };
    status.notes.as_mut().unwrap().coverage = vec![NicCoverage {
        pod: "shop/web".into(),
        nic: "eth0".into(),
        device: "veth-web".into(),
        why_inside: Some(Reason::Cni("Cilium").to_string()),
        ingress: covered.clone(),
        egress: covered,
    }];
    let text = status.explain("shop/web").unwrap();
    let expected = "
NIC eth0
  It is tapped at the node side of its veth, veth-web (ifindex 12).
  Packets to the pod are tapped inside the pod, where the NIC has ifindex 2.
    Programs of Cilium are at the node side of the veth, and can deliver packets to the pod past it.
  Podmirror's programs run at its hooks: ingress inside the pod (tcx) for what reaches the pod, ingress (tcx) for what leaves the pod.
  The agent sees no other program before them.
  Coverage of what reaches the pod: Covered, for 5 s. Podmirror's program sees what the NIC carries.
";
    assert!(text.starts_with("shop/web is mirrored.\n") && text.contains(expected), "{text}");
}

/// Programs that are ahead of podmirror's are reported for each tap, inside pods too.
#[test]
fn what_runs_ahead_of_a_tap_inside_is_told() {
    for (is_inside, side) in
        [(true, None), (false, Some(PodSideStatus { ifindex: 2, attached: "clsact".into() }))]
    {
        let mut of = tap("web", &[session("default", "default", &[])]);
        (of.inside, of.pod_side) = (is_inside, side);
        let mut status = node(&[of]);
        let says =
            |status: &NodeStatus, sentence: &str| status.explain("shop/web").unwrap().contains(sentence);
        assert!(says(&status, "  The agent sees no other program before them.\n"));
        let hidden = Finding { nic: Some("eth0".into()), ..skipped(None, Why::HIDDEN) };
        status.notes.as_mut().unwrap().not_mirrored = vec![hidden];
        assert!(says(&status, "  Another program or filter runs before them: see Hidden above.\n"));
        assert!(!says(&status, "ahead of all other programs"));
        status.notes = None;
        assert!(says(
            &status,
            "  Without an answer of the agent, it is unknown whether other programs run before them.\n"
        ));
    }
}

/// The counters of the NIC show more than that the tap saw nothing.
#[test]
fn what_the_nic_carries_is_told_beside_what_the_tap_sees() {
    let mut of = session("default", "default", &[]);
    of.counters = vec![counter("egress", Verdict::Copied, 3)];
    let mut status = node(&[tap("web", &[of])]);
    let silent = "It has seen no packet that reaches the pod.";
    assert!(status.explain("shop/web").unwrap().contains(silent));
    let direction = |state: State, seconds, seen, carried| DirectionCoverage {
        state: state.name().into(),
        message: state.to_string(),
        seconds,
        seen,
        carried,
    };
    status.notes.as_mut().unwrap().coverage = vec![NicCoverage {
        pod: "shop/web".into(),
        nic: "eth0".into(),
        device: "veth-web".into(),
        why_inside: None,
        ingress: direction(State::Bypassed(Way::Unseen), 7200, 0, 77),
        egress: direction(State::Covered, 119, 3, 3),
    }];
    let text = status.explain("shop/web").unwrap();
    let expected = "
  Coverage of what reaches the pod: Bypassed, for 2 hours. The NIC carries packets that the tap does not see, and the \
                    agent finds no program or filter that hides them; the reason can be an XDP program of the device, \
                    or another program inside the pod.
    Since the agent began to compare, the NIC has carried 77 of these packets, and the tap has seen 0.
  Coverage of what leaves the pod: Covered, for 119 s. Podmirror's program sees what the NIC carries.
    Since the agent began to compare, the NIC has carried 3 of these packets, and the tap has seen 3.
";
    assert!(text.contains(expected) && !text.contains(silent), "{text}");
}
