//! Exports in the Hugging Face layout: the weights read back to the bit, with the fields and files that other tools read.

use std::fs;
use std::path::Path;

use flatout_train::Failure;
use flatout_train::recipes;
use flatout_train::run::checkpoint::{Dtype, TensorFile};
use flatout_train::weights::export::{Export, Exported, Width, export};
use flatout_train::weights::loaded::Loaded;
use serde_json::Value;

use crate::small_run::{config, train_in};

fn exported(run: &Path, to: &Path, change: impl Fn(&mut Export)) -> Result<Exported, Failure> {
    let mut wanted = Export {
        to: to.to_path_buf(),
        dtype: Width::F32,
        shard_bytes: 5_000_000_000,
        force: false,
        adapter: false,
    };
    change(&mut wanted);
    export(&mut Loaded::open(run, &[])?, &wanted)
}

fn trained(dir: &Path, overrides: &[&str]) {
    let words = [&["train.steps=3", "schedule.warmup_steps=1", "model.context=16"], overrides].concat();
    train_in(dir, &config(&words), |_| {});
}

/// Every weight of a run, as the bytes of its checkpoint.
fn weights(file: &Path) -> Vec<(String, Dtype, Vec<u8>)> {
    let file = TensorFile::open(file).expect("tensors");
    let entries: Vec<_> = file.entries().iter().map(|(name, e)| (name.clone(), e.dtype, e.bytes())).collect();
    let read = |(name, dtype, bytes): (String, Dtype, usize)| {
        let mut place = vec![0; bytes];
        file.read_into(&name, &mut place).expect("a tensor");
        (name, dtype, place)
    };
    entries.into_iter().map(read).collect()
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).expect("a file")).expect("JSON")
}

#[test]
fn a_run_is_exported_and_read_back_to_the_bit() {
    let scratch = tempfile::tempdir().expect("a folder");
    let at = |name: &str| scratch.path().join(name);
    for (name, overrides) in [
        ("qwen3", &[][..]),
        ("llama", &["qk_norm=false", "tied=false", "rope_theta=50000", "norm_eps=1e-5", "head_size=6"][..]),
        (
            "stretched",
            &["qk_norm=false", "bias=all", "rope_scaling=yarn", "rope_factor=2", "rope_original_context=8"][..],
        ),
        (
            "gemma3",
            &[
                "width=16",
                "head_size=8",
                "norm_weight=one_plus",
                "post_norms=true",
                "activation=geglu",
                "window=5",
                "global_every=2",
                "rope_local_theta=100",
                "rope_scaling=linear",
                "rope_factor=8",
                "embed_scale=4",
            ][..],
        ),
        (
            "gpt2",
            &[
                "qk_norm=false",
                "bias=all",
                "norm=layer",
                "norm_bias=true",
                "activation=gelu_tanh",
                "positions=learned",
                "kv_heads=2",
                "rope_cache=off",
            ][..],
        ),
    ] {
        let (run, out, back) = (at(name), at(&format!("{name}-out")), at(&format!("{name}-back")));
        trained(&run, overrides);
        let made = exported(&run, &out, |_| {}).expect("a folder");
        let class = match name {
            "qwen3" => "Qwen3ForCausalLM",
            "gpt2" => "GPT2LMHeadModel",
            "gemma3" => "Gemma3ForCausalLM",
            _ => "LlamaForCausalLM",
        };
        assert_eq!(made.architecture, class);
        let mut there: Vec<String> = fs::read_dir(&out)
            .expect("a folder")
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        there.sort();
        assert_eq!(there, made.files);

        // A run that begins from the folder with zero updates has the same weights.
        let from = format!("model.from={}", out.display());
        let still =
            ["train.steps=1", "train.batch=2", "warmup_steps=0", "lr=1e-30", "weight_decay=0", "eval.rows=0"];
        let words: Vec<String> = still.iter().map(|w| w.to_string()).chain([from]).collect();
        let again = recipes::resolve("tiny", &[], &words).expect("a config");
        let own = flatout_train::run::config(&run).expect("a config").model.decoder().clone();
        assert_eq!(again.model.decoder().head_size(), own.head_size());
        assert_eq!(
            (again.model.decoder().rope_theta, again.model.decoder().tied),
            (own.rope_theta, own.tied)
        );
        train_in(&back, &again, |_| {});
        let of = |run: &Path, step: u64| {
            let mut all = weights(&run.join(format!("checkpoints/step-{step}/state.safetensors")));
            all.retain(|(name, ..)| own_weight(name));
            all
        };
        assert_eq!(of(&run, 3), of(&back, 1), "{name}");
        // A second export gives the same files, except for the positions, which follow the rows of the run.
        let twice = at(&format!("{name}-twice"));
        exported(&back, &twice, |_| {}).expect("a folder");
        for file in ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json"] {
            assert_eq!(fs::read(out.join(file)).unwrap(), fs::read(twice.join(file)).unwrap(), "{file}");
        }
    }
}

/// Whether a tensor of a checkpoint is a weight instead of optimiser state.
fn own_weight(name: &str) -> bool {
    ["embed.", "layers.", "norm", "head."].iter().any(|start| name.starts_with(start))
}

#[test]
fn the_fields_that_other_tools_read() {
    let scratch = tempfile::tempdir().expect("a folder");
    let (run, out) = (scratch.path().join("run"), scratch.path().join("out"));
    trained(&run, &["qk_norm=false"]);
    exported(&run, &out, |wanted| wanted.dtype = Width::Bf16).expect("a folder");
    let config = json(&out.join("config.json"));
    for (field, value) in [
        ("architectures", serde_json::json!(["LlamaForCausalLM"])),
        ("model_type", "llama".into()),
        ("hidden_size", 32.into()),
        ("num_hidden_layers", 2.into()),
        ("num_attention_heads", 2.into()),
        ("num_key_value_heads", 1.into()),
        ("head_dim", 16.into()),
        ("intermediate_size", 48.into()),
        ("vocab_size", 512.into()),
        ("max_position_embeddings", 16.into()),
        ("hidden_act", "silu".into()),
        ("rms_norm_eps", 1e-6.into()),
        ("tie_word_embeddings", true.into()),
        ("rope_theta", 1e4.into()),
        ("attention_bias", false.into()),
        ("mlp_bias", false.into()),
        ("torch_dtype", "bfloat16".into()),
        ("bos_token_id", 0.into()),
        ("eos_token_id", 1.into()),
    ] {
        assert_eq!(config[field], value, "{field}");
    }
    assert_eq!(config["rope_parameters"]["rope_theta"], 1e4);
    let tokens = json(&out.join("tokenizer_config.json"));
    assert_eq!((tokens["bos_token"].as_str(), tokens["eos_token"].as_str()), (Some("<bos>"), Some("<eos>")));
    assert_eq!(json(&out.join("special_tokens_map.json"))["eos_token"], "<eos>");
    assert_eq!(json(&out.join("generation_config.json"))["eos_token_id"], 1);
    let stored = weights(&out.join("model.safetensors"));
    assert!(stored.iter().all(|(name, dtype, _)| *dtype == Dtype::Bf16 && name != "lm_head.weight"));
    let whole = fs::read(out.join("model.safetensors")).expect("a file");
    let reference =
        safetensors::SafeTensors::read_metadata(&whole).expect("the reference library reads it").1;
    assert_eq!(reference.metadata().as_ref().expect("metadata")["format"], "pt");
    // Settings of a source that names no special token leave as they are, and no file beside them names one.
    let settings = r#"{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": null}"#;
    fs::write(out.join("tokenizer_config.json"), settings).expect("a file");
    fs::remove_file(out.join("special_tokens_map.json")).expect("a file");
    let (next, again) = (scratch.path().join("next"), scratch.path().join("again"));
    let words = ["train.steps=1", "train.batch=2", "warmup_steps=0", "eval.rows=0"].map(String::from);
    let words = [&words[..], &[format!("model.from={}", out.display())]].concat();
    train_in(&next, &recipes::resolve("tiny", &[], &words).expect("a config"), |_| {});
    exported(&next, &again, |_| {}).expect("a folder");
    assert_eq!(fs::read_to_string(again.join("tokenizer_config.json")).expect("a file"), settings);
    assert!(!again.join("special_tokens_map.json").exists());
}

#[test]
fn shards_have_an_index_and_hold_the_same() {
    let scratch = tempfile::tempdir().expect("a folder");
    let (run, one, many) =
        (scratch.path().join("run"), scratch.path().join("one"), scratch.path().join("many"));
    trained(&run, &["tied=false"]);
    exported(&run, &one, |_| {}).expect("a folder");
    let made = exported(&run, &many, |wanted| wanted.shard_bytes = 20_000).expect("a folder");
    let shards: Vec<&String> = made.files.iter().filter(|file| file.ends_with(".safetensors")).collect();
    assert!(shards.len() > 3 && shards[0].starts_with("model-00001-of-000"), "{shards:?}");
    let mut all = vec![];
    let index = json(&many.join("model.safetensors.index.json"));
    for shard in shards {
        let tensors = weights(&many.join(shard));
        let bytes: usize = tensors.iter().map(|(.., bytes)| bytes.len()).sum();
        assert!(bytes <= 20_000 || tensors.len() == 1, "{shard} has {bytes} bytes");
        tensors.iter().for_each(|(name, ..)| assert_eq!(index["weight_map"][name], shard.as_str()));
        all.extend(tensors);
    }
    assert_eq!(index["metadata"]["total_size"], made.bytes);
    all.sort_by(|a, b| a.0.cmp(&b.0));
    assert!(all == weights(&one.join("model.safetensors")));
    Loaded::open(&many, &[]).expect("a model");
}

#[test]
fn nothing_is_overwritten_or_left_half_done() {
    let scratch = tempfile::tempdir().expect("a folder");
    let (run, out) = (scratch.path().join("run"), scratch.path().join("out"));
    trained(&run, &[]);
    let refused = |to: &Path, words: &str| {
        let sentence = exported(&run, to, |_| {}).expect_err(words).to_string();
        assert!(sentence.contains(words), "{sentence:?} lacks {words:?}");
    };
    fs::create_dir(&out).expect("a folder");
    fs::write(out.join("thesis.tex"), "mine").expect("a file");
    refused(&out, "is there already: give another --to, or --force");
    assert_eq!(fs::read_to_string(out.join("thesis.tex")).unwrap(), "mine");
    // Even with --force, only exports are replaced.
    let forced = || exported(&run, &out, |wanted| wanted.force = true);
    let sentence = forced().expect_err("a refusal").to_string();
    assert!(sentence.contains("holds thesis.tex, which no export wrote"), "{sentence}");
    assert_eq!(fs::read_to_string(out.join("thesis.tex")).unwrap(), "mine");
    fs::remove_file(out.join("thesis.tex")).expect("a file");
    forced().expect("an empty folder");
    fs::write(out.join("model.safetensors.index.json"), "{}").expect("a file of exports in shards");
    forced().expect("an earlier export");
    assert!(!out.join("model.safetensors.index.json").exists() && out.join("config.json").is_file());
    let file = scratch.path().join("file");
    fs::write(&file, "").expect("a file");
    refused(&file, "is a file: give --to a folder");
    refused(&file.join("out"), "the export to");
    // A folder of another program is in the layout already, and a decoder of no published architecture has no config.json.
    let sentence = exported(&out, &scratch.path().join("again"), |_| {}).unwrap_err().to_string();
    assert!(sentence.contains("in the Hugging Face layout already"), "{sentence}");
    let odd = scratch.path().join("odd");
    trained(&odd, &["activation=relu2"]);
    let sentence = exported(&odd, &scratch.path().join("again"), |_| {}).unwrap_err().to_string();
    assert!(sentence.contains("model.activation = relu2 is none of LlamaForCausalLM"), "{sentence}");
    let names: Vec<_> = fs::read_dir(scratch.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(names.iter().all(|name| !name.to_string_lossy().starts_with('.')), "{names:?}");
}

#[test]
fn files_beside_an_imported_model_are_exported() {
    let scratch = tempfile::tempdir().expect("a folder");
    let (first, base, run, out) = (
        scratch.path().join("first"),
        scratch.path().join("base"),
        scratch.path().join("run"),
        scratch.path().join("out"),
    );
    trained(&first, &[]);
    exported(&first, &base, |_| {}).expect("a folder");
    let mut config = json(&base.join("config.json"));
    config["max_position_embeddings"] = 777.into();
    config["eos_token_id"] = serde_json::json!([1, 5]);
    fs::write(base.join("config.json"), config.to_string()).expect("a file");
    fs::write(base.join("chat_template.jinja"), "{{ messages }}").expect("a file");
    fs::write(base.join("generation_config.json"), r#"{"temperature": 0.6}"#).expect("a file");
    let words = [
        format!("model.from={}", base.display()),
        "train.steps=1".into(),
        "train.batch=2".into(),
        "warmup_steps=0".into(),
        "eval.rows=0".into(),
    ];
    train_in(&run, &recipes::resolve("tiny", &[], &words).expect("a config"), |_| {});
    fs::remove_dir_all(&base).expect("the source");
    exported(&run, &out, |_| {}).expect("a folder");
    let config = json(&out.join("config.json"));
    assert_eq!(
        config["max_position_embeddings"], 777,
        "how far its positions go is the model's, not the rows'"
    );
    assert_eq!(config["eos_token_id"], serde_json::json!([1, 5]));
    assert_eq!(fs::read_to_string(out.join("chat_template.jinja")).unwrap(), "{{ messages }}");
    assert_eq!(json(&out.join("generation_config.json"))["temperature"], 0.6);
}
