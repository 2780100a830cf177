//! Identifies the running program by a hash of its file: different builds of one version do not compute alike.

use std::fs::File;
use std::io::{self, Read};

use xxhash_rust::xxh3::Xxh3;

const PIECE: usize = 1 << 20;

/// A hash of this process's executable file.
pub fn hash() -> io::Result<u64> {
    let mut file = File::open("/proc/self/exe").or_else(|_| File::open(std::env::current_exe()?))?;
    let (mut state, mut piece) = (Xxh3::new(), vec![0; PIECE]);
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(state.digest()),
            bytes => state.update(&piece[..bytes]),
        }
    }
}
