//! Compares the decoder with Hugging Face's models: logits, loss and every gradient of tiny random checkpoints, in f32 on the
//! CPU. `make_golden.py` beside the fixtures made them, in f64.

use std::collections::BTreeMap;

use flatout_ir::passes::differentiate::{LOSS_SUM, gradient_path};
use flatout_ir::passes::input_path;
use flatout_ir::{Options, Program, Recompute, Role, compile};
use flatout_models::config::{Activation, Bias, DecoderConfig, Norm, Positions, RopeScaling};
use flatout_models::decoder::build;
use flatout_models::form::{Form, LossForm};
use flatout_models::library::llama::weight_names;
use flatout_models::library::stored::Stored;
use flatout_models::library::{gpt2, huggingface};
use flatout_runtime::{Session, cpu};
use flatout_train::weights::initial;
use flatout_train::weights::pretrained::parameters;
use serde_json::Value;

use crate::distance::relative;
use crate::fixture::Fixture;
use crate::unfused;

/// The largest relative L2 distance of any tensor.
const BOUND: f64 = 1e-5;

/// Number of rows in a file, and the length of each.
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

#[test]
fn gpt2() {
    equals_the_reference("gpt2");
}

#[test]
fn gpt2_with_the_exact_gelu() {
    equals_the_reference("gpt2-exact");
}

#[test]
fn linear_rope_scaling() {
    equals_the_reference("llama-linear");
}

#[test]
fn llama3_rope_scaling_and_biases() {
    equals_the_reference("llama-llama3");
}

#[test]
fn yarn_and_biases() {
    equals_the_reference("llama-yarn");
}

#[test]
fn gemma3() {
    equals_the_reference("gemma3");
}

#[test]
fn gemma3_that_sees_both_ways() {
    equals_the_reference("gemma3-bidirectional");
}

fn equals_the_reference(name: &str) {
    Golden::open(name).equals(name);
}

impl Golden {
    /// Compares every tensor with passes on, off and with full recomputation.
    pub fn equals(mut self, name: &str) {
        let golden = &mut self;
        let plain = unfused::options();
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
}

/// A model of the library with its weights, and the library's results.
pub struct Golden {
    pub model: DecoderConfig,
    /// The location of each of our weights among theirs.
    places: Vec<Stored>,
    /// Their weights, under a name.
    weights: Fixture,
    below: &'static str,
    /// Rows, logits, the sum of losses, and gradients by the names of weights.
    expected: Fixture,
}

impl Golden {
    fn open(name: &str) -> Golden {
        let fixture = Fixture::open(name);
        let json = &fixture.json;
        let model = match json["model_type"].as_str() {
            Some("gpt2") => gpt2_model(json),
            Some("gemma3_text") => {
                let model = huggingface::read(json).expect("a Gemma-3").model;
                DecoderConfig { context: LEN, ..model }
            }
            _ => model(json),
        };
        model.validate().expect("a model that exists");
        let place = |(ours, theirs): (String, String)| {
            let dims = fixture.file.entries()[&format!("weight.{theirs}")].shape.clone();
            Stored::whole(ours, theirs, dims)
        };
        let places = match json["model_type"] == "gpt2" {
            true => gpt2::stored(&model),
            false => weight_names(&model).into_iter().map(place).collect(),
        };
        let expected = Fixture::tensors(name);
        Golden { model, places, weights: fixture, below: "weight.", expected }
    }

    /// A checkpoint as the library writes it, in a folder with `expected.safetensors`. Rows are as long as the file's.
    pub fn checkpoint(folder: &str) -> Golden {
        let expected = Fixture::tensors(&format!("{folder}/expected"));
        let weights = Fixture::checkpoint(folder);
        let model = huggingface::read(&weights.json).expect("a decoder").model;
        let model = DecoderConfig { context: LEN, ..model };
        let shapes = parameters(&model.clone().into());
        let places = huggingface::stored(&model, |path| shapes[path].0.dims.clone()).expect("names");
        Golden { model, places, weights, below: "", expected }
    }

    /// The distance of every tensor of the file from the one that a session compiled with these options computes.
    fn distances(&mut self, options: &Options) -> BTreeMap<String, f64> {
        let places = self.places.clone();
        let mut session = self.session(options);
        for at in &places {
            let name = self.weights.name_of(&format!("{}{}", self.below, at.theirs));
            let theirs = self.weights.f32s(&name);
            session.write_f32(&at.ours, &at.take(&theirs)).expect("a weight");
        }
        initial::write_tables(&mut session).expect("tables");

        session.run(Role::Logits).expect("logits");
        let logits = session.result(Role::Logits, "logits").expect("logits");
        session.run(Role::GRAD).expect("gradients");
        let mut distances = BTreeMap::from([
            ("logits".to_string(), relative(&logits, &self.expected.f32s("logits"))),
            (
                "loss".to_string(),
                relative(&session.read_f32(LOSS_SUM).expect("a sum"), &self.expected.f32s("loss_sum")),
            ),
        ]);
        let mut gradients: BTreeMap<String, Vec<f32>> = BTreeMap::new();
        for at in &places {
            let theirs =
                gradients.entry(at.theirs.clone()).or_insert_with(|| vec![0.0; at.dims.iter().product()]);
            at.put(&session.read_f32(&gradient_path(&at.ours)).expect("a gradient"), theirs);
        }
        let in_file = self.expected.file.entries().keys().filter(|name| name.starts_with("grad.")).count();
        assert_eq!(gradients.len(), in_file, "every gradient of the file is compared");
        for (name, gradient) in gradients {
            let off = relative(&gradient, &self.expected.f32s(&format!("grad.{name}")));
            distances.insert(name, off);
        }
        distances
    }

    /// Plans of both forms, fed with the file's rows.
    fn session(&mut self, options: &Options) -> Session {
        let context = self.model.context;
        let form = Form::Loss(LossForm::rows(ROWS, context));
        let programs = [
            Program { role: Role::GRAD, graph: build(&self.model, form) },
            Program {
                role: Role::Logits,
                graph: build(&self.model, Form::Logits { rows: ROWS, len: LEN, seen: None }),
            },
        ];
        let plans = compile(&programs, &cpu::target(2), options).expect("plans");
        let mut session = Session::new(plans, 2).expect("a session");
        let (ids, labels) = (self.expected.i32s("input_ids"), self.expected.i32s("labels"));
        // The model's rows may be longer than the file's: the padding has weight 0.
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
        write(Role::GRAD, "tokens", &padded(&ids, 0));
        write(Role::GRAD, "positions", &positions(context));
        write(Role::GRAD, "targets", &targets);
        session.write_f32(&input_path(Role::GRAD, "weights"), &weights).expect("an input");
        session
    }
}

/// Our configuration of a reference model.
fn model(json: &Value) -> DecoderConfig {
    let whole = |key: &str| json[key].as_u64().unwrap_or_else(|| panic!("{key} is a number")) as usize;
    let learned = json["positions"] == "learned";
    let rope = &json["rope_parameters"];
    DecoderConfig {
        width: whole("hidden_size"),
        layers: whole("num_hidden_layers"),
        heads: whole("num_attention_heads"),
        kv_heads: Some(whole("num_key_value_heads")),
        head_size: Some(whole("head_dim")),
        ffn: whole("intermediate_size"),
        vocab: whole("vocab_size"),
        // A learned position is a parameter, so the model determines their number; otherwise rows are as long as the file's.
        context: if learned { whole("max_position_embeddings") } else { LEN },
        norm: if json["norm"] == "layer_norm" { Norm::Layer } else { Norm::Rms },
        norm_eps: json["rms_norm_eps"].as_f64().or(json["norm_eps"].as_f64()).expect("an epsilon"),
        activation: match json["hidden_act"].as_str() {
            Some("silu") => Activation::Swiglu,
            Some("gelu_tanh") => Activation::GeluTanh,
            other => panic!("{other:?} is no activation of the fixtures"),
        },
        positions: if learned { Positions::Learned } else { Positions::Rope },
        rope_theta: rope["rope_theta"].as_f64().unwrap_or(1e4),
        rope_scaling: match rope["rope_type"].as_str() {
            None | Some("default") => RopeScaling::None,
            Some(name) => name.parse().expect("a scaling"),
        },
        rope_factor: rope["factor"].as_f64(),
        rope_original_context: rope["original_max_position_embeddings"].as_u64().map(|n| n as usize),
        rope_low_freq_factor: rope["low_freq_factor"].as_f64().unwrap_or(1.0),
        rope_high_freq_factor: rope["high_freq_factor"].as_f64().unwrap_or(4.0),
        rope_beta_fast: rope["beta_fast"].as_f64().unwrap_or(32.0),
        rope_beta_slow: rope["beta_slow"].as_f64().unwrap_or(1.0),
        bias: match (json["attention_bias"] == true, json["mlp_bias"] == true) {
            (true, true) => Bias::All,
            (true, false) => Bias::Attention,
            (false, _) => Bias::None,
        },
        qk_norm: json["model_type"] == "qwen3",
        tied: json["tie_word_embeddings"] == true,
        ..DecoderConfig::default()
    }
}

fn gpt2_model(json: &Value) -> DecoderConfig {
    let whole = |key: &str| json[key].as_u64().unwrap_or_else(|| panic!("{key} is a number")) as usize;
    DecoderConfig {
        width: whole("n_embd"),
        layers: whole("n_layer"),
        heads: whole("n_head"),
        ffn: whole("n_inner"),
        vocab: whole("vocab_size"),
        context: whole("n_positions"),
        norm: Norm::Layer,
        norm_bias: true,
        norm_eps: json["layer_norm_epsilon"].as_f64().expect("an epsilon"),
        bias: Bias::All,
        activation: match json["activation_function"].as_str() {
            Some("gelu_new") => Activation::GeluTanh,
            Some("gelu") => Activation::GeluExact,
            other => panic!("{other:?} is no activation of the fixtures"),
        },
        positions: Positions::Learned,
        ..DecoderConfig::default()
    }
}
