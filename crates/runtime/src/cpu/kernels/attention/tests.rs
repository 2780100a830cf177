//! Tests of attention, both directions, against the oracle over masks, segments, heads, sizes and types.

use flatout_ir::ops::attention::{Mask, Segments};
use flatout_ir::ops::cap::Cap;
use flatout_ir::{DType, Op};

use super::trial::{LaunchVariant, TestInput, assert_near, expected, launched, workspace};

const CAUSAL: Mask = Mask::Causal;

#[derive(Clone, Debug)]
enum SideSegments {
    /// Count and length of uniform segments.
    Even(usize, usize),
    /// Tokens of the axis, and (start, length) of each segment.
    Uneven(usize, Vec<(i32, i32)>),
}

impl SideSegments {
    fn tokens(&self) -> usize {
        match self {
            SideSegments::Even(count, len) => count * len,
            SideSegments::Uneven(tokens, _) => *tokens,
        }
    }

    fn segments(&self) -> Segments {
        match self {
            SideSegments::Even(_, len) => Segments::Uniform { len: *len },
            SideSegments::Uneven(tokens, bounds) => {
                Segments::Ragged { max_segments: bounds.len(), max_len: *tokens }
            }
        }
    }

    fn inputs(&self) -> Vec<TestInput> {
        let SideSegments::Uneven(_, bounds) = self else { return vec![] };
        let (starts, lengths): (Vec<i32>, Vec<i32>) = bounds.iter().copied().unzip();
        vec![TestInput::integers(&starts), TestInput::integers(&lengths)]
    }

    fn is_idle(&self, row: usize) -> bool {
        let SideSegments::Uneven(_, bounds) = self else { return false };
        let row = row as i32;
        !bounds.iter().any(|(start, len)| (*start..start + len).contains(&row))
    }
}

struct Case {
    mask: Mask,
    q: SideSegments,
    k: SideSegments,
    heads: usize,
    kv_heads: usize,
    size: usize,
    dtype: DType,
    /// Whether lse has a gradient too.
    d_lse: bool,
    cap: Cap,
}

impl Case {
    fn new(mask: Mask, q: SideSegments, k: SideSegments) -> Self {
        Case { mask, q, k, heads: 4, kv_heads: 2, size: 16, dtype: DType::F32, d_lse: false, cap: Cap::NONE }
    }

    fn name(&self) -> String {
        let Case { mask, q, k, heads, kv_heads, size, dtype, d_lse, cap } = self;
        let dtype = dtype.name();
        format!(
            "{mask:?}, {q:?} on {k:?}, {heads} heads on {kv_heads}, {size} {dtype}, d lse {d_lse}, {cap:?}"
        )
    }

    fn ops(&self) -> (Op, Op) {
        let (scale, mask) = (1.7 / (self.size as f32).sqrt(), self.mask);
        let (q, k) = (self.q.segments(), self.k.segments());
        let (cap, d_lse) = (self.cap, self.d_lse);
        (Op::Attention { scale, cap, mask, q, k }, Op::AttentionGrad { scale, cap, mask, q, k, d_lse })
    }

    /// The inputs of the forward operation; rows outside every segment hold `idle`.
    fn inputs(&self, idle: f64) -> Vec<TestInput> {
        let (tq, tk) = (self.q.tokens(), self.k.tokens());
        let keys = |seed: u32| {
            let x = TestInput::noise(self.dtype, &[tk, self.kv_heads, self.size], seed);
            x.with_rows(idle, |row| self.k.is_idle(row))
        };
        let q = TestInput::noise(self.dtype, &[tq, self.heads, self.size], 1);
        let mut ins = vec![q.with_rows(idle, |row| self.q.is_idle(row)), keys(2), keys(3)];
        ins.extend(self.q.inputs());
        ins.extend(self.k.inputs());
        if self.mask == Mask::TwoIntervals {
            // A prefix and another interval per query; some overlap, some are empty or extend past the keys.
            let own = |row: i32| [row % 7 - 2, row % 11, row - 9, row + row % 3 * 40 - 3];
            let edges = |i: usize| own(i as i32 / 4)[i % 4] as f64;
            ins.push(TestInput::new(DType::I32, &[tq, 4], edges));
        }
        ins
    }

    /// The inputs of the gradient operation, given the forward pass's outputs.
    fn gradient_inputs(&self, idle: f64, outs: &[Vec<f64>]) -> Vec<TestInput> {
        let (tq, h) = (self.q.tokens(), self.heads);
        let mut ins = self.inputs(idle);
        let is_idle = |row: usize| self.q.is_idle(row);
        ins.push(TestInput::new(self.dtype, &[tq, h, self.size], |i| outs[0][i]).with_rows(idle, is_idle));
        ins.push(TestInput::new(DType::F32, &[tq, h], |i| outs[1][i]).with_rows(idle, is_idle));
        ins.push(TestInput::noise(self.dtype, &[tq, h, self.size], 4).with_rows(idle, is_idle));
        ins.extend(self.d_lse.then(|| TestInput::noise(DType::F32, &[tq, h], 5).with_rows(idle, is_idle)));
        ins
    }

    /// Runs both directions with everything outside the segments NaN and compares with the oracle.
    fn check(&self) {
        let (forward, backward) = self.ops();
        let (bound, gradient_bound) = match self.dtype {
            DType::F32 => (2e-5, 2e-5),
            // Rounding to bf16 alone is 1.7e-3; the gradients also start from a rounded o.
            _ => (3e-3, 6e-3),
        };
        let want = expected(&forward, &self.inputs(0.0));
        let got = launched(&forward, &self.inputs(f64::NAN), 2, LaunchVariant::default()).unwrap();
        for (i, what) in ["o", "lse"].into_iter().enumerate() {
            assert_near(got[i].as_ref().unwrap(), &want[i], bound, &format!("{what} of {}", self.name()));
        }
        let gradients = expected(&backward, &self.gradient_inputs(0.0, &want));
        let ins = self.gradient_inputs(f64::NAN, &want);
        let got = launched(&backward, &ins, 2, LaunchVariant::default()).unwrap();
        for (i, what) in ["dq", "dk", "dv"].into_iter().enumerate() {
            let what = format!("{what} of {}", self.name());
            assert_near(got[i].as_ref().unwrap(), &gradients[i], gradient_bound, &what);
        }
    }
}

fn masks() -> [Mask; 6] {
    let window = |back, ahead| Mask::Window { back, ahead };
    [Mask::Full, CAUSAL, window(3, 2), window(70, 0), window(0, 1000), Mask::TwoIntervals]
}

fn uneven(tokens: usize, bounds: &[(i32, i32)]) -> SideSegments {
    SideSegments::Uneven(tokens, bounds.to_vec())
}

#[test]
fn even_segments_of_every_length_ratio() {
    for mask in masks() {
        Case::new(mask, SideSegments::Even(2, 75), SideSegments::Even(2, 75)).check();
        Case::new(mask, SideSegments::Even(3, 20), SideSegments::Even(3, 97)).check();
        Case::new(mask, SideSegments::Even(2, 70), SideSegments::Even(2, 13)).check();
        Case::new(mask, SideSegments::Even(5, 1), SideSegments::Even(5, 1)).check();
        // With 17 units each is a task, while fewer are split into parts.
        Case {
            heads: 3,
            kv_heads: 1,
            ..Case::new(mask, SideSegments::Even(17, 9), SideSegments::Even(17, 9))
        }
        .check();
    }
}

#[test]
fn uneven_segments_empty_short_and_out_of_order() {
    for mask in masks() {
        let q = uneven(130, &[(60, 66), (0, 0), (5, 1), (10, 40), (-1, 0), (55, 4)]);
        let k = uneven(140, &[(0, 70), (75, 5), (71, 1), (90, 50), (0, 0), (0, 0)]);
        Case::new(mask, q.clone(), k.clone()).check();
        Case::new(mask, k, q).check();
        Case::new(mask, uneven(80, &[(0, 80)]), uneven(80, &[(0, 80)])).check();
        // One query each over caches filled to different lengths.
        Case::new(mask, SideSegments::Even(4, 1), uneven(120, &[(0, 1), (30, 30), (60, 0), (90, 17)]))
            .check();
    }
}

#[test]
fn heads_and_sizes() {
    for (heads, kv_heads, size) in
        [(1, 1, 1), (3, 3, 7), (6, 2, 33), (5, 1, 24), (2, 2, 64), (4, 1, 256), (8, 8, 5)]
    {
        for mask in [CAUSAL, Mask::Window { back: 11, ahead: 3 }] {
            let case = Case::new(mask, SideSegments::Even(2, 41), SideSegments::Even(2, 67));
            Case { heads, kv_heads, size, ..case }.check();
        }
    }
}

#[test]
fn bf16_is_rounded_only_where_it_is_stored() {
    for mask in masks() {
        for size in [16, 21] {
            let case = Case::new(mask, SideSegments::Even(2, 75), SideSegments::Even(2, 75));
            Case { size, dtype: DType::BF16, ..case }.check();
        }
        let q = uneven(70, &[(2, 66), (1, 1)]);
        let case = Case::new(mask, q, uneven(90, &[(0, 80), (85, 2)]));
        Case { dtype: DType::BF16, ..case }.check();
    }
}

/// Scores beyond the cap, at the edges of masks, and with queries that attend to nothing.
#[test]
fn capped_scores() {
    for (mask, dtype) in [
        (CAUSAL, DType::F32),
        (Mask::Window { back: 9, ahead: 0 }, DType::F32),
        (Mask::TwoIntervals, DType::F32),
        (CAUSAL, DType::BF16),
    ] {
        let cap = Cap(Some(0.8));
        let case = Case::new(mask, SideSegments::Even(2, 80), SideSegments::Even(2, 70));
        Case { dtype, cap, d_lse: true, ..case }.check();
        let q = uneven(130, &[(60, 66), (0, 0), (5, 1), (10, 40)]);
        let case = Case::new(mask, q, uneven(140, &[(0, 70), (75, 5), (71, 1), (90, 50)]));
        Case { dtype, cap, ..case }.check();
    }
}

#[test]
fn gradients_of_lse() {
    for (mask, dtype) in [(CAUSAL, DType::F32), (Mask::TwoIntervals, DType::F32), (CAUSAL, DType::BF16)] {
        // Includes queries that attend to nothing.
        let case = Case::new(mask, SideSegments::Even(2, 40), SideSegments::Even(2, 27));
        Case { dtype, d_lse: true, ..case }.check();
        let q = uneven(130, &[(60, 66), (0, 0), (5, 1), (10, 40)]);
        let case = Case::new(mask, q, uneven(140, &[(0, 70), (75, 5), (71, 1), (90, 50)]));
        Case { dtype, d_lse: true, ..case }.check();
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    let sides = [
        (SideSegments::Even(1, 300), SideSegments::Even(1, 300)),
        (SideSegments::Even(20, 40), SideSegments::Even(20, 40)),
        (uneven(200, &[(0, 90), (100, 100)]), uneven(200, &[(0, 90), (90, 110)])),
    ];
    for (q, k) in sides {
        let case = Case { heads: 6, size: 24, ..Case::new(CAUSAL, q, k) };
        let (forward, backward) = case.ops();
        let outs = |op: &Op, ins: &[TestInput], threads: usize| -> Vec<Vec<f64>> {
            let outs = launched(op, ins, threads, LaunchVariant::default()).unwrap();
            outs.into_iter().map(|x| x.expect("every output was asked for")).collect()
        };
        let bits = |outs: &[Vec<f64>]| -> Vec<u64> { outs.iter().flatten().map(|x| x.to_bits()).collect() };
        let first = outs(&forward, &case.inputs(0.0), 1);
        let ins = case.gradient_inputs(0.0, &first);
        let gradients = outs(&backward, &ins, 1);
        for threads in [2, 5] {
            assert_eq!(bits(&outs(&forward, &case.inputs(0.0), threads)), bits(&first), "{}", case.name());
            assert_eq!(bits(&outs(&backward, &ins, threads)), bits(&gradients), "{}", case.name());
        }
    }
}

#[test]
fn unrequested_outputs_do_not_affect_others() {
    let case = Case::new(CAUSAL, SideSegments::Even(2, 45), SideSegments::Even(2, 45));
    let (forward, backward) = case.ops();
    let all = launched(&forward, &case.inputs(0.0), 2, LaunchVariant::default()).unwrap();
    for unread in 0..2 {
        let variant = LaunchVariant { unread: &[unread], ..LaunchVariant::default() };
        let got = launched(&forward, &case.inputs(0.0), 2, variant).unwrap();
        assert_eq!((&got[unread], &got[1 - unread]), (&None, &all[1 - unread]));
    }
    let outs: Vec<Vec<f64>> = all.into_iter().flatten().collect();
    let ins = case.gradient_inputs(0.0, &outs);
    let all = launched(&backward, &ins, 2, LaunchVariant::default()).unwrap();
    for unread in 0..3 {
        let variant = LaunchVariant { unread: &[unread], ..LaunchVariant::default() };
        let got = launched(&backward, &ins, 2, variant).unwrap();
        for out in 0..3 {
            let want = if out == unread { &None } else { &all[out] };
            assert_eq!(&got[out], want, "output {out} without {unread}");
        }
    }
}

/// A divergence must reach the finiteness check: no maximum or clamp may drop a NaN of an unmasked score.
#[test]
fn a_nan_among_visible_keys_is_seen() {
    let case = Case::new(CAUSAL, SideSegments::Even(1, 70), SideSegments::Even(1, 70));
    for input in 0..3 {
        let mut ins = case.inputs(0.0);
        ins[input] = ins[input].with_rows(f64::NAN, |row| row == 66);
        let outs = launched(&case.ops().0, &ins, 2, LaunchVariant::default()).unwrap();
        let o = outs[0].as_ref().unwrap();
        let width = case.heads * case.size;
        assert!(
            o[66 * width..67 * width].iter().all(|x| x.is_nan()),
            "a NaN in input {input} reaches its row"
        );
        assert!(o[..64 * width].iter().all(|x| x.is_finite()), "and no earlier block");
    }
}

#[test]
fn scratch_is_linear_in_the_tokens() {
    let scratch = |tokens: usize, cores: usize| {
        let side = || SideSegments::Even(1, tokens);
        let case = Case { heads: 12, kv_heads: 4, size: 64, ..Case::new(CAUSAL, side(), side()) };
        let (forward, backward) = case.ops();
        let zeros = |heads: usize| TestInput::new(DType::F32, &[tokens, heads, 64], |_| 0.0);
        let ins = [zeros(12), zeros(4), zeros(4)];
        let mut of_gradient = ins.to_vec();
        of_gradient.extend([zeros(12), TestInput::new(DType::F32, &[tokens, 12], |_| 0.0), zeros(12)]);
        (workspace(&forward, &ins, cores), workspace(&backward, &of_gradient, cores))
    };
    let cores = 16;
    let (forward, backward) = scratch(8192, cores);
    let (forward_half, backward_half) = scratch(4096, cores);
    assert_eq!(forward, forward_half, "forward needs tiles only");
    assert!(forward < cores * (64 << 10), "{forward} bytes");
    assert!(backward < 2 * backward_half, "{backward} bytes against {backward_half} at half the tokens");
    // Four parts' accumulators of dk and dv, and tiles; one head's scores would take 256 MiB.
    assert!(backward < 4 * 2 * 8192 * 4 * 64 * 4 + cores * (128 << 10), "{backward} bytes");
}

#[test]
fn invalid_segments_are_refused_with_a_message() {
    for (q, k, why) in [
        (
            uneven(20, &[(0, 12), (11, 9)]),
            uneven(20, &[(0, 10), (10, 10)]),
            "query row 11 lies in two segments",
        ),
        (
            uneven(20, &[(0, 10), (10, 10)]),
            uneven(20, &[(0, 12), (11, 9)]),
            "key row 11 lies in two segments",
        ),
        (
            uneven(20, &[(0, 10), (15, 10)]),
            uneven(20, &[(0, 10), (10, 10)]),
            "query segment 1 starts at row 15",
        ),
        (
            uneven(20, &[(0, 10), (10, -3)]),
            uneven(20, &[(0, 10), (10, 10)]),
            "query segment 1 starts at row 10",
        ),
    ] {
        let case = Case::new(CAUSAL, q, k);
        let outs = [vec![0.0; 20 * 4 * 16], vec![0.0; 20 * 4]];
        let ins = case.gradient_inputs(0.0, &outs);
        let error = launched(&case.ops().1, &ins, 1, LaunchVariant::default()).unwrap_err();
        assert!(error.contains(why), "{error}");
    }
    // The forward pass may read keys twice: several queries over one cache.
    let case = Case::new(Mask::Full, SideSegments::Even(2, 5), uneven(20, &[(0, 12), (11, 9)]));
    let want = expected(&case.ops().0, &case.inputs(0.0));
    let got = launched(&case.ops().0, &case.inputs(0.0), 1, LaunchVariant::default()).unwrap();
    assert_near(got[0].as_ref().unwrap(), &want[0], 2e-5, "o over shared keys");
}
