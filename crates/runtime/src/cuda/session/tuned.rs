//! On-disk cache of measured times: algorithms of matrix products, and attention kernels.
//!
//! With a warm cache, a start times nothing. The key of an entry holds all that a time depends on: the GPU, its driver, the
//! library's version, the number of candidates, and the problem itself (shapes, types, layouts, alignments, scratch, epilogue;
//! for our own kernels their sources). So another GPU, driver, library or kernel misses the cache and is timed again.

use std::cell::RefCell;
use std::collections::HashMap;

use crate::cuda::driver::store::{self, Store};

/// An opaque cuBLASLt algorithm, which its documentation allows to store for the same library version.
pub type Algorithm = [u64; 8];

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    pub ms: f64,
    pub workspace_bytes: usize,
    pub algorithm: Algorithm,
}

#[derive(Clone, Debug, PartialEq)]
pub struct KernelTime {
    /// Contains no spaces.
    pub name: String,
    pub ms: f64,
}

/// Statistics of choosing algorithms, in distinct products.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tuning {
    pub timed: usize,
    pub remembered: usize,
    /// Why times could not be stored, if so.
    pub note: Option<String>,
}

/// The cache as one session uses it.
pub struct Tuned {
    store: Store,
    /// GPU, driver and library version.
    on: String,
    candidates: usize,
    tuning: RefCell<Tuning>,
    /// Kernel times by problem, kept in memory even if nothing can be stored on disk.
    kernels: RefCell<HashMap<String, Vec<KernelTime>>>,
}

impl Tuned {
    /// `candidates` per product are timed; 1 means none is timed and the library's first choice is taken.
    pub fn new(store: Store, on: String, candidates: usize) -> Tuned {
        Tuned { store, on, candidates, tuning: RefCell::default(), kernels: RefCell::default() }
    }

    pub fn candidates(&self) -> usize {
        self.candidates
    }

    pub fn tuning(&self) -> Tuning {
        self.tuning.borrow().clone()
    }

    /// The fastest candidate of a product, timed by this or an earlier process.
    pub fn recall(&self, product: &str) -> Option<Timing> {
        let fastest = self.lines(product)?.first().and_then(|line| parse(line))?;
        self.tuning.borrow_mut().remembered += 1;
        Some(fastest)
    }

    /// Stores the times of a product's candidates, fastest first.
    pub fn remember(&self, product: &str, timings: &[Timing]) {
        self.tuning.borrow_mut().timed += 1;
        self.keep(product, timings.iter().map(line).collect());
    }

    /// The times of a problem's kernels, fastest first, measured by this or an earlier process.
    pub fn recall_kernels(&self, problem: &str) -> Option<Vec<KernelTime>> {
        if let Some(known) = self.kernels.borrow().get(problem) {
            return Some(known.clone());
        }
        let lines = self.lines(problem)?;
        let times = lines.iter().map(|line| parse_kernel(line)).collect::<Option<Vec<_>>>()?;
        self.kernels.borrow_mut().insert(problem.into(), times.clone());
        (!times.is_empty()).then_some(times)
    }

    /// Stores the times of a problem's kernels, fastest first.
    pub fn remember_kernels(&self, problem: &str, times: &[KernelTime]) {
        self.kernels.borrow_mut().insert(problem.into(), times.into());
        self.keep(problem, times.iter().map(|time| format!("{} {}", time.ms, time.name)).collect());
    }

    /// The times stored for a problem, one line per candidate.
    fn lines(&self, problem: &str) -> Option<Vec<String>> {
        let text = String::from_utf8(self.store.get(&self.name(problem))?).ok()?;
        let (key, lines) = text.split_once('\n')?;
        (key == problem).then(|| lines.lines().map(String::from).collect())
    }

    fn keep(&self, problem: &str, lines: Vec<String>) {
        let kept =
            self.store.put(&self.name(problem), format!("{problem}\n{}\n", lines.join("\n")).as_bytes());
        if let Err(why) = kept {
            self.tuning.borrow_mut().note.get_or_insert(why);
        }
    }

    fn name(&self, problem: &str) -> String {
        store::name([self.on.as_str(), &self.candidates.to_string(), problem]) + ".txt"
    }
}

/// Formats milliseconds, bytes of scratch and the algorithm's words.
fn line(timing: &Timing) -> String {
    let words: Vec<String> = timing.algorithm.iter().map(|word| format!("{word:016x}")).collect();
    format!("{} {} {}", timing.ms, timing.workspace_bytes, words.join(" "))
}

fn parse(line: &str) -> Option<Timing> {
    let mut fields = line.split(' ');
    let ms = fields.next()?.parse().ok()?;
    let workspace_bytes = fields.next()?.parse().ok()?;
    let mut algorithm = Algorithm::default();
    for word in &mut algorithm {
        *word = u64::from_str_radix(fields.next()?, 16).ok()?;
    }
    fields.next().is_none().then_some(Timing { ms, workspace_bytes, algorithm })
}

fn parse_kernel(line: &str) -> Option<KernelTime> {
    let (ms, name) = line.split_once(' ')?;
    Some(KernelTime { name: name.into(), ms: ms.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn folder(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("flatout-tuned-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        path
    }

    fn timing(ms: f64) -> Timing {
        Timing { ms, workspace_bytes: 4096, algorithm: [1, 2, u64::MAX, 4, 5, 6, 7, 8 << 40] }
    }

    #[test]
    fn times_are_keyed_by_product_gpu_library_and_candidates() {
        let folder = folder("same");
        let on = |on: &str, candidates| Tuned::new(Store::at(folder.clone()), on.into(), candidates);
        let first = on("h200, driver 580, cuBLASLt 130100", 8);
        assert_eq!(first.recall("a x b"), None);
        first.remember("a x b", &[timing(0.125), timing(0.25)]);
        assert_eq!(first.tuning(), Tuning { timed: 1, remembered: 0, note: None });
        let again = on("h200, driver 580, cuBLASLt 130100", 8);
        assert_eq!(again.recall("a x b"), Some(timing(0.125)));
        assert_eq!(again.tuning(), Tuning { timed: 0, remembered: 1, note: None });
        assert_eq!(again.recall("a x c"), None);
        assert_eq!(on("h200, driver 580, cuBLASLt 130200", 8).recall("a x b"), None);
        assert_eq!(on("h100, driver 580, cuBLASLt 130100", 8).recall("a x b"), None);
        assert_eq!(on("h200, driver 580, cuBLASLt 130100", 64).recall("a x b"), None);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn corruption_and_key_collisions_count_as_misses() {
        let folder = folder("damage");
        let tuned = Tuned::new(Store::at(folder.clone()), "gpu".into(), 8);
        tuned.remember("a x b", &[timing(1.0)]);
        let path = folder.join(tuned.name("a x b"));
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, &whole[..whole.len() - 3]).unwrap();
        assert_eq!(tuned.recall("a x b"), None);
        Store::at(folder.clone()).put(&tuned.name("a x b"), b"a x c\n1 2 3\n").unwrap();
        assert_eq!(tuned.recall("a x b"), None);
        Store::at(folder.clone()).put(&tuned.name("a x b"), b"a x b\n1 2 3\n").unwrap();
        assert_eq!(tuned.recall("a x b"), None);
        std::fs::remove_dir_all(folder).unwrap();
    }
    #[test]
    fn kernel_times_are_sorted_and_survive_without_a_disk() {
        let folder = folder("kernels");
        let on = |on: &str| Tuned::new(Store::at(folder.clone()), on.into(), 8);
        let times: Vec<KernelTime> =
            [("wgmma", 0.5), ("cudnn", 0.625)].map(|(name, ms)| KernelTime { name: name.into(), ms }).into();
        let first = on("h200");
        assert_eq!(first.recall_kernels("causal"), None);
        first.remember_kernels("causal", &times);
        assert_eq!(on("h200").recall_kernels("causal"), Some(times.clone()));
        assert_eq!(on("h200").recall_kernels("full"), None);
        assert_eq!(on("a100").recall_kernels("causal"), None);
        assert_eq!(on("h200").tuning(), Tuning::default(), "products alone are counted");
        Store::at(folder.clone()).put(&first.name("causal"), b"causal\nfast wgmma\n").unwrap();
        assert_eq!(on("h200").recall_kernels("causal"), None);
        std::fs::remove_dir_all(&folder).unwrap();
        std::fs::write(&folder, "in the way").unwrap();
        let unstored = on("h200");
        unstored.remember_kernels("causal", &times);
        assert_eq!(unstored.recall_kernels("causal"), Some(times));
        assert!(unstored.tuning().note.is_some());
        std::fs::remove_file(folder).unwrap();
    }
}
