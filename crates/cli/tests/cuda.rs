//! The program on a GPU, if there is one: losses like the CPU's, a second start from a warm cache, a bitwise resume, ranks that share
//! the GPU.
//!
//! Without a GPU the tests print that they skip; with FLATOUT_REQUIRE_GPU set they fail. `bench/gpu_proof.py` shows more, at real
//! sizes.

use std::path::Path;

use flatout_train::run::events::{self, Event, Start};

use crate::program::{execute, flatout, small_train};

/// Whether there is a usable GPU; otherwise a line says why not.
fn has_gpu(dir: &Path) -> bool {
    let result = execute(dir, &["doctor", "--json"]);
    assert_eq!(result.code, Some(0), "{}", result.err);
    let report: serde_json::Value = serde_json::from_str(&result.out).expect("an object");
    let is_usable = report["gpu"]["usable"] == true;
    if !is_usable {
        let why = &report["gpu"]["is"];
        assert!(std::env::var_os("FLATOUT_REQUIRE_GPU").is_none(), "nothing ran on a GPU: {why}");
        eprintln!("SKIPPED: nothing ran on a GPU: {why}");
    }
    is_usable
}

/// Trains with a cache in the folder; returns the start event and the losses.
fn train(dir: &Path, run: &str, words: &[&str]) -> (Start, Vec<f32>) {
    let words = small_train(&[words, &["eval.rows=0", "--run", run, "--resume", "auto", "--json"]].concat());
    let output = flatout(dir, &words).env("FLATOUT_CACHE", dir.join("cache")).output().expect("it starts");
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    let events = events::read(&dir.join(run).join("events.jsonl")).expect("a log");
    let is_start = |event: &&Event| matches!(event, Event::Start(_));
    let Some(Event::Start(start)) = events.iter().rfind(is_start) else { panic!("{run} has no start") };
    (start.clone(), events::steps(&events).iter().map(|step| step.loss).collect())
}

#[test]
fn the_gpu_follows_the_cpu_and_a_second_start_compiles_and_times_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    if !has_gpu(dir) {
        return;
    }
    let common = ["precision=fp32", "train.steps=20"];
    let (first, gpu) = train(dir, "first", &[&common[..], &["backend=cuda"]].concat());
    let (_, cpu) = train(dir, "cpu", &[&common[..], &["backend=cpu"]].concat());
    let off = gpu.iter().zip(&cpu).map(|(a, b)| ((a - b) / b).abs()).fold(0.0, f32::max);
    assert!(gpu.len() == 20 && cpu.len() == 20 && off < 1e-4, "off by {off:.1e}: {gpu:?} and {cpu:?}");
    let first = first.prepared.expect("a GPU's start says what it prepared");
    assert!(first.kernels_compiled > 0 && first.products_timed > 0, "{first:?}");
    let (again, _) = train(dir, "again", &[&common[..], &["backend=cuda"]].concat());
    let again = again.prepared.expect("as above");
    assert_eq!((again.kernels_compiled, again.products_timed), (0, 0));
    assert_eq!(again.kernels_from_disk, first.kernels_compiled);
    assert_eq!(again.products_remembered, first.products_timed);
}

#[test]
fn a_deterministic_run_resumes_bitwise() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    if !has_gpu(dir) {
        return;
    }
    let common = ["backend=cuda", "deterministic=on", "checkpoint.every=5", "schedule.horizon_steps=20"];
    let (start, whole) = train(dir, "whole", &[&common[..], &["train.steps=20"]].concat());
    assert_eq!((start.not_deterministic, start.switches["autotune"].as_str()), (vec![], "off"));
    train(dir, "parts", &[&common[..], &["train.steps=10"]].concat());
    let (_, parts) = train(dir, "parts", &[&common[..], &["train.steps=20"]].concat());
    let bits = |losses: &[f32]| losses.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&parts), bits(&whole));
}

/// Ranks that share a GPU have the bits of one rank with as many lanes, and one rank through NCCL has the bits of the plain run.
#[test]
fn ranks_on_a_gpu_have_the_bits_of_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    if !has_gpu(dir) {
        return;
    }
    let common = ["deterministic=on", "train.steps=10", "train.batch=8", "model.width=128", "model.ffn=256"];
    let of = |run: &str, more: &[&str]| train(dir, run, &[&common[..], more].concat());
    let bits = |losses: &[f32]| losses.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let (_, plain) = of("plain", &["train.lanes=1"]);
    let (start, alone) = of("alone", &["train.lanes=1", "wire=nccl"]);
    assert_eq!(bits(&alone), bits(&plain));
    assert!(start.world.is_some_and(|world| world.wire.starts_with("nccl ") && world.ranks == 1));
    let (_, lanes) = of("lanes", &["train.lanes=2"]);
    for shard in ["shard=none", "shard=optimizer"] {
        let (start, two) = of(shard, &["train.lanes=2", shard, "--gpus", "2", "--share-gpu"]);
        assert_eq!(bits(&two), bits(&lanes), "{shard}");
        let world = start.world.expect("two ranks");
        assert_eq!((world.ranks, start.switches["wire"].as_str()), (2, "nccl"));
        assert!(world.environment.iter().any(|word| word == "NCCL_HOSTID=rank-0"), "{:?}", world.environment);
    }
}
