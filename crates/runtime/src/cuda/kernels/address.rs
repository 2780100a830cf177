//! Element addresses: strides become constants in the source, and determine the width of vector accesses.

use std::fmt::Write;

use flatout_ir::View;
use flatout_ir::types::DType;

/// The widest access of a thread.
const ACCESS_BYTES: usize = 16;

/// The axes of a tensor, outermost first, as (extent, stride); axes with compatible strides are merged.
#[derive(Clone, Debug, PartialEq)]
pub struct Walk {
    axes: Vec<(usize, usize)>,
}

impl Walk {
    pub fn new(dims: &[usize], strides: &[usize]) -> Walk {
        let mut axes: Vec<(usize, usize)> = vec![];
        for (&n, &step) in dims.iter().zip(strides).filter(|(n, _)| **n != 1) {
            match axes.last_mut() {
                Some((outer, outer_step)) if *outer_step == step * n => {
                    (*outer, *outer_step) = (*outer * n, step)
                }
                _ => axes.push((n, step)),
            }
        }
        Walk { axes }
    }

    pub fn of(view: &View) -> Walk {
        Walk::new(&view.dims, &view.strides)
    }

    /// All axes but the last, to address the start of a row.
    pub fn rows(view: &View) -> Walk {
        let outer = view.dims.len().saturating_sub(1);
        Walk::new(&view.dims[..outer], &view.strides[..outer])
    }

    /// All axes but the first, to address the elements within a row of the first axis.
    pub fn inner(view: &View) -> Walk {
        Walk::new(&view.dims[1..], &view.strides[1..])
    }

    /// The innermost extent and stride.
    pub fn last(&self) -> (usize, usize) {
        self.axes.last().copied().unwrap_or((1, 1))
    }

    /// Generates a device function that maps an element's row-major index to its offset. The outermost extent does not appear
    /// in it, so tensors that differ only in that share a source.
    pub fn function(&self, name: &str, index: &str) -> String {
        let mut text = format!("__device__ __forceinline__ i64 {name}({index} e) {{\n    i64 at = 0;\n");
        for (i, (n, step)) in self.axes.iter().enumerate().rev() {
            let place = if i == 0 { "e".into() } else { format!("(e % {n}u)") };
            _ = writeln!(text, "    at += (i64){place} * {step};");
            if i > 0 {
                _ = writeln!(text, "    e /= {n}u;");
            }
        }
        text + "    return at;\n}\n"
    }

    /// Whether any `width` elements from a multiple of `width` are contiguous and aligned for a single access.
    pub fn takes(&self, width: usize, dtype: DType, offset: usize) -> bool {
        let access = (width * dtype.bytes()).min(ACCESS_BYTES);
        let (n, step) = self.last();
        let outer = &self.axes[..self.axes.len().saturating_sub(1)];
        width == 1
            || step == 1
                && n.is_multiple_of(width)
                && offset.is_multiple_of(access)
                && outer.iter().all(|(_, step)| (step * dtype.bytes()).is_multiple_of(access))
    }
}

/// The index type for a number of elements.
pub fn index_type(elements: usize) -> &'static str {
    // Threads past the last element still compute an address.
    if elements < 1 << 31 { "u32" } else { "u64" }
}

/// Elements per access of the narrowest of the types.
pub fn most(views: &[&View]) -> usize {
    views.iter().map(|v| ACCESS_BYTES / v.dtype.bytes()).max().unwrap_or(1)
}

/// The largest number of elements, up to `most`, that a thread may access as one vector in every view.
pub fn width(views: &[&View], most: usize) -> usize {
    let takes = |width: usize| views.iter().all(|v| Walk::of(v).takes(width, v.dtype, v.offset));
    widths(most).find(|w| takes(*w)).unwrap_or(1)
}

/// As `width`, within rows of `extent` elements.
pub fn row_width(views: &[&View], extent: usize) -> usize {
    let takes = |width: usize| {
        extent.is_multiple_of(width) && views.iter().all(|v| Walk::of(v).takes(width, v.dtype, v.offset))
    };
    widths(most(views)).find(|w| takes(*w)).unwrap_or(1)
}

pub fn widths(most: usize) -> impl Iterator<Item = usize> {
    [8, 4, 2, 1].into_iter().filter(move |w| *w <= most)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(offset: usize, dims: &[usize], strides: &[usize]) -> View {
        View { offset, dtype: DType::BF16, dims: dims.into(), strides: strides.into() }
    }

    #[test]
    fn axes_with_compatible_strides_are_merged() {
        assert_eq!(Walk::new(&[4, 1, 6], &[6, 99, 1]).axes, [(24, 1)]);
        assert_eq!(Walk::new(&[5, 2, 3], &[18, 3, 1]).axes, [(5, 18), (6, 1)]);
        assert_eq!(Walk::new(&[4, 6], &[0, 0]).axes, [(24, 0)]);
        assert_eq!(Walk::new(&[1], &[7]).axes, []);
    }

    #[test]
    fn vectors_need_alignment_at_every_step() {
        let wide = |v: &View| width(&[v], 8);
        assert_eq!(wide(&view(0, &[4, 16], &[16, 1])), 8);
        assert_eq!(wide(&view(8, &[4, 16], &[16, 1])), 4);
        assert_eq!(wide(&view(0, &[4, 16], &[18, 1])), 2);
        assert_eq!(wide(&view(0, &[4, 16], &[17, 1])), 1);
        assert_eq!(wide(&view(0, &[4, 16], &[1, 4])), 1);
        // A dense tensor is one run, but rows of 12 elements allow vectors of 4.
        assert_eq!(
            (wide(&view(0, &[4, 12], &[12, 1])), row_width(&[&view(0, &[4, 12], &[12, 1])], 12)),
            (8, 4)
        );
    }

    #[test]
    fn sources_do_not_depend_on_the_outermost_extent() {
        let at = |rows| Walk::of(&view(0, &[rows, 5], &[8, 1])).function("at", "u32");
        assert_eq!(at(3), at(7));
        assert!(at(3).contains("at += (i64)(e % 5u) * 1;\n    e /= 5u;\n    at += (i64)e * 8;"), "{}", at(3));
    }
}
