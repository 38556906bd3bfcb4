//! Where the headers of a frame are, for the next primitive. `vlan` and its like move them.

use super::super::{
    ast::Operator,
    value::{Slot, Value},
};

/// The kind of link-layer header that `link_type` belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LinkKind {
    Ethernet,
    /// In a session of PPPoE.
    Ppp,
}

/// A place in the frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    /// What is added to the offset; inside of Geneve the places depend on the frame.
    pub(super) slot: Option<Slot>,
    pub(super) offset: u32,
}

/// The places of the headers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layers {
    pub(super) kind: LinkKind,
    /// The link-layer header.
    pub(super) link: Place,
    /// Its field with the type of what it carries.
    pub(super) link_type: Place,
    /// What it carries.
    pub(super) payload: Place,
    /// The network header, in bytes behind `payload`: labels of MPLS can stand between.
    pub(super) network: u32,
    /// The network header where a header of LLC stands before it, in bytes behind `payload`.
    pub(super) network_behind_llc: u32,
    /// How many labels of MPLS an expression has asked for.
    pub(super) labels: u32,
    /// Whether the packet that is looked at may have no Ethernet header.
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
    /// `size` bytes so many bytes behind the place.
    pub(super) fn at(self, offset: u32, size: u8) -> Value {
        let offset = self.offset.saturating_add(offset);
        match self.slot {
            None => Value::fixed(offset, size),
            Some(slot) => Value::behind(Value::Slot(slot), offset, size),
        }
    }

    /// `size` bytes behind the place, at an index that wraps around.
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
    /// The length of the IPv4 header, and what else has to be added to `payload.offset` and `network` to come to what
    /// stands behind that header.
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

    /// A field behind the IPv4 header.
    pub(super) fn transport(self, offset: u32, size: u8) -> Value {
        Value::behind(self.behind_ipv4(), self.payload.plus(self.network.saturating_add(offset)).offset, size)
    }
}
