//! `data prepare`, `data inspect` and training on every kind of source, through the program.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;

use crate::program::{CommandOutput, execute, flatout, refused, small_train};

/// Documents as JSONL: sentences of different lengths.
fn jsonl(count: usize) -> String {
    let line = |i: usize| {
        let words =
            (0..5 + i * 7 % 40).map(|w| format!("word{} ", (i * i + w * 31) % 97)).collect::<String>();
        format!("{{\"id\": {i}, \"text\": \"{words}number {i}.\"}}\n")
    };
    (0..count).map(line).collect()
}

fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entry = |entry: std::io::Result<fs::DirEntry>| {
        let path = entry.expect("an entry").path();
        (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(path).expect("a file"))
    };
    fs::read_dir(folder).expect("a folder").map(entry).collect()
}

fn prepared(dir: &Path, words: &[&str]) -> CommandOutput {
    let result = execute(dir, &[&["data", "prepare"], words].concat());
    assert_eq!(result.code, Some(0), "{words:?}: {}", result.err);
    result
}

#[test]
fn the_command_that_preparation_suggests_works() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    fs::write(dir.join("a.jsonl"), jsonl(900)).unwrap();
    let result = prepared(dir, &["a.jsonl", "--out", "shards", "--vocab", "600"]);
    let next =
        result.err.lines().find_map(|line| line.strip_prefix("next     flatout ")).expect("a suggestion");
    let mut words: Vec<&str> = next.split(' ').collect();
    assert_eq!(words[..2], ["train", "tiny"]);
    words.extend([
        "model.width=32",
        "model.layers=1",
        "model.context=16",
        "train.steps=5",
        "eval.rows=4",
        "-q",
    ]);
    let result = execute(dir, &words);
    assert_eq!(result.code, Some(0), "{next}: {}", result.err);
}

#[test]
fn shards_are_the_same_for_any_number_of_workers() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    fs::create_dir(dir.join("text")).unwrap();
    fs::write(dir.join("text/a.jsonl"), jsonl(900)).unwrap();
    fs::write(dir.join("b.txt"), "A line of a book, and another one.\n".repeat(3000)).unwrap();
    let mut all = Vec::new();
    for workers in ["1", "2", "7"] {
        let out = format!("out-{workers}");
        let words = [
            "text",
            "b.txt",
            "--out",
            &out,
            "--vocab",
            "400",
            "--shard-tokens",
            "9000",
            "--workers",
            workers,
        ];
        let result = prepared(dir, &[&words[..], &["--json"]].concat());
        let result: Value = serde_json::from_str(&result.out).expect("JSON");
        let totals = &result["manifest"]["totals"];
        assert_eq!(result["done"]["tokens"], totals["tokens"]);
        assert!(result["manifest"]["shards"].as_array().unwrap().len() > 3, "{result}");
        assert!(result["done"]["tokens_per_second"].as_f64().unwrap() > 0.0);
        all.push(files(&dir.join(out)));
    }
    assert!(all[0].contains_key("manifest.json") && all[0].contains_key("tokenizer.json"));
    assert!(!all[0].contains_key("unfinished.json") && !all[0].contains_key("lock"));
    assert!(all[0] == all[1] && all[0] == all[2]);
    // The same command again has nothing to do; a different one is refused and changes nothing.
    let again = ["text", "b.txt", "--out", "out-1", "--vocab", "400", "--shard-tokens", "9000"];
    assert!(prepared(dir, &again).out.contains("complete already"));
    refused(dir, &["data", "prepare", "text", "--out", "out-1", "--vocab", "300"], "--restart");
    assert!(files(&dir.join("out-1")) == all[0]);
}

/// Kills the preparation repeatedly until it finishes; the result equals that of an uninterrupted one.
#[test]
fn a_killed_preparation_continues() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    for name in ["a", "b", "c"] {
        fs::write(dir.join(format!("{name}.jsonl")), jsonl(2500) + "{\"text\": 5}\n").unwrap();
    }
    prepared(dir, &["a.jsonl", "--out", "first", "--vocab", "300", "--on-error", "skip"]);
    let words = |out| {
        let sources = ["data", "prepare", "a.jsonl", "b.jsonl", "c.jsonl", "--out", out];
        let options = ["--tokenizer", "first/tokenizer.json", "--shard-tokens", "8000", "--on-error", "skip"];
        [&sources[..], &options[..], &["--workers", "2", "--json"]].concat()
    };
    let result = execute(dir, &words("whole"));
    assert_eq!(result.code, Some(0), "{}", result.err);
    let whole = files(&dir.join("whole"));
    assert!(whole.len() > 20, "{} files", whole.len());
    let skipped =
        serde_json::from_str::<Value>(&result.out).unwrap()["manifest"]["totals"]["skipped"].clone();
    assert_eq!(skipped["field not a string"], 3);

    let shards_in = |name: &str| {
        fs::read_dir(dir.join(name)).map_or(0, |entries| {
            entries
                .filter(|e| e.as_ref().is_ok_and(|e| e.path().extension().is_some_and(|e| e == "tokens")))
                .count()
        })
    };
    let (mut kills, mut kept) = (0, 0);
    loop {
        let before = shards_in("broken");
        let mut child = flatout(dir, &words("broken")).spawn().expect("a process");
        // It is killed as soon as two more shards are complete.
        while shards_in("broken") < before + 2 && child.try_wait().expect("a child").is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        if child.try_wait().expect("a child").is_none() {
            child.kill().expect("a living process");
            child.wait().expect("an end");
            kills += 1;
            assert!(kills < 100, "it does not get on");
            continue;
        }
        let output = child.wait_with_output().expect("an end");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let result: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        kept = kept.max(result["kept_shards"].as_u64().unwrap());
        break;
    }
    assert!(kills >= 3 && kept > 3, "{kills} kills, {kept} shards kept");
    let broken = files(&dir.join("broken"));
    let names: BTreeSet<_> = broken.keys().chain(whole.keys()).collect();
    let differ: Vec<_> = names.into_iter().filter(|name| broken.get(*name) != whole.get(*name)).collect();
    assert!(differ.is_empty(), "{differ:?}");

    // It is killed between its last two steps.
    let left = dir.join("whole/unfinished.json");
    fs::write(&left, "{}").unwrap();
    assert_eq!(execute(dir, &words("whole")).code, Some(0));
    assert!(!left.exists());
}

#[test]
fn sources_that_cannot_be_prepared_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    fs::write(dir.join("a.jsonl"), jsonl(50)).unwrap();
    fs::write(dir.join("bad.jsonl"), jsonl(5) + "{\"text\": \n" + &jsonl(5)).unwrap();
    fs::write(dir.join("empty.txt"), "").unwrap();
    fs::create_dir(dir.join("full")).unwrap();
    fs::write(dir.join("full/thesis.pdf"), "years of work").unwrap();
    let cases: &[(&[&str], &str)] = &[
        (&["none.jsonl", "--out", "o1"], "none.jsonl"),
        (&["*.parquet", "--out", "o1"], "*.parquet"),
        (&["bad.jsonl", "--out", "o2", "--vocab", "300"], "bad.jsonl, line 6"),
        (&["a.jsonl", "--out", "o3", "--field", "body", "--vocab", "300"], "a.jsonl, line 1"),
        (&["empty.txt", "--out", "o4", "--vocab", "300"], "empty.txt"),
        (&["a.jsonl", "--out", "full"], "thesis.pdf"),
        (&["a.jsonl", "--out", "a.jsonl/out"], "a.jsonl/out"),
        (&["a.jsonl", "--out", "o5", "--vocab", "100"], "258"),
        (&["a.jsonl", "--out", "o6", "--tokenizer", "none.json"], "none.json"),
        (&["a.jsonl", "--out", "o6", "--shard-tokens", "0"], "--shard-tokens"),
        (&["a.jsonl", "-", "--out", "o7", "--vocab", "300"], "Standard input (-)"),
        (&["a.jsonl", "--out", "o8", "--format", "u16"], "data.path"),
    ];
    for (words, sentence) in cases {
        refused(dir, &[&["data", "prepare"], *words].concat(), sentence);
    }
    let left: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 4, "nothing was written: {left:?}");
    assert_eq!(fs::read(dir.join("full/thesis.pdf")).unwrap(), b"years of work");
    let words = ["bad.jsonl", "--out", "skipped", "--vocab", "300", "--on-error", "skip"];
    let result = prepared(dir, &words);
    assert!(result.out.contains("skipped  1 broken JSON"), "{}", result.out);
    assert!(result.err.contains("bad.jsonl, line 6"), "{}", result.err);
    // Shards of a source that changed since are not continued.
    fs::write(dir.join("bad.jsonl"), jsonl(7)).unwrap();
    refused(dir, &[&["data", "prepare"], &words[..]].concat(), "other sources");
    prepared(dir, &[&words[..], &["--restart"]].concat());
}

pub fn gzip(text: &str) -> Vec<u8> {
    let mut packed = Vec::new();
    let mut encoder = flate2::read::GzEncoder::new(text.as_bytes(), flate2::Compression::fast());
    encoder.read_to_end(&mut packed).unwrap();
    packed
}

/// The losses of a run, as written in its log.
fn losses(run: &Path) -> Vec<String> {
    let events = fs::read_to_string(run.join("events.jsonl")).expect("events");
    let events = events.lines().map(|line| serde_json::from_str::<Value>(line).expect("an event"));
    events.filter(|event| event["event"] == "step").map(|event| event["loss"].to_string()).collect()
}

#[test]
fn every_kind_of_source_trains_alike_for_any_number_of_loader_threads() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    fs::write(dir.join("a.jsonl"), jsonl(700)).unwrap();
    fs::write(dir.join("a.jsonl.gz"), gzip(&jsonl(700))).unwrap();
    fs::write(
        dir.join("b.csv"),
        "id,text\n".to_string() + &"7,\"some words, more words\"\n8,others\n".repeat(80),
    )
    .unwrap();
    // More text than is tokenised at the start.
    fs::write(dir.join("large.txt"), "A long line of a long book, one of very many.\n".repeat(400_000))
        .unwrap();
    prepared(dir, &["a.jsonl", "--out", "shards", "--vocab", "300", "--shard-tokens", "5000"]);
    let tokens: Vec<u8> = (0..60_000u32).flat_map(|i| ((i * i / 7 % 290) as u16).to_le_bytes()).collect();
    fs::write(dir.join("tokens.bin"), tokens).unwrap();
    let tokenizer = "data.tokenizer=shards/tokenizer.json";
    let sources: [(&str, &[&str]); 7] = [
        ("jsonl", &["data.path=a.jsonl"]),
        ("gz", &["data.path=a.jsonl.gz", tokenizer]),
        ("shards", &["data.path=shards"]),
        ("bin", &["data.path=tokens.bin", "data.eos=3", "model.vocab=300"]),
        ("large", &["data.path=large.txt", tokenizer, "data.held_out=0", "eval.rows=0"]),
        ("list", &["data.path=[a.jsonl, b.csv]"]),
        ("mix", &["data.mix=[{path='shards',weight=2},{path='b.csv'}]"]),
    ];
    let mut by_name = BTreeMap::new();
    for (name, words) in sources {
        let mut all = Vec::new();
        for workers in ["1", "2", "7"] {
            let run = format!("{name}-{workers}");
            let given = format!("loader.workers={workers}");
            let words = small_train(&[words, &["--run", &run, &given, "--json"]].concat());
            let output =
                flatout(dir, &words).env("FLATOUT_CACHE", dir.join("cache")).output().expect("a run");
            let err = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{name}: {err}");
            let losses = losses(&dir.join(&run));
            assert_eq!(losses.len(), 6);
            all.push(losses);
        }
        assert!(all[0] == all[1] && all[0] == all[2], "{name}: {all:?}");
        by_name.insert(name, all.remove(0));
    }
    assert_eq!(by_name["gz"], by_name["shards"], "the same documents in the same order");
    assert_eq!(fs::read_dir(dir.join("cache/corpora")).unwrap().count(), 1, "packed text is tokenised once");
    assert_eq!(fs::read_dir(dir.join("cache/indices")).unwrap().count(), 1, "large text is indexed once");
    let events = fs::read_to_string(dir.join("mix-2/events.jsonl")).unwrap();
    assert!(events.contains("\"data_wait_ms\":") && events.contains("\"data_wait\":{\"share\":"), "{events}");
}

#[test]
fn trainings_that_start_on_one_cold_archive_share_its_tokens() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    fs::write(dir.join("a.jsonl.gz"), gzip(&jsonl(4000))).unwrap();
    let runs: Vec<String> = (0..5).map(|n| format!("run-{n}")).collect();
    let start = |run: &String| {
        let words = small_train(&["data.path=a.jsonl.gz", "model.vocab=300", "--run", run, "--json"]);
        flatout(dir, &words).env("FLATOUT_CACHE", dir.join("cache")).spawn().expect("the program starts")
    };
    let children: Vec<_> = runs.iter().map(start).collect();
    for child in children {
        let output = child.wait_with_output().expect("an end");
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let first = losses(&dir.join(&runs[0]));
    assert!(first.len() == 6 && runs.iter().all(|run| losses(&dir.join(run)) == first));
    let corpora: Vec<_> = fs::read_dir(dir.join("cache/corpora")).unwrap().flatten().collect();
    assert_eq!(corpora.len(), 1, "packed text is tokenised once");
    assert!(!corpora[0].path().join("lock").exists() && corpora[0].path().join("manifest.json").is_file());
}

#[test]
fn standard_input_is_kept_with_the_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    fs::write(dir.join("a.jsonl"), jsonl(300)).unwrap();
    prepared(dir, &["a.jsonl", "--out", "shards", "--vocab", "300"]);
    let fed = |words: &[&str]| {
        let mut child = flatout(dir, words).stdin(Stdio::piped()).spawn().expect("a process");
        child.stdin.take().expect("a pipe").write_all(jsonl(300).as_bytes()).expect("written");
        let output = child.wait_with_output().expect("an end");
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        output
    };
    let words = small_train(&["data.path=-", "data.tokenizer=shards/tokenizer.json", "--run", "run"]);
    let result = fed(&words);
    assert!(String::from_utf8_lossy(&result.stderr).contains("kept in run/data"));
    // Standard input is not read when the run is resumed.
    let resumed = execute(dir, &["resume", "run", "train.steps=9"]);
    assert_eq!(resumed.code, Some(0), "{}", resumed.err);
    let from_file = small_train(&[
        "data.path=a.jsonl",
        "data.tokenizer=shards/tokenizer.json",
        "--run",
        "file",
        "train.steps=9",
        "schedule.horizon_steps=6",
    ]);
    assert_eq!(execute(dir, &from_file).code, Some(0));
    assert_eq!(losses(&dir.join("run")), losses(&dir.join("file")));
    let words = small_train(&["data.path=-"]);
    refused(dir, &words, "Standard input");
    // `data prepare` may also train a tokeniser on it.
    fed(&["data", "prepare", "-", "--out", "piped", "--vocab", "300"]);
    assert!(dir.join("piped/manifest.json").is_file());
}

#[test]
fn data_is_inspected() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    fs::write(dir.join("a.jsonl"), jsonl(300) + "{\"text\": null}\n").unwrap();
    prepared(dir, &["a.jsonl", "--out", "shards", "--vocab", "300", "--on-error", "skip"]);
    let tokens: Vec<u8> = (0..500u32).flat_map(|i| ((i % 50) as u16).to_le_bytes()).collect();
    fs::write(dir.join("tokens.bin"), tokens).unwrap();
    let looked = |words: &[&str]| -> Value {
        let result = execute(dir, &[&["data", "inspect", "--json"], words].concat());
        assert_eq!(result.code, Some(0), "{words:?}: {}", result.err);
        serde_json::from_str(&result.out).expect("JSON")
    };
    let text = looked(&["a.jsonl", "--tokenizer", "shards/tokenizer.json"]);
    assert_eq!((&text["kind"], &text["documents"]), (&"text".into(), &300.into()));
    assert_eq!(text["unusable"][0][0], "field null");
    assert_eq!(text["samples"].as_array().unwrap().len(), 3);
    assert!(text["samples"][0]["tokens"].as_u64().unwrap() > 3);
    let counted = |value: &Value| -> u64 {
        value["lengths"]["histogram"]
            .as_array()
            .unwrap()
            .iter()
            .map(|bar| bar["documents"].as_u64().unwrap())
            .sum()
    };
    assert_eq!(counted(&text), 300);
    let shards = looked(&["shards"]);
    assert_eq!((&shards["kind"], counted(&shards)), (&"shards".into(), 300));
    assert!(shards["samples"][0]["text"].as_str().unwrap().contains("number"));
    let bin = looked(&["tokens.bin", "--eos", "0"]);
    assert_eq!(
        (&bin["documents"], &bin["tokens"], &bin["lengths"]["most"]),
        (&10.into(), &490.into(), &49.into())
    );

    let rows = looked(&["tiny", "data.path=shards", "model.context=32", "data.document_mask=true"]);
    let spans = rows["rows"][0]["spans"].as_array().unwrap();
    assert_eq!(spans[0]["is_trained"], false, "the first token is only read");
    let trained: u64 = spans
        .iter()
        .filter(|span| span["is_trained"] == true)
        .map(|span| span["tokens"].as_u64().unwrap())
        .sum();
    assert_eq!(rows["rows"][0]["trained_tokens"].as_f64().unwrap() as u64, trained);
    let result = execute(dir, &["data", "inspect", "tiny", "data.path=shards", "data.document_mask=true"]);
    assert!(result.out.contains("[[<bos>]]") && result.out.contains("tokens trained"), "{}", result.out);
    assert!(execute(dir, &["data", "inspect", "shards"]).out.contains("####"));
    refused(dir, &["data", "inspect", "nothing.jsonl"], "nothing.jsonl");
}

#[test]
fn damaged_data_is_named_before_anything_is_trained() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    fs::write(dir.join("a.jsonl"), jsonl(300)).unwrap();
    prepared(dir, &["a.jsonl", "--out", "shards", "--vocab", "300", "--shard-tokens", "5000"]);
    prepared(dir, &["a.jsonl", "--out", "others", "--vocab", "280"]);
    let shard = dir.join("shards/shard-00001.tokens");
    let whole = fs::read(&shard).unwrap();
    let flipped = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        bytes
    };
    let train = |words: &[&str], sentence| refused(dir, &small_train(words), sentence);
    for (bytes, sentence) in [
        (whole[..whole.len() / 2].to_vec(), "shard-00001.tokens cannot be used"),
        (flipped(100), "is damaged"),
        (flipped(whole.len() - 3), "is damaged"),
        (fs::read(dir.join("others/shard-00000.tokens")).unwrap(), "another tokeniser"),
    ] {
        fs::write(&shard, bytes).unwrap();
        train(&["data.path=shards"], sentence);
    }
    fs::write(&shard, &whole).unwrap();
    train(&["data.path=shards", "data.tokenizer=others/tokenizer.json"], "made with another tokeniser");
    train(&["data.path=shards", "model.vocab=290"], "but the model only 290");
    let manifest = dir.join("shards/manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    for (from, to, sentence) in [
        ("shard-00001.tokens", "../a.jsonl", "not in its folder"),
        ("\"version\": 1", "\"version\": 7", "its version is 7"),
        ("{", "", "manifest.json cannot be used"),
    ] {
        fs::write(&manifest, text.replacen(from, to, 1)).unwrap();
        train(&["data.path=shards"], sentence);
    }
    fs::write(dir.join("odd.bin"), [1, 0, 2]).unwrap();
    train(&["data.path=odd.bin"], "odd.bin cannot be used");
    fs::write(dir.join("large.bin"), [255; 100]).unwrap();
    train(&["data.path=large.bin"], "its token 0 is 65535 and the vocabulary has 512");
    train(&["data.path=*.parquet"], "*.parquet");
    train(&["data.mix=[{path='a.jsonl',weight=0}]"], "above 0");
    train(&["data.mix=[{path='a.jsonl'}]", "data.path=a.jsonl"], "both given");
    assert!(!dir.join("runs").join("tiny-1").join("checkpoints").exists());
}
