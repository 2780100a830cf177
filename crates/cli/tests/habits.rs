//! Completions, manual pages and the cache of the program. `.ci/completions.py` tests completion in real shells.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::program::{CommandOutput, execute, flatout};

/// The completions of a command line.
fn completed(dir: &Path, words: &[&str]) -> Vec<String> {
    let result = execute(dir, &[&["complete", "--", "flatout"], words].concat());
    assert_eq!((result.code, result.err.as_str()), (Some(0), ""), "{result:?}");
    result.out.lines().map(|line| line.split('\t').next().unwrap_or_default().to_string()).collect()
}

#[test]
fn command_lines_are_completed_from_the_definitions() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let is = |words: &[&str], expected: &[&str]| assert_eq!(completed(dir, words), expected, "{words:?}");
    is(&["tra"], &["train"]);
    is(&["recipes", ""], &["show"]);
    is(&["train", "vision-t"], &["vision-tiny"]);
    is(&["train", "tiny", "vision-t"], &[]);
    is(&["train", "tiny", "data.crop_s"], &["data.crop_scale="]);
    is(&["train", "data.filter=b"], &["data.filter=bilinear", "data.filter=bicubic"]);
    is(&["train", "filter=bic"], &["filter=bicubic"]);
    is(&["plan", "tiny", "fuse.qk"], &["fuse.qkv="]);
    is(&["train", "--max"], &["--max-time"]);
    is(&["train", "--quie"], &["--quiet"]);
    is(&["--json", "doctor", "--veri"], &["--verify"]);
    is(&["schema", "data.fil"], &["data.filter"]);
    is(&["completions", ""], &["bash", "zsh", "fish"]);
    // The value of an option is not a recipe, and the shell completes files.
    is(&["train", "--run", "t"], &[]);
    is(&["train", "--", "t"], &[]);
    assert!(completed(dir, &["train", "--with", ""]).contains(&"small".to_string()));
    assert!(!completed(dir, &[""]).iter().any(|word| ["complete", "ranks"].contains(&&word[..])), "hidden");
    fs::create_dir_all(dir.join("runs/mine-1")).expect("a folder");
    fs::create_dir_all(dir.join("runs/other")).expect("a folder");
    fs::write(dir.join("runs/mine-1/config.toml"), "").expect("a file");
    is(&["resume", "runs/"], &["runs/mine-1"]);
    is(&["generate", "runs/m"], &["runs/mine-1"]);
}

/// File names may come from other people: control characters in them are escaped.
#[test]
fn hostile_names_are_escaped() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::create_dir_all(folder.path().join("runs/a\u{1b}[2Jb\nc")).expect("a folder");
    fs::write(folder.path().join("runs/a\u{1b}[2Jb\nc/config.toml"), "").expect("a file");
    let result = execute(folder.path(), &["complete", "--", "flatout", "resume", "runs/"]);
    assert!(result.out.lines().count() == 1 && !result.out.contains('\u{1b}'), "{result:?}");
}

#[test]
fn every_command_has_a_page_that_man_can_show() {
    let folder = tempfile::tempdir().expect("a folder");
    let result = execute(folder.path(), &["man", "pages/deep", "--json"]);
    assert_eq!(result.code, Some(0), "{result:?}");
    let told: Value = serde_json::from_str(&result.out).expect("an object");
    let pages: Vec<&str> =
        told["pages"].as_array().expect("a list").iter().filter_map(Value::as_str).collect();
    for page in ["flatout.1", "flatout-train.1", "flatout-data-prepare.1", "flatout-cache-clean.1"] {
        assert!(pages.contains(&page), "{pages:?}");
    }
    assert!(!pages.contains(&"flatout-complete.1") && pages.len() > 20, "{pages:?}");
    let page = fs::read_to_string(folder.path().join("pages/deep/flatout-train.1")).expect("a page");
    assert!(page.contains(".TH") && page.contains("max\\-time"), "{page}");
    fs::write(folder.path().join("file"), "").expect("a file");
    let refused = execute(folder.path(), &["man", "file"]);
    assert_eq!((refused.code, refused.err.trim().lines().count()), (Some(1), 1), "{refused:?}");
}

/// Makes a cache folder with entries of some parts, and files of another program among them.
fn kept(dir: &Path) {
    for name in [
        "kernels/0123456789abcdef0123456789abcdef.cubin",
        "corpora/0123456789abcdef/a.bin",
        "samples/fedcba9876543210",
    ] {
        let path = dir.join("cache").join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(path, [7; 1000]).expect("a file");
    }
    fs::write(dir.join("cache/samples/holiday.jpg"), "mine").expect("a file");
    fs::create_dir_all(dir.join("cache/photos")).expect("a folder");
    fs::write(dir.join("cache/photos/0123456789abcdef"), "mine").expect("a file");
    fs::create_dir_all(dir.join("outside")).expect("a folder");
    fs::write(dir.join("outside/0123456789abcdef"), "mine").expect("a file");
    std::os::unix::fs::symlink(dir.join("outside"), dir.join("cache/archives")).expect("a link");
}

fn of_cache(dir: &Path, words: &[&str]) -> CommandOutput {
    let mut command: Command = flatout(dir, &[&["cache"], words].concat());
    let output = command.env("FLATOUT_CACHE", dir.join("cache")).output().expect("the program starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    CommandOutput { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

#[test]
fn the_cache_is_listed_and_only_files_of_flatout_are_deleted() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    kept(dir);
    let listed = || serde_json::from_str::<Value>(&of_cache(dir, &["--json"]).out).expect("an object");
    let of = |listed: &Value, name: &str| {
        let parts = listed["parts"].as_array().expect("a list");
        let part = parts.iter().find(|part| part["part"] == name).expect("a part");
        (part["bytes"].as_u64().expect("bytes"), part["entries"].as_u64().expect("a count"))
    };
    let before = listed();
    assert_eq!(before["bytes"], 3000, "{before}");
    assert_eq!(
        (of(&before, "corpora"), of(&before, "samples"), of(&before, "archives")),
        ((1000, 1), (1000, 1), (0, 0))
    );
    assert!(of_cache(dir, &[]).out.contains("compiled GPU kernels"));

    let dry = of_cache(dir, &["clean", "--dry-run"]);
    assert!(dry.out.contains("in 3 entries would be removed"), "{dry:?}");
    assert_eq!(listed(), before);
    let young = of_cache(dir, &["clean", "--older-than", "1h"]);
    assert!(young.out.contains("in 0 entries removed"), "{young:?}");
    let one = of_cache(dir, &["clean", "kernels"]);
    assert!(one.out.contains("in 1 entries removed"), "{one:?}");
    assert_eq!((of(&listed(), "kernels").1, of(&listed(), "corpora").1), (0, 1));
    assert_eq!(of_cache(dir, &["clean"]).code, Some(0));
    assert_eq!(listed()["bytes"], 0);
    for mine in ["cache/samples/holiday.jpg", "cache/photos/0123456789abcdef", "outside/0123456789abcdef"] {
        assert!(dir.join(mine).is_file(), "{mine} belongs to another program");
    }
    let refused = of_cache(dir, &["clean", "kernel"]);
    assert_eq!((refused.code, refused.out.as_str()), (Some(2), ""));
    assert!(refused.err.contains("no part `kernel`; did you mean `kernels`?"), "{refused:?}");
}

/// Several crates write to the cache: `cache` must list everything that the program leaves there.
#[test]
fn everything_that_a_run_caches_is_listed() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let mut packed = flate2::write::GzEncoder::new(vec![], flate2::Compression::fast());
    std::io::Write::write_all(&mut packed, "once upon a time there was a book. ".repeat(2000).as_bytes())
        .expect("bytes");
    fs::write(dir.join("book.txt.gz"), packed.finish().expect("bytes")).expect("a file");
    let words = crate::program::small_train(&["data.path=book.txt.gz", "model.vocab=300", "--run", "r"]);
    let done =
        flatout(dir, &words).env("FLATOUT_CACHE", dir.join("cache")).output().expect("the program starts");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let listed: Value = serde_json::from_str(&of_cache(dir, &["--json"]).out).expect("an object");
    let on_disk: Vec<String> = fs::read_dir(dir.join("cache"))
        .expect("a folder")
        .flatten()
        .map(|entry| entry.file_name().into_string().expect("UTF-8"))
        .collect();
    assert!(!on_disk.is_empty());
    for name in on_disk {
        let parts = listed["parts"].as_array().expect("a list");
        assert!(
            parts.iter().any(|part| part["part"] == name.as_str() && part["entries"].as_u64() > Some(0)),
            "{name}: {listed}"
        );
    }
}
