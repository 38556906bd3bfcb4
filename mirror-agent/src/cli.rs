//! The commands: each one connects the parts that it needs. [`args`] has their flags.
//!
//! Nothing here decides about pods or packets, and no other room names this one.

mod apiserver;
pub mod args;
pub mod attach;
pub mod cleanup;
mod controller;
mod crds;
pub mod filter;
mod ready;
pub mod run;
pub mod status;
pub mod tail;
#[cfg(test)]
mod tests;

use std::{
    env,
    future::Future,
    io::{self, IsTerminal as _, Write as _},
};

use anyhow::Context as _;
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    cli::args::{Cli, Command, LogFormat, MirrorArgs},
    mirror_iface::{MirrorIface, MirrorIfaces},
};

/// Runs the command that was typed.
pub fn execute(cli: Cli) -> anyhow::Result<()> {
    log_to_stderr(cli.log_format, &cli.log)?;
    // One thread is enough for a loop that sleeps most of the time, and keeps the agent small.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(async {
        match cli.command {
            Command::Run(args) => run::run(*args).await,
            Command::Attach(args) => attach::attach(args).await,
            Command::Tail(args) => tail::tail(args).await,
            Command::Capture(args) => tail::capture(args).await,
            Command::Recorder(args) => tail::recorder(args).await,
            Command::Controller(args) => controller::controller(args).await,
            Command::Apiserver(args) => apiserver::apiserver(args).await,
            Command::Status { output, state } => status::status(output, &state).await,
            Command::Ready { listen } => ready::ready(listen).await,
            Command::Cleanup(args) => cleanup::cleanup(args).await,
            Command::Filter(args) => filter::filter(args),
            Command::Explain { pod, state } => status::explain(pod, &state).await,
            Command::Crds => print(&crds::crds()?),
        }
    })
}

fn log_to_stderr(format: LogFormat, filter: &str) -> anyhow::Result<()> {
    // These libraries warn at each attempt of an operation whose failure the agent logs once. The warnings of
    // netlink-proto also contain kilobytes of data that a pod controls. The user can enable these logs.
    let filter = tracing_subscriber::EnvFilter::try_new(format!(
        "kube_runtime=error,kube_client=off,netlink_proto=off,{filter}"
    ))
    .context("--log")?;
    // https://no-color.org
    let colours = io::stderr().is_terminal() && env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let subscriber =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).with_ansi(colours);
    match format {
        LogFormat::Text => subscriber.with_target(false).init(),
        LogFormat::Json => subscriber.json().flatten_event(true).with_target(false).init(),
    }
    Ok(())
}

/// How missing mirror interfaces are created.
fn mirrors(args: &MirrorArgs) -> MirrorIfaces {
    let template = MirrorIface::new("", args.mirror_iface_mtu).offloads(args.mirror_offloads);
    MirrorIfaces::new(template.when_read(args.when_read))
}

fn print(text: &str) -> anyhow::Result<()> {
    match io::stdout().write_all(text.as_bytes()) {
        // The reader has closed the pipe, as in `status | head`.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to standard output"),
    }
}

/// Becomes ready at SIGINT (Ctrl-C) or SIGTERM.
fn stop_signal() -> anyhow::Result<impl Future<Output = ()>> {
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot handle SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("cannot handle SIGTERM")?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}
