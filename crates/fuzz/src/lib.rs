//! Damaged inputs for the tests of parsers, and a loop that feeds them for a while.
//!
//! It is no part of the program: other crates have it among their dev-dependencies.
//! An input is a function of the seeds and a number, so whatever fails can be made again:
//!
//! ```text
//! FLATOUT_FUZZ_SECONDS=3600 cargo test --release -p flatout-data --test main fuzz::  an hour a parser
//! FLATOUT_FUZZ_CASE=123456 cargo test -p flatout-data --test main fuzz::jsonl       one input again
//! ```
#![forbid(unsafe_code)]

mod mutate;
mod watch;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

pub use mutate::mutate;
use watch::Watch;

/// Seconds a parser is fed where nothing else is said.
const SECONDS: f64 = 2.0;

/// The limits a parser must keep to.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Time for one input. It is meant to tell a hang from slow work on a busy machine.
    pub seconds: u64,
    /// Memory of the process above what it had at the beginning.
    pub memory_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { seconds: 20, memory_bytes: 512 << 20 }
    }
}

/// Feeds the seeds as they are, and then damaged ones, to `check`, which panics where it finds something wrong. The test
/// fails at the first panic, the first input that takes longer than the limit, and the first that takes more memory; the
/// message has the number of the input and a file with it.
pub fn feed(parser: &str, seeds: &[Vec<u8>], limits: Limits, mut check: impl FnMut(&[u8])) {
    assert!(!seeds.is_empty(), "{parser}: there is nothing to damage");
    let watch = Watch::begin(parser, limits);
    let mut one = |number: u64| {
        let input = mutate(seeds, number);
        watch.enter(number, &input);
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| check(&input))) {
            watch::report(parser, number, &input, "the parser panicked");
            resume_unwind(panic);
        }
        watch.leave();
    };
    if let Some(number) = variable("FLATOUT_FUZZ_CASE") {
        return one(number as u64);
    }
    let until = Instant::now() + Duration::from_secs_f64(variable("FLATOUT_FUZZ_SECONDS").unwrap_or(SECONDS));
    let mut number = 0;
    while number < seeds.len() as u64 || Instant::now() < until {
        one(number);
        number += 1;
    }
    eprintln!("{parser}: {number} inputs");
}

fn variable(name: &str) -> Option<f64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name}={value} is not a number")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parser_that_panics_is_noticed() {
        let parse = |bytes: &[u8]| assert!(!bytes.starts_with(b"{{"), "two braces");
        let seeds = [b"{}".to_vec()];
        assert!(catch_unwind(|| feed("braces", &seeds, Limits::default(), parse)).is_err());
        for kept in std::fs::read_dir(std::env::temp_dir()).unwrap().flatten() {
            if kept.file_name().to_string_lossy().starts_with("flatout-fuzz-braces-") {
                assert!(std::fs::read(kept.path()).unwrap().starts_with(b"{{"));
                std::fs::remove_file(kept.path()).unwrap();
            }
        }
    }
}
