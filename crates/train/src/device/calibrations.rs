//! Stored kernel timings: one table per device, driver and flatout version, so that a changed configuration finds none and
//! reports that.
//!
//! Exchanges between GPUs have a separate table, because they also depend on NCCL and on the links between GPUs. Timings of ranks
//! that share a GPU do not apply elsewhere: they are stored under a name that no prediction looks up.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use flatout_ir::timings::Timings;
use flatout_runtime::cuda;
use flatout_runtime::cuda::device::{Gpu, Identity, probe, short_name};
use flatout_runtime::cuda::nccl::nccl;
use flatout_runtime::cuda::store::{Store, name};

use crate::device::Device;
use crate::machine;

const FOLDER: &str = "timings";

/// Stores a device's timings, or returns the reason why that failed.
pub fn keep(device: &Device, timings: &Timings) -> Result<(), String> {
    let key = timing_key(device);
    Store::of_this_user(FOLDER).put(&entry(&key), format!("{key}\n{}", timings.to_text()).as_bytes())
}

/// The stored timings of a device; empty if there are none.
pub fn recall(device: &Device) -> Timings {
    recall_of(timing_key(device))
}

/// The same for a GPU by name, if this machine has one.
pub fn recall_named(gpu: &str) -> Timings {
    match &probe().gpu {
        Gpu::Usable(identity) if short_name(&identity.model, identity.memory_bytes) == gpu => {
            recall_of(gpu_key(identity))
        }
        _ => Timings::default(),
    }
}

/// The links over which exchanges were timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over<'a> {
    /// A link by its name.
    Link(&'a str),
    /// Loopback, between ranks that share a GPU.
    SharedGpu,
}

/// Stores times of exchanges among a number of ranks, replacing earlier ones for that number; returns the reason if that failed.
pub fn keep_exchanges(
    device: &cuda::Device,
    over: Over<'_>,
    ways: usize,
    timings: &Timings,
) -> Result<(), String> {
    let key = exchange_key(device.identity(), over)?;
    let store = Store::of_this_user(FOLDER);
    let earlier = read(&store, &key).unwrap_or_default();
    let all = earlier.without_exchanges(ways).with(timings);
    store.put(&entry(&key), format!("{key}\n{}", all.to_text()).as_bytes())
}

/// The stored times of exchanges between this machine's GPUs over a link; empty if there are none.
pub fn recall_exchanges(link: &str) -> Timings {
    match &probe().gpu {
        Gpu::Usable(identity) => exchange_key(identity, Over::Link(link)).map(recall_of).unwrap_or_default(),
        _ => Timings::default(),
    }
}

/// The key of exchange timings: everything they depend on. The error says why it is unknown.
fn exchange_key(identity: &Identity, over: Over<'_>) -> Result<String, String> {
    let nccl = nccl().map_err(|why| why.to_string())?.version();
    Ok(exchange_key_of(&gpu_key(identity), &nccl, over))
}

fn exchange_key_of(gpu: &str, nccl: &str, over: Over<'_>) -> String {
    match over {
        Over::Link(link) => format!("{gpu}, NCCL {nccl} over {link}"),
        Over::SharedGpu => format!("{gpu}, NCCL {nccl} between ranks that share it"),
    }
}

/// Reads each table once per process.
fn recall_of(key: String) -> Timings {
    static KNOWN: Mutex<BTreeMap<String, Timings>> = Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let read = |key: &String| read(&Store::of_this_user(FOLDER), key).unwrap_or_default();
    known.entry(key).or_insert_with_key(read).clone()
}

fn read(store: &Store, key: &str) -> Option<Timings> {
    let text = String::from_utf8(store.get(&entry(key))?).ok()?;
    let (stored_key, table) = text.split_once('\n')?;
    Timings::read(table).ok().filter(|_| stored_key == key)
}

fn entry(key: &str) -> String {
    name([key])
}

/// The key of kernel timings: everything they depend on.
fn timing_key(device: &Device) -> String {
    match device {
        Device::Cpu { threads } => {
            format!("{} flatout {}", machine::processor(*threads), env!("CARGO_PKG_VERSION"))
        }
        Device::Cuda(device) => gpu_key(device.identity()),
    }
}

fn gpu_key(identity: &Identity) -> String {
    let Identity { model, major, minor, sms, driver, cuda, .. } = identity;
    let driver = driver.as_deref().unwrap_or("unknown");
    let version = env!("CARGO_PKG_VERSION");
    format!("{model} {major}.{minor} of {sms}, driver {driver} for {cuda}, flatout {version}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_ir::Work;
    use flatout_ir::timings::{Point, Size, Units};

    #[test]
    fn exchanges_are_known_by_nccl_and_link_and_ranks_that_share_a_gpu_apart() {
        let over = |nccl: &str, over: Over<'_>| entry(&exchange_key_of("NVIDIA H200", nccl, over));
        let real = over("2.28.9", Over::Link("nvlink4"));
        for other in [
            over("2.30.7", Over::Link("nvlink4")),
            over("2.28.9", Over::Link("nvlink4 x12")),
            over("2.28.9", Over::SharedGpu),
            entry("NVIDIA H200"),
        ] {
            assert_ne!(real, other);
        }
    }

    #[test]
    fn timings_are_read_back_for_their_key_only() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::at(folder.path().into());
        let size = Size {
            work: Work::Norm,
            kernel: "norm".into(),
            units: Units::F32,
            inner: 8,
            flops: 9,
            bytes: 7,
            ways: 1,
        };
        let timings = Timings::new([Point { size, seconds: 1e-6 }]);
        let text = |key: &str| format!("{key}\n{}", timings.to_text());
        store.put(&entry("this CPU"), text("this CPU").as_bytes()).unwrap();
        assert_eq!(read(&store, "this CPU"), Some(timings.clone()));
        assert_eq!(read(&store, "another"), None);
        // A colliding name or a table of another format counts as absent.
        store.put(&entry("another"), text("this CPU").as_bytes()).unwrap();
        assert_eq!(read(&store, "another"), None);
        store.put(&entry("another"), b"another\nflatout timings 0\n").unwrap();
        assert_eq!(read(&store, "another"), None);
    }
}
