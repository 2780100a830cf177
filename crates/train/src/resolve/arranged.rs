//! Decides the layout of examples of unequal length: resolves `packing` and `length_buckets` for a config.

use flatout_data::{Arrangement, BatchLimits, Layout, LayoutOptions, Shape, arrange};

use flatout_models::vision::{Qwen3VlConfig, SCOPE};

use crate::UserError;
use crate::config::pattern::matches;
use crate::config::{AdapterKind, Config, Task};
use crate::refuse;
use crate::switches::data::{
    HEAD_ROWS, HeadRows, LAST_LAYER, LENGTH_BUCKETS, PACKING, SHARED_PREFIX, WITHIN_UPDATES,
};
use crate::switches::{Choose, Chosen};
use crate::tasks::capacities::trims_last_layer;
use crate::tasks::examples::{self, lengths};
use crate::weights::pretrained;

/// `packing=auto` turns packing on, which needs other attention kernels, if it saves this share of the computed tokens.
const WORTH_PACKING: f64 = 0.02;

/// The head runs only on the learned rows if these are less than this share.
const WORTH_READING: f64 = 0.9;

/// The layout of micro-batches of at most `rows` rows, and the choices of `auto`.
pub(crate) fn arranged(
    config: &Config,
    rows: usize,
) -> Result<Option<(Arrangement, Vec<Chosen>)>, UserError> {
    let Some(lengths) = lengths(config) else { return Ok(None) };
    let context = config.model.tokens();
    if lengths.longest() > context {
        refuse!(
            "an example has {} tokens and model.context is {context}: raise it, or cut the examples",
            lengths.longest()
        );
    }
    let (packing, buckets) = (config.switches.data.packing, config.switches.data.length_buckets);
    let is_sorted = buckets == Choose::On;
    if is_sorted && packing == Choose::On {
        refuse!(
            "`length_buckets=on` has no effect with `packing=on`, which leaves no padding: leave one of them out"
        );
    }
    let learned = lengths.learned_share();
    let reads_learned = match config.switches.data.head_rows {
        _ if config.model.class_head().is_some() => false,
        HeadRows::Answers => true,
        HeadRows::All => false,
        HeadRows::Auto => learned < WORTH_READING,
    };
    check_last_layer(config)?;
    let shares_prefixes = shares_prefixes(config)?;
    let block = config.model.as_qwen3_vl().map_or(1, Qwen3VlConfig::block);
    let together = config.together();
    let (batch, rows) = (config.train.batch * together, rows * together);
    let extents = BatchLimits { batch, rows, context, block, together };
    let always_sees = lengths.has_images() && trains_tower(config);
    if lengths.has_images() {
        check_images(config)?;
    }
    let of = |is_packed: bool| {
        let has_buckets = buckets != Choose::Off;
        let manner =
            LayoutOptions { is_packed, has_buckets, is_sorted, reads_learned, shares_prefixes, always_sees };
        arrange(&lengths, extents, manner)
    };
    let mut chosen = vec![];
    let mut choose =
        |switch, value: &str, why: String| chosen.push(Chosen { switch, value: value.into(), why });
    let arrangement = match packing {
        Choose::On => of(true),
        Choose::Off => of(false),
        Choose::Auto if lengths.has_images() => {
            choose(PACKING.name, "on", "examples with images lie one after another".into());
            of(true)
        }
        Choose::Auto if shares_prefixes => {
            let why = match config.switches.data.shared_prefix {
                Choose::On => "shared_prefix=on lays examples one after another",
                _ => "the answers of a pair follow one prompt",
            };
            choose(PACKING.name, "on", why.into());
            of(true)
        }
        Choose::Auto if is_sorted => {
            choose(PACKING.name, "off", "length_buckets=on fills rows of like length".into());
            of(false)
        }
        Choose::Auto => {
            let (packed, padded) = (of(true), of(false));
            match packed.computed_tokens() < (1.0 - WORTH_PACKING) * padded.computed_tokens() {
                true => {
                    choose(PACKING.name, "on", packed.words());
                    packed
                }
                false => {
                    choose(
                        PACKING.name,
                        "off",
                        format!("examples are about equally long: {}", padded.words()),
                    );
                    padded
                }
            }
        }
    };
    if buckets == Choose::Auto {
        match arrangement.layout.shapes().len() {
            1 => choose(LENGTH_BUCKETS.name, "off", "one plan is enough for these lengths".into()),
            _ => choose(LENGTH_BUCKETS.name, WITHIN_UPDATES, arrangement.words()),
        }
    }
    if config.switches.data.head_rows == HeadRows::Auto && config.model.class_head().is_none() {
        let (value, percent) = (if reads_learned { "answers" } else { "all" }, 100.0 * learned);
        choose(HEAD_ROWS.name, value, format!("{percent:.0}% of the tokens are learned"));
    }
    if config.switches.data.last_layer == HeadRows::Auto && reads_learned {
        let (value, why) = match trims_last_layer(config) {
            true => ("answers", "after its attention only the rows of the head are read"),
            false => ("all", "one layer is applied again and again, and sees all rows"),
        };
        choose(LAST_LAYER.name, value, why.into());
    }
    if config.switches.data.shared_prefix == Choose::Auto {
        let (value, why) = match (shares_prefixes, together) {
            (true, _) => ("on", "the answers of a pair share their prompt"),
            (false, 1) => {
                ("off", "it would keep examples that begin alike together, which changes their order")
            }
            (false, _) => ("off", "answers in rows, or of a model that sees a window, do not share a prompt"),
        };
        choose(SHARED_PREFIX.name, value, why.into());
    }
    Ok(Some((arrangement, chosen)))
}

/// Refuses `last_layer=answers` for models whose layers are not decoder blocks.
fn check_last_layer(config: &Config) -> Result<(), UserError> {
    if config.switches.data.last_layer == HeadRows::Answers && config.model.as_decoder().is_none() {
        refuse!("`last_layer=answers` needs a decoder with attention blocks: give last_layer=all");
    }
    Ok(())
}

/// Whether weights of the tower are trained or have adapters: then every plan contains the tower.
pub fn trains_tower(config: &Config) -> bool {
    let parameters = pretrained::parameters(&config.model);
    let mut tower = parameters.keys().filter(|path| matches(SCOPE, path));
    let names = |patterns: &[String], path: &str| patterns.iter().any(|pattern| matches(pattern, path));
    match config.adapter.kind {
        AdapterKind::None => tower.any(|path| !names(&config.train.freeze, path)),
        _ => {
            let groups = config.adapter.all();
            tower.any(|path| {
                groups.iter().any(|group| names(&group.paths, path))
                    || names(&config.adapter.also_train, path)
            })
        }
    }
}

/// Refuses images in padded rows: their patches are always packed.
fn check_images(config: &Config) -> Result<(), UserError> {
    let switches = &config.switches.data;
    if switches.packing == Choose::Off || switches.length_buckets == Choose::On {
        refuse!(
            "examples with images lie one after another, and `packing=off` or `length_buckets=on` gives each a row: leave \
             it out"
        );
    }
    Ok(())
}

/// Whether examples share the computation of a common prefix; an error says why they cannot.
fn shares_prefixes(config: &Config) -> Result<bool, UserError> {
    let switches = &config.switches.data;
    if switches.shared_prefix != Choose::On {
        return Ok(examples::shares_prefixes(config));
    }
    if config.preference.loss.is_judged() && config.data.task == Task::Preference {
        refuse!(
            "`shared_prefix=on` needs answers in pairs, and kto has one answer per prompt: give shared_prefix=off"
        );
    }
    if switches.packing == Choose::Off || switches.length_buckets == Choose::On {
        refuse!(
            "`shared_prefix=on` lays examples one after another, and `packing=off` or `length_buckets=on` gives each a row: \
             leave one out"
        );
    }
    match config.model.as_decoder() {
        Some(decoder) if config.model.class_head().is_none() => match decoder.is_causal() {
            true => Ok(true),
            false => refuse!(
                "`shared_prefix=on` needs layers that see every earlier token, and this model's see a window or both \
                 ways: give shared_prefix=off"
            ),
        },
        _ => {
            refuse!(
                "`shared_prefix=on` needs a model that predicts text with attention: give shared_prefix=off"
            )
        }
    }
}

/// The layout of held-out examples: the largest plan, or one of `eval.micro_batch` rows.
pub fn eval_layout(config: &Config, arrangement: &Arrangement) -> Layout {
    let (largest, context) = (arrangement.layout.shapes()[0], config.model.tokens());
    let seen = arrangement.layout.seen().map(|seen| vec![seen[0]]);
    let Some(rows) = config.eval.micro_batch.given() else {
        let read = arrangement.layout.read(0).map(|rows| vec![rows]);
        let layout =
            Layout::with_loss_rows(vec![largest], read).sharing(arrangement.layout.trees()).with_images(seen);
        return layout.comparing(arrangement.layout.together());
    };
    let together = arrangement.layout.together();
    let rows = rows * together;
    let shape = match largest {
        Shape::Packed { segments, .. } => {
            Shape::Packed { tokens: (rows * context).next_multiple_of(128), segments }
        }
        Shape::Padded { .. } => Shape::Padded { rows, len: context },
    };
    let trees = arrangement.layout.trees().map(|most| most.min(shape.tokens()));
    Layout::new(vec![shape]).sharing(trees).with_images(seen).comparing(together)
}
