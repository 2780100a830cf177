//! The positions of matrices in a piece, for update rules that need all elements of a matrix, grouped by repeated layers.

/// A matrix of a piece, row by row. Its rows are the outputs of the layer that it belongs to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Matrix {
    /// Index of its first element in the piece.
    pub start: usize,
    pub rows: usize,
    pub columns: usize,
}

/// Layers with equal matrices at equal distances.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Run<'a> {
    /// Index of the first element of the first layer.
    pub start: usize,
    /// Elements from one layer to the next.
    pub distance: usize,
    pub count: usize,
    pub matrices: &'a [Matrix],
}

impl Run<'_> {
    /// The matrices of the first `count` layers, as layers of a piece of their own.
    pub fn layers(&self, count: usize) -> Vec<Vec<Matrix>> {
        let at = |layer: usize| {
            let moved =
                |own: &Matrix| Matrix { start: own.start - self.start + layer * self.distance, ..*own };
            self.matrices.iter().map(moved).collect()
        };
        (0..count).map(at).collect()
    }
}

/// Groups consecutive layers that repeat one another. A run ends where the next begins; the last ends with the piece, which has
/// `elements` elements.
pub fn runs(layers: &[Vec<Matrix>], elements: usize) -> Vec<Run<'_>> {
    let start = |layer: usize| layers.get(layer).map_or(elements, |matrices| matrices[0].start);
    let shape =
        |layer: usize| layers[layer].iter().map(move |own| (own.start - start(layer), own.rows, own.columns));
    let mut runs: Vec<Run> = vec![];
    for (layer, matrices) in layers.iter().enumerate() {
        let distance = start(layer + 1) - start(layer);
        match runs.last_mut() {
            Some(run) if run.distance == distance && shape(layer - 1).eq(shape(layer)) => run.count += 1,
            _ => runs.push(Run { start: start(layer), distance, count: 1, matrices }),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_layers_form_runs() {
        let matrix = |start, rows, columns| Matrix { start, rows, columns };
        let layer = |at: usize| vec![matrix(at, 3, 4), matrix(at + 16, 2, 2)];
        let other = vec![matrix(64, 5, 2)];
        let layers = [layer(0), layer(32), other.clone(), layer(80)];
        let found = runs(&layers, 112);
        assert_eq!(
            found,
            [
                Run { start: 0, distance: 32, count: 2, matrices: &layer(0) },
                Run { start: 64, distance: 16, count: 1, matrices: &other },
                Run { start: 80, distance: 32, count: 1, matrices: &layer(80) },
            ]
        );
        assert_eq!(found[2].layers(2), [layer(0), layer(32)]);
    }
}
