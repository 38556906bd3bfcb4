//! The programs that other versions of the agent, older or newer, have left at the hooks, and when the last of them
//! goes.
//!
//! Taps are taken over one by one, as they are wanted. The second stage of another version is not taken over: it cuts
//! the copies of that version's taps only, and stays beside ours until none of those taps runs any more. So no copy
//! stays whole that was to be cut. Then that second stage is detached, and the directory of its version is removed,
//! with its maps.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::Path,
};

use anyhow::Context as _;
use aya::{
    maps::MapInfo,
    programs::{ProgramError, loaded_programs},
};
use mirror_common::abi::ABI_VERSION;
use tracing::info;

use super::{Hooks, clsact, filters::AtHook, tcx};
use crate::{
    dataplane::pins::{LinkPin, Pins},
    model::Program,
};

/// The loaded programs of other versions, by id, and whether each is a program of a tap.
#[derive(Debug, Clone, Default)]
pub(super) struct Others {
    versions: BTreeMap<u32, BTreeMap<u32, bool>>,
}

impl Others {
    /// Reads the pinned maps of the other versions, and which programs use them.
    pub(super) fn look(pins: &Pins) -> anyhow::Result<Self> {
        let mut versions = BTreeMap::new();
        for version in pins.other_versions().context("cannot list the pins")? {
            let maps = maps_in(&pins.maps_of(version)).context("cannot list the pinned maps")?;
            versions.insert(version, users_of(&maps)?);
        }
        Ok(Self { versions })
    }

    /// The same, with the programs of this version.
    pub(super) fn with_own(pins: &Pins) -> anyhow::Result<Self> {
        let mut all = Self::look(pins)?;
        // `cleanup` of a node where only agents of other versions were makes no directory of this one.
        let maps = match maps_in(&pins.maps()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeSet::new(),
            maps => maps.context("cannot list the pinned maps")?,
        };
        all.versions.insert(ABI_VERSION, users_of(&maps)?);
        Ok(all)
    }

    /// Whether it is one of these programs.
    pub(super) fn have(&self, program: u32) -> bool {
        self.versions.values().any(|programs| programs.contains_key(&program))
    }

    /// Leaves out what belongs to another version.
    pub(super) fn leave_out(&self, pins: &mut Vec<LinkPin>, filters: &mut AtHook) {
        if !self.versions.is_empty() {
            pins.retain(LinkPin::is_of_this_version);
            filters.ours.retain(|filter| !self.have(filter.program));
        }
    }
}

impl Hooks {
    /// Removes the remains of other versions that have no running taps, and returns the versions that are left.
    ///
    /// # Errors
    ///
    /// The pins cannot be read, or something cannot be removed.
    pub async fn retire_versions(&self) -> anyhow::Result<BTreeSet<u32>> {
        let Others { versions } = Others::look(&self.pins)?;
        let mut left = BTreeSet::new();
        for (version, programs) in versions {
            let links = self.pins.pinned_links()?.into_iter().filter(|pin| pin.version == version);
            let (deliver, taps): (Vec<_>, Vec<_>) = links.partition(|pin| pin.program == Program::Deliver);
            if !taps.is_empty() || programs.values().any(|is_tap| *is_tap) {
                left.insert(version);
                continue;
            }
            for pin in deliver {
                tcx::remove(&pin.path)?;
            }
            if !programs.is_empty() {
                self.remove_filters_of(&programs).await?;
            }
            self.pins.remove_version(version)?;
            info!(version, "no tap of this other version of the agent is left; removed its pins");
        }
        Ok(left)
    }

    /// Removes the second stages that run these programs.
    async fn remove_filters_of(&self, programs: &BTreeMap<u32, bool>) -> anyhow::Result<()> {
        for ((ifindex, which), AtHook { mut ours, .. }) in self.filters.all().await?.hooks {
            ours.retain(|filter| programs.contains_key(&filter.program));
            if which == Program::Deliver {
                clsact::remove(&ours, ifindex, which)?;
            }
        }
        Ok(())
    }
}

/// Ids of the loaded programs that use the map of taps with this version's pin: the proof that a filter is ours.
///
/// # Errors
///
/// The map cannot be opened.
pub fn programs_of(pins: &Pins) -> anyhow::Result<BTreeSet<u32>> {
    let map = MapInfo::from_pin(pins.maps().join("TAPS")).context("cannot open the map of taps")?.id();
    Ok(users_of(&[map].into())?.into_keys().collect())
}

/// Ids of the maps that are pinned in a directory.
fn maps_in(directory: &Path) -> io::Result<BTreeSet<u32>> {
    let mut maps = BTreeSet::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        // A pin that is no map, or that is removed meanwhile, has no user.
        if !path.is_dir()
            && let Ok(map) = MapInfo::from_pin(&path)
        {
            maps.insert(map.id());
        }
    }
    Ok(maps)
}

/// Ids of the loaded programs that use one of these maps, and whether each is a program of a tap, by its name.
///
/// # Errors
///
/// A program cannot be read, so it is not known whether it is one of them.
fn users_of(maps: &BTreeSet<u32>) -> anyhow::Result<BTreeMap<u32, bool>> {
    let uses = |ids: Option<Vec<u32>>| ids.is_some_and(|ids| ids.iter().any(|id| maps.contains(id)));
    let mut users = BTreeMap::new();
    for program in loaded_programs() {
        let ids = program.and_then(|program| Ok((program.map_ids()?, program)));
        let (ids, program) = match ids {
            Err(ProgramError::SyscallError(error)) if is_gone(&error.io_error) => continue,
            read => read.context("cannot read a loaded program")?,
        };
        if uses(ids) {
            let name = program.name_as_str().unwrap_or_default();
            users.insert(program.id(), name != Program::Deliver.name());
        }
    }
    Ok(users)
}

/// The program has gone while it was read.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
}
