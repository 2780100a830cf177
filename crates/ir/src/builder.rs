//! The builder of models, gradient rules and expansions: tensors with methods.
//!
//! A shape error is a mistake of the caller's code, so it panics at the caller's line and names the path.

use std::cell::RefCell;
use std::ops::{Add, Mul, Neg, Sub};

use crate::attr::Attr;
use crate::graph::{Class, Graph, Init, Node, Slot, SlotId, Value};
use crate::ops::Op;
use crate::ops::attention::{Attend, Masking};
use crate::ops::cap::Cap;
use crate::ops::elementwise::Elementwise as E;
use crate::ops::gated::Act;
use crate::ops::linear_attention::LinearAttend;
use crate::ops::norm::{NormSpec, NormWeight};
use crate::ops::product::{self, Compute};
use crate::ops::reduce::Fold;
use crate::ops::rope::RopeSpec;
use crate::types::{DType, TensorType};

/// A graph under construction, and the scope that prefixes the paths of new nodes.
#[derive(Default)]
pub struct Builder {
    graph: RefCell<Graph>,
    scope: RefCell<String>,
}

/// A value of the graph under construction.
#[derive(Clone, Copy)]
pub struct Tensor<'g> {
    pub b: &'g Builder,
    pub v: Value,
}

impl Builder {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn from_graph(graph: Graph) -> Self {
        Builder { graph: RefCell::new(graph), scope: RefCell::default() }
    }

    pub fn finish(self) -> Graph {
        self.graph.into_inner()
    }

    pub fn with_graph<R>(&self, read: impl FnOnce(&Graph) -> R) -> R {
        read(&self.graph.borrow())
    }

    pub fn edit<R>(&self, edit: impl FnOnce(&mut Graph) -> R) -> R {
        edit(&mut self.graph.borrow_mut())
    }

    /// Prefixes the paths of all that `inside` builds with `name`.
    pub fn scope<R>(&self, name: &str, inside: impl FnOnce() -> R) -> R {
        let outer = self.scope.borrow().clone();
        *self.scope.borrow_mut() =
            if outer.is_empty() { name.to_string() } else { format!("{outer}.{name}") };
        let result = inside();
        *self.scope.borrow_mut() = outer;
        result
    }

    /// Runs `inside` with another path as the scope: gradients carry the path of the operation that they differentiate.
    pub fn at_path<R>(&self, path: &str, inside: impl FnOnce() -> R) -> R {
        let outer = self.scope.replace(path.to_string());
        let result = inside();
        self.scope.replace(outer);
        result
    }

    fn path(&self, name: &str) -> String {
        let scope = self.scope.borrow();
        if scope.is_empty() { name.to_string() } else { format!("{scope}.{name}") }
    }

    /// A slot under the current scope.
    #[track_caller]
    pub fn slot(&self, name: &str, class: Class, dtype: DType, dims: &[usize], init: Init) -> SlotId {
        let path = self.path(name);
        let ty = TensorType::new(dtype, dims);
        // Not through `edit`: a closure would hide the caller's line.
        self.graph.borrow_mut().add_slot(Slot { path, ty, class, init, part: None })
    }

    #[track_caller]
    pub fn read(&self, slot: SlotId) -> Tensor<'_> {
        let path = self.with_graph(|g| g.slot(slot).path.clone());
        Tensor { b: self, v: self.edit(|g| g.add(Op::Read { slot }, vec![], &path)) }
    }

    /// A trained parameter of the current scope.
    #[track_caller]
    pub fn param(&self, name: &str, dims: &[usize], init: Init) -> Tensor<'_> {
        self.read(self.slot(name, Class::Weight, DType::F32, dims, init))
    }

    /// A value the host writes before each run; inputs are named without scope.
    #[track_caller]
    pub fn input(&self, name: &str, dtype: DType, dims: &[usize]) -> Tensor<'_> {
        let ty = TensorType::new(dtype, dims);
        let slot = Slot { path: name.into(), ty, class: Class::Input, init: Init::Zeros, part: None };
        let slot = self.graph.borrow_mut().add_slot(slot);
        self.read(slot)
    }

    #[track_caller]
    pub fn fill(&self, value: f64, dtype: DType, dims: &[usize]) -> Tensor<'_> {
        self.op(Op::Fill { value, dtype, dims: dims.into() }, &[])
    }

    #[track_caller]
    pub fn iota(&self, dtype: DType, dims: &[usize], axis: usize) -> Tensor<'_> {
        self.op(Op::Iota { dtype, dims: dims.into(), axis }, &[])
    }

    #[track_caller]
    pub fn concat<'g>(&'g self, parts: &[Tensor<'g>], axis: usize) -> Tensor<'g> {
        self.op(Op::Concat { axis }, parts)
    }

    pub fn result(&self, name: &str, value: Tensor<'_>) {
        self.edit(|g| g.results.push((name.into(), value.v)));
    }

    pub fn write(&self, slot: SlotId, value: Tensor<'_>) {
        self.edit(|g| g.writes.push((slot, value.v)));
    }

    /// The first output of a new node.
    #[track_caller]
    pub fn op<'g>(&'g self, op: Op, ins: &[Tensor<'g>]) -> Tensor<'g> {
        self.ops(op, ins)[0]
    }

    /// All outputs of a new node.
    #[track_caller]
    pub fn ops<'g>(&'g self, op: Op, ins: &[Tensor<'g>]) -> Vec<Tensor<'g>> {
        let path = self.scope.borrow().clone();
        let ins = ins.iter().map(|t| t.v).collect();
        let node = self.graph.borrow_mut().push(op, ins, &path);
        self.outputs(node)
    }

    /// Builds nodes that draw no random numbers, without advancing the keys, such as inputs of only some variants of a model:
    /// later nodes have the same keys, and draw the same numbers, in every variant.
    pub fn uncounted<T>(&self, make: impl FnOnce() -> T) -> T {
        let next_key = self.with_graph(|g| g.next_key);
        let made = make();
        self.edit(|g| g.next_key = next_key);
        made
    }

    /// Builds a part that only some variants of a model have, with keys from `first`, which must lie above all others: later
    /// nodes have the same keys in every variant.
    pub fn counted_from<T>(&self, first: u64, make: impl FnOnce() -> T) -> T {
        self.uncounted(|| {
            self.edit(|g| g.next_key = first);
            make()
        })
    }

    /// The first output of a new node under an explicit key, whose random numbers it draws.
    #[track_caller]
    pub fn op_keyed<'g>(&'g self, op: Op, ins: &[Tensor<'g>], key: u64) -> Tensor<'g> {
        self.ops_keyed(op, ins, key)[0]
    }

    /// All outputs of a new node under an explicit key.
    pub fn ops_keyed<'g>(&'g self, op: Op, ins: &[Tensor<'g>], key: u64) -> Vec<Tensor<'g>> {
        let path = self.scope.borrow().clone();
        let ins = ins.iter().map(|t| t.v).collect();
        let node = self.graph.borrow_mut().push_keyed(op, ins, &path, key);
        self.outputs(node)
    }

    pub fn outputs(&self, node: crate::graph::NodeId) -> Vec<Tensor<'_>> {
        let count = self.with_graph(|g| g.node(node).outs.len());
        (0..count as u8).map(|out| Tensor { b: self, v: node.out(out) }).collect()
    }

    pub fn tensor(&self, v: Value) -> Tensor<'_> {
        Tensor { b: self, v }
    }
}

#[allow(clippy::should_implement_trait, reason = "`neg`, `add` and the like also exist as operators")]
impl<'g> Tensor<'g> {
    pub fn ty(self) -> TensorType {
        self.b.with_graph(|g| g.ty(self.v).clone())
    }
    pub fn dims(self) -> Vec<usize> {
        self.ty().dims
    }
    pub fn dtype(self) -> DType {
        self.b.with_graph(|g| g.ty(self.v).dtype)
    }
    pub fn source(self) -> Node {
        self.b.with_graph(|g| g.node(self.v.node).clone())
    }

    #[track_caller]
    pub fn map(self, f: E) -> Tensor<'g> {
        self.b.op(Op::Map { f }, &[self])
    }

    /// Applies a function of two tensors; axes of extent 1 are broadcast.
    #[track_caller]
    pub fn zip(self, f: E, other: Tensor<'g>) -> Tensor<'g> {
        let (a, b) = (self.dims(), other.dims());
        assert!(
            a.len() == b.len(),
            "{}: {} of {a:?} and {b:?}: give both the same number of axes",
            self.b.scope.borrow(),
            f.to_text()
        );
        let dims: Vec<usize> = a.iter().zip(&b).map(|(&x, &y)| x.max(y)).collect();
        self.b.op(Op::Map { f }, &[self.broadcast(&dims), other.broadcast(&dims)])
    }

    #[track_caller]
    pub fn cast(self, dtype: DType) -> Tensor<'g> {
        if self.dtype() == dtype { self } else { self.map(E::Cast(dtype)) }
    }
    #[track_caller]
    pub fn scale(self, by: f64) -> Tensor<'g> {
        self.map(E::Scale(by))
    }
    #[track_caller]
    pub fn offset(self, by: f64) -> Tensor<'g> {
        self.map(E::Offset(by))
    }
    #[track_caller]
    pub fn square(self) -> Tensor<'g> {
        self.map(E::Square)
    }
    #[track_caller]
    pub fn exp(self) -> Tensor<'g> {
        self.map(E::Exp)
    }
    #[track_caller]
    pub fn log(self) -> Tensor<'g> {
        self.map(E::Log)
    }
    #[track_caller]
    pub fn sqrt(self) -> Tensor<'g> {
        self.map(E::Sqrt)
    }
    #[track_caller]
    pub fn rsqrt(self) -> Tensor<'g> {
        self.map(E::Rsqrt)
    }
    #[track_caller]
    pub fn recip(self) -> Tensor<'g> {
        self.map(E::Recip)
    }
    #[track_caller]
    pub fn div(self, other: Tensor<'g>) -> Tensor<'g> {
        self.zip(E::Div, other)
    }
    /// 1 where `self < other`, else 0.
    #[track_caller]
    pub fn less(self, other: Tensor<'g>) -> Tensor<'g> {
        self.zip(E::Less, other)
    }
    #[track_caller]
    pub fn less_equal(self, other: Tensor<'g>) -> Tensor<'g> {
        self.zip(E::LessEqual, other)
    }
    #[track_caller]
    pub fn equal(self, other: Tensor<'g>) -> Tensor<'g> {
        self.zip(E::Equal, other)
    }
    /// `yes` where this condition is not 0, `no` elsewhere.
    #[track_caller]
    pub fn select(self, yes: Tensor<'g>, no: Tensor<'g>) -> Tensor<'g> {
        let dims = yes.dims();
        self.b.op(Op::Map { f: E::Select }, &[self.broadcast(&dims), yes, no.broadcast(&dims)])
    }

    #[track_caller]
    pub fn reshape(self, dims: &[usize]) -> Tensor<'g> {
        if self.dims() == dims { self } else { self.b.op(Op::Reshape { dims: dims.into() }, &[self]) }
    }
    #[track_caller]
    pub fn transpose(self, perm: &[usize]) -> Tensor<'g> {
        self.b.op(Op::Transpose { perm: perm.into() }, &[self])
    }
    #[track_caller]
    pub fn slice(self, axis: usize, start: usize, len: usize) -> Tensor<'g> {
        self.b.op(Op::Slice { axis, start, len }, &[self])
    }
    #[track_caller]
    pub fn broadcast(self, dims: &[usize]) -> Tensor<'g> {
        if self.dims() == dims { self } else { self.b.op(Op::Broadcast { dims: dims.into() }, &[self]) }
    }
    /// Folds `axis` to extent 1.
    #[track_caller]
    pub fn reduce(self, axis: usize, by: Fold) -> Tensor<'g> {
        self.b.op(Op::Reduce { axis, by }, &[self])
    }
    #[track_caller]
    pub fn sum(self, axis: usize) -> Tensor<'g> {
        self.reduce(axis, Fold::Sum)
    }
    #[track_caller]
    pub fn mean(self, axis: usize) -> Tensor<'g> {
        let n = self.dims()[axis];
        self.sum(axis).scale(1.0 / n as f64)
    }

    /// `self [.., M, K] * other [.., K, N]`; `ta` and `tb` say that an operand is stored transposed.
    #[track_caller]
    pub fn product(self, other: Tensor<'g>, ta: bool, tb: bool) -> Tensor<'g> {
        self.b.op(product::plain(ta, tb, self.dtype(), Compute::Full), &[self, other])
    }
    /// `x [.., in]` times the transposed weight `[out, in]`.
    #[track_caller]
    pub fn linear(self, weight: Tensor<'g>) -> Tensor<'g> {
        self.product(weight, false, true)
    }

    #[track_caller]
    pub fn rms_norm(self, eps: f32, weight: NormWeight, w: Option<Tensor<'g>>) -> Tensor<'g> {
        self.norm(NormSpec::rms(eps, weight), w, None)
    }
    #[track_caller]
    pub fn norm(self, spec: NormSpec, w: Option<Tensor<'g>>, bias: Option<Tensor<'g>>) -> Tensor<'g> {
        let ins: Vec<_> = [Some(self), w, bias].into_iter().flatten().collect();
        self.b.op(spec.op(false), &ins)
    }
    /// Rotates pairs of `self [T, H, K]` by `positions i32 [axes, T]`.
    #[track_caller]
    pub fn rope(self, positions: Tensor<'g>, spec: &RopeSpec) -> Tensor<'g> {
        self.b.op(spec.op(), &[self, positions])
    }
    #[track_caller]
    pub fn activate(self, act: Act) -> Tensor<'g> {
        self.map(act.elementwise())
    }
    #[track_caller]
    pub fn dropout(self, p: f32, rng: Tensor<'g>, rows: Tensor<'g>) -> Tensor<'g> {
        if p == 0.0 { self } else { self.b.op(Op::Dropout { p }, &[self, rng, rows]) }
    }
    #[track_caller]
    pub fn gather(self, index: Tensor<'g>) -> Tensor<'g> {
        self.b.op(Op::Gather {}, &[self, index])
    }
    /// Crops of the images of `self` [N, H, W, C], given as `parts` i32 [B, 6], resized to one size.
    #[track_caller]
    pub fn resample(self, parts: Tensor<'g>, [height, width]: [usize; 2]) -> Tensor<'g> {
        self.b.op(Op::Resample { height, width }, &[self, parts])
    }
    /// A token sampled from every row of `self` [S, V], with its log-probability, by parameters `numbers` i32 [S, 6] and
    /// `shares` f32 [S, 2].
    #[track_caller]
    pub fn sample(self, numbers: Tensor<'g>, shares: Tensor<'g>) -> Tensor<'g> {
        self.b.op(Op::Sample {}, &[self, numbers, shares])
    }
    #[track_caller]
    pub fn row_scatter(self, rows: Tensor<'g>, index: Tensor<'g>) -> Tensor<'g> {
        self.b.op(Op::RowScatter {}, &[self, rows, index])
    }
    /// Attention of queries `[Tq, H, K]` over keys and values `[Tk, HK, K]`.
    #[track_caller]
    pub fn attention(
        self,
        k: Tensor<'g>,
        v: Tensor<'g>,
        attend: &Attend,
        masking: &Masking<'g>,
    ) -> Tensor<'g> {
        self.attention_and_lse(k, v, attend, masking).0
    }
    /// Attention, and the logarithm of each row's sum of exponentials, with which `ops::attention::merge` combines results.
    #[track_caller]
    pub fn attention_and_lse(
        self,
        k: Tensor<'g>,
        v: Tensor<'g>,
        attend: &Attend,
        masking: &Masking<'g>,
    ) -> (Tensor<'g>, Tensor<'g>) {
        let ins: Vec<_> = [self, k, v].into_iter().chain(masking.tensors()).collect();
        let outs = self.b.ops(attend.op(), &ins);
        (outs[0], outs[1])
    }
    /// Attention without softmax of queries `[Tq, H, N]` over keys `[Tk, HK, N]`, or over themselves without keys, to values
    /// `[Tk, HV, D]`.
    #[track_caller]
    pub fn linear_attention(
        self,
        k: Option<Tensor<'g>>,
        v: Tensor<'g>,
        attend: &LinearAttend,
        masking: &Masking<'g>,
    ) -> Tensor<'g> {
        let ins: Vec<_> = [Some(self), k, Some(v)].into_iter().flatten().chain(masking.tensors()).collect();
        self.b.op(attend.op(), &ins)
    }
    /// The losses of targets under a head `[V, D]`.
    #[track_caller]
    pub fn head_loss(self, head: Tensor<'g>, target: Tensor<'g>, weight: Tensor<'g>) -> HeadLosses<'g> {
        self.capped_head_loss(head, target, weight, Cap::NONE)
    }
    /// `head_loss` with logits softly bounded by a cap.
    #[track_caller]
    pub fn capped_head_loss(
        self,
        head: Tensor<'g>,
        target: Tensor<'g>,
        weight: Tensor<'g>,
        cap: Cap,
    ) -> HeadLosses<'g> {
        let outs = self.b.ops(Op::HeadLoss { compute: Compute::Full, cap }, &[self, head, target, weight]);
        HeadLosses { sum: outs[0], logp: outs[1], best: outs[3] }
    }
}

/// The losses of R rows under a head.
#[derive(Clone, Copy)]
pub struct HeadLosses<'g> {
    /// The sum of weighted losses [1].
    pub sum: Tensor<'g>,
    /// The log-probability of each target [R].
    pub logp: Tensor<'g>,
    /// The largest log-probability of each row [R].
    pub best: Tensor<'g>,
}

impl<'g> Add for Tensor<'g> {
    type Output = Tensor<'g>;
    #[track_caller]
    fn add(self, other: Tensor<'g>) -> Tensor<'g> {
        self.zip(E::Add, other)
    }
}

impl<'g> Sub for Tensor<'g> {
    type Output = Tensor<'g>;
    #[track_caller]
    fn sub(self, other: Tensor<'g>) -> Tensor<'g> {
        self.zip(E::Sub, other)
    }
}

impl<'g> Mul for Tensor<'g> {
    type Output = Tensor<'g>;
    #[track_caller]
    fn mul(self, other: Tensor<'g>) -> Tensor<'g> {
        self.zip(E::Mul, other)
    }
}

impl<'g> Neg for Tensor<'g> {
    type Output = Tensor<'g>;
    #[track_caller]
    fn neg(self) -> Tensor<'g> {
        self.map(E::Neg)
    }
}
