//! The hub on rank 0: accepts joins, answers calls, monitors heartbeats, and tells everyone the first failure.
//!
//! One thread makes all decisions. Every connection has a reader thread and a writer thread, so that a stalled rank delays no
//! other.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::beats::{Beats, at_step};
use crate::calls::Collected;
use crate::failure::{Failure, named};
use crate::frame::{self, Frame, FrameKind, MOST_BYTES, MOST_GREETING_BYTES};
use crate::join::Note;
use crate::message::{Account, Beat, Hello, Join, MAGIC, Member, PROTOCOL, Report, Welcome, json, parse};
use crate::timing::Timing;

/// Interval at which the hub checks for connections and for timeouts.
const TICK: Duration = Duration::from_millis(10);
/// Timeout for a new connection to identify itself.
const GREETING: Duration = Duration::from_secs(5);
/// The time for the first failure to reach all other ranks before rank 0 is told and ends the process.
const TELLING: Duration = Duration::from_secs(1);
/// Maximum number of connections that have not identified themselves, besides one per rank.
const STRANGERS: usize = 64;
const STACK_BYTES: usize = 128 << 10;

pub(crate) struct Terms {
    pub ranks: usize,
    pub version: String,
    pub secret: Option<String>,
    pub label: String,
    /// A number that only the ranks of this run know.
    pub session: u64,
    pub timing: Timing,
    pub note: Note,
}

/// The hub's thread, and its address.
pub(crate) struct Hub {
    pub address: SocketAddr,
    pub failure: Arc<OnceLock<Failure>>,
    thread: JoinHandle<()>,
}

impl Hub {
    pub fn open(listener: TcpListener, terms: Terms) -> io::Result<Hub> {
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let failure = Arc::new(OnceLock::new());
        let told = Arc::clone(&failure);
        let thread = spawn("hub", move || {
            let mut state = State::new(terms);
            if let Err(failure) = state.run(listener) {
                let _ = told.set(failure.clone());
                state.tell(FrameKind::Failure, &json(&failure));
            }
        })?;
        Ok(Hub { address, failure, thread })
    }

    /// Waits until every rank has left or has been told the failure.
    pub fn wait(self) {
        let _ = self.thread.join();
    }
}

enum Event {
    JoinRequest(Join, TcpStream),
    Stranger,
    Received(usize, Frame),
    Closed(usize),
}

enum Outgoing {
    Frame(Arc<Vec<u8>>),
    /// Acknowledged when everything before it is written.
    Flush(Sender<()>),
}

struct Seat {
    member: Member,
    out: Sender<Outgoing>,
    has_left: bool,
}

struct State {
    terms: Terms,
    seats: Vec<Option<Seat>>,
    /// By rank, once all have joined.
    members: Vec<Member>,
    calls: Collected,
    beats: Beats,
    /// A rank whose connection closed: the deadline for its parent's report, and the failure without one.
    lost: Option<(Instant, Failure)>,
    /// The reason why everyone leaves before the run has begun.
    stopped: Option<String>,
    strangers: usize,
    events: Receiver<Event>,
    sender: Sender<Event>,
}

impl State {
    fn new(terms: Terms) -> State {
        let (sender, events) = mpsc::channel();
        let ranks = terms.ranks;
        State {
            seats: (0..ranks).map(|_| None).collect(),
            members: vec![],
            calls: Collected::new(ranks),
            beats: Beats::new(ranks, terms.timing, Instant::now()),
            lost: None,
            stopped: None,
            strangers: 0,
            terms,
            events,
            sender,
        }
    }

    fn run(&mut self, listener: TcpListener) -> Result<(), Failure> {
        let Timing { join, say_every, beat_every, .. } = self.terms.timing;
        let mut listener = Some(listener);
        let began = Instant::now();
        let (mut said, mut beaten) = (began, began);
        loop {
            if let Some(listener) = &listener {
                self.accept(listener);
            }
            match self.events.recv_timeout(TICK) {
                Ok(event) => self.take(event)?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => unreachable!("the hub has a sender itself"),
            }
            // Rank 0 is told too, so it must have joined, which takes a moment.
            if let Some(reason) = self.stopped.as_ref().filter(|_| self.seats[0].is_some()) {
                self.tell(FrameKind::Stop, reason.as_bytes());
                return Ok(());
            }
            let now = Instant::now();
            if now.duration_since(beaten) >= beat_every {
                beaten = now;
                self.post(FrameKind::Beat, &[]);
            }
            if let Some((_, failure)) = self.lost.as_ref().filter(|(until, _)| now >= *until) {
                return Err(failure.clone());
            }
            if listener.is_some() {
                let ranks = self.terms.ranks;
                let missing: Vec<usize> = (0..ranks).filter(|rank| self.seats[*rank].is_none()).collect();
                let missing_ranks = || format!("{} of {ranks}", named(&missing));
                if missing.is_empty() {
                    listener = None;
                    self.welcome(now);
                } else if now.duration_since(began) >= join {
                    let (seconds, missing) = (join.as_secs(), missing_ranks());
                    let sentence = format!(
                        "{missing} did not join within {seconds} s: see that they were started, or raise --join-timeout"
                    );
                    return Err(Failure::new(None, sentence));
                } else if now.duration_since(said) >= say_every {
                    said = now;
                    (self.terms.note)(&format!("waiting for {}", missing_ranks()));
                }
            } else if let Some(failure) = self.beats.judge(&self.calls, &self.members, now) {
                return Err(failure);
            }
            if self.seats.iter().all(|seat| seat.as_ref().is_some_and(|seat| seat.has_left)) {
                return Ok(());
            }
        }
    }

    /// Greets all new connections, each on a separate thread.
    fn accept(&mut self, listener: &TcpListener) {
        while self.strangers < self.terms.ranks + STRANGERS {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                // There is no connection, or it has closed again.
                Err(_) => return,
            };
            let (sender, label) = (self.sender.clone(), self.terms.label.clone());
            let greeted = spawn("greeting", move || {
                let event = match greet(&stream, label) {
                    Some(join) => Event::JoinRequest(join, stream),
                    None => Event::Stranger,
                };
                let _ = sender.send(event);
            });
            self.strangers += usize::from(greeted.is_ok());
        }
    }

    fn take(&mut self, event: Event) -> Result<(), Failure> {
        match event {
            Event::Stranger => {
                self.strangers -= 1;
                Ok(())
            }
            Event::JoinRequest(join, stream) => {
                self.strangers -= 1;
                self.seat(join, stream)
            }
            Event::Closed(rank) => {
                let what = if self.members.is_empty() { " before all ranks had joined" } else { "" };
                self.lose(rank, &format!("ended{what} without saying why"));
                Ok(())
            }
            Event::Received(rank, frame) => self.receive(rank, frame),
        }
    }

    /// Refuses a joining rank with a sentence, or gives it its seat. A rank of this run with an incompatible program or
    /// configuration fails the run.
    fn seat(&mut self, join: Join, mut stream: TcpStream) -> Result<(), Failure> {
        let rank = join.rank;
        let who = join.member.named(rank);
        let terms = &self.terms;
        let refusal = if join.secret != terms.secret {
            Some("its FLATOUT_SECRET is not that of rank 0".to_string())
        } else {
            self.seats.get(rank).and_then(Option::as_ref).map(|seat| {
                format!(
                    "that rank is there already, on {} as process {}",
                    seat.member.host, seat.member.process
                )
            })
        };
        if let Some(why) = refusal {
            let sentence = format!("{who} was refused: {why}");
            (terms.note)(&sentence);
            let _ = frame::write(&mut stream, FrameKind::Refused, sentence.as_bytes());
            return Ok(());
        }
        let differs = if join.protocol != PROTOCOL || join.version != terms.version {
            Some(format!(
                "runs flatout {} (protocol {}), rank 0 runs {} (protocol {PROTOCOL}): start one program everywhere",
                join.version, join.protocol, terms.version
            ))
        } else if join.ranks != terms.ranks {
            Some(format!("was started as one of {} ranks, rank 0 as one of {}", join.ranks, terms.ranks))
        } else if rank >= terms.ranks {
            Some(format!("is beyond the {} ranks of this run", terms.ranks))
        } else {
            None
        };
        if let Some(how) = differs {
            let failure = Failure::new(Some(rank), format!("{who} {how}"));
            let _ = frame::write(&mut stream, FrameKind::Refused, failure.sentence.as_bytes());
            return Err(failure);
        }
        match self.connect(rank, stream) {
            Ok(out) => self.seats[rank] = Some(Seat { member: join.member, out, has_left: false }),
            Err(error) => {
                return Err(Failure::new(Some(rank), format!("{who} could not be connected: {error}")));
            }
        }
        Ok(())
    }

    fn connect(&self, rank: usize, stream: TcpStream) -> io::Result<Sender<Outgoing>> {
        stream.set_read_timeout(None)?;
        stream.set_write_timeout(Some(self.terms.timing.silent_after))?;
        let (out, posts) = mpsc::channel();
        let mut writing = stream.try_clone()?;
        spawn("to rank", move || {
            for post in posts {
                match post {
                    Outgoing::Frame(bytes) if io::Write::write_all(&mut writing, &bytes).is_err() => return,
                    Outgoing::Frame(_) => {}
                    Outgoing::Flush(done) => drop(done.send(())),
                }
            }
        })?;
        let sender = self.sender.clone();
        let mut reading = stream;
        spawn("from rank", move || {
            while let Ok(frame) = frame::read(&mut reading, MOST_BYTES) {
                if sender.send(Event::Received(rank, frame)).is_err() {
                    return;
                }
            }
            let _ = sender.send(Event::Closed(rank));
        })?;
        Ok(out)
    }

    fn welcome(&mut self, now: Instant) {
        self.members = self.seats.iter().flatten().map(|seat| seat.member.clone()).collect();
        self.beats = Beats::new(self.terms.ranks, self.terms.timing, now);
        let welcome = Welcome { session: self.terms.session, members: self.members.clone() };
        self.post(FrameKind::Welcome, &json(&welcome));
    }

    fn receive(&mut self, rank: usize, frame: Frame) -> Result<(), Failure> {
        let now = Instant::now();
        if self.members.is_empty() && frame.kind != FrameKind::Stop {
            let sentence = format!("{} spoke before all ranks had joined", self.who(rank));
            return Err(Failure::new(Some(rank), sentence));
        }
        self.beats.hear(rank, now);
        let unread = || format!("{} sent a message that cannot be read", self.who(rank));
        match frame.kind {
            FrameKind::Call => {
                if let Some(answer) = self.calls.take(rank, &frame.payload, &self.members)? {
                    self.post(FrameKind::Answer, &answer);
                }
                Ok(())
            }
            FrameKind::Beat => {
                let beat: Beat = parse(&frame.payload).ok_or_else(|| Failure::new(Some(rank), unread()))?;
                self.beats.take(rank, beat, &self.members, now)
            }
            FrameKind::Failure => {
                let report: Report =
                    parse(&frame.payload).ok_or_else(|| Failure::new(Some(rank), unread()))?;
                match report.about.filter(|about| *about < self.terms.ranks) {
                    Some(other) => {
                        self.lose(other, &format!("is out of reach of rank {rank} ({})", report.sentence));
                        Ok(())
                    }
                    None => {
                        let at = at_step(self.beats.step(rank));
                        let sentence = format!("{} failed{at}: {}", self.who(rank), report.sentence);
                        Err(Failure::new(Some(rank), sentence))
                    }
                }
            }
            FrameKind::Account => {
                let Account { rank: ended, how, .. } =
                    parse(&frame.payload).ok_or_else(|| Failure::new(Some(rank), unread()))?;
                let is_seated = |seat: &Option<Seat>| seat.as_ref().is_some_and(|seat| !seat.has_left);
                if !self.seats.get(ended).is_some_and(is_seated) {
                    return Ok(());
                }
                let at = at_step(self.beats.step(ended));
                Err(Failure::new(Some(ended), format!("{} {how}{at}", self.who(ended))))
            }
            FrameKind::Stop => {
                self.stopped.get_or_insert(String::from_utf8_lossy(&frame.payload).into_owned());
                Ok(())
            }
            FrameKind::Post => {
                let payload = [&(rank as u32).to_le_bytes()[..], &frame.payload].concat();
                let bytes = Arc::new(frame::encode(FrameKind::Post, &payload));
                let first = self.seats[0].as_ref().filter(|seat| !seat.has_left);
                first.map(|seat| seat.out.send(Outgoing::Frame(bytes)));
                Ok(())
            }
            FrameKind::Bye => {
                self.seats[rank].as_mut().expect("who speaks has a seat").has_left = true;
                self.beats.leave(rank);
                Ok(())
            }
            _ => Err(Failure::new(Some(rank), unread())),
        }
    }

    /// Handles a closed connection: the parent's report within the next moment takes precedence over `what`.
    fn lose(&mut self, rank: usize, what: &str) {
        if self.lost.is_some() || self.seats[rank].as_ref().is_none_or(|seat| seat.has_left) {
            return;
        }
        let sentence = format!("{} {what}{}", self.who(rank), at_step(self.beats.step(rank)));
        self.lost = Some((Instant::now() + self.terms.timing.account, Failure::new(Some(rank), sentence)));
    }

    fn who(&self, rank: usize) -> String {
        match &self.seats[rank] {
            Some(seat) => seat.member.named(rank),
            None => format!("rank {rank}"),
        }
    }

    fn post(&self, kind: FrameKind, payload: &[u8]) {
        let bytes = Arc::new(frame::encode(kind, payload));
        for seat in self.seats.iter().flatten().filter(|seat| !seat.has_left) {
            let _ = seat.out.send(Outgoing::Frame(Arc::clone(&bytes)));
        }
    }

    /// Tells everyone to leave; rank 0 last, because it ends the process that this code runs in.
    fn tell(&self, kind: FrameKind, payload: &[u8]) {
        let bytes = Arc::new(frame::encode(kind, payload));
        let until = Instant::now() + TELLING;
        let tell_seats = |seats: &[Option<Seat>]| {
            let (done, written) = mpsc::channel();
            for seat in seats.iter().flatten() {
                let _ = seat.out.send(Outgoing::Frame(Arc::clone(&bytes)));
                let _ = seat.out.send(Outgoing::Flush(done.clone()));
            }
            drop(done);
            // Ends when every writer has acknowledged or is gone, or at the timeout.
            while written.recv_timeout(until.saturating_duration_since(Instant::now())).is_ok() {}
        };
        let (first, others) = self.seats.split_at(1);
        tell_seats(others);
        tell_seats(first);
    }
}

/// Sends the hello and reads the request to join; `None` for foreign connections.
fn greet(mut stream: &TcpStream, label: String) -> Option<Join> {
    stream.set_nonblocking(false).ok()?;
    stream.set_nodelay(true).ok()?;
    stream.set_read_timeout(Some(GREETING)).ok()?;
    stream.set_write_timeout(Some(GREETING)).ok()?;
    frame::write(&mut stream, FrameKind::Hello, &json(&Hello { magic: MAGIC.into(), label })).ok()?;
    let frame = frame::read(&mut stream, MOST_GREETING_BYTES).ok()?;
    let join: Join = parse(&frame.payload)?;
    (frame.kind == FrameKind::Join && join.magic == MAGIC).then_some(join)
}

pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name(name.into()).stack_size(STACK_BYTES).spawn(run)
}
