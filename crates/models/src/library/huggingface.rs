//! Decoders as the `transformers` library describes them: which of its architectures a `config.json` or a config is.
//!
//! Pure: values in, values out. A field that would change numbers and that the decoder does not have is refused by
//! name; fields of training (dropout, initialisation) and of the library itself are not the model's and are left alone.

use serde_json::{Value, json};

use super::fields::Fields;
use super::llama::weight_names;
use super::processor::{self, Processor};
use super::stored::Stored;
use super::{Published, class_heads, fovea, gemma, gpt2, llama, qwen3_vl};
use crate::config::{
    Activation, Attention, Bias, DecoderConfig, Head, Norm, NormWeights, Positions, RopePairs, Vision,
};

/// What a `config.json` says.
#[derive(Clone, Debug, PartialEq)]
pub struct Described {
    /// The decoder. `context` is the library's `max_position_embeddings`.
    pub model: DecoderConfig,
    /// Tokens a text may begin and end with, as far as the file names them.
    pub bos: Vec<u32>,
    pub eos: Vec<u32>,
    /// The names of its classes in the order of its outputs, where it has a head of classes.
    pub classes: Vec<String>,
}

/// The architectures that the decoder equals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Architecture {
    Llama,
    Qwen3,
    Gpt2,
    Gemma3,
}

impl Architecture {
    const ALL: [Architecture; 4] =
        [Architecture::Llama, Architecture::Qwen3, Architecture::Gpt2, Architecture::Gemma3];

    /// The one that a decoder equals, or the key that is in the way.
    fn of(model: &DecoderConfig) -> Result<Architecture, String> {
        if model.positions == Positions::Learned {
            return gpt2::stored(model).map(|_| Architecture::Gpt2);
        }
        if model.post_norms || model.norm_weight == NormWeights::OnePlus {
            return gemma::fits(model).map(|()| Architecture::Gemma3);
        }
        let architecture = if model.qk_norm { Architecture::Qwen3 } else { Architecture::Llama };
        let bias = match architecture {
            Architecture::Llama => matches!(model.bias, Bias::None | Bias::Attention | Bias::All),
            _ => matches!(model.bias, Bias::None | Bias::Attention),
        };
        let asked = [
            ("norm", model.norm == Norm::Rms, model.norm.to_string()),
            ("norm_bias", !model.norm_bias, model.norm_bias.to_string()),
            ("activation", model.activation == Activation::Swiglu, model.activation.to_string()),
            ("positions", model.positions == Positions::Rope, model.positions.to_string()),
            ("rope_pairs", model.rope_pairs == RopePairs::Half, model.rope_pairs.to_string()),
            ("bias", bias, model.bias.to_string()),
            ("embed_scale", model.embed_scale == 1.0, model.embed_scale.to_string()),
            ("attention", model.attention == Attention::Causal, model.attention.to_string()),
            ("window", model.window.is_none(), model.window.unwrap_or(0).to_string()),
            ("score_size", model.score_size.is_none(), model.score_size.unwrap_or(0).to_string()),
        ];
        match asked.into_iter().find(|(_, fits, _)| !fits) {
            Some((key, _, value)) => {
                let known = Architecture::ALL.map(|known| known.class(Head::Tokens)).join(", ");
                Err(format!("a decoder with model.{key} = {value} is none of {known}"))
            }
            None => Ok(architecture),
        }
    }

    fn model_type(self) -> &'static str {
        match self {
            Architecture::Llama => "llama",
            Architecture::Qwen3 => "qwen3",
            Architecture::Gpt2 => "gpt2",
            Architecture::Gemma3 => "gemma3_text",
        }
    }

    fn class(self, head: Head) -> &'static str {
        match (self, head) {
            (Architecture::Llama, Head::Tokens) => "LlamaForCausalLM",
            (Architecture::Qwen3, Head::Tokens) => "Qwen3ForCausalLM",
            (Architecture::Gpt2, Head::Tokens) => "GPT2LMHeadModel",
            (Architecture::Gemma3, Head::Tokens) => "Gemma3ForCausalLM",
            (Architecture::Llama, Head::Classes) => "LlamaForSequenceClassification",
            (Architecture::Qwen3, Head::Classes) => "Qwen3ForSequenceClassification",
            (Architecture::Gpt2, Head::Classes) => "GPT2ForSequenceClassification",
            (Architecture::Gemma3, Head::Classes) => "Gemma3TextForSequenceClassification",
        }
    }
}

/// Reads a parsed `config.json`, or says in a sentence which field stands in the way.
pub fn read(config: &Value) -> Result<Described, String> {
    let Some(fields) = config.as_object() else {
        return Err("it is not a JSON object".into());
    };
    let outer = Fields(fields);
    let f = outer.text_part()?;
    let (model, classes) = match outer.get("model_type").and_then(Value::as_str) {
        Some(qwen3_vl::MODEL_TYPE) => (qwen3_vl::read(&outer)?, vec![]),
        Some(fovea::MODEL_TYPE) => (fovea::read(&outer)?, vec![]),
        _ => read_text(&outer, &f)?,
    };
    model.validate().map_err(|sentence| format!("it describes no model: {sentence}"))?;
    let tokens = |name: &str| match outer.tokens(name)? {
        none if none.is_empty() => f.tokens(name),
        found => Ok(found),
    };
    Ok(Described { model, bos: tokens("bos_token_id")?, eos: tokens("eos_token_id")?, classes })
}

/// A model of text alone, with the names of its classes.
fn read_text(outer: &Fields<'_>, f: &Fields<'_>) -> Result<(DecoderConfig, Vec<String>), String> {
    let (architecture, head) = f.architecture()?;
    f.refuse_unsupported(architecture)?;
    let model = match architecture {
        Architecture::Gpt2 => gpt2::read(f)?,
        Architecture::Llama | Architecture::Qwen3 => llama::read(f, architecture == Architecture::Qwen3)?,
        Architecture::Gemma3 => {
            let named = |f: &Fields<'_>| {
                f.get("dtype").or(f.get("torch_dtype")).and_then(Value::as_str).map(str::to_string)
            };
            gemma::read(f, named(outer).or(named(f)).as_deref())?
        }
    };
    match head {
        Head::Classes => Ok((class_heads::read(f, model)?, class_heads::names(f)?)),
        Head::Tokens => Ok((model, vec![])),
    }
}

/// Other names that a weight may have in a file: of a base model without its head, or of the text part of a model that
/// sees images as well.
pub fn other_names(name: &str) -> Vec<String> {
    let bare = name.strip_prefix("transformer.").map(str::to_string);
    bare.into_iter().chain(gemma::other_names(name)).collect()
}

/// Where every weight of a decoder lies in the library's checkpoints.
pub fn stored(model: &DecoderConfig, shape: impl Fn(&str) -> Vec<usize>) -> Result<Vec<Stored>, String> {
    if Architecture::of(model)? == Architecture::Gpt2 {
        return gpt2::stored(model);
    }
    match &model.vision {
        Some(Vision::Qwen3Vl(vision)) => {
            return seeing(model).map(|()| qwen3_vl::stored(model, vision, shape));
        }
        Some(Vision::Fovea(vision)) => {
            return looking(model).and_then(|()| fovea::stored(model, vision, shape));
        }
        None => {}
    }
    let plain = |(ours, theirs): (String, String)| {
        let dims = shape(&ours);
        Stored::whole(ours, theirs, dims)
    };
    Ok(weight_names(model).into_iter().map(plain).collect())
}

/// Whether the text of a decoder that sees images is one that the library has beside a tower.
fn seeing(model: &DecoderConfig) -> Result<(), String> {
    match Architecture::of(model)? {
        Architecture::Qwen3 => Ok(()),
        _ => Err(format!(
            "a decoder with `model.vision` and model.qk_norm = {} is no {}",
            model.qk_norm,
            qwen3_vl::CLASS
        )),
    }
}

/// Whether the text of a decoder that looks at frames is one that the authors' files have.
fn looking(model: &DecoderConfig) -> Result<(), String> {
    match Architecture::of(model)? {
        Architecture::Llama => Ok(()),
        other => Err(format!(
            "a decoder with model.vision.kind=fovea is published beside a Llama, and this one is a {}",
            other.model_type()
        )),
    }
}

/// Whether a tensor of a checkpoint follows from the rest: a tied head that is stored all the same, frequencies of
/// rotations and masks that old versions stored. A model with a head of classes has no use for the other one.
pub fn is_redundant(model: &DecoderConfig, name: &str) -> bool {
    match model.vision {
        Some(Vision::Fovea(_)) => fovea::is_redundant(model, name),
        _ => is_redundant_text(model, name),
    }
}

pub(super) fn is_redundant_text(model: &DecoderConfig, name: &str) -> bool {
    let is_head = ["lm_head.weight", "language_model.lm_head.weight"].contains(&name);
    (is_head && (model.tied || model.head == Head::Classes))
        || [".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"].iter().any(|end| name.ends_with(end))
}

/// The `config.json` of a decoder whose texts begin and end with these tokens, or the key that keeps it from being one
/// of the library's.
pub fn write(model: &DecoderConfig, dtype: &str, bos: &[u32], eos: &[u32]) -> Result<Value, String> {
    let architecture = Architecture::of(model)?;
    let one_or_more = |tokens: &[u32]| match tokens {
        [] => Value::Null,
        [one] => json!(one),
        more => json!(more),
    };
    let mut config = json!({
        "architectures": [architecture.class(model.head)],
        "model_type": architecture.model_type(),
        "vocab_size": model.vocab,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied,
        "use_cache": true,
        "bos_token_id": one_or_more(bos),
        "eos_token_id": one_or_more(eos),
        "torch_dtype": dtype,
        "dtype": dtype,
    });
    let fields = config.as_object_mut().expect("an object was just made");
    match &model.vision {
        Some(Vision::Qwen3Vl(vision)) => {
            seeing(model)?;
            return qwen3_vl::write(model, vision, std::mem::take(fields));
        }
        Some(Vision::Fovea(vision)) => {
            looking(model)?;
            return fovea::write(model, vision, std::mem::take(fields));
        }
        None => {}
    }
    let more = match architecture {
        Architecture::Gpt2 => gpt2::write(model),
        Architecture::Llama | Architecture::Qwen3 => llama::write(model),
        Architecture::Gemma3 => gemma::write(model, dtype)?,
    };
    fields.extend(more.as_object().cloned().expect("an object was just made"));
    if model.head == Head::Classes {
        fields.extend(class_heads::write(model));
    }
    if architecture == Architecture::Llama {
        fields.insert("mlp_bias".into(), json!(model.bias == Bias::All));
    }
    Ok(config)
}

impl Published for DecoderConfig {
    fn stored(&self, shape: &dyn Fn(&str) -> Vec<usize>) -> Result<Vec<Stored>, String> {
        stored(self, shape)
    }

    fn other_names(&self, name: &str) -> Vec<String> {
        match self.vision {
            Some(Vision::Fovea(_)) => fovea::other_names(name),
            _ => other_names(name),
        }
    }

    fn is_redundant(&self, name: &str) -> bool {
        is_redundant(self, name)
    }

    fn write(&self, dtype: &str, bos: &[u32], eos: &[u32]) -> Result<Value, String> {
        write(self, dtype, bos, eos)
    }

    fn processor(&self, processor: &Processor) -> Option<Value> {
        match self.vision.as_ref()? {
            Vision::Qwen3Vl(vision) => Some(qwen3_vl::write_processor(vision, processor.area)),
            Vision::Fovea(vision) => Some(processor::write(&vision.vit(), processor)),
        }
    }
}

impl<'a> Fields<'a> {
    /// The fields of an object within.
    pub(super) fn part(&self, name: &str) -> Result<Fields<'a>, String> {
        match self.get(name).map(Value::as_object) {
            Some(Some(fields)) => Ok(Fields(fields)),
            Some(None) => Err(format!("its `{name}` is not an object")),
            None => Err(format!("it has no `{name}`")),
        }
    }

    /// The fields of the text model: all of them, or of a model that sees images as well those of its part.
    fn text_part(&self) -> Result<Fields<'a>, String> {
        let seeing = [qwen3_vl::MODEL_TYPE, fovea::MODEL_TYPE];
        if self.get("model_type").is_some_and(|kind| seeing.iter().any(|seeing| kind == seeing)) {
            return self.part("text_config");
        }
        if self.get("model_type").is_none_or(|kind| kind != "gemma3") {
            return Ok(Fields(self.0));
        }
        let class = self.get("architectures").and_then(|classes| classes.get(0)).and_then(Value::as_str);
        match class {
            None | Some("Gemma3ForConditionalGeneration") => {}
            Some(class) => {
                return Err(format!(
                    "its `architectures` says {class}, and of gemma3 models only Gemma3ForConditionalGeneration is read"
                ));
            }
        }
        match self.get("text_config").map(Value::as_object) {
            Some(Some(fields)) => Ok(Fields(fields)),
            Some(None) => Err("its `text_config` is not an object".into()),
            None => Err("it has no `text_config`, and of a gemma3 the text part is read".into()),
        }
    }

    fn architecture(&self) -> Result<(Architecture, Head), String> {
        let known = "llama, qwen3, qwen3_vl, gpt2, gemma3_text and gemma3";
        let Some(found) = self.get("model_type").and_then(Value::as_str) else {
            return Err(format!("it has no `model_type`; {known} are read"));
        };
        let architecture = Architecture::ALL.into_iter().find(|a| a.model_type() == found);
        let unknown = || {
            let relative = qwen3_vl::refused(found);
            relative.unwrap_or_else(|| format!("its `model_type` is {found:?}, and only {known} are read"))
        };
        let architecture = architecture.ok_or_else(unknown)?;
        let classes = self.get("architectures").and_then(Value::as_array);
        let Some(class) = classes.and_then(|classes| classes.first()).and_then(Value::as_str) else {
            return Ok((architecture, Head::Tokens));
        };
        match Head::ALL.iter().find(|head| architecture.class(**head) == class) {
            Some(head) => Ok((architecture, *head)),
            None => Err(format!(
                "its `architectures` says {class}, and of {found} models only {} and {} are read",
                architecture.class(Head::Tokens),
                architecture.class(Head::Classes)
            )),
        }
    }

    /// The same of the text beside a tower.
    pub(super) fn refuse_unsupported_qwen3(&self) -> Result<(), String> {
        self.refuse_unsupported(Architecture::Qwen3)
    }

    /// Fields with which the library would compute something else than the decoder does.
    fn refuse_unsupported(&self, architecture: Architecture) -> Result<(), String> {
        let refused = |name: &str, value: &Value, supported: &str| {
            let shown = value.to_string();
            let shown = if shown.len() > 60 { "given".to_string() } else { shown };
            Err(format!("its `{name}` is {shown}, and here there is only {supported}"))
        };
        let own_activation = matches!(architecture, Architecture::Gpt2 | Architecture::Gemma3);
        if let Some(value) = self.get("quantization_config") {
            return refused("quantization_config", value, "weights that are not quantised");
        }
        if let Some(value) = self.get("hidden_act").filter(|value| *value != "silu" && !own_activation) {
            return refused("hidden_act", value, "silu for this architecture");
        }
        if let Some(value) = self.get("partial_rotary_factor").filter(|value| value.as_f64() != Some(1.0)) {
            return refused("partial_rotary_factor", value, "rotation of whole heads");
        }
        if architecture == Architecture::Gpt2 {
            // What the library reads beside the dimensions, with the value that the decoder has.
            for (name, supported) in [
                ("scale_attn_weights", true),
                ("scale_attn_by_inverse_layer_idx", false),
                ("add_cross_attention", false),
            ] {
                if let Some(value) = self.get(name).filter(|value| **value != json!(supported)) {
                    return refused(name, value, &supported.to_string());
                }
            }
        }
        if architecture == Architecture::Qwen3 {
            if let Some(value) = self.get("use_sliding_window").filter(|value| **value != json!(false)) {
                return refused("use_sliding_window", value, "attention over the whole text");
            }
            let layers = self.get("layer_types").and_then(Value::as_array).into_iter().flatten();
            if let Some(kind) = layers.into_iter().find(|kind| *kind != "full_attention") {
                return refused("layer_types", kind, "full_attention");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Map;

    use super::*;

    fn llama() -> Value {
        json!({
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 61, "hidden_size": 36,
            "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 40, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 64, "hidden_act": "silu", "tie_word_embeddings": true,
            "rope_theta": 100000.0, "rope_scaling": null, "bos_token_id": 1, "eos_token_id": [2, 3],
        })
    }

    fn changed(change: impl Fn(&mut Map<String, Value>)) -> Value {
        let mut config = llama();
        change(config.as_object_mut().unwrap());
        config
    }

    #[test]
    fn both_forms_of_rope_read_alike() {
        let old = read(&llama()).unwrap();
        assert_eq!((old.model.rope_theta, old.model.kv_heads(), old.model.head_size()), (1e5, 6, 6));
        assert_eq!((old.bos.as_slice(), old.eos.as_slice()), (&[1][..], &[2, 3][..]));
        let new = changed(|fields| {
            fields.remove("rope_theta");
            fields
                .insert("rope_parameters".into(), json!({ "rope_type": "default", "rope_theta": 100000.0 }));
        });
        assert_eq!(read(&new).unwrap(), old);
    }

    #[test]
    fn what_a_qwen3_leaves_out_is_the_librarys_default() {
        let config = changed(|fields| {
            fields.insert("model_type".into(), json!("qwen3"));
            fields.insert("num_attention_heads".into(), json!(64));
            fields.remove("architectures");
            fields.remove("tie_word_embeddings");
        });
        let model = read(&config).unwrap().model;
        assert_eq!((model.kv_heads(), model.head_size()), (32, 128));
        assert!(model.qk_norm && !model.tied);
    }

    #[test]
    fn what_is_written_reads_back() {
        for qk_norm in [false, true] {
            for tied in [false, true] {
                let model = DecoderConfig { qk_norm, tied, ..read(&llama()).unwrap().model };
                let written = write(&model, "float32", &[5], &[6, 7]).unwrap();
                let (bos, eos) = (vec![5], vec![6, 7]);
                assert_eq!(read(&written).unwrap(), Described { model, bos, eos, classes: vec![] });
            }
        }
    }

    #[test]
    fn scalings_and_biases_read_in_both_forms_and_are_written_back() {
        let scalings = [
            json!({ "rope_type": "linear", "factor": 3.0 }),
            json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 5.0,
                    "original_max_position_embeddings": 32 }),
            json!({ "rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.25,
                    "original_max_position_embeddings": 16 }),
        ];
        for scaling in scalings {
            let old = changed(|fields| drop(fields.insert("rope_scaling".into(), scaling.clone())));
            let mut both = scaling.clone();
            both["rope_theta"] = json!(100000.0);
            let new = changed(|fields| {
                fields.remove("rope_theta");
                fields.insert("rope_parameters".into(), both.clone());
            });
            let read_old = read(&old).unwrap();
            assert_eq!(read(&new).unwrap(), read_old);
            assert_eq!(read_old.model.rope_scaling.name(), scaling["rope_type"].as_str().unwrap());
            let written = write(&read_old.model, "float32", &[1], &[2, 3]).unwrap();
            assert_eq!(read(&written).unwrap(), read_old);
            assert_eq!(written["rope_scaling"], scaling);
        }
        for (attention, mlp, bias) in [(true, false, Bias::Attention), (true, true, Bias::All)] {
            let config = changed(|fields| {
                fields.insert("attention_bias".into(), json!(attention));
                fields.insert("mlp_bias".into(), json!(mlp));
            });
            let described = read(&config).unwrap();
            assert_eq!(described.model.bias, bias);
            assert_eq!(read(&write(&described.model, "float32", &[1], &[2, 3]).unwrap()).unwrap(), described);
        }
    }

    #[test]
    fn a_gpt2_reads_and_is_written_back() {
        let config = json!({
            "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 24, "n_layer": 2, "n_head": 4,
            "n_positions": 32, "vocab_size": 61, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
            "bos_token_id": 60, "eos_token_id": 60,
        });
        let described = read(&config).unwrap();
        let model = &described.model;
        assert_eq!((model.ffn, model.context, model.bias), (96, 32, Bias::All));
        assert!(model.norm_bias && model.tied && model.positions == Positions::Learned);
        assert_eq!(read(&write(model, "float32", &[60], &[60]).unwrap()).unwrap(), described);
        let refused = |name: &str, value: Value| {
            let mut config = config.clone();
            config[name] = value;
            read(&config).unwrap_err()
        };
        assert!(refused("activation_function", json!("relu")).contains("\"relu\""));
        assert!(
            refused("scale_attn_by_inverse_layer_idx", json!(true)).contains("inverse_layer_idx` is true")
        );
        assert!(refused("tie_word_embeddings", json!(false)).contains("tied head"));
    }

    #[test]
    fn what_would_change_numbers_is_refused_by_name() {
        let cases = [
            (
                "model_type",
                json!("mamba"),
                "`model_type` is \"mamba\", and only llama, qwen3, qwen3_vl, gpt2, gemma3_text and gemma3 are read",
            ),
            ("architectures", json!(["LlamaForTokenClassification"]), "LlamaForTokenClassification"),
            ("hidden_act", json!("gelu"), "`hidden_act` is \"gelu\""),
            ("quantization_config", json!({ "bits": 4 }), "`quantization_config`"),
            ("attention_bias", json!("yes"), "`attention_bias` is \"yes\""),
            ("mlp_bias", json!(true), "`mlp_bias` is true"),
            ("rope_scaling", json!({ "rope_type": "linear" }), "it has no `factor`"),
            ("rope_scaling", json!({ "rope_type": "yarn", "factor": 2.0, "mscale": 1.0 }), "`mscale` is 1.0"),
            ("rope_scaling", json!({ "rope_type": "llama3", "factor": 0.5 }), "`model.rope_factor` is 0.5"),
            ("partial_rotary_factor", json!(0.5), "`partial_rotary_factor` is 0.5"),
            ("rope_scaling", json!({ "rope_type": "longrope", "factor": 2.0 }), "\"longrope\""),
            ("rope_scaling", json!({ "rope_type": 3, "factor": 2.0 }), "its type is 3, which is no name"),
            ("rope_scaling", json!({ "rope_type": ["yarn"], "factor": 2.0 }), "its type is [\"yarn\"]"),
            ("rope_scaling", json!("twice"), "wants to be an object"),
            ("rope_theta", json!("10"), "`rope_theta` is \"10\""),
            ("rope_theta", json!(-1.0), "it describes no model: `model.rope_theta` is -1"),
            ("hidden_size", json!(36.5), "`hidden_size` is 36.5"),
            ("hidden_size", Value::Null, "it has no `hidden_size`"),
            ("num_attention_heads", json!(0), "`num_attention_heads` is 0"),
            ("head_dim", json!(5), "must be even"),
            ("num_key_value_heads", json!(4), "does not divide"),
            ("num_hidden_layers", json!(1e18 as u64), "may be 4096 at most"),
            ("eos_token_id", json!([-1]), "`eos_token_id` is [-1]"),
            ("tie_word_embeddings", json!("yes"), "`tie_word_embeddings` is \"yes\""),
        ];
        for (name, value, words) in cases {
            let sentence =
                read(&changed(|fields| drop(fields.insert(name.into(), value.clone())))).unwrap_err();
            assert!(sentence.contains(words), "{name}: {sentence:?} lacks {words:?}");
        }
        let qwen3 = |name: &str, value: Value| {
            read(&changed(|fields| {
                fields.remove("architectures");
                fields.insert("model_type".into(), json!("qwen3"));
                fields.insert(name.into(), value.clone());
            }))
            .unwrap_err()
        };
        assert!(qwen3("use_sliding_window", json!(true)).contains("`use_sliding_window` is true"));
        let layers = json!(["full_attention", "sliding_attention"]);
        assert!(qwen3("layer_types", layers).contains("`layer_types` is \"sliding_attention\""));
        assert_eq!(read(&json!([])).unwrap_err(), "it is not a JSON object");
    }

    #[test]
    fn decoders_that_are_no_ones_are_refused_by_name() {
        let model = read(&llama()).unwrap().model;
        let refused = |model: DecoderConfig| write(&model, "float32", &[], &[]).unwrap_err();
        let relu2 = DecoderConfig { activation: Activation::Relu2, ..model.clone() };
        assert_eq!(
            refused(relu2),
            "a decoder with model.activation = relu2 is none of LlamaForCausalLM, Qwen3ForCausalLM, \
             GPT2LMHeadModel, Gemma3ForCausalLM"
        );
        let learned = DecoderConfig { positions: Positions::Learned, ..model.clone() };
        assert!(refused(learned).contains("GPT-2 has another `model.norm`"));
        assert!(refused(DecoderConfig { bias: Bias::Qkv, ..model.clone() }).contains("model.bias = qkv"));
        assert!(refused(DecoderConfig { norm: Norm::Layer, ..model.clone() }).contains("model.norm = layer"));
        let pairs = DecoderConfig { rope_pairs: RopePairs::Interleaved, ..model };
        assert!(refused(pairs).contains("model.rope_pairs = interleaved"));
    }
}
