//! Tests that attention over parts of the keys, merged by lse, equals attention over all of them.
//!
//! Whole plans on the CPU, in f32 and bf16, values and gradients.

use flatout_ir::check::differentiate;
use flatout_ir::ops::attention::{self, Attend, Mask, Masking, Segments};
use flatout_ir::ops::cap::Cap;
use flatout_ir::passes::input_path;
use flatout_ir::random::normal;
use flatout_ir::{Builder, DType, Graph, Init, Options, Precision, Program, Role, compile};
use flatout_runtime::{Session, cpu};

const QUERIES: usize = 6;
const KEYS: usize = 200;
const HEADS: [usize; 2] = [4, 2];
const SIZE: usize = 16;
/// The keys each query attends to: of both parts, only the first, none, only the second, all, one of each.
const SEEN: [[i32; 4]; QUERIES] =
    [[10, 60, 70, 140], [0, 64, 0, 0], [0; 4], [77, 200, 0, 0], [0, 200, 0, 0], [76, 77, 77, 78]];

/// o and lse of all queries, over all keys at once, or separately over those before `cut` and those from it.
fn graph(cut: Option<usize>) -> Graph {
    let b = Builder::new();
    let x = |name: &str, tokens: usize, heads: usize| {
        b.param(name, &[tokens, heads, SIZE], Init::Normal { std: 1.0 })
    };
    let (q, k, v) = (x("q", QUERIES, HEADS[0]), x("k", KEYS, HEADS[1]), x("v", KEYS, HEADS[1]));
    let over = |first: usize, len: usize| {
        let seen = b.input(&format!("seen{first}"), DType::I32, &[QUERIES, 4]);
        let (q_cut, k_cut) = (Segments::Uniform { len: QUERIES }, Segments::Uniform { len });
        let attend = Attend { scale: 0.3, cap: Cap::NONE, mask: Mask::TwoIntervals, q: q_cut, k: k_cut };
        let masking = Masking { intervals: Some(seen), ..Masking::default() };
        q.attention_and_lse(k.slice(0, first, len), v.slice(0, first, len), &attend, &masking)
    };
    let (o, lse) = match cut {
        None => over(0, KEYS),
        Some(cut) => attention::merge(&[over(0, cut), over(cut, KEYS - cut)]),
    };
    b.result("y0", o);
    b.result("y1", lse);
    differentiate(&b.finish())
}

/// o, lse, dq, dk and dv.
fn outcome(cut: Option<usize>, precision: Precision) -> Vec<Vec<f32>> {
    let program = Program { role: Role::Eval, graph: graph(cut) };
    let options = Options { precision, ..Options::default() };
    let plans = compile(&[program], &cpu::target(2), &options).expect("a plan");
    let mut session = Session::new(plans, 2).unwrap();
    let draw = |stream: u64, heads: usize, tokens: usize, size: usize| -> Vec<f32> {
        (0..(tokens * heads * size) as u64).map(|i| normal(3, stream, i)).collect()
    };
    session.write_f32("q", &draw(0, HEADS[0], QUERIES, SIZE)).unwrap();
    session.write_f32("k", &draw(1, HEADS[1], KEYS, SIZE)).unwrap();
    session.write_f32("v", &draw(2, HEADS[1], KEYS, SIZE)).unwrap();
    let input = |name: &str| input_path(Role::Eval, name);
    session.write_f32(&input("d.y0"), &draw(3, HEADS[0], QUERIES, SIZE)).unwrap();
    session.write_f32(&input("d.y1"), &draw(4, HEADS[0], QUERIES, 1)).unwrap();
    for first in [0].into_iter().chain(cut) {
        let seen: Vec<i32> = SEEN.iter().flatten().map(|key| key - first as i32).collect();
        session.write_i32(&input(&format!("seen{first}")), &seen).unwrap();
    }
    if session.plans().plan(Role::Derive).is_some() {
        session.run(Role::Derive).unwrap();
    }
    session.run(Role::Eval).unwrap();
    ["y0", "y1", "d.q", "d.k", "d.v"].map(|name| session.result(Role::Eval, name).unwrap()).to_vec()
}

#[test]
fn parts_merge_to_the_whole() {
    // In bf16 each part's o is rounded before the parts are merged.
    for (precision, bound) in [(Precision::F32, 2e-6), (Precision::BF16, 1e-2)] {
        let whole = outcome(None, precision);
        let unseen = HEADS[0] * 2..HEADS[0] * 3;
        assert!(whole[1][unseen.clone()].iter().all(|lse| *lse == f32::NEG_INFINITY));
        for cut in [77, 64, 1] {
            let merged = outcome(Some(cut), precision);
            assert!(merged[1][unseen.clone()].iter().all(|lse| *lse == f32::NEG_INFINITY));
            for (i, name) in ["o", "lse", "dq", "dk", "dv"].into_iter().enumerate() {
                let pairs = || merged[i].iter().zip(&whole[i]).filter(|(_, want)| want.is_finite());
                let off: f32 = pairs().map(|(got, want)| (got - want) * (got - want)).sum();
                let size: f32 = pairs().map(|(_, want)| want * want).sum();
                let off = (off / size).sqrt();
                assert!(off < bound, "{name} cut at {cut}, {precision:?}: {off:.1e}");
            }
        }
    }
}
