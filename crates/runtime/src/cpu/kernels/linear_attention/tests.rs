//! Tests of linear attention, both directions, against the oracle over masks, segments, heads, sizes and types.
//!
//! They include the symmetric form, in which queries double as keys.

use flatout_ir::DType;
use flatout_ir::ops::attention::Segments;
use flatout_ir::ops::linear_attention::{Keys, LinearAttend, LinearMask, Rotary};

use crate::cpu::kernels::attention::trial::{
    LaunchVariant, TestInput, assert_near, expected, launched, workspace,
};

/// (start, length) of segments on an axis of a number of tokens; uniform without any.
#[derive(Clone, Debug)]
struct SideSegments {
    tokens: usize,
    len: usize,
    ragged: Vec<(i32, i32)>,
}

fn even(count: usize, len: usize) -> SideSegments {
    SideSegments { tokens: count * len, len, ragged: vec![] }
}

fn uneven(tokens: usize, ragged: &[(i32, i32)]) -> SideSegments {
    SideSegments { tokens, len: tokens, ragged: ragged.to_vec() }
}

impl SideSegments {
    fn segments(&self) -> Segments {
        match self.ragged.len() {
            0 => Segments::Uniform { len: self.len },
            max_segments => Segments::Ragged { max_segments, max_len: self.len },
        }
    }

    fn inputs(&self) -> Vec<TestInput> {
        if self.ragged.is_empty() {
            return vec![];
        }
        let (starts, lengths): (Vec<i32>, Vec<i32>) = self.ragged.iter().copied().unzip();
        vec![TestInput::integers(&starts), TestInput::integers(&lengths)]
    }

    fn is_idle(&self, row: usize) -> bool {
        let has = |(start, len): &(i32, i32)| (*start..start + len).contains(&(row as i32));
        !self.ragged.is_empty() && !self.ragged.iter().any(has)
    }
}

#[derive(Clone, Debug)]
struct Case {
    mask: LinearMask,
    q: SideSegments,
    /// `None` if the queries double as keys.
    k: Option<SideSegments>,
    /// Heads of queries, keys and values.
    heads: [usize; 3],
    /// N and D.
    sizes: [usize; 2],
    dtype: DType,
    rotary: Rotary,
}

impl Case {
    fn new(mask: LinearMask, q: SideSegments, k: Option<SideSegments>) -> Self {
        let heads = if k.is_some() { [6, 2, 3] } else { [3, 3, 1] };
        Case { mask, q, k, heads, sizes: [6, 5], dtype: DType::F32, rotary: Rotary::None }
    }

    fn attend(&self) -> LinearAttend {
        let k = self.k.as_ref().map_or(Keys::Queries, |k| Keys::Given(k.segments()));
        LinearAttend { scale: 0.3, mask: self.mask, q: self.q.segments(), k, rotary: self.rotary }
    }

    /// The inputs of the forward operation; rows outside every segment hold `idle`.
    fn inputs(&self, idle: f64) -> Vec<TestInput> {
        let keys = self.k.as_ref().unwrap_or(&self.q);
        let make = |side: &SideSegments, heads: usize, size: usize, seed: u32| {
            let x = TestInput::noise(self.dtype, &[side.tokens, heads, size], seed);
            x.with_rows(idle, |row| side.is_idle(row))
        };
        let mut ins = vec![make(&self.q, self.heads[0], self.sizes[0], 1)];
        ins.extend(self.k.as_ref().map(|k| make(k, self.heads[1], self.sizes[0], 2)));
        ins.push(make(keys, self.heads[2], self.sizes[1], 3));
        ins.extend(self.q.inputs());
        ins.extend(self.k.iter().flat_map(SideSegments::inputs));
        if let Some(freq) = self.rotary.freq() {
            // Positions restart every 41 tokens; a table has 30 of them.
            let (tokens, half) = (self.q.tokens, self.sizes[0] / 2);
            ins.push(TestInput::new(DType::I32, &[1, tokens], |i| (i % 41) as f64));
            let table: Vec<f64> = freq.table(30, half).collect();
            ins.extend(
                self.rotary.has_table().then(|| TestInput::new(DType::F32, &[30, half, 2], |i| table[i])),
            );
        }
        ins
    }

    fn gradient_inputs(&self, idle: f64) -> Vec<TestInput> {
        let d = TestInput::noise(self.dtype, &[self.q.tokens, self.heads[0], self.sizes[1]], 4);
        let mut ins = self.inputs(idle);
        ins.push(d.with_rows(idle, |row| self.q.is_idle(row)));
        ins
    }

    /// Runs both directions with everything outside the segments NaN and compares with the oracle.
    fn check(&self) {
        // Rounding to bf16 alone is 1.7e-3; the oracle rounds a gradient before and after rotating it back.
        let bound = match (self.dtype, self.rotary) {
            (DType::F32, _) => 1e-6,
            (_, Rotary::None) => 2.5e-3,
            _ => 4e-3,
        };
        let at = self.attend();
        for (op, clean, poisoned) in [
            (at.op(), self.inputs(0.0), self.inputs(f64::NAN)),
            (at.grad(), self.gradient_inputs(0.0), self.gradient_inputs(f64::NAN)),
        ] {
            let want = expected(&op, &clean);
            let got = launched(&op, &poisoned, 2, LaunchVariant::default()).unwrap();
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                let what = format!("output {i} of {} of {self:?}", op.name());
                assert_near(got.as_ref().unwrap(), want, bound, &what);
            }
        }
    }
}

#[test]
fn even_segments_of_every_length_ratio() {
    for &mask in LinearMask::ALL {
        Case::new(mask, even(2, 75), Some(even(2, 75))).check();
        // A tile and one row, three tiles of one height, more keys than queries and fewer.
        Case::new(mask, even(2, 97), Some(even(2, 97))).check();
        Case::new(mask, even(1, 20), Some(even(1, 257))).check();
        Case::new(mask, even(2, 200), Some(even(2, 13))).check();
        Case::new(mask, even(5, 1), Some(even(5, 1))).check();
        Case::new(mask, even(3, 65), None).check();
        Case::new(mask, even(1, 250), None).check();
    }
}

#[test]
fn uneven_segments_empty_short_and_out_of_order() {
    for &mask in LinearMask::ALL {
        let q = uneven(130, &[(60, 66), (0, 0), (5, 1), (10, 40), (-1, 0), (55, 4)]);
        let k = uneven(240, &[(0, 70), (75, 5), (71, 1), (90, 150), (0, 0), (0, 0)]);
        Case::new(mask, q.clone(), Some(k.clone())).check();
        Case::new(mask, k.clone(), Some(q.clone())).check();
        Case::new(mask, q, None).check();
        Case::new(mask, k, None).check();
        Case::new(mask, even(4, 1), Some(uneven(120, &[(0, 1), (30, 30), (60, 0), (90, 17)]))).check();
    }
}

#[test]
fn heads_sizes_and_types() {
    for (heads, sizes) in
        [([1, 1, 1], [1, 1]), ([4, 1, 2], [33, 7]), ([4, 4, 1], [64, 24]), ([4, 2, 4], [5, 130])]
    {
        for &mask in LinearMask::ALL {
            for dtype in [DType::F32, DType::BF16] {
                let given = Case::new(mask, even(2, 21), Some(even(2, 33)));
                Case { heads, sizes, dtype, ..given }.check();
                let symmetric = Case::new(mask, even(2, 33), None);
                Case { heads: [heads[0], heads[0], heads[2]], sizes, dtype, ..symmetric }.check();
            }
        }
    }
}

#[test]
fn queries_are_rotated_as_they_are_read() {
    for rotary in [Rotary::Angles(100.0.into()), Rotary::Table(100.0.into())] {
        for &mask in LinearMask::ALL {
            for (q, sizes) in [
                (even(3, 65), [6, 5]),
                (even(1, 110), [2, 3]),
                (uneven(130, &[(60, 66), (0, 0), (5, 1), (10, 40), (-1, 0), (55, 4)]), [10, 4]),
            ] {
                for dtype in [DType::F32, DType::BF16] {
                    Case { rotary, sizes, dtype, ..Case::new(mask, q.clone(), None) }.check();
                }
            }
        }
    }
}

/// The same bits as a separate rotation and plain linear attention, except for the gradient, which is rounded once.
#[test]
fn fused_rotation_has_the_bits_of_a_separate_one() {
    use flatout_ir::Op;
    use flatout_ir::ops::rope::Pairs;
    let turned = Case {
        rotary: Rotary::Table(100.0.into()),
        sizes: [16, 8],
        dtype: DType::BF16,
        ..Case::new(LinearMask::Strict, even(2, 65), None)
    };
    let ins = turned.inputs(0.0);
    let rope = Op::Rope {
        freq: 100.0.into(),
        axis_of_freq: vec![0; 8],
        pairs: Pairs::Interleaved,
        inverse: false,
        table: true,
    };
    let launch = |op: &Op, ins: &[TestInput]| launched(op, ins, 2, LaunchVariant::default()).unwrap();
    let rotated = launch(&rope, &[ins[0].clone(), ins[2].clone(), ins[3].clone()])[0].clone().unwrap();
    let r = TestInput::new(DType::BF16, &[130, 3, 16], |i| rotated[i]);
    let plain = Case { rotary: Rotary::None, ..turned.clone() };
    let o = launch(&plain.attend().op(), &[r.clone(), ins[1].clone()]);
    assert_eq!(launch(&turned.attend().op(), &ins), o);
    let d = turned.gradient_inputs(0.0).pop().unwrap();
    let grads = launch(&plain.attend().grad(), &[r, ins[1].clone(), d]);
    assert_eq!(launch(&turned.attend().grad(), &turned.gradient_inputs(0.0))[1], grads[1]);
}

#[test]
fn bits_do_not_depend_on_threads_and_outputs_not_on_each_other() {
    for k in [Some(even(3, 110)), None] {
        let case = Case { sizes: [64, 40], ..Case::new(LinearMask::Causal, even(3, 110), k) };
        for (op, ins) in
            [(case.attend().op(), case.inputs(0.0)), (case.attend().grad(), case.gradient_inputs(0.0))]
        {
            let first = launched(&op, &ins, 1, LaunchVariant::default()).unwrap();
            for threads in [2, 5] {
                assert_eq!(
                    launched(&op, &ins, threads, LaunchVariant::default()).unwrap(),
                    first,
                    "{case:?}"
                );
            }
            for unread in 0..first.len() {
                let variant = LaunchVariant { unread: &[unread], ..LaunchVariant::default() };
                let mut want = first.clone();
                want[unread] = None;
                assert_eq!(launched(&op, &ins, 2, variant).unwrap(), want, "{case:?} without {unread}");
            }
        }
    }
}

#[test]
fn scratch_does_not_grow_with_the_tokens() {
    let scratch = |tokens: usize| {
        let case = Case { sizes: [1024, 192], ..Case::new(LinearMask::Full, even(1, tokens), None) };
        let zeros = |heads: usize, size: usize| TestInput::new(DType::F32, &[tokens, heads, size], |_| 0.0);
        let mut ins = vec![zeros(6, 1024), zeros(1, 192)];
        let forward = workspace(&case.attend().op(), &ins, 4);
        ins.push(zeros(6, 192));
        (forward, workspace(&case.attend().grad(), &ins, 4))
    };
    assert_eq!(scratch(64), scratch(640));
    assert!(scratch(64).1 < 4 * (2 << 20), "{} bytes for four cores", scratch(64).1);
}

#[test]
fn keys_of_two_segments_have_no_gradient() {
    let shared = Some(uneven(20, &[(0, 12), (11, 9)]));
    let case = Case::new(LinearMask::Full, even(2, 5), shared);
    let error =
        launched(&case.attend().grad(), &case.gradient_inputs(0.0), 1, LaunchVariant::default()).unwrap_err();
    assert!(error.contains("key row 11 lies in two segments"), "{error}");
    // The forward pass may read keys twice.
    let (op, ins) = (case.attend().op(), case.inputs(0.0));
    let got = launched(&op, &ins, 1, LaunchVariant::default()).unwrap();
    assert_near(got[0].as_ref().unwrap(), &expected(&op, &ins)[0], 1e-6, "o over shared keys");
}
