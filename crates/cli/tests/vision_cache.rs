//! `data.vision_cache` through the program: kills while features are written, several processes at once, full disks, plans and errors.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::fixture::Fixture;
use crate::program::{execute, refused};

/// Questions about synthetic images whose features take several files, with a frozen tower.
const WORDS: [&str; 17] = [
    "train",
    "qwen3-vl-8b-vqa",
    "--with",
    "small",
    "adapter.kind=lora",
    "adapter.paths=[layers]",
    "adapter.rank=2",
    "data.synthetic_rows=4000",
    "train.batch=8",
    "train.epochs=none",
    "train.steps=4",
    "eval.every_epochs=none",
    "eval.rows=4",
    "checkpoint.every=1",
    "backend=cpu",
    "--resume",
    "auto",
];

fn words<'a>(run: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&WORDS[..], &["--run", run], more].concat()
}

/// The features of every image by the image's hash, independent of the order in which they were made.
fn hashes(cache: &Path) -> BTreeMap<String, String> {
    let Ok(bytes) = fs::read(cache.join("index.json")) else { return BTreeMap::new() };
    let index: Value = serde_json::from_slice(&bytes).expect("an index is replaced at once");
    let parts = index["parts"].as_array().expect("parts").iter();
    let images = parts.flat_map(|part| part["images"].as_array().expect("images"));
    let word = |value: &Value| value.as_str().expect("a word").to_string();
    images.map(|image| (word(&image["sha256"]), word(&image["hash"]))).collect()
}

fn is_writing(cache: &Path) -> bool {
    let entries = fs::read_dir(cache).into_iter().flatten().flatten();
    entries.into_iter().any(|entry| entry.file_name().to_string_lossy().ends_with(".bin.partial"))
}

#[test]
fn kills_while_features_are_written_leave_complete_files() {
    let fixture = Fixture::new();
    let unbroken = execute(fixture.folder.path(), &words("unbroken", &["data.vision_cache=whole"]));
    assert_eq!(unbroken.code, Some(0), "{}", unbroken.err);
    let whole = hashes(&fixture.dir("whole"));
    assert!(whole.len() > 600, "{} images are several parts", whole.len());
    let broken = words("broken", &["data.vision_cache=parts"]);
    let cache = fixture.dir("parts");
    let (mut before, mut inside, mut went_on) = (0, 0, 0);
    for kill in 0..8_u32 {
        let mut child = fixture.start(&broken);
        let born = Instant::now();
        let [drawn, ..] = flatout_ir::random::philox([kill, 3, 0, 0], [25, 11]);
        // Every other one is killed soon after it began to write, a little later each time.
        let after = match kill % 2 {
            0 => Duration::from_micros([0, 300, 3_000, 30_000][kill as usize / 2]),
            _ => Duration::from_micros(u64::from(drawn % 40_000)),
        };
        let mut seen: Option<Instant> = None;
        loop {
            if kill % 2 == 0 && is_writing(&cache) {
                seen.get_or_insert_with(Instant::now);
            }
            let is_due = if kill % 2 == 0 {
                seen.is_some_and(|seen| seen.elapsed() >= after)
            } else {
                born.elapsed() >= 20 * after
            };
            if is_due || child.try_wait().expect("a child").is_some() {
                break;
            }
            assert!(born.elapsed() < Duration::from_secs(120), "the run makes no progress");
        }
        child.kill().expect("a process that was not waited for");
        let status = child.wait().expect("an end");
        inside += u32::from(status.signal() == Some(9) && is_writing(&cache));
        let now = hashes(&cache);
        assert!(now.iter().all(|(image, hash)| whole[image] == *hash), "kill {kill}: what is named is whole");
        assert!(now.len() >= before, "kill {kill}: what was whole stays");
        went_on += u32::from(now.len() > before && before > 0);
        before = now.len();
    }
    println!("{inside} kills fell inside a part, {went_on} lives went on from whole parts");
    assert!(inside > 0, "no kill fell inside a part");
    let ended = execute(fixture.folder.path(), &broken);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    assert_eq!(hashes(&cache), whole);
    assert!(!is_writing(&cache));
    fixture.assert_same("unbroken", "broken", 4);
}

#[test]
fn processes_at_once_make_features_once() {
    let fixture = Fixture::new();
    let runs = ["one", "two", "three"];
    let mut children: Vec<_> =
        runs.iter().map(|run| fixture.start(&words(run, &["data.vision_cache=shared"]))).collect();
    for child in &mut children {
        assert_eq!(child.wait().expect("an end").code(), Some(0));
    }
    let index: Value =
        serde_json::from_slice(&fs::read(fixture.dir("shared/index.json")).expect("an index")).expect("JSON");
    let images = index["parts"]
        .as_array()
        .expect("parts")
        .iter()
        .map(|part| part["images"].as_array().expect("images").len());
    assert_eq!(images.sum::<usize>(), hashes(&fixture.dir("shared")).len(), "every image once");
    runs[1..].iter().for_each(|run| fixture.assert_same("one", run, 4));
}

#[test]
fn a_full_disk_is_a_sentence() {
    let fixture = Fixture::new();
    let line = words("run", &["data.vision_cache=cache"]).join(" ");
    // Files are limited to some KiB.
    let output = Command::new("sh")
        .args(["-c", &format!("ulimit -f 100; exec $FLATOUT {line}")])
        .env("FLATOUT", env!("CARGO_BIN_EXE_flatout"))
        .current_dir(fixture.folder.path())
        .stdin(Stdio::null())
        .output()
        .expect("a shell");
    let result = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(output.status.code(), Some(1), "{result}");
    assert!(
        result.contains("Features could not be written to cache") && result.contains("make room"),
        "{result}"
    );
    assert!(!is_writing(&fixture.dir("cache")), "what is not whole is removed");
    let again = execute(fixture.folder.path(), &words("run", &["data.vision_cache=cache"]));
    assert_eq!(again.code, Some(0), "{}", again.err);
}

#[test]
fn it_is_planned_trained_evaluated_and_refused() {
    let fixture = Fixture::new();
    let dir = fixture.folder.path();
    let mut plan = ["plan", "--json"].iter().chain(&WORDS[1..15]).copied().collect::<Vec<_>>();
    let object = |words: &[&str]| -> Value {
        let result = execute(dir, words);
        assert_eq!(result.code, Some(0), "{}", result.err);
        serde_json::from_str(&result.out).expect("an object")
    };
    let without = object(&plan);
    assert_eq!(without.get("vision_cache"), None);
    plan.push("data.vision_cache=cache");
    let with = object(&plan);
    assert!(with["arena_bytes"].as_u64() < without["arena_bytes"].as_u64());
    assert_eq!(with["parameters"], without["parameters"]);
    let of = &with["vision_cache"];
    assert!(
        of["bytes_per_image"].as_f64() > Some(0.0) && of["tower_ms_per_image"].as_f64() > Some(0.0),
        "{of}"
    );
    assert!(!fixture.dir("cache").exists(), "a plan writes nothing");
    plan.retain(|word| *word != "--json");
    plan.extend(["train.steps=none", "train.epochs=1"]);
    let result = execute(dir, &plan);
    let line = result.out.lines().find(|line| line.starts_with("vision cache")).unwrap_or_default();
    assert!(
        line.contains("of the tower an image") && line.contains("training reads up to "),
        "{}",
        result.out
    );
    assert!(
        result
            .out
            .contains("it does not pay: one epoch with shared_prefix=on shows the tower each image once"),
        "{}",
        result.out
    );

    let rows = ["data.vision_cache=cache", "data.synthetic_rows=80"];
    let trained = execute(dir, &words("run", &rows));
    assert_eq!(trained.code, Some(0), "{}", trained.err);
    assert!(
        trained.err.contains("the cache pays: ") || trained.err.contains("the cache does not pay: "),
        "{}",
        trained.err
    );
    // A trained run is evaluated with its tower, even if the cached features are gone.
    fs::remove_dir_all(fixture.dir("cache")).expect("a folder");
    let evaluated = object(&["eval", "run", "--json"]);
    let last = fixture.events("run").into_iter().rev().find_map(|event| match event {
        flatout_train::run::events::Event::Eval { loss, .. } => Some(f64::from(loss)),
        _ => None,
    });
    let (evaluated, trained) = (evaluated["loss"].as_f64().expect("a loss"), last.expect("an evaluation"));
    assert!((evaluated / trained - 1.0).abs() < 1e-5, "{evaluated} {trained}");

    for (more, sentence) in [
        (&["adapter.paths=[layers,vision.layers]"][..], "the tower is trained"),
        (&["data.vision_cache="], "`data.vision_cache` is empty"),
    ] {
        refused(dir, &words("refused", &[&rows[..], more].concat()), sentence);
        assert!(!fixture.dir("refused").exists() && !fixture.dir("cache").exists());
    }
}
