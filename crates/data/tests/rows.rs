//! Compares rows of parquet files with lists and structures that pyarrow wrote (`rows/make.py`) with their original contents.

use std::path::{Path, PathBuf};

use crate::scratch::Scratch;
use flatout_data::formats::{Field, OnError, ReadOptions, Record, Records, find};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/rows")
}

fn records(path: &Path) -> Vec<Record> {
    let options = ReadOptions::default();
    let input = find(&[path.to_str().unwrap().to_string()], &options).unwrap().remove(0);
    Records::open(&input, &options).unwrap().map(Result::unwrap).collect()
}

#[test]
fn every_row_is_what_pyarrow_wrote() {
    let expected = std::fs::read_to_string(folder().join("expected.json")).unwrap();
    let Field::List(expected) = Field::from_json(&expected).unwrap() else { panic!("a list of rows") };
    for name in ["plain", "dictionary", "groups", "pages", "v2", "delta"] {
        let found = records(&folder().join(format!("{name}.parquet")));
        assert_eq!(found.len(), expected.len(), "{name}");
        for (at, (record, wanted)) in found.into_iter().zip(&expected).enumerate() {
            assert_eq!(record.place.row, Some(at as u64 + 1));
            assert_eq!(Field::Object(record.fields), *wanted, "{name}, row {}", at + 1);
        }
    }
}

#[test]
fn jsonl_csv_and_parquet_name_their_rows() {
    let scratch = Scratch::new("rows-places");
    let jsonl = scratch.write("a.jsonl", b"{\"a\":1}\n\n{\"a\":2}\n");
    let csv = scratch.write("a.csv", b"a,b\n1,\"x\ny\"\n2,z\n");
    let places =
        |path: &str| records(Path::new(path)).iter().map(|record| record.place.line).collect::<Vec<_>>();
    assert_eq!(places(&jsonl), [Some(1), Some(3)]);
    assert_eq!(places(&csv), [Some(2), Some(4)]);
}

#[test]
fn damage_in_parquet_is_named_by_its_row() {
    let scratch = Scratch::new("rows-damage");
    let bytes = std::fs::read(folder().join("pages.parquet")).unwrap();
    let mut damaged = bytes.clone();
    damaged[40..60].fill(0xff);
    let path = scratch.write("a.parquet", &damaged);
    let options = ReadOptions::default();
    let input = find(&[path], &options).unwrap().remove(0);
    let error = Records::open(&input, &options).unwrap().find_map(Result::err).unwrap();
    assert!(error.sentence.contains("a.parquet, row "), "{error}");
    let skip = ReadOptions { on_error: OnError::Skip, ..options };
    let mut reader = Records::open(&input, &skip).unwrap();
    assert!(reader.by_ref().all(|record| record.is_ok()));
    assert_eq!(reader.skipped().total(), 1);
}
