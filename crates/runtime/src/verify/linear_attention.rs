//! Verification cases for linear attention: masks, shared heads, segments, sizes and rotations.
//!
//! Every mask, separate keys and queries that double as keys, heads that share keys or values, equal and ragged segments; sizes
//! that tensor-core kernels can read in 16-byte pieces and others, segments of one tile and of several; queries that are
//! rotated as they are read, with a table, past its end and without one, and their gradient onto a base.

use flatout_ir::ops::attention::Segments;
use flatout_ir::ops::frequency::Frequencies;
use flatout_ir::ops::linear_attention::{Accumulate, Keys, LinearAttend, LinearMask, Rotary};
use flatout_ir::types::{DType, TensorType};

use super::Data;
use super::cases::{FLOATS, Input, Table, tensor, x};
use super::layers::rope_table;

pub(super) fn linear_attention(table: &mut Table) {
    for dtype in FLOATS {
        for &mask in LinearMask::ALL {
            let even = Segments::Uniform { len: 21 };
            given(table, mask, even, even, [42, 42], [4, 2, 1], [12, 20], dtype, vec![]);
            given(table, mask, even, even, [42, 42], [4, 2, 4], [40, 24], dtype, vec![]);
            symmetric(table, mask, even, 42, [4, 2], [40, 24], dtype, vec![]);
            symmetric(table, mask, even, 42, [3, 1], [7, 5], dtype, vec![]);
            let ragged = Segments::Ragged { max_segments: 4, max_len: 30 };
            symmetric(table, mask, ragged, 42, [4, 1], [24, 16], dtype, bounds());
        }
        let mask = LinearMask::Causal;
        let ragged = Segments::Ragged { max_segments: 4, max_len: 30 };
        let both = bounds().into_iter().chain(bounds()).collect();
        given(table, mask, ragged, ragged, [42, 42], [4, 1, 2], [24, 16], dtype, both);
        // Fewer queries than keys, and segments of several tiles.
        let (q, k) = (Segments::Uniform { len: 70 }, Segments::Uniform { len: 150 });
        given(table, mask, q, k, [140, 300], [2, 1, 2], [72, 40], dtype, vec![]);
        symmetric(table, LinearMask::Strict, k, 300, [2, 1], [72, 40], dtype, vec![]);
        symmetric(table, LinearMask::Full, k, 300, [2, 2], [40, 264], dtype, vec![]);
        rotated(table, LinearMask::Strict, k, 300, [2, 1], [72, 40], dtype, vec![], Rows::Some);
        rotated(
            table,
            LinearMask::Full,
            Segments::Uniform { len: 21 },
            42,
            [3, 1],
            [6, 5],
            dtype,
            vec![],
            Rows::All,
        );
    }
    // Segments with every number of strips per tile, one of them that of Vision-BDH.
    for len in [16, 33, 50, 65, 90, 110, 128] {
        let segments = Segments::Uniform { len };
        symmetric(table, LinearMask::Full, segments, 2 * len, [2, 1], [136, 72], DType::BF16, vec![]);
        symmetric(table, LinearMask::Strict, segments, 2 * len, [2, 1], [64, 64], DType::BF16, vec![]);
        for rows in [Rows::All, Rows::Counted] {
            rotated(table, LinearMask::Full, segments, 2 * len, [3, 1], [136, 72], DType::BF16, vec![], rows);
        }
        rotated(
            table,
            LinearMask::Strict,
            segments,
            2 * len,
            [2, 1],
            [64, 64],
            DType::BF16,
            vec![],
            Rows::Some,
        );
    }
    let (segments, ragged) =
        (Segments::Uniform { len: 65 }, Segments::Ragged { max_segments: 4, max_len: 30 });
    rotated(table, LinearMask::Causal, segments, 130, [2, 1], [200, 64], DType::BF16, vec![], Rows::None);
    for rows in [Rows::All, Rows::Some, Rows::Counted, Rows::None] {
        rotated(table, LinearMask::Strict, ragged, 42, [4, 1], [72, 16], DType::BF16, bounds(), rows);
    }
}

/// Starts and lengths of four segments of 42 rows: one is empty, and three rows are outside every segment.
fn bounds() -> Vec<Input> {
    let column = |values: [f64; 4]| tensor(DType::I32, &[4], Data::Values(values.to_vec()));
    vec![column([0.0, 17.0, 30.0, 0.0]), column([17.0, 13.0, 9.0, 0.0])]
}

#[allow(clippy::too_many_arguments, reason = "a row of the table")]
fn given(
    table: &mut Table,
    mask: LinearMask,
    q: Segments,
    k: Segments,
    [tq, tk]: [usize; 2],
    [h, hk, hv]: [usize; 3],
    [n, d]: [usize; 2],
    dtype: DType,
    bounds: Vec<Input>,
) {
    let attend = LinearAttend { scale: 0.3, mask, q, k: Keys::Given(k), rotary: Rotary::None };
    let tensors = vec![x(dtype, &[tq, h, n]), x(dtype, &[tk, hk, n]), x(dtype, &[tk, hv, d])];
    both_ways(table, attend, [tensors, bounds].concat(), TensorType::new(dtype, [tq, h, d]));
}

#[allow(clippy::too_many_arguments, reason = "a row of the table")]
fn symmetric(
    table: &mut Table,
    mask: LinearMask,
    q: Segments,
    tokens: usize,
    [h, hv]: [usize; 2],
    [n, d]: [usize; 2],
    dtype: DType,
    bounds: Vec<Input>,
) {
    let attend = LinearAttend { scale: 0.3, mask, q, k: Keys::Queries, rotary: Rotary::None };
    let tensors = vec![x(dtype, &[tokens, h, n]), x(dtype, &[tokens, hv, d])];
    both_ways(table, attend, [tensors, bounds].concat(), TensorType::new(dtype, [tokens, h, d]));
}

/// Which positions a table contains.
#[derive(Clone, Copy, PartialEq)]
enum Rows {
    All,
    Some,
    /// All, and they are consecutive.
    Counted,
    /// There is no table.
    None,
}

#[allow(clippy::too_many_arguments, reason = "a row of the table")]
fn rotated(
    table: &mut Table,
    mask: LinearMask,
    q: Segments,
    tokens: usize,
    [h, hv]: [usize; 2],
    [n, d]: [usize; 2],
    dtype: DType,
    bounds: Vec<Input>,
    rows: Rows,
) {
    let freq = Frequencies::from(1000.0);
    let rotary = if rows == Rows::None { Rotary::Angles(freq) } else { Rotary::Table(freq) };
    let attend = LinearAttend { scale: 0.3, mask, q, k: Keys::Queries, rotary };
    let counted = (0..tokens).map(|token| (3 + token) as f64).collect();
    let (places, count) = match rows {
        Rows::All => (Data::Between(0.0, 150.0), 151),
        Rows::Counted => (Data::Values(counted), 3 + tokens.max(128)),
        Rows::Some | Rows::None => (Data::Between(0.0, 150.0), 40),
    };
    let positions = tensor(DType::I32, &[1, tokens], places);
    let tensors = vec![x(dtype, &[tokens, h, n]), x(dtype, &[tokens, hv, d])];
    let listed = (rows != Rows::None).then(|| rope_table(count, n / 2, freq));
    let ins = [tensors, bounds, vec![positions], Vec::from_iter(listed)].concat();
    let (o, base) = (x(dtype, &[tokens, h, d]), x(dtype, &[tokens, h, n]));
    for accumulate in
        [Accumulate::Base, Accumulate::Relu].into_iter().filter(|_| matches!(q, Segments::Uniform { .. }))
    {
        table
            .add(attend.accumulating_grad(accumulate), [ins.clone(), vec![o.clone(), base.clone()]].concat());
    }
    both_ways(table, attend, ins, o.0);
}

fn both_ways(table: &mut Table, attend: LinearAttend, ins: Vec<Input>, o: TensorType) {
    table.add(attend.op(), ins.clone());
    table.add(attend.grad(), ins.into_iter().chain([(o, Data::Normal(1.0))]).collect());
}
