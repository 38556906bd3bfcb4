//! The transmit offloads of a device, as ethtool shows them: reads and switches them.
//!
//! This module uses an ioctl, which needs a name: rtnetlink does not list the offloads, and some kernels lack ethtool's
//! own netlink family. `mirror_iface` decides. `netlink` and `create` call it.

use std::{collections::BTreeSet, io, os::fd::AsRawFd as _, os::unix::net::UnixDatagram};

use anyhow::{Context as _, bail};
use tracing::info;

use crate::model::Offloads;

/// From include/uapi/linux/ethtool.h, like the layouts of the requests below.
const ETHTOOL_GSTRINGS: u32 = 0x1b;
const ETHTOOL_GSSET_INFO: u32 = 0x37;
const ETHTOOL_GFEATURES: u32 = 0x3a;
const ETHTOOL_SFEATURES: u32 = 0x3b;
const ETH_SS_FEATURES: u32 = 4;
const ETH_GSTRING_WORDS: usize = 32 / 4;

/// Reads the offloads of `device`.
pub(super) fn read(device: &str) -> io::Result<Offloads> {
    let features = Device::open(device).and_then(|device| device.features());
    features.map(|features| offloads(&features))
}

/// Switches the offloads of `device` that can be switched.
pub(super) fn switch(device: &str, on: bool) -> anyhow::Result<()> {
    let word = if on { "on" } else { "off" };
    let switched = Device::open(device).and_then(|device| {
        let mut features = device.features()?;
        features.retain(|feature| is_offload(&feature.name) && feature.can_change && feature.is_on != on);
        device.set(&features, on)?;
        Ok((features, offloads(&device.features()?)))
    });
    let (features, now) =
        switched.with_context(|| format!("cannot switch the offloads of {device} {word}"))?;
    let refused = if on { &now.off } else { &now.on };
    let names: Vec<&str> = features.iter().map(|feature| feature.name.as_str()).collect();
    if let Some(name) = names.iter().find(|name| refused.contains(**name)) {
        bail!("the driver of {device} does not support switching its offload {name} {word}");
    }
    if !names.is_empty() {
        info!(
            mirror_iface = device,
            offloads = names.join(" "),
            "switched {word} what the kernel left to the device"
        );
    }
    Ok(())
}

/// A feature of a device.
#[derive(Debug, Clone)]
struct Feature {
    name: String,
    /// Its number, which is its bit in the kernel's sets.
    bit: usize,
    is_on: bool,
    can_change: bool,
}

/// Whether the kernel leaves segmentation or checksums to a device with this feature.
///
/// `tx-generic-segmentation` does not count: with it, sockets make super-frames for a device that cannot segment them,
/// and the kernel does. That is the wanted behaviour here.
fn is_offload(feature: &str) -> bool {
    let is_segmentation = feature.ends_with("-segmentation") && feature != "tx-generic-segmentation";
    feature.starts_with("tx-checksum-")
        || feature.starts_with("tx-") && is_segmentation
        || matches!(feature, "tx-gso-partial" | "tx-gso-list")
}

fn offloads(features: &[Feature]) -> Offloads {
    let names = |is_on: bool, can_change: bool| -> BTreeSet<String> {
        let alike = |feature: &&Feature| feature.is_on == is_on && feature.can_change == can_change;
        let found = features.iter().filter(|feature| is_offload(&feature.name)).filter(alike);
        found.map(|feature| feature.name.clone()).collect()
    };
    Offloads { on: names(true, true), off: names(false, true), fixed: names(true, false) }
}

/// A device, by its name in the calling thread's network namespace.
struct Device<'a> {
    /// Any kind of socket works; every kernel has this kind.
    socket: UnixDatagram,
    name: &'a str,
}

impl<'a> Device<'a> {
    fn open(name: &'a str) -> io::Result<Self> {
        Ok(Self { socket: UnixDatagram::unbound()?, name })
    }

    /// Reads all features.
    fn features(&self) -> io::Result<Vec<Feature>> {
        let names = self.feature_names()?;
        // `struct ethtool_gfeatures`: for each 32 features the words available, requested, active, never_changed.
        let blocks = names.len().div_ceil(32);
        let mut request = vec![0; 2 + 4 * blocks];
        (request[0], request[1]) = (ETHTOOL_GFEATURES, blocks as u32);
        self.ask(&mut request)?;
        let is_set = |bit: usize, word: usize| request[2 + 4 * (bit / 32) + word] >> (bit % 32) & 1 == 1;
        let feature = |(bit, name)| Feature {
            name,
            bit,
            is_on: is_set(bit, 2),
            can_change: is_set(bit, 0) && !is_set(bit, 3),
        };
        Ok(names.into_iter().enumerate().map(feature).collect())
    }

    /// Switches these features.
    fn set(&self, features: &[Feature], on: bool) -> io::Result<()> {
        // `struct ethtool_sfeatures`: for each 32 features the words valid, requested. The kernel requires all of them.
        let blocks = self.feature_count()?.div_ceil(32);
        let mut request = vec![0; 2 + 2 * blocks];
        (request[0], request[1]) = (ETHTOOL_SFEATURES, blocks as u32);
        for Feature { bit, .. } in features {
            let at = 2 + 2 * (bit / 32);
            request[at] |= 1 << (bit % 32);
            request[at + 1] |= u32::from(on) << (bit % 32);
        }
        self.ask(&mut request)
    }

    /// Returns the number of features of this kernel.
    fn feature_count(&self) -> io::Result<usize> {
        // `struct ethtool_sset_info`: a word reserved, a mask of 64 bits, the number of strings of each set in it.
        let mask = 1_u64 << ETH_SS_FEATURES;
        let [a, b, c, d, e, f, g, h] = mask.to_ne_bytes();
        let mask = [[a, b, c, d], [e, f, g, h]].map(u32::from_ne_bytes);
        let mut request = [ETHTOOL_GSSET_INFO, 0, mask[0], mask[1], 0];
        self.ask(&mut request)?;
        Ok(request[4] as usize)
    }

    /// Returns the names of the features, each at the index that is its number.
    fn feature_names(&self) -> io::Result<Vec<String>> {
        let count = self.feature_count()?;
        // `struct ethtool_gstrings`: the set, its length, texts of 32 bytes, padded with zeros.
        let mut request = vec![0; 3 + ETH_GSTRING_WORDS * count];
        (request[0], request[1], request[2]) = (ETHTOOL_GSTRINGS, ETH_SS_FEATURES, count as u32);
        self.ask(&mut request)?;
        let text = |words: &[u32]| {
            let bytes = words.iter().flat_map(|word| word.to_ne_bytes());
            String::from_utf8_lossy(&bytes.take_while(|byte| *byte != 0).collect::<Vec<_>>()).into_owned()
        };
        Ok(request[3..].chunks(ETH_GSTRING_WORDS).map(text).collect())
    }

    /// Passes a request to the kernel. It must have the length of its command; the reply overwrites it.
    fn ask(&self, request: &mut [u32]) -> io::Result<()> {
        // SAFETY: every field of an `ifreq` is a number or a pointer that may be null.
        let mut ifreq: libc::ifreq = unsafe { std::mem::zeroed() };
        let end = ifreq.ifr_name.len() - 1;
        for (to, from) in ifreq.ifr_name[..end].iter_mut().zip(self.name.bytes()) {
            *to = from as libc::c_char;
        }
        ifreq.ifr_ifru.ifru_data = request.as_mut_ptr().cast();
        // SAFETY: the descriptor is open, and the kernel writes no more than the request holds: the callers make room
        // for the number of features and strings that the kernel has reported, which does not change while it runs.
        match unsafe {
            libc::ioctl(self.socket.as_raw_fd(), libc::SIOCETHTOOL as libc::Ioctl, &raw mut ifreq)
        } {
            -1 => Err(io::Error::last_os_error()),
            // The reply to a change contains the driver's changes; a fresh read shows more.
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

    use mirror_core::destination::Destination;
    use rtnetlink::LinkVeth;
    use tokio::time::timeout;

    use super::*;
    use crate::{
        kernel::links::{
            LinkTable as _,
            netlink::Netlink,
            tests::{DEADLINE, add, by_name, handle, on_a_node, quiet},
        },
        model::{LinkChange, TargetName},
    };

    #[test]
    fn what_changes_a_frame_that_is_sent_is_an_offload() {
        for name in [
            "tx-checksum-ip-generic",
            "tx-checksum-ipv4",
            "tx-checksum-sctp",
            "tx-tcp-segmentation",
            "tx-tcp6-segmentation",
            "tx-udp-segmentation",
            "tx-udp_tnl-csum-segmentation",
            "tx-gso-partial",
            "tx-gso-list",
        ] {
            assert!(is_offload(name), "{name}");
        }
        for name in [
            "tx-generic-segmentation",
            "rx-checksum",
            "tx-scatter-gather",
            "tx-vlan-hw-insert",
            "tx-lockless",
        ] {
            assert!(!is_offload(name), "{name}");
        }
    }

    #[test]
    fn offloads_are_read_and_switched() {
        on_a_node(|| async {
            let (mut netlink, handle) = (Netlink::new().unwrap(), handle());
            let target = (TargetName::default(), Destination::Device("a".into()));
            netlink.follow(&[target].into());
            add(&handle, LinkVeth::new("a", "b").build()).await;
            let [a, b] =
                [by_name(&mut netlink, "a").await.unwrap(), by_name(&mut netlink, "b").await.unwrap()];
            let born = a.offloads.unwrap();
            for name in ["tx-checksum-ip-generic", "tx-tcp-segmentation", "tx-tcp6-segmentation"] {
                assert!(born.on.contains(name), "{born:?}");
            }
            assert_eq!(b.offloads, None, "nobody asked");

            quiet(&mut netlink).await;
            netlink.apply(&LinkChange::SetOffloads(a.ifindex, false)).await.unwrap();
            timeout(DEADLINE, netlink.changed()).await.expect("switched offloads wake");
            let off = by_name(&mut netlink, "a").await.unwrap().offloads.unwrap();
            assert_eq!((off.on.len(), off.off), (0, born.on.union(&born.off).cloned().collect()));
            netlink.apply(&LinkChange::SetOffloads(a.ifindex, true)).await.unwrap();
            let on = by_name(&mut netlink, "a").await.unwrap().offloads.unwrap();
            assert!(on.off.is_empty() && on.on.is_superset(&born.on), "{on:?}");
        });
    }
}
