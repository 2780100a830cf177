//! A cache of the examples of shards between runs: reading headers and JSON and tokenising takes longer than everything else
//! before the first step.
//!
//! Each shard has one file, named by a hash of its path and of everything that determines its tokens: tokeniser, template,
//! system message, prompts, learned parts and lengths. The file records the shard's path, size and modification time and is
//! sealed by a hash (`sealed`). A file that is damaged, or of another shard or an earlier state of it, is replaced.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::shard::{SampleRow, ShardExamples};
use crate::examples::{Example, Sighting};
use crate::formats::{OnError, Reason, SourceLocation, Version};
use crate::random::{fingerprint, key};
use crate::sealed::{self, Lines, Sealed, escaped_path, path};
use crate::vision::Grid;

const FORM: &str = "flatout samples 1";
/// Values per line, so that no line is longer than the limit.
const VALUES_PER_LINE: usize = 512;

/// The shard and the tokenisation that cached examples are valid for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CacheKey {
    named: Arc<PathBuf>,
    archive: PathBuf,
    version: Version,
    /// Hash of everything that determines the tokens of its samples.
    writing: u64,
}

impl CacheKey {
    /// The key of a shard in its present state.
    pub fn now(archive: &Path, writing: u64) -> io::Result<Self> {
        let version = Version::of(&fs::metadata(archive)?);
        let (named, archive) = (Arc::new(archive.to_path_buf()), std::path::absolute(archive)?);
        Ok(Self { named, archive, version, writing })
    }

    fn file_in(&self, cache: &Path) -> PathBuf {
        let path = fingerprint(self.archive.as_os_str().as_encoded_bytes());
        cache.join("samples").join(format!("{:016x}", key(path, self.writing)))
    }
}

/// The cached examples of a shard. Returns `None` where samples were skipped and that is not allowed, so that reading the shard
/// again reports them.
pub(super) fn load(cache: &Path, of: &CacheKey, on_error: OnError) -> Option<ShardExamples> {
    let cached = from_text(File::open(of.file_in(cache)).ok()?, of)?;
    (on_error == OnError::Skip || cached.skipped.total() == 0).then_some(cached)
}

/// Caches the examples of a shard, unless it has changed since they were read.
pub(super) fn store(cache: &Path, of: &CacheKey, shard: &ShardExamples) -> io::Result<()> {
    if CacheKey::now(&of.named, of.writing)? != *of {
        return Ok(());
    }
    sealed::keep(&of.file_in(cache), |out| to_text(shard, out, of))
}

fn to_text(shard: &ShardExamples, out: impl Write, of: &CacheKey) -> io::Result<()> {
    let mut out = Sealed::new(out);
    let Version { bytes, modified } = of.version;
    out.line(FORM)?;
    out.line(&format!("of {bytes} {modified} {:x} {}", of.writing, escaped_path(&of.archive)))?;
    out.line(&format!("counts {} {} {}", shard.samples, shard.cut, shard.too_long))?;
    for (reason, count, first) in shard.skipped.reasons() {
        out.line(&format!("skipped {} {count} {}", reason as usize, first.offset))?;
    }
    for [offset, bytes] in &shard.frames {
        out.line(&format!("frame {offset} {bytes}"))?;
    }
    let mut all = |name: &str, words: Vec<String>| {
        words.chunks(VALUES_PER_LINE).try_for_each(|some| out.line(&format!("{name} {}", some.join(" "))))
    };
    for (example, SampleRow { hash, offset }) in shard.examples.iter().zip(&shard.rows) {
        all("tokens", example.tokens.iter().map(|token| format!("{token:x}")).collect())?;
        let runs = example.weights.chunk_by(|a, b| a.to_bits() == b.to_bits());
        all("weights", runs.map(|run| format!("{:x}:{:x}", run.len(), run[0].to_bits())).collect())?;
        let sighting = |seen: &Sighting| format!("{:x}:{:x}", seen.image, seen.hash);
        all("images", example.images.iter().map(sighting).collect())?;
        all("example", vec![format!("{hash:x} {offset}")])?;
    }
    out.end()
}

/// Parses the text form; `None` where it is damaged or has another key.
fn from_text(text: impl Read, of: &CacheKey) -> Option<ShardExamples> {
    let mut lines = Lines::new(text);
    let mut shard = ShardExamples::default();
    let mut is_of = false;
    let (mut tokens, mut weights, mut images): (Vec<u32>, Vec<f32>, Vec<Sighting>) = Default::default();
    if lines.next()? != FORM {
        return None;
    }
    loop {
        let hash = lines.hash();
        let (kind, rest) = lines.next()?.split_once(' ')?;
        let mut words = rest.split(' ');
        let mut decimal = || words.next()?.parse::<u64>().ok();
        match kind {
            "of" => {
                let version = Version { bytes: decimal()?, modified: decimal()? };
                let writing = hex(words.next()?)?;
                let found =
                    CacheKey { named: of.named.clone(), archive: path(words.next()?)?, version, writing };
                is_of = found == *of;
            }
            "counts" => (shard.samples, shard.cut, shard.too_long) = (decimal()?, decimal()?, decimal()?),
            "skipped" => {
                let (reason, count, offset) =
                    (Reason::numbered(decimal()? as usize)?, decimal()?, decimal()?);
                let place = SourceLocation { file: of.named.clone(), line: None, row: None, offset };
                shard.skipped.note_many(reason, count, place);
            }
            "frame" => {
                let (offset, bytes) = (decimal()?, decimal()?);
                offset.checked_add(bytes).filter(|end| *end <= of.version.bytes)?;
                shard.frames.push([offset, bytes]);
            }
            "tokens" => {
                for word in words {
                    tokens.push(u32::try_from(hex(word)?).ok()?);
                }
            }
            "weights" => {
                for word in words {
                    let (count, bits) = word.split_once(':')?;
                    let count = usize::try_from(hex(count)?).ok()?;
                    (weights.len().checked_add(count)? <= tokens.len()).then_some(())?;
                    weights.resize(weights.len() + count, f32::from_bits(u32::try_from(hex(bits)?).ok()?));
                }
            }
            "images" => {
                for word in words {
                    let (image, hash) = word.split_once(':')?;
                    let (image, hash) = (u32::try_from(hex(image)?).ok()?, hex(hash)?);
                    (shard.frames.len() > image as usize && images.len() < tokens.len()).then_some(())?;
                    images.push(Sighting {
                        start: images.len() as u32,
                        image,
                        grid: Grid::FRAME,
                        merge: 1,
                        tokens: 1,
                        hash,
                    });
                }
            }
            "example" => {
                let row = SampleRow { hash: hex(words.next()?)?, offset: words.next()?.parse().ok()? };
                (!tokens.is_empty() && tokens.len() == weights.len()).then_some(())?;
                shard.examples.push(Example {
                    tokens: &tokens,
                    weights: &weights,
                    label: None,
                    images: &images,
                });
                shard.rows.push(row);
                tokens.clear();
                weights.clear();
                images.clear();
            }
            "end" => return (is_of && rest == format!("{hash:x}")).then_some(shard),
            _ => return None,
        }
    }
}

fn hex(word: &str) -> Option<u64> {
    u64::from_str_radix(word, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::examples::frames::shard::{frame_rows, push};
    use crate::scratch::Scratch;

    fn shard(of: &CacheKey) -> ShardExamples {
        let mut shard = ShardExamples { samples: 5, cut: 1, too_long: 2, ..ShardExamples::default() };
        shard.frames = vec![[512, 100], [1024, 7], [2048, 9]];
        let long: Vec<u32> = (0..1500).collect();
        let weights: Vec<f32> = (0..1500).map(|i| if i % 700 < 3 { 0.0 } else { 1.0 }).collect();
        push(&mut shard.examples, &frame_rows(&[7, 8], 0, 4), &(long, weights));
        push(&mut shard.examples, &frame_rows(&[9], 2, 4), &(vec![5, 6], vec![0.0, 0.5]));
        push(&mut shard.examples, &[], &(vec![9], vec![1.0]));
        shard.rows = (0..3).map(|row| SampleRow { hash: u64::MAX - row, offset: 512 * row }).collect();
        let first = SourceLocation { file: of.named.clone(), line: None, row: None, offset: 512 };
        shard.skipped.note_many(Reason::Damaged, 2, first);
        shard
    }

    #[test]
    fn cached_examples_are_valid_for_their_key_only() {
        let scratch = Scratch::new("cached-samples");
        let (cache, archive) = (scratch.path().join("cache"), scratch.write("a.tar", &[0; 4096]));
        let of = CacheKey::now(&archive, 11).unwrap();
        let made = shard(&of);
        store(&cache, &of, &made).unwrap();
        assert_eq!(load(&cache, &of, OnError::Skip), Some(made.clone()));
        assert_eq!(load(&cache, &of, OnError::Fail), None, "something was left out of it");
        assert_eq!(load(&cache, &CacheKey::now(&archive, 12).unwrap(), OnError::Skip), None);
        scratch.write("a.tar", &[0; 4608]);
        assert_eq!(load(&cache, &CacheKey::now(&archive, 11).unwrap(), OnError::Skip), None);
        fs::remove_file(of.file_in(&cache)).unwrap();
        store(&cache, &of, &made).unwrap();
        assert!(!of.file_in(&cache).exists(), "the shard has changed since");
    }

    #[test]
    fn damaged_text_is_none() {
        let scratch = Scratch::new("cached-samples-damaged");
        let of = CacheKey::now(&scratch.write("a.tar", &[0; 4096]), 1).unwrap();
        let mut made = shard(&of);
        let mut text = Vec::new();
        to_text(&made, &mut text, &of).unwrap();
        assert_eq!(from_text(&text[..], &of), Some(made.clone()));
        for at in (0..text.len()).step_by(3) {
            assert!(from_text(&text[..at], &of).is_none(), "cut at {at}");
            let mut damaged = text.clone();
            damaged[at] ^= 1;
            assert!(from_text(&damaged[..], &of).is_none(), "damaged at {at}");
        }
        // A frame beyond the end of the shard, with a valid hash.
        made.frames[0][1] = 5000;
        let mut text = Vec::new();
        to_text(&made, &mut text, &of).unwrap();
        assert!(from_text(&text[..], &of).is_none());
    }
}
