//! Tests of the feature cache: round trips, killed and concurrent writers, and invalid indices.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use flatout_data::vision::{
    CacheWriter, CachedImage, FeatureCache, FeatureFormat, FeatureIndex, Grid, PartSize,
};

use crate::scratch::Scratch;

pub fn format() -> FeatureFormat {
    let made_with = [("type", "bf16"), ("tower", "0123"), ("version", "1")];
    let made_with = made_with.map(|(name, value)| (name.to_string(), value.to_string()));
    FeatureFormat { made_with: BTreeMap::from(made_with), levels: 2, row_bytes: 6 }
}

/// Images of unequal sizes, every third of them without a file of its own.
pub fn images(count: usize) -> Vec<CachedImage> {
    let image = |i: usize| CachedImage {
        sha256: format!("{:064x}", i + 1),
        name: (!i.is_multiple_of(3)).then(|| format!("/images/{i}.png")),
        grid: Grid { rows: 2, columns: 2 * (i % 4 + 1) },
        tokens: i % 4 + 1,
    };
    (0..count).map(image).collect()
}

fn features(image: &CachedImage) -> Vec<u8> {
    let bytes = format().bytes(image.tokens).expect("few") as usize;
    let seed: usize = image.sha256.bytes().map(usize::from).sum();
    (0..bytes).map(|i| (31 * i + seed) as u8).collect()
}

const SMALL: PartSize = PartSize { bytes: 1 << 14, images: 3 };

fn writer(folder: &Path) -> CacheWriter {
    CacheWriter::enter(folder, &format(), SMALL, &mut || {}).expect("a folder")
}

/// Writes the missing features of some images.
fn fill(folder: &Path, images: &[CachedImage]) -> usize {
    let mut writer = writer(folder);
    let missing = writer.cache().missing(images).expect("images");
    missing
        .iter()
        .for_each(|number| writer.append(&images[*number], &features(&images[*number])).expect("room"));
    writer.finish().expect("an end");
    missing.len()
}

pub fn filled(name: &str, images: &[CachedImage]) -> Scratch {
    let scratch = Scratch::new(name);
    fill(scratch.path(), images);
    scratch
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("a folder").flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().into_string().expect("a name")).collect();
    names.sort();
    names
}

/// Checks that the features of every image are at the place in the index.
fn check(folder: &Path, images: &[CachedImage]) {
    let cache = FeatureCache::open(folder, &format()).expect("a cache");
    assert_eq!((cache.count(), cache.missing(images).expect("images").len()), (images.len(), 0));
    cache.features(images).expect("features");
    let text = std::fs::read(folder.join("index.json")).expect("an index");
    let index = FeatureIndex::parse(&text, &format()).expect("an index");
    let entries: BTreeMap<&str, _> =
        index.entries().map(|(part, entry)| (entry.sha256.as_str(), (part, entry))).collect();
    for image in images {
        let (part, entry) = entries[image.sha256.as_str()];
        let bytes = std::fs::read(folder.join(format!("features-{part:05}.bin"))).expect("a part");
        let own = features(image);
        assert_eq!(entry.offset % 4096, 0);
        assert!(bytes[entry.offset as usize..][..own.len()] == own);
    }
}

#[test]
fn parts_are_whole_or_absent() {
    let (scratch, images) = (Scratch::new("features-parts"), images(10));
    // A process that is killed after four images leaves a complete part of three.
    let mut killed = writer(scratch.path());
    images[..4].iter().for_each(|image| killed.append(image, &features(image)).expect("room"));
    assert_eq!(
        names(scratch.path()),
        ["features-00000.bin", "features-00001.bin.partial", "index.json", "lock"]
    );
    let cache = FeatureCache::open(scratch.path(), &format()).expect("a cache");
    assert_eq!(cache.missing(&images).expect("images"), (3..10).collect::<Vec<_>>());
    // A writer that is dropped before its part is complete removes it.
    drop(killed);
    assert_eq!(names(scratch.path()), ["features-00000.bin", "index.json", "lock"]);
    check(scratch.path(), &images[..3]);
}

#[test]
fn a_cache_is_resumed_and_grows() {
    let (scratch, all) = (Scratch::new("features-grows"), images(10));
    assert_eq!(fill(scratch.path(), &all[..4]), 4);
    // A killed process leaves a truncated part, and a part that no index names.
    for left in ["features-00002.bin.partial", "features-00002.bin", "index.json.partial"] {
        std::fs::write(scratch.path().join(left), b"left").expect("a file");
    }
    assert_eq!(fill(scratch.path(), &all), 6);
    assert_eq!(fill(scratch.path(), &all), 0);
    check(scratch.path(), &all);
    assert!(
        names(scratch.path()).iter().all(|name| !name.ends_with(".bin.partial")),
        "{:?}",
        names(scratch.path())
    );
}

#[test]
fn writers_wait_for_one_another() {
    let (scratch, all) = (Scratch::new("features-writers"), images(30));
    let (made, waited) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut wait = || {
                    waited.fetch_add(1, Ordering::Relaxed);
                };
                let mut writer =
                    CacheWriter::enter(scratch.path(), &format(), SMALL, &mut wait).expect("a folder");
                for number in writer.cache().missing(&all).expect("images") {
                    writer.append(&all[number], &features(&all[number])).expect("room");
                    made.fetch_add(1, Ordering::Relaxed);
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
                writer.finish().expect("an end");
            });
        }
    });
    assert_eq!(made.into_inner(), all.len(), "one makes them, the others find them");
    assert!(waited.into_inner() > 0);
    check(scratch.path(), &all);
}

#[test]
fn changes_are_named() {
    let all = images(6);
    let scratch = filled("features-changed", &all);
    let sentence = |format: &FeatureFormat, images: &[CachedImage]| {
        let opened = FeatureCache::open(scratch.path(), format).and_then(|cache| cache.missing(images));
        opened.expect_err("refused").sentence
    };
    let mut other = format();
    other.made_with.insert("tower".into(), "4567".into());
    let said = sentence(&other, &all);
    assert!(said.contains("made with `tower` = 0123, and it is 4567 now"), "{said}");
    let wider = FeatureFormat { row_bytes: 12, ..format() };
    assert!(sentence(&wider, &all).contains("`row_bytes` = 6, and it is 12 now"));
    let mut changed = all.clone();
    changed[4].sha256 = format!("{:064x}", 77);
    let said = sentence(&format(), &changed);
    assert!(said.contains("/images/4.png has other bytes than when its features were written"), "{said}");
    let mut cut = all.clone();
    cut[1].grid = Grid { rows: 4, columns: 2 };
    assert!(sentence(&format(), &cut).contains("/images/1.png is cut into 4 x 2 patches of 2 tokens"));
    // A moved image has the features of its bytes.
    let mut moved = all.clone();
    moved.swap(1, 4);
    moved
        .iter_mut()
        .for_each(|image| image.name = image.name.take().map(|name| name.replace("images", "elsewhere")));
    assert_eq!(FeatureCache::open(scratch.path(), &format()).expect("a cache").missing(&moved), Ok(vec![]));
}

#[test]
fn an_index_that_cannot_be_is_refused() {
    let all = images(6);
    let scratch = filled("features-index", &all);
    let text = std::fs::read_to_string(scratch.path().join("index.json")).expect("an index");
    for (from, to, said) in [
        ("\"version\": 1,", "\"version\": 2,", "has version 2 of its form"),
        ("features-00001.bin", "../features-1.bin", "calls part 1 `../features-1.bin`"),
        ("\"offset\": 4096", "\"offset\": 4097", "offset is not where features may begin"),
        ("\"offset\": 4096", "\"offset\": 0", "offset is not where features may begin"),
        ("\"offset\": 8192", "\"offset\": 12288", "reach beyond the end"),
        ("\"tokens\": 1", "\"tokens\": 0", "tokens is not a number of tokens"),
        ("\"tokens\": 1", "\"tokens\": 18446744073709551615", "tokens is not a number of tokens"),
        ("\"sha256\": \"0", "\"sha256\": \"x", "sha256 is not a SHA-256"),
        ("\"hash\": \"", "\"hash\": \"0", "hash is not a hash"),
        (&format!("{:064x}", 1), &format!("{:064x}", 2), "features are there twice"),
        ("\"parts\"", "\"pieces\"", "cannot be parsed"),
    ] {
        assert!(text.contains(from), "{from}");
        let wrong =
            FeatureIndex::parse(text.replacen(from, to, 1).as_bytes(), &format()).expect_err("refused");
        assert!(wrong.contains(said), "{from} to {to}: {wrong}");
    }
    std::fs::write(scratch.path().join("features-00001.bin"), b"short").expect("a part");
    let error = FeatureCache::open(scratch.path(), &format()).expect_err("refused");
    assert!(error.is_input() && error.sentence.contains("features-00001.bin has 5 bytes"), "{error}");
}

#[test]
fn a_disk_without_room_is_a_sentence() {
    let (scratch, all) = (Scratch::new("features-full"), images(4));
    let mut writer = writer(scratch.path());
    assert!(writer.check_room(1 << 10).is_ok());
    let said = writer.check_room(u64::MAX).expect_err("no disk is as large").sentence;
    assert!(said.contains("GB free: make room, or give another data.vision_cache"), "{said}");
    // The first part is on a full disk.
    std::os::unix::fs::symlink("/dev/full", scratch.path().join("features-00000.bin.partial"))
        .expect("a link");
    let error =
        all.iter().try_for_each(|image| writer.append(image, &features(image))).expect_err("a full disk");
    assert!(!error.is_input() && error.sentence.contains("No space left on device"), "{error}");
    assert!(error.sentence.contains("make room, or give another"), "{error}");
    drop(writer);
    assert_eq!(fill(scratch.path(), &all), 4);
    check(scratch.path(), &all);
}
