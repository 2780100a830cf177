//! Rotary embeddings in the library's formats: `rope_theta` beside `rope_scaling` before version 5, `rope_parameters` since.

use serde_json::{Map, Value, json};

use super::fields::Fields;
use crate::config::{DecoderConfig, RopeScaling};
use crate::decoder::longrope_amplitude;

/// `rope_scaling` as before version 5, and `rope_parameters`, which contains the base as well.
pub(crate) fn write(model: &DecoderConfig) -> (Value, Value) {
    let kind = if model.rope_scaling == RopeScaling::None { "default" } else { model.rope_scaling.name() };
    let mut fields = Map::new();
    fields.insert("rope_type".into(), json!(kind));
    let mut add = |name: &str, value: Value| drop(fields.insert(name.into(), value));
    if model.rope_scaling != RopeScaling::None {
        add("factor", json!(model.rope_factor));
    }
    // With dynamic scaling the original context is the model's own.
    if let Some(original) = model.rope_original_context.filter(|_| model.rope_scaling != RopeScaling::Dynamic)
    {
        add("original_max_position_embeddings", json!(original));
    }
    match model.rope_scaling {
        RopeScaling::None | RopeScaling::Linear | RopeScaling::Dynamic => {}
        RopeScaling::Longrope => {
            add("short_factor", json!(model.rope_short_factors));
            add("long_factor", json!(model.rope_long_factors));
            add("attention_factor", json!(model.rope_attention_factor));
        }
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
    if model.rope_size.is_some() {
        add("partial_rotary_factor", json!(rotated_fraction(model)));
    }
    let scaling = if kind == "default" { Value::Null } else { Value::Object(fields.clone()) };
    fields.insert("rope_theta".into(), json!(model.rope_theta));
    (scaling, Value::Object(fields))
}

/// The model with separate frequencies for global and local layers: one object per kind in `rope_parameters`, or the older
/// fields with these bases.
pub(crate) fn by_layer(
    f: &Fields<'_>,
    model: DecoderConfig,
    [global_theta, local_theta]: [f64; 2],
) -> Result<DecoderConfig, String> {
    let within = |fields: &Map<String, Value>, kind: &str, model: DecoderConfig| {
        Fields(fields).scaling(model).map_err(|why| format!("in its rotations of {kind} layers: {why}"))
    };
    let object = |value: &Value, name: &str| {
        let found = value.as_object().cloned();
        found.ok_or_else(|| format!("its `{name}` is {value}, and must be an object"))
    };
    let model = DecoderConfig { rope_theta: global_theta, ..model };
    let (global, local) = match (f.get("rope_parameters"), f.own_scaling()) {
        (Some(both), _) => {
            let both = object(both, "rope_parameters")?;
            let part = |kind: &str| both.get(kind).filter(|value| !value.is_null());
            let global = part("full_attention").map(|value| object(value, "full_attention")).transpose()?;
            let local =
                part("sliding_attention").map(|value| object(value, "sliding_attention")).transpose()?;
            (global, local)
        }
        (None, Some(scaling)) => (Some(object(scaling, "rope_scaling")?), None),
        (None, None) => (None, None),
    };
    let stretched = match &global {
        Some(fields) => within(fields, "global", model.clone())?,
        None => model.clone(),
    };
    if let Some(scaling) = f.own_scaling().filter(|_| f.get("rope_parameters").is_some()) {
        let older = within(&object(scaling, "rope_scaling")?, "global", model)?;
        agree(&older, &stretched)?;
    }
    let model = stretched;
    let plain = DecoderConfig { rope_theta: local_theta, ..DecoderConfig::default() };
    let local = match &local {
        Some(fields) => within(fields, "local", plain)?,
        None => plain,
    };
    if local.rope_scaling != RopeScaling::None {
        return Err(format!(
            "its rotations of local layers are stretched ({}), and here only those of global ones are",
            local.rope_scaling
        ));
    }
    let has_local = model.window.is_some();
    Ok(DecoderConfig { rope_local_theta: has_local.then_some(local.rope_theta), ..model })
}

/// `rope_parameters` of global and of local layers.
pub(crate) fn write_by_layer(c: &DecoderConfig) -> (Value, Value) {
    let theta = c.rope_local_theta.unwrap_or(c.rope_theta);
    (write(c).1, json!({ "rope_type": "default", "rope_theta": theta }))
}

/// Number of positions a model was made for: dynamic scaling starts beyond it.
pub(crate) fn most_positions(model: &DecoderConfig) -> usize {
    let original = model.rope_original_context.filter(|_| model.rope_scaling == RopeScaling::Dynamic);
    original.unwrap_or(model.context)
}

/// Fraction of a head that rotates. The library multiplies the head size by it and truncates.
pub(crate) fn rotated_fraction(model: &DecoderConfig) -> f64 {
    let (size, rotated) = (model.head_size() as f64, model.rope_size());
    let share = rotated as f64 / size;
    if (size * share) as usize == rotated { share } else { (rotated as f64 + 0.5) / size }
}

/// Yarn's factor on cosines and sines, from the scaling factor and a weight on its logarithm.
fn mscale(factor: f64, weight: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 }
}

impl Fields<'_> {
    /// The model with its rotations, from either form: `rope_theta` beside `rope_scaling`, or both in
    /// `rope_parameters`.
    pub fn rope(&self, model: DecoderConfig) -> Result<DecoderConfig, String> {
        let partial = |fields: &Fields<'_>| {
            let share = fields.get("partial_rotary_factor").filter(|value| value.as_f64() != Some(1.0))?;
            Some(format!(
                "`partial_rotary_factor` is {share}, and here heads of this architecture rotate whole"
            ))
        };
        let within =
            ["rope_parameters", "rope_scaling"].into_iter().find_map(|name| self.get(name)?.as_object());
        match partial(self).or_else(|| partial(&Fields(within?))) {
            Some(why) => Err(format!("its {why}")),
            None => self.partial_rope(model),
        }
    }

    /// `rope` for an architecture whose heads may rotate in part.
    pub fn partial_rope(&self, model: DecoderConfig) -> Result<DecoderConfig, String> {
        let scaling = self.own_scaling();
        let (name, fields) = match (self.get("rope_parameters"), scaling) {
            (Some(both), _) => ("rope_parameters", Some(both)),
            (None, scaling) => ("rope_scaling", scaling),
        };
        let rope_theta = self.number_or("rope_theta", model.rope_theta)?;
        let share = self.number_or("partial_rotary_factor", 1.0)?;
        let model = DecoderConfig { rope_theta, rope_size: rotated(&model, share), ..model };
        let Some(fields) = fields else { return Ok(DecoderConfig { rope_original_context: None, ..model }) };
        let read = |name: &str, fields: &Value| match fields.as_object() {
            Some(fields) => {
                Fields(fields).scaling(model.clone()).map_err(|why| format!("in its `{name}`: {why}"))
            }
            None => Err(format!("its `{name}` is {fields}, and must be an object")),
        };
        let rope = read(name, fields)?;
        if let Some(scaling) = scaling.filter(|_| name == "rope_parameters") {
            agree(&read("rope_scaling", scaling)?, &rope)?;
        }
        Ok(rope)
    }

    /// The older field `rope_scaling`, unless it is an empty object, which stands for none.
    fn own_scaling(&self) -> Option<&Value> {
        self.get("rope_scaling").filter(|value| value.as_object().is_none_or(|fields| !fields.is_empty()))
    }

    /// The model with the rotations in these fields of a `rope_parameters`. If they lack the original context, the one from the
    /// model's own fields applies.
    pub fn scaling(&self, model: DecoderConfig) -> Result<DecoderConfig, String> {
        let kind = match self.get("rope_type").or(self.get("type")) {
            None | Some(Value::Null) => "default",
            // The name under which it was first published.
            Some(Value::String(kind)) if kind == "su" => "longrope",
            Some(Value::String(kind)) => kind,
            Some(other) => return Err(format!("its type is {other}, which is no name of one")),
        };
        let rope_scaling = match kind {
            "default" => RopeScaling::None,
            other => match other.parse() {
                Ok(scaling) if scaling != RopeScaling::None => scaling,
                _ => {
                    return Err(format!(
                        "its type is {kind:?}, and here there is default, {}",
                        RopeScaling::VALUES[1..].join(", ")
                    ));
                }
            },
        };
        if self.get("truncate").is_some_and(|value| *value != json!(true)) {
            return Err("`truncate` is not true, and here bounds are rounded to whole pairs".into());
        }
        let is_long = rope_scaling == RopeScaling::Longrope;
        let named = self.extent_or(
            "original_max_position_embeddings",
            model.rope_original_context.unwrap_or(model.context),
        )?;
        let rope_original_context = match rope_scaling {
            RopeScaling::None | RopeScaling::Linear => None,
            RopeScaling::Dynamic => Some(model.context),
            RopeScaling::Llama3 | RopeScaling::Yarn | RopeScaling::Longrope => Some(named),
        };
        let rope_factor = match (rope_scaling, self.number("factor")?) {
            (RopeScaling::None, _) => None,
            (RopeScaling::Longrope, None) => Some((model.context as f64 / named as f64).max(1.0)),
            (_, None) => return Err("it has no `factor`".into()),
            (_, given) => given,
        };
        let factor = rope_factor.unwrap_or(1.0);
        let amplitude = self.number("attention_factor")?;
        let rope_attention_factor = match rope_scaling {
            RopeScaling::Yarn => match (self.number("mscale")?, self.number("mscale_all_dim")?) {
                (Some(weight), Some(over)) if amplitude.is_none() && weight != 0.0 && over != 0.0 => {
                    Some(mscale(factor, weight) / mscale(factor, over))
                }
                _ => amplitude,
            },
            RopeScaling::Longrope => Some(amplitude.unwrap_or(longrope_amplitude(factor, named as f64))),
            _ => None,
        };
        let share = self.number("partial_rotary_factor")?;
        Ok(DecoderConfig {
            rope_theta: self.number_or("rope_theta", model.rope_theta)?,
            rope_size: share.map_or(model.rope_size, |share| rotated(&model, share)),
            rope_scaling,
            rope_factor,
            rope_original_context,
            rope_low_freq_factor: self.number_or("low_freq_factor", model.rope_low_freq_factor)?,
            rope_high_freq_factor: self.number_or("high_freq_factor", model.rope_high_freq_factor)?,
            rope_beta_fast: self.number_or("beta_fast", model.rope_beta_fast)?,
            rope_beta_slow: self.number_or("beta_slow", model.rope_beta_slow)?,
            rope_attention_factor,
            rope_short_factors: self.numbers("short_factor")?.filter(|_| is_long),
            rope_long_factors: self.numbers("long_factor")?.filter(|_| is_long),
            ..model
        })
    }
}

/// Refuses a file whose two forms say different rotations: versions of the library differ in which one they read.
fn agree(older: &DecoderConfig, newer: &DecoderConfig) -> Result<(), String> {
    match older == newer {
        true => Ok(()),
        false => Err("its `rope_scaling` and its `rope_parameters` say different rotations, and the library reads one or \
                      the other by its version: keep the one that is meant, with `rope_theta` in it"
            .into()),
    }
}

/// Number of elements of a head that rotate, unless all do.
fn rotated(model: &DecoderConfig, share: f64) -> Option<usize> {
    let size = (model.head_size() as f64 * share) as usize;
    (size != model.head_size()).then_some(size)
}
