//! A request for packets: its URI, and its answer as blocks.

use std::time::Duration;

use anyhow::{Context as _, Error, anyhow};
use http_body_util::BodyExt as _;
use kube::core::Selector;
use mirror_api::SettingsSpec;
use mirror_capture::{
    blocks::{Block, Blocks},
    merge::StreamId,
    pcapng::Names,
};
use mirror_core::{settings::show_kubernetes_duration, status::printable};
use tokio::sync::mpsc;

use super::course::Course;
use crate::{cli::TailArgs, cluster::Cluster, packets, workload::Selection};

/// The beginning of the server's messages for people, and then of the reason for the end of a stream.
pub(super) const SAYS: &str = "podmirror: ";
pub(super) const END: &str = "end: ";

/// The difference between the numbers of two streams of a request.
pub(super) const NEXT: StreamId = 1 << 32;
/// The longest `timeoutSeconds`.
const MAX_SECONDS: u64 = 99_999;

/// An event of a stream. Each request that is sent is a separate stream.
pub(super) type News = (StreamId, What);

/// The kinds of events of a stream.
pub(super) enum What {
    /// The answer begins.
    Began,
    Blocks(Vec<Block>),
    /// The answer has ended, for this reason of the server, or too early, or there was none.
    Ended(anyhow::Result<String>),
}

/// A request, which is sent again after a gap.
pub(super) struct Source {
    /// The name of the pod, if there are several requests.
    name: Option<String>,
    parameters: Vec<(&'static str, String)>,
    pub(super) course: Course,
    /// The newest stream.
    pub(super) id: StreamId,
}

impl Source {
    /// The URI for the packets of a namespace, or of all, during this time.
    pub(super) fn uri(&self, scope: Option<&str>, time: Duration) -> String {
        let mut parameters = self.parameters.clone();
        // Later streams go on after the past.
        parameters.retain(|(key, _)| !(self.course.has_begun() && *key == "since"));
        let seconds = time.as_secs().saturating_add(1).min(MAX_SECONDS);
        parameters.push(("timeoutSeconds", seconds.to_string()));
        packets::uri(scope, "packets", &parameters)
    }

    /// A message about the request.
    pub(super) fn words(&self, text: &str) -> String {
        let name = self.name.as_ref().map(|name| format!("{name}: ")).unwrap_or_default();
        name + &printable(text)
    }
}

/// The requests for the selected pods: one for each name, or one for all.
pub(super) fn all(args: &TailArgs, selection: &Selection) -> anyhow::Result<Vec<Source>> {
    let labels = Selector::try_from(selection.labels.clone());
    let labels = labels.map_err(|error| anyhow!("{error}")).context("the selector of the workload")?;
    let labels = labels.to_string();
    let SettingsSpec { filter, snap_length, .. } = args.settings()?;
    let yes = |is_set: bool| is_set.then(|| "true".to_owned());
    let names = selection.pods.as_deref().unwrap_or_default();
    let of = |id: StreamId, pod: Option<&String>| {
        let parameters = [
            ("watch", yes(true)),
            ("fieldSelector", pod.map(|pod| format!("metadata.name={pod}"))),
            ("labelSelector", Some(labels.clone()).filter(|labels| !labels.is_empty())),
            ("filter", filter.clone()),
            ("snapLength", snap_length.map(|length| length.to_string())),
            ("superFrames", yes(args.super_frames)),
            ("since", args.since.map(show_kubernetes_duration)),
            ("follow", args.no_follow.then(|| "false".to_owned())),
        ];
        let parameters = parameters.into_iter().filter_map(|(key, value)| Some((key, value?)));
        let name = pod.filter(|_| names.len() > 1).cloned();
        Source { name, parameters: parameters.collect(), course: Course::default(), id }
    };
    Ok(match names {
        [] => vec![of(0, None)],
        names => (0..).zip(names).map(|(id, pod)| of(id, Some(pod))).collect(),
    })
}

/// Sends a request, and passes its answer on. Without a receiver of the events, the request is dropped.
pub(super) async fn read(cluster: Cluster, uri: String, id: StreamId, news: mpsc::Sender<News>) {
    let ended = pass_on(&cluster, &uri, id, &news).await;
    // The command may have ended.
    let _ = news.send((id, What::Ended(ended))).await;
}

async fn pass_on(
    cluster: &Cluster,
    uri: &str,
    id: StreamId,
    news: &mpsc::Sender<News>,
) -> anyhow::Result<String> {
    let answer = tokio::select! {
        answer = packets::get(cluster, uri) => answer?,
        () = news.closed() => return Ok(String::new()),
    };
    news.send((id, What::Began)).await?;
    let (mut body, mut blocks, mut why) = (answer.into_body(), Blocks::default(), None);
    loop {
        let frame = tokio::select! {
            frame = body.frame() => frame,
            () = news.closed() => return Ok(String::new()),
        };
        let Some(frame) = frame else { break };
        blocks.push(&frame?.into_data().unwrap_or_default());
        let mut complete = Vec::new();
        while let Some(block) = blocks.pop().map_err(Error::msg)? {
            if let Block::Names(Names { comment: Some(comment), .. }) = &block
                && let Some(reason) = comment.strip_prefix(SAYS).and_then(|text| text.strip_prefix(END))
            {
                why = Some(reason.to_owned());
            }
            complete.push(block);
        }
        news.send((id, What::Blocks(complete))).await?;
    }
    why.context("the answer was not complete")
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

    use mirror_api::labels;
    use mirror_core::settings::{parse_duration, parse_filter, parse_snaplen};
    use proptest::prelude::*;

    use super::*;
    use crate::cli::{self, Command};

    fn tail(words: &[&str]) -> TailArgs {
        let words = ["kubectl-mirror", "tail"].iter().chain(words).map(Into::into);
        let Command::Tail(args) = cli::read(words).unwrap().command else { panic!("no tail") };
        args
    }

    /// The requests as pairs of keys and values.
    fn requests(words: &[&str]) -> Vec<String> {
        let args = tail(words);
        let labels = args.which.selector.clone().unwrap_or_default();
        let pods = args.which.workloads().unwrap().into_iter().map(|pod| pod.name).collect::<Vec<_>>();
        let selection = Selection { labels, pods: (!pods.is_empty()).then_some(pods) };
        let pair = |(key, value): &(&str, String)| format!("{key}={value}");
        let all = all(&args, &selection).unwrap();
        all.iter().map(|of| of.parameters.iter().map(pair).collect::<Vec<_>>().join(" ")).collect()
    }

    #[test]
    fn the_words_are_the_parameters_of_the_request() {
        assert_eq!(requests(&["-l", ""]), ["watch=true"]);
        assert_eq!(
            requests(&["-l", "app==web,tier in (b, a)", "--snaplen", "96", "--", "tcp", "port 443"]),
            ["watch=true labelSelector=app=web,tier in (a,b) filter=tcp port 443 snapLength=96"]
        );
        let past = "superFrames=true since=1h30m follow=false";
        assert_eq!(
            requests(&["pod", "web-0", "web-1", "--super-frames", "--since", "90m", "--no-follow"]),
            ["web-0", "web-1"].map(|pod| format!("watch=true fieldSelector=metadata.name={pod} {past}"))
        );
    }

    proptest! {
        /// The server reads values with these functions.
        #[test]
        fn the_server_reads_what_was_typed(
            app in "[a-z0-9]([a-z0-9_.-]{0,9}[a-z0-9])?", tiers in prop::collection::vec("[a-z0-9]{0,5}", 1..4),
            operator in "(in|notin)", snaplen in 76..=15_616_u32, port: u16, seconds in 1..86_400_u64,
        ) {
            let labels = format!("app={app},tier {operator} ({}),!test", tiers.join(","));
            let (length, since) = (snaplen.to_string(), format!("{seconds}s"));
            let filter = format!("tcp port {port}");
            let words = ["-l", &labels, "--snaplen", &length, "--since", &since, "--", &filter];
            let all = all(&tail(&words), &Selection { labels: labels::parse(&labels).unwrap(), pods: None }).unwrap();
            let value = |key: &str| all[0].parameters.iter().find(|(of, _)| *of == key).unwrap().1.as_str();
            let selector = |text: &str| Selector::try_from(labels::parse(text).unwrap()).unwrap();
            prop_assert_eq!(selector(value("labelSelector")), selector(&labels));
            prop_assert_eq!(parse_filter(value("filter")).unwrap().text, filter);
            prop_assert_eq!(parse_snaplen(value("snapLength")).unwrap(), snaplen);
            prop_assert_eq!(parse_duration(value("since")).unwrap().as_secs(), seconds);
        }
    }
}
