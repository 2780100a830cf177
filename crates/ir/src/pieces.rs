//! Pieces of tensors: which elements of every parameter and saved tensor a rank holds, and which of them it writes.
//!
//! A tensor has one name, type and shape, whatever the number of ranks. A rank holds ranges of its elements, counted in
//! row-major order; ranges of one tensor on two ranks are equal or disjoint. State that is replicated on several ranks is
//! divided by bytes, so that, together with the state that only one rank holds, every rank writes as equal an amount as
//! possible. A tensor may be divided at any element.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use crate::graph::{Class, Init};
use crate::mesh::Axis;
use crate::passes::types::base::{self, Codes};
use crate::plan::{PlacedSlot, PlanSet};
use crate::types::{DType, TensorType};

/// A range of the elements of a tensor, and the slot that holds it.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorRange {
    /// The name of the tensor in checkpoints.
    pub path: String,
    pub ty: TensorType,
    pub class: Class,
    pub init: Init,
    /// Elements of the tensor, in row-major order.
    pub range: Range<usize>,
    pub slot: String,
    /// Index of the first of them in the slot.
    pub at: usize,
}

impl TensorRange {
    /// The format of the codes in its slot, where it is a weight stored as codes, which is written and read as a whole
    /// (`passes::base`).
    pub fn codes(&self) -> Option<Codes> {
        base::weight_of_codes(&self.slot).filter(|(_, weight)| *weight == self.path).map(|(codes, _)| codes)
    }

    /// Whether it is the tensor with all its elements.
    pub fn is_whole(&self) -> bool {
        self.range == (0..self.ty.elements())
    }

    pub fn elements(&self) -> usize {
        self.range.len()
    }

    /// The bytes of its elements in the slot.
    pub fn bytes(&self) -> usize {
        self.elements() * self.ty.dtype.bytes()
    }

    /// The range of its elements within the slot.
    pub fn within(&self) -> Range<usize> {
        self.at..self.at + self.elements()
    }

    /// The type of its elements in checkpoints.
    pub fn saved_dtype(&self) -> DType {
        saved_dtype(self.ty.dtype)
    }

    /// The bytes of its elements in a checkpoint.
    pub fn saved_bytes(&self) -> usize {
        self.elements() * self.saved_dtype().bytes()
    }

    /// The part of it that covers a range of the tensor's elements; `None` unless it holds all of them.
    pub fn covering(&self, range: &Range<usize>) -> Option<TensorRange> {
        let has = self.range.start <= range.start && range.end <= self.range.end;
        has.then(|| self.part(range.start - self.range.start..range.end - self.range.start))
    }

    /// A part of it; `of` counts from its first element.
    pub fn part(&self, of: Range<usize>) -> TensorRange {
        let range = self.range.start + of.start..self.range.start + of.end;
        TensorRange { range, at: self.at + of.start, ..self.clone() }
    }
}

/// The type of a slot's elements in checkpoints: 8-bit moments are saved as their decoded values, which are exact in bf16.
pub fn saved_dtype(dtype: DType) -> DType {
    match dtype {
        DType::E4M3 | DType::E4M4 => DType::BF16,
        other => other,
    }
}

/// A tensor of which each rank of a shard group holds a range. Ranks divide a flat bucket into shares of equal size. Tensors
/// lie in it one after the other, so a share may begin inside one tensor and end inside another.
#[derive(Clone, Debug, PartialEq)]
pub struct Sharded {
    pub path: String,
    pub ty: TensorType,
    pub class: Class,
    pub init: Init,
    /// The slot that holds a rank's shares of buckets.
    pub slot: String,
    /// Index of the tensor's first element in its bucket.
    pub start: usize,
    /// Index in the slot of the first element of a rank's share of the bucket.
    pub at: usize,
    /// Number of elements of the bucket that each rank holds.
    pub share: usize,
    /// Number of slots before the tensor, so that `held` has the same order whether or not ranks divide it.
    pub before: usize,
}

impl Sharded {
    /// The piece of the rank at a coordinate along the shard axis; empty where its share has no element of the tensor.
    fn piece(&self, coordinate: usize) -> TensorRange {
        let Sharded { path, ty, class, init, slot, start, at, share, .. } = self.clone();
        let [begins, ends] = [0, 1].map(|next| (coordinate + next) * share);
        let [from, to] = [begins, ends].map(|at| at.clamp(start, start + ty.elements()));
        let at = at + from.saturating_sub(begins).min(share);
        TensorRange { path, ty, class, init, range: from - start..to - start, slot, at }
    }
}

impl PlanSet {
    /// The parameters and saved tensors that a rank holds, in the order of slots. Pieces of a divided tensor may be empty. A
    /// weight that is stored as codes is a piece of its values in f32, in the slot of its codes.
    pub fn held(&self, rank: usize) -> Vec<TensorRange> {
        let coordinate = self.mesh.coordinate(rank, Axis::Shard);
        let mut pieces: Vec<(usize, TensorRange)> =
            self.sharded.iter().map(|sharded| (2 * sharded.before, sharded.piece(coordinate))).collect();
        let is_held =
            |slot: &PlacedSlot| !slot.is_whole && (slot.class.is_saved() || slot.class.is_parameter());
        for (number, slot) in self.slots.iter().enumerate().filter(|(_, slot)| is_held(slot)) {
            let PlacedSlot { path, ty, class, init, .. } = slot.clone();
            if base::is_beside_codes(&path) {
                continue;
            }
            let slot = path.clone();
            // A weight that is stored as codes appears under its own name, with the type of its values.
            let (path, ty) = match base::weight_of_codes(&path) {
                Some((codes, weight)) => {
                    let [rows, columns] = [ty.dims[0], codes.packed() * ty.dims[1]];
                    (weight.into(), TensorType::new(DType::F32, [rows, columns]))
                }
                None => (path, ty),
            };
            let range = 0..ty.elements();
            pieces.push((2 * number + 1, TensorRange { path, ty, class, init, range, slot, at: 0 }));
        }
        pieces.sort_by_key(|(place, _)| *place);
        pieces.into_iter().map(|(_, piece)| piece).collect()
    }

    /// Every saved tensor with its type, whichever ranks hold it.
    pub fn saved(&self) -> Vec<(String, TensorType)> {
        let mut known = HashSet::new();
        let all = self.owners().into_iter().flatten();
        all.filter(|piece| known.insert(piece.path.clone())).map(|piece| (piece.path, piece.ty)).collect()
    }

    /// The pieces that a rank writes into a checkpoint.
    pub fn owned(&self, rank: usize) -> Vec<TensorRange> {
        self.owners().swap_remove(rank)
    }

    /// The pieces that each rank writes into a checkpoint: together each element of every saved tensor once.
    pub fn owners(&self) -> Vec<Vec<TensorRange>> {
        divided(&(0..self.mesh.ranks()).map(|rank| self.at_hand(rank)).collect::<Vec<_>>())
    }

    /// The saved pieces whose values a rank can read between updates: those it holds. Of a sharded weight it has all elements
    /// if layers read the weight in its saved type, because that copy is gathered from the shards.
    pub fn at_hand(&self, rank: usize) -> Vec<TensorRange> {
        let is_gathered = |slot: &&PlacedSlot| slot.class == Class::Derived && !slot.is_whole;
        let gathered: HashMap<&str, &TensorType> =
            self.slots.iter().filter(is_gathered).map(|slot| (slot.path.as_str(), &slot.ty)).collect();
        let saved = self.held(rank).into_iter().filter(|piece| piece.class.is_saved());
        let whole = |piece: TensorRange| match gathered.get(piece.path.as_str()) {
            Some(ty) if **ty == piece.ty => {
                TensorRange { range: 0..piece.ty.elements(), slot: piece.path.clone(), at: 0, ..piece }
            }
            _ => piece,
        };
        saved.map(whole).collect()
    }
}

/// Divides pieces among the ranks that hold them: of pieces that several ranks hold, those ranks with fewer bytes of their own
/// get more, so that all write equal amounts where that is possible. A tensor without elements belongs to the first rank that
/// holds it.
fn divided(held: &[Vec<TensorRange>]) -> Vec<Vec<TensorRange>> {
    let has_any = |piece: &&TensorRange| piece.elements() > 0 || piece.is_whole();
    let held: Vec<Vec<&TensorRange>> =
        held.iter().map(|pieces| pieces.iter().filter(has_any).collect()).collect();
    let mut holders: HashMap<(&str, usize), Vec<usize>> = HashMap::new();
    for (rank, pieces) in held.iter().enumerate() {
        for piece in pieces {
            holders.entry(key(piece)).or_default().push(rank);
        }
    }
    // The bytes that each group of ranks holds in common, in the order of first appearance, and the start of each range among
    // them.
    let mut totals: HashMap<&[usize], usize> = HashMap::new();
    let mut starts: HashMap<(&str, usize), (usize, &TensorRange)> = HashMap::new();
    for piece in held.iter().flatten().copied() {
        let total = totals.entry(&holders[&key(piece)]).or_default();
        let (_, first) = *starts.entry(key(piece)).or_insert_with(|| {
            *total += piece.saved_bytes();
            (*total - piece.saved_bytes(), piece)
        });
        assert_eq!(first.range, piece.range, "ranks have other ranges of {}", piece.path);
    }
    // State that fewer ranks hold comes first, because it has fewer possible writers.
    let mut groups: Vec<(&[usize], usize)> = totals.into_iter().collect();
    groups.sort_unstable_by_key(|(ranks, _)| (ranks.len(), *ranks));
    let mut loads = vec![0; held.len()];
    let mut ends: HashMap<&[usize], Vec<usize>> = HashMap::new();
    for (ranks, total) in groups {
        let shares = filled(&ranks.iter().map(|rank| loads[*rank]).collect::<Vec<_>>(), total);
        ranks.iter().zip(&shares).for_each(|(rank, share)| loads[*rank] += share);
        let end = |sum: &mut usize, share: usize| {
            *sum += share;
            Some(*sum)
        };
        ends.insert(ranks, std::iter::once(0).chain(shares.into_iter().scan(0, end)).collect());
    }
    let share = |rank: usize, piece: &TensorRange| {
        let ranks = holders[&key(piece)].as_slice();
        let (ends, (start, _)) = (&ends[ranks], starts[&key(piece)]);
        // The first element after the shares of the first `count` ranks of the group.
        let cut = |some: usize| {
            let byte = ends[some].saturating_sub(start);
            byte.div_ceil(piece.saved_dtype().bytes()).min(piece.elements())
        };
        let number = ranks.iter().position(|other| *other == rank).expect("a rank that has it");
        let of = cut(number)..cut(number + 1);
        (!of.is_empty() || (number == 0 && piece.elements() == 0)).then(|| piece.part(of))
    };
    let owned = |(rank, pieces): (usize, &Vec<&TensorRange>)| {
        pieces.iter().filter_map(|piece| share(rank, piece)).collect::<Vec<TensorRange>>()
    };
    held.iter().enumerate().map(owned).collect()
}

/// Shares of `total` that make the loads as equal as possible, by raising the lowest first.
fn filled(loads: &[usize], total: usize) -> Vec<usize> {
    let mut lowest: Vec<usize> = (0..loads.len()).collect();
    lowest.sort_by_key(|rank| loads[*rank]);
    let sum = |count: usize| total + lowest[..count].iter().map(|rank| loads[*rank]).sum::<usize>();
    let is_below = |count: &usize| loads[lowest[*count - 1]] * count <= sum(*count);
    let count = (1..=loads.len()).rev().find(is_below).expect("the lowest alone is below itself");
    let level = |some: usize| sum(count) * some / count;
    let mut below = lowest[..count].to_vec();
    below.sort_unstable();
    let mut shares = vec![0; loads.len()];
    for (some, rank) in below.into_iter().enumerate() {
        shares[rank] = level(some + 1) - level(some) - loads[rank];
    }
    shares
}

/// The identity of a range of one tensor: ranges differ in where they begin.
fn key(piece: &TensorRange) -> (&str, usize) {
    (&piece.path, piece.range.start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Mesh;
    use crate::plan::View;

    fn piece(path: &str, dtype: DType, of: usize, range: Range<usize>) -> TensorRange {
        let (ty, slot) = (TensorType::new(dtype, [of]), format!("slot of {path}"));
        TensorRange { path: path.into(), ty, class: Class::Weight, init: Init::Zeros, range, slot, at: 0 }
    }

    /// The ranges of a tensor in these pieces, in order.
    fn covered(owned: &[Vec<TensorRange>], path: &str) -> Vec<Range<usize>> {
        let mut ranges: Vec<_> =
            owned.iter().flatten().filter(|p| p.path == path).map(|p| p.range.clone()).collect();
        ranges.sort_by_key(|range| range.start);
        ranges
    }

    #[test]
    fn replicas_write_equal_bytes_wherever_tensors_end() {
        let of =
            [(DType::F32, 4_096), (DType::E4M3, 3_001), (DType::BF16, 77), (DType::I32, 1), (DType::F32, 70)];
        let held: Vec<TensorRange> =
            of.iter().enumerate().map(|(i, (dtype, n))| piece(&i.to_string(), *dtype, *n, 0..*n)).collect();
        let total: usize = held.iter().map(TensorRange::saved_bytes).sum();
        for ranks in [1, 2, 3, 4, 7, 8] {
            let owned = divided(&vec![held.clone(); ranks]);
            for (rank, pieces) in owned.iter().enumerate() {
                let bytes: usize = pieces.iter().map(TensorRange::saved_bytes).sum();
                assert!(bytes.abs_diff(total / ranks) <= 4, "rank {rank} of {ranks}: {bytes} of {total}");
                assert!(pieces.iter().all(|piece| piece.at == piece.range.start && piece.elements() > 0));
            }
            for whole in &held {
                let mut end = 0;
                for range in covered(&owned, &whole.path) {
                    assert_eq!(range.start, end, "{} over {ranks}", whole.path);
                    end = range.end;
                }
                assert_eq!(end, whole.elements());
            }
        }
        assert!(divided(&vec![held.clone(); 1])[0] == held, "one rank writes whole tensors");
    }

    #[test]
    fn a_rank_writes_its_own_state_and_its_share_of_shared_state() {
        // Two replicas of two shards, and a vector that all ranks hold.
        let shard = |shard: usize| {
            let sharded = TensorRange { at: 7, ..piece("w", DType::F32, 80, 40 * shard..40 * shard + 40) };
            vec![sharded, piece("b", DType::F32, 8, 0..8), piece("none", DType::F32, 9, 3..3)]
        };
        let owned = divided(&[shard(0), shard(1), shard(0), shard(1)]);
        let of = |rank: usize, i: usize| (owned[rank][i].range.clone(), owned[rank][i].at);
        assert_eq!([of(0, 0), of(1, 0)], [(0..20, 7), (40..60, 7)]);
        assert_eq!([of(2, 0), of(3, 0)], [(20..40, 27), (60..80, 27)]);
        assert_eq!([of(0, 1), of(1, 1), of(2, 1), of(3, 1)], [(0..2, 0), (2..4, 2), (4..6, 4), (6..8, 6)]);
        assert!(owned.iter().all(|pieces| pieces.len() == 2));
        let alone = divided(&[shard(0), shard(1)]);
        assert_eq!(covered(&alone, "w"), [0..40, 40..80]);
    }

    #[test]
    fn ranks_with_less_state_of_their_own_write_more_shared_state() {
        assert_eq!(filled(&[0, 0, 0], 10), [3, 3, 4]);
        assert_eq!(filled(&[5, 5, 5], 10), [3, 3, 4]);
        assert_eq!(filled(&[5, 0, 3], 4), [0, 3, 1]);
        assert_eq!(filled(&[5, 0, 3], 100), [31, 36, 33]);
        assert_eq!(filled(&[9, 2, 2], 0), [0, 0, 0]);
        for seed in 0..200u32 {
            let drawn = crate::random::philox([seed, 0, 0, 0], [1, 2]);
            let loads: Vec<usize> = drawn.iter().map(|x| *x as usize % 50).collect();
            let total = seed as usize;
            let shares = filled(&loads, total);
            assert_eq!(shares.iter().sum::<usize>(), total, "{loads:?}");
            let level = loads.iter().zip(&shares).filter(|(_, share)| **share > 0);
            let level: Vec<usize> = level.map(|(load, share)| load + share).collect();
            if let (Some(low), Some(high)) = (level.iter().min(), level.iter().max()) {
                assert!(high - low <= 1, "{loads:?} {shares:?}");
                let untouched = loads.iter().zip(&shares).filter(|(_, share)| **share == 0);
                assert!(untouched.clone().all(|(load, _)| load + 1 >= *low), "{loads:?} {shares:?}");
            }
        }
        // A share of 40 elements and one of 30, and a vector of 20 that both ranks hold.
        let shard =
            |range: Range<usize>| vec![piece("w", DType::F32, 70, range), piece("b", DType::F32, 20, 0..20)];
        let owned = divided(&[shard(0..40), shard(40..70)]);
        assert_eq!(covered(&owned, "b"), [0..5, 5..20]);
        let bytes = |pieces: &Vec<TensorRange>| pieces.iter().map(TensorRange::saved_bytes).sum::<usize>();
        assert_eq!(owned.iter().map(bytes).collect::<Vec<_>>(), [180, 180]);
    }

    #[test]
    fn a_share_may_begin_and_end_inside_a_tensor() {
        // Ten elements from the sixth on of a bucket of which three ranks have six each.
        let ty = TensorType::new(DType::F32, [5, 2]);
        let (path, slot) = ("w".to_string(), "shard".to_string());
        let sharded = Sharded {
            path,
            ty,
            class: Class::Weight,
            init: Init::Zeros,
            slot,
            start: 5,
            at: 100,
            share: 6,
            before: 0,
        };
        let pieces = [0, 1, 2].map(|rank| sharded.piece(rank));
        assert_eq!(pieces.each_ref().map(|piece| piece.range.clone()), [0..1, 1..7, 7..10]);
        assert_eq!(pieces.each_ref().map(TensorRange::within), [105..106, 100..106, 100..103]);
        for (start, elements) in [(0, [6, 4, 0]), (12, [0, 0, 6]), (6, [0, 6, 4])] {
            let moved = Sharded { start, ..sharded.clone() };
            assert_eq!([0, 1, 2].map(|rank| moved.piece(rank).elements()), elements);
        }
    }

    #[test]
    fn ranks_divide_saved_state_and_hold_all_of_it() {
        let slot = |path: &str, class: Class, n: usize, is_whole: bool| {
            let ty = TensorType::new(DType::F32, [n]);
            let view = View::dense(0, &ty);
            PlacedSlot { path: path.into(), ty, class, init: Init::Zeros, is_whole, view }
        };
        let slots = vec![
            slot("region", Class::Weight, 96, true),
            slot("w", Class::Weight, 96, false),
            slot("base", Class::Frozen, 10, false),
            slot("grad", Class::Carry, 96, false),
            slot("m", Class::Moment, 32, false),
        ];
        let plans = PlanSet {
            arena_bytes: 0,
            persistent_bytes: 0,
            transient_bytes: 0,
            buffers: vec![],
            slots,
            inputs: 0..0,
            landings: vec![],
            plans: vec![],
            mesh: Mesh::new(2, 1),
            sharded: vec![],
            done: vec![],
        };
        let held = plans.held(1);
        assert_eq!(held.iter().map(|piece| piece.path.as_str()).collect::<Vec<_>>(), ["w", "base", "m"]);
        assert!(held.iter().all(TensorRange::is_whole));
        let owned: Vec<_> =
            plans.owned(1).into_iter().map(|piece| (piece.path.clone(), piece.within())).collect();
        assert_eq!(owned, [("w".to_string(), 64..96), ("m".to_string(), 0..32)]);
        let saved: Vec<_> = plans.saved().into_iter().map(|(path, ty)| (path, ty.elements())).collect();
        assert_eq!(saved, [("w".to_string(), 96), ("m".to_string(), 32)]);
        // Weights that two ranks divide and layers read in their saved type are written by both; moments by the rank that holds
        // them.
        let sharded = |path: &str, class: Class| Sharded {
            path: path.into(),
            ty: TensorType::new(DType::F32, [96]),
            class,
            init: Init::Zeros,
            slot: format!("{path}.shard"),
            start: 0,
            at: 0,
            share: 64,
            before: 0,
        };
        let slots = vec![slot("w", Class::Derived, 96, false), slot("b", Class::Weight, 4, false)];
        let shared = PlanSet {
            slots,
            mesh: Mesh::new(1, 2),
            sharded: vec![sharded("w", Class::Weight), sharded("m", Class::Moment)],
            ..plans.clone()
        };
        let place = |piece: TensorRange| (piece.slot.clone(), piece.range.clone(), piece.at);
        let owned = [0, 1].map(|rank| shared.owned(rank).into_iter().map(place).collect::<Vec<_>>());
        assert_eq!(owned[0], [("w".to_string(), 0..34, 0), ("m.shard".to_string(), 0..64, 0)]);
        let rest =
            [("w".to_string(), 34..96, 34), ("m.shard".to_string(), 64..96, 0), ("b".to_string(), 0..4, 0)];
        assert_eq!(owned[1], rest);
        let seen = held[0].covering(&(64..96)).unwrap();
        assert_eq!((seen.within(), seen.part(1..3).range), (64..96, 65..67));
        assert_eq!(seen.covering(&(60..70)), None);
    }
}
