//! An agent is killed between any two steps of its life. `cleanup` removes everything that it leaves, and the next
//! agent mirrors correctly.
//!
//! A step is a system call that changes the kernel's state or the pins. The points are chosen at random;
//! `MIRROR_CRASHES=all` takes every one of them.

mod settings;

use std::{env, fs};

use mirror_tests::{
    Agent, AttachMode, Capture, Lab, PodNs, PodSpec, PodsFile, SOON, TapStatus, check, eventually,
    random::Random,
};
use nix::sys::signal::Signal;

use mirror_core::exit;

use crate::{
    Inside, MIRROR, any_mode,
    pod_side::{HUB, filters, has_exit, up},
    with_qdisc,
};

in_both_modes!(an_agent_may_be_killed_at_any_step, cleanup_may_be_killed_at_any_step);

const KILL_AT: &str = env!("CARGO_BIN_EXE_kill-at");
const MACVLAN: &str = "macvlan mode bridge";
/// Number of random points.
const DRAWN: usize = 3;

/// A node with a veth pod and a macvlan pod, each with a peer.
struct Scene {
    veth: [PodNs; 2],
    macvlan: [PodNs; 2],
    mode: AttachMode,
    pods: PodsFile,
    before: [Vec<String>; 2],
    lab: Lab,
}

impl Scene {
    fn new(story: &str, mode: AttachMode) -> Self {
        let lab = Lab::new(story);
        lab.bridge("br0");
        lab.node().ip("link add up0 type veth peer name up1");
        lab.node().ip("link set up0 up");
        lab.node().ip("link set up1 up");
        let veth = ["web", "db"].map(|name| lab.pod(name, "br0"));
        let macvlan = ["far", "other"].map(|name| lab.pod_over(name, MACVLAN, "up0"));
        with_qdisc(&lab, &veth[0], mode);
        let before = [lab.network_state(), macvlan[0].netns().devices()];
        Self { pods: PodsFile::new(&lab, &[]), veth, macvlan, mode, before, lab }
    }

    /// The successive contents of the pods file, each with the number of sessions per pod, and the devices that then
    /// have a tap.
    fn life(&self) -> [(Vec<PodSpec>, usize, Vec<&str>); 4] {
        let web_end = self.veth[0].veth_host();
        let [web, far] = [&self.veth[0], &self.macvlan[0]].map(PodSpec::of);
        let second = |spec: PodSpec| {
            spec.annotated("podmirror.io/mirror.second", "egress")
                .annotated("podmirror.io/snaplen.second", "96")
        };
        let filtered = |spec: PodSpec| spec.mirror("true").annotated("podmirror.io/filter", "icmp or arp");
        [
            (vec![filtered(web.clone()), filtered(far.clone())], 1, vec![web_end, "eth0"]),
            (
                vec![second(web.clone().mirror("true")), second(far.clone().mirror("true"))],
                2,
                vec![web_end, "eth0"],
            ),
            (vec![web.clone().mirror("ingress"), far.clone()], 1, vec![web_end]),
            (vec![web, far], 0, vec![]),
        ]
    }

    /// Runs an agent through its life, or kills it at a step. Returns the number of steps that it has begun.
    fn live(&self, step: usize) -> usize {
        self.pods.write(&self.life()[0].0);
        let file = self.lab.files().join("steps");
        let runner = [KILL_AT, &step.to_string(), file.to_str().unwrap()];
        let mut agent = Agent::run_by(&runner, &self.lab, self.mode, &self.pods, &[]);
        for (pods, sessions, expected) in self.life() {
            self.pods.write(&pods);
            // Each system call of a traced agent needs two context switches to the tracer.
            eventually(3 * SOON, || {
                if agent.has_ended() {
                    return Ok(());
                }
                let status = self.lab.try_status()?;
                let mut taps: Vec<_> = status.taps.iter().map(|tap| tap.device.as_str()).collect();
                taps.sort_unstable_by_key(|device| *device == "eth0");
                let are_done = status.taps.iter().all(|tap| {
                    tap.sessions.len() == sessions && tap.attached.values().all(|attached| attached != "none")
                });
                check(taps == expected && are_done, || format!("{expected:?}: {:?}", status.taps))
            });
        }
        if step == 0 {
            agent.stop();
        } else {
            agent.end();
        }
        fs::read_to_string(file).unwrap().parse().unwrap()
    }

    /// Nothing of podmirror is left, and the pods can talk.
    #[track_caller]
    fn is_clean(&self) {
        assert!(self.lab.pins().is_empty(), "{:?}", self.lab.pins());
        assert_eq!([self.lab.network_state(), self.macvlan[0].netns().devices()], self.before);
        assert_eq!(filters(&self.macvlan[0]), Vec::<String>::new());
        for [pod, peer] in [&self.veth, &self.macvlan] {
            pod.ping(peer.v4(), 2, 56);
        }
    }

    /// The next agent mirrors both pods: each frame once.
    fn goes_on(&self) {
        let Self { veth: [web, db], macvlan: [far, other], mode, pods, lab, .. } = self;
        let mirrored = [web, far];
        pods.write(&mirrored.map(|pod| PodSpec::of(pod).mirror("true")));
        let agent = Agent::run(lab, *mode, pods, &[]);
        lab.wait_taps(&self.life()[0].2);
        // The sessions of the killed agent no longer exist.
        lab.wait_status(|status| {
            let of = |tap: &TapStatus| (tap.sessions.len(), tap.settings["filter"].is_null());
            check(status.taps.iter().all(|tap| of(tap) == (1, true)), || format!("{:?}", status.taps))
        });
        let inside: Vec<_> = mirrored.iter().map(|pod| Inside::of(pod)).collect();
        let mirror = Capture::start(lab.node(), MIRROR);
        web.ping(db.v4(), 5, 56);
        db.ping(web.v6(), 5, 1400);
        far.ping(other.v4(), 5, 56);
        other.ping(far.v6(), 5, 1400);
        eventually(SOON, || {
            let all = inside.iter().map(|inside| inside.capture.frames());
            let all = all.reduce(|all, more| all.and(&more)).unwrap();
            mirror.frames().same_as(&all)
        });
        pods.write(&self.life()[3].0);
        lab.wait_taps(&[]);
        agent.stop();
        lab.cleanup();
        self.is_clean();
    }
}

/// The points at which the agent is killed, out of `all` steps.
fn points(all: usize, story: &str) -> Vec<usize> {
    if env::var("MIRROR_CRASHES").is_ok_and(|points| points == "all") {
        return (1..=all).collect();
    }
    // One point in each part, so that every phase of the life is tested.
    let mut random = Random::from_clock(story);
    (0..DRAWN).map(|part| part * all / DRAWN + 1 + random.below(all / DRAWN)).collect()
}

fn an_agent_may_be_killed_at_any_step(mode: AttachMode) {
    let scene = Scene::new("crash", mode);
    let steps = scene.live(0);
    scene.lab.cleanup();
    scene.is_clean();
    for step in points(steps, "crash") {
        let begun = scene.live(step);
        // The number of steps varies between runs, so the last ones may not be reached.
        assert!(begun == step || step > steps * 3 / 4, "{begun} of {step} of {steps} steps");
        if step % 2 == 0 {
            scene.lab.cleanup();
            scene.is_clean();
        }
        scene.goes_on();
    }
}

/// An agent has removed a tap inside a pod, and was killed before it removed the relay device (`exit`). No tap refers
/// to the relay device, and the relay hub stays for another pod.
#[test]
fn an_exit_that_a_killed_agent_has_left_goes() {
    let lab = Lab::new("left-exit");
    up(&lab, "up0", "up1");
    let [web, db] = ["web", "db"].map(|name| lab.pod_over(name, MACVLAN, "up0"));
    let pods = PodsFile::new(&lab, &[PodSpec::of(&web).mirror("true"), PodSpec::of(&db)]);
    let agent = Agent::run(&lab, any_mode(), &pods, &[]);
    lab.wait_taps(&["eth0"]);
    eventually(SOON, || check(has_exit(&web), || "no exit".into()));
    agent.kill();
    let (index, netns) = (exit::IFINDEX.0, db.netns().name());
    let name = exit::NAME;
    lab.node().ip(&format!(
        "link add link {HUB} name {name} index {index} netns {netns} type macvlan mode private"
    ));
    assert!(has_exit(&db));
    let agent = Agent::run(&lab, any_mode(), &pods, &[]);
    eventually(SOON, || check(!has_exit(&db), || "the exit is still there".into()));
    assert!(has_exit(&web), "it is in use");
    agent.stop();
    lab.cleanup();
}

fn cleanup_may_be_killed_at_any_step(mode: AttachMode) {
    let scene = Scene::new("crashclean", mode);
    let file = scene.lab.files().join("steps");
    let clean = |step: usize| {
        scene.pods.write(&scene.life()[1].0);
        let agent = Agent::run(&scene.lab, mode, &scene.pods, &[]);
        scene.lab.wait_taps(&scene.life()[1].2);
        agent.kill();
        let mut killed =
            scene.lab.agent_by(&[KILL_AT, &step.to_string(), file.to_str().unwrap()], &["cleanup"]);
        let code = killed.output().unwrap().status.code();
        assert_eq!(code, Some(if step == 0 { 0 } else { 128 + Signal::SIGKILL as i32 }), "at step {step}");
        fs::read_to_string(&file).unwrap().parse::<usize>().unwrap()
    };
    let steps = clean(0);
    scene.is_clean();
    for step in points(steps, "crashclean") {
        clean(step);
        scene.lab.cleanup();
        scene.is_clean();
    }
}
