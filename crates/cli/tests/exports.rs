//! Where exports are written: only an earlier export is ever replaced, atomically, and concurrent exports leave one complete.

use std::fs;
use std::path::Path;

use crate::fixture::Fixture;
use crate::program::{execute, flatout, small_train};

/// Every file below a folder, with its content.
fn contents(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found = vec![];
    for entry in fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry")) {
        match entry.path().is_dir() {
            true => found.extend(contents(&entry.path())),
            false => {
                found.push((entry.path().display().to_string(), fs::read(entry.path()).expect("a file")))
            }
        }
    }
    found.sort();
    found
}

#[test]
fn force_replaces_nothing_but_an_earlier_export() {
    let fixture = Fixture::new();
    let dir = fixture.folder.path();
    let trained = execute(dir, &small_train(&["checkpoint.every=3", "--run", "runs/run"]));
    assert_eq!(trained.code, Some(0), "{}", trained.err);
    let exported = execute(dir, &["export", "runs/run", "--to", "out"]);
    assert_eq!(exported.code, Some(0), "{}", exported.err);

    fs::create_dir(fixture.dir("thesis")).expect("a folder");
    fs::write(fixture.dir("thesis/chapter.tex"), "all of it").expect("a file");
    // A model from another tool has the same file names.
    fs::create_dir(fixture.dir("theirs")).expect("a folder");
    fs::copy(fixture.dir("out/config.json"), fixture.dir("theirs/config.json")).expect("a copy");
    let header = br#"{"__metadata__":{"format":"pt"}}"#;
    let tensors = [&(header.len() as u64).to_le_bytes()[..], header].concat();
    fs::write(fixture.dir("theirs/model.safetensors"), tensors).expect("a file");
    fs::create_dir(fixture.dir("noted")).expect("a folder");
    for entry in fs::read_dir(fixture.dir("out")).expect("an export").flatten() {
        fs::copy(entry.path(), fixture.dir("noted").join(entry.file_name())).expect("a copy");
    }
    fs::write(fixture.dir("noted/README.md"), "what it is for").expect("a file");
    std::os::unix::fs::symlink("runs/run", fixture.dir("link")).expect("a link");
    let before = contents(dir);
    for (to, part) in [
        ("runs/run", "which is exported"),
        ("runs", "which is exported"),
        (".", "names no folder"),
        ("..", "names no folder"),
        ("../", "names no folder"),
        ("link", "which is exported"),
        ("runs/run/checkpoints", "which no export wrote"),
        ("thesis", "holds chapter.tex, which no export wrote"),
        ("theirs", "is no export of flatout's"),
        ("noted", "holds README.md, which no export wrote"),
        ("thesis/chapter.tex", "is a file"),
    ] {
        let result = execute(dir, &["export", "runs/run", "--to", to, "--force"]);
        assert_eq!(result.code, Some(2), "{to}: {result:?}");
        assert!(result.err.contains(part) && result.err.lines().count() == 1, "{to}: {}", result.err);
    }
    assert!(contents(dir) == before, "nothing was touched");

    let replaced = execute(dir, &["export", "runs/run", "--to", "out", "--force", "--shard-size", "20KB"]);
    assert_eq!(replaced.code, Some(0), "{}", replaced.err);
    assert!(!fixture.dir("out/model.safetensors").exists() && fixture.dir("out/config.json").is_file());
    // An export that a run starts from is not changed.
    let words = ["model.from=out", "data.source=synthetic", "train.freeze=embed", "--run", "second"];
    let second = execute(
        dir,
        &[&["train", "tiny", "train.steps=2", "schedule.warmup_steps=1", "eval.rows=0"], &words[..]].concat(),
    );
    assert_eq!(second.code, Some(0), "{}", second.err);
    let result = execute(dir, &["export", "second", "--to", "out", "--force"]);
    result.assert_refused(&["which is exported"]);
}

#[test]
fn the_note_on_four_bit_weights_says_what_was_trained() {
    let fixture = Fixture::new();
    let dir = fixture.folder.path();
    for (own, trained) in [
        (["adapter.kind=lora", "base=nf4"], "with which the adapters were trained; --adapter exports the"),
        (["train.freeze=[layers.0]", "base=nf4"], "with which the other weights were trained\n"),
    ] {
        let run = own[0].split('=').next().expect("a key");
        let made = execute(dir, &small_train(&[own[0], own[1], "--run", run, "-q"]));
        assert_eq!(made.code, Some(0), "{}", made.err);
        let result = execute(dir, &["export", run, "--to", &format!("{run}-out")]);
        assert_eq!(result.code, Some(0), "{own:?}: {}", result.err);
        assert!(
            result.err.contains("are exported with the values of their 4-bit codes"),
            "{own:?}: {}",
            result.err
        );
        assert!(result.err.contains(trained), "{own:?}: {}", result.err);
    }
}

#[test]
fn concurrent_exports_leave_one_that_is_complete() {
    let fixture = Fixture::new();
    let dir = fixture.folder.path();
    for (run, seed) in [("a", "train.seed=1"), ("b", "train.seed=2")] {
        let trained = execute(dir, &small_train(&[seed, "--run", run, "-q"]));
        assert_eq!(trained.code, Some(0), "{}", trained.err);
        assert_eq!(execute(dir, &["export", run, "--to", &format!("{run}-alone")]).code, Some(0));
    }
    let names = |folder: &Path| -> Vec<(String, Vec<u8>)> {
        let cut =
            |(path, bytes): (String, Vec<u8>)| (path.rsplit('/').next().expect("a name").to_string(), bytes);
        contents(folder).into_iter().map(cut).collect()
    };
    let alone = ["a-alone", "b-alone"].map(|name| names(&fixture.dir(name)));
    for round in 0..4 {
        let to = format!("out-{round}");
        let forced = round % 2 == 1;
        let children: Vec<_> = (0..6)
            .map(|n| {
                let mut words = vec!["export", ["a", "b"][n % 2], "--to", to.as_str()];
                words.extend(forced.then_some("--force"));
                flatout(dir, &words).spawn().expect("the program starts")
            })
            .collect();
        let ends: Vec<_> =
            children.into_iter().map(|child| child.wait_with_output().expect("an end")).collect();
        let result: Vec<_> =
            ends.iter().map(|end| (end.status.code(), String::from_utf8_lossy(&end.stderr))).collect();
        let done = result.iter().filter(|(code, _)| *code == Some(0)).count();
        assert_eq!(done, if forced { 6 } else { 1 }, "{result:?}");
        assert!(result.iter().all(|(code, _)| matches!(code, Some(0 | 2))), "{result:?}");
        assert!(alone.contains(&names(&fixture.dir(&to))), "{to} is one of the exports, whole");
    }
    let left = fs::read_dir(dir).expect("a folder").flatten().map(|entry| entry.file_name());
    assert!(
        !left.into_iter().any(|name| name.to_string_lossy().starts_with('.')),
        "nothing is left beside it"
    );
}

/// A text with enough words for a tokeniser.
fn book() -> String {
    let words = ["run", "weights", "are", "trained", "once", "more", "before", "12", "steps", "it's", "done"];
    (0..3000).map(|i| format!("{} ", words[i * i % 11 * (i % 5 + 1) % 11])).collect()
}

#[test]
fn a_gguf_file_is_complete_and_replaces_only_another() {
    let fixture = Fixture::new();
    let dir = fixture.folder.path();
    fs::write(fixture.dir("book.txt"), book()).expect("a file");
    let trained =
        execute(dir, &small_train(&["data.path=book.txt", "model.vocab=320", "--run", "run", "-q"]));
    assert_eq!(trained.code, Some(0), "{}", trained.err);
    let gguf = |words: &[&str]| execute(dir, &[&["export", "--format", "gguf"], words].concat());
    let made = gguf(&["run", "--to", "out.gguf", "--json"]);
    assert_eq!(made.code, Some(0), "{}", made.err);
    let report: serde_json::Value = serde_json::from_str(&made.out).expect("an object");
    assert_eq!([&report["format"], &report["dtype"], &report["architecture"]], ["gguf", "f16", "qwen3"]);
    let f16 = fs::read(fixture.dir("out.gguf")).expect("a file");
    assert!(f16.starts_with(b"GGUF\x03\0\0\0") && f16.len().is_multiple_of(32));
    for text in
        ["tokenizer.ggml.merges", "gpt-2", "blk.1.attn_q_norm.weight", "qwen3.attention.head_count_kv"]
    {
        assert!(f16.windows(text.len()).any(|part| part == text.as_bytes()), "{text}");
    }

    // The file made from the Hugging Face layout is the same, if the folder has the same name.
    assert_eq!(execute(dir, &["export", "run", "--to", "folder/run"]).code, Some(0));
    let through = gguf(&["folder/run", "--to", "through.gguf"]);
    assert_eq!(through.code, Some(0), "{}", through.err);
    assert!(fs::read(fixture.dir("through.gguf")).expect("a file") == f16);
    assert_eq!(gguf(&["run", "--to", "deep/small.gguf", "--dtype", "q8_0"]).code, Some(0));
    assert!(fs::read(fixture.dir("deep/small.gguf")).expect("a file").len() < f16.len());

    fs::write(fixture.dir("theirs.gguf"), b"GGUF\x03\0\0\0 somebody else's").expect("a file");
    let synthetic = execute(dir, &small_train(&["--run", "words", "-q"]));
    assert_eq!(synthetic.code, Some(0), "{}", synthetic.err);
    let before = contents(dir);
    for (words, part) in [
        (&["run", "--to", "out.gguf"][..], "out.gguf is there already"),
        (&["run", "--to", "theirs.gguf", "--force"], "theirs.gguf is no export of flatout's"),
        (&["run", "--to", "deep"], "deep does not end in .gguf"),
        (&["run", "--to", "new.gguf", "--adapter"], "--adapter is for the Hugging Face layout"),
        (&["run", "--to", "new.gguf", "--shard-size", "1GB"], "--shard-size is for the Hugging Face layout"),
        (&["words", "--to", "new.gguf"], "its tokeniser is a WordLevel"),
        (&["nowhere", "--to", "new.gguf"], "nowhere"),
    ] {
        let result = gguf(words);
        assert_eq!(result.code, Some(2), "{words:?}: {result:?}");
        assert!(result.err.contains(part) && result.err.lines().count() == 1, "{words:?}: {}", result.err);
    }
    let result = execute(dir, &["export", "run", "--to", "other", "--dtype", "q8_0"]);
    result.assert_refused(&["--dtype q8_0 is a type of GGUF files"]);
    assert!(contents(dir) == before, "nothing was touched");
    assert_eq!(gguf(&["run", "--to", "out.gguf", "--force", "--dtype", "bf16"]).code, Some(0));
    assert_eq!(fs::read(fixture.dir("out.gguf")).expect("a file").len(), f16.len());
    let left = fs::read_dir(dir).expect("a folder").flatten().map(|entry| entry.file_name());
    assert!(
        !left.into_iter().any(|name| name.to_string_lossy().starts_with('.')),
        "nothing is left beside it"
    );
}
