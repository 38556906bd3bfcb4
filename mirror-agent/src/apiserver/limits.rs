//! The limits of a replica: places for requests, and the rate of each. Pure.
//!
//! A rate bounds what a request sends: while its bucket is not ready, the request reads nothing from the agents, so that
//! the packets wait in the rings of the nodes, where losses are counted.

use std::time::Duration;

use super::query::Refusal;
use crate::util::places::{Place, Places};

/// Most requests for packets of a user, for a namespace and to a replica, and most streams of nodes to a replica.
const OF_A_USER: usize = 5;
const FOR_A_NAMESPACE: usize = 20;
const TO_A_REPLICA: usize = 100;
const STREAMS: usize = 2048;
/// Maximum number of requests for reports of a user. A replica serves few at a time.
const REPORTS_OF_A_USER: usize = 3;
/// The time for which an unused rate accumulates.
const BURST: Duration = Duration::from_millis(50);

/// The places of a replica.
#[derive(Debug, Clone, Default)]
pub struct Limits(Places);

impl Limits {
    /// Takes a place for a request for packets. `namespace`: the only one whose packets it reads.
    ///
    /// # Errors
    ///
    /// A refusal that says whether the user, the namespace or the replica has no place.
    pub fn enter(&self, user: &str, namespace: Option<&str>) -> Result<Place, Refusal> {
        let mut counted = vec![(format!("requests of the user {user}"), OF_A_USER)];
        counted.extend(namespace.map(|name| (format!("requests for the namespace {name}"), FOR_A_NAMESPACE)));
        counted.push(("requests to this replica".to_owned(), TO_A_REPLICA));
        self.take(counted)
    }

    /// Takes a place for a request for reports.
    ///
    /// # Errors
    ///
    /// A refusal, if the user has none.
    pub fn reports(&self, user: &str) -> Result<Place, Refusal> {
        self.take(vec![(format!("requests for reports of the user {user}"), REPORTS_OF_A_USER)])
    }

    /// Takes a place for the stream of a node.
    ///
    /// # Errors
    ///
    /// A refusal, if there is none.
    pub fn stream(&self) -> Result<Place, Refusal> {
        self.take(vec![("streams of nodes to this replica".to_owned(), STREAMS)])
    }

    fn take(&self, counted: Vec<(String, usize)>) -> Result<Place, Refusal> {
        self.0.take(counted).map_err(|why| Refusal::for_now(429, "TooManyRequests", why))
    }
}

/// The rate of a request: a leaky bucket. Times count from any moment.
#[derive(Debug, Clone)]
pub struct Bucket {
    bits_per_second: u64,
    /// The time at which everything has flowed out.
    empty_at: Duration,
}

impl Bucket {
    /// An empty bucket.
    pub const fn new(bits_per_second: u64) -> Self {
        Self { bits_per_second, empty_at: Duration::ZERO }
    }

    /// The time from which bytes can be sent. It changes only in [`Self::take`].
    pub const fn ready_at(&self) -> Duration {
        self.empty_at.saturating_sub(BURST)
    }

    /// Counts bytes that are sent.
    pub fn take(&mut self, bytes: usize, now: Duration) {
        let nanoseconds = (bytes as u128 * 8_000_000_000).div_ceil(u128::from(self.bits_per_second.max(1)));
        let lasts = Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX));
        self.empty_at = self.empty_at.max(now).saturating_add(lasts);
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use proptest::prelude::*;

    use super::*;

    /// Takes places until one is refused. Returns them, and the refusal.
    fn fill(enter: impl Fn(usize) -> Result<Place, Refusal>) -> (Vec<Place>, String) {
        let mut places = Vec::new();
        loop {
            match enter(places.len()) {
                Ok(place) => places.push(place),
                Err(refusal) => {
                    assert_eq!((refusal.code, refusal.retry), (429, Some(5)));
                    return (places, refusal.message);
                }
            }
        }
    }

    #[test]
    fn users_namespaces_and_the_replica_have_places_and_get_them_back() {
        let limits = Limits::default();
        let (of_alice, why) = fill(|number| limits.enter("alice", Some(&format!("shop-{number}"))));
        assert_eq!(of_alice.len(), 5);
        assert!(why.starts_with("5 requests of the user alice are open"), "{why}");
        let (of_shop, why) = fill(|number| limits.enter(&format!("user-{number}"), Some("shop")));
        assert_eq!(of_shop.len(), 20);
        assert!(why.starts_with("20 requests for the namespace shop are open"), "{why}");
        let (rest, why) = fill(|number| limits.enter(&format!("admin-{number}"), None));
        assert_eq!(rest.len(), 75);
        assert!(why.starts_with("100 requests to this replica are open"), "{why}");
        let (streams, why) = fill(|_| limits.stream());
        assert_eq!(streams.len(), 2048);
        assert!(why.starts_with("2048 streams of nodes to this replica are open"), "{why}");
        let (reports, why) = fill(|_| limits.reports("alice"));
        assert_eq!(reports.len(), 3);
        assert!(why.starts_with("3 requests for reports of the user alice are open"), "{why}");
        limits.reports("bob").unwrap();

        drop(of_alice);
        let again = limits.enter("alice", Some("shop-0")).unwrap();
        limits.enter("user-20", Some("shop")).unwrap_err();
        drop((of_shop, rest, streams, reports, again));
        assert!(limits.0.is_empty(), "{limits:?}");
    }

    proptest! {
        #[test]
        fn a_rate_is_kept(
            bits in 1_000..10_000_000_000_u64, chunks in prop::collection::vec((1..262_144_usize, 0..50_000_000_u64), 1..40),
        ) {
            let mut bucket = Bucket::new(bits);
            let (mut now, mut pauses) = (Duration::ZERO, Duration::ZERO);
            let mut sent: Vec<(Duration, usize)> = Vec::new();
            let cost = |bytes: usize| bytes as u128 * 8_000_000_000;
            for (bytes, pause) in chunks {
                let pause = Duration::from_nanos(pause);
                (now, pauses) = ((now + pause).max(bucket.ready_at()), pauses + pause);
                // A request that always has packets gets its rate: it waits no longer than they take.
                let before: u128 = sent.iter().map(|(_, bytes)| cost(*bytes)).sum();
                let latest = pauses.as_nanos() + before / u128::from(bits) + sent.len() as u128;
                prop_assert!(now.as_nanos() <= latest, "{now:?} is after {latest} ns");
                bucket.take(bytes, now);
                sent.push((now, bytes));
            }
            // In no time does it get more: what is sent between two moments fits between them, and into a burst.
            for (index, (begin, _)) in sent.iter().enumerate() {
                let mut bytes = 0;
                for (end, more) in &sent[index..] {
                    let room = u128::from(bits) * (*end - *begin + BURST).as_nanos();
                    prop_assert!(cost(bytes) <= room, "{bytes} bytes from {begin:?} to {end:?}");
                    bytes += more;
                }
            }
        }
    }
}
