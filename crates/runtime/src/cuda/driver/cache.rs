//! On-disk cache of compiled kernels, keyed by a hash of source, defines, options, architecture and compiler.

use std::collections::HashSet;

use flatout_waits::{self as waits, Unit};
use rayon::prelude::*;

use super::nvrtc::{Nvrtc, OPTIONS};
use super::store::{self, Store};
use crate::cuda::context::{CudaError, Source};

pub struct Cache {
    store: Store,
}

pub type Cubins = Vec<(Source, Vec<u8>)>;

/// Statistics of compiling a set of sources.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Compiled {
    pub from_disk: usize,
    pub compiled: usize,
    /// Why entries could not be stored, if so.
    pub note: Option<String>,
}

impl Cache {
    pub fn of_this_user() -> Cache {
        Cache { store: Store::of_this_user("kernels") }
    }

    /// Returns the cubins of distinct sources, compiling misses in parallel. `see` is called after each.
    pub fn cubins(
        &self,
        sources: &HashSet<Source>,
        arch: &str,
        nvrtc: &Nvrtc,
        see: &(dyn Fn() + Sync),
    ) -> Result<(Cubins, Compiled), CudaError> {
        let wait = waits::begin("compiling kernels", Unit::Things("kernels"), Some(sources.len() as u64));
        let made: Vec<_> = sources
            .par_iter()
            .map(|source| {
                let compile = || nvrtc.compile(source, arch);
                let key = key(source, arch, &nvrtc.version.to_string());
                let made = self.entry(&key, compile);
                see();
                wait.add(1);
                made.map(|(cubin, outcome)| (source.clone(), cubin, outcome))
            })
            .collect::<Result<_, CudaError>>()?;
        let mut report = Compiled::default();
        let mut cubins = Vec::with_capacity(made.len());
        for (source, cubin, outcome) in made {
            match outcome {
                Outcome::FromDisk => report.from_disk += 1,
                Outcome::Compiled(note) => {
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
    ) -> Result<(Vec<u8>, Outcome), CudaError> {
        let name = format!("{key}.cubin");
        if let Some(cubin) = self.store.get(&name) {
            return Ok((cubin, Outcome::FromDisk));
        }
        let cubin = compile()?;
        let note = self.store.put(&name, &cubin).err();
        Ok((cubin, Outcome::Compiled(note)))
    }
}

enum Outcome {
    FromDisk,
    Compiled(Option<String>),
}

fn key(source: &Source, arch: &str, compiler: &str) -> String {
    let defines = source.defines.iter().flat_map(|(name, value)| [name.as_str(), value]);
    let texts = [compiler, arch].into_iter().chain(OPTIONS.iter().copied());
    store::name(texts.chain([source.name, &source.code]).chain(defines))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_recompiled_only_after_corruption() {
        let folder = std::env::temp_dir().join(format!("flatout-kernels-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        let cache = Cache { store: Store::at(folder.clone()) };
        let is_from_disk = |compiles: &[u8]| {
            let (cubin, outcome) = cache.entry("k", || Ok(compiles.to_vec())).unwrap();
            assert_eq!(cubin, b"cubin");
            matches!(outcome, Outcome::FromDisk)
        };
        assert!(!is_from_disk(b"cubin"));
        assert!(is_from_disk(b"never"));
        std::fs::write(folder.join("k.cubin"), "damaged").unwrap();
        assert!(!is_from_disk(b"cubin"));
        assert!(is_from_disk(b"never"));
        std::fs::remove_dir_all(&folder).unwrap();
        std::fs::write(&folder, "in the way").unwrap();
        let Outcome::Compiled(Some(note)) = cache.entry("k", || Ok(b"cubin".to_vec())).unwrap().1 else {
            panic!("the folder is a file")
        };
        assert!(note.starts_with("nothing is kept in"), "{note}");
        std::fs::remove_file(folder).unwrap();
    }

    #[test]
    fn the_key_covers_every_input_of_the_compiler() {
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
