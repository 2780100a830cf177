//! This machine without its GPU: threads, the processor's name, memory, and the cache folder.

use std::num::NonZero;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use flatout_runtime::cpu;

/// Threads of this process where it shares its host with other ranks of a run, and the number of those ranks; 0 and 1 otherwise.
static SHARED: [AtomicUsize; 2] = [AtomicUsize::new(0), AtomicUsize::new(1)];

/// Limits the process to a number of threads, and to its share of the host's memory among a number of ranks.
pub fn share(threads: usize, ranks: usize) {
    SHARED[0].store(threads, Ordering::Relaxed);
    SHARED[1].store(ranks, Ordering::Relaxed);
}

/// Threads the process may use.
pub fn threads() -> usize {
    match SHARED[0].load(Ordering::Relaxed) {
        0 => std::thread::available_parallelism().map_or(1, NonZero::get),
        threads => threads,
    }
}

/// Memory that the process may still allocate.
pub fn memory_bytes() -> u64 {
    cpu::memory_bytes() / SHARED[1].load(Ordering::Relaxed) as u64
}

/// The processor's model if the system reports it, its threads and vector instructions.
pub fn processor(threads: usize) -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let model = model.map_or("cpu", |(_, name)| name.trim());
    format!("{model}, {threads} threads, {}", cpu::instructions())
}

/// The folder of caches that can be rebuilt: `FLATOUT_CACHE`, or `flatout` under XDG_CACHE_HOME or ~/.cache.
pub fn cache_folder() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    variable("FLATOUT_CACHE")
        .or_else(|| variable("XDG_CACHE_HOME").map(|folder| folder.join("flatout")))
        .or_else(|| variable("HOME").map(|folder| folder.join(".cache/flatout")))
}
