//! The kinds of traffic, and the figures of their samples.

use serde::{Deserialize, Serialize};

use crate::figures::Average;

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Half a round trip of messages over TCP.
    TcpLatency,
    /// Bytes per second over TCP, by iperf3.
    TcpBandwidth,
    /// Half a round trip of datagrams.
    UdpLatency,
    /// Datagrams as fast as the client sends them, by iperf3: arrived and lost ones.
    UdpBandwidth,
    /// TCP latency, measured by sockperf.
    TcpSockperf,
    /// UDP latency, measured by sockperf.
    UdpSockperf,
    /// HTTP requests per second by wrk, to a server that answers with 1 KiB.
    Http,
    /// Values that redis-benchmark reads from a Redis server.
    RedisGet,
    /// Values that redis-benchmark writes to a Redis server.
    RedisSet,
    /// Round trips of ICMP echo, by ping.
    Ping,
}

impl Kind {
    /// All kinds, in the order of the report.
    pub const ALL: [Self; 10] = [
        Self::TcpLatency,
        Self::TcpBandwidth,
        Self::UdpLatency,
        Self::UdpBandwidth,
        Self::TcpSockperf,
        Self::UdpSockperf,
        Self::Http,
        Self::RedisGet,
        Self::RedisSet,
        Self::Ping,
    ];

    /// The name in the command line, in the files and in the published ratios.
    pub const fn name(self) -> &'static str {
        match self {
            Self::TcpLatency => "tcp-latency",
            Self::TcpBandwidth => "tcp-bandwidth",
            Self::UdpLatency => "udp-latency",
            Self::UdpBandwidth => "udp-bandwidth",
            Self::TcpSockperf => "tcp-sockperf",
            Self::UdpSockperf => "udp-sockperf",
            Self::Http => "http",
            Self::RedisGet => "redis-get",
            Self::RedisSet => "redis-set",
            Self::Ping => "ping",
        }
    }

    /// The name in the report.
    pub const fn title(self) -> &'static str {
        match self {
            Self::TcpLatency => "TCP latency",
            Self::TcpBandwidth => "TCP bandwidth",
            Self::UdpLatency => "UDP latency",
            Self::UdpBandwidth => "UDP bandwidth",
            Self::TcpSockperf => "TCP latency by sockperf",
            Self::UdpSockperf => "UDP latency by sockperf",
            Self::Http => "HTTP requests",
            Self::RedisGet => "Redis GET",
            Self::RedisSet => "Redis SET",
            Self::Ping => "ping",
        }
    }

    /// The metric that the report compares first.
    pub const fn metric(self) -> Metric {
        match self {
            Self::TcpBandwidth | Self::UdpBandwidth => Metric::BitsPerSecond,
            Self::Http | Self::RedisGet | Self::RedisSet => Metric::RequestsPerSecond,
            Self::Ping => Metric::RoundTripUs,
            _ => Metric::LatencyUs,
        }
    }

    /// Further metrics of this kind, each with a table.
    pub const fn further(self) -> &'static [Metric] {
        match self {
            Self::UdpBandwidth => &[Metric::SentPerSecond, Metric::LossPercent],
            Self::TcpLatency | Self::UdpLatency | Self::TcpSockperf | Self::UdpSockperf => {
                &[Metric::LatencyP99Us]
            }
            Self::Http | Self::RedisGet | Self::RedisSet => &[Metric::ResponseUs, Metric::ResponseP99Us],
            Self::TcpBandwidth | Self::Ping => &[],
        }
    }

    /// The reported CPU times, each with a table. sockperf sends only in one of its three seconds.
    pub const fn cpu(self) -> &'static [Metric] {
        match self {
            Self::TcpSockperf | Self::UdpSockperf => &[],
            _ => &[Metric::CpuNsPerMessage, Metric::CpuUserNsPerPacket, Metric::CpuKernelNsPerPacket],
        }
    }
}

/// A figure of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Metric {
    /// Half a round trip: the median of a sample, in µs.
    LatencyUs,
    /// The 99th percentile of the same.
    LatencyP99Us,
    /// Bits of payload that arrived, per second.
    BitsPerSecond,
    /// Messages that the client sent, per second.
    SentPerSecond,
    /// Lost datagrams, in percent of the sent ones.
    LossPercent,
    /// Answered requests per second.
    RequestsPerSecond,
    /// From a request to its answer: the median of a sample, in µs.
    ResponseUs,
    /// The 99th percentile of the same.
    ResponseP99Us,
    /// A whole round trip: the mean of a sample, in µs.
    RoundTripUs,
    /// Busy time of the machine's CPUs per message or round trip, in ns.
    CpuNsPerMessage,
    /// User time of the machine's CPUs per packet at the mirrored pod's NIC, in ns.
    CpuUserNsPerPacket,
    /// Kernel time of the same, with interrupts.
    CpuKernelNsPerPacket,
    /// Share of its packets that the contestant's reader did not get, in percent.
    ReaderLossPercent,
}

impl Metric {
    /// The name and unit in the report.
    pub const fn title(self) -> &'static str {
        match self {
            Self::LatencyUs => "latency, µs",
            Self::LatencyP99Us => "latency, 99 % of messages are faster, µs",
            Self::BitsPerSecond => "bandwidth, Mbit/s",
            Self::SentPerSecond => "datagrams sent, thousands a second",
            Self::LossPercent => "datagrams lost, %",
            Self::RequestsPerSecond => "requests a second",
            Self::ResponseUs => "response, µs",
            Self::ResponseP99Us => "response, 99 % are faster, µs",
            Self::RoundTripUs => "round trip, µs",
            Self::CpuNsPerMessage => "CPU time of the machine for a message, ns",
            Self::CpuUserNsPerPacket => "CPU time in programs for a packet, ns",
            Self::CpuKernelNsPerPacket => "CPU time in the kernel for a packet, ns",
            Self::ReaderLossPercent => "packets that the reader lost, %",
        }
    }

    /// The divisor of a value for the report.
    pub const fn unit(self) -> f64 {
        match self {
            Self::BitsPerSecond => 1e6,
            Self::SentPerSecond => 1e3,
            _ => 1.0,
        }
    }

    /// How the rounds are averaged. CPU times are counted in ticks of 10 ms, and most samples lose no packet.
    pub const fn average(self) -> Average {
        match self {
            Self::LossPercent
            | Self::CpuNsPerMessage
            | Self::CpuUserNsPerPacket
            | Self::CpuKernelNsPerPacket
            | Self::ReaderLossPercent => Average::Mean,
            _ => Average::Median,
        }
    }

    /// Whether a contestant is compared by a ratio. A share is shown unchanged: 0 % has no ratio.
    pub const fn has_ratio(self) -> bool {
        !matches!(self, Self::LossPercent | Self::ReaderLossPercent)
    }
}
