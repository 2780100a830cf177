//! The ranks of a run, as training uses them: they agree on everything before the first step, and end together.
//!
//! Rank 0 writes the run's directory and prints. The others compute the same on rows of their own; all decisions follow from
//! results that are equal on every rank, or from rank 0.

pub mod message;

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use flatout_ir::Target;
use flatout_ir::links::Link;
use flatout_ir::timings::Timings;
use flatout_runtime::cuda::{links, nccl};
use flatout_world::{Alarm, Calls, Sockets, Status, Wire, WireError, World};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::machine;
use crate::{Failure, UserError};

/// The longest time that a rank waits for a file of rank 0 to appear, and the polling interval.
const SHARED_WITHIN: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// One rank among those of a run.
pub struct Ranks {
    world: World,
    wire: Option<Arc<TimedWire>>,
    /// Every rank knows the reason why the run cannot begin, and leaves by itself.
    is_refused: Cell<bool>,
    has_begun: Cell<bool>,
    /// The smallest memory of any rank's device: plans must be equal, and some choices depend on what fits.
    memory_bytes: Cell<u64>,
    /// The link between GPUs of a node according to rank 0, and measured times of exchanges. Without a link the table of links
    /// applies.
    linked: RefCell<(Option<Link>, Timings)>,
}

impl Ranks {
    /// A run of one process, which opens no sockets.
    pub fn alone() -> Ranks {
        Ranks::over(World::alone(), None)
    }

    /// Connects the ranks of a world and divides the cores of each host: the smallest number of threads applies to all ranks,
    /// because plans must be equal.
    pub fn connect(world: World) -> Result<Ranks, Failure> {
        if world.ranks == 1 {
            return Ok(Ranks::over(world, None));
        }
        let sockets = Sockets::connect(&world).map_err(failed)?;
        let wire =
            Some(Arc::new(TimedWire { sockets, broken: Mutex::new(None), nanoseconds: AtomicU64::new(0) }));
        let own = (machine::threads() / world.locals).max(1) as u64;
        let threads = u64::MAX - world.agree("threads", u64::MAX - own).map_err(failed)?;
        machine::share(threads as usize, world.locals);
        Ok(Ranks::over(world, wire))
    }

    fn over(world: World, wire: Option<Arc<TimedWire>>) -> Ranks {
        let [is_refused, has_begun] = [false; 2].map(Cell::new);
        let (memory_bytes, linked) = (Cell::new(u64::MAX), RefCell::default());
        Ranks { world, wire, is_refused, has_begun, memory_bytes, linked }
    }

    pub fn rank(&self) -> usize {
        self.world.rank
    }

    pub fn count(&self) -> usize {
        self.world.ranks
    }

    pub fn nodes(&self) -> usize {
        self.world.nodes
    }

    /// The number of this rank on its host.
    pub fn local_rank(&self) -> usize {
        self.world.local_rank
    }

    /// The number of ranks on this rank's host.
    pub fn locals(&self) -> usize {
        self.world.locals
    }

    /// Whether rank 0 is on this rank's node.
    pub fn is_on_first_node(&self) -> bool {
        self.world.node == 0
    }

    pub fn are_many(&self) -> bool {
        self.world.ranks > 1
    }

    /// Whether this rank writes the run's directory and prints.
    pub fn is_first(&self) -> bool {
        self.world.rank == 0
    }

    pub fn wire(&self) -> Option<Arc<dyn Wire>> {
        self.wire.clone().map(|wire| wire as Arc<dyn Wire>)
    }

    /// Time spent in exchanges of tensors since the last call.
    pub fn take_wire_time(&self) -> Duration {
        let take = |wire: &Arc<TimedWire>| wire.nanoseconds.swap(0, Ordering::Relaxed);
        Duration::from_nanos(self.wire.as_ref().map_or(0, take))
    }

    /// The target of a device, for this number of ranks.
    pub fn target(&self, target: Target) -> Target {
        let memory_bytes = target.memory_bytes.min(self.memory_bytes.get());
        let target = Target { memory_bytes, ..target };
        let ranks_a_node = self.world.ranks.div_ceil(self.world.nodes);
        let (link, timed) = &*self.linked.borrow();
        let agreed = link.as_ref().map(|link| links::between(link, links::default_net(), ranks_a_node));
        let links = agreed.or_else(|| links::of_nodes(&target.name, ranks_a_node));
        let timings = target.timings.with(timed);
        target_among(self.world.ranks, Target { links, timings, ..target })
    }

    /// Agrees on the link between GPUs of a node: rank 0 decides, because plans must be equal. `timed` are this rank's times of
    /// exchanges over its link; they affect no choice.
    pub fn agree_on_link(&self, own: Option<Link>, timed: Timings) -> Result<(), Failure> {
        if self.are_many() {
            let fields = own.map(|link| (link.name, link.bytes_per_second, link.step_seconds));
            let link = |(name, bytes_per_second, step_seconds)| Link { name, bytes_per_second, step_seconds };
            *self.linked.borrow_mut() = (self.of_first(fields)?.map(link), timed);
        }
        Ok(())
    }

    /// Agrees on the smallest memory of any rank's device.
    pub fn agree_on_memory(&self, own: u64) -> Result<(), Failure> {
        if self.are_many() {
            self.memory_bytes.set(self.gather(&own)?.into_iter().min().unwrap_or(own));
        }
        Ok(())
    }

    /// Runs a part of the start in which ranks wait for one another where messages do not reach them: a failure in it ends all
    /// ranks immediately.
    pub fn at_once<T>(&self, work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
        self.waits_inside(true);
        let done = work()?;
        self.waits_inside(false);
        Ok(done)
    }

    /// Marks the beginning or end of a time in which ranks wait for one another where messages do not reach them; a failure
    /// meanwhile ends all ranks immediately.
    pub fn waits_inside(&self, is: bool) {
        self.has_begun.set(is);
    }

    /// A handle by which any thread can fail the run; `None` for a single rank.
    pub fn alarm(&self) -> Option<Alarm> {
        self.are_many().then(|| self.world.alarm())
    }

    /// Runs a part of the start on the first rank of each host, which leaves files that the others then find.
    pub fn once_a_host(&self, make: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
        if self.world.local_rank == 0 {
            make()?;
        }
        self.meet()
    }

    /// Refuses a mix of ranks on GPUs and ranks on CPUs. Unless they may share one, also refuses ranks of one host with the same
    /// GPU; `gpu` identifies a GPU on its host.
    pub fn check_apart(&self, gpu: Option<String>, may_share: bool) -> Result<(), Failure> {
        if !self.are_many() {
            return Ok(());
        }
        // An empty name stands for the CPU.
        let places: Vec<String> = self.gather(&gpu.unwrap_or_default())?;
        let members = self.world.members();
        let place = |rank: usize| (&members[rank].host, &places[rank]);
        let is_mixed = |rank: &usize| places[*rank].is_empty() != places[0].is_empty();
        let why = if let Some(other) = (1..places.len()).find(is_mixed) {
            let [on_gpu, on_cpu] = if places[0].is_empty() { [other, 0] } else { [0, other] };
            format!(
                "{} has a GPU and {} has none: give backend=cpu, or start ranks on hosts with GPUs alone",
                self.named(on_gpu),
                self.named(on_cpu)
            )
        } else {
            let taken = |rank: &usize| (0..*rank).any(|other| place(other) == place(*rank));
            let is_free = may_share || places[0].is_empty();
            let Some(second) = (0..places.len()).find(taken).filter(|_| !is_free) else { return Ok(()) };
            let first = (0..second).find(|other| place(*other) == place(second)).expect("it was found");
            format!(
                "{} and {} have one GPU ({}): start at most as many ranks as there are GPUs, or give --share-gpu to test on one",
                self.named(first),
                self.named(second),
                places[second]
            )
        };
        self.is_refused.set(true);
        Err(Failure::User(UserError(why)))
    }

    /// Records the activity of this rank, for the report about a rank that hangs.
    pub fn at(&self, step: u64, doing: &str, part: usize) {
        self.world.beat(Status { step, doing: doing.into(), part: part as u64 });
    }

    /// Collective calls of a thread other than the main one.
    pub fn calls(&self, line: &'static str) -> Calls {
        self.world.calls(line)
    }

    /// Names of all ranks for messages; empty for a single rank.
    pub fn names(&self) -> Vec<String> {
        (0..self.world.members().len()).map(|rank| self.named(rank)).collect()
    }

    /// Tells the process that started the ranks the run's directory.
    pub fn tell_parent(&self, run: &str) {
        if self.is_first() {
            self.world.tell_parent(run);
        }
    }

    /// The name of a rank for messages, with its host and process.
    pub fn named(&self, rank: usize) -> String {
        self.world.members().get(rank).map_or_else(|| format!("rank {rank}"), |member| member.named(rank))
    }

    /// Sends rank 0 a message that it reads later; nobody waits.
    pub fn post(&self, content: &impl Serialize) {
        self.world.post(&message::write(content));
    }

    /// The messages that other ranks posted to rank 0 since the last call, with the numbers of their senders.
    pub fn posts<T: DeserializeOwned>(&self) -> Result<Vec<(usize, T)>, Failure> {
        let read = |(rank, bytes): (usize, Vec<u8>)| Ok((rank, message::read(&bytes)?));
        self.world.posts().into_iter().map(read).collect()
    }

    /// Counts a run of a plan that contains collectives.
    pub fn called(&self, plan: &str) {
        self.world.called(plan);
    }

    /// Runs a part of the start on rank 0 first, which may write what the others then read.
    pub fn in_turn<T>(&self, make: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
        if self.is_first() {
            let made = make()?;
            self.meet()?;
            return Ok(made);
        }
        self.meet()?;
        make()
    }

    /// Waits until every rank is here, and fails if one of them has failed.
    pub fn meet(&self) -> Result<(), Failure> {
        self.gather(&()).map(drop)
    }

    /// Rank 0's value on every rank.
    pub fn of_first<T: Serialize + DeserializeOwned>(&self, own: T) -> Result<T, Failure> {
        if !self.are_many() {
            return Ok(own);
        }
        // A list, because in JSON no value and a value of `None` read the same.
        let value: Vec<T> = if self.is_first() { vec![own] } else { vec![] };
        let all: Vec<Vec<T>> = self.gather(&value)?;
        Ok(all.into_iter().flatten().next().expect("rank 0 gives its value"))
    }

    /// Every rank's value, in order of ranks, or the failure of the first rank that failed. Until the first step all collective
    /// calls are this one, so that a failing rank can send its failure in place of its next call.
    pub fn gather<T: Serialize + DeserializeOwned>(&self, own: &T) -> Result<Vec<T>, Failure> {
        let messages: Vec<StartMessage<T>> = self.start_messages(&StartMessage::Value(own))?;
        let mut values = vec![];
        for (rank, message) in messages.into_iter().enumerate() {
            match message {
                StartMessage::Value(value) => values.push(value),
                StartMessage::Refusal(code, sentence) => {
                    self.is_refused.set(true);
                    let sentence = match rank {
                        0 => sentence,
                        _ => format!("{}: {sentence}", self.world.members()[rank].named(rank)),
                    };
                    return Err(match code {
                        2 => Failure::User(UserError(sentence)),
                        _ => Failure::Environment(sentence),
                    });
                }
            }
        }
        Ok(values)
    }

    /// Every rank's bytes, in order of ranks, over the transport for tensors: calls between hosts are small.
    pub fn gather_bytes(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, Failure> {
        match self.are_many() {
            true => self.exchange_bytes(own, &self.gather(&own.len())?),
            false => Ok(vec![own.to_vec()]),
        }
    }

    /// The same where every rank knows the lengths of all, which saves a call.
    pub fn exchange_bytes(&self, own: &[u8], lengths: &[usize]) -> Result<Vec<Vec<u8>>, Failure> {
        let Some(wire) = &self.wire else { return Ok(vec![own.to_vec()]) };
        let send = vec![own; lengths.len()];
        let mut all: Vec<Vec<u8>> = lengths.iter().map(|length| vec![0; *length]).collect();
        let mut receive: Vec<&mut [u8]> = all.iter_mut().map(Vec::as_mut_slice).collect();
        let exchanged = wire.exchange(&send, &mut receive);
        exchanged.map_err(|error| Failure::Environment(error.to_string()))?;
        Ok(all)
    }

    fn start_messages<S: Serialize, T: DeserializeOwned>(
        &self,
        own: &StartMessage<S>,
    ) -> Result<Vec<StartMessage<T>>, Failure> {
        message::read_all(&self.world.gather("words", &message::write(own)).map_err(failed)?)
    }

    /// From here on a failure ends the run immediately.
    pub fn begin_steps(&self) -> Result<(), Failure> {
        self.meet()?;
        self.has_begun.set(true);
        Ok(())
    }

    /// The largest value of any rank.
    pub fn agree(&self, what: &str, number: u64) -> Result<u64, Failure> {
        self.world.agree(what, number).map_err(failed)
    }

    /// Refuses ranks whose values differ: `what` names them, and `advice` says what to do.
    pub fn check_equal(
        &self,
        what: &str,
        text: impl FnOnce() -> String,
        advice: &str,
    ) -> Result<(), Failure> {
        if !self.are_many() {
            return Ok(());
        }
        let all: Vec<u64> = self.gather(&xxh3_64(text().as_bytes()))?;
        match all.iter().position(|hash| *hash != all[0]) {
            Some(other) => Err(self.unequal(what, other, advice)),
            None => Ok(()),
        }
    }

    /// The refusal of all ranks because one of them found another value. Every rank must call this.
    pub fn unequal(&self, what: &str, other: usize, advice: &str) -> Failure {
        self.is_refused.set(true);
        let member = |rank: usize| self.world.members()[rank].named(rank);
        let sentence = format!("{what} of {} are not those of {}: {advice}", member(other), member(0));
        Failure::User(UserError(sentence))
    }

    /// Waits until a file of rank 0 is visible here with the content that rank 0 wrote: all hosts must share the folder.
    pub fn sees(&self, file: &std::path::Path, content: &str) -> Result<(), Failure> {
        let began = Instant::now();
        while std::fs::read_to_string(file).map_or(true, |text| text.trim() != content.trim()) {
            if began.elapsed() > SHARED_WITHIN {
                let folder = file.parent().unwrap_or(file).display();
                return Err(Failure::User(UserError(format!(
                    "{folder} is another folder here ({}) than on rank 0: give --run a folder that all hosts share",
                    self.world.members()[self.rank()].host
                ))));
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    /// Process id of rank 0.
    pub fn first_process(&self) -> u32 {
        self.world.members().first().map_or(std::process::id(), |member| member.process)
    }

    /// Ends a rank with the result of its run: every rank leaves, and only rank 0 returns a result. A failure after the first
    /// step ends the processes of all ranks from here.
    pub fn conclude<T>(self, result: Result<T, Failure>) -> Result<Option<T>, Failure> {
        if let Err(failure) = &result
            && self.are_many()
        {
            if self.has_begun.get() {
                self.fail(failure);
            } else if !self.is_refused.get() {
                self.refuse(failure)?;
            }
        }
        let is_first = self.is_first();
        self.world.finish().map_err(failed)?;
        if is_first { result.map(Some) } else { Ok(result.ok()) }
    }

    /// Tries something on every rank, and continues whether or not it worked; it counts as done only if it worked on all ranks. A
    /// rank that failed returns its own failure, the others that of the first rank that did. No rank may leave the run while
    /// others attempt something. A failure while ranks wait inside an exchange ends them all.
    pub fn attempt<T>(&self, work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
        let tried = work().and_then(|done| self.meet().map(|()| done));
        let Err(failure) = &tried else { return tried };
        if self.are_many() {
            if self.has_begun.get() {
                self.end(failure);
            }
            if !self.is_refused.get() {
                self.refuse(failure)?;
            }
            self.is_refused.set(false);
        }
        tried
    }

    /// Sends the others this rank's failure in place of its next call.
    fn refuse(&self, failure: &Failure) -> Result<(), Failure> {
        let (code, sentence) = match failure {
            Failure::User(UserError(sentence)) => (2, sentence),
            Failure::Environment(sentence) => (1, sentence),
        };
        self.start_messages::<(), serde_json::Value>(&StartMessage::Refusal(code, sentence.clone())).map(drop)
    }

    /// Does repeatedly something in which ranks wait for one another where messages do not reach them: a failure ends all ranks,
    /// and this function does not return.
    pub fn in_step<T>(&self, work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
        work().inspect_err(|failure| {
            if self.are_many() {
                self.end(failure);
            }
        })
    }

    /// Ends all ranks because of a failure of this one: their watchers end the processes, including this one.
    fn end(&self, failure: &Failure) -> ! {
        self.fail(failure);
        loop {
            std::thread::park();
        }
    }

    /// Ends the run on all ranks immediately, because this one failed while others may wait for it where messages do not reach
    /// them.
    pub fn tell(&self, failure: &Failure) {
        if self.are_many() && !self.is_refused.get() {
            self.waits_inside(true);
            self.fail(failure);
        }
    }

    /// Ends the run on all ranks, because this one failed. Their watchers end the processes.
    fn fail(&self, failure: &Failure) {
        let broken = self.wire.as_ref().and_then(|wire| wire.broken());
        match broken {
            Some(error) => drop(self.world.fail_wire(&error)),
            None => drop(self.world.fail(&failure.to_string())),
        }
    }
}

/// The target of a device for a number of ranks. GPUs exchange through NCCL, which needs device memory of its own.
pub fn target_among(ranks: usize, target: Target) -> Target {
    let wire_bytes = if ranks > 1 && target.name != "cpu" { nccl::CEILING_BYTES } else { target.wire_bytes };
    Target { ranks, wire_bytes, ..target }
}

/// A message of a rank to the others before the first step.
#[derive(Serialize, Deserialize)]
enum StartMessage<T> {
    Value(T),
    /// Exit code and reason why the run cannot begin.
    Refusal(u8, String),
}

fn failed(failure: flatout_world::Failure) -> Failure {
    Failure::Environment(failure.sentence)
}

/// The transport, and the reason why it broke.
struct TimedWire {
    sockets: Sockets,
    broken: Mutex<Option<WireError>>,
    /// Time spent in exchanges.
    nanoseconds: AtomicU64,
}

impl TimedWire {
    fn broken(&self) -> Option<WireError> {
        self.broken.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Wire for TimedWire {
    fn rank(&self) -> usize {
        self.sockets.rank()
    }

    fn ranks(&self) -> usize {
        self.sockets.ranks()
    }

    fn exchange(&self, send: &[&[u8]], receive: &mut [&mut [u8]]) -> Result<(), WireError> {
        let since = Instant::now();
        let exchanged = self.sockets.exchange(send, receive).inspect_err(|error| {
            *self.broken.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.clone());
        });
        self.nanoseconds.fetch_add(since.elapsed().as_nanos() as u64, Ordering::Relaxed);
        exchanged
    }
}

#[cfg(test)]
mod tests;
