//! The parent of ranks: its output, the signals it forwards, its exit codes, and ranks that outlive it.

use std::collections::BTreeSet;

use crate::program::{self, Program, is_there, send, wait_until};

#[test]
fn only_rank_0_is_shown() {
    let output = program::run("--ranks 3 --steps 4");
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.starts_with("rank 0 of 3 is process ") && said.lines().count() == 1, "{said}");
    assert!(output.stderr.is_empty());
}

#[test]
fn all_ranks_are_shown_with_their_numbers_on_request() {
    let output = program::run("--ranks 3 --steps 1 --all");
    let said = String::from_utf8_lossy(&output.stdout);
    let words = |line: &str| line.split(" is process ").next().unwrap_or_default().to_string();
    let lines: BTreeSet<String> = said.lines().map(words).collect();
    let expected = ["[rank 1] rank 1 of 3", "[rank 2] rank 2 of 3", "rank 0 of 3"];
    assert_eq!(lines.into_iter().collect::<Vec<_>>(), expected);
}

#[test]
fn signals_reach_every_rank_once_and_all_stop_after_the_same_step() {
    for signal in ["-TERM", "-INT", "-USR1"] {
        let program = Program::start(3, &[]);
        send(signal, u64::from(program.child.id()));
        let folder = program.folder.path().to_path_buf();
        let steps =
            |rank: usize| std::fs::read_to_string(folder.join(format!("step-{rank}"))).expect("a step");
        let Program { child, folder: kept, .. } = program;
        let output = child.wait_with_output().expect("an end");
        assert_eq!(output.status.code(), Some(3), "{signal}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(output.stderr.is_empty());
        assert_eq!(steps(0), steps(1));
        assert_eq!(steps(0), steps(2));
        drop(kept);
    }
}

#[test]
fn a_signal_to_one_rank_stops_all() {
    let program = Program::start(3, &[]);
    program.send("-TERM", 2);
    let (code, said) = program.gone();
    assert_eq!((code, said.as_str()), (Some(3), ""));
}

#[test]
fn ranks_leave_when_their_parent_is_killed() {
    let program = Program::start(3, &[]);
    let processes: Vec<u64> = (0..3).map(|rank| program.process(rank)).collect();
    send("-KILL", u64::from(program.child.id()));
    wait_until("every rank leaves", || processes.iter().all(|process| !is_there(*process)));
    let (code, said) = program.gone();
    assert_eq!((code, said.as_str()), (None, "rank: the process that started the ranks is gone\n"));
}

#[test]
fn a_program_that_cannot_start_says_so() {
    let output = program::run("--ranks 2 --nodes 2");
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        "rank: --nodes 2 needs --node, the number of this node from 0\n"
    );
}

#[test]
fn a_hangup_stops_the_ranks_unless_it_is_ignored() {
    for (hangup, code) in [("--default-signal=HUP", None), ("--ignore-signal=HUP", Some(3))] {
        let program = Program::start_by(3, &[], &["env", hangup]);
        send("-HUP", u64::from(program.child.id()));
        if code.is_some() {
            let steps = program.step(2);
            program.wait_for_steps(steps + 20);
            send("-TERM", u64::from(program.child.id()));
        }
        let (found, said) = program.gone();
        match code {
            Some(_) => assert_eq!((found, said.as_str()), (code, "")),
            // The ranks of this program do not handle a hangup, so the system ends them.
            None => assert!(
                found == Some(1) && said.contains("was killed by signal 1 (SIGHUP)"),
                "{found:?} {said}"
            ),
        }
    }
}
