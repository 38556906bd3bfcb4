//! The tree of an expression, between the parser and the code generator.

use std::ops::Range;

/// An expression, and the bytes where it stands.
#[derive(Debug, Clone)]
pub(super) struct Expr {
    pub(super) kind: ExprKind,
    pub(super) span: Range<usize>,
}

#[derive(Debug, Clone)]
pub(super) enum ExprKind {
    And(Box<Expr>, Box<Expr>),
    Or(Box<Expr>, Box<Expr>),
    Not(Box<Expr>),
    Primitive(Primitive),
}

/// A primitive in the sense of the language.
#[derive(Debug, Clone)]
pub(super) enum Primitive {
    /// The name of a protocol alone.
    Protocol(Protocol),
    /// Qualifiers and an id: `tcp dst port 80`.
    Id(Qualifiers, Id),
    Broadcast(Option<Protocol>),
    Multicast(Option<Protocol>),
    /// `vlan`, with or without a number. The following primitives look behind the tag.
    Vlan(Option<u32>),
    /// `left relation right`, as in `tcp[13] & 2 != 0`.
    Relation(Value, Relation, Value),
}

/// The meaning of an id. An id without qualifiers of its own has those of the id before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Qualifiers {
    pub(super) protocol: Option<Protocol>,
    pub(super) direction: Direction,
    pub(super) kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Protocol {
    Ether,
    Ip,
    Ip6,
    Arp,
    Rarp,
    Tcp,
    Udp,
    Sctp,
    Icmp,
    Icmp6,
    Igmp,
    Igrp,
    Pim,
    Vrrp,
    Ah,
    Esp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// No word stands there: the same as `SrcOrDst`, but allowed where a direction makes no sense.
    Either,
    Src,
    Dst,
    SrcOrDst,
    SrcAndDst,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Host,
    Net,
    Port,
    PortRange,
    Proto,
}

#[derive(Debug, Clone)]
pub(super) enum Id {
    Number(u32),
    /// The first `bits` of an address.
    Ipv4 {
        address: u32,
        bits: u32,
    },
    Ipv4Net {
        address: u32,
        mask: u32,
    },
    Ipv6 {
        address: u128,
        prefix: u32,
    },
    Mac([u8; 6]),
    Name(String),
}

/// One side of a relation.
#[derive(Debug, Clone, Copy)]
pub(super) enum Value {
    Constant(u32),
    /// The length of the packet, masked.
    Length {
        mask: u32,
    },
    /// `protocol[offset:size] & mask`.
    Field {
        protocol: Protocol,
        offset: u32,
        size: u8,
        mask: u32,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Relation {
    Greater,
    GreaterOrEqual,
    Equal,
    NotEqual,
    LessOrEqual,
    Less,
}

impl Relation {
    /// The relation with its sides changed.
    pub(super) fn mirrored(self) -> Self {
        match self {
            Self::Greater => Self::Less,
            Self::GreaterOrEqual => Self::LessOrEqual,
            Self::LessOrEqual => Self::GreaterOrEqual,
            Self::Less => Self::Greater,
            Self::Equal | Self::NotEqual => self,
        }
    }
}
