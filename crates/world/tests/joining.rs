//! Joining: port ranges, foreign connections, other runs, rendezvous files, missing and duplicate ranks.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use flatout_world::frame::{self, FrameKind};
use flatout_world::{Joining, Meeting, Stopper, Timing, World};
use tempfile::TempDir;

use crate::program::wait_until;
use crate::ranks::{Notes, at, free_port, joining, quick, rank, sentence};

#[test]
fn foreign_bytes_on_the_port_do_not_disturb_ranks() {
    let port = free_port();
    let meeting = at(port..port + 1, "");
    let notes = Notes::default();
    thread::scope(|scope| {
        let first = scope.spawn(|| World::join(&rank(0, 2, &meeting), joining(quick(), &notes, None)));
        let mut strangers = vec![];
        wait_until("the hub listens", || {
            TcpStream::connect(("127.0.0.1", port)).map(|stream| strangers.push(stream)).is_ok()
        });
        let whole = flatout_world::frame::encode(
            flatout_world::frame::FrameKind::Join,
            b"{\"magic\":\"flatout world\"}",
        );
        for bytes in
            [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 64], &[0xff; 64], b"\x05\0\0\0\x02nulls", &whole, b""]
        {
            let mut stranger = TcpStream::connect(("127.0.0.1", port)).unwrap();
            let _ = stranger.write_all(bytes);
            strangers.push(stranger);
        }
        let second = World::join(&rank(1, 2, &meeting), joining(quick(), &notes, None)).unwrap();
        let first = first.join().unwrap().unwrap();
        let other = scope.spawn(|| first.finish().unwrap());
        second.finish().unwrap();
        other.join().unwrap();
    });
}

#[test]
fn a_second_hub_on_the_port_is_refused() {
    let port = free_port();
    let _first = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let told = sentence(World::join(
        &rank(0, 2, &at(port..port + 1, "")),
        joining(quick(), &Notes::default(), None),
    ));
    assert!(told.starts_with(&format!("rank 0 cannot listen at 127.0.0.1:{port}: ")), "{told}");
    assert!(told.ends_with("name a free port of this one"), "{told}");
}

#[test]
fn two_runs_on_a_range_of_ports_find_their_own() {
    // As with torchrun, another process holds the first port and never speaks.
    let holder = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = holder.local_addr().unwrap().port();
    let runs = [at(port..port + 16, "first"), at(port..port + 16, "second")];
    let notes = Notes::default();
    thread::scope(|scope| {
        let join = |meeting, own| {
            let notes = &notes;
            scope.spawn(move || {
                let world = World::join(&rank(own, 2, meeting), joining(quick(), notes, None)).unwrap();
                let Meeting::Address { label, .. } = meeting else { unreachable!() };
                assert_eq!(world.gather("label", label.as_bytes()).unwrap(), [label.as_bytes(); 2]);
                world.finish().unwrap();
            })
        };
        for own in [1, 0] {
            runs.iter().for_each(|meeting| drop(join(meeting, own)));
        }
    });
}

#[test]
fn a_file_in_the_folder_names_rank_0() {
    let folder = TempDir::new().unwrap();
    // A file left over from a killed run: its address belongs to a hub of another run.
    let file = folder.path().join("rendezvous.json");
    std::fs::write(&file, format!("{{\"address\":\"127.0.0.1:{}\",\"nonce\":\"old\"}}", free_port()))
        .unwrap();
    let notes = Notes::default();
    thread::scope(|scope| {
        for own in [2, 1, 0] {
            let (folder, notes) = (folder.path(), &notes);
            scope.spawn(move || {
                thread::sleep(Duration::from_millis(if own == 0 { 300 } else { 0 }));
                let world =
                    World::join(&rank(own, 3, &Meeting::Folder), joining(quick(), notes, Some(folder)))
                        .unwrap();
                world.finish().unwrap();
            });
        }
    });
    assert!(!file.exists(), "the file is removed when everyone is there");
    let told = sentence(World::join(&rank(1, 3, &Meeting::Folder), joining(quick(), &notes, None)));
    assert!(told.starts_with("nothing says where rank 0 is: set MASTER_ADDR"), "{told}");
}

#[test]
fn missing_ranks_are_named_while_others_wait() {
    let port = free_port();
    let meeting = at(port..port + 1, "");
    let notes = Notes::default();
    let timing =
        Timing { join: Duration::from_millis(1500), say_every: Duration::from_millis(400), ..quick() };
    thread::scope(|scope| {
        let (meeting, notes) = (&meeting, &notes);
        let join = |own| {
            scope.spawn(move || sentence(World::join(&rank(own, 8, meeting), joining(timing, notes, None))))
        };
        let told = [0, 2].map(join).map(|thread| thread.join().unwrap());
        let sentence =
            "ranks 1, 3-7 of 8 did not join within 1 s: see that they were started, or raise --join-timeout";
        assert_eq!(told, [sentence, sentence]);
    });
    let notes = notes.lock().unwrap();
    assert!(
        notes.len() >= 2 && notes.iter().all(|note| note == "waiting for ranks 1, 3-7 of 8"),
        "{notes:?}"
    );
}

#[test]
fn an_unused_address_is_reported() {
    let port = free_port();
    let timing = Timing { join: Duration::from_millis(500), ..quick() };
    let told =
        sentence(World::join(&rank(3, 4, &at(port..port + 1, "")), joining(timing, &Notes::default(), None)));
    let begins = format!("rank 3 did not find rank 0 within 0 s (127.0.0.1:{port}: ");
    assert!(told.starts_with(&begins), "{told}");
}

#[test]
fn a_duplicate_rank_is_refused_and_the_run_goes_on() {
    let port = free_port();
    let meeting = at(port..port + 1, "");
    let notes = Notes::default();
    thread::scope(|scope| {
        let (meeting, notes) = (&meeting, &notes);
        let join = |own| World::join(&rank(own, 3, meeting), joining(quick(), notes, None));
        let begin = |own| scope.spawn(move || join(own).map(|world| world.finish().unwrap()));
        let begun = [0, 1, 1].map(begin);
        wait_until("one of two is refused", || notes.lock().unwrap().len() == 1);
        join(2).unwrap().finish().unwrap();
        let ends = begun.map(|thread| thread.join().unwrap());
        let refused: Vec<String> =
            ends.into_iter().filter_map(Result::err).map(|failure| failure.sentence).collect();
        assert_eq!(refused, *notes.lock().unwrap());
        assert!(refused[0].starts_with("rank 1 ("), "{refused:?}");
        assert!(refused[0].contains("was refused: that rank is there already, on "), "{refused:?}");
    });
    assert_eq!(notes.lock().unwrap().len(), 1);
}

/// A fixture for ranks that are asked to stop: their handles, and how each ended.
#[derive(Default)]
struct StopRequests {
    stoppers: Mutex<Vec<(usize, Stopper)>>,
    left: Arc<Mutex<Vec<(usize, String)>>>,
}

impl StopRequests {
    /// Joins a rank; failures and stops are recorded.
    fn join(self: &Arc<Self>, own: usize, ranks: usize, meeting: &Meeting) -> Result<World, String> {
        self.join_noting(own, ranks, meeting, &Notes::default())
    }

    fn join_noting(
        self: &Arc<Self>,
        own: usize,
        ranks: usize,
        meeting: &Meeting,
        notes: &Notes,
    ) -> Result<World, String> {
        let timing = Timing { say_every: Duration::from_millis(20), ..quick() };
        let (asked, stopped, failed) = (Arc::clone(self), Arc::clone(&self.left), Arc::clone(&self.left));
        let joining = Joining {
            leave: Arc::new(move |failure| failed.lock().unwrap().push((own, failure.sentence.clone()))),
            stop: Arc::new(move |reason| stopped.lock().unwrap().push((own, format!("asked: {reason}")))),
            take_stopper: Arc::new(move |stopper| asked.stoppers.lock().unwrap().push((own, stopper))),
            ..joining(timing, notes, None)
        };
        World::join(&rank(own, ranks, meeting), joining).map_err(|failure| failure.sentence)
    }

    /// Asks a rank to stop through its handle; returns whether the hub was asked.
    fn stop(&self, own: usize) -> bool {
        let stoppers = self.stoppers.lock().unwrap();
        stoppers.iter().find(|(rank, _)| *rank == own).expect("a handle").1.stop("SIGTERM")
    }

    /// How ranks ended, once that number has ended.
    fn left(&self, ranks: usize) -> Vec<(usize, String)> {
        wait_until("ranks are left", || self.left.lock().unwrap().len() >= ranks);
        let mut left = self.left.lock().unwrap().clone();
        left.sort();
        left
    }
}

fn asked(ranks: usize) -> Vec<(usize, String)> {
    (0..ranks).map(|rank| (rank, "asked: SIGTERM".to_string())).collect()
}

/// An address that forwards to another one, but holds back everything after the hub's greeting until a signal.
fn held_back(to: u16, word: mpsc::Receiver<()>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        let (mut near, _) = listener.accept().unwrap();
        let mut far = loop {
            // The hub may not be listening yet.
            if let Ok(far) = TcpStream::connect(("127.0.0.1", to)) {
                break far;
            }
            thread::sleep(Duration::from_millis(1));
        };
        let (mut from, mut to) = (near.try_clone().unwrap(), far.try_clone().unwrap());
        thread::spawn(move || io::copy(&mut from, &mut to));
        let hello = frame::read(&mut far, frame::MOST_GREETING_BYTES).unwrap();
        near.write_all(&frame::encode(FrameKind::Hello, &hello.payload)).unwrap();
        word.recv().unwrap();
        let mut piece = [0; 4096];
        while let Ok(bytes @ 1..) = far.read(&mut piece) {
            if near.write_all(&piece[..bytes]).is_err() {
                return;
            }
        }
    });
    port
}

#[test]
fn a_stop_between_welcome_and_arrival_stops_all() {
    let port = free_port();
    let (release, word) = mpsc::channel();
    let late = held_back(port, word);
    let ranks = Arc::new(StopRequests::default());
    thread::scope(|scope| {
        let second = scope.spawn(|| ranks.join(1, 2, &at(late..late + 1, "")));
        // Rank 0 has the welcome, so it has also been sent to the other rank.
        let first = ranks.join(0, 2, &at(port..port + 1, "")).expect("everyone is there");
        assert!(ranks.stop(1), "the hub knows of the rank");
        assert_eq!(ranks.left(1), asked(1));
        assert!(first.barrier("anything").unwrap_err().sentence.contains("stopped before it began"));
        release.send(()).unwrap();
        assert_eq!(ranks.left(2), asked(2));
        drop(second.join().unwrap());
    });
}

#[test]
fn a_stop_while_ranks_are_missing_stops_those_that_joined() {
    let port = free_port();
    let meeting = at(port..port + 1, "");
    let (ranks, notes) = (Arc::new(StopRequests::default()), Notes::default());
    thread::scope(|scope| {
        let first = scope.spawn(|| ranks.join_noting(0, 3, &meeting, &notes));
        let second = scope.spawn(|| ranks.join(1, 3, &meeting));
        let is_seated = |line: &String| line == "waiting for rank 2 of 3";
        wait_until("the hub knows of the rank", || notes.lock().unwrap().iter().any(is_seated));
        assert!(ranks.stop(1), "the hub knows of the rank");
        assert_eq!(ranks.left(2), asked(2));
        for thread in [first, second] {
            let said = thread.join().unwrap().err().expect("nobody joins");
            assert_eq!(said, "the run was stopped before it began: SIGTERM");
        }
    });
}

#[test]
fn a_stop_before_the_hub_knows_the_rank_prevents_joining() {
    let port = free_port();
    let meeting = at(port..port + 1, "");
    let ranks = Arc::new(StopRequests::default());
    thread::scope(|scope| {
        let second = scope.spawn(|| ranks.join(1, 2, &meeting));
        wait_until("it looks for the hub", || !ranks.stoppers.lock().unwrap().is_empty());
        assert!(!ranks.stop(1), "nobody knows of it");
        let timing = Timing { join: Duration::from_secs(1), ..quick() };
        let first = World::join(&rank(0, 2, &meeting), joining(timing, &Notes::default(), None));
        assert!(sentence(first).starts_with("rank 1 of 2 did not join within 1 s"));
        assert_eq!(ranks.left(1), [(1, "asked: SIGTERM".to_string())]);
        assert!(second.join().unwrap().is_err());
    });
}
