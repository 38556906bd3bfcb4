//! Parses the output of the tools. Each function is tested with real output (`fixtures/`).

use std::collections::BTreeMap;

use serde_json::Value;

use crate::plan::Metric;

/// Figures by metric.
pub type Figures = BTreeMap<Metric, f64>;

/// The results of iperf3.
#[derive(Debug, Clone, PartialEq)]
pub struct Iperf3 {
    /// Seconds for which the client sent.
    pub seconds: f64,
    /// Received bits per second, and for UDP also sent and lost datagrams.
    pub figures: Figures,
}

/// Parses the client's output of `iperf3 --json`. An error is iperf3's own message.
pub fn iperf3(output: &str) -> Result<Iperf3, String> {
    let json: Value = serde_json::from_str(output).map_err(|why| format!("iperf3 printed no JSON: {why}"))?;
    if let Some(error) = json["error"].as_str() {
        return Err(format!("iperf3: {error}"));
    }
    let end = &json["end"];
    let number = |value: &Value, name: &str| {
        value.as_f64().ok_or_else(|| format!("iperf3's JSON has no number at end.{name}"))
    };
    let seconds = number(&end["sum_sent"]["seconds"], "sum_sent.seconds")?;
    let received = number(&end["sum_received"]["bits_per_second"], "sum_received.bits_per_second")?;
    let mut figures = Figures::from([(Metric::BitsPerSecond, received)]);
    if json["start"]["test_start"]["protocol"] == "UDP" {
        // `packets` of `sum_received` does not count datagrams after the last one that has arrived.
        let sent = number(&end["sum_sent"]["packets"], "sum_sent.packets")?;
        let bytes = number(&end["sum_received"]["bytes"], "sum_received.bytes")?;
        let size = number(&json["start"]["test_start"]["blksize"], "test_start.blksize")?;
        figures.insert(Metric::SentPerSecond, sent / seconds);
        figures.insert(Metric::LossPercent, (100.0 * (1.0 - bytes / size / sent)).max(0.0));
    }
    Ok(Iperf3 { seconds, figures })
}

/// Parses the output of `sockperf ping-pong`: the messages, and half a round trip in µs, the median and the 99th
/// percentile.
pub fn sockperf(output: &str) -> Result<(u64, Figures), String> {
    let percentile = |which: &str| {
        let line = output.lines().find(|line| line.contains(&format!("percentile {which}")));
        let value = line.and_then(|line| line.rsplit('=').next()?.trim().parse().ok());
        value.ok_or_else(|| format!("sockperf printed no percentile {which}: {output}"))
    };
    // The first count in the output is that of the whole run.
    let sent = output.split("SentMessages=").nth(1).and_then(|rest| rest.split(';').next()?.parse().ok());
    let sent = sent.ok_or_else(|| format!("sockperf printed no SentMessages: {output}"))?;
    Ok((
        sent,
        [(Metric::LatencyUs, percentile("50.000")?), (Metric::LatencyP99Us, percentile("99.000")?)].into(),
    ))
}

/// Parses the output of `wrk --latency`: the requests, and the figures. Failed requests are an error.
pub fn wrk(output: &str) -> Result<(u64, Figures), String> {
    let missing = |what: &str| format!("wrk printed no {what}: {output}");
    if let Some(failed) =
        output.lines().find(|line| line.contains("Socket errors") || line.contains("Non-2xx"))
    {
        return Err(format!("wrk: {}", failed.trim()));
    }
    let after = |name: &str| {
        let line = output.lines().find_map(|line| line.trim().strip_prefix(name));
        line.map(str::trim).ok_or_else(|| missing(name))
    };
    let response = |share: &str| after(share).and_then(|text| us(text).ok_or_else(|| missing(share)));
    let per_second = after("Requests/sec:")?.parse().map_err(|_| missing("Requests/sec"))?;
    let requests = output.lines().find(|line| line.contains(" requests in "));
    let requests = requests.and_then(|line| line.split_whitespace().next()?.parse().ok());
    let figures = [
        (Metric::RequestsPerSecond, per_second),
        (Metric::ResponseUs, response("50%")?),
        (Metric::ResponseP99Us, response("99%")?),
    ];
    Ok((requests.ok_or_else(|| missing("requests"))?, figures.into()))
}

/// Parses the output of `redis-benchmark --csv` for one command: the figures.
pub fn redis_benchmark(output: &str) -> Result<Figures, String> {
    let mut lines = output.lines();
    let names = lines.by_ref().find(|line| line.starts_with("\"test\",")).map(cells).unwrap_or_default();
    let values = lines.next().map(cells).unwrap_or_default();
    let value = |name: &str| {
        let column = names.iter().position(|other| *other == name);
        let value = column.and_then(|column| values.get(column)?.parse::<f64>().ok());
        value.ok_or_else(|| format!("redis-benchmark printed no {name}: {output}"))
    };
    Ok([
        (Metric::RequestsPerSecond, value("rps")?),
        (Metric::ResponseUs, value("p50_latency_ms")? * 1e3),
        (Metric::ResponseP99Us, value("p99_latency_ms")? * 1e3),
    ]
    .into())
}

/// The cells of a line of CSV, without their quotes.
fn cells(line: &str) -> Vec<&str> {
    line.split(',').map(|cell| cell.trim().trim_matches('"')).collect()
}

/// A time with its unit, in µs.
fn us(text: &str) -> Option<f64> {
    let (number, factor) = match text {
        _ if text.ends_with("us") => (text.strip_suffix("us")?, 1.0),
        _ if text.ends_with("ms") => (text.strip_suffix("ms")?, 1e3),
        _ => (text.strip_suffix('s')?, 1e6),
    };
    number.parse::<f64>().ok().map(|number| number * factor)
}

/// Parses the output of `ping -q`. A request without an answer is an error.
pub fn ping(output: &str) -> Result<Figures, String> {
    let answered = output.contains(" 0% packet loss");
    let line = output.lines().find(|line| line.starts_with("rtt min/avg/max/mdev = "));
    let mean_ms = line.and_then(|line| line.split('/').nth(4)?.parse::<f64>().ok());
    match mean_ms.filter(|_| answered) {
        Some(mean) => Ok([(Metric::RoundTripUs, mean * 1e3)].into()),
        None => Err(format!("not every ping was answered: {output}")),
    }
}

/// Parses tcpdump's summary: the packets that the kernel had for it, and those of them that it dropped. tcpdump's own
/// count contains only what it has read so far, and it may read only once a second.
pub fn tcpdump(output: &str) -> Result<(u64, u64), String> {
    let count = |what: &str| {
        let line = output.lines().find(|line| line.contains(what));
        let value = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
        value.ok_or_else(|| format!("tcpdump did not say \"{what}\": {output}"))
    };
    Ok((count(" received by filter")?, count(" dropped by kernel")?))
}

/// Ticks in which the CPUs were busy, summed over all CPUs, 100 per second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Busy {
    /// Ticks in user mode.
    pub user: u64,
    /// Ticks in the kernel, with interrupts.
    pub kernel: u64,
}

/// Parses `/proc/stat`.
pub fn busy_ticks(stat: &str) -> Result<Busy, String> {
    let all = stat.lines().find_map(|line| line.strip_prefix("cpu "));
    let ticks: Option<Vec<u64>> =
        all.and_then(|all| all.split_whitespace().map(|tick| tick.parse().ok()).collect());
    match ticks.as_deref() {
        // user, nice, system; idle and iowait; irq, softirq. `guest` is included in user, and stolen time is no work of
        // this machine.
        Some([user, nice, system, _, _, irq, softirq, ..]) => {
            Ok(Busy { user: user + nice, kernel: system + irq + softirq })
        }
        _ => Err("/proc/stat has no line for all CPUs".to_owned()),
    }
}

/// The packets of a device in both directions, from `/proc/net/dev`.
pub fn packets(dev: &str, device: &str) -> Result<u64, String> {
    let line = dev.lines().find_map(|line| line.trim_start().strip_prefix(device)?.strip_prefix(':'));
    let counts: Vec<&str> = line.unwrap_or_default().split_whitespace().collect();
    // Eight receive counters, then the send counters. The second of each is the packets.
    let count = |at: usize| counts.get(at)?.parse::<u64>().ok();
    match (count(1), count(9)) {
        (Some(received), Some(sent)) => Ok(received + sent),
        _ => Err(format!("/proc/net/dev has no packets of {device}: {dev}")),
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn iperf3_of_tcp() {
        let Iperf3 { seconds, figures } = iperf3(include_str!("../fixtures/iperf3-tcp.json")).unwrap();
        assert!((seconds - 0.2386).abs() < 1e-4, "{seconds}");
        assert_eq!(figures.keys().collect::<Vec<_>>(), [&Metric::BitsPerSecond]);
        assert!((figures[&Metric::BitsPerSecond] / 1e6 - 107.2).abs() < 0.1, "{figures:?}");
    }

    #[test]
    fn iperf3_of_udp_counts_what_arrived_and_what_was_lost() {
        let Iperf3 { figures, .. } = iperf3(include_str!("../fixtures/iperf3-udp.json")).unwrap();
        assert!((figures[&Metric::BitsPerSecond] / 1e6 - 61.28).abs() < 0.01, "{figures:?}");
        assert!((figures[&Metric::SentPerSecond] / 1e3 - 144.7).abs() < 0.1, "{figures:?}");
        // 50000 were sent, and 41426 arrived: 28 of the lost ones were sent after the last that arrived.
        assert!((figures[&Metric::LossPercent] - 17.148).abs() < 0.001, "{figures:?}");
    }

    #[test]
    fn iperf3s_own_error_is_told() {
        let busy = r#"{"start":{},"error":"error - the server is busy running a test. try again later"}"#;
        assert!(iperf3(busy).unwrap_err().contains("server is busy"));
        assert!(iperf3("").unwrap_err().contains("no JSON"));
        assert!(iperf3("{}").unwrap_err().contains("sum_sent.seconds"));
    }

    #[test]
    fn sockperfs_percentiles() {
        let (sent, figures) = sockperf(include_str!("../fixtures/sockperf.txt")).unwrap();
        assert!(sent > 1000, "{sent}");
        let (half, most) = (figures[&Metric::LatencyUs], figures[&Metric::LatencyP99Us]);
        assert!(half > 1.0 && most > half && most < 1e5, "{figures:?}");
        assert!(sockperf("sockperf: ERROR: connect").unwrap_err().contains("connect"));
    }

    #[test]
    fn wrks_requests_and_responses() {
        let (requests, figures) = wrk(include_str!("../fixtures/wrk.txt")).unwrap();
        assert_eq!(requests, 394);
        let expected = [
            (Metric::RequestsPerSecond, 392.66),
            (Metric::ResponseUs, 12_550.0),
            (Metric::ResponseP99Us, 55_050.0),
        ];
        assert_eq!(figures, expected.into());
        assert_eq!([us("870.5us"), us("1.5s"), us("no")], [Some(870.5), Some(1.5e6), None]);
        let failed = "  Socket errors: connect 0, read 3, write 0, timeout 0\n";
        assert!(wrk(failed).unwrap_err().contains("read 3"));
    }

    #[test]
    fn pings_mean_and_lost_pings() {
        let whole = include_str!("../fixtures/ping.txt");
        assert_eq!(ping(whole), Ok([(Metric::RoundTripUs, 45.0)].into()));
        let lost = whole.replace("20 received, 0%", "19 received, 5%");
        assert!(ping(&lost).unwrap_err().contains("19 received"));
    }

    #[test]
    fn tcpdumps_counts() {
        assert_eq!(tcpdump(include_str!("../fixtures/tcpdump.txt")), Ok((20, 0)));
        let lost = "1 packet captured\n7 packets received by filter\n6 packets dropped by kernel\n";
        assert_eq!(tcpdump(lost), Ok((7, 6)));
        assert!(tcpdump("tcpdump: eth9: No such device exists").unwrap_err().contains("eth9"));
    }

    #[test]
    fn busy_time_is_without_idle_and_stolen_time() {
        let stat = "cpu  10 20 30 4000 500 6 7 800 0 0\ncpu0 5 10 15 2000 250 3 3 400 0 0\n";
        assert_eq!(busy_ticks(stat), Ok(Busy { user: 30, kernel: 43 }));
        assert!(busy_ticks("intr 1").is_err());
    }

    #[test]
    fn the_packets_of_a_device() {
        let dev = include_str!("../fixtures/net-dev.txt");
        assert_eq!(packets(dev, "eth0"), Ok(11 + 31));
        assert!(packets(dev, "eth").unwrap_err().contains("no packets of eth"));
        assert!(packets(dev, "eth1").is_err());
    }

    #[test]
    fn redis_benchmarks_requests_and_responses() {
        let figures = redis_benchmark(include_str!("../fixtures/redis.csv")).unwrap();
        let expected = [
            (Metric::RequestsPerSecond, 48_780.49),
            (Metric::ResponseUs, 127.0),
            (Metric::ResponseP99Us, 271.0),
        ];
        assert_eq!(figures, expected.into());
        assert!(redis_benchmark("Could not connect to Redis").unwrap_err().contains("no rps"));
    }

    proptest! {
        #[test]
        fn nothing_that_a_tool_prints_ends_the_run(text in ".{0,200}", cut in 0_usize..2665) {
            let whole = include_str!("../fixtures/iperf3-udp.json");
            let _ = iperf3(whole.get(..cut).unwrap_or(whole));
            let _ = (iperf3(&text), sockperf(&text), wrk(&text), ping(&text), tcpdump(&text));
            let _ = (redis_benchmark(&text), busy_ticks(&text), packets(&text, "eth0"));
        }
    }
}
