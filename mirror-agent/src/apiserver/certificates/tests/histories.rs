//! Whole histories of two replicas, on a model of the API server: requests in any order, lost or late; wrong clocks.

use proptest::{collection::vec, prelude::*};

use super::*;

/// A CA in the model: its name instead of a PEM, and its end.
type Certificate = (String, Duration);

/// What becomes of a request.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fate {
    Done,
    /// The server does not get it.
    Lost,
    /// The replica has no answer, and continues. The server gets it some time later, if it is a write.
    Late,
}

#[derive(Debug, Clone)]
enum Event {
    /// A replica sends its next request.
    Request(usize, Fate),
    Pass(Duration),
    /// The clock of a replica is set: it is this number of seconds ahead of the true time.
    SetClock(usize, i64),
    Restart(usize),
    /// A late write reaches the server.
    Arrive,
    /// The status of the APIService changes.
    Status,
}

fn any_event() -> impl Strategy<Value = Event> {
    let pass = |from: u64, to: u64| (from..to).prop_map(|seconds| Event::Pass(Duration::from_secs(seconds)));
    let fate = prop_oneof![10 => Just(Fate::Done), 1 => Just(Fate::Lost), 1 => Just(Fate::Late)];
    let ahead = -3 * DAY.cast_signed()..=3 * DAY.cast_signed();
    prop_oneof![
        30 => (0..2_usize, fate).prop_map(|(replica, fate)| Event::Request(replica, fate)),
        3 => pass(60, 3600),
        2 => pass(DAY, 8 * DAY),
        1 => pass(10 * DAY, 60 * DAY),
        1 => (0..2_usize, ahead).prop_map(|(replica, ahead)| Event::SetClock(replica, ahead)),
        1 => (0..2_usize).prop_map(Event::Restart),
        1 => Just(Event::Arrive),
        1 => Just(Event::Status),
    ]
}

/// A write on its way to the server, with the versions that its replica has read.
#[derive(Debug)]
struct Write {
    todo: Do,
    service: u64,
    secret: u64,
    now: Duration,
}

/// The progress of a replica in a step.
#[derive(Debug, Default)]
enum Progress {
    #[default]
    Begins,
    /// It has read this version of the APIService, with this caBundle.
    Read(u64, String),
    Writes(Write),
}

#[derive(Debug)]
struct Replica {
    ahead: i64,
    progress: Progress,
    leaf: Option<Leaf>,
    seen: (String, Duration),
}

#[derive(Debug)]
struct World {
    lifetime: Duration,
    now: Duration,
    /// The current CA and the old one.
    secret: (Option<Certificate>, Option<Certificate>),
    secret_version: u64,
    /// Each caBundle, and since when.
    bundles: Vec<(Duration, String)>,
    service_version: u64,
    made: usize,
    late: Vec<Write>,
    replicas: [Replica; 2],
    /// Whether somebody else has changed the objects.
    is_tampered: bool,
}

impl World {
    fn new(lifetime: Duration) -> Self {
        let now = Duration::from_secs(1_800_000_000);
        Self {
            lifetime,
            now,
            secret: (None, None),
            secret_version: 0,
            bundles: vec![(now, String::new())],
            service_version: 0,
            made: 0,
            late: Vec::new(),
            replicas: [0, 1].map(|_| Replica::new(now)),
            is_tampered: false,
        }
    }

    fn bundle(&self) -> &str {
        &self.bundles[self.bundles.len() - 1].1
    }

    fn clock(&self, replica: usize) -> Duration {
        Duration::from_secs(self.now.as_secs().saturating_add_signed(self.replicas[replica].ahead))
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Request(replica, fate) => {
                self.request(replica, fate);
            }
            Event::Pass(time) => self.now += time,
            Event::SetClock(replica, ahead) => self.replicas[replica].ahead = ahead,
            Event::Restart(replica) => {
                let ahead = self.replicas[replica].ahead;
                self.replicas[replica] = Replica { ahead, ..Replica::new(self.now) };
            }
            Event::Arrive if self.late.is_empty() => {}
            Event::Arrive => {
                let write = self.late.remove(0);
                self.write(&write);
            }
            Event::Status => self.service_version += 1,
        }
    }

    /// Sends the next request of a replica. Returns whether the replica has nothing left to do.
    fn request(&mut self, index: usize, fate: Fate) -> bool {
        let (clock, bundle) = (self.clock(index), self.bundle().to_owned());
        let replica = &mut self.replicas[index];
        match mem::take(&mut replica.progress) {
            Progress::Begins if fate == Fate::Done => {
                replica.progress = Progress::Read(self.service_version, bundle);
            }
            Progress::Read(service, bundle) if fate == Fate::Done => {
                if replica.seen.0 != bundle {
                    replica.seen = (bundle, self.now);
                }
                let is_settled = self.now - replica.seen.1 >= look(self.lifetime);
                let (current, old) = self.secret.clone();
                let old = old.filter(|(_, ends)| *ends > clock).map_or_else(String::new, |(pem, _)| pem);
                let ca = current.map(|(pem, ends)| Ca { pem, ends, old });
                let leaf = replica.leaf.as_ref();
                match decide(ca.as_ref(), &replica.seen.0, is_settled, leaf, self.lifetime, clock) {
                    None => return true,
                    Some(Do::Issue) => self.issue(index, ca.unwrap().pem, clock),
                    Some(todo) => {
                        let secret = self.secret_version;
                        replica.progress = Progress::Writes(Write { todo, service, secret, now: clock });
                    }
                }
            }
            Progress::Writes(write) if fate == Fate::Done => self.write(&write),
            Progress::Writes(write) if fate == Fate::Late => self.late.push(write),
            _ => {}
        }
        false
    }

    fn issue(&mut self, index: usize, ca: String, clock: Duration) {
        let replica = &mut self.replicas[index];
        let seen = &replica.seen.0;
        let could_wait = |leaf: &Leaf| leaf.ca != ca && leaf.ends > clock && seen.contains(&leaf.ca);
        if replica.leaf.as_ref().is_some_and(could_wait) && !self.is_tampered {
            // Clients that have read caBundle a while ago know the new CA as well.
            let since = self.now - look(self.lifetime);
            let ends = self.bundles.iter().skip(1).map(|(time, _)| *time).chain([Duration::MAX]);
            for ((_, bundle), _) in self.bundles.iter().zip(ends).filter(|(_, end)| *end > since) {
                assert!(bundle.contains(&ca), "{ca} signs too early: {:?}", self.bundles);
            }
        }
        replica.leaf = Some(Leaf { ca, ends: clock + of_leaf(self.lifetime) });
    }

    fn write(&mut self, write: &Write) {
        match &write.todo {
            Do::Replace if write.secret == self.secret_version => {
                self.made += 1;
                let old = self.secret.0.take();
                self.secret = (Some((format!("<{}>", self.made), write.now + self.lifetime)), old);
                self.secret_version += 1;
            }
            Do::Trust(bundle) if write.service == self.service_version => self.set_bundle(bundle),
            _ => {}
        }
    }

    fn set_bundle(&mut self, bundle: &str) {
        self.bundles.push((self.now, bundle.to_owned()));
        self.service_version += 1;
    }

    /// Whatever a replica serves is trusted.
    fn check(&self) {
        for leaf in self.replicas.iter().filter_map(|replica| replica.leaf.as_ref()) {
            let is_trusted = self.bundle().contains(&leaf.ca) || leaf.ends <= self.now;
            assert!(is_trusted || self.is_tampered, "{leaf:?} is not trusted: {self:?}");
        }
    }

    /// Whether both replicas have what they need for some time.
    fn is_calm(&self) -> bool {
        let Some((ca, ends)) = &self.secret.0 else { return false };
        self.bundle().contains(ca)
            && self.replicas.iter().enumerate().all(|(index, replica)| {
                let clock = self.clock(index);
                let has_leaf =
                    |leaf: &Leaf| leaf.ca == *ca && is_fresh(leaf.ends, of_leaf(self.lifetime), clock);
                replica.leaf.as_ref().is_some_and(has_leaf) && is_fresh(*ends, self.lifetime, clock)
            })
    }

    /// Somebody else changes an object.
    fn tamper(&mut self, how: u8) {
        self.is_tampered = how > 0;
        match how {
            1 => self.set_bundle(""),
            2 => self.set_bundle("<another>"),
            3 => self.secret = (None, None),
            4 => self.secret.0.iter_mut().for_each(|(_, ends)| *ends += Duration::from_secs(60 * DAY)),
            _ => {}
        }
        self.secret_version += 1;
    }
}

impl Replica {
    fn new(now: Duration) -> Self {
        Self { ahead: 0, progress: Progress::Begins, leaf: None, seen: (String::new(), now) }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// For any order of the requests of two replicas, with lost and late ones, restarts, and clocks that are up to
    /// three days wrong: at each moment until it ends, the certificate of a replica is signed by a CA in caBundle, and
    /// a new CA has been there for a while before it is used instead of another. After the failures, whatever somebody
    /// else has done to the objects, both replicas get a certificate of the same CA, and then have nothing to do.
    #[test]
    fn any_history_serves_a_trusted_certificate(
        // With the short lifetime, there are many CAs.
        days in prop_oneof![1 => Just(365_u64), 2 => Just(40_u64)],
        events in vec(any_event(), 1..300),
        tampering in 0..5_u8,
    ) {
        let lifetime = Duration::from_secs(days * DAY);
        let mut world = World::new(lifetime);
        for event in events {
            world.happens(event);
            world.check();
        }
        world.tamper(tampering);
        let is_calm = (0..8).any(|_| {
            world.now += look(lifetime);
            for replica in [0, 1] {
                let is_done = (0..40).any(|_| {
                    let is_done = world.request(replica, Fate::Done);
                    world.check();
                    is_done
                });
                assert!(is_done, "replica {replica} always has something to do: {world:?}");
            }
            world.is_calm()
        });
        prop_assert!(is_calm, "a replica waits for ever: {world:?}");
    }
}
