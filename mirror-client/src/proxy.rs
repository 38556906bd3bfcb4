//! Chooses the proxy for a server: that of the kubeconfig, or that of the environment, by the rules of Go's `net/http`.
//! kube's client compares NO_PROXY with the proxy's name instead of the server's.

use std::net::IpAddr;

use anyhow::{Context as _, bail};
use http::Uri;

use crate::Environment;

/// The proxy schemes that client-go supports.
const SCHEMES: [&str; 4] = ["http", "https", "socks5", "socks5h"];

/// The proxy for `server`; `None`: a direct connection. NO_PROXY does not apply to the kubeconfig's own `proxy-url`.
pub(crate) fn of(
    server: &Uri,
    proxy_url: Option<&str>,
    environment: &Environment,
) -> anyhow::Result<Option<Uri>> {
    if let Some(proxy) = proxy_url {
        return parse(proxy).map(Some).context("proxy-url of the kubeconfig");
    }
    let (name, names) = match server.scheme_str() {
        Some("https") => ("HTTPS_PROXY", ["HTTPS_PROXY", "https_proxy"]),
        _ => ("HTTP_PROXY", ["HTTP_PROXY", "http_proxy"]),
    };
    let Some(proxy) = environment.first(&names) else { return Ok(None) };
    let (host, port) = (server.host().unwrap_or_default(), port(server));
    let excluded = environment.first(&["NO_PROXY", "no_proxy"]).unwrap_or_default();
    if is_direct(host, port, excluded) {
        return Ok(None);
    }
    // As in Go, a name without a scheme is an HTTP proxy.
    let proxy = if proxy.contains("://") { proxy.to_owned() } else { format!("http://{proxy}") };
    parse(&proxy).map(Some).with_context(|| format!("the environment variable {name}"))
}

fn parse(proxy: &str) -> anyhow::Result<Uri> {
    let uri: Uri = proxy.parse().with_context(|| format!("{proxy:?} is not a URL of a proxy"))?;
    match uri.scheme_str() {
        Some(scheme) if SCHEMES.contains(&scheme) && uri.host().is_some_and(|host| !host.is_empty()) => {
            Ok(uri)
        }
        _ => bail!("{proxy:?} is not a URL of a proxy; use http://, https:// or socks5:// and a host"),
    }
}

fn port(server: &Uri) -> u16 {
    server.port_u16().unwrap_or(if server.scheme_str() == Some("https") { 443 } else { 80 })
}

/// Whether the server is reached without a proxy: a loopback address, or one in NO_PROXY.
fn is_direct(host: &str, port: u16, excluded: &str) -> bool {
    let host = host.trim_matches(['[', ']']).to_lowercase();
    let address: Option<IpAddr> = host.parse().ok();
    if host == "localhost" || address.is_some_and(|address| address.is_loopback()) {
        return true;
    }
    excluded.split(',').map(|entry| entry.trim().to_lowercase()).any(|entry| match address {
        _ if entry == "*" => true,
        Some(address) if entry.contains('/') => is_in(address, &entry),
        Some(address) => {
            let (name, of_port) = split(&entry);
            name.parse() == Ok(address) && of_port.is_none_or(|of_port| of_port == port)
        }
        None => {
            let (name, of_port) = split(&entry);
            let name = name.strip_prefix('*').filter(|rest| rest.starts_with('.')).unwrap_or(name);
            let (parent, is_exact) = (name.strip_prefix('.').unwrap_or(name), !name.starts_with('.'));
            let below = host.strip_suffix(parent).is_some_and(|rest| rest.ends_with('.'));
            !parent.is_empty()
                && (below || is_exact && host == parent)
                && of_port.is_none_or(|of_port| of_port == port)
        }
    })
}

/// Splits an entry into name or address, and port: `host`, `host:port`, `::1`, `[::1]:port`.
fn split(entry: &str) -> (&str, Option<u16>) {
    let parts = entry.rsplit_once(':').and_then(|(name, port)| Some((name, port.parse().ok()?)));
    match parts {
        Some((name, port)) if name.starts_with('[') || !name.contains(':') => {
            (name.trim_matches(['[', ']']), Some(port))
        }
        _ => (entry.trim_matches(['[', ']']), None),
    }
}

/// Whether an address is in a network such as `10.0.0.0/8`.
fn is_in(address: IpAddr, network: &str) -> bool {
    let Some((base, length)) = network.split_once('/') else { return false };
    let (Ok(base), Ok(length)) = (base.parse(), length.parse::<u32>()) else { return false };
    let (address, base, bits) = match (address, base) {
        (IpAddr::V4(address), IpAddr::V4(base)) => {
            (u128::from(address.to_bits()), u128::from(base.to_bits()), 32)
        }
        (IpAddr::V6(address), IpAddr::V6(base)) => (address.to_bits(), base.to_bits(), 128),
        _ => return false,
    };
    length <= bits && (address ^ base).checked_shr(bits - length).unwrap_or_default() == 0
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use super::*;

    /// Whether the proxy is used for a server, with this NO_PROXY.
    fn is_used(server: &str, excluded: &str) -> bool {
        let variables = [("HTTPS_PROXY", "proxy:3128"), ("NO_PROXY", excluded)];
        let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let environment = Environment { variables, home: None };
        let proxy = of(&server.parse().unwrap(), None, &environment).unwrap();
        assert!(proxy.is_none() || proxy == Some("http://proxy:3128".parse().unwrap()));
        proxy.is_some()
    }

    #[test]
    fn names_and_networks_of_no_proxy_are_as_in_go() {
        for (server, excluded) in [
            ("https://api.example.org:6443", ""),
            ("https://api.example.org:6443", "example.com,10.0.0.0/8"),
            ("https://api.example.org:6443", "example.org:443"),
            ("https://example.org", ".example.org"),
            ("https://notexample.org", "example.org"),
            ("https://10.1.2.3:6443", "10.1.2.4,11.0.0.0/8,10.1.2.3:443,10.0.0.0/33"),
            ("https://[2001:db8::1]:6443", "2001:db8::2, 2001:db9::/32"),
            ("https://api.example.org:6443", "proxy"),
        ] {
            assert!(is_used(server, excluded), "{server} with NO_PROXY={excluded:?}");
        }
        for (server, excluded) in [
            ("https://localhost:6443", ""),
            ("https://127.3.2.1:6443", ""),
            ("https://[::1]:6443", ""),
            ("https://api.example.org:6443", "*"),
            ("https://API.example.org:6443", "other, Example.org"),
            ("https://api.example.org:6443", ".example.org"),
            ("https://api.example.org:6443", "*.example.org:6443,"),
            ("https://10.1.2.3:6443", "10.0.0.0/8"),
            ("https://10.1.2.3:6443", "0.0.0.0/0"),
            ("https://10.1.2.3", "10.1.2.3:443"),
            ("https://[2001:db8::1]:6443", "[2001:db8::1]:6443"),
            ("https://[2001:db8::1]:6443", "2001:db8::/32"),
        ] {
            assert!(!is_used(server, excluded), "{server} with NO_PROXY={excluded:?}");
        }
    }
}
