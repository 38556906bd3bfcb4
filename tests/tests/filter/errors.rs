//! Error messages: each names the wrong part of the filter and its position.

use mirror_core::filter::compile;

#[test]
fn each_error_names_the_part_and_its_place() {
    for (text, position, part, reason) in [
        ("host example.com", 0, "host example.com", "names are not looked up"),
        ("tcp port 80 or host web", 15, "host web", "names are not looked up"),
        ("tcp port 80 or", 14, "", "expected"),
        ("tcp prot 80", 4, "prot", "expected 'and', 'or' or the end"),
        ("tcp port 65536", 0, "tcp port 65536", "65535 at most"),
        ("icmp port 7", 0, "icmp port 7", "only tcp, udp and sctp"),
        ("udp port http", 0, "udp port http", "another protocol"),
        ("port nosuchservice", 0, "port nosuchservice", "not known"),
        ("net 10.0.0.1/8", 4, "10.0.0.1/8", "bits behind the mask"),
        ("net 10.0.0.0/33", 13, "33", "prefix length from 0 to 32"),
        ("net fe80::1/10", 4, "fe80::1/10", "bits behind the prefix"),
        ("host 10.0.0.256", 5, "10.0.0.256", "from 0 to 255"),
        ("ether host 10.0.0.1", 0, "ether host 10.0.0.1", "Ethernet address"),
        ("host 02:00:00:00:00:01", 0, "host 02:00:00:00:00:01", "needs 'ether host'"),
        ("10.0.0.1", 0, "10.0.0.1", "nothing tells what this is"),
        ("tcp or 80", 7, "80", "nothing tells what this is"),
        ("(tcp port 80", 12, "", "expected ')'"),
        ("tcp port 80)", 11, ")", "expected 'and', 'or' or the end"),
        ("tcp and (udp or )", 16, ")", "expected"),
        ("ip proto tcp", 9, "tcp", "write it \\tcp"),
        ("inbound and tcp", 0, "inbound", "direction"),
        ("tcp[13:3] = 1", 7, "3", "1, 2 or 4 bytes"),
        ("len > 1 / 0", 6, "1 / 0", "division by zero"),
        ("len % (3 - 3) = 0", 0, "len % (3 - 3)", "division by zero"),
        ("host 10.0.0.1 and (7 % 1 / 3) > 1", 19, "7 % 1 / 3", "division by zero"),
        ("ip[0] << 32 = 0", 0, "ip[0] << 32", "more than 31 bits"),
        ("ip[0] + = 0", 8, "=", "expected a number"),
        ("ah[0] = 0", 0, "ah[0] = 0", "not supported"),
        ("tcp and wlan host 1", 8, "wlan", "Ethernet frames"),
        ("gateway 10.0.0.1", 0, "gateway", "not looked up"),
        ("mpls and arp", 9, "arp", "behind mpls"),
        ("mpls 1048576", 0, "mpls 1048576", "1048575 at most"),
        ("pppoes and vlan", 11, "vlan", "inside of pppoes"),
        ("pppoes and ether host 02:00:00:00:00:01", 11, "ether host 02:00:00:00:00:01", "inside of pppoes"),
        ("llc frame", 4, "frame", "not known"),
        ("byte 0 & 1", 7, "&", "ether[0] & 1 != 0"),
        ("byte 0 5", 7, "5", "expected =, < or >"),
        ("decnet host 10.1", 0, "decnet host 10.1", "not supported"),
        ("tcp proto 6", 0, "tcp proto 6", "only ether, ip, ip6, iso and isis"),
        ("arp protochain 6", 0, "arp protochain 6", "only ip and ip6"),
        ("vlan 4096", 0, "vlan 4096", "4095 at most"),
        ("tcp port 08", 9, "08", "octal"),
        ("tcp = 6", 4, "=", "expected 'and', 'or' or the end"),
        ("tcp ; udp", 4, ";", "no such character"),
        ("tcp and ü", 8, "ü", "no such character"),
        ("ip and not ip", 0, "ip and not ip", "no packet can match"),
        ("", 0, "", "nothing in this filter"),
        (" \n", 2, "", "nothing in this filter"),
    ] {
        let error = compile(text).expect_err(text);
        assert_eq!((error.position, error.part.as_str()), (position, part), "{text}: {error}");
        assert!(error.reason.contains(reason), "{text}: {error}");
        assert_eq!(error.to_string().lines().count(), 1, "{error}");
    }
}
