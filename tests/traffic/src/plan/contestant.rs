//! The contestants: which software copies, and how.

use serde::{Deserialize, Serialize};

/// The software that handles the mirrored pod's packets. All copies are of this pod, in both directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Contestant {
    /// No software.
    Off,
    /// No software, a second time: its difference from `Off` is noise.
    OffAgain,
    /// An agent that mirrors another pod of the node.
    Unselected,
    /// podmirror to a mirror interface, attached by TCX.
    Tcx,
    /// The same, with tcpdump as reader of the mirror interface.
    TcxRead,
    /// The same as `Tcx`, with `--when-read` and without a reader, so that nothing is copied.
    TcxUnread,
    /// The same as `Tcx`, to a device that frees its copies at once, as a dummy device does.
    TcxFreed,
    /// The same as `Tcx`, with a filter that matches no packet.
    TcxFilter,
    /// The same as `Tcx`, with a filter that matches about one packet of 128.
    TcxFew,
    /// podmirror to a mirror interface, attached by clsact.
    Clsact,
    /// podmirror to a stream, with `tail` as its reader.
    Stream,
    /// The same, cut to 96 bytes.
    Stream96,
    /// A program that only clones with `bpf_clone_redirect`.
    BareClone,
    /// tc: a u32 filter that matches everything, with the action mirred.
    Mirred,
    /// The same, with tcpdump as reader of the mirror interface.
    MirredRead,
    /// The same as `Mirred`, with a filter that matches about one packet of 128.
    MirredFew,
    /// tcpdump in the pod, to /dev/null.
    Tcpdump,
    /// The same, cut to 96 bytes.
    Tcpdump96,
    /// tcpdump in the pod, to files that it overwrites in turn.
    TcpdumpFile,
    /// tcpdump on the node side of the veth, to /dev/null.
    TcpdumpVeth,
    /// The same, to files that it overwrites in turn.
    TcpdumpVethFile,
}

impl Contestant {
    /// All contestants, in the order of the report.
    pub const ALL: [Self; 21] = [
        Self::Off,
        Self::OffAgain,
        Self::Unselected,
        Self::Tcx,
        Self::TcxRead,
        Self::TcxUnread,
        Self::TcxFreed,
        Self::TcxFilter,
        Self::TcxFew,
        Self::Clsact,
        Self::Stream,
        Self::Stream96,
        Self::BareClone,
        Self::Mirred,
        Self::MirredRead,
        Self::MirredFew,
        Self::Tcpdump,
        Self::Tcpdump96,
        Self::TcpdumpFile,
        Self::TcpdumpVeth,
        Self::TcpdumpVethFile,
    ];
    /// The most informative contestants.
    pub const FEW: [Self; 6] =
        [Self::Off, Self::OffAgain, Self::Tcx, Self::Stream96, Self::BareClone, Self::Mirred];

    /// Contestants that can copy the packets of a pod whose NIC has no peer on the node.
    pub const INSIDE: [Self; 6] =
        [Self::Off, Self::OffAgain, Self::Tcx, Self::Stream96, Self::Tcpdump, Self::Tcpdump96];

    /// The minimal set.
    pub const THREE: [Self; 3] = [Self::Off, Self::Tcx, Self::Mirred];

    /// Its name in the report.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::OffAgain => "off, again (noise)",
            Self::Unselected => "another pod is mirrored",
            Self::Tcx => "podmirror, TCX",
            Self::TcxRead => "podmirror, TCX, read",
            Self::TcxUnread => "podmirror, TCX, when read: no reader",
            Self::TcxFreed => "podmirror, TCX, copies freed at once",
            Self::TcxFilter => "podmirror, TCX, filter takes none",
            Self::TcxFew => "podmirror, TCX, filter takes 1 of 128",
            Self::Clsact => "podmirror, clsact",
            Self::Stream => "podmirror, stream",
            Self::Stream96 => "podmirror, stream, 96",
            Self::BareClone => "bare clone",
            Self::Mirred => "tc mirred",
            Self::MirredRead => "tc mirred, read",
            Self::MirredFew => "tc mirred, filter takes 1 of 128",
            Self::Tcpdump => "tcpdump in the pod",
            Self::Tcpdump96 => "tcpdump in the pod, 96",
            Self::TcpdumpFile => "tcpdump in the pod, file",
            Self::TcpdumpVeth => "tcpdump on the veth",
            Self::TcpdumpVethFile => "tcpdump on the veth, file",
        }
    }

    /// Whether the contestant attaches by TCX, which came with Linux 6.6.
    pub const fn needs_tcx(self) -> bool {
        matches!(
            self,
            Self::Unselected
                | Self::Tcx
                | Self::TcxRead
                | Self::TcxUnread
                | Self::TcxFreed
                | Self::TcxFilter
                | Self::TcxFew
                | Self::Stream
                | Self::Stream96
        )
    }
}
