//! Ranks as threads of a test, without a wire: what they agree on goes over the sockets of a world.

use std::net::TcpListener;

use flatout_world::{Joining, Meeting, RankPlacement, Timing};

use super::*;

/// Does something on every rank of a world and gives back what each returned.
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
            // A thread cannot end its process: calls give the failure back instead.
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

/// Wherever a rank gives up, all come back with its failure, and what they do next together works.
#[test]
fn an_attempt_that_fails_on_one_rank_fails_on_all_and_the_next_goes_on() {
    let broke = || Err::<(), _>(Failure::Environment("it broke".into()));
    let told = among(3, |ranks| {
        let mut told = vec![];
        for place in 0..3 {
            let gives_up = |at: usize| if ranks.rank() == 1 && at == place { broke() } else { Ok(()) };
            let tried = ranks.attempt(|| {
                gives_up(0)?;
                ranks.meet()?;
                gives_up(1)?;
                assert_eq!(ranks.of_first(7 + ranks.rank())?, 7);
                gives_up(2)
            });
            told.push(tried.expect_err("rank 1 gives up").to_string());
            assert_eq!(ranks.attempt(|| ranks.gather(&ranks.rank())), Ok(vec![0, 1, 2]));
        }
        told
    });
    for (rank, told) in told.iter().enumerate() {
        let is_told = |sentence: &String| match rank {
            1 => sentence == "it broke",
            _ => sentence.starts_with("rank 1 (") && sentence.ends_with("): it broke"),
        };
        assert!(told.len() == 3 && told.iter().all(is_told), "{told:?}");
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
