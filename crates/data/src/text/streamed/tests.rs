//! Tests that text in blocks, local and remote, gives the same bits from any position.

use std::collections::BTreeMap;
use std::io::Read;

use crate::error::DataError;
use crate::formats::{self, OnError, ReadOptions};
use crate::order::loader::{Cursor, LoaderOptions, Rows};
use crate::order::pack::STREAMS;
use crate::order::permutation::Order;
use crate::remote::server::{Content, SetServer};
use crate::scratch::Scratch;
use crate::text::corpus::{Corpus, DocumentOrder, MixPart, Spec, open};
use crate::text::streamed::{MOST_UNUSABLE, Streamed};

const CONTEXT: usize = 64;

fn fixture(name: &str) -> String {
    format!("{}/tests/streamed/{name}.parquet", env!("CARGO_MANIFEST_DIR"))
}

/// The texts of a local file.
fn texts(path: &str) -> Vec<String> {
    let input = formats::find(&[path.to_string()], &ReadOptions::default()).unwrap().remove(0);
    formats::read(&input, &ReadOptions::default()).unwrap().map(|document| document.unwrap().text).collect()
}

/// The same texts as lines of JSON.
fn lines(name: &str) -> Vec<u8> {
    let line = |text| format!("{{\"n\": 1, \"text\": {}}}\n", serde_json::to_string(&text).unwrap());
    texts(&fixture(name)).into_iter().map(line).collect::<String>().into_bytes()
}

/// The same documents in every form: names and contents of files.
fn forms() -> BTreeMap<&'static str, Vec<(String, Vec<u8>)>> {
    let packed = |name: &str| {
        let (lines, mut packed) = (lines(name), Vec::new());
        let mut encoder = flate2::bufread::GzEncoder::new(&lines[..], flate2::Compression::fast());
        encoder.read_to_end(&mut packed).unwrap();
        packed
    };
    let both = |ending: &str, of: &dyn Fn(&str) -> Vec<u8>| -> Vec<(String, Vec<u8>)> {
        ["a", "b"].map(|name| (format!("{name}.{ending}"), of(name))).into()
    };
    BTreeMap::from([
        ("parquet", both("parquet", &|name| std::fs::read(fixture(name)).unwrap())),
        ("jsonl", both("jsonl", &lines)),
        ("packed", both("jsonl.gz", &packed)),
    ])
}

fn spec(path: Vec<String>) -> Spec {
    Spec {
        path,
        vocab: 300,
        context: CONTEXT,
        held_out: 0.2,
        order: DocumentOrder::Streamed,
        ..Spec::default()
    }
}

fn written(scratch: &Scratch, files: &[(String, Vec<u8>)]) -> Vec<String> {
    files.iter().map(|(name, bytes)| scratch.write(name, bytes).to_str().unwrap().to_string()).collect()
}

fn rows(corpus: &Corpus, from: &Cursor, threads: usize, count: usize) -> (Rows, Cursor) {
    let options = LoaderOptions { threads, ..LoaderOptions::default() };
    let mut loader = corpus.train_loader(from, options).unwrap();
    let rows = loader.next_rows(count).unwrap();
    (rows, loader.cursor().clone())
}

/// The parts of rows that training reads.
fn seen(rows: &Rows) -> (Vec<i32>, Vec<i32>, Vec<u64>, u64) {
    (rows.tokens.clone(), rows.targets.clone(), rows.sample.clone(), rows.epoch.to_bits())
}

/// The documents in rows of a single pass, sorted.
fn documents(corpus: &Corpus, tokens: &[i32]) -> Vec<String> {
    let end = corpus.vocabulary().eos() as i32;
    let documents = tokens.split(|token| *token == end);
    let decoded = documents.map(|tokens| {
        let inner =
            tokens.iter().map(|token| *token as u32).filter(|token| *token != corpus.vocabulary().bos());
        corpus.vocabulary().decode(&inner.collect::<Vec<_>>())
    });
    let mut decoded: Vec<String> = decoded.filter(|text| !text.is_empty()).collect();
    decoded.sort_unstable();
    decoded
}

#[test]
fn every_document_comes_once_on_one_side() {
    let scratch = Scratch::new("streamed-once");
    let mut all = ["a", "b"].map(|name| texts(&fixture(name))).concat();
    all.sort_unstable();
    for (form, files) in forms() {
        let spec = spec(written(&scratch, &files));
        let corpus = open(&spec).unwrap();
        let train = documents(&corpus, &corpus.rows_once(100_000).unwrap().tokens);
        let held_out = documents(&corpus, &corpus.held_out_rows(100_000).unwrap().tokens);
        assert!(held_out.len() > all.len() / 10 && held_out.len() < all.len() * 3 / 10, "{form}");
        let mut both = [train, held_out.clone()].concat();
        both.sort_unstable();
        assert_eq!(both, all, "{form}");
        // Indexed files hold out the same documents, and the counts that are estimated here are close.
        let shuffled = Spec { order: DocumentOrder::Auto, cache: Some(scratch.path().into()), ..spec };
        let indexed = open(&shuffled).unwrap();
        assert_eq!(documents(&indexed, &indexed.held_out_rows(100_000).unwrap().tokens), held_out, "{form}");
        let (known, guessed) = (indexed.describe(), corpus.describe());
        let near = |known: Option<u64>, guessed: Option<u64>| {
            (guessed.unwrap() as f64 / known.unwrap() as f64 - 1.0).abs() < 0.3
        };
        match form {
            "packed" => assert_eq!((guessed.documents, guessed.tokens), (None, None)),
            _ => {
                assert!(guessed.is_estimated, "{form}");
                assert!(near(known.documents, guessed.documents), "{form}: {known:?} {guessed:?}");
                assert!(near(known.tokens, guessed.tokens), "{form}: {known:?} {guessed:?}");
            }
        }
    }
}

#[test]
fn streams_share_the_documents_of_few_blocks() {
    let scratch = Scratch::new("streamed-few");
    for (form, files) in forms().into_iter().filter(|(form, _)| *form != "jsonl") {
        let corpus = open(&spec(written(&scratch, &files))).unwrap();
        let epoch = corpus.rows_once(100_000).unwrap().tokens.len() / CONTEXT;
        let each = epoch * 7 / 10 / STREAMS;
        let (all, _) = rows(&corpus, &corpus.start(), 2, each * STREAMS);
        let mut seen = Vec::new();
        for stream in 0..STREAMS {
            // Rows are taken from the streams in turn. The last document of each stream continues after them.
            let own = all.tokens.chunks(CONTEXT).skip(stream).step_by(STREAMS).flatten().copied();
            let mut own: Vec<i32> = own.collect();
            let end = own.iter().rposition(|token| *token == corpus.vocabulary().eos() as i32).unwrap();
            own.truncate(end);
            seen.extend(documents(&corpus, &own));
        }
        let count = seen.len();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), count, "{form}: a document came twice before all came once");
        assert!(count > 4 * STREAMS, "{form}: {count}");
    }
}

#[test]
fn a_server_gives_the_rows_of_local_files_from_any_position() {
    let scratch = Scratch::new("streamed-remote");
    for (form, files) in forms() {
        let local = open(&spec(written(&scratch, &files))).unwrap();
        let server = SetServer::start(Content::of(files.iter().cloned().collect()));
        let path = files.iter().map(|(name, _)| server.address(name)).collect();
        let remote = open(&Spec { order: DocumentOrder::Auto, ..spec(path) }).unwrap();
        assert_eq!(remote.vocabulary().fingerprint(), local.vocabulary().fingerprint(), "{form}");
        let held_out = |corpus: &Corpus| seen(&corpus.held_out_rows(30).unwrap());
        assert_eq!(held_out(&remote), held_out(&local), "{form}");
        // About two epochs.
        let count = 2000;
        let (unbroken, _) = rows(&local, &local.start(), 1, count);
        // A compressed file is one block, and epochs are counted in blocks.
        assert!(unbroken.epoch > 1.0 || form == "packed", "{form}: {}", unbroken.epoch);
        assert_eq!(seen(&rows(&remote, &remote.start(), 3, count).0), seen(&unbroken), "{form}");
        for at in [1, 8, 13, 400, 1111, 1999] {
            let (_, cursor) = rows(&remote, &remote.start(), 2, at);
            let text = serde_json::to_string(&cursor).unwrap();
            let cursor: Cursor = serde_json::from_str(&text).unwrap();
            let (rest, _) = rows(&remote, &cursor, 2, count - at);
            assert_eq!(rest.tokens, unbroken.tokens[at * CONTEXT..], "{form} from row {at}");
            assert_eq!(rest.targets, unbroken.targets[at * CONTEXT..], "{form} from row {at}");
        }
        // Another seed gives another order of the same documents.
        let other = open(&Spec { seed: 9, ..spec(written(&scratch, &files)) }).unwrap();
        assert_ne!(
            seen(&rows(&other, &other.start(), 1, 50).0),
            seen(&rows(&local, &local.start(), 1, 50).0)
        );
        assert_eq!(held_out(&other), held_out(&local), "{form}");
    }
}

#[test]
fn changed_data_is_refused() {
    let scratch = Scratch::new("streamed-changed");
    let files = forms().remove("jsonl").unwrap();
    let server = SetServer::start(Content::of(files.iter().cloned().collect()));
    let path: Vec<String> = files.iter().map(|(name, _)| server.address(name)).collect();
    let corpus = open(&spec(path.clone())).unwrap();
    let (_, cursor) = rows(&corpus, &corpus.start(), 1, 10);
    let tokenizer = scratch.write("tokenizer.json", corpus.vocabulary().to_json().as_bytes());
    server.change(|content| {
        let files = content.commits.values_mut().next().unwrap();
        let changed = files.get_mut("a.jsonl").unwrap();
        let at = changed.iter().position(|byte| *byte == b'q').unwrap();
        changed[at] = b'Q';
    });
    let again = open(&Spec { tokenizer: Some(tokenizer), ..spec(path) }).unwrap();
    let refused = again.train_loader(&cursor, LoaderOptions::default()).err().unwrap();
    assert!(refused.sentence.contains("not what this run began with"), "{refused}");
    // Changes of files that are already open are noticed when they are read.
    let error = corpus.held_out_rows(100_000).unwrap_err();
    assert!(error.sentence.contains("changed on the server"), "{error}");
}

#[test]
fn wrong_documents_end_the_rows_or_are_counted() {
    let scratch = Scratch::new("streamed-wrong");
    let mut files = forms().remove("jsonl").unwrap();
    files[1].1.extend_from_slice(b"{\"text\": 7}\n{broken\n{\"text\": \"the last document of all\"}\n");
    let spec = spec(written(&scratch, &files));
    let tokenizer = {
        let corpus = open(&Spec { path: vec![fixture("a")], ..spec.clone() }).unwrap();
        scratch.write("tokenizer.json", corpus.vocabulary().to_json().as_bytes())
    };
    let spec = Spec { tokenizer: Some(tokenizer), ..spec };
    let taken = |spec: &Spec| -> Result<Vec<String>, DataError> {
        let corpus = open(spec)?;
        let mut loader = corpus.train_loader(&corpus.start(), LoaderOptions::default())?;
        loader.next_rows(3000)?;
        Ok(loader.take_left_out())
    };
    let error = taken(&spec).unwrap_err();
    assert!(error.sentence.contains("b.jsonl, byte ") && error.is_input(), "{error}");
    let read = ReadOptions { on_error: OnError::Skip, ..ReadOptions::default() };
    let left_out = taken(&Spec { read, ..spec }).unwrap();
    assert!(left_out.len() == 1 && left_out[0].contains("b.jsonl"), "{left_out:?}");
}

#[test]
fn a_sample_ends_after_many_unusable_documents_in_a_row() {
    const FILES: u64 = 40;
    let scratch = Scratch::new("streamed-unusable");
    let first = Order::new(Some(FILES), 0).document(0);
    let good = "{\"text\": \"once\"}\n".repeat(3);
    let files: Vec<_> = (0..FILES)
        .map(|n| (format!("{n:02}.jsonl"), if n == first { good.clone() } else { "{}\n".repeat(1000) }))
        .map(|(name, lines)| (name, lines.into_bytes()))
        .collect();
    let options = ReadOptions { on_error: OnError::Skip, ..ReadOptions::default() };
    let inputs = formats::find(&written(&scratch, &files), &options).unwrap();
    let streamed = Streamed::open(inputs, &options, 0.0, None);
    let mut found = 0;
    let skipped = streamed.visit(|_| {
        found += 1;
        Ok(Some(false))
    });
    assert_eq!((found, skipped.unwrap().total()), (1, MOST_UNUSABLE));
}

#[test]
fn unstreamable_data_is_reported() {
    let server = SetServer::start(Content::of(BTreeMap::from([
        ("empty.jsonl".into(), b"\n\n".to_vec()),
        ("a.jsonl".into(), b"{\"text\": \"a b c\"}\n{\"text\": \"d e f\"}\n".to_vec()),
        ("other.parquet".into(), std::fs::read(fixture("a")).unwrap()),
    ])));
    let at = |name: &str| vec![server.address(name)];
    let refused = |spec: Spec| open(&spec).err().unwrap().sentence;
    assert!(refused(spec(at("empty.jsonl"))).contains("no text to learn from"));
    assert!(refused(spec(at("none.jsonl"))).contains("no such file"));
    assert!(refused(spec(at("a.bin"))).contains("token files"));
    let shuffled = Spec { order: DocumentOrder::Shuffled, ..spec(at("a.jsonl")) };
    assert!(refused(shuffled).contains("data.order=shuffled"));
    let part = |name: &str| MixPart { path: at(name), weight: 1.0 };
    let mix = Spec { mix: vec![part("a.jsonl"), part("a.jsonl")], ..spec(vec![]) };
    assert!(refused(mix).contains("flatout data prepare"));
    let read = ReadOptions { field: "body".into(), ..ReadOptions::default() };
    let other = Spec { read, ..spec(at("other.parquet")) };
    assert!(refused(other).contains("there is no column `body`"));
}
