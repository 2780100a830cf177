//! Products on `mma.sync`, for every GPU from sm_80, with the epilogues of the Hopper kernel: `product.cu`.

use std::borrow::Cow;

use super::call::{Call, Epilogue, Types};
use super::lt::Matrices;
use crate::cuda::argument::{Block, launch_blocks};
use crate::cuda::context::{Arg, Facts, Prepare, Prepared, Source};

/// A configuration that product.cu is compiled with: a thread block of `warps[0]` by `warps[1]` warps, each with a tile of 64 by
/// 64, and thread blocks per multiprocessor for the launch bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductConfig {
    /// Name under which times are stored; contains no spaces.
    pub name: &'static str,
    warps: [usize; 2],
    per_sm: usize,
}

/// Loads the fewest bytes, for products of many tiles.
const LARGE: ProductConfig = ProductConfig { name: "mma-256x128", warps: [4, 2], per_sm: 1 };
/// Two thread blocks per multiprocessor: one's epilogue overlaps the other's products.
const MEDIUM: ProductConfig = ProductConfig { name: "mma-128x128", warps: [2, 2], per_sm: 2 };
/// For products of few rows, whose larger tiles would leave multiprocessors idle.
const SMALL: ProductConfig = ProductConfig { name: "mma-64x128", warps: [1, 2], per_sm: 2 };

/// Rows and columns of a warp's tile.
const WARP: usize = 64;
/// The block of K that a stage holds.
const INNER: usize = 32;
const NAME: &str = "products/mma/product.cu";

/// Whether the kernel computes a product that `Call::is_served`: all is bf16, and results are stored 16 bytes at a time.
pub fn serves(call: &Call, facts: &Facts) -> bool {
    let [_, n, _] = call.extents();
    let [_, b_mn] = call.layout();
    let is_bf16 = call.types() == Types::BF16;
    is_bf16 && facts.major >= 8 && n.is_multiple_of(8) && !(call.epilogue.is_gated() && b_mn)
}

/// The configurations worth timing, with the default first: that of the largest tiles of which every multiprocessor has one, and
/// the next smaller or larger one.
pub fn forms(call: &Call, facts: &Facts) -> [ProductConfig; 2] {
    let fills = |form: ProductConfig| call.tiles(form.tile(call.epilogue)) >= facts.sms as usize;
    match () {
        () if fills(LARGE) => [LARGE, MEDIUM],
        () if fills(MEDIUM) => [MEDIUM, SMALL],
        () => [SMALL, MEDIUM],
    }
}

/// Dynamic shared memory of a source's kernel; `None` for a source of another file.
pub fn shared_bytes(source: &Source) -> Option<usize> {
    let number = |name: &str| source.number(name).filter(|_| source.name == NAME);
    Some(number("STAGES")? * stage_bytes([number("WARPS_M")?, number("WARPS_N")?]))
}

fn stage_bytes([down, across]: [usize; 2]) -> usize {
    (down + across) * WARP * INNER * 2
}

impl ProductConfig {
    /// Rows and columns of d per tile.
    fn tile(&self, epilogue: Epilogue) -> [usize; 2] {
        let [rows, columns] = self.warps.map(|warps| warps * WARP);
        [rows, if epilogue.is_gated() { columns / 2 } else { columns }]
    }

    /// Four, if as many thread blocks as the launch bounds name then fit on a multiprocessor, otherwise three. A multiprocessor
    /// has 1 KiB more than a block may request, and each block costs 1 KiB in addition.
    fn stages(&self, facts: &Facts) -> usize {
        let bytes = |stages: usize| self.per_sm * (stages * stage_bytes(self.warps) + 1024);
        if bytes(4) <= facts.shared_bytes as usize + 1024 { 4 } else { 3 }
    }

    pub fn source(&self, call: &Call, facts: &Facts) -> Source {
        let defines = [
            ("WARPS_M", self.warps[0]),
            ("WARPS_N", self.warps[1]),
            ("PER_SM", self.per_sm),
            ("STAGES", self.stages(facts)),
        ];
        let defines = defines.into_iter().map(|(name, value)| (name.into(), value.to_string()));
        let code = concat!(
            include_str!("../../prelude.cuh"),
            include_str!("../../matrices.cuh"),
            include_str!("../../mma.cuh"),
            include_str!("../../elementwise/activation.cuh"),
            include_str!("../call.cuh"),
            include_str!("product.cu")
        );
        let of_call = call.epilogue.defines(call.layout());
        Source { name: NAME, code: Cow::Borrowed(code), defines: defines.chain(of_call).collect() }
    }

    pub fn prepare(&self, call: &Call, p: &Prepare<'_>) -> Prepared {
        let tile = self.tile(call.epilogue);
        let source = self.source(call, p.facts());
        let shared = shared_bytes(&source).expect("a source of this file") as u32;
        let function = p.function(&source, "product")?;
        let threads = (32 * self.warps[0] * self.warps[1]) as u32;
        let blocks = p.facts().sms as usize * function.blocks_per_sm(threads, shared)?.max(1) as usize;
        let [a, b] = [&call.a, &call.b].map(words);
        let b2 = call.b2.as_ref().map_or(b, words);
        // An absent matrix is not accessed.
        let results = call.outs.iter().chain(&call.sides).map(|m| m.as_ref().map_or([0; 3], words));
        let mut args = vec![call.shape(tile, INNER, 1)?];
        args.extend([a, b, b2].map(|matrix| Block::of_words(&matrix)));
        args.push(Block::of_words(&results.collect::<Vec<[u64; 3]>>().concat()));
        args.extend([call.bias, call.partial].map(|at| Block::from(Arg::Ptr(at))));
        launch_blocks(function, [blocks.min(call.tiles(tile)), 1, 1], threads, shared, args)
    }
}

/// `Matrix` of product.cu.
fn words(m: &Matrices) -> [u64; 3] {
    [m.at, m.pitch as u64, m.step as u64]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::products::call::tests::{call, matrices};

    const ARCHITECTURES: [&str; 6] = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"];

    #[test]
    fn every_form_fits_in_shared_memory() {
        for facts in ARCHITECTURES.map(Facts::on_paper) {
            for form in [SMALL, MEDIUM, LARGE] {
                let bytes = shared_bytes(&form.source(&call(), &facts)).unwrap();
                assert!(bytes <= facts.shared_bytes as usize, "{form:?} takes {bytes}");
                let of_all = form.per_sm * (bytes + 1024);
                assert!(of_all <= facts.shared_bytes as usize + 1024, "{form:?} takes {of_all}");
            }
        }
        let stages = |arch: &str| MEDIUM.stages(&Facts::on_paper(arch));
        assert_eq!(["sm_80", "sm_86", "sm_90a"].map(stages), [4, 3, 4]);
    }

    #[test]
    fn tiles_are_as_large_as_fill_the_device() {
        let facts = Facts { sms: 108, ..Facts::on_paper("sm_80") };
        let of = |rows: usize| {
            let (a, d) = (matrices(rows, 768, 768, false), matrices(rows, 768, 768, false));
            forms(&Call::plain(1, a, matrices(768, 768, 768, true), d), &facts).map(|form| form.name)
        };
        assert_eq!(of(65536), ["mma-256x128", "mma-128x128"]);
        assert_eq!(of(4096), ["mma-128x128", "mma-64x128"]);
        assert_eq!(of(512), ["mma-64x128", "mma-128x128"]);
    }

    #[test]
    fn rows_of_results_are_whole_pieces() {
        let facts = Facts::on_paper("sm_86");
        assert!(serves(&call(), &facts));
        let odd = Call { b: matrices(132, 72, 80, true), ..call() };
        assert!(odd.is_served() && !serves(&odd, &facts));
    }
}
