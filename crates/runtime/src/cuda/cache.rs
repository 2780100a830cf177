//! Compiled kernels on disk, by a hash of source, defines, options, architecture and compiler.
//!
//! An entry is written whole to a file of its own and then renamed, so two processes never see half of one. It carries
//! a checksum; what does not match is compiled again and replaced. A disk that is full or read-only only costs time.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

use super::context::{CudaError, Source};
use super::nvrtc::{Nvrtc, OPTIONS};

/// Changes when the file's form does.
const MAGIC: &[u8; 8] = b"flatout1";
const HEADER_BYTES: usize = MAGIC.len() + 16;

pub struct Cache {
    /// `None`: nothing is kept.
    folder: Option<PathBuf>,
}

/// Sources with what they compiled to.
pub type Cubins = Vec<(Source, Vec<u8>)>;

/// What compiling a set of sources took.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Compiled {
    pub from_disk: usize,
    pub compiled: usize,
    /// Why entries could not be kept, once.
    pub note: Option<String>,
}

impl Cache {
    /// `FLATOUT_CACHE/kernels`, or `flatout/kernels` under XDG_CACHE_HOME or ~/.cache.
    pub fn of_this_user() -> Cache {
        let variable = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let folder = variable("FLATOUT_CACHE")
            .or_else(|| variable("XDG_CACHE_HOME").map(|p| p.join("flatout")))
            .or_else(|| variable("HOME").map(|p| p.join(".cache/flatout")));
        Cache { folder: folder.map(|p| p.join("kernels")) }
    }

    pub fn at(folder: PathBuf) -> Cache {
        Cache { folder: Some(folder) }
    }

    /// The cubins of distinct sources, in parallel.
    pub fn cubins(
        &self,
        sources: &HashSet<Source>,
        arch: &str,
        nvrtc: &Nvrtc,
    ) -> Result<(Cubins, Compiled), CudaError> {
        let made: Vec<_> = sources
            .par_iter()
            .map(|source| {
                let compile = || nvrtc.compile(source, arch);
                let key = key(source, arch, &nvrtc.version.to_string());
                self.entry(&key, compile).map(|(cubin, how)| (source.clone(), cubin, how))
            })
            .collect::<Result<_, CudaError>>()?;
        let mut report = Compiled::default();
        let mut cubins = Vec::with_capacity(made.len());
        for (source, cubin, how) in made {
            match how {
                How::FromDisk => report.from_disk += 1,
                How::Compiled(note) => {
                    report.compiled += 1;
                    report.note = report.note.or(note);
                }
            }
            cubins.push((source, cubin));
        }
        Ok((cubins, report))
    }

    fn entry(
        &self,
        key: &str,
        compile: impl FnOnce() -> Result<Vec<u8>, CudaError>,
    ) -> Result<(Vec<u8>, How), CudaError> {
        let Some(folder) = &self.folder else { return Ok((compile()?, How::Compiled(None))) };
        let path = folder.join(format!("{key}.cubin"));
        if let Some(cubin) = std::fs::read(&path).ok().and_then(|bytes| unseal(&bytes)) {
            return Ok((cubin, How::FromDisk));
        }
        let cubin = compile()?;
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let own = format!("{key}.{}.{}.part", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let own = folder.join(own);
        let written = std::fs::create_dir_all(folder)
            .and_then(|()| std::fs::write(&own, seal(&cubin)))
            .and_then(|()| std::fs::rename(&own, &path));
        let note = written.err().map(|why| {
            let _ = std::fs::remove_file(&own);
            format!("compiled kernels are not kept in {}: {why}", folder.display())
        });
        Ok((cubin, How::Compiled(note)))
    }
}

enum How {
    FromDisk,
    Compiled(Option<String>),
}

fn key(source: &Source, arch: &str, compiler: &str) -> String {
    let mut hash = Fnv::default();
    // Lengths stand before texts, so that no two lists read alike.
    let mut text = |s: &str| {
        hash.update(&(s.len() as u64).to_le_bytes());
        hash.update(s.as_bytes());
    };
    text(compiler);
    text(arch);
    OPTIONS.iter().for_each(|option| text(option));
    text(source.name);
    text(&source.code);
    source.defines.iter().for_each(|(name, value)| {
        text(name);
        text(value);
    });
    format!("{:032x}", hash.0)
}

fn seal(cubin: &[u8]) -> Vec<u8> {
    let mut hash = Fnv::default();
    hash.update(cubin);
    [MAGIC.as_slice(), &hash.0.to_le_bytes(), cubin].concat()
}

fn unseal(bytes: &[u8]) -> Option<Vec<u8>> {
    let cubin = bytes.get(HEADER_BYTES..)?;
    let mut hash = Fnv::default();
    hash.update(cubin);
    let whole = bytes.starts_with(MAGIC) && bytes[MAGIC.len()..HEADER_BYTES] == hash.0.to_le_bytes();
    (whole && !cubin.is_empty()).then(|| cubin.to_vec())
}

/// FNV-1a of 128 bits: a checksum and a name, not a defence against somebody who writes in the user's own cache.
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

    fn folder(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("flatout-cache-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        path
    }

    fn is_from_disk(cache: &Cache, compiles: &[u8]) -> bool {
        let (cubin, how) = cache.entry("k", || Ok(compiles.to_vec())).unwrap();
        assert_eq!(cubin, b"cubin");
        matches!(how, How::FromDisk)
    }

    #[test]
    fn entries_come_back_and_damage_is_compiled_again() {
        let folder = folder("damage");
        let cache = Cache::at(folder.clone());
        let path = folder.join("k.cubin");
        assert!(!is_from_disk(&cache, b"cubin"));
        assert!(is_from_disk(&cache, b"never"));
        let whole = std::fs::read(&path).unwrap();
        for damaged in [&whole[..whole.len() - 1], &whole[..5], &[], &[whole.as_slice(), b"x"].concat()] {
            std::fs::write(&path, damaged).unwrap();
            assert!(!is_from_disk(&cache, b"cubin"));
            assert_eq!(std::fs::read(&path).unwrap(), whole);
        }
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "nothing half-written is left");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_disk_that_cannot_be_written_costs_a_note() {
        let file = folder("file");
        std::fs::write(&file, "in the way").unwrap();
        let (cubin, how) = Cache::at(file.join("kernels")).entry("k", || Ok(b"cubin".to_vec())).unwrap();
        assert_eq!(cubin, b"cubin");
        let How::Compiled(Some(note)) = how else { panic!("the folder is a file") };
        assert!(note.starts_with("compiled kernels are not kept in"), "{note}");
        std::fs::remove_file(file).unwrap();
    }

    #[test]
    fn everything_that_changes_a_cubin_changes_its_name() {
        let source = |code: &'static str, defines: &[(&str, &str)]| Source {
            name: "x.cu",
            code: code.into(),
            defines: defines.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect(),
        };
        let keys = [
            key(&source("a", &[]), "sm_80", "13.0.0"),
            key(&source("b", &[]), "sm_80", "13.0.0"),
            key(&source("a", &[]), "sm_90a", "13.0.0"),
            key(&source("a", &[]), "sm_80", "13.1.0"),
            key(&source("a", &[("T", "float")]), "sm_80", "13.0.0"),
            key(&source("a", &[("T", "bf16")]), "sm_80", "13.0.0"),
            key(&source("a", &[("Tf", "loat")]), "sm_80", "13.0.0"),
        ];
        assert_eq!(keys.iter().collect::<HashSet<_>>().len(), keys.len());
        assert_eq!(keys[0], key(&source("a", &[]), "sm_80", "13.0.0"));
    }
}
