//! Tests collectives between sessions on threads of this process against the oracle over the same ranks, to the bit.

use std::sync::Arc;
use std::thread;

use flatout_ir::ops::collective::{Combine, Order};
use flatout_ir::oracle::{self, Values};
use flatout_ir::passes::input_path;
use flatout_ir::random::normal;
use flatout_ir::{Axis, Builder, DType, Graph, Mesh, Op, Options, Program, Role, compile};
use flatout_runtime::{Session, cpu};
use flatout_world::{Threads, Wire};

const AXES: [Axis; 2] = [Axis::Shard, Axis::Replica];

/// Every collective on the given number of elements along both axes of a mesh.
fn graph(mesh: &Mesh, extent: usize) -> Graph {
    let b = Builder::new();
    let x = b.input("x", DType::F32, &[extent]);
    let order = Order::Tree;
    for axis in AXES {
        let ways = mesh.ways(axis);
        let name = |op: &Op| format!("{}.{}", op.name(), axis.name());
        let give = |op: Op, ins: &[_]| {
            let name = name(&op);
            b.result(&name, b.op(op, ins));
        };
        give(Op::Rank { axis }, &[]);
        give(Op::AllGather { axis, ways }, &[x]);
        give(Op::AllReduce { axis, ways, by: Combine::Sum, order }, &[x]);
        let most = Op::AllReduce { axis, ways, by: Combine::Max, order };
        b.result(&format!("max.{}", axis.name()), b.op(most, &[x]));
        // Halves the gathered tensor: as many blocks as there are ranks.
        let all = b.op(Op::AllGather { axis, ways }, &[x]).scale(0.5);
        give(Op::ReduceScatter { axis, ways, order, base: false }, &[all]);
        let with_base = Op::ReduceScatter { axis, ways, order, base: true };
        b.result(&format!("with_base.{}", axis.name()), b.op(with_base, &[all, x.scale(-4.0)]));
        // A sum in place.
        let sum = Op::AllReduce { axis, ways, by: Combine::Sum, order };
        b.result(&format!("in_place.{}", axis.name()), b.op(sum, &[x.scale(-0.5)]));
    }
    b.finish()
}

fn drawn(rank: usize, extent: usize) -> Vec<f32> {
    (0..extent as u64).map(|i| normal(9, rank as u64, i)).collect()
}

/// Runs `act` on every rank, each on a thread with its end of a wire.
fn on_ranks<T: Send>(ranks: usize, act: impl Fn(usize, Arc<dyn Wire>) -> T + Sync) -> Vec<T> {
    let act = &act;
    thread::scope(|scope| {
        let ends = Threads::connect(ranks).into_iter().enumerate();
        let running: Vec<_> = ends
            .map(|(rank, end)| {
                let wire: Arc<dyn Wire> = Arc::new(end);
                scope.spawn(move || act(rank, wire))
            })
            .collect();
        running.into_iter().map(|rank| rank.join().expect("a rank that ends")).collect()
    })
}

#[test]
fn exchanges_have_the_bits_of_the_oracle() {
    let meshes = [(1, 1), (1, 2), (1, 3), (1, 5), (1, 8), (2, 2), (3, 2)];
    for (replicas, shards) in meshes {
        let mesh = Mesh::new(replicas, shards);
        // Fewer elements than ranks, an empty block, several tasks.
        for (extent, threads) in [(1, 1), (9, 1), (1000, 2), (100_003, 2)] {
            let graph = graph(&mesh, extent);
            let values = |rank: usize| -> Values {
                [("x".into(), drawn(rank, extent).into_iter().map(f64::from).collect())].into()
            };
            let values: Vec<Values> = (0..mesh.ranks()).map(values).collect();
            let wanted = oracle::run_world(&graph, &mesh, &values);
            let options = Options { mesh, ..Options::default() };
            let program = Program { role: Role::Eval, graph: graph.clone() };
            let plans = compile(&[program], &cpu::target(threads), &options).expect("a plan");
            let got = on_ranks(mesh.ranks(), |rank, wire| {
                let mut session = Session::among(plans.clone(), threads, Some(wire)).expect("a session");
                session.write_f32(&input_path(Role::Eval, "x"), &drawn(rank, extent)).expect("an input");
                session.run(Role::Eval).expect("an exchange");
                let result = |(name, _): &(String, _)| session.result(Role::Eval, name).expect("a result");
                graph.results.iter().map(result).collect::<Vec<_>>()
            });
            for (rank, got) in got.iter().enumerate() {
                for ((name, _), got) in graph.results.iter().zip(got) {
                    let got: Vec<f64> = got.iter().map(|x| f64::from(*x)).collect();
                    assert!(got == wanted[rank].results[name], "{name} of {extent} at rank {rank} of {mesh}");
                }
            }
        }
    }
}

/// Large tensors are exchanged in pieces, without growing the workspace.
#[test]
fn pieces_of_a_large_tensor_join() {
    const BLOCK: usize = 700_001;
    const RANKS: usize = 3;
    let mesh = Mesh::new(1, RANKS);
    let (axis, ways, order) = (Axis::Shard, RANKS, Order::Tree);
    let b = Builder::new();
    let x = b.input("x", DType::F32, &[RANKS * BLOCK]);
    b.result("all", b.op(Op::AllReduce { axis, ways, by: Combine::Sum, order }, &[x]));
    b.result("block", b.op(Op::ReduceScatter { axis, ways, order, base: false }, &[x]));
    let program = Program { role: Role::Eval, graph: b.finish() };
    let options = Options { mesh, ..Options::default() };
    let plans = compile(&[program], &cpu::target(2), &options).expect("a plan");
    let scratch = |launch: &flatout_ir::Launch| launch.workspace.as_ref().map_or(0, |view| view.span_bytes());
    assert!(plans.plans[0].launches.iter().all(|launch| scratch(launch) < (4 << 20) + 64));
    let whole = |rank: usize| -> Vec<f32> {
        (0..RANKS * BLOCK).map(|i| ((i * 37 + rank * 11) % 1009) as f32 / 7.0).collect()
    };
    let terms: Vec<Vec<f32>> = (0..RANKS).map(whole).collect();
    let wanted: Vec<f32> = (0..RANKS * BLOCK).map(|i| terms[0][i] + terms[1][i] + terms[2][i]).collect();
    on_ranks(RANKS, |rank, wire| {
        let mut session = Session::among(plans.clone(), 2, Some(wire)).expect("a session");
        session.write_f32(&input_path(Role::Eval, "x"), &terms[rank]).expect("an input");
        session.run(Role::Eval).expect("an exchange");
        assert!(session.result(Role::Eval, "all").expect("a result") == wanted);
        assert!(session.result(Role::Eval, "block").expect("a result") == wanted[rank * BLOCK..][..BLOCK]);
    });
}

#[test]
fn plans_of_ranks_without_their_wire_are_refused() {
    let mesh = Mesh::new(1, 2);
    let options = Options { mesh, ..Options::default() };
    let program = Program { role: Role::Eval, graph: graph(&mesh, 6) };
    let plans = compile(&[program], &cpu::target(1), &options).expect("a plan");
    let refused = |wire: Option<Arc<dyn Wire>>| {
        Session::among(plans.clone(), 1, wire).err().expect("no such wire").to_string()
    };
    assert_eq!(
        refused(None),
        "these plans are for 2 ranks, and the session was opened without a wire to the others"
    );
    let three: Arc<dyn Wire> = Arc::new(Threads::connect(3).remove(0));
    assert_eq!(refused(Some(three)), "these plans are for 2 ranks, and the wire connects 3");
    let mut other = plans.clone();
    other.mesh = Mesh::new(2, 1);
    let wrong = Session::among(other, 1, None).err().expect("another mesh").to_string();
    assert!(wrong.contains("all_gather") && wrong.ends_with("the mesh is replica 2"), "{wrong}");
}

/// If a neighbour is gone, a rank fails with a sentence that names the launch and the rank.
#[test]
fn a_lost_rank_is_named() {
    let mesh = Mesh::new(1, 2);
    let options = Options { mesh, ..Options::default() };
    let program = Program { role: Role::Eval, graph: graph(&mesh, 6) };
    let plans = compile(&[program], &cpu::target(1), &options).expect("a plan");
    let said = on_ranks(2, |rank, wire| {
        let mut session = Session::among(plans.clone(), 1, Some(wire)).expect("a session");
        if rank == 1 {
            return String::new();
        }
        session.run(Role::Eval).expect_err("nobody answers").to_string()
    });
    assert!(said[0].contains("all_") && said[0].contains("rank 1"), "{}", said[0]);
}
