//! Ranks that fail in every way: all are gone within 5 s, the parent ends with code 1, and one sentence names the rank, its
//! host and process, and what happened.

use crate::program::Program;

/// Reproducible random numbers for the tests.
fn draws() -> impl FnMut(u64) -> u64 {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    move |below| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    }
}

#[test]
fn a_random_rank_is_killed() {
    let mut draw = draws();
    for _ in 0..8 {
        let program = Program::start(4, &[]);
        program.wait_for_steps(1 + draw(40));
        let rank = draw(4) as usize;
        program.send("-KILL", rank);
        program.gone_with(1, rank, &["was killed by signal 9 (SIGKILL)"]);
    }
}

#[test]
fn a_rank_is_killed_at_the_start() {
    let mut draw = draws();
    for _ in 0..6 {
        let program = Program::begin(4, &[]);
        let rank = draw(4) as usize;
        let path = program.folder.path().join(format!("process-{rank}"));
        crate::program::wait_until("a rank begins", || path.exists());
        program.send("-KILL", rank);
        program.gone_with(1, rank, &["was killed by signal 9 (SIGKILL)"]);
    }
}

#[test]
fn the_hub_is_killed() {
    let program = Program::start(4, &[]);
    program.wait_for_steps(40);
    program.send("-KILL", 0);
    program.gone_with(1, 0, &["was killed by signal 9 (SIGKILL) at step "]);
}

#[test]
fn a_rank_is_stopped() {
    let program = Program::start(3, &["--silent-ms", "1500"]);
    program.send("-STOP", 2);
    program.gone_with(1, 2, &["has given no sign of life for ", "or the process is stopped"]);
}

#[test]
fn the_hub_is_stopped() {
    let program = Program::start(3, &["--silent-ms", "1500"]);
    program.send("-STOP", 0);
    program.gone_with(1, 0, &["which holds the ranks together, has given no sign of life for "]);
}

#[test]
fn a_rank_gets_stuck() {
    let program = Program::start(3, &["--still-ms", "1000", "--order", "1:hang@8"]);
    program.wait_for_steps(7);
    program.gone_with(1, 1, &["has stood still at step 8 (counting) for ", " s, while ranks 0, 2 wait"]);
}

#[test]
fn a_rank_leaves_with_a_code() {
    let program = Program::start(3, &["--order", "1:exit=7@30"]);
    program.wait_for_steps(29);
    program.gone_with(1, 1, &["ended with code 7"]);
}

#[test]
fn a_rank_panics() {
    let program = Program::start(3, &["--order", "2:panic@30"]);
    program.wait_for_steps(29);
    program.gone_with(1, 2, &["ended with code 101 after it wrote `"]);
}

#[test]
fn a_rank_reports_why_it_fails() {
    for rank in [0, 2] {
        let program = Program::start(3, &["--order", &format!("{rank}:fail@30")]);
        program.wait_for_steps(29);
        program.gone_with(1, rank, &["failed", ": the disk is full"]);
    }
}

/// A monitoring thread ends the run, whatever the main thread does.
#[test]
fn a_monitoring_thread_fails_the_run() {
    for rank in [0, 1] {
        let program = Program::start(3, &["--order", &format!("{rank}:alarm@30"), "--step-ms", "2"]);
        program.wait_for_steps(29);
        program.gone_with(1, rank, &["failed", ": a link is down"]);
    }
}

#[test]
fn ranks_make_unequal_collective_calls() {
    let program = Program::start(3, &["--order", "1:diverge@30"]);
    program.wait_for_steps(29);
    let (code, said) = program.gone();
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains("made unequal collective calls among their first ") && said.lines().count() == 1,
        "{said}"
    );
    assert!(said.contains("rank 1 ("), "{said}");
}

#[test]
fn a_rank_waits_in_a_call_that_no_other_makes() {
    let program = Program::start(3, &["--still-ms", "1000", "--order", "1:barrier@8"]);
    program.wait_for_steps(7);
    program.gone_with(1, 1, &["has stood still", "; barrier `of its own` of rank 1 waits for ranks 0, 2"]);
}

#[test]
fn a_rank_that_does_not_belong_ends_the_run_before_it_begins() {
    for (order, told) in [
        (
            "2:version",
            "runs flatout 0.0.0 (protocol 2), rank 0 runs 0.1.0 (protocol 2): start one program everywhere",
        ),
        ("2:world size", "was started as one of 5 ranks, rank 0 as one of 4"),
        ("2:secret", "was refused: its FLATOUT_SECRET is not that of rank 0"),
        (
            "2:leave",
            "ended with code 2 after it wrote `rank: this rank was told not to join` before all ranks had joined",
        ),
    ] {
        let program = Program::begin(4, &["--order", order]);
        let path = program.folder.path().join("process-2");
        crate::program::wait_until("rank 2 begins", || path.exists());
        let who = format!("process {}", program.process(2));
        let (code, said) = program.gone();
        assert_eq!(code, Some(1), "{order}: {said}");
        assert!(said.contains(told) && said.contains("rank 2 (") && said.contains(&who), "{order}: {said}");
    }
}

#[test]
fn a_missing_rank_is_named_by_number() {
    let address = format!("127.0.0.1:{}", crate::ranks::free_port());
    let program =
        Program::begin(1, &["--nodes", "2", "--node", "0", "--address", &address, "--join-ms", "1200"]);
    let (code, said) = program.gone();
    assert_eq!(code, Some(1));
    assert_eq!(
        said,
        "rank: rank 1 of 2 did not join within 1 s: see that they were started, or raise --join-timeout\n"
    );
}
