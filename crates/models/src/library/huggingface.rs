//! Decoders as the `transformers` library describes them: finds the architecture of a `config.json` or of a config.
//!
//! Pure functions on values. A field that would change results and that the decoder does not support is refused by name; fields
//! of training (dropout, initialisation) and of the library itself are ignored.

use serde_json::{Value, json};

use super::architecture::{Architecture, common_fields};
use super::encoder::Encoder;
use super::fields::Fields;
use super::layer_kinds::object;
use super::processor::{self, Processor};
use super::stored::Stored;
use super::{Published, class_heads, encoder, fovea, gemma, llama, qwen, qwen3_vl, vision};
use crate::config::{DecoderConfig, Head, Vision};

/// The description of a model in a `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct Described {
    /// The decoder. Its `context` is the library's `max_position_embeddings`.
    pub model: DecoderConfig,
    /// The tokens that a text may begin and end with, if the file has them.
    pub bos: Vec<u32>,
    pub eos: Vec<u32>,
    /// The names of its classes in the order of its outputs, if it has a head of classes.
    pub classes: Vec<String>,
    /// The library's class, for a body without a head and without tied embeddings.
    pub headless: Option<&'static str>,
}

/// Reads a parsed `config.json`, or returns a sentence that names the unsupported field.
pub fn read(config: &Value) -> Result<Described, String> {
    let Some(fields) = config.as_object() else {
        return Err("it is not a JSON object".into());
    };
    let outer = Fields(fields);
    let f = outer.text_part()?;
    let (model, classes, headless) = match outer.get("model_type").and_then(Value::as_str) {
        Some(qwen3_vl::MODEL_TYPE) => (qwen3_vl::read(&outer)?, vec![], None),
        Some(fovea::MODEL_TYPE) => (fovea::read(&outer)?, vec![], None),
        _ => read_text(&outer, &f)?,
    };
    // An encoder without a head is meant to get one.
    let headed = match model.encoder && model.head == Head::Tokens {
        true => DecoderConfig { head: Head::Classes, classes: Some(2), ..model.clone() },
        false => model.clone(),
    };
    headed.validate().map_err(|sentence| format!("it describes no model: {sentence}"))?;
    let tokens = |name: &str| match outer.tokens(name)? {
        none if none.is_empty() => f.tokens(name),
        found => Ok(found),
    };
    Ok(Described { model, bos: tokens("bos_token_id")?, eos: tokens("eos_token_id")?, classes, headless })
}

/// A text model, the names of its classes, and the class of a body that lacks its head.
type Text = (DecoderConfig, Vec<String>, Option<&'static str>);

fn read_text<'a>(outer: &Fields<'a>, f: &Fields<'a>) -> Result<Text, String> {
    let (architecture, head) = f.architecture()?;
    f.refuse_quantised()?;
    let mut model = (architecture.read)(f)?;
    if architecture.scales_embeddings {
        let named = |f: &Fields<'a>| f.get("dtype").or(f.get("torch_dtype")).and_then(Value::as_str);
        let dtype = named(outer).or(named(f)).unwrap_or("bfloat16");
        model.embed_scale = gemma::embed_scale(model.width, dtype);
    }
    let model = architecture.naming(model);
    match head {
        Some(Head::Classes) => Ok((class_heads::read(f, model)?, class_heads::names(f)?, None)),
        // An encoder's new head is the library's head of classes.
        _ if model.encoder => {
            Ok((DecoderConfig { pooling: class_heads::pooling(f, &model)?, ..model }, vec![], None))
        }
        Some(Head::Tokens) => Ok((model, vec![], None)),
        // Tied embeddings serve as a head.
        None => {
            let headless = (!model.tied).then_some(architecture.bodies[0]);
            Ok((model, vec![], headless))
        }
    }
}

/// Other names that a weight may have in a file: of a body without its head, or of the text part of a model that also sees
/// images.
pub fn other_names(name: &str) -> Vec<String> {
    let bare = ["model.", "transformer."].iter().find_map(|prefix| name.strip_prefix(prefix));
    bare.map(str::to_string).into_iter().chain(gemma::other_names(name)).collect()
}

/// Location of every weight of a decoder in the library's checkpoints.
pub fn stored(model: &DecoderConfig, shape: impl Fn(&str) -> Vec<usize>) -> Result<Vec<Stored>, String> {
    let architecture = Architecture::of(model)?;
    match &model.vision {
        Some(Vision::Qwen3Vl(vision)) => {
            check_text_of_qwen3_vl(architecture).map(|()| qwen3_vl::stored(model, vision, shape))
        }
        Some(Vision::Fovea(vision)) => {
            check_text_of_fovea(architecture).and_then(|()| fovea::stored(model, vision, shape))
        }
        None => Ok((architecture.stored)(model, &shape)),
    }
}

/// Whether the library has this text model beside a vision tower.
fn check_text_of_qwen3_vl(text: &Architecture) -> Result<(), String> {
    check_text(text, &qwen::QWEN3, qwen3_vl::CLASS)
}

/// Whether the authors' files have this text model beside a tower for frames.
fn check_text_of_fovea(text: &Architecture) -> Result<(), String> {
    check_text(text, &llama::LLAMA, "foveated model")
}

fn check_text(text: &Architecture, wanted: &Architecture, what: &str) -> Result<(), String> {
    match text.model_type == wanted.model_type {
        true => Ok(()),
        false => Err(format!(
            "a decoder with `model.vision` is published as a {what} beside a {}, and this one is a {}",
            wanted.model_type, text.model_type
        )),
    }
}

/// Whether a tensor of a checkpoint is redundant: a tied head that is stored anyway, rotary frequencies and masks that old
/// versions stored, and the head of tokens beside a head of classes.
pub fn is_redundant(model: &DecoderConfig, name: &str) -> bool {
    match model.vision {
        Some(Vision::Fovea(_)) => fovea::is_redundant(model, name),
        _ => is_redundant_text(model, name),
    }
}

pub(super) fn is_redundant_text(model: &DecoderConfig, name: &str) -> bool {
    let is_head = ["lm_head.weight", "language_model.lm_head.weight"].contains(&name);
    (is_head && (model.tied || model.head == Head::Classes))
        || encoder::is_redundant(model, name)
        || [".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"].iter().any(|end| name.ends_with(end))
}

/// The `config.json` of a decoder whose texts begin and end with these tokens, or the key that the library does not support.
pub fn write(model: &DecoderConfig, dtype: &str, bos: &[u32], eos: &[u32]) -> Result<Value, String> {
    let architecture = Architecture::of(model)?;
    let one_or_more = |tokens: &[u32]| match tokens {
        [] => Value::Null,
        [one] => json!(one),
        more => json!(more),
    };
    let class = match model.vision {
        None => architecture.class(model.head)?,
        Some(_) => architecture.class,
    };
    let mut fields = common_fields(model);
    let common = json!({
        "architectures": [class],
        "model_type": architecture.model_type,
        "use_cache": true,
        "bos_token_id": one_or_more(bos),
        "eos_token_id": one_or_more(eos),
        "torch_dtype": dtype,
        "dtype": dtype,
    });
    fields.extend(object(common));
    match &model.vision {
        Some(Vision::Qwen3Vl(vision)) => {
            check_text_of_qwen3_vl(architecture)?;
            return qwen3_vl::write(model, vision, fields);
        }
        Some(Vision::Fovea(vision)) => {
            check_text_of_fovea(architecture)?;
            return fovea::write(model, vision, fields);
        }
        None => {}
    }
    fields.extend((architecture.write)(model));
    if architecture.scales_embeddings {
        gemma::check_embed_scale(model, dtype)?;
    }
    if model.head == Head::Classes {
        fields.extend(class_heads::write(model));
    }
    if let Some(encoder) = Encoder::of(architecture) {
        encoder.check_head(model)?;
    }
    Ok(Value::Object(fields))
}

impl Published for DecoderConfig {
    fn stored(&self, shape: &dyn Fn(&str) -> Vec<usize>) -> Result<Vec<Stored>, String> {
        stored(self, shape)
    }

    fn other_names(&self, name: &str) -> Vec<String> {
        match self.vision {
            Some(Vision::Fovea(_)) => fovea::other_names(name),
            _ if self.encoder => encoder::other_names(name),
            _ => other_names(name),
        }
    }

    fn may_lack(&self, name: &str) -> bool {
        encoder::may_lack(self, name)
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
    /// The fields of a nested object.
    pub(super) fn part(&self, name: &str) -> Result<Fields<'a>, String> {
        match self.get(name).map(Value::as_object) {
            Some(Some(fields)) => Ok(Fields(fields)),
            Some(None) => Err(format!("its `{name}` is not an object")),
            None => Err(format!("it has no `{name}`")),
        }
    }

    /// The fields of the text model: all of them, or its section in a model that also sees images.
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

    /// The architecture of a text model, and its head; `None` for a body alone.
    fn architecture(&self) -> Result<(&'static Architecture, Option<Head>), String> {
        let known = format!("{}, gemma3 and {}", Architecture::names(), qwen3_vl::MODEL_TYPE);
        let Some(found) = self.get("model_type").and_then(Value::as_str) else {
            return Err(format!("it has no `model_type`; {known} are read"));
        };
        let unknown = || {
            let relative = qwen3_vl::refused(found).or_else(|| experts(found));
            relative.unwrap_or_else(|| {
                let images = vision::model_types();
                format!("its `model_type` is {found:?}, and only {known} are read, and of images {images}")
            })
        };
        let architecture = Architecture::by_name(found).ok_or_else(unknown)?;
        let classes = self.get("architectures").and_then(Value::as_array);
        let Some(class) = classes.and_then(|classes| classes.first()).and_then(Value::as_str) else {
            return Ok((architecture, Some(Head::Tokens)));
        };
        let heads = Head::ALL.iter().filter_map(|head| Some((Some(*head), architecture.class(*head).ok()?)));
        let bodies = architecture.bodies.iter().map(|body| (None, *body));
        let all: Vec<(Option<Head>, &str)> = heads.chain(bodies).collect();
        match all.iter().find(|(_, known)| *known == class) {
            Some((head, _)) => Ok((architecture, *head)),
            None => {
                let known: Vec<&str> = all.into_iter().map(|(_, class)| class).collect();
                Err(format!(
                    "its `architectures` says {class}, and of {found} models only {} are read",
                    known.join(" and ")
                ))
            }
        }
    }

    pub(super) fn refuse_quantised(&self) -> Result<(), String> {
        let Some(said) = self.get("quantization_config") else { return Ok(()) };
        let method = said.get("quant_method").and_then(Value::as_str).map(|name| format!(" by {name}"));
        Err(format!(
            "its `quantization_config` says that its weights are quantised{}, and of such only NF4 of bitsandbytes is read: take \
             the checkpoint that it was made from",
            method.unwrap_or_default()
        ))
    }
}

/// The reason why a mixture of experts is not supported.
fn experts(model_type: &str) -> Option<String> {
    let is_known = ["mixtral", "deepseek", "llama4", "gpt_oss", "phimoe"]
        .iter()
        .any(|start| model_type.starts_with(start));
    (is_known || model_type.contains("moe")).then(|| {
        format!(
            "its `model_type` is {model_type:?}, which is a mixture of experts, and here models are dense"
        )
    })
}

#[cfg(test)]
mod tests {
    use serde_json::Map;

    use super::*;
    use crate::config::{Activation, Bias, Norm, Positions, RopePairs};

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
    fn omitted_qwen3_fields_are_the_librarys_defaults() {
        let config = changed(|fields| {
            fields.insert("model_type".into(), json!("qwen3"));
            fields.insert("num_attention_heads".into(), json!(64));
            fields.remove("architectures");
            fields.remove("tie_word_embeddings");
        });
        let model = read(&config).unwrap().model;
        assert_eq!((model.kv_heads(), model.head_size()), (32, 128));
        assert!(model.qk_norm && !model.tied);
        let mut null = config;
        null["num_key_value_heads"] = Value::Null;
        assert_eq!(read(&null).unwrap().model.kv_heads(), 64, "as many as heads");
    }

    #[test]
    fn written_configs_read_back() {
        for qk_norm in [false, true] {
            for tied in [false, true] {
                let model = DecoderConfig { qk_norm, tied, ..read(&llama()).unwrap().model };
                let written = write(&model, "float32", &[5], &[6, 7]).unwrap();
                let (bos, eos) = (vec![5], vec![6, 7]);
                assert_eq!(
                    read(&written).unwrap(),
                    Described { model, bos, eos, classes: vec![], headless: None }
                );
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
        for (attention, mlp, bias) in
            [(true, false, Bias::Attention), (true, true, Bias::All), (false, true, Bias::Ffn)]
        {
            let config = changed(|fields| {
                fields.insert("attention_bias".into(), json!(attention));
                fields.insert("mlp_bias".into(), json!(mlp));
            });
            let described = read(&config).unwrap();
            assert_eq!(described.model.bias, bias);
            assert_eq!(read(&write(&described.model, "float32", &[1], &[2, 3]).unwrap()).unwrap(), described);
        }
    }

    /// Versions 4 and 5 take the older field where both are there, the latter with another base.
    #[test]
    fn two_forms_of_rope_that_differ_are_refused() {
        let yarn = json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16 });
        let both = |scaling: Value, parameters: Value| {
            changed(|fields| {
                fields.insert("rope_scaling".into(), scaling.clone());
                fields.insert("rope_parameters".into(), parameters.clone());
            })
        };
        let plain = json!({ "rope_type": "default", "rope_theta": 100000.0 });
        let refused = read(&both(yarn.clone(), plain.clone())).unwrap_err();
        assert!(
            refused.contains("`rope_scaling` and its `rope_parameters` say different rotations"),
            "{refused}"
        );
        let mut stretched = yarn.clone();
        stretched["rope_theta"] = json!(100000.0);
        assert!(read(&both(yarn, stretched)).is_ok());
        assert_eq!(read(&both(json!({}), plain)).unwrap(), read(&llama()).unwrap());
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
    fn fields_that_change_results_are_refused_by_name() {
        let cases = [
            (
                "model_type",
                json!("mamba"),
                "`model_type` is \"mamba\", and only llama, qwen3, gpt2, gemma3_text, gemma2, qwen2, mistral, phi3, olmo2, \
                 smollm3, granite, modernbert, bert, roberta, xlm-roberta, distilbert, gemma3 and qwen3_vl are read, \
                 and of images clip, clip_vision_model, siglip, siglip_vision_model, deit, dinov2, dinov2_with_registers, vit",
            ),
            ("architectures", json!(["LlamaForTokenClassification"]), "LlamaForTokenClassification"),
            ("hidden_act", json!("gelu"), "`hidden_act` is \"gelu\""),
            ("quantization_config", json!({ "bits": 4 }), "`quantization_config`"),
            ("attention_bias", json!("yes"), "`attention_bias` is \"yes\""),
            ("mlp_bias", json!(1), "`mlp_bias` is 1"),
            ("rope_scaling", json!({ "rope_type": "linear" }), "it has no `factor`"),
            (
                "rope_scaling",
                json!({ "rope_type": "yarn", "factor": 2.0, "mscale": "1" }),
                "`mscale` is \"1\"",
            ),
            ("rope_scaling", json!({ "rope_type": "llama3", "factor": 0.5 }), "`model.rope_factor` is 0.5"),
            ("partial_rotary_factor", json!(0.5), "`partial_rotary_factor` is 0.5"),
            ("rope_scaling", json!({ "rope_type": "ntk", "factor": 2.0 }), "\"ntk\""),
            (
                "rope_scaling",
                json!({ "rope_type": "longrope", "factor": 2.0 }),
                "`model.rope_short_factors` is missing",
            ),
            ("rope_scaling", json!({ "rope_type": 3, "factor": 2.0 }), "its type is 3, which is no name"),
            ("rope_scaling", json!({ "rope_type": ["yarn"], "factor": 2.0 }), "its type is [\"yarn\"]"),
            ("rope_scaling", json!("twice"), "must be an object"),
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
        assert!(qwen3("mlp_bias", json!(true)).contains("`mlp_bias` is true"));
        assert!(qwen3("num_hidden_layers", json!(1e18 as u64)).contains("may be 4096 at most"));
        assert!(qwen3("layer_types", json!(["full_attention"])).contains("list of 3 names"));
        let layers = json!(["full_attention", "sliding_attention", "full_attention"]);
        assert!(qwen3("layer_types", layers).contains("it has no `sliding_window`"));
        assert!(qwen3("model_type", json!("mixtral")).contains("which is a mixture of experts"));
        assert_eq!(read(&json!([])).unwrap_err(), "it is not a JSON object");
    }

    /// Some files of a family do not differ from a Llama's; they keep the family's name, which determines the names of tensors.
    #[test]
    fn a_family_that_equals_another_keeps_its_name() {
        let of = |model_type: &str, more: Value| {
            let mut config = llama();
            config["model_type"] = json!(model_type);
            config["num_key_value_heads"] = json!(2);
            config.as_object_mut().unwrap().remove("architectures");
            config.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap());
            read(&config).unwrap()
        };
        let families = [
            ("llama", json!({}), None, "q_proj"),
            ("phi3", json!({ "sliding_window": null }), Some("phi3"), "qkv_proj"),
            ("phi3", json!({ "sliding_window": 7 }), Some("phi3"), "qkv_proj"),
            ("phi3", json!({ "partial_rotary_factor": 0.7 }), None, "qkv_proj"),
            ("mistral", json!({ "sliding_window": null }), Some("mistral"), "q_proj"),
            ("mistral", json!({ "sliding_window": 7 }), None, "q_proj"),
            ("smollm3", json!({ "no_rope_layers": [1, 1, 1] }), Some("smollm3"), "q_proj"),
            ("granite", json!({ "attention_multiplier": 0.2 }), None, "q_proj"),
        ];
        for (model_type, more, family, tensor) in families {
            let described = of(model_type, more);
            let model = &described.model;
            assert_eq!(model.family.as_deref(), family, "{model_type}");
            let table = stored(model, |_| vec![4, 4]).unwrap();
            assert!(table.iter().any(|at| at.theirs.contains(&format!(".{tensor}."))), "{model_type}");
            let written = write(model, "float32", &[1], &[2, 3]).unwrap();
            assert_eq!(written["model_type"], model_type);
            assert_eq!(read(&written).unwrap(), described, "{model_type}");
        }
        let other = DecoderConfig { family: Some("phi9".into()), ..read(&llama()).unwrap().model };
        assert!(write(&other, "float32", &[], &[]).unwrap_err().contains("`model.family` is phi9"));
        let biased =
            DecoderConfig { bias: Bias::Qkv, ..of("mistral", json!({ "sliding_window": null })).model };
        let refused = write(&biased, "float32", &[], &[]).unwrap_err();
        assert!(refused.contains("model.bias = qkv is none of MistralForCausalLM"), "{refused}");
    }

    #[test]
    fn decoders_of_no_architecture_are_refused_by_name() {
        let model = read(&llama()).unwrap().model;
        let refused = |model: DecoderConfig| write(&model, "float32", &[], &[]).unwrap_err();
        let relu2 = DecoderConfig { activation: Activation::Relu2, ..model.clone() };
        let sentence = refused(relu2);
        assert!(
            sentence
                .starts_with("a decoder with model.activation = relu2 is none of LlamaForCausalLM, Qwen3"),
            "{sentence}"
        );
        assert!(sentence.ends_with("LlamaForCausalLM, the nearest, has swiglu"), "{sentence}");
        let learned = DecoderConfig { positions: Positions::Learned, ..model.clone() };
        assert!(refused(learned).contains("model.positions = learned"));
        let gpt2 = DecoderConfig {
            positions: Positions::Learned,
            norm: Norm::Layer,
            norm_bias: true,
            bias: Bias::Qkv,
            activation: Activation::GeluTanh,
            kv_heads: None,
            ..model.clone()
        };
        assert!(refused(gpt2).ends_with("GPT2LMHeadModel, the nearest, has all"));
        let scaled = DecoderConfig { residual_scale: 0.5, bias: Bias::Qkv, ..model.clone() };
        assert!(refused(scaled).contains("model.residual_scale = 0.5"));
        assert!(refused(DecoderConfig { norm: Norm::Layer, ..model.clone() }).contains("model.norm = layer"));
        let classes =
            DecoderConfig { score_scale: Some(0.5), head: Head::Classes, classes: Some(2), ..model.clone() };
        assert!(refused(classes).contains("no GraniteForCausalLM with a head of classes"));
        let pairs = DecoderConfig { rope_pairs: RopePairs::Interleaved, ..model };
        assert!(refused(pairs).contains("model.rope_pairs = interleaved"));
    }
}
