//! The places where the next primitive looks for a frame's headers. `vlan`, `mpls`, `pppoes` and `geneve` move
//! them.

use super::super::{
    ast::Operator,
    value::{Slot, Value},
};

/// The kind of link-layer header that contains `link_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LinkKind {
    Ethernet,
    /// A session of PPPoE.
    Ppp,
}

/// A place in the frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    /// The slot whose value is added to the offset. Inside Geneve, places depend on the frame.
    pub(super) slot: Option<Slot>,
    pub(super) offset: u32,
}

/// The places of the headers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layers {
    pub(super) kind: LinkKind,
    /// The link-layer header.
    pub(super) link: Place,
    /// The field of the link-layer header with the type of its payload.
    pub(super) link_type: Place,
    /// The payload of the link-layer header.
    pub(super) payload: Place,
    /// Offset of the network header from `payload`, in bytes. MPLS labels can be between them.
    pub(super) network: u32,
    /// Offset of the network header from `payload` if there is an LLC header, in bytes.
    pub(super) network_behind_llc: u32,
    /// The number of MPLS labels in the expression so far.
    pub(super) labels: u32,
    /// Whether the current packet can lack an Ethernet header.
    pub(super) in_geneve: bool,
}

impl Default for Layers {
    fn default() -> Self {
        let fixed = |offset| Place { slot: None, offset };
        Self {
            kind: LinkKind::Ethernet,
            link: fixed(0),
            link_type: fixed(12),
            payload: fixed(14),
            network: 0,
            network_behind_llc: 3,
            labels: 0,
            in_geneve: false,
        }
    }
}

impl Place {
    /// `size` bytes at this offset from the place.
    pub(super) fn at(self, offset: u32, size: u8) -> Value {
        let offset = self.offset.saturating_add(offset);
        match self.slot {
            None => Value::fixed(offset, size),
            Some(slot) => Value::behind(Value::Slot(slot), offset, size),
        }
    }

    /// `size` bytes at an index from the place. The index wraps around.
    pub(super) fn indexed(self, index: Value, size: u8) -> Value {
        let start = match self.slot {
            None => index,
            Some(slot) => index.plus(Value::Slot(slot)),
        };
        Value::behind(start, self.offset, size)
    }

    pub(super) fn plus(self, bytes: u32) -> Self {
        Self { offset: self.offset.saturating_add(bytes), ..self }
    }
}

impl Layers {
    /// The length of the IPv4 header, plus the value of the place's slot. Together with `payload.offset` and `network`
    /// this is the offset of the data after the header.
    pub(super) fn behind_ipv4(self) -> Value {
        let at = self.payload.plus(self.network);
        match at.slot {
            None => Value::Ipv4Header(at.offset),
            Some(slot) => {
                let words = Value::binary(Operator::And, at.at(0, 1), Value::Constant(0x0f));
                Value::binary(Operator::ShiftLeft, words, Value::Constant(2)).plus(Value::Slot(slot))
            }
        }
    }

    /// A field after the IPv4 header.
    pub(super) fn transport(self, offset: u32, size: u8) -> Value {
        Value::behind(self.behind_ipv4(), self.payload.plus(self.network.saturating_add(offset)).offset, size)
    }
}
