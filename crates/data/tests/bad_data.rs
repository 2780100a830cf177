//! Tests every kind of invalid data, one per row: the error with its place, and the documents that remain when such documents
//! are skipped.

use std::io::Read;

use crate::scratch::Scratch;
use flatout_data::formats::{
    Compression, Format, Index, Input, OnError, ReadOptions, Reader, Reason, find, is_indexable, read,
};

/// An invalid file.
struct Case {
    name: &'static str,
    file: &'static str,
    bytes: Vec<u8>,
    /// Parts of the error, its place first.
    says: [&'static str; 2],
    reason: Reason,
    /// Documents that remain when invalid ones are skipped.
    left: &'static [&'static str],
    /// Count of the reason in that case.
    skipped: u64,
}

#[rustfmt::skip]
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut case = |name, file, bytes: &[u8], says, reason, left, skipped| {
        cases.push(Case { name, file, bytes: bytes.to_vec(), says, reason, left, skipped });
    };
    let two = b"{\"text\":\"one\"}\n{\"text\":\"two\"}\n";
    let good = |line: &str| format!("{{\"text\":\"one\"}}\n{line}\n{{\"text\":\"three\"}}\n").into_bytes();
    let both: &[&str] = &["one", "three"];

    // Text.
    case("invalid UTF-8 in text", "a.txt", b"first\ncaf\xe9\n", ["a.txt, line 2", "byte 9 is not UTF-8"], Reason::NotUtf8, &[], 1);
    case("a character cut off at the end", "a.txt", b"caf\xc3", ["a.txt, line 1", "byte 3 is not UTF-8"], Reason::NotUtf8, &[], 1);
    case("NUL bytes in text", "a.txt", b"some words, a \0 and more words\n", ["a.txt, line 1", "NUL"], Reason::Nul, &[], 1);
    case("an empty file", "a.txt", b"", ["a.txt", "no text"], Reason::NoDocuments, &[], 1);
    case("only white space", "a.txt", b" \n\t\r\n ", ["a.txt", "no text"], Reason::NoDocuments, &[], 1);
    case("only a mark", "a.txt", b"\xef\xbb\xbf", ["a.txt", "no text"], Reason::NoDocuments, &[], 1);
    case("UTF-16 with a mark", "a.txt", b"\xff\xfeh\0i\0", ["a.txt", "UTF-16"], Reason::NotEightBit, &[], 1);
    case("UTF-16 without a mark", "a.txt", b"h\0e\0l\0l\0o\0", ["a.txt", "UTF-16"], Reason::NotEightBit, &[], 1);
    case("UTF-32", "a.txt", b"\xff\xfe\0\0h\0\0\0", ["a.txt", "UTF-32"], Reason::NotEightBit, &[], 1);
    case("a picture given as text", "a.txt", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\xff", ["a.txt", "begins like a PNG picture"], Reason::Binary, &[], 1);
    case("parquet given as text", "a.txt", &fixture("plain-snappy"), ["a.txt", "begins like a parquet file"], Reason::Binary, &[], 1);
    case("an archive given as JSONL", "a.jsonl", b"PK\x03\x04\x14\0\0\0\x08\0\xc3\xff", ["a.jsonl", "a zip archive"], Reason::Binary, &[], 1);
    case("xz data", "a.jsonl.xz", b"\xfd7zXZ\0\0\x04\xe6\xd6", ["a.jsonl.xz", "xz data"], Reason::Binary, &[], 1);

    // JSONL.
    case("broken JSON", "a.jsonl", &good(r#"{"text":"tw"#), ["a.jsonl, line 2", "not JSON (EOF while parsing a string, at column"], Reason::BrokenJson, both, 1);
    case("a missing comma", "a.jsonl", &good(r#"{"id":1 "text":"two"}"#), ["a.jsonl, line 2", "expected `,` or `}`, at column 9"], Reason::BrokenJson, both, 1);
    case("two objects on a line", "a.jsonl", &good(r#"{"text":"a"}{"text":"b"}"#), ["a.jsonl, line 2", "trailing characters"], Reason::BrokenJson, both, 1);
    case("half of a surrogate pair", "a.jsonl", &good(r#"{"text":"\ud83e"}"#), ["a.jsonl, line 2", "not JSON"], Reason::BrokenJson, both, 1);
    case("nesting without end", "a.jsonl", &good(&format!("{{\"text\":{}", "[".repeat(50_000))), ["a.jsonl, line 2", "not JSON"], Reason::BrokenJson, both, 1);
    case("text instead of JSON", "a.jsonl", &good("two"), ["a.jsonl, line 2", "not JSON"], Reason::BrokenJson, both, 1);
    case("a raw NUL in JSON", "a.jsonl", &good("{\"text\":\"a\0b\"}"), ["a.jsonl, line 2", "not JSON (control character"], Reason::BrokenJson, both, 1);
    case("a NUL in a string", "a.jsonl", &good(r#"{"text":"a\u0000b"}"#), ["a.jsonl, line 2", "NUL"], Reason::Nul, both, 1);
    case("invalid UTF-8 in JSONL", "a.jsonl", &[two.as_slice(), b"{\"text\":\"caf\xe9\"}\n"].concat(), ["a.jsonl, line 3", "byte 12 of the line is not UTF-8"], Reason::NotUtf8, &["one", "two"], 1);
    case("JSON but not an object", "a.jsonl", &good("[\"two\"]"), ["a.jsonl, line 2", "not an object"], Reason::NotAnObject, both, 1);
    case("a string but not an object", "a.jsonl", &good("\"two\""), ["a.jsonl, line 2", "not an object"], Reason::NotAnObject, both, 1);
    case("a field that is missing", "a.jsonl", &good(r#"{"content":"two"}"#), ["a.jsonl, line 2", "no field `text`, only `content`;"], Reason::MissingField, both, 1);
    case("a field that is a number", "a.jsonl", &good(r#"{"text":2}"#), ["a.jsonl, line 2", "is a number, not a string"], Reason::NotAString, both, 1);
    case("a field that is a list", "a.jsonl", &good(r#"{"text":["two"]}"#), ["a.jsonl, line 2", "is a list, not a string"], Reason::NotAString, both, 1);
    case("a field that is null", "a.jsonl", &good(r#"{"text":null}"#), ["a.jsonl, line 2", "null"], Reason::Null, both, 1);
    case("an empty document", "a.jsonl", &good(r#"{"text":""}"#), ["a.jsonl, line 2", "empty"], Reason::Empty, both, 1);
    case("a blank document", "a.jsonl", &good(r#"{"text":" \n\t"}"#), ["a.jsonl, line 2", "empty"], Reason::Empty, both, 1);
    case("a line that is too long", "a.jsonl", &good(&format!("{{\"text\":\"{}\"}}", "x".repeat(300_000))), ["a.jsonl, line 2", "longer than 100000 bytes"], Reason::TooLong, both, 1);
    case("a last line that is too long", "a.jsonl", &[two.as_slice(), &[b'x'; 200_000]].concat(), ["a.jsonl, line 3", "longer than 100000 bytes"], Reason::TooLong, &["one", "two"], 1);
    case("a file of blank lines", "a.jsonl", b"\n\r\n \n", ["a.jsonl", "no text"], Reason::NoDocuments, &[], 1);

    // CSV and TSV.
    case("unequal columns", "a.csv", b"id,text\n1,one\n2,two,too\n3,three\n", ["a.csv, line 3", "3 columns instead of 2"], Reason::Columns, both, 1);
    case("a record cut off", "a.csv", b"id,text\n1,one\n3,three\n2", ["a.csv, line 4", "1 columns instead of 2"], Reason::Columns, both, 1);
    case("a quote never closed", "a.csv", b"id,text\n1,one\n3,three\n2,\"two\n4,four\n", ["a.csv, line 4", "never closed"], Reason::Quotes, both, 1);
    case("text behind a quote", "a.csv", b"id,text\n1,one\n2,\"t\"wo\n3,three\n", ["a.csv, line 3", "follows a closing quote"], Reason::Quotes, both, 1);
    case("a column that is missing", "a.csv", b"id,content\n1,one\n", ["a.csv, line 1", "no column `text`, only `id`, `content`"], Reason::Schema, &[], 1);
    case("a column that is there twice", "a.csv", b"text,text\n1,one\n", ["a.csv, line 1", "`text` twice"], Reason::Schema, &[], 1);
    case("a header that never ends", "a.csv", &[b"id,\"text\n".as_slice(), &[b'x'; 200_000]].concat(), ["a.csv, line 1", "longer than 100000"], Reason::TooLong, &[], 1);
    case("a record that is too long", "a.csv", &[b"text\none\n\"two\n".as_slice(), &[b'x'; 200_000], b"\"\nthree\n"].concat(), ["a.csv, line 3", "longer than 100000"], Reason::TooLong, both, 1);
    case("only a header", "a.csv", b"id,text\n", ["a.csv", "no text"], Reason::NoDocuments, &[], 1);
    case("an empty field", "a.csv", b"id,text\n1,one\n2,\n3,three\n", ["a.csv, line 3", "empty"], Reason::Empty, both, 1);
    case("invalid UTF-8 in CSV", "a.tsv", b"id\ttext\n1\tone\n2\tcaf\xe9\n3\tthree\n", ["a.tsv, line 3", "not UTF-8"], Reason::NotUtf8, both, 1);
    case("NUL bytes in CSV", "a.csv", b"id,text,more words\n1,one,\n2,t\0o,\n3,three,\n", ["a.csv, line 3", "NUL"], Reason::Nul, both, 1);

    // Compressed files.
    let gz = packed_gzip(two);
    let zst = include_bytes!("packed/two.jsonl.zst");
    case("truncated gzip", "a.jsonl.gz", &gz[..gz.len() - 9], ["a.jsonl.gz, line ", "gzip data ends too early"], Reason::Damaged, &["one"], 1);
    case("a wrong checksum of gzip", "a.jsonl.gz", &damaged(&gz, gz.len() - 6), ["a.jsonl.gz, line ", "gzip data is damaged"], Reason::Damaged, &["one", "two"], 1);
    case("damaged gzip", "a.jsonl.gz", &replaced(&gz, 10, &[0xff]), ["a.jsonl.gz, line 1", "gzip data"], Reason::Damaged, &[], 1);
    case("something behind gzip", "a.jsonl.gz", &[gz.as_slice(), b"trailing garbage"].concat(), ["a.jsonl.gz, line 3", "gzip data is damaged (invalid gzip header)"], Reason::Damaged, &["one", "two"], 1);
    case("plain text called gzip", "a.jsonl.gz", two, ["a.jsonl.gz, line 1", "invalid gzip header"], Reason::Damaged, &[], 1);
    case("truncated zstd", "a.jsonl.zst", &zst[..zst.len() - 6], ["a.jsonl.zst, line 1", "zstd data is damaged or ends too early"], Reason::Damaged, &[], 1);
    case("a wrong checksum of zstd", "a.jsonl.zst", &damaged(zst, zst.len() - 1), ["a.jsonl.zst, line ", "checksum is wrong"], Reason::Damaged, &["one", "two"], 1);
    case("something behind zstd", "a.jsonl.zst", &[zst.as_slice(), b"trailing"].concat(), ["a.jsonl.zst, line 3", "zstd data is damaged"], Reason::Damaged, &["one", "two"], 1);
    case("plain text called zstd", "a.jsonl.zst", two, ["a.jsonl.zst, line 1", "zstd data is damaged"], Reason::Damaged, &[], 1);
    case("broken JSON in gzip", "a.jsonl.gz", &packed_gzip(&good("{")), ["a.jsonl.gz, line 2", "not JSON"], Reason::BrokenJson, both, 1);

    // Parquet.
    let plain = fixture("plain-zstd");
    let end = plain.len();
    case("parquet of another schema", "a.parquet", &fixture("other"), ["a.parquet", "no column `text`; columns with text are `content`, `title`"], Reason::Schema, &[], 1);
    case("a parquet column of integers", "a.parquet", &fixture("integers"), ["a.parquet", "is INT64, not a string; columns with text are `body`"], Reason::Schema, &[], 1);
    case("a parquet column of lists", "a.parquet", &fixture("list"), ["a.parquet", "`text` is a group of columns"], Reason::Schema, &[], 1);
    case("a parquet column of structures", "a.parquet", &fixture("structure"), ["a.parquet", "`text` is a group of columns"], Reason::Schema, &[], 1);
    case("parquet without rows", "a.parquet", &fixture("no-rows"), ["a.parquet", "no text"], Reason::NoDocuments, &[], 1);
    case("invalid UTF-8 in parquet", "a.parquet", &fixture("not-utf8"), ["a.parquet, row 2", "byte 3 of the document is not UTF-8"], Reason::NotUtf8, &["fine", "fine again"], 1);
    case("empty documents in parquet", "a.parquet", &fixture("empty-text"), ["a.parquet, row 2", "empty"], Reason::Empty, &["fine", "fine again"], 2);
    case("NUL bytes in parquet", "a.parquet", &fixture("nul"), ["a.parquet, row 2", "NUL"], Reason::Nul, &["fine", "fine again"], 1);
    case("a codec that is not read", "a.parquet", &fixture("brotli"), ["a.parquet", "the codec brotli is not supported"], Reason::Unsupported, &[], 1);
    case("another codec that is not read", "a.parquet", &fixture("lz4"), ["a.parquet", "the codec lz4"], Reason::Unsupported, &[], 1);
    case("truncated parquet", "a.parquet", &plain[..end - 100], ["a.parquet", "ends too early"], Reason::Damaged, &[], 1);
    case("parquet without its beginning", "a.parquet", &plain[100..], ["a.parquet", "the column is outside the file"], Reason::Damaged, &[], 1);
    case("text called parquet", "a.parquet", b"this is not a parquet file", ["a.parquet", "not parquet"], Reason::Damaged, &[], 1);
    case("a few bytes called parquet", "a.parquet", b"PAR1", ["a.parquet", "too short"], Reason::Damaged, &[], 1);
    case("an empty file called parquet", "a.parquet", b"", ["a.parquet", "no text"], Reason::NoDocuments, &[], 1);
    case("a footer that states a wrong length", "a.parquet", &replaced(&plain, end - 8, &[0xff, 0xff, 0xff, 0x7f]), ["a.parquet", "states a wrong length"], Reason::Damaged, &[], 1);
    case("a footer that is shorter than itself", "a.parquet", &replaced(&plain, end - 8, &[20, 0, 0, 0]), ["a.parquet", "footer of the parquet file"], Reason::Damaged, &[], 1);
    case("an encrypted parquet file", "a.parquet", &replaced(&plain, end - 4, b"PARE"), ["a.parquet", "encrypted"], Reason::Unsupported, &[], 1);
    case("a parquet page whose checksum is wrong", "a.parquet", &page_damaged(), ["a.parquet, row 1", "checksum of a page is wrong"], Reason::Damaged, &[], 1);
    case("parquet compressed as a whole", "a.parquet.gz", &packed_gzip(&plain), ["a.parquet.gz", "compressed as a whole"], Reason::Unsupported, &[], 1);
    cases
}

fn fixture(name: &str) -> Vec<u8> {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parquet");
    std::fs::read(folder.join(format!("{name}.parquet"))).unwrap()
}

fn page_damaged() -> Vec<u8> {
    let bytes = fixture("checksums");
    let at = bytes.windows(7).position(|word| word == b"captain").unwrap();
    damaged(&bytes, at)
}

fn damaged(bytes: &[u8], at: usize) -> Vec<u8> {
    replaced(bytes, at, &[bytes[at] ^ 0x5a])
}

fn replaced(bytes: &[u8], at: usize, with: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at..at + with.len()].copy_from_slice(with);
    bytes
}

fn packed_gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packed = Vec::new();
    flate2::bufread::GzEncoder::new(bytes, flate2::Compression::fast()).read_to_end(&mut packed).unwrap();
    packed
}

fn options(on_error: OnError) -> ReadOptions {
    ReadOptions { on_error, max_document_bytes: 100_000, ..ReadOptions::default() }
}

#[test]
fn wrong_data_is_named_or_skipped_and_counted() {
    let scratch = Scratch::new("bad-data");
    let cases = cases();
    assert!(cases.len() >= 60);
    for case in cases {
        let name = case.name;
        let pattern = [scratch.write(case.file, &case.bytes)];
        let fail = options(OnError::Fail);
        let input = find(&pattern, &fail).unwrap().remove(0);

        let mut reader = read(&input, &fail).unwrap();
        let error = reader.by_ref().find_map(Result::err).unwrap_or_else(|| panic!("{name}: no error"));
        assert!(error.is_input(), "{name}: {error}");
        for part in case.says {
            assert!(error.sentence.contains(part), "{name}: {error}\n  does not say {part}");
        }
        assert!(error.sentence.ends_with("with data.on_error=skip."), "{name}: {error}");
        assert!(reader.next().is_none(), "{name}: documents after an error");

        let skip = options(OnError::Skip);
        let mut reader = read(&input, &skip).unwrap();
        let left: Vec<String> = reader.by_ref().map(|document| document.unwrap().text).collect();
        assert_eq!(left, case.left, "{name}");
        let counted: Vec<(Reason, u64)> =
            reader.skipped().reasons().map(|(reason, count, _)| (reason, count)).collect();
        assert_eq!(counted, [(case.reason, case.skipped)], "{name}");
        let place = case.says[0];
        assert!(reader.skipped().to_string().contains(place), "{name}: {}", reader.skipped());

        if is_indexable(&input) {
            assert_eq!(Index::build(std::slice::from_ref(&input), &fail).err().unwrap(), error, "{name}");
            let index = Index::build(&[input], &skip).unwrap();
            assert_eq!(index.skipped(), reader.skipped(), "{name}");
            let texts: Vec<String> = (0..index.count()).map(|at| index.read(at).unwrap().text).collect();
            assert_eq!(texts, case.left, "{name}");
        }
        std::fs::remove_file(&pattern[0]).unwrap();
    }
}

/// Unusual but valid inputs.
#[test]
fn harmless_oddities_change_nothing() {
    let scratch = Scratch::new("oddities");
    let long = format!("{{\"text\":\"{}\"}}", "x".repeat(90_000));
    for (file, bytes, wanted) in [
        ("mark.txt", b"\xef\xbb\xbfone".to_vec(), vec!["one"]),
        ("mark.jsonl", b"\xef\xbb\xbf{\"text\":\"one\"}".to_vec(), vec!["one"]),
        ("mark.csv", b"\xef\xbb\xbf\r\n\ntext,id\none,1".to_vec(), vec!["one"]),
        ("ends.txt", b"a\r\nb\nc\rd".to_vec(), vec!["a\r\nb\nc\rd"]),
        ("ends.jsonl", b"\r\n{\"text\":\"one\"}\r\n\n  {\"text\":\"two\"}".to_vec(), vec!["one", "two"]),
        (
            "ends.csv",
            b"id,text\r\n1,one\n\r\n2,\"t\r\nwo\"\r\n3,\"\"\"\"\r\n".to_vec(),
            vec!["one", "t\r\nwo", "\""],
        ),
        ("words.txt", b"ORC and PAR1 are words".to_vec(), vec!["ORC and PAR1 are words"]),
        ("members.jsonl.gz", [packed_gzip(b"{\"text\":\"o"), packed_gzip(b"ne\"}\n")].concat(), vec!["one"]),
        (
            "frames.jsonl.zst",
            [b"\x53\x2a\x4d\x18\x03\0\0\0abc".as_slice(), include_bytes!("packed/two.jsonl.zst")].concat(),
            vec!["one", "two"],
        ),
        ("long.jsonl", long.clone().into_bytes(), vec![&long[9..long.len() - 2]]),
    ] {
        let input = find(&[scratch.write(file, &bytes)], &options(OnError::Fail)).unwrap().remove(0);
        let found: Vec<String> =
            read(&input, &options(OnError::Fail)).unwrap().map(|document| document.unwrap().text).collect();
        assert_eq!(found, wanted, "{file}");
    }
}

#[test]
fn columns_can_be_counted_where_there_is_no_header() {
    let scratch = Scratch::new("columns");
    let pattern = [scratch.write("a.csv", b"\n1,one\n2,two\n")];
    let read_column = |field: &str| {
        let options = ReadOptions { field: field.into(), ..ReadOptions::default() };
        let input = find(&pattern, &options).unwrap().remove(0);
        let index = Index::build(std::slice::from_ref(&input), &options);
        let texts: Result<Vec<String>, _> =
            read(&input, &options).unwrap().map(|document| document.map(|document| document.text)).collect();
        if let Ok(index) = index {
            let indexed: Vec<String> = (0..index.count()).map(|at| index.read(at).unwrap().text).collect();
            assert_eq!(&indexed, texts.as_ref().unwrap());
        }
        texts.map_err(|error| error.sentence)
    };
    assert_eq!(read_column("#2").unwrap(), ["one", "two"]);
    assert!(read_column("#3").unwrap_err().contains("there is no column 3: the first record has 2"));
    assert!(read_column("#x").unwrap_err().contains("`#x` is not `#` and a number from 1"));
}

#[test]
fn paths_that_lead_nowhere_are_named() {
    let scratch = Scratch::new("nowhere");
    scratch.write("mixed/README.md", b"words");
    scratch.write("mixed/a.parquet", &fixture("plain-none"));
    scratch.write("bare/notes.bin", b"words");
    std::fs::create_dir_all(scratch.path().join("folder.jsonl")).unwrap();
    let list = scratch.write("list.json", b"[{\"text\":\"one\"}]");
    std::os::unix::fs::symlink(scratch.at("circle.txt"), scratch.at("circle.txt")).unwrap();
    std::os::unix::fs::symlink(scratch.at("gone"), scratch.at("bare/dangling.txt")).unwrap();
    for (pattern, says) in [
        (scratch.at("*.csv"), "No file matches"),
        (scratch.at("bar*"), "only folders"),
        (scratch.at("[.txt"), "cannot be used"),
        (scratch.at("gone.txt"), "There is no file or folder"),
        (scratch.at("folder.jsonl"), "has no text, JSONL, CSV or parquet files"),
        (scratch.at("bare"), "dangling.txt is a broken link"),
        (scratch.at("circle.txt"), "is a broken link"),
        (scratch.at("mixed"), "several formats: parquet"),
        ("/dev/null".into(), "neither a file nor a folder"),
        (list, "one JSON list"),
    ] {
        let error = find(std::slice::from_ref(&pattern), &ReadOptions::default()).unwrap_err();
        assert!(error.is_input() && error.sentence.contains(says), "{pattern}: {error}");
    }
    assert!(find(&[], &ReadOptions::default()).unwrap_err().sentence.contains("data.path is empty"));
    let text = ReadOptions { format: Some(Format::Text), ..ReadOptions::default() };
    let found = find(&[scratch.at("mixed")], &text).unwrap();
    assert!(found.len() == 1 && found[0].path.ends_with("README.md"), "{found:?}");
    // A read error of the system is no fault of the user's input.
    let error = find(&["/proc/self/mem".into()], &ReadOptions::default()).unwrap_err();
    assert!(!error.is_input() && error.sentence.contains("/proc/self/mem cannot be read"), "{error}");
}

/// `count` times the same byte, generated as it is read.
struct Endless {
    left: u64,
}

impl Read for Endless {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let count = (out.len() as u64).min(self.left) as usize;
        out[..count].fill(b'x');
        self.left -= count as u64;
        Ok(count)
    }
}

fn peak_memory_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

#[test]
fn a_line_of_a_gigabyte_is_passed_in_bounded_memory() {
    let before = peak_memory_bytes();
    for (format, begin, end) in [
        (Format::Jsonl, "{\"text\":\"one\"}\n{\"text\":\"", "\"}\n{\"text\":\"three\"}\n"),
        (Format::Csv, "text\none\n\"", "\"\nthree\n"),
    ] {
        let input =
            Input { path: "big".into(), format, compression: Compression::None, bytes: 0, remote: None };
        let open = |on_error| {
            let bytes = begin.as_bytes().chain(Endless { left: 1 << 30 }).chain(end.as_bytes());
            Reader::over(Box::new(bytes), &input, &options(on_error))
        };
        let mut reader = open(OnError::Skip);
        let left: Vec<String> = reader.by_ref().map(|document| document.unwrap().text).collect();
        assert_eq!(left, ["one", "three"]);
        let counted: Vec<_> = reader.skipped().reasons().map(|(reason, count, _)| (reason, count)).collect();
        assert_eq!(counted, [(Reason::TooLong, 1)]);
        let error = open(OnError::Fail).find_map(Result::err).unwrap();
        assert!(error.sentence.contains("longer than 100000 bytes"), "{error}");
    }
    let text = Input {
        path: "big".into(),
        format: Format::Text,
        compression: Compression::None,
        bytes: 0,
        remote: None,
    };
    let mut reader = Reader::over(Box::new(Endless { left: 1 << 28 }), &text, &options(OnError::Fail));
    assert!(reader.by_ref().all(|document| document.unwrap().text.len() == 32 << 10));
    let used = peak_memory_bytes() - before;
    assert!(used < 64 << 20, "{used} bytes");
}
