//! Random access to the bytes of an input, local or remote.

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
    /// `interleaved` is the number of positions that are read in turn, for each of which remote bytes are buffered.
    pub fn open(input: &Input, interleaved: usize) -> io::Result<Self> {
        Ok(match &input.remote {
            Some(object) => Bytes::Remote(Ranged::new(object.clone(), interleaved)),
            None => Bytes::File(File::open(&input.path)?),
        })
    }

    pub fn len(&self) -> io::Result<u64> {
        match self {
            Bytes::File(file) => Ok(file.metadata()?.len()),
            Bytes::Remote(ranged) => Ok(ranged.len()),
        }
    }

    /// Fills `out` with the bytes at `at`. Hints that bytes up to `until` will be read soon.
    pub fn read_exact_at(&self, out: &mut [u8], at: u64, until: u64) -> io::Result<()> {
        match self {
            Bytes::File(file) => file.read_exact_at(out, at),
            Bytes::Remote(ranged) => ranged.read_exact_at(out, at, until),
        }
    }
}
