//! The watcher of a rank: listens to the hub and the parent, and ends the rank when the run has failed.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use crate::beats::{CallHash, at_step};
use crate::failure::Failure;
use crate::frame::{self, FrameError, FrameKind, MOST_BYTES};
use crate::join::{Leave, Stop};
use crate::message::{Account, Beat, Member, Status, json, nodes, parse, split_call};
use crate::parent::{Channel, ToParent, ToRank};
use crate::timing::Timing;

/// The time in which the hub's message may arrive before the end of another rank counts as the failure itself.
const MOMENT: Duration = Duration::from_millis(500);

/// The state that the threads of a rank share.
pub(crate) struct Core {
    pub rank: usize,
    pub host: String,
    pub timing: Timing,
    leave: Leave,
    stop: Stop,
    pub parent: Option<Channel>,
    pub link: Mutex<Link>,
    pub local_address: OnceLock<IpAddr>,
    pub session: OnceLock<u64>,
    /// By rank, once all have joined.
    pub members: OnceLock<Vec<Member>>,
    pub state: Mutex<State>,
    pub changed: Condvar,
    pub status: Mutex<(Status, CallHash)>,
    /// Messages from other ranks that rank 0 has not read yet, with their ranks.
    pub posts: Mutex<Vec<(usize, Vec<u8>)>>,
    is_failing: AtomicBool,
    /// Whether the run is over or has failed: nothing waits for the hub or for other ranks any more.
    pub is_over: Arc<AtomicBool>,
}

/// The sending side of the connection to the hub.
#[derive(Default)]
pub(crate) struct Link {
    /// Set from the request to join until the rank leaves.
    pub stream: Option<TcpStream>,
    /// The reason why this rank was asked to stop before it joined: it must then not join.
    stopped: Option<String>,
}

#[derive(Default)]
pub(crate) struct State {
    pub failure: Option<Failure>,
    /// How ranks of this node ended, reported by the parent.
    accounts: Vec<Account>,
    /// The address of rank 0, reported by the parent.
    address: Option<String>,
    /// Callers that wait for the result of a call, by line and count.
    pub waiting: HashMap<(String, u64), Sender<Vec<u8>>>,
}

impl Core {
    pub fn new(
        rank: usize,
        host: String,
        timing: Timing,
        (leave, stop): (Leave, Stop),
        parent: Option<Channel>,
    ) -> Core {
        Core {
            rank,
            host,
            timing,
            leave,
            stop,
            parent,
            link: Mutex::default(),
            local_address: OnceLock::new(),
            session: OnceLock::new(),
            members: OnceLock::new(),
            state: Mutex::default(),
            changed: Condvar::new(),
            status: Mutex::default(),
            posts: Mutex::default(),
            is_failing: AtomicBool::new(false),
            is_over: Arc::default(),
        }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread of a rank panics with its state")
    }

    pub fn failure(&self) -> Option<Failure> {
        self.state().failure.clone()
    }

    /// Waits until the hub reports a failure, or is itself found to be gone.
    pub fn wait_for_failure(&self) -> Failure {
        let mut state = self.state();
        loop {
            if let Some(failure) = &state.failure {
                return failure.clone();
            }
            state = self.changed.wait(state).expect("no thread of a rank panics with its state");
        }
    }

    /// Waits for the parent to report the address of rank 0; `None` at `until` or after a failure.
    pub fn wait_for_address(&self, until: Instant) -> Option<String> {
        let mut state = self.state();
        loop {
            if state.address.is_some() || state.failure.is_some() {
                return state.address.clone();
            }
            let left = until.checked_duration_since(Instant::now())?;
            state =
                self.changed.wait_timeout(state, left).expect("no thread of a rank panics with its state").0;
        }
    }

    pub fn handle_message(&self, message: ToRank) {
        match message {
            ToRank::Address(address) => self.state().address = Some(address),
            ToRank::Ended(account) => {
                self.state().accounts.push(account.clone());
                if self.members.get().is_some() {
                    self.send(FrameKind::Account, &json(&account));
                } else if !self.hub_explains() && !self.is_over.load(Ordering::SeqCst) {
                    let Account { rank, process, how } = account;
                    let who = format!("rank {rank} ({}, process {process})", self.host);
                    self.fail(
                        Failure::new(Some(rank), format!("{who} {how} before all ranks had joined")),
                        false,
                    );
                }
            }
            // Ranks that have joined leave when the hub tells them to, and all end together.
            ToRank::Stopped if self.members.get().is_none() => self.stopped("a rank was asked to stop"),
            ToRank::Stopped => {}
        }
        self.changed.notify_all();
    }

    /// Whether the hub explains within a moment why ranks end: a rank that it told first may be gone before this one is told.
    fn hub_explains(&self) -> bool {
        let until = Instant::now() + MOMENT;
        let mut state = self.state();
        loop {
            if state.failure.is_some() || self.is_failing.load(Ordering::SeqCst) {
                return true;
            }
            let Some(left) = until.checked_duration_since(Instant::now()) else { return false };
            state =
                self.changed.wait_timeout(state, left).expect("no thread of a rank panics with its state").0;
        }
    }

    /// Handles the end of the channel to the parent.
    pub fn lose_parent(&self) {
        if !self.is_over.load(Ordering::SeqCst) {
            self.fail(Failure::new(None, "the process that started the ranks is gone"), false);
        }
    }

    /// Handles the failure of the run: tells the parent, and calls the function that ends the process. Only if that returns are
    /// waiting threads woken, so that the main thread does not print a message of its own while the failure is printed.
    fn fail(&self, mut failure: Failure, is_hub_gone: bool) {
        if self.is_failing.swap(true, Ordering::SeqCst) {
            return;
        }
        failure.is_mine_to_say =
            self.rank == 0 || (is_hub_gone && self.parent.is_none() && self.is_first_here());
        if let Some(parent) = &self.parent {
            parent.tell(&ToParent::Failed {
                sentence: failure.sentence.clone(),
                is_said_by_rank_0: !is_hub_gone,
            });
        }
        (self.leave)(&failure);
        let mut state = self.state();
        state.failure = Some(failure);
        state.waiting.clear();
        self.is_over.store(true, Ordering::SeqCst);
        self.changed.notify_all();
    }

    /// Handles a stop before the run has begun: calls the function that ends the process. If that returns, calls fail.
    pub fn stopped(&self, reason: &str) {
        if self.is_failing.load(Ordering::SeqCst) || self.is_over.swap(true, Ordering::SeqCst) {
            return;
        }
        (self.stop)(reason);
        let mut state = self.state();
        state.failure = Some(Failure::new(None, format!("the run was stopped before it began: {reason}")));
        state.waiting.clear();
        self.changed.notify_all();
    }

    /// Whether this is the first rank of its node, not counting rank 0.
    fn is_first_here(&self) -> bool {
        let Some(members) = self.members.get() else { return true };
        let nodes = nodes(members);
        (1..self.rank).all(|other| nodes[other] != nodes[self.rank])
    }

    /// Sends to the hub. If that fails, the watcher finds out why.
    pub fn send(&self, kind: FrameKind, payload: &[u8]) {
        if let Some(stream) = &mut self.link().stream {
            let _ = frame::write(stream, kind, payload);
        }
    }

    pub fn link(&self) -> MutexGuard<'_, Link> {
        self.link.lock().expect("no thread panics with the link")
    }

    /// Sends the first message over a new connection to the hub, unless this rank was already asked to stop, which is then
    /// handled. Returns whether it was sent.
    pub fn connect(&self, mut stream: TcpStream, kind: FrameKind, payload: &[u8]) -> io::Result<bool> {
        let mut link = self.link();
        if let Some(reason) = link.stopped.take() {
            drop(link);
            self.stopped(&reason);
            return Ok(false);
        }
        frame::write(&mut stream, kind, payload)?;
        link.stream = Some(stream);
        Ok(true)
    }

    /// Asks the hub to tell all ranks, including this one, to leave; a rank that the hub does not know of never joins. Returns
    /// whether the hub was asked.
    pub fn ask_to_stop(&self, reason: &str) -> bool {
        let mut link = self.link();
        match &mut link.stream {
            Some(stream) => {
                let _ = frame::write(stream, FrameKind::Stop, reason.as_bytes());
                true
            }
            None => {
                link.stopped = Some(reason.into());
                false
            }
        }
    }

    pub fn beat(&self) {
        let beat = {
            let (status, calls) = &*self.status.lock().expect("no thread panics with the status");
            Beat { status: status.clone(), marks: calls.marks() }
        };
        self.send(FrameKind::Beat, &json(&beat));
    }

    /// Reads the hub's messages until the run is over or has failed.
    pub fn watch(&self, mut stream: TcpStream) {
        loop {
            match frame::read(&mut stream, MOST_BYTES) {
                Ok(frame) if frame.kind == FrameKind::Beat => {}
                Ok(frame) if frame.kind == FrameKind::Answer => {
                    let Some((head, bytes)) = split_call(&frame.payload) else { continue };
                    let waiting = self.state().waiting.remove(&(head.line, head.count));
                    waiting.map(|waiting| waiting.send(bytes.to_vec()));
                }
                Ok(frame) if frame.kind == FrameKind::Post => {
                    let Some((rank, bytes)) = frame.payload.split_first_chunk::<4>() else { continue };
                    let post = (u32::from_le_bytes(*rank) as usize, bytes.to_vec());
                    self.posts.lock().expect("no thread panics with the posts").push(post);
                }
                Ok(frame) if frame.kind == FrameKind::Stop => {
                    return self.stopped(&String::from_utf8_lossy(&frame.payload));
                }
                Ok(frame) => {
                    let told = (frame.kind == FrameKind::Failure)
                        .then(|| parse::<Failure>(&frame.payload))
                        .flatten();
                    let unread = || Failure::new(Some(0), "rank 0 sent a message that cannot be read");
                    return self.fail(told.unwrap_or_else(unread), false);
                }
                Err(_) if self.is_over.load(Ordering::SeqCst) => return,
                Err(why) => return self.lose_hub(why),
            }
        }
    }

    /// Handles the loss of the hub, and with it of rank 0, whose parent may report how it ended.
    fn lose_hub(&self, why: FrameError) {
        let until = Instant::now() + self.timing.account;
        let mut state = self.state();
        let account = loop {
            let account = state.accounts.iter().find(|account| account.rank == 0);
            let left = until.checked_duration_since(Instant::now());
            match (account, left.filter(|_| self.parent.is_some())) {
                (None, Some(left)) => {
                    state = self
                        .changed
                        .wait_timeout(state, left)
                        .expect("no thread of a rank panics with its state")
                        .0;
                }
                (account, _) => break account.cloned(),
            }
        };
        drop(state);
        let members = self.members.get().expect("whoever watches has joined");
        let who = members[0].named(0);
        let at = at_step(self.status.lock().expect("no thread panics with the status").0.step);
        let sentence = match (account, why) {
            (Some(account), _) => format!("{who} {}{at}", account.how),
            (None, FrameError::Silent) => {
                let seconds = self.timing.silent_after.as_secs();
                format!(
                    "{who}, which holds the ranks together, has given no sign of life for {seconds} s{at}: its host or its network \
                     is gone, or the process is stopped"
                )
            }
            (None, why) => format!("{who}, which holds the ranks together, is gone{at}: {why}"),
        };
        self.fail(Failure::new(Some(0), sentence), true);
    }
}
