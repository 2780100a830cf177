//! Movements as views: the same memory read with other extents and strides.

use crate::ops::Op;
use crate::plan::View;

pub fn is_movement(op: &Op) -> bool {
    matches!(
        op,
        Op::Reshape { .. }
            | Op::Transpose { .. }
            | Op::Slice { .. }
            | Op::Broadcast { .. }
            | Op::Concat { .. }
            | Op::Pad { .. }
    )
}

/// The view that a movement of one input results in, or `None` where it needs a copy.
pub fn moved(from: &View, op: &Op) -> Option<View> {
    match op {
        Op::Reshape { dims } => reshape(from, dims),
        Op::Transpose { perm } => {
            let dims = perm.iter().map(|&p| from.dims[p]).collect();
            let strides = perm.iter().map(|&p| from.strides[p]).collect();
            Some(View { dims, strides, ..*from })
        }
        Op::Slice { axis, start, len } => Some(slice(from, *axis, *start, *len)),
        Op::Broadcast { dims } => {
            let stride = |i: usize| if from.dims[i] == dims[i] { from.strides[i] } else { 0 };
            Some(View { strides: (0..dims.len()).map(stride).collect(), dims: dims.clone(), ..*from })
        }
        _ => None,
    }
}

pub fn slice(from: &View, axis: usize, start: usize, len: usize) -> View {
    let mut view = from.clone();
    view.offset += start * view.strides[axis] * view.dtype.bytes();
    view.dims[axis] = len;
    view
}

/// Splits and merges axes, where every group of old axes that forms a group of new ones is evenly strided.
pub fn reshape(from: &View, dims: &[usize]) -> Option<View> {
    // Axes of extent 1 carry no stride.
    let old: Vec<(usize, usize)> =
        from.dims.iter().zip(&from.strides).filter(|(d, _)| **d != 1).map(|(d, s)| (*d, *s)).collect();
    let mut strides = vec![0; dims.len()];
    let (mut i, mut j) = (0, 0);
    while i < old.len() || j < dims.len() {
        if j < dims.len() && dims[j] == 1 {
            j += 1;
            continue;
        }
        if i == old.len() || j == dims.len() {
            return None;
        }
        // Extends a run of old and a run of new axes until they hold the same number of elements.
        let (mut i_end, mut j_end) = (i + 1, j + 1);
        let (mut n_old, mut n_new) = (old[i].0, dims[j]);
        while n_old != n_new {
            if n_old < n_new {
                n_old *= old.get(i_end)?.0;
                i_end += 1;
            } else {
                n_new *= dims.get(j_end)?;
                j_end += 1;
            }
        }
        let even = (i..i_end - 1).all(|a| old[a].1 == old[a + 1].0 * old[a + 1].1);
        if !even {
            return None;
        }
        let mut stride = old[i_end - 1].1;
        for a in (j..j_end).rev() {
            strides[a] = stride;
            stride *= dims[a];
        }
        (i, j) = (i_end, j_end);
    }
    Some(View { dims: dims.to_vec(), strides, ..*from })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{DType, TensorType};

    #[test]
    fn heads_split_out_of_a_column_slice_without_a_copy() {
        let whole = View::dense(0, &TensorType::new(DType::F32, [5, 24]));
        let q = slice(&whole, 1, 8, 8);
        let heads = reshape(&q, &[5, 2, 4]).expect("a view");
        assert_eq!((heads.offset, heads.strides.clone()), (32, vec![24, 4, 1]));
        assert_eq!(reshape(&heads, &[5, 8]).expect("back").strides, vec![24, 1]);
        assert_eq!(reshape(&q, &[40]), None);
    }

    #[test]
    fn transposed_axes_do_not_join() {
        let whole = View::dense(0, &TensorType::new(DType::F32, [4, 6]));
        let turned = moved(&whole, &Op::Transpose { perm: vec![1, 0] }).expect("a view");
        assert_eq!(turned.strides, vec![1, 6]);
        assert_eq!(reshape(&turned, &[24]), None);
        assert!(reshape(&turned, &[6, 1, 4]).is_some());
    }
}
