//! The location of one of our weights in another library's tensor.

use std::ops::Range;

use flatout_ir::bicubic;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Our path.
    pub ours: String,
    /// The tensor's name.
    pub theirs: String,
    /// The tensor's extents.
    pub dims: Vec<usize>,
    pub within: Within,
}

/// The elements of the tensor that form our weight, and their order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Within {
    /// All of them in order; extents of 1 may differ.
    Whole,
    /// These of the last axis, which holds several weights side by side. If `transposed`, the tensor is [in, out] and ours
    /// [out, in].
    Columns { transposed: bool, columns: Range<usize> },
    /// These of the first axis, which holds several weights one after the other.
    Rows(Range<usize>),
    /// The tensor is [out, channels, height, width] and ours [out, height width channels]; with a time axis before the height
    /// ours is [out, time height width channels].
    ChannelsLast,
}

impl Stored {
    /// A tensor that equals our weight.
    pub fn whole(ours: impl Into<String>, theirs: impl Into<String>, dims: Vec<usize>) -> Stored {
        Stored { ours: ours.into(), theirs: theirs.into(), dims, within: Within::Whole }
    }

    /// Whether the tensor equals our weight element by element.
    pub fn is_whole(&self) -> bool {
        match &self.within {
            Within::Whole => true,
            Within::Columns { transposed, columns } => {
                !transposed && *columns == (0..self.dims[self.dims.len() - 1])
            }
            Within::Rows(rows) => *rows == (0..self.dims[0]),
            Within::ChannelsLast => false,
        }
    }

    /// Extracts our values from the tensor's.
    pub fn take<T: Copy>(&self, theirs: &[T]) -> Vec<T> {
        self.places().map(|place| theirs[place]).collect()
    }

    /// Writes our values into the tensor's.
    pub fn put<T: Copy>(&self, ours: &[T], theirs: &mut [T]) {
        self.places().zip(ours).for_each(|(place, value)| theirs[place] = *value);
    }

    /// Index in the tensor of each of our elements, in order.
    pub fn places(&self) -> Box<dyn Iterator<Item = usize>> {
        let all: usize = self.dims.iter().product();
        match &self.within {
            Within::Whole => Box::new(0..all),
            Within::Columns { transposed, columns } => {
                let width = self.dims[self.dims.len() - 1];
                let (rows, first, count) = (all / width, columns.start, columns.len());
                let transposed = *transposed;
                Box::new((0..rows * count).map(move |i| match transposed {
                    true => (i % rows) * width + first + i / rows,
                    false => (i / count) * width + first + i % count,
                }))
            }
            Within::Rows(rows) => {
                let width = all / self.dims[0];
                Box::new(rows.start * width..rows.end * width)
            }
            Within::ChannelsLast => {
                let [out, channels] = [self.dims[0], self.dims[1]];
                let pixels = all / (out * channels);
                Box::new((0..all).map(move |i| {
                    let (o, pixel, channel) = (i / (pixels * channels), i / channels % pixels, i % channels);
                    (o * channels + channel) * pixels + pixel
                }))
            }
        }
    }
}

/// A tensor of positions, `[..., prefix + grid, width]`, that is written for another grid than it was learned for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resampled {
    pub theirs: &'static str,
    /// Number of positions of tokens before the patches, which are not resampled.
    pub prefix: usize,
    pub from: [usize; 2],
    pub to: [usize; 2],
    pub antialias: bool,
}

impl Resampled {
    /// The extents of the written tensor, from those it was learned with.
    pub fn dims(&self, learned: &[usize]) -> Vec<usize> {
        let mut dims = learned.to_vec();
        let rows = dims.len() - 2;
        dims[rows] = self.prefix + self.to[0] * self.to[1];
        dims
    }

    /// The positions of the new grid.
    pub fn apply(&self, learned: &[f32], width: usize) -> Vec<f32> {
        let (first, grid) = learned.split_at(self.prefix * width);
        let matrix = bicubic::matrix(self.from, self.to, self.antialias);
        let mut all = first.to_vec();
        for weights in matrix.chunks_exact(self.from[0] * self.from[1]) {
            let mut row = vec![0f64; width];
            for (weight, learned) in weights.iter().zip(grid.chunks_exact(width)) {
                row.iter_mut().zip(learned).for_each(|(sum, x)| *sum += weight * *x as f64);
            }
            all.extend(row.iter().map(|sum| *sum as f32));
        }
        all
    }
}

/// Asserts that every parameter of a graph has one location of its size, and that the locations fill their tensors. Returns the
/// number of tensors.
#[cfg(test)]
pub(super) fn assert_filled(graph: &flatout_ir::Graph, table: &[Stored]) -> usize {
    let mut filled: std::collections::BTreeMap<&str, Vec<usize>> = Default::default();
    let parameters: Vec<_> = graph.slots.iter().filter(|slot| slot.class.is_parameter()).collect();
    for slot in &parameters {
        let at =
            table.iter().find(|stored| stored.ours == slot.path).unwrap_or_else(|| panic!("{}", slot.path));
        assert_eq!(at.places().count(), slot.ty.elements(), "{}", slot.path);
        let tensor = filled.entry(&at.theirs).or_insert_with(|| vec![0; at.dims.iter().product()]);
        at.places().for_each(|place| tensor[place] += 1);
    }
    assert_eq!(parameters.len(), table.len());
    assert!(filled.values().flatten().all(|times| *times == 1));
    filled.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(dims: &[usize], within: Within) -> Stored {
        Stored { within, ..Stored::whole("ours", "theirs", dims.to_vec()) }
    }

    #[test]
    fn taken_values_can_be_put_back() {
        let cases = [
            (of(&[2, 3], Within::Whole), vec![0, 1, 2, 3, 4, 5]),
            (of(&[3, 2], Within::Rows(1..3)), vec![2, 3, 4, 5]),
            (of(&[2, 3], Within::Columns { transposed: false, columns: 1..3 }), vec![1, 2, 4, 5]),
            (of(&[2, 3], Within::Columns { transposed: true, columns: 1..3 }), vec![1, 4, 2, 5]),
            (of(&[1, 2, 2, 1, 2], Within::ChannelsLast), vec![0, 4, 1, 5, 2, 6, 3, 7]),
            (of(&[2, 3, 1, 2], Within::ChannelsLast), vec![0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]),
        ];
        for (stored, wanted) in cases {
            let theirs: Vec<usize> = (0..stored.dims.iter().product()).collect();
            let ours = stored.take(&theirs);
            assert_eq!(ours, wanted, "{stored:?}");
            let mut back = vec![usize::MAX; theirs.len()];
            stored.put(&ours, &mut back);
            assert!(wanted.iter().all(|place| back[*place] == *place), "{stored:?}");
            assert_eq!(stored.is_whole(), matches!(stored.within, Within::Whole));
        }
        assert!(of(&[3, 2], Within::Rows(0..3)).is_whole());
    }
}
