//! Data sets of the hub through the program: the same bits as local files on every number of ranks, killed and resumed, and no file left
//! behind.

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use crate::fixture::{Fixture, checkpoints};
use crate::program::{CommandOutput, flatout};
use crate::ranks_train::words;
use crate::set_server::{COMMIT, Content, Fault, SetServer};

const LATER: &str = "fedcba9876543210fedcba9876543210fedcba98";
const KEYS: &str = "data.tokenizer=tokens/tokenizer.json model.context=32 eval.rows=4 data.held_out=0.1 \
                    schedule.horizon_steps=20 checkpoint.every=3";

/// Lines of random words.
fn lines(seed: u32, documents: u32) -> Vec<u8> {
    let mut state = seed;
    let mut drawn = |below: u32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % below
    };
    let mut text = String::new();
    for document in 0..documents {
        text += &format!("{{\"id\": {document}, \"text\": \"number {document} has");
        (0..5 + drawn(60)).for_each(|_| text += &format!(" w{}", drawn(300)));
        text += "\"}\n";
    }
    text.into_bytes()
}

/// The files of a set in one of two formats.
fn files(form: &str) -> BTreeMap<String, Vec<u8>> {
    let parquet = |name: &str| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/tests/streamed");
        fs::read(folder.join(format!("{name}.parquet"))).expect("a fixture")
    };
    match form {
        "parquet" => ["a", "b"].map(|name| (format!("data/train-{name}.parquet"), parquet(name))).into(),
        _ => [1, 2].map(|seed| (format!("data/train-{seed}.jsonl"), lines(seed, 400))).into(),
    }
}

/// A folder with the files of a set, a tokeniser for them, and the set on a server.
fn fixture(form: &str) -> (Fixture, SetServer) {
    let (fixture, mut files) = (Fixture::new(), files(form));
    for (name, bytes) in &files {
        let place = fixture.dir("local").join(name);
        fs::create_dir_all(place.parent().expect("in a folder")).expect("a folder");
        fs::write(place, bytes).expect("a file");
    }
    files.insert("README.md".into(), b"# A set".to_vec());
    files.insert("data/test-0.jsonl".into(), lines(9, 30));
    let server = SetServer::start(Content::of(files));
    let result =
        execute(&fixture, &server, &["data", "prepare", "local", "--out", "tokens", "--vocab", "400"]);
    assert_eq!(result.code, Some(0), "{}", result.err);
    (fixture, server)
}

/// The program with the hub and all caches in the scene.
fn command(fixture: &Fixture, server: &SetServer, words: &[&str]) -> Command {
    let mut command = flatout(fixture.folder.path(), words);
    command.env("HF_ENDPOINT", &server.endpoint).env("HF_HOME", fixture.dir("hf"));
    command.env("FLATOUT_CACHE", fixture.dir("cache")).env_remove("HF_TOKEN").env_remove("HF_HUB_OFFLINE");
    command
}

fn execute(fixture: &Fixture, server: &SetServer, words: &[&str]) -> CommandOutput {
    let output = command(fixture, server, words).output().expect("the program starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    CommandOutput { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

fn train(fixture: &Fixture, server: &SetServer, path: &str, run: &str, ranks: &str, steps: u64) {
    let asked = format!("tiny data.path={path} {KEYS} train.steps={steps}");
    let result = execute(fixture, server, &words(&asked, run, ranks));
    assert_eq!(result.code, Some(0), "{run}: {}", result.err);
}

fn resume(fixture: &Fixture, server: &SetServer, run: &str, ranks: &str, steps: u64) -> CommandOutput {
    execute(fixture, server, &["resume", run, &format!("train.steps={steps}"), "--ranks", ranks, "-q"])
}

/// The names of everything below a folder.
fn below(folder: &Path) -> Vec<String> {
    let mut names = vec![];
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        names.extend(below(&entry.path()));
        names.push(entry.path().display().to_string());
    }
    names
}

#[test]
fn a_set_of_the_hub_gives_the_bits_of_local_files() {
    for form in ["parquet", "jsonl"] {
        let (fixture, server) = fixture(form);
        let before = below(fixture.folder.path());
        train(&fixture, &server, "local data.order=streamed", "local-run", "1", 9);
        let (state, tensors) = fixture.state("local-run", 9);
        for ranks in ["1", "2"] {
            let run = format!("remote-{ranks}");
            server.change(|content| {
                content.faults = VecDeque::from([
                    Fault::Short,
                    Fault::Status(503, None),
                    Fault::OtherRange,
                    Fault::Hang(Duration::from_millis(200)),
                    Fault::Short,
                ]);
            });
            train(&fixture, &server, "hf://org/set", &run, ranks, 9);
            assert_eq!(fixture.losses(&run), fixture.losses("local-run"), "{form} on {ranks} ranks");
            let (remote, remote_tensors) = fixture.state(&run, 9);
            assert!(remote_tensors == tensors, "{form} on {ranks} ranks: the last weights differ");
            assert_eq!(remote.cursor["streams"], state.cursor["streams"], "{form} on {ranks} ranks");
        }
        // Only the runs are kept on disk.
        let is_new =
            |name: &String| !before.contains(name) && !name.contains("-run") && !name.contains("remote-");
        let left: Vec<String> = below(fixture.folder.path()).into_iter().filter(is_new).collect();
        assert!(left.iter().all(|name| !name.contains("stream") && !name.contains("/hf")), "{left:?}");
        let asked = server.requests();
        assert!(asked.iter().all(|line| !line.contains("test-0")), "the other split is not read: {asked:?}");
    }
}

fn wait_for(what: impl Fn() -> bool, child: &mut Child) {
    let began = Instant::now();
    while !what() && child.try_wait().expect("a child").is_none() {
        assert!(began.elapsed() < Duration::from_secs(120), "it takes too long");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_run_resumes_at_the_commit_that_it_began_with() {
    let (fixture, server) = fixture("parquet");
    train(&fixture, &server, "hf://org/set", "unbroken", "1", 90);
    // It is killed after a checkpoint, and the branch has moved to other files when it is resumed.
    let asked = format!("tiny data.path=hf://org/set {KEYS} train.steps=90");
    let mut child = command(&fixture, &server, &words(&asked, "killed", "1")).spawn().expect("it starts");
    wait_for(|| checkpoints(&fixture.dir("killed")).whole.is_some(), &mut child);
    let _ = child.kill();
    child.wait().expect("a child");
    let resolved = fs::read_to_string(fixture.dir("killed").join("resolved.toml")).expect("a file");
    assert!(resolved.contains(&format!("\"hf://org/set\" = \"hf://org/set@{COMMIT}\"")), "{resolved}");
    server.change(|content| {
        content.commits.insert(LATER.into(), files("jsonl"));
        content.main = LATER.into();
    });
    let result = resume(&fixture, &server, "killed", "2", 60);
    assert_eq!(result.code, Some(0), "{}", result.err);
    // The command that began the run continues it too.
    let again = [words(&asked, "killed", "1"), vec!["--resume", "auto"]].concat();
    let result = execute(&fixture, &server, &again);
    assert_eq!(result.code, Some(0), "{}", result.err);
    fixture.assert_same("unbroken", "killed", 90);
    // A commit that no longer exists is reported.
    server.change(|content| drop(content.commits.remove(COMMIT)));
    let result = resume(&fixture, &server, "killed", "1", 99);
    result.assert_refused(&[&format!("has no revision `{COMMIT}`")]);
}

#[test]
fn a_cache_stays_within_its_bound_and_is_read_again() {
    let (fixture, server) = fixture("parquet");
    let held = || -> u64 {
        let pieces = fs::read_dir(fixture.dir("cache/stream")).into_iter().flatten().flatten();
        pieces.map(|piece| piece.metadata().expect("a piece").len()).sum()
    };
    train(&fixture, &server, "hf://org/set data.stream_cache_gb=0.00008", "small", "1", 9);
    assert!(held() > 0 && held() <= 80_000, "{} bytes", held());
    train(&fixture, &server, "hf://org/set data.stream_cache_gb=1", "all", "1", 9);
    server.requests();
    train(&fixture, &server, "hf://org/set data.stream_cache_gb=1", "again", "1", 9);
    let asked = server.requests();
    assert!(asked.iter().all(|line| !line.contains("signed")), "{asked:?}");
    fixture.assert_same("small", "again", 9);
}

#[test]
fn sets_are_inspected_and_prepared() {
    let (fixture, server) = fixture("parquet");
    let result = execute(&fixture, &server, &["data", "inspect", "hf://org/set", "--samples", "2"]);
    assert_eq!(result.code, Some(0), "{}", result.err);
    assert!(result.out.contains("text  2 files") && result.out.contains("by a sample of"), "{}", result.out);
    assert!(result.out.contains(&format!("hf://org/set@{COMMIT}/data/train-")), "{}", result.out);
    let result = execute(&fixture, &server, &["data", "inspect", "hf://org/set:test", "--json"]);
    let seen: serde_json::Value = serde_json::from_str(&result.out).expect("one object");
    assert_eq!((seen["files"].as_u64(), seen["sampled"].as_u64()), (Some(1), Some(30)), "{}", result.out);
    let prepare =
        ["data", "prepare", "hf://org/set", "--out", "from-hub", "--tokenizer", "tokens/tokenizer.json"];
    let result = execute(&fixture, &server, &prepare);
    assert_eq!(result.code, Some(0), "{}", result.err);
    let shard = |folder: &str| {
        let entries = fs::read_dir(fixture.dir(folder)).expect("a folder").flatten();
        let mut shards: Vec<_> = entries.map(|entry| entry.path()).collect();
        shards.retain(|path| path.extension().is_none_or(|ending| ending != "json"));
        shards.sort();
        shards.into_iter().map(|path| fs::read(path).unwrap_or_default()).collect::<Vec<_>>()
    };
    assert_eq!(shard("from-hub"), shard("tokens"));
    let result = execute(&fixture, &server, &["plan", "tiny", "data.path=hf://org/set"]);
    assert_eq!(result.code, Some(0), "{}", result.err);
}

#[test]
fn sets_that_cannot_be_read_are_one_sentence() {
    let (fixture, server) = fixture("jsonl");
    for (path, sentence) in [
        ("hf://org/gated", "accept its terms"),
        ("hf://org/none", "there is no data set hf://org/none"),
        ("hf://org/set@v9", "has no revision `v9`"),
        ("hf://org/set:validation", "split validation"),
        ("hf://org", "write hf://owner/set"),
        ("s3://bucket/key.parquet", "https://bucket.s3.amazonaws.com/key.parquet"),
        ("http://example.org/a.jsonl", "https://"),
        ("hf://org/set data.order=shuffled", "data.order=shuffled"),
        ("hf://org/set data.stream_cache_gb=-1", "data.stream_cache_gb"),
    ] {
        let asked = format!("tiny data.path={path} {KEYS} train.steps=2");
        let result = execute(&fixture, &server, &words(&asked, "refused", "1"));
        result.assert_refused(&[sentence]);
    }
    // A file by its URL, whose server ignores ranges, and one that changes while it is read.
    let address = server.address("data/train-1.jsonl");
    for (faults, code, sentence) in [
        (vec![Fault::Whole], 2, "the whole file"),
        (vec![Fault::Short, Fault::Short, Fault::OtherTag], 1, "changed on the server"),
    ] {
        server.change(|content| content.faults = VecDeque::from(faults));
        let asked = format!("tiny data.path={address} {KEYS} train.steps=2");
        let result = execute(&fixture, &server, &words(&asked, "refused", "1"));
        assert_eq!(result.code, Some(code), "{}", result.err);
        assert!(result.err.contains(sentence), "{}", result.err);
    }
    server.change(|content| content.faults.clear());
    train(&fixture, &server, &address, "by-address", "1", 2);
}
