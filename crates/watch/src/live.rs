//! The thread that polls the folder and sends each page the updates it does not have yet.
//!
//! While no page is open nothing is read. Runs that are only listed are summarised from the ends of their logs; those that a page
//! shows are read from the beginning, in turns, while the list already has their newest state. Memory is bounded: the curves of
//! at most [`MOST_FOLLOWED`] runs are kept, each in at most [`crate::record::MOST_BYTES`].

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use flatout_http::{Answer, Stream};
use serde_json::{Value, json};

use crate::details;
use crate::folder::{Folder, FolderEntry};
use crate::follow::Follower;
use crate::glance::Glance;

/// The most runs whose curves are sent to one page, runs that are followed for all pages, and pages.
pub const MOST_SHOWN: usize = 32;
pub const MOST_FOLLOWED: usize = 64;
pub const MOST_PAGES: usize = 16;
/// Intervals at which the shown runs and the folder are polled.
const TICK: Duration = Duration::from_millis(250);
const LOOK: Duration = Duration::from_secs(2);
/// The longest time of reading without a pause, and the pause: other threads need the lock, and training needs the cores.
const AT_ONCE: Duration = Duration::from_millis(40);
const BREATH: Duration = Duration::from_millis(5);
const CHUNK: usize = 4 << 20;
/// Intervals of updates of a run that is still being read, and of heartbeats.
const WHILE_READING: Duration = Duration::from_secs(1);
const PING: Duration = Duration::from_secs(10);
const LOG: &str = "events.jsonl";

/// The current state of the folder, and the thread that updates it.
pub struct Live {
    shared: Arc<Shared>,
    /// Dropped to end the thread.
    pages: Option<Mutex<Sender<Page>>>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    folder: Folder,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    runs: BTreeMap<String, Entry>,
    sweeps: BTreeMap<String, PathBuf>,
    notes: Vec<String>,
    /// Counts changes of the list; and the revision at which something was last removed from it.
    revision: u64,
    removed: u64,
    /// Runs whose summary is due.
    waiting: VecDeque<String>,
    looked: Option<Instant>,
}

struct Entry {
    dir: PathBuf,
    glance: Glance,
    state: &'static str,
    /// Size and modification time of the log when it was summarised.
    stamp: Option<(u64, i64, i64)>,
    revision: u64,
    follower: Option<Box<Follower>>,
    last_shown: Instant,
}

/// An open page.
struct Page {
    stream: Stream,
    runs: Vec<String>,
    /// The revision of the list that it has.
    list: Option<u64>,
    sent: BTreeMap<String, Sent>,
    pinged: Instant,
}

/// The revisions that a page has of a run.
#[derive(Default)]
struct Sent {
    generation: u64,
    steps: u64,
    evaluations: u64,
    record: u64,
    share: f64,
    at: Option<Instant>,
}

impl Live {
    pub fn start(folder: Folder) -> io::Result<Live> {
        let shared = Arc::new(Shared { folder, state: Mutex::default() });
        let (pages, inbox) = channel();
        let own = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("watch".into()).spawn(move || own.run(&inbox))?;
        Ok(Live { shared, pages: Some(Mutex::new(pages)), thread: Some(thread) })
    }

    /// Opens a stream of updates of the list and of these runs.
    pub fn subscribe<'a>(&self, runs: impl Iterator<Item = &'a str>) -> Answer {
        let (answer, stream) = Answer::events();
        let unique: BTreeSet<&str> = runs.collect();
        let runs = unique.into_iter().take(MOST_SHOWN).map(String::from).collect();
        let page = Page { stream, runs, list: None, sent: BTreeMap::new(), pinged: Instant::now() };
        let pages = self.pages.as_ref().expect("it is taken when this is dropped");
        match pages.lock().unwrap_or_else(PoisonError::into_inner).send(page) {
            Ok(()) => answer,
            Err(_) => Answer::text(503, "the folder is no longer watched"),
        }
    }

    /// Everything known about a run.
    pub fn run(&self, id: &str) -> Option<Value> {
        let (dir, recipe, record, samples) = {
            let state = self.shared.lock();
            let entry = state.runs.get(id)?;
            let record = entry.follower.as_ref().map(|follower| &follower.record);
            let samples = record.map(|record| record.samples()).unwrap_or_default();
            (entry.dir.clone(), entry.glance.recipe.clone(), record.map(|record| record.object()), samples)
        };
        let mut all = details::details(&self.shared.folder, &dir, recipe.as_deref());
        all["id"] = json!(id);
        // Samples of evaluations are in the log, before those of the end of the run.
        let of_end = all["samples"].take();
        let of_end = of_end.as_array().into_iter().flatten().cloned();
        all["samples"] = Value::Array(samples.into_iter().chain(of_end).collect());
        all["record"] = record.unwrap_or(Value::Null);
        Some(all)
    }

    /// The curves of a range of steps, as finely as a chart shows them; `null` where the page's curves are as fine.
    pub fn part(&self, id: &str, from: u64, to: u64) -> Option<Value> {
        let (dir, part) = {
            let state = self.shared.lock();
            let entry = state.runs.get(id)?;
            (entry.dir.clone(), entry.follower.as_ref()?.part(from, to))
        };
        let Some(part) = part else { return Some(Value::Null) };
        let file = self.shared.folder.file(&dir, LOG).ok()?;
        part.read(&file).ok()
    }

    /// The picture of a sample.
    pub fn image(&self, id: &str, name: &str) -> Option<Vec<u8>> {
        let dir = self.shared.lock().runs.get(id)?.dir.clone();
        details::image(&self.shared.folder, &dir, name)
    }

    /// The summary of a sweep.
    pub fn sweep(&self, id: &str) -> Option<Value> {
        let dir = self.shared.lock().sweeps.get(id)?.clone();
        details::read(&self.shared.folder, &dir, "sweep.json", &mut vec![])
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        drop(self.pages.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, inbox: &Receiver<Page>) {
        let (mut pages, mut pause) = (Vec::<Page>::new(), Duration::ZERO);
        loop {
            // Without a page there is nothing to do until one opens.
            let opened = match pages.is_empty() {
                true => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
                false => inbox.recv_timeout(pause),
            };
            match opened {
                Ok(page) => {
                    pages.push(page);
                    if pages.len() > MOST_PAGES {
                        let message = json!({ "most_pages": MOST_PAGES });
                        pages.remove(0).stream.send("full", &message.to_string());
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            let shown_ids: BTreeSet<String> =
                pages.iter().flat_map(|page| page.runs.iter().cloned()).collect();
            let mut is_behind = self.lock().renew(&self.folder, &shown_ids);
            for page in &mut pages {
                is_behind |= page.send(&self.lock(), self.folder.path());
            }
            pages.retain(|page| !page.stream.is_closed());
            pause = if is_behind { BREATH } else { TICK };
        }
    }
}

impl State {
    /// Updates everything that is due, for a short time; returns whether there is more to read.
    fn renew(&mut self, folder: &Folder, shown_ids: &BTreeSet<String>) -> bool {
        let began = Instant::now();
        if self.looked.is_none_or(|looked| looked.elapsed() >= LOOK) {
            self.look(folder);
            self.looked = Some(Instant::now());
        }
        for id in shown_ids.iter().take(MOST_FOLLOWED) {
            self.glance(folder, id);
        }
        // Runs that have no summary yet come first: they were put in front.
        while began.elapsed() < AT_ONCE {
            let Some(id) = self.waiting.pop_front() else { break };
            self.glance(folder, &id);
        }
        self.forget(shown_ids);
        let mut is_behind = !self.waiting.is_empty();
        let began = Instant::now();
        for id in shown_ids.iter().take(MOST_FOLLOWED) {
            is_behind |= self.follow(folder, id, began);
        }
        is_behind
    }

    /// Lists the folder again.
    fn look(&mut self, folder: &Folder) {
        let found = folder.look();
        let is_there: BTreeSet<&str> = found.runs.iter().map(|place| place.id.as_str()).collect();
        let before = self.runs.len();
        self.runs.retain(|id, _| is_there.contains(id.as_str()));
        let sweeps: BTreeMap<String, PathBuf> =
            found.sweeps.iter().map(|place| (place.id.clone(), place.dir.clone())).collect();
        if self.runs.len() < before || sweeps != self.sweeps || found.notes != self.notes {
            self.revision += 1;
            self.removed = self.revision;
        }
        (self.sweeps, self.notes) = (sweeps, found.notes);
        self.waiting.clear();
        for FolderEntry { id, dir } in found.runs {
            match self.runs.get(&id) {
                Some(known) if known.stamp.is_some() => self.waiting.push_back(id),
                Some(_) => self.waiting.push_front(id),
                None => {
                    self.revision += 1;
                    let entry = Entry {
                        dir,
                        glance: Glance::default(),
                        state: "",
                        stamp: None,
                        revision: self.revision,
                        follower: None,
                        last_shown: Instant::now(),
                    };
                    self.runs.insert(id.clone(), entry);
                    self.waiting.push_front(id);
                }
            }
        }
    }

    /// Updates a run's summary where its log changed, and checks its lock where it has not ended.
    fn glance(&mut self, folder: &Folder, id: &str) {
        let Some(entry) = self.runs.get_mut(id) else { return };
        let meta = fs::symlink_metadata(entry.dir.join(LOG)).ok();
        let stamp = meta.map_or((0, 0, 0), |meta| (meta.len(), meta.mtime(), meta.mtime_nsec()));
        let mut glance = entry.glance.clone();
        if entry.stamp != Some(stamp) {
            let looked = folder.file(&entry.dir, LOG).and_then(|file| Glance::at(&file, Some(&entry.glance)));
            glance = looked.unwrap_or_default();
        }
        let state = match glance.status.as_deref() {
            Some("done") => "done",
            Some("stopped") => "stopped",
            Some("failed") => "failed",
            _ if is_running(folder, &entry.dir) => "running",
            _ => "crashed",
        };
        if glance != entry.glance || state != entry.state || entry.stamp.is_none() {
            self.revision += 1;
            (entry.glance, entry.state, entry.revision) = (glance, state, self.revision);
        }
        entry.stamp = Some(stamp);
    }

    /// Reads further in a run's log, until a short time after `began`; returns whether there is more to read.
    fn follow(&mut self, folder: &Folder, id: &str, began: Instant) -> bool {
        let Some(entry) = self.runs.get_mut(id) else { return false };
        entry.last_shown = Instant::now();
        let follower = entry.follower.get_or_insert_default();
        let Ok(file) = folder.file(&entry.dir, LOG) else { return false };
        loop {
            match follower.advance(&file, CHUNK) {
                Ok(true) if began.elapsed() < AT_ONCE => {}
                Ok(is_behind) => return is_behind,
                // A file that cannot be read now is tried again at the next poll.
                Err(_) => return false,
            }
        }
    }

    /// Evicts the curves of runs that no page shows, the least recently shown first.
    fn forget(&mut self, shown_ids: &BTreeSet<String>) {
        let followed =
            self.runs.iter().filter(|(id, entry)| entry.follower.is_some() && !shown_ids.contains(*id));
        let mut unseen: Vec<(Instant, String)> =
            followed.map(|(id, entry)| (entry.last_shown, id.clone())).collect();
        let more = (unseen.len() + shown_ids.len()).saturating_sub(MOST_FOLLOWED).min(unseen.len());
        unseen.sort();
        for (_, id) in unseen.drain(..more) {
            if let Some(entry) = self.runs.get_mut(&id) {
                entry.follower = None;
            }
        }
    }
}

impl Page {
    /// Sends updates; returns whether some wait for the reader.
    fn send(&mut self, state: &State, folder: &Path) -> bool {
        if self.pinged.elapsed() >= PING {
            self.stream.ping();
            self.pinged = Instant::now();
        }
        if self.list.is_none_or(|list| list < state.revision) {
            if !self.stream.is_ready() {
                return true;
            }
            let is_all = self.list.is_none_or(|list| list < state.removed);
            let have = self.list.unwrap_or(0);
            let runs = state.runs.iter().filter(|(_, entry)| is_all || entry.revision > have);
            let shown = runs.map(|(id, entry)| {
                let mut run = json!(entry.glance);
                (run["id"], run["state"]) = (json!(id), json!(entry.state));
                run
            });
            let list = json!({
                "all": is_all,
                "folder": folder.to_string_lossy(),
                "runs": shown.collect::<Vec<Value>>(),
                "sweeps": state.sweeps.keys().collect::<Vec<_>>(),
                "notes": state.notes,
                "most_shown": MOST_SHOWN,
            });
            self.stream.send("runs", &list.to_string());
            self.list = Some(state.revision);
        }
        let mut is_waiting = false;
        for id in &self.runs {
            let Some(follower) = state.runs.get(id).and_then(|entry| entry.follower.as_ref()) else {
                continue;
            };
            let sent = self.sent.entry(id.clone()).or_default();
            if sent.generation != follower.generation {
                *sent = Sent { generation: follower.generation, share: -1.0, at: sent.at, ..Sent::default() };
            }
            let record = &follower.record;
            let newest = (record.steps.revision(), record.evaluations.revision(), record.revision);
            let share = follower.share();
            if (sent.steps, sent.evaluations, sent.record) == newest && sent.share == share {
                continue;
            }
            if share < 1.0 && sent.at.is_some_and(|at| at.elapsed() < WHILE_READING) {
                continue;
            }
            if !self.stream.is_ready() {
                is_waiting = true;
                break;
            }
            let mut news = json!({
                "id": id,
                "read": share,
                "unreadable": follower.unreadable,
                "steps": record.steps.since(sent.steps),
                "evaluations": record.evaluations.since(sent.evaluations),
            });
            if sent.record != record.revision {
                news["record"] = record.object();
            }
            self.stream.send("run", &news.to_string());
            (sent.steps, sent.evaluations, sent.record) = newest;
            (sent.share, sent.at) = (share, Some(Instant::now()));
        }
        is_waiting
    }
}

/// Whether a process holds the run's lock. The check holds a shared lock for the duration of a call.
fn is_running(folder: &Folder, dir: &Path) -> bool {
    let locked = |file: fs::File| matches!(file.try_lock_shared(), Err(fs::TryLockError::WouldBlock));
    folder.file(dir, "lock").is_ok_and(locked)
}
