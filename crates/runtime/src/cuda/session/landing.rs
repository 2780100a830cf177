//! Landing areas: staging copies of the inputs, so that the host can write while a plan still reads the previous ones.
//!
//! The areas lie next to the inputs in the arena and are used round-robin. The host writes into the current area while a plan
//! may still be reading the inputs; before the next plan, the writes are copied into the inputs on the plans' own stream, and
//! the next area becomes current. So the addresses that plans read stay fixed, and an area is only overwritten after it was
//! copied.

use std::ops::Range;

/// Slots begin at multiples of this; the padding after a slot is unused.
const ALIGN: usize = 256;

/// Tracks which bytes of which area were written since the last run. Moves no bytes itself.
pub struct Landing {
    /// The arena range of the inputs.
    inputs: Range<usize>,
    /// Offset of each area in the arena.
    areas: Vec<usize>,
    turn: usize,
    /// Written but not yet copied, as ranges of the inputs: sorted and disjoint.
    fresh: Vec<Range<usize>>,
}

impl Landing {
    pub fn new(inputs: Range<usize>, areas: Vec<usize>) -> Landing {
        Landing { inputs, areas, turn: 0, fresh: vec![] }
    }

    /// Index of the current area.
    pub fn turn(&self) -> usize {
        self.turn
    }

    /// The address to write to instead of `range` of the arena; `None` if it is written in place.
    pub fn redirect(&self, range: &Range<usize>) -> Option<usize> {
        let is_input = self.inputs.start <= range.start && range.end <= self.inputs.end;
        let area = self.areas.get(self.turn)?;
        is_input.then(|| area + range.start - self.inputs.start)
    }

    pub fn is_empty(&self) -> bool {
        self.fresh.is_empty()
    }

    /// Records a write. Adjacent ranges are merged, so that the inputs of a step become one copy.
    pub fn add(&mut self, range: &Range<usize>) {
        let mut start = range.start;
        let mut end = range.end.next_multiple_of(ALIGN).min(self.inputs.end);
        self.fresh.retain(|other| {
            let meets = other.start <= end && start <= other.end;
            if meets {
                (start, end) = (start.min(other.start), end.max(other.end));
            }
            !meets
        });
        let at = self.fresh.partition_point(|other| other.start < start);
        self.fresh.insert(at, start..end);
    }

    /// The copies to make: source offset and destination range.
    pub fn moves(&self) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        let area = self.areas.get(self.turn).copied().unwrap_or(0);
        self.fresh.iter().map(move |range| (area + range.start - self.inputs.start, range.clone()))
    }

    /// Call after the copies: moves on to the next area.
    pub fn advance(&mut self) {
        self.fresh.clear();
        self.turn = (self.turn + 1) % self.areas.len().max(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_are_redirected_to_the_areas_in_turn() {
        let mut landing = Landing::new(1024..2048, vec![2048, 3072]);
        assert_eq!(landing.redirect(&(1280..1300)), Some(2304));
        assert_eq!(landing.redirect(&(0..16)), None, "a weight");
        assert_eq!(landing.redirect(&(2000..2100)), None, "behind the inputs");
        landing.add(&(1280..1300));
        assert_eq!(landing.moves().collect::<Vec<_>>(), [(2304, 1280..1536)]);
        landing.advance();
        assert!(landing.is_empty());
        assert_eq!(landing.redirect(&(1280..1300)), Some(3328));
        landing.advance();
        assert_eq!(landing.redirect(&(1024..1025)), Some(2048));
    }

    #[test]
    fn adjacent_writes_merge_in_any_order() {
        let slots = [1024..1100, 1280..1284, 1536..1700, 1792..2048];
        for order in [[0, 1, 2, 3], [3, 1, 0, 2], [2, 0, 3, 1]] {
            let mut landing = Landing::new(1024..2048, vec![4096]);
            order.iter().for_each(|&i| landing.add(&slots[i]));
            assert_eq!(landing.moves().collect::<Vec<_>>(), [(4096, 1024..2048)], "{order:?}");
        }
        let mut apart = Landing::new(1024..2048, vec![4096]);
        apart.add(&slots[3]);
        apart.add(&slots[0]);
        apart.add(&slots[0]);
        assert_eq!(apart.moves().collect::<Vec<_>>(), [(4096, 1024..1280), (4864, 1792..2048)]);
    }

    #[test]
    fn without_areas_everything_goes_in_place() {
        let landing = Landing::new(0..512, vec![]);
        assert_eq!((landing.redirect(&(0..4)), landing.moves().count()), (None, 0));
    }
}
