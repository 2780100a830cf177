//! Ranks as threads of a test: each joins its own world over loopback.

use std::net::TcpListener;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use flatout_world::{Failure, Joining, Meeting, RankPlacement, Timing, World};

/// Lines for the user.
pub type Notes = Arc<Mutex<Vec<String>>>;

pub fn quick() -> Timing {
    let seconds = Duration::from_secs;
    Timing {
        join: seconds(20),
        beat_every: Duration::from_millis(100),
        silent_after: seconds(5),
        ..Timing::default()
    }
}

pub fn joining<'a>(timing: Timing, notes: &Notes, folder: Option<&'a Path>) -> Joining<'a> {
    let notes = Arc::clone(notes);
    Joining {
        version: "1.0".into(),
        secret: None,
        device: None,
        folder,
        timing,
        note: Arc::new(move |line| notes.lock().unwrap().push(line.into())),
        // A thread cannot end its process, so calls return the failure instead.
        leave: Arc::new(|_| {}),
        stop: Arc::new(|_| {}),
        take_stopper: Arc::new(drop),
    }
}

pub fn rank(rank: usize, ranks: usize, meeting: &Meeting) -> RankPlacement {
    RankPlacement { rank, ranks, local: None, node: None, has_parent: false, meeting: meeting.clone() }
}

/// A loopback port that was free a moment ago.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

pub fn at(ports: std::ops::Range<u16>, label: &str) -> Meeting {
    Meeting::Address { host: "127.0.0.1".into(), ports, label: label.into() }
}

/// Runs a function on every rank of a world and returns the results.
pub fn with_ranks<T: Send>(ranks: usize, run: impl Fn(World) -> T + Sync) -> Vec<T> {
    with_timing(ranks, quick(), run)
}

/// `with_ranks` with other durations.
pub fn with_timing<T: Send>(ranks: usize, timing: Timing, run: impl Fn(World) -> T + Sync) -> Vec<T> {
    let port = free_port();
    let meeting = at(port..port + 1, "");
    let notes = Notes::default();
    thread::scope(|scope| {
        let (run, notes, meeting) = (&run, &notes, &meeting);
        let begin = |own| {
            scope.spawn(move || {
                run(World::join(&rank(own, ranks, meeting), joining(timing, notes, None)).expect("it joins"))
            })
        };
        let threads: Vec<_> = (0..ranks).map(begin).collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
    })
}

pub fn sentence(failure: Result<World, Failure>) -> String {
    failure.err().expect("a failure").sentence
}
