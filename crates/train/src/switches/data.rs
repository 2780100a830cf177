//! Switches of the layout of data, most of which depend on the data: `packing`, `length_buckets`, `shared_prefix`, `head_rows`,
//! `last_layer`, `visual_tokens`, `image_table`.

use flatout_data::LayoutOptions;
use flatout_ir::passes::input_path;
use flatout_ir::passes::recompute::layer_of;
use flatout_ir::{OpKind, Role};
use flatout_models::images::TABLE;
use flatout_settings::choice;

use super::active::{CompiledView, on};
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
    /// The rows that the head, or the last layer, runs on.
    pub enum HeadRows { Auto = "auto", Answers = "answers", All = "all" }
}

choice! {
    /// The share of an image's tokens that the text model sees.
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

/// The state of `length_buckets=auto` if plans of several lengths pay off.
pub const WITHIN_UPDATES: &str = "within updates";

/// The state if rows are cut to one length.
const NOTHING_UNEQUAL: &str = "nothing of unequal length";

/// The state if every token is trained on.
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

/// Whether examples are packed: then the starts of segments are an input. A head of classes reads them without packing too, so there
/// the layout decides.
fn packing(view: &CompiledView<'_>) -> &'static str {
    let has = |input: &str| view.plans.slot(&input_path(Role::GRAD, input)).is_some();
    match view.prepared.lengths {
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

/// Whether micro-batches have plans of several sizes, and whether updates are sorted by length for them.
fn length_buckets(view: &CompiledView<'_>) -> &'static str {
    match (view.prepared.lengths, view.plans.grads().count()) {
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
    // With a shared prefix, the intervals of rows that each token sees are an input.
    active: |view| match view.prepared.lengths {
        None => NOTHING_UNEQUAL,
        Some(_) => on(view.plans.slot(&input_path(Role::GRAD, "intervals")).is_some()),
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
    // The rows that the head reads are an input.
    active: |view| {
        let has = |input: &str| view.plans.slot(&input_path(Role::GRAD, input)).is_some();
        match view.prepared.lengths {
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
    // If the last layer is trimmed, one of its launches gathers the rows that the head reads.
    active: |view| {
        let slot = |input: &str| view.plans.slot(&input_path(Role::GRAD, input));
        match slot("answers") {
            _ if slot("targets").is_none() => "nothing that predicts text",
            None => "nothing to leave out: the head reads every row",
            Some(answers) => {
                let is_trimmed = view.launches(OpKind::Gather).any(|launch| {
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
        settling.settled.visual_tokens = settling.requested.data.visual_tokens;
        Ok(())
    }),
    // Plans have the number of tokens that examples were read with, and a tower if examples have images.
    active: |view| {
        let has_tower = view.plans.slot(&input_path(Role::GRAD, "patches")).is_some();
        match view.prepared.lengths {
            _ if !has_tower => "nothing that sees images",
            None => "nothing that was read",
            Some(_) => view.prepared.visual_tokens.name(),
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
    // Images are in the arena and are cropped by launches, or the loader writes crops. There may be no images, or they are encoded or in
    // files that are not open yet.
    active: |view| match (view.plans.slot(TABLE), view.prepared.decoded) {
        (Some(_), _) => "on",
        (None, true) => "off",
        (None, false) => "nothing that lies decoded",
    },
    guides_word: "the whole set on the GPU",
    elsewhere: &[elsewhere(GUIDES, "gpu_dataset", "image_table")],
    ..ROW
};
