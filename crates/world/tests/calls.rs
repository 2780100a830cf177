//! Calls that all ranks make together.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use flatout_world::{Status, Timing, World};

use crate::proxy;
use crate::ranks::{Notes, at, free_port, joining, quick, rank, with_ranks, with_timing};

#[test]
fn every_rank_gets_the_parts_of_all() {
    let worlds = with_ranks(4, |world| {
        let (rank, ranks) = (world.rank, world.ranks);
        assert_eq!((world.local_rank, world.locals, world.node, world.nodes), (rank, 4, 0, 1));
        for round in 0..20u8 {
            let config = vec![round; 1000 * usize::from(round)];
            assert_eq!(world.broadcast("config", if rank == 0 { &config } else { b"no" }).unwrap(), config);
            let gathered = world.gather("loss", &vec![rank as u8; rank]).unwrap();
            assert_eq!(gathered, (0..ranks).map(|rank| vec![rank as u8; rank]).collect::<Vec<_>>());
            assert_eq!(world.agree("stop", (rank as u64 * 7) % 5).unwrap(), 4);
            world.barrier("here").unwrap();
        }
        let process = world.members()[rank].process;
        world.finish().unwrap();
        process
    });
    assert_eq!(worlds, [std::process::id(); 4]);
}

#[test]
fn large_messages_pass() {
    with_ranks(2, |world| {
        let large = vec![7; 15 << 20];
        assert_eq!(world.broadcast("large", &large).unwrap(), large);
        assert_eq!(world.gather("halves", &large[..7 << 20]).unwrap(), [&large[..7 << 20]; 2]);
        world.finish().unwrap();
    });
}

#[test]
fn a_second_thread_has_calls_of_its_own() {
    with_ranks(3, |world| {
        let saving = world.calls("saving");
        thread::scope(|scope| {
            scope.spawn(|| {
                for step in 0..30u64 {
                    // Each rank is late at another step.
                    thread::sleep(Duration::from_millis((step * 7 + world.rank as u64 * 3) % 5));
                    assert_eq!(saving.gather("bytes", &step.to_le_bytes()).unwrap(), [step.to_le_bytes(); 3]);
                }
            });
            (0..100u64).for_each(|step| assert_eq!(world.agree("stop", step).unwrap(), step));
        });
        world.finish().unwrap();
    });
}

#[test]
fn a_rank_that_leaves_early_fails_the_others() {
    let failures = with_ranks(3, |world: World| {
        world.beat(Status { step: 12, doing: "training".into(), part: 0 });
        thread::sleep(Duration::from_millis(300));
        if world.rank == 1 {
            return None;
        }
        let failure = world.barrier("save").unwrap_err();
        assert_eq!(world.gather("loss", b"").unwrap_err(), failure, "every later call tells the same");
        Some(failure)
    });
    let told: Vec<_> = failures.into_iter().flatten().collect();
    assert_eq!(told.len(), 2);
    for (failure, is_mine) in told.into_iter().zip([true, false]) {
        assert_eq!((failure.rank, failure.is_mine_to_say), (Some(1), is_mine));
        let ended = format!("process {}) ended without saying why at step 12", std::process::id());
        assert!(failure.sentence.starts_with("rank 1 (") && failure.sentence.ends_with(&ended), "{failure}");
    }
}

#[test]
fn all_ranks_get_the_first_failure() {
    let failures = with_ranks(3, |world| match world.rank {
        2 => world.fail("the disk is full"),
        _ => world.barrier("save").unwrap_err(),
    });
    for failure in failures {
        assert!(
            failure.sentence.starts_with("rank 2 (")
                && failure.sentence.ends_with(") failed: the disk is full")
        );
    }
}

/// Runs two ranks, the second behind a proxy, and returns the results of `run`.
fn behind_a_link<T: Send>(
    delay: Duration,
    is_cut: Arc<AtomicBool>,
    run: impl Fn(World) -> T + Sync,
) -> [T; 2] {
    let port = free_port();
    let far = proxy::link(([127, 0, 0, 1], port).into(), delay, is_cut).port();
    let notes = Notes::default();
    let timing = Timing { silent_after: Duration::from_secs(1), ..quick() };
    thread::scope(|scope| {
        let (run, notes) = (&run, &notes);
        let ranks = [(0, port), (1, far)].map(|(own, port)| {
            let place = rank(own, 2, &at(port..port + 1, ""));
            scope.spawn(move || run(World::join(&place, joining(timing, notes, None)).expect("it joins")))
        });
        ranks.map(|thread| thread.join().expect("no rank panics"))
    })
}

#[test]
fn calls_over_a_link_of_20_ms_take_a_round_trip_each() {
    let delay = Duration::from_millis(20);
    let took = behind_a_link(delay, Arc::default(), |world| {
        let began = Instant::now();
        (0..10).for_each(|step| assert_eq!(world.agree("stop", step).unwrap(), step));
        let took = began.elapsed();
        world.finish().unwrap();
        took
    });
    took.into_iter().for_each(|took| assert!(took >= 18 * delay && took < 100 * delay, "{took:?}"));
}

#[test]
fn both_sides_of_a_cut_link_notice() {
    let is_cut = Arc::new(AtomicBool::new(false));
    let cut = Arc::clone(&is_cut);
    let failures = behind_a_link(Duration::ZERO, is_cut, |world| {
        world.barrier("here").unwrap();
        thread::sleep(Duration::from_millis(200));
        cut.store(true, Ordering::SeqCst);
        let began = Instant::now();
        let failure = world.barrier("save").unwrap_err();
        assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
        failure
    });
    let [near, far] = failures;
    assert!(
        near.sentence.starts_with("rank 1 (") && near.sentence.contains("no sign of life for "),
        "{near}"
    );
    assert!(far.sentence.starts_with("rank 0 (") && far.sentence.contains("no sign of life for "), "{far}");
    assert!(near.is_mine_to_say && far.is_mine_to_say, "each side speaks to its own users");
}

#[test]
fn posts_reach_rank_0_in_order_and_before_later_calls() {
    let ends = with_ranks(3, |world| {
        (0..50u8).filter(|_| world.rank > 0).for_each(|number| world.post(&[number]));
        world.barrier("posted").expect("everyone is there");
        let posts = world.posts();
        world.finish().expect("an end");
        posts
    });
    assert!(ends[1].is_empty() && ends[2].is_empty(), "posts are rank 0's");
    for rank in [1, 2] {
        let of_rank = ends[0].iter().filter(|(from, _)| *from == rank).map(|(_, bytes)| bytes[0]);
        assert_eq!(of_rank.collect::<Vec<u8>>(), (0..50).collect::<Vec<u8>>());
    }
}

#[test]
fn a_stop_before_the_run_begins_stops_all() {
    let ends = with_ranks(3, |world| {
        assert!(world.rank != 1 || world.stopper().stop("SIGTERM"), "there are others to stop");
        world.barrier("begin").expect_err("nobody begins").sentence
    });
    assert_eq!(ends, ["the run was stopped before it began: SIGTERM"; 3]);
}

/// A long save reports its progress while ranks wait for it.
#[test]
fn work_that_reports_progress_is_not_stuck() {
    let quickly = Timing { still_after: Duration::from_millis(400), ..quick() };
    for is_told in [true, false] {
        let ends = with_timing(2, quickly, |world| {
            let saving = |part: u64| world.beat(Status { step: 7, doing: "saving".into(), part });
            saving(0);
            // It takes four times the timeout for progress.
            for part in (0..16).filter(|_| world.rank == 0) {
                thread::sleep(Duration::from_millis(100));
                saving(if is_told { part } else { 0 });
            }
            world.finish()
        });
        let is_fine = ends.iter().all(Result::is_ok);
        assert_eq!(is_fine, is_told, "{ends:?}");
    }
}
