//! A stage: one launch of one of our kernels before addresses are known.
//!
//! It has a source, a grid and arguments. Most operations are a short list of stages, which give both sources and work.

use flatout_ir::View;
use flatout_ir::types::DType;

use crate::cuda::context::{Arg, CudaError, Prepare, Source, Work, launch, sequence};

/// Prepended to all our sources.
pub const PRELUDE: &str = include_str!("prelude.cuh");

/// The counter-based generator Philox, for kernels that draw random numbers.
pub const PHILOX: &str = include_str!("philox.cuh");

/// A kernel whose launches are the stages that a function of the launch and the device's facts returns.
macro_rules! staged {
    ($row:expr, $stages:expr) => {
        $crate::cuda::Kernel {
            row: $row,
            sources: |launch, facts| $crate::cuda::kernels::stage::sources($stages(launch, facts)),
            prepare: |launch, p| $crate::cuda::kernels::stage::prepare($stages(launch, p.facts()), p),
        }
    };
}
pub(crate) use staged;

pub struct Stage {
    pub source: Source,
    pub entry: &'static str,
    /// Blocks along x and y.
    pub grid: [u32; 2],
    /// Threads per block.
    pub block: u32,
    pub args: Vec<Value>,
}

/// A kernel argument.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// Offset of a byte in the arena.
    At(usize),
    /// Null pointer for a tensor that the kernel was compiled without.
    Nothing,
    I32(i32),
    I64(i64),
    F32(f32),
    F64(f64),
    /// The parameters `NEXT_WEIGHT` of ahead.cuh.
    NextWeight,
}

pub type Stages = Result<Vec<Stage>, CudaError>;

pub fn at(view: &View) -> Value {
    Value::At(view.offset)
}

pub fn at_or_nothing(view: Option<&View>) -> Value {
    view.map_or(Value::Nothing, at)
}

/// The sources of an operation's stages. Stages that cannot be launched have none; `prepare` reports why.
pub fn sources(stages: Stages) -> Vec<Source> {
    stages.unwrap_or_default().into_iter().map(|stage| stage.source).collect()
}

/// The define that says how much shared memory the launches of a source take beside what it declares.
const SHARED_BYTES: &str = "SHARED_BYTES";

/// The bytes of shared memory given to launches of a source.
pub fn shared_bytes(source: &Source) -> usize {
    let given = source.defines.iter().find(|(name, _)| name == SHARED_BYTES);
    given.map_or(0, |(_, bytes)| bytes.parse().expect("a number of bytes"))
}

/// Resolves the stages to work, in order.
pub fn prepare(stages: Stages, prepare: &Prepare<'_>) -> Result<Box<dyn Work>, CudaError> {
    let start = View { offset: 0, dtype: DType::F32, dims: vec![], strides: vec![] };
    let arena = prepare.address(&start);
    let resolve = |stage: Stage| {
        let args = stage.args.iter().flat_map(|value| match *value {
            Value::At(offset) => vec![Arg::Ptr(arena + offset as u64)],
            Value::Nothing => vec![Arg::Ptr(0)],
            Value::I32(x) => vec![Arg::I32(x)],
            Value::I64(x) => vec![Arg::I64(x)],
            Value::F32(x) => vec![Arg::F32(x)],
            // Only the eight bytes matter.
            Value::F64(x) => vec![Arg::I64(x.to_bits() as i64)],
            Value::NextWeight => prepare.next_weight().args().to_vec(),
        });
        let function = prepare.function(&stage.source, stage.entry)?;
        let shared = shared_bytes(&stage.source) as u32;
        Ok(launch(function, [stage.grid[0], stage.grid[1], 1], stage.block, shared, args.collect()))
    };
    Ok(sequence(stages?.into_iter().map(resolve).collect::<Result<_, CudaError>>()?))
}

/// A source under construction: constants as defines, and address functions as text before the kernel's own.
pub struct Draft {
    name: &'static str,
    functions: String,
    defines: Vec<(String, String)>,
}

impl Draft {
    pub fn new(name: &'static str) -> Draft {
        Draft { name, functions: String::new(), defines: vec![] }
    }

    pub fn define(mut self, name: &str, value: impl ToString) -> Draft {
        self.defines.push((name.into(), value.to_string()));
        self
    }

    /// A 0 or 1 that the source tests with `#if`.
    pub fn flag(self, name: &str, is: bool) -> Draft {
        self.define(name, is as u8)
    }

    /// Gives every launch this much shared memory.
    pub fn shared(self, bytes: usize) -> Draft {
        self.define(SHARED_BYTES, bytes)
    }

    /// An element type.
    pub fn dtype(self, name: &str, dtype: DType) -> Draft {
        self.define(name, c_type(dtype))
    }

    pub fn text(mut self, text: &str) -> Draft {
        self.functions.push_str(text);
        self
    }

    pub fn source(self, body: &str) -> Source {
        let code = format!("{PRELUDE}\n{}\n{body}", self.functions);
        Source { name: self.name, code: code.into(), defines: self.defines }
    }
}

/// The name of an element type in the sources.
pub fn c_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float",
        DType::BF16 => "bf16",
        DType::I32 => "int",
        DType::E4M3 => "e4m3",
        DType::E5M2 => "e5m2",
        DType::E4M4 | DType::U8 => "u8",
        DType::F64 => "double",
    }
}

/// A type of the same size, for kernels that only move bytes.
pub fn c_bits(dtype: DType) -> &'static str {
    match dtype.bytes() {
        1 => "u8",
        2 => "u16",
        4 => "u32",
        _ => "u64",
    }
}

/// Blocks along x for a number of items.
pub fn blocks(items: usize, items_a_block: usize) -> Result<u32, CudaError> {
    let blocks = items.div_ceil(items_a_block);
    i32::try_from(blocks)
        .map(|n| n as u32)
        .map_err(|_| CudaError::new(format!("{blocks} blocks are more than a grid holds")))
}

/// A count that a kernel stores in 32 bits.
pub fn count32(what: &str, n: usize) -> Result<Value, CudaError> {
    i32::try_from(n)
        .map(Value::I32)
        .map_err(|_| CudaError::new(format!("{n} {what} are more than the 2147483647 the kernel counts")))
}

/// A count of the type that `address::index_type` names.
pub fn count(index: &str, n: usize) -> Value {
    if index == "u32" { Value::I32(n as i32) } else { Value::I64(n as i64) }
}
