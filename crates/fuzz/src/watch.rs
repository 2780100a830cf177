//! A thread that ends the test when an input takes too long or too much memory, because such an input would never return to
//! report it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::Limits;

const LOOK_EVERY: Duration = Duration::from_millis(50);

pub(crate) struct Watch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    /// The input being parsed.
    current: Mutex<Option<(u64, Vec<u8>, Instant)>>,
    done: AtomicBool,
}

impl Watch {
    pub fn begin(parser: &str, limits: Limits) -> Self {
        let shared = Arc::new(Shared { current: Mutex::new(None), done: AtomicBool::new(false) });
        let (parser, seen) = (parser.to_string(), shared.clone());
        let most_memory = resident_bytes() + limits.memory_bytes;
        let thread = thread::spawn(move || {
            while !seen.done.load(Ordering::Relaxed) {
                thread::sleep(LOOK_EVERY);
                let current = seen.current.lock().expect("the watched thread does not panic with this lock");
                let Some((number, input, began)) = &*current else { continue };
                if began.elapsed() > Duration::from_secs(limits.seconds) {
                    end(&parser, *number, input, &format!("the input took more than {} s", limits.seconds));
                }
                let memory = resident_bytes();
                if memory > most_memory {
                    end(&parser, *number, input, &format!("memory grew to {memory} bytes of {most_memory}"));
                }
            }
        });
        Self { shared, thread: Some(thread) }
    }

    pub fn enter(&self, number: u64, input: &[u8]) {
        *self.current() = Some((number, input.to_vec(), Instant::now()));
    }

    pub fn leave(&self) {
        *self.current() = None;
    }

    fn current(&self) -> std::sync::MutexGuard<'_, Option<(u64, Vec<u8>, Instant)>> {
        self.shared.current.lock().expect("the watching thread does not panic with this lock")
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.done.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Saves the input to a file and prints its path.
pub(crate) fn report(parser: &str, number: u64, input: &[u8], message: &str) {
    let path = std::env::temp_dir().join(format!("flatout-fuzz-{parser}-{number}"));
    let kept = match std::fs::write(&path, input) {
        Ok(()) => format!("it is in {}", path.display()),
        Err(error) => format!("it could not be kept: {error}"),
    };
    eprintln!(
        "{parser}, input {number} ({} bytes): {message}; {kept}, FLATOUT_FUZZ_CASE={number} makes it again",
        input.len()
    );
}

fn end(parser: &str, number: u64, input: &[u8], message: &str) -> ! {
    report(parser, number, input, message);
    std::process::exit(101)
}

/// The resident memory of the process, according to Linux.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("fuzzing runs where /proc is");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("a process has a resident size");
    let kilobytes = line.split_whitespace().nth(1).and_then(|word| word.parse::<u64>().ok());
    kilobytes.expect("the resident size is a number") << 10
}
