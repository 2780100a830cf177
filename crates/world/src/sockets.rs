//! The wire between processes on CPUs: a socket between every two ranks.
//!
//! Reads and writes never block: the calling thread moves bytes on whatever socket is ready, and waits for all sockets at once
//! if none is. So two ranks that send to each other never deadlock, however much they send, and no thread has to be woken.
//! Every message begins with the number of the exchange and its length, which reveals ranks that are out of step.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::failure::{Failure, named};
use crate::member::World;
use crate::wire::{self, Wire, WireError};

/// Maximum number of ranks: every rank has a socket to every other, and CPUs on a network are slow.
pub const MOST_RANKS: usize = 64;

const HEAD: usize = 16;
/// Interval at which a waiting thread checks whether the run has failed.
const LOOK_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// Timeout for connecting the sockets of all ranks, once everyone has joined.
const CONNECTING: Duration = Duration::from_secs(30);
/// Timeout for a new connection to say which rank it is.
const GREETING: Duration = Duration::from_secs(2);

pub struct Sockets {
    rank: usize,
    ranks: usize,
    state: Mutex<State>,
    /// Set when the run is over or has failed, which ends all waiting.
    is_over: Arc<AtomicBool>,
}

struct State {
    /// By rank; `None` for this one.
    peers: Vec<Option<TcpStream>>,
    exchanges: u64,
}

impl Sockets {
    /// Connects all ranks of a world. Every rank must call it at the same point.
    pub fn connect(world: &World) -> Result<Sockets, Failure> {
        let (rank, ranks) = (world.rank, world.ranks);
        if ranks > MOST_RANKS {
            return Err(world
                .fail(&format!("{ranks} ranks on CPUs are more than the {MOST_RANKS} that sockets carry")));
        }
        let Some(core) = world.core() else {
            return Ok(Sockets::over(0, vec![None]).expect("a rank alone has no sockets"));
        };
        let here = core.local_address.get().expect("a rank that joined has an address");
        let session = core.session.get().expect("a rank that joined has a session");
        let bound = TcpListener::bind((*here, 0)).and_then(|listener| Ok((listener.local_addr()?, listener)));
        let (address, listener) = match bound {
            Ok(bound) => bound,
            Err(error) => {
                return Err(world.fail(&format!("it cannot listen for the other ranks at {here}: {error}")));
            }
        };
        let told = world.gather("addresses of sockets", address.to_string().as_bytes())?;
        let read = |bytes: &Vec<u8>| std::str::from_utf8(bytes).ok()?.parse::<SocketAddr>().ok();
        let Some(addresses) = told.iter().map(read).collect::<Option<Vec<SocketAddr>>>() else {
            return Err(world.fail("the addresses of the other ranks cannot be read"));
        };
        let sockets = mesh(rank, &addresses, &listener, *session).and_then(|peers| {
            let sockets = Sockets::over(rank, peers).map_err(|error| Unconnected(error.to_string(), None))?;
            Ok(Sockets { is_over: Arc::clone(&core.is_over), ..sockets })
        });
        let sockets = sockets.map_err(|Unconnected(sentence, other)| world.report(sentence, other))?;
        // No rank sends before all are connected.
        world.barrier("sockets")?;
        Ok(sockets)
    }

    /// Uses established connections: one per rank, and `None` for this one.
    pub fn over(rank: usize, peers: Vec<Option<TcpStream>>) -> io::Result<Sockets> {
        for peer in peers.iter().flatten() {
            peer.set_nodelay(true)?;
            peer.set_nonblocking(true)?;
        }
        let ranks = peers.len();
        let state = Mutex::new(State { peers, exchanges: 0 });
        Ok(Sockets { rank, ranks, state, is_over: Arc::default() })
    }
}

/// A sentence that says why a rank is not connected, and the unreachable rank, if it is one.
struct Unconnected(String, Option<usize>);

/// Connects to every lower rank and accepts connections from every higher one.
fn mesh(
    rank: usize,
    addresses: &[SocketAddr],
    listener: &TcpListener,
    session: u64,
) -> Result<Vec<Option<TcpStream>>, Unconnected> {
    let mut peers: Vec<Option<TcpStream>> = addresses.iter().map(|_| None).collect();
    for (other, address) in addresses.iter().enumerate().take(rank) {
        let greeting = [session.to_le_bytes(), (rank as u64).to_le_bytes()].concat();
        let connected = TcpStream::connect_timeout(address, CONNECTING).and_then(|mut stream| {
            stream.write_all(&greeting)?;
            Ok(stream)
        });
        let unreached = |error: io::Error| Unconnected(format!("at {address}: {error}"), Some(other));
        peers[other] = Some(connected.map_err(unreached)?);
    }
    let until = Instant::now() + CONNECTING;
    listener.set_nonblocking(true).map_err(|error| Unconnected(error.to_string(), None))?;
    while peers[rank + 1..].iter().any(Option::is_none) {
        match listener.accept() {
            Ok((stream, _)) => {
                // Foreign connections are dropped.
                if let Ok(other) = who(&stream, session)
                    && let Some(place @ None) = peers[rank + 1..].get_mut(other.wrapping_sub(rank + 1))
                {
                    *place = Some(stream);
                }
            }
            Err(_) if Instant::now() >= until => {
                let missing: Vec<usize> =
                    (rank + 1..peers.len()).filter(|other| peers[*other].is_none()).collect();
                let (ranks, seconds) = (named(&missing), CONNECTING.as_secs());
                return Err(Unconnected(format!("{ranks} did not connect to it within {seconds} s"), None));
            }
            Err(_) => thread::sleep(Duration::from_millis(1)),
        }
    }
    Ok(peers)
}

/// The rank that a connection identifies itself as.
fn who(mut stream: &TcpStream, session: u64) -> io::Result<usize> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(GREETING))?;
    let mut greeting = [0; HEAD];
    stream.read_exact(&mut greeting)?;
    let (key, rank) = numbers(&greeting);
    if key == session { Ok(rank as usize) } else { Err(ErrorKind::PermissionDenied.into()) }
}

fn numbers(head: &[u8; HEAD]) -> (u64, u64) {
    let number = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("eight bytes"));
    (number(0), number(8))
}

/// A message being sent; `at` counts the bytes of head and body already sent.
struct Outgoing<'a> {
    to: usize,
    head: [u8; HEAD],
    body: &'a [u8],
    at: usize,
}

struct Incoming<'a> {
    from: usize,
    head: [u8; HEAD],
    body: &'a mut [u8],
    at: usize,
}

impl Outgoing<'_> {
    fn is_done(&self) -> bool {
        self.at == HEAD + self.body.len()
    }

    fn write(&mut self, mut stream: &TcpStream) -> io::Result<usize> {
        match self.at.checked_sub(HEAD) {
            Some(at) => stream.write(&self.body[at..]),
            None => stream.write_vectored(&[IoSlice::new(&self.head[self.at..]), IoSlice::new(self.body)]),
        }
    }
}

impl Incoming<'_> {
    fn is_done(&self) -> bool {
        self.at == HEAD + self.body.len()
    }

    fn read(&mut self, mut stream: &TcpStream) -> io::Result<usize> {
        match self.at.checked_sub(HEAD) {
            Some(at) => stream.read(&mut self.body[at..]),
            None => {
                let head = IoSliceMut::new(&mut self.head[self.at..]);
                stream.read_vectored(&mut [head, IoSliceMut::new(self.body)])
            }
        }
    }

    /// Compares the head, once it is complete, with the expected one.
    fn check(&self, before: usize, exchange: u64) -> Result<(), WireError> {
        if before >= HEAD || self.at < HEAD {
            return Ok(());
        }
        let ((theirs, sent), awaited) = (numbers(&self.head), self.body.len() as u64);
        if theirs != exchange {
            return Err(WireError::OutOfStep { rank: self.from, theirs, ours: exchange });
        }
        if sent != awaited {
            return Err(WireError::Unequal { rank: self.from, sent, awaited });
        }
        Ok(())
    }
}

impl Wire for Sockets {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn exchange(&self, send: &[&[u8]], receive: &mut [&mut [u8]]) -> Result<(), WireError> {
        let mut state = self.state.lock().expect("no exchange panics");
        wire::begin(self.rank, state.peers.len(), send, receive);
        state.exchanges += 1;
        let State { peers, exchanges } = &*state;
        let peer = |rank: usize| peers[rank].as_ref().expect("every other rank has a socket");
        let head = |body: &[u8]| {
            let mut head = [0; HEAD];
            head[..8].copy_from_slice(&exchanges.to_le_bytes());
            head[8..].copy_from_slice(&(body.len() as u64).to_le_bytes());
            head
        };
        // A rank sends to its successor first, so that not all send to rank 0 at once. Empty messages are neither sent nor
        // awaited.
        let behind = |rank: usize| (rank + peers.len() - self.rank) % peers.len();
        let mut outgoing: Vec<Outgoing> = (send.iter().enumerate())
            .filter(|(to, body)| *to != self.rank && !body.is_empty())
            .map(|(to, body)| Outgoing { to, head: head(body), body, at: 0 })
            .collect();
        outgoing.sort_by_key(|message| behind(message.to));
        let mut incoming: Vec<Incoming> = (receive.iter_mut().enumerate())
            .filter(|(from, body)| *from != self.rank && !body.is_empty())
            .map(|(from, body)| Incoming { from, head: [0; HEAD], body, at: 0 })
            .collect();
        while !outgoing.is_empty() || !incoming.is_empty() {
            let mut moved = 0;
            for message in &mut outgoing {
                let written = settle(message.to, message.write(peer(message.to)))?;
                message.at += written;
                moved += written;
            }
            for message in &mut incoming {
                let before = message.at;
                let read = settle(message.from, message.read(peer(message.from)))?;
                message.at += read;
                message.check(before, *exchanges)?;
                moved += read;
            }
            outgoing.retain(|message| !message.is_done());
            incoming.retain(|message| !message.is_done());
            // Retrying first, with the core yielded in between, was no faster and waited for milliseconds under other load.
            if moved == 0 {
                self.sleep(&outgoing, &incoming, &peer)?;
            }
        }
        Ok(())
    }
}

impl Sockets {
    /// Sleeps until a socket with pending work can move bytes.
    fn sleep<'a>(
        &self,
        outgoing: &[Outgoing],
        incoming: &[Incoming],
        peer: &impl Fn(usize) -> &'a TcpStream,
    ) -> Result<(), WireError> {
        if self.is_over.load(Ordering::SeqCst) {
            return Err(WireError::Failed);
        }
        let out = outgoing.iter().map(|message| PollFd::new(peer(message.to), PollFlags::OUT));
        let into = incoming.iter().map(|message| PollFd::new(peer(message.from), PollFlags::IN));
        let mut sockets: Vec<PollFd> = out.chain(into).collect();
        match poll(&mut sockets, Some(&LOOK_EVERY)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(WireError::System { rank: self.rank, error: error.to_string() }),
        }
    }
}

/// Number of bytes moved; 0 if the socket is not ready.
fn settle(rank: usize, moved: io::Result<usize>) -> Result<usize, WireError> {
    match moved {
        Ok(0) => Err(WireError::Gone { rank }),
        Ok(bytes) => Ok(bytes),
        Err(error) => match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::Interrupted => Ok(0),
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted => {
                Err(WireError::Gone { rank })
            }
            _ => Err(WireError::System { rank, error: error.to_string() }),
        },
    }
}
