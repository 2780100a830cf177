//! Tests that the index returns each document as the reader does, from memory or from the cache, or an error when files
//! changed.

use std::io::{Read, Write};
use std::process::{Command, Stdio};

use crate::scratch::Scratch;
use flatout_data::formats::{
    Document, Format, Index, Input, OnError, ReadOptions, Reason, find, is_indexable, read,
};

fn options() -> ReadOptions {
    ReadOptions { on_error: OnError::Skip, text_document_bytes: 100, ..ReadOptions::default() }
}

/// Many files of every format, some with invalid lines.
fn sources(scratch: &Scratch) -> Vec<Input> {
    let text = |at: usize| format!("document {at}, \"quoted\",\nß {}", "word ".repeat(at % 17));
    for file in 0..12 {
        let texts: Vec<String> = (0..40).map(|at| text(file * 100 + at)).collect();
        let jsonl: String = texts
            .iter()
            .enumerate()
            .map(|(at, text)| match at % 10 {
                3 => "{\"text\": oops}\n\r\n".to_string(),
                _ => format!("{}\r\n", serde_json::json!({ "id": at, "text": text })),
            })
            .collect();
        scratch.write(&format!("all/{file:02}.jsonl"), jsonl.as_bytes());
        let quoted = |text: &String| format!("\"{}\"", text.replace('"', "\"\""));
        let csv: String =
            texts.iter().enumerate().map(|(at, text)| format!("{at},{},x\n", quoted(text))).collect();
        scratch.write(&format!("all/{file:02}.csv"), format!("id,text,more\n{csv}1,2\n").as_bytes());
        scratch.write(&format!("all/{file:02}.txt"), format!("\u{feff}{}", texts.join("\n")).as_bytes());
    }
    let parquet = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/parquet/");
    let patterns =
        [scratch.at("all/*"), format!("{parquet}groups.parquet"), format!("{parquet}pages.parquet")];
    find(&patterns, &options()).unwrap()
}

fn documents(inputs: &[Input]) -> Vec<Document> {
    inputs.iter().flat_map(|input| read(input, &options()).unwrap()).map(Result::unwrap).collect()
}

#[test]
fn the_index_returns_the_documents_of_the_reader() {
    let scratch = Scratch::new("index");
    let inputs = sources(&scratch);
    let wanted = documents(&inputs);
    assert!(wanted.len() > 1000);
    let build = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| Index::build(&inputs, &options()).unwrap())
    };
    let index = build(1);
    assert_eq!(index.count(), wanted.len() as u64);
    for at in (0..wanted.len()).map(|at| at * 7919 % wanted.len()) {
        assert_eq!(index.read(at as u64).unwrap(), wanted[at]);
        assert_eq!(index.place(at as u64), wanted[at].place);
    }
    let counted: Vec<_> = index.skipped().reasons().map(|(reason, count, _)| (reason, count)).collect();
    assert_eq!(counted, [(Reason::BrokenJson, 48), (Reason::Columns, 12)]);
    assert!(index.skipped().to_string().starts_with("60 left out: 48 broken JSON (first: "));
    for other in [2, 7].map(build) {
        assert_eq!(other.fingerprint(), index.fingerprint());
        assert_eq!(other.skipped(), index.skipped());
    }
    // Threads may read concurrently.
    let index = &index;
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let wanted = &wanted;
            scope.spawn(move || {
                for at in (0..wanted.len()).map(|at| (at * 31 + thread * 97) % wanted.len()) {
                    assert_eq!(index.read(at as u64).unwrap().text, wanted[at].text);
                }
            });
        }
    });
}

#[test]
fn a_cached_index_is_valid_until_something_changes() {
    let scratch = Scratch::new("index-cache");
    let mut inputs = sources(&scratch);
    let cache = scratch.path().join("deep/er/cache");
    let first = Index::cached(&cache, &inputs, &options()).unwrap();
    let kept = std::fs::read(&cache).unwrap();
    let again = Index::from_text(kept.as_slice()).unwrap();
    assert!(again.is_of(&inputs, &options()));
    assert_eq!((again.count(), again.fingerprint()), (first.count(), first.fingerprint()));
    assert_eq!(again.skipped(), first.skipped());
    for at in (0..first.count()).step_by(13) {
        assert_eq!(again.read(at).unwrap(), first.read(at).unwrap());
    }
    let mut text = Vec::new();
    again.to_text(&mut text).unwrap();
    assert!(text == kept);

    assert!(!again.is_of(&inputs, &ReadOptions { field: "other".into(), ..options() }));
    assert!(!again.is_of(&inputs[1..], &options()));
    // Any damage to the cache is noticed, and the index is built again.
    for at in (0..kept.len()).step_by(97) {
        let mut damaged = kept.clone();
        damaged[at] ^= 1;
        assert!(Index::from_text(damaged.as_slice()).is_err(), "byte {at}");
        assert!(Index::from_text(&kept[..at]).is_err(), "cut at {at}");
    }
    std::fs::write(&cache, &kept[..kept.len() / 2]).unwrap();
    assert_eq!(Index::cached(&cache, &inputs, &options()).unwrap().fingerprint(), first.fingerprint());
    assert!(std::fs::read(&cache).unwrap() == kept);

    let changed = inputs[0].path.clone();
    std::fs::File::options().append(true).open(&changed).unwrap().write_all(b"9,\"one more\",x\n").unwrap();
    inputs[0].bytes = std::fs::metadata(&changed).unwrap().len();
    assert!(!again.is_of(&inputs, &options()));
    let newer = Index::cached(&cache, &inputs, &options()).unwrap();
    assert_eq!(newer.count(), first.count() + 1);
    assert_ne!(newer.fingerprint(), first.fingerprint());
}

#[test]
fn changed_and_removed_files_are_errors_and_never_other_texts() {
    let scratch = Scratch::new("index-changed");
    let parquet = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/parquet/");
    let bytes = |name: &str| std::fs::read(format!("{parquet}{name}.parquet")).unwrap();
    for (name, before, after) in [
        ("a.txt", b"one and two".to_vec(), b"one and ten".to_vec()),
        ("a.txt", b"one and two".to_vec(), b"one".to_vec()),
        ("a.jsonl", b"{\"text\":\"one\"}".to_vec(), b"{\"text\":\"two\"}".to_vec()),
        ("a.jsonl", b"{\"text\":\"one\"}".to_vec(), b"{\"text\":\"one\"]".to_vec()),
        ("a.csv", b"text,id\none,1".to_vec(), b"id,text\none,1".to_vec()),
        ("a.csv", b"text,id\none,1".to_vec(), b"name,id\none,1".to_vec()),
        ("a.parquet", bytes("plain-none"), bytes("dictionary-none")),
        ("a.parquet", bytes("plain-none"), bytes("plain-none")[..900].to_vec()),
    ] {
        let input = find(&[scratch.write(name, &before)], &options()).unwrap();
        let index = Index::build(&input, &options()).unwrap();
        scratch.write(name, &after);
        let last = index.count() - 1;
        let error = index.read(last).unwrap_err();
        assert!(!error.is_input() && error.sentence.contains("changed after it was indexed"), "{error}");
        assert!(error.sentence.contains(&index.place(last).to_string()), "{error}");

        scratch.write(name, &before);
        let input = find(&[scratch.at(name)], &options()).unwrap();
        let index = Index::build(&input, &options()).unwrap();
        std::fs::remove_file(scratch.path().join(name)).unwrap();
        let error = index.read(last).unwrap_err();
        assert!(error.sentence.contains("removed after it was indexed"), "{error}");
    }
}

#[test]
fn the_first_file_that_is_wrong_is_named_whatever_the_threads() {
    let scratch = Scratch::new("index-first");
    for file in 0..40 {
        let line = if file % 10 == 7 { "{".into() } else { "{\"text\":\"fine\"}\n".repeat(2000 - 40 * file) };
        scratch.write(&format!("{file:02}.jsonl"), line.as_bytes());
    }
    let options = ReadOptions::default();
    let inputs = find(&[scratch.at("*.jsonl")], &options).unwrap();
    for _ in 0..10 {
        let error = Index::build(&inputs, &options).err().unwrap();
        assert!(error.sentence.contains("07.jsonl, line 1"), "{error}");
    }
}

/// More files than are kept open at once.
#[test]
fn a_glob_of_a_thousand_files_is_one_source() {
    let scratch = Scratch::new("index-many");
    for file in 0..1000 {
        scratch.write(
            &format!("{}/{file:04}.jsonl", file % 10),
            format!("{{\"text\":\"file {file}\"}}").as_bytes(),
        );
    }
    let inputs = find(&[scratch.at("**/*.jsonl")], &ReadOptions::default()).unwrap();
    assert_eq!(inputs.len(), 1000);
    let index = Index::build(&inputs, &ReadOptions::default()).unwrap();
    assert_eq!(index.count(), 1000);
    for at in (0..2000).map(|at| at * 617 % 1000) {
        let (folder, rest) = (at / 100, at % 100);
        assert_eq!(index.read(at).unwrap().text, format!("file {}", rest * 10 + folder));
    }
}

const CHILD: &str = "FLATOUT_STANDARD_INPUT_CHILD";

/// Runs this test binary with a pipe as standard input.
#[test]
fn standard_input_is_a_source_and_its_content_settles_what_it_is() {
    if std::env::var_os(CHILD).is_some() {
        let input = find(&["-".into()], &ReadOptions::default()).unwrap().remove(0);
        assert!(!is_indexable(&input) && Index::build(std::slice::from_ref(&input), &options()).is_err());
        for document in read(&input, &ReadOptions::default()).unwrap() {
            match document {
                Ok(document) => println!("{} <- {:?}", document.text, document.place.to_string()),
                Err(error) => println!("{error}"),
            }
        }
        return println!("{:?}", input.format);
    }
    let run = |bytes: &[u8]| {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "index::standard_input_is_a_source_and_its_content_settles_what_it_is",
                "--nocapture",
            ])
            .env(CHILD, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(bytes).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    };
    let lines = b"{\"text\":\"one\"}\n{\"text\":2}\n";
    let mut packed = Vec::new();
    flate2::bufread::GzEncoder::new(lines.as_slice(), flate2::Compression::fast())
        .read_to_end(&mut packed)
        .unwrap();
    for bytes in [lines.as_slice(), &packed] {
        let said = run(bytes);
        assert!(said.contains("one <- \"standard input, line 1\""), "{said}");
        assert!(said.contains("standard input, line 2: the field `text` is a number"), "{said}");
        assert!(said.contains(&format!("{:?}", Format::Jsonl)), "{said}");
    }
    assert!(run(b"plain words").contains("plain words <- \"standard input, line 1\""));
    let parquet = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/parquet/nulls.parquet")).unwrap();
    assert!(run(&parquet).contains("standard input: parquet is read from its end"));
}
