//! Describes all pinned maps of the eBPF object, and compares the description with the file of its ABI version.
//!
//! An agent reads the maps of another agent if both have the same ABI version. So the pinned maps of a released version
//! must never change. The description has every pinned map, every type in it with all fields, and the meaning of the
//! numbers in the fields.

use std::{collections::BTreeSet, env, fmt::Write as _, fs, mem::offset_of, path::Path};

use aya_obj::{Object, maps::PinningType};
use mirror_common::{
    abi::ABI_VERSION,
    limit::{Level, TICKS_PER_NS},
    stream::{HEAD, RecordHead, SIZES},
    verdict::{Direction, Misfit, TapKind, Verdict},
};
use mirror_core::model::Origin;

use crate::btf::Btf;

/// The source of the numbers, so that none is left out.
const SOURCE: &str = include_str!("../../../mirror-common/src/abi.rs");

/// Set this variable to write the file.
const WRITE: &str = "PODMIRROR_WRITE_ABI";

#[test]
fn what_is_pinned_is_what_the_abi_version_says() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../mirror-common/abi.txt");
    let described = describe();
    if env::var_os(WRITE).is_some() {
        fs::write(&path, &described).unwrap();
    }
    let expected = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        expected == described,
        "The pinned maps differ from mirror-common/abi.txt. If a release has that ABI version, raise ABI_VERSION in \
         mirror-common/src/abi.rs: agents of that release would read these maps. Then write the file: run this test with \
         {WRITE}=1.\n\n{}",
        difference(&expected, &described),
    );
}

/// The lines that only one of the texts has.
fn difference(old: &str, new: &str) -> String {
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<BTreeSet<_>>();
    let (before, after) = (lines(old), lines(new));
    let only = |sign: char, text: &str, others: &BTreeSet<String>| {
        let lines = text.lines().filter(|line| !others.contains(*line));
        lines.map(|line| format!("{sign}{line}\n")).collect::<String>()
    };
    only('-', old, &after) + &only('+', new, &before)
}

fn describe() -> String {
    let object = Object::parse(aya::include_bytes_aligned!(env!("PODMIRROR_EBPF"))).unwrap();
    let btf = Btf::parse(&object.btf.as_ref().expect("the object has BTF").to_bytes());
    let mut text =
        format!("What podmirror pins in ABI version {ABI_VERSION}. Written by the tests.\n\nMaps\n");
    let mut structs = BTreeSet::new();
    let mut maps: Vec<_> = object.maps.iter().collect();
    maps.sort_by_key(|(name, _)| *name);
    for (name, map) in maps {
        if map.pinning() != PinningType::ByName {
            continue;
        }
        let aya_obj::Map::Btf(btf_map) = map else { panic!("{name} has no BTF") };
        let [key, value] = [btf_map.def.btf_key_type_id, btf_map.def.btf_value_type_id];
        let [key, value] = [key, value].map(|id| {
            btf.structs_in(id, &mut structs);
            btf.type_name(id)
        });
        let (kind, flags) = (kind(map.map_type()), map.map_flags());
        let (keys, values, entries) = (map.key_size(), map.value_size(), map.max_entries());
        let entries = match name.as_str() {
            // The agent sets the number of entries.
            "COUNTERS" => format!("at most {entries}"),
            _ => entries.to_string(),
        };
        writeln!(text, "  {name}: {kind}, {entries} entries, flags {flags:#x}").unwrap();
        writeln!(text, "    key {key}, {keys} bytes; value {value}, {values} bytes").unwrap();
    }
    text += "\nTypes (offset and size in bytes)\n";
    for name in structs {
        let (size, fields) = btf.fields_of(&name);
        writeln!(text, "  {name}, {size}").unwrap();
        for (field, offset, size, of) in fields {
            writeln!(text, "    {offset:>4} {size:>5}  {field}: {of}").unwrap();
        }
    }
    text += "\nNumbers\n";
    for line in SOURCE.lines().filter_map(|line| line.strip_prefix("pub const ")) {
        let whole = line.strip_suffix(';');
        writeln!(text, "  {}", whole.expect("a number and its name are in one line of the source")).unwrap();
    }
    writeln!(text, "  TICKS_PER_NS: u64 = {TICKS_PER_NS}").unwrap();
    for level in Level::ALL {
        let [limits, meters] = [level.limits(0), level.meter(0)];
        writeln!(text, "  level {level:?}: limits from {limits}, meters from {meters}").unwrap();
    }
    // Records are not pinned, but their reader can be of another version than the agent.
    writeln!(text, "  record: head of {HEAD} bytes, sizes {SIZES:?}").unwrap();
    macro_rules! head {
        ($($field:ident),+) => {{
            let RecordHead { $($field: _),+ } = RecordHead::default();
            $(writeln!(text, "    {:>4}  {}", offset_of!(RecordHead, $field), stringify!($field)).unwrap();)+
        }};
    }
    head!(time_ns, serial, session, len, captured, gso_size, direction, vlan_protocol, vlan_tci);
    for direction in Direction::ALL {
        writeln!(text, "  direction {} {}", direction as u32, direction.name()).unwrap();
    }
    for kind in [TapKind::Interface, TapKind::HostVeth] {
        writeln!(text, "  kind of a tap {} {kind:?}", kind.wire()).unwrap();
    }
    for (number, origin) in Origin::ALL.iter().enumerate() {
        writeln!(text, "  origin of a session {number} {}", origin.name()).unwrap();
    }
    for misfit in Misfit::ALL {
        writeln!(text, "  misfit {} {}", misfit as u32, misfit.name()).unwrap();
    }
    for verdict in Verdict::ALL {
        writeln!(text, "  verdict {} {}", verdict as u32, verdict.name()).unwrap();
    }
    text
}

/// The names of the map types that are used (include/uapi/linux/bpf.h).
fn kind(number: u32) -> &'static str {
    match number {
        1 => "hash",
        2 => "array",
        3 => "array of programs",
        6 => "per-CPU array",
        12 => "array of maps",
        number => panic!("a map of type {number}"),
    }
}
