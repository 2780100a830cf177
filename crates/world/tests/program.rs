//! Starts the program of `examples/rank.rs` and observes it.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// Ranks that run for minutes unless they are ended.
pub struct Program {
    pub folder: TempDir,
    pub child: Child,
    ranks: Vec<usize>,
}

/// The path of the program, which is built with the tests.
pub fn path() -> PathBuf {
    let mut path = std::env::current_exe().expect("a test has a path");
    path.pop();
    path.pop();
    path.push("examples/rank");
    assert!(path.exists(), "{} is missing: `cargo test -p flatout-world` builds it", path.display());
    path
}

/// Runs it to completion.
pub fn run(arguments: &str) -> Output {
    Command::new(path()).args(arguments.split_whitespace()).output().expect("the program starts")
}

impl Program {
    /// Starts `ranks` ranks with short heartbeats, and waits until every one has taken a step.
    pub fn start(ranks: usize, arguments: &[&str]) -> Program {
        Program::start_by(ranks, arguments, &["env"])
    }

    /// Starts them through another program that executes the command.
    pub fn start_by(ranks: usize, arguments: &[&str], by: &[&str]) -> Program {
        let program = Program::begin_by(ranks, arguments, by);
        program.wait_for_steps(1);
        program
    }

    /// Starts them without waiting.
    pub fn begin(ranks: usize, arguments: &[&str]) -> Program {
        Program::begin_by(ranks, arguments, &["env"])
    }

    fn begin_by(ranks: usize, arguments: &[&str], by: &[&str]) -> Program {
        let folder = TempDir::new().expect("a folder");
        let mut command = Command::new(by[0]);
        command.args(&by[1..]).arg(path());
        command.args([
            "--ranks",
            &ranks.to_string(),
            "--steps",
            "20000",
            "--step-ms",
            "5",
            "--beat-ms",
            "100",
        ]);
        command.arg("--folder").arg(folder.path()).args(arguments);
        let child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
        Program { folder, child, ranks: (0..ranks).collect() }
    }

    fn number(&self, name: &str, rank: usize) -> Option<u64> {
        fs::read_to_string(self.folder.path().join(format!("{name}-{rank}"))).ok()?.parse().ok()
    }

    pub fn step(&self, rank: usize) -> u64 {
        self.number("step", rank).unwrap_or_default()
    }

    pub fn process(&self, rank: usize) -> u64 {
        self.number("process", rank).expect("a rank that runs leaves its id")
    }

    pub fn wait_for_steps(&self, step: u64) {
        wait_until("every rank takes steps", || self.ranks.iter().all(|rank| self.step(*rank) >= step));
    }

    /// Sends a signal to a rank.
    pub fn send(&self, signal: &str, rank: usize) {
        send(signal, self.process(rank));
    }

    /// Waits until the parent and every rank are gone, at most 5 s from this call; returns the exit code and standard error.
    pub fn gone(self) -> (Option<i32>, String) {
        let began = Instant::now();
        let processes: Vec<u64> =
            self.ranks.iter().filter_map(|rank| self.number("process", *rank)).collect();
        let output = self.child.wait_with_output().expect("an end");
        wait_until("every rank is gone", || processes.iter().all(|process| !is_there(*process)));
        let took = began.elapsed();
        assert!(took < Duration::from_secs(5), "the ranks were gone after {took:?}");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// `gone`, checking that exactly one sentence was printed, and that it names the process of the given rank.
    pub fn gone_with(self, code: i32, rank: usize, parts: &[&str]) {
        let who = format!("process {}", self.process(rank));
        let (found, said) = self.gone();
        assert_eq!(found, Some(code), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        let begins = format!("rank: rank {rank} (");
        assert!(said.starts_with(&begins) && said.contains(&who), "{said}");
        parts.iter().for_each(|part| assert!(said.contains(part), "`{part}` is missing: {said}"));
    }
}

pub fn send(signal: &str, process: u64) {
    let sent = Command::new("kill").args([signal, &process.to_string()]).status().expect("kill is there");
    assert!(sent.success(), "kill {signal} {process}");
}

/// Whether a process is running; a zombie is not.
pub fn is_there(process: u64) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
}

pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(30);
    while !is_so() {
        assert!(Instant::now() < until, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
