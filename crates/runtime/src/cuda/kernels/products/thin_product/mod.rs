//! An adapter's products, with dropout inside or added to a base.
//!
//! The kernels are `down.cu`, `up.cu` and `weight.cu`; `any.cu` handles the shapes that these do not support.

use flatout_ir::ops::thin_product::{MOST_RANK, STEP, Thin};
use flatout_ir::random::drop_below;
use flatout_ir::target::{KernelRow, Layout, Shapes};
use flatout_ir::types::DType;
use flatout_ir::{Launch, Op, OpKind, View};

use crate::cuda::context::{Facts, Kernel};
use crate::cuda::kernels::elementwise::dropout::drawing;
use crate::cuda::kernels::stage::{
    Draft, PHILOX, Stage, Stages, Value, at, at_or_nothing, blocks, c_type, count32, staged,
};
use crate::rows::kernel_row;

pub const KERNELS: &[Kernel] = &[staged!(
    KernelRow {
        workspace,
        ..kernel_row("cuda.thin_product", OpKind::ThinProduct, &[DType::BF16], Layout::Rows)
    },
    stages
)];

const THIN: &str = include_str!("thin.cuh");

/// Rows of a fragment, and columns of the slab of a warp or block.
const TILE: usize = 16;
const SLAB: usize = 64;

/// How a weight's gradient is divided.
mod cut {
    use super::{SLAB, TILE};

    pub const WARPS: usize = 4;
    /// Groups of eight ranks whose sums fit in the shared memory that held the rows.
    pub const TOGETHER: usize = 3;

    /// Blocks per multiprocessor, limited by the registers for sums.
    pub fn blocks(rank: usize) -> usize {
        match rank {
            0..=24 => 4,
            25..=48 => 3,
            _ => 2,
        }
    }

    /// Tiles of rows per block, and the resulting number of parts: as many blocks as run at once on a large device, but no part
    /// so small that its sums outweigh it. Depends on shapes alone.
    pub fn parts(rows: usize, [rank, width]: [usize; 2]) -> (usize, usize) {
        const LARGE: usize = 132;
        let tiles = rows.div_ceil(TILE);
        let parts = (LARGE * blocks(rank) / width.div_ceil(SLAB)).max(1);
        let each = tiles.div_ceil(parts).max(2 * WARPS);
        (each, tiles.div_ceil(each))
    }
}

/// The partial sums of a weight's gradient.
fn workspace(shapes: &Shapes<'_>) -> usize {
    let Op::ThinProduct { form: Thin::Weight, .. } = shapes.node.op else { return 0 };
    let [rank, width] = Thin::Weight.extents([shapes.ins[0], shapes.ins[1]]);
    let (_, parts) = cut::parts(shapes.ins[1].dims[0], [rank, width]);
    parts * rank * width * 4
}

/// A launch's tensors and extents.
struct Call<'a> {
    launch: &'a Launch,
    form: Thin,
    p: f32,
    left: &'a View,
    right: &'a View,
    base: Option<&'a View>,
    /// The numbers that a dropout draws by, and the rows that it draws for.
    drawn: Option<[&'a View; 2]>,
    out: &'a View,
    /// Rows of the wide tensor.
    m: usize,
    rank: usize,
    width: usize,
}

fn stages(launch: &Launch, facts: &Facts) -> Stages {
    let Op::ThinProduct { form, p, base, .. } = launch.op else {
        unreachable!("the row is for thin products")
    };
    let Some(out) = launch.outs[0].as_ref().filter(|out| out.elements() > 0) else { return Ok(vec![]) };
    let (left, right) = (&launch.ins[0], &launch.ins[1]);
    let drawn = match &launch.ins[2 + base as usize..] {
        [rng, rows] => Some([rng, rows]),
        _ => None,
    };
    let (rank, width) = match form {
        Thin::Down => (right.dims[0], right.dims[1]),
        Thin::Up | Thin::Weight => (left.dims[1], right.dims[1]),
        Thin::Out => (left.dims[1], right.dims[0]),
    };
    let base = base.then(|| &launch.ins[2]);
    let call = Call { launch, form, p, left, right, base, drawn, out, m: left.dims[0], rank, width };
    match form {
        _ if !call.is_regular() => call.any(),
        Thin::Down => call.down(facts),
        Thin::Up | Thin::Out => call.up(facts),
        Thin::Weight => call.weight(),
    }
}

impl Call<'_> {
    /// Whether extents, strides and addresses meet the conditions of the fast kernels.
    fn is_regular(&self) -> bool {
        let steps = [self.rank, self.width].iter().all(|n| n.is_multiple_of(STEP));
        let aligned = |view: &View, bytes: usize| {
            view.offset.is_multiple_of(bytes) && (row(view) * view.dtype.bytes()).is_multiple_of(bytes)
        };
        let wide = [self.left, self.right, self.out].into_iter().chain(self.base);
        let has_rows = self.m > 0 && self.rank > 0 && self.rank <= MOST_RANK;
        let are_drawn_together = self.drawn.is_none_or(|[_, rows]| aligned(rows, 8));
        steps && has_rows && wide.into_iter().all(|view| aligned(view, 16)) && are_drawn_together
    }

    fn draft(&self, name: &'static str, strides: &[(&str, &View)]) -> Draft {
        let draft = Draft::new(name)
            .define("BELOW", format!("{}u", drop_below(self.p)))
            .define("ROWS_ROW", self.drawn.map_or(0, |[_, rows]| row(rows)))
            .flag("HAS_BASE", self.base.is_some());
        let strides = strides.iter().copied().chain(self.base.map(|base| ("BASE_ROW", base)));
        strides.fold(draft, |draft, (name, view)| draft.define(name, row(view))).text(PHILOX)
    }

    /// The source of one of the fast kernels.
    fn fast(&self, name: &'static str, warps: usize, blocks: usize, strides: &[(&str, &View)]) -> Draft {
        let draft = self.draft(name, strides).define("RANK", self.rank).define("WIDTH", self.width);
        draft.define("WARPS", warps).define("BLOCKS", blocks).text(THIN)
    }

    fn key(&self) -> [Value; 2] {
        let [low, high, ..] = drawing(self.p, self.launch.key);
        [low, high]
    }

    /// The numbers and rows of the dropout, or nothing.
    fn drawn_by(&self) -> [Value; 2] {
        [0, 1].map(|i| at_or_nothing(self.drawn.map(|drawn| drawn[i])))
    }

    fn keep(&self) -> Value {
        drawing(self.p, self.launch.key)[3]
    }

    fn down(&self, facts: &Facts) -> Stages {
        const WARPS: usize = 4;
        const ROWS: usize = 32;
        // As many blocks as registers allow, which depends on the compiler.
        let is_small = self.rank <= 32 || (self.rank <= 48 && facts.major == 9);
        let blocks_each = if is_small { 4 } else { 3 };
        let strides = [("X_ROW", self.left), ("A_ROW", self.right), ("U_ROW", self.out)];
        let source =
            self.fast("thin_product/down.cu", WARPS, blocks_each, &strides).source(include_str!("down.cu"));
        let mut args = [self.left, self.right].map(at).to_vec();
        args.extend(self.drawn_by());
        args.extend([at(self.out), count32("rows", self.m)?]);
        args.extend(self.key());
        args.push(self.keep());
        let grid = [blocks(self.m, ROWS)?, 1];
        Ok(vec![Stage { source, entry: "thin_down", grid, block: 32 * WARPS as u32, args }])
    }

    fn up(&self, facts: &Facts) -> Stages {
        let (slabs, tiles) = (self.width.div_ceil(SLAB), self.m.div_ceil(TILE));
        // Without a dropout the loads in flight decide, and four blocks of four warps have more than two of six.
        let sizes = if self.drawn.is_some() { [6, 4, 5] } else { [4, 5, 6] };
        let warps = sizes.into_iter().find(|n| slabs.is_multiple_of(*n)).unwrap_or(slabs.min(4));
        // The part of `a` that a warp keeps fills its registers.
        let blocks_each = if self.rank <= 32 { 16 / warps } else { 12 / warps };
        let across = slabs.div_ceil(warps);
        // One wave: a block that starts later would read its columns of a again.
        let each = tiles.div_ceil((facts.sms as usize * blocks_each / across).max(1));
        let strides = [("DU_ROW", self.left), ("A_ROW", self.right), ("DX_ROW", self.out)];
        let source = self
            .fast("thin_product/up.cu", warps, blocks_each, &strides)
            .flag("DROPS", self.drawn.is_some())
            .flag("OUT", self.form == Thin::Out)
            .flag("AHEAD", self.drawn.is_none() && self.rank <= 48)
            .source(include_str!("up.cu"));
        let mut args = vec![at(self.left), at(self.right), at_or_nothing(self.base)];
        args.extend(self.drawn_by());
        args.extend([at(self.out), count32("rows", self.m)?, count32("tiles", each)?]);
        args.extend(self.key());
        args.push(self.keep());
        let grid = [across as u32, tiles.div_ceil(each) as u32];
        Ok(vec![Stage { source, entry: "thin_up", grid, block: 32 * warps as u32, args }])
    }

    fn weight(&self) -> Stages {
        let (each, parts) = cut::parts(self.m, [self.rank, self.width]);
        let strides = [("DU_ROW", self.left), ("X_ROW", self.right), ("DA_ROW", self.out)];
        let source = self
            .fast("thin_product/weight.cu", cut::WARPS, cut::blocks(self.rank), &strides)
            .define("TOGETHER", cut::TOGETHER)
            .source(concat!(include_str!("../../matrices.cuh"), include_str!("weight.cu")));
        let scratch = Value::At(self.launch.workspace.as_ref().map_or(0, |view| view.offset));
        let mut args = [self.left, self.right].map(at).to_vec();
        args.extend(self.drawn_by());
        args.extend([scratch, count32("rows", self.m)?, count32("tiles", each)?]);
        args.extend(self.key());
        let slabs = self.width.div_ceil(SLAB) as u32;
        let block = 32 * cut::WARPS as u32;
        let grid = [slabs, parts as u32];
        let products = Stage { source: source.clone(), entry: "thin_weight", grid, block, args };
        let parts = count32("parts", parts)?;
        let args = vec![scratch, at_or_nothing(self.base), at(self.out), parts, self.keep()];
        let grid = [blocks(self.rank * self.width, 4 * 128)?, 1];
        Ok(vec![products, Stage { source, entry: "thin_weight_sum", grid, block: 128, args }])
    }

    fn any(&self) -> Stages {
        let [ta, tb] = self.form.transposed();
        let dropped = match self.form {
            _ if self.drawn.is_none() => -1,
            Thin::Down => 0,
            Thin::Up | Thin::Out => 1,
            Thin::Weight => 2,
        };
        let strides = [("LEFT_ROW", self.left), ("RIGHT_ROW", self.right), ("OUT_ROW", self.out)];
        let source = self
            .draft("thin_product/any.cu", &strides)
            .define("T_OUT", c_type(self.out.dtype))
            .define("DROPPED", dropped)
            .flag("TA", ta)
            .flag("TB", tb)
            .source(include_str!("any.cu"));
        let (count, columns) = (self.out.elements(), self.out.dims[1]);
        let inner = self.left.dims[if ta { 0 } else { 1 }];
        let mut args = vec![at(self.left), at(self.right), at_or_nothing(self.base)];
        args.extend(self.drawn_by());
        args.push(at(self.out));
        args.extend([Value::I64(count as i64), count32("columns", columns)?, count32("terms", inner)?]);
        args.extend(self.key());
        args.push(self.keep());
        Ok(vec![Stage { source, entry: "thin_any", grid: [blocks(count, 256)?, 1], block: 256, args }])
    }
}

/// Row stride in elements.
fn row(view: &View) -> usize {
    view.strides[0]
}
