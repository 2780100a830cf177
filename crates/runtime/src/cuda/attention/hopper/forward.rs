//! The forward pass on Hopper: which form of forward.cu a problem takes, and its launch.

use std::borrow::Cow;

use flatout_ir::Launch;
use flatout_ir::ops::attention::Mask;

use super::{MOST_SHARED, PANEL, is_hopper, is_written, rows_map};
use crate::cuda::argument::{Block, launch_blocks};
use crate::cuda::attention::Problem;
use crate::cuda::attention::call::{self, Call};
use crate::cuda::attention::scratch::Scratch;
use crate::cuda::attention::tiles::{self, Heights};
use crate::cuda::context::{Arg, CudaError, Facts, Prepare, Source, Work, sequence};

/// What forward.cu is compiled for; its header says what each means.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Form {
    groups: usize,
    pack: usize,
    walk: usize,
    narrow: usize,
    stages: usize,
    blocks: usize,
    overlap: bool,
    pingpong: bool,
}

/// Behind the tiles: barriers and the task.
const MESSAGE_BYTES: usize = 1024;

impl Form {
    fn rows(&self) -> usize {
        64 * self.groups
    }

    /// Tokens of a tile of queries.
    fn own(&self) -> usize {
        self.rows() / self.pack
    }

    fn shared_bytes(&self, size: usize) -> usize {
        let row = 2 * size.next_multiple_of(PANEL);
        (self.rows() + 2 * self.stages * self.walk) * row + MESSAGE_BYTES
    }

    /// Registers of the producer's and of the consumers' threads. Where consumers keep little, the compiler's even share
    /// is enough and the producer is a single warp.
    fn registers(&self) -> Option<[usize; 2]> {
        match (self.groups, self.blocks) {
            (2, 1) => Some([40, 232]),
            (3, 1) => Some([32, 160]),
            _ => None,
        }
    }

    fn threads(&self) -> usize {
        128 * self.groups + if self.registers().is_some() { 128 } else { 32 }
    }
}
