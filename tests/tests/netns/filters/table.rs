//! The programs of filters in the kernel's tables: reading them, and writing states that a killed agent could leave.

use std::{collections::BTreeMap, path::PathBuf};

use aya::maps::{Array, HashMap, Map, MapData};
use mirror_agent::kernel::dataplane::filter_programs::{FilterMap, FilterProgram};
use mirror_common::abi::{ABI_VERSION, SessionInfo};
use mirror_core::settings::parse_filter;
use mirror_tests::{Lab, programs_in};
use zerocopy::{FromBytes as _, IntoBytes as _};

/// The maps of the agent's present version.
#[derive(Debug)]
pub(super) struct FilterTable {
    maps: PathBuf,
}

impl FilterTable {
    /// The maps that are pinned on the node.
    pub(super) fn of(lab: &Lab) -> Self {
        Self { maps: lab.bpffs().join(format!("podmirror/v{ABI_VERSION}")) }
    }

    fn path(&self, map: &str) -> PathBuf {
        self.maps.join(map)
    }

    fn map(&self, name: &str) -> Map {
        Map::from_map_data(MapData::from_pin(self.path(name)).unwrap()).unwrap()
    }

    fn hashes(&self) -> Array<MapData, u64> {
        self.map("FILTER_HASHES").try_into().unwrap()
    }

    /// The kernel's id of the program at each used index; empty before an agent has created the map.
    pub(super) fn programs(&self) -> BTreeMap<u32, u32> {
        let path = self.path("FILTERS");
        if path.exists() { programs_in(&path) } else { BTreeMap::new() }
    }

    /// The hash at an index.
    pub(super) fn hash(&self, place: u32) -> u64 {
        self.hashes().get(&place, 0).unwrap()
    }

    /// Writes the hash at an index.
    pub(super) fn put_hash(&self, place: u32, hash: u64) {
        self.hashes().set(place, &hash, 0).unwrap();
    }

    /// Writes a filter at an index, like an agent that is killed before it writes the session.
    pub(super) fn put(&self, place: u32, filter: &str) {
        let program = FilterProgram::load(&parse_filter(filter).unwrap().instructions().unwrap()).unwrap();
        FilterMap::new(self.map("FILTERS")).unwrap().set(place, &program).unwrap();
    }

    /// Writes the filter's text of every session, like an agent that is killed before it writes the tap.
    pub(super) fn put_text(&self, filter: &str) {
        const BYTES: usize = size_of::<SessionInfo>();
        let mut infos: HashMap<MapData, u32, [u8; BYTES]> = self.map("SESSION_INFO").try_into().unwrap();
        let sessions: Vec<u32> = infos.keys().map(Result::unwrap).collect();
        for id in sessions {
            let mut info = SessionInfo::read_from_bytes(&infos.get(&id, 0).unwrap()).unwrap();
            info.filter.fill(0);
            info.filter[..filter.len()].copy_from_slice(filter.as_bytes());
            infos.insert(&id, &<[u8; BYTES]>::try_from(info.as_bytes()).unwrap(), 0).unwrap();
        }
    }
}
