//! Damaged inputs for the tests of parsers, and a loop that feeds them for a while.
//!
//! This crate is not part of the program: other crates have it as a dev-dependency. An input is a function of the seeds
//! and a number, so every failure can be reproduced:
//!
//! ```text
//! FLATOUT_FUZZ_SECONDS=3600 cargo test --release -p flatout-data --test main fuzz::  an hour per parser
//! FLATOUT_FUZZ_CASE=123456 cargo test -p flatout-data --test main fuzz::jsonl       one input again
//! ```
#![forbid(unsafe_code)]

mod mutate;
mod watch;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

pub use mutate::mutate;
use watch::Watch;

/// Default number of seconds per parser.
const SECONDS: f64 = 2.0;

/// The limits that a parser must respect.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// The time for one input. It should distinguish a hang from slow work on a busy machine.
    pub seconds: u64,
    /// The memory of the process above its initial value.
    pub memory_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { seconds: 20, memory_bytes: 512 << 20 }
    }
}

/// Feeds the unchanged seeds, and then damaged ones, to `check`, which panics on an error. The test fails at the first panic,
/// the first input that exceeds the time limit, and the first that exceeds the memory limit; the message has the number of the
/// input and the path of a file with it.
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
    fn a_parser_that_panics_fails_the_test() {
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
