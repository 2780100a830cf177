//! Joining: rank 0 opens the hub, and every rank connects to it and waits until all have joined.

use std::fs;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::frame::{self, FrameError, FrameKind, MOST_BYTES, MOST_GREETING_BYTES};
use crate::hub::{Hub, Terms};
use crate::member::{Stopper, World};
use crate::message::{Hello, Join, MAGIC, Member, PROTOCOL, Welcome, json, parse};
use crate::parent::{self, Channel, ToParent};
use crate::place::{Meeting, RankPlacement};
use crate::timing::Timing;
use crate::watcher::Core;

/// The file through which ranks find rank 0 if nothing else names its address.
pub const RENDEZVOUS: &str = "rendezvous.json";

/// Timeout of one attempt to connect, and of the hello after it.
const ATTEMPT: Duration = Duration::from_secs(2);
const TRY_EVERY: Duration = Duration::from_millis(100);

/// Receives lines for the user while ranks join.
pub type Note = Arc<dyn Fn(&str) + Send + Sync>;
/// Ends the process after a failure, from a thread of this crate, whatever the main thread waits for. It prints the sentence if
/// `Failure::is_mine_to_say`.
pub type Leave = Arc<dyn Fn(&Failure) + Send + Sync>;
/// Ends the process, like `Leave`, because a rank was asked to stop before the run began, with the reason.
pub type Stop = Arc<dyn Fn(&str) + Send + Sync>;
/// Receives the handle with which this rank stops all ranks, before any other rank knows of this one. From then on, a rank that
/// is asked to stop must use the handle before it leaves.
pub type TakeStopper = Arc<dyn Fn(Stopper) + Send + Sync>;

/// The options of a joining rank.
pub struct Joining<'a> {
    /// The program's version, equal on all ranks.
    pub version: String,
    /// `FLATOUT_SECRET`, if set.
    pub secret: Option<String>,
    /// The rank's device, for failure messages.
    pub device: Option<String>,
    /// The run's folder, where ranks may have to meet through a file.
    pub folder: Option<&'a Path>,
    pub timing: Timing,
    pub note: Note,
    pub leave: Leave,
    pub stop: Stop,
    pub take_stopper: TakeStopper,
}

impl World {
    /// Joins the other ranks, or fails with a sentence.
    pub fn join(place: &RankPlacement, joining: Joining<'_>) -> Result<World, Failure> {
        if place.ranks == 1 {
            return Ok(World::alone());
        }
        let own =
            |sentence: String| Failure { is_mine_to_say: true, ..Failure::new(Some(place.rank), sentence) };
        let system = |error: io::Error| own(format!("rank {} cannot join: {error}", place.rank));
        let Joining { timing, leave, stop, .. } = &joining;
        let deadline = Instant::now() + timing.join;
        let (parent, messages) = match place.has_parent {
            true => Channel::of_standard_input()
                .map(|(parent, messages)| (Some(parent), Some(messages)))
                .map_err(system)?,
            false => (None, None),
        };
        let ends = (Arc::clone(leave), Arc::clone(stop));
        let core = Arc::new(Core::new(place.rank, host_name(), *timing, ends, parent));
        (joining.take_stopper)(Stopper::of(&core));
        if let Some(messages) = messages {
            let core = Arc::clone(&core);
            let listen = move || {
                parent::listen(messages, |message| core.handle_message(message));
                core.lose_parent();
            };
            thread::Builder::new().name("parent".into()).spawn(listen).map_err(system)?;
        }
        let hub = match place.rank {
            0 => Some(open(place, &joining, &core).map_err(own)?),
            _ => None,
        };
        let joined = connect_to_hub(place, &joining, &core, hub.as_ref().map(|opened| &opened.hub), deadline)
            .and_then(|stream| {
                wait_for_welcome(&stream, &core, hub.as_ref().map(|opened| &opened.hub)).map(|()| stream)
            });
        let stream = joined.map_err(|why| match why {
            JoinError::Local(sentence) => own(sentence),
            JoinError::Run(failure) => Failure { is_mine_to_say: place.rank == 0, ..failure },
        })?;
        // The rendezvous file is no longer needed once all have joined.
        let hub = hub.map(|opened| opened.hub);
        World::begin(core, stream, hub, place.local).map_err(system)
    }
}

enum JoinError {
    /// An error on this rank.
    Local(String),
    /// A failure of the run, from the hub.
    Run(Failure),
}

struct OpenHub {
    hub: Hub,
    _file: Option<RendezvousFile>,
}

/// Opens the hub at the address where the others look for it. The error is a sentence.
fn open(place: &RankPlacement, joining: &Joining<'_>, core: &Core) -> Result<OpenHub, String> {
    let session = random();
    let (listener, label) = match &place.meeting {
        Meeting::Alone => unreachable!("one rank opens nothing"),
        Meeting::Parent => (listen_at(&[(Ipv4Addr::LOCALHOST, 0).into()])?, String::new()),
        Meeting::Address { host, ports, label } => (listen_at(&addresses(host, ports)?)?, label.clone()),
        Meeting::Folder => (listen_at(&own_addresses())?, format!("{session:016x}")),
    };
    let Joining { version, secret, timing, note, .. } = joining;
    let terms = Terms {
        ranks: place.ranks,
        version: version.clone(),
        secret: secret.clone(),
        label: label.clone(),
        session: random(),
        timing: *timing,
        note: Arc::clone(note),
    };
    let hub = Hub::open(listener, terms).map_err(|error| format!("rank 0 cannot listen: {error}"))?;
    let file = match &place.meeting {
        Meeting::Folder => {
            let folder = folder(joining)?;
            Some(RendezvousFile::write(
                folder,
                &Rendezvous { address: hub.address.to_string(), nonce: label },
            )?)
        }
        _ => None,
    };
    if let (Meeting::Parent, Some(parent)) = (&place.meeting, &core.parent) {
        parent.tell(&ToParent::Address(hub.address.to_string()));
    }
    Ok(OpenHub { hub, _file: file })
}

fn listen_at(addresses: &[SocketAddr]) -> Result<TcpListener, String> {
    let mut last = String::from("no address is named");
    for address in addresses {
        match TcpListener::bind(address) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = format!("{address}: {error}"),
        }
    }
    let hint = "another program may listen there, or the address may be another host's: name a free port of this one";
    Err(format!("rank 0 cannot listen at {last}; {hint}"))
}

fn addresses(host: &str, ports: &Range<u16>) -> Result<Vec<SocketAddr>, String> {
    let found = (host, ports.start).to_socket_addrs();
    let found: Vec<SocketAddr> =
        found.map_err(|error| format!("`{host}` is no host that can be found: {error}"))?.collect();
    let all =
        ports.clone().flat_map(|port| found.iter().map(move |address| SocketAddr::new(address.ip(), port)));
    Ok(all.collect())
}

/// The addresses of this host's name, those that other hosts can reach first, and loopback last.
fn own_addresses() -> Vec<SocketAddr> {
    let found = (host_name().as_str(), 0).to_socket_addrs().map(Iterator::collect);
    let mut found: Vec<SocketAddr> = found.unwrap_or_default();
    found.push((Ipv4Addr::LOCALHOST, 0).into());
    found.sort_by_key(|address| address.ip().is_loopback());
    found
}

fn folder<'a>(joining: &Joining<'a>) -> Result<&'a Path, String> {
    joining.folder.ok_or(
        "nothing says where rank 0 is: set MASTER_ADDR and MASTER_PORT, or name the run's folder".into(),
    )
}

#[derive(Debug, Serialize, Deserialize)]
struct Rendezvous {
    address: String,
    /// The hub's greeting has it: a file left over from a run that was killed leads nowhere.
    nonce: String,
}

/// The file, removed when joining is over.
struct RendezvousFile(PathBuf);

impl RendezvousFile {
    fn write(folder: &Path, rendezvous: &Rendezvous) -> Result<RendezvousFile, String> {
        let path = folder.join(RENDEZVOUS);
        let partial = folder.join(format!(".{RENDEZVOUS}.partial"));
        let written = fs::create_dir_all(folder)
            .and_then(|()| fs::write(&partial, json(rendezvous)))
            .and_then(|()| fs::rename(&partial, &path));
        match written {
            Ok(()) => Ok(RendezvousFile(path)),
            Err(error) => Err(format!("{} cannot be written: {error}", path.display())),
        }
    }
}

impl Drop for RendezvousFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Connects to the hub and sends the request to join.
fn connect_to_hub(
    place: &RankPlacement,
    joining: &Joining<'_>,
    core: &Core,
    hub: Option<&Hub>,
    deadline: Instant,
) -> Result<TcpStream, JoinError> {
    let mut last = String::from("nothing listens there");
    loop {
        if let Some(failure) = hub.and_then(|hub| hub.failure.get().cloned()).or_else(|| core.failure()) {
            return Err(JoinError::Run(failure));
        }
        let (targets, label) = match hub {
            Some(hub) => (vec![hub.address], None),
            None => targets(place, joining, core, deadline).map_err(JoinError::Local)?,
        };
        for target in &targets {
            match attempt(*target, label.as_deref()) {
                Ok(stream) => return request_join(stream, place, joining, core),
                Err(why) => last = format!("{target}: {why}"),
            }
        }
        if Instant::now() >= deadline {
            let (rank, seconds) = (place.rank, joining.timing.join.as_secs());
            return Err(JoinError::Local(format!(
                "rank {rank} did not find rank 0 within {seconds} s ({last})"
            )));
        }
        thread::sleep(TRY_EVERY);
    }
}

/// The candidate addresses of the hub, and the label that it must have.
fn targets(
    place: &RankPlacement,
    joining: &Joining<'_>,
    core: &Core,
    deadline: Instant,
) -> Result<(Vec<SocketAddr>, Option<String>), String> {
    match &place.meeting {
        Meeting::Alone => unreachable!("one rank looks for nobody"),
        Meeting::Parent => {
            let address = core.wait_for_address(deadline).and_then(|address| address.parse().ok());
            Ok((address.into_iter().collect(), None))
        }
        // An unknown host name may become known, because its node may still be starting.
        Meeting::Address { host, ports, label } => {
            Ok((addresses(host, ports).unwrap_or_default(), Some(label.clone())))
        }
        Meeting::Folder => {
            let path = folder(joining)?.join(RENDEZVOUS);
            let found = fs::read(path).ok().and_then(|bytes| parse::<Rendezvous>(&bytes));
            let address = found.as_ref().and_then(|found| found.address.parse().ok());
            Ok((address.into_iter().collect(), found.map(|found| found.nonce)))
        }
    }
}

/// Connects, and checks by its greeting that this run's hub is there.
fn attempt(target: SocketAddr, label: Option<&str>) -> Result<TcpStream, String> {
    let connected = TcpStream::connect_timeout(&target, ATTEMPT).and_then(|stream| {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(ATTEMPT))?;
        Ok(stream)
    });
    let mut stream = connected.map_err(|error| error.to_string())?;
    let foreign = || "something else listens there".to_string();
    let frame = frame::read(&mut stream, MOST_GREETING_BYTES).map_err(|_| foreign())?;
    let hello: Hello =
        parse(&frame.payload).filter(|hello: &Hello| hello.magic == MAGIC).ok_or_else(foreign)?;
    match label.is_none_or(|label| label == hello.label) {
        true => Ok(stream),
        false => Err("the ranks of another run meet there".into()),
    }
}

/// Sends the request to join, unless this rank was asked to stop: a rank that the hub knows must be able to tell it so.
fn request_join(
    stream: TcpStream,
    place: &RankPlacement,
    joining: &Joining<'_>,
    core: &Core,
) -> Result<TcpStream, JoinError> {
    let member = Member {
        host: core.host.clone(),
        process: std::process::id(),
        node: place.node,
        device: joining.device.clone(),
    };
    let join = Join {
        magic: MAGIC.into(),
        protocol: PROTOCOL,
        version: joining.version.clone(),
        rank: place.rank,
        ranks: place.ranks,
        secret: joining.secret.clone(),
        member,
    };
    let connect = || {
        stream.set_read_timeout(Some(joining.timing.silent_after))?;
        stream.set_write_timeout(Some(joining.timing.silent_after))?;
        core.connect(stream.try_clone()?, FrameKind::Join, &json(&join))
    };
    match connect() {
        Ok(true) => Ok(stream),
        Ok(false) => Err(JoinError::Run(core.wait_for_failure())),
        Err(error) => Err(JoinError::Local(error.to_string())),
    }
}

/// Waits until the hub reports that all ranks have joined. Meanwhile the hub sends heartbeats; this rank does not.
fn wait_for_welcome(mut stream: &TcpStream, core: &Core, hub: Option<&Hub>) -> Result<(), JoinError> {
    let rank = core.rank;
    loop {
        let frame = match frame::read(&mut stream, MOST_BYTES) {
            Ok(frame) => frame,
            Err(why) => {
                // The hub of this process may have failed before this rank had its seat, and the parent may report the end of a
                // rank.
                thread::sleep(if core.parent.is_some() { core.timing.account } else { Duration::ZERO });
                if let Some(failure) =
                    hub.and_then(|hub| hub.failure.get().cloned()).or_else(|| core.failure())
                {
                    return Err(JoinError::Run(failure));
                }
                let what = if matches!(why, FrameError::Silent) {
                    "fell silent".into()
                } else {
                    format!("is gone: {why}")
                };
                return Err(JoinError::Local(format!("rank {rank} joined, and then rank 0 {what}")));
            }
        };
        match frame.kind {
            FrameKind::Beat => {}
            FrameKind::Refused => {
                return Err(JoinError::Local(String::from_utf8_lossy(&frame.payload).into_owned()));
            }
            FrameKind::Failure => {
                let failure = parse(&frame.payload).unwrap_or(Failure::new(Some(0), "rank 0 failed"));
                return Err(JoinError::Run(failure));
            }
            FrameKind::Stop => {
                core.stopped(&String::from_utf8_lossy(&frame.payload));
                return Err(JoinError::Run(core.wait_for_failure()));
            }
            FrameKind::Welcome => {
                let welcome: Option<Welcome> = parse(&frame.payload);
                let Some(Welcome { session, members }) =
                    welcome.filter(|welcome| welcome.members.len() > rank)
                else {
                    return Err(JoinError::Local(format!("rank {rank} cannot read what rank 0 sends")));
                };
                let local = stream.local_addr();
                let local =
                    local.map_err(|error| JoinError::Local(format!("rank {rank} cannot join: {error}")))?;
                core.local_address.get_or_init(|| local.ip());
                core.session.get_or_init(|| session);
                core.members.get_or_init(|| members);
                return Ok(());
            }
            _ => return Err(JoinError::Local(format!("rank {rank} cannot read what rank 0 sends"))),
        }
    }
}

pub(crate) fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// An unguessable number: the standard library seeds its hash keys from the system.
pub(crate) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
