//! Protocols: by name, by number, and by the type in the link-layer header.

use super::{
    super::{
        ast::{Id, IsIsGroup, Llc, Operator, Protocol},
        names,
        tree::Tree,
        value::{Slot, Value},
    },
    Generator, Made,
    layers::LinkKind,
};

/// Maximum value of the field after the addresses that is a length, not a type.
const MAX_ETHERNET_LENGTH: u32 = 1500;
/// The number of headers that `protochain` follows. libpcap follows any number in a loop, but a kernel rejects classic
/// BPF with a loop. A longer chain rejects the packet, as libpcap rejects a chain that does not end in the packet.
const MAX_CHAIN: usize = 8;
/// An offset that no packet has.
const NOWHERE: u32 = i32::MAX as u32;

impl Generator {
    /// Tests whether the link-layer header has this Ethernet type or service access point.
    pub(super) fn link_type(&self, number: u32) -> Made {
        let field = self.layers.link_type.at(0, 2);
        if self.layers.labels > 0 {
            let version = match number {
                names::IP => 0x40,
                names::IP6 => 0x60,
                _ => return Err("behind mpls, only IPv4 and IPv6 are known".to_owned()),
            };
            let version = self.network(0, 1).masked(0xf0, version);
            return Ok(Tree::All(vec![self.bottom_of_labels(true), version]));
        }
        if self.layers.kind == LinkKind::Ppp {
            return Ok(field.equals(names::ppp_type(number)));
        }
        let llc = |offset, size| self.layers.payload.at(offset, size);
        let in_llc = |test| Tree::All(vec![self.has_length(), test]);
        Ok(match number {
            // Both source and destination must match.
            names::ISO | names::IP_IN_LLC | names::NETBEUI => in_llc(llc(0, 2).equals(number << 8 | number)),
            names::IPX => {
                let raw =
                    vec![self.snap(0, names::IPX_II), llc(0, 1).equals(names::IPX), llc(0, 2).equals(0xffff)];
                Tree::Any(vec![field.equals(names::IPX_II), in_llc(Tree::Any(raw))])
            }
            names::ATALK => Tree::Any(vec![field.equals(number), in_llc(self.snap(0x08_0007, number))]),
            names::AARP => Tree::Any(vec![field.equals(number), in_llc(self.snap(0, number))]),
            0..=MAX_ETHERNET_LENGTH => in_llc(self.layers.link_type.at(2, 1).equals(number)),
            _ => field.equals(number),
        })
    }

    /// Tests for a frame with a length in place of a type, so that an LLC header follows.
    fn has_length(&self) -> Tree {
        self.layers.link_type.at(0, 2).within(0, MAX_ETHERNET_LENGTH)
    }

    /// Tests for LLC and SNAP headers with this organisation and type.
    fn snap(&self, organisation: u32, ethertype: u32) -> Tree {
        let start = names::SNAP << 24 | names::SNAP << 16 | 0x03 << 8 | organisation >> 16;
        let rest = organisation << 16 | ethertype;
        let word = |offset| self.layers.payload.at(offset, 4);
        Tree::All(vec![word(4).equals(rest), word(0).equals(start)])
    }

    pub(super) fn llc(&self, llc: Llc) -> Made {
        if self.layers.kind != LinkKind::Ethernet {
            return Err("inside of pppoes there is no LLC".to_owned());
        }
        // Novell's frames without LLC begin with this value.
        let is_raw = self.layers.payload.at(0, 2).equals(0xffff);
        let mut tests = vec![self.has_length(), is_raw.negated()];
        if let Llc::Control { mask, bits } = llc {
            tests.push(self.layers.payload.at(2, 1).masked(mask, bits));
        }
        Ok(Tree::All(tests))
    }

    pub(super) fn ip_protocol(&self, number: u32) -> Made {
        Ok(Tree::All(vec![self.link_type(names::IP)?, self.network(9, 1).equals(number)]))
    }

    /// Tests the next header, also after a fragment header.
    fn ip6_protocol(&self, number: u32) -> Made {
        let next = || self.network(6, 1);
        let fragment = Tree::All(vec![next().equals(names::FRAGMENT), self.network(40, 1).equals(number)]);
        Ok(Tree::All(vec![self.link_type(names::IP6)?, Tree::Any(vec![next().equals(number), fragment])]))
    }

    fn any_ip_protocol(&self, number: u32) -> Made {
        Ok(Tree::Any(vec![self.ip_protocol(number)?, self.ip6_protocol(number)?]))
    }

    fn iso_protocol(&self, number: u32) -> Made {
        let identifier = self.layers.payload.at(self.layers.network_behind_llc, 1);
        Ok(Tree::All(vec![self.link_type(names::ISO)?, identifier.equals(number)]))
    }

    /// Tests for IS-IS packets of these types.
    fn isis(&self, types: &[u32]) -> Made {
        let field = self.layers.payload.at(self.layers.network_behind_llc + 4, 1);
        let types = types.iter().map(|number| field.clone().equals(*number)).collect();
        Ok(Tree::All(vec![self.iso_protocol(names::IS_IS)?, Tree::Any(types)]))
    }

    pub(super) fn protocol(&self, protocol: Protocol) -> Made {
        match protocol {
            Protocol::Ether => Err("ether alone says nothing; every packet here has it".to_owned()),
            Protocol::Ip => self.link_type(names::IP),
            Protocol::Ip6 => self.link_type(names::IP6),
            Protocol::Arp => self.link_type(names::ARP),
            Protocol::Rarp => self.link_type(names::RARP),
            Protocol::Tcp => self.any_ip_protocol(names::TCP),
            Protocol::Udp => self.any_ip_protocol(names::UDP),
            Protocol::Sctp => self.any_ip_protocol(names::SCTP),
            Protocol::Icmp => self.ip_protocol(names::ICMP),
            Protocol::Icmp6 => self.ip6_protocol(names::ICMP6),
            Protocol::Igmp => self.ip_protocol(names::IGMP),
            Protocol::Igrp => self.ip_protocol(names::IGRP),
            Protocol::Pim => self.any_ip_protocol(names::PIM),
            // CARP has the same number as VRRP.
            Protocol::Vrrp | Protocol::Carp => self.ip_protocol(names::VRRP),
            Protocol::Ah => self.any_ip_protocol(names::AH),
            Protocol::Esp => self.any_ip_protocol(names::ESP),
            Protocol::Atalk => self.link_type(names::ATALK),
            Protocol::Aarp => self.link_type(names::AARP),
            Protocol::Decnet => self.link_type(names::DECNET),
            Protocol::Lat => self.link_type(names::LAT),
            Protocol::Sca => self.link_type(names::SCA),
            Protocol::MopDl => self.link_type(names::MOP_DL),
            Protocol::MopRc => self.link_type(names::MOP_RC),
            Protocol::Stp => self.link_type(names::STP),
            Protocol::Ipx => self.link_type(names::IPX),
            Protocol::Netbeui => self.link_type(names::NETBEUI),
            Protocol::Iso => self.link_type(names::ISO),
            Protocol::Clnp => self.iso_protocol(names::CLNP),
            Protocol::EsIs => self.iso_protocol(names::ES_IS),
            Protocol::IsIs => self.iso_protocol(names::IS_IS),
            Protocol::IsIsGroup(group) => self.isis(match group {
                IsIsGroup::Level1 => &[15, 17, 18, 24, 26],
                IsIsGroup::Level2 => &[16, 17, 20, 25, 27],
                IsIsGroup::Hello => &[15, 16, 17],
                IsIsGroup::LinkState => &[18, 20],
                IsIsGroup::SequenceNumbers => &[24, 25, 26, 27],
                IsIsGroup::CompleteSequenceNumbers => &[24, 25],
                IsIsGroup::PartialSequenceNumbers => &[26, 27],
            }),
        }
    }

    /// Generates `ip proto 6`, `ether proto \arp` and the like.
    pub(super) fn numbered_protocol(&self, protocol: Option<Protocol>, id: &Id) -> Made {
        let no_names = |_: &str| None;
        match protocol {
            None => self.any_ip_protocol(number(id, names::ip_protocol)?),
            Some(Protocol::Ip) => self.ip_protocol(number(id, names::ip_protocol)?),
            Some(Protocol::Ip6) => self.ip6_protocol(number(id, names::ip_protocol)?),
            Some(Protocol::Ether) => self.link_type(number(id, names::ethertype)?),
            Some(Protocol::Iso) => self.iso_protocol(number(id, names::iso_protocol)?),
            Some(Protocol::IsIs) => self.isis(&[number(id, no_names)?]),
            Some(_) => Err("only ether, ip, ip6, iso and isis have a protocol number".to_owned()),
        }
    }

    /// Generates `ip6 protochain 6`: the protocol after any chain of extension headers.
    ///
    /// libpcap computes a wrong offset after an authentication header: it uses the header's length as the offset.
    pub(super) fn protocol_chain(&self, protocol: Option<Protocol>, id: &Id) -> Made {
        let wanted = number(id, names::ip_protocol)?;
        match protocol {
            None => Ok(Tree::Any(vec![self.chain(false, wanted)?, self.chain(true, wanted)?])),
            Some(Protocol::Ip) => self.chain(false, wanted),
            Some(Protocol::Ip6) => self.chain(true, wanted),
            Some(_) => Err("only ip and ip6 have a chain of protocols".to_owned()),
        }
    }

    fn chain(&self, is_ip6: bool, wanted: u32) -> Made {
        use Slot::{NextHeader, NextHeaderAt};
        let next = || Value::Slot(NextHeader);
        let network = self.layers.payload.offset.saturating_add(self.layers.network);
        let field = |offset| Value::behind(Value::Slot(NextHeaderAt), network + offset, 1);
        // The length of the header is in units of `bytes`, and does not include `uncounted` of them.
        let advance = |bytes: u32, uncounted: u32| {
            let units = field(1).plus(Value::Constant(uncounted));
            let length = Value::binary(Operator::Multiply, units, Value::Constant(bytes));
            [Tree::Set(NextHeader, field(0)), Tree::Set(NextHeaderAt, length.plus(Value::Slot(NextHeaderAt)))]
        };
        let is_ah = || next().equals(names::AH);
        let is_extension = || Tree::Any(names::EXTENSIONS.map(|number| next().equals(number)).into());
        let is_header = if is_ip6 { Tree::Any(vec![is_ah(), is_extension()]) } else { is_ah() };
        let is_longer = Tree::All(vec![is_header, Value::fixed(NOWHERE, 1).equals(0)]);
        let mut tree = Tree::Any(vec![next().equals(wanted), is_longer]);
        for _ in 0..MAX_CHAIN {
            let [next_header, at] = advance(4, 2);
            let mut headers = vec![Tree::All(vec![is_ah(), next_header, at])];
            if is_ip6 {
                let [next_header, at] = advance(8, 1);
                headers.push(Tree::All(vec![is_extension(), next_header, at]));
            }
            let end = next().equals(names::NO_NEXT_HEADER).negated();
            let behind = Tree::All(vec![end, Tree::Any(headers), tree]);
            tree = Tree::Any(vec![next().equals(wanted), behind]);
        }
        let (link_type, first, start) = if is_ip6 {
            let start = match self.layers.payload.slot {
                None => Value::Constant(40),
                Some(slot) => Value::Slot(slot).plus(Value::Constant(40)),
            };
            (self.link_type(names::IP6)?, self.network(6, 1), start)
        } else {
            (self.link_type(names::IP)?, self.network(9, 1), self.layers.behind_ipv4())
        };
        Ok(Tree::All(vec![link_type, Tree::Set(NextHeader, first), Tree::Set(NextHeaderAt, start), tree]))
    }
}

/// The number of a protocol.
fn number(id: &Id, lookup: impl Fn(&str) -> Option<u32>) -> Result<u32, String> {
    match id {
        Id::Number(number) => Ok(*number),
        Id::Name(name) => lookup(name).ok_or("this protocol is not known, give its number".to_owned()),
        _ => Err("a protocol is a number or a name".to_owned()),
    }
}
