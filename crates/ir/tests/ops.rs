//! Every operation through `check`; those that only exist after autodiff each have a test of their own.

use std::collections::BTreeSet;

use flatout_ir::autodiff::gradients;
use flatout_ir::check::{Build, Case, cases, check, differentiate, draw, evaluate, sound, within};
use flatout_ir::graph::{Class, Graph, Init, Slot, SlotId};
use flatout_ir::ops::attention::{self, Attend, Mask, Masking, Segments};
use flatout_ir::ops::cap::Cap;
use flatout_ir::ops::elementwise::{Elementwise as E, NAMED};
use flatout_ir::ops::norm::{NormSpec, NormWeight};
use flatout_ir::ops::product::Compute;
use flatout_ir::ops::quantize::Source;
use flatout_ir::ops::thin_product::Thin;
use flatout_ir::ops::{Op, OpKind};
use flatout_ir::oracle::{self, in_f64};
use flatout_ir::types::{DType, TensorType};
use flatout_ir::{Builder, Tensor, bundle, nf4};

use crate::{activations, cached_heads, collectives};

#[test]
fn every_case_passes() {
    let failures: Vec<String> = cases::all().filter_map(|case| check(case).err()).collect();
    assert!(failures.is_empty(), "{} cases fail:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn every_case_has_a_name_of_its_own() {
    let mut names = BTreeSet::new();
    assert_eq!(cases::all().find(|case| !names.insert(case.name)).map(|case| case.name), None);
}

/// Operations that no gradient graph of the table contains, each with the test that covers it instead.
const AFTER_AUTODIFF: &[(OpKind, fn())] = &[
    (OpKind::Quantize, quantize_is_division_and_rounding),
    (OpKind::Dequantize, dequantize_is_a_table_of_sixteen_times_magnitudes),
    (OpKind::Requantize, requantize_rounds_what_dequantize_gives),
    (OpKind::RowScatter, row_scatter_replaces_rows),
    (OpKind::CachedQkNormRope, cached_heads::a_fused_rotation_writes_to_the_caches),
    (OpKind::Resample, resample_is_a_weighted_mean),
    (OpKind::Sample, samples_are_as_frequent_as_they_are_likely),
    (OpKind::HeadLossTrain, head_loss_train_is_both_passes),
    (OpKind::DoubleNorm, double_norms_are_two_around_a_sum),
    (OpKind::DoubleNormGrad, double_norms_have_the_slopes_of_two),
    (OpKind::GatedProduct, activations::gated_products_match_product_and_gate),
    (OpKind::GatedProductGrad, activations::gated_product_gradients_match_both_slopes),
    (OpKind::ActivatedProduct, activations::activated_products_match_product_and_activation),
    (OpKind::ActivatedProductGrad, activations::activated_product_gradients_match_both_slopes),
    (OpKind::LowRankNorm, low_rank_norm_is_of_the_sums_rows),
    (OpKind::ThinProduct, thin_products_are_of_what_is_kept),
    (OpKind::AdamW, adamw_expands_to_its_outputs),
    (OpKind::AdamW8, adamw8_expands_to_its_outputs),
    (OpKind::Rank, collectives::rank_is_the_coordinate),
    (OpKind::AllGather, collectives::all_gather_concatenates_in_rank_order),
    (OpKind::ReduceScatter, collectives::reduce_scatter_sums_a_block),
    (OpKind::AllReduce, collectives::all_reduce_is_the_same_everywhere),
    (OpKind::Region, a_region_is_its_body),
    (OpKind::Bundle, a_bundle_is_its_regions),
];

#[test]
fn operations_that_come_after_autodiff() {
    AFTER_AUTODIFF.iter().for_each(|(_, prove)| prove());
}

#[test]
fn no_operation_is_without_a_case() {
    let mut covered: BTreeSet<OpKind> = AFTER_AUTODIFF.iter().map(|(kind, _)| *kind).collect();
    for case in cases::all() {
        covered.extend(case.with_gradients().0.nodes.iter().map(|n| n.op.kind()));
    }
    let missing: Vec<_> = OpKind::ALL.iter().filter(|kind| !covered.contains(kind)).collect();
    assert!(missing.is_empty(), "{missing:?} have no line in check::cases");
}

#[test]
fn no_function_is_without_a_case() {
    let graphs: Vec<Graph> = cases::all().map(|case| case.with_gradients().0).collect();
    let text: String = graphs.iter().map(Graph::to_string).collect();
    let plain = NAMED.iter().map(|(name, _)| format!("map{{f={name}}}"));
    let others = ["cast:bf16}", "scale:", "fp8_scale:e4m3", "fp8_scale:e5m2", "offset:", "select}"]
        .map(|name| format!("map{{f={name}"));
    for f in plain.chain(others) {
        assert!(text.contains(&f), "{f} has no line in check::cases");
    }
}

/// In bf16 the gradients have their parameters' types, expansions their shape rules' types, and the numbers match those of f64
/// within the rounding of 8 bits.
#[test]
fn gradients_hold_in_bf16() {
    let families = [
        cases::ELEMENTWISE,
        cases::MOVEMENT,
        cases::PRODUCT,
        cases::NORM,
        cases::ROPE,
        cases::GATED,
        cases::INDEX,
        cases::ATTENTION,
        cases::LINEAR_ATTENTION,
        cases::HEAD_LOSS,
    ];
    // Models keep norm weights and row weights in f32; the norms are also tested with bf16 weights.
    let matrices = families.into_iter().flatten().map(|case| (case, 2));
    let all = [cases::NORM, cases::ROPE].into_iter().flatten().map(|case| (case, 1));
    for (case, from_rank) in matrices.chain(all).filter(|(case, _)| !case.name.starts_with("cast")) {
        let (forward, _) = case.forward();
        let narrow = differentiate(&in_bf16(&forward, from_rank));
        sound(&narrow).unwrap_or_else(|why| panic!("{}: {why}", case.name));
        let (wide, values) = case.with_gradients();
        let (narrow_run, wide_run) = (oracle::run(&narrow, &values), oracle::run(&in_f64(&wide), &values));
        for (slot, s) in narrow.slot_ids().zip(&narrow.slots).filter(|(_, s)| s.class == Class::Weight) {
            let name = format!("d.{}", s.path);
            let gradient = narrow.result(&name).expect("a gradient a weight");
            assert_eq!(narrow.ty(gradient), &narrow.slot(slot).ty, "{}: {name}", case.name);
            within(0.06, &narrow_run.results[&name], &wide_run.results[&name])
                .unwrap_or_else(|why| panic!("{}: {name}: {why}", case.name));
        }
    }
}

/// The same graph with weights of at least `from_rank` axes in bf16.
fn in_bf16(graph: &Graph, from_rank: usize) -> Graph {
    let mut out = Graph { slots: graph.slots.clone(), results: graph.results.clone(), ..Graph::default() };
    for s in out.slots.iter_mut().filter(|s| s.class == Class::Weight && s.ty.rank() >= from_rank) {
        s.ty.dtype = DType::BF16;
    }
    for node in &graph.nodes {
        out.push_keyed(node.op.clone(), node.ins.clone(), &node.path, node.key);
    }
    out
}

fn low_rank_norm_is_of_the_sums_rows() {
    let (outs, values) = evaluate(|t| {
        let ins = [t.x(&[3, 5]), t.x(&[2, 5]), t.x(&[3, 2])];
        vec![t.b.op(Op::LowRankNorm { scale: 0.5 }, &ins)]
    });
    let (w, a, b) = (&values["x0"], &values["x1"], &values["x2"]);
    let element = |i: usize, j: usize| w[5 * i + j] + 0.5 * (b[2 * i] * a[j] + b[2 * i + 1] * a[5 + j]);
    let norm = |i: usize| (0..5).map(|j| element(i, j).powi(2)).sum::<f64>().sqrt();
    let wanted: Vec<f64> = (0..3).map(|i| 1.0 / norm(i)).collect();
    within(1e-12, &outs[0], &wanted).expect("1 over the norms");
}

const DOUBLE: [NormSpec; 2] = [
    NormSpec { eps: 1e-3, center: false, weight: NormWeight::OnePlus, bias: false },
    NormSpec { eps: 1e-2, center: false, weight: NormWeight::OnePlus, bias: false },
];

fn double_norms_are_two_around_a_sum() {
    const D: usize = 4;
    let (outs, values) = evaluate(|t| {
        let ins = [t.x(&[3, D]), t.x(&[3, D]), t.x(&[D]), t.x(&[D])];
        let [inner, outer] = DOUBLE;
        t.b.ops(Op::DoubleNorm { inner, outer }, &ins)
    });
    let [y, x, inner, outer] = ["x0", "x1", "x2", "x3"].map(|name| &values[name]);
    let norm = |row: &[f64], w: &[f64], eps: f32| -> Vec<f64> {
        let square = row.iter().map(|x| x * x).sum::<f64>() / D as f64 + eps as f64;
        row.iter().zip(w).map(|(x, w)| x / square.sqrt() * (1.0 + w)).collect()
    };
    let rows = |of: &[f64]| of.chunks(D).map(<[f64]>::to_vec).collect::<Vec<_>>();
    let sums: Vec<Vec<f64>> = rows(y)
        .iter()
        .zip(rows(x))
        .map(|(y, x)| norm(y, inner, DOUBLE[0].eps).iter().zip(x).map(|(n, x)| n + x).collect())
        .collect();
    let wanted: Vec<f64> = sums.iter().flat_map(|h| norm(h, outer, DOUBLE[1].eps)).collect();
    within(1e-12, &outs[0], &wanted).expect("normed twice");
    within(1e-12, &outs[1], &sums.concat()).expect("the sum between");
}

/// Gradients of x and y through the two norms in sequence, whether the sum is given or recomputed.
fn double_norms_have_the_slopes_of_two() {
    let (outs, _) = evaluate(|t| {
        let [inner, outer] = DOUBLE;
        let (y, x, wi, wo) = (t.x(&[3, 4]), t.x(&[3, 4]), t.x(&[4]), t.x(&[4]));
        let (d, dh) = (t.x(&[3, 4]), t.x(&[3, 4]));
        let n = t.b.op(inner.op(false), &[y, wi]);
        let both = t.b.ops(outer.op(true), &[n, x, wo]);
        let mut wanted = gradients(&t.b, &[(both[0], d), (both[1], dh)], &[x, y]);
        for (of_sum, given) in [(false, x), (true, both[1])] {
            let op = Op::DoubleNormGrad { inner, outer, add: true, of_sum };
            wanted.extend(t.b.ops(op, &[y, given, wi, wo, d, dh]));
        }
        wanted
    });
    for (i, got) in outs[2..].iter().enumerate() {
        within(1e-12, got, &outs[i % 2]).expect("the slopes of two norms");
    }
}

/// With one factor of ones a thin product is the sum of the elements that dropout keeps, and a dropped product of ones shows
/// its mask.
fn thin_products_are_of_what_is_kept() {
    const M: usize = 5;
    const R: usize = 2;
    const K: usize = 3;
    let (outs, values) = evaluate(|t| {
        let p = 0.4;
        let (x, a, du) = (t.x(&[M, K]), t.x(&[R, K]), t.x(&[M, R]));
        let (wide, small, b) = (t.x(&[M, K]), t.x(&[R, K]), t.x(&[K, R]));
        let rng = t.index(&[3], &[7, -5, 11]);
        let rows: Vec<i32> = (0..M as i32).flat_map(|i| [i / 2, i % 2]).collect();
        let rows = t.index(&[M, 2], &rows);
        let thin = |form, mut ins: Vec<_>| {
            let op = Op::ThinProduct { form, p, out: x.dtype(), base: ins.len() == 3 };
            ins.extend([rng, rows]);
            t.b.op_keyed(op, &ins, 42)
        };
        let undropped =
            |form, ins: [_; 3]| t.b.op(Op::ThinProduct { form, p: 0.0, out: x.dtype(), base: true }, &ins);
        let ones = x * x.recip();
        let mask = t.b.op_keyed(Op::Dropout { p }, &[ones, rng, rows], 42);
        vec![
            mask,
            thin(Thin::Down, vec![x, a]),
            thin(Thin::Up, vec![du, a]),
            thin(Thin::Up, vec![du, a, wide]),
            thin(Thin::Weight, vec![du, x]),
            thin(Thin::Weight, vec![du, x, small]),
            undropped(Thin::Up, [du, a, wide]),
            undropped(Thin::Out, [du, b, wide]),
        ]
    });
    let [x, a, du, wide, small, b] = ["x0", "x1", "x2", "x3", "x4", "x5"].map(|name| &values[name]);
    let mask = |i: usize, c: usize| outs[0][i * K + c];
    assert!(outs[0].contains(&0.0) && outs[0].iter().any(|x| *x > 1.0), "{:?}", outs[0]);
    let pairs = |rows: usize, columns: usize| (0..rows).flat_map(move |i| (0..columns).map(move |j| (i, j)));
    let sum = |n: usize, f: &dyn Fn(usize) -> f64| (0..n).map(f).sum::<f64>();
    let down = pairs(M, R).map(|(i, j)| sum(K, &|c| mask(i, c) * x[i * K + c] * a[j * K + c]));
    let up = pairs(M, K).map(|(i, c)| mask(i, c) * sum(R, &|j| du[i * R + j] * a[j * K + c]));
    let weight = pairs(R, K).map(|(j, c)| sum(M, &|i| du[i * R + j] * mask(i, c) * x[i * K + c]));
    let (up, weight): (Vec<f64>, Vec<f64>) = (up.collect(), weight.collect());
    let plus = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a + b).collect::<Vec<f64>>();
    let plain = |w: &dyn Fn(usize, usize) -> f64| -> Vec<f64> {
        pairs(M, K).map(|(i, c)| wide[i * K + c] + sum(R, &|j| du[i * R + j] * w(j, c))).collect()
    };
    let onto = [plain(&|j, c| a[j * K + c]), plain(&|j, c| b[c * R + j])];
    let dropped = [down.collect(), up.clone(), plus(&up, wide), weight.clone(), plus(&weight, small)];
    let wanted: Vec<Vec<f64>> = dropped.into_iter().chain(onto).collect();
    for (got, want) in outs[1..].iter().zip(&wanted) {
        within(1e-12, got, want).expect("sums of what is kept");
    }
}

fn row_scatter_replaces_rows() {
    let (outs, values) = evaluate(|t| {
        let (base, rows) = (t.x(&[5, 3]), t.x(&[4, 3]));
        vec![base.row_scatter(rows, t.index(&[4], &[3, -1, 0, 3]))]
    });
    let (base, rows) = (&values["x0"], &values["x1"]);
    let row = |of: &[f64], i: usize| of[3 * i..3 * i + 3].to_vec();
    let wanted = [row(rows, 2), row(base, 1), row(base, 2), row(rows, 3), row(base, 4)].concat();
    assert_eq!(outs[0], wanted);
}

/// Tokens occur as often as the softmax predicts, and never where `top_k` or `top_p` excludes them; a row without tokens
/// samples none.
fn samples_are_as_frequent_as_they_are_likely() {
    // Probabilities 1/8, 1/2, 1/8, 1/4, and a token outside the vocabulary.
    let (rows, logits) = (4000, [0.0, 4f64.ln(), 0.0, 2f64.ln(), 9.0]);
    let frequencies = |size: i32, top_k: i32, temperature: f64, top_p: f64| -> Vec<f64> {
        let b = Builder::new();
        let drawn = b
            .input("logits", DType::F32, &[rows, 5])
            .sample(b.input("numbers", DType::I32, &[rows, 6]), b.input("shares", DType::F32, &[rows, 2]));
        b.result("drawn", drawn);
        let numbers = (0..rows as i32).flat_map(|i| [size, top_k, 7, 1, 3, i].map(f64::from)).collect();
        let values = [
            ("logits".to_string(), logits.repeat(rows)),
            ("numbers".to_string(), numbers),
            ("shares".to_string(), [temperature, top_p].repeat(rows)),
        ];
        let graph = b.finish();
        sound(&graph).unwrap();
        let drawn = &oracle::run(&graph, &values.into()).results["drawn"];
        let mut counts = vec![0.0; 6];
        for row in drawn.chunks(2) {
            counts[(row[0] + 1.0) as usize] += 1.0 / rows as f64;
            let probability =
                [1.0 / 8.0, 0.5, 1.0 / 8.0, 0.25].get(row[0] as usize).filter(|_| row[0] >= 0.0);
            let wanted = probability.map_or(0.0, |p: &f64| p.ln());
            assert!((row[1] - wanted).abs() < 1e-6, "{row:?}");
        }
        counts
    };
    let near = |got: Vec<f64>, wanted: [f64; 6]| {
        assert!(got.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 0.03), "{got:?}, wanted {wanted:?}");
    };
    near(frequencies(4, 0, 1.0, 1.0), [0.0, 0.125, 0.5, 0.125, 0.25, 0.0]);
    near(frequencies(4, 2, 1.0, 1.0), [0.0, 0.0, 2.0 / 3.0, 0.0, 1.0 / 3.0, 0.0]);
    near(frequencies(4, 0, 1.0, 0.8), [0.0, 1.0 / 7.0, 4.0 / 7.0, 0.0, 2.0 / 7.0, 0.0]);
    near(frequencies(4, 0, 0.5, 1.0), [0.0, 1.0 / 22.0, 16.0 / 22.0, 1.0 / 22.0, 4.0 / 22.0, 0.0]);
    assert_eq!(frequencies(4, 0, 0.0, 1.0)[2].round(), 1.0);
    assert_eq!(frequencies(0, 0, 1.0, 1.0)[0].round(), 1.0);
}

/// Two weights one after the other, with rows that end inside blocks, whose codes and magnitudes are those of `nf4`.
fn dequantize_is_a_table_of_sixteen_times_magnitudes() {
    let (rows, columns) = ([5, 300], 88);
    let (values, wanted) = nf4_weights(&rows, columns);
    for to in [DType::F32, DType::BF16] {
        let b = Builder::new();
        let ins = nf4_inputs(&b, &rows, columns);
        b.result("y", b.op(Op::Dequantize { rows: rows.to_vec(), to, nested: true }, &ins));
        let graph = b.finish();
        sound(&graph).unwrap();
        let rounded: Vec<f64> = wanted.iter().map(|x| to.round(*x)).collect();
        assert_eq!(oracle::run(&graph, &values).results["y"], rounded, "{to:?}");
    }
}

/// The codes of the weights in bf16 divided by the scale, along rows and along columns.
fn requantize_rounds_what_dequantize_gives() {
    let (rows, columns) = ([5, 300], 80);
    let (mut values, wanted) = nf4_weights(&rows, columns);
    let scale = 2f64.powi(-7);
    values.insert("scale".into(), vec![scale]);
    let codes: Vec<f64> = wanted.iter().map(|x| DType::E4M3.round(DType::BF16.round(*x) / scale)).collect();
    let total = rows.iter().sum::<usize>();
    for transposed in [false, true] {
        let b = Builder::new();
        let mut ins = nf4_inputs(&b, &rows, columns);
        ins.push(b.input("scale", DType::F32, &[1]));
        b.result("y", b.op(Op::Requantize { rows: rows.to_vec(), transposed }, &ins));
        let graph = b.finish();
        sound(&graph).unwrap();
        let at = |i: usize| if transposed { i % total * columns + i / total } else { i };
        let expected: Vec<f64> = (0..codes.len()).map(|i| codes[at(i)]).collect();
        assert_eq!(oracle::run(&graph, &values).results["y"], expected, "transposed: {transposed}");
    }
}

/// Codes and magnitudes of drawn weights in NF4, one after the other, and the values that they stand for.
fn nf4_weights(rows: &[usize], columns: usize) -> (oracle::Values, Vec<f64>) {
    let (map, mut values, mut wanted) = (nf4::dynamic_map(), oracle::Values::new(), vec![]);
    let mut codes = vec![];
    for (part, rows) in rows.iter().enumerate() {
        let weight: Vec<f32> = draw(&format!("w{part}"), rows * columns).iter().map(|x| *x as f32).collect();
        let blocks = nf4::blocks(weight.len());
        let (mut of_part, mut absmax) = (vec![0; weight.len() / 2], vec![0.0; blocks]);
        nf4::quantize(&weight, &mut of_part, &mut absmax);
        let small = nf4::Magnitudes::of(&absmax);
        let magnitude = |block: usize| {
            let nested = small.nested[block / 256];
            map[small.codes[block] as usize] * nested + small.offset
        };
        for (i, x) in weight.iter().enumerate() {
            let code = of_part[i / 2] >> if i.is_multiple_of(2) { 4 } else { 0 } & 15;
            let got = f64::from(nf4::CODES[code as usize & 15] * magnitude(i / 64));
            // Half of the widest step between codes, plus the rounding of a magnitude.
            assert!((got - f64::from(*x)).abs() < 0.17 * f64::from(absmax[i / 64]), "{x} became {got}");
            wanted.push(got);
        }
        codes.extend(of_part.iter().map(|code| f64::from(*code)));
        values.insert(format!("absmax{part}"), small.codes.iter().map(|code| f64::from(*code)).collect());
        values.insert(format!("nested{part}"), small.nested.iter().map(|x| f64::from(*x)).collect());
        values.insert(format!("offset{part}"), vec![f64::from(small.offset)]);
    }
    values.insert("map".into(), map.map(f64::from).to_vec());
    values.insert("codes".into(), codes);
    (values, wanted)
}

/// The inputs of an operation that dequantises such weights.
fn nf4_inputs<'b>(b: &'b Builder, rows: &[usize], columns: usize) -> Vec<Tensor<'b>> {
    let mut ins = vec![
        b.input("codes", DType::U8, &[rows.iter().sum(), columns / 2]),
        b.input("map", DType::F32, &[256]),
    ];
    for (part, rows) in rows.iter().enumerate() {
        let blocks = nf4::blocks(rows * columns);
        ins.push(b.input(&format!("absmax{part}"), DType::U8, &[blocks]));
        ins.push(b.input(&format!("nested{part}"), DType::F32, &[blocks.div_ceil(256)]));
        ins.push(b.input(&format!("offset{part}"), DType::F32, &[1]));
    }
    ins
}

/// Parts at their own size are unchanged, others are the weighted mean of the definition, in f64 and rounded once.
fn resample_is_a_weighted_mean() {
    let (images, rows, columns, channels) = (3, 11, 13, 2);
    let table: Vec<f64> = draw("bytes", images * rows * columns * channels)
        .iter()
        .map(|x| (x * 80.0 + 128.0).clamp(0.0, 255.0).floor())
        .collect();
    let parts = [
        [1, 2, 3, 5, 4, 0],
        [2, 0, 0, 13, 11, 1],
        [0, 12, 10, 1, 1, 1],
        [-1, 0, 0, 0, 0, 0],
        [0, 4, 1, 7, 9, 0],
    ];
    for (height, width) in [(4, 5), (11, 13), (3, 2), (20, 31)] {
        let b = Builder::new();
        let images = b.input("table", DType::U8, &[images, rows, columns, channels]);
        b.result("y", images.resample(b.input("parts", DType::I32, &[parts.len(), 6]), [height, width]));
        let flat = parts.iter().flatten().map(|n| f64::from(*n)).collect();
        let values = [("table".to_string(), table.clone()), ("parts".to_string(), flat)].into();
        let graph = b.finish();
        sound(&graph).unwrap();
        let y = &oracle::run(&graph, &values).results["y"];
        for (part, seen) in parts.iter().zip(y.chunks(height * width * channels)) {
            if part[0] < 0 {
                assert!(seen.iter().all(|x| *x == 0.0));
                continue;
            }
            let [image, left, top, w, h, flip] = part.map(|n| n as usize);
            let mean = |place: usize, count: usize, start: usize, extent: usize| -> Vec<(usize, f64)> {
                let step = extent as f64 / count as f64;
                let c = start as f64 + (place as f64 + 0.5) * step;
                let weight = |i: usize| (1.0 - (i as f64 + 0.5 - c).abs() / step.max(1.0)).max(0.0);
                let sum: f64 = (start..start + extent).map(weight).sum();
                (start..start + extent).map(|i| (i, weight(i) / sum)).collect()
            };
            for (at, got) in seen.iter().enumerate() {
                let (y, x, channel) = (at / channels / width, at / channels % width, at % channels);
                let x = if flip == 1 { width - 1 - x } else { x };
                let mut wanted = 0.0;
                for (row, down) in mean(y, height, top, h) {
                    for (column, across) in mean(x, width, left, w) {
                        wanted += down
                            * across
                            * table[((image * rows + row) * columns + column) * channels + channel];
                    }
                }
                assert!((got - wanted).abs() <= 0.5001, "{got} of {wanted} in {part:?}");
                assert!((height, width) != (h, w) || *got == wanted.round(), "{part:?} is itself");
            }
        }
    }
}

/// Element by element: codes in both layouts, the recorded magnitude, and the scale computed from x.
fn quantize_is_division_and_rounding() {
    let x: Vec<f32> = draw("x", 15).iter().map(|x| *x as f32 * 1e-3).collect();
    let amax = x.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
    for (to, max) in [(DType::E4M3, 448.0), (DType::E5M2, 57_344.0)] {
        // With a given scale that is not a power of two and saturates, and with the scale of x.
        for (current, given, before) in [(false, amax / max * 1.5, 0.5), (false, 3e-9, 0.0), (true, 0.0, 0.0)]
        {
            let b = Builder::new();
            let slot = |name: &str, dims: &[usize]| b.input(name, DType::F32, dims);
            let all = [slot("x", &[3, 5]), slot("scale", &[1]), slot("amax", &[1])];
            let outs = b
                .ops(Op::Quantize { to, current, of: Source::Given }, if current { &all[..1] } else { &all });
            outs.iter().enumerate().for_each(|(i, out)| b.result(&format!("y{i}"), *out));
            let graph = b.finish();
            sound(&graph).unwrap();
            let values = [("x", x.iter().map(|x| *x as f64).collect()), ("scale", vec![given as f64])];
            let values = values.into_iter().chain([("amax", vec![before])]);
            let got = oracle::run(&graph, &values.map(|(name, v)| (name.to_string(), v)).collect()).results;

            let scale = if current { flatout_ir::fp8::scale(to, amax) } else { given };
            let q: Vec<f64> = x.iter().map(|x| to.round((x * (1.0 / scale)) as f64)).collect();
            assert_eq!(got["y0"], q);
            let turned: Vec<f64> = (0..15).map(|i| q[i % 3 * 5 + i / 3]).collect();
            assert_eq!(got["y1"], turned);
            let third = if current { scale as f64 } else { before.max(amax as f64) };
            assert_eq!(got["y2"], [third]);
        }
    }
}

fn head_loss_train_is_both_passes() {
    for base in [false, true] {
        let (outs, _) = evaluate(if base { |t| both_passes(t, true) } else { |t| both_passes(t, false) });
        let (apart, joined) = outs.split_at(5);
        for (i, (apart, joined)) in apart.iter().zip(joined).enumerate() {
            within(1e-12, joined, apart).unwrap_or_else(|why| panic!("output {i}, base {base}: {why}"));
        }
    }
}

/// sum, logp, lse, dx, dw by two operations, then by the fused one.
fn both_passes(t: &flatout_ir::check::Trial, base: bool) -> Vec<Tensor<'_>> {
    let (x, w, weight, sum_before) = (t.x(&[5, 3]), t.x(&[7, 3]), t.x(&[5]), t.x(&[7, 3]));
    let target = t.index(&[5], &[2, -1, 6, 0, 2]);
    let add = base.then_some(sum_before);
    let mut outs = t.b.ops(Op::HeadLoss { compute: Compute::Full, cap: Cap::NONE }, &[x, w, target, weight]);
    outs.truncate(3);
    let backward = [Some(x), Some(w), Some(target), Some(outs[2]), Some(-weight), add];
    outs.extend(t.b.ops(
        Op::HeadLossGrad { base, kept: false, compute: Compute::Full, cap: Cap::NONE },
        &backward.into_iter().flatten().collect::<Vec<_>>(),
    ));
    let joined = [Some(x), Some(w), Some(target), Some(weight), add];
    outs.extend(t.b.ops(
        Op::HeadLossTrain { base, compute: Compute::Full, cap: Cap::NONE },
        &joined.into_iter().flatten().collect::<Vec<_>>(),
    ));
    if base {
        let plain = t.b.ops(
            Op::HeadLossTrain { base: false, compute: Compute::Full, cap: Cap::NONE },
            &[x, w, target, weight],
        );
        outs[4] = plain[4] + sum_before;
    }
    outs
}

/// Logits that the forward pass kept give the gradients that computing them again gives.
#[test]
fn the_gradient_of_head_loss_may_read_kept_logits() {
    for (base, cap) in [(false, Cap::NONE), (true, Cap::NONE), (false, Cap(Some(1.5)))] {
        let (outs, _) = evaluate(match (base, cap) {
            (false, Cap::NONE) => |t| gradients_of_logits(t, false, Cap::NONE),
            (true, _) => |t| gradients_of_logits(t, true, Cap::NONE),
            (false, _) => |t| gradients_of_logits(t, false, Cap(Some(1.5))),
        });
        let (again, kept) = outs.split_at(2);
        for (i, (again, kept)) in again.iter().zip(kept).enumerate() {
            within(1e-12, kept, again)
                .unwrap_or_else(|why| panic!("output {i}, base {base}, {cap:?}: {why}"));
        }
    }
}

/// dx and dw with logits computed again, then with kept ones.
fn gradients_of_logits(t: &flatout_ir::check::Trial, base: bool, cap: Cap) -> Vec<Tensor<'_>> {
    let (x, w, d, sum_before) = (t.x(&[5, 3]), t.x(&[7, 3]), t.x(&[5]), t.x(&[7, 3]));
    let target = t.index(&[5], &[2, -1, 6, 0, 2]);
    let (compute, weight) = (Compute::Full, t.x(&[5]));
    let loss = t.b.ops(Op::HeadLoss { compute, cap }, &[x, w, target, weight]);
    let gradients = |kept: bool| {
        let ins = [
            Some(x),
            Some(w),
            Some(target),
            Some(loss[2]),
            Some(d),
            kept.then_some(loss[4]),
            base.then_some(sum_before),
        ];
        let ins: Vec<Tensor<'_>> = ins.into_iter().flatten().collect();
        t.b.ops(Op::HeadLossGrad { base, kept, compute, cap }, &ins)
    };
    [gradients(false), gradients(true)].concat()
}

/// formulas.rs checks the numbers; this test checks types and text.
fn adamw_expands_to_its_outputs() {
    let b = Builder::new();
    let p = b.param("p", &[3, 5], Init::Zeros);
    let one = b.fill(1.0, DType::F32, &[1]);
    let op = |copy| Op::AdamW {
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        lr_scale: 1.0,
        copy,
        first: 0,
    };
    let ins = [p, p, p, p, one, one, one, one];
    assert_eq!(b.ops(op(false), &ins).len(), 3);
    let copied = b.ops(op(true), &ins);
    assert_eq!((copied.len(), copied[3].dtype()), (4, DType::BF16));
    sound(&b.finish()).unwrap();
}

fn adamw8_expands_to_its_outputs() {
    let b = Builder::new();
    let p = b.param("p", &[3, 100], Init::Zeros);
    let one = b.fill(1.0, DType::F32, &[1]);
    let scales = b.fill(1.0, DType::F32, &[2]);
    let (beta1, beta2, eps, weight_decay, lr_scale, first) = (0.9, 0.95, 1e-8, 0.1, 1.0, 300);
    let op = |copy| Op::AdamW8 { beta1, beta2, eps, weight_decay, lr_scale, copy, first };
    let moments = [p.cast(DType::E4M3), p.cast(DType::E4M4)];
    let ins = [p, p, moments[0], moments[1], scales, scales, one, one, one, one];
    assert_eq!(b.ops(op(false), &ins).len(), 5);
    let copied = b.ops(op(true), &ins);
    let types: Vec<DType> = copied.iter().map(|out| out.dtype()).collect();
    assert_eq!(types, [DType::F32, DType::E4M3, DType::E4M4, DType::F32, DType::F32, DType::BF16]);
    sound(&b.finish()).unwrap();
}

fn a_region_is_its_body() {
    const OPEN: Build = |t| {
        let (x, y) = (t.x(&[3, 5]), t.x(&[3, 5]));
        let product = x * y;
        vec![product.map(E::Silu), product + x]
    };
    let (open, _) = Case { name: "open", build: OPEN }.forward();
    let mut body = open.clone();
    for (slot, name) in body.slots.iter_mut().zip(["a", "b"]) {
        (slot.path, slot.class) = (name.into(), Class::Input);
    }
    let b = Builder::from_graph(Graph { slots: open.slots.clone(), ..Graph::default() });
    let ins = [b.read(SlotId(0)), b.read(SlotId(1))];
    for (i, y) in b.ops(Op::Region { body: Box::new(body) }, &ins).into_iter().enumerate() {
        b.result(&format!("y{i}"), y);
    }
    let closed = b.finish();
    sound(&closed).unwrap();
    let (wanted, values) = evaluate(OPEN);
    let got = oracle::run(&in_f64(&closed), &values).results;
    assert_eq!([&got["y0"], &got["y1"]], [&wanted[0], &wanted[1]]);
}

/// Regions of unequal shapes, identified by what connects their nodes.
fn a_bundle_is_its_regions() {
    let open = Builder::new();
    let [x, y] = ["x", "y"].map(|name| open.input(name, DType::F32, &[3, 5]));
    let (z, u) = (open.input("z", DType::F32, &[7]), open.input("u", DType::F32, &[3, 5]));
    let (sum, side) = (x + y, z.map(E::Silu));
    for (name, v) in [("sum", sum), ("side", side), ("x", x * x), ("u", u.map(E::Silu)), ("last", sum * y)] {
        open.result(name, v);
    }
    let body = open.finish();
    let parts: Vec<_> = bundle::parts(&body).into_iter().map(|part| (part.ins, part.outs)).collect();
    let wanted = [(vec![0, 1], vec![0, 2, 4]), (vec![2], vec![1]), (vec![3], vec![3])];
    assert_eq!(parts, wanted);
    let mut pairs = bundle::pairs(&body);
    pairs.sort_unstable();
    assert_eq!(pairs, [(0, 0), (0, 2), (0, 4), (1, 0), (1, 2), (1, 4), (2, 1), (3, 3)]);
    let b = Builder::from_graph(Graph { slots: body.slots.clone(), ..Graph::default() });
    let ins: Vec<_> = (0..4).map(|slot| b.read(SlotId(slot))).collect();
    let outs = b.ops(Op::Bundle { body: Box::new(body.clone()) }, &ins);
    for ((name, _), y) in body.results.iter().zip(outs) {
        b.result(name, y);
    }
    let closed = b.finish();
    sound(&closed).unwrap();
    let values = body.slots.iter().enumerate().map(|(i, slot)| {
        let count = slot.ty.elements();
        (slot.path.clone(), (0..count).map(|e| (i as f64 + 1.0) * 0.1 * e as f64 - 0.5).collect())
    });
    let values: oracle::Values = values.collect();
    assert_eq!(oracle::run(&closed, &values).results, oracle::run(&body, &values).results);
}

/// A table holds the same angles: the shape rule checks it, the expansion ignores it.
#[test]
fn rope_takes_a_table() {
    let b = Builder::new();
    let (x, positions) = (b.param("x", &[5, 3, 6], Init::Zeros), b.input("positions", DType::I32, &[1, 5]));
    let ty = TensorType::new(DType::F32, [9, 3, 2]);
    let init = Init::RopeTable { freq: 100.0.into() };
    let slot =
        b.edit(|g| g.add_slot(Slot { path: "table".into(), ty, class: Class::Const, init, part: None }));
    let op = Op::Rope {
        freq: 100.0.into(),
        axis_of_freq: vec![0; 3],
        pairs: flatout_ir::ops::rope::Pairs::Half,
        inverse: false,
        table: true,
    };
    assert_eq!(b.op(op.clone(), &[x, positions, b.read(slot)]).dims(), [5, 3, 6]);
    let refused = b.with_graph(|g| op.infer(g, &[x.v, positions.v, x.v]));
    assert_eq!(refused, Err("the rotation table is f32[5,3,6], wanted f32[5,3,2]".into()));
    sound(&b.finish()).unwrap();
}

#[test]
fn dropout_drops_its_share_and_keeps_the_mean() {
    const DROP: Build = |t| {
        let x = t.b.fill(1.0, DType::F32, &[50, 401]);
        let rows: Vec<i32> = (0..100).collect();
        let (rng, rows) = (t.index(&[3], &[7, 0, 1]), t.index(&[50, 2], &rows));
        let y = x.dropout(0.3, rng, rows);
        vec![
            y,
            t.b.op_keyed(Op::Dropout { p: 0.3 }, &[x, rng, rows], y.source().key),
            x.dropout(0.3, rng, rows),
        ]
    };
    let (outs, _) = evaluate(DROP);
    assert_eq!(outs[0], outs[1], "the same key draws the same mask");
    assert_ne!(outs[0], outs[2], "another node draws another");
    let dropped = outs[0].iter().filter(|x| **x == 0.0).count() as f64 / outs[0].len() as f64;
    assert!((dropped - 0.3).abs() < 0.01, "{dropped} is dropped");
    let kept = 1.0 / (1.0 - 0.3f32 as f64);
    assert!(outs[0].iter().all(|x| *x == 0.0 || (x - kept).abs() < 1e-12));
}

/// A sample draws the same numbers whatever its rows' positions.
#[test]
fn dropout_follows_the_sample_not_the_row() {
    let (outs, _) = evaluate(|t| {
        let x = t.b.fill(1.0, DType::F32, &[2, 33]);
        let rng = t.index(&[3], &[7, 0, 1]);
        let y = x.dropout(0.5, rng, t.index(&[2, 2], &[4, 0, 9, 0]));
        let op = Op::Dropout { p: 0.5 };
        vec![y, t.b.op_keyed(op, &[x, rng, t.index(&[2, 2], &[9, 0, 4, 0])], y.source().key)]
    });
    assert_eq!(outs[0][..33], outs[1][33..]);
    assert_eq!(outs[0][33..], outs[1][..33]);
    assert_ne!(outs[0][..33], outs[0][33..]);
}

/// Five queries over seven keys, and over the first three and the last four, merged. One query sees only keys of the first
/// part, one none at all, one only keys of the second.
fn whole_and_merged(t: &flatout_ir::check::Trial) -> Vec<Tensor<'_>> {
    const SEEN: [[i32; 4]; 5] = [[0, 2, 0, 0], [0; 4], [4, 6, 0, 0], [1, 3, 3, 7], [0, 3, 5, 6]];
    let (q, k, v) = (t.x(&[5, 3, 4]), t.x(&[7, 1, 4]), t.x(&[7, 1, 4]));
    let over = |first: usize, len: usize| {
        let seen: Vec<i32> = SEEN.iter().flatten().map(|key| key - first as i32).collect();
        let (q_cut, k_cut) = (Segments::Uniform { len: 5 }, Segments::Uniform { len });
        let attend = Attend { scale: 0.7, cap: Cap::NONE, mask: Mask::TwoIntervals, q: q_cut, k: k_cut };
        let masking = Masking { intervals: Some(t.index(&[5, 4], &seen)), ..Masking::default() };
        q.attention_and_lse(k.slice(0, first, len), v.slice(0, first, len), &attend, &masking)
    };
    let (whole, merged) = (over(0, 7), attention::merge(&[over(0, 3), over(3, 4)]));
    vec![whole.0, whole.1, merged.0, merged.1]
}

#[test]
fn attention_over_parts_of_the_keys_merges_to_attention_over_all() {
    let (outs, _) = evaluate(whole_and_merged);
    assert!(outs[1][3..6].iter().all(|lse| *lse == f64::NEG_INFINITY), "query 1 sees nothing");
    assert_eq!(within(1e-12, &outs[2], &outs[0]), Ok(()));
    assert_eq!(within(1e-12, &outs[3], &outs[1]), Ok(()));

    // Gradients of a projection of o and lse, for the whole or the merged outputs.
    let gradients = |merged: bool| {
        let (mut forward, mut values) = Case { name: "parts", build: whole_and_merged }.forward();
        forward.results = forward.results.split_off(if merged { 2 } else { 0 });
        forward.results.truncate(2);
        for (i, result) in forward.results.iter_mut().enumerate() {
            result.0 = format!("y{i}");
            let path = format!("d.y{i}");
            values.insert(path.clone(), draw(&path, [60, 15][i]));
        }
        oracle::run(&in_f64(&differentiate(&forward)), &values).results
    };
    let (whole, merged) = (gradients(false), gradients(true));
    for x in ["d.x0", "d.x1", "d.x2"] {
        assert_eq!(within(1e-12, &merged[x], &whole[x]), Ok(()), "{x}");
        assert!(whole[x].iter().any(|d| d.abs() > 0.1), "{x} has something to compare");
    }
}
