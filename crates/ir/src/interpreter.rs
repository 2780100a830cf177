//! Runs plans launch by launch with the oracle's mathematics, to test passes, views, lifetimes and offsets without relying on
//! any kernel.

use std::collections::HashMap;
use std::ops::Range;

use crate::access::Access;
use crate::block8::{e4m4_from_f32, e4m4_to_f32};
use crate::fp8::{e4m3_from_f32, e4m3_to_f32, e5m2_from_f32, e5m2_to_f32};
use crate::graph::{Class, Graph, Init, Slot, SlotId};
use crate::nf4;
use crate::ops::Op;
use crate::oracle;
use crate::passes::types::base::Codes;
use crate::passes::types::fp8_base::{self, Waiting};
use crate::passes::types::nf4::{MAP, magnitude_paths};
use crate::pieces::TensorRange;
use crate::plan::{Launch, PlanSet, Queue, Role, View};
use crate::types::{DType, TensorType, amax, bf16_from_f32, bf16_to_f32};

/// The plans, and an arena of bytes for every rank of their mesh. Ranks run in lockstep: all finish a launch before any begins
/// the next.
pub struct Interpreter {
    pub plans: PlanSet,
    arenas: Vec<Vec<u8>>,
    /// Whether exchanges run only when a launch waits for them, rather than at their place in the plan.
    is_late: bool,
    /// For every rank, the weights of incomplete E4M3 groups.
    waiting: Vec<Waiting<Vec<f32>>>,
}

impl Interpreter {
    /// Arenas start as NaN, so that reads before writes show, and slots as zeros.
    pub fn new(plans: PlanSet) -> Self {
        let arenas = vec![vec![0xff; plans.arena_bytes]; plans.mesh.ranks()];
        let waiting = arenas.iter().map(|_| Waiting::default()).collect();
        let mut this = Interpreter { plans, arenas, is_late: false, waiting };
        let slots: Vec<View> = this.plans.slots.iter().map(|s| s.view.clone()).collect();
        let zeros = |view: &View| vec![0.0; view.elements()];
        this.arenas
            .iter_mut()
            .for_each(|arena| slots.iter().for_each(|view| write(arena, view, &zeros(view))));
        this
    }

    /// Like `new`, with every exchange at the last moment that a join allows, and NaN in its outputs until then.
    pub fn late(plans: PlanSet) -> Self {
        Interpreter { is_late: true, ..Interpreter::new(plans) }
    }

    pub fn set(&mut self, path: &str, values: &[f64]) {
        (0..self.arenas.len()).for_each(|rank| self.set_at(rank, path, values));
    }

    pub fn set_at(&mut self, rank: usize, path: &str, values: &[f64]) {
        let view = self.slot(path);
        write(&mut self.arenas[rank], &view, values);
    }

    /// A slot of the first rank.
    pub fn get(&self, path: &str) -> Vec<f64> {
        self.get_at(0, path)
    }

    pub fn get_at(&self, rank: usize, path: &str) -> Vec<f64> {
        read(&self.arenas[rank], &self.slot(path))
    }

    /// Sets a parameter or a saved tensor on every rank that holds some of it.
    pub fn set_tensor(&mut self, path: &str, values: &[f64]) {
        for rank in 0..self.arenas.len() {
            for piece in self.plans.held(rank).into_iter().filter(|piece| piece.path == path) {
                match piece.codes() {
                    Some(Codes::Nf4) => self.set_nf4(rank, &piece, values),
                    Some(Codes::Fp8) => self.set_fp8(rank, piece, values),
                    None => {
                        let view = self.view_of(&piece);
                        write(&mut self.arenas[rank], &view, &values[piece.range]);
                    }
                }
            }
        }
    }

    /// A parameter or a saved tensor, assembled from the pieces of all ranks, which must agree where they overlap.
    pub fn tensor(&self, path: &str) -> Vec<f64> {
        let mut whole: Vec<Option<f64>> = vec![];
        for (rank, arena) in self.arenas.iter().enumerate() {
            for piece in self.plans.held(rank).into_iter().filter(|piece| piece.path == path) {
                whole.resize(piece.ty.elements(), None);
                let values = match piece.codes() {
                    Some(Codes::Nf4) => self.nf4(arena, &piece),
                    Some(Codes::Fp8) => self.fp8(arena, &piece),
                    None => read(arena, &self.view_of(&piece)),
                };
                for (known, x) in whole[piece.range.clone()].iter_mut().zip(values) {
                    assert!(
                        known.is_none_or(|known| known == x),
                        "ranks have another `{path}` than rank {rank}"
                    );
                    *known = Some(x);
                }
            }
        }
        whole.into_iter().map(|x| x.unwrap_or_else(|| panic!("no rank has all of `{path}`"))).collect()
    }

    /// Quantises a weight that is stored in NF4.
    fn set_nf4(&mut self, rank: usize, piece: &TensorRange, values: &[f64]) {
        let values: Vec<f32> = values.iter().map(|x| *x as f32).collect();
        let (mut codes, mut absmax) = (vec![0; values.len() / 2], vec![0.0; nf4::blocks(values.len())]);
        nf4::quantize(&values, &mut codes, &mut absmax);
        let small = nf4::Magnitudes::of(&absmax);
        let [absmax, nested, offset] = magnitude_paths(&piece.path);
        let bytes = |bytes: Vec<u8>| bytes.into_iter().map(f64::from).collect::<Vec<f64>>();
        let wide = |values: &[f32]| values.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
        self.set_at(rank, &piece.slot, &bytes(codes));
        self.set_at(rank, &absmax, &bytes(small.codes));
        self.set_at(rank, &nested, &wide(&small.nested));
        self.set_at(rank, &offset, &[f64::from(small.offset)]);
        self.set_at(rank, MAP, &wide(&nf4::dynamic_map()));
    }

    /// Quantises a group of weights that is stored in E4M3, once all of them were given.
    fn set_fp8(&mut self, rank: usize, piece: TensorRange, values: &[f64]) {
        let values: Vec<f32> = values.iter().map(|x| *x as f32).collect();
        let Some((path, group)) = self.waiting[rank].add(&self.plans, piece, values) else { return };
        let scale = fp8_base::scale(group.iter().map(|(_, values)| amax(values)));
        self.set_at(rank, &path, &[f64::from(scale)]);
        for (piece, values) in group {
            let quotients: Vec<f64> = values.into_iter().map(|x| f64::from(x / scale)).collect();
            self.set_at(rank, &piece.slot, &quotients);
        }
    }

    /// The values of a weight that is stored in E4M3.
    fn fp8(&self, arena: &[u8], piece: &TensorRange) -> Vec<f64> {
        let scale = read(arena, &self.slot(&fp8_base::scale_of(&self.plans, &piece.path)))[0];
        read(arena, &self.slot(&piece.slot)).into_iter().map(|x| x * scale).collect()
    }

    /// The values of a weight that is stored in NF4.
    fn nf4(&self, arena: &[u8], piece: &TensorRange) -> Vec<f64> {
        let [absmax, nested, offset] =
            magnitude_paths(&piece.path).map(|path| read(arena, &self.slot(&path)));
        let codes: Vec<u8> =
            read(arena, &self.slot(&piece.slot)).into_iter().map(|code| code as u8).collect();
        let map = read(arena, &self.slot(MAP));
        let magnitude = |block: usize| {
            let value = map[absmax[block] as usize] as f32;
            nf4::magnitude(value, nested[block / nf4::NESTED] as f32, offset[0] as f32)
        };
        let mut values = vec![0.0; piece.ty.elements()];
        nf4::dequantize(&codes, magnitude, f64::from, 0, &mut values);
        values
    }

    fn view_of(&self, piece: &TensorRange) -> View {
        let View { offset, dtype, .. } = self.slot(&piece.slot);
        let ty = TensorType::new(dtype, [piece.elements()]);
        View::dense(offset + piece.at * dtype.bytes(), &ty)
    }

    /// A result of the first rank.
    pub fn result(&self, role: Role, name: &str) -> Vec<f64> {
        self.result_at(0, role, name)
    }

    pub fn result_at(&self, rank: usize, role: Role, name: &str) -> Vec<f64> {
        let view = self.plans.plan(role).and_then(|p| p.result(name)).expect("a result of this name");
        read(&self.arenas[rank], view)
    }

    fn slot(&self, path: &str) -> View {
        self.plans.slot(path).unwrap_or_else(|| panic!("no slot `{path}`")).view.clone()
    }

    pub fn run(&mut self, role: Role) {
        let launches = self.plans.plan(role).expect("a plan of this role").launches.clone();
        let mut waiting: Vec<usize> = vec![];
        for (at, launch) in launches.iter().enumerate() {
            if self.is_late && launch.queue == Queue::Wire {
                waiting.push(at);
                self.poison(launch, waiting.iter().map(|at| &launches[*at]));
                continue;
            }
            if let Some(joined) = launch.joins {
                let due = waiting.iter().take_while(|at| **at <= joined).count();
                waiting.drain(..due).for_each(|at| self.launch(&launches[at]));
            }
            self.launch(launch);
        }
        waiting.into_iter().for_each(|at| self.launch(&launches[at]));
    }

    /// Makes the outputs of an exchange NaN, except for bytes that it or another pending exchange has yet to read.
    fn poison<'a>(&mut self, launch: &Launch, waiting: impl Iterator<Item = &'a Launch>) {
        let unread: Vec<_> = waiting.flat_map(|launch| Access::of(launch).reads).collect();
        for (_, bytes) in Access::of(launch).writes {
            let mut free = vec![bytes];
            for (_, read) in &unread {
                let around = |bytes: Range<usize>| {
                    let (before, behind) =
                        (bytes.start..bytes.end.min(read.start), bytes.start.max(read.end)..bytes.end);
                    [before, behind].into_iter().filter(|left| !left.is_empty())
                };
                free = free.into_iter().flat_map(around).collect();
            }
            for arena in &mut self.arenas {
                free.iter().for_each(|bytes| arena[bytes.clone()].fill(0xff));
            }
        }
    }

    fn launch(&mut self, launch: &Launch) {
        let mut g = Graph::default();
        let mut values: Vec<oracle::Values> = vec![HashMap::new(); self.arenas.len()];
        let mut ins = vec![];
        for (i, view) in launch.ins.iter().enumerate() {
            let (path, ty) = (format!("in{i}"), TensorType::new(view.dtype, view.dims.clone()));
            for (own, arena) in values.iter_mut().zip(&self.arenas) {
                own.insert(path.clone(), read(arena, view));
            }
            g.add_slot(Slot { path: path.clone(), ty, class: Class::Input, init: Init::Zeros, part: None });
            ins.push(g.add(Op::Read { slot: SlotId(i as u32) }, vec![], &path));
        }
        let node = g.push_keyed(launch.op.clone(), ins, &launch.path, launch.key);
        for (i, out) in launch.outs.iter().enumerate().filter(|(_, out)| out.is_some()) {
            let ty = &g.node(node).outs[i];
            let view = out.as_ref().expect("filtered");
            assert_eq!((ty.dtype, &ty.dims), (view.dtype, &view.dims), "{}: output {i}", launch.path);
            g.results.push((i.to_string(), node.out(i as u8)));
        }
        let evaluated = oracle::run_world(&g, &self.plans.mesh, &values);
        for (arena, oracle::Evaluated { results, .. }) in self.arenas.iter_mut().zip(evaluated) {
            // A kernel may leave anything in its workspace.
            if let Some(scratch) = &launch.workspace {
                write(arena, scratch, &vec![f64::NAN; scratch.elements()]);
            }
            for (name, values) in results {
                let out = &launch.outs[name.parse::<usize>().expect("an index")];
                write(arena, out.as_ref().expect("a wanted output"), &values);
            }
        }
    }
}

fn read(arena: &[u8], view: &View) -> Vec<f64> {
    let bytes = |at: usize, n: usize| &arena[at..at + n];
    let value = |at: usize| match view.dtype {
        DType::F64 => f64::from_le_bytes(bytes(at, 8).try_into().expect("8 bytes")),
        DType::F32 => f32::from_le_bytes(bytes(at, 4).try_into().expect("4 bytes")) as f64,
        DType::I32 => i32::from_le_bytes(bytes(at, 4).try_into().expect("4 bytes")) as f64,
        DType::BF16 => bf16_to_f32(u16::from_le_bytes(bytes(at, 2).try_into().expect("2 bytes"))) as f64,
        DType::U8 => arena[at] as f64,
        DType::E4M3 => e4m3_to_f32(arena[at]) as f64,
        DType::E5M2 => e5m2_to_f32(arena[at]) as f64,
        DType::E4M4 => e4m4_to_f32(arena[at]) as f64,
    };
    offsets(view).into_iter().map(value).collect()
}

fn write(arena: &mut [u8], view: &View, values: &[f64]) {
    assert_eq!(values.len(), view.elements(), "as many values as the view has elements");
    for (at, x) in offsets(view).into_iter().zip(values) {
        match view.dtype {
            DType::F64 => arena[at..at + 8].copy_from_slice(&x.to_le_bytes()),
            DType::F32 => arena[at..at + 4].copy_from_slice(&(*x as f32).to_le_bytes()),
            DType::I32 => arena[at..at + 4].copy_from_slice(&(*x as i32).to_le_bytes()),
            DType::U8 => arena[at] = *x as u8,
            DType::E4M3 => arena[at] = e4m3_from_f32(*x as f32),
            DType::E5M2 => arena[at] = e5m2_from_f32(*x as f32),
            DType::E4M4 => arena[at] = e4m4_from_f32(*x as f32),
            DType::BF16 => arena[at..at + 2].copy_from_slice(&bf16_from_f32(*x as f32).to_le_bytes()),
        }
    }
}

/// The byte offset of every element, in row-major order.
fn offsets(view: &View) -> Vec<usize> {
    let mut offsets = vec![view.offset];
    for (dim, stride) in view.dims.iter().zip(&view.strides) {
        let step = stride * view.dtype.bytes();
        offsets = offsets.iter().flat_map(|at| (0..*dim).map(move |i| at + i * step)).collect();
    }
    offsets
}
