//! Adapters in complete runs: PEFT's ten steps, the contents of checkpoints, and export and import of adapters.
//! `peft/make_peft.py` made the fixtures.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use flatout_ir::cost::cost;
use flatout_ir::passes::differentiate::gradient_path;
use flatout_ir::passes::{input_path, update};
use flatout_ir::{Class, Options, Program, Role};
use flatout_models::form::Form;
use flatout_runtime::{Session, cpu};
use flatout_train::Config;
use flatout_train::UserError;
use flatout_train::config::AdapterKind;
use flatout_train::device;
use flatout_train::device::Device;
use flatout_train::infer::generate::Generator;
use flatout_train::infer::logits;
use flatout_train::recipes;
use flatout_train::resolve::compile;
use flatout_train::run::checkpoint::TensorFile;
use flatout_train::weights::export::{Export, Width, export};
use flatout_train::weights::loaded::Loaded;
use flatout_train::weights::pretrained;

use crate::distance::relative;
use crate::small_run::{self, train_in};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peft").join(name)
}

/// The model of a fixture.
fn base(adapter: &Path) -> PathBuf {
    let is_tied = adapter.to_string_lossy().ends_with("-tied");
    let name = if is_tied { "smollm2" } else { "llama" };
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden/checkpoints").join(name)
}

fn words(file: &mut TensorFile, name: &str) -> Vec<[u8; 4]> {
    let entry = file.entries().get(name).unwrap_or_else(|| panic!("a tensor {name}"));
    let mut bytes = vec![0; entry.bytes()];
    file.read_into(name, &mut bytes).expect("a tensor");
    bytes.as_chunks::<4>().0.to_vec()
}

pub fn f32s(file: &mut TensorFile, name: &str) -> Vec<f32> {
    words(file, name).into_iter().map(f32::from_le_bytes).collect()
}

const ROWS: usize = 2;

fn config_from(adapter: &Path, more: &[&str]) -> Result<Config, UserError> {
    let (from, adapter) =
        (format!("model.from={}", base(adapter).display()), format!("adapter.from={}", adapter.display()));
    let fixed = [
        from.as_str(),
        adapter.as_str(),
        "train.batch=2",
        "train.micro_batch=2",
        "optimizer.betas=[0.9,0.95]",
        "optimizer.eps=1e-8",
        "optimizer.weight_decay=0.1",
        "optimizer.clip=1",
        "eval.rows=0",
    ];
    let all: Vec<String> = fixed.iter().chain(more).map(|word| word.to_string()).collect();
    recipes::resolve("tiny", &[], &all)
}

/// PEFT's name of one of our tensors.
pub fn theirs(ours: &str) -> String {
    match ours {
        "embed.weight" => return "base_model.model.model.embed_tokens.weight".into(),
        "head.weight" => return "base_model.model.lm_head.weight".into(),
        _ => {}
    }
    let (weight, what) =
        ours.strip_prefix("adapter.default.").and_then(|o| o.rsplit_once('.')).expect("an adapter's");
    if weight == "embed.weight" {
        let what = if what == "a" { "lora_embedding_B" } else { "lora_embedding_A" };
        return format!("base_model.model.model.embed_tokens.{what}");
    }
    let module = weight
        .replace("attn.w", "self_attn.")
        .replace("self_attn.q", "self_attn.q_proj")
        .replace("self_attn.k", "self_attn.k_proj")
        .replace("self_attn.v", "self_attn.v_proj")
        .replace("self_attn.o", "self_attn.o_proj")
        .replace("ffn.gate", "mlp.gate_proj")
        .replace("ffn.up", "mlp.up_proj")
        .replace("ffn.down", "mlp.down_proj");
    let what = match what {
        "a" => "lora_A.weight",
        "b" => "lora_B.weight",
        _ => "lora_magnitude_vector",
    };
    match module.as_str() {
        "head.weight" => format!("base_model.model.lm_head.{what}"),
        _ => format!("base_model.model.model.{module}.{what}"),
    }
}

/// PEFT's values in our order: for the embedding both tensors are transposed.
fn ordered(ours: &str, file: &mut TensorFile, name: &str) -> Vec<f32> {
    let values = f32s(file, name);
    if !ours.contains(".embed.weight.") {
        return values;
    }
    let [rows, columns] = file.entries()[name].shape[..] else { panic!("a matrix") };
    (0..rows * columns).map(|i| values[i % rows * columns + i / rows]).collect()
}

/// Ten updates with AdamW: every loss and norm, the first gradients and the last adapters equal PEFT's.
fn steps_as_peft_does(name: &str, more: &[&str]) {
    let mut expected = TensorFile::open(&fixture(name).join("expected.safetensors")).expect("a file");
    let i32s = |file: &mut TensorFile, name: &str| -> Vec<i32> {
        words(file, name).into_iter().map(i32::from_le_bytes).collect()
    };
    let (ids, labels) = (i32s(&mut expected, "input_ids"), i32s(&mut expected, "labels"));
    let len = ids.len() / ROWS;
    let context = format!("model.context={len}");
    let words: Vec<&str> = more.iter().copied().chain([context.as_str()]).collect();
    let config = config_from(&fixture(name), &words).expect("a config");
    let compiled = compile::compile(&config, &cpu::target(2)).expect("plans");
    let mut session = Session::new(compiled.plans, 2).expect("a session");
    pretrained::begin(&config, &mut session).expect("weights");
    let trained: Vec<String> = {
        let slots = session.plans().slots.iter();
        slots.filter(|s| s.class == Class::Weight && !s.is_whole).map(|s| s.path.clone()).collect()
    };
    let tensors = expected.entries().keys().filter(|name| name.starts_with("after.")).count();
    assert_eq!(trained.len(), tensors, "{name}: {trained:?}");
    let check = |what: &str, got: &[f32], wanted: &[f32], bound: f64| {
        let off = relative(got, wanted);
        assert!(off < bound, "{name} {more:?}, {what}: off by {off:.1e}");
    };
    let positions: Vec<i32> = (0..ROWS).flat_map(|_| 0..len as i32).collect();
    let weights: Vec<f32> = labels.iter().map(|label| if *label < 0 { 0.0 } else { 1.0 }).collect();
    let supervised: f32 = weights.iter().sum();
    for step in 1..=10 {
        for (input, values) in [("tokens", &ids), ("targets", &labels), ("positions", &positions)] {
            session.write_i32(&input_path(Role::GRAD, input), values).expect("an input");
        }
        session.write_f32(&input_path(Role::GRAD, "weights"), &weights).expect("an input");
        session.run(Role::GRAD).expect("gradients");
        for ours in trained.iter().filter(|_| step == 1) {
            let sums = session.read_f32(&gradient_path(ours)).expect("a gradient");
            let means: Vec<f32> = sums.iter().map(|sum| sum / supervised).collect();
            let wanted = ordered(ours, &mut expected, &format!("grad.{}", theirs(ours)));
            check(ours, &means, &wanted, if name.starts_with("lora-ends") { 1e-5 } else { 1e-4 });
        }
        session.write_f32(&input_path(Role::Apply, update::LR), &[3e-3]).expect("a rate");
        session.run(Role::Apply).expect("an update");
        for (what, theirs) in [("loss", "loss"), ("grad_norm", "norm")] {
            let got = session.result(Role::Apply, what).expect("a result");
            check(&format!("{what} {step}"), &got, &f32s(&mut expected, &format!("{theirs}.{step}")), 1e-4);
        }
    }
    for ours in &trained {
        let got = session.read_f32(ours).expect("a weight");
        check(ours, &got, &ordered(ours, &mut expected, &format!("after.{}", theirs(ours))), 1e-4);
    }
}

#[test]
fn ten_steps_of_lora() {
    for name in ["lora", "lora-some"] {
        steps_as_peft_does(name, &[]);
        steps_as_peft_does(name, &["fuse.qkv=off", "fuse.gate_up=off", "fuse.elementwise=off"]);
    }
}

/// Adapters of the embedding and the head, which are two tensors or a tied one.
#[test]
fn ten_steps_of_lora_at_both_ends() {
    for name in ["lora-ends", "lora-ends-tied"] {
        steps_as_peft_does(name, &[]);
        steps_as_peft_does(name, &["fuse.loss=off", "recompute=full"]);
    }
}

/// Tables that grew for two tokens, trained in full along with adapters.
#[test]
fn ten_steps_with_new_tokens() {
    let scratch = tempfile::tempdir().expect("a folder");
    let words: Vec<String> =
        ["<bos>", "<eos>"].map(String::from).into_iter().chain((2..53).map(|n| format!("w{n}"))).collect();
    let tokenizer = scratch.path().join("tokenizer.json");
    flatout_data::Vocabulary::from_words(&words).save(&tokenizer).expect("a tokeniser");
    let (tokenizer, path) =
        (format!("data.tokenizer={}", tokenizer.display()), format!("data.path={}", tokenizer.display()));
    let tokens = ["data.new_tokens=['<tool>','</tool>']", &tokenizer, &path];
    steps_as_peft_does("lora-tokens", &[&tokens[..], &["adapter.also_train=['embed','head']"]].concat());
    steps_as_peft_does("lora-tokens-tied", &[&tokens[..], &["adapter.also_train=embed"]].concat());
}

/// A session that begins from PEFT's adapters has PEFT's logits. The tables that the library stores with them must equal the
/// model's.
#[test]
fn logits_with_adapters_at_both_ends() {
    for name in ["lora-ends", "lora-ends-tied"] {
        let mut expected = TensorFile::open(&fixture(name).join("expected.safetensors")).expect("a file");
        let ids: Vec<i32> = words(&mut expected, "input_ids").into_iter().map(i32::from_le_bytes).collect();
        let len = ids.len() / ROWS;
        let config = config_from(&fixture(name), &["model.context=32"]).expect("a config");
        let graph = config.model.build(Form::Logits { rows: ROWS, len, seen: None });
        let weights = graph.slots.iter().filter(|slot| slot.class == Class::Weight);
        let freeze = weights.map(|slot| slot.path.clone()).collect();
        let adapters = flatout_train::weights::adapters::of(&config, &graph).expect("adapters");
        let options = Options { adapters, freeze, ..Options::default() };
        let program = Program { role: Role::Logits, graph };
        let plans = flatout_ir::compile(&[program], &cpu::target(2), &options).expect("plans");
        let mut session = Session::new(plans, 2).expect("a session");
        pretrained::begin(&config, &mut session).expect("weights");
        let positions: Vec<i32> = (0..ROWS).flat_map(|_| 0..len as i32).collect();
        for (input, values) in [("tokens", &ids), ("positions", &positions)] {
            session.write_i32(&input_path(Role::Logits, input), values).expect("an input");
        }
        session.run(Role::Logits).expect("logits");
        let got = session.result(Role::Logits, "logits").expect("logits");
        let off = relative(&got, &f32s(&mut expected, "logits"));
        assert!(off < 1e-5, "{name}: off by {off:.1e}");
    }
    // The same adapters with another table.
    let other = tempfile::tempdir().expect("a folder");
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(base(&fixture("lora-ends")).join(file), other.path().join(file)).expect("a copy");
    }
    let weights = other.path().join("model.safetensors");
    let mut bytes = std::fs::read(&weights).expect("weights");
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let json: serde_json::Value = serde_json::from_slice(&bytes[8..header]).expect("a header");
    let at =
        header + json["model.embed_tokens.weight"]["data_offsets"][0].as_u64().expect("a number") as usize;
    bytes[at] ^= 1;
    std::fs::write(&weights, bytes).expect("weights");
    let from = format!("model.from={}", other.path().display());
    let config =
        config_from(&fixture("lora-ends"), &[&from, "train.steps=1", "model.context=32"]).expect("a config");
    let compiled = compile::compile(&config, &cpu::target(2)).expect("plans");
    let mut session = Session::new(compiled.plans, 2).expect("a session");
    let refused = pretrained::begin(&config, &mut session).expect_err("a refusal").to_string();
    assert!(refused.contains("`base_model.model.model.embed_tokens.base_layer.weight`"), "{refused}");
}

#[test]
fn ten_steps_of_dora() {
    for name in ["dora", "dora-some"] {
        steps_as_peft_does(name, &[]);
        steps_as_peft_does(name, &["fuse.qkv=off", "recompute=full", "optimizer.state=fp32"]);
    }
}

#[test]
fn a_folder_describes_its_adapter() {
    let section = |name: &str| config_from(&fixture(name), &[]).expect("a config").adapter;
    let all = section("lora");
    assert_eq!((all.kind, all.rank, all.alpha, all.groups.0.len()), (AdapterKind::Lora, 4, Some(8.0), 0));
    assert_eq!(all.paths[0], "layers.*.attn.wq");
    assert_eq!(all.paths.len(), 7);
    let some = section("lora-some");
    assert_eq!((some.rank, some.alpha), (3, Some(6.0)));
    assert_eq!(some.paths, ["layers.*.attn.wq", "layers.0.attn.wv"]);
    let group = &some.groups.0[0];
    assert_eq!(
        (group.rank, group.alpha, &group.paths[..]),
        (Some(2), Some(7.0), &["layers.1.attn.wv".to_string()][..])
    );
    let dora = section("dora-some");
    assert_eq!(dora.kind, AdapterKind::Dora);
    assert_eq!(dora.paths, ["layers.*.ffn.down", "layers.1.attn.wq", "layers.1.ffn.up"]);

    let sentence = |more: &[&str]| config_from(&fixture("lora"), more).expect_err("a refusal").0;
    assert!(sentence(&["adapter.rank=8"]).contains("`adapter.rank` is 8 and the adapter in"));
    assert!(sentence(&["adapter.kind=dora"]).contains("leave it out"));
    let nowhere = config_from(Path::new("no/such/folder"), &[]).expect_err("a refusal").0;
    assert!(nowhere.contains("`adapter.from` needs a folder with an adapter in PEFT's layout"), "{nowhere}");
}

/// The library divides alpha by the rank in the config: a rank that differs from the tensors' is refused.
#[test]
fn a_config_that_contradicts_its_tensors_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let refused = |name: &str, key: &str, value: serde_json::Value| {
        let path = folder.path().join("adapter_config.json");
        let text = std::fs::read(fixture(name).join("adapter_config.json")).expect("a config");
        let mut config: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
        config[key] = value;
        std::fs::write(&path, config.to_string()).expect("a config");
        let tensors = "adapter_model.safetensors";
        std::fs::copy(fixture(name).join(tensors), folder.path().join(tensors)).expect("tensors");
        config_from(folder.path(), &[]).map(|_| ()).map_err(|error| error.0)
    };
    assert_eq!(refused("lora", "r", 4.into()), Ok(()));
    assert_eq!(refused("lora", "r", serde_json::Value::Null), Ok(()));
    assert_eq!(refused("lora", "init_lora_weights", "gaussian".into()), Ok(()));
    for (name, key, value, part) in [
        ("lora", "r", 16.into(), "is 16, and its tensors have 4"),
        ("lora", "r", "4".into(), "is \"4\", and its tensors have 4"),
        ("lora-some", "rank_pattern", serde_json::json!({}), "is 3, and its tensors have 2"),
        ("lora", "lora_alpha", "many".into(), "is \"many\" and must be a number"),
        (
            "lora",
            "init_lora_weights",
            "pissa_niter_4".into(),
            "changes the weights that the adapter lies beside",
        ),
        ("lora", "init_lora_weights", "olora".into(), "changes the weights that the adapter lies beside"),
        ("lora", "peft_type", "LOHA".into(), "merge the adapter into its model with PEFT"),
        (
            "lora",
            "alpha_pattern",
            serde_json::json!({"(": 3}),
            "`(` among alpha_pattern is not a regular expression",
        ),
    ] {
        let sentence = refused(name, key, value).expect_err("a refusal");
        let file = folder.path().join("adapter_config.json").display().to_string();
        assert!(sentence.starts_with(&file) && sentence.contains(part), "{sentence}");
    }
}

/// The logits of a run or a folder for fixed rows.
pub fn computed(model: &Path) -> Vec<f32> {
    let out = tempfile::tempdir().expect("a folder");
    let path = out.path().join("logits.safetensors");
    let mut loaded = Loaded::open(model, &[]).expect("a model");
    let rows = [vec![5, 6, 7, 8, 9], vec![9, 10, 11, 12, 13]];
    logits::write(&mut loaded, &Device::Cpu { threads: 2 }, &rows, &path).expect("logits");
    f32s(&mut TensorFile::open(&path).expect("a file"), "logits")
}

fn exported(run: &Path, to: &Path, adapter: bool) -> Vec<String> {
    let mut loaded = Loaded::open(run, &[]).expect("a run");
    let wanted =
        Export { to: to.to_path_buf(), dtype: Width::F32, shard_bytes: u64::MAX, force: false, adapter };
    export(&mut loaded, &wanted).expect("an export").files
}

fn small(more: &[&str]) -> Config {
    let few = ["train.steps=8", "checkpoint.every=4", "checkpoint.keep=9", "lr=1e-2"];
    small_run::config(&few.iter().chain(more).copied().collect::<Vec<_>>())
}

/// Patterns of some weights in layers.
const SOME: &str = "['**.wq','**.wo','layers.0.ffn.up']";

/// Trains a base and adapters for it, exports both ways, and begins new runs from the exports.
fn is_exported_and_read_back(kind: &str, paths: &str, tied: bool) {
    let scratch = tempfile::tempdir().expect("a folder");
    let at = |name: &str| scratch.path().join(name);
    let is_tied = format!("model.tied={tied}");
    train_in(&at("first"), &small(&[&is_tied]), |_| {});
    exported(&at("first"), &at("base"), false);
    let from = format!("model.from={}", at("base").display());
    let (kind, paths) = (format!("adapter.kind={kind}"), format!("adapter.paths={paths}"));
    // After merging, a tied table would become two different ones.
    let is_merged = !tied || !paths.contains("head");
    let own = [
        from.as_str(),
        kind.as_str(),
        "adapter.rank=3",
        "adapter.alpha=5",
        paths.as_str(),
        "adapter.also_train=norm",
    ];
    train_in(&at("tuned"), &small(&own), |_| {});
    let tuned = computed(&at("tuned"));
    assert!(relative(&tuned, &computed(&at("base"))) > 1e-2, "training changed nothing");
    // Generation through its cache gives the same logits.
    let mut generator = Generator::open(&at("tuned"), &Device::Cpu { threads: 2 }).expect("a run");
    generator.read(&[5, 6, 7]).expect("logits");
    let (last, vocab) = (generator.read(&[8, 9]).expect("logits"), tuned.len() / 10);
    assert!(relative(&last, &tuned[4 * vocab..5 * vocab]) < 1e-5);

    // A checkpoint contains the adapters and other trained parameters, and no further weights.
    let place = Loaded::open(&at("tuned"), &[]).expect("a run").place;
    let state = TensorFile::open(&place.join("state.safetensors")).expect("a checkpoint");
    let outside: BTreeSet<&str> = state
        .entries()
        .keys()
        .map(|name| name.trim_start_matches("optimizer.m.").trim_start_matches("optimizer.v."))
        .filter(|name| !name.starts_with("adapter.default.") && !name.starts_with("optimizer."))
        .collect();
    assert_eq!(outside, BTreeSet::from(["norm"]));

    // The merged export is the model that was trained.
    if is_merged {
        exported(&at("tuned"), &at("merged"), false);
        let off = relative(&computed(&at("merged")), &tuned);
        assert!(off < 1e-5, "{kind}: merged logits are off by {off:.1e}");
    } else {
        let mut loaded = Loaded::open(&at("tuned"), &[]).expect("a run");
        let dtype = Width::F32;
        let wanted = Export { to: at("merged"), dtype, shard_bytes: u64::MAX, force: false, adapter: false };
        let refused = export(&mut loaded, &wanted).expect_err("a refusal").to_string();
        assert!(refused.contains("merged, the two would differ; export them with --adapter"), "{refused}");
    }

    // The adapter export can be imported to the bit.
    assert_eq!(
        exported(&at("tuned"), &at("apart"), true),
        ["adapter_config.json", "adapter_model.safetensors"]
    );
    let adapter = format!("adapter.from={}", at("apart").display());
    let again = [
        from.as_str(),
        adapter.as_str(),
        "adapter.also_train=norm",
        "train.steps=1",
        "lr=1e-30",
        "schedule.warmup_steps=0",
        "weight_decay=0",
    ];
    train_in(&at("again"), &small_run::config(&again), |_| {});
    assert_eq!(computed(&at("again")), tuned);
    let refused = recipes::resolve("tiny", &[], &[from.clone(), adapter]).expect_err("a refusal").0;
    assert!(refused.contains("comes with `norm`") && refused.contains("adapter.also_train"), "{refused}");

    // A run that begins from a run with adapters begins with the merged model.
    let onward = format!("model.from={}", at("tuned").display());
    let still = [onward.as_str(), "train.steps=1", "lr=1e-30", "schedule.warmup_steps=0", "weight_decay=0"];
    if !is_merged {
        let config = small_run::config(&still);
        let refused = pretrained::check(&config, &mut |_| {}).expect_err("a refusal").0;
        assert!(refused.contains("merged, the two would differ; begin from what"), "{refused}");
        return;
    }
    train_in(&at("onward"), &small_run::config(&still), |_| {});
    let off = relative(&computed(&at("onward")), &tuned);
    assert!(off < 1e-5, "{kind}: a run from the run is off by {off:.1e}");
}

#[test]
fn lora_is_exported_and_read_back() {
    is_exported_and_read_back("lora", SOME, true);
}

#[test]
fn lora_at_both_ends_is_exported_and_read_back() {
    is_exported_and_read_back("lora", "['**.wq','embed','head']", false);
    is_exported_and_read_back("lora", "['**.wq','embed','head']", true);
}

#[test]
fn dora_is_exported_and_read_back() {
    is_exported_and_read_back("dora", SOME, true);
}

/// Before the first update, adapters change nothing.
#[test]
fn the_model_begins_as_it_was() {
    for kind in ["lora", "dora"] {
        let loss = |more: &[&str]| {
            let scratch = tempfile::tempdir().expect("a folder");
            let config = small_run::config(&[&["train.steps=1", "schedule.warmup_steps=0"], more].concat());
            train_in(scratch.path(), &config, |_| {})[0].loss
        };
        let (plain, adapted) = (loss(&[]), loss(&[&format!("adapter.kind={kind}")]));
        assert!((plain - adapted).abs() < 1e-5 * plain, "{kind}: {plain} {adapted}");
    }
}

/// Decoders of Gemma-3-1B's size with adapters on q, k, v and o, with 32 rows of 512 tokens in bf16 on an H200: the lower bound
/// of an update's time by the roofline of every launch, the number of launches, and the memory.
fn at_the_size_of_gemma(kind: &str) -> (f64, usize, BTreeMap<&'static str, usize>) {
    let words = [
        "model.width=1152",
        "model.layers=26",
        "model.heads=4",
        "model.kv_heads=1",
        "model.head_size=256",
        "model.ffn=6912",
        "model.vocab=32768",
        "model.context=512",
        "model.activation=geglu",
        "train.batch=32",
        "train.micro_batch=32",
        "eval.rows=0",
        "precision=bf16",
        "backend=cuda",
        "adapter.paths=layers.*.attn",
        kind,
    ];
    let config = recipes::resolve("tiny", &[], &words.map(String::from)).expect("a config");
    let target = device::named("h200", &config.switches).expect("a GPU of the table");
    let plans = compile::compile(&config, &target).expect("plans").plans;
    let costs = [Role::GRAD, Role::Apply].map(|role| cost(plans.plan(role).expect("a plan"), &target));
    let seconds = costs.iter().map(|cost| cost.roofline_seconds).sum();
    (seconds, plans.plan(Role::GRAD).expect("a plan").launches.len(), plans.categories())
}

#[test]
fn dora_costs_little_more_than_lora() {
    let (lora, lora_launches, with_lora) = at_the_size_of_gemma("adapter.kind=lora");
    let (dora, dora_launches, with_dora) = at_the_size_of_gemma("adapter.kind=dora");
    println!("lora {lora:.4} s in {lora_launches} launches, {with_lora:?}");
    println!("dora {dora:.4} s in {dora_launches} launches, {with_dora:?}");
    println!("{:.3}", dora / lora);
    // The plan's bytes count g, one row for all tokens, as if it were read for each of them.
    assert!(dora < 1.1 * lora, "{dora} {lora}");
    // In addition to LoRA's: g, g v and, in the backward pass, g dy, dy z and its sum, 1/g and m's gradient; 2 products per
    // layer.
    assert!(dora_launches - lora_launches <= 26 * 2 * 8, "{dora_launches} {lora_launches}");
    // The outputs of attention's last product: LoRA keeps them if a norm follows, as in Gemma-3.
    assert!(with_dora["activations"] < with_lora["activations"] + 26 * 32 * 512 * 1152 * 2 + (64 << 20));
    assert_eq!(with_dora["frozen"], with_lora["frozen"]);
}
