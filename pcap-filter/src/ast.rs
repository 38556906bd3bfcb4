//! The syntax tree of an expression, between the parser and the code generator.

use std::ops::Range;

/// An expression, with its byte range in the text.
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

/// A primitive of the filter language.
#[derive(Debug, Clone)]
pub(super) enum Primitive {
    /// A protocol name without anything else.
    Protocol(Protocol),
    /// Qualifiers and an id: `tcp dst port 80`.
    Id(Qualifiers, Id),
    Broadcast(Option<Protocol>),
    Multicast(Option<Protocol>),
    /// `vlan 100`, `mpls`: a header after which the following primitives look.
    Encapsulation(Encapsulation, Option<u32>),
    /// `pppoed`. It is no encapsulation.
    PppoeDiscovery,
    Llc(Llc),
    /// `left relation right`, as in `tcp[13] & 2 != 0`.
    Relation(Arithmetic, Relation, Arithmetic),
}

/// A header that is followed by another packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Encapsulation {
    Vlan,
    Mpls,
    PppoeSession,
    Geneve,
}

/// The frames of `llc`: any, or those whose control byte has these bits under the mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Llc {
    Any,
    Control { mask: u32, bits: u32 },
}

/// The qualifiers of an id. An id without qualifiers takes the qualifiers of the previous id.
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
    Carp,
    Ah,
    Esp,
    Atalk,
    Aarp,
    Decnet,
    Lat,
    Sca,
    MopDl,
    MopRc,
    Stp,
    Ipx,
    Netbeui,
    Iso,
    Clnp,
    EsIs,
    IsIs,
    /// A group of IS-IS packets, such as `lsp`.
    IsIsGroup(IsIsGroup),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum IsIsGroup {
    Level1,
    Level2,
    Hello,
    LinkState,
    SequenceNumbers,
    CompleteSequenceNumbers,
    PartialSequenceNumbers,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// No direction is given. The same as `SrcOrDst`, but also allowed where a direction has no meaning.
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
    ProtoChain,
}

#[derive(Debug, Clone)]
pub(super) enum Id {
    Number(u32),
    /// The first `bits` bits of an address.
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

/// One side of a relation. The parser has evaluated constant parts.
#[derive(Debug, Clone)]
pub(super) enum Arithmetic {
    Number(u32),
    /// The length of the packet.
    Length,
    /// `protocol[index:size]`.
    Field {
        protocol: Protocol,
        index: Box<Arithmetic>,
        size: u8,
    },
    Negated(Box<Arithmetic>),
    Binary(Operator, Box<Arithmetic>, Box<Arithmetic>),
}

/// The arithmetic operators. Numbers are unsigned, have 32 bits, and wrap around.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Operator {
    /// `+`
    Add,
    /// `-`
    Subtract,
    /// `*`
    Multiply,
    /// `/`: a division by zero rejects the packet.
    Divide,
    /// `%`, the remainder of a division: a division by zero rejects the packet.
    Remainder,
    /// `&`
    And,
    /// `|`
    Or,
    /// `^`
    Xor,
    /// `<<`: a shift by more than 31 bits gives 0.
    ShiftLeft,
    /// `>>`: a shift by more than 31 bits gives 0.
    ShiftRight,
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
    /// The relation with its sides exchanged.
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

impl Operator {
    /// Computes the result. `None`: a division by zero.
    pub(super) fn apply(self, left: u32, right: u32) -> Option<u32> {
        match self {
            Self::Add => Some(left.wrapping_add(right)),
            Self::Subtract => Some(left.wrapping_sub(right)),
            Self::Multiply => Some(left.wrapping_mul(right)),
            Self::Divide => left.checked_div(right),
            Self::Remainder => left.checked_rem(right),
            Self::And => Some(left & right),
            Self::Or => Some(left | right),
            Self::Xor => Some(left ^ right),
            Self::ShiftLeft => Some(left.checked_shl(right).unwrap_or(0)),
            Self::ShiftRight => Some(left.checked_shr(right).unwrap_or(0)),
        }
    }
}
