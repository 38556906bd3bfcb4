//! The eBPF object: the layout of its wire types (its BTF) and of the same types on this host, and its length for the
//! verifier.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem::offset_of,
};

use mirror_common::{
    abi::{
        Counter, Delivery, DeviceKey, Session, SessionCounters, SessionInfo, Tap, TapOwner, Target, Tunnel,
    },
    limit::{Limits, Meter},
    tunnel::{TunnelId, Tunnels},
};

use crate::bench::Bench;

/// A field: offset and size in bytes.
type Field = (usize, usize);

/// A struct: its size in bytes and its fields.
#[derive(Debug, PartialEq, Eq)]
struct Layout {
    size: usize,
    fields: BTreeMap<String, Field>,
}

/// The layout of a struct on this host. The macro does not compile if a field is missing.
macro_rules! layout {
    ($type:ident { $($field:ident),+ }) => {{
        let _exhaustive = |$type { $($field: _),+ }: $type| ();
        fn size_of_field<F>(_: fn(&$type) -> &F) -> usize {
            size_of::<F>()
        }
        let fields = [$((
            stringify!($field).to_owned(),
            (offset_of!($type, $field), size_of_field(|value| &value.$field)),
        )),+];
        (stringify!($type), Layout { size: size_of::<$type>(), fields: BTreeMap::from(fields) })
    }};
}

#[test]
fn the_object_and_this_host_agree_on_every_wire_type() {
    let object = aya_obj::Object::parse(aya::include_bytes_aligned!(env!("PODMIRROR_EBPF"))).unwrap();
    let btf = Btf::parse(&object.btf.expect("the object has BTF").to_bytes());
    for (name, layout) in [
        layout!(DeviceKey { netns, ifindex }),
        layout!(Session {
            id,
            settings,
            target,
            directions,
            flags,
            filter,
            sample,
            seed,
            serial,
            snaplen,
            mark,
            alike,
            key
        }),
        layout!(Tap {
            kind,
            flags,
            pod_meter,
            namespace_meter,
            session_count,
            exit,
            bridge,
            other_end,
            sessions
        }),
        layout!(Delivery { snaplen, uncut, target, key, session, direction, hub, code, len, kept }),
        layout!(TapOwner { netns_dev, netns_ino, pod_uid, pod_namespace, pod_name, nic, device, network }),
        layout!(SessionInfo {
            mirror,
            origin,
            asked,
            rate_packets,
            rate_bits,
            burst_ms,
            budget_ms,
            budget_packets,
            budget_bytes,
            filter
        }),
        layout!(Limits { ticks_per_packet, ticks_per_byte, burst_ticks, packets, bytes, ends_ns }),
        layout!(Meter {
            packet_credit,
            byte_credit,
            counted_ns,
            packets,
            bytes,
            ticks_per_packet,
            ticks_per_byte
        }),
        layout!(Target {
            ifindex,
            flags,
            ring,
            name,
            device,
            collector,
            reserved,
            bridge,
            other_end,
            tunnel,
            destination
        }),
        layout!(Tunnel { remote, room, headers, oversize, flags }),
        layout!(Tunnels { count, known }),
        layout!(TunnelId { way, first, last }),
        layout!(Counter { packets, bytes }),
        layout!(SessionCounters { counters, removed }),
    ] {
        assert_eq!(btf.layout(name), layout, "{name}: the object was built with another mirror-common");
    }
}

/// The types of a BTF section, by id (Documentation/bpf/btf.rst).
pub(crate) struct Btf {
    types: Vec<Type>,
}

struct Type {
    name: String,
    kind: u32,
    /// Size in bytes, or the id of the referenced type.
    size_or_type: u32,
    /// For an array: element type, index type, length.
    array: [u32; 3],
    /// For a struct: name, type and offset in bytes.
    members: Vec<(String, u32, usize)>,
}

impl Btf {
    const INT: u32 = 1;
    const ARRAY: u32 = 3;
    const STRUCT: u32 = 4;

    pub(crate) fn parse(bytes: &[u8]) -> Self {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let header = word(4) as usize;
        let [types_at, types_length, strings_at] = [8, 12, 16].map(|at| word(at) as usize);
        let name = |offset: u32| {
            let string = &bytes[header + strings_at + offset as usize..];
            let end = string.iter().position(|&byte| byte == 0).unwrap();
            String::from_utf8(string[..end].to_vec()).unwrap()
        };
        let void = Type { name: String::new(), kind: 0, size_or_type: 0, array: [0; 3], members: Vec::new() };
        let mut types = vec![void];
        let mut at = header + types_at;
        while at < header + types_at + types_length {
            let info = word(at + 4);
            let (kind, count) = (info >> 24 & 0x1f, (info & 0xffff) as usize);
            let words = match kind {
                // int, var, decl_tag
                Self::INT | 14 | 17 => 1,
                Self::ARRAY => 3,
                // struct, union, datasec, enum64
                Self::STRUCT | 5 | 15 | 19 => 3 * count,
                // enum, func_proto
                6 | 13 => 2 * count,
                _ => 0,
            };
            let rest: Vec<u32> = (0..words).map(|index| word(at + 12 + 4 * index)).collect();
            let array = if kind == Self::ARRAY { [rest[0], rest[1], rest[2]] } else { [0; 3] };
            let fields = if kind == Self::STRUCT { &rest[..] } else { &[] };
            let members =
                fields.chunks(3).map(|field| (name(field[0]), field[1], field[2] as usize / 8)).collect();
            types.push(Type { name: name(word(at)), kind, size_or_type: word(at + 8), array, members });
            at += 12 + 4 * words;
        }
        Self { types }
    }

    /// Size in bytes of a type that a field of a wire type may have.
    fn size(&self, id: u32) -> usize {
        let Type { name, kind, size_or_type, array: [element, _, length], .. } = &self.types[id as usize];
        match *kind {
            Self::INT | Self::STRUCT => *size_or_type as usize,
            Self::ARRAY => self.size(*element) * *length as usize,
            kind => panic!("a field of a wire type is of kind {kind} ('{name}')"),
        }
    }

    /// The name of a type in Rust.
    pub(crate) fn type_name(&self, id: u32) -> String {
        let Type { name, kind, array: [element, _, length], .. } = &self.types[id as usize];
        match *kind {
            Self::INT | Self::STRUCT => name.clone(),
            Self::ARRAY => format!("[{}; {length}]", self.type_name(*element)),
            kind => panic!("a pinned type is of kind {kind} ('{name}')"),
        }
    }

    /// Adds the names of the structs in a type, recursively.
    pub(crate) fn structs_in(&self, id: u32, names: &mut BTreeSet<String>) {
        let Type { name, kind, array: [element, ..], members, .. } = &self.types[id as usize];
        match *kind {
            Self::ARRAY => self.structs_in(*element, names),
            Self::STRUCT => {
                names.insert(name.clone());
                members.iter().for_each(|(_, id, _)| self.structs_in(*id, names));
            }
            _ => {}
        }
    }

    /// The size of a struct, and name, offset, size and type of its fields, ordered by offset.
    pub(crate) fn fields_of(&self, name: &str) -> (usize, Vec<(String, usize, usize, String)>) {
        let Type { size_or_type, members, .. } = self.struct_of(name);
        let field = |(name, id, offset): &(String, u32, usize)| {
            (name.clone(), *offset, self.size(*id), self.type_name(*id))
        };
        let mut fields: Vec<_> = members.iter().map(field).collect();
        fields.sort_by_key(|(_, offset, ..)| *offset);
        (*size_or_type as usize, fields)
    }

    fn layout(&self, name: &str) -> Layout {
        let (size, fields) = self.fields_of(name);
        let fields = fields.into_iter().map(|(name, offset, size, _)| (name, (offset, size)));
        Layout { size, fields: fields.collect() }
    }

    fn struct_of(&self, name: &str) -> &Type {
        let mut found =
            self.types.iter().filter(|candidate| candidate.kind == Self::STRUCT && candidate.name == name);
        let Some(found_first) = found.next() else { panic!("no struct {name} in the object") };
        assert!(found.next().is_none(), "more than one struct {name} in the object");
        found_first
    }
}

/// The verifier processes at most a million instructions of a program, and each instruction once for every path to it.
/// A program above this bound delays each start of the agent, and each tap inside a pod.
#[test]
fn the_verifier_has_room_for_eight_sessions() {
    let mut bench = Bench::new("verifier");
    for name in ["tap_ingress", "tap_egress"] {
        if let Some(verified) = bench.verified(name) {
            assert!(verified < 150_000, "{name}: {verified}");
        }
    }
}
