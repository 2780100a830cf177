//! The output head's product fused with the cross entropy: logits exist for one chunk of rows at a time, in the workspace.
//!
//! A chunk's logits are computed on all cores, or read where the forward pass kept them, its rows become losses and then, in place, d logits = c (softmax - onehot) with
//! c the row's weight (or minus d logp, if given); two more products give dx and add to dw. Chunks are processed in order, so
//! dw is summed in a fixed order for any number of threads. bf16 is widened as it is read, the head's weight by blocks.
//!
//! A row without a target or with weight 0 has no gradient, and its logits are used only if its logp or lse is requested; a
//! chunk of such rows costs nothing.

use std::ops::Range;

use flatout_ir::ops::cap::Cap;
use flatout_ir::target::{KernelRow, Layout, Shapes};
use flatout_ir::types::DType;
use flatout_ir::{Launch, Op, OpKind};

use super::product::{Matrix, multiply};
use crate::cpu::Kernel;
use crate::cpu::context::{Context, chunk};
use crate::cpu::kernels::reductions::reduce::Shared;
use crate::cpu::math::{self, LANES, vectorised};
use crate::cpu::tensor::Tensor;
use crate::rows::{FLOATS, kernel_row};

const fn kernel(name: &'static str, op: OpKind) -> Kernel {
    let row = KernelRow { workspace, ..kernel_row(name, op, FLOATS, Layout::Rows) };
    Kernel { row, run }
}

pub const KERNELS: &[Kernel] = &[
    kernel("head_loss", OpKind::HeadLoss),
    kernel("head_loss_grad", OpKind::HeadLossGrad),
    kernel("head_loss_train", OpKind::HeadLossTrain),
];

/// Approximate logits per chunk: 32 MiB. With fewer rows dw would be read and written too often compared with its products.
const CHUNK_LOGITS: usize = 8 << 20;
/// Rows of a bf16 head that are widened at once.
const WIDENED: usize = 1024;

/// The parts of the workspace, in floats.
struct Sizes {
    /// Rows per chunk.
    rows: usize,
    /// Row stride of the logits.
    pitch: usize,
    /// Rows of the head that are multiplied at once.
    block: usize,
    /// The widened rows of x, those of dx before rounding, and the widened block of w.
    widened: [usize; 3],
}

impl Sizes {
    fn new(rows: usize, vocabulary: usize, width: usize, dtype: DType) -> Self {
        let most = (CHUNK_LOGITS / vocabulary.max(1)).clamp(64, 1024);
        // Chunks of equal size: a short last one would be less efficient.
        let chunks = rows.div_ceil(most).max(1);
        let rows = rows.div_ceil(chunks).next_multiple_of(16);
        let (block, widened) = if dtype == DType::F32 {
            (vocabulary, [0; 3])
        } else {
            let block = WIDENED.min(vocabulary);
            (block, [rows * width, rows * width, block * width].map(|n| n.next_multiple_of(16)))
        };
        Sizes { rows, pitch: vocabulary.next_multiple_of(16), block, widened }
    }

    fn floats(&self) -> usize {
        self.rows * self.pitch + 3 * self.rows + self.widened.iter().sum::<usize>()
    }
}

fn workspace(shapes: &Shapes<'_>) -> usize {
    let (x, w) = (shapes.ins[0], shapes.ins[1]);
    4 * Sizes::new(x.dims[0], w.dims[0], x.dims[1], x.dtype).floats()
}

/// A launch of any of the three operations.
struct Head<'a, 'c> {
    cx: &'c Context<'a>,
    x: Tensor<'a>,
    w: Tensor<'a>,
    target: Vec<i32>,
    /// The factor c of each row's d logits.
    factor: Vec<f32>,
    /// Soft cap of logits, if any.
    cap: Option<f32>,
    /// lse from the forward pass, if given.
    known_lse: Option<Tensor<'a>>,
    /// Logits from the forward pass, if given.
    known_logits: Option<Tensor<'a>>,
    sum: Option<Tensor<'a>>,
    logp: Option<Tensor<'a>>,
    lse: Option<Tensor<'a>>,
    best: Option<Tensor<'a>>,
    logits: Option<Tensor<'a>>,
    dx: Option<Tensor<'a>>,
    dw: Option<Tensor<'a>>,
    sizes: Sizes,
}

fn run(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let (x, w) = (cx.input(0), cx.input(1));
    // SAFETY: targets are an i32 input, which nothing writes during the launch.
    let target = unsafe { cx.input(2).i32s() };
    let vocabulary = w.dims[0];
    if let Some((row, t)) = target.iter().enumerate().find(|(_, t)| **t < -1 || **t >= vocabulary as i32) {
        return Err(format!(
            "row {row} has target {t}; targets are -1 or below the vocabulary of {vocabulary}"
        ));
    }
    let sizes = Sizes::new(x.dims[0], vocabulary, x.dims[1], x.dtype);
    let (Op::HeadLoss { cap: Cap(cap), .. }
    | Op::HeadLossGrad { cap: Cap(cap), .. }
    | Op::HeadLossTrain { cap: Cap(cap), .. }) = launch.op
    else {
        unreachable!("the rows are for head and loss")
    };
    let head = Head {
        cx,
        x,
        w,
        target,
        factor: vec![],
        cap,
        known_lse: None,
        known_logits: None,
        sum: None,
        logp: None,
        lse: None,
        best: None,
        logits: None,
        dx: None,
        dw: None,
        sizes,
    };
    match launch.op {
        Op::HeadLoss { .. } => {
            let (sum, logp, lse, best) = (cx.output(0), cx.output(1), cx.output(2), cx.output(3));
            let (factor, logits) = (floats(&cx.input(3)), cx.output(4));
            Head { factor, sum, logp, lse, best, logits, ..head }.run();
        }
        Op::HeadLossGrad { base, kept, .. } => {
            let factor = floats(&cx.input(4)).into_iter().map(|d| -d).collect();
            let (dx, dw) = (cx.output(0), cx.output(1));
            let known_logits = kept.then(|| cx.input(5));
            let head = Head { factor, known_lse: Some(cx.input(3)), known_logits, dx, dw, ..head };
            head.start_dw(base.then_some(5 + kept as usize), 1);
            head.run();
        }
        Op::HeadLossTrain { base, .. } => {
            let (sum, logp, lse) = (cx.output(0), cx.output(1), cx.output(2));
            let (dx, dw) = (cx.output(3), cx.output(4));
            let head = Head { factor: floats(&cx.input(3)), sum, logp, lse, dx, dw, ..head };
            head.start_dw(base.then_some(4), 4);
            head.run();
        }
        _ => unreachable!("the rows are for head and loss"),
    }
    Ok(())
}

/// The elements of an f32 vector.
fn floats(x: &Tensor<'_>) -> Vec<f32> {
    let mut out = vec![0.0; x.elements()];
    // SAFETY: one row of an input, which nothing writes during the launch.
    unsafe { x.rows().load(0, 0, &mut out) };
    out
}

impl Head<'_, '_> {
    /// Initialises dw with its base, or with zeros.
    fn start_dw(&self, base: Option<usize>, output: usize) {
        let Some(dw) = self.dw else { return };
        if base.is_some_and(|base| self.cx.is_in_place(base, output)) {
            return;
        }
        let (from, to) = (base.map(|base| self.cx.input(base).rows()), dw.rows());
        self.in_tasks(0..to.count, to.width, |row| {
            let mut buffer = vec![0.0; to.width];
            // SAFETY: a row belongs to one task, and the base does not overlap dw.
            unsafe {
                if let Some(from) = from {
                    from.load(row, 0, &mut buffer);
                }
                to.store(row, 0, &buffer);
            }
        });
    }

    fn run(&self) {
        // SAFETY: the only call of this launch.
        let mut scratch = unsafe { self.cx.workspace() };
        let mut take = |floats: usize| {
            let (part, rest) = std::mem::take(&mut scratch).split_at_mut(floats);
            scratch = rest;
            part
        };
        let logits = take(self.sizes.rows * self.sizes.pitch);
        let mut stats = [take(self.sizes.rows), take(self.sizes.rows), take(self.sizes.rows)];
        let widened = self.sizes.widened.map(|floats| Shared::new(take(floats)));
        let rows = self.x.dims[0];
        let mut total = 0.0_f64;
        for i in 0..rows.div_ceil(self.sizes.rows) {
            let rows = chunk(i, self.sizes.rows, rows);
            if !self.wants_every_row() && rows.clone().all(|row| !self.counts(row)) {
                self.clear_dx(&rows);
                continue;
            }
            total += self.chunk(&rows, logits, &mut stats, &widened);
        }
        if let Some(sum) = self.sum {
            // SAFETY: the tensor's only element, which only this thread writes.
            unsafe { sum.rows().store(0, 0, &[total as f32]) };
        }
    }

    /// Whether a row contributes to the sum and has a gradient.
    fn counts(&self, row: usize) -> bool {
        self.target[row] >= 0 && self.factor[row] != 0.0
    }

    fn wants_every_row(&self) -> bool {
        self.logp.is_some() || self.lse.is_some() || self.best.is_some() || self.logits.is_some()
    }

    fn wants_gradient(&self) -> bool {
        self.dx.is_some() || self.dw.is_some()
    }

    /// Processes the rows of one chunk; returns their part of the sum.
    fn chunk(
        &self,
        rows: &Range<usize>,
        logits: &mut [f32],
        [logp, lse, best]: &mut [&mut [f32]; 3],
        [wide_x, wide_dx, wide_w]: &[Shared; 3],
    ) -> f64 {
        let (count, width, vocabulary) = (rows.len(), self.x.dims[1], self.w.dims[0]);
        let (pitch, threads) = (self.sizes.pitch, self.cx.threads);
        let x = self.matrix(&self.x, rows, wide_x);
        let c = Matrix { start: logits.as_mut_ptr(), row: pitch, column: 1 };
        let blocks = if self.known_logits.is_some() { 0 } else { vocabulary.div_ceil(self.sizes.block) };
        for block in 0..blocks {
            let block = chunk(block, self.sizes.block, vocabulary);
            let w = self.matrix(&self.w, &block, wide_w);
            let c = Matrix { start: c.start.wrapping_add(block.start), ..c };
            // SAFETY: the chunk's rows of x, a block of w and its columns of the logits; only the logits are written.
            unsafe { multiply([count, block.len(), width], c, false, x, transposed(w), threads) };
        }

        let all = Shared::new(logits);
        let (logp_of, lse_of, best_of) = (Shared::new(logp), Shared::new(lse), Shared::new(best));
        self.in_tasks(0..count, 8 * vocabulary, |i| {
            // SAFETY: row i of the logits and of the statistics belongs to one task.
            let (row, logp, lse, best) = unsafe {
                let row = all.slice(i * pitch..i * pitch + vocabulary);
                (row, logp_of.slice(i..i + 1), lse_of.slice(i..i + 1), best_of.slice(i..i + 1))
            };
            // SAFETY: a row of an input, which nothing writes during the launch, or of an output, which belongs to one task.
            unsafe {
                if let Some(known) = &self.known_logits {
                    known.rows().load(rows.start + i, 0, row);
                }
                if let Some(to) = &self.logits {
                    to.rows().store(rows.start + i, 0, row);
                }
            }
            self.row(rows.start + i, row, [&mut logp[0], &mut lse[0], &mut best[0]]);
        });
        // SAFETY: the statistics of the chunk's rows go to their places; no task is running.
        unsafe {
            if let Some(to) = &self.logp {
                to.rows().store(0, rows.start, &logp[..count]);
            }
            if let Some(to) = &self.lse {
                to.rows().store(0, rows.start, &lse[..count]);
            }
            if let Some(to) = &self.best {
                to.rows().store(0, rows.start, &best[..count]);
            }
        }

        if let Some(dx) = &self.dx {
            let is_direct = dx.dtype == DType::F32;
            let to =
                if is_direct { self.matrix(dx, rows, wide_dx) } else { dense(wide_dx, count * width, width) };
            for block in 0..vocabulary.div_ceil(self.sizes.block) {
                let block = chunk(block, self.sizes.block, vocabulary);
                let w = self.matrix(&self.w, &block, wide_w);
                let c = Matrix { start: c.start.wrapping_add(block.start), ..c };
                // SAFETY: as above; the chunk's rows of dx, or scratch for them, are written.
                unsafe { multiply([count, width, block.len()], to, block.start > 0, c, w, threads) };
            }
            if !is_direct {
                self.in_tasks(0..count, width, |i| {
                    // SAFETY: row i of scratch and of dx belongs to one task.
                    unsafe {
                        let from = wide_dx.slice(i * width..(i + 1) * width);
                        dx.rows().store(rows.start + i, 0, from);
                    }
                });
            }
        }
        if let Some(dw) = &self.dw {
            let to = Matrix { start: dw.at(0).cast(), row: dw.strides[0], column: 1 };
            // SAFETY: dw is f32 with rows of `width`, apart from x and the logits.
            unsafe { multiply([vocabulary, width, count], to, true, transposed(c), x, threads) };
        }
        let weighted = |i: usize| self.factor[rows.start + i] as f64 * logp[i] as f64;
        -(0..count).filter(|&i| self.counts(rows.start + i)).map(weighted).sum::<f64>()
    }

    /// Computes one row's statistics, and replaces its logits by their gradient if that is requested.
    fn row(&self, row: usize, logits: &mut [f32], [logp, lse, best]: [&mut f32; 3]) {
        let counts = self.counts(row);
        let target = usize::try_from(self.target[row]).ok();
        if !counts && !self.wants_every_row() {
            (*logp, *lse, *best) = (0.0, 0.0, 0.0);
            return logits.fill(0.0);
        }
        let factor = self.factor[row];
        // The derivative of the cap at each logit.
        let slopes = self.cap.map(|cap| {
            let mut slopes = vec![0.0; logits.len()];
            soft_cap(cap, logits, &mut slopes);
            slopes
        });
        if let Some(known) = &self.known_lse {
            // SAFETY: an element of an f32 input, which nothing writes during the launch.
            let known = unsafe { *known.at(row * known.strides[0]).cast::<f32>() };
            exponentials(logits, known);
            multiply_by(logits, factor);
        } else {
            let chosen = target.map(|t| logits[t]);
            let top = peak(logits);
            let is_kept = counts && self.wants_gradient();
            let total = if is_kept { exponentials(logits, top) } else { exponential_sum(logits, top) };
            *lse = top + total.ln();
            *best = top - *lse;
            *logp = chosen.map_or(0.0, |chosen| chosen - *lse);
            if !self.wants_gradient() {
                return;
            }
            if !counts {
                return logits.fill(0.0);
            }
            multiply_by(logits, factor / total);
        }
        logits[target.expect("a row that counts has a target")] -= factor;
        if let Some(slopes) = slopes {
            logits.iter_mut().zip(slopes).for_each(|(d, slope)| *d *= slope);
        }
    }

    fn clear_dx(&self, rows: &Range<usize>) {
        let Some(dx) = &self.dx else { return };
        self.in_tasks(rows.clone(), self.x.dims[1], |row| {
            // SAFETY: a row of dx belongs to one task.
            unsafe { dx.rows().store(row, 0, &vec![0.0; self.x.dims[1]]) };
        });
    }

    /// Rows of a tensor as f32: in place, or widened into scratch.
    fn matrix(&self, of: &Tensor<'_>, rows: &Range<usize>, scratch: &Shared) -> Matrix {
        let (pitch, width) = (of.strides[0], of.dims[1]);
        if of.dtype == DType::F32 {
            return Matrix { start: of.at(rows.start * pitch).cast(), row: pitch, column: 1 };
        }
        self.in_tasks(0..rows.len(), width, |i| {
            // SAFETY: row i of scratch belongs to one task, and nothing writes the tensor.
            unsafe { of.rows().load(rows.start + i, 0, scratch.slice(i * width..(i + 1) * width)) };
        });
        dense(scratch, rows.len() * width, width)
    }

    /// Runs `each` for rows on all cores, in tasks of about 8192 elements of work.
    fn in_tasks(&self, rows: Range<usize>, work: usize, each: impl Fn(usize) + Sync + Send) {
        let per_task = (8192 / work.max(1)).max(1);
        self.cx.parallel(rows.len().div_ceil(per_task), 8 * per_task * work, |task| {
            chunk(task, per_task, rows.len()).for_each(|i| each(rows.start + i));
        });
    }
}

/// Scratch as rows without gaps.
fn dense(scratch: &Shared, elements: usize, width: usize) -> Matrix {
    // SAFETY: only the address is kept; no task uses the scratch now.
    let start = unsafe { scratch.slice(0..elements) }.as_mut_ptr();
    Matrix { start, row: width, column: 1 }
}

fn transposed(x: Matrix) -> Matrix {
    Matrix { row: x.column, column: x.row, ..x }
}

vectorised! {
    fn peak(x: &[f32]) -> f32 {
        math::max(x)
    }

    /// Replaces x by e^(x - shift); returns the sum.
    fn exponentials(x: &mut [f32], shift: f32) -> f32 {
        let mut sums = [0.0; LANES];
        for x in x.chunks_mut(LANES) {
            for (sum, x) in sums.iter_mut().zip(x) {
                *x = math::exp(*x - shift);
                *sum += *x;
            }
        }
        math::sum_lanes(sums)
    }

    /// The sum of e^(x - shift); leaves x unchanged.
    fn exponential_sum(x: &[f32], shift: f32) -> f32 {
        let mut sums = [0.0; LANES];
        for x in x.chunks(LANES) {
            for (sum, x) in sums.iter_mut().zip(x) {
                *sum += math::exp(*x - shift);
            }
        }
        math::sum_lanes(sums)
    }

    /// Replaces x by cap tanh(x / cap) and writes the derivatives.
    fn soft_cap(cap: f32, x: &mut [f32], slopes: &mut [f32]) {
        for (x, slope) in x.iter_mut().zip(slopes) {
            let t = math::tanh(*x / cap);
            *x = cap * t;
            *slope = 1.0 - t * t;
        }
    }

    fn multiply_by(x: &mut [f32], factor: f32) {
        x.iter_mut().for_each(|x| *x *= factor);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::kernels::attention::trial::{
        LaunchVariant, TestInput, assert_near, expected, launched, workspace,
    };
    use flatout_ir::ops::product::Compute;

    const FULL: Compute = Compute::Full;
    const NAMES: [&str; 5] = ["sum", "logp", "lse", "dx", "dw"];

    #[derive(Clone, Copy)]
    struct Case {
        rows: usize,
        width: usize,
        vocabulary: usize,
        dtype: DType,
        cap: Cap,
    }

    impl Case {
        /// x, w, targets (every fifth row has none) and weights (every third is 0, one is negative).
        fn inputs(&self) -> Vec<TestInput> {
            let Case { rows, width, vocabulary, dtype, .. } = *self;
            let target = |i: usize| if i % 5 == 3 { -1 } else { (i * 7919 % vocabulary) as i32 };
            let targets: Vec<i32> = (0..rows).map(target).collect();
            vec![
                TestInput::noise(dtype, &[rows, width], 1),
                TestInput::noise(dtype, &[vocabulary, width], 2),
                TestInput::integers(&targets),
                TestInput::new(DType::F32, &[rows], |i| if i == 4 { -0.5 } else { (i % 3) as f64 * 0.75 }),
            ]
        }

        fn base(&self) -> TestInput {
            TestInput::noise(DType::F32, &[self.vocabulary, self.width], 3)
        }

        fn train_inputs(&self, base: bool) -> Vec<TestInput> {
            self.inputs().into_iter().chain(base.then(|| self.base())).collect()
        }

        fn grad_inputs(&self, base: bool) -> Vec<TestInput> {
            let lse = expected(&Op::HeadLoss { compute: FULL, cap: self.cap }, &self.inputs()).swap_remove(2);
            let mut ins = self.inputs();
            ins[3] = TestInput::new(DType::F32, &[self.rows], |i| lse[i]);
            ins.push(TestInput::noise(DType::F32, &[self.rows], 5).with_rows(0.0, |row| row % 4 == 1));
            ins.extend(base.then(|| self.base()));
            ins
        }

        fn compare(&self, op: Op, ins: &[TestInput], names: &[&str], variant: LaunchVariant<'_>) {
            // Only dx is rounded to bf16, which alone is 1.7e-3. The rest is f32 whatever the inputs' type, so it is compared
            // with the mathematics of the same numbers in f32.
            let bound = |name: &str| if self.dtype == DType::BF16 && name == "dx" { 3e-3 } else { 2e-5 };
            let wide: Vec<TestInput> = ins.iter().map(TestInput::widened).collect();
            let want = expected(&op, &wide);
            let got = launched(&op, ins, 2, variant).unwrap();
            for ((name, want), got) in names.iter().zip(&want).zip(&got) {
                let Some(got) = got else { continue };
                let Case { rows, width, vocabulary, dtype, .. } = self;
                let what = format!("{name} of {op:?}, {rows} rows, {vocabulary} x {width}, {}", dtype.name());
                assert_near(got, want, bound(name), &what);
            }
        }
    }

    fn cases() -> Vec<Case> {
        let case = |rows, width, vocabulary, dtype| Case { rows, width, vocabulary, dtype, cap: Cap::NONE };
        vec![
            case(1, 1, 1, DType::F32),
            case(7, 5, 3, DType::F32),
            case(70, 33, 129, DType::F32),
            // Several chunks, and in bf16 several blocks of the head.
            case(1100, 3, 17, DType::F32),
            case(90, 5, 1500, DType::BF16),
            case(1100, 4, 9, DType::BF16),
            Case { cap: Cap(Some(0.7)), ..case(70, 33, 129, DType::F32) },
            Case { cap: Cap(Some(0.4)), ..case(90, 5, 1500, DType::BF16) },
        ]
    }

    #[test]
    fn all_three_operations_match_the_mathematics() {
        for case in cases() {
            let variant = LaunchVariant::default();
            case.compare(
                Op::HeadLoss { compute: FULL, cap: case.cap },
                &case.inputs(),
                &["sum", "logp", "lse", "best"],
                variant,
            );
            for base in [false, true] {
                case.compare(
                    Op::HeadLossGrad { base, kept: false, compute: FULL, cap: case.cap },
                    &case.grad_inputs(base),
                    &NAMES[3..],
                    variant,
                );
                case.compare(
                    Op::HeadLossTrain { base, compute: FULL, cap: case.cap },
                    &case.train_inputs(base),
                    &NAMES,
                    variant,
                );
            }
        }
    }

    #[test]
    fn dw_is_added_in_place_and_unread_outputs_are_left_out() {
        for case in cases() {
            let op = Op::HeadLossTrain { base: true, compute: FULL, cap: case.cap };
            for unread in [&[][..], &[1, 2], &[0, 1, 2], &[3], &[1, 4], &[1, 2, 3, 4]] {
                let in_place = (!unread.contains(&4)).then_some((4, 4));
                case.compare(
                    op.clone(),
                    &case.train_inputs(true),
                    &NAMES,
                    LaunchVariant { unread, in_place },
                );
            }
            let variant = LaunchVariant { unread: &[0], in_place: Some((5, 1)) };
            case.compare(
                Op::HeadLossGrad { base: true, kept: false, compute: FULL, cap: case.cap },
                &case.grad_inputs(true),
                &NAMES[3..],
                variant,
            );
        }
    }

    /// Rows of weight 0 cost nothing if only the sum is needed, whatever their logits, even NaN.
    #[test]
    fn chunks_that_do_not_count_are_skipped() {
        let case = Case { rows: 3000, width: 3, vocabulary: 11, dtype: DType::F32, cap: Cap::NONE };
        let chunk = Sizes::new(case.rows, case.vocabulary, case.width, case.dtype).rows;
        assert!(chunk * 2 < case.rows, "the case has at least three chunks");
        let is_off = |row: usize| (chunk..2 * chunk).contains(&row);
        let mut ins = case.train_inputs(false);
        ins[3] = ins[3].with_rows(0.0, is_off);
        let op = Op::HeadLossTrain { base: false, compute: FULL, cap: case.cap };
        let want = expected(&op, &ins);
        ins[0] = ins[0].with_rows(f64::NAN, is_off);
        let got = launched(&op, &ins, 2, LaunchVariant { unread: &[1, 2], in_place: None }).unwrap();
        for out in [0, 3, 4] {
            assert_near(got[out].as_ref().unwrap(), &want[out], 2e-5, NAMES[out]);
        }
        ins[3] = ins[3].with_rows(0.0, |_| true);
        let got = launched(&op, &ins, 2, LaunchVariant { unread: &[1, 2], in_place: None }).unwrap();
        for out in [0, 3, 4] {
            assert!(
                got[out].as_ref().unwrap().iter().all(|x| *x == 0.0),
                "nothing counts: {} is 0",
                NAMES[out]
            );
        }
    }

    #[test]
    fn bits_do_not_depend_on_threads() {
        for (rows, width, vocabulary, dtype) in
            [(700, 48, 300, DType::F32), (1500, 16, 65, DType::F32), (200, 24, 1100, DType::BF16)]
        {
            let case = Case { rows, width, vocabulary, dtype, cap: Cap::NONE };
            let op = Op::HeadLossTrain { base: true, compute: FULL, cap: case.cap };
            let bits = |threads: usize| -> Vec<u64> {
                let outs =
                    launched(&op, &case.train_inputs(true), threads, LaunchVariant::default()).unwrap();
                outs.into_iter().flatten().flatten().map(f64::to_bits).collect()
            };
            let one = bits(1);
            assert!(
                [2, 5].into_iter().all(|threads| bits(threads) == one),
                "{rows} rows, {vocabulary} x {width}"
            );
        }
    }

    #[test]
    fn workspace_holds_the_logits_of_one_chunk() {
        let scratch = |rows: usize| {
            let zeros = |dims: &[usize]| TestInput::new(DType::F32, dims, |_| 0.0);
            let ins =
                [zeros(&[rows, 8]), zeros(&[32768, 8]), TestInput::integers(&vec![0; rows]), zeros(&[rows])];
            workspace(&Op::HeadLossTrain { base: false, compute: FULL, cap: Cap::NONE }, &ins, 16)
        };
        assert_eq!(scratch(16384), scratch(1024), "more rows are more chunks");
        assert!(scratch(16384) < 33 << 20);
    }

    #[test]
    fn a_target_outside_the_vocabulary_is_refused_with_a_message() {
        let case = Case { rows: 4, width: 2, vocabulary: 5, dtype: DType::F32, cap: Cap::NONE };
        for target in [5, -2] {
            let mut ins = case.inputs();
            ins[2] = TestInput::integers(&[0, 1, target, 2]);
            let error =
                launched(&Op::HeadLoss { compute: FULL, cap: case.cap }, &ins, 1, LaunchVariant::default())
                    .unwrap_err();
            assert_eq!(
                error,
                format!("row 2 has target {target}; targets are -1 or below the vocabulary of 5")
            );
        }
    }
}
