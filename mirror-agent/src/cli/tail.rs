//! `mirror-agent tail`, `capture` and `recorder`: read the packets of pods and interfaces into pcapng files, or keep
//! the newest ones.
//!
//! `capture::tail` does the reading. If no agent runs, `tail` and `capture` run the loop themselves, for interfaces,
//! and send themselves the same request.

use std::{
    collections::BTreeMap,
    future::pending,
    io::{self, IsTerminal as _},
    path::PathBuf,
};

use anyhow::{Context as _, bail};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
};

use super::{attach::run_alone, stop_signal};
use crate::{
    capture::{
        control::{Request, Subject as Of},
        recording::{Kept, Plan, Sink},
        tail::{Ask, Since, Subject, memory, pipe, read, read_past, recorder, wanted},
    },
    cli::args::{CaptureArgs, RecorderArgs, SubjectArgs, TailArgs},
    kernel::dataplane::pins::Pins,
    model::Actual,
    select::Policy,
};

/// Reads packets as they arrive.
pub async fn tail(args: TailArgs) -> anyhow::Result<()> {
    let is_stdout = args.write.as_os_str() == "-";
    if is_stdout && io::stdout().is_terminal() {
        bail!("packets are not for a terminal: use -w FILE, or a pipe, as in `... | tcpdump -nr -`");
    }
    let output = if is_stdout { Sink::Stdout } else { Sink::Path(args.write) };
    let TailArgs { subject, since, no_follow, .. } = args;
    if let (Some(target), Some(_), false) = (&subject.target, since, no_follow) {
        bail!("the recorder of target {target} reads on, and a stream has one reader: use --no-follow");
    }
    run(subject, output, Kept::All, since.map(|time| Since { time, is_all: no_follow })).await
}

/// Keeps packets in memory or in rotating files.
pub async fn capture(args: CaptureArgs) -> anyhow::Result<()> {
    if args.write.as_os_str() == "-" {
        bail!("`capture` writes a file: use -w FILE, or `tail` for standard output");
    }
    let kept = match args {
        CaptureArgs { ring: Some(bound), .. } => Kept::Last(bound),
        CaptureArgs { first: Some(bytes), .. } => Kept::First { bytes },
        CaptureArgs { rotate: Some(bytes), files, .. } => Kept::Files { bytes, files },
        CaptureArgs { .. } => Kept::All,
    };
    let twice = memory::is_in_memory(&args.write).then_some("the file is in memory, too");
    let instead = ", or --rotate, which keeps nothing in memory";
    memory::check(kept, args.subject.buffer, twice, instead)?;
    run(args.subject, Sink::Path(args.write), kept, None).await
}

/// Keeps the newest copies until it is stopped.
pub async fn recorder(args: RecorderArgs) -> anyhow::Result<()> {
    let RecorderArgs { target, ring, super_frames, buffer, state } = args;
    let kept = Kept::Last(ring);
    memory::check(kept, buffer, Some("`tail --since` gets a copy"), "")?;
    let stop = stop_signal()?;
    // It has no file, so it leaves nothing behind.
    let output = Sink::Path(PathBuf::from("/dev/null"));
    let plan = Plan { output, kept, super_frames, max_packets: None, comment: None };
    let request = Request { of: Of::Target(target.to_string()), ring_bytes: buffer };
    let subject = Subject { request, bpffs: state.bpffs, since: None, duration: None };
    tokio::select! {
        outcome = recorder::run(&target, &subject, plan) => outcome,
        () = stop => Ok(()),
    }
}

async fn run(args: SubjectArgs, output: Sink, kept: Kept, since: Option<Since>) -> anyhow::Result<()> {
    args.check()?;
    let (super_frames, max_packets) = (args.super_frames, args.packets);
    let plan = Plan { output, kept, super_frames, max_packets, comment: None };
    let subject = subject(args, since);
    // First, so that from here on Ctrl-C leads to the clean-up.
    let stop = stop_signal()?;
    tokio::pin!(stop);
    let _open = tokio::select! {
        open = pipe::has_reader(&plan.output) => open,
        () = &mut stop => return Ok(()),
    };
    // A recorder knows pods and interfaces by their names, without an agent.
    if let Some(since @ Since { is_all: true, .. }) = since {
        let wanted = wanted(&subject, since, None)?;
        return tokio::select! {
            outcome = read_past(&subject, &wanted, plan, since, None) => outcome,
            () = stop => Ok(()),
        };
    }
    // Without a buffer in memory, SIGUSR1 keeps its default action and ends the process.
    let asks = matches!(plan.kept, Kept::Last(_)).then(asks_by_signal).transpose()?;
    match (Pins::connect_control()?, &subject.request.of) {
        (Some(agent), _) => read(agent, &subject, plan, asks, None, stop).await,
        (None, Of::Target(target)) => {
            bail!(
                "no agent is running on this node, and the copies for target {target} need one; start \
                 it with `mirror-agent run --define-target {target}=stream`"
            )
        }
        (None, Of::Capture { pods, .. }) if pods.is_empty() => {
            let is_left = |installed: &Actual| *installed != Actual::empty(installed.capacity);
            let work = async {
                let agent = Pins::connect_control()?
                    .context("cannot reach the control socket that was just created")?;
                read(agent, &subject, plan, asks, None, stop).await
            };
            let policy = Policy { targets: BTreeMap::new(), ..Policy::default() };
            run_alone(&subject.bpffs, None, policy, is_left, pending(), work).await
        }
        (None, _) => {
            bail!("no agent is running on this node, so pods cannot be found; name interfaces instead")
        }
    }
}

fn subject(args: SubjectArgs, since: Option<Since>) -> Subject {
    let settings = args.settings();
    let SubjectArgs { interfaces, pods, target, direction, duration, buffer, state, .. } = args;
    let of = match target {
        Some(target) => Of::Target(target.to_string()),
        None => Of::Capture {
            pods: pods.into_iter().collect(),
            interfaces: interfaces.into_iter().collect(),
            direction: direction.unwrap_or_default(),
            settings,
        },
    };
    Subject { request: Request { of, ring_bytes: buffer }, bpffs: state.bpffs, since, duration }
}

/// Returns a receiver with an [`Ask::Save`] for each SIGUSR1.
fn asks_by_signal() -> anyhow::Result<mpsc::Receiver<Ask>> {
    let (asks, asked) = mpsc::channel(1);
    let mut wanted = signal(SignalKind::user_defined1()).context("cannot handle SIGUSR1")?;
    tokio::spawn(async move { while wanted.recv().await.is_some() && asks.send(Ask::Save).await.is_ok() {} });
    Ok(asked)
}
