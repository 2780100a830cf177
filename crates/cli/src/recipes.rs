//! `recipes` and `schema`: what can be trained, and what can be set.

use std::process::ExitCode;

use flatout_train::Failure;
use flatout_train::config;
use flatout_train::recipes as embedded;
use serde_json::json;

use crate::args::{Recipes, Show, recipe_and_overrides};
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

pub fn schema(screen: &Screen) -> Result<ExitCode, Failure> {
    let keys = config::schema();
    if screen.json {
        screen.object(&keys);
        return Ok(ExitCode::SUCCESS);
    }
    for key in keys {
        screen.result(format!("{:28} {:22} {}", key.path, key.default.clone().unwrap_or_default(), key.doc));
    }
    Ok(ExitCode::SUCCESS)
}
