//! `recipes` and `schema`: list the recipes and the keys.

use std::process::ExitCode;

use flatout_train::Failure;
use flatout_train::UserError;
use flatout_train::config;
use flatout_train::recipes as embedded;

use crate::args::{Recipes, Schema, Show, recipe_and_overrides};
use crate::screen::Screen;

pub fn recipes(args: &Recipes, screen: &Screen) -> Result<ExitCode, Failure> {
    match &args.show {
        Some(Show::Show { words }) => {
            let (recipe, overrides) = recipe_and_overrides(words);
            let config = embedded::resolve(recipe, &[], overrides)?;
            if screen.json { screen.object(&config) } else { screen.result(config.to_toml().trim_end()) }
        }
        None if screen.json => screen.object(&embedded::as_json()),
        None => {
            let (recipes, presets) = (embedded::list(), embedded::presets());
            let names = recipes.iter().chain(presets).map(|recipe| recipe.name.len());
            let width = names.max().unwrap_or(0);
            for recipe in recipes {
                screen.result(format!("{:width$} {}", recipe.name, recipe.description()));
            }
            screen.result("\npresets, for --with:");
            for preset in presets {
                screen.result(format!("{:width$} {}", preset.name, preset.description()));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

pub fn schema(args: &Schema, screen: &Screen) -> Result<ExitCode, Failure> {
    let mut keys = config::schema();
    if let Some(word) = &args.word {
        let is_named =
            |key: &config::SchemaKey| key.path.strip_prefix("switches.").unwrap_or(&key.path) == word;
        if word.contains('.') && keys.iter().any(|key| is_named(key) || key.path == *word) {
            keys.retain(|key| is_named(key) || key.path == *word);
        }
        let (name, words) = (word.to_lowercase(), word.to_lowercase().replace('_', " "));
        let all = keys.clone();
        keys.retain(|key| key.path.contains(&name) || key.doc.to_lowercase().contains(&words));
        if keys.is_empty() {
            let paths: Vec<&str> = all.iter().map(|key| key.path.as_str()).collect();
            let names: Vec<&str> = paths.iter().map(|path| path.rsplit('.').next().unwrap_or(path)).collect();
            let nearest = || config::suggestion(word, &paths).or_else(|| config::suggestion(word, &names));
            let answer =
                config::answer(word).or_else(nearest).unwrap_or("flatout schema lists them all".into());
            return Err(UserError(format!("no key has `{word}` in its name or description; {answer}")).into());
        }
    }
    if screen.json {
        screen.object(&keys);
        return Ok(ExitCode::SUCCESS);
    }
    if let [only] = &keys[..] {
        detailed(only, screen);
        return Ok(ExitCode::SUCCESS);
    }
    for key in keys {
        let default = key.default.unwrap_or_default();
        screen.result(format!("{:28} {default:22} {} Takes {}.", key.path, key.doc, key.wants));
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints one key in detail.
fn detailed(key: &config::SchemaKey, screen: &Screen) {
    screen.result(&key.path);
    screen.result(format!("  {}", key.doc));
    let default = key.default.clone().unwrap_or_else(|| match key.required {
        true => "none: it must be given".into(),
        false => "none: it may be left out".into(),
    });
    screen.result(format!("  Takes {}.", key.wants));
    if let Some(range) = range(&key.path) {
        screen.result(format!("  range    {range}"));
    }
    screen.result(format!("  default  {default}"));
    if let [first, ..] = key.values[..] {
        screen.result(format!("  as in    {}={first}", key.path.trim_start_matches("switches.")));
    }
}

/// The bounds of a number, taken from the errors for values outside of them.
fn range(path: &str) -> Option<String> {
    let mut all: Vec<String> = vec![];
    for value in ["-1", "0", "1e30", "1000000000000000"] {
        let refused = embedded::list().iter().find_map(|recipe| {
            let refused =
                embedded::resolve(recipe.name, &[], &[format!("{path}={value}")]).err()?.to_string();
            let (_, bounds) = refused.strip_prefix(&format!("`{path}` is "))?.split_once(" and m")?;
            Some(format!("m{bounds}"))
        });
        all.extend(refused.filter(|bounds| !all.contains(bounds)));
    }
    (!all.is_empty()).then(|| all.join(", "))
}
