//! Every recipe in a size small enough to be compiled for many settings, and the targets it is compiled for.

use std::collections::HashSet;

use flatout_ir::Target;
use flatout_models::config::Model;
use flatout_train::Config;
use flatout_train::device;
use flatout_train::recipes;
use flatout_train::resolve::compile;

/// The names of recipes that still differ, once they are small, in more than their learning rates: of models in several sizes
/// only one.
pub fn different() -> Vec<&'static str> {
    let of_name = ["recipe", "description", "optimizer.lr", "schedule.final_lr"];
    let mut seen = HashSet::new();
    let is_new = |name: &&str| {
        let mut values = small(name, 0).values();
        values.retain(|key, _| !of_name.contains(&key.as_str()));
        seen.insert(values.into_iter().collect::<Vec<_>>())
    };
    recipes::list().iter().map(|recipe| recipe.name).filter(is_new).collect()
}

/// A recipe with its own choices but small sizes, which evaluates `eval_rows` rows.
pub fn small(recipe: &str, eval_rows: usize) -> Config {
    let model = recipes::resolve(recipe, &[], &[]).expect("a recipe").model;
    let Some(heads) = model.as_decoder().map(|decoder| decoder.heads) else {
        return small_images(recipe, &model, eval_rows);
    };
    if model.as_decoder().is_some_and(|decoder| decoder.vision.is_some()) {
        return small_sighted(recipe, eval_rows);
    }
    let width = format!("model.width={}", 16 * heads);
    let eval = format!("eval.rows={eval_rows}");
    // Two layers have room for one table.
    let tables = format!("model.value_embeddings={}", model.decoder().value_embeddings.min(1));
    let words = [
        tables.as_str(),
        width.as_str(),
        "model.head_size=16",
        "model.layers=2",
        "model.ffn=96",
        "model.vocab=512",
        "model.context=32",
        "train.batch=4",
        "train.micro_batch=2",
        eval.as_str(),
        // Both depend on evaluations, of which there may be none.
        "train.patience=none",
        "checkpoint.best=false",
    ];
    recipes::resolve(recipe, &[], &words.map(String::from)).expect("a small recipe")
}

/// A small version of a recipe of questions about images.
fn small_sighted(recipe: &str, eval_rows: usize) -> Config {
    let eval = format!("eval.rows={eval_rows}");
    let words =
        ["train.batch=4", "train.micro_batch=2", eval.as_str(), "eval.metric=loss", "checkpoint.best=false"];
    recipes::resolve(recipe, &["small".into()], &words.map(String::from)).expect("a small recipe")
}

/// A small version of a recipe of images.
fn small_images(recipe: &str, model: &Model, eval_rows: usize) -> Config {
    let sizes: &[&str] = match model {
        Model::Bdh(_) => &["model.width=32", "model.latent=64"],
        _ => &["model.width=48", "model.heads=3", "model.grid=none", "train.groups=[]"],
    };
    let eval = format!("eval.rows={eval_rows}");
    let words = [
        "model.layers=2",
        "model.patch=4",
        "model.image_size=16",
        // Products in 8 bits need a multiple of 16 tokens, and an image has 17.
        "train.batch=32",
        "train.micro_batch=16",
        eval.as_str(),
        "train.patience=none",
        "checkpoint.best=false",
    ];
    let words: Vec<String> = sizes.iter().chain(&words).map(|word| word.to_string()).collect();
    recipes::resolve(recipe, &[], &words).expect("a small recipe")
}

/// The CPU, or a GPU that need not exist on this machine.
pub fn target(place: &str, config: &Config) -> Target {
    match place {
        "cpu" => compile::target(),
        gpu => device::named(gpu, &config.switches).expect("a GPU of the table"),
    }
}
