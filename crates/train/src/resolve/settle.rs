//! What every switch comes to on this machine: `on` that cannot run is refused, `auto` is decided and says why.

use std::collections::{BTreeMap, BTreeSet};

use flatout_data::Arrangement;
use flatout_ir::{
    Adapter, Graph, Moments, Options, Precision as Types, Recompute as Again, Rule, Scaling as Scales,
    Target, Update,
};
use flatout_models::config::{Model, Positions};

use crate::UserError;
use crate::config::Config;
use crate::refuse;
use crate::resolve::adapters;
use crate::resolve::fp8_layers;
use crate::resolve::groups;
use crate::resolve::recompute_layers;
use crate::switches::{
    Attention, AttentionKernel, Autotune, Backend, Choose, OptimizerState, Precision, Recompute, Scaling,
    TABLE, Toggle,
};
use crate::tasks::image_table;

/// What `auto` chose for a switch, and why.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Chosen {
    pub switch: &'static str,
    pub value: String,
    pub why: String,
}

/// Compiler options and the choices behind them.
#[derive(Clone, Debug)]
pub struct Settled {
    pub options: Options,
    pub chosen: Vec<Chosen>,
    /// Plans are replayed as CUDA graphs.
    pub cuda_graphs: bool,
    /// What is timed to choose the algorithms of products.
    pub autotune: Autotune,
    /// Only kernels that give the same bits every time.
    pub deterministic: bool,
    /// What attention must run on.
    pub attention_kernel: AttentionKernel,
    /// How examples are laid out; none where rows of text are equally long.
    pub arrangement: Option<Arrangement>,
    /// Images are known to lie decoded and to be of one size.
    pub decoded: bool,
}

impl Settled {
    /// With what the lengths of examples come to, and what `auto` chose by them.
    pub(crate) fn with_lengths(mut self, arranged: Option<(Arrangement, Vec<Chosen>)>) -> Settled {
        if let Some((arrangement, chosen)) = arranged {
            self.arrangement = Some(arrangement);
            self.chosen.extend(chosen);
        }
        self
    }
}

/// Settles the switches for a target and a model.
pub fn settle(config: &Config, target: &Target, model: &Graph) -> Result<Settled, UserError> {
    let switches = &config.switches;
    for row in TABLE {
        let asked = switches.get(row.name).unwrap_or_default();
        row.available(&asked, target).map_err(UserError)?;
    }
    let mut chosen = vec![];
    let mut choose =
        |switch, value: &str, why: String| chosen.push(Chosen { switch, value: value.into(), why });
    let on_gpu = target.name != "cpu";
    if switches.backend == Backend::Auto {
        match on_gpu {
            true => choose("backend", "cuda", format!("there is an {} to use", target.name)),
            false => choose("backend", "cpu", "there is no NVIDIA GPU to use".into()),
        }
    }
    let precision = match (switches.precision, on_gpu) {
        (Precision::Tf32, _) => Types::Tf32,
        (Precision::Auto, false) => {
            choose("precision", "fp32", "the CPU computes in fp32; bf16 would be widened to it".into());
            Types::F32
        }
        (Precision::Auto, true) => {
            choose(
                "precision",
                "bf16",
                "the GPU's matrix units are fastest in it; sums and weights stay fp32".into(),
            );
            Types::BF16
        }
        (Precision::Fp32, _) => Types::F32,
        (Precision::Bf16, _) => Types::BF16,
        (Precision::Fp8, _) => Types::FP8,
    };
    let fp8_scaling = match switches.fp8_scaling {
        Scaling::Auto => {
            if precision == Types::FP8 {
                choose(
                    "fp8.scaling",
                    "delayed",
                    "scales that are known beforehand save a pass over memory".into(),
                );
            }
            Scales::Delayed
        }
        Scaling::Delayed => Scales::Delayed,
        Scaling::Current => Scales::Current,
    };
    let cuda_graphs = match (switches.cuda_graphs, on_gpu) {
        (Choose::Auto, false) => {
            choose("cuda_graphs", "off", "there is no GPU in use".into());
            false
        }
        (Choose::Auto, true) => {
            choose("cuda_graphs", "on", "a step's launches replay without the host".into());
            true
        }
        (Choose::On, _) => true,
        (Choose::Off, _) => false,
    };
    let flash_attention = match switches.attention {
        Attention::Auto => {
            choose("attention", "flash", format!("{} has a kernel that stores no scores", target.name));
            true
        }
        Attention::Flash => true,
        Attention::Naive => false,
    };
    let attention_kernel = switches.attention_kernel;
    if attention_kernel != AttentionKernel::Auto && !flash_attention {
        refuse!(
            "`attention_kernel={attention_kernel}` cannot run with `attention=naive`, which has no such kernel"
        );
    }
    let recompute = match switches.recompute {
        Recompute::Auto => {
            choose("recompute", "cheap", "memory does not ask for more".into());
            Again::Cheap
        }
        Recompute::Cheap => Again::Cheap,
        Recompute::None => Again::None,
        Recompute::Wide => Again::Wide,
        Recompute::Full => Again::Full,
    };
    let context = config.model.tokens();
    let rotates = match &config.model {
        Model::Decoder(decoder) => decoder.positions == Positions::Rope,
        Model::Vit(_) => false,
        Model::Bdh(_) => true,
    };
    let rope_positions = match switches.rope_cache {
        Choose::Off => None,
        Choose::On if !rotates => {
            refuse!("`rope_cache=on` has nothing to cache: the model rotates nothing")
        }
        Choose::On => Some(context),
        Choose::Auto if rotates => {
            choose("rope_cache", "on", format!("a table of {} positions is small", context));
            Some(context)
        }
        Choose::Auto => {
            choose("rope_cache", "off", "the model rotates nothing".into());
            None
        }
    };
    if switches.deterministic == Toggle::On
        && let Some(kernel) = target.kernels.iter().find(|k| !k.deterministic)
    {
        refuse!("`deterministic=on` cannot run: {} may give other bits each time", kernel.name);
    }
    let autotune = match (switches.autotune, switches.deterministic) {
        (Autotune::Full, Toggle::On) if on_gpu => refuse!(
            "`autotune=full` cannot run with `deterministic=on`: times choose other algorithms each time; leave one out"
        ),
        (Autotune::Quick, Toggle::On) if on_gpu => {
            choose("autotune", "off", "deterministic=on takes algorithms by shape alone".into());
            Autotune::Off
        }
        (asked, _) => asked,
    };
    let on = |toggle: Toggle| toggle == Toggle::On;
    let adapters = adapters::of(config, model)?;
    let (freeze, update) = trained(config, model, &adapters)?;
    let options = Options {
        precision,
        fp8_scaling,
        fp8_layers: fp8_layers::named(config)?,
        flash_attention,
        fuse_qkv: on(switches.fuse_qkv),
        fuse_gate_up: on(switches.fuse_gate_up),
        fuse_norm: on(switches.fuse_norm),
        fuse_elementwise: on(switches.fuse_elementwise),
        fuse_loss: on(switches.fuse_loss),
        fuse_optimizer: on(switches.fuse_optimizer),
        recompute,
        recompute_layers: recompute_layers::given(config)?,
        memory_plan: on(switches.memory_plan),
        rope_positions,
        freeze,
        adapters,
        update,
        skip_pass: None,
    };
    let deterministic = switches.deterministic == Toggle::On;
    Ok(Settled {
        options,
        chosen,
        cuda_graphs,
        autotune,
        deterministic,
        attention_kernel,
        arrangement: None,
        decoded: image_table::extents(config).is_some(),
    })
}

/// Who is trained and how, parameter by parameter.
fn trained(
    config: &Config,
    model: &Graph,
    adapters: &[Adapter],
) -> Result<(BTreeSet<String>, Update), UserError> {
    let beside = adapters::parameters(model, adapters);
    let parameters = model.slots.iter().filter(|s| s.class.is_parameter()).chain(&beside);
    let parameters: Vec<(&str, usize)> = parameters.map(|s| (s.path.as_str(), s.ty.rank())).collect();
    let rules = groups::rules(config, &parameters)?;
    let by_path = || parameters.iter().map(|(path, _)| path.to_string()).zip(&rules);
    let freeze = by_path().filter(|(_, rule)| rule.frozen).map(|(path, _)| path).collect();
    let rules: BTreeMap<String, Rule> = by_path()
        .map(|(path, r)| (path, Rule { lr_scale: r.lr_scale as f32, weight_decay: r.weight_decay as f32 }))
        .collect();
    let optimizer = &config.optimizer;
    let update = Update {
        beta1: optimizer.betas[0] as f32,
        beta2: optimizer.betas[1] as f32,
        eps: optimizer.eps as f32,
        weight_decay: optimizer.weight_decay as f32,
        clip: optimizer.clip as f32,
        moments: match config.switches.optimizer_state {
            OptimizerState::Fp32 => Moments::F32,
            OptimizerState::Bf16 => Moments::BF16,
            OptimizerState::Int8 => Moments::Int8,
        },
        average: (config.train.ema > 0.0).then_some(config.train.ema),
        rules,
    };
    Ok((freeze, update))
}
