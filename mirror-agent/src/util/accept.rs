//! Accept loops for the sockets of the agent. Neither a client nor a failure to accept can end a loop.

use std::{
    collections::VecDeque,
    future::Future,
    io::{self, ErrorKind},
    net::SocketAddr,
    os::unix::net::UnixListener as StdListener,
    time::Duration,
};

use nix::sys::socket::{
    setsockopt,
    sockopt::{KeepAlive, TcpKeepIdle, TcpKeepInterval, TcpUserTimeout},
};
use tokio::{
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    task::{AbortHandle, yield_now},
    time::sleep,
};
use tracing::warn;

use crate::util::backoff::Backoff;

/// Pause after `accept` failed, for example because descriptors or memory ran out. Other parts of the agent need them
/// more.
const PAUSE: Duration = Duration::from_secs(1);
/// The first and the longest delay before the next attempt to bind an address.
const RETRY: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(30));

/// Serves root on a UNIX socket, each connection in a task, until the result is dropped. Must be called within the
/// runtime.
pub(crate) fn of_root<F>(
    listener: StdListener,
    attend: impl Fn(UnixStream) -> F + Send + 'static,
) -> io::Result<impl Future<Output = ()> + Send + 'static>
where
    F: Future<Output = ()> + Send + 'static,
{
    listener.set_nonblocking(true)?;
    let listener = UnixListener::from_std(listener)?;
    Ok(async move {
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                sleep(PAUSE).await;
                continue;
            };
            // Only root reaches the socket. This check still holds if the socket's directory is opened to other users.
            if stream.peer_cred().is_ok_and(|peer| peer.uid() == 0) {
                tokio::spawn(attend(stream));
            }
        }
    })
}

/// Binds an address. Retries until it succeeds; `failed` gets each error.
pub(crate) async fn bind(address: SocketAddr, mut failed: impl FnMut(io::Error)) -> TcpListener {
    let mut backoff = RETRY;
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return listener,
            Err(error) => failed(error),
        }
        sleep(backoff.pause()).await;
    }
}

/// Serves anybody, each connection in a task, until the result is dropped. There are at most `most` of these tasks: at
/// the limit, a new connection evicts the oldest. `flag` has the address, for messages.
pub(crate) async fn of_anybody<F>(
    listener: TcpListener,
    most: usize,
    flag: &str,
    attend: impl Fn(TcpStream) -> F,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let mut tasks = VecDeque::<AbortHandle>::new();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                tasks.retain(|task| !task.is_finished());
                if tasks.len() == most
                    && let Some(oldest) = tasks.pop_front()
                {
                    oldest.abort();
                }
                tasks.push_back(tokio::spawn(attend(stream)).abort_handle());
                // Many simultaneous connections must not delay the loop, nor each other.
                yield_now().await;
            }
            // The client disconnected before it was accepted.
            Err(error)
                if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset) => {}
            Err(error) => {
                warn!(%error, "cannot accept a connection to {flag}");
                sleep(PAUSE).await;
            }
        }
    }
}

/// Lets the kernel close a connection whose client acknowledges nothing for `silence`, in seconds. hyper cannot: while it
/// waits to write, it does not notice that a request has ended, and while there is nothing to write, that the client's
/// machine is off.
pub(crate) fn close_if_silent(stream: &TcpStream, silence: u32) -> nix::Result<()> {
    setsockopt(stream, KeepAlive, &true)?;
    setsockopt(stream, TcpKeepIdle, &(silence / 3))?;
    setsockopt(stream, TcpKeepInterval, &(silence / 3))?;
    setsockopt(stream, TcpUserTimeout, &(silence * 1000))
}
