//! The CPU backend: sessions, threads, vector mathematics and the kernels.

mod cgroup;
pub mod context;
pub mod kernels;
pub mod math;
pub mod normal;
pub mod session;
pub mod tensor;

pub use kernels::{KERNELS, kernel};

use std::path::Path;

use flatout_ir::Launch;
use flatout_ir::target::{KernelRow, Rates, Target};
use flatout_ir::timings::Timings;

use crate::rows::EVERY_TYPE;
use context::Context;
use math::Level;

/// A kernel: its capabilities, and its function. An error is a sentence to which the session adds the launch's name and shapes.
pub struct Kernel {
    pub row: KernelRow,
    pub run: Run,
}

pub type Run = fn(&Launch, &Context<'_>) -> Result<(), String>;

/// The compilation target for this machine with `threads` threads.
pub fn target(threads: usize) -> Target {
    let cores = threads.max(1);
    Target {
        name: "cpu".into(),
        dtypes: EVERY_TYPE.to_vec(),
        align: crate::arena::ALIGN,
        memory_bytes: memory_bytes(),
        driver_bytes: 0,
        wire_bytes: 0,
        cores,
        ranks: 1,
        shards: None,
        links: None,
        landings: 0,
        rates: rates(cores),
        timings: Timings::default(),
        kernels: KERNELS.iter().copied().flatten().map(|k| k.row).collect(),
        missing: vec![],
    }
}

/// Roofline constants, for predictions only. Measured on one Zen 4 core: products 110 GFLOP/s with AVX-512, 16 GB/s from and to
/// memory. AVX2 has half the lanes; bf16 is widened to f32 and gains nothing; four cores are assumed to saturate memory.
fn rates(cores: usize) -> Rates {
    let a_core = match math::level() {
        Level::Avx512 => 110e9,
        Level::Avx2 => 60e9,
        Level::Baseline => 10e9,
    };
    let products = a_core * cores as f64;
    Rates {
        f32_flops: products,
        tf32_flops: None,
        bf16_flops: products,
        fp8_flops: Some(products),
        memory_bytes: 16e9 * cores.min(4) as f64,
    }
}

/// Memory that a run may use: what Linux reports as available, or less if the process's control groups allow less; 4 GiB on
/// systems that report nothing.
pub fn memory_bytes() -> u64 {
    let available = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    });
    let available = available.map_or(4 << 30, |kib| kib << 10);
    cgroup::room_bytes(Path::new("/")).map_or(available, |room| room.min(available))
}

/// Name of the widest instructions that the kernels use on this machine.
pub fn instructions() -> &'static str {
    match math::level() {
        Level::Avx512 => "AVX-512",
        Level::Avx2 => "AVX2 and FMA",
        Level::Baseline => "no vector extensions in use",
    }
}
