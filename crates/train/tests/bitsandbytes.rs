//! Checkpoints that bitsandbytes quantised to four bits: their logits, their codes in a session, runs that begin from them, and
//! the refusals of broken ones. `make_bitsandbytes.py` beside the fixtures made them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use flatout_ir::Codes;
use flatout_ir::passes::nf4::{MAP, magnitude_paths};
use flatout_models::library::huggingface;
use flatout_runtime::{Session, cpu};
use flatout_train::device::Device;
use flatout_train::infer::generate::Generator;
use flatout_train::infer::logits;
use flatout_train::resolve::compile;
use flatout_train::run::checkpoint::{Dtype, TensorFile, header};
use flatout_train::weights::export::{Export, Width, export};
use flatout_train::weights::loaded::Loaded;
use flatout_train::weights::pretrained::{self, Source};
use flatout_train::{Config, recipes};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::adapters::computed;
use crate::distance::relative;
use crate::import::{f32s, folder, has_the_references_logits};
use crate::small_run::train_in;

const NESTED: &str = "llama-nf4";
const SINGLE: &str = "qwen3-nf4-single";

fn config_from(from: &Path, more: &[&str]) -> Config {
    let from = format!("model.from={}", from.display());
    let small = [
        "model.context=32",
        "train.steps=6",
        "train.batch=4",
        "schedule.warmup_steps=1",
        "lr=1e-2",
        "eval.rows=0",
        "checkpoint.every=3",
        "adapter.kind=lora",
        "adapter.rank=4",
        from.as_str(),
    ];
    let words: Vec<String> = small.iter().chain(more).map(|word| word.to_string()).collect();
    recipes::resolve("tiny", &[], &words).expect("a config")
}

#[test]
fn logits_are_the_librarys() {
    [NESTED, SINGLE].into_iter().for_each(has_the_references_logits);
}

/// Every value that bitsandbytes dequantises, to the bit.
#[test]
fn values_of_codes_are_those_of_bitsandbytes() {
    for name in [NESTED, SINGLE] {
        let pretrained = pretrained::open(&Source::Folder(folder(name)), &mut |_| {}).expect("a model");
        let model = &pretrained.description.model;
        let shapes = pretrained::parameters(model);
        let stored = huggingface::stored(model.decoder(), |path| shapes[path].0.dims.clone()).expect("names");
        let mut expected = TensorFile::open(&folder(name).join("expected.safetensors")).expect("a file");
        let mut compared = 0;
        for stored in
            stored.iter().filter(|stored| expected.entries().contains_key(&stored.theirs)).collect::<Vec<_>>()
        {
            let (ty, init) = &shapes[&stored.ours];
            let (bytes, _) = pretrained.weights.read(&stored.ours, ty, init).expect("values");
            let wanted: Vec<u32> = f32s(&mut expected, &stored.theirs).iter().map(|x| x.to_bits()).collect();
            let values: Vec<u32> =
                bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
            assert!(values[values.len() - wanted.len()..] == wanted, "{name}: {}", stored.theirs);
            compared += 1;
        }
        assert_eq!(compared, 2, "{name}");
    }
}

/// With base=nf4, codes, magnitudes, means and their map in the session equal those in the file, whether products are merged or
/// not.
#[test]
fn a_session_has_the_codes_of_the_file() {
    let file = TensorFile::open(&folder(NESTED).join("model.safetensors")).expect("a file");
    let bytes = |name: &str| {
        let mut bytes = vec![0; file.entries()[name].bytes()];
        file.read_into(name, &mut bytes).expect("a tensor");
        bytes
    };
    for words in [&["base=nf4"][..], &["base=nf4", "fuse.qkv=off", "precision=bf16"]] {
        let config = config_from(&folder(NESTED), words);
        pretrained::check(&config, &mut |_| {}).expect("a model");
        let compiled = compile::compile(&config, &cpu::target(2)).expect("plans");
        let mut session = Session::new(compiled.plans, 2).expect("a session");
        pretrained::begin(&config, &mut session).expect("weights");
        let shapes = pretrained::parameters(&config.model);
        let stored = huggingface::stored(config.model.decoder(), |path| shapes[path].0.dims.clone());
        let mut kept = 0;
        for stored in stored.expect("names").iter().filter(|stored| stored.theirs.contains("_proj.")) {
            let (ours, theirs) = (&stored.ours, &stored.theirs);
            let piece =
                session.plans().held(0).into_iter().find(|piece| piece.path == *ours).expect("a piece");
            assert!(piece.codes() == Some(Codes::Nf4), "{ours}");
            let codes = bytes(theirs);
            let all = session.read_slot(&piece.slot).expect("codes");
            assert_eq!(piece.slot, Codes::Nf4.path(ours));
            assert!(all == codes, "{ours}: codes");
            let [absmax, nested, offset] = magnitude_paths(ours);
            assert!(session.read_slot(&absmax).expect("codes") == bytes(&format!("{theirs}.absmax")));
            assert!(
                session.read_slot(&nested).expect("numbers") == bytes(&format!("{theirs}.nested_absmax"))
            );
            assert!(session.read_slot(MAP).expect("numbers") == bytes(&format!("{theirs}.nested_quant_map")));
            let state: Value =
                serde_json::from_slice(&bytes(&format!("{theirs}.quant_state.bitsandbytes__nf4")))
                    .expect("JSON");
            let mean = state["nested_offset"].as_f64().expect("a number") as f32;
            assert_eq!(session.read_f32(&offset).expect("a number"), [mean]);
            kept += 1;
        }
        assert_eq!(kept, 14);
    }
}

/// A run that keeps the codes and one with dequantised values have the same losses, resume, and can be used and exported.
#[test]
fn runs_begin_from_codes() {
    let scratch = TempDir::new().expect("a folder");
    let losses = |name: &str, words: &[&str]| -> (PathBuf, Vec<f32>) {
        let dir = scratch.path().join(name);
        let config = config_from(&folder(NESTED), words);
        pretrained::check(&config, &mut |_| {}).expect("a model");
        let steps = train_in(&dir, &config, |_| {});
        (dir, steps.iter().map(|step| step.loss).collect())
    };
    for precision in ["precision=fp32", "precision=bf16"] {
        for kind in ["adapter.kind=lora", "adapter.kind=dora"] {
            let (small, in_codes) =
                losses(&format!("codes-{kind}-{precision}"), &["base=nf4", precision, kind]);
            let (full, in_full) = losses(&format!("full-{kind}-{precision}"), &[precision, kind]);
            assert_eq!(in_codes, in_full, "{kind} {precision}");
            // The adapters of a source run are merged into its weights, which are then no longer codes.
            let onward = config_from(&full, &["adapter.kind=lora", "base=nf4"]);
            let refused = pretrained::check(&onward, &mut |_| {}).expect_err("a refusal").0;
            assert!(
                refused.contains("a run with adapters beside weights that bitsandbytes quantised"),
                "{refused}"
            );
            // A resumed run reads them again and verifies their hashes.
            let own = flatout_train::run::config(&small).expect("a config");
            let compiled = compile::compile(&own, &cpu::target(2)).expect("plans");
            let mut session = Session::new(compiled.plans, 2).expect("a session");
            pretrained::resume(&own, &mut session, &small).expect("frozen weights");
            let logits = computed(&small);
            let merged = scratch.path().join(format!("merged-{kind}-{precision}"));
            let mut loaded = Loaded::open(&small, &[]).expect("a run");
            let wanted = Export {
                to: merged.clone(),
                dtype: Width::F32,
                shard_bytes: u64::MAX,
                force: false,
                adapter: false,
            };
            export(&mut loaded, &wanted).expect("an export");
            let off = relative(&computed(&merged), &logits);
            let bound = if precision == "precision=fp32" { 1e-5 } else { 2e-2 };
            assert!(off < bound, "{kind} {precision}: merged logits are off by {off:.1e}");
            let mut generator = Generator::open(&small, &Device::Cpu { threads: 2 }).expect("a run");
            assert!(generator.read(&[5, 6, 7]).expect("logits").iter().all(|x| x.is_finite()));
        }
    }
    let config = config_from(&folder(SINGLE), &["adapter.kind=lora", "base=nf4"]);
    let refused = pretrained::check(&config, &mut |_| {}).expect_err("a refusal").0;
    assert!(
        refused.contains("without double quantisation") && refused.contains("give base=bf16"),
        "{refused}"
    );
}

/// A run that dequantises codes reports that, and records the hashes of the parts.
#[test]
fn a_run_on_dequantised_values_reports_that() {
    let scratch = TempDir::new().expect("a folder");
    let config = config_from(&folder(NESTED), &["train.steps=1"]);
    let compiled = compile::compile(&config, &cpu::target(2)).expect("plans");
    let mut session = Session::new(compiled.plans, 2).expect("a session");
    let origin = pretrained::begin(&config, &mut session).expect("weights").expect("an origin");
    let said = origin.left_out.clone().expect("a line");
    assert!(said.starts_with("14 weights that bitsandbytes quantised are read as the values"), "{said}");
    assert!(said.contains("base=nf4 keeps those that are frozen"), "{said}");
    origin.keep(scratch.path()).expect("a record");
    assert!(origin.frozen.len() > 14);
}

/// Tensors of a file: type, shape and bytes by name.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn read(path: &Path) -> Tensors {
    let file = TensorFile::open(path).expect("a file");
    let entries = file.entries().clone();
    let tensor = |(name, entry): (String, flatout_train::run::checkpoint::Entry)| {
        let mut bytes = vec![0; entry.bytes()];
        file.read_into(&name, &mut bytes).expect("a tensor");
        (name, (entry.dtype, entry.shape, bytes))
    };
    entries.into_iter().map(tensor).collect()
}

fn write(path: &Path, tensors: &Tensors) {
    let described = tensors.iter().map(|(name, (dtype, shape, _))| (name.as_str(), *dtype, &shape[..]));
    let mut bytes = header(&described.collect::<Vec<_>>(), &[]).expect("a header");
    tensors.values().for_each(|(_, _, of)| bytes.extend(of));
    fs::write(path, bytes).expect("a file");
}

const Q: &str = "model.layers.0.self_attn.q_proj.weight";
const STATE: &str = ".quant_state.bitsandbytes__nf4";

/// Changes the description of a weight.
fn describe(tensors: &mut Tensors, change: impl Fn(&mut Value)) {
    let (_, shape, bytes) = tensors.get_mut(&format!("{Q}{STATE}")).expect("a description");
    let mut said: Value = serde_json::from_slice(bytes).expect("JSON");
    change(&mut said);
    *bytes = said.to_string().into_bytes();
    *shape = vec![bytes.len()];
}

/// Replaces a quantised weight by an unquantised one with other values.
fn plain(tensors: &mut Tensors, name: &str, dims: [usize; 2]) {
    tensors.retain(|other, _| !other.starts_with(name));
    tensors.insert(name.into(), (Dtype::F32, dims.to_vec(), vec![0; 4 * dims[0] * dims[1]]));
}

type Case = (&'static str, fn(&mut Value, &mut Tensors), &'static str);

const REFUSED: &[Case] = &[
    (
        "int8",
        |c, _| c["load_in_8bit"] = json!(true),
        "has load_in_8bit, and of bitsandbytes' forms only NF4 is read",
    ),
    ("neither", |c, _| c["load_in_4bit"] = json!(false), "names bitsandbytes without load_in_4bit"),
    ("fp4", |c, _| c["bnb_4bit_quant_type"] = json!("fp4"), "has bnb_4bit_quant_type fp4, and"),
    ("the default type", |c, _| c["bnb_4bit_quant_type"] = json!(null), "has bnb_4bit_quant_type fp4, and"),
    ("bf16 storage", |c, _| c["bnb_4bit_quant_storage"] = json!("bfloat16"), "keeps codes as bfloat16"),
    ("another method", |c, _| c["quant_method"] = json!("gptq"), "`quantization_config`"),
    (
        "magnitudes of another form than said",
        |c, _| c["bnb_4bit_use_double_quant"] = json!(false),
        "are quantised in turn, and config.json does not say so",
    ),
    (
        "an fp4 weight",
        |_, t| {
            let state = t.remove(&format!("{Q}{STATE}")).unwrap();
            t.insert(format!("{Q}.quant_state.bitsandbytes__fp4"), state);
        },
        "q_proj.weight` is in fp4, and only nf4 is supported",
    ),
    (
        "other blocks",
        |_, t| describe(t, |s| s["blocksize"] = json!(128)),
        "with blocksize 128, and only 64 is supported",
    ),
    (
        "other blocks of magnitudes",
        |_, t| describe(t, |s| s["nested_blocksize"] = json!(128)),
        "with nested_blocksize 128, and only 256 is supported",
    ),
    ("no size of blocks", |_, t| describe(t, |s| s["blocksize"] = Value::Null), "lacks `blocksize`"),
    ("no mean", |_, t| describe(t, |s| s["nested_offset"] = json!(null)), "lacks `nested_offset`"),
    (
        "another type",
        |_, t| describe(t, |s| s["quant_type"] = json!("fp4")),
        "with quant_type \"fp4\", and only \"nf4\" is supported",
    ),
    (
        "another shape",
        |_, t| describe(t, |s| s["shape"] = json!([32, 128])),
        "has codes of shape [32,128], and [64, 64] is",
    ),
    ("a broken description", |_, t| t.get_mut(&format!("{Q}{STATE}")).unwrap().2[0] = b'[', "is not JSON"),
    (
        "another table",
        |_, t| t.get_mut(&format!("{Q}.quant_map")).unwrap().2[4] ^= 1,
        "q_proj.weight.quant_map` has other values than NF4's",
    ),
    (
        "too few codes",
        |_, t| {
            let (_, shape, bytes) = t.get_mut(Q).unwrap();
            bytes.truncate(1024);
            *shape = vec![1024, 1];
        },
        "is U8 [1024, 1], and U8 of 2048 elements belong to its weight",
    ),
    (
        "magnitudes of another type",
        |_, t| t.get_mut(&format!("{Q}.absmax")).unwrap().0 = Dtype::I8,
        "absmax` is I8 [64], and U8 of 64 elements",
    ),
    ("no magnitudes", |_, t| drop(t.remove(&format!("{Q}.absmax"))), "q_proj.weight.absmax` is missing"),
    ("no table", |_, t| drop(t.remove(&format!("{Q}.quant_map"))), "q_proj.weight.quant_map` is missing"),
    ("no map", |_, t| drop(t.remove(&format!("{Q}.nested_quant_map"))), "nested_quant_map` is missing"),
    ("no description", |_, t| drop(t.remove(&format!("{Q}{STATE}"))), "bitsandbytes__nf4` is missing"),
    (
        "no largest magnitudes",
        |_, t| drop(t.remove(&format!("{Q}.nested_absmax"))),
        "are not quantised in turn, and config.json says that they are",
    ),
    ("no codes", |_, t| drop(t.remove(Q)), "lacks `model.layers.0.self_attn.q_proj.weight`"),
    (
        "parts beside numbers",
        |_, t| {
            t.insert(Q.into(), (Dtype::F32, vec![64, 64], vec![0; 4 * 64 * 64]));
        },
        "has `model.layers.0.self_attn.q_proj.weight.absmax`",
    ),
    (
        "a quantised embedding",
        |_, t| {
            let parts: Vec<_> = t.iter().filter(|(name, _)| name.starts_with(Q)).collect();
            let name = |name: &str| name.replace(Q, "model.embed_tokens.weight");
            let parts: Vec<_> = parts.into_iter().map(|(n, tensor)| (name(n), tensor.clone())).collect();
            t.extend(parts);
        },
        "`model.embed_tokens.weight` is quantised, and only weights of linear layers",
    ),
    (
        "nothing quantised",
        |_, t| {
            let codes: Vec<String> = t
                .iter()
                .filter(|(n, (ty, ..))| n.ends_with("_proj.weight") && *ty == Dtype::U8)
                .map(|(n, _)| n.clone())
                .collect();
            for name in codes {
                let rows = |of: &str| name.contains(of);
                let dims = match () {
                    () if rows("q_proj") || rows("o_proj") => [64, 64],
                    () if rows("k_proj") || rows("v_proj") => [32, 64],
                    () if rows("down_proj") => [64, 320],
                    () => [320, 64],
                };
                plain(t, &name, dims);
            }
        },
        "has no quantised weight, and the `quantization_config` of its config.json says that it has",
    ),
];

/// A copy of a folder with a change.
fn changed(change: fn(&mut Value, &mut Tensors)) -> TempDir {
    let scratch = TempDir::new().expect("a folder");
    let mut config: Value =
        serde_json::from_slice(&fs::read(folder(NESTED).join("config.json")).expect("a file")).expect("JSON");
    let mut tensors = read(&folder(NESTED).join("model.safetensors"));
    change(&mut config["quantization_config"], &mut tensors);
    fs::write(scratch.path().join("config.json"), config.to_string()).expect("a file");
    write(&scratch.path().join("model.safetensors"), &tensors);
    scratch
}

#[test]
fn every_broken_folder_is_refused() {
    let open = |folder: &Path| pretrained::open(&Source::Folder(folder.to_path_buf()), &mut |_| {});
    assert!(open(changed(|_, _| {}).path()).is_ok(), "the folder as it is");
    for (name, change, sentence) in REFUSED {
        let folder = changed(*change);
        let refused = open(folder.path()).err().unwrap_or_else(|| panic!("{name} is read")).0;
        assert!(refused.contains(sentence), "{name}: {refused}");
        assert!(!refused.contains('\n'), "{name}: {refused}");
    }
}

/// A magnitude that is not finite is found when weights are read, as any such value is.
#[test]
fn magnitudes_that_are_not_finite_are_refused() {
    let folder = changed(|_, t| {
        let (_, _, bytes) = t.get_mut(&format!("{Q}.nested_absmax")).unwrap();
        bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    let mut loaded = Loaded::open(folder.path(), &[]).expect("a folder");
    let out = folder.path().join("logits.safetensors");
    let refused = logits::write(&mut loaded, &Device::Cpu { threads: 2 }, &[vec![1, 2]], &out).err();
    let refused = refused.expect("a refusal").to_string();
    assert!(refused.contains("q_proj.weight.nested_absmax` has values that are not finite"), "{refused}");
}

/// A weight that was not quantised is read unchanged beside the others, and a base in four bits is refused; so are different
/// maps.
#[test]
fn mixed_folders_are_not_kept_in_four_bits() {
    let kept = |folder: &TempDir, words: &[&str]| {
        pretrained::check(&config_from(folder.path(), words), &mut |_| {}).map_err(|refused| refused.0)
    };
    let mixed = changed(|_, t| plain(t, Q, [64, 64]));
    assert_eq!(kept(&mixed, &[]), Ok(()));
    let refused = kept(&mixed, &["base=nf4"]).expect_err("a refusal");
    assert!(refused.contains("in nf4 and `layers.0.attn.wq` not, and base=nf4 would"), "{refused}");
    let refused = kept(&mixed, &["base=fp8"]).expect_err("a refusal");
    assert!(refused.contains("base=fp8 would quantise their values again: give base=nf4"), "{refused}");
    let maps = changed(|_, t| t.get_mut(&format!("{Q}.nested_quant_map")).unwrap().2[8] ^= 1);
    assert_eq!(kept(&maps, &[]), Ok(()));
    let refused = kept(&maps, &["base=nf4"]).expect_err("a refusal");
    assert!(refused.contains("has magnitudes by another map than"), "{refused}");
}
