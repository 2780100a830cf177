//! A weighted sum in bf16 on tensor cores, over segments of any length; the kernel is `sum.cu`.

use std::borrow::Cow;

use flatout_ir::View;

use super::{At, Step, in_pieces, numbers, plain};
use crate::cuda::context::Source;
use crate::weighted_sum::{Owner, WeightedSum};

/// Maximum panels of 64 columns of a block's result: 32 registers per thread each.
const MOST_PANELS: usize = 4;
const STAGES: usize = 3;

pub(super) fn serves(at: &At<'_>, sum: &WeightedSum, out: &View) -> bool {
    let ins = [sum.left, sum.right, sum.rows].map(|i| &at.launch.ins[i]);
    ins.into_iter().chain([out]).all(in_pieces)
}

/// How a sum is tiled: rows of the owned tile and of opposite tiles, columns per block, and number of column slices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Cut {
    own: usize,
    walk: usize,
    slice: usize,
    slices: usize,
}

impl Cut {
    /// A short side is one tile, padded to a multiple of 16 rows; for long ones, tall tiles read the opposite side less often.
    fn new(own_longest: usize, walk_longest: usize, width: usize) -> Cut {
        let panels = width.div_ceil(64).max(1);
        let slices = panels.div_ceil(MOST_PANELS);
        let slice = 64 * panels.div_ceil(slices);
        let padded = |longest: usize| longest.max(1).next_multiple_of(16);
        let own = if own_longest <= 128 { padded(own_longest) } else { 128 };
        let walk = if walk_longest <= if slice > 192 { 64 } else { 80 } { padded(walk_longest) } else { 64 };
        Cut { own, walk, slice, slices }
    }

    fn shared_bytes(&self) -> usize {
        STAGES * (self.own + self.walk) * 128
    }
}

pub(super) fn step(at: &At<'_>, sum: &WeightedSum, out: &View) -> Step {
    let p = &at.problem;
    let (own, walk) = plain::sides(p, sum.owner);
    let (inner, width) = (at.launch.ins[sum.left].dims[2], out.dims[2]);
    let cut = Cut::new(own, walk, width);
    let owner = match sum.owner {
        Owner::Queries => 0,
        Owner::Keys => 1,
        Owner::Both => 2,
    };
    let mut defines = p.defines();
    defines.extend(numbers(&[
        ("OWNER", owner),
        ("INNER", inner),
        ("WIDTH", width),
        ("OWN", cut.own),
        ("WALK", cut.walk),
        ("SLICE", cut.slice),
        ("SLICES", cut.slices),
        ("STAGES", STAGES),
    ]));
    let code = concat!(
        include_str!("../prelude.cuh"),
        include_str!("segment.cuh"),
        include_str!("fragments.cuh"),
        include_str!("sum.cu")
    );
    let tiles = own.div_ceil(cut.own);
    Step {
        source: Source { name: "linear_attention/sum.cu", code: Cow::Borrowed(code), defines },
        entry: "weighted_sum",
        grid: [tiles * p.segments(), out.dims[1] * cut.slices],
        threads: 2 * cut.own,
        shared_bytes: cut.shared_bytes(),
        args: plain::args(at, sum, out, tiles),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// sm_86, sm_89 and sm_120 have 99 KiB. The result is staged in the ring, 2 KiB per warp.
    #[test]
    fn every_cut_covers_its_sides_within_the_smallest_shared_memory() {
        for longest in [0, 1, 16, 17, 65, 80, 81, 97, 128, 129, 5000] {
            for width in [8, 64, 72, 192, 200, 256, 264, 1024, 1032] {
                let cut = Cut::new(longest, longest, width);
                assert!(cut.shared_bytes() <= 99 << 10, "{cut:?}");
                assert!(2048 * cut.own / 16 <= cut.shared_bytes(), "{cut:?}");
                assert!(cut.slice * cut.slices >= width && cut.slice * (cut.slices - 1) < width, "{cut:?}");
                assert!(
                    cut.own.is_multiple_of(16) && cut.walk.is_multiple_of(16) && 2 * cut.own <= 256,
                    "{cut:?}"
                );
            }
        }
        // A segment of 65 rows is one tile of 80.
        assert_eq!(Cut::new(65, 65, 192), Cut { own: 80, walk: 80, slice: 192, slices: 1 });
    }
}
