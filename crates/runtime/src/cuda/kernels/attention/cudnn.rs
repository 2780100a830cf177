//! cuDNN's backend API: handle, descriptors, operation graphs of rank 4, and plans bound to addresses.
//!
//! Constants are those of cudnn_graph.h 9.10 to 9.21 (identical in all of them); tested with 9.14 and 9.19. Descriptors live as
//! long as the plan made from them.

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex};

use crate::cuda::context::{CudaError, Stream, Work};
use crate::cuda::driver::library::Library;

type Opaque = *mut c_void;

/// `cudnnBackendDescriptorType_t`.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
enum DescriptorType {
    Pointwise = 0,
    EngineConfig = 3,
    EngineHeuristic = 4,
    ExecutionPlan = 5,
    OperationPointwise = 13,
    OperationGraph = 15,
    VariantPack = 16,
    Tensor = 17,
    Matmul = 18,
    OperationMatmul = 19,
    Reduction = 21,
    OperationReduction = 22,
    OperationReshape = 31,
}

/// `cudnnBackendAttributeName_t`.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
enum Name {
    PointwiseMode = 0,
    PointwiseMathPrec = 1,
    PointwiseAxis = 9,
    EngineHeurMode = 200,
    EngineHeurOperationGraph = 201,
    EngineHeurResults = 202,
    ExecutionPlanHandle = 400,
    ExecutionPlanEngineConfig = 401,
    ExecutionPlanWorkspaceSize = 402,
    OperationPointwisePwDescriptor = 750,
    OperationPointwiseXDesc = 751,
    OperationPointwiseBDesc = 752,
    OperationPointwiseYDesc = 753,
    OperationPointwiseTDesc = 758,
    OperationGraphHandle = 800,
    OperationGraphOps = 801,
    TensorByteAlignment = 900,
    TensorDataType = 901,
    TensorDimensions = 902,
    TensorStrides = 903,
    TensorUniqueId = 906,
    TensorIsVirtual = 907,
    TensorIsByValue = 908,
    TensorRaggedOffsetDesc = 913,
    VariantPackUniqueIds = 1000,
    VariantPackDataPointers = 1001,
    VariantPackWorkspace = 1003,
    MatmulCompType = 1500,
    OperationMatmulADesc = 1520,
    OperationMatmulBDesc = 1521,
    OperationMatmulCDesc = 1522,
    OperationMatmulDesc = 1523,
    OperationMatmulGemmMOverrideDesc = 1525,
    OperationMatmulGemmNOverrideDesc = 1526,
    OperationMatmulGemmKOverrideDesc = 1527,
    ReductionOperator = 1600,
    ReductionCompType = 1601,
    OperationReductionXDesc = 1610,
    OperationReductionYDesc = 1611,
    OperationReductionDesc = 1612,
    OperationReshapeXDesc = 2200,
    OperationReshapeYDesc = 2201,
}

/// `cudnnBackendAttributeType_t`.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
enum Type {
    Handle = 0,
    Data = 1,
    Boolean = 2,
    Int64 = 3,
    VoidPtr = 6,
    HeurMode = 8,
    PointwiseMode = 14,
    BackendDescriptor = 15,
    ReductionOperator = 18,
}

/// `cudnnDataType_t`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(i32)]
pub(super) enum Data {
    Float = 0,
    Int32 = 4,
    Bf16 = 9,
    Int64 = 10,
    Boolean = 11,
}

/// `cudnnPointwiseMode_t`.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub(super) enum Pointwise {
    Add = 0,
    Mul = 1,
    Div = 6,
    Sub = 9,
    Exp = 13,
    Log = 15,
    Identity = 21,
    CmpGt = 302,
    CmpGe = 303,
    CmpLt = 304,
    LogicalAnd = 400,
    GenIndex = 501,
    BinarySelect = 601,
}

/// `cudnnReduceTensorOp_t`.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub(super) enum Reduce {
    Add = 0,
    Max = 3,
}

const CUDNN_HEUR_MODE_A: i32 = 3;

/// The entry points used; all but the last two return `cudnnStatus_t`.
#[derive(Clone, Copy)]
struct Entries {
    create: unsafe extern "C" fn(*mut Opaque) -> c_int,
    destroy: unsafe extern "C" fn(Opaque) -> c_int,
    set_stream: unsafe extern "C" fn(Opaque, Opaque) -> c_int,
    create_descriptor: unsafe extern "C" fn(c_int, *mut Opaque) -> c_int,
    destroy_descriptor: unsafe extern "C" fn(Opaque) -> c_int,
    set: unsafe extern "C" fn(Opaque, c_int, c_int, i64, *const c_void) -> c_int,
    get: unsafe extern "C" fn(Opaque, c_int, c_int, i64, *mut i64, *mut c_void) -> c_int,
    finalize: unsafe extern "C" fn(Opaque) -> c_int,
    execute: unsafe extern "C" fn(Opaque, Opaque, Opaque) -> c_int,
    version: unsafe extern "C" fn() -> usize,
    last_error: unsafe extern "C" fn(*mut c_char, usize),
}

impl Entries {
    fn open(library: &'static Library) -> Result<Entries, CudaError> {
        // SAFETY: the signatures are those of the header for these symbols.
        unsafe {
            Ok(Entries {
                create: library.symbol("cudnnCreate")?,
                destroy: library.symbol("cudnnDestroy")?,
                set_stream: library.symbol("cudnnSetStream")?,
                create_descriptor: library.symbol("cudnnBackendCreateDescriptor")?,
                destroy_descriptor: library.symbol("cudnnBackendDestroyDescriptor")?,
                set: library.symbol("cudnnBackendSetAttribute")?,
                get: library.symbol("cudnnBackendGetAttribute")?,
                finalize: library.symbol("cudnnBackendFinalize")?,
                execute: library.symbol("cudnnBackendExecute")?,
                version: library.symbol("cudnnGetVersion")?,
                last_error: library.symbol("cudnnGetLastErrorString")?,
            })
        }
    }

    /// Turns a status into an error with the call and the library's own message, which is precise.
    fn ok(&self, status: c_int, call: impl FnOnce() -> String) -> Result<(), CudaError> {
        if status == 0 {
            return Ok(());
        }
        let mut words = [0_u8; 2048];
        // SAFETY: writes at most as many bytes as the buffer has, zero-terminated.
        unsafe { (self.last_error)(words.as_mut_ptr().cast(), words.len()) };
        let end = words.iter().position(|b| *b == 0).unwrap_or(words.len());
        let words = String::from_utf8_lossy(&words[..end]).trim().replace('\n', " ");
        Err(CudaError::status(format!("cuDNN could not {}: {words}", call()), status))
    }

    fn descriptor(&self, kind: DescriptorType) -> Result<Descriptor, CudaError> {
        let mut raw = null_mut();
        // SAFETY: writes one handle.
        let status = unsafe { (self.create_descriptor)(kind as c_int, &mut raw) };
        self.ok(status, || format!("create {kind:?}"))?;
        Ok(Descriptor { raw, kind, entries: *self })
    }
}

struct Descriptor {
    raw: Opaque,
    kind: DescriptorType,
    entries: Entries,
}

impl Descriptor {
    fn set<T>(&self, name: Name, ty: Type, values: &[T]) -> Result<(), CudaError> {
        // SAFETY: the attribute's elements have type T, which the library copies.
        let status = unsafe {
            let count = values.len() as i64;
            (self.entries.set)(self.raw, name as c_int, ty as c_int, count, values.as_ptr().cast())
        };
        self.entries.ok(status, || format!("set {name:?} of {:?}", self.kind))
    }

    fn link(&self, name: Name, to: &Descriptor) -> Result<(), CudaError> {
        self.set(name, Type::BackendDescriptor, &[to.raw])
    }

    fn finalize(&self) -> Result<(), CudaError> {
        // SAFETY: the descriptor is alive.
        let status = unsafe { (self.entries.finalize)(self.raw) };
        self.entries.ok(status, || format!("finalize {:?}", self.kind))
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: created by `Entries::descriptor`.
        unsafe { (self.entries.destroy_descriptor)(self.raw) };
    }
}

struct Handle(Opaque);

// SAFETY: a cuDNN handle may move between threads; the lock around it prevents concurrent use.
unsafe impl Send for Handle {}

/// Plans by key, or the error with which building one failed.
type Plans = HashMap<Vec<i64>, Result<Arc<Plan>, CudaError>>;

/// The cuDNN handle and the plans built so far.
pub struct Cudnn {
    entries: Entries,
    handle: Mutex<Handle>,
    plans: Mutex<Plans>,
}

impl Cudnn {
    /// Requires a current primary context.
    pub fn open(library: &'static Library) -> Result<Cudnn, CudaError> {
        let entries = Entries::open(library)?;
        let mut handle = null_mut();
        // SAFETY: writes one handle.
        entries.ok(unsafe { (entries.create)(&mut handle) }, || "create its handle".into())?;
        Ok(Cudnn { entries, handle: Mutex::new(Handle(handle)), plans: Mutex::default() })
    }

    /// Version: 91900 for 9.19.0.
    pub fn version(&self) -> usize {
        // SAFETY: takes no argument.
        unsafe { (self.entries.version)() }
    }

    fn handle(&self) -> Result<std::sync::MutexGuard<'_, Handle>, CudaError> {
        self.handle.lock().map_err(|_| CudaError::new("a thread failed while it used cuDNN"))
    }

    /// The plan of a key, built by `build` on first use. A failure is cached too.
    pub(super) fn plan(
        &self,
        key: &[i64],
        build: impl FnOnce(&mut Graph) -> Result<(), CudaError>,
    ) -> Result<Arc<Plan>, CudaError> {
        let known = self.plans.lock().ok().and_then(|plans| plans.get(key).cloned());
        if let Some(plan) = known {
            return plan;
        }
        let mut graph = Graph::new(self.entries);
        let plan = build(&mut graph).and_then(|()| graph.plan(&*self.handle()?)).map(Arc::new);
        if let Ok(mut plans) = self.plans.lock() {
            plans.insert(key.to_vec(), plan.clone());
        }
        plan
    }
}

impl Drop for Cudnn {
    fn drop(&mut self) {
        if let Ok(plans) = self.plans.get_mut() {
            plans.clear();
        }
        if let Ok(handle) = self.handle.get_mut() {
            // SAFETY: created in `open`; works hold their `Cudnn`, so it is no longer in use.
            unsafe { (self.entries.destroy)(handle.0) };
        }
    }
}

pub(super) type Dims = [i64; 4];

/// Row-major strides.
pub(super) fn dense([_, b, c, d]: Dims) -> Dims {
    [b * c * d, c * d, d, 1]
}

/// Swaps the last two axes; applied to dims and strides, this is a transpose.
pub(super) fn transposed_axes([a, b, c, d]: Dims) -> Dims {
    [a, b, d, c]
}

/// Handle of a tensor of a graph.
#[derive(Clone, Copy, Debug)]
pub(super) struct T(usize);

struct Tensor {
    descriptor: Descriptor,
    dims: Dims,
    strides: Dims,
}

/// Ids below this are the caller's, for tensors in device memory.
const OWN_IDS: i64 = 1000;

/// An operation graph under construction.
pub(super) struct Graph {
    entries: Entries,
    tensors: Vec<Tensor>,
    operations: Vec<Descriptor>,
    others: Vec<Descriptor>,
    /// By-value scalars, which the library reads from host memory at every execution of a plan.
    scalars: Vec<(i64, Box<f32>)>,
}

impl Graph {
    fn new(entries: Entries) -> Graph {
        Graph { entries, tensors: vec![], operations: vec![], others: vec![], scalars: vec![] }
    }

    fn tensor(
        &mut self,
        id: i64,
        dims: Dims,
        strides: Dims,
        data: Data,
        kind: Option<Name>,
        offsets: Option<T>,
    ) -> Result<T, CudaError> {
        let t = self.entries.descriptor(DescriptorType::Tensor)?;
        t.set(Name::TensorDataType, Type::Data, &[data as i32])?;
        t.set(Name::TensorDimensions, Type::Int64, &dims)?;
        t.set(Name::TensorStrides, Type::Int64, &strides)?;
        t.set(Name::TensorUniqueId, Type::Int64, &[id])?;
        t.set(Name::TensorByteAlignment, Type::Int64, &[16_i64])?;
        if let Some(flag) = kind {
            t.set(flag, Type::Boolean, &[true])?;
        }
        if let Some(offsets) = offsets {
            t.link(Name::TensorRaggedOffsetDesc, self.at(offsets))?;
        }
        t.finalize()?;
        self.tensors.push(Tensor { descriptor: t, dims, strides });
        Ok(T(self.tensors.len() - 1))
    }

    fn own_id(&self) -> i64 {
        OWN_IDS + self.tensors.len() as i64
    }

    /// A tensor in device memory, bound to an address by its id.
    pub(super) fn real(&mut self, id: i64, dims: Dims, strides: Dims, data: Data) -> Result<T, CudaError> {
        debug_assert!(id < OWN_IDS);
        self.tensor(id, dims, strides, data, None, None)
    }

    /// A tensor in device memory whose entries along the first axis begin at `offsets`, in elements of this tensor.
    pub(super) fn ragged(
        &mut self,
        id: i64,
        dims: Dims,
        strides: Dims,
        data: Data,
        offsets: T,
    ) -> Result<T, CudaError> {
        debug_assert!(id < OWN_IDS);
        self.tensor(id, dims, strides, data, None, Some(offsets))
    }

    /// A virtual tensor, which is never written to memory.
    pub(super) fn hidden(&mut self, dims: Dims, strides: Dims, data: Data) -> Result<T, CudaError> {
        self.tensor(self.own_id(), dims, strides, data, Some(Name::TensorIsVirtual), None)
    }

    /// A constant. Of rank 4 like every tensor, because rank 1 is refused.
    pub(super) fn scalar(&mut self, value: f32) -> Result<T, CudaError> {
        let id = self.own_id();
        self.scalars.push((id, Box::new(value)));
        self.tensor(id, [1; 4], [1; 4], Data::Float, Some(Name::TensorIsByValue), None)
    }

    fn at(&self, t: T) -> &Descriptor {
        &self.tensors[t.0].descriptor
    }

    fn like(&mut self, x: T, data: Data) -> Result<T, CudaError> {
        let (dims, strides) = (self.tensors[x.0].dims, self.tensors[x.0].strides);
        self.hidden(dims, strides, data)
    }

    /// y = mode(x, b), or mode(x) without b; with `select`, x where `select` holds and b elsewhere.
    #[allow(clippy::too_many_arguments, reason = "the descriptor's attributes")]
    fn pointwise_full(
        &mut self,
        mode: Pointwise,
        math: Data,
        axis: Option<i64>,
        x: T,
        b: Option<T>,
        select: Option<T>,
        y: T,
    ) -> Result<(), CudaError> {
        let p = self.entries.descriptor(DescriptorType::Pointwise)?;
        p.set(Name::PointwiseMode, Type::PointwiseMode, &[mode as i32])?;
        p.set(Name::PointwiseMathPrec, Type::Data, &[math as i32])?;
        if let Some(axis) = axis {
            p.set(Name::PointwiseAxis, Type::Int64, &[axis])?;
        }
        p.finalize()?;
        let o = self.entries.descriptor(DescriptorType::OperationPointwise)?;
        o.link(Name::OperationPointwisePwDescriptor, &p)?;
        o.link(Name::OperationPointwiseXDesc, self.at(x))?;
        o.link(Name::OperationPointwiseYDesc, self.at(y))?;
        if let Some(b) = b {
            o.link(Name::OperationPointwiseBDesc, self.at(b))?;
        }
        if let Some(select) = select {
            o.link(Name::OperationPointwiseTDesc, self.at(select))?;
        }
        o.finalize()?;
        self.others.push(p);
        self.operations.push(o);
        Ok(())
    }

    /// y = mode(x, b), or mode(x) without b, into a given tensor.
    pub(super) fn pointwise(&mut self, mode: Pointwise, x: T, b: Option<T>, y: T) -> Result<(), CudaError> {
        self.pointwise_full(mode, Data::Float, None, x, b, None, y)
    }

    /// mode(x), shaped like x.
    pub(super) fn unary(&mut self, mode: Pointwise, x: T) -> Result<T, CudaError> {
        let y = self.like(x, Data::Float)?;
        self.pointwise(mode, x, None, y)?;
        Ok(y)
    }

    /// mode(x, b), shaped like x; b is broadcast along axes of extent 1.
    pub(super) fn binary(&mut self, mode: Pointwise, x: T, b: T, data: Data) -> Result<T, CudaError> {
        let y = self.like(x, data)?;
        self.pointwise(mode, x, Some(b), y)?;
        Ok(y)
    }

    /// The index along an axis, shaped like x. Computed in type `math`, which comparisons with it need.
    pub(super) fn index(&mut self, x: T, axis: i64, math: Data) -> Result<T, CudaError> {
        let y = self.like(x, Data::Int32)?;
        self.pointwise_full(Pointwise::GenIndex, math, Some(axis), x, None, None, y)?;
        Ok(y)
    }

    pub(super) fn compare(&mut self, mode: Pointwise, x: T, b: T) -> Result<T, CudaError> {
        let y = self.like(x, Data::Boolean)?;
        self.pointwise_full(mode, Data::Boolean, None, x, Some(b), None, y)?;
        Ok(y)
    }

    /// x where `keep` holds, otherwise `other`.
    pub(super) fn select(&mut self, x: T, other: T, keep: T) -> Result<T, CudaError> {
        let y = self.like(x, Data::Float)?;
        self.pointwise_full(Pointwise::BinarySelect, Data::Float, None, x, Some(other), Some(keep), y)?;
        Ok(y)
    }

    pub(super) fn matmul(&mut self, a: T, b: T, c: T) -> Result<(), CudaError> {
        self.matmul_within(a, b, c, [None; 3])
    }

    /// A batched product in which each entry along the first axis has its own M, N and K, up to the tensors' extents.
    pub(super) fn matmul_within(
        &mut self,
        a: T,
        b: T,
        c: T,
        extents: [Option<T>; 3],
    ) -> Result<(), CudaError> {
        let m = self.entries.descriptor(DescriptorType::Matmul)?;
        m.set(Name::MatmulCompType, Type::Data, &[Data::Float as i32])?;
        m.finalize()?;
        let o = self.entries.descriptor(DescriptorType::OperationMatmul)?;
        o.link(Name::OperationMatmulADesc, self.at(a))?;
        o.link(Name::OperationMatmulBDesc, self.at(b))?;
        o.link(Name::OperationMatmulCDesc, self.at(c))?;
        o.link(Name::OperationMatmulDesc, &m)?;
        let names = [
            Name::OperationMatmulGemmMOverrideDesc,
            Name::OperationMatmulGemmNOverrideDesc,
            Name::OperationMatmulGemmKOverrideDesc,
        ];
        for (name, extent) in names.into_iter().zip(extents) {
            if let Some(extent) = extent {
                o.link(name, self.at(extent))?;
            }
        }
        o.finalize()?;
        self.others.push(m);
        self.operations.push(o);
        Ok(())
    }

    /// Reduces the axes in which y is shorter; heads are reduced in groups of neighbours.
    pub(super) fn reduce(&mut self, by: Reduce, x: T, y: T) -> Result<(), CudaError> {
        let r = self.entries.descriptor(DescriptorType::Reduction)?;
        r.set(Name::ReductionCompType, Type::Data, &[Data::Float as i32])?;
        r.set(Name::ReductionOperator, Type::ReductionOperator, &[by as i32])?;
        r.finalize()?;
        let o = self.entries.descriptor(DescriptorType::OperationReduction)?;
        o.link(Name::OperationReductionDesc, &r)?;
        o.link(Name::OperationReductionXDesc, self.at(x))?;
        o.link(Name::OperationReductionYDesc, self.at(y))?;
        o.finalize()?;
        self.others.push(r);
        self.operations.push(o);
        Ok(())
    }

    /// Transposes a virtual tensor, through the strides of y.
    pub(super) fn reshape(&mut self, x: T, y: T) -> Result<(), CudaError> {
        let o = self.entries.descriptor(DescriptorType::OperationReshape)?;
        o.link(Name::OperationReshapeXDesc, self.at(x))?;
        o.link(Name::OperationReshapeYDesc, self.at(y))?;
        o.finalize()?;
        self.operations.push(o);
        Ok(())
    }

    /// Takes the first configuration of the heuristic that can be finalised.
    fn plan(mut self, handle: &Handle) -> Result<Plan, CudaError> {
        let graph = self.entries.descriptor(DescriptorType::OperationGraph)?;
        let operations: Vec<Opaque> = self.operations.iter().map(|o| o.raw).collect();
        graph.set(Name::OperationGraphOps, Type::BackendDescriptor, &operations)?;
        graph.set(Name::OperationGraphHandle, Type::Handle, &[handle.0])?;
        graph.finalize()?;
        let heuristic = self.entries.descriptor(DescriptorType::EngineHeuristic)?;
        heuristic.link(Name::EngineHeurOperationGraph, &graph)?;
        heuristic.set(Name::EngineHeurMode, Type::HeurMode, &[CUDNN_HEUR_MODE_A])?;
        heuristic.finalize()?;

        let results = |configs: &mut [Opaque]| {
            let mut count = 0;
            let at = if configs.is_empty() { null_mut() } else { configs.as_mut_ptr().cast() };
            // SAFETY: writes the count, and fills the descriptors passed in, which the library created.
            let status = unsafe {
                let (name, ty) = (Name::EngineHeurResults as c_int, Type::BackendDescriptor as c_int);
                (self.entries.get)(heuristic.raw, name, ty, configs.len() as i64, &mut count, at)
            };
            self.entries.ok(status, || "list engine configurations".into())?;
            Ok::<usize, CudaError>(usize::try_from(count).unwrap_or(0))
        };
        let most = results(&mut [])?;
        let configs: Vec<Descriptor> = (0..most)
            .map(|_| self.entries.descriptor(DescriptorType::EngineConfig))
            .collect::<Result<_, _>>()?;
        let mut raw: Vec<Opaque> = configs.iter().map(|c| c.raw).collect();
        let found = if most > 0 { results(&mut raw)?.min(most) } else { 0 };

        let mut refusal = CudaError::new("cuDNN has no engine for this attention");
        for config in &configs[..found] {
            match self.finalized(config, handle) {
                Ok((plan, workspace_bytes)) => {
                    self.others.extend([graph, heuristic]);
                    self.others.extend(configs);
                    return Ok(Plan { plan, workspace_bytes, graph: self });
                }
                Err(error) => refusal = error,
            }
        }
        Err(refusal)
    }

    fn finalized(&self, config: &Descriptor, handle: &Handle) -> Result<(Descriptor, usize), CudaError> {
        let plan = self.entries.descriptor(DescriptorType::ExecutionPlan)?;
        plan.link(Name::ExecutionPlanEngineConfig, config)?;
        plan.set(Name::ExecutionPlanHandle, Type::Handle, &[handle.0])?;
        plan.finalize()?;
        let (mut bytes, mut count) = (0_i64, 0_i64);
        // SAFETY: writes one count and one 64-bit integer.
        let status = unsafe {
            let (name, ty) = (Name::ExecutionPlanWorkspaceSize as c_int, Type::Int64 as c_int);
            (self.entries.get)(plan.raw, name, ty, 1, &mut count, (&raw mut bytes).cast())
        };
        self.entries.ok(status, || "say its workspace".into())?;
        Ok((plan, usize::try_from(bytes).unwrap_or(0)))
    }
}

/// A graph compiled for the device.
pub(super) struct Plan {
    plan: Descriptor,
    pub(super) workspace_bytes: usize,
    /// Owns the descriptors and the scalars.
    graph: Graph,
}

// SAFETY: a plan is immutable once built, and is executed under the handle's lock.
unsafe impl Send for Plan {}
// SAFETY: as above.
unsafe impl Sync for Plan {}

impl Plan {
    /// Binds the plan to tensor addresses, by id, and to a workspace of at least `workspace_bytes`.
    pub(super) fn bind(
        self: &Arc<Self>,
        cudnn: &Arc<Cudnn>,
        tensors: &[(i64, u64)],
        workspace: u64,
    ) -> Result<Box<dyn Work>, CudaError> {
        let scalars = self.graph.scalars.iter().map(|(id, value)| (*id, (&raw const **value) as u64));
        let (ids, addresses): (Vec<i64>, Vec<u64>) = tensors.iter().copied().chain(scalars).unzip();
        let pack = self.graph.entries.descriptor(DescriptorType::VariantPack)?;
        pack.set(Name::VariantPackWorkspace, Type::VoidPtr, &[workspace])?;
        pack.set(Name::VariantPackDataPointers, Type::VoidPtr, &addresses)?;
        pack.set(Name::VariantPackUniqueIds, Type::Int64, &ids)?;
        pack.finalize()?;
        Ok(Box::new(Bound { pack, plan: Arc::clone(self), cudnn: Arc::clone(cudnn) }))
    }
}

/// A plan bound to addresses.
struct Bound {
    pack: Descriptor,
    plan: Arc<Plan>,
    cudnn: Arc<Cudnn>,
}

impl Work for Bound {
    fn enqueue(&self, stream: Stream) -> Result<(), CudaError> {
        let entries = &self.cudnn.entries;
        let handle = self.cudnn.handle()?;
        // SAFETY: handle and stream are alive.
        let status = unsafe { (entries.set_stream)(handle.0, stream.raw()) };
        entries.ok(status, || "take the stream".into())?;
        // SAFETY: the addresses in the pack hold the tensors that the plan describes, as the caller's views were checked.
        let status = unsafe { (entries.execute)(handle.0, self.plan.plan.raw, self.pack.raw) };
        entries.ok(status, || "run attention".into())
    }
}
