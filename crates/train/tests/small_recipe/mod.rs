//! Every recipe small enough to be compiled for many settings, and where it may be compiled for.

use flatout_ir::Target;
use flatout_train::{Config, compile, device, recipes};

/// A recipe with its own choices and small sizes, that evaluates so many rows.
pub fn small(recipe: &str, eval_rows: usize) -> Config {
    let heads = recipes::resolve(recipe, &[], &[]).expect("a recipe").model.decoder().heads;
    let width = format!("model.width={}", 16 * heads);
    let eval = format!("eval.rows={eval_rows}");
    let words = [
        width.as_str(),
        "model.head_size=16",
        "model.layers=2",
        "model.ffn=96",
        "model.vocab=512",
        "model.context=32",
        "train.batch=4",
        "train.micro_batch=2",
        eval.as_str(),
        // Both go by evaluations, of which there may be none.
        "train.patience=none",
        "checkpoint.best=false",
    ];
    recipes::resolve(recipe, &[], &words.map(String::from)).expect("a small recipe")
}

/// The CPU, or a GPU that need not be here.
pub fn target(place: &str, config: &Config) -> Target {
    match place {
        "cpu" => compile::target(),
        gpu => device::named(gpu, &config.switches).expect("a GPU of the table"),
    }
}
