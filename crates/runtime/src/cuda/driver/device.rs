//! A GPU: detection, properties, and the compilation target it represents.

use std::collections::HashSet;
use std::ffi::c_int;
use std::sync::{Arc, OnceLock};

use flatout_ir::target::{KernelRow, Rates, Target};
use flatout_ir::timings::Timings;

use super::cache::Cache;
use super::library::{self, Candidate, Libraries, LibraryKind};
use super::nvrtc::{self, Nvrtc};
use super::topology::{self, Topology};
use super::{Attribute, Context, Driver};
use super::{environment, gpus, nvml};
use crate::Laps;
use crate::cuda::KERNELS;
use crate::cuda::context::{CudaError, Facts, Kernel, Source};
use crate::cuda::kernels::attention::choice::{self as attention, AttentionKernel};
use crate::cuda::kernels::attention::cudnn::Cudnn;
use crate::cuda::kernels::products::choice::ProductKernel;
use crate::cuda::kernels::products::lt::Lt;
use crate::cuda::session::Options;
use crate::rows::EVERY_TYPE;

/// The oldest supported driver: CUDA 12.8. Tested with 13.0.
const OLDEST_DRIVER: u32 = 12080;
/// Bytes the driver allocates besides the context: modules, graphs, cuDNN's kernels. An upper bound for plans; sessions
/// measure.
const MODULE_BYTES: u64 = 512 << 20;
/// Double-buffered inputs: one area is being filled while the other is copied into place.
const LANDINGS: usize = 2;

/// Whether a GPU can be used, with a sentence for the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gpu {
    /// There is no GPU.
    None(String),
    /// There is a GPU that cannot be used; the sentence says how to fix that.
    Unusable(String),
    Usable(Identity),
}

/// A GPU's properties, available before a context exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub index: usize,
    /// As the driver reports it: `NVIDIA H200`.
    pub model: String,
    pub major: u32,
    pub minor: u32,
    pub sms: u32,
    pub memory_bytes: u64,
    /// The driver's own version, if its file name tells it.
    pub driver: Option<String>,
    /// The CUDA version the driver supports: 13000 for 13.0.
    pub cuda: u32,
}

/// The result of looking for a GPU.
pub struct Probe {
    pub gpu: Gpu,
    pub candidates: &'static [Candidate],
    /// Libraries of which no candidate could be opened.
    pub missing: Vec<LibraryKind>,
    /// The major CUDA version the driver supports.
    pub cuda_major: Option<u32>,
    /// Environment variables that would change results and were cleared first.
    pub cleared: Vec<String>,
}

/// Detects the first GPU: clears the environment and opens the libraries, but creates no context. The first result is cached.
/// Call it before threads start, when variables that change results can be cleared; later, they make the GPU unusable.
pub fn probe() -> &'static Probe {
    static ANSWER: OnceLock<Probe> = OnceLock::new();
    ANSWER.get_or_init(|| {
        let cleared = environment::clear().unwrap_or_default();
        let found = library::libraries();
        let missing = LibraryKind::ALL.into_iter().filter(|kind| found.get(*kind).is_none()).collect();
        let cuda_major = found.cuda_major;
        Probe { gpu: detect_gpu(found), candidates: &found.candidates, missing, cuda_major, cleared }
    })
}

fn detect_gpu(found: &'static Libraries) -> Gpu {
    let Some(file) = found.get(LibraryKind::Driver) else {
        return Gpu::None("there is no NVIDIA driver".into());
    };
    let driver = match driver() {
        Ok(driver) => driver,
        Err(why) => return Gpu::Unusable(format!("the NVIDIA driver cannot be used: {why}")),
    };
    let cuda = driver.version().unwrap_or(0);
    if cuda < OLDEST_DRIVER {
        return Gpu::Unusable(format!(
            "the NVIDIA driver supports CUDA {}.{}, and 12.8 is the least: {}",
            cuda / 1000,
            cuda % 1000 / 10,
            LibraryKind::Driver.install(None)
        ));
    }
    // CUDA_ERROR_NO_DEVICE, for example if CUDA_VISIBLE_DEVICES is empty.
    match driver.init() {
        Err(why) if why.code == 100 => return Gpu::None("the NVIDIA driver finds no GPU".into()),
        Err(why) => return Gpu::Unusable(format!("the NVIDIA driver does not start: {why}")),
        Ok(()) => {}
    }
    match driver.devices() {
        Ok(0) => return Gpu::None("the NVIDIA driver finds no GPU".into()),
        Err(why) => return Gpu::Unusable(format!("the NVIDIA driver lists no GPUs: {why}")),
        Ok(_) => {}
    }
    let identity = match identify(driver, 0, cuda) {
        Ok(identity) => Identity { driver: Some(file.version.to_string()), ..identity },
        Err(why) => return Gpu::Unusable(format!("the GPU does not answer: {why}")),
    };
    if identity.major < 8 {
        return Gpu::Unusable(format!(
            "the {} has compute capability {}.{}, and 8.0 (Ampere) is the least",
            identity.model, identity.major, identity.minor
        ));
    }
    if let Some(why) =
        [LibraryKind::Nvrtc, LibraryKind::CublasLt].iter().find_map(|k| found.require(*k).err())
    {
        return Gpu::Unusable(format!("the {} cannot be used: {why}", identity.model));
    }
    let set = environment::present();
    if !set.is_empty() {
        let names = set.join(", ");
        return Gpu::Unusable(format!("{names} changes what NVIDIA's libraries compute: unset it"));
    }
    Gpu::Usable(identity)
}

/// The driver's entry points, resolved once.
fn driver() -> Result<&'static Driver, CudaError> {
    static OPENED: OnceLock<Result<Driver, CudaError>> = OnceLock::new();
    let open = || Driver::open(library::libraries().require(LibraryKind::Driver)?);
    OPENED.get_or_init(open).as_ref().map_err(Clone::clone)
}

/// Every GPU visible to this process, in the driver's order; empty if the first cannot be used.
pub fn all() -> Vec<Identity> {
    let (Gpu::Usable(first), Ok(driver)) = (&probe().gpu, driver()) else { return vec![] };
    let others = (1..driver.devices().unwrap_or(1)).filter_map(|index| {
        let identity = identify(driver, index, first.cuda).ok()?;
        Some(Identity { driver: first.driver.clone(), ..identity })
    });
    std::iter::once(first.clone()).chain(others).collect()
}

/// The links between the GPUs visible to this process, or why they are not known.
pub fn topology() -> Result<&'static Topology, CudaError> {
    static READ: OnceLock<Result<Topology, CudaError>> = OnceLock::new();
    let read = || {
        let (driver, nvml) = (driver()?, library::libraries().require(LibraryKind::Nvml)?);
        let place = |gpu: Identity| {
            let pci = driver.pci_address(driver.device(gpu.index)?)?;
            Ok((pci.to_lowercase(), topology::nvlink_of(gpu.major, gpu.minor)))
        };
        topology::read(nvml, &all().into_iter().map(place).collect::<Result<Vec<_>, CudaError>>()?)
    };
    READ.get_or_init(read).as_ref().map_err(Clone::clone)
}

fn identify(driver: &Driver, index: usize, cuda: u32) -> Result<Identity, CudaError> {
    let device = driver.device(index)?;
    Ok(Identity {
        index,
        model: driver.device_name(device)?,
        major: driver.attribute(device, Attribute::Major)?,
        minor: driver.attribute(device, Attribute::Minor)?,
        sms: driver.attribute(device, Attribute::Multiprocessors)?,
        memory_bytes: driver.total_memory(device)?,
        driver: None,
        cuda,
    })
}

/// An open GPU: its primary context and the libraries' handles on it, shared by clones.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    identity: Identity,
    facts: Facts,
    rates: Rates,
    /// Free device memory before this process had a context.
    free_bytes: u64,
    /// Device memory that the context and the handles allocated.
    context_bytes: u64,
    /// Time spent opening the device, by phase.
    laps: Laps,
    cudnn: Result<Arc<Cudnn>, CudaError>,
    lt: Arc<Lt>,
    nvrtc: Nvrtc,
    driver: &'static Driver,
    /// Last, so that it is released last.
    context: Context,
}

impl Device {
    /// Opens the GPU with this ordinal and makes its context current on this thread.
    pub fn open(index: usize) -> Result<Device, CudaError> {
        match &probe().gpu {
            Gpu::None(why) | Gpu::Unusable(why) => return Err(CudaError::new(why.clone())),
            Gpu::Usable(_) => {}
        }
        let mut laps = Laps::begin();
        let found = library::libraries();
        let driver = driver()?;
        let version = found.get(LibraryKind::Driver).map(|file| file.version.to_string());
        let identity = Identity { driver: version, ..identify(driver, index, driver.version()?)? };
        let device = driver.device(index)?;
        let before = found
            .get(LibraryKind::Nvml)
            .and_then(|nvml| nvml::free_bytes(nvml, &driver.pci_address(device).ok()?).ok());
        let context = Context::retain(driver, device)?;
        let lt = Arc::new(Lt::open(found.require(LibraryKind::CublasLt)?)?);
        let cudnn = found.require(LibraryKind::Cudnn).and_then(|l| Cudnn::open(l).map(Arc::new));
        let nvrtc = Nvrtc::open(found.require(LibraryKind::Nvrtc)?)?;
        let (free, total) = driver.memory()?;
        // Without NVML, all memory in use is attributed to this process.
        let free_bytes = before.unwrap_or(total).min(total);
        let facts = Facts {
            major: identity.major,
            minor: identity.minor,
            sms: identity.sms,
            shared_bytes: driver.attribute(device, Attribute::SharedBytesPerBlockOptin)?,
            l2_bytes: driver.attribute(device, Attribute::L2Bytes)?,
            cudnn: cudnn
                .is_ok()
                .then(|| found.get(LibraryKind::Cudnn).map(|l| packed(l.version.0)))
                .flatten(),
            deterministic: false,
            autotune: false,
            attention: AttentionKernel::Auto,
            product: ProductKernel::Auto,
        };
        let rates = rates(driver, device, &identity)?;
        let context_bytes = free_bytes.saturating_sub(free);
        laps.lap("device");
        Ok(Device(Arc::new(Inner {
            identity,
            facts,
            rates,
            free_bytes,
            context_bytes,
            laps,
            cudnn,
            lt,
            nvrtc,
            driver,
            context,
        })))
    }

    /// Time spent opening the device, by phase.
    pub fn laps(&self) -> &Laps {
        &self.0.laps
    }

    pub fn identity(&self) -> &Identity {
        &self.0.identity
    }

    pub fn facts(&self, options: Options) -> Facts {
        let autotune = options.candidates() > 1;
        let Options { deterministic, attention, product, .. } = options;
        Facts { deterministic, autotune, attention, product, ..self.0.facts.clone() }
    }

    /// The sticky error of the context, if any: after an illegal access in a kernel every later call fails.
    pub fn broken(&self) -> Option<CudaError> {
        self.bind().and_then(|()| self.0.driver.synchronize_context()).err()
    }

    /// Compiles the sources that the cache lacks. `see` is called after each.
    pub fn compile_ahead(&self, sources: &HashSet<Source>, see: &(dyn Fn() + Sync)) -> Result<(), CudaError> {
        Cache::of_this_user().cubins(sources, &nvrtc::arch(&self.0.facts), &self.0.nvrtc, see).map(|_| ())
    }

    /// Free device memory before this process had a context, by NVML.
    pub fn free_bytes(&self) -> u64 {
        self.0.free_bytes
    }

    /// GPU, driver and library version that measured times are valid for.
    pub(crate) fn tuned_on(&self) -> String {
        let Inner { identity, lt, .. } = &*self.0;
        let driver = library::libraries().get(LibraryKind::Driver).map(|l| l.version.to_string());
        let (driver, cuda) = (driver.unwrap_or_default(), identity.cuda);
        let Identity { model, major, minor, sms, .. } = identity;
        format!("{model} {major}.{minor} of {sms}, driver {driver} for {cuda}, cuBLASLt {}", lt.version())
    }

    /// Opens a monitor of this GPU's load, power and clocks.
    pub fn monitor(&self) -> Result<nvml::Monitor, CudaError> {
        nvml::Monitor::open(library::libraries().require(LibraryKind::Nvml)?, &self.pci_address()?)
    }

    pub(crate) fn lt(&self) -> &Arc<Lt> {
        &self.0.lt
    }

    pub(crate) fn cudnn(&self) -> Result<&Arc<Cudnn>, &CudaError> {
        self.0.cudnn.as_ref()
    }

    pub(crate) fn nvrtc(&self) -> &Nvrtc {
        &self.0.nvrtc
    }

    pub(crate) fn driver(&self) -> &'static Driver {
        self.0.driver
    }

    /// Makes the device current on the calling thread.
    pub(crate) fn bind(&self) -> Result<(), CudaError> {
        self.0.context.bind()
    }

    /// Makes the device current on whichever thread calls it.
    pub(crate) fn binder(&self) -> impl Fn() -> Result<(), CudaError> + Send + 'static {
        self.0.context.binder()
    }

    /// PCI address: `0000:1b:00.0`.
    pub fn pci_address(&self) -> Result<String, CudaError> {
        self.0.driver.pci_address(self.0.driver.device(self.0.identity.index)?)
    }
}

/// The compilation target of a device. With `deterministic`, rows are marked deterministic even if they are not in general, and
/// collectives that never are get left out.
pub fn target(device: &Device, deterministic: bool) -> Target {
    let Inner { identity, rates, free_bytes, context_bytes, .. } = &*device.0;
    let name = short_name(&identity.model, identity.memory_bytes);
    let target = describe_target(name, *free_bytes, context_bytes + MODULE_BYTES, *rates, deterministic);
    Target { missing: attention::missing(&device.0.facts), ..target }
}

/// The compilation target of a GPU, whether present or from a data sheet.
pub(crate) fn describe_target(
    name: String,
    memory_bytes: u64,
    driver_bytes: u64,
    rates: Rates,
    deterministic: bool,
) -> Target {
    // Under `Facts::deterministic` every other kernel adds in a fixed order; a sum over ranks has a separate kernel for that.
    let is_offered = |k: &&Kernel| !(deterministic && k.row.op.is_collective()) || k.row.deterministic;
    let kernels = KERNELS.iter().copied().flatten().filter(is_offered);
    let kernels = kernels.map(|k| KernelRow { deterministic: deterministic || k.row.deterministic, ..k.row });
    Target {
        name,
        dtypes: EVERY_TYPE.iter().copied().filter(|d| !d.is_fp8() || rates.fp8_flops.is_some()).collect(),
        align: 256,
        memory_bytes,
        driver_bytes,
        wire_bytes: 0,
        cores: 1,
        ranks: 1,
        shards: None,
        links: None,
        landings: LANDINGS,
        rates,
        timings: Timings::default(),
        kernels: kernels.collect(),
        missing: vec![],
    }
}

/// Encodes a version as `cudnnGetVersion` does: 91900.
fn packed([major, minor, patch]: [u32; 3]) -> u32 {
    major * 10000 + minor * 100 + patch
}

/// `NVIDIA GeForce RTX 4090` is `rtx4090`, `NVIDIA A100-SXM4-80GB` is `a100-80`, `NVIDIA H100 80GB HBM3` is `h100`.
pub fn short_name(model: &str, memory_bytes: u64) -> String {
    let words: Vec<String> =
        model.split([' ', '-']).map(str::to_lowercase).filter(|w| w != "nvidia" && w != "geforce").collect();
    match &words[..] {
        [rtx, number, ..] if rtx == "rtx" => format!("rtx{number}"),
        [a100, ..] if a100 == "a100" => format!("a100-{}", if memory_bytes > 50 << 30 { 80 } else { 40 }),
        [name, ..] => name.clone(),
        [] => "gpu".into(),
    }
}

/// Peak rates from the data sheet, or else computed from clocks: 128 fused multiply-adds per multiprocessor and cycle in f32,
/// and the tensor-core rate of the generation in bf16; TF32 is half of that, and FP8, where supported, twice.
fn rates(driver: &Driver, device: c_int, identity: &Identity) -> Result<Rates, CudaError> {
    let name = short_name(&identity.model, identity.memory_bytes);
    if let Some(gpu) = gpus::find(&name) {
        return Ok(gpu.rates);
    }
    let hz = |attribute| driver.attribute(device, attribute).map(|khz| khz as f64 * 1e3);
    let cycles = identity.sms as f64 * hz(Attribute::ClockRateKhz)?;
    let bf16_a_cycle = match (identity.major, identity.minor) {
        (8, 0) => 2048.0,
        (9, _) => 4096.0,
        (10 | 11, _) => 8192.0,
        _ => 512.0,
    };
    let bus_bytes = driver.attribute(device, Attribute::MemoryBusBits)? as f64 / 8.0;
    Ok(Rates {
        f32_flops: cycles * 256.0,
        tf32_flops: Some(cycles * bf16_a_cycle / 2.0),
        bf16_flops: cycles * bf16_a_cycle,
        fp8_flops: ((identity.major, identity.minor) >= (8, 9)).then_some(cycles * bf16_a_cycle * 2.0),
        memory_bytes: 2.0 * hz(Attribute::MemoryClockRateKhz)? * bus_bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_have_short_names_with_rates() {
        for (model, gib, name) in [
            ("NVIDIA H200", 140, "h200"),
            ("NVIDIA H100 80GB HBM3", 80, "h100"),
            ("NVIDIA A100-SXM4-80GB", 80, "a100-80"),
            ("NVIDIA A100-PCIE-40GB", 40, "a100-40"),
            ("NVIDIA GeForce RTX 3090", 24, "rtx3090"),
            ("NVIDIA L40S", 45, "l40s"),
        ] {
            assert_eq!(short_name(model, gib << 30), name);
            assert!(gpus::find(name).is_some(), "{name}");
        }
        assert_eq!(short_name("NVIDIA Something 7", 1 << 30), "something");
    }
}
