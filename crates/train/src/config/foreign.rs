//! Answers keys of other tools with the keys of flatout. The names of switches in other tools are in the table of switches; those of
//! all other keys are here.

mod names;

use flatout_runtime::cuda::gpus;
use toml::Value;

use super::schema::{self, Meaning};
use super::value::{self, Written};
use crate::switches;
use names::{NAMES, OFF, OTHER_VALUES, PRESETS, VALUES, WITHOUT_KEY};

/// The answer to a `name` that is no key, and to the value given with it, as the second half of a sentence.
pub(super) fn answer(name: &str, value: Option<&str>) -> Option<String> {
    let plain = name.trim_start_matches('-').replace('-', "_").to_ascii_lowercase();
    let last = plain.rsplit('.').next().unwrap_or_default();
    let value = value.map(str::trim);
    [&plain, last].into_iter().find_map(|name| named(name, value).or_else(|| negated(name)))
}

fn named(name: &str, value: Option<&str>) -> Option<String> {
    if let Some((_, answer)) = WITHOUT_KEY.iter().find(|(names, _)| names.contains(&name)) {
        return Some(preset(name, value).unwrap_or_else(|| answer.to_string()));
    }
    let ours = find(name)?;
    if let Some((_, conversion)) = OTHER_VALUES.iter().find(|(names, _)| names.contains(&name)) {
        return Some(format!("here that is `{}`{conversion}", key_of(ours)));
    }
    Some(format!("here that is {}", with_value(ours, value)))
}

/// The answer to `no_NAME` and `disable_NAME`, which turn off what NAME stands for.
fn negated(name: &str) -> Option<String> {
    let rest = ["no_", "disable_"].iter().find_map(|prefix| name.strip_prefix(prefix))?;
    let ours = match schema::lookup(rest) {
        Meaning::One(found) => found.path.trim_start_matches("switches.").to_string(),
        _ => find(rest)?.to_string(),
    };
    let off = with_value(&ours, Some("false"));
    off.contains('=').then(|| format!("here that is {off}"))
}

/// Our key, or key and value, with the value that the other tool's value stands for.
fn with_value(ours: &str, value: Option<&str>) -> String {
    let key = key_of(ours);
    let is_flag = ours.contains('=');
    match value {
        Some(value) if is_flag && is_false(value) => {
            let off = OFF.iter().find(|(on, _)| *on == ours).map_or(ours, |(_, off)| off);
            format!("`{off}`")
        }
        Some(value) if is_flag && !is_true(value) => {
            of_key(key, value).unwrap_or_else(|| format!("`{ours}`"))
        }
        None | Some(_) if is_flag => format!("`{ours}`"),
        value => value.and_then(|value| of_key(key, value)).unwrap_or_else(|| {
            let values = match schema::lookup(key) {
                Meaning::One(found) => schema::values_in_brackets(&found.key.kind),
                _ => String::new(),
            };
            format!("`{key}`{values}")
        }),
    }
}

/// A key of ours with a value, which may be written as here or as in another tool; `None` if the key does not take it.
fn of_key(key: &str, value: &str) -> Option<String> {
    if let Some(here) = value_here(key, value) {
        return Some(here);
    }
    let Meaning::One(found) = schema::lookup(key) else { return None };
    let given = Value::String(value.to_string());
    let read = value::read(key, &found.key.kind, &given, Written::AsText).ok()?;
    Some(format!("`{key}={}`", read.as_str().unwrap_or(value)))
}

/// The answer to a value that one of our keys has in other tools.
pub(super) fn value_here(key: &str, given: &str) -> Option<String> {
    let key = key.trim_start_matches("switches.");
    let given = given.to_ascii_lowercase();
    let row = VALUES.iter().find(|(of, value, ..)| *of == key && *value == given);
    row.map(|(_, _, ours, remark)| format!("`{ours}`{remark}"))
}

/// The preset of the GPU that a preset of another tool is named after: `experiment=rtx3090_optimized`.
fn preset(name: &str, value: Option<&str>) -> Option<String> {
    let value = value.filter(|_| PRESETS.contains(&name))?.to_ascii_lowercase().replace('_', "-");
    let gpu = gpus::named().iter().find(|gpu| value.contains(gpu.name))?;
    Some(format!("here that is the option `--with {}`", gpu.name))
}

fn key_of(ours: &str) -> &str {
    ours.split('=').next().unwrap_or_default()
}

fn is_false(value: &str) -> bool {
    ["false", "0", "no", "off", "none"].iter().any(|word| value.eq_ignore_ascii_case(word))
}

fn is_true(value: &str) -> bool {
    ["", "true", "1", "yes", "on"].iter().any(|word| value.eq_ignore_ascii_case(word))
}

fn find(name: &str) -> Option<&'static str> {
    let mut all = NAMES.iter().copied().chain(of_switches());
    all.find(|(theirs, _)| theirs.eq_ignore_ascii_case(name)).map(|(_, ours)| ours)
}

fn of_switches() -> impl Iterator<Item = (&'static str, &'static str)> {
    switches::TABLE.iter().flat_map(|switch| switch.elsewhere).map(|named| (named.name, named.here))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether `key` or `key=value` is valid here.
    fn is_ours(ours: &str) -> bool {
        let (key, value) = ours.split_once('=').map_or((ours, None), |(key, value)| (key, Some(value)));
        let Meaning::One(found) = schema::lookup(key) else { return false };
        let is_valid = |value: &str| {
            value::read(key, &found.key.kind, &Value::String(value.into()), Written::AsText).is_ok()
        };
        value.is_none_or(is_valid)
    }

    #[test]
    fn every_answer_is_a_key_and_no_name_is_ours_already() {
        let names: Vec<(&str, &str)> = NAMES.iter().copied().chain(of_switches()).collect();
        for (theirs, ours) in &names {
            assert!(is_ours(ours), "{theirs}: {ours} is no key or value");
            assert!(matches!(schema::lookup(theirs), Meaning::Nothing), "{theirs} is a name of ours");
            let has_values = OTHER_VALUES.iter().any(|(names, _)| names.contains(theirs));
            let is_flag = ours.contains('=') && !has_values;
            let off = OFF.iter().find(|(on, _)| on == ours);
            assert!(!is_flag || off.is_some(), "{theirs}: OFF has no row for {ours}");
            let others = names.iter().filter(|(name, _)| name.eq_ignore_ascii_case(theirs)).count();
            assert_eq!(others, 1, "{theirs} is listed twice");
        }
        for (on, off) in OFF {
            assert!(is_ours(on) && is_ours(off) && on != off, "{on}, {off}");
            assert!(names.iter().any(|(_, ours)| ours == on), "no name stands for {on}");
        }
        for (key, value, ours, _) in VALUES {
            assert!(is_ours(key) && is_ours(ours), "{key}, {ours}");
            assert!(!is_ours(&format!("{key}={value}")), "{key}={value} is ours");
        }
        for (others, _) in OTHER_VALUES {
            assert!(others.iter().all(|name| find(name).is_some()), "{others:?}");
        }
        for name in WITHOUT_KEY.iter().flat_map(|(names, _)| names.iter()) {
            assert!(find(name).is_none() && matches!(schema::lookup(name), Meaning::Nothing), "{name}");
        }
    }

    #[test]
    fn names_of_other_tools_are_answered_with_their_values() {
        let cases = [
            ("num_workers", None, "`loader.workers`"),
            ("num_workers", Some("4"), "`loader.workers=4`"),
            (
                "num_workers",
                Some("0"),
                "`loader.workers=1`, the fewest: data is always read beside the training",
            ),
            ("--learning-rate", Some("1e-3"), "`optimizer.lr=1e-3`"),
            ("training.max_steps", None, "`train.steps`"),
            ("bf16", None, "`precision=bf16`"),
            ("bf16", Some("True"), "`precision=bf16`"),
            ("bf16", Some("False"), "`precision=fp32`"),
            ("tf32", Some("false"), "`precision=fp32`"),
            ("use_tf32", Some("false"), "`precision=fp32`"),
            ("use_fp8", Some("false"), "`precision=bf16`"),
            ("use_flash_attention", Some("false"), "`attention=naive`"),
            ("gradient_checkpointing", Some("false"), "`recompute=none`"),
            ("torch_compile", Some("false"), "`compile=off`"),
            ("use_torch_compile", Some("true"), "`compile=default`"),
            ("torch_compile", Some("max-autotune"), "`compile=max-autotune`"),
            ("fused_adamw", Some("false"), "`fuse.optimizer=off`"),
            ("no_compile", None, "`compile=off`"),
            ("disable_tf32", None, "`precision=fp32`"),
            ("AdamW8bit", None, "`optimizer.state=int8`"),
            ("use_8bit_optim", Some("true"), "`optimizer.state=int8`"),
            ("optim", Some("adamw_torch_fused"), "`fuse.optimizer=on`, which is the default"),
            ("optimizer_type", Some("AdamW8bit"), "`optimizer.state=int8`"),
            ("optimizer_type", Some("lion"), "`optimizer.name` (adamw, muon)"),
            ("attn_implementation", Some("flash_attention_2"), "`attention=flash`"),
            ("sample_packing", Some("true"), "`packing=on`"),
            ("validation_file", Some("v.jsonl"), "`data.held_out_path=v.jsonl`"),
            ("--eval-file", None, "`data.held_out_path`"),
            ("beta2", Some("0.95"), "`optimizer.betas`, both in one, as in betas=0.9,0.95"),
            ("train_on_inputs", Some("false"), "`data.train_on=assistant`"),
            ("load_in_4bit", Some("true"), "`base=nf4`"),
            ("experiment", Some("rtx3090_optimized"), "the option `--with rtx3090`"),
            ("output_dir", Some("out"), "the option `--run DIR`"),
        ];
        for (name, value, expected) in cases {
            assert_eq!(answer(name, value), Some(format!("here that is {expected}")), "{name} {value:?}");
        }
        assert!(answer("pin_memory", Some("true")).unwrap().starts_with("nothing has to be set"));
        assert!(answer("use_qlora", Some("true")).unwrap().contains("`adapter.kind=lora base=nf4`"));
        assert_eq!(answer("lr", Some("1")), None);
    }
}
