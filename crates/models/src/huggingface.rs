//! The decoder as the `transformers` library describes it: `config.json` to a config and back.
//!
//! Pure: values in, values out. A field that would change numbers and that the decoder does not have is refused by
//! name; fields of training (dropout, initialisation) and of the library itself are not the model's and are left alone.

use serde_json::{Map, Value, json};

use crate::config::{Activation, DecoderConfig, Norm, Positions, RopePairs};

/// What a `config.json` says.
#[derive(Clone, Debug, PartialEq)]
pub struct Described {
    /// The decoder. `context` is the library's `max_position_embeddings`.
    pub model: DecoderConfig,
    /// Tokens a text may begin and end with, as far as the file names them.
    pub bos: Vec<u32>,
    pub eos: Vec<u32>,
}

/// The architectures that the decoder equals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Architecture {
    Llama,
    Qwen3,
}

impl Architecture {
    const ALL: [Architecture; 2] = [Architecture::Llama, Architecture::Qwen3];

    fn model_type(self) -> &'static str {
        match self {
            Architecture::Llama => "llama",
            Architecture::Qwen3 => "qwen3",
        }
    }

    fn class(self) -> &'static str {
        match self {
            Architecture::Llama => "LlamaForCausalLM",
            Architecture::Qwen3 => "Qwen3ForCausalLM",
        }
    }
}

/// Reads a parsed `config.json`, or says in a sentence which field stands in the way.
pub fn read(config: &Value) -> Result<Described, String> {
    let Some(fields) = config.as_object() else {
        return Err("it is not a JSON object".into());
    };
    let f = Fields(fields);
    let architecture = f.architecture()?;
    f.refuse_unsupported(architecture)?;
    let (width, heads) = (f.extent("hidden_size")?, f.extent("num_attention_heads")?);
    // The library's own defaults, by architecture: a file may leave out what equals them.
    let (kv_heads, head_size, positions) = match architecture {
        Architecture::Llama => (heads, width.checked_div(heads).unwrap_or(0), 2048),
        Architecture::Qwen3 => (32, 128, 32768),
    };
    let rope = f.rope()?;
    let model = DecoderConfig {
        width,
        layers: f.extent("num_hidden_layers")?,
        heads,
        kv_heads: Some(f.extent_or("num_key_value_heads", kv_heads)?),
        head_size: Some(f.extent_or("head_dim", head_size)?),
        ffn: f.extent("intermediate_size")?,
        vocab: f.extent("vocab_size")?,
        context: f.extent_or("max_position_embeddings", positions)?,
        norm: Norm::Rms,
        norm_eps: f.number_or("rms_norm_eps", 1e-6)?,
        activation: Activation::Swiglu,
        positions: Positions::Rope,
        rope_theta: rope,
        rope_pairs: RopePairs::Half,
        qk_norm: architecture == Architecture::Qwen3,
        tied: f.flag("tie_word_embeddings")?,
        ..DecoderConfig::default()
    };
    model.validate().map_err(|sentence| format!("it describes no model: {sentence}"))?;
    Ok(Described { model, bos: f.tokens("bos_token_id")?, eos: f.tokens("eos_token_id")? })
}

/// The `config.json` of a decoder, with the given names of other fields laid over it; or what keeps the decoder from
/// being one of the library's.
pub fn write(model: &DecoderConfig, dtype: &str, bos: &[u32], eos: &[u32]) -> Result<Value, String> {
    let stands_in_the_way = [
        (model.norm != Norm::Rms, format!("model.norm = {}", model.norm)),
        (model.activation != Activation::Swiglu, format!("model.activation = {}", model.activation)),
        (model.positions != Positions::Rope, format!("model.positions = {}", model.positions)),
        (model.rope_pairs != RopePairs::Half, format!("model.rope_pairs = {}", model.rope_pairs)),
    ];
    if let Some((_, what)) = stands_in_the_way.into_iter().find(|(applies, _)| *applies) {
        let known = Architecture::ALL.map(Architecture::class).join(" nor ");
        return Err(format!("a decoder with {what} is neither {known}"));
    }
    let architecture = if model.qk_norm { Architecture::Qwen3 } else { Architecture::Llama };
    let one_or_more = |tokens: &[u32]| match tokens {
        [] => Value::Null,
        [one] => json!(one),
        more => json!(more),
    };
    let mut config = json!({
        "architectures": [architecture.class()],
        "model_type": architecture.model_type(),
        "vocab_size": model.vocab,
        "hidden_size": model.width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads(),
        "head_dim": model.head_size(),
        "intermediate_size": model.ffn,
        "max_position_embeddings": model.context,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied,
        "attention_bias": false,
        "attention_dropout": 0.0,
        "use_cache": true,
        "bos_token_id": one_or_more(bos),
        "eos_token_id": one_or_more(eos),
        // Versions before 5 read the first two, later ones the third.
        "rope_theta": model.rope_theta,
        "rope_scaling": null,
        "rope_parameters": { "rope_type": "default", "rope_theta": model.rope_theta },
        "torch_dtype": dtype,
        "dtype": dtype,
    });
    let fields = config.as_object_mut().expect("an object was just made");
    if architecture == Architecture::Llama {
        fields.insert("mlp_bias".into(), json!(false));
    }
    Ok(config)
}

/// The fields of the file. One that is null is one that is absent, as the library has it.
struct Fields<'a>(&'a Map<String, Value>);

impl Fields<'_> {
    fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn architecture(&self) -> Result<Architecture, String> {
        let known = Architecture::ALL.map(Architecture::model_type).join(" and ");
        let Some(found) = self.get("model_type").and_then(Value::as_str) else {
            return Err(format!("it has no `model_type`; {known} are read"));
        };
        let architecture = Architecture::ALL.into_iter().find(|a| a.model_type() == found);
        let architecture = architecture
            .ok_or_else(|| format!("its `model_type` is {found:?}, and only {known} are read"))?;
        let classes = self.get("architectures").and_then(Value::as_array);
        match classes.and_then(|classes| classes.first()).and_then(Value::as_str) {
            Some(class) if class != architecture.class() => Err(format!(
                "its `architectures` says {class}, and of {found} models only {} is read",
                architecture.class()
            )),
            _ => Ok(architecture),
        }
    }

    /// Fields with which the library would compute something else than the decoder does.
    fn refuse_unsupported(&self, architecture: Architecture) -> Result<(), String> {
        let refused = |name: &str, value: &Value, supported: &str| {
            let shown = value.to_string();
            let shown = if shown.len() > 60 { "given".to_string() } else { shown };
            Err(format!("its `{name}` is {shown}, and here there is only {supported}"))
        };
        if let Some(value) = self.get("quantization_config") {
            return refused("quantization_config", value, "weights that are not quantised");
        }
        if let Some(value) = self.get("hidden_act").filter(|value| *value != "silu") {
            return refused("hidden_act", value, "silu for this architecture");
        }
        for name in ["attention_bias", "mlp_bias"] {
            if let Some(value) = self.get(name).filter(|value| **value != json!(false)) {
                return refused(name, value, "products without a bias");
            }
        }
        if let Some(value) = self.get("partial_rotary_factor").filter(|value| value.as_f64() != Some(1.0)) {
            return refused("partial_rotary_factor", value, "rotation of whole heads");
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

    /// The base of the rotations, from either form: `rope_theta` beside `rope_scaling`, or both in `rope_parameters`.
    fn rope(&self) -> Result<f64, String> {
        let (name, fields) = match (self.get("rope_parameters"), self.get("rope_scaling")) {
            (Some(both), _) => ("rope_parameters", Some(both)),
            (None, scaling) => ("rope_scaling", scaling),
        };
        let Some(fields) = fields else { return self.number_or("rope_theta", 1e4) };
        let Some(fields) = fields.as_object() else {
            return Err(format!("its `{name}` is {fields}, and wants to be an object"));
        };
        let rope = Fields(fields);
        let kind = rope.get("rope_type").or(rope.get("type")).and_then(Value::as_str).unwrap_or("default");
        if kind != "default" {
            return Err(format!("its `{name}` has the type {kind:?}, and here there is only default"));
        }
        if let Some(share) = rope.get("partial_rotary_factor").filter(|value| value.as_f64() != Some(1.0)) {
            return Err(format!(
                "its `{name}` has `partial_rotary_factor` = {share}, and here heads rotate whole"
            ));
        }
        let beside = self.number_or("rope_theta", 1e4)?;
        rope.number_or("rope_theta", beside).map_err(|sentence| format!("`{name}`: {sentence}"))
    }

    fn extent(&self, name: &str) -> Result<usize, String> {
        let value = self.get(name).ok_or_else(|| format!("it has no `{name}`"))?;
        let whole = value.as_u64().filter(|n| *n > 0).and_then(|n| usize::try_from(n).ok());
        whole.ok_or_else(|| format!("its `{name}` is {value}, and wants to be a whole number of 1 or more"))
    }

    fn extent_or(&self, name: &str, default: usize) -> Result<usize, String> {
        self.get(name).map_or(Ok(default), |_| self.extent(name))
    }

    fn number_or(&self, name: &str, default: f64) -> Result<f64, String> {
        let Some(value) = self.get(name) else { return Ok(default) };
        let number = value.as_f64().filter(|x| x.is_finite());
        number.ok_or_else(|| format!("its `{name}` is {value}, and wants to be a number"))
    }

    fn flag(&self, name: &str) -> Result<bool, String> {
        let Some(value) = self.get(name) else { return Ok(false) };
        value.as_bool().ok_or_else(|| format!("its `{name}` is {value}, and wants to be true or false"))
    }

    /// One token or a list of them.
    fn tokens(&self, name: &str) -> Result<Vec<u32>, String> {
        let Some(value) = self.get(name) else { return Ok(vec![]) };
        let token = |value: &Value| value.as_u64().and_then(|n| u32::try_from(n).ok());
        let tokens = match value {
            Value::Array(tokens) => tokens.iter().map(token).collect(),
            one => token(one).map(|token| vec![token]),
        };
        tokens.ok_or_else(|| format!("its `{name}` is {value}, and wants to be a token or a list of them"))
    }
}

#[cfg(test)]
mod tests {
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
                assert_eq!(read(&written).unwrap(), Described { model, bos: vec![5], eos: vec![6, 7] });
            }
        }
    }

    #[test]
    fn what_would_change_numbers_is_refused_by_name() {
        let cases = [
            ("model_type", json!("mamba"), "`model_type` is \"mamba\", and only llama and qwen3 are read"),
            ("architectures", json!(["LlamaForSequenceClassification"]), "LlamaForSequenceClassification"),
            ("hidden_act", json!("gelu"), "`hidden_act` is \"gelu\""),
            ("quantization_config", json!({ "bits": 4 }), "`quantization_config`"),
            ("attention_bias", json!(true), "`attention_bias` is true"),
            ("mlp_bias", json!(true), "`mlp_bias` is true"),
            ("partial_rotary_factor", json!(0.5), "`partial_rotary_factor` is 0.5"),
            ("rope_scaling", json!({ "rope_type": "longrope", "factor": 2.0 }), "\"longrope\""),
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
            "a decoder with model.activation = relu2 is neither LlamaForCausalLM nor Qwen3ForCausalLM"
        );
        assert!(refused(DecoderConfig { norm: Norm::Layer, ..model.clone() }).contains("model.norm = layer"));
        let pairs = DecoderConfig { rope_pairs: RopePairs::Interleaved, ..model };
        assert!(refused(pairs).contains("model.rope_pairs = interleaved"));
    }
}
