//! On-disk store for results that can be recomputed; an entry is either complete or absent.
//!
//! An entry is written to a temporary file and renamed, so that other processes never see a partial one. It carries a checksum;
//! an entry that does not match counts as missing. A full or read-only disk only costs time.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Changes with the file format.
const MAGIC: &[u8; 8] = b"flatout1";
const HEADER_BYTES: usize = MAGIC.len() + 16;

pub struct Store {
    /// `None` disables the store.
    folder: Option<PathBuf>,
}

impl Store {
    /// A folder under `FLATOUT_CACHE`, or under `flatout` in XDG_CACHE_HOME or ~/.cache.
    pub fn of_this_user(part: &str) -> Store {
        let variable = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let folder = variable("FLATOUT_CACHE")
            .or_else(|| variable("XDG_CACHE_HOME").map(|p| p.join("flatout")))
            .or_else(|| variable("HOME").map(|p| p.join(".cache/flatout")));
        Store { folder: folder.map(|p| p.join(part)) }
    }

    pub fn at(folder: PathBuf) -> Store {
        Store { folder: Some(folder) }
    }

    /// Reads an entry, if it exists and its checksum matches.
    pub fn get(&self, name: &str) -> Option<Vec<u8>> {
        std::fs::read(self.folder.as_ref()?.join(name)).ok().and_then(|bytes| unseal(&bytes))
    }

    /// Writes an entry, or explains in a sentence why it cannot.
    pub fn put(&self, name: &str, content: &[u8]) -> Result<(), String> {
        let Some(folder) = &self.folder else { return Ok(()) };
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let own = format!("{name}.{}.{}.part", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let own = folder.join(own);
        let written = std::fs::create_dir_all(folder)
            .and_then(|()| std::fs::write(&own, seal(content)))
            .and_then(|()| std::fs::rename(&own, folder.join(name)));
        written.map_err(|why| {
            let _ = std::fs::remove_file(&own);
            cannot_store(folder, &why)
        })
    }
}

fn cannot_store(folder: &Path, why: &std::io::Error) -> String {
    format!("nothing is kept in {}: {why}", folder.display())
}

/// The file name for a key of several texts, each prefixed with its length so that different lists never collide.
pub fn name<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    let mut hash = Fnv::default();
    for text in texts {
        hash.update(&(text.len() as u64).to_le_bytes());
        hash.update(text.as_bytes());
    }
    format!("{:032x}", hash.0)
}

fn seal(content: &[u8]) -> Vec<u8> {
    let mut hash = Fnv::default();
    hash.update(content);
    [MAGIC.as_slice(), &hash.0.to_le_bytes(), content].concat()
}

fn unseal(bytes: &[u8]) -> Option<Vec<u8>> {
    let content = bytes.get(HEADER_BYTES..)?;
    let mut hash = Fnv::default();
    hash.update(content);
    let whole = bytes.starts_with(MAGIC) && bytes[MAGIC.len()..HEADER_BYTES] == hash.0.to_le_bytes();
    (whole && !content.is_empty()).then(|| content.to_vec())
}

/// 128-bit FNV-1a, as checksum and name; no protection against someone who writes to the user's own cache.
struct Fnv(u128);

impl Default for Fnv {
    fn default() -> Self {
        Fnv(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }
}

impl Fnv {
    fn update(&mut self, bytes: &[u8]) {
        const PRIME: u128 = (1 << 88) + 0x13b;
        for byte in bytes {
            self.0 = (self.0 ^ *byte as u128).wrapping_mul(PRIME);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};

    fn folder(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("flatout-store-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        path
    }

    fn files(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).unwrap();
        let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn corrupt_entries_count_as_missing() {
        let folder = folder("damage");
        let store = Store::at(folder.clone());
        assert_eq!(store.get("k"), None);
        store.put("k", b"content").unwrap();
        assert_eq!(store.get("k").as_deref(), Some(&b"content"[..]));
        let path = folder.join("k");
        let whole = std::fs::read(&path).unwrap();
        let mut flipped = whole.clone();
        flipped[HEADER_BYTES] ^= 1;
        let longer = [whole.as_slice(), b"x"].concat();
        for damaged in [&whole[..whole.len() - 1], &whole[..5], &[], &longer, &flipped] {
            std::fs::write(&path, damaged).unwrap();
            assert_eq!(store.get("k"), None);
        }
        store.put("k", b"content").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), whole);
        assert_eq!(files(&folder), ["k"], "nothing half-written is left");
        std::fs::remove_dir_all(folder).unwrap();
    }

    /// The content of an entry, long enough to be written in several pieces.
    fn content(entry: usize) -> Vec<u8> {
        (0..300_000 + entry).map(|i| (i * 31 + entry) as u8).collect()
    }

    const CHILD: &str = "FLATOUT_TEST_STORE";

    /// Runs a test again in a child process, with `folder` in the variable `CHILD`.
    fn child(command: &mut Command, test: &str, folder: &Path) -> Child {
        let command =
            command.args(["--exact", &format!("cuda::driver::store::tests::{test}"), "--nocapture"]);
        command.env(CHILD, folder).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    }

    fn this_program() -> PathBuf {
        std::env::current_exe().unwrap()
    }

    #[test]
    fn concurrent_writers_never_expose_partial_entries() {
        const ENTRIES: usize = 3;
        let name = |entry: usize| format!("entry-{entry}");
        if let Some(folder) = std::env::var_os(CHILD) {
            let store = Store::at(folder.into());
            for round in 0..20 * ENTRIES {
                store.put(&name(round % ENTRIES), &content(round % ENTRIES)).unwrap();
            }
            return;
        }
        let folder = folder("processes");
        let test = "concurrent_writers_never_expose_partial_entries";
        let mut writers: Vec<Child> =
            (0..2).map(|_| child(&mut Command::new(this_program()), test, &folder)).collect();
        let store = Store::at(folder.clone());
        let (mut seen, mut running) = (0, true);
        while running {
            running = writers.iter_mut().any(|writer| writer.try_wait().unwrap().is_none());
            for entry in 0..ENTRIES {
                // Reads the file itself, to tell a partial entry from a missing one.
                let Ok(bytes) = std::fs::read(folder.join(name(entry))) else { continue };
                assert!(unseal(&bytes).is_some_and(|got| got == content(entry)), "entry {entry} is torn");
                seen += 1;
            }
        }
        for writer in writers {
            let done = writer.wait_with_output().unwrap();
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        }
        assert!(seen > 0);
        assert!((0..ENTRIES).all(|entry| store.get(&name(entry)).is_some_and(|got| got == content(entry))));
        assert_eq!(files(&folder), ["entry-0", "entry-1", "entry-2"]);
        std::fs::remove_dir_all(folder).unwrap();
    }

    /// Simulates a full disk by a process with a file size limit: every write fails after the file was created.
    #[test]
    fn a_full_disk_gives_a_note_and_no_entry() {
        if let Some(folder) = std::env::var_os(CHILD) {
            let store = Store::at(PathBuf::from(&folder));
            let note = store.put("k", b"content").unwrap_err();
            assert!(note.starts_with("nothing is kept in"), "{note}");
            assert_eq!((store.get("k"), files(Path::new(&folder))), (None, vec![]));
            return;
        }
        let folder = folder("full");
        std::fs::create_dir_all(&folder).unwrap();
        let limited = r#"trap "" XFSZ; ulimit -f 0; exec "$0" "$@""#;
        let mut command = Command::new("sh");
        let command = command.args(["-c", limited]).arg(this_program());
        let done = child(command, "a_full_disk_gives_a_note_and_no_entry", &folder);
        let done = done.wait_with_output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn an_unwritable_folder_gives_a_note() {
        let file = folder("file");
        std::fs::write(&file, "in the way").unwrap();
        let note = Store::at(file.join("part")).put("k", b"content").unwrap_err();
        assert!(note.starts_with("nothing is kept in"), "{note}");
        std::fs::remove_file(file).unwrap();
    }
}
