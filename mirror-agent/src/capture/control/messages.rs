//! The messages on the control socket, and their encoding. Both ends use it ([`control`](super)).
//!
//! A message is a line of JSON. The ring is sent before the answer, with a separate byte.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, IoSlice, IoSliceMut},
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
};

use anyhow::anyhow;
use mirror_api::SettingsSpec;
pub use mirror_api::packets::ReadOf;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader, Interest},
    net::UnixStream,
};

use crate::{
    model::Directions,
    settings::{FILTER, Setting, Settings},
};

/// Maximum length of a request or an answer in bytes.
pub(super) const MOST_BYTES: u64 = 1 << 20;

/// The request of a program.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// The packets.
    pub of: Subject,
    /// Size of the ring in bytes: a power of two, of at least a page.
    pub ring_bytes: u32,
}

/// The requested packets.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
pub enum Subject {
    /// The packets of a new capture.
    Capture {
        /// The pods, by namespace and name.
        pods: BTreeSet<(String, String)>,
        /// The interfaces of the node.
        interfaces: BTreeSet<String>,
        /// The directions to copy.
        direction: Directions,
        /// The settings of the capture, by the keys of annotations.
        settings: BTreeMap<String, String>,
    },
    /// The packets for a reader of the API. Limits apply to the reader as to a Mirror. So do opt-outs and
    /// namespaces, to pods and to interfaces that lead into pods. Other interfaces show the packets of all pods
    /// that pass there.
    Reader {
        /// The pods or the interface.
        of: ReadOf,
        /// The directions to copy.
        direction: Directions,
        /// The settings.
        settings: Box<SettingsSpec>,
    },
    /// The copies for a stream target of the agent.
    Target(String),
}

/// The agent's answer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// The target whose copies are written to the ring; empty if the request is refused.
    pub target: String,
    /// The reason for a refusal, or what is not mirrored as requested. The agent retries what can still succeed.
    pub problems: Vec<String>,
    /// For the pods of a reader of the API: what it can begin with, apart from the packets of its sessions' interfaces.
    pub past: Wanted,
}

/// Packets of the past, which a recorder of the node may have.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wanted {
    /// Whose packets: names of interfaces, or of pods (`NAMESPACE/NAME`, or `NAMESPACE/*`); `None`: all packets.
    pub of: Option<BTreeSet<String>>,
    /// The pods and interfaces whose packets are left out all the same, unless `of` has their own names.
    pub except: BTreeSet<String>,
    /// Only these NICs of the pods in `of`; `None`: all NICs. It does not apply to interfaces in `of`.
    pub nics: Option<BTreeSet<String>>,
    /// Only the packets of these directions.
    pub directions: Directions,
    /// Only the packets that match.
    pub filter: Option<String>,
    /// At most this number of bytes of each packet.
    pub snaplen: Option<u32>,
    /// When they were copied, in ns of `CLOCK_MONOTONIC`: the first and the last moment. The client sets it.
    pub times: (u64, u64),
}

impl Wanted {
    /// Whether the interface with this name is wanted. The name of a pod's interface is `NAMESPACE/NAME NIC`.
    pub fn has(&self, interface: &str) -> bool {
        let Some(of) = &self.of else { return true };
        let (pod, nic) = interface.split_once(' ').unwrap_or((interface, ""));
        let is_in_namespace =
            |(namespace, _): (&str, _)| of.contains(&format!("{namespace}/*")) && !self.except.contains(pod);
        let has_pod = || of.contains(pod) || pod.split_once('/').is_some_and(is_in_namespace);
        let has_nic = self.nics.as_ref().is_none_or(|nics| nics.contains(nic));
        of.contains(interface) || has_nic && has_pod()
    }
}

/// Reads the settings of a capture, as a request has them.
pub fn parse(asked: &BTreeMap<String, String>) -> anyhow::Result<Settings> {
    let mut settings = Settings::default();
    for (key, value) in asked {
        let setting = Setting::named(key).ok_or_else(|| anyhow!("a capture has no setting {key:?}"))?;
        settings.set(setting.key, value)?;
    }
    Ok(settings)
}

/// Reads the settings of a reader of the API.
pub(in crate::capture) fn read(asked: &SettingsSpec) -> anyhow::Result<Settings> {
    let mut settings = asked.read().map_err(anyhow::Error::msg)?;
    if let Some(filter) = &asked.filter {
        settings.set(FILTER, filter)?;
    }
    Ok(settings)
}

/// Writes a message.
pub async fn write_line(
    stream: &mut (impl AsyncWrite + Unpin),
    message: &impl Serialize,
) -> anyhow::Result<()> {
    Ok(stream.write_all(&[serde_json::to_vec(message)?, b"\n".to_vec()].concat()).await?)
}

/// Reads a message.
pub async fn read_line(stream: &mut UnixStream) -> anyhow::Result<String> {
    let mut line = String::new();
    BufReader::new(stream.take(MOST_BYTES)).read_line(&mut line).await?;
    Ok(line)
}

/// Writes one byte, with the ring's descriptor if there is one, and the answer.
pub(super) async fn write_answer(
    stream: &mut UnixStream,
    answer: &Answer,
    ring: Option<&OwnedFd>,
) -> anyhow::Result<()> {
    let fds = ring.map(|ring| [ring.as_raw_fd()]);
    let rights = fds.as_ref().map(|fds| ControlMessage::ScmRights(fds));
    stream
        .async_io(Interest::WRITABLE, || {
            let byte = [IoSlice::new(b"+")];
            Ok(sendmsg::<()>(stream.as_raw_fd(), &byte, rights.as_slice(), MsgFlags::empty(), None)?)
        })
        .await?;
    write_line(stream, answer).await
}

/// Reads that byte, and the ring's descriptor if there is one.
pub(super) async fn receive_ring(stream: &UnixStream) -> io::Result<Option<OwnedFd>> {
    stream
        .async_io(Interest::READABLE, || {
            let mut byte = [0];
            let mut parts = [IoSliceMut::new(&mut byte)];
            let mut space = nix::cmsg_space!([i32; 1]);
            let flags = MsgFlags::MSG_CMSG_CLOEXEC;
            let message = recvmsg::<()>(stream.as_raw_fd(), &mut parts, Some(&mut space), flags)?;
            if message.bytes == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let mut ring = None;
            for control in message.cmsgs()? {
                if let ControlMessageOwned::ScmRights(fds) = control {
                    // SAFETY: the kernel has just created these descriptors for this process.
                    ring = fds.first().map(|fd| unsafe { OwnedFd::from_raw_fd(*fd) });
                }
            }
            Ok(ring)
        })
        .await
}
