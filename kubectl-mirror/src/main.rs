//! `kubectl mirror`: streams the packets of pods to Wireshark, creates and deletes mirrors, and reports their state.
//!
//! ```text
//! cli ─► tail ─────► workload; packets     read packets, merge them by time, and read on after a gap
//!     └► mirror ───► workload; resource    make and delete Mirrors
//!     └► status ───► resource; screen      Mirrors and ClusterMirrors with their status
//!     └► explain ──► reports ─► packets    the words of the agent about a pod
//!     └► coverage ─► reports; screen       packets that taps saw and NICs carried
//!     └► top ──────► reports; screen       what the NICs carry now
//!     └► check ────► read; judge           whether podmirror can work here, or works
//!     └► sysdump ──► check; reports        an archive for a bug report
//!     └► complete ─► workload              candidates for a shell
//!        extcap ───► tail; complete        interfaces of Wireshark
//!                    packets               requests to the API of packets
//!                    cluster               the connection to the API server
//!                    screen ─► jsonpath    what is printed, and templates for it
//! ```
//!
//! It communicates only with the API server, with the rights of its user. It needs no root, and runs on Linux, macOS
//! and Windows. `main` parses the command line, and turns the outcome into an exit code: 0 success, 1 failure, 2 wrong
//! usage (clap's own); of `tail` 3, if a part of the packets is missing.

mod check;
mod cli;
mod cluster;
mod complete;
mod coverage;
mod explain;
mod extcap;
mod jsonpath;
mod mirror;
mod packets;
mod reports;
mod resource;
mod screen;
mod status;
mod sysdump;
mod tail;
mod top;
mod workload;

use std::{
    env, fs,
    io::{self, Write as _},
    process::ExitCode,
};

use anyhow::Context as _;
use tokio::{runtime::Runtime, sync::mpsc};

use self::{
    cli::{Cli, Command},
    cluster::Cluster,
};

fn main() -> ExitCode {
    let outcome = if complete::is_asked() {
        print(&complete::candidates(env::args_os().collect())).map(|()| ExitCode::SUCCESS)
    } else if extcap::is_asked() {
        extcap::run(env::args_os().skip(1))
    } else {
        execute(cli::read(env::args_os()).unwrap_or_else(|usage| usage.exit()))
    };
    outcome.unwrap_or_else(|error| {
        // A failure to print cannot be reported.
        let _ = writeln!(io::stderr(), "{}: {}", kind(&error), mirror_client::in_words(error.as_ref()));
        ExitCode::FAILURE
    })
}

/// Where an error comes from, in kubectl's words.
fn kind(error: &anyhow::Error) -> String {
    match error.chain().find_map(|cause| cause.downcast_ref()) {
        Some(kube::Error::Api(status)) => format!("Error from server ({})", status.reason),
        _ => "error".to_owned(),
    }
}

fn execute(cli: Cli) -> anyhow::Result<ExitCode> {
    if let Command::Man { directory } = cli.command {
        fs::create_dir_all(&directory)
            .and_then(|()| clap_mangen::generate_to(cli::command(), &directory))
            .with_context(|| format!("cannot write the manual pages into {}", directory.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let runtime = runtime()?;
    let outcome = runtime.block_on(async {
        use Command::{Coverage, Explain, Sysdump, Tail, Top};
        // The server of packets says why it cannot answer now.
        let is_patient =
            !matches!(cli.command, Tail(_) | Explain(_) | Coverage { .. } | Top(_) | Sysdump { .. });
        let cluster = Cluster::connect(&cli.connection, is_patient).await?;
        match cli.command {
            Tail(args) => return tail::tail(args, &cluster).await,
            Command::On(args) => mirror::on(args, &cluster).await?,
            Command::Off(args) => mirror::off(args, &cluster).await?,
            Command::Status(args) => status::status(args, &cluster).await?,
            Explain(args) => explain::explain(args, &cluster).await?,
            Coverage { all_namespaces, output } => {
                coverage::coverage(all_namespaces, output, &cluster).await?;
            }
            Top(args) => top::top(args, &cluster).await?,
            Command::Check { output } => return check::check(output, &cluster).await,
            Sysdump { output } => sysdump::sysdump(output, &cluster).await?,
            Command::Man { .. } => {}
        }
        Ok(ExitCode::SUCCESS)
    });
    // A blocked reader of standard output must not delay the exit.
    runtime.shutdown_background();
    outcome
}

fn runtime() -> anyhow::Result<Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start the runtime")
}

/// Receives an item at each Ctrl-C and SIGTERM. It never closes.
fn stop_signals() -> anyhow::Result<mpsc::Receiver<()>> {
    let (sender, receiver) = mpsc::channel(1);
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let sender = sender.clone();
        let mut terminate = signal(SignalKind::terminate()).context("cannot handle SIGTERM")?;
        tokio::spawn(
            async move { while terminate.recv().await.is_some() && sender.send(()).await.is_ok() {} },
        );
    }
    tokio::spawn(
        async move { while tokio::signal::ctrl_c().await.is_ok() && sender.send(()).await.is_ok() {} },
    );
    Ok(receiver)
}

fn print(text: &str) -> anyhow::Result<()> {
    let mut output = io::stdout().lock();
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        // The reader has closed the pipe, as in `status | head`.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to standard output"),
    }
}

/// Prints a message to standard error, except for Wireshark, which takes it for a failure.
fn tell(text: &str) {
    if !extcap::is_asked() {
        tell_failure(text);
    }
}

/// Prints the message of a failure to standard error.
fn tell_failure(text: &str) {
    // A failure to print cannot be reported.
    let _ = writeln!(io::stderr(), "kubectl-mirror: {text}");
}
