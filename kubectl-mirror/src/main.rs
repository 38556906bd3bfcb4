//! `kubectl mirror`: streams the packets of pods to Wireshark, creates and deletes mirrors, and reports their state.
//!
//! ```text
//! cli ─► tail ─────► workload ─► selector   make a Mirror with a stream, read it from the agents, merge it by time
//!     └► mirror ───► workload               make and delete Mirrors
//!     └► status ───► screen                 Mirrors and MirrorNodes as one table
//!     └► explain ──► exec; words            one pod: the words of its agent, or those of the API server
//!     └► coverage ─► nodes ─► exec; screen  what the taps have seen of what the NICs have carried
//!     └► top ──────► nodes; rates; screen   what the NICs carry now
//!     └► check ────► read ─► nodes; judge   whether podmirror can work here, or works
//!     └► man                                the manual pages
//!                    agents                 the ready agent of each node
//!                    cluster                the connection to the API server
//! ```
//!
//! It communicates only with the API server, with the rights of its user, and with the agents by the API server's
//! port-forward and exec. It needs no root, and runs on Linux, macOS and Windows. `main` parses the command line, and
//! turns the outcome into an exit code: 0 success, 1 failure, 2 wrong usage (clap's own). `explain` returns the exit
//! code of the agent's command, `check` that of its worst finding, `tail --since` 3 if the past of a node is missing.

mod agents;
mod check;
mod cli;
mod cluster;
mod coverage;
mod exec;
mod explain;
mod man;
mod mirror;
mod nodes;
mod screen;
mod selector;
mod status;
mod tail;
mod top;
mod workload;

use std::{
    io::{self, Write as _},
    process::ExitCode,
};

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser as _};
use tokio::sync::mpsc;

use self::{
    cli::{Cli, Command},
    cluster::Cluster,
};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let failure = match cli.command {
        Command::Check(_) => ExitCode::from(check::FAILURE),
        _ => ExitCode::FAILURE,
    };
    execute(cli).unwrap_or_else(|error| {
        tell(&mirror_client::in_words(error.as_ref()));
        failure
    })
}

fn execute(cli: Cli) -> anyhow::Result<ExitCode> {
    match cli.command {
        Command::Completion { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "kubectl-mirror", &mut script);
            print(&String::from_utf8_lossy(&script))?;
            return Ok(ExitCode::SUCCESS);
        }
        Command::Man { directory } => {
            man::write(&directory)?;
            return Ok(ExitCode::SUCCESS);
        }
        _ => {}
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let outcome = runtime.block_on(async {
        let cluster = Cluster::connect(&cli.connection).await?;
        match cli.command {
            Command::Tail(args) => return tail::tail(args, &cluster).await,
            Command::On(args) => mirror::on(args, &cluster).await?,
            Command::Off(args) => mirror::off(args, &cluster).await?,
            Command::Status(args) => status::status(args, &cluster).await?,
            Command::Explain(args) => return explain::explain(args, &cluster).await,
            Command::Coverage(args) => coverage::coverage(args, &cluster).await?,
            Command::Top(args) => top::top(args, &cluster).await?,
            Command::Check(args) => return check::check(args, &cluster).await,
            Command::Completion { .. } | Command::Man { .. } => {}
        }
        Ok(ExitCode::SUCCESS)
    });
    // A blocked reader of standard output must not delay the exit.
    runtime.shutdown_background();
    outcome
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

/// Prints a message to standard error.
fn tell(text: &str) {
    // A failure to print cannot be reported.
    let _ = writeln!(io::stderr(), "kubectl-mirror: {text}");
}
