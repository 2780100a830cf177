//! Compares every family of decoders with `transformers`: logits, loss and every gradient of a tiny checkpoint with every option
//! off and on, the checkpoint as `logits` and `generate` read it, and its `config.json` written back.
//!
//! `make_families.py` beside the fixtures made them.

use std::path::{Path, PathBuf};

use flatout_models::library::huggingface;

use crate::fixture::Fixture;
use crate::golden::Golden;
use crate::import::{computed, reads_in_portions};

macro_rules! families {
    ($($test:ident = $folder:literal, $class:literal;)*) => {
        $(#[test]
        fn $test() {
            equals_the_library($folder, $class);
        })*
    };
}

families! {
    qwen2 = "qwen2", "Qwen2ForCausalLM";
    qwen2_with_a_tied_head = "qwen2-tied", "Qwen2ForCausalLM";
    qwen3_with_windows = "qwen3-windows", "Qwen3ForCausalLM";
    mistral = "mistral", "MistralForCausalLM";
    llama_with_dynamic_rotations_and_biases_of_the_feed_forward = "llama-dynamic", "LlamaForCausalLM";
    llama_with_the_scales_of_yarn = "llama-mscale", "LlamaForCausalLM";
    phi3_within_its_original_context = "phi3", "Phi3ForCausalLM";
    phi3_beyond_its_original_context = "phi3-long", "Phi3ForCausalLM";
    gemma2 = "gemma2", "Gemma2ForCausalLM";
    gemma3_with_a_cap_and_layers_without_a_period = "gemma3-capped", "Gemma3ForCausalLM";
    olmo2 = "olmo2", "Olmo2ForCausalLM";
    smollm3 = "smollm3", "SmolLM3ForCausalLM";
    granite = "granite", "GraniteForCausalLM";
    a_body_whose_embeddings_are_tied = "qwen3-body", "Qwen3ForCausalLM";
    a_body_with_joined_tensors = "phi3-body", "Phi3ForCausalLM";
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden/families").join(name)
}

fn equals_the_library(name: &str, class: &str) {
    let golden = Golden::checkpoint(&format!("families/{name}"));
    let described =
        huggingface::read(&Fixture::checkpoint(&format!("families/{name}")).json).expect("a model");
    let written =
        huggingface::write(&described.model, "float32", &described.bos, &described.eos).expect("a file");
    assert_eq!(written["architectures"][0], class);
    assert_eq!(huggingface::read(&written).expect("a model"), described, "{name} is written as it was read");
    golden.equals(name);

    let mut expected = Fixture::tensors(&format!("families/{name}/expected"));
    let (ids, logits) = (expected.i32s("input_ids"), expected.f32s("logits"));
    let len = ids.len() / 2;
    let rows: Vec<Vec<u32>> = ids.chunks(len).map(|row| row.iter().map(|id| *id as u32).collect()).collect();
    // Dynamic rotary scaling is tested in rows that are longer than the model's positions, which commands refuse.
    if described.model.context < len {
        return;
    }
    let got = computed(&folder(name), &rows);
    let worst = got.iter().zip(&logits).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(got.len() == logits.len() && worst < 1e-4, "{name}: `logits` is off by {worst:.1e}");
    reads_in_portions(&folder(name), len);
}
