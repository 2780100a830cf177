//! A proxy that delays the bytes it forwards, like a long link, and that can be cut.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// An address that forwards to another one, with every byte delayed by `delay`. It lasts as long as the test.
pub fn delayed(to: SocketAddr, delay: Duration) -> SocketAddr {
    link(to, delay, Arc::default())
}

/// A delayed address, until `is_cut` is set: from then on nothing arrives, and neither side is told.
pub fn link(to: SocketAddr, delay: Duration, is_cut: Arc<AtomicBool>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for near in listener.incoming().flatten() {
            thread::sleep(delay);
            let Ok(far) = TcpStream::connect(to) else { continue };
            for stream in [&near, &far] {
                stream.set_nodelay(true).unwrap();
            }
            pass(near.try_clone().unwrap(), far.try_clone().unwrap(), delay, &is_cut);
            pass(far, near, delay, &is_cut);
        }
    });
    address
}

/// Reads and writes on separate threads, so that a delay does not limit the rate.
fn pass(mut from: TcpStream, mut to: TcpStream, delay: Duration, is_cut: &Arc<AtomicBool>) {
    let is_cut = Arc::clone(is_cut);
    let (sender, pieces) = mpsc::channel::<(Instant, Vec<u8>)>();
    thread::spawn(move || {
        let mut piece = vec![0; 256 << 10];
        while let Ok(bytes @ 1..) = from.read(&mut piece) {
            if sender.send((Instant::now() + delay, piece[..bytes].to_vec())).is_err() {
                return;
            }
        }
    });
    thread::spawn(move || {
        for (due, piece) in pieces {
            thread::sleep(due.saturating_duration_since(Instant::now()));
            if is_cut.load(Ordering::SeqCst) {
                continue;
            }
            if to.write_all(&piece).is_err() {
                return;
            }
        }
        if is_cut.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_secs(3600));
        }
        let _ = to.shutdown(Shutdown::Write);
    });
}
