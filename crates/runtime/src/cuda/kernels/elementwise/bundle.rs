//! Several regions in one launch: one generated kernel, in which a block looks up its region by its index.
//!
//! The code of a region is that of `elementwise`, in its own namespace; regions of equal types, extents and alignment share it.
//! The blocks of a region are consecutive. Moves each tensor once. A region of one block takes less time than a launch, so 120
//! of them take about as long as one.

use std::fmt::Write;

use flatout_ir::{Launch, OpKind};

use crate::launch::{body_of, parts_of};

use super::map::{Pass, THREADS, row};
use crate::cuda::context::{CudaError, Kernel};
use crate::cuda::kernels::stage::{Draft, Stage, Stages, Value, count32, staged};

pub const KERNELS: &[Kernel] = &[staged!(row("cuda.bundle", OpKind::Bundle), |l, _| stages(l))];

fn stages(launch: &Launch) -> Stages {
    let parts = parts_of(launch);
    let passes = parts.iter().map(|part| Pass::new(part, &body_of(part)));
    let passes: Vec<Pass> = passes.collect::<Result<Vec<_>, CudaError>>()?.into_iter().flatten().collect();
    if passes.is_empty() {
        return Ok(vec![]);
    }
    let (mut namespaces, mut parameters, mut calls) = (vec![], vec![], String::new());
    let (mut args, mut blocks): (Vec<Value>, u32) = (vec![], 0);
    for (i, pass) in passes.into_iter().enumerate() {
        let constants: String = pass
            .constants
            .iter()
            .map(|(name, value)| format!("#undef {name}\n#define {name} {value}\n"))
            .collect();
        let text = format!("{constants}namespace REGION {{\n{}}}\n", pass.text);
        let of = namespaces.iter().position(|known| *known == text).unwrap_or_else(|| {
            namespaces.push(text);
            namespaces.len() - 1
        });
        parameters.extend(pass.tensors.iter().map(|(ty, name)| format!("{ty} {name}_{i}")));
        parameters.push(format!("{} count_{i}", pass.constants[2].1));
        let names: String = pass.tensors.iter().map(|(_, name)| format!("{name}_{i}, ")).collect();
        let first = blocks;
        blocks += pass.blocks;
        _ = writeln!(
            calls,
            "    if (block >= {first}u && block < {blocks}u) return region{of}::run({names}count_{i}, block - {first}u);"
        );
        args.extend(pass.args.into_iter().chain([pass.count]));
    }
    let mut code = String::new();
    for (i, text) in namespaces.iter().enumerate() {
        code.push_str(&text.replace("namespace REGION", &format!("namespace region{i}")));
    }
    _ = write!(
        code,
        "extern \"C\" __global__ void __launch_bounds__({THREADS}) bundle({}) {{\n    u32 block = blockIdx.x;\n{calls}}}\n",
        parameters.join(", ")
    );
    count32("blocks", blocks as usize)?;
    let source = Draft::new("bundle").source(&code);
    Ok(vec![Stage { source, entry: "bundle", grid: [blocks, 1], block: THREADS as u32, args }])
}
