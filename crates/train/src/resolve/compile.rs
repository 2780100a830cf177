//! From a config to the plans of a run. Nothing is allocated here and no data is read, so `plan` and `train` agree to
//! the byte.

use flatout_data::{Shape, max_segments};
use flatout_ir::cost::forward_flops;
use flatout_ir::{Class, Graph, PlanSet, Program, Role, Target, compile as compile_programs};
use flatout_models::config::{Head, Model};
use flatout_models::decoder::{self, Documents, Form};
use flatout_runtime::cpu;

use crate::Failure;
use crate::UserError;
use crate::config::{Config, Count};
use crate::machine;
use crate::resolve::adapters;
use crate::resolve::arranged;
use crate::resolve::arranged::eval_layout;
use crate::resolve::fp8_layers;
use crate::resolve::recompute_layers;
use crate::resolve::settle::settle;
use crate::switches::active;
use crate::switches::{Auto, Settled};
use crate::tasks::image_table;
use crate::tasks::images;

/// Plans of a run and the extents they were made for.
#[derive(Clone, Debug)]
pub struct Compiled {
    pub plans: PlanSet,
    pub target: Target,
    /// Rows a `grad`.
    pub micro_batch: usize,
    /// Rows an `eval`; 0 where nothing is evaluated.
    pub eval_batch: usize,
    /// What the switches came to.
    pub settled: Settled,
    /// Trained and frozen values.
    pub parameters: u64,
    /// Forward and backward arithmetic of products, attention and head.
    pub flops_per_token: u64,
}

impl Compiled {
    /// Values that are trained.
    pub fn trained(&self) -> u64 {
        let trained = self.plans.slots.iter().filter(|s| s.class == Class::Weight && !s.is_whole);
        trained.map(|s| s.ty.elements() as u64).sum()
    }

    /// Writes down what `auto` chose by the memory and the timings there were: a resumed run must not choose otherwise,
    /// because the split of a batch and what is recomputed move the last bits, and what is in 8 bits has a state.
    pub fn pin(&self, config: &mut Config) {
        if config.train.micro_batch().is_none() {
            config.train.micro_batch = Count::Given(self.micro_batch);
        }
        config.switches.memory.recompute = Auto::Given(self.settled.options.recompute);
        recompute_layers::pin(&self.settled, config);
        fp8_layers::pin(&self.settled, config);
    }
}

/// The CPU with all threads that the process may use, as the compiler sees it.
pub fn target() -> Target {
    cpu::target(machine::threads())
}

/// Tokens a micro-batch holds at most where its size is chosen here. On a CPU larger ones leave the caches; on a GPU
/// beyond this nothing gets faster.
const AUTO_TOKENS_CPU: usize = 2048;
const AUTO_TOKENS_GPU: usize = 65536;

/// Compiles for training: `grad`, `apply` and, where something is held out, `eval`.
pub fn compile(config: &Config, target: &Target) -> Result<Compiled, Failure> {
    let batch = config.train.batch;
    let tokens = config.model.tokens();
    if let Some(rows) = config.train.micro_batch() {
        let compiled = compile_for(config, target, rows, true);
        return compiled.map_err(|refused| too_large(config, target, rows, refused));
    }
    let auto_tokens = if target.name == "cpu" { AUTO_TOKENS_CPU } else { AUTO_TOKENS_GPU };
    let divisors = (1..=batch).rev().filter(|n| batch.is_multiple_of(*n));
    let wanted: Vec<usize> = divisors.filter(|n| *n == 1 || n * tokens <= auto_tokens).collect();
    let mut refused = None;
    // Fewer rows at once cost little, running every layer twice a third: the second round is for what fits no other way.
    for may_recompute_all in [false, true] {
        for &rows in &wanted {
            match compile_for(config, target, rows, may_recompute_all) {
                Ok(compiled) => return Ok(compiled),
                Err(failure) => refused = Some(failure),
            }
        }
    }
    Err(too_large(config, target, 1, refused.expect("a batch has the divisor 1")))
}

/// A refusal for want of memory, with where the bytes would go and the largest micro-batch that fits; any other as it
/// is.
fn too_large(config: &Config, target: &Target, rows: usize, refused: Failure) -> Failure {
    let endless = Target { memory_bytes: u64::MAX, ..target.clone() };
    let Ok(planned) = compile_for(config, &endless, rows, true) else { return refused };
    let gib = |bytes: usize| bytes as f64 / (1u64 << 30) as f64;
    let parts = planned.plans.categories().into_iter().filter(|(_, bytes)| gib(*bytes) >= 0.05);
    let parts: Vec<String> = parts.map(|(name, bytes)| format!("{name} {:.1}", gib(bytes))).collect();
    let smaller = (1..rows).rev().filter(|n| config.train.batch.is_multiple_of(*n));
    let advice = match smaller.into_iter().find(|n| compile_for(config, target, *n, true).is_ok()) {
        Some(fits) => format!("train.micro_batch={fits} is the largest that fits"),
        None => "no micro-batch fits: use a smaller model or context, or recompute=full".into(),
    };
    Failure::User(UserError(format!("{refused} (GiB: {}); {advice}", parts.join(", "))))
}

/// The forward graph of so many rows, with its loss.
pub(crate) fn model_for(config: &Config, rows: usize, dropout: bool) -> Graph {
    let decoder = match &config.model {
        Model::Decoder(decoder) => decoder,
        Model::Bdh(bdh) if bdh.head == Head::Tokens => {
            let (len, documents) = (bdh.context, Documents::Joined);
            return config.model.of_texts(Form::Loss { rows, len, documents, dropout });
        }
        Model::Vit(_) | Model::Bdh(_) => return config.model.of_images(images::form(config, rows, dropout)),
    };
    let context = decoder.context;
    if decoder.head == Head::Classes {
        // Before lengths are known every text may be as long as the context.
        return arranged::model_for(config, Shape::Padded { rows, len: context }, dropout);
    }
    let documents = match config.data.document_mask {
        true => Documents::Apart { most: rows * max_segments(context) },
        false => Documents::Joined,
    };
    decoder::build(decoder, Form::Loss { rows, len: context, documents, dropout })
}

/// What the switches come to for so many rows at once, without plans.
pub fn settle_for(config: &Config, target: &Target, micro_batch: usize) -> Result<Settled, UserError> {
    let (config, of_images) = &image_table::settle(config, target)?;
    let (arranged, graph) = match arranged::arranged(config, micro_batch)? {
        None => (None, model_for(config, micro_batch, true)),
        Some(arranged) => {
            let graph = arranged::model_for(config, arranged.0.layout.shapes()[0], true);
            (Some(arranged), graph)
        }
    };
    let mut settled = settle(config, target, &graph)?.with_lengths(arranged);
    settled.chosen.extend(of_images.clone());
    Ok(settled)
}

/// Compiles for so many rows at once; `recompute=auto` may come to `full` only where that is allowed.
pub fn compile_for(
    config: &Config,
    target: &Target,
    micro_batch: usize,
    may_recompute_all: bool,
) -> Result<Compiled, Failure> {
    let asked = config;
    let (config, of_images) = &image_table::settle(config, target)?;
    let eval_batch = match config.eval.rows {
        0 => 0,
        rows => config.eval.micro_batch.given().unwrap_or(micro_batch).min(rows),
    };
    let arranged = arranged::arranged(config, micro_batch)?;
    let mut programs = match &arranged {
        None => vec![Program { role: Role::Grad, graph: model_for(config, micro_batch, true) }],
        Some((arrangement, _)) => {
            let graph = |shape: &Shape| arranged::model_for(config, *shape, true);
            let programs = arrangement.layout.shapes().iter().zip(Role::GRADS);
            programs.map(|(shape, role)| Program { role, graph: graph(shape) }).collect()
        }
    };
    if eval_batch > 0 {
        let graph = match &arranged {
            None => model_for(config, eval_batch, false),
            Some((arrangement, _)) => {
                arranged::model_for(config, eval_layout(config, arrangement).shapes()[0], false)
            }
        };
        programs.push(Program { role: Role::Eval, graph });
    }
    let mut settled = settle(config, target, &programs[0].graph)?.with_lengths(arranged);
    settled.chosen.extend(of_images.clone());
    fp8_layers::settle(config, &programs[0], target, &mut settled)?;
    let mut plans = compile_programs(&programs, target, &settled.options);
    // `auto` goes further only where memory forces it.
    let may_go_on = may_recompute_all && config.switches.memory.recompute == Auto::Auto;
    if plans.is_err()
        && may_go_on
        && let Some(smaller) = recompute_layers::fewest(&programs, target, &mut settled)
    {
        plans = Ok(smaller);
    }
    let forward = &programs[0].graph;
    let tokens = settled.arrangement.as_ref().map(|a| a.layout.shapes()[0].tokens());
    let tokens = tokens.unwrap_or(micro_batch * config.model.tokens());
    let beside = adapters::parameters(forward, &settled.options.adapters);
    // A frozen weight has no gradient: what is left is forward and the gradient of what it multiplies.
    let passes = if beside.is_empty() { 3 } else { 2 };
    let compiled = Compiled {
        plans: plans?,
        target: target.clone(),
        micro_batch,
        eval_batch,
        settled,
        parameters: forward
            .slots
            .iter()
            .filter(|s| s.class.is_parameter())
            .chain(&beside)
            .map(|s| s.ty.elements() as u64)
            .sum(),
        flops_per_token: passes * forward_flops(forward) / tokens as u64,
    };
    active::check(&asked.switches, &compiled.plans, target, &compiled.settled)?;
    Ok(compiled)
}
