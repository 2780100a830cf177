//! Keeps rows that share an image, directly or through other rows, on the same side of the split.

use std::collections::HashMap;

use crate::random::key;

/// Mixed into the hashes of images, so that they do not coincide with hashes of texts.
const IMAGES: u64 = 0x696d_6167;

/// The hash that decides the side of every row. Rows that are connected by images have the same one, in whatever order they
/// come; a row without images has its own. Each row is given as its own hash and those of its images.
pub(super) fn sides<'r>(rows: impl Iterator<Item = (u64, &'r [u128])>) -> Vec<u64> {
    let mut numbers: HashMap<u128, usize> = HashMap::new();
    let mut parents: Vec<usize> = Vec::new();
    let mut least: Vec<u64> = Vec::new();
    let mut firsts: Vec<(u64, Option<usize>)> = Vec::new();
    for (own, images) in rows {
        let mut first = None;
        for image in images {
            let number = *numbers.entry(*image).or_insert_with(|| {
                parents.push(parents.len());
                least.push(key(IMAGES, key(*image as u64, (*image >> 64) as u64)));
                parents.len() - 1
            });
            let (one, other) = (root(&mut parents, number), root(&mut parents, first.unwrap_or(number)));
            parents[one.max(other)] = one.min(other);
            least[one.min(other)] = least[one].min(least[other]);
            first = Some(number);
        }
        firsts.push((own, first));
    }
    let side =
        |(own, first): (u64, Option<usize>)| first.map_or(own, |first| least[root(&mut parents, first)]);
    firsts.into_iter().map(side).collect()
}

/// Union-find root of an image, with path halving.
fn root(parents: &mut [usize], mut at: usize) -> usize {
    while parents[at] != at {
        parents[at] = parents[parents[at]];
        at = parents[at];
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(rows: &[(u64, Vec<u128>)]) -> Vec<u64> {
        sides(rows.iter().map(|(own, images)| (*own, images.as_slice())))
    }

    #[test]
    fn connected_rows_have_one_hash_in_any_order() {
        let rows = [
            (1, vec![10]),
            (2, vec![20, 30]),
            (3, vec![]),
            (4, vec![30, 10]),
            (5, vec![40, 40]),
            (6, vec![]),
        ];
        let found = of(&rows);
        assert!(found[0] == found[1] && found[1] == found[3], "connected by way of others: {found:?}");
        assert!(found[4] != found[0] && (found[2], found[5]) == (3, 6));
        for turn in 1..rows.len() {
            let mut turned = rows.to_vec();
            turned.rotate_left(turn);
            let mut other = of(&turned);
            other.rotate_right(turn);
            assert_eq!(other, found, "turned by {turn}");
        }
        let backwards: Vec<_> = rows.iter().rev().cloned().collect();
        assert_eq!(of(&backwards).into_iter().rev().collect::<Vec<_>>(), found);
    }
}
