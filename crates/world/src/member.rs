//! The interface of a rank: calls that all ranks make together, heartbeats, failing and finishing.

use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};

use crate::calls::MOST_CALL_BYTES;
use crate::failure::Failure;
use crate::frame::FrameKind;
use crate::hub::Hub;
use crate::message::{Head, Member, Op, Report, Status, join_call, json, nodes, split_parts};
use crate::parent::ToParent;
use crate::watcher::Core;
use crate::wire::WireError;

/// The line of calls of `World` itself.
const MAIN: &str = "main";

/// A rank of a run, connected to all others.
pub struct World {
    pub rank: usize,
    pub ranks: usize,
    /// The rank's number among the ranks of this host, and their number.
    pub local_rank: usize,
    pub locals: usize,
    pub node: usize,
    pub nodes: usize,
    calls: Calls,
    core: Option<Arc<Core>>,
    hub: Option<Hub>,
    /// Dropping it stops the heartbeats.
    beating: Option<Sender<()>>,
}

impl World {
    /// A run with one rank: opens no connection, and every call returns its own input.
    pub fn alone() -> World {
        let calls = Calls { core: None, line: MAIN, count: AtomicU64::new(0) };
        let (rank, ranks, local_rank, locals, node, nodes) = (0, 1, 0, 1, 0, 1);
        World { rank, ranks, local_rank, locals, node, nodes, calls, core: None, hub: None, beating: None }
    }

    /// Starts a rank whose connection is established: from here on it sends heartbeats and is monitored.
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

    /// Calls for another thread, which have a counter of their own, named `line`. Every rank must have the same lines.
    pub fn calls(&self, line: &'static str) -> Calls {
        assert_ne!(line, MAIN, "this line of calls is the world's own");
        Calls { core: self.core.clone(), line, count: AtomicU64::new(0) }
    }

    /// Rank 0's bytes on every rank; the bytes that others pass are ignored.
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

    /// Waits until every rank has called it.
    pub fn barrier(&self, name: &str) -> Result<(), Failure> {
        self.calls.barrier(name)
    }

    /// Sets this rank's progress for the next heartbeat.
    pub fn beat(&self, status: Status) {
        if let Some(core) = &self.core {
            core.status.lock().expect("no thread panics with the status").0 = status;
        }
    }

    /// Sends rank 0 a message that it reads at its convenience. No rank waits for it.
    pub fn post(&self, bytes: &[u8]) {
        if let Some(core) = &self.core {
            core.send(FrameKind::Post, bytes);
        }
    }

    /// The messages that other ranks have posted to rank 0 since the last call, with their ranks. Messages of one rank are in
    /// order.
    pub fn posts(&self) -> Vec<(usize, Vec<u8>)> {
        let take = |core: &Arc<Core>| {
            std::mem::take(&mut *core.posts.lock().expect("no thread panics with the posts"))
        };
        self.core.as_ref().map(take).unwrap_or_default()
    }

    /// Describes the run to the parent process, for its sentence if rank 0 is killed.
    pub fn tell_parent(&self, run: &str) {
        if let Some(parent) = self.core.as_ref().and_then(|core| core.parent.as_ref()) {
            parent.tell(&ToParent::About(run.into()));
        }
    }

    /// A handle with which any thread of this rank stops all ranks before the run has begun.
    pub fn stopper(&self) -> Stopper {
        Stopper(self.core.clone())
    }

    /// A handle with which any thread of this rank fails the run.
    pub fn alarm(&self) -> Alarm {
        Alarm(self.core.clone())
    }

    /// Counts a run of a plan with collectives. Heartbeats carry a hash of their order, which must be the same on all ranks.
    pub fn called(&self, role: &str) {
        if let Some(core) = &self.core {
            core.status.lock().expect("no thread panics with the status").1.add(role);
        }
    }

    /// Fails the run with a sentence about this rank. Every rank, this one too, is told and ended by its watcher: the call only
    /// returns if the function passed to `join` does not end the process.
    pub fn fail(&self, sentence: &str) -> Failure {
        self.report(sentence.into(), None)
    }

    /// Fails the run because a wire broke. If another rank is gone, the report of its parent or of the hub replaces this one.
    pub fn fail_wire(&self, error: &WireError) -> Failure {
        let about = match error {
            WireError::Gone { rank } => Some(*rank),
            _ => None,
        };
        match error {
            WireError::Failed => self.core.as_ref().expect("a rank alone loses nobody").wait_for_failure(),
            _ => self.report(error.to_string(), about),
        }
    }

    /// Fails the run, because of another rank if `about` names one, and waits for the resulting failure.
    pub(crate) fn report(&self, sentence: String, about: Option<usize>) -> Failure {
        let Some(core) = &self.core else {
            return Failure { is_mine_to_say: true, ..Failure::new(Some(0), sentence) };
        };
        core.send(FrameKind::Failure, &json(&Report { sentence, about }));
        core.wait_for_failure()
    }

    pub fn failure(&self) -> Option<Failure> {
        self.core.as_ref().and_then(|core| core.failure())
    }

    /// Leaves once every rank has finished the run. Rank 0 stays until the others have gone.
    pub fn finish(mut self) -> Result<(), Failure> {
        let Some(core) = self.core.clone() else { return Ok(()) };
        self.barrier("end of the run")?;
        core.is_over.store(true, Ordering::SeqCst);
        core.send(FrameKind::Bye, &[]);
        if let Some(hub) = self.hub.take() {
            hub.wait();
        }
        Ok(())
    }

    /// Every rank as the others see it; empty for a single rank.
    pub fn members(&self) -> &[Member] {
        self.core.as_ref().and_then(|core| core.members.get()).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn core(&self) -> Option<&Arc<Core>> {
        self.core.as_ref()
    }
}

impl Drop for World {
    /// Closes the connection; the others notice a rank that leaves before the end of the run.
    fn drop(&mut self) {
        self.beating = None;
        if let Some(core) = &self.core {
            core.is_over.store(true, Ordering::SeqCst);
            if let Some(stream) = core.link().stream.take() {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    }
}

/// Stops all ranks before the run has begun: none has saved anything, and on each the function passed to `join` ends the
/// process. The caller must be sure that no rank has begun.
pub struct Stopper(Option<Arc<Core>>);

impl Stopper {
    pub(crate) fn of(core: &Arc<Core>) -> Stopper {
        Stopper(Some(Arc::clone(core)))
    }

    /// Asks the hub to tell all ranks, including this one. Returns immediately, with whether the hub was asked. If not, the hub
    /// does not know of this rank and never will.
    pub fn stop(&self, reason: &str) -> bool {
        self.0.as_ref().is_some_and(|core| core.ask_to_stop(reason))
    }
}

/// Fails the run from a monitoring thread.
pub struct Alarm(Option<Arc<Core>>);

impl Alarm {
    /// Tells the hub, and through it all ranks, of a failure on this rank. Returns immediately.
    pub fn fail(&self, sentence: &str) {
        if let Some(core) = &self.0 {
            core.send(FrameKind::Failure, &json(&Report { sentence: sentence.into(), about: None }));
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
        core.send(FrameKind::Call, &join_call(&head, bytes));
        answer.recv().map_err(|_| core.failure().expect("only a failure ends a call without an answer"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_rank_opens_nothing_and_gets_its_input_back() {
        let world = World::alone();
        assert_eq!(world.broadcast("config", b"text").unwrap(), b"text");
        assert_eq!(world.gather("loss", b"1").unwrap(), [b"1".to_vec()]);
        assert_eq!(world.agree("stop", 7).unwrap(), 7);
        world.barrier("here").unwrap();
        world.beat(Status::default());
        world.called("grad");
        world.post(b"times");
        assert!(world.posts().is_empty() && !world.stopper().stop("SIGTERM"));
        world.alarm().fail("NCCL");
        assert!(world.members().is_empty());
        world.finish().unwrap();
    }
}
