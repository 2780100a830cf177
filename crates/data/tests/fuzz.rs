//! Feeds damaged inputs to every parser of this crate: no panic, no hang, bounded memory, and stronger properties where they
//! hold.

use std::collections::{HashSet, VecDeque};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::archive;
use crate::features;
use crate::scratch::Scratch;
use crate::visual::{base64, encoded_png};
use flatout_data::Vocabulary;
use flatout_data::examples::{
    ChatTemplate, Conversation, ExampleKind, ExampleSets, ExampleSpec, FrameSpec, VisionSpec, open,
};
use flatout_data::formats::{
    Compression, Document, Field, Fields, Format, Index, Input, OnError, ReadOptions, Reader, Reason,
    Records, Skipped, find, read,
};
use flatout_data::images::{
    Augment, Filter, ImageSet, ImageSource, ImageSpec, View, inspect, open as open_images, ordered,
};
use flatout_data::vision::{FeatureCache, FeatureIndex, Given, ImageReader, ImageStore, Patching};
use flatout_fuzz::{Limits, feed};

const MOST_BYTES: usize = 4 << 10;

fn options(on_error: OnError) -> ReadOptions {
    ReadOptions {
        on_error,
        max_document_bytes: MOST_BYTES,
        text_document_bytes: 64,
        ..ReadOptions::default()
    }
}

fn packed_gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packed = Vec::new();
    flate2::bufread::GzEncoder::new(bytes, flate2::Compression::best()).read_to_end(&mut packed).unwrap();
    packed
}

fn jsonl_seeds() -> Vec<Vec<u8>> {
    vec![
        b"{\"text\":\"one\"}\n{\"text\":\"two\", \"id\": 2}\r\n\n".to_vec(),
        "{\"id\":[1,2.5e3,{\"text\":null}],\"text\":\"\\ud83e\\udd8a ß \\n\\\"quoted\\\"\"}\n"
            .repeat(4)
            .into_bytes(),
        b"\xef\xbb\xbf{\"text\":null}\n[1]\n{\"text\":3}\n{}\n{\"text\":\"\"}\nnonsense\n".to_vec(),
    ]
}

/// Returns a few bytes at a time.
struct Trickle(VecDeque<u8>, usize);

impl Read for Trickle {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let count = out.len().min(self.0.len()).min(self.1);
        for (place, byte) in out.iter_mut().zip(self.0.drain(..count)) {
            *place = byte;
        }
        Ok(count)
    }
}

/// Reads under both policies. Documents that are read are usable, failing stops at the first thing that skipping skips, and the
/// sizes of reads do not matter.
fn check(bytes: &[u8], format: Format, compression: Compression) {
    let input = Input { path: "fuzzed".into(), format, compression, bytes: bytes.len() as u64, remote: None };
    let open = |bytes: Box<dyn Read + Send>, on_error| Reader::over(bytes, &input, &options(on_error));
    let whole = || Box::new(std::io::Cursor::new(bytes.to_vec()));
    let (skipping, skipped) = collect(open(whole(), OnError::Skip));
    check_documents(&skipping, format);
    let mut failing = open(whole(), OnError::Fail);
    let before: Vec<Document> = failing.by_ref().map_while(Result::ok).collect();
    assert_eq!(before, skipping[..before.len()]);
    assert_eq!(before.len() < skipping.len() || skipped.total() > 0, skipped.total() > 0);
    // The amount of output before the damage of compressed data varies.
    let damaged = skipped.reasons().any(|(reason, _, _)| reason == Reason::Damaged);
    if bytes.len() < 2000 && !damaged {
        let trickle = Trickle(bytes.to_vec().into(), 1 + bytes.len() % 7);
        assert!(collect(open(Box::new(trickle), OnError::Skip)) == (skipping, skipped));
    }
}

fn collect(mut reader: Reader) -> (Vec<Document>, Skipped) {
    let documents = reader.by_ref().map(|document| document.expect("wrong data is skipped")).collect();
    (documents, reader.skipped().clone())
}

fn check_documents(documents: &[Document], format: Format) {
    for Document { text, place } in documents {
        assert!(!text.trim().is_empty() && !text.contains('\0') && text.len() <= MOST_BYTES);
        let numbers = (place.line, place.row);
        assert!(matches!((format, numbers), (Format::Parquet, (None, Some(1..))) | (_, (Some(1..), None))));
    }
}

#[test]
fn text() {
    let seeds = [
        "a line of text\nand another, with ß and 東京 and 🦊\n".repeat(9).into_bytes(),
        b"\xef\xbb\xbfword \r\n\n\n  \n".repeat(3),
        b"x".repeat(500),
    ];
    feed("text", &seeds, Limits::default(), |bytes| check(bytes, Format::Text, Compression::None));
}

#[test]
fn jsonl() {
    feed("jsonl", &jsonl_seeds(), Limits::default(), |bytes| check(bytes, Format::Jsonl, Compression::None));
}

#[test]
fn csv() {
    let seeds = [
        b"id,text\n1,one\n2,\"two, \"\"quoted\"\"\r\nlines\"\r\n\n3,three\n".to_vec(),
        b"text\none\n\"\"\n".to_vec(),
        b"a,b,text,c\n,,x,\n\"\",\"\",\"y\",\"\"\n1,2\n\"open".to_vec(),
    ];
    feed("csv", &seeds, Limits::default(), |bytes| check(bytes, Format::Csv, Compression::None));
}

#[test]
fn gzip() {
    let seeds: Vec<Vec<u8>> = jsonl_seeds().iter().map(|bytes| packed_gzip(bytes)).collect();
    feed("gzip", &seeds, Limits::default(), |bytes| check(bytes, Format::Jsonl, Compression::Gzip));
}

#[test]
fn zstd() {
    let seeds = [
        include_bytes!("packed/two.jsonl.zst").to_vec(),
        include_bytes!("packed/many.jsonl.zst").to_vec(),
        b"\x53\x2a\x4d\x18\x03\0\0\0abc".to_vec(),
    ];
    feed("zstd", &seeds, Limits::default(), |bytes| check(bytes, Format::Jsonl, Compression::Zstd));
}

#[test]
fn parquet() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parquet");
    let names = "plain-none dictionary-none nulls required pages-dictionary fallback v2 v2-dictionary delta \
                 delta-length delta-many plain-snappy plain-gzip dictionary-zstd groups structure list no-rows";
    let seed = |name: &str| std::fs::read(folder.join(format!("{name}.parquet"))).unwrap();
    let seeds: Vec<Vec<u8>> = names.split_whitespace().map(seed).collect();
    let scratch = Scratch::new("fuzz-parquet");
    let path = scratch.write("a.parquet", b"");
    let file = File::options().write(true).open(&path).unwrap();
    feed("parquet", &seeds, Limits::default(), |bytes| {
        file.write_all_at(bytes, 0).unwrap();
        file.set_len(bytes.len() as u64).unwrap();
        let input = Input {
            path: path.clone().into(),
            format: Format::Parquet,
            compression: Compression::None,
            bytes: bytes.len() as u64,
            remote: None,
        };
        let (documents, skipped) = collect(read(&input, &options(OnError::Skip)).unwrap());
        check_documents(&documents, Format::Parquet);
        let index = Index::build(&[input], &options(OnError::Skip)).unwrap();
        assert_eq!((index.count(), index.skipped()), (documents.len() as u64, &skipped));
        for (at, document) in documents.iter().enumerate().take(20) {
            assert_eq!(index.read(at as u64).unwrap(), *document);
        }
    });
}

#[test]
fn index() {
    let scratch = Scratch::new("fuzz-index");
    let seeds: Vec<Vec<u8>> = jsonl_seeds()
        .iter()
        .enumerate()
        .map(|(at, bytes)| {
            let inputs =
                find(&[scratch.write(&format!("{at}.jsonl"), bytes)], &options(OnError::Skip)).unwrap();
            let mut text = Vec::new();
            Index::build(&inputs, &options(OnError::Skip)).unwrap().to_text(&mut text).unwrap();
            text
        })
        .collect();
    let whole = seeds.clone();
    feed("index", &seeds, Limits::default(), move |bytes| {
        if let Ok(index) = Index::from_text(bytes) {
            assert!(whole.iter().any(|seed| bytes.starts_with(seed)), "damage was not noticed");
            assert!(index.count() <= 20);
        }
    });
}

#[test]
fn tokenizer() {
    let scratch = Scratch::new("fuzz-tokenizer");
    let path = scratch.path().join("seed.json");
    let texts = ["the quick brown fox and the lazy dog", "and the fox and the dog"];
    Vocabulary::train(texts.into_iter(), 270).unwrap().save(&path).unwrap();
    let trained = std::fs::read(&path).unwrap();
    let words = ["<bos>", "<eos>", "the", "captain", "."].map(String::from);
    Vocabulary::from_words(&words).save(&path).unwrap();
    let mut seeds = vec![trained, std::fs::read(&path).unwrap()];
    let plain: serde_json::Value = serde_json::from_slice(&seeds[0]).unwrap();
    for (part, value) in [
        (
            "normalizer",
            r#"{"type":"Sequence","normalizers":[{"type":"NFKC"},{"type":"Replace","pattern":{"Regex":" +"},"content":"_"},{"type":"Prepend","prepend":"_"},{"type":"Lowercase"}]}"#,
        ),
        (
            "pre_tokenizer",
            r#"{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"String":" "},"behavior":"Isolated","invert":false},{"type":"Metaspace","replacement":"_","prepend_scheme":"always","split":true},{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":false}]}"#,
        ),
        (
            "decoder",
            r#"{"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"_"},"content":" "},{"type":"ByteFallback"},{"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":0}]}"#,
        ),
    ] {
        let mut file = plain.clone();
        file[part] = serde_json::from_str(value).unwrap();
        seeds.push(file.to_string().into_bytes());
    }
    let path = scratch.write("tokenizer.json", b"");
    let file = File::options().write(true).open(&path).unwrap();
    feed("tokenizer", &seeds, Limits::default(), |bytes| {
        file.write_all_at(bytes, 0).unwrap();
        file.set_len(bytes.len() as u64).unwrap();
        if let Ok(vocabulary) = Vocabulary::load(Path::new(&path))
            && let Ok(tokens) = vocabulary.encode("the quick ß captain .")
        {
            assert!(tokens.iter().all(|token| (*token as usize) < vocabulary.size()));
            vocabulary.decode(&tokens);
        }
    });
}

/// Reads a file as rows: no row is both read and skipped, and reading ends.
fn rows(path: &Path, format: Format, bytes: u64) {
    let input = Input { path: path.into(), format, compression: Compression::None, bytes, remote: None };
    let options = |on_error| ReadOptions { max_image_bytes: MOST_BYTES, ..options(on_error) };
    let mut records = Records::open(&input, &options(OnError::Skip)).unwrap();
    let read = records.by_ref().inspect(|record| assert!(record.is_ok(), "wrong rows are skipped")).count();
    let mut failing = Records::open(&input, &options(OnError::Fail)).unwrap();
    let before = failing.by_ref().take_while(Result::is_ok).count();
    assert!(before <= read && (records.skipped().total() > 0 || before == read));
}

#[test]
fn parquet_rows() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/rows");
    let seed = |name: &str| std::fs::read(folder.join(format!("{name}.parquet"))).unwrap();
    let mut seeds: Vec<Vec<u8>> =
        ["plain", "dictionary", "groups", "pages", "v2", "delta"].map(seed).to_vec();
    seeds.extend(["bytes", "stored", "lists", "column", "turns"].map(sighted));
    let scratch = Scratch::new("fuzz-parquet-rows");
    let path = scratch.write("a.parquet", b"");
    let file = File::options().write(true).open(&path).unwrap();
    feed("parquet-rows", &seeds, Limits::default(), |bytes| {
        file.write_all_at(bytes, 0).unwrap();
        file.set_len(bytes.len() as u64).unwrap();
        rows(Path::new(&path), Format::Parquet, bytes.len() as u64);
    });
}

/// Rows of every schema, up to tokens: every example has something to learn.
#[test]
fn examples() {
    let seeds = [
        "{\"messages\":[{\"role\":\"user\",\"content\":\"q\"},{\"role\":\"assistant\",\"content\":\"a\"}],\"tools\":[{}]}\n".repeat(2),
        "{\"conversations\":[{\"from\":\"human\",\"value\":\"q\"},{\"from\":\"gpt\",\"value\":[{\"type\":\"text\",\"text\":\"\\ud83e\\udd8a\"}]}]}\n".into(),
        "{\"instruction\":\"q\",\"input\":null,\"output\":\"a\"}\n{\"instruction\":1}\n".into(),
        "{\"prompt\":\"q\",\"chosen\":\"a\",\"rejected\":\"b\"}\n{\"prompt\":[{\"role\":\"user\",\"content\":\"q\"}],\"chosen\":[{\"role\":\"assistant\",\"content\":\"a\"}],\"rejected\":{\"role\":\"assistant\",\"content\":\"b\"}}\n".into(),
        "{\"chosen\":\"q a\",\"rejected\":\"q b\"}\n{\"messages\":[{\"role\":\"user\",\"content\":\"q\"},{\"role\":\"assistant\",\"content\":\"a\"}],\"rejected_response\":\"b\",\"label\":true}\n".into(),
        "{\"prompt\":\"q\",\"completion\":\"a\",\"text\":\"t\",\"label\":\"x\"}\n{\"prompt\":\"\",\"completion\":\"b\",\"text\":\"u\",\"label\":1}\n".into(),
    ]
    .map(String::into_bytes);
    let scratch = Scratch::new("fuzz-examples");
    let path = scratch.write("a.jsonl", b"");
    let tokenizer = scratch.at("tokenizer.json");
    Vocabulary::train(["q a t u"].into_iter(), 258).unwrap().save(Path::new(&tokenizer)).unwrap();
    let file = File::options().write(true).open(&path).unwrap();
    let spec = ExampleSpec {
        path: vec![path.clone()],
        read: options(OnError::Skip),
        tokenizer: Some(tokenizer.into()),
        template: Some("chatml".into()),
        held_out: 0.0,
        max_tokens: 64,
        ..ExampleSpec::default()
    };
    feed("examples", &seeds, Limits::default(), |bytes| {
        file.write_all_at(bytes, 0).unwrap();
        file.set_len(bytes.len() as u64).unwrap();
        for task in [ExampleKind::Chat, ExampleKind::Classes, ExampleKind::Pairs, ExampleKind::Judged] {
            if let Ok(sets) = open(&ExampleSpec { task, ..spec.clone() }) {
                assert!(sets.train.count().is_multiple_of(sets.train.together()));
                assert!(
                    sets.train.iter().all(|example| example.is_supervised() && example.tokens.len() <= 64)
                );
            }
        }
    });
}

/// A parquet file whose rows contain images.
fn sighted(name: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sighted");
    std::fs::read(folder.join(format!("{name}.parquet"))).unwrap()
}

/// A specification of rows with images, with its tokeniser.
fn visual_spec(scratch: &Scratch) -> ExampleSpec {
    let rows = scratch.write("whole.jsonl", b"{\"question\":\"q\",\"answer\":\"a\"}\n");
    let patching = Patching { patch: 2, merge: 2, least_pixels: 16, most_pixels: 256, ..Patching::default() };
    let spec = ExampleSpec {
        task: ExampleKind::Visual,
        path: vec![rows],
        read: options(OnError::Skip),
        vocab: 300,
        held_out: 0.0,
        max_tokens: 96,
        vision: Some(VisionSpec { patching, max_pixels: 1 << 16, ..VisionSpec::default() }),
        ..ExampleSpec::default()
    };
    let tokenizer = scratch.at("tokenizer.json");
    open(&spec).unwrap().vocabulary.save(Path::new(&tokenizer)).unwrap();
    ExampleSpec { tokenizer: Some(tokenizer.into()), ..spec }
}

/// Checks that images among the tokens of examples are in order, complete and not learned.
fn check_image_tokens(sets: &ExampleSets) {
    let places = sets.train.iter().flat_map(|example| example.images).map(|sighting| sighting.image);
    assert!(places.collect::<HashSet<_>>().len() == sets.images.count(), "every image is shown");
    for example in sets.train.iter() {
        assert!(example.is_supervised() && example.tokens.len() <= 96);
        let mut at = 0;
        for sighting in example.images {
            let (start, end) = (sighting.start as usize, (sighting.start + sighting.tokens) as usize);
            assert!(at <= start && start < end && end <= example.tokens.len());
            assert!(example.weights[start..end].iter().all(|weight| *weight == 0.0));
            assert!(example.tokens[start..end].iter().all(|token| *token == example.tokens[start]));
            assert_eq!(sighting.grid.tokens(2), sighting.tokens as usize);
            at = end;
        }
    }
}

/// Rows with images of every form, up to tokens.
#[test]
fn visual_rows() {
    let url = format!("data:image/png;base64,{}", base64(&encoded_png(6, 5, 1)));
    let seeds = [
        format!("{{\"messages\":[{{\"role\":\"user\",\"content\":[{{\"type\":\"image_url\",\"image_url\":{{\"url\":\"{url}\"}}}},{{\"type\":\"text\",\"text\":\"q\"}}]}},{{\"role\":\"assistant\",\"content\":\"a\"}}]}}\n").repeat(2),
        "{\"conversations\":[{\"from\":\"human\",\"value\":\"<image>\\nq<image>\"},{\"from\":\"gpt\",\"value\":\"a\"}],\"images\":[\"a.png\",{\"path\":\"b.png\",\"bytes\":null}]}\n".into(),
        "{\"image\":\"a.png\",\"question\":\"q\",\"answer\":\"a\"}\n{\"image\":null,\"question\":\"q\",\"answer\":\"a\"}\n".into(),
        "{\"images\":[\"a.png\"],\"texts\":[{\"user\":\"q\",\"assistant\":\"a\"},{\"user\":\"<image>r\",\"assistant\":\"b\"}]}\n".into(),
    ]
    .map(String::into_bytes);
    let scratch = Scratch::new("fuzz-visual");
    scratch.write("a.png", &encoded_png(8, 8, 1));
    scratch.write("b.png", &encoded_png(16, 4, 2));
    let spec = visual_spec(&scratch);
    let path = scratch.write("a.jsonl", b"");
    let file = File::options().write(true).open(&path).unwrap();
    let spec = ExampleSpec { path: vec![path], ..spec };
    feed("visual-rows", &seeds, Limits::default(), |bytes| {
        file.write_all_at(bytes, 0).unwrap();
        file.set_len(bytes.len() as u64).unwrap();
        if let Ok(sets) = open(&spec) {
            check_image_tokens(&sets);
        }
    });
}

/// Parquet files with images, up to tokens.
#[test]
fn visual_parquet() {
    let names = ["bytes", "stored", "lists", "column", "parts", "turns", "broken"];
    let scratch = Scratch::new("fuzz-visual-parquet");
    let spec = visual_spec(&scratch);
    let path = scratch.write("a.parquet", b"");
    let file = File::options().write(true).open(&path).unwrap();
    let spec = ExampleSpec { path: vec![path], ..spec };
    feed("visual-parquet", &names.map(sighted), Limits::default(), |bytes| {
        file.write_all_at(bytes, 0).unwrap();
        file.set_len(bytes.len() as u64).unwrap();
        if let Ok(sets) = open(&spec) {
            check_image_tokens(&sets);
        }
    });
}

/// Damaged templates: each ends within limits, with a text or a refusal.
#[test]
fn template() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/templates");
    let names = ["chatml", "llama-3", "mistral", "qwen-thinking", "zephyr", "python", "deepseek"];
    let mut seeds: Vec<Vec<u8>> =
        names.iter().map(|name| std::fs::read(folder.join(format!("{name}.jinja"))).unwrap()).collect();
    let snippets = std::fs::read_to_string(folder.join("snippets.txt")).unwrap();
    seeds.extend(snippets.split("\n---\n").map(|snippet| snippet.as_bytes().to_vec()));
    let message = |role: &str, content: &str| {
        Fields(vec![("role".into(), Field::from(role)), ("content".into(), Field::from(content))])
    };
    let messages = vec![
        message("user", "q 🦊"),
        message("assistant", "a"),
        message("user", "r"),
        message("assistant", "b"),
    ];
    let talk = Conversation { messages, tools: Some(Field::List(vec![])), ..Conversation::default() };
    feed("template", &seeds, Limits::default(), |bytes| {
        let source = String::from_utf8_lossy(bytes);
        let Ok(template) = ChatTemplate::compile(&source, "fuzzed", vec![], None) else { return };
        if let Ok(rendered) = template.render(&talk, 4, true) {
            assert!(rendered.generated.iter().all(|span| rendered.text.get(span.clone()).is_some()));
        }
    });
}

fn pictures(ending: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/pictures");
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|found| found == ending));
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

/// Decodes an image that may be broken. It is decoded or skipped, the same way every time.
fn decoded(set: &ImageSet) {
    let view = View { width: 9, height: 7, augment: Augment::Centre { share: 0.9 }, filter: Filter::Bicubic };
    let batch = ordered(set, &view, 0..set.count()).expect("wrong images are left out");
    assert_eq!(batch.pixels.len(), set.count() as usize * 9 * 7 * 3);
    assert_eq!(batch.left_out.len(), batch.labels.iter().filter(|label| **label < 0).count());
    assert_eq!(batch, ordered(set, &view, 0..set.count()).unwrap());
}

/// Feeds damaged images of one format.
fn images(kind: &str) {
    let scratch = Scratch::new(&format!("fuzz-{kind}"));
    let path = scratch.write("a/fuzzed.png", b"");
    scratch.write("b/whole.png", &pictures("png")[0]);
    let spec = ImageSpec {
        path: vec![scratch.at("")],
        held_out: 0.0,
        on_error: OnError::Skip,
        max_pixels: 1 << 20,
        ..ImageSpec::default()
    };
    feed(kind, &pictures(kind), Limits::default(), |bytes| {
        std::fs::write(&path, bytes).unwrap();
        // Opens the set again: an open set refuses files that have changed.
        let sets = open_images(&spec, &mut |_| {}).unwrap();
        decoded(&sets.train);
        assert_eq!(inspect(&sets, 2).unwrap().looked_at, 2);
    });
}

#[test]
fn jpeg() {
    images("jpg");
}

#[test]
fn png() {
    images("png");
}

#[test]
fn webp() {
    images("webp");
}

/// Files of CIFAR in their Python form: the result is a set or an error, whatever the bytes would do in Python.
#[test]
fn cifar_python() {
    let scratch = Scratch::new("fuzz-cifar-python");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cifar");
    let names = ["ten-old", "hundred-old", "ten-2", "ten-4", "ten-5", "turned-old", "meta-old", "harm"];
    let seeds = names.map(|name| std::fs::read(folder.join(name)).unwrap());
    let path = scratch.write("data_batch_1", b"");
    let spec = ImageSpec {
        source: ImageSource::Cifar,
        path: vec![scratch.at("data_batch_1")],
        held_out: 0.0,
        ..ImageSpec::default()
    };
    feed("cifar-python", &seeds, Limits::default(), |bytes| {
        std::fs::write(&path, bytes).unwrap();
        scratch.write("meta", bytes);
        match open_images(&spec, &mut |_| {}) {
            Ok(sets) => decoded(&sets.train),
            Err(error) => assert!(error.is_input(), "{error}"),
        }
    });
}

/// From bytes to patches: an image is refused, or all its patches are written, the same way every time.
fn patches(kind: &str) {
    let patching =
        Patching { patch: 4, merge: 2, least_pixels: 64, most_pixels: 1 << 14, ..Patching::default() };
    let max_pixels = 1 << 20;
    let mut images = pictures(kind);
    for more in ["one.png", "tall-1x200.png", "wide-200x1.png", "turned8.png", "turned5.jpg", "ycck.jpg"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/patches").join(more);
        images.extend(more.ends_with(kind).then(|| std::fs::read(path).unwrap()));
    }
    feed(&format!("patches-{kind}"), &images, Limits::default(), |bytes| {
        let reader = ImageReader::new(patching, max_pixels, 1 << 20);
        let Ok(image) = reader.read(Given::Bytes(bytes), Path::new("")) else { return };
        let (rows, columns) = (image.grid.rows, image.grid.columns);
        assert!(rows > 0 && columns > 0 && rows % 2 == 0 && columns % 2 == 0, "{:?}", image.grid);
        assert!(image.grid.patches() <= (1 << 14) / 16, "{:?}", image.grid);
        let mut store = ImageStore::new(patching, max_pixels);
        let number = store.number(&image);
        let made = [0, 255].map(|fill| {
            let mut patches = vec![fill; image.grid.patches() * 4 * 4 * 3];
            store.patches(number, &mut patches).map(|()| patches)
        });
        assert_eq!(made[0].as_ref().ok(), made[1].as_ref().ok(), "every byte is written");
    });
}

#[test]
fn patches_of_jpeg() {
    patches("jpg");
}

#[test]
fn patches_of_png() {
    patches("png");
}

#[test]
fn patches_of_webp() {
    patches("webp");
}

/// A damaged index of an archive is ignored, and the archive is scanned again.
#[test]
fn archive_index() {
    let scratch = Scratch::new("fuzz-archive-index");
    let sample = |name: &str| {
        let image = archive::member(&format!("{name}.png"), &pictures("png")[0]);
        [image, archive::member(&format!("{name}.cls"), name.as_bytes())].concat()
    };
    scratch.write("s.tar", &archive::archive(&["a", "b", "c"].map(sample)));
    let cache = scratch.path().join("cache");
    let spec = ImageSpec {
        path: vec![scratch.at("s.tar")],
        held_out: 0.0,
        cache: Some(cache.clone()),
        ..ImageSpec::default()
    };
    let found = || {
        let sets = open_images(&spec, &mut |_| {}).unwrap();
        let places: Vec<_> = (0..sets.train.count()).map(|at| sets.train.place(at)).collect();
        (sets.classes, places)
    };
    let whole = found();
    let kept = std::fs::read_dir(cache.join("archives")).unwrap().next().unwrap().unwrap().path();
    let seeds = [std::fs::read(&kept).unwrap()];
    feed("archive-index", &seeds, Limits::default(), |bytes| {
        std::fs::write(&kept, bytes).unwrap();
        assert_eq!(found(), whole);
    });
}

/// Samples with frames: the result for any bytes of a shard is a set or an error.
#[test]
fn shards_of_samples() {
    let scratch = Scratch::new("fuzz-samples");
    let image = &pictures("png")[0];
    let sample = |key: &str, json: &str| {
        [
            archive::member(&format!("{key}.001.png"), image),
            archive::member(&format!("{key}.000.png"), image),
            archive::member(&format!("{key}.json"), json.as_bytes()),
        ]
        .concat()
    };
    let seeds = [
        archive::archive(&[
            sample("a", r#"{"user":"what?","assistant":"that","source":"web","frame_count":2}"#),
            sample("b", r#"{"token_ids":[5,6,7],"loss_mask":[0,1,1]}"#),
            archive::member("c.json", br#"{"assistant":"text","frame_count":0}"#),
        ]),
        archive::archive(&[
            [archive::member("d.png", image), archive::member("d.txt", b"a caption")].concat(),
            sample("e", r#"{"user":"","chosen_assistant":"yes","rejected_assistant":"no"}"#),
        ]),
    ];
    let path = scratch.at("fuzzed.tar");
    let tokenizer = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/templates/tokenizer.json");
    let spec = |on_error| ExampleSpec {
        task: ExampleKind::Frames,
        path: vec![path.clone()],
        read: ReadOptions { on_error, ..ReadOptions::default() },
        frames: Some(FrameSpec { side: 8, ..FrameSpec::default() }),
        tokenizer: Some(tokenizer.into()),
        template: Some("chatml".into()),
        vocab: 1 << 20,
        held_out: 0.0,
        ..ExampleSpec::default()
    };
    feed("samples", &seeds, Limits::default(), |bytes| {
        std::fs::write(&path, bytes).unwrap();
        let failing = open(&spec(OnError::Fail));
        match open(&spec(OnError::Skip)) {
            Ok(sets) => {
                let mut pixels = vec![0; 8 * 8 * 3];
                for number in 0..sets.frames.count() as u32 {
                    let _ = sets.frames.pixels(number, &mut pixels).expect("its bytes are there");
                }
                assert_eq!(failing.is_ok(), sets.description.unusable.is_empty());
            }
            Err(error) => assert!(error.is_input() && failing.is_err(), "{error}"),
        }
    });
}

#[test]
fn tar() {
    let scratch = Scratch::new("fuzz-tar");
    let image = &pictures("png")[0];
    let sample = |name: &str| {
        let label = format!("{{\"label\": \"{}\"}}", name.len());
        [
            archive::member(&format!("{name}.png"), image),
            archive::member(&format!("{name}.json"), label.as_bytes()),
        ]
        .concat()
    };
    let seeds = [
        archive::archive(&[sample("a"), sample("bb")]),
        archive::archive(&[
            archive::extra(b'L', b"long/name.of.it.png"),
            archive::member("x", image),
            archive::extra(b'x', &archive::record("path", "long/name.cls")),
            archive::member("y", b"3"),
            archive::header("link", 0, b'2'),
            sample("c"),
        ]),
    ];
    let path = scratch.at("fuzzed.tar");
    let spec =
        |on_error| ImageSpec { path: vec![path.clone()], held_out: 0.0, on_error, ..ImageSpec::default() };
    feed("tar", &seeds, Limits::default(), |bytes| {
        std::fs::write(&path, bytes).unwrap();
        let skipping = open_images(&spec(OnError::Skip), &mut |_| {});
        let failing = open_images(&spec(OnError::Fail), &mut |_| {});
        match &skipping {
            Ok(sets) => {
                decoded(&sets.train);
                // Failing and skipping agree where nothing is skipped.
                let is_whole = sets.description.unusable.is_empty();
                assert_eq!(failing.is_ok(), is_whole);
            }
            Err(error) => assert!(error.is_input() && failing.is_err(), "{error}"),
        }
    });
}

#[test]
fn feature_index() {
    let (format, images) = (features::format(), features::images(7));
    let scratch = features::filled("fuzz-features", &images);
    let path = scratch.path().join("index.json");
    let whole = std::fs::read(&path).unwrap();
    let compact: serde_json::Value = serde_json::from_slice(&whole).unwrap();
    let seeds = [whole, compact.to_string().into_bytes()];
    feed("feature-index", &seeds, Limits::default(), |bytes| {
        std::fs::write(&path, bytes).unwrap();
        let parsed = FeatureIndex::parse(bytes, &format);
        match FeatureCache::open(scratch.path(), &format) {
            Ok(cache) => {
                assert_eq!(cache.count(), parsed.expect("it was opened").entries().count());
                // Everything that the index names is inside its files.
                let there = cache.missing(&images).map(|missing| images.len() - missing.len());
                assert!(there.is_err() || there.unwrap() <= cache.count());
            }
            Err(error) => assert!(error.is_input(), "{error}"),
        }
    });
}
