//! Runs with a frozen base stored as codes, in NF4 or in 8-bit floats: they equal runs with the dequantised values to the bit,
//! learn as much as runs with a full base, and export the model that they trained.

use std::path::{Path, PathBuf};

use flatout_train::Config;
use flatout_train::device::Device;
use flatout_train::infer::generate::Generator;
use flatout_train::resolve::compile;
use flatout_train::run::checkpoint::TensorFile;
use flatout_train::weights::export::{Export, Width, export};
use flatout_train::weights::loaded::Loaded;
use flatout_train::weights::pretrained;
use tempfile::TempDir;

use crate::adapters::computed;
use crate::distance::relative;
use crate::small_run::{self, train_in};

fn small(more: &[&str]) -> Config {
    let few = ["train.steps=12", "lr=1e-2"];
    small_run::config(&few.iter().chain(more).copied().collect::<Vec<_>>())
}

fn exported(run: &Path, to: &Path) {
    let mut loaded = Loaded::open(run, &[]).expect("a run");
    let (to, dtype) = (to.to_path_buf(), Width::F32);
    let wanted = Export { to, dtype, shard_bytes: u64::MAX, force: false, adapter: false };
    export(&mut loaded, &wanted).expect("an export");
}

/// A trained model in the Hugging Face layout, in a folder with room for others.
fn base(scratch: &TempDir, steps: &str) -> (PathBuf, String) {
    let [first, base] = ["first", "base"].map(|name| scratch.path().join(name));
    train_in(&first, &small(&[steps, "eval.rows=0"]), |_| {});
    exported(&first, &base);
    let from = format!("model.from={}", base.display());
    (base, from)
}

fn losses(dir: &Path, words: &[&str]) -> Vec<f32> {
    train_in(dir, &small(words), |_| {}).iter().map(|step| step.loss).collect()
}

/// With `precision=fp8` products multiply E4M3 codes of the dequantised values.
#[test]
fn a_run_in_four_bits_is_one_on_the_values_of_its_codes() {
    are_runs_on_values("nf4", &["precision=fp32", "precision=bf16", "precision=fp8"]);
}

/// Products multiply the codes with `precision=fp8`, and dequantised values otherwise.
#[test]
fn a_run_in_eight_bits_is_one_on_the_values_of_its_codes() {
    are_runs_on_values("fp8", &["precision=fp32", "precision=bf16", "precision=fp8"]);
}

fn are_runs_on_values(codes: &str, precisions: &[&str]) {
    let scratch = tempfile::tempdir().expect("a folder");
    let at = |name: &str| scratch.path().join(name);
    let (base, from) = base(&scratch, "train.steps=30");
    let stored = format!("base={codes}");
    let kinds = precisions.iter().flat_map(|precision| [("lora", *precision), ("dora", *precision)]);
    for (kind, precision) in kinds {
        let named = |what: &str| at(&format!("{what}-{kind}-{precision}"));
        let adapter = format!("adapter.kind={kind}");
        let own = [adapter.as_str(), precision, "adapter.rank=4"];
        let small = [&own[..], &[&stored, &from]].concat();
        // LoRA with zero updates leaves the dequantised values unchanged; DoRA would divide them by their norms and multiply
        // again.
        let still = ["adapter.kind=lora", precision, &stored, &from, "train.steps=1", "lr=1e-30"];
        let still = [&still[..], &["schedule.warmup_steps=0", "weight_decay=0"]].concat();
        losses(&named("still"), &still);
        exported(&named("still"), &named("values"));
        let moved = relative(&computed(&named("values")), &computed(&base));
        assert!(moved > 1e-3 && moved < 0.3, "{kind} {precision}: codes move logits by {moved}");

        let in_codes = losses(&named("codes"), &small);
        let values = format!("model.from={}", named("values").display());
        let in_full = losses(&named("full"), &[&own[..], &[&values]].concat());
        assert_eq!(in_codes, in_full, "{kind} {precision}");

        // The model of a run is the one it trained: in inference, in a full copy, and exported.
        let logits = computed(&named("codes"));
        assert!(relative(&logits, &computed(&named("values"))) > 1e-3, "training changed nothing");
        exported(&named("codes"), &named("merged"));
        let off = relative(&computed(&named("merged")), &logits);
        let bound = if precision == "precision=fp32" { 1e-5 } else { 2e-2 };
        assert!(off < bound, "{kind} {precision}: merged logits are off by {off:.1e}");
        let mut generator = Generator::open(&named("codes"), &Device::Cpu { threads: 2 }).expect("a run");
        generator.read(&[5, 6, 7]).expect("logits");
        let (last, vocab) = (generator.read(&[8, 9]).expect("logits"), logits.len() / 10);
        assert!(relative(&last, &logits[4 * vocab..5 * vocab]) < bound);

        // No frozen weight is saved, and the adapters are exported alone, for use with any base.
        let place = Loaded::open(&named("codes"), &[]).expect("a run").place;
        let state = TensorFile::open(&place.join("state.safetensors")).expect("a checkpoint");
        assert!(state.entries().keys().all(|name| name.contains("adapter.default.")
            || name.starts_with("optimizer.")
            || name.starts_with("fp8.history.")));
        // A run with a full base can begin from it as a merged model; another quantised one would quantise it twice.
        let onward = format!("model.from={}", named("codes").display());
        let again = small_run::config(&["adapter.kind=lora", &stored, &onward]);
        let refused = pretrained::check(&again, &mut |_| {}).expect_err("a refusal").0;
        let sentence =
            format!("keeps its base in {codes}, and base={codes} would quantise it again: export it");
        assert!(refused.contains(&sentence), "{refused}");
        let still =
            [onward.as_str(), "train.steps=1", "lr=1e-30", "schedule.warmup_steps=0", "weight_decay=0"];
        losses(&named("onward"), &still);
        let off = relative(&computed(&named("onward")), &logits);
        assert!(off < bound, "{kind} {precision}: a run from the run is off by {off:.1e}");
    }
}

/// Two hundred updates of adapters reach the same loss with a quantised base as with a full one.
#[test]
fn codes_learn_what_a_full_base_learns() {
    let scratch = tempfile::tempdir().expect("a folder");
    let (_, from) = base(&scratch, "train.steps=100");
    for kind in ["adapter.kind=lora", "adapter.kind=dora"] {
        let curve = |base: &[&str]| {
            let own = [&from, kind, "train.steps=200", "lr=3e-3", "adapter.rank=8", "train.seed=3"];
            losses(&scratch.path().join(format!("{kind}-{}", base.join("-"))), &[&own[..], base].concat())
        };
        let full = curve(&["base=bf16"]);
        let mean = |losses: &[f32]| losses.iter().sum::<f32>() / losses.len() as f32;
        let bases = [
            &["base=nf4"][..],
            &["base=nf4", "precision=fp8"],
            &["base=fp8"],
            &["base=fp8", "precision=fp8"],
        ];
        for base in bases {
            let codes = curve(base);
            let (begun, last) = (mean(&codes[..10]), mean(&codes[180..]));
            let off = last / mean(&full[180..]) - 1.0;
            println!(
                "{kind} {base:?}: {begun} to {last}, {} in full: {:+.2}%",
                mean(&full[180..]),
                100.0 * off
            );
            assert!(last < 0.97 * begun, "{kind} {base:?}: {begun} to {last}");
            assert!(off.abs() < 0.03, "{kind} {base:?}: {off}");
        }
    }
}

#[test]
fn unsupported_bases_are_refused() {
    let refused = |words: &[&str]| {
        let config = small_run::config(words);
        compile::compile(&config, &compile::target()).expect_err("a refusal").to_string()
    };
    for (words, sentence) in [
        (
            &["base=nf4"][..],
            "`base=nf4` is for weights of layers that nothing trains, and all of them are trained here: give",
        ),
        (
            &["base=fp8"],
            "`base=fp8` is for weights of layers that nothing trains, and all of them are trained here: give",
        ),
        (
            &["base=nf4", "adapter.kind=lora", "shard=parameters"],
            "`base=nf4` cannot run with `shard=parameters`",
        ),
        (
            &["base=fp8", "adapter.kind=lora", "shard=parameters"],
            "`base=fp8` cannot run with `shard=parameters`",
        ),
    ] {
        let said = refused(words);
        assert!(said.contains(sentence), "{words:?}: {said}");
    }
}
