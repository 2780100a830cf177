//! The mesh of ranks: the number of ranks along each axis, and the coordinates of each rank.
//!
//! Plans are the same on every rank, so nothing in them depends on a coordinate. A collective names its axis and exchanges
//! within the group of ranks that differ from one another along this axis alone.

use std::fmt;

use crate::attr::named;

named! {
    /// An axis of the mesh of ranks, named after what its ranks divide.
    pub enum Axis {
        /// Rows; each rank holds all that its shard group holds.
        Replica = "replica",
        /// Rows, and the optimiser's state, gradients or parameters.
        Shard = "shard",
        /// Tokens of a row.
        Context = "context",
        /// Columns of weights.
        Tensor = "tensor",
        Stage = "stage",
    }
}

/// Ranks are numbered with the coordinate of the last axis running fastest, so that replicas are outermost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mesh {
    /// In the order of `Axis::ALL`.
    extents: [usize; 5],
}

impl Mesh {
    pub const ONE: Mesh = Mesh { extents: [1; 5] };

    /// A mesh whose ranks all have rows of their own: replicas of groups of shards.
    ///
    /// # Panics
    /// If either number is 0.
    pub fn new(replicas: usize, shards: usize) -> Mesh {
        assert!(replicas > 0 && shards > 0, "a mesh of {replicas} x {shards} has no rank");
        Mesh { extents: [replicas, shards, 1, 1, 1] }
    }

    pub fn ranks(&self) -> usize {
        self.extents.iter().product()
    }

    pub fn ways(&self, axis: Axis) -> usize {
        self.extents[axis as usize]
    }

    /// The axes of more than one rank along which rows are divided, the innermost first: sums along one after the other equal
    /// those of one balanced tree over all these ranks.
    pub fn axes_of_rows(&self) -> impl Iterator<Item = Axis> + use<> {
        let mesh = *self;
        [Axis::Shard, Axis::Replica].into_iter().filter(move |axis| mesh.ways(*axis) > 1)
    }

    /// Number of ranks with rows of their own.
    pub fn ranks_of_rows(&self) -> usize {
        self.axes_of_rows().map(|axis| self.ways(axis)).product()
    }

    pub fn coordinate(&self, rank: usize, axis: Axis) -> usize {
        rank / self.stride(axis) % self.ways(axis)
    }

    /// The ranks that differ from this one along the given axis alone, itself included, in the order of their coordinates.
    pub fn group(&self, rank: usize, axis: Axis) -> Vec<usize> {
        let stride = self.stride(axis);
        let first = rank - self.coordinate(rank, axis) * stride;
        (0..self.ways(axis)).map(|at| first + at * stride).collect()
    }

    /// The distance between the numbers of neighbours along an axis.
    pub(crate) fn stride(&self, axis: Axis) -> usize {
        self.extents[axis as usize + 1..].iter().product()
    }
}

impl Default for Mesh {
    fn default() -> Self {
        Mesh::ONE
    }
}

/// The mesh as plans print it: `replica 2 shard 4`, listing the axes of more than one rank.
impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let several = Axis::ALL.iter().filter(|axis| self.ways(**axis) > 1);
        let words: Vec<String> =
            several.map(|axis| format!("{} {}", axis.name(), self.ways(*axis))).collect();
        f.write_str(if words.is_empty() { "one rank".into() } else { words.join(" ") }.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replicas_are_outermost() {
        let mesh = Mesh::new(2, 4);
        assert_eq!((mesh.ranks(), mesh.ranks_of_rows()), (8, 8));
        let coordinates = |axis: Axis| (0..8).map(|rank| mesh.coordinate(rank, axis)).collect::<Vec<_>>();
        assert_eq!(coordinates(Axis::Replica), [0, 0, 0, 0, 1, 1, 1, 1]);
        assert_eq!(coordinates(Axis::Shard), [0, 1, 2, 3, 0, 1, 2, 3]);
        assert_eq!(coordinates(Axis::Tensor), [0; 8]);
        assert_eq!(mesh.group(6, Axis::Shard), [4, 5, 6, 7]);
        assert_eq!(mesh.group(6, Axis::Replica), [2, 6]);
        assert_eq!(mesh.group(6, Axis::Stage), [6]);
        assert_eq!(mesh.axes_of_rows().collect::<Vec<_>>(), [Axis::Shard, Axis::Replica]);
        assert_eq!(mesh.to_string(), "replica 2 shard 4");
        assert_eq!((Mesh::ONE.ranks(), Mesh::ONE.axes_of_rows().count()), (1, 0));
        assert_eq!(Mesh::ONE.to_string(), "one rank");
    }
}
