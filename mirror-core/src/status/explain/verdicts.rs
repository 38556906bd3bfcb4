//! The meaning of each verdict, and what can be done about it.
//!
//! Texts only, a part of [`explain`](super). docs/metrics.md has the same as a table.

use mirror_common::verdict::{Misfit, Verdict};

/// Returns the meaning and the remedy of a verdict, by its name.
pub(super) fn words(name: &str) -> &'static str {
    let verdict = Verdict::ALL.into_iter().find(|verdict| verdict.name() == name);
    verdict.map_or("This result is unknown to this version of mirror-agent.", of)
}

/// Returns the meaning and the remedy of copies that differ from the request.
pub(super) const fn of_misfit(misfit: Misfit) -> &'static str {
    match misfit {
        Misfit::Cut => {
            "They did not fit into a packet of the tunnel, or into a record of the stream, and were cut. oversize=segment and \
             a larger MTU on the way leave tunnels more room."
        }
        Misfit::Long => {
            "They are longer than the snap length, because the kernel cuts no packet within its headers."
        }
    }
}

const fn of(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Copied => "The target accepted a copy.",
        Verdict::OtherDirection => {
            "The mirror does not include this direction. The value \"true\" or \"both\" includes both."
        }
        Verdict::Duplicate => {
            "The target already received this packet, in the same form, from another pod's tap or another mirror of this \
             pod. Nothing is missing."
        }
        Verdict::Loop => {
            "The packet is itself a copy, or carries copies to a target. It is never copied again."
        }
        Verdict::TargetDown => "The target was down when the packet passed.",
        Verdict::Congested => {
            "The device of the target did not accept the copy: its queue was full, or the packet was longer than its \
             MTU. A filter, a sample or a snap length makes fewer or shorter copies."
        }
        Verdict::Failed => {
            "The kernel could not make the copy, for example without free memory. If this persists, the agent's log \
             may say why."
        }
        Verdict::Filtered => {
            "The mirror does not select the packet, for example because its filter does not match. `mirror-agent filter \
             check --pcap` tries a filter on a capture."
        }
        Verdict::SampledOut => "The flow is not in the sample. A larger sample includes more flows.",
        Verdict::Limited => {
            "A rate was used up: that of the mirror, of the pod (--max-pod-rate), of its namespace \
             (--max-namespace-rate), of the node (--max-rate) or of the MirrorTarget (maxRate). A narrower filter needs \
             fewer copies; a higher rate allows more."
        }
        Verdict::Ended => "A budget is used up. All budgets restart when the settings of the mirror change.",
        Verdict::Uncut => {
            "The copy could not be cut to the snap length, or addressed for the tunnel, so it was not delivered. \
             Without a snap length, a copy to a device is not cut."
        }
        Verdict::Unread => {
            "No program read the mirror interface, and --when-read copies only for a reader. Copies begin within 40 ms of \
             the start of tcpdump or an IDS on it."
        }
        Verdict::Lost => {
            "The ring of the stream had no room: the program that reads it is too slow. A filter, a snap length or a \
             larger --buffer helps."
        }
    }
}
