//! Training on several ranks, run launch by launch with the oracle on an arena a rank, against the graph no pass has touched
//! over all rows and AdamW written down.

use std::collections::HashMap;

use flatout_ir::interpreter::Interpreter;
use flatout_ir::passes::differentiate::{LOSS_SUM, WEIGHT_SUM, differentiate, gradient_path};
use flatout_ir::passes::lanes::{lanes_a_rank, lanes_of, roles_after};
use flatout_ir::passes::totals::{STOP, STOP_FLAGS, stop_path};
use flatout_ir::passes::{input_path, update};
use flatout_ir::target::paper;
use flatout_ir::{
    Class, Graph, Init, Mesh, Options, Precision, Program, Role, Update, compile, oracle, random,
};
use flatout_models::config::DecoderConfig;
use flatout_models::decoder::build;
use flatout_models::form::{Form, LossForm};

use crate::small;

const UPDATES: usize = 2;
const LR: f64 = 0.02;

fn config() -> DecoderConfig {
    DecoderConfig { dropout: 0.1, ..small::decoder() }
}

fn graph(c: &DecoderConfig, rows: usize) -> Graph {
    build(c, Form::Loss(LossForm { dropout: c.dropout > 0.0, ..LossForm::rows(rows, c.context) }))
}

/// The values of an input for the tokens of one row of an update.
fn input(c: &DecoderConfig, name: &str, update: usize, row: usize) -> Vec<f64> {
    let at = |t: usize| (update * 31 + row) * c.context + t;
    let of_token = |t: usize| -> Vec<f64> {
        match name {
            "tokens" => vec![((at(t) * 7 + 3) % 13) as f64],
            "targets" => vec![if at(t) % 4 == 1 { -1.0 } else { ((at(t) * 5 + 2) % 13) as f64 }],
            "weights" => vec![if at(t) % 4 == 1 { 0.0 } else { 1.0 + 0.25 * (at(t) % 3) as f64 }],
            "positions" => vec![t as f64],
            "rows" => vec![row as f64, t as f64],
            _ => unreachable!("an input `{name}`"),
        }
    };
    (0..c.context).flat_map(of_token).collect()
}

/// All inputs of some rows of an update.
fn inputs(c: &DecoderConfig, g: &Graph, update: usize, rows: &[usize]) -> Vec<(String, Vec<f64>)> {
    let of_slot = |path: &str| match path {
        "rng" => vec![11.0, 0.0, update as f64],
        name => rows.iter().flat_map(|row| input(c, name, update, *row)).collect(),
    };
    let slots = g.slots.iter().filter(|slot| slot.class == Class::Input);
    slots.map(|slot| (slot.path.clone(), of_slot(&slot.path))).collect()
}

fn weights(g: &Graph) -> HashMap<String, Vec<f64>> {
    let slots = g.slots.iter().enumerate().filter(|(_, slot)| slot.class == Class::Weight);
    let drawn = |(i, slot): (usize, &flatout_ir::Slot)| {
        let draw = |k: usize| random::normal(5, i as u64, k as u64);
        let value = |k: usize| match slot.init {
            Init::Normal { std } => draw(k) * std,
            _ => 1.0 + 0.2 * draw(k),
        };
        (slot.path.clone(), (0..slot.ty.elements()).map(|k| value(k) as f64).collect())
    };
    slots.map(drawn).collect()
}

/// The state that training ends in, and loss and norm of every update.
#[derive(Debug, PartialEq)]
struct Trained {
    told: Vec<[f64; 2]>,
    weights: HashMap<String, Vec<f64>>,
}

/// Without any pass: gradients of all rows at once by the oracle, then the formula.
fn plain(c: &DecoderConfig, rows: usize, how: &Update) -> Trained {
    let g = graph(c, rows);
    let all: Vec<usize> = (0..rows).collect();
    let gradients = differentiate(&g).graph;
    let mut weights = weights(&g);
    let zeros = |of: &HashMap<String, Vec<f64>>| -> HashMap<String, Vec<f64>> {
        of.iter().map(|(path, x)| (path.clone(), vec![0.0; x.len()])).collect()
    };
    let (mut m, mut v, mut told) = (zeros(&weights), zeros(&weights), vec![]);
    for update in 0..UPDATES {
        let mut values = weights.clone();
        values.extend(inputs(c, &g, update, &all));
        let sums = oracle::run(&gradients, &values).writes;
        let weight = sums[WEIGHT_SUM][0];
        let squares = |path: &String| sums[&gradient_path(path)].iter().map(|x| x * x).sum::<f64>();
        let norm = weights.keys().map(squares).sum::<f64>().sqrt() / weight;
        told.push([sums[LOSS_SUM][0] / weight, norm]);
        let scale = (how.clip as f64 / norm).min(1.0) / weight;
        let (b1, b2, t) = (how.beta1 as f64, how.beta2 as f64, (update + 1) as i32);
        for (path, w) in &mut weights {
            let axes = g.slot(g.find_slot(path).expect("a weight")).ty.rank();
            let decay = how.rule(path, axes).weight_decay as f64;
            let (m, v) = (m.get_mut(path).expect("a moment"), v.get_mut(path).expect("a moment"));
            for (i, sum) in sums[&gradient_path(path)].iter().enumerate() {
                let g = sum * scale;
                m[i] = b1 * m[i] + (1.0 - b1) * g;
                v[i] = b2 * v[i] + (1.0 - b2) * g * g;
                let step = m[i] / (1.0 - b1.powi(t)) / ((v[i] / (1.0 - b2.powi(t))).sqrt() + how.eps as f64);
                w[i] -= LR * (step + decay * w[i]);
            }
        }
    }
    Trained { told, weights }
}

/// By compiled plans, a micro-batch a row, each rank with the rows of its lanes.
fn on_ranks(c: &DecoderConfig, rows: usize, options: &Options) -> Trained {
    let g = graph(c, 1);
    let program = Program { role: Role::GRAD, graph: g.clone() };
    let mut run = Interpreter::new(compile(&[program], &paper(), options).expect("plans"));
    let names: Vec<String> = weights(&g).into_keys().collect();
    let kept = run.plans.slots.iter().filter(|slot| slot.class.is_saved() || slot.class == Class::Derived);
    let kept: Vec<String> = kept.map(|slot| slot.path.clone()).collect();
    weights(&g).iter().for_each(|(path, values)| run.set(path, values));
    if run.plans.plan(Role::Derive).is_some() {
        run.run(Role::Derive);
    }
    let (ranks, each) = (options.mesh.ranks(), lanes_a_rank(options));
    // Where lanes are not kept apart, a rank is one.
    let lanes = each * ranks;
    let rows_a_lane = rows / lanes;
    assert_eq!(rows_a_lane * lanes, rows);
    let mut told = vec![];
    for update in 0..UPDATES {
        for lane in 0..each {
            for turn in 0..rows_a_lane {
                for rank in 0..ranks {
                    let own = lanes_of(rank, options).start + lane;
                    for (name, values) in inputs(c, &g, update, &[turn * lanes + own]) {
                        run.set_at(rank, &input_path(Role::GRAD, &name), &values);
                    }
                }
                run.run(Role::GRAD);
            }
            roles_after(lane, each).into_iter().for_each(|role| run.run(role));
        }
        run.set(&input_path(Role::Apply, update::LR), &[LR]);
        if ranks > 1 {
            // The last rank is asked to stop by the second flag.
            let mut flags = vec![0.0; STOP_FLAGS.len()];
            run.set(&input_path(Role::Apply, STOP), &flags);
            flags[1] = 1.0;
            run.set_at(ranks - 1, &input_path(Role::Apply, STOP), &flags);
        }
        run.run(Role::Apply);
        let told_by =
            |rank: usize| ["loss", "grad_norm"].map(|name| run.result_at(rank, Role::Apply, name)[0]);
        told.push(told_by(0));
        for rank in 1..ranks {
            assert_eq!(told_by(rank), told_by(0), "rank {rank}");
            let stops = STOP_FLAGS.map(|flag| run.result_at(rank, Role::Apply, &stop_path(flag))[0]);
            assert_eq!(stops, [0.0, 1.0, 0.0, 0.0, 0.0]);
        }
        for rank in 0..ranks {
            assert!(run.get_at(rank, "region.0.grads").iter().all(|x| *x == 0.0), "sums are cleared");
        }
    }
    for (rank, path) in (1..ranks).flat_map(|rank| kept.iter().map(move |path| (rank, path))) {
        assert_eq!(run.get_at(rank, path), run.get(path), "replicas do not drift: `{path}` of rank {rank}");
    }
    let weights = names.into_iter().map(|path| (path.clone(), run.get(&path))).collect();
    Trained { told, weights }
}

fn close(got: &Trained, want: &Trained, bound: f64, what: &str) {
    for (got, want) in got.told.iter().zip(&want.told) {
        for (got, want) in got.iter().zip(want) {
            assert!((got / want - 1.0).abs() < bound, "{what}: {got}, wanted {want}");
        }
    }
    let size = |x: f64| x * x;
    let (mut off, mut all) = (0.0, 0.0);
    for (path, want) in &want.weights {
        off += got.weights[path].iter().zip(want).map(|(g, w)| size(g - w)).sum::<f64>();
        all += want.iter().map(|w| size(*w)).sum::<f64>();
    }
    let off: f64 = (off / all).sqrt();
    assert!(off < bound, "{what}: weights are off by {off:.1e}");
}

fn options(mesh: Mesh, lanes: usize) -> Options {
    Options { mesh, lanes, ..Options::default() }
}

#[test]
fn ranks_make_the_update_of_all_rows() {
    let (c, how) = (&config(), Update::default());
    for (ranks, rows) in [(2, 4), (3, 6), (4, 4), (8, 8)] {
        let want = plain(c, rows, &how);
        let mesh = Mesh::new(1, ranks);
        for options in [options(mesh, ranks), options(mesh, 1)] {
            close(
                &on_ranks(c, rows, &options),
                &want,
                1e-5,
                &format!("{ranks} ranks, {} lanes", options.lanes),
            );
        }
        let apart = Options { fuse_optimizer: false, fuse_elementwise: false, ..options(mesh, ranks) };
        close(&on_ranks(c, rows, &apart), &want, 1e-5, &format!("{ranks} ranks, parameter by parameter"));
    }
    let bf16 = Options { precision: Precision::BF16, ..options(Mesh::new(1, 2), 2) };
    close(&on_ranks(c, 4, &bf16), &plain(c, 4, &how), 5e-2, "2 ranks in bf16");
}

/// Magnitudes of 8-bit tensors are those of all ranks: what scales are made of is the same on each, and the update is that of
/// all rows within the rounding of 8 bits.
#[test]
fn ranks_share_the_scales_of_8_bit_floats() {
    let c = &DecoderConfig {
        width: 32,
        head_size: Some(16),
        ffn: 48,
        context: 16,
        init_std: 0.1,
        ..small::decoder()
    };
    let want = plain(c, 2, &Update::default());
    let of = |mesh: Mesh, lanes: usize| {
        on_ranks(c, 2, &Options { precision: Precision::FP8, ..options(mesh, lanes) })
    };
    let (one, two) = (of(Mesh::ONE, 2), of(Mesh::new(1, 2), 2));
    close(&two, &want, 0.1, "2 ranks in fp8");
    assert_eq!(one, two, "two lanes on one rank");
}

/// The same bits for every number of ranks that divides the lanes, and for every mesh of them.
#[test]
fn bits_do_not_depend_on_how_many_ranks_have_the_lanes() {
    let c = &config();
    let one = on_ranks(c, 8, &options(Mesh::ONE, 8));
    close(&one, &plain(c, 8, &Update::default()), 1e-5, "eight lanes on one rank");
    for mesh in [Mesh::new(1, 2), Mesh::new(1, 4), Mesh::new(2, 2), Mesh::new(1, 8), Mesh::new(2, 4)] {
        assert_eq!(on_ranks(c, 8, &options(mesh, 8)), one, "{mesh}");
    }
}
