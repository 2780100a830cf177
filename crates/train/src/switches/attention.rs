//! Switches of attention: `attention`, `attention_kernel`.

use flatout_ir::OpKind;
use flatout_settings::choice;

use super::value::{AttentionKernel, field};
use super::{AXOLOTL, Class, GUIDES, HF, ROW, Settle, Switch, TITAN, elsewhere};
use crate::refuse;

choice! {
    pub enum Attention { Auto = "auto", Flash = "flash", Naive = "naive" }
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AttentionSwitches {
    pub scores: Attention,
    pub kernel: AttentionKernel,
}

pub(super) const ROWS: [Switch; 2] = [ATTENTION, KERNEL];

pub const ATTENTION: Switch = Switch {
    name: "attention",
    doc: "Attention that does not store its scores (flash) or does (naive).",
    field: field!(attention.scores),
    class: Class::Bounded,
    off: Some("naive"),
    settle: Settle::ByModel(|s| {
        if s.requested.attention.scores == Attention::Auto {
            s.choose("flash", format!("{} has a kernel that stores no scores", s.target.name));
        }
        s.settled.options.flash_attention = s.requested.attention.scores != Attention::Naive;
        Ok(())
    }),
    // With flash, softmax or linear attention is a single launch.
    active: |view| match view.has(OpKind::Attention) || view.has(OpKind::LinearAttention) {
        true => "flash",
        false => "naive",
    },
    guides_word: "SDPA, flash attention",
    elsewhere: &[
        elsewhere(HF, "attn_implementation", "attention"),
        elsewhere(AXOLOTL, "flash_attention", "attention=flash"),
        elsewhere(AXOLOTL, "sdp_attention", "attention=flash"),
        elsewhere(TITAN, "attn_type", "attention"),
        elsewhere(GUIDES, "use_flash_attention", "attention=flash"),
        elsewhere(GUIDES, "flash_attn", "attention=flash"),
    ],
    ..ROW
};

pub const KERNEL: Switch = Switch {
    name: "attention_kernel",
    doc: "Kernel of attention on a GPU; auto is the fastest, or follows a rule where autotune is off.",
    field: field!(attention.kernel),
    class: Class::Bounded,
    off: Some("fma"),
    refusal: |value, target| {
        if value == AttentionKernel::Auto.name() {
            return None;
        }
        if target.name == "cpu" {
            return Some("cannot run on the CPU: it names a kernel of a GPU; leave it out".into());
        }
        let missing = target.missing.iter().find(|(name, _)| *name == value);
        missing.map(|(_, why)| format!("cannot run: {why}"))
    },
    settle: Settle::ByModel(|s| {
        let kernel = s.requested.attention.kernel;
        if kernel != AttentionKernel::Auto && !s.settled.options.flash_attention {
            refuse!(
                "`attention_kernel={}` cannot run with `attention=naive`, which has no such kernel",
                kernel.name()
            );
        }
        s.settled.attention_kernel = kernel;
        Ok(())
    }),
    active: |view| view.prepared.attention_kernel.name(),
    guides_word: "SDPA backend",
    elsewhere: &[elsewhere(GUIDES, "sdpa_kernel", "attention_kernel")],
    ..ROW
};
