//! Rotated keys and their values are written to the caches by the operation that rotates them, with equal numbers.

use flatout_ir::graph::Class;
use flatout_ir::ops::attention::{Attend, Mask, Masking, Segments};
use flatout_ir::ops::cached_qk_norm_rope::MOST_TOKENS;
use flatout_ir::ops::cap::Cap;
use flatout_ir::ops::norm::NormWeight;
use flatout_ir::ops::rope::Pairs;
use flatout_ir::oracle::{self, Values};
use flatout_ir::passes::fuse::cached_heads::cached_heads;
use flatout_ir::target::paper;
use flatout_ir::{Builder, DType, Graph, Init, Op, OpKind, Program, Role, compile, random};

const QUERIES: usize = 4;
const KEYS: usize = 2;
const SIZE: usize = 6;
const ROWS: usize = 9;

/// Attention of new tokens to caches that they are written to. With `reads_keys` the rotated keys are a result too.
fn step(tokens: usize, reads_keys: bool) -> Graph {
    let b = Builder::new();
    let heads = |name: &str, count: usize| b.input(name, DType::F32, &[tokens, count, SIZE]);
    let x = heads("x", QUERIES + KEYS);
    let rotate = Op::QkNormRope {
        eps: 1e-6,
        weight: NormWeight::Plain,
        first: QUERIES,
        freq: 100.0.into(),
        axis_of_freq: vec![0; SIZE / 2],
        pairs: Pairs::Half,
        table: false,
    };
    let positions = b.input("positions", DType::I32, &[1, tokens]);
    let y = b.op(rotate, &[x, b.param("w", &[2 * SIZE], Init::Zeros), positions]);
    let (q, k) = (y.slice(1, 0, QUERIES), y.slice(1, QUERIES, KEYS));
    let rows = b.input("rows", DType::I32, &[tokens]);
    let [k, v] = [("k", k), ("v", heads("v", KEYS))].map(|(name, x)| {
        let slot =
            b.slot(&format!("cache.{name}"), Class::Cache, DType::F32, &[ROWS, KEYS, SIZE], Init::Zeros);
        let all = b.read(slot).row_scatter(x, rows);
        b.write(slot, all);
        all
    });
    let [q_segments, k_segments] = [tokens, ROWS].map(|len| Segments::Uniform { len });
    let attend = Attend { scale: 1.0, cap: Cap::NONE, mask: Mask::Full, q: q_segments, k: k_segments };
    b.result("o", q.attention(k, v, &attend, &Masking::default()));
    if reads_keys {
        b.result("keys", y);
    }
    b.finish()
}

fn values(g: &Graph) -> Values {
    let draw = |i: usize, path: &str, n: usize| -> Vec<f64> {
        match path {
            // One token is dropped, and two have one row.
            "rows" => (0..n).map(|k| [3.0, -1.0, 8.0, 0.0, 3.0][k % 5]).collect(),
            "positions" => (0..n).map(|k| (k * 3 % 7) as f64).collect(),
            _ => (0..n).map(|k| random::normal(3, i as u64, k as u64) as f64).collect(),
        }
    };
    let slots = g.slots.iter().enumerate();
    slots.map(|(i, slot)| (slot.path.clone(), draw(i, &slot.path, slot.ty.elements()))).collect()
}

pub fn a_fused_rotation_writes_to_the_caches() {
    let apart = step(5, false);
    let (joint, count) = cached_heads(&apart, &paper());
    assert_eq!(count, 1);
    assert_eq!(joint.nodes.len(), apart.nodes.len() - 4);
    assert_eq!(joint.to_string().parse::<Graph>().expect("its own text"), joint);
    let values = values(&apart);
    let [a, b] = [&apart, &joint].map(|g| oracle::run(g, &values));
    assert_eq!(a.writes.len(), 2);
    assert_eq!((a.writes, a.results), (b.writes, b.results));
}

#[test]
fn rotations_stay_apart_where_another_reads_them_or_tokens_are_many() {
    for (graph, why) in [(step(5, true), "a result"), (step(MOST_TOKENS + 1, false), "many tokens")] {
        assert_eq!(cached_heads(&graph, &paper()), (graph, 0), "{why}");
    }
}

#[test]
fn caches_are_replaced_in_place_where_the_target_has_a_kernel() {
    for has_kernel in [true, false] {
        let mut target = paper();
        target.kernels.retain(|row| has_kernel || !row.op.is_optional());
        let programs = [Program { role: Role::Decode, graph: step(5, false) }];
        let plans = compile(&programs, &target, &Default::default()).expect("a plan");
        let launches = &plans.plans[0].launches;
        let of = |kind: OpKind| launches.iter().filter(|launch| launch.op.kind() == kind).collect::<Vec<_>>();
        let fused = of(OpKind::CachedQkNormRope);
        assert_eq!((fused.len(), of(OpKind::RowScatter).len()), if has_kernel { (1, 0) } else { (0, 2) });
        for launch in fused {
            let caches = &launch.ins[launch.ins.len() - 3..][..2];
            let outs = launch.outs[1..].iter().map(|out| out.as_ref().expect("attention reads it").offset);
            assert!(caches.iter().map(|cache| cache.offset).eq(outs), "{launch:?}");
        }
    }
}
