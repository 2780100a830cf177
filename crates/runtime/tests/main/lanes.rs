//! Training on the CPU's kernels by ranks that are threads: the same bits for every number of ranks that divides the lanes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;

use flatout_ir::passes::lanes::{lanes_a_rank, lanes_of, roles_after};
use flatout_ir::passes::totals::{STOP, STOP_FLAGS};
use flatout_ir::passes::{input_path, update};
use flatout_ir::{
    Class, Graph, Init, Mesh, Moments, Options, PlanSet, Precision, Program, Role, Update, compile, random,
};
use flatout_models::config::DecoderConfig;
use flatout_models::decoder::build;
use flatout_models::form::{Form, LossForm};
use flatout_runtime::{Session, cpu};
use flatout_world::{Threads, Wire};

const CONTEXT: usize = 16;
const UPDATES: usize = 20;
const VOCAB: usize = 61;

fn graph(rows: usize) -> Graph {
    let config = DecoderConfig {
        width: 32,
        layers: 3,
        heads: 4,
        kv_heads: Some(2),
        ffn: 80,
        vocab: VOCAB,
        context: CONTEXT,
        qk_norm: true,
        dropout: 0.1,
        init_std: 0.1,
        ..DecoderConfig::default()
    };
    build(&config, Form::Loss(LossForm { dropout: true, ..LossForm::rows(rows, CONTEXT) }))
}

fn draw(update: usize, row: usize, token: usize) -> u32 {
    random::philox([update as u32, row as u32, token as u32, 0], [5, 0])[0]
}

/// Writes rows of an update. Rows weigh differently, and some tokens nothing.
fn feed(session: &mut Session, update: usize, rows: &[usize]) {
    let tokens = || rows.iter().flat_map(|row| (0..CONTEXT).map(move |t| (*row, t)));
    let at = |name: &str| input_path(Role::GRAD, name);
    let text = |row: usize, t: usize| (draw(update, row, t) % VOCAB as u32 / (1 + t as u32 % 3)) as i32;
    let is_learned = |row: usize, t: usize| !draw(update, row, 100 + t).is_multiple_of(5);
    let i32s = |of: &dyn Fn(usize, usize) -> i32| tokens().map(|(row, t)| of(row, t)).collect::<Vec<i32>>();
    session.write_i32(&at("tokens"), &i32s(&text)).expect("tokens");
    let target = |row, t| if is_learned(row, t) { text(row, t + 1) } else { -1 };
    session.write_i32(&at("targets"), &i32s(&target)).expect("targets");
    session.write_i32(&at("positions"), &i32s(&|_, t| t as i32)).expect("positions");
    let weight = |(row, t): (usize, usize)| if is_learned(row, t) { 0.5 + (row % 3) as f32 } else { 0.0 };
    session.write_f32(&at("weights"), &tokens().map(weight).collect::<Vec<f32>>()).expect("weights");
    session.write_i32(&at("rng"), &[11, 0, update as i32]).expect("a seed");
    let keys: Vec<i32> = tokens().flat_map(|(row, t)| [row as i32, t as i32]).collect();
    session.write_i32(&at("rows"), &keys).expect("keys");
}

fn begin(session: &mut Session) {
    let slots: Vec<_> = session.plans().slots.clone();
    let leaves = slots.iter().filter(|slot| !slot.is_whole);
    for slot in leaves {
        let stream = slot.path.bytes().fold(0, |h: u64, b| h.wrapping_mul(257).wrapping_add(b as u64));
        let values: Vec<f32> = match (slot.class, slot.init) {
            (Class::Weight | Class::Average, Init::Normal { std }) => {
                (0..slot.ty.elements() as u64).map(|i| std * random::normal(3, stream, i)).collect()
            }
            (Class::Weight, Init::Ones) => vec![1.0; slot.ty.elements()],
            _ => continue,
        };
        session.write_f32(&slot.path, &values).expect("a value");
    }
    if session.plans().plan(Role::Derive).is_some() {
        session.run(Role::Derive).expect("copies");
    }
}

/// Bits of loss and norm of every update, and of all that is saved.
#[derive(Clone, PartialEq)]
struct Run {
    told: Vec<[u32; 2]>,
    state: BTreeMap<String, Vec<u8>>,
}

impl Run {
    fn losses(&self) -> Vec<f32> {
        self.told.iter().map(|[loss, _]| f32::from_bits(*loss)).collect()
    }

    /// Where two runs part, for a message.
    fn parts_from(&self, other: &Run) -> Option<String> {
        if let Some(at) = (0..UPDATES).find(|at| self.told[*at] != other.told[*at]) {
            let [a, b] = [self, other].map(|run| run.told[at].map(f32::from_bits));
            return Some(format!("update {at} gives {a:?} and {b:?}"));
        }
        let differs = |path: &&String| self.state[*path] != other.state[*path];
        self.state.keys().find(differs).map(|path| format!("`{path}` differs"))
    }
}

/// Trains as one rank does: its lanes one after the other, micro-batches of `rows` rows of one lane.
fn train(plans: PlanSet, o: &Options, batch: usize, rows: usize, wire: Option<Arc<dyn Wire>>) -> Run {
    let rank = wire.as_ref().map_or(0, |wire| wire.rank());
    let mut session = Session::among(plans, 1, wire).expect("a session");
    begin(&mut session);
    let (each, ranks) = (lanes_a_rank(o), o.mesh.ranks());
    let lanes = each * ranks;
    let mut told = vec![];
    for update in 0..UPDATES {
        for lane in 0..each {
            let own = lanes_of(rank, o).start + lane;
            let of_lane: Vec<usize> = (own..batch).step_by(lanes).collect();
            for part in of_lane.chunks_exact(rows) {
                feed(&mut session, update, part);
                session.run(Role::GRAD).expect("gradients");
            }
            roles_after(lane, each).into_iter().for_each(|role| session.run(role).expect("a lane"));
        }
        let lr = 5e-3 / (1 + update / 10) as f32;
        session.write_f32(&input_path(Role::Apply, update::LR), &[lr]).expect("a rate");
        if ranks > 1 {
            session.write_f32(&input_path(Role::Apply, STOP), &[0.0; STOP_FLAGS.len()]).expect("flags");
        }
        session.run(Role::Apply).expect("an update");
        let result = |name: &str| session.result(Role::Apply, name).expect("a result")[0];
        assert_eq!(result("is_finite"), 1.0);
        told.push(["loss", "grad_norm"].map(|name| result(name).to_bits()));
    }
    let saved = session
        .plans()
        .slots
        .iter()
        .filter(|s| !s.is_whole && (s.class.is_saved() || s.class == Class::Scale));
    let state = saved.map(|s| (s.path.clone(), session.read_slot(&s.path).expect("a slot"))).collect();
    Run { told, state }
}

/// The run of every rank.
fn on_ranks(o: &Options, batch: usize, rows: usize) -> Vec<Run> {
    let program = Program { role: Role::GRAD, graph: graph(rows) };
    let plans = compile(&[program], &cpu::target(1), o).expect("plans");
    let ranks = o.mesh.ranks();
    if ranks == 1 {
        return vec![train(plans, o, batch, rows, None)];
    }
    thread::scope(|scope| {
        let running: Vec<_> = Threads::connect(ranks)
            .into_iter()
            .map(|end| {
                let (plans, wire): (_, Arc<dyn Wire>) = (plans.clone(), Arc::new(end));
                scope.spawn(move || train(plans, o, batch, rows, Some(wire)))
            })
            .collect();
        running.into_iter().map(|rank| rank.join().expect("a rank that ends")).collect()
    })
}

fn options(mesh: Mesh, lanes: usize, moments: Moments) -> Options {
    let update = Update { clip: 0.5, average: Some(0.9), moments, ..Update::default() };
    Options { mesh, lanes, update, ..Options::default() }
}

/// The run of one rank, which those of these meshes must equal.
fn same_bits(meshes: &[[usize; 2]], moments: Moments, change: impl Fn(Options) -> Options) -> Run {
    let of = |mesh: Mesh| on_ranks(&change(options(mesh, 8, moments)), 16, 1);
    let one = of(Mesh::ONE).remove(0);
    for mesh in meshes.iter().map(|[replicas, shards]| Mesh::new(*replicas, *shards)) {
        for (rank, run) in of(mesh).iter().enumerate() {
            assert_eq!(run.parts_from(&one), None, "rank {rank} of {mesh} against one rank, {moments:?}");
        }
    }
    one
}

#[test]
fn every_number_of_ranks_has_the_bits_of_one() {
    let losses = same_bits(&[[1, 2], [1, 4], [2, 2], [1, 8], [4, 2]], Moments::F32, |o| o).losses();
    assert!(losses[UPDATES - 1] < losses[0] - 0.1, "something is learned: {losses:?}");
    for moments in [Moments::BF16, Moments::Int8] {
        same_bits(&[[1, 2], [1, 8]], moments, |o| o);
    }
    same_bits(&[[1, 4]], Moments::F32, |o| Options { precision: Precision::BF16, ..o });
    same_bits(&[[1, 4]], Moments::F32, |o| Options { fuse_optimizer: false, fuse_elementwise: false, ..o });
}

#[test]
fn ranks_that_are_no_power_of_two_stay_close() {
    let moments = Moments::F32;
    let one = on_ranks(&options(Mesh::ONE, 1, moments), 15, 1).remove(0).losses();
    for ranks in [3, 5] {
        for lanes in [1, ranks] {
            let runs = on_ranks(&options(Mesh::new(1, ranks), lanes, moments), 15, 1);
            assert!(runs.iter().all(|run| run.parts_from(&runs[0]).is_none()), "replicas do not drift");
            for (got, want) in runs[0].losses().iter().zip(&one) {
                assert!(
                    (got / want - 1.0).abs() < 1e-5,
                    "{ranks} ranks, {lanes} lanes: {got}, wanted {want}"
                );
            }
        }
    }
}

/// Micro-batches of a lane are summed in order, whatever the lanes lie on; without lanes the grouping is another.
#[test]
fn lanes_are_what_keeps_the_bits() {
    let moments = Moments::F32;
    let two_rows = |mesh: Mesh| on_ranks(&options(mesh, 8, moments), 32, 2).remove(0);
    assert_eq!(two_rows(Mesh::new(1, 4)).parts_from(&two_rows(Mesh::ONE)), None);
    let [two, four] =
        [2, 4].map(|ranks| on_ranks(&options(Mesh::new(1, ranks), 1, moments), 16, 1).remove(0));
    assert!(two.parts_from(&four).is_some(), "sums in another order have other bits");
}
