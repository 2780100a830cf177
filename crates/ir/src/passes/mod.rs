//! The compiler from programs to plans: tables of passes, each row with its name, its condition and its function. The comment
//! at a row says what holds after it.

pub mod options;
pub mod place;
pub mod readers;
mod state;

pub mod forward {
    //! Passes over a model's forward graph, before gradients are taken.

    pub mod adapter;
    pub mod adapters;
    pub mod folded_scales;
    pub mod joint_heads;
    pub mod merge;
    pub mod patterns;
    pub mod rope_table;
    pub mod rotated_scores;
}

pub mod fuse {
    //! Fusion of neighbours into one launch: products with what surrounds them, elementwise regions, bundles.

    pub mod activated_products;
    pub mod bundles;
    pub mod cached_heads;
    pub mod column_sums;
    pub mod double_norms;
    pub mod epilogues;
    pub mod fused_products;
    pub mod gated_products;
    pub mod joined_products;
    pub mod regions;
    pub mod thin_products;
    pub mod unit_axes;
}

pub mod gradient {
    //! Gradients, the update that uses them, and recomputation of parts of the forward pass.

    pub mod average;
    mod buckets;
    pub mod differentiate;
    pub(crate) mod frozen;
    pub mod gathers;
    pub mod held_ratios;
    pub mod kept_logits;
    pub mod lanes;
    pub mod layout;
    pub mod one_pass_loss;
    pub mod recompute;
    pub mod rejoin;
    mod scatter;
    pub mod score_gradients;
    pub(crate) mod shards;
    pub mod totals;
    pub mod update;
}

pub mod types {
    //! Element types: bf16, tf32 and 8-bit floats, and the updates of the copies of weights in these types.

    pub mod adapter_norms;
    pub mod base;
    pub mod copies;
    pub mod fp8;
    pub mod fp8_base;
    pub mod fp8_choice;
    pub mod fp8_copies;
    pub mod nf4;
    pub mod precision;
    pub mod quantize_sources;
    pub(crate) mod temporary_copies;
    pub mod tf32;
}

// Other crates ask these for names of slots and of weights.
pub use forward::{adapter, adapters};
pub use gradient::{average, differentiate, lanes, layout, recompute, totals, update};
pub use types::{base, fp8, fp8_base, fp8_choice, fp8_copies, nf4};

use crate::expand;
use crate::graph::{Class, Graph};
use crate::mesh::Axis;
use crate::ops::{Op, OpKind};
use crate::plan::{PlanSet, Refusal, Role};
use crate::replay::without_dead;
use crate::target::Target;
use crate::verify::verify;
use forward::{folded_scales, joint_heads, merge, patterns, rope_table, rotated_scores};
use fuse::{
    activated_products, bundles, cached_heads, column_sums, double_norms, epilogues, fused_products,
    gated_products, joined_products, regions, thin_products,
};
use gradient::shards::{self, Divided};
use gradient::{frozen, gathers, held_ratios, kept_logits, one_pass_loss, rejoin, score_gradients};
use options::{Base, Options, Precision, Recompute};
use place::prefetch;
use state::{Reports, State};
use types::{adapter_norms, copies, precision, quantize_sources, temporary_copies, tf32};

/// A graph and its role. A gradient role takes a forward graph: `Role::GRAD` compiles to `grad` and `apply`. A higher index,
/// the same model with other extents or another window, compiles to one more plan that adds to the same sums.
#[derive(Clone, Debug)]
pub struct Program {
    pub role: Role,
    pub graph: Graph,
}

/// Compiles the programs of a run for a target. All plans share the persistent slots; their transient buffers overlay one
/// another.
pub fn compile(programs: &[Program], target: &Target, options: &Options) -> Result<PlanSet, Refusal> {
    lanes::check(options)?;
    shards::check(options)?;
    let gradient_plans = programs.iter().filter(|program| program.role.is_grad()).count();
    assert!(!options.one_run || (gradient_plans == 1 && options.mesh.ranks() == 1 && options.lanes == 1));
    let mut reports = Reports::default();
    let mut graphs: Vec<(Role, Graph)> = vec![];
    let mut divided: Vec<Divided> = vec![];
    let to_end = |state: &mut State| run(GATHERED, state, options, target);
    for Program { role, graph } in programs {
        let mut state = State::new(*role, graph.clone(), reports);
        run(TYPED, &mut state, options, target)?;
        run(JOINED, &mut state, options, target)?;
        to_end(&mut state)?;
        graphs.push((*role, state.graph));
        reports = state.reports;
        // The update reads sums, which all micro-batches share: one serves all.
        if let Some(apply) = state.apply.filter(|_| *role == Role::GRAD) {
            divided = state.divided;
            let of_lanes = lanes::lanes(&apply, options);
            for (role, graph) in [(Role::Apply, apply)].into_iter().chain(of_lanes) {
                let mut state = State::new(role, graph, reports);
                to_end(&mut state)?;
                graphs.push((role, state.graph));
                reports = state.reports;
            }
        }
    }
    add_copies(&mut graphs, &divided, options);

    // Evaluation reads the running averages of trained parameters.
    let averages = average::bind(&mut graphs, &options.adapters, &divided);
    graphs.iter().for_each(|(_, g)| check("average", g));
    reports
        .add(Role::Eval, "average", averages, || format!("{averages} parameters are read as their averages"));

    // No bf16 copy is kept of weights that training reads as codes.
    if options.precision == Precision::FP8 && divided.is_empty() && options.runs("temporary_copies") {
        let dropped = temporary_copies::temporary_copies(&mut graphs);
        graphs.iter().for_each(|(_, g)| check("temporary_copies", g));
        reports.add(Role::Apply, "temporary_copies", dropped, || {
            format!("{dropped} weights have 8-bit codes and no bf16 copy, which evaluation makes where it reads one")
        });
    }

    // Where ranks shard weights, layers read gathered copies.
    for (role, count) in add_gathers(&mut graphs, &mut divided, options) {
        reports
            .add(role, "gathers", count, || format!("{count} gathers bring weights to where they are read"));
    }
    graphs.iter().for_each(|(_, g)| check("gathers", g));

    // Each rank holds only its shard of what is sharded.
    let sharded = shards::remove_wholes(&mut graphs, &divided, options);
    graphs.iter().for_each(|(_, g)| check("shards", g));
    let trained = sharded.iter().filter(|tensor| tensor.class == Class::Weight).count();
    reports.add(Role::Apply, "shards", trained, || {
        let ways = options.mesh.ways(Axis::Shard);
        format!("{trained} parameters are updated in shares, of which a rank has one of {ways}")
    });

    // Exchanges begin as soon as the data they send is ready.
    for (role, g) in graphs.iter_mut().filter(|_| options.runs("prefetch")) {
        let (ordered, exchanges) =
            prefetch::prefetch(g, |id| options.shards_parameters() && gathers::is_of_unit(g, id));
        *g = ordered;
        check("prefetch", g);
        reports.add(*role, "prefetch", exchanges, || {
            format!("{exchanges} exchanges begin as soon as what they send is there")
        });
    }

    // Frozen weights of linear layers are stored as codes, and dequantised next to their readers unless those multiply codes.
    if options.base != Base::Full && options.runs("base") {
        let weights = base::base(&mut graphs, &options.base)?;
        graphs.iter().for_each(|(_, g)| check("base", g));
        let codes = if let Base::Nf4(_) = options.base { "NF4" } else { "E4M3" };
        reports.add(Role::GRAD, "base", weights, || {
            format!(
                "{weights} frozen weights are stored in {codes} and dequantised where they are read in full"
            )
        });
    }
    place::plan(graphs, target, options, sharded, reports)
}

/// Adds the updates of copies: of weights in other types, of other ranks' shards, and of adapter norms.
fn add_copies(graphs: &mut Vec<(Role, Graph)>, divided: &[Divided], o: &Options) {
    if o.precision.is_narrow() {
        copies::copies(graphs, divided);
    }
    shards::gathers(graphs, divided, o);
    if o.precision == Precision::FP8 {
        fp8_copies::fp8_copies(graphs, o);
    }
    adapter_norms::adapter_norms(graphs, &o.adapters);
}

/// Where ranks shard the weights that layers read, shards the frozen ones too and adds gathers. Returns the number of gathers
/// in each graph.
fn add_gathers(
    graphs: &mut Vec<(Role, Graph)>,
    divided: &mut Vec<Divided>,
    o: &Options,
) -> Vec<(Role, usize)> {
    let apply = graphs.iter_mut().find(|(role, _)| *role == Role::Apply && o.shards_parameters());
    let Some((_, apply)) = apply else { return vec![] };
    divided.extend(frozen::divide(apply, o));
    gathers::gathers(graphs, divided, o)
}

/// A row of a table of passes.
struct Pass {
    /// The name in reports and in `Options::skip_pass`.
    name: &'static str,
    enabled: fn(&Options, Role) -> bool,
    run: fn(&mut State, &Options, &Target) -> Result<(), Refusal>,
}

/// Runs the passes of a table in order. Debug builds verify the graph after each.
fn run(passes: &[Pass], state: &mut State, o: &Options, target: &Target) -> Result<(), Refusal> {
    let role = state.role;
    for pass in passes.iter().filter(|pass| (pass.enabled)(o, role) && o.runs(pass.name)) {
        state.pass = pass.name;
        (pass.run)(state, o, target)?;
        check(pass.name, &state.graph);
    }
    Ok(())
}

fn check(pass: &str, g: &Graph) {
    if cfg!(debug_assertions)
        && let Err(why) = verify(g)
    {
        panic!("after {pass}: {why}");
    }
}

/// From a program to its final types, except for 8-bit products.
const TYPED: &[Pass] = &[
    // Inputs are private to a program: evaluation may have another batch size.
    Pass {
        name: "inputs",
        enabled: |_, _| true,
        run: |s, _, _| {
            let inputs = s.graph.slots.iter_mut().filter(|slot| slot.class == Class::Input);
            inputs.for_each(|slot| slot.path = input_path(s.role, &slot.path));
            Ok(())
        },
    },
    // Parameters that are not trained are marked.
    Pass {
        name: "freeze",
        enabled: |_, _| true,
        run: |s, o, _| {
            let frozen = differentiate::freeze(&mut s.graph, &o.freeze);
            s.report(frozen, || format!("{frozen} parameters are not trained"));
            Ok(())
        },
    },
    // Operations whose fused form is switched off are expanded.
    Pass {
        name: "expand",
        enabled: |_, _| true,
        run: |s, o, _| {
            s.graph = expand::expand(&s.graph, |op| is_switched_off(op, o));
            Ok(())
        },
    },
    // Weights that share an input are merged into one slot and one product.
    Pass {
        name: "merge",
        enabled: |_, _| true,
        run: |s, o, _| {
            let (g, merged) = merge::merge(&s.graph, o.fuse_qkv, o.fuse_gate_up, &o.update);
            let merge::Merged { qkv, gate_up } = merged;
            s.graph = g;
            s.report(qkv, || format!("{qkv} q, k, v products became one each"));
            s.report(gate_up, || format!("{gate_up} gate and up products became one each"));
            Ok(())
        },
    },
    // Neighbours that can share one pass over memory are one operation.
    Pass {
        name: "patterns",
        enabled: |_, _| true,
        run: |s, o, _| {
            let (g, joined) = patterns::patterns(&s.graph, o.fuse_norm, o.fuse_elementwise);
            let patterns::Joined { add_norm, norm_rope, gated } = joined;
            s.graph = g;
            s.report(add_norm, || format!("{add_norm} residual additions joined their norm"));
            s.report(norm_rope, || format!("{norm_rope} q or k norms joined their rotation"));
            s.report(gated, || format!("{gated} gated activations run in one pass"));
            Ok(())
        },
    },
    // Queries and keys from one product are normed and rotated together.
    Pass {
        name: "joint_heads",
        enabled: |o, _| o.fuse_norm,
        run: |s, o, _| {
            s.rewrite(joint_heads::joint_heads(&s.graph, &o.update), |pairs| {
                format!("{pairs} pairs of q and k are normed and rotated together")
            })
        },
    },
    // Frozen weights have their low-rank adapters beside them.
    Pass {
        name: "adapters",
        enabled: |o, _| !o.adapters.is_empty(),
        run: |s, o, _| {
            let folds = has_epilogues(o) && o.runs("folded_scales");
            let context = adapters::AdapterContext { update: &o.update, role: s.role, folds };
            let (g, adapters::Adapted { weights, products }) =
                adapters::adapters(&s.graph, &o.adapters, context)?;
            s.rewrite((g, weights), |_| {
                format!("{weights} weights have low-rank adapters, whose inputs {products} products compute")
            })
        },
    },
    // A scale after a linear layer is folded into its weight.
    Pass {
        name: "folded_scales",
        enabled: |o, _| has_epilogues(o),
        run: |s, _, _| {
            s.rewrite(folded_scales::folded_scales(&s.graph), |folded| {
                format!("{folded} scales are part of the weight before them")
            })
        },
    },
    // Products add their bias and apply GELU as they write.
    Pass {
        name: "fused_products",
        enabled: |o, _| has_epilogues(o),
        run: |s, _, _| {
            s.rewrite(fused_products::forward(&s.graph), |layers| {
                format!("{layers} products add their bias or apply GELU")
            })
        },
    },
    // Rotary embeddings read their angles from a table.
    Pass {
        name: "rope_table",
        enabled: |o, _| o.rope_positions.is_some(),
        run: |s, o, _| {
            let positions = o.rope_positions.expect("enabled");
            s.rewrite(rope_table::rope_table(&s.graph, positions), |served| {
                format!("{served} rotations read a table")
            })
        },
    },
    // Queries that are also the keys are rotated where they are read.
    Pass {
        name: "rotated_scores",
        enabled: |o, _| o.fuse_elementwise,
        run: |s, _, _| {
            s.rewrite(rotated_scores::rotated_scores(&s.graph), |count| {
                format!("{count} linear attentions rotate what they read")
            })
        },
    },
    // Gradients of every trained parameter are summed; nothing else is differentiated.
    Pass {
        name: "differentiate",
        enabled: |_, role| role.is_grad(),
        run: |s, o, _| {
            let trained = differentiate::with_gradients(&s.graph, o.one_run);
            if trained.weights.is_empty() {
                return Err(Refusal("every parameter is frozen: there is nothing to train".into()));
            }
            s.set_trained(trained);
            Ok(())
        },
    },
    // Multiplications by m / m, needed for its gradient only, are removed.
    Pass {
        name: "held_ratios",
        enabled: |_, role| role.is_grad(),
        run: |s, _, _| {
            let (trained, ones) = held_ratios::held_ratios(&s.take_trained());
            s.set_trained(trained);
            s.report(ones, || format!("{ones} multiplications by m / m are gone, with m's gradient there"));
            Ok(())
        },
    },
    // Parameters, gradients and moments lie in flat regions; `apply` updates a region in one launch.
    Pass {
        name: "update",
        enabled: |o, role| role.is_grad() && o.fuse_optimizer,
        run: |s, o, _| {
            add_update(s, o, true);
            Ok(())
        },
    },
    // Where regions are not updated as a whole, `apply` updates parameter by parameter.
    Pass {
        name: "update_apart",
        enabled: |_, role| role.is_grad(),
        run: |s, o, _| {
            if s.apply.is_none() {
                add_update(s, o, false);
            }
            Ok(())
        },
    },
    // Loss and its gradient take one pass over the logits.
    Pass {
        name: "one_pass_loss",
        enabled: |o, role| role.is_grad() && o.fuse_loss,
        run: |s, _, _| {
            let (trained, count) = one_pass_loss::one_pass_loss(&s.take_trained());
            s.set_trained(trained);
            s.report(count, || format!("{count} loss computes its gradient in the same pass"));
            Ok(())
        },
    },
    // Types are final. Only the gradient program reports the count: evaluation follows it.
    Pass {
        name: "precision",
        enabled: |o, _| o.precision.is_narrow(),
        run: |s, _, _| {
            let (g, forward, products) = precision::precision(&s.graph, s.forward());
            s.set_graph(g, forward);
            let of_gradients = if s.role.is_grad() { products } else { 0 };
            s.report(of_gradients, || format!("{products} products run in bf16"));
            Ok(())
        },
    },
    Pass {
        name: "precision",
        enabled: |o, _| o.precision == Precision::Tf32,
        run: |s, _, _| {
            let (g, products) = tf32::tf32(&s.graph);
            s.graph = g;
            let of_gradients = if s.role.is_grad() { products } else { 0 };
            s.report(of_gradients, || format!("{products} products run in tf32"));
            Ok(())
        },
    },
];

/// From final types to fused launches.
const JOINED: &[Pass] = &[
    // Linear layers multiply 8-bit floats.
    Pass {
        name: "fp8",
        enabled: |o, role| role.is_grad() && o.precision == Precision::FP8,
        run: |s, o, _| {
            let layers = o.fp8_layers.as_ref();
            if let Some(unknown) = layers.and_then(|layers| fp8::unknown(&s.graph, s.forward(), layers)) {
                return Err(Refusal(unknown));
            }
            let (g, forward, narrowed) = fp8::fp8(&s.graph, s.forward(), o.fp8_scaling, layers);
            let fp8::Narrowed { products, of } = narrowed;
            if products == 0 && layers.is_none() {
                return Err(Refusal(NO_FP8.into()));
            }
            s.set_graph(g, forward);
            let scaling = o.fp8_scaling.name();
            s.report(products, || {
                format!("{products} of {of} products run in fp8 by {scaling} scales; the head stays in bf16")
            });
            Ok(())
        },
    },
    // Norms on both sides of a residual addition are one pass. Not in FP8, which quantises in single norms.
    Pass {
        name: "double_norms",
        enabled: |o, role| role.is_grad() && o.fuse_norm && o.precision != Precision::FP8,
        run: |s, _, target| {
            let (g, forward, [pairs, slopes]) = double_norms::double_norms(&s.graph, s.forward(), target);
            s.set_graph(g, forward);
            s.report(pairs, || {
                format!(
                    "{pairs} norms joined the addition and the norm behind them, {slopes} with their gradients"
                )
            });
            Ok(())
        },
    },
    // A second pass over the logits reads those of the first instead of computing them again.
    Pass {
        name: "kept_logits",
        enabled: |o, role| role.is_grad() && o.recompute == Recompute::None,
        run: |s, _, target| {
            s.rewrite(kept_logits::kept_logits(&s.graph, target.name != "cpu"), |count| {
                format!("the gradient of {count} loss reads the logits of the forward pass")
            })
        },
    },
    // Values that the backward pass reads are either kept or recomputed next to their use.
    Pass {
        name: "recompute",
        enabled: |o, role| role.is_grad() && o.recompute != Recompute::None,
        run: |s, o, _| {
            let regathers = o.shards_parameters() && !o.keep_gathered;
            let again =
                recompute::recompute(&s.graph, s.forward(), o.recompute, o.recompute_layers, regathers);
            s.rewrite(again, |again| format!("{again} forward operations run again in the backward pass"))
        },
    },
    DEAD_NODES,
    // A recomputed operation whose gradient reads the same inputs runs inside that gradient.
    Pass {
        name: "rejoin",
        enabled: |_, role| role.is_grad(),
        run: |s, _, _| {
            s.rewrite(rejoin::rejoin(&s.graph), |rejoined| {
                format!("{rejoined} of these run inside a gradient that reads the same")
            })
        },
    },
    // Products of the backward pass apply the slope of GELU as they write.
    Pass {
        name: "fused_products",
        enabled: |o, role| role.is_grad() && has_epilogues(o),
        run: |s, _, _| {
            s.rewrite(fused_products::backward(&s.graph), |slopes| {
                format!("{slopes} products apply GELU's slope")
            })
        },
    },
    DEAD_NODES,
    // The gradient of an input that attends to itself is accumulated onto its other gradients.
    Pass {
        name: "score_gradients",
        enabled: |o, role| role.is_grad() && o.fuse_elementwise,
        run: |s, _, _| {
            s.rewrite(score_gradients::score_gradients(&s.graph), |sums| {
                format!("{sums} gradients of linear attention are written as sums")
            })
        },
    },
    // Products with adapters also compute what the adapters add.
    Pass {
        name: "joined_products",
        enabled: |o, _| !o.adapters.is_empty() && has_epilogues(o),
        run: |s, _, _| {
            s.rewrite(joined_products::joined_products(&s.graph), |joined| {
                format!("{joined} products compute what adapters add to them")
            })
        },
    },
    // Adapters' products apply dropout to what they read or write.
    Pass {
        name: "thin_products",
        enabled: |o, role| role.is_grad() && o.fuse_elementwise,
        run: |s, _, target| {
            s.rewrite(thin_products::thin_products(&s.graph, target), |thin| {
                format!("{thin} dropouts are part of an adapter's product")
            })
        },
    },
    // The operation that computes the last term of a sum also adds it.
    Pass {
        name: "epilogues",
        enabled: |_, _| true,
        run: |s, _, _| {
            let (g, folded) = epilogues::epilogues(&s.graph);
            s.graph = g;
            let of_gradients = if s.role.is_grad() { folded } else { 0 };
            s.report(of_gradients, || format!("{folded} additions are done by the product before them"));
            Ok(())
        },
    },
    // Adapters' products that add to a large tensor move its bytes once, at the rate of a copy.
    Pass {
        name: "thin_sums",
        enabled: |o, role| role.is_grad() && o.fuse_elementwise,
        run: |s, _, target| {
            s.rewrite(thin_products::thin_sums(&s.graph, target), |thin| {
                format!("{thin} adapters' products add to a large tensor in a kernel of their own")
            })
        },
    },
    // Keys and values of few tokens are cached by the operation that rotates queries and keys.
    Pass {
        name: "cached_heads",
        enabled: |o, role| !role.is_grad() && o.fuse_norm,
        run: |s, _, target| {
            s.rewrite(cached_heads::cached_heads(&s.graph, target), |layers| {
                format!("{layers} norms and rotations of q and k write to the caches")
            })
        },
    },
    // Products apply gated activations, and their gradients, as they write.
    Pass {
        name: "gated_products",
        enabled: |o, _| o.fuse_activation && o.precision != Precision::FP8,
        run: |s, _, target| {
            let (g, [gates, slopes]) = gated_products::gated_products(&s.graph, target);
            s.rewrite((g, gates + slopes), |_| {
                format!("{gates} products apply the gated activation behind them, {slopes} its gradient")
            })
        },
    },
    // Products apply GELU, its slope and the sum after the slope as they write.
    Pass {
        name: "activated_products",
        enabled: |o, _| o.fuse_activation && o.precision != Precision::FP8,
        run: |s, _, target| {
            let (g, [layers, slopes]) = activated_products::activated_products(&s.graph, target);
            s.rewrite((g, layers + slopes), |_| {
                format!("{layers} products apply GELU in a kernel of their own, {slopes} its slope")
            })
        },
    },
    // A tensor that is only read quantised is quantised where it is computed.
    Pass {
        name: "quantize_sources",
        enabled: |o, role| role.is_grad() && o.precision == Precision::FP8 && o.fuse_elementwise,
        run: |s, _, _| {
            let (g, joined) = quantize_sources::quantize_sources(&s.graph);
            let quantize_sources::Joined { gated, norms, again } = joined;
            s.rewrite((g, gated + norms), |_| {
                format!(
                    "{gated} gated activations and {norms} norms, or their gradients, are made in 8 bits, and {again} of the \
                     gradients make codes of the forward pass again"
                )
            })
        },
    },
    // Products of 8 bits write gated activations in 8 bits, if only their codes along rows are read.
    Pass {
        name: "gated_codes",
        enabled: |o, role| role.is_grad() && o.precision == Precision::FP8 && o.fuse_activation,
        run: |s, _, target| {
            s.rewrite(gated_products::gated_codes(&s.graph, target), |gates| {
                format!("{gates} products write the gated activation behind them in 8 bits")
            })
        },
    },
];

/// From fused launches to the final graph, for gradients, updates and evaluation alike.
const GATHERED: &[Pass] = &[
    DEAD_NODES,
    // Elementwise neighbours are regions.
    Pass {
        name: "regions",
        enabled: |o, _| o.fuse_elementwise,
        run: |s, _, _| {
            let (g, gathered) = regions::regions(&s.graph);
            s.rewrite((g, gathered.regions), |regions| {
                format!("{} elementwise operations run in {regions} regions", gathered.nodes)
            })
        },
    },
    // Sums over rows are taken by the operation that computes the rows.
    Pass {
        name: "column_sums",
        enabled: |o, _| has_regions(o),
        run: |s, _, _| {
            s.rewrite(column_sums::column_sums(&s.graph), |sums| {
                format!("{sums} sums over rows are taken by what computes the rows")
            })
        },
    },
    // Small elementwise launches at the end of the graph are bundled into one.
    Pass {
        name: "bundles",
        enabled: |o, _| has_regions(o),
        run: |s, _, _| {
            let (g, bundles::Bundled { bundles, nodes }) = bundles::bundles(&s.graph);
            s.rewrite((g, bundles), |_| {
                format!("{nodes} small elementwise launches at the end are {bundles}")
            })
        },
    },
];

/// Nodes that no write and no result depends on are removed.
const DEAD_NODES: Pass = Pass {
    name: "dead_nodes",
    enabled: |_, _| true,
    run: |s, _, _| {
        s.graph = without_dead(&s.graph);
        Ok(())
    },
};

const NO_FP8: &str = "no product of a layer can run in fp8: its extents must be multiples of 16 (tokens of a micro-batch, width, heads, ffn)";

/// Whether products may have epilogues; 8-bit products have none.
fn has_epilogues(o: &Options) -> bool {
    o.fuse_elementwise && o.precision != Precision::FP8 && o.runs("fused_products")
}

fn has_regions(o: &Options) -> bool {
    o.fuse_elementwise && o.runs("regions")
}

/// Lays the parameters out in regions and adds the graph of `apply`.
fn add_update(s: &mut State, o: &Options, fused: bool) {
    let mut trained = s.take_trained();
    let update::Updated { mut apply, launches, divided } = update::update(&mut trained, o, fused);
    if o.precision.is_narrow() {
        precision::narrow_slots(&mut apply, &trained.graph);
    }
    check("update", &apply);
    s.reports.add(s.role, "update", launches, || {
        format!("{} parameter tensors are updated in {launches} launches", trained.weights.len())
    });
    s.set_trained(trained);
    (s.apply, s.divided) = (Some(apply), divided);
}

fn is_switched_off(op: &Op, o: &Options) -> bool {
    match op.kind() {
        OpKind::RmsNorm => !o.fuse_norm,
        OpKind::Attention | OpKind::LinearAttention => !o.flash_attention,
        OpKind::HeadLoss => !o.fuse_loss,
        _ => false,
    }
}

/// The slot path of a program's input.
pub fn input_path(role: Role, name: &str) -> String {
    format!("{role}.{name}")
}
