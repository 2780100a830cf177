//! Collectives over the ranks of several meshes against plain loops, and the passes around them.

use flatout_ir::check::{draw, sound, within};
use flatout_ir::graph::Graph;
use flatout_ir::interpreter::Interpreter;
use flatout_ir::ops::collective::{Combine, Order};
use flatout_ir::oracle::{self, Values};
use flatout_ir::passes::input_path;
use flatout_ir::passes::totals::{STOP, STOP_FLAGS, stop_path};
use flatout_ir::passes::update::LR;
use flatout_ir::target::paper;
use flatout_ir::{
    Axis, Builder, Class, DType, Init, Mesh, Op, OpKind, Options, Program, Role, Tensor, compile,
};

fn meshes() -> [Mesh; 6] {
    [(1, 1), (1, 2), (1, 3), (1, 8), (2, 2), (3, 2)].map(|(replicas, shards)| Mesh::new(replicas, shards))
}

const AXES: [Axis; 2] = [Axis::Shard, Axis::Replica];

/// The value of an operation on inputs `x0`, `x1`, .. on every rank, from each rank's values.
fn on_every_rank(mesh: &Mesh, op: Op, ins: &[Vec<Vec<f64>>]) -> Vec<Vec<f64>> {
    let b = Builder::new();
    let inputs: Vec<Tensor<'_>> =
        ins.iter().enumerate().map(|(i, of)| b.input(&format!("x{i}"), DType::F32, &[of[0].len()])).collect();
    b.result("y", b.op(op, &inputs));
    let graph = b.finish();
    sound(&graph).expect("a sound graph");
    let of_rank = |rank: usize| -> Values {
        ins.iter().enumerate().map(|(i, of)| (format!("x{i}"), of[rank].clone())).collect()
    };
    let values: Vec<Values> = (0..mesh.ranks()).map(of_rank).collect();
    let evaluated = oracle::run_world(&graph, mesh, &values);
    evaluated.into_iter().map(|mut of| of.results.remove("y").expect("a result")).collect()
}

/// f32 values for every rank.
fn drawn(name: &str, mesh: &Mesh, count: usize) -> Vec<Vec<f64>> {
    let of_rank =
        |rank: usize| draw(&format!("{name}{rank}"), count).iter().map(|x| *x as f32 as f64).collect();
    (0..mesh.ranks()).map(of_rank).collect()
}

fn each(mut prove: impl FnMut(&Mesh, Axis, usize)) {
    for mesh in meshes() {
        AXES.iter().for_each(|axis| prove(&mesh, *axis, mesh.ways(*axis)));
    }
}

pub fn rank_is_the_coordinate() {
    each(|mesh, axis, _| {
        let wanted: Vec<Vec<f64>> =
            (0..mesh.ranks()).map(|rank| vec![mesh.coordinate(rank, axis) as f64]).collect();
        assert_eq!(on_every_rank(mesh, Op::Rank { axis }, &[]), wanted, "{mesh} along {}", axis.name());
    });
}

pub fn all_gather_concatenates_in_rank_order() {
    each(|mesh, axis, ways| {
        let x = drawn("x", mesh, 5);
        let got = on_every_rank(mesh, Op::AllGather { axis, ways }, std::slice::from_ref(&x));
        for (rank, got) in got.iter().enumerate() {
            let wanted: Vec<f64> =
                mesh.group(rank, axis).iter().flat_map(|other| x[*other].clone()).collect();
            assert_eq!(*got, wanted, "rank {rank} of {mesh} along {}", axis.name());
        }
    });
}

/// The sum in f64, and the sum by the tree, rounded to f32.
fn sums(terms: &[f64]) -> [f64; 2] {
    let rounded = |a: f64, b: f64| (a as f32 + b as f32) as f64;
    fn tree(terms: &[f64], add: &impl Fn(f64, f64) -> f64) -> f64 {
        match terms {
            [x] => *x,
            _ if terms.len().is_power_of_two() => {
                let (left, right) = terms.split_at(terms.len() / 2);
                add(tree(left, add), tree(right, add))
            }
            [first, rest @ ..] => rest.iter().fold(*first, |sum, x| add(sum, *x)),
            [] => unreachable!("a group has a rank"),
        }
    }
    [terms.iter().sum(), tree(terms, &rounded)]
}

pub fn reduce_scatter_sums_a_block() {
    const M: usize = 3;
    each(|mesh, axis, ways| {
        let (x, base) = (drawn("x", mesh, ways * M), drawn("base", mesh, M));
        for (order, which, bound) in [(Order::Any, 0, 1e-6), (Order::Tree, 1, 0.0)] {
            let op = |base: bool| Op::ReduceScatter { axis, ways, order, base };
            let without = on_every_rank(mesh, op(false), std::slice::from_ref(&x));
            let with = on_every_rank(mesh, op(true), &[x.clone(), base.clone()]);
            for rank in 0..mesh.ranks() {
                let block = mesh.coordinate(rank, axis) * M;
                let term = |i: usize| -> Vec<f64> {
                    mesh.group(rank, axis).iter().map(|other| x[*other][block + i]).collect()
                };
                let wanted: Vec<f64> = (0..M).map(|i| sums(&term(i))[which]).collect();
                within(bound, &without[rank], &wanted).expect("the sum of a block");
                let wanted: Vec<f64> = wanted.iter().zip(&base[rank]).map(|(sum, base)| base + sum).collect();
                within(1e-6, &with[rank], &wanted).expect("with a base");
            }
        }
    });
}

pub fn all_reduce_is_the_same_everywhere() {
    const M: usize = 7;
    each(|mesh, axis, ways| {
        let x = drawn("x", mesh, M);
        let run = |by: Combine, order: Order| {
            on_every_rank(mesh, Op::AllReduce { axis, ways, by, order }, std::slice::from_ref(&x))
        };
        let [any, tree] = [Order::Any, Order::Tree].map(|order| run(Combine::Sum, order));
        let most = run(Combine::Max, Order::Any);
        for rank in 0..mesh.ranks() {
            let term =
                |i: usize| -> Vec<f64> { mesh.group(rank, axis).iter().map(|other| x[*other][i]).collect() };
            let of_sums: Vec<[f64; 2]> = (0..M).map(|i| sums(&term(i))).collect();
            within(1e-6, &any[rank], &of_sums.iter().map(|s| s[0]).collect::<Vec<_>>()).expect("the sum");
            assert_eq!(tree[rank], of_sums.iter().map(|s| s[1]).collect::<Vec<_>>(), "the sum by the tree");
            let wanted: Vec<f64> =
                (0..M).map(|i| term(i).into_iter().fold(f64::NEG_INFINITY, f64::max)).collect();
            assert_eq!(most[rank], wanted, "the maximum");
        }
    });
}

/// Summing over shards and then over replicas equals the tree over all ranks.
#[test]
fn sums_over_two_axes_are_those_of_one() {
    let x = drawn("x", &Mesh::new(1, 8), 9);
    let over = |mesh: &Mesh| {
        let sum = |x: &Vec<Vec<f64>>, axis: Axis| {
            let op = Op::AllReduce { axis, ways: mesh.ways(axis), by: Combine::Sum, order: Order::Tree };
            on_every_rank(mesh, op, std::slice::from_ref(x))
        };
        sum(&sum(&x, Axis::Shard), Axis::Replica)
    };
    let whole = over(&Mesh::new(1, 8));
    for mesh in [Mesh::new(2, 4), Mesh::new(4, 2), Mesh::new(8, 1)] {
        assert_eq!(over(&mesh), whole, "{mesh}");
    }
}

fn refused(op: Op, dims: &[&[usize]]) -> String {
    let b = Builder::new();
    let ins: Vec<_> =
        dims.iter().enumerate().map(|(i, d)| b.input(&i.to_string(), DType::F32, d).v).collect();
    b.with_graph(|g| op.infer(g, &ins)).expect_err("a wrong shape")
}

#[test]
fn wrong_shapes_are_refused() {
    let (axis, order) = (Axis::Shard, Order::Tree);
    let scatter = |base: bool| Op::ReduceScatter { axis, ways: 4, order, base };
    assert_eq!(
        refused(Op::AllGather { axis, ways: 2 }, &[&[3, 2]]),
        "f32[3,2] among 2 ranks: collectives take flat tensors, and one rank at least"
    );
    assert_eq!(refused(scatter(false), &[&[6]]), "f32[6] does not divide among 4 ranks");
    assert_eq!(refused(scatter(true), &[&[8], &[3]]), "the base is f32[3], wanted f32[2]");
    let (beta1, beta2, eps, weight_decay, lr_scale, copy, first) = (0.9, 0.95, 1e-8, 0.1, 1.0, false, 0);
    let adamw = Op::AdamW { beta1, beta2, eps, weight_decay, lr_scale, copy, first };
    let scalars = [[1]; 6];
    let of = |behind: usize| -> Vec<&[usize]> {
        [&[4][..]; 4].into_iter().chain(scalars[..behind].iter().map(|dims| &dims[..])).collect()
    };
    assert_eq!(refused(adamw.clone(), &of(5)), "the rank is f32[1], wanted i32[1]");
    assert_eq!(refused(adamw, &of(6)), "takes 8 inputs, got 10");
}

/// One weight whose gradient is an input.
fn line() -> Graph {
    let b = Builder::new();
    let x = b.input("x", DType::F32, &[6]);
    let w = b.param("w", &[6], Init::Ones);
    b.result("loss", (w * x).sum(0));
    b.result("weight", b.input("weights", DType::F32, &[1]).scale(1.0));
    b.result("sum.shown", x.sum(0));
    b.finish()
}

/// Results of `apply` cover all ranks, including named sums and stop flags.
#[test]
fn an_update_reports_totals_of_all_ranks() {
    let options = Options { mesh: Mesh::new(1, 3), lanes: 3, ..Options::default() };
    let program = Program { role: Role::GRAD, graph: line() };
    let mut run = Interpreter::new(compile(&[program], &paper(), &options).expect("plans"));
    run.set("w", &[1.0; 6]);
    for rank in 0..3 {
        let x: Vec<f64> = (0..6).map(|i| (rank * 6 + i) as f64).collect();
        run.set_at(rank, &input_path(Role::GRAD, "x"), &x);
        run.set_at(rank, &input_path(Role::GRAD, "weights"), &[1.0 + rank as f64]);
        let flags = [0, 1, 2, 2, 2].map(|from| (rank >= from) as u8 as f64);
        run.set_at(rank, &input_path(Role::Apply, STOP), &flags);
    }
    run.run(Role::GRAD);
    run.run(Role::Apply);
    let mean = (0..18).sum::<usize>() as f64 / 6.0;
    for rank in 0..3 {
        let result = |name: &str| run.result_at(rank, Role::Apply, name)[0];
        within(1e-6, &["loss", "sum.shown", "weight"].map(result), &[mean, mean, 6.0]).expect("of all ranks");
        assert_eq!(STOP_FLAGS.map(|flag| result(&stop_path(flag))), [3.0, 2.0, 1.0, 1.0, 1.0]);
    }
}

/// A loss or a norm that is not finite on one rank skips the update on all.
#[test]
fn a_non_finite_rank_skips_the_update_everywhere() {
    let options = Options { mesh: Mesh::new(1, 2), lanes: 2, ..Options::default() };
    let program = Program { role: Role::GRAD, graph: line() };
    let mut run = Interpreter::new(compile(&[program], &paper(), &options).expect("plans"));
    run.set("w", &[0.5; 6]);
    run.set(&input_path(Role::GRAD, "x"), &[1.0; 6]);
    run.set(&input_path(Role::GRAD, "weights"), &[1.0]);
    run.set(&input_path(Role::Apply, LR), &[0.1]);
    run.set_at(1, &input_path(Role::GRAD, "x"), &[1.0, 1.0, f64::INFINITY, 1.0, 1.0, 1.0]);
    run.run(Role::GRAD);
    run.run(Role::Apply);
    for rank in 0..2 {
        assert_eq!(run.result_at(rank, Role::Apply, "is_finite"), [0.0]);
        assert_eq!(run.get_at(rank, "w"), [0.5; 6]);
    }
    run.set(&input_path(Role::GRAD, "x"), &[1.0; 6]);
    run.run(Role::GRAD);
    run.run(Role::Apply);
    for rank in 0..2 {
        assert_eq!(run.result_at(rank, Role::Apply, "is_finite"), [1.0]);
        assert!(run.get_at(rank, "w").iter().all(|w| *w < 0.5), "the next one is made");
    }
}

#[test]
fn exchanges_are_not_fused_and_are_planned() {
    let programs = [Program { role: Role::GRAD, graph: line() }];
    let options =
        |ranks: usize, lanes: usize| Options { mesh: Mesh::new(1, ranks), lanes, ..Options::default() };
    let plans = |ranks, lanes| compile(&programs, &paper(), &options(ranks, lanes)).expect("plans");
    let one = plans(1, 1);
    assert_eq!(
        one.to_string(),
        compile(&programs, &paper(), &Options::default()).expect("plans").to_string()
    );
    assert!(!one.to_string().contains("mesh") && !one.categories().contains_key("wire"));
    let four = plans(4, 4);
    let apply = four.plan(Role::Apply).expect("a plan");
    let exchanges: Vec<_> = apply.launches.iter().filter(|l| l.op.kind() == OpKind::AllReduce).collect();
    // All small values at once, and the region of gradients.
    let extents: Vec<usize> = exchanges.iter().map(|l| l.ins[0].elements()).collect();
    assert_eq!(extents, [3 + 5, 4096]);
    assert!(exchanges.iter().all(|l| l.flops == 4 * l.ins[0].elements() as u64));
    // Totals of gradients overwrite the rank's own sums.
    assert_eq!(exchanges[1].outs[0].as_ref(), Some(&exchanges[1].ins[0]));
    assert_eq!(four.slot("region.0.grads").expect("a slot").view.offset, exchanges[1].ins[0].offset);
    let square =
        compile(&programs, &paper(), &Options { mesh: Mesh::new(2, 2), ..options(1, 4) }).expect("plans");
    let apply = square.plan(Role::Apply).expect("a plan");
    let exchanges: Vec<_> = apply.launches.iter().filter(|l| l.op.kind() == OpKind::AllReduce).collect();
    assert_eq!(exchanges.len(), 4, "over both axes");
    let of_gradients = exchanges.iter().filter(|l| l.ins[0].elements() == 4096);
    assert!(of_gradients.clone().all(|l| l.outs[0].as_ref() == Some(&l.ins[0])), "in place along both");
    assert!(four.to_string().contains("\nmesh shard 4\n"));
    assert!(
        four.plans.iter().all(
            |plan| plan.role == Role::Apply || plan.launches.iter().all(|l| !l.op.kind().is_collective())
        )
    );
    assert!(four.plan(Role::Keep(0)).is_none(), "a rank with one lane puts nothing aside");
    // A copy of the sums for each of three levels, and plans to fill and add them.
    let eight = plans(1, 8);
    let roles: Vec<String> = eight.plans.iter().map(|plan| plan.role.to_string()).collect();
    assert_eq!(roles, ["grad", "apply", "keep", "fold", "keep.1", "fold.1", "keep.2", "fold.2"]);
    let kept = |level: usize| {
        let prefix = format!("lane.{level}.");
        let of_level = eight.slots.iter().filter(|s| s.path.starts_with(&prefix));
        of_level.map(|s| (s.class, s.ty.elements())).collect::<Vec<_>>()
    };
    for level in 0..3 {
        let mut kept = kept(level);
        kept.sort_by_key(|(_, elements)| *elements);
        assert_eq!(kept, [1, 1, 1, 4096].map(|n| (Class::Carry, n)));
    }
    let refusal = compile(&programs, &paper(), &options(3, 8)).expect_err("lanes that do not divide");
    assert!(refusal.to_string().starts_with("8 lanes do not divide among 3 ranks"), "{refusal}");
}
