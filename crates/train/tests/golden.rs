//! The decoder against Hugging Face's models: logits, loss and every gradient of tiny random checkpoints, in f32 on
//! the CPU. `make_golden.py` beside the fixtures made them, in f64.

mod distance;

use std::collections::BTreeMap;
use std::path::Path;

use distance::relative;
use flatout_ir::passes::differentiate::{LOSS_SUM, gradient_path};
use flatout_ir::passes::input_path;
use flatout_ir::{Options, Program, Recompute, Role, compile};
use flatout_models::config::{Activation, DecoderConfig, Norm, Positions};
use flatout_models::decoder::{Documents, Form, build, weight_names};
use flatout_runtime::{Session, cpu};
use flatout_train::checkpoint::TensorFile;
use flatout_train::initial;
use serde_json::Value;

/// Largest relative L2 distance of any tensor.
const BOUND: f64 = 1e-5;

/// The file's rows and the length of each.
const ROWS: usize = 2;
const LEN: usize = 23;

#[test]
fn llama() {
    equals_the_reference("llama");
}

#[test]
fn qwen3() {
    equals_the_reference("qwen3");
}

#[test]
fn layer_norm_ungated_gelu_and_learned_positions() {
    equals_the_reference("options");
}

fn equals_the_reference(name: &str) {
    let mut golden = Golden::open(name);
    let plain = Options {
        flash_attention: false,
        fuse_qkv: false,
        fuse_gate_up: false,
        fuse_norm: false,
        fuse_elementwise: false,
        fuse_loss: false,
        fuse_optimizer: false,
        recompute: Recompute::None,
        memory_plan: false,
        ..Options::default()
    };
    let tables = Options { rope_positions: Some(golden.model.context), ..Options::default() };
    let full = Options { recompute: Recompute::Full, ..tables.clone() };
    for (how, options) in
        [("fused", Options::default()), ("rope tables", tables), ("recompute", full), ("plain", plain)]
    {
        for (tensor, off) in golden.distances(&options) {
            println!("{name}, {how}: {tensor} is off by {off:.1e}");
            assert!(off < BOUND, "{name}, {how}: {tensor} is off by {off:.1e}");
        }
    }
}

struct Golden {
    model: DecoderConfig,
    file: TensorFile,
}

impl Golden {
    fn open(name: &str) -> Golden {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden");
        let json = std::fs::read_to_string(folder.join(format!("{name}.json"))).expect("a configuration");
        let model = model(&serde_json::from_str(&json).expect("JSON"));
        model.validate().expect("a model that exists");
        let file = TensorFile::open(&folder.join(format!("{name}.safetensors"))).expect("tensors");
        Golden { model, file }
    }

    fn words(&mut self, name: &str) -> impl Iterator<Item = [u8; 4]> + use<> {
        let mut bytes = vec![0; self.file.entries()[name].bytes()];
        self.file.read_into(name, &mut bytes).expect("a tensor");
        bytes.chunks_exact(4).map(|word| word.try_into().expect("four bytes")).collect::<Vec<_>>().into_iter()
    }

    fn f32s(&mut self, name: &str) -> Vec<f32> {
        self.words(name).map(f32::from_le_bytes).collect()
    }

    fn i32s(&mut self, name: &str) -> Vec<i32> {
        self.words(name).map(i32::from_le_bytes).collect()
    }

    /// How far every tensor of the file is from what a session compiled with these options computes.
    fn distances(&mut self, options: &Options) -> BTreeMap<String, f64> {
        let names = weight_names(&self.model);
        let in_file = self.file.entries().keys().filter(|name| name.starts_with("grad.")).count();
        assert_eq!(names.len(), in_file, "every gradient of the file is compared");
        let mut session = self.session(options);
        for (ours, theirs) in &names {
            session.write_f32(ours, &self.f32s(&format!("weight.{theirs}"))).expect("a weight");
        }
        initial::write_tables(&mut session).expect("tables");

        session.run(Role::Logits).expect("logits");
        let logits = session.result(Role::Logits, "logits").expect("logits");
        session.run(Role::Grad).expect("gradients");
        let mut distances = BTreeMap::from([
            ("logits".to_string(), relative(&logits, &self.f32s("logits"))),
            (
                "loss".to_string(),
                relative(&session.read_f32(LOSS_SUM).expect("a sum"), &self.f32s("loss_sum")),
            ),
        ]);
        for (ours, theirs) in names {
            let gradient = session.read_f32(&gradient_path(&ours)).expect("a gradient");
            distances.insert(ours, relative(&gradient, &self.f32s(&format!("grad.{theirs}"))));
        }
        distances
    }

    /// Plans of both forms, fed with the file's rows.
    fn session(&mut self, options: &Options) -> Session {
        let context = self.model.context;
        let form = Form::Loss { rows: ROWS, documents: Documents::Joined, dropout: false };
        let programs = [
            Program { role: Role::Grad, graph: build(&self.model, form) },
            Program { role: Role::Logits, graph: build(&self.model, Form::Logits { rows: ROWS, len: LEN }) },
        ];
        let plans = compile(&programs, &cpu::target(2), options).expect("plans");
        let mut session = Session::new(plans, 2).expect("a session");
        let (ids, labels) = (self.i32s("input_ids"), self.i32s("labels"));
        // The model's rows may be longer than the file's: what is added counts nothing.
        let padded = |values: &[i32], fill: i32| -> Vec<i32> {
            let row = |row: &[i32]| [row, &vec![fill; context - LEN]].concat();
            values.chunks(LEN).flat_map(row).collect()
        };
        let targets = padded(&labels, -1);
        let weights: Vec<f32> = targets.iter().map(|&t| if t < 0 { 0.0 } else { 1.0 }).collect();
        let positions = |len: usize| -> Vec<i32> { (0..ROWS).flat_map(|_| 0..len as i32).collect() };
        let mut write = |role: Role, name: &str, values: &[i32]| {
            session.write_i32(&input_path(role, name), values).expect("an input");
        };
        write(Role::Logits, "tokens", &ids);
        write(Role::Logits, "positions", &positions(LEN));
        write(Role::Grad, "tokens", &padded(&ids, 0));
        write(Role::Grad, "positions", &positions(context));
        write(Role::Grad, "targets", &targets);
        session.write_f32(&input_path(Role::Grad, "weights"), &weights).expect("an input");
        session
    }
}

/// Our configuration of a reference model.
fn model(json: &Value) -> DecoderConfig {
    let whole = |key: &str| json[key].as_u64().unwrap_or_else(|| panic!("{key} is a number")) as usize;
    let learned = json["positions"] == "learned";
    DecoderConfig {
        width: whole("hidden_size"),
        layers: whole("num_hidden_layers"),
        heads: whole("num_attention_heads"),
        kv_heads: Some(whole("num_key_value_heads")),
        head_size: Some(whole("head_dim")),
        ffn: whole("intermediate_size"),
        vocab: whole("vocab_size"),
        // A learned position is a parameter, so their number is the model's; otherwise rows are as long as the file's.
        context: if learned { whole("max_position_embeddings") } else { LEN },
        norm: if json["norm"] == "layer_norm" { Norm::Layer } else { Norm::Rms },
        norm_eps: json["rms_norm_eps"].as_f64().or(json["norm_eps"].as_f64()).expect("an epsilon"),
        activation: match json["hidden_act"].as_str() {
            Some("silu") => Activation::Swiglu,
            Some("gelu_tanh") => Activation::Gelu,
            other => panic!("{other:?} is no activation of the fixtures"),
        },
        positions: if learned { Positions::Learned } else { Positions::Rope },
        rope_theta: json["rope_parameters"]["rope_theta"].as_f64().unwrap_or(1e4),
        qk_norm: json["model_type"] == "qwen3",
        tied: json["tie_word_embeddings"] == true,
        ..DecoderConfig::default()
    }
}
