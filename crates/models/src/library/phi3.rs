//! Phi-3 and Phi-4 as the `transformers` library describes them: a Llama whose q, k and v are one tensor, and whose gate and up
//! projections are another. Heads may rotate in part, and long contexts use LongRoPE.

use serde_json::{Map, Value, json};

use super::architecture::{Architecture, Shape};
use super::fields::Fields;
use super::layer_kinds::no_padding;
use super::llama::{self, DEFAULTS, Defaults, weight_names};
use super::rope;
use super::stored::{Stored, Within};
use crate::config::{DecoderConfig, RopeScaling};

pub(crate) const PHI3: Architecture = Architecture {
    model_type: "phi3",
    class: "Phi3ForCausalLM",
    bodies: &["Phi3Model"],
    class_of_classes: Some("Phi3ForSequenceClassification"),
    read,
    write,
    stored,
    scales_embeddings: false,
};

fn read(f: &Fields<'_>) -> Result<DecoderConfig, String> {
    let defaults = Defaults { context: 4096, norm_eps: 1e-5, ..DEFAULTS };
    let model = llama::dimensions(f, &defaults)?;
    // The original context of LongRoPE, which is a field outside the rotations.
    let original = f.extent_or("original_max_position_embeddings", defaults.context)?;
    let model = f.partial_rope(DecoderConfig { rope_original_context: Some(original), ..model })?;
    let window = f.get("sliding_window").map(|_| f.extent("sliding_window")).transpose()?;
    Ok(DecoderConfig { window, ..model })
}

fn write(c: &DecoderConfig) -> Map<String, Value> {
    let mut fields = llama::write_dimensions(c);
    fields.insert("sliding_window".into(), json!(c.window));
    fields.insert("partial_rotary_factor".into(), json!(rope::rotated_fraction(c)));
    fields.extend([no_padding()]);
    fields.insert("resid_pdrop".into(), json!(0.0));
    fields.insert("embd_pdrop".into(), json!(0.0));
    if c.rope_scaling == RopeScaling::Longrope {
        fields.insert("original_max_position_embeddings".into(), json!(c.rope_original_context));
    }
    fields
}

/// Rows of a tensor of theirs, one of our weights after the other.
fn stored(c: &DecoderConfig, shape: Shape<'_>) -> Vec<Stored> {
    let (queries, keys) = (c.heads * c.head_size(), c.kv_heads() * c.head_size());
    let joined = [
        ("attn.wq", "self_attn.q_proj", "self_attn.qkv_proj", 0, queries + 2 * keys),
        ("attn.wk", "self_attn.k_proj", "self_attn.qkv_proj", queries, queries + 2 * keys),
        ("attn.wv", "self_attn.v_proj", "self_attn.qkv_proj", queries + keys, queries + 2 * keys),
        ("ffn.gate", "mlp.gate_proj", "mlp.gate_up_proj", 0, 2 * c.ffn),
        ("ffn.up", "mlp.up_proj", "mlp.gate_up_proj", c.ffn, 2 * c.ffn),
    ];
    let place = |(ours, theirs): (String, String)| {
        let dims = shape(&ours);
        match joined.iter().find(|(weight, ..)| ours.ends_with(&format!(".{weight}"))) {
            None => Stored::whole(ours, theirs, dims),
            Some((_, own, joint, first, rows)) => Stored {
                theirs: theirs.replace(own, joint),
                within: Within::Rows(*first..first + dims[0]),
                dims: vec![*rows, dims[1]],
                ours,
            },
        }
    };
    weight_names(c).into_iter().map(place).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::build;
    use crate::library::stored::assert_filled;
    use crate::registry::Family;

    /// Every parameter of the graph has one location of its size, and the locations fill each tensor.
    #[test]
    fn every_weight_has_one_location() {
        let c = DecoderConfig {
            width: 8,
            layers: 2,
            heads: 4,
            kv_heads: Some(2),
            head_size: Some(6),
            ffn: 10,
            vocab: 7,
            context: 5,
            tied: false,
            ..DecoderConfig::default()
        };
        let graph = build(&c, c.least());
        let shape = |path: &str| {
            graph.slots.iter().find(|slot| slot.path == path).expect("a weight").ty.dims.to_vec()
        };
        assert_eq!(assert_filled(&graph, &stored(&c, &shape)), 3 + 2 * 6);
    }
}
