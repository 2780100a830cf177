//! The bytes of an input at any place: of a file of this machine, or of one on a server.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::find::Input;
use crate::remote::ranged::Ranged;

pub(super) enum Bytes {
    File(File),
    Remote(Ranged),
}

impl Bytes {
    /// `in_turns` is how many places are read in turns: those of a file on a server are held in memory.
    pub fn open(input: &Input, in_turns: usize) -> io::Result<Self> {
        Ok(match &input.remote {
            Some(object) => Bytes::Remote(Ranged::new(object.clone(), in_turns)),
            None => Bytes::File(File::open(&input.path)?),
        })
    }

    pub fn len(&self) -> io::Result<u64> {
        match self {
            Bytes::File(file) => Ok(file.metadata()?.len()),
            Bytes::Remote(ranged) => Ok(ranged.len()),
        }
    }

    /// Fills `out` with the bytes at `at`; what follows up to `until` is read soon.
    pub fn read_exact_at(&self, out: &mut [u8], at: u64, until: u64) -> io::Result<()> {
        match self {
            Bytes::File(file) => file.read_exact_at(out, at),
            Bytes::Remote(ranged) => ranged.read_exact_at(out, at, until),
        }
    }
}
