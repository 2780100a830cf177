//! The parent of the ranks of one node: starts copies of a command, forwards signals, reaps the processes, and records how each
//! ended.
//!
//! Rank 0 writes to the parent's output; the output of other ranks is kept in case they fail, or shown with a rank prefix. If a
//! rank fails, the others are told and leave; ranks that remain after `grace` are killed. Ranks have process groups of their
//! own, so that Ctrl-C reaches them once, through the parent.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use signal_hook::low_level::signal_name;

use crate::join::{host_name, random};
use crate::message::Account;
use crate::parent::{self, Channel, ToParent, ToRank};
use crate::place::{self, Copies};

/// Interval at which the parent checks its children.
const TICK: Duration = Duration::from_millis(20);
/// Number of lines kept of a rank's standard error.
const KEPT_LINES: usize = 20;
/// The exit code of a rank that was asked to stop.
const STOPPED: i32 = 3;
/// Exit codes that mean no failure: finished, and stopped after saving.
const GOOD_CODES: [i32; 2] = [0, STOPPED];

/// The options for starting and showing ranks.
pub struct Launch<'a> {
    pub copies: Copies,
    /// Builds the command of a rank from its number.
    pub command: &'a dyn Fn(usize) -> io::Result<Command>,
    /// Shows the output of ranks other than 0, with their number before each line.
    pub shows_all: bool,
    /// Time that ranks have to leave after one has failed, before they are killed.
    pub grace: Duration,
    /// Receives sentences for the user.
    pub say: &'a dyn Fn(&str),
    /// Receives rank 0's description of the run (`World::tell_parent`).
    pub about: &'a dyn Fn(&str),
}

/// The default time for ranks to leave by themselves after one has failed.
pub const GRACE: Duration = Duration::from_secs(2);

/// The command line of this process.
pub fn own_command() -> io::Result<Command> {
    let mut words = std::env::args_os();
    let name = words.next();
    let mut command = Command::new(std::env::current_exe()?);
    command.arg0(name.as_deref().unwrap_or(OsStr::new("flatout"))).args(words);
    Ok(command)
}

/// Starts the ranks of this node and waits for all of them. Returns the exit code for this process: rank 0's, or 1. The error
/// is a sentence.
pub fn launch(launch: &Launch<'_>) -> Result<u8, String> {
    let (sender, events) = mpsc::channel();
    // Registered before the first child starts, so that no signal is missed.
    let mut taken = vec![SIGTERM, SIGINT, SIGUSR1];
    // Ranks ignore a hangup if their parent does.
    if !is_ignored(SIGHUP) {
        taken.push(SIGHUP);
    }
    let mut signals = Signals::new(taken).map_err(|error| format!("signals cannot be taken: {error}"))?;
    let handle = signals.handle();
    let to_events = sender.clone();
    thread::spawn(move || {
        signals.forever().take_while(|signal| to_events.send(Event::Signal(*signal)).is_ok()).count()
    });
    let mut children = Children { launch, host: host_name(), ranks: vec![], failure: None, until: None };
    let secret = std::env::var(place::SECRET).ok().or_else(|| {
        // Other users of this host can reach loopback too.
        (launch.copies.nodes == 1).then(|| format!("{:016x}{:016x}", random(), random()))
    });
    let begun = (0..launch.copies.here).try_for_each(|local| {
        let started = start(launch, local, secret.as_deref(), &sender);
        started
            .map(|rank| children.ranks.push(rank))
            .map_err(|error| format!("rank {local} cannot be started: {error}"))
    });
    drop(sender);
    if let Err(sentence) = begun {
        children.signal(Signal::KILL);
        children.ranks.iter_mut().for_each(|rank| drop(rank.child.wait()));
        return Err(sentence);
    }
    children.supervise(&events);
    handle.close();
    Ok(children.code())
}

/// Whether the process was started with a signal ignored, as by `nohup`, where the system provides that information.
pub fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

enum Event {
    Signal(i32),
    Message(usize, ToParent),
}

struct Rank {
    rank: usize,
    child: Child,
    channel: Channel,
    /// The last lines of its standard error, unless shown.
    wrote: Arc<Mutex<VecDeque<String>>>,
    readers: Vec<thread::JoinHandle<()>>,
    /// The failure for which it leaves, and whether rank 0 prints that failure.
    told: Option<(String, bool)>,
    end: Option<ExitStatus>,
}

fn start(
    launch: &Launch<'_>,
    local: usize,
    secret: Option<&str>,
    events: &Sender<Event>,
) -> io::Result<Rank> {
    let Copies { here, node, nodes } = launch.copies;
    let rank = node * here + local;
    let (ours, theirs) = UnixStream::pair()?;
    let mut command = (launch.command)(rank)?;
    let numbers = [
        (place::RANK, rank),
        (place::RANKS, here * nodes),
        (place::LOCAL_RANK, local),
        (place::LOCALS, here),
        (place::NODE, node),
        (place::PARENT, std::process::id() as usize),
    ];
    command.envs(numbers.map(|(name, number)| (name, number.to_string())));
    command.envs(secret.map(|secret| (place::SECRET, secret)));
    command.stdin(Stdio::from(OwnedFd::from(theirs))).process_group(0);
    if rank != 0 {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
    }
    let mut child = command.spawn()?;
    // The command holds the rank's end of the channel, which must close when the rank ends.
    drop(command);
    let wrote = Arc::new(Mutex::new(VecDeque::new()));
    let mut readers = vec![];
    if let Some(out) = child.stdout.take() {
        let prefix = launch.shows_all.then(|| format!("[rank {rank}] "));
        readers
            .push(thread::spawn(move || each_line(out, |line| show(io::stdout(), prefix.as_deref(), line))));
    }
    if let Some(err) = child.stderr.take() {
        let prefix = launch.shows_all.then(|| format!("[rank {rank}] "));
        let wrote = Arc::clone(&wrote);
        readers.push(thread::spawn(move || {
            each_line(err, |line| {
                show(io::stderr(), prefix.as_deref(), line);
                let mut kept = wrote.lock().expect("nobody panics with these lines");
                if kept.len() == KEPT_LINES {
                    kept.pop_front();
                }
                kept.push_back(line.to_string());
            });
        }));
    }
    let (messages, events) = (ours.try_clone()?, events.clone());
    thread::spawn(move || {
        parent::listen(messages, |message| drop(events.send(Event::Message(local, message))))
    });
    Ok(Rank { rank, child, channel: Channel::new(ours), wrote, readers, told: None, end: None })
}

/// Prints a line if it has a prefix. A missing reader is not an error.
fn show(mut out: impl Write, prefix: Option<&str>, line: &str) {
    if let Some(prefix) = prefix {
        let _ = writeln!(out, "{prefix}{line}");
    }
}

/// The lines of a stream, whose bytes need not be valid text.
fn each_line(stream: impl Read, mut take: impl FnMut(&str)) {
    let mut stream = BufReader::new(stream);
    let mut line = vec![];
    while stream.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
        take(String::from_utf8_lossy(&line).trim_end_matches('\n'));
        line.clear();
    }
}

struct Children<'a> {
    launch: &'a Launch<'a>,
    host: String,
    ranks: Vec<Rank>,
    /// How the first failed rank ended.
    failure: Option<String>,
    /// The time at which remaining ranks are killed.
    until: Option<Instant>,
}

impl Children<'_> {
    /// Waits for all ranks and handles events in the meantime.
    fn supervise(&mut self, events: &Receiver<Event>) {
        while self.ranks.iter().any(|rank| rank.end.is_none()) {
            match events.recv_timeout(TICK) {
                Ok(Event::Signal(number)) => self.pass_on(number),
                Ok(Event::Message(local, message)) => self.handle_message(local, message),
                Err(RecvTimeoutError::Timeout) => {}
                // The thread for signals keeps a sender until the end.
                Err(RecvTimeoutError::Disconnected) => thread::sleep(TICK),
            }
            for local in 0..self.ranks.len() {
                self.reap(local);
            }
            if self.until.is_some_and(|until| Instant::now() >= until) {
                self.until = None;
                self.signal(Signal::KILL);
            }
        }
        // Messages that were in flight when the last rank ended.
        while let Ok(event) = events.recv_timeout(TICK) {
            if let Event::Message(local, message) = event {
                self.handle_message(local, message);
            }
        }
        self.print_failure();
    }

    fn pass_on(&self, number: i32) {
        if let Some(signal) = Signal::from_named_raw(number) {
            self.signal(signal);
        }
    }

    /// Sends a signal to every rank that has not been reaped, so that its process id is still valid.
    fn signal(&self, signal: Signal) {
        for rank in self.ranks.iter().filter(|rank| rank.end.is_none()) {
            let _ = kill_process(Pid::from_child(&rank.child), signal);
        }
    }

    fn handle_message(&mut self, local: usize, message: ToParent) {
        match message {
            ToParent::Address(address) => {
                self.ranks.iter().for_each(|rank| rank.channel.tell(&ToRank::Address(address.clone())));
            }
            ToParent::Failed { sentence, is_said_by_rank_0 } => {
                self.ranks[local].told = Some((sentence, is_said_by_rank_0));
                self.until.get_or_insert(Instant::now() + self.launch.grace);
            }
            ToParent::About(run) => (self.launch.about)(&run),
        }
    }

    /// Reaps a rank if it has ended, and tells the others if it failed.
    fn reap(&mut self, local: usize) {
        let rank = &mut self.ranks[local];
        if rank.end.is_some() {
            return;
        }
        let Ok(Some(status)) = rank.child.try_wait() else { return };
        rank.end = Some(status);
        if status.code() == Some(STOPPED) {
            self.tell_alive(&ToRank::Stopped);
        }
        if status.code().is_some_and(|code| GOOD_CODES.contains(&code)) {
            return;
        }
        let rank = &self.ranks[local];
        // Its last lines may still be in flight; the wait is bounded, because a grandchild may keep the pipe open.
        let patience = Instant::now() + 5 * TICK;
        while !rank.readers.iter().all(thread::JoinHandle::is_finished) && Instant::now() < patience {
            thread::sleep(Duration::from_millis(1));
        }
        let (rank, process, how) = (rank.rank, rank.child.id(), ended(status, &rank.wrote));
        self.until.get_or_insert(Instant::now() + self.launch.grace);
        if self.failure.is_none() {
            self.failure = Some(format!("rank {rank} ({}, process {process}) {how}", self.host));
            self.tell_alive(&ToRank::Ended(Account { rank, process, how }));
        }
    }

    fn tell_alive(&self, message: &ToRank) {
        self.ranks.iter().filter(|rank| rank.end.is_none()).for_each(|rank| rank.channel.tell(message));
    }

    /// Prints the failure unless someone else does. A rank 0 that ended by itself has printed it, on this node or another.
    fn print_failure(&self) {
        let Some(failure) = &self.failure else { return };
        let has_spoken = match self.ranks.iter().find(|rank| rank.rank == 0) {
            Some(first) => first.end.and_then(|end| end.code()).is_some_and(|code| code != 0),
            None => self
                .ranks
                .iter()
                .any(|rank| rank.told.as_ref().is_some_and(|(_, is_said_by_rank_0)| *is_said_by_rank_0)),
        };
        if !has_spoken {
            let told = self.ranks.iter().find_map(|rank| rank.told.as_ref());
            (self.launch.say)(told.map_or(failure, |(sentence, _)| sentence));
        }
    }

    fn code(&self) -> u8 {
        let code = |rank: &Rank| rank.end.and_then(|end| end.code()).unwrap_or(1);
        // On a node without rank 0 the exit code is that of its first rank.
        let first = self.ranks.first().map_or(1, code);
        let is_good = |rank: &Rank| GOOD_CODES.contains(&code(rank));
        let code = if first == 0 && !self.ranks.iter().all(is_good) { 1 } else { first };
        u8::try_from(code).unwrap_or(1)
    }
}

/// How a process ended, as a clause.
fn ended(status: ExitStatus, wrote: &Mutex<VecDeque<String>>) -> String {
    match status.signal() {
        Some(number) => match signal_name(number) {
            Some(name) => format!("was killed by signal {number} ({name})"),
            None => format!("was killed by signal {number}"),
        },
        None => {
            let wrote = wrote.lock().expect("nobody panics with these lines");
            let last = wrote.iter().rev().find(|line| !line.trim().is_empty());
            let last = last.map(|line| format!(" after it wrote `{}`", line.trim())).unwrap_or_default();
            format!("ended with code {}{last}", status.code().unwrap_or(1))
        }
    }
}
