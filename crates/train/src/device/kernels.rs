//! Tests the backends' kernels on this machine: which devices there are, and whether their kernels are correct.

use flatout_runtime::cuda::{self, nvrtc::Nvrtc};
use flatout_runtime::verify::{collective, packed, real};
use flatout_runtime::{Laps, cpu, verify};
use rayon::prelude::*;

pub use flatout_runtime::verify::speed::Speed;
use flatout_runtime::verify::speed::attention as race;
pub use flatout_runtime::verify::speed::attention::{COPY, Lap, PADDED, Shape};

/// One kernel case that was run.
pub struct Checked {
    pub name: String,
    /// The row that ran it, and which of its kernels, if it has several.
    pub kernel: String,
    /// Bound on the relative L2 error of each output.
    pub bound: f64,
    /// The largest error, or the reason why the case failed.
    pub error: Result<f64, String>,
}

/// Runs every kernel case whose name contains `only` against the oracle, on the CPU.
pub fn verify(only: &str, see: Progress<'_>) -> Vec<Checked> {
    let place = verify::CaseDevice::Cpu;
    let cases = chosen(only, place);
    let promised = promises(only);
    let of_cases = cases.chunks(PREPARED).enumerate().flat_map(|(chunk, part)| {
        see("kernels of the CPU", chunk * PREPARED, cases.len());
        let ready = prepared(part, place);
        part.iter().zip(ready).flat_map(|(case, ready)| checked(case, &ready, place)).collect::<Vec<_>>()
    });
    of_cases.chain(promised.iter().flat_map(|promise| checked_promise(promise, place))).collect()
}

/// Results of the GPU's kernels: each case against the oracle, and each kernel's speed on a large case.
pub struct GpuChecked {
    pub name: String,
    pub cases: Vec<Checked>,
    /// Spot checks at the sizes of a real model.
    pub real: Vec<Checked>,
    /// The case after which the device stopped responding, and the number of checks skipped because of it.
    pub broke: Option<(String, usize)>,
    /// The first entry is a plain copy.
    pub speeds: Vec<Result<Speed, String>>,
    /// Seconds spent on each part of the check, in order.
    pub took: Laps,
}

/// Receives the progress of a check: the part, its finished steps and all its steps.
pub type Progress<'a> = &'a (dyn Fn(&'static str, usize, usize) + Sync);

/// The same as [`verify`] on the first GPU. `None` if there is none; the error says why one cannot be used.
pub fn verify_gpu(only: &str, see: Progress<'_>) -> Option<Result<GpuChecked, String>> {
    if let cuda::Gpu::None(_) = cuda::probe().gpu {
        return None;
    }
    let device = match cuda::Device::open(0) {
        Ok(device) => device,
        Err(why) => return Some(Err(why.to_string())),
    };
    let place = verify::CaseDevice::Cuda(&device);
    let cases = chosen(only, place);
    let promised = promises(only);
    // Compile failures are reported with the case that needs the kernel.
    let of_promises = promised.iter().flat_map(packed::Promise::cases);
    let all: Vec<_> = cases.iter().cloned().chain(of_promises).collect();
    let real: Vec<_> = real::checks(real::Sizes::PRETRAIN_226M)
        .into_iter()
        .filter(|check| check.name.contains(only))
        .collect();
    let launches: Vec<_> = real.iter().flat_map(|check| check.launches(place)).collect();
    let mut took = Laps::begin();
    let _ =
        verify::compile_ahead(&all, &launches, &device, &|done, of| see("compiling for the GPU", done, of));
    let is_asked = |case: &verify::Case| case.name.contains(only) && verify::is_for(case, place);
    let large: Vec<_> = verify::speed::cases().into_iter().filter(is_asked).collect();
    let name = cuda::target(&device, false).name;
    took.lap("compiling");
    let mut done = GpuChecked { name, cases: vec![], real: vec![], broke: None, speeds: vec![], took };
    let sums: Vec<_> = collective::checks().into_iter().filter(|sum| sum.name.contains(only)).collect();
    let mut left = cases.len() + promised.len() + sums.len() + real.len() + large.len();
    // Either the kernel alone failed, or the device failed with it: then nothing later can be checked.
    let mut is_over = |failed: bool, name: &str, done: &mut GpuChecked| {
        left -= 1;
        if failed && device.broken().is_some() {
            done.broke = Some((name.into(), left));
        }
        done.broke.is_some()
    };
    let is_wrong = |checks: &[Checked]| checks.iter().any(|c| c.error.is_err());
    for (chunk, part) in cases.chunks(PREPARED).enumerate() {
        for (i, (case, ready)) in part.iter().zip(prepared(part, place)).enumerate() {
            see("cases on the GPU", chunk * PREPARED + i, cases.len());
            let checks = checked(case, &ready, place);
            let failed = is_wrong(&checks);
            done.cases.extend(checks);
            if is_over(failed, &case.name, &mut done) {
                return Some(Ok(done));
            }
        }
    }
    done.took.lap("cases");
    for (i, promise) in promised.iter().enumerate() {
        see("packed rows on the GPU", i, promised.len());
        let checks = checked_promise(promise, place);
        let failed = is_wrong(&checks);
        done.cases.extend(checks);
        if is_over(failed, &promise.name, &mut done) {
            return Some(Ok(done));
        }
    }
    done.took.lap("packing");
    for (i, sum) in sums.iter().enumerate() {
        see("sums over ranks on the GPU", i, sums.len());
        let (name, kernel, error) = (sum.name.clone(), sum.kernel().to_string(), sum.run(&device));
        let failed = error.is_err();
        done.cases.push(Checked { name, kernel, bound: 0.0, error });
        if is_over(failed, &sum.name, &mut done) {
            return Some(Ok(done));
        }
    }
    done.took.lap("sums over ranks");
    for (i, check) in real.iter().enumerate() {
        see("real sizes on the GPU", i, real.len());
        let checks = check.run(place).into_iter().map(|(kernel, error)| {
            let (name, bound) = (check.name.clone(), check.bound);
            Checked { error, kernel, name, bound }
        });
        let checks: Vec<Checked> = checks.collect();
        let failed = is_wrong(&checks);
        done.real.extend(checks);
        if is_over(failed, &check.name, &mut done) {
            return Some(Ok(done));
        }
    }
    done.took.lap("real sizes");
    for (i, case) in large.iter().enumerate() {
        see("speeds on the GPU", i, large.len());
        let speed = verify::speed::time(case, &device).map_err(|why| format!("{}: {why}", case.name));
        done.speeds.push(speed);
        if is_over(done.speeds.last().is_some_and(Result::is_err), &case.name, &mut done) {
            return Some(Ok(done));
        }
    }
    done.took.lap("speeds");
    Some(Ok(done))
}

fn chosen(only: &str, place: verify::CaseDevice<'_>) -> Vec<verify::Case> {
    let is_asked = |case: &verify::Case| case.name.contains(only) && verify::is_for(case, place);
    verify::cases::all().into_iter().filter(is_asked).collect()
}

/// Cases whose inputs and expected outputs are held in memory at a time.
const PREPARED: usize = 128;

/// Inputs are prepared on all cores; kernels then run one case at a time, because they have the cores, or the GPU, to themselves.
fn prepared<'a>(cases: &'a [verify::Case], place: verify::CaseDevice<'_>) -> Vec<verify::Prepared<'a>> {
    let target = place.target();
    cases.par_iter().map(|case| verify::Prepared::new(case, &target)).collect()
}

/// Runs a case on every kernel that serves it.
fn checked(case: &verify::Case, ready: &verify::Prepared<'_>, place: verify::CaseDevice<'_>) -> Vec<Checked> {
    let (name, bound) = (&case.name, case.bound);
    let all = ready.check_on(place).into_iter();
    all.map(|(kernel, error)| Checked { name: name.clone(), kernel, bound, error }).collect()
}

fn promises(only: &str) -> Vec<packed::Promise> {
    packed::promises().into_iter().filter(|promise| promise.name.contains(only)).collect()
}

/// Checks a guarantee of packed rows on every kernel that serves it.
fn checked_promise(promise: &packed::Promise, place: verify::CaseDevice<'_>) -> Vec<Checked> {
    let (name, bound) = (&promise.name, promise.bound());
    let all = promise.check(place).into_iter();
    all.map(|(kernel, error)| Checked { name: name.clone(), kernel, bound, error }).collect()
}

/// The kernels that serve one shape and direction of attention, timed alternately.
pub struct Raced {
    pub name: String,
    pub shape: Shape,
    pub laps: Result<Vec<Lap>, String>,
}

/// Times every attention kernel on the benchmark shapes whose name contains `only`, on the first GPU. Returns the GPU's name and
/// the times, which are also passed to `see` as they are measured.
pub fn race_attention(only: &str, see: &mut dyn FnMut(&Raced)) -> Result<(String, Vec<Raced>), String> {
    if let cuda::Gpu::None(why) = &cuda::probe().gpu {
        return Err(format!("kernels are timed on a GPU, and {why}"));
    }
    let device = cuda::Device::open(0).map_err(|why| why.to_string())?;
    let races: Vec<_> = race::races().into_iter().filter(|race| race.name.contains(only)).collect();
    let launches: Vec<_> = races.iter().flat_map(|race| race.launches(&device).unwrap_or_default()).collect();
    // Compile failures are reported with the shape that needs the kernel.
    let _ = verify::compile_ahead(&[], &launches, &device, &|_, _| ());
    let mut all = vec![];
    for race in races {
        let raced = Raced { laps: race.run(&device), shape: race.shape(), name: race.name };
        see(&raced);
        let broken = raced.laps.is_err() && device.broken().is_some();
        all.push(raced);
        if broken {
            break;
        }
    }
    Ok((cuda::target(&device, false).name, all))
}

/// A kernel compiled for an architecture, without a GPU.
pub struct Assembled {
    pub source: String,
    pub arch: String,
    /// Entry point, registers and spilled bytes of each kernel; or the compile error.
    pub kernels: Result<Vec<(String, u32, u32)>, String>,
}

/// Compiles everything that the CUDA kernels of the cases whose name contains `only` use, for architectures such as `sm_90a`.
/// Needs NVRTC but no GPU.
pub fn assemble(archs: &[String], only: &str) -> Result<Vec<Assembled>, String> {
    let open = || Nvrtc::open(cuda::library::nvrtc_alone()?);
    let nvrtc = open().map_err(|why| why.to_string())?;
    let large = verify::speed::cases().into_iter().filter(|case| case.name.contains(only));
    let all = verify::cases::all().into_iter().filter(|case| case.name.contains(only));
    let cases: Vec<_> = all.chain(large).collect();
    verify::assemble(&cases, archs, &nvrtc)
        .into_iter()
        .map(|(source, arch, made)| {
            let kernels = made
                .map_err(|why| why.to_string())
                .map(|kernels| kernels.into_iter().map(|k| (k.entry, k.registers, k.spill_bytes)).collect());
            Ok(Assembled { source, arch, kernels })
        })
        .collect()
}

/// Numbers of kernels of both backends.
pub struct Kernels {
    pub cpu: usize,
    pub cuda: usize,
    /// The CUDA kernels that are not deterministic without deterministic=on. All CPU kernels are deterministic.
    pub not_deterministic: Vec<&'static str>,
}

pub fn kernels() -> Kernels {
    let rows = || cuda::KERNELS.iter().copied().flatten().map(|kernel| &kernel.row);
    let not_deterministic = rows().filter(|row| !row.deterministic).map(|row| row.name).collect();
    Kernels { cpu: cpu::target(1).kernels.len(), cuda: rows().count(), not_deterministic }
}

/// A candidate file for a library, and whether it was opened.
pub struct Candidate {
    pub library: &'static str,
    pub path: String,
    pub version: String,
    pub verdict: String,
}

/// The GPU that can be used in addition to the CPU, if there is one.
pub struct Gpu {
    /// `None` where there is no GPU; otherwise whether it can be used.
    pub usable: Option<bool>,
    /// Its description, or the reason why it is not used.
    pub sentence: String,
    pub candidates: Vec<Candidate>,
    /// Libraries of which no candidate was opened, and the command that installs each.
    pub missing: Vec<(&'static str, &'static str)>,
}

fn listed(found: &cuda::library::Candidate) -> Candidate {
    Candidate {
        library: found.library.name(),
        path: found.path.display().to_string(),
        version: found.version.map_or_else(|| "?".into(), |version| version.to_string()),
        verdict: found.verdict.clone(),
    }
}

/// Looks for a GPU; opens libraries on the first call.
pub fn gpu() -> Gpu {
    let found = cuda::probe();
    let (usable, sentence) = match &found.gpu {
        cuda::Gpu::None(why) => (None, why.clone()),
        cuda::Gpu::Unusable(why) => (Some(false), why.clone()),
        cuda::Gpu::Usable(gpu) => {
            let driver = gpu.driver.clone().unwrap_or_else(|| "unknown".into());
            let (major, minor) = (gpu.cuda / 1000, gpu.cuda % 1000 / 10);
            let proven = if major == 13 { "" } else { ", unproven below 13.0" };
            let sentence = format!(
                "{}, compute capability {}.{}, {} multiprocessors, {:.1} GiB, driver {driver} (CUDA {major}.{minor}{proven})",
                gpu.model,
                gpu.major,
                gpu.minor,
                gpu.sms,
                gpu.memory_bytes as f64 / (1u64 << 30) as f64,
            );
            (Some(true), sentence)
        }
    };
    let candidates = found.candidates.iter().map(listed);
    let missing = found.missing.iter().map(|kind| (kind.name(), kind.install(found.cuda_major)));
    Gpu { usable, sentence, candidates: candidates.collect(), missing: missing.collect() }
}

/// NCCL as `doctor` lists it: the candidates, and the command that installs it if none was opened. Opens the library.
pub fn nccl() -> (Vec<Candidate>, Option<(&'static str, &'static str)>) {
    let (found, kind) = (cuda::library::nccl(), cuda::library::LibraryKind::Nccl);
    let missing =
        found.get().is_none().then(|| (kind.name(), kind.install(cuda::library::libraries().cuda_major)));
    (found.candidates.iter().map(listed).collect(), missing)
}

/// Descriptions of all GPUs that this process sees.
pub fn gpus() -> Vec<String> {
    let named = |gpu: cuda::Identity| {
        let gib = gpu.memory_bytes as f64 / (1u64 << 30) as f64;
        format!("{}, {} multiprocessors, {gib:.1} GiB", gpu.model, gpu.sms)
    };
    cuda::device::all().into_iter().map(named).collect()
}

/// Clears the environment variables that change the results of NVIDIA's libraries, and returns their names. Must be called first:
/// it fails once other threads run, because the environment cannot be changed under them.
pub fn clear_environment() -> Result<Vec<String>, String> {
    cuda::environment::clear()
}

/// The widest vector instructions that the kernels use here, in words.
pub fn instructions() -> &'static str {
    cpu::instructions()
}
