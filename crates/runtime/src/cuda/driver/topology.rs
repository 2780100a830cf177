//! Links between the GPUs of a machine, as reported by NVML.
//!
//! `read` queries NVML once, for raw facts; `Topology::path` derives the link of two GPUs from them, so that it can be tested
//! with facts of other machines. The NVLink generation is derived from the GPU's architecture, because the number that NVML
//! reports changed its meaning between drivers.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::ptr::null_mut;

use flatout_ir::links::Link;

use super::library::Library;
use super::links;
use crate::cuda::context::CudaError;

/// A GPU, and how it is attached to others.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Attachment {
    /// PCI address: `0000:1b:00.0`.
    pub pci: String,
    /// NVLink generation; `None` if the architecture has none or is unknown.
    pub nvlink: Option<u32>,
    /// The remote ends of active NVLinks.
    pub ends: Vec<End>,
    /// The best that both the GPU and its slot support; an idle GPU may currently run slower.
    pub pcie: Option<Pcie>,
}

/// The remote end of an NVLink.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The GPU at this address.
    Gpu(String),
    /// An NVSwitch, which reaches every other GPU attached to a switch.
    Switch,
    /// NVML does not report it, as in virtual machines.
    Unknown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pcie {
    pub generation: u32,
    pub width: u32,
}

/// Facts about a pair of GPUs; `None` where NVML does not report them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Between {
    /// Whether each can read the other's memory.
    pub peers: Option<bool>,
    /// Whether they can do so over NVLink.
    pub nvlink: Option<bool>,
    pub meet: Option<Meet>,
}

/// The closest common ancestor of two GPUs on their paths to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Meet {
    Board,
    Switch,
    Switches,
    HostBridge,
    Numa,
    Sockets,
}

impl Meet {
    /// Converts `nvmlGpuTopologyLevel_t`.
    fn of(level: c_uint) -> Option<Meet> {
        Some(match level {
            0 => Meet::Board,
            10 => Meet::Switch,
            20 => Meet::Switches,
            30 => Meet::HostBridge,
            40 => Meet::Numa,
            50 => Meet::Sockets,
            _ => return None,
        })
    }
}

/// The link between two GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    NvLink { generation: Option<u32>, links: u32 },
    Pcie { pcie: Pcie, over: Over },
    Unknown,
}

/// The component that PCIe traffic passes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// Only switches: GPUs reach each other directly.
    Switches,
    /// Host memory.
    Host,
    /// Host memory and the interconnect between sockets.
    Sockets,
}

/// The GPUs of a machine in driver order, and the facts about each pair.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Topology {
    pub gpus: Vec<Attachment>,
    /// Indexed by two indices of `gpus`.
    pub between: Vec<Vec<Between>>,
}

impl Topology {
    /// The path between two GPUs.
    pub fn path(&self, a: usize, b: usize) -> Path {
        let (one, other, between) = (&self.gpus[a], &self.gpus[b], self.between[a][b]);
        let to_switch = |gpu: &Attachment| gpu.ends.iter().filter(|end| **end == End::Switch).count();
        let to_other = one.ends.iter().filter(|end| **end == End::Gpu(other.pci.clone())).count();
        let told = to_other + to_switch(one).min(to_switch(other));
        let links = match between.nvlink {
            // If the remote ends are hidden, all links count.
            Some(true) if told == 0 => one.ends.len().min(other.ends.len()),
            // Links that currently lead nowhere, for example without the fabric manager.
            Some(false) => 0,
            _ => told,
        };
        if links > 0 {
            return Path::NvLink { generation: one.nvlink.min(other.nvlink), links: links as u32 };
        }
        let (Some(own), Some(its)) = (one.pcie, other.pcie) else { return Path::Unknown };
        let pcie = Pcie { generation: own.generation.min(its.generation), width: own.width.min(its.width) };
        let over = match (between.meet, between.peers) {
            (Some(Meet::Sockets), _) => Over::Sockets,
            (Some(meet), Some(true)) if meet <= Meet::Switches => Over::Switches,
            (Some(_), Some(_)) => Over::Host,
            _ => return Path::Unknown,
        };
        Path::Pcie { pcie, over }
    }

    /// The link used to predict exchanges among the first `gpus` GPUs: the slowest path between any two of them. `None` with
    /// fewer than two GPUs, with fewer than requested, or if a path is unknown.
    pub fn link(&self, gpus: usize) -> Option<Link> {
        if gpus > self.gpus.len() {
            return None;
        }
        let pairs = (0..gpus).flat_map(|a| (0..a).map(move |b| (a, b)));
        let links: Option<Vec<Link>> = pairs.map(|(a, b)| self.path(a, b).link()).collect();
        links?.into_iter().min_by(|a, b| a.bytes_per_second.total_cmp(&b.bytes_per_second))
    }
}

impl Path {
    /// The row of the link table, with bandwidth scaled down if there are fewer links or lanes than the row assumes.
    pub fn link(self) -> Option<Link> {
        let (row, count, full) = match self {
            Path::NvLink { generation: Some(generation), links } => {
                let full = if generation == 3 { 12 } else { 18 };
                (format!("nvlink{generation}"), links, full)
            }
            Path::Pcie { pcie: Pcie { generation, width }, over } => {
                let host = if over == Over::Switches { "" } else { "-host" };
                (format!("pcie{}{host}", generation.min(links::NEWEST_PCIE)), width, 16)
            }
            Path::NvLink { generation: None, .. } | Path::Unknown => return None,
        };
        let link = links::find(&row)?;
        let name = if count == full { row } else { format!("{row} x{count}") };
        let bytes_per_second = link.bytes_per_second * f64::from(count) / f64::from(full);
        Some(Link { name, bytes_per_second, ..link.clone() })
    }

    /// Legend for the output of `Display`; `None` if it needs none.
    pub fn legend(self) -> Option<&'static str> {
        Some(match self {
            Path::NvLink { .. } => return None,
            Path::Pcie { over: Over::Switches, .. } => "direct: over PCIe switches, from GPU to GPU",
            Path::Pcie { over: Over::Host, .. } => "host: over PCIe and the host's memory",
            Path::Pcie { over: Over::Sockets, .. } => "sockets: as host, and between the host's sockets",
            Path::Unknown => "unknown: NVML does not tell how they are linked",
        })
    }
}

impl fmt::Display for Path {
    /// `NVLink4 x18`, `PCIe5 x16 host`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Path::NvLink { generation: Some(generation), links } => write!(f, "NVLink{generation} x{links}"),
            Path::NvLink { generation: None, links } => write!(f, "NVLink x{links}"),
            Path::Pcie { pcie: Pcie { generation, width }, over } => {
                let over = match over {
                    Over::Switches => "direct",
                    Over::Host => "host",
                    Over::Sockets => "sockets",
                };
                write!(f, "PCIe{generation} x{width} {over}")
            }
            Path::Unknown => f.write_str("unknown"),
        }
    }
}

impl fmt::Display for Attachment {
    /// `18 x NVLink4, PCIe5 x16`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let generation = self.nvlink.map_or(String::new(), |generation| generation.to_string());
        match self.ends.len() {
            0 => f.write_str("no NVLink")?,
            links => write!(f, "{links} x NVLink{generation}")?,
        }
        match self.pcie {
            Some(Pcie { generation, width }) => write!(f, ", PCIe{generation} x{width}"),
            None => f.write_str(", PCIe unknown"),
        }
    }
}

/// The NVLink generation of an architecture.
pub fn nvlink_of(major: u32, minor: u32) -> Option<u32> {
    match (major, minor) {
        (8, 0 | 6) => Some(3),
        (9, _) => Some(4),
        (10, _) => Some(5),
        _ => None,
    }
}

/// Maximum number of NVLinks per GPU in NVML.
const NVLINKS: c_uint = 18;
/// `nvmlGpuP2PCapsIndex_t`.
const P2P_READ: c_int = 0;
const P2P_NVLINK: c_int = 2;
/// `nvmlIntNvLinkDeviceType_t`.
const REMOTE_GPU: c_uint = 0;
const REMOTE_SWITCH: c_uint = 2;

/// `nvmlPciInfo_t`.
#[repr(C)]
struct PciInfo {
    legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    ids: [c_uint; 2],
    address: [c_char; 32],
}

type Device = *mut c_void;

/// The NVML entry points used by `read`. Those after `find` are missing in some drivers.
struct NvmlCalls {
    find: unsafe extern "C" fn(*const c_char, *mut Device) -> c_int,
    state: Option<unsafe extern "C" fn(Device, c_uint, *mut c_uint) -> c_int>,
    remote_type: Option<unsafe extern "C" fn(Device, c_uint, *mut c_uint) -> c_int>,
    remote_pci: Option<unsafe extern "C" fn(Device, c_uint, *mut PciInfo) -> c_int>,
    generation: Option<unsafe extern "C" fn(Device, *mut c_uint) -> c_int>,
    width: Option<unsafe extern "C" fn(Device, *mut c_uint) -> c_int>,
    peers: Option<unsafe extern "C" fn(Device, Device, c_int, *mut c_uint) -> c_int>,
    ancestor: Option<unsafe extern "C" fn(Device, Device, *mut c_uint) -> c_int>,
}

/// Queries NVML for the GPUs at these addresses, each paired with the NVLink generation of its architecture.
pub fn read(library: &'static Library, gpus: &[(String, Option<u32>)]) -> Result<Topology, CudaError> {
    type Status = unsafe extern "C" fn() -> c_int;
    // SAFETY: the signatures are those of the header for these symbols.
    let (init, shutdown, calls): (Status, Status, NvmlCalls) = unsafe {
        let calls = NvmlCalls {
            find: library.symbol("nvmlDeviceGetHandleByPciBusId_v2")?,
            state: library.symbol("nvmlDeviceGetNvLinkState").ok(),
            remote_type: library.symbol("nvmlDeviceGetNvLinkRemoteDeviceType").ok(),
            remote_pci: library.symbol("nvmlDeviceGetNvLinkRemotePciInfo_v2").ok(),
            generation: library.symbol("nvmlDeviceGetMaxPcieLinkGeneration").ok(),
            width: library.symbol("nvmlDeviceGetMaxPcieLinkWidth").ok(),
            peers: library.symbol("nvmlDeviceGetP2PStatus").ok(),
            ancestor: library.symbol("nvmlDeviceGetTopologyCommonAncestor").ok(),
        };
        (library.symbol("nvmlInit_v2")?, library.symbol("nvmlShutdown")?, calls)
    };
    // SAFETY: takes no argument; matched by one shutdown below.
    match unsafe { init() } {
        0 => {}
        status => return Err(CudaError::status("nvmlInit", status)),
    }
    let read = calls.topology(gpus);
    // SAFETY: matches the start above; no handle is used after it.
    unsafe { shutdown() };
    read
}

impl NvmlCalls {
    fn topology(&self, gpus: &[(String, Option<u32>)]) -> Result<Topology, CudaError> {
        let mut handles = vec![];
        for (pci, _) in gpus {
            let address =
                CString::new(&pci[..]).map_err(|_| CudaError::new("a PCI address holds a zero byte"))?;
            let mut device = null_mut();
            // SAFETY: reads a zero-terminated string and writes one handle.
            match unsafe { (self.find)(address.as_ptr(), &mut device) } {
                0 => handles.push(device),
                status => return Err(CudaError::status("nvmlDeviceGetHandleByPciBusId", status)),
            }
        }
        let attachment = |((pci, nvlink), device): (&(String, Option<u32>), &Device)| Attachment {
            pci: pci.clone(),
            nvlink: *nvlink,
            ends: self.ends(*device),
            pcie: self.pcie(*device),
        };
        let row = |a: &Device| handles.iter().map(|b| self.between(*a, *b)).collect();
        Ok(Topology {
            gpus: gpus.iter().zip(&handles).map(attachment).collect(),
            between: handles.iter().map(row).collect(),
        })
    }

    fn ends(&self, device: Device) -> Vec<End> {
        let told = |call: Option<unsafe extern "C" fn(Device, c_uint, *mut c_uint) -> c_int>,
                    link: c_uint| {
            let mut value = 0;
            // SAFETY: the handle is valid until the shutdown; writes one integer.
            call.filter(|call| unsafe { call(device, link, &mut value) } == 0).map(|_| value)
        };
        let is_up = |link: &c_uint| told(self.state, *link) == Some(1);
        let end = |link: c_uint| match told(self.remote_type, link) {
            Some(REMOTE_SWITCH) => End::Switch,
            Some(REMOTE_GPU) => self.remote(device, link).map_or(End::Unknown, End::Gpu),
            _ => End::Unknown,
        };
        (0..NVLINKS).filter(is_up).map(end).collect()
    }

    /// The address of the device at the other end of a link.
    fn remote(&self, device: Device, link: c_uint) -> Option<String> {
        let mut info =
            PciInfo { legacy: [0; 16], domain: 0, bus: 0, device: 0, ids: [0; 2], address: [0; 32] };
        let call = self.remote_pci?;
        // SAFETY: the handle is valid until the shutdown; writes one struct with the header's layout.
        let is_told = unsafe { call(device, link, &mut info) } == 0;
        is_told.then(|| address(info.domain, info.bus, info.device))
    }

    fn pcie(&self, device: Device) -> Option<Pcie> {
        let told = |call: Option<unsafe extern "C" fn(Device, *mut c_uint) -> c_int>| {
            let mut value = 0;
            // SAFETY: as in `ends`.
            call.filter(|call| unsafe { call(device, &mut value) } == 0).map(|_| value)
        };
        Some(Pcie { generation: told(self.generation)?, width: told(self.width)? })
    }

    fn between(&self, a: Device, b: Device) -> Between {
        if a == b {
            return Between::default();
        }
        let status = |index: c_int| {
            let mut status = 0;
            // SAFETY: both handles are valid until the shutdown; writes one integer.
            let told = self.peers.filter(|call| unsafe { call(a, b, index, &mut status) } == 0);
            told.map(|_| status == 0)
        };
        let mut level = 0;
        // SAFETY: as above.
        let told = self.ancestor.filter(|call| unsafe { call(a, b, &mut level) } == 0);
        let meet = told.and_then(|_| Meet::of(level));
        Between { peers: status(P2P_READ), nvlink: status(P2P_NVLINK), meet }
    }
}

/// Formats a PCI address as the driver does: `0000:1b:00.0`.
fn address(domain: u32, bus: u32, device: u32) -> String {
    format!("{domain:04x}:{bus:02x}:{device:02x}.0")
}

#[cfg(test)]
mod tests;
