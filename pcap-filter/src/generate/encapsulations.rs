//! `vlan`, `mpls`, `pppoes` and `geneve`. The primitives to the right of one of these look behind its header.

use super::{
    super::{
        ast::{Direction, Encapsulation, Operator},
        names,
        tree::Tree,
        value::{Slot, Value},
    },
    Generator, Made,
    layers::{LinkKind, Place},
};

const GENEVE_PORT: u32 = 6081;
const UDP_HEADER: u32 = 8;
const GENEVE_HEADER: u32 = 8;
const IP6_HEADER: u32 = 40;

impl Generator {
    pub(super) fn encapsulation(&mut self, encapsulation: Encapsulation, number: Option<u32>) -> Made {
        let (greatest, what) = match encapsulation {
            Encapsulation::Vlan => (0xfff, "a VLAN id"),
            Encapsulation::Mpls => (0xf_ffff, "a label of MPLS"),
            Encapsulation::PppoeSession => (0xffff, "a session of PPPoE"),
            Encapsulation::Geneve => (0xff_ffff, "a network of Geneve"),
        };
        if number.is_some_and(|number| number > greatest) {
            return Err(format!("{what} is {greatest} at most"));
        }
        match encapsulation {
            Encapsulation::Vlan => self.vlan(number),
            Encapsulation::Mpls => self.mpls(number),
            Encapsulation::PppoeSession => self.pppoe_session(number),
            Encapsulation::Geneve => self.geneve(number),
        }
    }

    fn vlan(&mut self, id: Option<u32>) -> Made {
        if self.layers.labels > 0 {
            return Err("behind mpls, vlan is not known".to_owned());
        }
        if self.layers.kind != LinkKind::Ethernet {
            return Err("inside of pppoes there is no vlan".to_owned());
        }
        let tags = names::VLAN.map(|ethertype| self.link_type(ethertype));
        let mut tests = vec![Tree::Any(tags.into_iter().collect::<Result<_, _>>()?)];
        tests.extend(id.map(|id| self.network(0, 2).masked(0xfff, id)));
        self.layers.link_type = self.layers.link_type.plus(4);
        self.layers.payload = self.layers.payload.plus(4);
        Ok(Tree::All(tests))
    }

    fn mpls(&mut self, label: Option<u32>) -> Made {
        let mut tests = vec![match (self.layers.labels, self.layers.kind) {
            (0, LinkKind::Ethernet) => self.link_type(names::MPLS)?,
            (0, LinkKind::Ppp) => self.link_type(names::PPP_MPLS)?,
            _ => self.bottom_of_labels(false),
        }];
        tests.extend(label.map(|label| self.network(0, 4).masked(0xffff_f000, label << 12)));
        self.layers.network += 4;
        self.layers.network_behind_llc += 4;
        self.layers.labels += 1;
        Ok(Tree::All(tests))
    }

    /// Tests whether the label just before the network header is the last one.
    pub(super) fn bottom_of_labels(&self, is_bottom: bool) -> Tree {
        self.layers.payload.at(self.layers.network.saturating_sub(2), 1).masked(0x01, is_bottom.into())
    }

    fn pppoe_session(&mut self, session: Option<u32>) -> Made {
        let mut tests = vec![self.link_type(names::PPPOE_SESSION)?];
        tests.extend(session.map(|session| self.network(0, 4).masked(0xffff, session)));
        let ppp = self.layers.payload.plus(self.layers.network + 6);
        self.layers.kind = LinkKind::Ppp;
        self.layers.link = ppp;
        self.layers.link_type = ppp;
        self.layers.payload = ppp.plus(2);
        self.layers.network = 0;
        self.layers.network_behind_llc = 0;
        self.layers.in_geneve = false;
        Ok(Tree::All(tests))
    }

    /// Generates the tests of `geneve`. The places inside Geneve depend on the length of its header, so the program
    /// stores them in slots.
    ///
    /// libpcap does the same. But if a frame is not Geneve and a primitive to the right is evaluated nevertheless
    /// (`geneve or tcp`), its program reads slots that were never set. Here such a primitive looks at the same place as
    /// without `geneve`.
    fn geneve(&mut self, network: Option<u32>) -> Made {
        let outside = self.layers;
        let places = [
            (Slot::Link, outside.link),
            (Slot::LinkType, outside.link_type),
            (Slot::Payload, outside.payload.plus(outside.network)),
        ];
        for (slot, Place { slot: inside, offset }) in places {
            // For Geneve inside Geneve, the slots are already set.
            if inside.is_none() {
                self.prepared.push(Tree::Set(slot, Value::Constant(offset)));
            }
        }
        let ip6_header = match outside.payload.slot {
            None => Value::Constant(IP6_HEADER),
            Some(slot) => Value::Slot(slot).plus(Value::Constant(IP6_HEADER)),
        };
        let ports = (GENEVE_PORT, GENEVE_PORT);
        let over4 = Tree::All(vec![
            self.link_type(names::IP)?,
            self.ports4(names::UDP, Direction::Dst, ports),
            self.geneve_header(outside.behind_ipv4(), network),
        ]);
        let over6 = Tree::All(vec![
            self.link_type(names::IP6)?,
            self.ports6(names::UDP, Direction::Dst, ports),
            self.geneve_header(ip6_header, network),
        ]);
        let inside = |slot| Place { slot: Some(slot), offset: 0 };
        self.layers.kind = LinkKind::Ethernet;
        self.layers.link = inside(Slot::Link);
        self.layers.link_type = inside(Slot::LinkType);
        self.layers.payload = inside(Slot::Payload);
        self.layers.network = 0;
        // libpcap still looks for the end of the outer labels, so no packet matches.
        self.layers.labels = 0;
        self.layers.in_geneve = true;
        Ok(Tree::All(vec![Tree::Any(vec![over4, over6]), inside_of_geneve()]))
    }

    /// The tests of the Geneve header after UDP. If they pass, the payload slot has the offset of that header. `start`:
    /// the length of the IP header, as [`super::layers::Layers::behind_ipv4`] counts it.
    fn geneve_header(&self, start: Value, network: Option<u32>) -> Tree {
        let header = self.layers.payload.offset + self.layers.network + UDP_HEADER;
        let field = |offset, size| Value::behind(start.clone(), header + offset, size);
        let mut tests = vec![field(0, 1).masked(0xc0, 0)];
        tests.extend(network.map(|network| field(4, 4).masked(0xffff_ff00, network << 8)));
        tests.push(Tree::Set(Slot::Payload, start.plus(Value::Constant(header))));
        Tree::All(tests)
    }
}

/// Sets the slots for the packet inside Geneve. The payload slot has the offset of the Geneve header.
fn inside_of_geneve() -> Tree {
    let header = || Value::Slot(Slot::Payload);
    let behind = |slot, bytes| Value::Slot(slot).plus(Value::Constant(bytes));
    let options = Value::binary(Operator::And, Value::behind(header(), 0, 1), Value::Constant(0x3f));
    let bytes = Value::binary(Operator::ShiftLeft, options, Value::Constant(2));
    let end = bytes.plus(header()).plus(Value::Constant(GENEVE_HEADER));
    let ethernet = vec![
        Value::behind(header(), 2, 2).equals(names::ETHERNET),
        Tree::Set(Slot::LinkType, behind(Slot::Link, 12)),
        Tree::Set(Slot::Payload, behind(Slot::Link, 14)),
    ];
    let bare = vec![
        Tree::Set(Slot::LinkType, behind(Slot::Payload, 2)),
        Tree::Set(Slot::Payload, Value::Slot(Slot::Link)),
    ];
    Tree::All(vec![Tree::Set(Slot::Link, end), Tree::Any(vec![Tree::All(ethernet), Tree::All(bare)])])
}
