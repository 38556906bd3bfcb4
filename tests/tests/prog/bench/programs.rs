//! Loaded programs, which one test after the other uses. The verifier needs half a second for each of them, and many
//! seconds in an emulator. A test gets the programs of a test that has passed, with empty maps.

use std::{
    ops::{Deref, DerefMut},
    ptr,
    sync::Mutex,
    thread,
};

use aya::{
    Ebpf, EbpfLoader,
    maps::{MapData, MapType},
    programs::SchedClassifier,
    util::nr_cpus,
};
use mirror_agent::kernel::dataplane::filter_programs::{FilterMap, element};
use mirror_tests::Lab;

/// Programs that no test uses now.
static IDLE: Mutex<Vec<Programs>> = Mutex::new(Vec::new());

/// The eBPF object with loaded tap programs.
struct Programs {
    ebpf: Ebpf,
    filters: FilterMap,
    /// All maps.
    maps: Vec<MapData>,
    calls_filters: bool,
}

impl Programs {
    fn load(lab: &Lab, calls_filters: bool) -> Self {
        let mut ebpf = EbpfLoader::new()
            .default_map_pin_directory(lab.bpffs())
            .override_global("CALLS_FILTERS", &u32::from(calls_filters), true)
            .load(aya::include_bytes_aligned!(env!("PODMIRROR_EBPF")))
            .unwrap();
        for name in ["tap_ingress", "tap_egress"] {
            let program: &mut SchedClassifier = ebpf.program_mut(name).unwrap().try_into().unwrap();
            program.load().unwrap_or_else(|error| panic!("the verifier refuses {name}: {error:#}"));
        }
        // Each map is pinned.
        let maps = lab.pins().iter().map(|pin| MapData::from_pin(pin).unwrap()).collect();
        let filters = FilterMap::new(ebpf.take_map("FILTERS").unwrap()).unwrap();
        Self { ebpf, filters, maps, calls_filters }
    }

    fn emptied(self) -> Self {
        self.maps.iter().for_each(empty);
        self
    }
}

/// The programs of one test. Another test gets them afterwards, unless this one fails.
pub(super) struct Lent(Option<Programs>);

const LENT: &str = "it has programs until it is dropped";

/// Takes idle programs, or loads them. `calls_filters`: whether they may call filters.
pub(super) fn lend(lab: &Lab, calls_filters: bool) -> Lent {
    let idle = if calls_filters { IDLE.lock().unwrap().pop() } else { None };
    Lent(Some(idle.map_or_else(|| Programs::load(lab, calls_filters), Programs::emptied)))
}

impl Lent {
    /// The map `FILTERS`.
    pub(super) fn filters(&mut self) -> &mut FilterMap {
        &mut self.0.as_mut().expect(LENT).filters
    }
}

impl Deref for Lent {
    type Target = Ebpf;

    fn deref(&self) -> &Ebpf {
        &self.0.as_ref().expect(LENT).ebpf
    }
}

impl DerefMut for Lent {
    fn deref_mut(&mut self) -> &mut Ebpf {
        &mut self.0.as_mut().expect(LENT).ebpf
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if !thread::panicking() {
            let again = self.0.take().filter(|programs| programs.calls_filters);
            IDLE.lock().unwrap().extend(again);
        }
    }
}

// Commands of bpf(2).
const MAP_UPDATE_ELEM: libc::c_int = 2;
const MAP_DELETE_ELEM: libc::c_int = 3;
const MAP_GET_NEXT_KEY: libc::c_int = 4;

/// Deletes the elements of a map, or sets those of an array to zero.
fn empty(map: &MapData) {
    let info = map.info().unwrap();
    let indexes = || (0..info.max_entries()).map(u32::to_ne_bytes);
    let size = info.value_size() as usize;
    match info.map_type().unwrap() {
        MapType::Array => zero(map, indexes(), size),
        MapType::PerCpuArray => {
            zero(map, indexes(), size.next_multiple_of(8) * nr_cpus().unwrap().get() as usize)
        }
        MapType::ProgramArray | MapType::ArrayOfMaps => {
            for index in indexes() {
                call(MAP_DELETE_ELEM, map, Some(&index), None);
            }
        }
        MapType::Hash => {
            let mut key = vec![0; info.key_size() as usize];
            // Without a key, the command returns the first one.
            while call(MAP_GET_NEXT_KEY, map, None, Some(&mut key)) {
                call(MAP_DELETE_ELEM, map, Some(&key), None);
            }
        }
        other => panic!("a map of another type: {other:?}"),
    }
}

fn zero(map: &MapData, indexes: impl Iterator<Item = [u8; 4]>, size: usize) {
    let mut zeros = vec![0; size];
    for index in indexes {
        assert!(call(MAP_UPDATE_ELEM, map, Some(&index), Some(&mut zeros)));
    }
}

/// Calls bpf(2) with the key of an element, and with its value or a place for a key. Returns whether the kernel has
/// found the element.
#[track_caller]
fn call(command: libc::c_int, map: &MapData, key: Option<&[u8]>, value: Option<&mut [u8]>) -> bool {
    let key = key.map_or(ptr::null(), <[u8]>::as_ptr);
    let value = value.map_or(ptr::null(), |value| value.as_mut_ptr().cast_const());
    // SAFETY: key and value have the sizes of the map's, and live as long as the call.
    let Err(error) = (unsafe { element(command, map.fd(), key, value) }) else { return true };
    assert_eq!(error.raw_os_error(), Some(libc::ENOENT), "a map cannot be emptied: {error}");
    false
}
