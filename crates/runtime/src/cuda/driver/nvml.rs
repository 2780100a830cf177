//! NVML readings of a device: memory in use before this process started, then load, power and clocks.

use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::null_mut;

use super::library::Library;
use crate::cuda::context::CudaError;

#[repr(C)]
#[derive(Default)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// Free bytes of the device at a PCI address such as `0000:1b:00.0`.
pub fn free_bytes(library: &'static Library, pci: &str) -> Result<u64, CudaError> {
    type Init = unsafe extern "C" fn() -> c_int;
    type Find = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
    type Ask = unsafe extern "C" fn(*mut c_void, *mut Memory) -> c_int;
    let pci = CString::new(pci).map_err(|_| CudaError::new("a PCI address holds a zero byte"))?;
    let ok = |status: c_int, call: &str| {
        if status == 0 { Ok(()) } else { Err(CudaError::status(call, status)) }
    };
    // SAFETY: the signatures are those of the header; each call writes only to what its pointer refers to.
    unsafe {
        let init: Init = library.symbol("nvmlInit_v2")?;
        let find: Find = library.symbol("nvmlDeviceGetHandleByPciBusId_v2")?;
        let ask: Ask = library.symbol("nvmlDeviceGetMemoryInfo")?;
        let shutdown: Init = library.symbol("nvmlShutdown")?;
        ok(init(), "nvmlInit")?;
        let (mut device, mut memory) = (null_mut(), Memory::default());
        let asked = ok(find(pci.as_ptr(), &mut device), "nvmlDeviceGetHandleByPciBusId")
            .and_then(|()| ok(ask(device, &mut memory), "nvmlDeviceGetMemoryInfo"));
        shutdown();
        asked.map(|()| memory.free)
    }
}

type Status = unsafe extern "C" fn() -> c_int;
type Number = unsafe extern "C" fn(*mut c_void, *mut u32) -> c_int;
type Chosen = unsafe extern "C" fn(*mut c_void, c_int, *mut u32) -> c_int;

/// `nvmlTemperatureSensors_t` and `nvmlClockType_t`: the GPU's temperature and the multiprocessors' clock.
const CHIP: c_int = 0;
const MULTIPROCESSORS: c_int = 1;

/// Reads a device's state repeatedly, from any thread. Values that its model or driver does not report are `None`.
pub struct Monitor {
    device: *mut c_void,
    utilization: Option<unsafe extern "C" fn(*mut c_void, *mut [u32; 2]) -> c_int>,
    memory: Option<unsafe extern "C" fn(*mut c_void, *mut Memory) -> c_int>,
    power: Option<Number>,
    power_limit: Option<Number>,
    energy: Option<unsafe extern "C" fn(*mut c_void, *mut u64) -> c_int>,
    temperature: Option<Chosen>,
    clock: Option<Chosen>,
    reasons: Option<unsafe extern "C" fn(*mut c_void, *mut u64) -> c_int>,
    shutdown: Status,
}

// SAFETY: NVML may be called from any thread, and a device handle stays valid on all of them until the shutdown in `drop`.
unsafe impl Send for Monitor {}

/// A device's state at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceState {
    /// Share of the last sampling period in which a kernel ran.
    pub utilization_percent: Option<u32>,
    pub memory_bytes: Option<u64>,
    pub power_milliwatts: Option<u32>,
    pub power_limit_milliwatts: Option<u32>,
    pub temperature_celsius: Option<u32>,
    pub clock_mhz: Option<u32>,
    /// Bits of NVML that say why the clock is not higher; 0 if not reported.
    pub reasons: u64,
}

/// The bits of `reasons` that throttle a busy GPU. Other bits mean that it is idle or that a user limited the clock.
const THROTTLES: [(u64, &str); 5] =
    [(0x4, "power"), (0x8, "hardware"), (0x20, "heat"), (0x40, "heat"), (0x80, "power brake")];

impl DeviceState {
    /// The reasons for throttling, without duplicates.
    pub fn throttled(&self) -> Vec<&'static str> {
        let mut names: Vec<&str> =
            THROTTLES.iter().filter(|(bit, _)| self.reasons & bit != 0).map(|(_, name)| *name).collect();
        names.dedup();
        names
    }
}

impl Monitor {
    /// Opens the device at a PCI address such as `0000:1b:00.0`.
    pub fn open(library: &'static Library, pci: &str) -> Result<Monitor, CudaError> {
        type Find = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
        let pci = CString::new(pci).map_err(|_| CudaError::new("a PCI address holds a zero byte"))?;
        let mut device = null_mut();
        // SAFETY: the signatures are those of the header; `find` writes the handle its pointer refers to. Every start of NVML
        // is matched by one shutdown: here if there is no such device, otherwise in `drop`.
        unsafe {
            let init: Status = library.symbol("nvmlInit_v2")?;
            let find: Find = library.symbol("nvmlDeviceGetHandleByPciBusId_v2")?;
            let shutdown: Status = library.symbol("nvmlShutdown")?;
            match init() {
                0 => {}
                status => return Err(CudaError::status("nvmlInit", status)),
            }
            let status = find(pci.as_ptr(), &mut device);
            if status != 0 {
                shutdown();
                return Err(CudaError::status("nvmlDeviceGetHandleByPciBusId", status));
            }
            Ok(Monitor {
                device,
                utilization: library.symbol("nvmlDeviceGetUtilizationRates").ok(),
                memory: library.symbol("nvmlDeviceGetMemoryInfo").ok(),
                power: library.symbol("nvmlDeviceGetPowerUsage").ok(),
                power_limit: library.symbol("nvmlDeviceGetEnforcedPowerLimit").ok(),
                energy: library.symbol("nvmlDeviceGetTotalEnergyConsumption").ok(),
                temperature: library.symbol("nvmlDeviceGetTemperature").ok(),
                clock: library.symbol("nvmlDeviceGetClockInfo").ok(),
                reasons: library.symbol("nvmlDeviceGetCurrentClocksThrottleReasons").ok(),
                shutdown,
            })
        }
    }

    /// Energy in millijoules that the device has used since its driver was loaded, if it counts it.
    pub fn energy_millijoules(&self) -> Option<u64> {
        let mut value = 0;
        // SAFETY: the handle is valid until `drop`; the call writes one u64.
        self.energy.filter(|call| unsafe { call(self.device, &mut value) } == 0).map(|_| value)
    }

    pub fn read(&self) -> DeviceState {
        let number = |call: Option<Number>| {
            let mut value = 0;
            // SAFETY: the handle is valid until `drop`; the call writes one u32.
            call.filter(|call| unsafe { call(self.device, &mut value) } == 0).map(|_| value)
        };
        let chosen = |call: Option<Chosen>, which: c_int| {
            let mut value = 0;
            // SAFETY: as above.
            call.filter(|call| unsafe { call(self.device, which, &mut value) } == 0).map(|_| value)
        };
        let (mut rates, mut memory, mut reasons) = ([0; 2], Memory::default(), 0);
        // SAFETY: as above; the struct of rates is two u32, for the GPU and its memory; the reasons are a u64.
        let (rated, used, reasoned) = unsafe {
            (
                self.utilization.is_some_and(|call| call(self.device, &mut rates) == 0),
                self.memory.is_some_and(|call| call(self.device, &mut memory) == 0),
                self.reasons.is_some_and(|call| call(self.device, &mut reasons) == 0),
            )
        };
        DeviceState {
            utilization_percent: rated.then_some(rates[0]),
            memory_bytes: used.then_some(memory.used),
            power_milliwatts: number(self.power),
            power_limit_milliwatts: number(self.power_limit),
            temperature_celsius: chosen(self.temperature, CHIP),
            clock_mhz: chosen(self.clock, MULTIPROCESSORS),
            reasons: if reasoned { reasons } else { 0 },
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        // SAFETY: matches the start in `open`; the handle is not used again.
        unsafe { (self.shutdown)() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn throttle_reasons_are_listed_once() {
        let throttled = |reasons| DeviceState { reasons, ..DeviceState::default() }.throttled();
        assert!(throttled(0x1 | 0x2 | 0x10 | 0x100).is_empty(), "idle and chosen clocks are no throttling");
        assert_eq!(throttled(0x4 | 0x20 | 0x40), ["power", "heat"]);
        assert_eq!(throttled(0x8 | 0x80), ["hardware", "power brake"]);
    }
}
