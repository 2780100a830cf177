//! Resolves each switch for a target and a model: a value that cannot run is refused, `auto` is decided and says why.

use flatout_data::Arrangement;
use flatout_ir::{Options, Target};
use flatout_models::config::Model;

use super::data::VisualTokens;
use super::value::{AttentionKernel, Autotune, ProductKernel};
use super::{Switches, TABLE};
use crate::UserError;

/// The value that `auto` of a switch or a key was resolved to, with the reason.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Chosen {
    pub switch: &'static str,
    pub value: String,
    pub why: String,
}

/// The resolved switches: compiler options, other settings, and the choices made for `auto`.
#[derive(Clone, Debug)]
pub struct Settled {
    pub options: Options,
    pub chosen: Vec<Chosen>,
    /// Plans are replayed as CUDA graphs.
    pub cuda_graphs: bool,
    /// Which algorithms of products are timed.
    pub autotune: Autotune,
    /// Only kernels that give the same bits every time.
    pub deterministic: bool,
    /// The arena is a window of NCCL's communicators.
    pub window: bool,
    /// The only kernel that attention may run on.
    pub attention_kernel: AttentionKernel,
    /// The kernel that products run on where it supports them.
    pub product_kernel: ProductKernel,
    /// The share of an image's tokens that the text model sees.
    pub visual_tokens: VisualTokens,
    /// How examples are laid out; none if rows of text are equally long.
    pub arrangement: Option<Arrangement>,
    /// Images are known to be stored decoded and to have one size.
    pub decoded: bool,
}

impl Settled {
    /// Adds the layout that follows from the lengths of examples, and the choices of `auto` about it.
    pub(crate) fn with_lengths(mut self, arranged: Option<(Arrangement, Vec<Chosen>)>) -> Settled {
        if let Some((arrangement, chosen)) = arranged {
            self.arrangement = Some(arrangement);
            self.chosen.extend(chosen);
        }
        self
    }

    /// The choice made for a switch or a key that was `auto`.
    pub fn choice(&self, name: &str) -> Option<&Chosen> {
        self.chosen.iter().find(|chosen| chosen.switch == name)
    }

    /// Records a choice, and replaces an earlier one for the same switch.
    pub fn choose(&mut self, switch: &'static str, value: impl Into<String>, why: impl Into<String>) {
        let chosen = Chosen { switch, value: value.into(), why: why.into() };
        match self.chosen.iter_mut().find(|earlier| earlier.switch == switch) {
            Some(earlier) => *earlier = chosen,
            None => self.chosen.push(chosen),
        }
    }
}

/// Resolves one switch.
pub type Step = fn(&mut Settling<'_>) -> Result<(), UserError>;

/// How a switch is resolved. Switches that depend on the target come first; otherwise the order is the table's.
#[derive(Clone, Copy, Debug)]
pub enum Settle {
    ByTarget(Step),
    /// By the model, or by switches that are resolved already.
    ByModel(Step),
    /// By `resolve::arranged`, which knows the lengths of the examples.
    ByLengths,
    /// By `tasks::image_table`, which knows the images.
    ByImages,
    /// Not at all: an alias sets other switches.
    Alias,
}

/// The arguments and results of a step that resolves a switch.
pub struct Settling<'a> {
    pub requested: &'a Switches,
    pub model: &'a Model,
    pub target: &'a Target,
    pub settled: Settled,
    name: &'static str,
}

impl Settling<'_> {
    pub fn on_gpu(&self) -> bool {
        self.target.name != "cpu"
    }

    /// Records the value that `auto` resolves to for the row's switch.
    pub fn choose(&mut self, value: &str, why: impl Into<String>) {
        self.settled.choose(self.name, value, why);
    }
}

/// Resolves every switch that depends on neither data nor plans.
pub fn settle(requested: &Switches, model: &Model, target: &Target) -> Result<Settled, UserError> {
    for row in TABLE {
        row.available(row.value(requested).unwrap_or_default(), target).map_err(UserError)?;
    }
    let settled = Settled {
        options: Options::default(),
        chosen: vec![],
        cuda_graphs: false,
        autotune: Autotune::Off,
        deterministic: false,
        window: false,
        attention_kernel: AttentionKernel::Auto,
        product_kernel: ProductKernel::Auto,
        visual_tokens: VisualTokens::All,
        arrangement: None,
        decoded: false,
    };
    let mut settling = Settling { requested, model, target, settled, name: "" };
    let by_target = |settle| if let Settle::ByTarget(step) = settle { Some(step) } else { None };
    let by_model = |settle| if let Settle::ByModel(step) = settle { Some(step) } else { None };
    for stage in [by_target, by_model] {
        for row in TABLE {
            if let Some(step) = stage(row.settle) {
                settling.name = row.name;
                step(&mut settling)?;
            }
        }
    }
    Ok(settling.settled)
}
