//! From programs to plans: an ordered list of plain functions, each saying what is true after it.

pub mod adapter;
pub mod adapter_norms;
pub mod adapters;
pub mod average;
pub mod bundles;
pub mod column_sums;
pub mod copies;
pub mod differentiate;
pub mod double_norms;
pub mod epilogues;
pub mod folded_scales;
pub mod fp8;
pub mod fp8_choice;
pub mod fp8_copies;
pub mod fused_products;
pub mod held_ratios;
pub mod joined_products;
pub mod joint_heads;
pub mod lower;
pub mod memory;
pub mod merge;
pub mod one_pass_loss;
pub mod options;
pub mod patterns;
pub mod precision;
pub mod quantize_sources;
pub mod readers;
pub mod recompute;
pub mod regions;
pub mod rejoin;
pub mod rope_table;
pub mod rotated_scores;
pub mod score_gradients;
pub mod slots;
pub mod tf32;
pub mod thin_products;
pub mod unit_axes;
pub mod update;
pub mod views;

use crate::expand;
use crate::graph::{Class, Graph};
use crate::op::{Op, OpKind};
use crate::plan::{Buffer, Category, PassReport, PlanSet, Refusal, Role};
use crate::replay::without_dead;
use crate::target::Target;
use crate::verify::verify;
use options::{Options, Precision, Recompute};

/// A graph and its role. Gradients take a forward graph: `Role::GRAD` becomes `grad` and `apply`, and a higher index, the
/// same model in other extents, becomes another plan that adds to the same sums.
#[derive(Clone, Debug)]
pub struct Program {
    pub role: Role,
    pub graph: Graph,
}

/// Compiles the programs of a run for a target. Every plan shares the persistent slots; transients overlay.
pub fn compile(programs: &[Program], target: &Target, options: &Options) -> Result<PlanSet, Refusal> {
    let mut reports = Reports { done: vec![], role: Role::GRAD };
    let mut graphs: Vec<(Role, Graph)> = vec![];
    for program in programs {
        reports.role = program.role;
        graphs.extend(rewrite(program, target, options, &mut reports)?);
    }
    add_copies(&mut graphs, options);

    // Evaluation reads averages of what is trained.
    let averages = average::bind(&mut graphs, &options.adapters);
    let graphs = graphs.into_iter().map(|(role, g)| (role, checked("average", g))).collect();
    reports.role = Role::Eval;
    reports.say("average", averages, || format!("{averages} parameters are read as their averages"));
    plan(graphs, target, options, reports)
}

/// Copies of weights in other types have a writer, and so have norms.
fn add_copies(graphs: &mut Vec<(Role, Graph)>, o: &Options) {
    if o.precision.is_narrow() {
        copies::copies(graphs);
    }
    if o.precision == Precision::FP8 {
        fp8_copies::fp8_copies(graphs);
    }
    adapter_norms::adapter_norms(graphs, &o.adapters);
}

/// All passes over one program's graph.
fn rewrite(
    program: &Program,
    target: &Target,
    o: &Options,
    reports: &mut Reports,
) -> Result<Vec<(Role, Graph)>, Refusal> {
    let typed = match typed(program, o, reports)? {
        Typed::Forward(g) => return Ok(vec![(program.role, elementwise(g, o, reports))]),
        Typed::Training(typed) => typed,
    };
    let g = elementwise(joined(&typed, target, o, reports)?, o, reports);
    if program.role != Role::GRAD {
        // The update reads sums and has no extents of a micro-batch: one serves all.
        return Ok(vec![(program.role, g)]);
    }
    reports.role = Role::Apply;
    let apply = elementwise(typed.apply, o, reports);
    Ok(vec![(Role::GRAD, g), (Role::Apply, apply)])
}

/// A program whose types are final, up to which products multiply 8-bit floats.
enum Typed {
    /// It only runs forward.
    Forward(Graph),
    Training(Training),
}

/// Gradients, and the updates they are for.
struct Training {
    grad: Graph,
    /// How many nodes of it are the forward pass.
    forward: usize,
    apply: Graph,
}

/// The passes from a program to final types.
fn typed(program: &Program, o: &Options, reports: &mut Reports) -> Result<Typed, Refusal> {
    let runs = |pass: &'static str| o.skip_pass != Some(pass);
    // Inputs are private to a program: evaluation may have another batch.
    let mut g = named_inputs(&program.graph, program.role);

    let frozen = differentiate::freeze(&mut g, &o.freeze);
    reports.say("freeze", frozen, || format!("{frozen} parameters are not trained"));

    // Operations whose fused form is switched off are gone.
    let g = checked("expand", expand::expand(&g, |op| is_switched_off(op, o)));

    // Weights that share an input are one slot and one product.
    let (g, merged) = if runs("merge") {
        merge::merge(&g, o.fuse_qkv, o.fuse_gate_up, &o.update)
    } else {
        (g, Default::default())
    };
    let g = checked("merge", g);
    reports.say("merge", merged.qkv, || format!("{} q, k, v products became one each", merged.qkv));
    reports
        .say("merge", merged.gate_up, || format!("{} gate and up products became one each", merged.gate_up));

    // Neighbours that share one pass over memory are one operation.
    let (g, joined) = if runs("patterns") {
        patterns::patterns(&g, o.fuse_norm, o.fuse_elementwise)
    } else {
        (g, Default::default())
    };
    let g = checked("patterns", g);
    reports.say("patterns", joined.add_norm, || {
        format!("{} residual additions joined their norm", joined.add_norm)
    });
    reports.say("patterns", joined.norm_rope, || {
        format!("{} q or k norms joined their rotation", joined.norm_rope)
    });
    reports.say("patterns", joined.gated, || format!("{} gated activations run in one pass", joined.gated));

    // Queries and keys of one product are normed and turned together.
    let (g, pairs) =
        if o.fuse_norm && runs("joint_heads") { joint_heads::joint_heads(&g, &o.update) } else { (g, 0) };
    let g = checked("joint_heads", g);
    reports.say("joint_heads", pairs, || format!("{pairs} pairs of q and k are normed and turned together"));

    // Frozen weights have their low-rank adapters beside them.
    let (g, adapted) = match o.adapters.is_empty() {
        true => (g, Default::default()),
        false => {
            let folds = has_epilogues(o) && runs("folded_scales");
            let how = adapters::How { update: &o.update, role: program.role, folds };
            adapters::adapters(&g, &o.adapters, how)?
        }
    };
    let g = checked("adapters", g);
    reports.say("adapters", adapted.weights, || {
        let adapters::Adapted { weights, products } = adapted;
        format!("{weights} weights have low-rank adapters, whose inputs {products} products compute")
    });

    // A scale behind a linear layer is part of its weight.
    let (g, folded) =
        if has_epilogues(o) && runs("folded_scales") { folded_scales::folded_scales(&g) } else { (g, 0) };
    let g = checked("folded_scales", g);
    reports.say("folded_scales", folded, || format!("{folded} scales are part of the weight before them"));

    // Products add their bias and apply GELU as they write.
    let (g, layers) = if has_epilogues(o) { fused_products::forward(&g) } else { (g, 0) };
    let g = checked("fused_products", g);
    reports.say("fused_products", layers, || format!("{layers} products add their bias or apply GELU"));

    // Rotations read their angles from a table.
    let (g, served) = o.rope_positions.map_or((g.clone(), 0), |n| rope_table::rope_table(&g, n));
    let g = checked("rope_table", g);
    reports.say("rope_table", served, || format!("{served} rotations read a table"));

    // Queries that are their own keys are turned where they are read.
    let (g, turned) = if o.fuse_elementwise && runs("rotated_scores") {
        rotated_scores::rotated_scores(&g)
    } else {
        (g, 0)
    };
    let g = checked("rotated_scores", g);
    reports.say("rotated_scores", turned, || format!("{turned} linear attentions turn what they read"));

    if !program.role.is_grad() {
        return Ok(Typed::Forward(inference(&g, o, reports)));
    }

    // Gradients of every trained parameter are summed; nothing else is differentiated.
    let mut trained = differentiate::differentiate(&g);
    if trained.weights.is_empty() {
        return Err(Refusal("every parameter is frozen: there is nothing to train".into()));
    }
    checked("differentiate", trained.graph.clone());

    // What multiplies by a one that was there for its slope is gone.
    let (held, ones) = held_ratios::held_ratios(&trained);
    trained = held;
    checked("held_ratios", trained.graph.clone());
    reports.say("held_ratios", ones, || {
        format!("{ones} multiplications by m / m are gone, with m's gradient there")
    });

    // Parameters, gradients and moments lie in flat regions; `apply` updates them.
    let (mut apply, launches) = update::update(&mut trained, &o.update, o.fuse_optimizer && runs("update"));
    if o.precision.is_narrow() {
        precision::narrow_frozen(&mut apply);
    }
    let apply = checked("update", apply);
    reports.say("update", launches, || {
        format!("{} parameter tensors are updated in {launches} launches", trained.weights.len())
    });

    // Loss and its gradient take one pass over the logits.
    if o.fuse_loss && runs("one_pass_loss") {
        let (one_pass, count) = one_pass_loss::one_pass_loss(&trained);
        trained = one_pass;
        reports
            .say("one_pass_loss", count, || format!("{count} loss computes its gradient in the same pass"));
    }

    // Types are final.
    let (mut g, mut forward) = (trained.graph, trained.forward);
    if o.precision.is_narrow() {
        let (narrow, translated, products) = precision::precision(&g, forward);
        (g, forward) = (narrow, translated);
        reports.say("precision", products, || format!("{products} products run in bf16"));
    } else if o.precision == Precision::Tf32 {
        let (rounding, products) = tf32::tf32(&g);
        g = rounding;
        reports.say("precision", products, || format!("{products} products run in tf32"));
    }
    Ok(Typed::Training(Training { grad: checked("precision", g), forward, apply }))
}

/// What adapters add to a product is part of it.
fn joined_products(g: Graph, o: &Options, reports: &mut Reports) -> Graph {
    if o.adapters.is_empty() || !has_epilogues(o) || o.skip_pass == Some("joined_products") {
        return g;
    }
    let (g, joined) = joined_products::joined_products(&g);
    reports.say("joined_products", joined, || format!("{joined} products compute what adapters add to them"));
    checked("joined_products", g)
}

/// Whether products have epilogues; those of 8-bit floats have none.
fn has_epilogues(o: &Options) -> bool {
    o.fuse_elementwise && o.precision != Precision::FP8 && o.skip_pass != Some("fused_products")
}

/// The passes over a gradient's graph from final types to joined launches.
fn joined(typed: &Training, target: &Target, o: &Options, reports: &mut Reports) -> Result<Graph, Refusal> {
    let runs = |pass: &'static str| o.skip_pass != Some(pass);
    let (mut g, mut forward) = (typed.grad.clone(), typed.forward);

    // Linear layers multiply 8-bit floats.
    if o.precision == Precision::FP8 {
        if let Some(unknown) = o.fp8_layers.as_ref().and_then(|layers| fp8::unknown(&g, forward, layers)) {
            return Err(Refusal(unknown));
        }
        let (scaled, translated, narrowed) = fp8::fp8(&g, forward, o.fp8_scaling, o.fp8_layers.as_ref());
        (g, forward) = (checked("fp8", scaled), translated);
        if narrowed.products == 0 && o.fp8_layers.is_none() {
            return Err(Refusal(NO_FP8.into()));
        }
        reports.say("fp8", narrowed.products, || {
            let fp8::Narrowed { products, of } = narrowed;
            format!(
                "{products} of {of} products run in fp8 by {} scales; the head stays in bf16",
                o.fp8_scaling.name()
            )
        });
    }

    // Norms on both sides of a residual addition are one pass; 8-bit floats are made where a norm of its own is.
    if o.fuse_norm && o.precision != Precision::FP8 && runs("double_norms") {
        let (paired, translated, [pairs, slopes]) = double_norms::double_norms(&g, forward, target);
        (g, forward) = (checked("double_norms", paired), translated);
        reports.say("double_norms", pairs, || {
            format!(
                "{pairs} norms joined the addition and the norm behind them, {slopes} with their gradients"
            )
        });
    }

    // What the backward pass reads is either kept or computed again next to its use.
    let how = if runs("recompute") { o.recompute } else { Recompute::None };
    let (g, again) = recompute::recompute(&g, forward, how, o.recompute_layers);
    let g = checked("recompute", without_dead(&g));
    reports.say("recompute", again, || format!("{again} forward operations run again in the backward pass"));

    // What runs again beside a gradient that reads the same runs in it.
    let (g, rejoined) = if runs("rejoin") { rejoin::rejoin(&g) } else { (g, 0) };
    let g = checked("rejoin", g);
    reports
        .say("rejoin", rejoined, || format!("{rejoined} of these run inside a gradient that reads the same"));

    // Products of the backward pass do the same for GELU's gradient.
    let (g, slopes) = if has_epilogues(o) { fused_products::backward(&g) } else { (g, 0) };
    let g = checked("fused_products", without_dead(&g));
    reports.say("fused_products", slopes, || format!("{slopes} products apply GELU's slope"));

    // The gradient of what attends to itself is added to what else flows there.
    let (g, sums) = if o.fuse_elementwise && runs("score_gradients") {
        score_gradients::score_gradients(&g)
    } else {
        (g, 0)
    };
    let g = checked("score_gradients", g);
    reports
        .say("score_gradients", sums, || format!("{sums} gradients of linear attention are written as sums"));

    let g = joined_products(g, o, reports);

    // Adapters' products drop what they read or write as it passes.
    let (g, thin) = if o.fuse_elementwise && runs("thin_products") {
        thin_products::thin_products(&g, target)
    } else {
        (g, 0)
    };
    let g = checked("thin_products", g);
    reports.say("thin_products", thin, || format!("{thin} dropouts are part of an adapter's product"));

    // Sums are done by whoever computes their last term.
    let (g, folded) = epilogues::epilogues(&g);
    let g = checked("epilogues", g);
    reports.say("epilogues", folded, || format!("{folded} additions are done by the product before them"));

    // What is only quantised is quantised where it is made.
    let (g, made) = if o.precision == Precision::FP8 && o.fuse_elementwise && runs("quantize_sources") {
        quantize_sources::quantize_sources(&g)
    } else {
        (g, Default::default())
    };
    let g = checked("quantize_sources", g);
    reports.say("quantize_sources", made.gated + made.norms, || {
        let quantize_sources::Joined { gated, norms } = made;
        format!("{gated} gated activations and {norms} norms, or their gradients, are made in 8 bits")
    });
    Ok(g)
}

const NO_FP8: &str = "no product of a layer can run in fp8: its extents must be multiples of 16 (tokens of a micro-batch, width, heads, ffn)";

/// Elementwise neighbours are regions; what is left of dead nodes is gone.
fn elementwise(g: Graph, o: &Options, reports: &mut Reports) -> Graph {
    let g = without_dead(&g);
    if !o.fuse_elementwise || o.skip_pass == Some("regions") {
        return g;
    }
    let (g, gathered) = regions::regions(&g);
    reports.say("regions", gathered.regions, || {
        format!("{} elementwise operations run in {} regions", gathered.nodes, gathered.regions)
    });
    let g = checked("regions", g);

    // Sums over rows are taken by what computes the rows.
    let runs = |pass: &'static str| o.skip_pass != Some(pass);
    let (g, sums) = if runs("column_sums") { column_sums::column_sums(&g) } else { (g, 0) };
    reports.say("column_sums", sums, || format!("{sums} sums over rows are taken by what computes the rows"));
    let g = checked("column_sums", g);

    // Small work that only the end reads is one launch.
    let (g, ends) = if runs("bundles") { bundles::bundles(&g) } else { (g, Default::default()) };
    reports.say("bundles", ends.bundles, || {
        let bundles::Bundled { bundles, nodes } = ends;
        format!("{nodes} small elementwise launches at the end are {bundles}")
    });
    checked("bundles", g)
}

/// A forward-only program in the run's precision.
fn inference(g: &Graph, o: &Options, reports: &mut Reports) -> Graph {
    let g = match o.precision {
        Precision::BF16 | Precision::FP8 => precision::precision(g, g.nodes.len()).0,
        Precision::Tf32 => tf32::tf32(g).0,
        Precision::F32 => g.clone(),
    };
    let g = joined_products(checked("precision", g), o, reports);
    checked("epilogues", epilogues::epilogues(&g).0)
}

fn is_switched_off(op: &Op, o: &Options) -> bool {
    match op.kind() {
        OpKind::RmsNorm => !o.fuse_norm,
        OpKind::Attention | OpKind::LinearAttention => !o.flash_attention,
        OpKind::HeadLoss => !o.fuse_loss,
        _ => false,
    }
}

fn named_inputs(g: &Graph, role: Role) -> Graph {
    let mut g = g.clone();
    g.slots.iter_mut().filter(|s| s.class == Class::Input).for_each(|s| s.path = input_path(role, &s.path));
    g
}

/// The slot of a program's input.
pub fn input_path(role: Role, name: &str) -> String {
    format!("{}.{name}", role.name())
}

/// Kernels, views, lifetimes, offsets.
fn plan(
    graphs: Vec<(Role, Graph)>,
    target: &Target,
    o: &Options,
    mut reports: Reports,
) -> Result<PlanSet, Refusal> {
    let all: Vec<&Graph> = graphs.iter().map(|(_, g)| g).collect();
    let (slots, mut persistent_bytes, mut buffers) = slots::Slots::place(&all, target.align)?;
    let inputs = slots.inputs(persistent_bytes);
    let mut landings = vec![];
    for area in 0..if inputs.is_empty() { 0 } else { target.landings } {
        let (name, offset, bytes) = (format!("landing.{area}"), persistent_bytes, inputs.len());
        buffers.push(Buffer { name, category: Category::Inputs, offset, bytes, live: None });
        landings.push(offset);
        persistent_bytes += bytes;
    }
    let (mut plans, mut transient_bytes) = (vec![], 0);
    for (role, g) in &graphs {
        reports.role = *role;
        let lowered = lower::lower(g, &slots, target, o.memory_plan)?;
        let (in_place, copies) = (lowered.in_place, lowered.copies);
        let placed = memory::place(lowered, *role, persistent_bytes, target.align, o.memory_plan);
        reports.say("memory", placed.plan.launches.len(), || {
            let launches = placed.plan.launches.len();
            format!(
                "{launches} launches, {in_place} outputs in place, {copies} copies, {} transient bytes",
                placed.bytes
            )
        });
        transient_bytes = transient_bytes.max(placed.bytes);
        buffers.extend(placed.buffers.into_iter().map(|b| with_plan(b, plans.len())));
        plans.push(placed.plan);
    }
    let arena_bytes = persistent_bytes + transient_bytes;
    if arena_bytes as u64 + target.driver_bytes > target.memory_bytes {
        return Err(Refusal(format!(
            "the plan needs {arena_bytes} bytes and {} has {}",
            target.name,
            target.memory_bytes.saturating_sub(target.driver_bytes)
        )));
    }
    let slots = slots.placed();
    Ok(PlanSet {
        arena_bytes,
        persistent_bytes,
        transient_bytes,
        buffers,
        slots,
        inputs,
        landings,
        plans,
        done: reports.done,
    })
}

fn with_plan(mut buffer: crate::plan::Buffer, plan: usize) -> crate::plan::Buffer {
    buffer.live = buffer.live.map(|(_, range)| (plan, range));
    buffer
}

struct Reports {
    done: Vec<PassReport>,
    role: Role,
}

impl Reports {
    fn say(&mut self, pass: &'static str, count: usize, did: impl FnOnce() -> String) {
        if count > 0 {
            self.done.push(PassReport { pass, role: self.role, count, did: did() });
        }
    }
}

/// The graph, verified in debug builds.
fn checked(pass: &str, g: Graph) -> Graph {
    if cfg!(debug_assertions)
        && let Err(why) = verify(&g)
    {
        panic!("after {pass}: {why}");
    }
    g
}
