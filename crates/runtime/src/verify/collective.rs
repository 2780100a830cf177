//! Verifies sums over ranks on one GPU: the kernel that adds terms, to the bit, and the exchanges of a rank with itself.

use std::collections::HashSet;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use flatout_ir::ops::collective::tree;
use flatout_ir::random::normal;
use flatout_ir::{Mesh, OpKind};

use super::trial::{Trial, TrialLayout};
use super::{Case, CaseDevice, cases, judge, runs};
use crate::cuda::driver::cache::Cache;
use crate::cuda::driver::nccl::{Communicators, nccl};
use crate::cuda::driver::{DeviceMemory, Module, OwnedStream, PinnedMemory, nvrtc};
use crate::cuda::kernels::collective::tree_sum::{Places, TOGETHER, TreeSum};
use crate::cuda::{self, CudaError, Device, Source};

/// The most terms of a sum that is checked.
const MOST_WAYS: usize = 16;

pub struct Check {
    pub name: String,
    kind: CheckKind,
}

enum CheckKind {
    /// Terms drawn on the host, added on the device and on the host.
    Sum { sum: TreeSum, elements: usize },
    /// A row that only deterministic targets use.
    Row { case: Box<Case>, kernel: &'static cuda::Kernel },
}

/// Sums of 2 to 16 terms, and the rows that add in a fixed order, with a single rank.
pub fn checks() -> Vec<Check> {
    let mut all = vec![];
    for ways in 2..=MOST_WAYS {
        for (elements, has_base, is_aligned) in [(1, false, true), (4099, true, true), (70_001, false, false)]
        {
            let base = if has_base { " onto a base" } else { "" };
            let vectors = if is_aligned { "" } else { ", one by one" };
            let name = format!("tree_sum of {ways} terms of {elements}{base}{vectors}");
            all.push(Check {
                name,
                kind: CheckKind::Sum { sum: TreeSum { ways, has_base, is_aligned }, elements },
            });
        }
    }
    for case in cases::all() {
        let is_sum = matches!(case.op.kind(), OpKind::AllReduce | OpKind::ReduceScatter);
        let kernels = cuda::KERNELS.iter().copied().flatten();
        for kernel in kernels.filter(|k| is_sum && k.row.deterministic && runs(&k.row, &case)) {
            let name = format!("{} in one order", case.name);
            all.push(Check { name, kind: CheckKind::Row { case: Box::new(case.clone()), kernel } });
        }
    }
    all
}

impl Check {
    pub fn kernel(&self) -> &'static str {
        match &self.kind {
            CheckKind::Sum { .. } => "cuda.tree_sum",
            CheckKind::Row { kernel, .. } => kernel.row.name,
        }
    }

    /// Returns the error against the oracle, which must be 0 for a sum.
    pub fn run(&self, device: &Device) -> Result<f64, String> {
        match &self.kind {
            CheckKind::Sum { sum, elements } => {
                let got = added(device, *sum, *elements).map_err(|why| why.to_string())?;
                let wanted = wanted(*sum, *elements);
                match got.iter().zip(&wanted).position(|(got, want)| got.to_bits() != want.to_bits()) {
                    None => Ok(0.0),
                    Some(i) => Err(format!("element {i} is {}, and the tree gives {}", got[i], wanted[i])),
                }
            }
            CheckKind::Row { case, kernel } => {
                let trial = Trial::new(case, kernel.row);
                let (options, wanted) = (cuda::Options::default(), trial.oracle());
                let mut worst: f64 = 0.0;
                for form in [TrialLayout::Dense { threads: 1 }].into_iter().chain(trial.forms()) {
                    let got = trial.run(form, CaseDevice::Cuda(device), options)?;
                    worst = worst.max(judge(case, trial.outs(), &got, &wanted)?);
                }
                Ok(worst)
            }
        }
    }
}

/// A communicator of one rank, created once; `None` if NCCL is missing or cannot connect a rank with itself.
pub(super) fn alone(device: &Device) -> Option<Arc<Communicators>> {
    static MADE: OnceLock<Option<Arc<Communicators>>> = OnceLock::new();
    let make = || {
        let id = nccl().ok()?.new_id().ok()?;
        let made = Communicators::connect(device, Mesh::ONE, 0, &id, false, Duration::from_secs(60));
        made.ok().map(Arc::new)
    };
    MADE.get_or_init(make).clone()
}

fn term(t: usize, i: usize) -> f32 {
    normal(23, t as u64, i as u64)
}

/// The sum as `tree` defines it, in f32.
fn wanted(sum: TreeSum, elements: usize) -> Vec<f32> {
    let of = |i: usize| {
        let mut terms: Vec<f32> = (0..sum.ways).map(|t| term(t, i)).collect();
        tree(sum.ways, |onto, from| terms[onto] += terms[from]);
        if sum.has_base { term(sum.ways, i) + terms[0] } else { terms[0] }
    };
    (0..elements).map(of).collect()
}

/// The sum by the kernel: terms, base and result lie in one allocation.
fn added(device: &Device, sum: TreeSum, elements: usize) -> Result<Vec<f32>, CudaError> {
    device.bind()?;
    let (driver, stream) = (device.driver(), OwnedStream::new(device.driver())?);
    let arch = nvrtc::arch(&device.facts(cuda::Options::default()));
    let sources: HashSet<Source> = [sum.source()].into();
    let (cubins, _) = Cache::of_this_user().cubins(&sources, &arch, device.nvrtc(), &|| ())?;
    let function = Arc::new(Module::load(driver, &cubins[0].1)?).function("tree_sum")?;
    let stride = elements.next_multiple_of(TOGETHER);
    let words = (sum.ways + 2) * stride;
    let (memory, mut host) = (DeviceMemory::new(driver, 4 * words)?, PinnedMemory::new(driver, 4 * words)?);
    // SAFETY: no copy is pending.
    let into = unsafe { host.as_mut_slice() };
    for t in 0..=sum.ways {
        for i in 0..elements {
            into[4 * (t * stride + i)..][..4].copy_from_slice(&term(t, i).to_le_bytes());
        }
    }
    memory.copy_in(0, &host, 0, 4 * words, stream.get())?;
    let at = |term: usize| memory.address() + 4 * (term * stride) as u64;
    let base = sum.has_base.then(|| at(sum.ways));
    let places = Places { terms: at(0), stride, base, out: at(sum.ways + 1) };
    sum.launch(function, places, elements)?.enqueue(stream.get())?;
    let out = 4 * (sum.ways + 1) * stride;
    memory.copy_out(out, &host, out, 4 * elements, stream.get())?;
    stream.synchronize()?;
    // SAFETY: the copy is complete.
    let got = unsafe { host.as_slice() }[out..][..4 * elements].chunks_exact(4);
    Ok(got.map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect())
}
