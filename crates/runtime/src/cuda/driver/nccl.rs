//! NCCL, which moves tensors between GPUs: entry points and the communicators of a rank.
//!
//! Written against nccl.h of 2.27 and 2.28. Communicators are created before the arena, so that their memory is accounted for,
//! and each is used by one stream at a time. Once every plan is captured, the host only calls `failure` here.

mod window;

pub use window::{WindowCalls, Windows};

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use flatout_ir::{Axis, Mesh};

use super::device::Device;
use super::library::{self, Library, LibraryKind, Version};
use crate::cuda::context::{CudaError, Stream};

/// Memory that plans reserve for NCCL until a session has measured its use.
pub const CEILING_BYTES: u64 = 1 << 30;
/// The oldest supported version: the first with every field of `Config`.
const OLDEST: Version = Version([2, 27, 0]);
/// Size of a unique id in bytes.
pub const ID_BYTES: usize = 128;

type Handle = *mut c_void;

/// `ncclUniqueId`, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; ID_BYTES]);

/// `ncclConfig_t` of 2.27; a newer library recognises it by size and version and fills in the fields it lacks.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
    comm_name: *const c_char,
    collnet_enable: c_int,
    cta_policy: c_int,
    shrink_share: c_int,
    nvls_ctas: c_int,
}

const NCCL_API_MAGIC: c_uint = 0xcafe_beef;
const NCCL_CONFIG_VERSION: c_uint = 22700;
const NCCL_CONFIG_UNDEF_INT: c_int = c_int::MIN;
const NCCL_SUCCESS: c_int = 0;
const NCCL_IN_PROGRESS: c_int = 7;
/// `ncclDataType_t`.
const NCCL_INT8: c_int = 0;
const NCCL_FLOAT32: c_int = 7;

/// Exchanges use copy engines instead of multiprocessors where possible.
const NCCL_CTA_POLICY_ZERO: c_int = 2;
/// The first version with this policy.
const ZERO_CTAS_SINCE: Version = Version([2, 28, 0]);

impl Config {
    /// The configuration for blocking calls. With a window, copy engines may perform transfers that need no addition.
    fn blocking(nccl: Version, has_window: bool) -> Config {
        let unset = NCCL_CONFIG_UNDEF_INT;
        let takes_none = has_window && nccl >= ZERO_CTAS_SINCE;
        Config {
            size: size_of::<Config>(),
            magic: NCCL_API_MAGIC,
            version: NCCL_CONFIG_VERSION,
            blocking: 1,
            cga_cluster_size: unset,
            min_ctas: unset,
            max_ctas: unset,
            net_name: std::ptr::null(),
            split_share: unset,
            traffic_class: unset,
            comm_name: std::ptr::null(),
            collnet_enable: unset,
            cta_policy: if takes_none { NCCL_CTA_POLICY_ZERO } else { unset },
            shrink_share: unset,
            nvls_ctas: unset,
        }
    }
}

/// Reduction operator: `ncclRedOp_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Reduction {
    Sum = 0,
    Max = 2,
}

/// Declares each entry point once: field, symbol, signature. All return `ncclResult_t`.
macro_rules! entries {
    ($($field:ident = $symbol:literal ($($arg:ty),*);)*) => {
        /// Entry points of libnccl.
        pub struct Nccl {
            library: &'static Library,
            error_string: unsafe extern "C" fn(c_int) -> *const c_char,
            last_error: unsafe extern "C" fn(Handle) -> *const c_char,
            $($field: unsafe extern "C" fn($($arg),*) -> c_int,)*
        }

        impl Nccl {
            fn open(library: &'static Library) -> Result<Nccl, CudaError> {
                Ok(Nccl {
                    library,
                    // SAFETY: the signatures are those of the header for these symbols.
                    error_string: unsafe { library.symbol("ncclGetErrorString")? },
                    // SAFETY: as above.
                    last_error: unsafe { library.symbol("ncclGetLastError")? },
                    // SAFETY: as above.
                    $($field: unsafe { library.symbol($symbol)? },)*
                })
            }
        }
    };
}

entries! {
    unique_id = "ncclGetUniqueId" (*mut UniqueId);
    init_rank = "ncclCommInitRankConfig" (*mut Handle, c_int, UniqueId, c_int, *mut Config);
    split = "ncclCommSplit" (Handle, c_int, c_int, *mut Handle, *mut Config);
    destroy = "ncclCommDestroy" (Handle);
    abort = "ncclCommAbort" (Handle);
    async_error = "ncclCommGetAsyncError" (Handle, *mut c_int);
    all_gather = "ncclAllGather" (*const c_void, *mut c_void, usize, c_int, Handle, Handle);
    reduce_scatter = "ncclReduceScatter" (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Handle);
    all_reduce = "ncclAllReduce" (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Handle);
    send = "ncclSend" (*const c_void, usize, c_int, c_int, Handle, Handle);
    receive = "ncclRecv" (*mut c_void, usize, c_int, c_int, Handle, Handle);
    group_start = "ncclGroupStart" ();
    group_end = "ncclGroupEnd" ();
}

/// NCCL's entry points, resolved once; or how to install it.
pub fn nccl() -> Result<&'static Nccl, CudaError> {
    static OPENED: OnceLock<Result<Nccl, CudaError>> = OnceLock::new();
    let open = || {
        let library = library::nccl().require()?;
        if library.version < OLDEST {
            return Err(CudaError::new(format!(
                "NCCL {} at {} is too old, 2.27 is the least: {}",
                library.version,
                library.path.display(),
                LibraryKind::Nccl.install(library::libraries().cuda_major)
            )));
        }
        Nccl::open(library)
    };
    OPENED.get_or_init(open).as_ref().map_err(Clone::clone)
}

impl Nccl {
    /// Version such as `2.28.9`.
    pub fn version(&self) -> String {
        self.library.version.to_string()
    }

    /// Creates the unique id of a new communicator. One rank calls this and distributes the id to the others.
    pub fn new_id(&self) -> Result<Vec<u8>, CudaError> {
        let mut id = UniqueId([0; ID_BYTES]);
        // SAFETY: writes one id.
        self.ok(unsafe { (self.unique_id)(&mut id) }, null_mut(), "ncclGetUniqueId")?;
        Ok(id.0.to_vec())
    }

    /// Turns a status into an error with the name of the call, NCCL's description and its last error message.
    fn ok(&self, status: c_int, communicator: Handle, call: &str) -> Result<(), CudaError> {
        if status == NCCL_SUCCESS {
            return Ok(());
        }
        // SAFETY: returns a static string for any status.
        let words = text(unsafe { (self.error_string)(status) });
        let last = self.last_error_message(communicator);
        let last = if last.is_empty() { String::new() } else { format!(", {last}") };
        Err(CudaError::status(format!("{call}: {words}{last}"), status))
    }

    /// NCCL's last error message; empty if there is none.
    fn last_error_message(&self, communicator: Handle) -> String {
        // SAFETY: null or a live communicator; NCCL owns the string.
        let words = text(unsafe { (self.last_error)(communicator) });
        words.split_whitespace().collect::<Vec<_>>().join(" ")
    }
}

fn text(at: *const c_char) -> String {
    // SAFETY: null, or a zero-terminated string owned by NCCL.
    if at.is_null() { String::new() } else { unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned() }
}

/// One rank's endpoint in a group of ranks that exchange.
pub struct Communicator {
    nccl: &'static Nccl,
    raw: Handle,
    rank: usize,
    ranks: usize,
}

// SAFETY: any thread may call NCCL. Only the session's thread enqueues, and the error state may be queried concurrently.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

/// A contiguous range of f32 in device memory to send to, or receive from, a rank of the group.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    pub rank: usize,
    pub at: u64,
    pub elements: usize,
}

impl Communicator {
    /// This rank's number in its group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    pub fn ranks(&self) -> usize {
        self.ranks
    }

    fn ok(&self, status: c_int, call: &str) -> Result<(), CudaError> {
        self.nccl.ok(status, self.raw, call)
    }

    /// Enqueues an all-gather: `bytes` bytes from every rank, concatenated in rank order.
    ///
    /// # Safety
    /// `from` refers to `bytes` bytes and `to` to that many per rank, in memory of this device that stays allocated until the
    /// stream has executed the call.
    pub unsafe fn all_gather(
        &self,
        from: u64,
        to: u64,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), CudaError> {
        let (from, to) = (from as *const c_void, to as *mut c_void);
        // SAFETY: guaranteed by the caller.
        let status = unsafe { (self.nccl.all_gather)(from, to, bytes, NCCL_INT8, self.raw, stream.raw()) };
        self.ok(status, "ncclAllGather")
    }

    /// Enqueues an all-reduce over all ranks, in an order of NCCL's choice; `to` may equal `from`.
    ///
    /// # Safety
    /// Both refer to `elements` f32, in memory of this device that stays allocated until the stream has executed the call.
    pub unsafe fn all_reduce(
        &self,
        from: u64,
        to: u64,
        elements: usize,
        by: Reduction,
        stream: Stream,
    ) -> Result<(), CudaError> {
        let (from, to) = (from as *const c_void, to as *mut c_void);
        // SAFETY: guaranteed by the caller.
        let status = unsafe {
            (self.nccl.all_reduce)(from, to, elements, NCCL_FLOAT32, by as c_int, self.raw, stream.raw())
        };
        self.ok(status, "ncclAllReduce")
    }

    /// Enqueues a reduce-scatter over all ranks, in an order of NCCL's choice: each rank gets one block of the sum.
    ///
    /// # Safety
    /// `from` refers to `elements` f32 per rank and `to` to that many for one rank, in memory of this device that stays
    /// allocated until the stream has executed the call.
    pub unsafe fn reduce_scatter(
        &self,
        from: u64,
        to: u64,
        elements: usize,
        stream: Stream,
    ) -> Result<(), CudaError> {
        let (from, to, sum) = (from as *const c_void, to as *mut c_void, Reduction::Sum as c_int);
        // SAFETY: guaranteed by the caller.
        let status = unsafe {
            (self.nccl.reduce_scatter)(from, to, elements, NCCL_FLOAT32, sum, self.raw, stream.raw())
        };
        self.ok(status, "ncclReduceScatter")
    }

    /// Enqueues point-to-point transfers as one group; nothing is reduced.
    ///
    /// # Safety
    /// Every range lies in memory of this device that stays allocated until the stream has executed the call, and no received
    /// range overlaps another range.
    pub unsafe fn exchange(
        &self,
        send: &[Transfer],
        receive: &[Transfer],
        stream: Stream,
    ) -> Result<(), CudaError> {
        // SAFETY: takes no argument.
        self.ok(unsafe { (self.nccl.group_start)() }, "ncclGroupStart")?;
        let mut asked = Ok(());
        for (transfer, is_sent) in send.iter().map(|p| (p, true)).chain(receive.iter().map(|p| (p, false))) {
            let Transfer { rank, at, elements } = *transfer;
            let (peer, dtype, raw) = (rank as c_int, NCCL_FLOAT32, self.raw);
            if elements == 0 || asked.is_err() {
                continue;
            }
            asked = match is_sent {
                // SAFETY: guaranteed by the caller.
                true => self.ok(
                    unsafe {
                        (self.nccl.send)(at as *const c_void, elements, dtype, peer, raw, stream.raw())
                    },
                    "ncclSend",
                ),
                // SAFETY: guaranteed by the caller.
                false => self.ok(
                    unsafe {
                        (self.nccl.receive)(at as *mut c_void, elements, dtype, peer, raw, stream.raw())
                    },
                    "ncclRecv",
                ),
            };
        }
        // SAFETY: a group that was started must be ended, even after an error.
        let ended = self.ok(unsafe { (self.nccl.group_end)() }, "ncclGroupEnd");
        asked.and(ended)
    }

    /// An asynchronous error that occurred after calls had returned, if any.
    fn failure(&self) -> Option<CudaError> {
        let mut state = NCCL_SUCCESS;
        // SAFETY: writes one status; the communicator is alive.
        let status = unsafe { (self.nccl.async_error)(self.raw, &mut state) };
        let state = if status == NCCL_SUCCESS { state } else { status };
        if state == NCCL_IN_PROGRESS { None } else { self.ok(state, "NCCL").err() }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // A failed communicator is aborted: destroying it would wait for ranks that are gone.
        let has_failed = self.failure().is_some();
        // SAFETY: created in `connect`; no pending work uses it, because works are dropped after their stream was synchronised.
        unsafe { if has_failed { (self.nccl.abort)(self.raw) } else { (self.nccl.destroy)(self.raw) } };
    }
}

/// The communicators of a rank, one per axis of the mesh along which it may exchange.
pub struct Communicators {
    nccl: &'static Nccl,
    mesh: Mesh,
    rank: usize,
    /// Dropped first, because it holds the communicators.
    watch: Option<Watch>,
    by_axis: Vec<(Axis, Arc<Communicator>)>,
    bytes: u64,
}

/// A thread that polls communicators for errors until its sender is dropped.
struct Watch {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Polling interval.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

impl Communicators {
    /// Connects this rank of a mesh with all others, which make the same call with the id that one of them created. A mesh of
    /// one rank gets a communicator of one rank. `has_window` announces that memory will be registered with it. Gives up after
    /// `patience`; the thread that waits inside NCCL is then leaked until the process ends.
    pub fn connect(
        device: &Device,
        mesh: Mesh,
        rank: usize,
        id: &[u8],
        has_window: bool,
        patience: Duration,
    ) -> Result<Communicators, CudaError> {
        let nccl = nccl()?;
        let id: [u8; ID_BYTES] = id.try_into().map_err(|_| {
            CudaError::new(format!("an id of NCCL has {ID_BYTES} bytes, and {} came", id.len()))
        })?;
        device.bind()?;
        let (before, _) = device.driver().memory()?;
        let (sender, made) = mpsc::channel();
        let bind = device.binder();
        let spawned = std::thread::Builder::new().name("nccl".into()).spawn(move || {
            let made = bind().and_then(|()| make(nccl, mesh, rank, UniqueId(id), has_window));
            // After a timeout nobody receives this.
            drop(sender.send(made));
        });
        spawned.map_err(|why| CudaError::new(format!("a thread for NCCL cannot be started: {why}")))?;
        let by_axis = match made.recv_timeout(patience) {
            Ok(made) => made.map_err(|why| {
                CudaError::status(
                    format!("NCCL {} does not connect the ranks: {}; {HINT}", nccl.version(), why.what),
                    why.code,
                )
            })?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(CudaError::new("the thread that connects NCCL ended before it was done"));
            }
            Err(RecvTimeoutError::Timeout) => {
                let last = nccl.last_error_message(null_mut());
                let last = if last.is_empty() { String::new() } else { format!(" ({last})") };
                return Err(CudaError::new(format!(
                    "NCCL {} did not connect the ranks within {} s{last}; {HINT}",
                    nccl.version(),
                    patience.as_secs()
                )));
            }
        };
        let (after, _) = device.driver().memory()?;
        Ok(Communicators { nccl, mesh, rank, by_axis, bytes: before.saturating_sub(after), watch: None })
    }

    pub fn mesh(&self) -> Mesh {
        self.mesh
    }

    /// This rank's number in the mesh.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The communicator of the group along an axis.
    pub fn along(&self, axis: Axis) -> Option<&Arc<Communicator>> {
        self.by_axis.iter().find(|(own, _)| *own == axis).map(|(_, communicator)| communicator)
    }

    /// Device memory that connecting allocated; the first exchanges allocate more.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The calls that register memory as a window of these communicators.
    pub fn windows(&self) -> Result<WindowCalls, CudaError> {
        self.nccl.windows()
    }

    /// Name and version: `nccl 2.28.9`.
    pub fn words(&self) -> String {
        format!("nccl {}", self.nccl.version())
    }

    /// Starts a thread that polls every second for asynchronous errors and reports the first one.
    pub fn watch(&mut self, report: impl FnOnce(&str) + Send + 'static) -> Result<(), CudaError> {
        let watched: Vec<Arc<Communicator>> = self.by_axis.iter().map(|(_, own)| Arc::clone(own)).collect();
        let (stop, stopped) = mpsc::channel::<()>();
        let ask = move || {
            while stopped.recv_timeout(POLL_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                if let Some(why) = watched.iter().find_map(|communicator| communicator.failure()) {
                    return report(&why.to_string());
                }
            }
        };
        let thread = std::thread::Builder::new().name("nccl-watch".into()).spawn(ask);
        let thread = thread.map_err(|why| CudaError::new(format!("a thread cannot be started: {why}")))?;
        self.watch = Some(Watch { stop: Some(stop), thread: Some(thread) });
        Ok(())
    }
}

impl Drop for Watch {
    /// Joins the thread, so that it does not outlive this as the last owner of a communicator.
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Hint for ranks that do not connect.
const HINT: &str = "NCCL_DEBUG=INFO makes it say what it does";

/// Creates the communicators: one of all ranks, and one split off for every axis with a subset of them.
fn make(
    nccl: &'static Nccl,
    mesh: Mesh,
    rank: usize,
    id: UniqueId,
    has_window: bool,
) -> Result<Vec<(Axis, Arc<Communicator>)>, CudaError> {
    let ranks = mesh.ranks();
    let config = || Config::blocking(nccl.library.version, has_window);
    let mut raw = null_mut();
    // SAFETY: writes one handle; the config is read before the call returns.
    let status = unsafe { (nccl.init_rank)(&mut raw, ranks as c_int, id, rank as c_int, &mut config()) };
    nccl.ok(status, null_mut(), "ncclCommInitRankConfig")?;
    let all = Arc::new(Communicator { nccl, raw, rank, ranks });
    let mut by_axis = vec![];
    for &axis in Axis::ALL {
        let (ways, at) = (mesh.ways(axis), mesh.coordinate(rank, axis));
        if ways == ranks {
            by_axis.push((axis, Arc::clone(&all)));
        } else if ways > 1 {
            let mut raw = null_mut();
            // A group is identified by its first rank.
            let (group, key) = (mesh.group(rank, axis)[0] as c_int, at as c_int);
            // SAFETY: writes one handle; the communicator of all ranks is alive.
            let status = unsafe { (nccl.split)(all.raw, group, key, &mut raw, &mut config()) };
            all.ok(status, "ncclCommSplit")?;
            by_axis.push((axis, Arc::new(Communicator { nccl, raw, rank: at, ranks: ways })));
        }
    }
    Ok(by_axis)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Field offsets of `ncclConfig_t` in nccl.h of 2.27.
    #[test]
    fn config_layout_matches_the_header() {
        assert_eq!(size_of::<Config>(), 72);
        assert_eq!(std::mem::offset_of!(Config, blocking), 16);
        assert_eq!(std::mem::offset_of!(Config, net_name), 32);
        assert_eq!(std::mem::offset_of!(Config, comm_name), 48);
        assert_eq!(std::mem::offset_of!(Config, nvls_ctas), 68);
        let config = |minor: u32, has_window: bool| Config::blocking(Version([2, minor, 3]), has_window);
        assert_eq!((size_of::<UniqueId>(), config(27, false).size), (128, 72));
        // Only newer versions know the policy, and it only affects windows.
        let policies =
            [(27, true), (28, false), (28, true), (30, true)].map(|(v, w)| config(v, w).cta_policy);
        assert_eq!(policies, [NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, 2, 2]);
    }
}
