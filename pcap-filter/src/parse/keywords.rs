//! The keywords of the language.

use super::super::ast::{Direction, IsIsGroup, Kind, Protocol};

/// The meaning of a keyword. Keywords of libpcap that are not supported are included.
pub(super) enum Keyword {
    Protocol(Protocol),
    Direction(Direction),
    Kind(Kind),
    /// A keyword with a grammar of its own.
    Other,
    /// The reason why it is not supported.
    Unsupported(&'static str),
}

/// Returns the keyword with this spelling.
pub(super) fn keyword(word: &str) -> Option<Keyword> {
    Some(match word {
        "src" => Keyword::Direction(Direction::Src),
        "dst" => Keyword::Direction(Direction::Dst),
        "host" => Keyword::Kind(Kind::Host),
        "net" => Keyword::Kind(Kind::Net),
        "port" => Keyword::Kind(Kind::Port),
        "portrange" => Keyword::Kind(Kind::PortRange),
        "proto" => Keyword::Kind(Kind::Proto),
        "protochain" => Keyword::Kind(Kind::ProtoChain),
        "broadcast" | "multicast" | "less" | "greater" | "byte" | "len" | "length" | "mask" | "vlan"
        | "mpls" | "pppoed" | "pppoes" | "geneve" | "llc" | "rnr" => Keyword::Other,
        _ => match protocol(word) {
            Some(protocol) => Keyword::Protocol(protocol),
            None => Keyword::Unsupported(unsupported(word)?),
        },
    })
}

fn protocol(word: &str) -> Option<Protocol> {
    Some(match word {
        "ether" | "link" => Protocol::Ether,
        "ip" => Protocol::Ip,
        "ip6" => Protocol::Ip6,
        "arp" => Protocol::Arp,
        "rarp" => Protocol::Rarp,
        "tcp" => Protocol::Tcp,
        "udp" => Protocol::Udp,
        "sctp" => Protocol::Sctp,
        "icmp" => Protocol::Icmp,
        "icmp6" => Protocol::Icmp6,
        "igmp" => Protocol::Igmp,
        "igrp" => Protocol::Igrp,
        "pim" => Protocol::Pim,
        "vrrp" => Protocol::Vrrp,
        "carp" => Protocol::Carp,
        "ah" => Protocol::Ah,
        "esp" => Protocol::Esp,
        "atalk" => Protocol::Atalk,
        "aarp" => Protocol::Aarp,
        "decnet" => Protocol::Decnet,
        "lat" => Protocol::Lat,
        "sca" => Protocol::Sca,
        "mopdl" => Protocol::MopDl,
        "moprc" => Protocol::MopRc,
        "stp" => Protocol::Stp,
        "ipx" => Protocol::Ipx,
        "netbeui" => Protocol::Netbeui,
        "iso" => Protocol::Iso,
        "clnp" => Protocol::Clnp,
        "esis" | "es-is" => Protocol::EsIs,
        "isis" | "is-is" => Protocol::IsIs,
        "l1" => Protocol::IsIsGroup(IsIsGroup::Level1),
        "l2" => Protocol::IsIsGroup(IsIsGroup::Level2),
        "iih" => Protocol::IsIsGroup(IsIsGroup::Hello),
        "lsp" => Protocol::IsIsGroup(IsIsGroup::LinkState),
        "snp" => Protocol::IsIsGroup(IsIsGroup::SequenceNumbers),
        "csnp" => Protocol::IsIsGroup(IsIsGroup::CompleteSequenceNumbers),
        "psnp" => Protocol::IsIsGroup(IsIsGroup::PartialSequenceNumbers),
        _ => return None,
    })
}

/// Why a keyword of libpcap is not supported. `None`: libpcap has no such keyword.
fn unsupported(word: &str) -> Option<&'static str> {
    Some(match word {
        "inbound" | "outbound" => "a filter sees no direction: choose the direction in its own setting",
        "ifindex" => "a filter sees no device: choose the device in its own setting",
        "gateway" => "this needs the name of a host, and names are not looked up",
        "ppp" | "slip" | "fddi" | "tr" | "wlan" => "the packets here are Ethernet frames; write ether",
        "type" | "subtype" | "dir" | "direction" | "addr1" | "address1" | "addr2" | "address2" | "addr3"
        | "address3" | "addr4" | "address4" | "ra" | "ta" | "radio" => {
            "this is a word for Wi-Fi, and the packets here are Ethernet frames"
        }
        "on" | "ifname" | "rset" | "ruleset" | "rulenum" | "srnr" | "subrulenum" | "reason" | "action" => {
            "this is a word for the logs of OpenBSD's packet filter"
        }
        "lane" | "metac" | "bcc" | "oam" | "oamf4" | "oamf4ec" | "oamf4sc" | "sc" | "ilmic" | "vpi"
        | "vci" | "connectmsg" | "metaconnect" => {
            "this is a word for ATM, and the packets here are Ethernet frames"
        }
        "fisu" | "lssu" | "lsu" | "msu" | "hfisu" | "hlssu" | "hmsu" | "sio" | "opc" | "dpc" | "sls"
        | "hsio" | "hopc" | "hdpc" | "hsls" => {
            "this is a word for SS7, and the packets here are Ethernet frames"
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The chart rejects a filter with any other word when it is rendered.
    #[test]
    fn the_chart_knows_every_word_of_the_language_and_no_other() {
        let of_chart =
            include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/chart/files/filter-words.txt"));
        let of_chart: BTreeSet<_> = of_chart.lines().collect();
        let quoted = |source: &'static str| source.split('"').skip(1).step_by(2);
        let source = include_str!("keywords.rs").split("fn unsupported").next().unwrap_or_default();
        let mut words: BTreeSet<_> = quoted(source).filter(|word| keyword(word).is_some()).collect();
        let llc = include_str!("words.rs").split("let (mask, bits)").nth(1).unwrap_or_default();
        words.extend(quoted(llc).take_while(|word| !word.contains(' ')));
        let names = include_str!("../names.rs");
        words.extend(quoted(names).filter(|word| !word.is_empty() && !word.contains(' ')));
        words.extend(["and", "not", "or"]);
        let is_word = |word: &&str| word.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        words.retain(|word| is_word(word));
        assert_eq!(of_chart, words);
    }
}
