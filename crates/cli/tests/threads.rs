//! If threads cannot be started, the program ends with one sentence before any work.

use std::process::Command;

#[test]
fn threads_that_cannot_be_started_are_one_sentence() {
    let folder = tempfile::tempdir().expect("a folder");
    let output = Command::new("sh")
        // Each thread reserves 64 MiB of addresses for its stack, so threads before the failing one still find memory.
        .args(["-c", "ulimit -v 1000000; exec $FLATOUT train tiny train.steps=2 --run run"])
        .env("FLATOUT", env!("CARGO_BIN_EXE_flatout"))
        .env("RAYON_NUM_THREADS", "2000")
        .env("RUST_MIN_STACK", "67108864")
        .current_dir(folder.path())
        .output()
        .expect("a shell");
    let result = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{result}");
    assert!(
        result.starts_with("flatout: the threads that work is shared among cannot be started"),
        "{result}"
    );
    assert_eq!(result.trim_end().lines().count(), 1, "{result}");
    assert!(!folder.path().join("run").exists(), "nothing was begun");
}
