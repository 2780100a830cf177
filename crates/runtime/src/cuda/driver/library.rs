//! Finds and opens NVIDIA's libraries by absolute path, preferring the newest that fits the driver.
//!
//! One file of each kind is opened, once per process; NCCL only if ranks exchange, because a single rank has no use for it.
//! Every file found is recorded with the reason why it was opened or rejected.

use std::collections::BTreeSet;
use std::ffi::{CString, c_int};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libloading::os::unix::{Library as Handle, RTLD_GLOBAL, RTLD_LAZY, RTLD_LOCAL, RTLD_NOW};

use crate::cuda::context::CudaError;

/// The libraries this backend uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LibraryKind {
    Driver,
    Nvml,
    Nvrtc,
    CublasLt,
    Cudnn,
    Nccl,
}

impl LibraryKind {
    /// The libraries that every run on a GPU opens, in this order.
    pub const ALL: [LibraryKind; 5] = [
        LibraryKind::Driver,
        LibraryKind::Nvml,
        LibraryKind::Nvrtc,
        LibraryKind::CublasLt,
        LibraryKind::Cudnn,
    ];

    /// Prefix of the file name; a version follows.
    fn file(self) -> &'static str {
        match self {
            // Without the `.1` it is the toolkit's stub, which only satisfies linkers.
            LibraryKind::Driver => "libcuda.so.1",
            LibraryKind::Nvml => "libnvidia-ml.so.1",
            LibraryKind::Nvrtc => "libnvrtc.so",
            LibraryKind::CublasLt => "libcublasLt.so",
            LibraryKind::Cudnn => "libcudnn.so",
            LibraryKind::Nccl => "libnccl.so",
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            LibraryKind::Driver => "driver",
            LibraryKind::Nvml => "NVML",
            LibraryKind::Nvrtc => "NVRTC",
            LibraryKind::CublasLt => "cuBLASLt",
            LibraryKind::Cudnn => "cuDNN",
            LibraryKind::Nccl => "NCCL",
        }
    }

    /// The command that installs a version that fits a driver for this CUDA major; the newest without a driver.
    pub fn install(self, cuda_major: Option<u32>) -> &'static str {
        match (self, cuda_major) {
            (LibraryKind::Driver | LibraryKind::Nvml, _) => "install NVIDIA's driver, 570 or newer",
            (LibraryKind::Nvrtc, Some(12)) => "pip install nvidia-cuda-nvrtc-cu12",
            (LibraryKind::CublasLt, Some(12)) => "pip install nvidia-cublas-cu12",
            (LibraryKind::Cudnn, Some(12)) => "pip install nvidia-cudnn-cu12",
            (LibraryKind::Nccl, Some(12)) => "pip install nvidia-nccl-cu12",
            (LibraryKind::Nvrtc, _) => "pip install \"nvidia-cuda-nvrtc>=13,<13.5\"",
            (LibraryKind::CublasLt, _) => "pip install \"nvidia-cublas>=13,<14\"",
            (LibraryKind::Cudnn, _) => "pip install nvidia-cudnn-cu13",
            (LibraryKind::Nccl, _) => "pip install nvidia-nccl-cu13",
        }
    }

    /// Wheel folders are named after the package without its CUDA version: `nvidia_cublas-13.1.0.3.dist-info`.
    fn wheel(self) -> Option<&'static str> {
        match self {
            LibraryKind::Driver | LibraryKind::Nvml => None,
            LibraryKind::Nvrtc => Some("nvidia_cuda_nvrtc"),
            LibraryKind::CublasLt => Some("nvidia_cublas"),
            LibraryKind::Cudnn => Some("nvidia_cudnn"),
            LibraryKind::Nccl => Some("nvidia_nccl"),
        }
    }
}

/// Major, minor, patch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub [u32; 3]);

impl Version {
    pub fn major(self) -> u32 {
        self.0[0]
    }

    /// Decodes 91900 as 9.19.0.
    fn packed(number: usize) -> Version {
        let n = number as u32;
        Version([n / 10000, n / 100 % 100, n % 100])
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [major, minor, patch] = self.0;
        write!(f, "{major}.{minor}.{patch}")
    }
}

/// Where a file was found; the order breaks ties between equal versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    Named,
    Beside,
    VirtualEnv,
    Conda,
    CudaHome,
    System,
}

impl Origin {
    pub fn words(self) -> &'static str {
        match self {
            Origin::Named => "FLATOUT_CUDA_PATH",
            Origin::Beside => "wheels beside the binary",
            Origin::VirtualEnv => "VIRTUAL_ENV",
            Origin::Conda => "CONDA_PREFIX",
            Origin::CudaHome => "CUDA_HOME",
            Origin::System => "the system",
        }
    }
}

/// A file that could have been opened, and the verdict on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub library: LibraryKind,
    pub path: PathBuf,
    pub origin: Origin,
    pub version: Option<Version>,
    pub verdict: String,
}

/// An open library, which is never closed.
pub struct Library {
    pub kind: LibraryKind,
    pub path: PathBuf,
    /// The version the library reports, or that of its file if it reports none.
    pub version: Version,
    handle: Handle,
}

impl Library {
    /// Resolves an entry point.
    ///
    /// # Safety
    /// `T` is a function pointer with the signature of this symbol.
    pub unsafe fn symbol<T: Copy>(&'static self, name: &str) -> Result<T, CudaError> {
        // SAFETY: guaranteed by the caller; the library is never closed.
        unsafe { resolve(&self.handle, &self.path, name) }
    }
}

/// # Safety
/// As for `Library::symbol`; in addition the library must outlive the returned pointer.
unsafe fn resolve<T: Copy>(handle: &Handle, path: &Path, name: &str) -> Result<T, CudaError> {
    let text = CString::new(name).map_err(|_| CudaError::new("a symbol's name holds a zero byte"))?;
    // SAFETY: guaranteed by the caller.
    let found = unsafe { handle.get::<T>(text.as_bytes_with_nul()) };
    found.map(|s| *s).map_err(|_| CudaError::new(format!("{} has no `{name}`", path.display())))
}

/// A Python prefix whose wheels rank like those next to the binary.
static PREFIX: OnceLock<PathBuf> = OnceLock::new();

/// Adds the wheels under the prefix of the Python environment this process runs in, as its binary may be a link to an
/// interpreter elsewhere. Call it before any search for libraries; only the first call has an effect.
pub fn look_under(prefix: PathBuf) {
    let _ = PREFIX.set(prefix);
}

/// Folders to search, with the depth of the search, in order of preference. Read from the environment once.
#[derive(Clone, Debug, Default)]
pub struct Places(pub Vec<(Origin, PathBuf, usize)>);

impl Places {
    pub fn of_this_process() -> Places {
        let variable = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let mut places = vec![];
        if let Some(path) = variable("FLATOUT_CUDA_PATH") {
            places.push((Origin::Named, path, 4));
        }
        places.extend(PREFIX.get().into_iter().flat_map(|root| wheels(root)).map(|p| (Origin::Beside, p, 2)));
        let binary = std::env::current_exe().and_then(|path| path.canonicalize()).ok();
        // bin/flatout with lib/python3.x/site-packages, as wheels are installed; or a folder next to the binary.
        if let Some(folder) = binary.as_deref().and_then(Path::parent) {
            places.extend(wheels(folder.parent().unwrap_or(folder)).map(|p| (Origin::Beside, p, 2)));
            places.push((Origin::Beside, folder.join("nvidia"), 2));
        }
        if let Some(root) = variable("VIRTUAL_ENV") {
            places.extend(wheels(&root).map(|p| (Origin::VirtualEnv, p, 2)));
        }
        if let Some(root) = variable("CONDA_PREFIX") {
            places.extend(wheels(&root).map(|p| (Origin::Conda, p, 2)));
            places.push((Origin::Conda, root.join("lib"), 0));
        }
        for root in ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(variable) {
            places.push((Origin::CudaHome, root.join("lib64"), 0));
            places.push((Origin::CudaHome, root.join("lib"), 0));
        }
        places.extend(system().into_iter().map(|p| (Origin::System, p, 0)));
        Places(places)
    }
}

/// `site-packages/nvidia` under a Python prefix.
fn wheels(root: &Path) -> impl Iterator<Item = PathBuf> {
    let lib = root.join("lib");
    names(&lib)
        .into_iter()
        .filter(|name| name.starts_with("python"))
        .map(move |name| lib.join(name).join("site-packages/nvidia"))
}

/// The folders known to the dynamic linker, and those used by toolkits and containers.
fn system() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = vec![];
    if let Some(paths) = std::env::var_os("LD_LIBRARY_PATH") {
        folders.extend(std::env::split_paths(&paths).filter(|p| p.is_absolute()));
    }
    let toolkits = names(Path::new("/usr/local")).into_iter().filter(|n| n.starts_with("cuda"));
    folders.extend(toolkits.map(|name| Path::new("/usr/local").join(name).join("lib64")));
    let conf = Path::new("/etc/ld.so.conf.d");
    for name in names(conf).into_iter().filter(|n| n.ends_with(".conf")) {
        let text = std::fs::read_to_string(conf.join(name)).unwrap_or_default();
        folders.extend(text.lines().map(str::trim).filter(|l| l.starts_with('/')).map(PathBuf::from));
    }
    let usual = [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/nvidia/lib64",
        "/usr/lib/wsl/lib",
        "/run/opengl-driver/lib",
    ];
    folders.extend(usual.map(PathBuf::from));
    folders
}

/// The entries of a folder, sorted; empty if it cannot be read.
fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else { return vec![] };
    let mut names: Vec<String> =
        entries.filter_map(|e| Some(e.ok()?.file_name().to_string_lossy().into_owned())).collect();
    names.sort();
    names
}

/// Every candidate of a library, best first, with verdicts still empty. If several must be compared and a file name does not
/// tell its version, the file is opened to ask.
pub fn find(kind: LibraryKind, places: &Places) -> Vec<Candidate> {
    let mut seen = BTreeSet::new();
    let mut found = vec![];
    for (origin, root, depth) in &places.0 {
        for path in files(kind, root, *depth) {
            let whole = path.canonicalize().unwrap_or_else(|_| path.clone());
            if seen.insert(whole.clone()) {
                let version = version_of_file(kind, &whole);
                found.push(Candidate {
                    library: kind,
                    path,
                    origin: *origin,
                    version,
                    verdict: String::new(),
                });
            }
        }
    }
    if found.len() > 1 {
        for candidate in found.iter_mut().filter(|c| c.version.is_none()) {
            candidate.version = version_by_asking(kind, &candidate.path);
        }
    }
    // Stable sort: equal versions keep the order of the search paths.
    found.sort_by_key(|c| (c.origin != Origin::Named, std::cmp::Reverse(c.version)));
    found
}

/// Files of a library under a folder, or `root` itself if it is a file.
fn files(kind: LibraryKind, root: &Path, depth: usize) -> Vec<PathBuf> {
    if root.is_file() {
        let name = root.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        return if is_file_of(kind, &name) { vec![root.into()] } else { vec![] };
    }
    let mut found = vec![];
    for name in names(root) {
        let path = root.join(&name);
        if is_file_of(kind, &name) {
            found.push(path);
        } else if depth > 0 && !name.starts_with('.') && name != "stubs" && path.is_dir() {
            found.extend(files(kind, &path, depth - 1));
        }
    }
    found
}

/// Accepts `libnvrtc.so.13` but not `libnvrtc.alt.so.13`, `libnvrtc.so.13.debug` or `libcudnn_ops.so.9`.
fn is_file_of(kind: LibraryKind, name: &str) -> bool {
    let Some(rest) = name.strip_prefix(kind.file()) else { return false };
    rest.is_empty() || rest.starts_with('.') && rest[1..].bytes().all(|b| b.is_ascii_digit() || b == b'.')
}

/// Version from the file name, if it has more than the major, or from the wheel that installed the file.
fn version_of_file(kind: LibraryKind, path: &Path) -> Option<Version> {
    let name = path.file_name()?.to_string_lossy().into_owned();
    // The driver's file name carries its version instead of the `.1`: libcuda.so.580.82.07.
    let digits = name.split_once(".so.").map_or("", |(_, digits)| digits);
    if digits.contains('.') {
        return parse(digits);
    }
    let package = kind.wheel()?;
    let packages = path.ancestors().find(|p| p.ends_with("nvidia"))?.parent()?;
    names(packages).iter().find_map(|name| {
        let (wheel, version) = name.strip_suffix(".dist-info")?.split_once('-')?;
        let suffix = wheel.strip_prefix(package)?;
        (suffix.is_empty() || suffix.starts_with("_cu")).then(|| parse(version)).flatten()
    })
}

fn parse(digits: &str) -> Option<Version> {
    let mut numbers = [0; 3];
    for (to, text) in numbers.iter_mut().zip(digits.split('.')) {
        *to = text.parse().ok()?;
    }
    Some(Version(numbers))
}

/// Opens a candidate temporarily and asks for its version.
fn version_by_asking(kind: LibraryKind, path: &Path) -> Option<Version> {
    // SAFETY: NVIDIA's libraries may be loaded and unloaded; no pointer into the library is kept.
    let handle = unsafe { Handle::open(Some(path), RTLD_LAZY | RTLD_LOCAL) }.ok()?;
    own_version(kind, &handle, path)
}

/// The version an open library reports.
fn own_version(kind: LibraryKind, handle: &Handle, path: &Path) -> Option<Version> {
    type Count = unsafe extern "C" fn() -> usize;
    type Pair = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
    type Number = unsafe extern "C" fn(*mut c_int) -> c_int;
    match kind {
        LibraryKind::Driver | LibraryKind::Nvml => None,
        LibraryKind::Nvrtc => {
            let (mut major, mut minor) = (0, 0);
            // SAFETY: nvrtcVersion writes two integers; the handle is open.
            let status =
                unsafe { resolve::<Pair>(handle, path, "nvrtcVersion").ok()?(&mut major, &mut minor) };
            (status == 0).then_some(Version([major as u32, minor as u32, 0]))
        }
        // SAFETY: both take nothing and return size_t; the handle is open.
        LibraryKind::CublasLt => {
            Some(Version::packed(unsafe { resolve::<Count>(handle, path, "cublasLtGetVersion").ok()?() }))
        }
        // SAFETY: as above.
        LibraryKind::Cudnn => {
            Some(Version::packed(unsafe { resolve::<Count>(handle, path, "cudnnGetVersion").ok()?() }))
        }
        LibraryKind::Nccl => {
            let mut number = 0;
            // SAFETY: ncclGetVersion writes one integer; the handle is open.
            let status = unsafe { resolve::<Number>(handle, path, "ncclGetVersion").ok()?(&mut number) };
            (status == 0).then(|| Version::packed(number.max(0) as usize))
        }
    }
}

/// Opens the first candidate that fits and loads, and fills in every verdict. `cuda_major` is what the driver supports.
fn choose(candidates: &mut [Candidate], cuda_major: Option<u32>) -> Option<Library> {
    let mut chosen: Option<Library> = None;
    for candidate in candidates {
        let kind = candidate.library;
        let is_toolkit = matches!(kind, LibraryKind::Nvrtc | LibraryKind::CublasLt);
        candidate.verdict = match (&chosen, candidate.version, cuda_major) {
            (Some(winner), ..) => {
                let why = match candidate.version {
                    Some(version) if version < winner.version => format!("{} is newer", winner.version),
                    Some(version) if version == winner.version => "the same version, found later".into(),
                    _ => "another comes first".into(),
                };
                format!("not used: {why}")
            }
            (None, Some(version), Some(most)) if is_toolkit && version.major() > most => {
                format!("not used: the driver supports CUDA {most}, this needs {}", version.major())
            }
            _ => match open(kind, &candidate.path, candidate.version) {
                Ok(library) => {
                    candidate.version = Some(library.version);
                    chosen = Some(library);
                    format!("used: the first choice, from {}", candidate.origin.words())
                }
                Err(why) => format!("not used: {why}"),
            },
        };
    }
    chosen
}

fn open(kind: LibraryKind, path: &Path, version: Option<Version>) -> Result<Library, CudaError> {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    if kind == LibraryKind::Nvrtc {
        // NVRTC loads its builtins by file name: loading the neighbouring file first makes it the one found.
        let folder = path.parent().unwrap_or(Path::new("/"));
        for name in names(folder).iter().filter(|n| n.starts_with("libnvrtc-builtins.so.")) {
            // SAFETY: a library of data and pure functions.
            if let Ok(builtins) = unsafe { Handle::open(Some(folder.join(name)), RTLD_NOW | RTLD_GLOBAL) } {
                std::mem::forget(builtins);
            }
        }
    }
    // SAFETY: loading runs the initialisers of NVIDIA's libraries, which are designed to be loaded dynamically.
    let handle = unsafe { Handle::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) };
    let handle = handle.map_err(|why| CudaError::new(format!("it does not open: {why}")))?;
    let version = own_version(kind, &handle, &path).or(version).unwrap_or_default();
    Ok(Library { kind, path, version, handle })
}

/// The libraries this process found and opened.
pub struct Libraries {
    pub candidates: Vec<Candidate>,
    open: Vec<Library>,
    /// The major CUDA version the driver supports.
    pub cuda_major: Option<u32>,
}

impl Libraries {
    pub fn get(&'static self, kind: LibraryKind) -> Option<&'static Library> {
        self.open.iter().find(|l| l.kind == kind)
    }

    /// The library, or how to install it.
    pub fn require(&'static self, kind: LibraryKind) -> Result<&'static Library, CudaError> {
        self.get(kind).ok_or_else(|| absent(kind, &self.candidates, self.cuda_major))
    }
}

/// The error for a library of which no candidate opened: which files were tried, and how to install it.
fn absent(kind: LibraryKind, candidates: &[Candidate], cuda_major: Option<u32>) -> CudaError {
    let found = candidates.iter().find(|c| c.library == kind);
    let tried = found.map_or_else(String::new, |c| format!(" ({}: {})", c.path.display(), c.verdict));
    CudaError::new(format!(
        "{} was not found{tried}: {}, or set FLATOUT_CUDA_PATH to the folder that has it",
        kind.name(),
        kind.install(cuda_major)
    ))
}

/// The result of searching for NCCL.
pub struct FoundNccl {
    pub candidates: Vec<Candidate>,
    open: Option<Library>,
}

impl FoundNccl {
    pub fn get(&'static self) -> Option<&'static Library> {
        self.open.as_ref()
    }

    /// The library, or how to install it.
    pub fn require(&'static self) -> Result<&'static Library, CudaError> {
        self.get().ok_or_else(|| absent(LibraryKind::Nccl, &self.candidates, libraries().cuda_major))
    }
}

/// Finds NCCL on the first call, and opens it if there is a driver.
pub fn nccl() -> &'static FoundNccl {
    static OPENED: OnceLock<FoundNccl> = OnceLock::new();
    OPENED.get_or_init(|| {
        let mut candidates = find(LibraryKind::Nccl, &Places::of_this_process());
        if libraries().open.is_empty() {
            candidates.iter_mut().for_each(|c| c.verdict = UNOPENED.into());
            return FoundNccl { candidates, open: None };
        }
        let open = choose(&mut candidates, libraries().cuda_major);
        FoundNccl { candidates, open }
    })
}

/// The verdict on every file on a machine without a driver.
const UNOPENED: &str = "not opened: there is no NVIDIA driver";

/// Opens the libraries on the first call and caches them.
pub fn libraries() -> &'static Libraries {
    static OPENED: OnceLock<Libraries> = OnceLock::new();
    OPENED.get_or_init(|| {
        let places = Places::of_this_process();
        let mut all = Libraries { candidates: vec![], open: vec![], cuda_major: None };
        for kind in LibraryKind::ALL {
            let mut candidates = find(kind, &places);
            if kind != LibraryKind::Driver && all.open.is_empty() {
                candidates.iter_mut().for_each(|c| c.verdict = UNOPENED.into());
                all.candidates.extend(candidates);
                continue;
            }
            let library = choose(&mut candidates, all.cuda_major);
            if let Some(driver) = library.as_ref().filter(|l| l.kind == LibraryKind::Driver) {
                all.cuda_major = driver_version(driver).map(|version| version / 1000);
            }
            all.candidates.extend(candidates);
            all.open.extend(library);
        }
        all
    })
}

/// The CUDA version of a driver library that is not in use yet: 13000 for 13.0.
fn driver_version(library: &Library) -> Option<u32> {
    type Ask = unsafe extern "C" fn(*mut c_int) -> c_int;
    let mut version = 0;
    // SAFETY: cuDriverGetVersion writes one integer, before cuInit too; the handle is open.
    let status =
        unsafe { resolve::<Ask>(&library.handle, &library.path, "cuDriverGetVersion").ok()?(&mut version) };
    (status == 0).then_some(version.max(0) as u32)
}

/// Opens NVRTC alone, for compiling without a GPU.
pub fn nvrtc_alone() -> Result<&'static Library, CudaError> {
    static OPENED: OnceLock<Option<Library>> = OnceLock::new();
    let opened = OPENED.get_or_init(|| {
        let mut candidates = find(LibraryKind::Nvrtc, &Places::of_this_process());
        choose(&mut candidates, None)
    });
    let missing = || CudaError::new(format!("NVRTC was not found: {}", LibraryKind::Nvrtc.install(None)));
    opened.as_ref().ok_or_else(missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates empty files under a fresh temporary folder.
    fn tree(name: &str, files: &[&str]) -> PathBuf {
        let root = std::env::temp_dir().join(format!("flatout-library-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        for file in files {
            let path = root.join(file);
            std::fs::create_dir_all(path.parent().expect("a file has a folder")).unwrap();
            std::fs::write(path, "").unwrap();
        }
        root
    }

    #[test]
    fn the_newest_is_preferred_after_an_explicit_path() {
        let root = tree(
            "order",
            &[
                "system/libcudnn.so.9.14.0",
                "system/libcudnn_ops.so.9.14.0",
                "venv/nvidia/cudnn/lib/libcudnn.so.9",
                "venv/nvidia_cudnn_cu13-9.19.0.56.dist-info/RECORD",
                "named/deep/er/libcudnn.so.9.1.0",
            ],
        );
        let mut places = Places(vec![
            (Origin::VirtualEnv, root.join("venv/nvidia"), 2),
            (Origin::System, root.join("system"), 0),
        ]);
        let order = |places: &Places| -> Vec<String> {
            let found = find(LibraryKind::Cudnn, places);
            found.iter().map(|c| format!("{:?} {}", c.origin, c.version.unwrap())).collect()
        };
        assert_eq!(order(&places), ["VirtualEnv 9.19.0", "System 9.14.0"]);
        places.0.insert(0, (Origin::Named, root.join("named"), 4));
        assert_eq!(order(&places), ["Named 9.1.0", "VirtualEnv 9.19.0", "System 9.14.0"]);
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn files_that_fail_to_open_are_reported_and_skipped() {
        let root = tree("broken", &["libnvrtc.so.13.0.1", "libnvrtc.so.12.9.1", "libnvrtc.so.99.0.0"]);
        let mut candidates = find(LibraryKind::Nvrtc, &Places(vec![(Origin::System, root.clone(), 0)]));
        assert!(choose(&mut candidates, Some(13)).is_none());
        let verdicts: Vec<&str> = candidates.iter().map(|c| c.verdict.as_str()).collect();
        assert_eq!(verdicts[0], "not used: the driver supports CUDA 13, this needs 99");
        assert!(verdicts[1].starts_with("not used: it does not open"), "{verdicts:?}");
        assert!(verdicts[2].starts_with("not used: it does not open"), "{verdicts:?}");
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn the_install_command_matches_the_driver() {
        assert_eq!(LibraryKind::CublasLt.install(Some(12)), "pip install nvidia-cublas-cu12");
        assert_eq!(LibraryKind::CublasLt.install(Some(13)), "pip install \"nvidia-cublas>=13,<14\"");
        assert_eq!(LibraryKind::Nvrtc.install(Some(12)), "pip install nvidia-cuda-nvrtc-cu12");
        assert_eq!(LibraryKind::Cudnn.install(None), "pip install nvidia-cudnn-cu13");
        assert_eq!(LibraryKind::Nccl.install(Some(12)), "pip install nvidia-nccl-cu12");
        assert_eq!(LibraryKind::Nccl.install(None), "pip install nvidia-nccl-cu13");
        assert_eq!(LibraryKind::Driver.install(Some(12)), LibraryKind::Nvml.install(None));
    }

    #[test]
    fn nccl_gets_its_version_from_the_wheel_and_reports_absence() {
        let root = tree(
            "nccl",
            &[
                "nvidia/nccl/lib/libnccl.so.2",
                "nvidia_nccl_cu13-2.28.9.dist-info/RECORD",
                "nvidia/nccl/lib/x",
            ],
        );
        let places = Places(vec![(Origin::VirtualEnv, root.join("nvidia"), 2)]);
        let mut found = find(LibraryKind::Nccl, &places);
        assert_eq!(found.iter().map(|c| c.version).collect::<Vec<_>>(), [Some(Version([2, 28, 9]))]);
        assert!(choose(&mut found, Some(13)).is_none(), "an empty file is no library");
        let said = absent(LibraryKind::Nccl, &found, Some(13)).to_string();
        assert!(
            said.starts_with("NCCL was not found (") && said.contains("not used: it does not open"),
            "{said}"
        );
        assert!(said.contains("pip install nvidia-nccl-cu13, or set FLATOUT_CUDA_PATH"), "{said}");
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn only_the_library_itself_is_a_candidate() {
        for (name, is) in [
            ("libnvrtc.so.13", true),
            ("libnvrtc.so", true),
            ("libnvrtc.alt.so.13", false),
            ("libnvrtc-builtins.so.13.0", false),
            ("libnvrtc.so.13.old", false),
        ] {
            assert_eq!(is_file_of(LibraryKind::Nvrtc, name), is, "{name}");
        }
        assert!(!is_file_of(LibraryKind::Driver, "libcuda.so"), "the toolkit's stub");
        assert!(is_file_of(LibraryKind::Driver, "libcuda.so.1"));
    }
}
