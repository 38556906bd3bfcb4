//! The text of a tunnel, as in `--target ids=vxlan:10.9.0.5:4789/vni=77`, and back. `destination` calls it.

use core::net::{IpAddr, SocketAddr};
use std::fmt;

use super::{Keys, Kind, Oversize, Tunnel};

impl Tunnel {
    /// Whether the text of a tunnel begins with this word.
    pub fn is_kind(word: &str) -> bool {
        Kind::ALL.into_iter().any(|kind| kind.name() == word)
    }

    /// A tunnel of the kind with this name, from the text behind `vxlan:` and its like.
    ///
    /// # Errors
    ///
    /// A message for the user, with the part that is wrong.
    pub fn parse(kind: &str, text: &str) -> Result<Self, String> {
        let mut kind = Kind::ALL.into_iter().find(|of| of.name() == kind).ok_or("no kind of tunnel")?;
        let mut parts = text.split('/');
        let (remote, port) = address(kind, parts.next().unwrap_or_default())?;
        let (word, most) = kind.key();
        let (mut keys, mut oversize, mut identity) = (None, Oversize::default(), false);
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
                    oversize = found.ok_or_else(|| {
                        format!("{option:?}: use {}", Oversize::ALL.map(Oversize::name).join(", "))
                    })?;
                }
                Some(("version", "1")) if kind.name() == "erspan" => kind = Kind::Erspan2,
                Some(("version", "2")) if kind.name() == "erspan" => kind = Kind::Erspan3,
                Some(("identity", "true")) if kind == Kind::Geneve => identity = true,
                _ => return Err(format!("{option:?} is no option of this tunnel: use {}", options(kind))),
            }
        }
        let keys =
            keys.ok_or_else(|| format!("{text:?} has no {word}: add one, as in {text}/{word}=77"))?;
        Ok(Self { kind, remote, port, keys, oversize, identity })
    }
}

/// The options of a kind, for a message.
fn options(kind: Kind) -> String {
    let own = match kind {
        Kind::Geneve => ", identity=true",
        Kind::Erspan2 | Kind::Erspan3 => ", version=1 or version=2",
        Kind::Vxlan | Kind::Gre => "",
    };
    format!("{}=N, oversize=WORD{own}", kind.key().0)
}

impl fmt::Display for Tunnel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, remote, port, keys: Keys { first, last }, oversize, identity } = self;
        write!(f, "{}:", kind.name())?;
        match kind.port() {
            Some(_) => write!(f, "{}", SocketAddr::new(*remote, *port))?,
            None => write!(f, "{remote}")?,
        }
        write!(f, "/{}={first}", kind.key().0)?;
        if first != last {
            write!(f, "-{last}")?;
        }
        if *kind == Kind::Erspan3 {
            write!(f, "/version=2")?;
        }
        if *identity {
            write!(f, "/identity=true")?;
        }
        if *oversize != Oversize::default() { write!(f, "/oversize={}", oversize.name()) } else { Ok(()) }
    }
}

/// `77` or `100-199`.
fn parse_keys(text: &str, most: u32) -> Option<Keys> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let keys = Keys { first: first.parse().ok()?, last: last.parse().ok()? };
    (1 <= keys.first && keys.first <= keys.last && keys.last <= most).then_some(keys)
}

/// `10.9.0.5`, `10.9.0.5:4789`, `[fd00::5]` or `[fd00::5]:4789`; a kind without ports takes the address alone.
fn address(kind: Kind, text: &str) -> Result<(IpAddr, u16), String> {
    let port = kind.port();
    let bare = || text.trim_start_matches('[').trim_end_matches(']').parse().ok();
    let with_port = text.parse::<SocketAddr>().ok().filter(|_| port.is_some());
    let address = with_port.or_else(|| Some(SocketAddr::new(bare()?, port.unwrap_or_default())));
    let address = address.ok_or_else(|| match port {
        Some(port) => format!("{text:?} is no address: use one as in 10.9.0.5:{port} or [fd00::5]:{port}"),
        None => format!("{text:?} is no address: use one as in 10.9.0.5 or fd00::5, without a port"),
    })?;
    let ip = address.ip();
    if ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || (port.is_some() && address.port() == 0) {
        return Err(format!("{text:?} is no address of another node"));
    }
    Ok((ip, address.port()))
}
