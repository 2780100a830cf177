//! Rotations as the library describes them: `rope_theta` beside `rope_scaling` before version 5, `rope_parameters` since.

use serde_json::{Map, Value, json};

use super::fields::Fields;
use crate::config::{DecoderConfig, RopeScaling};

/// `rope_scaling` as it was before version 5, and `rope_parameters`, which has the base as well.
pub(crate) fn write(model: &DecoderConfig) -> (Value, Value) {
    let kind = if model.rope_scaling == RopeScaling::None { "default" } else { model.rope_scaling.name() };
    let mut fields = Map::new();
    fields.insert("rope_type".into(), json!(kind));
    let mut add = |name: &str, value: Value| drop(fields.insert(name.into(), value));
    if model.rope_scaling != RopeScaling::None {
        add("factor", json!(model.rope_factor));
    }
    if let Some(original) = model.rope_original_context {
        add("original_max_position_embeddings", json!(original));
    }
    match model.rope_scaling {
        RopeScaling::None | RopeScaling::Linear => {}
        RopeScaling::Llama3 => {
            add("low_freq_factor", json!(model.rope_low_freq_factor));
            add("high_freq_factor", json!(model.rope_high_freq_factor));
        }
        RopeScaling::Yarn => {
            add("beta_fast", json!(model.rope_beta_fast));
            add("beta_slow", json!(model.rope_beta_slow));
            if let Some(factor) = model.rope_attention_factor {
                add("attention_factor", json!(factor));
            }
        }
    }
    let scaling = if kind == "default" { Value::Null } else { Value::Object(fields.clone()) };
    fields.insert("rope_theta".into(), json!(model.rope_theta));
    (scaling, Value::Object(fields))
}

impl Fields<'_> {
    /// The model with its rotations, from either form: `rope_theta` beside `rope_scaling`, or both in
    /// `rope_parameters`.
    pub fn rope(&self, model: DecoderConfig) -> Result<DecoderConfig, String> {
        let (name, fields) = match (self.get("rope_parameters"), self.get("rope_scaling")) {
            (Some(both), _) => ("rope_parameters", Some(both)),
            (None, scaling) => ("rope_scaling", scaling),
        };
        let rope_theta = self.number_or("rope_theta", 1e4)?;
        let Some(fields) = fields else { return Ok(DecoderConfig { rope_theta, ..model }) };
        let Some(fields) = fields.as_object() else {
            return Err(format!("its `{name}` is {fields}, and wants to be an object"));
        };
        let rope = Fields(fields);
        rope.scaling(DecoderConfig { rope_theta, ..model }).map_err(|why| format!("in its `{name}`: {why}"))
    }

    /// The model with the rotations that these fields of a `rope_parameters` say.
    pub fn scaling(&self, model: DecoderConfig) -> Result<DecoderConfig, String> {
        if let Some(share) = self.get("partial_rotary_factor").filter(|value| value.as_f64() != Some(1.0)) {
            return Err(format!("`partial_rotary_factor` is {share}, and here heads rotate whole"));
        }
        let kind = match self.get("rope_type").or(self.get("type")) {
            None | Some(Value::Null) => "default",
            Some(Value::String(kind)) => kind,
            Some(other) => return Err(format!("its type is {other}, which is no name of one")),
        };
        let rope_scaling = match kind {
            "default" => RopeScaling::None,
            other => match other.parse() {
                Ok(scaling) if scaling != RopeScaling::None => scaling,
                _ => {
                    return Err(format!(
                        "its type is {kind:?}, and here there is default, linear, llama3 and yarn"
                    ));
                }
            },
        };
        let stretched = rope_scaling != RopeScaling::None;
        let from_shorter = matches!(rope_scaling, RopeScaling::Llama3 | RopeScaling::Yarn);
        let attention = self.get("attention_factor").is_some() && rope_scaling == RopeScaling::Yarn;
        for name in ["mscale", "mscale_all_dim"] {
            if let Some(value) = self.get(name).filter(|_| rope_scaling == RopeScaling::Yarn) {
                return Err(format!("`{name}` is {value}, and here there is only `attention_factor`"));
            }
        }
        if self.get("truncate").is_some_and(|value| *value != json!(true)) {
            return Err("`truncate` is not true, and here bounds are rounded to whole pairs".into());
        }
        Ok(DecoderConfig {
            rope_theta: self.number_or("rope_theta", model.rope_theta)?,
            rope_scaling,
            rope_factor: match self.get("factor") {
                Some(_) if stretched => Some(self.number_or("factor", 1.0)?),
                _ if stretched => return Err("it has no `factor`".into()),
                _ => None,
            },
            rope_original_context: match from_shorter {
                true => Some(self.extent_or("original_max_position_embeddings", model.context)?),
                false => None,
            },
            rope_low_freq_factor: self.number_or("low_freq_factor", model.rope_low_freq_factor)?,
            rope_high_freq_factor: self.number_or("high_freq_factor", model.rope_high_freq_factor)?,
            rope_beta_fast: self.number_or("beta_fast", model.rope_beta_fast)?,
            rope_beta_slow: self.number_or("beta_slow", model.rope_beta_slow)?,
            rope_attention_factor: attention.then(|| self.number_or("attention_factor", 1.0)).transpose()?,
            ..model
        })
    }
}
