//! Parses and formats the text of a tunnel, as in `--define-target ids=vxlan:10.9.0.5:4789/vni=77`. `destination` calls
//! it.

use core::net::{IpAddr, SocketAddr};
use std::fmt;

use super::{Keys, Kind, Oversize, Tunnel};
use crate::destination::device_name;

impl Tunnel {
    /// Whether this is the keyword of a tunnel.
    pub fn is_kind(word: &str) -> bool {
        Kind::ALL.into_iter().any(|kind| kind.name() == word)
    }

    /// Parses a tunnel of the kind with this name, from the text after `vxlan:` and the like.
    ///
    /// # Errors
    ///
    /// A message for the user, with the part that is invalid.
    pub fn parse(kind: &str, text: &str) -> Result<Self, String> {
        let kind = Kind::ALL.into_iter().find(|of| of.name() == kind).ok_or("no kind of tunnel")?;
        let mut parts = text.split('/');
        let (remote, port) = address(kind, parts.next().unwrap_or_default())?;
        let (word, most) = kind.key();
        let (mut keys, mut oversize, mut identity, mut existing) = (None, None, false, None);
        for option in parts {
            match option.split_once('=') {
                Some((of, numbers)) if of == word => {
                    let read = parse_keys(numbers, most);
                    keys = Some(read.ok_or_else(|| {
                        format!(
                            "{option:?}: use a number from 1 to {most}, or for a key of its own for each NIC a range, as \
                             in {word}=100-199"
                        )
                    })?);
                }
                Some(("oversize", word)) => {
                    let found = Oversize::ALL.into_iter().find(|oversize| oversize.name() == word);
                    oversize = Some(found.ok_or_else(|| {
                        format!("{option:?}: use {}", Oversize::ALL.map(Oversize::name).join(", "))
                    })?);
                }
                Some(("device", name)) => {
                    let name = device_name(name).map_err(|error| format!("{option:?}: {error}"))?;
                    existing = Some(name);
                }
                Some(("identity", "true")) if kind == Kind::Geneve => identity = true,
                _ => {
                    return Err(format!("{option:?} is not an option of this tunnel: use {}", options(kind)));
                }
            }
        }
        let keys = keys.ok_or_else(|| format!("{text:?} has no {word}: add one, as in {text}/{word}=77"))?;
        let oversize = oversize.unwrap_or_else(|| usual(kind, remote, existing.is_some()));
        if let Some(why) = refusal(kind, remote, existing.is_some(), oversize) {
            return Err(format!("{text:?}: {why}: use truncate"));
        }
        Ok(Self { kind, remote, port, keys, oversize, identity, existing })
    }
}

/// Why a tunnel cannot have this option.
fn refusal(kind: Kind, remote: IpAddr, is_others: bool, oversize: Oversize) -> Option<&'static str> {
    let leaves_to_kernel = matches!(oversize, Oversize::Segment | Oversize::Fragment);
    if oversize == Oversize::Fragment && remote.is_ipv6() {
        Some("the kernel makes no fragments of tunnel packets over IPv6")
    } else if oversize == Oversize::Segment && kind == Kind::Erspan && remote.is_ipv6() {
        Some("segments that do not fit would make the kernel send ICMP errors to the pod")
    } else if leaves_to_kernel && is_others && kind.usual_port().is_none() {
        Some("copies longer than the MTU of that device would make the kernel send ICMP errors to the pod")
    } else {
        None
    }
}

/// The default of the option: super-frames are segmented if that is possible.
fn usual(kind: Kind, remote: IpAddr, is_others: bool) -> Oversize {
    match refusal(kind, remote, is_others, Oversize::Segment) {
        None => Oversize::Segment,
        Some(_) => Oversize::Truncate,
    }
}

/// The options of a kind, for a message.
fn options(kind: Kind) -> String {
    let own = match kind {
        Kind::Geneve => ", identity=true",
        Kind::Vxlan | Kind::Gre | Kind::Erspan => "",
    };
    format!("{}=N, oversize=WORD, device=NAME{own}", kind.key().0)
}

impl fmt::Display for Tunnel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, remote, port, keys: Keys { first, last }, oversize, identity, existing } = self;
        write!(f, "{}:", kind.name())?;
        match kind.usual_port() {
            Some(_) => write!(f, "{}", SocketAddr::new(*remote, *port))?,
            None => write!(f, "{remote}")?,
        }
        write!(f, "/{}={first}", kind.key().0)?;
        if first != last {
            write!(f, "-{last}")?;
        }
        if *identity {
            write!(f, "/identity=true")?;
        }
        if let Some(name) = existing {
            write!(f, "/device={name}")?;
        }
        match usual(*kind, *remote, existing.is_some()) {
            usual if usual == *oversize => Ok(()),
            _ => write!(f, "/oversize={}", oversize.name()),
        }
    }
}

/// Parses `77` or `100-199`.
fn parse_keys(text: &str, most: u32) -> Option<Keys> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let keys = Keys { first: first.parse().ok()?, last: last.parse().ok()? };
    (1 <= keys.first && keys.first <= keys.last && keys.last <= most).then_some(keys)
}

/// Parses `10.9.0.5:4789` or `[fd00::5]:4789`. A kind without ports has only the address, as in `10.9.0.5` or
/// `fd00::5`.
///
/// There is no default port: a kernel has one program for a port, and that can be the node's CNI.
fn address(kind: Kind, text: &str) -> Result<(IpAddr, u16), String> {
    let (address, example) = match kind.usual_port() {
        Some(port) => (text.parse().ok(), format!("10.9.0.5:{port} or [fd00::5]:{port}")),
        None => (text.parse().ok().map(|ip| SocketAddr::new(ip, 0)), "10.9.0.5 or fd00::5".to_owned()),
    };
    let address = address.ok_or_else(|| {
        format!("{text:?} is not an address of a {} tunnel: use one as in {example}", kind.name())
    })?;
    let (ip, port) = (address.ip(), address.port());
    let is_special = match ip {
        IpAddr::V4(v4) => v4.is_broadcast(),
        // A link-local address would need the name of a device.
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    let is_portless = kind.usual_port().is_some() && port == 0;
    if is_special || ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || is_portless {
        return Err(format!("{text:?} is not an address of another node"));
    }
    Ok((ip, port))
}
