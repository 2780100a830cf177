//! Decoders in GGUF, the format of llama.cpp: the name of the architecture, its metadata, and the tensor of each of our
//! weights.
//!
//! Pure functions on values. A family is one row. A model that llama.cpp would compute differently is refused with the key that
//! prevents it, because a file that loads and answers wrongly is worse than none.

use flatout_ir::ops::frequency::Frequencies;

use super::architecture::Architecture;
use super::{gemma, llama};
use crate::config::{Attention, Bias, DecoderConfig, Head, NormWeights, RopeScaling};
use crate::decoder::HEAD;

/// A value of a file's metadata.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    U32(u32),
    F32(f32),
    Bool(bool),
    String(String),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
    Bools(Vec<bool>),
    Strings(Vec<String>),
}

/// Metadata in the order in which it is written.
pub type Metadata = Vec<(String, Value)>;

/// A decoder as a file describes it, except for its tokeniser.
#[derive(Clone, Debug, PartialEq)]
pub struct Described {
    /// llama.cpp's name of the architecture.
    pub architecture: &'static str,
    pub metadata: Metadata,
    pub tensors: Vec<Tensor>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub name: String,
    pub values: Values,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    /// One of our weights, by its path.
    Weight { path: String, change: Change },
    /// A vector that is not one of our weights.
    Vector(Vec<f32>),
}

/// The conversion from one of our weights to its tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    None,
    /// Adds 1: norms that multiply by 1 + w are stored as the factor itself.
    AddOne,
    /// Permutes the rows of each head from half to interleaved pairs: row i of a head becomes row 2i, and row half + i row 2i +
    /// 1.
    Interleave {
        heads: usize,
    },
}

impl Change {
    /// Converts our values to the tensor's; the values are `rows` rows of equal length.
    pub fn apply(self, mut values: Vec<f32>, rows: usize) -> Vec<f32> {
        match self {
            Change::None => values,
            Change::AddOne => {
                values.iter_mut().for_each(|value| *value += 1.0);
                values
            }
            Change::Interleave { heads } => {
                let (width, size) = (values.len() / rows, rows / heads);
                let source = |row: usize| {
                    let (head, within) = (row / size, row % size);
                    head * size + within / 2 + within % 2 * (size / 2)
                };
                (0..rows).flat_map(|row| &values[source(row) * width..][..width]).copied().collect()
            }
        }
    }
}

/// A family of decoders that llama.cpp computes as we do.
struct Row {
    /// The library's name of the family.
    model_type: &'static str,
    /// llama.cpp's name of the family.
    name: &'static str,
    /// Whether rotations use interleaved pairs, with rows of queries and keys stored in that order.
    rotates_neighbours: bool,
    scalings: &'static [RopeScaling],
    /// Refuses options that llama.cpp computes differently.
    check: fn(&DecoderConfig) -> Result<(), String>,
    /// Metadata besides the common ones, under the architecture's name.
    own: fn(&DecoderConfig) -> Vec<(&'static str, Value)>,
}

const ROWS: [Row; 5] = [
    Row {
        model_type: "llama",
        name: "llama",
        rotates_neighbours: true,
        scalings: &[RopeScaling::None, RopeScaling::Linear, RopeScaling::Llama3, RopeScaling::Yarn],
        check: |_| Ok(()),
        own: |c| vec![("vocab_size", u32(c.vocab)), ("rope.dimension_count", u32(c.head_size()))],
    },
    Row {
        model_type: "qwen2",
        name: "qwen2",
        rotates_neighbours: false,
        scalings: PLAIN_OR_YARN,
        check: |c| {
            no_window(c)?;
            match c.heads * c.head_size() == c.width {
                true => Ok(()),
                false => Err(format!(
                    "its {} heads of {} are not as wide as model.width = {}, and llama.cpp's qwen2 has no others",
                    c.heads,
                    c.head_size(),
                    c.width
                )),
            }
        },
        own: |_| vec![],
    },
    Row {
        model_type: "qwen3",
        name: "qwen3",
        rotates_neighbours: false,
        scalings: PLAIN_OR_YARN,
        check: |c| no_window(c).and_then(|()| no_bias(c)),
        own: |_| vec![],
    },
    Row {
        model_type: "gemma2",
        name: "gemma2",
        rotates_neighbours: false,
        scalings: PLAIN_OR_LINEAR,
        check: |c| {
            of_gemma(c, 46)?;
            match (c.score_cap, c.logit_cap, c.tied) {
                (Some(_), Some(_), true) => Ok(()),
                (_, _, false) => Err("its head is not tied to the embedding, as llama.cpp's gemma2 has it".into()),
                _ => Err("llama.cpp's gemma2 caps scores and logits, and it lacks model.score_cap or model.logit_cap".into()),
            }
        },
        own: |c| {
            let cap = |cap: Option<f64>| Value::F32(cap.unwrap_or_default() as f32);
            let caps =
                [("attn_logit_softcapping", cap(c.score_cap)), ("final_logit_softcapping", cap(c.logit_cap))];
            let window = [("attention.sliding_window", u32(c.window.unwrap_or(c.context)))];
            caps.into_iter().chain(window).chain(windows(c, 2)).collect()
        },
    },
    Row {
        model_type: "gemma3_text",
        name: "gemma3",
        rotates_neighbours: false,
        scalings: PLAIN_OR_LINEAR,
        check: |c| of_gemma(c, 62),
        own: |c| {
            let mut own = vec![];
            own.extend(c.logit_cap.map(|cap| ("final_logit_softcapping", Value::F32(cap as f32))));
            if let Some(window) = c.window {
                let theta = c.rope_local_theta.unwrap_or(c.rope_theta);
                own.extend([
                    ("attention.sliding_window", u32(window)),
                    ("rope.freq_base_swa", Value::F32(theta as f32)),
                ]);
                own.extend(windows(c, 6));
            }
            own
        },
    },
];

const PLAIN_OR_YARN: &[RopeScaling] = &[RopeScaling::None, RopeScaling::Linear, RopeScaling::Yarn];
const PLAIN_OR_LINEAR: &[RopeScaling] = &[RopeScaling::None, RopeScaling::Linear];

/// Our weights of a block, and their names in a file.
const BLOCK: [(&str, &str); 13] = [
    ("attn_norm", "attn_norm"),
    ("attn.wq", "attn_q"),
    ("attn.wk", "attn_k"),
    ("attn.wv", "attn_v"),
    ("attn.q_norm", "attn_q_norm"),
    ("attn.k_norm", "attn_k_norm"),
    ("attn.wo", "attn_output"),
    ("attn_post_norm", "post_attention_norm"),
    ("ffn_norm", "ffn_norm"),
    ("ffn.gate", "ffn_gate"),
    ("ffn.up", "ffn_up"),
    ("ffn.down", "ffn_down"),
    ("ffn_post_norm", "post_ffw_norm"),
];

/// The supported families, by the library's names.
pub fn families() -> String {
    ROWS.map(|row| row.model_type).join(", ")
}

/// Describes a decoder, or returns a sentence that names the unsupported key.
pub fn describe(c: &DecoderConfig) -> Result<Described, String> {
    if c.vision.is_some() {
        return Err("it sees images, and GGUF files are written of models of text alone".into());
    }
    if c.head == Head::Classes {
        return Err("it has a head of classes, and GGUF files are written of models that write text".into());
    }
    let architecture = Architecture::of(c)?;
    let Some(row) = ROWS.iter().find(|row| row.model_type == architecture.model_type) else {
        return Err(format!(
            "it is a {}, and GGUF files are written of these families: {}",
            architecture.model_type,
            families()
        ));
    };
    if !row.scalings.contains(&c.rope_scaling) {
        let known: Vec<&str> = row.scalings.iter().map(|scaling| scaling.name()).collect();
        return Err(format!(
            "model.rope_scaling is {}, and llama.cpp's {} has {}",
            c.rope_scaling,
            row.name,
            known.join(", ")
        ));
    }
    (row.check)(c)?;
    let own = common(c).into_iter().chain(rope(c)).chain((row.own)(c));
    let metadata = own.map(|(key, value)| (format!("{}.{key}", row.name), value)).collect();
    let mut tensors: Vec<Tensor> =
        llama::weight_names(c).into_iter().map(|(path, _)| tensor(c, row, path)).collect();
    if c.rope_scaling == RopeScaling::Llama3 {
        tensors
            .push(Tensor { name: "rope_freqs.weight".into(), values: Values::Vector(frequency_divisors(c)) });
    }
    Ok(Described { architecture: row.name, metadata, tensors })
}

fn tensor(c: &DecoderConfig, row: &Row, path: String) -> Tensor {
    let (weight, end) = path.strip_suffix("_bias").map_or((&*path, "weight"), |weight| (weight, "bias"));
    let name = match weight {
        "embed.weight" => "token_embd".to_string(),
        "norm" => "output_norm".to_string(),
        HEAD => "output".to_string(),
        of_block => {
            let inner = of_block.strip_prefix("layers.").and_then(|rest| rest.split_once('.'));
            let (layer, inner) = inner.expect("a weight of a block has its number");
            let known = BLOCK.iter().find(|(ours, _)| *ours == inner);
            format!("blk.{layer}.{}", known.expect("every weight of these families has a name").1)
        }
    };
    let change = match () {
        () if weight.ends_with("norm") && c.norm_weight == NormWeights::OnePlus => Change::AddOne,
        () if row.rotates_neighbours && weight.ends_with("attn.wq") => Change::Interleave { heads: c.heads },
        () if row.rotates_neighbours && weight.ends_with("attn.wk") => {
            Change::Interleave { heads: c.kv_heads() }
        }
        () => Change::None,
    };
    Tensor { name: format!("{name}.{end}"), values: Values::Weight { path, change } }
}

/// The metadata that all have in common.
fn common(c: &DecoderConfig) -> Vec<(&'static str, Value)> {
    vec![
        ("context_length", u32(c.context)),
        ("embedding_length", u32(c.width)),
        ("block_count", u32(c.layers)),
        ("feed_forward_length", u32(c.ffn)),
        ("attention.head_count", u32(c.heads)),
        ("attention.head_count_kv", u32(c.kv_heads())),
        ("attention.key_length", u32(c.head_size())),
        ("attention.value_length", u32(c.head_size())),
        ("attention.layer_norm_rms_epsilon", Value::F32(c.norm_eps as f32)),
    ]
}

/// Metadata of rotations. Llama 3 scaling has no metadata: it is a tensor.
fn rope(c: &DecoderConfig) -> Vec<(&'static str, Value)> {
    let mut rope = vec![("rope.freq_base", Value::F32(c.rope_theta as f32))];
    let factor = c.rope_factor.unwrap_or(1.0);
    if matches!(c.rope_scaling, RopeScaling::Linear | RopeScaling::Yarn) {
        rope.push(("rope.scaling.type", Value::String(c.rope_scaling.name().into())));
        rope.push(("rope.scaling.factor", Value::F32(factor as f32)));
    }
    if c.rope_scaling == RopeScaling::Yarn {
        let original = c.rope_original_context.unwrap_or(c.context);
        rope.push(("rope.scaling.original_context_length", u32(original)));
        rope.push(("rope.scaling.yarn_beta_fast", Value::F32(c.rope_beta_fast as f32)));
        rope.push(("rope.scaling.yarn_beta_slow", Value::F32(c.rope_beta_slow as f32)));
        // The format's factor on cosines and sines is multiplied onto the paper's.
        let beside = c.rope_attention_factor.map(|amplitude| amplitude / (1.0 + 0.1 * factor.ln()));
        rope.extend(beside.map(|beside| ("rope.scaling.attn_factor", Value::F32(beside as f32))));
    }
    rope
}

/// The factor by which scaling slows each pair of a head.
fn frequency_divisors(c: &DecoderConfig) -> Vec<f32> {
    let half = c.head_size() / 2;
    let stretched = c.frequencies(0);
    let plain = Frequencies::from(stretched.theta).turns(half);
    plain.iter().zip(stretched.turns(half)).map(|(plain, turn)| (plain / turn) as f32).collect()
}

/// The layers with a window, unless all but every `usual`-th have one, which is llama.cpp's default.
fn windows(c: &DecoderConfig, usual: usize) -> Option<(&'static str, Value)> {
    let local: Vec<bool> = (0..c.layers).map(|layer| c.is_local(layer)).collect();
    let is_usual = local.iter().enumerate().all(|(layer, local)| *local == (layer % usual < usual - 1));
    (!is_usual).then_some(("attention.sliding_window_pattern", Value::Bools(local)))
}

fn no_window(c: &DecoderConfig) -> Result<(), String> {
    match c.window {
        Some(window) => Err(format!("model.window is {window}, and llama.cpp's Qwen sees everything")),
        None => Ok(()),
    }
}

fn no_bias(c: &DecoderConfig) -> Result<(), String> {
    match c.bias {
        Bias::None => Ok(()),
        bias => Err(format!("model.bias is {bias}, and llama.cpp's form of it has none")),
    }
}

/// llama.cpp divides scores by the root of the head size, but for the largest model, known by its layers, by the root of width
/// / heads; and it multiplies embeddings by the unrounded root of the width.
fn of_gemma(c: &DecoderConfig, layers_of_27b: usize) -> Result<(), String> {
    no_bias(c)?;
    if c.attention == Attention::Bidirectional {
        return Err("model.attention is bidirectional, and llama.cpp's Gemma is causal".into());
    }
    let wanted = if c.layers == layers_of_27b { c.width / c.heads } else { c.head_size() };
    if c.score_size.unwrap_or(c.head_size()) != wanted {
        return Err(format!(
            "model.score_size is {}, and llama.cpp's Gemma of {} layers divides scores by the root of {wanted}",
            c.score_size.unwrap_or(c.head_size()),
            c.layers
        ));
    }
    let roots = ["float32", "float16", "bfloat16"].map(|dtype| gemma::embed_scale(c.width, dtype) as f32);
    match roots.contains(&(c.embed_scale as f32)) {
        true => Ok(()),
        false => Err(format!(
            "model.embed_scale is {}, and llama.cpp's Gemma multiplies embeddings by the root of the width, {}",
            c.embed_scale, roots[0]
        )),
    }
}

fn u32(number: usize) -> Value {
    Value::U32(u32::try_from(number).expect("extents of a model fit 32 bits"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::build;
    use crate::registry::Family;

    /// A small decoder of each family.
    fn small(model_type: &str) -> DecoderConfig {
        let plain = DecoderConfig {
            width: 64,
            layers: 3,
            heads: 4,
            kv_heads: Some(2),
            ffn: 96,
            vocab: 40,
            context: 32,
            tied: true,
            ..DecoderConfig::default()
        };
        let gemma = DecoderConfig {
            norm_weight: NormWeights::OnePlus,
            post_norms: true,
            activation: crate::config::Activation::Geglu,
            window: Some(8),
            global_every: Some(2),
            embed_scale: 8.0,
            ..plain.clone()
        };
        match model_type {
            "llama" => plain,
            "qwen2" => DecoderConfig { bias: Bias::Qkv, ..plain },
            "qwen3" => DecoderConfig { qk_norm: true, ..plain },
            "gemma2" => DecoderConfig { score_cap: Some(50.0), logit_cap: Some(30.0), ..gemma },
            _ => {
                DecoderConfig { qk_norm: true, rope_local_theta: Some(100.0), global_every: Some(6), ..gemma }
            }
        }
    }

    fn value<'d>(described: &'d Described, key: &str) -> Option<&'d Value> {
        let key = format!("{}.{key}", described.architecture);
        described.metadata.iter().find(|(known, _)| *known == key).map(|(_, value)| value)
    }

    #[test]
    fn every_weight_of_every_family_has_its_tensor() {
        for row in &ROWS {
            for tied in [true, false] {
                if row.model_type == "gemma2" && !tied {
                    continue;
                }
                let model = DecoderConfig { tied, ..small(row.model_type) };
                let described = describe(&model).expect(row.model_type);
                assert_eq!(described.architecture, row.name);
                let graph = build(&model, model.least());
                let mut ours: Vec<_> = graph
                    .slots
                    .iter()
                    .filter(|slot| slot.class.is_parameter())
                    .map(|slot| slot.path.clone())
                    .collect();
                let path = |tensor: &Tensor| match &tensor.values {
                    Values::Weight { path, .. } => path.clone(),
                    Values::Vector(_) => panic!("no such tensor"),
                };
                let mut theirs: Vec<_> = described.tensors.iter().map(path).collect();
                ours.sort();
                theirs.sort();
                assert_eq!(ours, theirs, "{}", row.model_type);
                let names: Vec<&str> = described.tensors.iter().map(|tensor| &*tensor.name).collect();
                assert_eq!(names.contains(&"output.weight"), !tied);
                assert!(names.contains(&"token_embd.weight") && names.contains(&"blk.2.ffn_down.weight"));
                let has_bias = row.model_type == "qwen2";
                assert_eq!(names.contains(&"blk.0.attn_q.bias"), has_bias);
            }
        }
    }

    #[test]
    fn windows_are_written_where_llama_cpp_has_other_defaults() {
        let local = |described: &Described| value(described, "attention.sliding_window_pattern").cloned();
        assert_eq!(local(&describe(&small("gemma2")).unwrap()), None, "every other layer");
        let six = DecoderConfig { layers: 12, ..small("gemma3_text") };
        assert_eq!(local(&describe(&six).unwrap()), None, "five of six");
        let own = DecoderConfig { global_every: None, global_layers: Some(vec![0]), ..small("gemma3_text") };
        assert_eq!(local(&describe(&own).unwrap()), Some(Value::Bools(vec![false, true, true])));
        let none = DecoderConfig {
            window: None,
            global_every: None,
            rope_local_theta: None,
            ..small("gemma3_text")
        };
        assert_eq!(value(&describe(&none).unwrap(), "attention.sliding_window"), None);
    }

    /// The readers' formula: each frequency is divided by its factor.
    #[test]
    fn a_stretch_by_llama3s_rule_is_a_tensor() {
        let stretched = DecoderConfig {
            rope_scaling: RopeScaling::Llama3,
            rope_factor: Some(8.0),
            rope_original_context: Some(16),
            rope_theta: 5e5,
            ..small("llama")
        };
        let described = describe(&stretched).unwrap();
        let last = described.tensors.last().unwrap();
        let Values::Vector(factors) = &last.values else { panic!("{last:?}") };
        assert_eq!((last.name.as_str(), factors.len()), ("rope_freqs.weight", 8));
        assert_eq!(factors[7], 8.0, "the slowest turns are stretched whole");
        assert!(value(&described, "rope.scaling.type").is_none());
        let refused = describe(&DecoderConfig { qk_norm: true, ..stretched }).unwrap_err();
        assert_eq!(refused, "model.rope_scaling is llama3, and llama.cpp's qwen3 has none, linear, yarn");
    }

    #[test]
    fn heads_are_interleaved_and_norms_get_their_one() {
        let rows: Vec<f32> = (0..8).flat_map(|row| [row as f32, row as f32 + 0.5]).collect();
        let interleaved = Change::Interleave { heads: 2 }.apply(rows, 8);
        let firsts: Vec<f32> = interleaved.iter().step_by(2).copied().collect();
        assert_eq!(firsts, [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
        assert_eq!(interleaved[3], 2.5, "a row stays whole");
        assert_eq!(Change::AddOne.apply(vec![0.5, -1.0], 1), [1.5, 0.0]);
    }

    #[test]
    fn differences_from_llama_cpp_are_refused_by_name() {
        let refused = |model: DecoderConfig| describe(&model).unwrap_err();
        let classes = DecoderConfig { head: Head::Classes, classes: Some(2), ..small("llama") };
        assert!(refused(classes).contains("head of classes"));
        let windowed = DecoderConfig { window: Some(8), ..small("qwen3") };
        assert!(refused(windowed).contains("model.window is 8"));
        let biased = DecoderConfig { bias: Bias::Attention, ..small("qwen3") };
        assert!(refused(biased).contains("model.bias is attention"));
        let wide = DecoderConfig { head_size: Some(32), ..small("qwen2") };
        assert!(refused(wide).contains("4 heads of 32 are not as wide"));
        let both = DecoderConfig { attention: Attention::Bidirectional, ..small("gemma3_text") };
        assert!(refused(both).contains("is causal"));
        let scored = DecoderConfig { score_size: Some(64), ..small("gemma3_text") };
        assert!(refused(scored).contains("divides scores by the root of 16"));
        let scaled = DecoderConfig { embed_scale: 7.0, ..small("gemma3_text") };
        assert!(refused(scaled).contains("root of the width, 8"));
        let other = DecoderConfig { positions: crate::config::Positions::Learned, ..small("llama") };
        assert!(describe(&other).is_err());
        let granite = DecoderConfig { residual_scale: 0.5, ..small("llama") };
        assert_eq!(
            refused(granite),
            "it is a granite, and GGUF files are written of these families: llama, qwen2, qwen3, gemma2, gemma3_text"
        );
    }
}
