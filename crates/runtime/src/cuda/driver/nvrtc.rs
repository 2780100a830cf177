//! NVRTC, the run-time compiler: compiles a source to a cubin for one architecture.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::{null, null_mut};

use super::library::{Library, Version};
use crate::cuda::context::{CudaError, Facts, Source};

type Program = *mut c_void;

/// Options besides architecture and defines; part of the cache key. Arithmetic is IEEE: multiply-add contraction is allowed,
/// but no approximations and no flushing of denormals.
pub const OPTIONS: &[&str] = &["--std=c++17", "--device-as-default-execution-space", "--fmad=true"];

pub struct Nvrtc {
    pub version: Version,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
}

/// Resources a kernel needs on a multiprocessor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resources {
    pub entry: String,
    pub registers: u32,
    /// Register spill in bytes stored.
    pub spill_bytes: u32,
    /// Bytes of static shared memory.
    pub shared_bytes: u32,
    /// Whether the assembler serialised the warpgroup's wgmma instructions, for example for lack of registers.
    pub is_serialized: bool,
}

impl Nvrtc {
    pub fn open(library: &'static Library) -> Result<Nvrtc, CudaError> {
        // SAFETY: the signatures are those of the header.
        unsafe {
            Ok(Nvrtc {
                version: library.version,
                create: library.symbol("nvrtcCreateProgram")?,
                compile: library.symbol("nvrtcCompileProgram")?,
                log_size: library.symbol("nvrtcGetProgramLogSize")?,
                log: library.symbol("nvrtcGetProgramLog")?,
                cubin_size: library.symbol("nvrtcGetCUBINSize")?,
                cubin: library.symbol("nvrtcGetCUBIN")?,
                destroy: library.symbol("nvrtcDestroyProgram")?,
                error_string: library.symbol("nvrtcGetErrorString")?,
            })
        }
    }

    /// Compiles a source for an architecture such as `sm_90a`.
    pub fn compile(&self, source: &Source, arch: &str) -> Result<Vec<u8>, CudaError> {
        self.build(source, arch, &[]).map(|(cubin, _)| cubin)
    }

    /// The resources of each kernel of a source. Always compiles, without the cache.
    pub fn resources(&self, source: &Source, arch: &str) -> Result<Vec<Resources>, CudaError> {
        let (_, log) = self.build(source, arch, &["--ptxas-options=--verbose"])?;
        let found = read_resources(&log);
        if found.is_empty() {
            return Err(CudaError::new(format!(
                "{} has no kernel, or the compiler said nothing",
                source.name
            )));
        }
        Ok(found)
    }

    fn build(&self, source: &Source, arch: &str, more: &[&str]) -> Result<(Vec<u8>, String), CudaError> {
        let text = |s: String| {
            CString::new(s).map_err(|_| CudaError::new(format!("{} holds a zero byte", source.name)))
        };
        let code = text(source.code.clone().into_owned())?;
        let name = text(source.name.into())?;
        let mut options = vec![text(format!("--gpu-architecture={arch}"))?];
        for option in OPTIONS.iter().chain(more) {
            options.push(text(option.to_string())?);
        }
        for (define, value) in &source.defines {
            options.push(text(format!("--define-macro={define}={value}"))?);
        }
        let options: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();

        let mut raw = null_mut();
        // SAFETY: both strings are zero-terminated and outlive the call, which copies them; there are no headers.
        let status = unsafe { (self.create)(&mut raw, code.as_ptr(), name.as_ptr(), 0, null(), null()) };
        self.ok(status, "nvrtcCreateProgram", source)?;
        let program = Owned { nvrtc: self, raw };
        // SAFETY: the program was created; the option strings outlive the call.
        let status = unsafe { (self.compile)(program.raw, options.len() as c_int, options.as_ptr()) };
        let log = program.log();
        if status != 0 {
            let what = format!("{source} does not compile for {arch}:\n{log}");
            return Err(CudaError::status(what, status));
        }
        let mut size = 0;
        // SAFETY: writes one integer.
        self.ok(unsafe { (self.cubin_size)(program.raw, &mut size) }, "nvrtcGetCUBINSize", source)?;
        let mut cubin = vec![0u8; size];
        // SAFETY: the buffer has the size just queried.
        let status = unsafe { (self.cubin)(program.raw, cubin.as_mut_ptr().cast()) };
        self.ok(status, "nvrtcGetCUBIN", source)?;
        Ok((cubin, log))
    }

    fn ok(&self, status: c_int, call: &str, source: &Source) -> Result<(), CudaError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: returns a static string for any status.
        let words = unsafe { CStr::from_ptr((self.error_string)(status)) }.to_string_lossy();
        Err(CudaError::status(format!("{call} for {}: {words}", source.name), status))
    }
}

struct Owned<'a> {
    nvrtc: &'a Nvrtc,
    raw: Program,
}

impl Owned<'_> {
    fn log(&self) -> String {
        let mut size = 0;
        // SAFETY: writes one integer.
        if unsafe { (self.nvrtc.log_size)(self.raw, &mut size) } != 0 {
            return String::new();
        }
        let mut log = vec![0u8; size];
        // SAFETY: the buffer has the size just queried.
        if unsafe { (self.nvrtc.log)(self.raw, log.as_mut_ptr().cast()) } != 0 {
            return String::new();
        }
        String::from_utf8_lossy(&log).trim_end_matches('\0').trim_end().to_string()
    }
}

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        // SAFETY: created in `build`.
        unsafe { (self.nvrtc.destroy)(&mut self.raw) };
    }
}

/// The compiler's name of a device's architecture. Hopper's own instructions need the suffix `a`.
pub fn arch(facts: &Facts) -> String {
    let feature = if (facts.major, facts.minor) == (9, 0) { "a" } else { "" };
    format!("sm_{}{}{feature}", facts.major, facts.minor)
}

/// Parses ptxas's report: an entry's name, then its spills, then its registers and shared memory.
fn read_resources(log: &str) -> Vec<Resources> {
    let mut found: Vec<Resources> = vec![];
    for line in log.lines() {
        if let Some(rest) = line.split_once("Compiling entry function '").map(|(_, rest)| rest) {
            let entry = rest.split('\'').next().unwrap_or_default().to_string();
            let is_serialized = log.lines().any(|line| {
                line.contains("instructions are serialized") && line.contains(&format!("'{entry}'"))
            });
            found.push(Resources { entry, registers: 0, spill_bytes: 0, shared_bytes: 0, is_serialized });
        }
        let Some(last) = found.last_mut() else { continue };
        let before = |words: &str| -> Option<u32> {
            let (head, _) = line.split_once(words)?;
            head.rsplit([' ', ',']).find(|w| !w.is_empty())?.parse().ok()
        };
        if let Some(bytes) = before(" bytes spill stores") {
            last.spill_bytes = bytes;
        }
        if let Some(registers) = before(" registers") {
            last.registers = registers;
        }
        if let Some(bytes) = before(" bytes smem") {
            last.shared_bytes = bytes;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ptxas_reports_are_parsed() {
        let log = "ptxas info    : 0 bytes gmem\n\
                   ptxas info    : Compiling entry function 'rms_norm' for 'sm_90a'\n\
                   ptxas info    : Function properties for rms_norm\n    \
                   0 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n\
                   ptxas info    : Used 40 registers, used 1 barriers, 128 bytes smem, 400 bytes cmem[0]\n";
        let wanted = Resources {
            entry: "rms_norm".into(),
            registers: 40,
            spill_bytes: 8,
            shared_bytes: 128,
            is_serialized: false,
        };
        assert_eq!(read_resources(log), [wanted]);
        let said = "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due \
                    to insufficient register resources for the function 'rms_norm'\n";
        assert!(read_resources(&format!("{said}{log}"))[0].is_serialized);
    }

    #[test]
    fn architecture_names_match_nvrtc() {
        let named = |major, minor| arch(&Facts { major, minor, ..Facts::on_paper("sm_80") });
        assert_eq!(
            [named(8, 0), named(8, 9), named(9, 0), named(10, 0), named(12, 0)],
            ["sm_80", "sm_89", "sm_90a", "sm_100", "sm_120"]
        );
    }
}
