//! Both wires: all messages arrive at the right rank, whatever their size, and broken peers are errors.

use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use flatout_world::{Sockets, Threads, Wire, WireError};

use crate::proxy;
use crate::ranks::with_ranks;

/// Bytes that rank `from` sends to rank `to` in a round.
fn message(from: usize, to: usize, round: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 31 + from * 7 + to * 3 + round) as u8).collect()
}

/// Sizes differ by pair and round; some messages are empty.
fn size(from: usize, to: usize, round: usize) -> usize {
    [0, 1, 17, 4096, 65_537, 300_000][(from * 5 + to * 3 + round) % 6]
}

fn exchange_rounds(wire: &dyn Wire, rounds: usize, size: impl Fn(usize, usize, usize) -> usize) {
    let (rank, ranks) = (wire.rank(), wire.ranks());
    for round in 0..rounds {
        let sent: Vec<Vec<u8>> =
            (0..ranks).map(|to| message(rank, to, round, size(rank, to, round))).collect();
        let mut received: Vec<Vec<u8>> = (0..ranks).map(|from| vec![0; size(from, rank, round)]).collect();
        let send: Vec<&[u8]> = sent.iter().map(Vec::as_slice).collect();
        let mut receive: Vec<&mut [u8]> = received.iter_mut().map(Vec::as_mut_slice).collect();
        wire.exchange(&send, &mut receive).unwrap();
        for (from, bytes) in received.iter().enumerate() {
            assert!(
                *bytes == message(from, rank, round, size(from, rank, round)),
                "round {round}, rank {from} to {rank}"
            );
        }
    }
}

/// Runs every rank's end on a thread.
fn on_threads<W: Wire, T: Send>(wires: Vec<W>, run: impl Fn(W) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = wires.into_iter().map(|wire| scope.spawn(move || run(wire))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Sockets of ranks in one process; `link` may redirect a connection.
fn sockets(ranks: usize, link: impl Fn(std::net::SocketAddr) -> std::net::SocketAddr) -> Vec<Sockets> {
    let mut peers: Vec<Vec<Option<TcpStream>>> =
        (0..ranks).map(|_| (0..ranks).map(|_| None).collect()).collect();
    for (low, high) in (0..ranks).flat_map(|low| (low + 1..ranks).map(move |high| (low, high))) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        peers[high][low] = Some(TcpStream::connect(link(listener.local_addr().unwrap())).unwrap());
        peers[low][high] = Some(listener.accept().unwrap().0);
    }
    peers.into_iter().enumerate().map(|(rank, peers)| Sockets::over(rank, peers).unwrap()).collect()
}

#[test]
fn threads_carry_every_size() {
    for ranks in [1, 2, 3, 5, 8] {
        on_threads(Threads::connect(ranks), |wire| exchange_rounds(&wire, 40, size));
    }
}

#[test]
fn sockets_carry_every_size() {
    for ranks in [1, 2, 3, 5, 8] {
        on_threads(sockets(ranks, |address| address), |wire| exchange_rounds(&wire, 40, size));
    }
}

#[test]
fn sockets_of_a_world_carry_every_size() {
    with_ranks(4, |world| {
        let sockets = Sockets::connect(&world).unwrap();
        assert_eq!((sockets.rank(), sockets.ranks()), (world.rank, 4));
        exchange_rounds(&sockets, 20, size);
        world.finish().unwrap();
    });
}

#[test]
fn all_ranks_send_more_than_buffers_hold() {
    on_threads(sockets(3, |address| address), |wire| exchange_rounds(&wire, 2, |_, _, _| 12 << 20));
}

#[test]
fn a_link_of_20_ms_delays_without_reducing_the_rate() {
    let delay = Duration::from_millis(20);
    let began = Instant::now();
    on_threads(sockets(3, |address| proxy::delayed(address, delay)), |wire| {
        exchange_rounds(&wire, 5, |_, _, _| 1 << 10);
        exchange_rounds(&wire, 5, |_, _, _| 1 << 20);
    });
    let took = began.elapsed();
    assert!(took > 10 * delay, "{took:?}: ten exchanges wait for ten delays");
    assert!(took < Duration::from_secs(20), "{took:?}");
}

#[test]
fn a_peer_that_leaves_is_an_error() {
    fn check<W: Wire>(wires: Vec<W>) {
        let found = on_threads(wires, |wire| {
            let mut received = [[0u8; 4]; 3];
            let mut receive: Vec<&mut [u8]> = received.iter_mut().map(|bytes| &mut bytes[..]).collect();
            match wire.rank() {
                1 => Ok(()),
                _ => wire.exchange(&[&[1; 4][..]; 3], &mut receive),
            }
        });
        assert_eq!(found[0], Err(WireError::Gone { rank: 1 }));
        assert_eq!(found[2], Err(WireError::Gone { rank: 1 }));
    }
    check(Threads::connect(3));
    check(sockets(3, |address| address));
}

#[test]
fn unequal_lengths_and_calls_are_errors() {
    fn check<W: Wire>(wires: Vec<W>) {
        let found = on_threads(wires, |wire| {
            let bytes = [0u8; 8];
            let mut received = [[0u8; 8]; 2];
            let own = 4 + 4 * wire.rank();
            let [first, second] = &mut received;
            wire.exchange(&[&bytes[..own]; 2], &mut [&mut first[..own], &mut second[..own]])
        });
        assert_eq!(found[0], Err(WireError::Unequal { rank: 1, sent: 8, awaited: 4 }));
        assert!(found[1].is_err());
    }
    check(Threads::connect(2));
    check(sockets(2, |address| address));
    // Rank 1 skipped an exchange in which it would have sent nothing.
    let found = on_threads(sockets(2, |address| address), |wire| {
        if wire.rank() == 0 {
            wire.exchange(&[b"", b""], &mut [&mut [], &mut []]).unwrap();
        }
        let (mut first, mut second) = ([0u8; 4], [0u8; 4]);
        wire.exchange(&[&[1; 4][..]; 2], &mut [&mut first, &mut second])
    });
    assert_eq!(found[0], Err(WireError::OutOfStep { rank: 1, theirs: 1, ours: 2 }));
}
