//! The reasons why a capture is not installed as requested, for the program that has requested it.
//!
//! A node has any number of pods, and an answer has a bound.

use crate::{
    report::Report,
    select::{Capture, Wants},
};

/// Maximum number of reasons in an answer.
pub(super) const MOST: usize = 40;
/// Maximum length of a reason in bytes.
const MOST_TEXT: usize = 1 << 10;

/// The first reasons, and the number of the others.
pub(super) fn of(capture: &Capture, report: &Report) -> Vec<String> {
    let mut problems = match &capture.wants {
        Wants::Named { .. } => of_named(capture, report),
        Wants::Reader(_) => of_selected(capture, report),
    };
    let more = problems.len().saturating_sub(MOST);
    problems.truncate(MOST);
    problems.iter_mut().for_each(|text| text.truncate(text.floor_char_boundary(MOST_TEXT)));
    problems.extend((more > 0).then(|| format!("and {more} more")));
    problems
}

/// Those for named pods and interfaces.
fn of_named(capture: &Capture, report: &Report) -> Vec<String> {
    let Wants::Named { pods, interfaces } = &capture.wants else { return Vec::new() };
    let mirror = capture.mirror();
    let is_asked = |namespace: &str, name: &str| pods.contains(&(namespace.into(), name.into()));
    let skipped = report.skipped.iter().filter(|skipped| match (&skipped.mirror, &skipped.pod) {
        (Some(of), _) if *of == mirror => true,
        // Another capture may select the pod, too.
        (_, Some(pod)) if skipped.mirror.is_none() || skipped.is_of_capture() => {
            is_asked(&pod.namespace, &pod.name)
        }
        (None, None) => skipped.nic.as_ref().is_some_and(|nic| interfaces.contains(nic)),
        _ => false,
    });
    let said = skipped.map(|skipped| {
        let subject = match (&skipped.pod, &skipped.nic) {
            (Some(pod), Some(nic)) => format!("{pod} {nic}: "),
            (Some(pod), None) => format!("{pod}: "),
            (None, Some(nic)) => format!("{nic}: "),
            (None, None) => String::new(),
        };
        format!("{subject}{}", skipped.why)
    });
    said.collect()
}

/// Those for selected pods.
fn of_selected(capture: &Capture, report: &Report) -> Vec<String> {
    let said = report.readers.get(&capture.ring).into_iter().flat_map(|coverage| {
        let refused = coverage.of.refused.iter().map(|(_, message)| message.clone());
        let pods = coverage.not_covered.iter().map(|of| match &of.nic {
            Some(nic) => format!("{} {nic}: {}", of.pod, of.message),
            None => format!("{}: {}", of.pod, of.message),
        });
        refused.chain(pods)
    });
    said.collect()
}
