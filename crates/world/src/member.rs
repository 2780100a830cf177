//! Every rank's side: calls that all ranks make together, heartbeats, and a watcher that ends the rank when the run fails.

use std::collections::HashMap;
use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

use crate::beats::{CallHash, at_step};
use crate::calls::MOST_CALL_BYTES;
use crate::failure::Failure;
use crate::frame::{self, FrameError, Kind, MOST_BYTES};
use crate::hub::Hub;
use crate::join::Leave;
use crate::message::{
    Account, Beat, Head, Member, Op, Report, Status, join_call, json, parse, split_call, split_parts,
};
use crate::parent::{Down, Line, Up};
use crate::timing::Timing;
use crate::wire::WireError;

/// The line of calls of `World` itself.
const MAIN: &str = "main";

/// One rank among all ranks of a run.
pub struct World {
    pub rank: usize,
    pub ranks: usize,
    /// Number among the ranks of this host, and how many they are.
    pub local_rank: usize,
    pub locals: usize,
    pub node: usize,
    pub nodes: usize,
    calls: Calls,
    core: Option<Arc<Core>>,
    hub: Option<Hub>,
    /// Dropped to end the heartbeats.
    beating: Option<Sender<()>>,
}

/// What the threads of a rank share.
pub(crate) struct Core {
    pub rank: usize,
    pub host: String,
    pub timing: Timing,
    pub leave: Leave,
    pub line: Option<Line>,
    pub link: Mutex<Option<TcpStream>>,
    pub local_address: OnceLock<IpAddr>,
    pub session: OnceLock<u64>,
    /// By rank, once everyone is there.
    pub members: OnceLock<Vec<Member>>,
    state: Mutex<State>,
    changed: Condvar,
    status: Mutex<(Status, CallHash)>,
    /// A failure is being told.
    is_falling: AtomicBool,
    /// The run is over or has failed: nobody waits for the hub or for other ranks any more.
    pub is_over: Arc<AtomicBool>,
}

#[derive(Default)]
struct State {
    failure: Option<Failure>,
    /// How ranks of this node ended, as the parent said.
    accounts: Vec<Account>,
    /// Where rank 0 listens, as the parent said.
    address: Option<String>,
    /// Who waits for the result of a call, by line and count.
    waiting: HashMap<(String, u64), Sender<Vec<u8>>>,
}

impl Core {
    pub fn new(rank: usize, host: String, timing: Timing, leave: Leave, line: Option<Line>) -> Core {
        Core {
            rank,
            host,
            timing,
            leave,
            line,
            link: Mutex::new(None),
            local_address: OnceLock::new(),
            session: OnceLock::new(),
            members: OnceLock::new(),
            state: Mutex::default(),
            changed: Condvar::new(),
            status: Mutex::default(),
            is_falling: AtomicBool::new(false),
            is_over: Arc::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread of a rank panics with its state")
    }

    pub fn failure(&self) -> Option<Failure> {
        self.state().failure.clone()
    }

    /// Waits for the parent to say where rank 0 listens; nothing before `until` or after a failure.
    pub fn told_address(&self, until: Instant) -> Option<String> {
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

    /// A word of the parent.
    pub fn hear(&self, word: Down) {
        match word {
            Down::Address(address) => self.state().address = Some(address),
            Down::Ended(account) => {
                self.state().accounts.push(account.clone());
                if self.members.get().is_some() {
                    self.send(Kind::Account, &json(&account));
                } else if !self.is_over.load(Ordering::SeqCst) {
                    let Account { rank, process, how } = account;
                    let who = format!("rank {rank} ({}, process {process})", self.host);
                    self.fall(
                        Failure::new(Some(rank), format!("{who} {how} before all ranks had joined")),
                        false,
                    );
                }
            }
        }
        self.changed.notify_all();
    }

    /// The line to the parent ended.
    pub fn lose_parent(&self) {
        if !self.is_over.load(Ordering::SeqCst) {
            self.fall(Failure::new(None, "the process that started the ranks is gone"), false);
        }
    }

    /// The run has failed: the parent is told, and the caller's function ends the process. Only where it does not is whoever waits
    /// woken, so that the main thread has no word of its own about a failure that is being said.
    fn fall(&self, mut failure: Failure, is_hub_gone: bool) {
        if self.is_falling.swap(true, Ordering::SeqCst) {
            return;
        }
        failure.is_mine_to_say =
            self.rank == 0 || (is_hub_gone && self.line.is_none() && self.is_first_here());
        if let Some(line) = &self.line {
            line.tell(&Up::Failed { sentence: failure.sentence.clone(), is_said_by_rank_0: !is_hub_gone });
        }
        (self.leave)(&failure);
        let mut state = self.state();
        state.failure = Some(failure);
        state.waiting.clear();
        self.is_over.store(true, Ordering::SeqCst);
        self.changed.notify_all();
    }

    /// Whether this is the first rank of its node, rank 0 left out.
    fn is_first_here(&self) -> bool {
        let Some(members) = self.members.get() else { return true };
        let nodes = nodes(members);
        (1..self.rank).all(|other| nodes[other] != nodes[self.rank])
    }

    /// Sends to the hub. Where that fails the watcher sees why.
    fn send(&self, kind: Kind, payload: &[u8]) {
        if let Some(stream) = self.link.lock().expect("no thread panics with the link").as_mut() {
            let _ = frame::write(stream, kind, payload);
        }
    }

    fn beat(&self) {
        let beat = {
            let (status, calls) = &*self.status.lock().expect("no thread panics with the status");
            Beat { status: status.clone(), marks: calls.marks() }
        };
        self.send(Kind::Beat, &json(&beat));
    }

    /// Reads what the hub sends until the run is over or has failed.
    pub fn watch(&self, mut stream: TcpStream) {
        loop {
            match frame::read(&mut stream, MOST_BYTES) {
                Ok(frame) if frame.kind == Kind::Beat => {}
                Ok(frame) if frame.kind == Kind::Answer => {
                    let Some((head, bytes)) = split_call(&frame.payload) else { continue };
                    let waiting = self.state().waiting.remove(&(head.line, head.count));
                    waiting.map(|waiting| waiting.send(bytes.to_vec()));
                }
                Ok(frame) => {
                    let told =
                        (frame.kind == Kind::Failure).then(|| parse::<Failure>(&frame.payload)).flatten();
                    let unread = || Failure::new(Some(0), "rank 0 sent a message that cannot be read");
                    return self.fall(told.unwrap_or_else(unread), false);
                }
                Err(_) if self.is_over.load(Ordering::SeqCst) => return,
                Err(why) => return self.lose_hub(why),
            }
        }
    }

    /// The hub is gone, and with it rank 0, whose parent may say how.
    fn lose_hub(&self, why: FrameError) {
        let until = Instant::now() + self.timing.account;
        let mut state = self.state();
        let account = loop {
            let account = state.accounts.iter().find(|account| account.rank == 0);
            let left = until.checked_duration_since(Instant::now());
            match (account, left.filter(|_| self.line.is_some())) {
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
        self.fall(Failure::new(Some(0), sentence), true);
    }
}

/// The node of every rank: nodes are told apart by the number their starter gave, or by host, and counted in order of ranks.
fn nodes(members: &[Member]) -> Vec<usize> {
    let mut seen: Vec<(Option<usize>, &str)> = vec![];
    let mut node = |member: &'_ Member| -> (Option<usize>, String) {
        (member.node, if member.node.is_some() { String::new() } else { member.host.clone() })
    };
    let keys: Vec<(Option<usize>, String)> = members.iter().map(&mut node).collect();
    let mut numbers = vec![];
    for key in &keys {
        let key = (key.0, key.1.as_str());
        let at = seen.iter().position(|other| *other == key).unwrap_or_else(|| {
            seen.push(key);
            seen.len() - 1
        });
        numbers.push(at);
    }
    numbers
}

impl World {
    /// A run of one rank: opens nothing, and every call gives back what it was given.
    pub fn alone() -> World {
        let calls = Calls { core: None, line: MAIN, count: AtomicU64::new(0) };
        let (rank, ranks, local_rank, locals, node, nodes) = (0, 1, 0, 1, 0, 1);
        World { rank, ranks, local_rank, locals, node, nodes, calls, core: None, hub: None, beating: None }
    }

    /// A rank whose connection stands: from here on it sends heartbeats and is watched.
    pub(crate) fn begin(
        core: Arc<Core>,
        stream: TcpStream,
        hub: Option<Hub>,
        local: Option<(usize, usize)>,
    ) -> std::io::Result<World> {
        let members = core.members.get().expect("a rank begins when everyone is there");
        let of_rank = nodes(members);
        let (rank, ranks) = (core.rank, members.len());
        let here = |other: &usize| of_rank[*other] == of_rank[rank];
        let (local_rank, locals) =
            local.unwrap_or(((0..rank).filter(here).count(), (0..ranks).filter(here).count()));
        let (node, nodes) = (of_rank[rank], of_rank.iter().max().map_or(1, |last| last + 1));
        let watcher = Arc::clone(&core);
        std::thread::Builder::new().name("watcher".into()).spawn(move || watcher.watch(stream))?;
        let (beating, stop) = mpsc::channel::<()>();
        let heart = Arc::clone(&core);
        std::thread::Builder::new().name("heartbeat".into()).spawn(move || {
            heart.beat();
            while stop.recv_timeout(heart.timing.beat_every) == Err(RecvTimeoutError::Timeout) {
                heart.beat();
            }
        })?;
        let calls = Calls { core: Some(Arc::clone(&core)), line: MAIN, count: AtomicU64::new(0) };
        let beating = Some(beating);
        Ok(World { rank, ranks, local_rank, locals, node, nodes, calls, core: Some(core), hub, beating })
    }

    /// The calls of another thread, which are counted on a line of their own. Every rank has the same lines.
    pub fn calls(&self, line: &'static str) -> Calls {
        assert_ne!(line, MAIN, "this line of calls is the world's own");
        Calls { core: self.core.clone(), line, count: AtomicU64::new(0) }
    }

    /// Rank 0's bytes on every rank; what the others pass is left aside.
    pub fn broadcast(&self, name: &str, bytes: &[u8]) -> Result<Vec<u8>, Failure> {
        self.calls.broadcast(name, bytes)
    }

    /// The bytes of every rank, in order of ranks, on every rank.
    pub fn gather(&self, name: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Failure> {
        self.calls.gather(name, bytes)
    }

    /// The largest number that any rank passes.
    pub fn agree(&self, name: &str, number: u64) -> Result<u64, Failure> {
        self.calls.agree(name, number)
    }

    /// Waits until every rank is here.
    pub fn barrier(&self, name: &str) -> Result<(), Failure> {
        self.calls.barrier(name)
    }

    /// Where this rank is, for the next heartbeat.
    pub fn beat(&self, status: Status) {
        if let Some(core) = &self.core {
            core.status.lock().expect("no thread panics with the status").0 = status;
        }
    }

    /// Counts a run of a plan that holds collectives. Heartbeats carry a hash of their order, which must be the same everywhere.
    pub fn called(&self, role: &str) {
        if let Some(core) = &self.core {
            core.status.lock().expect("no thread panics with the status").1.add(role);
        }
    }

    /// Fails the run with a sentence about this rank. Every rank is told and left by its watcher, this one too: the call comes back
    /// only where the function that `join` was given does not end the process.
    pub fn fail(&self, sentence: &str) -> Failure {
        self.report(sentence.into(), None)
    }

    /// Fails the run because a wire broke. Where another rank is gone, what its parent or the hub knows of it is said instead.
    pub fn fail_wire(&self, error: &WireError) -> Failure {
        let about = match error {
            WireError::Gone { rank } => Some(*rank),
            _ => None,
        };
        match error {
            WireError::Failed => self.wait_for_failure(),
            _ => self.report(error.to_string(), about),
        }
    }

    fn report(&self, sentence: String, about: Option<usize>) -> Failure {
        let Some(core) = &self.core else {
            return Failure { is_mine_to_say: true, ..Failure::new(Some(0), sentence) };
        };
        core.send(Kind::Failure, &json(&Report { sentence, about }));
        self.wait_for_failure()
    }

    /// Waits until the hub says what happened, or is itself found to be gone.
    fn wait_for_failure(&self) -> Failure {
        let core = self.core.as_ref().expect("a rank alone loses nobody");
        let mut state = core.state();
        loop {
            if let Some(failure) = &state.failure {
                return failure.clone();
            }
            state = core.changed.wait(state).expect("no thread of a rank panics with its state");
        }
    }

    /// The first failure, where there was one.
    pub fn failure(&self) -> Option<Failure> {
        self.core.as_ref().and_then(|core| core.failure())
    }

    /// Leaves when every rank has come to the end of the run. Rank 0 stays until the others have gone.
    pub fn finish(mut self) -> Result<(), Failure> {
        let Some(core) = self.core.clone() else { return Ok(()) };
        self.barrier("end of the run")?;
        core.is_over.store(true, Ordering::SeqCst);
        core.send(Kind::Bye, &[]);
        if let Some(hub) = self.hub.take() {
            hub.wait();
        }
        Ok(())
    }

    /// Every rank as the others see it; empty where there is only one.
    pub fn members(&self) -> &[Member] {
        self.core.as_ref().and_then(|core| core.members.get()).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn core(&self) -> Option<&Arc<Core>> {
        self.core.as_ref()
    }
}

impl Drop for World {
    /// Closes the connection: a rank that leaves before the end of the run is noticed by the others.
    fn drop(&mut self) {
        self.beating = None;
        if let Some(core) = &self.core {
            core.is_over.store(true, Ordering::SeqCst);
            if let Some(stream) = core.link.lock().expect("no thread panics with the link").take() {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    }
}

/// Calls that all ranks make together, in the same order. Host messages are small and rare.
pub struct Calls {
    core: Option<Arc<Core>>,
    line: &'static str,
    count: AtomicU64,
}

impl Calls {
    pub fn broadcast(&self, name: &str, bytes: &[u8]) -> Result<Vec<u8>, Failure> {
        let is_root = self.core.as_ref().is_none_or(|core| core.rank == 0);
        self.call(Op::Broadcast, name, if is_root { bytes } else { &[] })
    }

    pub fn gather(&self, name: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Failure> {
        match &self.core {
            None => Ok(vec![bytes.to_vec()]),
            Some(_) => {
                let parts = self.call(Op::Gather, name, bytes)?;
                split_parts(&parts)
                    .ok_or_else(|| Failure::new(Some(0), "rank 0 sent a message that cannot be read"))
            }
        }
    }

    pub fn agree(&self, name: &str, number: u64) -> Result<u64, Failure> {
        let bytes = self.call(Op::Agree, name, &number.to_le_bytes())?;
        let number = bytes.try_into().map(u64::from_le_bytes);
        number.map_err(|_| Failure::new(Some(0), "rank 0 sent a message that cannot be read"))
    }

    pub fn barrier(&self, name: &str) -> Result<(), Failure> {
        self.call(Op::Barrier, name, &[]).map(drop)
    }

    fn call(&self, op: Op, name: &str, bytes: &[u8]) -> Result<Vec<u8>, Failure> {
        assert!(bytes.len() <= MOST_CALL_BYTES, "call `{name}` has {} bytes", bytes.len());
        let Some(core) = &self.core else { return Ok(bytes.to_vec()) };
        let count = self.count.fetch_add(1, Ordering::SeqCst);
        let (sender, answer) = mpsc::channel();
        {
            let mut state = core.state();
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            state.waiting.insert((self.line.into(), count), sender);
        }
        let head = Head { line: self.line.into(), count, op, name: name.into() };
        core.send(Kind::Call, &join_call(&head, bytes));
        answer.recv().map_err(|_| core.failure().expect("only a failure ends a call without an answer"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_told_apart_by_number_or_by_host() {
        let member = |host: &str, node| Member { host: host.into(), process: 1, node, device: None };
        let by_host = ["a", "b", "a", "c", "b"].map(|host| member(host, None));
        assert_eq!(nodes(&by_host), [0, 1, 0, 2, 1]);
        let by_number = [0, 0, 1, 1].map(|node| member("a", Some(node)));
        assert_eq!(nodes(&by_number), [0, 0, 1, 1]);
    }

    #[test]
    fn one_rank_opens_nothing_and_gets_back_what_it_gives() {
        let world = World::alone();
        assert_eq!(world.broadcast("config", b"text").unwrap(), b"text");
        assert_eq!(world.gather("loss", b"1").unwrap(), [b"1".to_vec()]);
        assert_eq!(world.agree("stop", 7).unwrap(), 7);
        world.barrier("here").unwrap();
        world.beat(Status::default());
        world.called("grad");
        assert!(world.members().is_empty());
        world.finish().unwrap();
    }
}
