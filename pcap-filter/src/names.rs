//! Names of numbers: flags and types (pcap-filter(7)), protocols and services (IANA).
//!
//! The lists are short and built in, so that a filter has the same meaning on every node. The files in /etc are not
//! read.

/// Returns the number for a name that is allowed wherever a number is.
pub(super) fn number(word: &str) -> Option<u32> {
    find(NUMBERS, word)
}

/// Returns the number of an IP protocol.
pub(super) fn ip_protocol(name: &str) -> Option<u32> {
    find(IP_PROTOCOLS, name)
}

/// Returns the number of an Ethernet protocol.
pub(super) fn ethertype(name: &str) -> Option<u32> {
    find(ETHERTYPES, name)
}

/// Returns the port of a service, and its IP protocol if it uses only one. `None` there: any protocol with ports.
pub(super) fn service(name: &str) -> Option<(u32, Option<u32>)> {
    SERVICES.iter().find(|(known, ..)| *known == name).map(|(_, port, protocol)| (*port, *protocol))
}

fn find(table: &[(&str, u32)], name: &str) -> Option<u32> {
    table.iter().find(|(known, _)| *known == name).map(|(_, number)| *number)
}

const NUMBERS: &[(&str, u32)] = &[
    ("tcpflags", 13),
    ("tcp-fin", 0x01),
    ("tcp-syn", 0x02),
    ("tcp-rst", 0x04),
    ("tcp-push", 0x08),
    ("tcp-ack", 0x10),
    ("tcp-urg", 0x20),
    ("tcp-ece", 0x40),
    ("tcp-cwr", 0x80),
    ("icmptype", 0),
    ("icmpcode", 1),
    ("icmp-echoreply", 0),
    ("icmp-unreach", 3),
    ("icmp-sourcequench", 4),
    ("icmp-redirect", 5),
    ("icmp-echo", 8),
    ("icmp-routeradvert", 9),
    ("icmp-routersolicit", 10),
    ("icmp-timxceed", 11),
    ("icmp-paramprob", 12),
    ("icmp-tstamp", 13),
    ("icmp-tstampreply", 14),
    ("icmp-ireq", 15),
    ("icmp-ireqreply", 16),
    ("icmp-maskreq", 17),
    ("icmp-maskreply", 18),
    ("icmp6type", 0),
    ("icmp6code", 1),
    ("icmp6-destinationunreach", 1),
    ("icmp6-packettoobig", 2),
    ("icmp6-timeexceeded", 3),
    ("icmp6-parameterproblem", 4),
    ("icmp6-echo", 128),
    ("icmp6-echoreply", 129),
    ("icmp6-multicastlistenerquery", 130),
    ("icmp6-multicastlistenerreportv1", 131),
    ("icmp6-multicastlistenerdone", 132),
    ("icmp6-routersolicit", 133),
    ("icmp6-routeradvert", 134),
    ("icmp6-neighborsolicit", 135),
    ("icmp6-neighboradvert", 136),
    ("icmp6-redirect", 137),
    ("icmp6-routerrenum", 138),
    ("icmp6-nodeinformationquery", 139),
    ("icmp6-nodeinformationresponse", 140),
    ("icmp6-ineighbordiscoverysolicit", 141),
    ("icmp6-ineighbordiscoveryadvert", 142),
    ("icmp6-multicastlistenerreportv2", 143),
    ("icmp6-homeagentdiscoveryrequest", 144),
    ("icmp6-homeagentdiscoveryreply", 145),
    ("icmp6-mobileprefixsolicit", 146),
    ("icmp6-mobileprefixadvert", 147),
    ("icmp6-certpathsolicit", 148),
    ("icmp6-certpathadvert", 149),
    ("icmp6-multicastrouteradvert", 151),
    ("icmp6-multicastroutersolicit", 152),
    ("icmp6-multicastrouterterm", 153),
];

pub(super) const ICMP: u32 = 1;
pub(super) const IGMP: u32 = 2;
pub(super) const TCP: u32 = 6;
pub(super) const IGRP: u32 = 9;
pub(super) const UDP: u32 = 17;
pub(super) const ESP: u32 = 50;
pub(super) const AH: u32 = 51;
pub(super) const ICMP6: u32 = 58;
pub(super) const PIM: u32 = 103;
pub(super) const VRRP: u32 = 112;
pub(super) const SCTP: u32 = 132;
/// The next-header number of an IPv6 fragment.
pub(super) const FRAGMENT: u32 = 44;
/// The IPv6 extension headers whose length is in units of 8 bytes (a fragment's is always 8): hop-by-hop options,
/// routing, fragment, destination options.
pub(super) const EXTENSIONS: [u32; 4] = [0, 43, FRAGMENT, 60];
/// No header follows.
pub(super) const NO_NEXT_HEADER: u32 = 59;

const IP_PROTOCOLS: &[(&str, u32)] = &[
    ("icmp", ICMP),
    ("igmp", IGMP),
    ("ipencap", 4),
    ("tcp", TCP),
    ("udp", UDP),
    ("ipv6", 41),
    ("gre", 47),
    ("esp", ESP),
    ("ah", AH),
    ("ipv6-icmp", ICMP6),
    ("ospf", 89),
    ("pim", PIM),
    ("vrrp", VRRP),
    ("l2tp", 115),
    ("sctp", SCTP),
];

pub(super) const IP: u32 = 0x0800;
pub(super) const ARP: u32 = 0x0806;
pub(super) const RARP: u32 = 0x8035;
pub(super) const IP6: u32 = 0x86dd;
pub(super) const MOP_DL: u32 = 0x6001;
pub(super) const MOP_RC: u32 = 0x6002;
pub(super) const DECNET: u32 = 0x6003;
pub(super) const LAT: u32 = 0x6004;
pub(super) const SCA: u32 = 0x6007;
/// Ethernet in a tunnel.
pub(super) const ETHERNET: u32 = 0x6558;
pub(super) const ATALK: u32 = 0x809b;
pub(super) const AARP: u32 = 0x80f3;
pub(super) const IPX_II: u32 = 0x8137;
pub(super) const MPLS: u32 = 0x8847;
pub(super) const PPPOE_DISCOVERY: u32 = 0x8863;
pub(super) const PPPOE_SESSION: u32 = 0x8864;
/// 802.1Q, 802.1ad, and the older type for QinQ.
pub(super) const VLAN: [u32; 3] = [0x8100, 0x88a8, 0x9100];

/// Service access points of LLC that are used like Ethernet types.
pub(super) const IP_IN_LLC: u32 = 0x06;
pub(super) const STP: u32 = 0x42;
pub(super) const SNAP: u32 = 0xaa;
pub(super) const IPX: u32 = 0xe0;
pub(super) const NETBEUI: u32 = 0xf0;
pub(super) const ISO: u32 = 0xfe;

const ETHERTYPES: &[(&str, u32)] = &[
    ("ip", IP),
    ("arp", ARP),
    ("rarp", RARP),
    ("ip6", IP6),
    ("loopback", 0x9000),
    ("aarp", AARP),
    ("atalk", ATALK),
    ("decnet", DECNET),
    ("lat", LAT),
    ("mopdl", MOP_DL),
    ("moprc", MOP_RC),
    ("sca", SCA),
    ("iso", ISO),
    ("stp", STP),
    ("ipx", IPX),
    ("netbeui", NETBEUI),
];

/// PPP's numbers for protocols that have other numbers in Ethernet or LLC.
const PPP_TYPES: &[(u32, u32)] = &[
    (IP, 0x0021),
    (ISO, 0x0023),
    (0x0600, 0x0025),
    (DECNET, 0x0027),
    (ATALK, 0x0029),
    (IPX, 0x002b),
    (STP, 0x0031),
    (IP6, 0x0057),
];
pub(super) const PPP_MPLS: u32 = 0x0281;

/// Returns PPP's number for an Ethernet type.
pub(super) fn ppp_type(ethertype: u32) -> u32 {
    PPP_TYPES.iter().find(|(known, _)| *known == ethertype).map_or(ethertype, |(_, number)| *number)
}

pub(super) const CLNP: u32 = 0x81;
pub(super) const ES_IS: u32 = 0x82;
pub(super) const IS_IS: u32 = 0x83;

const ISO_PROTOCOLS: &[(&str, u32)] = &[("clnp", CLNP), ("esis", ES_IS), ("isis", IS_IS)];

/// Returns the number of an ISO protocol.
pub(super) fn iso_protocol(name: &str) -> Option<u32> {
    find(ISO_PROTOCOLS, name)
}

const SERVICES: &[(&str, u32, Option<u32>)] = &[
    ("ftp", 21, Some(TCP)),
    ("ssh", 22, Some(TCP)),
    ("telnet", 23, Some(TCP)),
    ("smtp", 25, Some(TCP)),
    ("domain", 53, None),
    ("bootps", 67, Some(UDP)),
    ("bootpc", 68, Some(UDP)),
    ("tftp", 69, Some(UDP)),
    ("http", 80, Some(TCP)),
    ("pop3", 110, Some(TCP)),
    ("ntp", 123, Some(UDP)),
    ("imap2", 143, Some(TCP)),
    ("snmp", 161, None),
    ("bgp", 179, Some(TCP)),
    ("ldap", 389, None),
    ("https", 443, None),
    ("syslog", 514, Some(UDP)),
];
