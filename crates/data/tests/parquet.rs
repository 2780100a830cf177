//! Compares parquet files that pyarrow wrote (`parquet/make.py`) with their original contents.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use flatout_data::formats::{Document, Index, Input, OnError, ReadOptions, Reason, find, read};
use serde::Deserialize;

#[derive(Deserialize)]
struct Expected {
    lists: BTreeMap<String, Vec<Option<String>>>,
    files: BTreeMap<String, String>,
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/parquet")
}

fn skip() -> ReadOptions {
    ReadOptions { on_error: OnError::Skip, ..ReadOptions::default() }
}

fn input(name: &str) -> Input {
    let path = folder().join(format!("{name}.parquet")).to_str().unwrap().to_string();
    find(&[path], &ReadOptions::default()).unwrap().remove(0)
}

#[test]
fn every_form_that_pyarrow_writes_is_read() {
    let expected = std::fs::read_to_string(folder().join("expected.json")).unwrap();
    let expected: Expected = serde_json::from_str(&expected).unwrap();
    assert!(expected.files.len() >= 20);
    for (name, list) in &expected.files {
        let wanted = &expected.lists[list];
        let mut reader = read(&input(name), &skip()).unwrap();
        let found: Vec<Document> = reader.by_ref().map(Result::unwrap).collect();
        let rows: Vec<(u64, &str)> =
            found.iter().map(|document| (document.place.row.unwrap(), document.text.as_str())).collect();
        let texts = wanted.iter().enumerate();
        let texts = texts.filter_map(|(at, text)| Some((at as u64 + 1, text.as_deref()?)));
        assert_eq!(rows, texts.collect::<Vec<_>>(), "{name}");
        let nulls = wanted.iter().filter(|text| text.is_none()).count() as u64;
        assert_eq!(reader.skipped().total(), nulls, "{name}: {}", reader.skipped());
        assert!(reader.skipped().reasons().all(|(reason, _, _)| reason == Reason::Null));

        let index = Index::build(&[input(name)], &skip()).unwrap();
        assert_eq!(index.count(), found.len() as u64);
        for step in [1, 7, 23] {
            for at in (0..found.len()).map(|at| at * step % found.len()) {
                assert_eq!(index.read(at as u64).unwrap(), found[at], "{name}");
            }
        }
    }
}

#[test]
fn long_values_are_read_whole_and_bounded_by_the_option() {
    let lengths = |options: &ReadOptions| {
        let mut reader = read(&input("large"), options).unwrap();
        let lengths: Vec<usize> = reader.by_ref().map(|document| document.unwrap().text.len()).collect();
        (lengths, reader.skipped().total())
    };
    assert_eq!(lengths(&skip()), (vec![150_000, 100_000, 5], 0));
    assert_eq!(lengths(&ReadOptions { max_document_bytes: 100_000, ..skip() }), (vec![100_000, 5], 1));
}

/// Damages every single byte of a file in turn: reading ends with rows or an error. Its pages have checksums, so damage to them
/// is always noticed; the footer has none, and may refer to another column's pages.
#[test]
fn damage_to_any_byte_is_survived_and_checksums_notice_it() {
    let bytes = std::fs::read(folder().join("checksums.parquet")).unwrap();
    let footer_bytes = u32::from_le_bytes(*bytes[..bytes.len() - 4].last_chunk().unwrap()) as usize;
    let data_end = bytes.len() - 8 - footer_bytes;
    let whole: Vec<Document> = read(&input("checksums"), &skip()).unwrap().map(Result::unwrap).collect();
    let path = std::env::temp_dir().join(format!("flatout-parquet-{}.parquet", std::process::id()));
    std::fs::write(&path, &bytes).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let damaged = Input { path: path.clone(), ..input("checksums") };
    let mut unnoticed = Vec::new();
    for (at, byte) in bytes.iter().enumerate() {
        file.write_all_at(&[byte ^ 0x55], at as u64).unwrap();
        let mut reader = read(&damaged, &skip()).unwrap();
        let texts: Vec<String> = reader.by_ref().map(|document| document.unwrap().text).collect();
        let same = texts.iter().eq(whole.iter().map(|document| &document.text));
        if !same && reader.skipped().total() == 0 && at < data_end {
            unnoticed.push(at);
        }
        file.write_all_at(&[*byte], at as u64).unwrap();
    }
    std::fs::remove_file(&path).unwrap();
    assert!(unnoticed.is_empty(), "{unnoticed:?}");
}
