//! `recipes` and `schema`: what can be trained, and what can be set.

use std::process::ExitCode;

use flatout_train::Failure;
use flatout_train::UserError;
use flatout_train::config;
use flatout_train::recipes as embedded;
use serde_json::json;

use crate::args::{Recipes, Schema, Show, recipe_and_overrides};
use crate::screen::Screen;

pub fn recipes(args: &Recipes, screen: &Screen) -> Result<ExitCode, Failure> {
    match &args.show {
        Some(Show::Show { words }) => {
            let (recipe, overrides) = recipe_and_overrides(words);
            let config = embedded::resolve(recipe, &[], overrides)?;
            if screen.json { screen.object(&config) } else { screen.result(config.to_toml().trim_end()) }
        }
        None if screen.json => {
            let row = |r: &embedded::Embedded| json!({ "name": r.name, "description": r.description() });
            let rows: Vec<_> = embedded::list().iter().map(row).collect();
            let presets: Vec<_> = embedded::presets().iter().map(row).collect();
            screen.object(&json!({ "recipes": rows, "presets": presets }));
        }
        None => {
            for recipe in embedded::list() {
                screen.result(format!("{:16} {}", recipe.name, recipe.description()));
            }
            screen.result("\npresets, for --with:");
            for preset in embedded::presets() {
                screen.result(format!("{:16} {}", preset.name, preset.description()));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

pub fn schema(args: &Schema, screen: &Screen) -> Result<ExitCode, Failure> {
    let mut keys = config::schema();
    if let Some(word) = &args.word {
        let (name, words) = (word.to_lowercase(), word.to_lowercase().replace('_', " "));
        keys.retain(|key| key.path.contains(&name) || key.doc.to_lowercase().contains(&words));
        if keys.is_empty() {
            let answer = config::answer(word).unwrap_or("flatout schema lists them all".into());
            return Err(UserError(format!("no key has `{word}` in its name or its line; {answer}")).into());
        }
    }
    if screen.json {
        screen.object(&keys);
        return Ok(ExitCode::SUCCESS);
    }
    for key in keys {
        let default = key.default.unwrap_or_default();
        screen.result(format!("{:28} {default:22} {} Takes {}.", key.path, key.doc, key.wants));
    }
    Ok(ExitCode::SUCCESS)
}
