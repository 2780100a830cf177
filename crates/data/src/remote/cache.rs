//! An on-disk LRU cache of pieces of remote files, with a bound on its size.
//!
//! A piece is a file of its own, renamed into place when complete, with a hash after its bytes. A damaged piece, or a disk that
//! cannot be written, costs a request and nothing else. Processes may share the folder.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::SystemTime;

use super::object::Object;
use crate::random::{fingerprint, key};

/// Size of a piece. Pieces begin at multiples of it.
const PIECE_BYTES: u64 = 1 << 20;
const HASH_BYTES: usize = 8;
/// Share of the bound that an eviction frees, because it has to list the folder.
const EVICTED_SHARE: f64 = 0.1;
/// Share of the bound that a process may write before it lists the folder again: other processes write into it, too.
const RECOUNT_SHARE: f64 = 1.0 / 64.0;

pub(crate) struct Cache {
    folder: PathBuf,
    most_bytes: u64,
    held: Mutex<CacheUsage>,
}

/// Bytes in the folder when it was last listed, bytes written by this process since then, and bytes that its threads are
/// writing.
struct CacheUsage {
    bytes: u64,
    since: u64,
    writing: u64,
}

impl CacheUsage {
    fn all(&self) -> u64 {
        self.bytes + self.since + self.writing
    }
}

impl Cache {
    pub fn new(folder: &Path, most_bytes: u64) -> Self {
        let bytes = pieces(folder).iter().map(|piece| piece.bytes).sum();
        Self {
            folder: folder.to_path_buf(),
            most_bytes,
            held: Mutex::new(CacheUsage { bytes, since: 0, writing: 0 }),
        }
    }

    /// Bytes of a file, from cached pieces and from the server.
    pub fn read(&self, object: &Object, at: u64, len: usize) -> io::Result<Vec<u8>> {
        let Some(tag) = object.tag() else { return object.fetch(at, len) };
        let (size, end) = (object.bytes(), at + len as u64);
        let of_file = key(key(fingerprint(object.url().as_bytes()), fingerprint(tag.as_bytes())), size);
        let path = |piece: u64| self.folder.join(format!("{of_file:016x}-{piece:06x}"));
        let extent = |piece: u64| (piece * PIECE_BYTES, size.min((piece + 1) * PIECE_BYTES));
        let mut out = Vec::with_capacity(len);
        let take = |out: &mut Vec<u8>, bytes: &[u8], start: u64| {
            let (from, to) = (at.max(start), end.min(start + bytes.len() as u64));
            out.extend_from_slice(&bytes[(from - start) as usize..(to - start) as usize]);
        };
        let mut piece = at / PIECE_BYTES;
        while piece * PIECE_BYTES < end {
            let (start, stop) = extent(piece);
            if let Some(bytes) = cached_piece(&path(piece), (stop - start) as usize) {
                take(&mut out, &bytes, start);
                piece += 1;
                continue;
            }
            // Adjacent missing pieces are fetched with the same request.
            let first = piece;
            piece += 1;
            while piece * PIECE_BYTES < end && !path(piece).exists() {
                piece += 1;
            }
            let stop = extent(piece - 1).1;
            let bytes = object.fetch(start, (stop - start) as usize)?;
            take(&mut out, &bytes, start);
            for number in first..piece {
                let (from, to) = extent(number);
                self.store(&path(number), &bytes[(from - start) as usize..(to - start) as usize]);
            }
        }
        Ok(out)
    }

    fn store(&self, path: &Path, bytes: &[u8]) {
        let size = (bytes.len() + HASH_BYTES) as u64;
        if !self.make_room(size) {
            return;
        }
        let written = crate::sealed::keep(path, |mut file| {
            use io::Write;
            file.write_all(bytes)?;
            file.write_all(&fingerprint(bytes).to_le_bytes())
        });
        let mut held = self.held.lock().expect("no reader panics");
        held.writing -= size;
        if written.is_ok() {
            held.since += size;
        }
    }

    /// Evicts pieces until there is room, and reserves it for this thread; false where that is impossible.
    fn make_room(&self, bytes: u64) -> bool {
        let mut held = self.held.lock().expect("no reader panics");
        let has_room = self.evict(&mut held, bytes);
        if has_room {
            held.writing += bytes;
        }
        has_room
    }

    fn evict(&self, held: &mut CacheUsage, bytes: u64) -> bool {
        let has_room = held.all() + bytes <= self.most_bytes;
        if has_room && held.since <= (self.most_bytes as f64 * RECOUNT_SHARE) as u64 {
            return true;
        }
        let mut all = pieces(&self.folder);
        (held.bytes, held.since) = (all.iter().map(|piece| piece.bytes).sum(), 0);
        if held.all() + bytes <= self.most_bytes {
            return true;
        }
        all.sort_by_key(|piece| piece.read);
        let wanted = (self.most_bytes as f64 * (1.0 - EVICTED_SHARE)) as u64;
        for piece in all {
            if held.all() + bytes <= wanted {
                break;
            }
            if fs::remove_file(&piece.path).is_ok() {
                held.bytes -= piece.bytes;
            }
        }
        held.all() + bytes <= self.most_bytes
    }
}

/// A complete cached piece.
fn cached_piece(path: &Path, len: usize) -> Option<Vec<u8>> {
    let mut bytes = fs::read(path).ok()?;
    let hash = bytes.split_off(bytes.len().checked_sub(HASH_BYTES)?);
    if bytes.len() != len || fingerprint(&bytes).to_le_bytes() != hash[..] {
        return None;
    }
    if let Ok(file) = fs::File::open(path) {
        let _ = file.set_modified(SystemTime::now());
    }
    Some(bytes)
}

struct CachedBlock {
    path: PathBuf,
    bytes: u64,
    read: SystemTime,
}

fn pieces(folder: &Path) -> Vec<CachedBlock> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let piece = |entry: fs::DirEntry| {
        let name = entry.file_name();
        let (file, number) = name.to_str()?.split_once('-')?;
        let is_hex = |part: &str| part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        // Other files in the folder are left alone.
        if file.len() != 16 || !is_hex(file) || !is_hex(number) {
            return None;
        }
        let metadata = entry.metadata().ok().filter(fs::Metadata::is_file)?;
        Some(CachedBlock { path: entry.path(), bytes: metadata.len(), read: metadata.modified().ok()? })
    };
    entries.filter_map(piece).collect()
}
