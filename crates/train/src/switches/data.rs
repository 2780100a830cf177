//! Switches of how data is laid out, which the data itself settles: `packing`, `length_buckets`, `shared_prefix`, `head_rows`,
//! `last_layer`, `visual_tokens`, `image_table`.

use flatout_data::LayoutOptions;
use flatout_ir::passes::input_path;
use flatout_ir::passes::recompute::layer_of;
use flatout_ir::{OpKind, Role};
use flatout_models::images::TABLE;
use flatout_settings::choice;

use super::active::{Reading, on};
use super::value::{Choose, field};
use super::{AXOLOTL, Class, GUIDES, HF, ROW, Settle, Switch, elsewhere};

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Data {
    pub packing: Choose,
    pub length_buckets: Choose,
    pub shared_prefix: Choose,
    pub head_rows: HeadRows,
    pub last_layer: HeadRows,
    pub visual_tokens: VisualTokens,
    pub image_table: Choose,
}

choice! {
    /// The rows that the head of the vocabulary runs on, and the last layer before it.
    pub enum HeadRows { Auto = "auto", Answers = "answers", All = "all" }
}

choice! {
    /// The share of an image's tokens that a text is shown.
    pub enum VisualTokens { All = "all", ThreeQuarters = "75%", Half = "50%", Quarter = "25%" }
}

impl VisualTokens {
    pub fn percent(self) -> usize {
        match self {
            VisualTokens::All => 100,
            VisualTokens::ThreeQuarters => 75,
            VisualTokens::Half => 50,
            VisualTokens::Quarter => 25,
        }
    }
}

pub(super) const ROWS: [Switch; 7] =
    [PACKING, LENGTH_BUCKETS, SHARED_PREFIX, HEAD_ROWS, LAST_LAYER, VISUAL_TOKENS, IMAGE_TABLE];

/// The state of `length_buckets=auto` where plans of several lengths pay.
pub const WITHIN_UPDATES: &str = "within updates";

/// The state where rows are cut to one length.
const NOTHING_UNEQUAL: &str = "nothing of unequal length";

/// The state where every token is learned.
const NOTHING_ONLY_READ: &str = "nothing that is only read";

pub const PACKING: Switch = Switch {
    name: "packing",
    doc: "Places examples of unequal length one after another, each a segment, instead of padding each to a row of its own.",
    field: field!(data.packing),
    class: Class::Bounded,
    off: Some("off"),
    settle: Settle::ByLengths,
    active: packing,
    guides_word: "packing",
    elsewhere: &[
        elsewhere(AXOLOTL, "sample_packing", "packing"),
        elsewhere(GUIDES, "padding_free", "packing"),
    ],
    ..ROW
};

/// Whether examples lie one after another: then their places are inputs. A head of classes reads the places of its texts
/// in rows too, and it is the layout that tells.
fn packing(reading: &Reading<'_>) -> &'static str {
    let has = |input: &str| reading.plans.slot(&input_path(Role::GRAD, input)).is_some();
    match reading.prepared.lengths {
        None => NOTHING_UNEQUAL,
        Some(layout) if has("labels") => on(layout.is_packed),
        Some(_) => on(has("segment_start")),
    }
}

pub const LENGTH_BUCKETS: Switch = Switch {
    name: "length_buckets",
    doc: "Compiles plans of up to four sizes for unequal lengths; on also puts examples of similar length into the same update.",
    field: field!(data.length_buckets),
    class: Class::Statistical,
    off: Some("off"),
    settle: Settle::ByLengths,
    active: length_buckets,
    guides_word: "bucketed padding, length-sorted batching",
    elsewhere: &[
        elsewhere(HF, "group_by_length", "length_buckets=on"),
        elsewhere(GUIDES, "dynamic_padding", "length_buckets"),
    ],
    ..ROW
};

/// Whether micro-batches have plans of several extents, and whether updates are sorted for them, which is the order's.
fn length_buckets(reading: &Reading<'_>) -> &'static str {
    match (reading.prepared.lengths, reading.plans.grads().count()) {
        (None, _) => NOTHING_UNEQUAL,
        (Some(LayoutOptions { is_sorted: true, .. }), _) => "on",
        (Some(_), 1) => "off",
        (Some(_), _) => WITHIN_UPDATES,
    }
}

pub const SHARED_PREFIX: Switch = Switch {
    name: "shared_prefix",
    doc: "Computes a beginning that several examples share once; such examples follow one another in an epoch.",
    field: field!(data.shared_prefix),
    class: Class::Statistical,
    reorders: true,
    off: Some("off"),
    settle: Settle::ByLengths,
    // The rows that a token sees are an input.
    active: |reading| match reading.prepared.lengths {
        None => NOTHING_UNEQUAL,
        Some(_) => on(reading.plans.slot(&input_path(Role::GRAD, "intervals")).is_some()),
    },
    guides_word: "prefix sharing",
    elsewhere: &[],
    ..ROW
};

pub const HEAD_ROWS: Switch = Switch {
    name: "head_rows",
    doc: "Runs head and loss only on the rows that are trained on (answers), or on every row of a conversation (all).",
    field: field!(data.head_rows),
    class: Class::Bounded,
    off: Some("all"),
    settle: Settle::ByLengths,
    // The rows that are read are an input.
    active: |reading| {
        let has = |input: &str| reading.plans.slot(&input_path(Role::GRAD, input)).is_some();
        match reading.prepared.lengths {
            _ if !has("targets") => "nothing that predicts text",
            None => NOTHING_ONLY_READ,
            Some(_) if has("answers") => "answers",
            Some(layout) if layout.reads_learned => NOTHING_ONLY_READ,
            Some(_) => "all",
        }
    },
    guides_word: "loss on answers only",
    elsewhere: &[],
    ..ROW
};

pub const LAST_LAYER: Switch = Switch {
    name: "last_layer",
    doc: "Runs the last layer behind its attention only on the rows that the head reads (answers), or on every row (all).",
    field: field!(data.last_layer),
    class: Class::Bounded,
    off: Some("all"),
    settle: Settle::ByLengths,
    // A launch of a layer gathers the rows that are read.
    active: |reading| {
        let slot = |input: &str| reading.plans.slot(&input_path(Role::GRAD, input));
        match slot("answers") {
            _ if slot("targets").is_none() => "nothing that predicts text",
            None => "nothing to leave out: the head reads every row",
            Some(answers) => {
                let is_trimmed = reading.launches(OpKind::Gather).any(|launch| {
                    launch.ins[1].offset == answers.view.offset && layer_of(&launch.path).is_some()
                });
                if is_trimmed { "answers" } else { "all" }
            }
        }
    },
    guides_word: "last layer on answers only",
    elsewhere: &[],
    ..ROW
};

pub const VISUAL_TOKENS: Switch = Switch {
    name: "visual_tokens",
    doc: "Share of an image's tokens that the text model sees: those whose pixels stand out. The tower sees the whole image.",
    field: field!(data.visual_tokens),
    class: Class::Statistical,
    rereads: true,
    off: Some("all"),
    settle: Settle::ByModel(|settling| {
        settling.settled.visual_tokens = settling.asked.data.visual_tokens;
        Ok(())
    }),
    // Plans have as many tokens as examples were read with, and a tower where these have images.
    active: |reading| {
        let has_tower = reading.plans.slot(&input_path(Role::GRAD, "patches")).is_some();
        match reading.prepared.lengths {
            _ if !has_tower => "nothing that sees images",
            None => "nothing that was read",
            Some(_) => reading.prepared.visual_tokens.name(),
        }
    },
    guides_word: "visual token pruning",
    elsewhere: &[],
    ..ROW
};

pub const IMAGE_TABLE: Switch = Switch {
    name: "image_table",
    doc: "Keeps the images of a small set on the device as one table of bytes, from which each step cuts its crops.",
    field: field!(data.image_table),
    class: Class::Bitwise,
    off: Some("off"),
    settle: Settle::ByImages,
    // Images lie in the arena and are cut by launches, or are written by the loader. There may be none, or they lie encoded,
    // or in files that are not open yet.
    active: |reading| match (reading.plans.slot(TABLE), reading.prepared.decoded) {
        (Some(_), _) => "on",
        (None, true) => "off",
        (None, false) => "nothing that lies decoded",
    },
    guides_word: "the whole set on the GPU",
    elsewhere: &[elsewhere(GUIDES, "gpu_dataset", "image_table")],
    ..ROW
};
