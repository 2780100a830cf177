//! The algorithms of matrix products that were timed, remembered on disk: a second start times nothing.
//!
//! An entry is named by all that a time depends on: the GPU, its driver, the library's version, how many candidates
//! were asked for, and the product itself (shapes, types, layouts, alignments, scratch, epilogue). So another GPU,
//! driver or library finds nothing and times again.

use std::cell::RefCell;

use super::store::{self, Store};

/// An opaque algorithm of cuBLASLt, which its documentation lets one keep for the same version of the library.
pub type Algorithm = [u64; 8];

/// A candidate that was timed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    pub ms: f64,
    pub workspace_bytes: usize,
    pub algorithm: Algorithm,
}

/// What choosing algorithms took, in distinct products.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tuning {
    pub timed: usize,
    pub remembered: usize,
    /// Why times could not be kept, once.
    pub note: Option<String>,
}

/// The memory of one session.
pub struct Tuned {
    store: Store,
    /// GPU, driver and library.
    on: String,
    candidates: usize,
    tuning: RefCell<Tuning>,
}

impl Tuned {
    /// `candidates` of a product are timed; with 1, none is and the library's first choice is taken.
    pub fn new(store: Store, on: String, candidates: usize) -> Tuned {
        Tuned { store, on, candidates, tuning: RefCell::default() }
    }

    pub fn candidates(&self) -> usize {
        self.candidates
    }

    pub fn tuning(&self) -> Tuning {
        self.tuning.borrow().clone()
    }

    /// The fastest of what was timed for a product, here or in an earlier process.
    pub fn recall(&self, product: &str) -> Option<Timing> {
        let text = String::from_utf8(self.store.get(&self.name(product))?).ok()?;
        let (whose, timings) = text.split_once('\n')?;
        let fastest = (whose == product).then(|| timings.lines().next().and_then(parse)).flatten()?;
        self.tuning.borrow_mut().remembered += 1;
        Some(fastest)
    }

    /// Keeps the times of a product's candidates, fastest first.
    pub fn remember(&self, product: &str, timings: &[Timing]) {
        let mut tuning = self.tuning.borrow_mut();
        tuning.timed += 1;
        let lines: Vec<String> = timings.iter().map(line).collect();
        let kept =
            self.store.put(&self.name(product), format!("{product}\n{}\n", lines.join("\n")).as_bytes());
        if let Err(why) = kept {
            tuning.note.get_or_insert(why);
        }
    }

    fn name(&self, product: &str) -> String {
        store::name([self.on.as_str(), &self.candidates.to_string(), product]) + ".txt"
    }
}

/// Milliseconds, bytes of scratch, the algorithm's words.
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
    fn times_come_back_only_for_the_same_product_gpu_library_and_effort() {
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
    fn damage_and_a_name_that_meets_another_are_timed_again() {
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
}
