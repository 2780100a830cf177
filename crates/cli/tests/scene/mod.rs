//! Runs of the program in a folder of their own, watched from outside through their logs and checkpoints.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use flatout_train::run::checkpoint::{self, Dtype, State};
use flatout_train::run::events::{self, Event};

use crate::program::flatout;

/// A tensor of a checkpoint: name, type, shape and bytes.
type Tensor = (String, Dtype, Vec<usize>, Vec<u8>);

/// The warnings among events, except those about a slow disk: tests share their disk with everything else on the machine.
pub fn warnings(events: impl IntoIterator<Item = Event>) -> Vec<String> {
    let of = |event| match event {
        Event::Warning { message } if !message.contains("the disk is slower than") => Some(message),
        _ => None,
    };
    events.into_iter().filter_map(of).collect()
}

pub struct Scene {
    pub folder: tempfile::TempDir,
}

impl Scene {
    pub fn new() -> Scene {
        Scene { folder: tempfile::tempdir().expect("a folder") }
    }

    pub fn start(&self, words: &[&str]) -> Child {
        flatout(self.folder.path(), words).stdout(Stdio::null()).spawn().expect("the program starts")
    }

    pub fn dir(&self, run: &str) -> PathBuf {
        self.folder.path().join(run)
    }

    pub fn events(&self, run: &str) -> Vec<Event> {
        events::read(&self.dir(run).join("events.jsonl")).unwrap_or_default()
    }

    /// The bits of every step's loss, where a later line wins.
    pub fn losses(&self, run: &str) -> Vec<(u64, u32)> {
        events::steps(&self.events(run)).iter().map(|step| (step.step, step.loss.to_bits())).collect()
    }

    /// All state at a step: weights, moments, counters, cursor, in however many files they lie.
    pub fn state(&self, run: &str, step: u64) -> (State, Vec<Tensor>) {
        let folder = self.dir(run).join(format!("checkpoints/step-{step}"));
        let (state, file) = checkpoint::open(&folder).expect("a last checkpoint");
        let tensors = file.entries().iter().map(|(name, entry)| {
            let mut bytes = vec![0; entry.bytes()];
            file.read_into(name, &mut bytes).expect("its bytes");
            (name.clone(), entry.dtype, entry.shape.clone(), bytes)
        });
        (state, tensors.collect())
    }

    pub fn assert_same(&self, a: &str, b: &str, steps: u64) {
        let losses = self.losses(a);
        assert_eq!(losses.iter().map(|(step, _)| *step).collect::<Vec<_>>(), (1..=steps).collect::<Vec<_>>());
        assert_eq!(losses, self.losses(b));
        assert!(self.state(a, steps) == self.state(b, steps), "the last states differ");
    }
}

/// The content of the folder of checkpoints, seen from outside.
pub struct Checkpoints {
    /// The newest with its marker.
    pub whole: Option<u64>,
    /// A save was under way: a folder under its first name, or one without its marker.
    pub partial: bool,
}

pub fn checkpoints(run: &Path) -> Checkpoints {
    let mut found = Checkpoints { whole: None, partial: false };
    for entry in fs::read_dir(run.join("checkpoints")).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let marked = fs::metadata(entry.path().join("complete")).is_ok_and(|marker| marker.len() == 32);
        match name.strip_prefix("step-").and_then(|step| step.parse::<u64>().ok()) {
            Some(step) if marked => found.whole = found.whole.max(Some(step)),
            Some(_) => found.partial = true,
            None => found.partial |= name.ends_with(".partial"),
        }
    }
    found
}

/// Sends a signal, by `kill`'s name for it.
pub fn send(signal: &str, child: &Child) {
    let sent = Command::new("kill").args([signal, &child.id().to_string()]).status().expect("kill");
    assert!(sent.success());
}

/// Waits until something is so, while the process lives.
pub fn wait_until(child: &mut Child, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(child.try_wait().expect("a child").is_none(), "the run ended by itself");
        assert!(began.elapsed() < Duration::from_secs(60), "the run makes no progress");
        std::thread::yield_now();
    }
}
