//! The contents of the maps by session and target, and the allocation of places in the tables.
//!
//! Pure. `maps` fills the ledger with the contents that it has read, requests places, and writes the result. Only one
//! agent at a time writes the maps, so the ledger is correct until that agent writes again.

use std::collections::{BTreeMap, BTreeSet};

use mirror_common::abi::{
    self, FILTER_PLACES, FORM_BITS, MAX_FORMS, MAX_SESSIONS, MAX_SESSIONS_PER_TAP, MAX_TAPS, TARGET_PLACES,
};

use crate::{
    model::{Device, MirrorId, Owner, Session, Tap, TapHead, Target, TargetName},
    settings::CaptureFilter,
};

/// The contents of the maps.
#[derive(Debug, Clone, Default)]
pub(super) struct Ledger {
    /// The taps by device.
    pub(super) taps: BTreeMap<Device, Entry>,
    /// The entries of NICs inside pods that are the pod side of a tap on the node side of a veth.
    pub(super) pod_sides: BTreeMap<Device, abi::Tap>,
    /// The taps whose entry differs from what an agent would write for it.
    pub(super) unsettled: BTreeSet<Device>,
    /// The targets by their place in `TARGETS`.
    pub(super) targets: BTreeMap<u32, (TargetName, Target)>,
    /// The filters that sessions use, by their place in `FILTERS`.
    pub(super) filters: BTreeMap<u32, CaptureFilter>,
    /// The places with a filter that no session uses any more. Its program is still there.
    unused_filters: BTreeSet<u32>,
    /// The place where the search for a free filter place starts. A tap program may still call a recently freed filter,
    /// so the search does not start at the first place.
    next_filter: u32,
    /// The highest serial number of a session so far.
    last_serial: u32,
    /// The id where the search for a free id starts.
    next_id: u32,
}

/// An entry of the map of taps.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Entry {
    /// The tap.
    pub(super) head: TapHead,
    /// The place of its pod's meters.
    pub(super) pod_meter: u32,
    /// The place of the meter of its pod's namespace; `None` for an interface without a pod.
    pub(super) namespace_meter: Option<u32>,
    /// Its sessions.
    pub(super) sessions: BTreeMap<MirrorId, Placed>,
}

/// A session and its places in the tables.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Placed {
    /// The session itself.
    pub(super) session: Session,
    /// Its id.
    pub(super) id: u32,
    /// The place of its settings, one of the two that belong to its id.
    pub(super) settings: u32,
    /// Its serial number, which is never reused.
    pub(super) serial: u32,
    /// The place of its target.
    pub(super) target: u32,
    /// The place of its filter.
    pub(super) filter: Option<u32>,
    /// The mark bit of its form; 0 for none.
    pub(super) mark: u32,
}

impl Placed {
    /// The place for its next settings. The current settings stay in use until then.
    pub(super) const fn other_settings(&self) -> u32 {
        if self.settings == self.id { self.id + MAX_SESSIONS } else { self.id }
    }
}

impl Ledger {
    fn placed(&self) -> impl Iterator<Item = &Placed> {
        self.taps.values().flat_map(|entry| entry.sessions.values())
    }

    /// Whether a session may use this place of settings.
    pub(super) fn has_settings(&self, settings: u32) -> bool {
        self.placed().any(|placed| placed.id == settings % MAX_SESSIONS)
    }

    /// Returns an id below `most` that no session has. The search starts after the last id that it returned: a program
    /// may still count or charge a packet for a recently removed session.
    pub(super) fn free_id(&mut self, most: u32) -> Option<u32> {
        let ids = (0..most).map(|offset| (self.next_id + offset) % most);
        let id = free(self.placed().map(|placed| placed.id).collect(), ids)?;
        self.next_id = (id + 1) % most;
        Some(id)
    }

    /// Returns a serial number for a new session.
    pub(super) fn new_serial(&mut self) -> u32 {
        let last = self.placed().map(|placed| placed.serial).max().unwrap_or_default();
        self.last_serial = last.max(self.last_serial) + 1;
        self.last_serial
    }

    /// Returns the place of a target.
    pub(super) fn target(&self, name: &TargetName) -> Option<u32> {
        self.targets.iter().find(|(_, (of, _))| of == name).map(|(place, _)| *place)
    }

    /// Returns the ids of the sessions whose target has this place.
    pub(super) fn sessions_of(&self, target: u32) -> Vec<u32> {
        self.placed().filter(|placed| placed.target == target).map(|placed| placed.id).collect()
    }

    /// Returns a free place for a target.
    pub(super) fn free_target(&self) -> Option<u32> {
        free(self.targets.keys().copied().collect(), 0..TARGET_PLACES)
    }

    /// Returns the place of the meters of a tap's pod, as [`Self::meter`] does. An interface without a pod has its own
    /// meters.
    pub(super) fn pod_meter(&self, device: Device, owner: &Owner) -> Option<(u32, bool)> {
        let is_same = |at: &Device, entry: &Entry| match (&entry.head.owner.pod, &owner.pod) {
            (Some(pod), Some(other)) => pod.uid == other.uid,
            _ => *at == device,
        };
        self.meter(|entry| Some(entry.pod_meter), is_same)
    }

    /// Returns the place of the meter of a namespace, as [`Self::meter`] does. There are as many places as taps.
    pub(super) fn namespace_meter(&self, namespace: &str) -> Option<(u32, bool)> {
        let is_same = |_: &Device, entry: &Entry| {
            entry.head.owner.pod.as_ref().is_some_and(|pod| pod.namespace == namespace)
        };
        self.meter(|entry| entry.namespace_meter, is_same)
    }

    /// Returns the place of the meter that an owner's taps share, or a free one, and whether the place was free.
    fn meter(
        &self,
        place: impl Fn(&Entry) -> Option<u32>,
        is_same: impl Fn(&Device, &Entry) -> bool,
    ) -> Option<(u32, bool)> {
        let mut same = self.taps.iter().filter(|&(device, entry)| is_same(device, entry));
        if let Some(place) = same.find_map(|(_, entry)| place(entry)) {
            return Some((place, false));
        }
        let taken = self.taps.values().filter_map(place).collect();
        Some((free(taken, 0..MAX_TAPS)?, true))
    }

    /// Returns the place of an equal filter.
    pub(super) fn filter(&self, filter: &CaptureFilter) -> Option<u32> {
        self.filters.iter().find(|(_, of)| *of == filter).map(|(place, _)| *place)
    }

    /// Returns a free place for a filter.
    pub(super) fn free_filter(&self) -> Option<u32> {
        let places = (0..FILTER_PLACES).map(|offset| (self.next_filter + offset) % FILTER_PLACES);
        free(self.filters.keys().copied().collect(), places)
    }

    /// Records that a filter was written.
    pub(super) fn put_filter(&mut self, place: u32, filter: CaptureFilter) {
        self.filters.insert(place, filter);
        self.unused_filters.remove(&place);
        self.next_filter = (place + 1) % FILTER_PLACES;
    }

    /// Forgets the filters that no session uses.
    pub(super) fn drop_unused_filters(&mut self) {
        let used: BTreeSet<u32> = self.placed().filter_map(|placed| placed.filter).collect();
        let unused = self.filters.keys().filter(|place| !used.contains(place));
        self.unused_filters.extend(unused);
        self.filters.retain(|place, _| used.contains(place));
    }

    /// Marks every place as unused, because an earlier agent may have left a program there.
    pub(super) fn doubt_filters(&mut self) {
        self.unused_filters = (0..FILTER_PLACES).collect();
    }

    /// Takes the places of programs that no session uses.
    pub(super) fn take_unused_filters(&mut self) -> BTreeSet<u32> {
        let mut unused = std::mem::take(&mut self.unused_filters);
        unused.retain(|place| !self.filters.contains_key(place));
        unused
    }

    /// Returns the mark bit for a form: that of its other sessions, or a free one; 0 if all bits are taken. Sessions
    /// keep their bit, so that the two taps that a packet passes agree on it.
    ///
    /// A capture has no bit: each of its taps shows every packet, and it takes no bit from a mirror.
    pub(super) fn mark(&self, device: Device, mirror: &MirrorId, target: u32, snaplen: Option<u32>) -> u32 {
        if mirror.0.is_capture() {
            return 0;
        }
        let is_alike =
            |placed: &&Placed| placed.target == target && placed.session.settings.snaplen == snaplen;
        if let Some(placed) = self.placed().find(is_alike) {
            return placed.mark;
        }
        // The session that requests a bit leaves its present form.
        let own = self.taps.get(&device).and_then(|entry| entry.sessions.get(mirror));
        let others = self.placed().filter(|placed| Some(placed.id) != own.map(|own| own.id));
        let taken = others.map(|placed| placed.mark).collect();
        let lowest = FORM_BITS.trailing_zeros();
        free(taken, (0..MAX_FORMS as u32).map(|number| 1 << (lowest + number))).unwrap_or(0)
    }
}

impl Entry {
    /// Returns the tap as a type of the model.
    pub(super) fn tap(&self) -> Tap {
        let sessions = self.sessions.iter().map(|(mirror, placed)| (mirror.clone(), placed.session.clone()));
        Tap { head: self.head.clone(), sessions: sessions.collect() }
    }

    /// Returns the sessions in the order in which the programs run them: the first of two with the same form copies.
    pub(super) fn in_order(&self) -> Vec<(&MirrorId, &Placed)> {
        let mut sessions: Vec<_> = self.sessions.iter().collect();
        sessions.sort_by_key(|(mirror, placed)| (placed.session.origin, (*mirror).clone()));
        sessions.truncate(MAX_SESSIONS_PER_TAP);
        sessions
    }
}

/// Returns the first of `places` that is not taken.
fn free(taken: BTreeSet<u32>, mut places: impl Iterator<Item = u32>) -> Option<u32> {
    places.find(|place| !taken.contains(place))
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use mirror_common::verdict::TapKind;
    use proptest::{collection::vec, option, prelude::*};

    use super::*;
    use crate::{
        model::{Directions, IfIndex, Origin, PodId},
        settings::{Settings, parse_filter},
    };

    fn session(snaplen: Option<u32>, filter: Option<&str>) -> Session {
        let filter = filter.map(|text| parse_filter(text).unwrap());
        Session {
            directions: Directions::Both,
            settings: Settings { snaplen, filter, ..Settings::default() },
            target: TargetName::default(),
            origin: Origin::Policy,
            asked: 0,
            key: None,
        }
    }

    /// Puts a session where the ledger says, as `maps` does.
    fn put(ledger: &mut Ledger, ifindex: u32, pod: u32, mirror: &str, target: u32, session: Session) {
        let device = Device::on_node(IfIndex(ifindex));
        let filter = session.settings.filter.as_ref().map(|filter| {
            ledger.filter(filter).unwrap_or_else(|| {
                let place = ledger.free_filter().unwrap();
                ledger.put_filter(place, filter.clone());
                place
            })
        });
        let pod = PodId { uid: pod.to_string(), namespace: (pod % 2).to_string(), ..PodId::default() };
        let owner = Owner { pod: Some(pod), ..Owner::default() };
        let id = ledger.free_id(MAX_SESSIONS).unwrap();
        let mirror = MirrorId(mirror.parse().unwrap());
        let mark = ledger.mark(device, &mirror, target, session.settings.snaplen);
        let namespace = &owner.pod.as_ref().unwrap().namespace;
        let (pod_meter, is_new_pod) = ledger.pod_meter(device, &owner).unwrap();
        let (namespace_meter, is_new_namespace) = ledger.namespace_meter(namespace).unwrap();
        let namespace_meter = Some(namespace_meter);
        assert_eq!(is_new_pod, ledger.taps.values().all(|other| other.pod_meter != pod_meter));
        assert_eq!(
            is_new_namespace,
            ledger.taps.values().all(|other| other.namespace_meter != namespace_meter)
        );
        let head = TapHead::new(owner, TapKind::HostVeth);
        let entry = Entry { head, pod_meter, namespace_meter, sessions: BTreeMap::new() };
        let sessions = &mut ledger.taps.entry(device).or_insert(entry).sessions;
        sessions.insert(mirror, Placed { session, id, settings: id, serial: 0, target, filter, mark });
    }

    proptest! {
        /// Sessions never share an id, taps share a meter only if they have the same pod or namespace, and a form has
        /// the same bit everywhere.
        #[test]
        fn places_are_never_given_twice(
            sessions in vec((1..6u32, 0..3u32, option::of(64..67u32), 0..3usize, any::<bool>()), 1..40),
        ) {
            let mut ledger = Ledger::default();
            for (number, (ifindex, target, snaplen, filter, goes)) in sessions.into_iter().enumerate() {
                let filter = [None, Some("tcp"), Some("udp")][filter];
                put(&mut ledger, ifindex, ifindex / 2, &format!("m{number}"), target, session(snaplen, filter));
                if goes {
                    ledger.taps.remove(&Device::on_node(IfIndex(number as u32 % 5 + 1)));
                    ledger.drop_unused_filters();
                }
                let ids: BTreeSet<_> = ledger.placed().map(|placed| placed.id).collect();
                prop_assert_eq!(ids.len(), ledger.placed().count());
                let used: BTreeSet<_> = ledger.placed().filter_map(|placed| placed.filter).collect();
                prop_assert!(used.iter().all(|place| ledger.filters.contains_key(place)));
                for placed in ledger.placed() {
                    let filter = placed.session.settings.filter.as_ref();
                    prop_assert_eq!(placed.filter.map(|place| &ledger.filters[&place]), filter);
                    prop_assert!(placed.mark == 0 || placed.mark & u32::from(FORM_BITS) == placed.mark);
                }
                for (a, b) in ledger.placed().flat_map(|a| ledger.placed().map(move |b| (a, b))) {
                    let form = |placed: &Placed| (placed.target, placed.session.settings.snaplen);
                    prop_assert!(a.mark == 0 || (a.mark == b.mark) == (form(a) == form(b)));
                }
                for (a, b) in ledger.taps.values().flat_map(|a| ledger.taps.values().map(move |b| (a, b))) {
                    let namespace = |entry: &Entry| entry.head.owner.pod.clone().unwrap().namespace;
                    prop_assert_eq!(a.pod_meter == b.pod_meter, a.head.owner.pod == b.head.owner.pod);
                    prop_assert_eq!(a.namespace_meter == b.namespace_meter, namespace(a) == namespace(b));
                }
            }
        }
    }

    #[test]
    fn the_fifth_form_has_no_bit_until_one_is_free() {
        let mut ledger = Ledger::default();
        for number in 0..5 {
            put(&mut ledger, number + 1, number, "default", 0, session(Some(64 + number), None));
        }
        let marks: Vec<_> = ledger.placed().map(|placed| placed.mark).collect();
        assert_eq!(marks, [0x100, 0x200, 0x400, 0x800, 0]);
        put(&mut ledger, 9, 9, "default", 0, session(Some(65), None));
        assert_eq!(ledger.placed().last().unwrap().mark, 0x200, "as at the other tap");
        ledger.taps.remove(&Device::on_node(IfIndex(1)));
        let mark = |ifindex, snaplen| {
            ledger.mark(Device::on_node(IfIndex(ifindex)), &MirrorId::default(), 0, Some(snaplen))
        };
        assert_eq!(mark(20, 70), 0x100);
        assert_eq!(mark(20, 68), 0, "the sessions of that form have none");
        assert_eq!(mark(3, 66), 0x400, "a session that keeps its form keeps its bit");
        assert_eq!(mark(1, 70), 0x100);
    }

    #[test]
    fn an_id_is_not_given_again_at_once() {
        let mut ledger = Ledger::default();
        for expected in [0, 1, 2, 0, 1] {
            assert_eq!(ledger.free_id(3), Some(expected));
        }
        put(&mut ledger, 1, 1, "default", 0, session(None, None));
        assert_eq!(ledger.placed().next().unwrap().id, 2);
        assert_eq!([ledger.free_id(3), ledger.free_id(3), ledger.free_id(3)], [Some(0), Some(1), Some(0)]);
    }

    #[test]
    fn a_full_table_of_filters_has_no_place_but_for_an_equal_one() {
        let filter = |port: u32| parse_filter(&format!("port {port}")).unwrap();
        let mut ledger = Ledger::default();
        for port in 0..FILTER_PLACES {
            let place = ledger.free_filter().unwrap();
            ledger.put_filter(place, filter(port));
        }
        assert_eq!((ledger.filter(&filter(FILTER_PLACES)), ledger.free_filter()), (None, None));
        assert_eq!(ledger.filter(&filter(3)), Some(3));
    }
}
