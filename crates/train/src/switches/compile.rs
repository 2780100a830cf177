//! The alias `compile`: `torch.compile`'s modes as settings of several switches.

use flatout_settings::choice;

use super::value::{Autotune, Choose, Toggle};
use super::{Class, GUIDES, HF, ROW, Switch, elsewhere, fuse, kernels};

choice! {
    /// `torch.compile`'s modes as settings of switches.
    pub enum Compile {
        Off = "off",
        Default = "default",
        ReduceOverhead = "reduce-overhead",
        MaxAutotune = "max-autotune",
    }
}

/// It has no field: it is replaced by the settings that it stands for.
pub const COMPILE: Switch = Switch {
    name: "compile",
    doc: "Sets every fuse.*, cuda_graphs and autotune as torch.compile's modes do: all off, fused (default), with graphs (reduce-overhead), with graphs and all algorithms timed (max-autotune).",
    class: Class::Bounded,
    off: Some("off"),
    guides_word: "torch.compile modes",
    elsewhere: &[
        elsewhere(HF, "torch_compile", "compile=default"),
        elsewhere(HF, "torch_compile_mode", "compile"),
        elsewhere(GUIDES, "use_compile", "compile=default"),
        elsewhere(GUIDES, "use_torch_compile", "compile=default"),
        elsewhere(GUIDES, "compile_model", "compile=default"),
        elsewhere(GUIDES, "compile_mode", "compile"),
    ],
    ..ROW
};

impl Compile {
    /// The switches it sets, as full paths and values.
    pub fn settings(self) -> Vec<(String, &'static str)> {
        let (fuse, graphs, tune) = match self {
            Compile::Off => (Toggle::Off, Choose::Off, Autotune::Off),
            Compile::Default => (Toggle::On, Choose::Off, Autotune::Quick),
            Compile::ReduceOverhead => (Toggle::On, Choose::On, Autotune::Quick),
            Compile::MaxAutotune => (Toggle::On, Choose::On, Autotune::Full),
        };
        let mut settings: Vec<_> = fuse::ROWS.iter().map(|row| (row.path(), fuse.name())).collect();
        settings.push((kernels::CUDA_GRAPHS.path(), graphs.name()));
        settings.push((kernels::AUTOTUNE.path(), tune.name()));
        settings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compile_stands_for_fusions_graphs_and_autotune() {
        let off = Compile::Off.settings();
        assert_eq!(off.len(), 9);
        assert!(off.iter().all(|(_, value)| *value == "off"));
        let mut most = Compile::MaxAutotune.settings();
        assert_eq!(most.pop(), Some(("switches.autotune".into(), "full")));
        assert!(most.iter().all(|(_, value)| *value == "on"));
    }
}
