//! Elementwise functions and fused regions of them, tile by tile.
//!
//! A tile's intermediates stay in the L1 cache, so each of the region's inputs and outputs crosses memory once.
//!
//! A launch is compiled to a list of steps over registers of `TILE` floats. An input that is contiguous f32 is read from the
//! arena directly unless an output overlaps it; an output that is contiguous f32 is written there by its last step. Every value
//! is rounded to its node's type, so a region gives the same bits as its nodes run separately. The same holds for its sums over
//! rows: a task then takes as many rows as a piece of such a sum has, and pieces are added as in `reduce`.

use flatout_ir::ops::elementwise::Elementwise as E;
use flatout_ir::region;
use flatout_ir::target::{KernelRow, Layout, Shapes};
use flatout_ir::types::{DType, bf16_to_f32};
use flatout_ir::{Graph, Launch, Op, OpKind, Value, View, fp8};

use crate::cpu::Kernel;
use crate::cpu::context::Context;
use crate::cpu::kernels::reductions::reduce::{self, Shared, sum_rows};
use crate::cpu::math::{self, vectorised};
use crate::cpu::tensor::{Tensor, load, round_bf16, store};
use crate::launch::{body_of, parts_of};
use crate::rows::{EVERY_TYPE, kernel_row};

pub const KERNELS: &[Kernel] = &[
    Kernel { row: row("map", OpKind::Map), run },
    Kernel { row: row("region", OpKind::Region), run },
    Kernel { row: row("bundle", OpKind::Bundle), run: run_bundle },
];

const fn row(name: &'static str, op: OpKind) -> KernelRow {
    KernelRow { workspace, ..kernel_row(name, op, EVERY_TYPE, Layout::Any) }
}

/// Bytes for the pieces of every sum over rows, one sum after another.
fn workspace(shapes: &Shapes<'_>) -> usize {
    let Op::Region { body } = &shapes.node.op else { return 0 };
    let pieces = |o: usize| reduce::pieces_across(body.ty(region::value(body, o)).rows());
    region::sums(body).map(|o| pieces(o) * shapes.outs[o].elements() * 4).sum()
}

/// Elements per register: 4 KiB, so that eight of them fit the L1 cache.
const TILE: usize = 1024;

/// The source of a step's argument.
#[derive(Clone, Copy, Debug, PartialEq)]
enum From {
    Input(usize),
    Register(usize),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum To {
    Register(usize),
    Output(usize),
}

#[derive(Debug)]
struct Step {
    f: E,
    /// Type of the arguments.
    dtype: DType,
    /// Type of the value.
    out: DType,
    args: Vec<From>,
    to: To,
}

#[derive(Debug)]
struct Program {
    steps: Vec<Step>,
    registers: usize,
    /// Values that are stored, or added to a sum, after the steps: (source, output).
    stores: Vec<(From, usize)>,
}

/// Compiles the steps for the requested outputs; `direct[o]` tells whether a step may write output `o` in the arena.
fn compile(body: &Graph, wanted: &[bool], direct: &[bool]) -> Program {
    let mut last_use = vec![None; body.nodes.len()];
    let made = |o: usize| region::value(body, o).node.0 as usize;
    for o in (0..body.results.len()).filter(|o| wanted[*o]) {
        last_use[made(o)] = Some(body.nodes.len() + o);
    }
    for (i, node) in body.nodes.iter().enumerate().rev() {
        if last_use[i].is_some() {
            for arg in &node.ins {
                last_use[arg.node.0 as usize].get_or_insert(i);
            }
        }
    }
    // An output is written directly by its step if nothing else needs the value.
    let output_of = |i: usize| {
        let mut results = (0..body.results.len()).filter(|&o| wanted[o] && made(o) == i);
        let first = results.next()?;
        let is_used = body.nodes.iter().enumerate().any(|(j, n)| last_use[j].is_some() && uses(n, i));
        (results.next().is_none() && !is_used && direct[first]).then_some(first)
    };
    let mut program = Program { steps: vec![], registers: 0, stores: vec![] };
    let mut free: Vec<usize> = vec![];
    let mut place: Vec<Option<From>> = vec![None; body.nodes.len()];
    for (i, node) in body.nodes.iter().enumerate() {
        if last_use[i].is_none() {
            continue;
        }
        let Op::Map { f } = node.op else {
            let Op::Read { slot } = node.op else { unreachable!("a region holds reads and maps") };
            place[i] = Some(From::Input(slot.0 as usize));
            continue;
        };
        let args: Vec<From> =
            node.ins.iter().map(|v| place[v.node.0 as usize].expect("arguments come first")).collect();
        let to = match output_of(i) {
            Some(o) => To::Output(o),
            None => {
                let r = free.pop().unwrap_or_else(|| {
                    program.registers += 1;
                    program.registers - 1
                });
                place[i] = Some(From::Register(r));
                To::Register(r)
            }
        };
        let ty = |v: Value| body.ty(v).dtype;
        program.steps.push(Step { f, dtype: ty(node.ins[0]), out: node.outs[0].dtype, args, to });
        let mut dying: Vec<usize> = node.ins.iter().map(|v| v.node.0 as usize).collect();
        dying.sort_unstable();
        dying.dedup();
        for d in dying.into_iter().filter(|d| last_use[*d] == Some(i)) {
            if let Some(From::Register(r)) = place[d] {
                free.push(r);
            }
        }
    }
    for o in (0..body.results.len()).filter(|o| wanted[*o]) {
        if let Some(from) = place[made(o)] {
            program.stores.push((from, o));
        }
    }
    program
}

fn uses(node: &flatout_ir::Node, i: usize) -> bool {
    node.ins.iter().any(|v| v.node.0 as usize == i)
}

/// The axes of all operands, merged where all have compatible strides: (extent, stride of each operand), outermost first.
pub(crate) fn common_axes(views: &[&View]) -> Vec<(usize, Vec<usize>)> {
    let mut axes: Vec<(usize, Vec<usize>)> = vec![];
    let dims = &views[0].dims;
    for axis in (0..dims.len()).rev().filter(|&a| dims[a] != 1) {
        let steps: Vec<usize> = views.iter().map(|v| v.strides[axis]).collect();
        if let Some((n, inner)) = axes.last_mut()
            && inner.iter().zip(&steps).all(|(inner, step)| *step == *inner * *n)
        {
            *n *= dims[axis];
        } else {
            axes.push((dims[axis], steps));
        }
    }
    if axes.is_empty() {
        axes.push((1, vec![1; views.len()]));
    }
    axes.reverse();
    axes
}

/// Splits the elements of all operands into tiles: whole rows of the merged last axis, or a part of a long one.
pub(crate) struct Tiles {
    axes: Vec<(usize, Vec<usize>)>,
    width: usize,
    rows: usize,
    rows_a_tile: usize,
    tiles_a_row: usize,
}

/// `rows` runs of `width` elements, each with its own offset.
pub(crate) struct Tile {
    first_row: usize,
    rows: usize,
    column: usize,
    pub width: usize,
}

impl Tile {
    pub(crate) fn len(&self) -> usize {
        self.rows * self.width
    }
}

impl Tiles {
    /// Maximum elements per tile.
    pub(crate) const LEN: usize = TILE;

    pub(crate) fn new(views: &[&View]) -> Self {
        let axes = common_axes(views);
        let width = axes[axes.len() - 1].0;
        let rows = axes[..axes.len() - 1].iter().map(|(n, _)| n).product();
        let (rows_a_tile, tiles_a_row) =
            if width >= TILE { (1, width.div_ceil(TILE)) } else { (TILE / width.max(1), 1) };
        Tiles { axes, width, rows, rows_a_tile, tiles_a_row }
    }

    /// Tiles of operands with two axes that are never merged, so that consecutive tiles add up to `reduce::GROUP` rows.
    fn by_rows(views: &[&View]) -> Self {
        let axis = |a: usize| (views[0].dims[a], views.iter().map(|v| v.strides[a]).collect());
        let (axes, width) = (vec![axis(0), axis(1)], views[0].dims[1]);
        let rows_a_tile =
            (1..=reduce::GROUP).rfind(|n| reduce::GROUP.is_multiple_of(*n) && n * width <= TILE).unwrap_or(1);
        Tiles { axes, width, rows: views[0].dims[0], rows_a_tile, tiles_a_row: width.div_ceil(TILE) }
    }

    pub(crate) fn count(&self) -> usize {
        if self.width == 0 { 0 } else { self.rows.div_ceil(self.rows_a_tile) * self.tiles_a_row }
    }

    pub(crate) fn tile(&self, i: usize) -> Tile {
        let first_row = i / self.tiles_a_row * self.rows_a_tile;
        let column = i % self.tiles_a_row * TILE;
        let rows = self.rows_a_tile.min(self.rows - first_row);
        Tile { first_row, rows, column, width: (self.width - column).min(TILE) }
    }

    /// Row-major index of a tile's first element; the others follow it.
    pub(crate) fn first(&self, tile: &Tile) -> usize {
        tile.first_row * self.width + tile.column
    }

    /// Stride between the elements of a run, for one operand.
    pub(crate) fn step(&self, operand: usize) -> usize {
        self.axes[self.axes.len() - 1].1[operand]
    }

    /// Offset of run `row` of a tile, in elements.
    fn offset(&self, operand: usize, tile: &Tile, row: usize) -> usize {
        let mut rest = tile.first_row + row;
        let mut offset = tile.column * self.step(operand);
        for (n, steps) in self.axes[..self.axes.len() - 1].iter().rev() {
            offset += rest % n * steps[operand];
            rest /= n;
        }
        offset
    }

    /// The tile's address, if it is f32 and contiguous.
    pub(crate) fn piece(&self, operand: usize, tensor: &Tensor<'_>, tile: &Tile) -> Option<*mut f32> {
        let in_one_piece = tile.rows == 1 && (self.step(operand) == 1 || tile.width == 1);
        (in_one_piece && tensor.dtype == DType::F32).then(|| tensor.at(self.offset(operand, tile, 0)).cast())
    }

    /// Reads a tile; i32 as its bits.
    ///
    /// # Safety
    /// The tensors' contract.
    pub(crate) unsafe fn load(&self, operand: usize, tensor: &Tensor<'_>, tile: &Tile, to: &mut [f32]) {
        // The bits of an i32 are kept unchanged in the f32 registers.
        let dtype = if tensor.dtype == DType::I32 { DType::F32 } else { tensor.dtype };
        let step = self.step(operand);
        for row in 0..tile.rows {
            let at = tensor.at(self.offset(operand, tile, row));
            let to = &mut to[row * tile.width..(row + 1) * tile.width];
            // SAFETY: elements of the tensor.
            unsafe {
                if step == 0 {
                    load(dtype, at, 1, &mut to[..1]);
                    let x = to[0];
                    to.fill(x);
                } else {
                    load(dtype, at, step, to);
                }
            }
        }
    }

    /// Writes a tile; i32 from its bits.
    ///
    /// # Safety
    /// The tensors' contract.
    pub(crate) unsafe fn store(&self, operand: usize, tensor: &Tensor<'_>, tile: &Tile, values: &[f32]) {
        let dtype = if tensor.dtype == DType::I32 { DType::F32 } else { tensor.dtype };
        for row in 0..tile.rows {
            let at = tensor.at(self.offset(operand, tile, row));
            let values = &values[row * tile.width..(row + 1) * tile.width];
            // SAFETY: elements of the tensor.
            unsafe { store(dtype, at, self.step(operand), values) }
        }
    }
}

/// Runs one region after another.
fn run_bundle(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    parts_of(launch).iter().try_for_each(|part| run(part, &cx.part(part)))
}

fn run(launch: &Launch, cx: &Context<'_>) -> Result<(), String> {
    let body = body_of(launch);
    let ins = launch.ins.len();
    let inputs: Vec<Tensor<'_>> = (0..ins).map(|i| cx.input(i)).collect();
    let outputs: Vec<Option<Tensor<'_>>> = (0..launch.outs.len()).map(|o| cx.output(o)).collect();
    if outputs.iter().all(Option::is_none) {
        return Ok(());
    }
    let is_sum = |o: usize| region::summed(&body, o).is_some();
    let sums: Vec<usize> = (0..launch.outs.len()).filter(|o| is_sum(*o) && outputs[*o].is_some()).collect();
    let stored: Vec<usize> =
        (0..launch.outs.len()).filter(|o| !is_sum(*o) && outputs[*o].is_some()).collect();
    let views: Vec<&View> = launch.ins.iter().chain(stored.iter().flat_map(|o| &launch.outs[*o])).collect();
    let tiles = if sums.is_empty() { Tiles::new(&views) } else { Tiles::by_rows(&views) };
    // The operand number of each output among `views`.
    let operand = |o: usize| ins + stored.iter().position(|s| *s == o).unwrap_or(0);
    let operand_of: Vec<usize> = (0..launch.outs.len()).map(operand).collect();

    let wanted: Vec<bool> = outputs.iter().map(Option::is_some).collect();
    let in_one_piece = |operand: usize| tiles.rows_a_tile == 1 && tiles.step(operand) == 1;
    let is_direct = |o: usize| stored.contains(&o) && in_one_piece(operand_of[o]);
    let direct: Vec<bool> = (0..outputs.len())
        .map(|o| outputs[o].is_some_and(|t| t.dtype == DType::F32) && is_direct(o))
        .collect();
    let program = compile(&body, &wanted, &direct);
    let is_written: Vec<bool> = (0..ins).map(|i| (0..outputs.len()).any(|o| cx.is_in_place(i, o))).collect();

    let bytes_a_tile = views.iter().map(|v| v.dtype.bytes()).sum::<usize>() * TILE;
    let tiles_a_task = match sums.is_empty() {
        true => (32 << 10) / bytes_a_tile.max(1) + 1,
        false => reduce::GROUP / tiles.rows_a_tile * tiles.tiles_a_row,
    };
    let count = tiles.count();
    let (width, pieces) = (tiles.width, count.div_ceil(tiles_a_task.max(1)));
    // SAFETY: the only call of this launch.
    let partial = unsafe { cx.workspace() };
    let all = Shared::new(partial);
    // The range that holds all pieces of a sum.
    let place = |sum: usize| sum * pieces * width..(sum + 1) * pieces * width;
    cx.parallel(count.div_ceil(tiles_a_task), bytes_a_tile * tiles_a_task, |task| {
        let mut registers = vec![vec![0.0_f32; TILE]; program.registers];
        let mut loaded = vec![vec![]; ins];
        let piece = |sum: usize| place(sum).start + task * width..place(sum).start + (task + 1) * width;
        // SAFETY: the task's pieces are exclusive, and each slice's lifetime ends before the next begins.
        (0..sums.len()).for_each(|sum| unsafe { all.slice(piece(sum)).fill(0.0) });
        for t in crate::cpu::context::chunk(task, tiles_a_task, count) {
            let tile = tiles.tile(t);
            let n = tile.len();
            // SAFETY: tiles are disjoint and belong to one task. Inputs that an output overlaps are copied before anything is
            // written, so no slice of them is alive; outputs are written through one slice at a time.
            unsafe {
                let mut args: Vec<&[f32]> = Vec::with_capacity(ins);
                for (i, (input, buffer)) in inputs.iter().zip(&mut loaded).enumerate() {
                    let piece = if is_written[i] { None } else { tiles.piece(i, input, &tile) };
                    args.push(match piece {
                        Some(at) => std::slice::from_raw_parts(at, n),
                        None => {
                            buffer.resize(TILE, 0.0);
                            tiles.load(i, input, &tile, &mut buffer[..n]);
                            &buffer[..n]
                        }
                    });
                }
                for step in &program.steps {
                    match step.to {
                        To::Register(r) => {
                            let mut to = std::mem::take(&mut registers[r]);
                            apply(step, &args, &registers, &mut to[..n]);
                            registers[r] = to;
                        }
                        To::Output(o) => {
                            let output = outputs[o].as_ref().expect("a step writes outputs that exist");
                            let at = tiles.piece(operand_of[o], output, &tile).expect("it is in one piece");
                            apply(step, &args, &registers, std::slice::from_raw_parts_mut(at, n));
                        }
                    }
                }
                for (from, o) in &program.stores {
                    let values = argument(*from, &args, &registers, n);
                    if let Some(sum) = sums.iter().position(|s| s == o) {
                        let columns = &mut all.slice(piece(sum))[tile.column..tile.column + tile.width];
                        values.chunks_exact(tile.width).for_each(|row| reduce::add_across(row, columns));
                        continue;
                    }
                    let output = outputs[*o].as_ref().expect("stored outputs exist");
                    tiles.store(operand_of[*o], output, &tile, values);
                }
            }
        }
    });
    for (i, o) in sums.iter().enumerate().filter(|_| width > 0) {
        let output = outputs[*o].as_ref().expect("sums that are wanted exist");
        sum_rows(&partial[place(i)], width, output);
    }
    Ok(())
}

fn argument<'a>(from: From, args: &[&'a [f32]], registers: &'a [Vec<f32>], n: usize) -> &'a [f32] {
    match from {
        From::Input(i) => args[i],
        From::Register(r) => &registers[r][..n],
    }
}

fn apply(step: &Step, args: &[&[f32]], registers: &[Vec<f32>], to: &mut [f32]) {
    let n = to.len();
    let arg = |i: usize| argument(step.args[i], args, registers, n);
    if step.dtype == DType::I32 || step.out == DType::I32 {
        return apply_i32(step, &(0..step.args.len()).map(arg).collect::<Vec<_>>(), to);
    }
    match step.args.len() {
        1 => apply_1(step.f, arg(0), to),
        2 => apply_2(step.f, arg(0), arg(1), to),
        _ => select(arg(0), arg(1), arg(2), to),
    }
    if step.out == DType::BF16 {
        round_all(to);
    } else if step.out.is_fp8() {
        to.iter_mut().for_each(|x| *x = step.out.round(*x as f64) as f32);
    }
}

/// With integers the definition itself is evaluated: exact, and too rare to optimise.
fn apply_i32(step: &Step, args: &[&[f32]], to: &mut [f32]) {
    let read = |x: f32| if step.dtype == DType::I32 { x.to_bits() as i32 as f64 } else { x as f64 };
    let mut x = [0.0; 3];
    for (i, to) in to.iter_mut().enumerate() {
        args.iter().enumerate().for_each(|(a, arg)| x[a] = read(arg[i]));
        let y = step.f.eval(&x[..args.len()]);
        *to = match step.out {
            DType::I32 => f32::from_bits(y as i32 as u32),
            dtype => dtype.round(y) as f32,
        };
    }
}

#[inline(always)]
fn each(x: &[f32], y: &mut [f32], f: impl Fn(f32) -> f32) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y = f(*x));
}

#[inline(always)]
fn each_2(a: &[f32], b: &[f32], y: &mut [f32], f: impl Fn(f32, f32) -> f32) {
    y.iter_mut().zip(a).zip(b).for_each(|((y, a), b)| *y = f(*a, *b));
}

#[inline(always)]
fn truth(is: bool) -> f32 {
    if is { 1.0 } else { 0.0 }
}

vectorised! {
    fn apply_1(f: E, x: &[f32], y: &mut [f32]) {
        match f {
            E::Neg => each(x, y, |x| -x),
            E::Exp => each(x, y, math::exp),
            E::Log => each(x, y, math::log),
            E::Sqrt => each(x, y, |x| x.sqrt()),
            E::Rsqrt => each(x, y, |x| 1.0 / x.sqrt()),
            E::Recip => each(x, y, |x| 1.0 / x),
            E::Square => each(x, y, |x| x * x),
            E::Sin => each(x, y, f32::sin),
            E::Cos => each(x, y, f32::cos),
            E::Tanh => each(x, y, math::tanh),
            E::Relu => each(x, y, |x| x.max(0.0)),
            E::Step => each(x, y, |x| truth(x > 0.0)),
            E::Silu => each(x, y, math::silu),
            E::SiluSlope => each(x, y, math::silu_slope),
            E::Gelu => each(x, y, math::gelu),
            E::GeluSlope => each(x, y, math::gelu_slope),
            E::GeluExact => each(x, y, math::gelu_exact),
            E::GeluExactSlope => each(x, y, math::gelu_exact_slope),
            E::Finite => each(x, y, |x| truth(x.is_finite())),
            E::Fp8Scale(dtype) => each(x, y, |x| fp8::scale(dtype, x)),
            E::Cast(_) | E::StopGradient => y.copy_from_slice(x),
            E::Scale(by) => {
                let by = by as f32;
                each(x, y, |x| x * by)
            }
            E::Offset(by) => {
                let by = by as f32;
                each(x, y, |x| x + by)
            }
            // Evaluates the definition; a vector form has not paid so far.
            f => each(x, y, |x| f.eval(&[f64::from(x)]) as f32),
        }
    }

    fn apply_2(f: E, a: &[f32], b: &[f32], y: &mut [f32]) {
        match f {
            E::Add => each_2(a, b, y, |a, b| a + b),
            E::Sub => each_2(a, b, y, |a, b| a - b),
            E::Mul => each_2(a, b, y, |a, b| a * b),
            E::Div => each_2(a, b, y, |a, b| a / b),
            E::Max => each_2(a, b, y, |a, b| a.max(b)),
            E::Min => each_2(a, b, y, |a, b| a.min(b)),
            E::Less => each_2(a, b, y, |a, b| truth(a < b)),
            E::LessEqual => each_2(a, b, y, |a, b| truth(a <= b)),
            E::Equal => each_2(a, b, y, |a, b| truth(a == b)),
            f => each_2(a, b, y, |a, b| f.eval(&[f64::from(a), f64::from(b)]) as f32),
        }
    }

    fn select(condition: &[f32], a: &[f32], b: &[f32], y: &mut [f32]) {
        for (i, y) in y.iter_mut().enumerate() {
            *y = if condition[i] != 0.0 { a[i] } else { b[i] };
        }
    }

    fn round_all(x: &mut [f32]) {
        x.iter_mut().for_each(|x| *x = bf16_to_f32(round_bf16(*x)));
    }
}
