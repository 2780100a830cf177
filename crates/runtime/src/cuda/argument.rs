//! Kernel arguments of any size: structs passed by value in their memory layout.

use super::context::{Arg, CudaError, Function, Stream, Work};

/// The strictest alignment any argument needs: that of a tensor map.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq)]
struct Line([u64; 8]);

/// The bytes of one argument, aligned to 64.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    lines: Vec<Line>,
    bytes: usize,
}

impl Block {
    /// A struct of 64-bit words, in field order.
    pub fn of_words(words: &[u64]) -> Block {
        Block::new(words, size_of_val(words))
    }

    pub fn of_ints(ints: &[u32]) -> Block {
        // Little-endian: the first of a pair is the low half of its word.
        let word = |pair: &[u32]| pair[0] as u64 | (pair.get(1).copied().unwrap_or(0) as u64) << 32;
        Block::new(&ints.chunks(2).map(word).collect::<Vec<u64>>(), size_of_val(ints))
    }

    fn new(words: &[u64], bytes: usize) -> Block {
        let line = |words: &[u64]| {
            let mut line = Line([0; 8]);
            line.0[..words.len()].copy_from_slice(words);
            line
        };
        Block { lines: words.chunks(8).map(line).collect(), bytes }
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn as_ptr(&self) -> *const u64 {
        self.lines.as_ptr().cast()
    }
}

impl From<Arg> for Block {
    fn from(arg: Arg) -> Block {
        match arg {
            Arg::Ptr(x) => Block::new(&[x], 8),
            Arg::I64(x) => Block::new(&[x as u64], 8),
            // Little-endian: a 32-bit value occupies the first half of its word.
            Arg::I32(x) => Block::new(&[x as u32 as u64], 4),
            Arg::F32(x) => Block::new(&[x.to_bits() as u64], 4),
        }
    }
}

/// As `context::launch`, for kernels that take structs. Checks number and sizes of the arguments against the kernel's
/// parameters as the driver reports them; a mismatch is an error.
pub fn launch_blocks(
    function: Function,
    grid: [usize; 3],
    block: u32,
    shared: u32,
    args: Vec<Block>,
) -> Result<Box<dyn Work>, CudaError> {
    let [Ok(x), Ok(y @ ..=65535), Ok(z @ ..=65535)] = grid.map(i32::try_from) else {
        return Err(CudaError::new(format!("{grid:?} blocks are more than a launch may have")));
    };
    let wanted = function.driver.parameter_bytes(&function)?;
    let given: Vec<usize> = args.iter().map(Block::bytes).collect();
    if wanted != given {
        return Err(CudaError::new(format!(
            "a kernel takes {wanted:?} bytes of arguments and got {given:?}"
        )));
    }
    if shared > super::context::DEFAULT_SHARED {
        function.driver.allow_shared(&function, shared)?;
    }
    let grid = [x, y, z].map(|n| n as u32);
    Ok(Box::new(BlockLaunch { function, grid, block, shared, args }))
}

struct BlockLaunch {
    function: Function,
    grid: [u32; 3],
    block: u32,
    shared: u32,
    args: Vec<Block>,
}

impl Work for BlockLaunch {
    fn enqueue(&self, stream: Stream) -> Result<(), CudaError> {
        let Self { function, grid, block, shared, args } = self;
        function.driver.launch_blocks(function, *grid, *block, *shared, args, stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_aligned_to_64_bytes_and_keep_word_order() {
        let words: Vec<u64> = (1..=42).collect();
        let block = Block::of_words(&words);
        assert_eq!((block.bytes(), block.as_ptr() as usize % 64), (336, 0));
        let lines: Vec<u64> = block.lines.iter().flat_map(|line| line.0).collect();
        assert_eq!(lines[..42], words);
        assert_eq!(Block::from(Arg::I32(-1)), Block::new(&[0xFFFF_FFFF], 4));
        assert_eq!(Block::from(Arg::Ptr(7)).bytes(), 8);
        assert_eq!(Block::of_ints(&[1, 2, 3]), Block::new(&[1 | 2 << 32, 3], 12));
    }
}
