//! Damaged configs: no panic, no hang, bounded memory, and a one-sentence error that names the origin.

use flatout_fuzz::{Limits, feed};
use flatout_train::Config;
use flatout_train::recipes;

/// A config that is accepted reads back as the same config.
#[test]
fn config() {
    let mut seeds: Vec<Vec<u8>> = recipes::list().iter().map(|recipe| recipe.text.into()).collect();
    for recipe in recipes::list() {
        seeds.push(recipes::resolve(recipe.name, &[], &[]).unwrap().to_toml().into());
    }
    feed("config", &seeds, Limits::default(), |bytes| {
        let text = String::from_utf8_lossy(bytes);
        match Config::parse(&text, "fuzzed.toml") {
            Ok(config) => {
                let written = config.to_toml();
                let again =
                    Config::parse(&written, "written").unwrap_or_else(|error| panic!("{error}\n{written}"));
                assert_eq!(again.to_toml(), written);
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    });
}

#[test]
fn overrides() {
    let seeds =
        ["lr=1e-3", "optimizer.betas=[0.9,0.95]", "precision=bf16", "train.steps=none", "data.path=a b.txt"];
    let seeds: Vec<Vec<u8>> = seeds.iter().map(|seed| seed.as_bytes().to_vec()).collect();
    feed("overrides", &seeds, Limits::default(), |bytes| {
        let given = String::from_utf8_lossy(bytes).into_owned();
        if let Ok(config) = recipes::resolve("tiny", &[], &[given]) {
            let written = config.to_toml();
            assert_eq!(Config::parse(&written, "written").unwrap().to_toml(), written);
        }
    });
}
