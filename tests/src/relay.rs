//! Relays the connections of a node to its API server, and can cut them.

use std::{
    fmt,
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    os::fd::AsRawFd as _,
    sync::{Arc, Condvar, Mutex},
    thread,
};

use nix::sys::socket;

use crate::Netns;

/// Treatment of the traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// All traffic passes.
    Open,
    /// The relay closes all connections, including new ones.
    Refused,
    /// The relay holds all traffic back, and closes no connection. The traffic passes when the relay is [`Way::Open`]
    /// again.
    Silent,
}

/// Listens, mostly in a node's network namespace at the server's address, and connects to a server in the tests' own
/// namespace. Closed on drop.
pub struct Relay {
    listener: TcpListener,
    road: Arc<Road>,
}

impl Relay {
    /// Starts a relay to a server. The node must have the server's address.
    #[track_caller]
    pub fn start(netns: &Netns, server: SocketAddr) -> Self {
        Self::with_listener(netns.enter(|| TcpListener::bind(server)).unwrap(), server)
    }

    /// As [`Relay::start`], with this listener.
    #[track_caller]
    pub(crate) fn with_listener(listener: TcpListener, server: SocketAddr) -> Self {
        let road = Arc::new(Road {
            way: Mutex::new(Way::Open),
            changed: Condvar::new(),
            ends: Mutex::default(),
            server: Mutex::new(server),
        });
        let (accepting, to) = (listener.try_clone().unwrap(), Arc::clone(&road));
        thread::spawn(move || {
            // The loop ends when the listener is shut down.
            for client in accepting.incoming().map_while(Result::ok) {
                // If one side has closed meanwhile, the other is closed too.
                let server = *to.server.lock().unwrap();
                if let Ok(server) = TcpStream::connect(server) {
                    let _ = to.join(client, server);
                }
            }
        });
        Self { listener, road }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.listener.local_addr().unwrap()
    }

    /// Connects new connections to another server, and closes the present connections.
    pub(crate) fn lead_to(&self, server: SocketAddr) {
        *self.road.server.lock().unwrap() = server;
        self.road.close();
    }

    /// Changes the treatment of the traffic from now on.
    pub fn set(&self, way: Way) {
        *self.road.way.lock().unwrap() = way;
        self.road.changed.notify_all();
        if way == Way::Refused {
            self.road.close();
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.set(Way::Refused);
        socket::shutdown(self.listener.as_raw_fd(), socket::Shutdown::Both).unwrap();
    }
}

impl fmt::Debug for Relay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Relay({:?})", self.road.way)
    }
}

/// The state that all connections share.
struct Road {
    way: Mutex<Way>,
    changed: Condvar,
    /// The sockets of all connections, to close them.
    ends: Mutex<Vec<TcpStream>>,
    server: Mutex<SocketAddr>,
}

impl Road {
    /// Copies bytes between two ends, in both directions.
    fn join(self: &Arc<Self>, a: TcpStream, b: TcpStream) -> std::io::Result<()> {
        self.ends.lock().unwrap().extend([a.try_clone()?, b.try_clone()?]);
        // A router does not hold small packets back until others are acknowledged (Nagle's algorithm).
        a.set_nodelay(true)?;
        b.set_nodelay(true)?;
        for (from, to) in [(a.try_clone()?, b.try_clone()?), (b, a)] {
            let road = Arc::clone(self);
            thread::spawn(move || road.copy(from, to));
        }
        Ok(())
    }

    fn copy(&self, mut from: TcpStream, mut to: TcpStream) {
        let mut buffer = [0; 1 << 14];
        while let Ok(length @ 1..) = from.read(&mut buffer) {
            let way = self.way.lock().unwrap();
            let way = self.changed.wait_while(way, |way| *way == Way::Silent).unwrap();
            if *way == Way::Refused {
                break;
            }
            drop(way);
            if to.write_all(&buffer[..length]).is_err() {
                break;
            }
        }
        for end in [from, to] {
            // The socket may already be closed.
            let _ = end.shutdown(Shutdown::Both);
        }
    }

    fn close(&self) {
        for end in self.ends.lock().unwrap().drain(..) {
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}
