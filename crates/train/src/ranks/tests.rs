//! Tests with ranks as threads and without a transport for tensors: they communicate over the sockets of a world.

use std::net::TcpListener;

use flatout_world::{Joining, Meeting, RankPlacement, Timing};

use super::*;

/// Runs a closure on every rank of a world and returns what each returned.
fn among<T: Send>(count: usize, run: impl Fn(&Ranks) -> T + Sync) -> Vec<T> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let meeting = Meeting::Address { host: "127.0.0.1".into(), ports: port..port + 1, label: String::new() };
    let of = |rank: usize| {
        let place = RankPlacement {
            rank,
            ranks: count,
            local: None,
            node: None,
            has_parent: false,
            meeting: meeting.clone(),
        };
        let joining = Joining {
            version: "1.0".into(),
            secret: None,
            device: None,
            folder: None,
            timing: Timing { join: Duration::from_secs(20), ..Timing::default() },
            note: Arc::new(|_| {}),
            // A thread cannot end its process: calls return the failure instead.
            leave: Arc::new(|_| {}),
            stop: Arc::new(|_| {}),
            take_stopper: Arc::new(drop),
        };
        let ranks = Ranks::over(World::join(&place, joining).expect("it joins"), None);
        let done = run(&ranks);
        ranks.conclude(Ok(())).expect("an end");
        done
    };
    std::thread::scope(|scope| {
        let of = &of;
        let threads: Vec<_> = (0..count).map(|rank| scope.spawn(move || of(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
    })
}

/// Whichever rank fails, all return its failure, and what they do next together works.
#[test]
fn an_attempt_that_fails_on_one_rank_fails_on_all_and_the_next_succeeds() {
    let broke = || Err::<(), _>(Failure::Environment("it broke".into()));
    let results = among(3, |ranks| {
        let mut results = vec![];
        for place in 0..3 {
            let gives_up = |at: usize| if ranks.rank() == 1 && at == place { broke() } else { Ok(()) };
            let tried = ranks.attempt(|| {
                gives_up(0)?;
                ranks.meet()?;
                gives_up(1)?;
                assert_eq!(ranks.of_first(7 + ranks.rank())?, 7);
                gives_up(2)
            });
            results.push(tried.expect_err("rank 1 gives up").to_string());
            assert_eq!(ranks.attempt(|| ranks.gather(&ranks.rank())), Ok(vec![0, 1, 2]));
        }
        results
    });
    for (rank, results) in results.iter().enumerate() {
        let is_right = |sentence: &String| match rank {
            1 => sentence == "it broke",
            _ => sentence.starts_with("rank 1 (") && sentence.ends_with("): it broke"),
        };
        assert!(results.len() == 3 && results.iter().all(is_right), "{results:?}");
    }
}

#[test]
fn one_rank_attempts_alone() {
    let ranks = Ranks::alone();
    assert_eq!(ranks.attempt(|| Ok(3)), Ok(3));
    let refused = || Failure::User(UserError("no".into()));
    assert_eq!(ranks.attempt(|| Err::<(), _>(refused())), Err(refused()));
    assert_eq!(ranks.in_step(|| Err::<(), _>(refused())), Err(refused()));
}
