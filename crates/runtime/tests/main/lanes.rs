//! Tests training on the CPU's kernels with ranks as threads: the same bits for every number of ranks that divides the lanes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;

use flatout_ir::block8::{BLOCK, Code};
use flatout_ir::optimizers::scales_path;
use flatout_ir::passes::lanes::{lanes_a_rank, lanes_of, roles_after};
use flatout_ir::passes::totals::{STOP, STOP_FLAGS};
use flatout_ir::passes::{input_path, update};
use flatout_ir::plan::PlacedSlot;
use flatout_ir::{
    Class, DType, Graph, Init, Mesh, Moments, Options, PlanSet, Precision, Program, Role, Shard, TensorRange,
    Update, compile, random,
};
use flatout_models::config::DecoderConfig;
use flatout_models::decoder::build;
use flatout_models::form::{Form, LossForm};
use flatout_runtime::{Session, cpu};
use flatout_world::{Threads, Wire};

const CONTEXT: usize = 16;
const UPDATES: usize = 20;
const VOCAB: usize = 61;

pub fn graph(rows: usize) -> Graph {
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

/// Writes rows of an update. Rows have different weights, and some tokens weight 0.
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

/// Initialises everything that a rank holds.
fn begin(session: &mut Session, rank: usize) {
    for piece in session.plans().held(rank) {
        let stream = piece.path.bytes().fold(0, |h: u64, b| h.wrapping_mul(257).wrapping_add(b as u64));
        let values: Vec<f32> = match (piece.class, piece.init) {
            (Class::Weight | Class::Average, Init::Normal { std }) => {
                piece.range.clone().map(|i| std * random::normal(3, stream, i as u64)).collect()
            }
            (Class::Weight, Init::Ones) => vec![1.0; piece.elements()],
            _ => continue,
        };
        let bytes: Vec<u8> = values.into_iter().flat_map(f32::to_le_bytes).collect();
        session.write_range(&piece.slot, piece.at, &bytes).expect("a value");
    }
    if session.plans().plan(Role::Derive).is_some() {
        session.run(Role::Derive).expect("copies");
    }
}

/// A range of a tensor's bytes.
struct Bytes {
    path: String,
    from: usize,
    of: usize,
    bytes: Vec<u8>,
}

/// Everything that a rank contributes to a checkpoint. 8-bit moments are decoded.
fn saved(session: &Session, rank: usize) -> Vec<Bytes> {
    let of_piece = |piece: TensorRange| {
        let size = piece.ty.dtype.bytes();
        let bytes = session.read_range(&piece.slot, piece.within()).expect("elements of a slot");
        let (from, of) = (piece.range.start, piece.ty.elements());
        match piece.ty.dtype {
            DType::E4M3 => decoded(session, &piece, Code::Signed, &bytes),
            DType::E4M4 => decoded(session, &piece, Code::Unsigned, &bytes),
            _ => Bytes { path: piece.path, from: size * from, of: size * of, bytes },
        }
    };
    let saved = session.plans().held(rank).into_iter().filter(|piece| piece.class.is_saved());
    saved.filter(|piece| piece.elements() > 0).map(of_piece).collect()
}

/// Decodes moments with the scales of the region, or of the share, that they lie in.
fn decoded(session: &Session, piece: &TensorRange, code: Code, codes: &[u8]) -> Bytes {
    let plans = session.plans();
    let at = plans.slot(&piece.slot).expect("a slot").view.offset + piece.at;
    let holds = |slot: &&PlacedSlot| {
        let range = slot.view.offset..slot.view.offset + slot.ty.elements();
        range.contains(&at) && plans.slot(&scales_path(&slot.path)).is_some()
    };
    let region = plans.slots.iter().find(holds).expect("a slot with scales");
    let scales = session.read_f32(&scales_path(&region.path)).expect("scales");
    let first = at - region.view.offset;
    let value = |(i, byte): (usize, &u8)| code.decode(*byte) * scales[(first + i) / BLOCK];
    let bytes = codes.iter().enumerate().map(value).flat_map(f32::to_le_bytes).collect();
    Bytes { path: piece.path.clone(), from: 4 * piece.range.start, of: 4 * piece.ty.elements(), bytes }
}

/// Assembles whole tensors from the parts of all ranks, which must agree.
fn together(ranks: impl IntoIterator<Item = Vec<Bytes>>) -> BTreeMap<String, Vec<u8>> {
    let mut tensors: BTreeMap<String, Vec<Option<u8>>> = BTreeMap::new();
    for Bytes { path, from, of, bytes } in ranks.into_iter().flatten() {
        let whole = tensors.entry(path.clone()).or_insert_with(|| vec![None; of]);
        for (known, byte) in whole[from..].iter_mut().zip(bytes) {
            assert!(known.is_none_or(|known| known == byte), "replicas do not drift: `{path}`");
            *known = Some(byte);
        }
    }
    let whole =
        |bytes: Vec<Option<u8>>| bytes.into_iter().map(|byte| byte.expect("some rank has it")).collect();
    tensors.into_iter().map(|(path, bytes)| (path, whole(bytes))).collect()
}

/// Bits of loss and norm of every update, and of the final state.
#[derive(Clone, PartialEq)]
pub struct Run {
    told: Vec<[u32; 2]>,
    state: BTreeMap<String, Vec<u8>>,
}

impl Run {
    fn losses(&self) -> Vec<f32> {
        self.told.iter().map(|[loss, _]| f32::from_bits(*loss)).collect()
    }

    /// Describes the first difference between two runs, for a message.
    pub fn parts_from(&self, other: &Run) -> Option<String> {
        if let Some(at) = (0..UPDATES).find(|at| self.told[*at] != other.told[*at]) {
            let [a, b] = [self, other].map(|run| run.told[at].map(f32::from_bits));
            return Some(format!("update {at} gives {a:?} and {b:?}"));
        }
        if !self.state.keys().eq(other.state.keys()) {
            return Some("other tensors are saved".into());
        }
        let differs = |path: &&String| self.state[*path] != other.state[*path];
        self.state.keys().find(differs).map(|path| format!("`{path}` differs"))
    }
}

/// Returns loss and norm of every update, and a rank's final state. Lanes are trained one after the other, in micro-batches of
/// `rows` rows of one lane.
fn train(
    plans: PlanSet,
    o: &Options,
    batch: usize,
    rows: usize,
    wire: Option<Arc<dyn Wire>>,
) -> (Vec<[u32; 2]>, Vec<Bytes>) {
    let rank = wire.as_ref().map_or(0, |wire| wire.rank());
    let mut session = Session::among(plans, 1, wire).expect("a session");
    begin(&mut session, rank);
    let (each, ranks) = (lanes_a_rank(o), o.mesh.ranks());
    let lanes = each * ranks;
    let mut told = vec![];
    for update in 0..UPDATES {
        for lane in 0..each {
            let own = lanes_of(rank, o)[lane];
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
    (told, saved(&session, rank))
}

/// The run of all ranks, which must agree on every update.
pub fn on_ranks(o: &Options, batch: usize, rows: usize) -> Run {
    let program = Program { role: Role::GRAD, graph: graph(rows) };
    let plans = compile(&[program], &cpu::target(1), o).expect("plans");
    let ranks = o.mesh.ranks();
    let ran: Vec<_> = thread::scope(|scope| {
        let wires: Vec<Option<Arc<dyn Wire>>> = match ranks {
            1 => vec![None],
            _ => {
                Threads::connect(ranks).into_iter().map(|end| Some(Arc::new(end) as Arc<dyn Wire>)).collect()
            }
        };
        let running: Vec<_> = wires
            .into_iter()
            .map(|wire| {
                let plans = plans.clone();
                scope.spawn(move || train(plans, o, batch, rows, wire))
            })
            .collect();
        running.into_iter().map(|rank| rank.join().expect("a rank that ends")).collect()
    });
    let (told, saved): (Vec<_>, Vec<_>) = ran.into_iter().unzip();
    assert!(told.iter().all(|by_rank| *by_rank == told[0]), "every rank says the same");
    Run { told: told[0].clone(), state: together(saved) }
}

pub fn options(mesh: Mesh, lanes: usize, moments: Moments) -> Options {
    let update = Update { clip: 0.5, average: Some(0.9), moments, ..Update::default() };
    Options { mesh, lanes, update, ..Options::default() }
}

/// The run of a single rank, after asserting that these meshes give the same bits, both replicated and sharded; the number of
/// buckets cycles through one, two, and one per layer.
fn same_bits(meshes: &[[usize; 2]], moments: Moments, change: impl Fn(Options) -> Options) -> Run {
    let of = |mesh: Mesh| change(options(mesh, 8, moments));
    let one = on_ranks(&of(Mesh::ONE), 16, 1);
    let numbers = [1, 2, usize::MAX].into_iter().cycle();
    let meshes = meshes.iter().map(|[replicas, shards]| Mesh::new(*replicas, *shards));
    for (mesh, buckets) in meshes.zip(numbers) {
        let whole = on_ranks(&of(mesh), 16, 1);
        assert_eq!(whole.parts_from(&one), None, "{mesh} against one rank, {moments:?}");
        let shares = on_ranks(&Options { shard: Shard::Optimizer, buckets, ..of(mesh) }, 16, 1);
        assert_eq!(shares.parts_from(&one), None, "shares of {mesh}, {buckets} buckets, {moments:?}");
    }
    one
}

#[test]
fn every_number_of_ranks_has_the_bits_of_one() {
    let losses = same_bits(&[[1, 2], [1, 4], [2, 2], [1, 8], [4, 2]], Moments::F32, |o| o).losses();
    assert!(losses[UPDATES - 1] < losses[0] - 0.1, "something is learned: {losses:?}");
    for moments in [Moments::BF16, Moments::Int8] {
        same_bits(&[[1, 2], [1, 8]], moments, |o| o);
        same_bits(&[[1, 4]], moments, |o| Options { precision: Precision::BF16, ..o });
    }
    same_bits(&[[1, 4]], Moments::F32, |o| Options { precision: Precision::BF16, ..o });
    // Without weight decay of matrices, vectors and matrices share one rule.
    let equal = |o: Options| Options { update: Update { weight_decay: 0.0, ..o.update }, ..o };
    same_bits(&[[1, 4]], Moments::BF16, equal);
}

/// The bits also stay the same if gradients are added over ranks in every micro-batch, and if weights are gathered in it.
#[test]
fn ranks_in_step_have_the_bits_of_one() {
    for (moments, precision, meshes) in [
        (Moments::F32, Precision::F32, &[[1, 2], [2, 2], [1, 8]][..]),
        (Moments::BF16, Precision::BF16, &[[1, 4]]),
        (Moments::Int8, Precision::F32, &[[1, 4]]),
    ] {
        let of = |mesh: Mesh| Options { precision, ..options(mesh, 8, moments) };
        let one = on_ranks(&of(Mesh::ONE), 8, 1);
        for [replicas, shards] in meshes {
            let mesh = Mesh::new(*replicas, *shards);
            for shard in [Shard::Gradients, Shard::Parameters] {
                let in_step = Options { shard, buckets: usize::MAX, ..of(mesh) };
                let what = format!("{mesh}, {}, {moments:?}, {}", shard.name(), precision.name());
                assert_eq!(on_ranks(&in_step, 8, 1).parts_from(&one), None, "{what}");
            }
        }
    }
}

/// The number of buckets in which shares are exchanged changes no bit.
#[test]
fn every_number_of_buckets_has_the_same_bits() {
    let of = |buckets: usize| {
        let options = options(Mesh::new(1, 4), 8, Moments::Int8);
        Options { shard: Shard::Optimizer, precision: Precision::BF16, buckets, ..options }
    };
    let one = on_ranks(&of(1), 16, 1);
    for buckets in [2, 3, usize::MAX] {
        assert_eq!(on_ranks(&of(buckets), 16, 1).parts_from(&one), None, "{buckets} buckets");
    }
}

/// Updating parameters one by one gives the bits of regions, on every rank; shares cannot be updated that way.
#[test]
fn parameters_one_by_one_have_the_same_bits() {
    let apart = |mesh: Mesh| {
        let options = options(mesh, 8, Moments::F32);
        Options { fuse_optimizer: false, fuse_elementwise: false, ..options }
    };
    let one = on_ranks(&apart(Mesh::ONE), 16, 1);
    assert_eq!(on_ranks(&apart(Mesh::new(1, 4)), 16, 1).parts_from(&one), None);
}

#[test]
fn ranks_that_are_no_power_of_two_stay_close() {
    let moments = Moments::F32;
    let one = on_ranks(&options(Mesh::ONE, 1, moments), 15, 1).losses();
    for (ranks, shard) in [3, 5].into_iter().flat_map(|ranks| Shard::ALL.iter().map(move |s| (ranks, *s))) {
        for lanes in [1, ranks] {
            let options = Options { shard, buckets: 2, ..options(Mesh::new(1, ranks), lanes, moments) };
            for (got, want) in on_ranks(&options, 15, 1).losses().iter().zip(&one) {
                assert!(
                    (got / want - 1.0).abs() < 1e-5,
                    "{ranks} ranks, {lanes} lanes: {got}, wanted {want}"
                );
            }
        }
    }
}

/// Micro-batches of a lane are summed in order, whatever ranks the lanes are on; without lanes the grouping differs.
#[test]
fn lanes_keep_the_bits() {
    let moments = Moments::F32;
    let two_rows = |mesh: Mesh| on_ranks(&options(mesh, 8, moments), 32, 2);
    assert_eq!(two_rows(Mesh::new(1, 4)).parts_from(&two_rows(Mesh::ONE)), None);
    let [two, four] = [2, 4].map(|ranks| on_ranks(&options(Mesh::new(1, ranks), 1, moments), 16, 1));
    assert!(two.parts_from(&four).is_some(), "sums in another order have other bits");
}
