//! GPT-2 as the `transformers` library describes it, with its own fields and names.
//!
//! Its checkpoints have q, k and v in one tensor and matrices stored [in, out]; files without the head have names without
//! `transformer.`.

use std::ops::Range;

use serde_json::{Map, Value, json};

use super::architecture::Architecture;
use super::fields::Fields;
use super::layer_kinds::object;
use super::stored::{Stored, Within};
use crate::config::Activation::{GeluExact, GeluTanh};
use crate::config::{Bias, DecoderConfig, Head, Norm, Positions};
use crate::decoder::SCORE;

pub(crate) const GPT2: Architecture = Architecture {
    model_type: "gpt2",
    class: "GPT2LMHeadModel",
    bodies: &["GPT2Model"],
    class_of_classes: Some("GPT2ForSequenceClassification"),
    read,
    write,
    stored: |c, _| stored(c),
    scales_embeddings: false,
};

/// Fields that would change the results, with the only supported value.
const FIXED: [(&str, bool); 3] = [
    ("scale_attn_weights", true),
    ("scale_attn_by_inverse_layer_idx", false),
    ("add_cross_attention", false),
];

fn read(f: &Fields<'_>) -> Result<DecoderConfig, String> {
    for (name, supported) in FIXED {
        f.only(name, json!(supported), &supported.to_string())?;
    }
    let width = f.extent("n_embd")?;
    let activation = f.get("activation_function").map_or(Ok("gelu_new"), |value| {
        value.as_str().ok_or_else(|| format!("its `activation_function` is {value}, and must be a name"))
    })?;
    if f.get("tie_word_embeddings").is_some_and(|tied| *tied != json!(true)) {
        return Err("its `tie_word_embeddings` is not true, and a GPT-2 is read with a tied head".into());
    }
    Ok(DecoderConfig {
        width,
        layers: f.layers("n_layer", None)?,
        heads: f.extent("n_head")?,
        ffn: f.extent_or("n_inner", 4 * width)?,
        vocab: f.extent("vocab_size")?,
        context: f.extent_or("n_positions", 1024)?,
        norm: Norm::Layer,
        norm_bias: true,
        norm_eps: f.number_or("layer_norm_epsilon", 1e-5)?,
        bias: Bias::All,
        activation: match activation {
            "gelu_new" | "gelu_pytorch_tanh" => GeluTanh,
            "gelu" => GeluExact,
            other => {
                return Err(format!(
                    "its `activation_function` is {other:?}, and here there is gelu_new and gelu"
                ));
            }
        },
        positions: Positions::Learned,
        ..DecoderConfig::default()
    })
}

fn write(model: &DecoderConfig) -> Map<String, Value> {
    object(json!({
        "n_embd": model.width,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_inner": model.ffn,
        "n_positions": model.context,
        "n_ctx": model.context,
        "activation_function": if model.activation == GeluTanh { "gelu_new" } else { "gelu" },
        "layer_norm_epsilon": model.norm_eps,
        "resid_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "attn_pdrop": 0.0,
    }))
}

/// Location of every weight of a decoder that is a GPT-2.
pub fn stored(c: &DecoderConfig) -> Vec<Stored> {
    let d = c.width;
    let mut all = vec![];
    let mut add =
        |ours: String, theirs: String, dims: Vec<usize>, transposed: bool, columns: Range<usize>| {
            let within = Within::Columns { transposed, columns };
            all.push(Stored { ours, theirs: format!("transformer.{theirs}"), dims, within });
        };
    add("embed.weight".into(), "wte.weight".into(), vec![c.vocab, d], false, 0..d);
    add("positions.weight".into(), "wpe.weight".into(), vec![c.context, d], false, 0..d);
    for i in 0..c.layers {
        for (ours, theirs) in [("attn_norm", "ln_1"), ("ffn_norm", "ln_2")] {
            add(format!("layers.{i}.{ours}"), format!("h.{i}.{theirs}.weight"), vec![d], false, 0..d);
            add(format!("layers.{i}.{ours}_bias"), format!("h.{i}.{theirs}.bias"), vec![d], false, 0..d);
        }
        let products = [
            ("attn.wq", "attn.c_attn", d, 3 * d, 0..d),
            ("attn.wk", "attn.c_attn", d, 3 * d, d..2 * d),
            ("attn.wv", "attn.c_attn", d, 3 * d, 2 * d..3 * d),
            ("attn.wo", "attn.c_proj", d, d, 0..d),
            ("ffn.up", "mlp.c_fc", d, c.ffn, 0..c.ffn),
            ("ffn.down", "mlp.c_proj", c.ffn, d, 0..d),
        ];
        for (ours, theirs, into, out, columns) in products {
            let (ours, theirs) = (format!("layers.{i}.{ours}"), format!("h.{i}.{theirs}"));
            add(ours.clone(), format!("{theirs}.weight"), vec![into, out], true, columns.clone());
            add(format!("{ours}_bias"), format!("{theirs}.bias"), vec![out], false, columns);
        }
    }
    add("norm".into(), "ln_f.weight".into(), vec![d], false, 0..d);
    add("norm_bias".into(), "ln_f.bias".into(), vec![d], false, 0..d);
    if c.head == Head::Classes {
        all.push(Stored::whole(SCORE, SCORE, vec![c.classes(), d]));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::build;
    use crate::form::Form;
    use crate::library::stored::assert_filled;

    fn small() -> DecoderConfig {
        DecoderConfig {
            width: 6,
            layers: 2,
            heads: 2,
            ffn: 10,
            vocab: 7,
            context: 5,
            norm: Norm::Layer,
            norm_bias: true,
            bias: Bias::All,
            activation: GeluTanh,
            positions: Positions::Learned,
            ..DecoderConfig::default()
        }
    }

    /// Every parameter of the graph has one location of its size, and the locations fill each tensor.
    #[test]
    fn every_weight_has_one_location() {
        let graph = build(&small(), Form::Logits { rows: 1, len: 3, seen: None });
        assert_eq!(assert_filled(&graph, &stored(&small())), 2 + 2 * 12 + 2);
    }

    #[test]
    fn taken_values_can_be_put_back() {
        let table = stored(&small());
        let key = table.iter().find(|s| s.ours == "layers.1.attn.wk").unwrap();
        // [in 6, out 18]: element (in, out) is 100 in + out; ours is [out, in] of the middle six columns.
        let theirs: Vec<usize> = (0..6).flat_map(|into| (0..18).map(move |out| 100 * into + out)).collect();
        let ours = key.take(&theirs);
        assert_eq!(ours[..7], [6, 106, 206, 306, 406, 506, 7]);
        let mut back = vec![usize::MAX; theirs.len()];
        key.put(&ours, &mut back);
        assert_eq!(back[6..12], theirs[6..12]);
        assert_eq!(back[5], usize::MAX);
    }
}
