//! The encodings DELTA_LENGTH_BYTE_ARRAY, DELTA_BYTE_ARRAY and DELTA_BINARY_PACKED.

use std::ops::Range;

use super::levels::varint;

/// Ranges of `count` strings whose lengths are at `at` and whose bytes follow. `None` where the data are invalid.
pub(super) fn lengths(bytes: &[u8], at: usize, count: usize) -> Option<Vec<Range<u32>>> {
    let mut at = at;
    let lengths = integers(bytes, &mut at, count)?;
    let mut places = Vec::with_capacity(lengths.len());
    for len in lengths {
        let end = at.checked_add(usize::try_from(len).ok()?).filter(|end| *end <= bytes.len())?;
        places.push(at as u32..end as u32);
        at = end;
    }
    Some(places)
}

/// Decodes `count` strings, each of which shares a prefix with the previous one. At most `most` bytes.
pub(super) fn prefixed(
    bytes: &[u8],
    at: usize,
    count: usize,
    most: usize,
) -> Option<(Vec<u8>, Vec<Range<u32>>)> {
    let mut at = at;
    let prefixes = integers(bytes, &mut at, count)?;
    let suffixes = lengths(bytes, at, count)?;
    let mut out = Vec::new();
    let mut places: Vec<Range<u32>> = Vec::with_capacity(count);
    for (prefix, suffix) in prefixes.into_iter().zip(suffixes) {
        let last = places.last().map_or(0..0, |place| place.start as usize..place.end as usize);
        let prefix = usize::try_from(prefix).ok().filter(|prefix| *prefix <= last.len())?;
        let start = out.len();
        if start + prefix + suffix.len() > most {
            return None;
        }
        out.extend_from_within(last.start..last.start + prefix);
        out.extend_from_slice(&bytes[suffix.start as usize..suffix.end as usize]);
        places.push(start as u32..out.len() as u32);
    }
    Some((out, places))
}

/// Decodes `count` delta-encoded integers from `at`, which is advanced past them.
pub(super) fn integers(bytes: &[u8], at: &mut usize, count: usize) -> Option<Vec<i64>> {
    let zigzag = |value: u64| (value >> 1) as i64 ^ -((value & 1) as i64);
    let block = usize::try_from(varint(bytes, at)?).ok()?;
    let minis = usize::try_from(varint(bytes, at)?).ok()?;
    let total = usize::try_from(varint(bytes, at)?).ok()?;
    let mut value = zigzag(varint(bytes, at)?);
    let per_mini = block.checked_div(minis)?;
    if total != count || per_mini == 0 || per_mini % 32 != 0 || per_mini * minis != block {
        return None;
    }
    let mut out = Vec::new();
    if count > 0 {
        out.push(value);
    }
    while out.len() < count {
        let least = zigzag(varint(bytes, at)?);
        let widths = bytes.get(*at..at.checked_add(minis)?)?;
        *at += minis;
        for width in widths {
            if out.len() == count {
                break;
            }
            let width = u32::from(*width);
            let packed_bytes = per_mini.checked_mul(width as usize)? / 8;
            let packed = bytes.get(*at..at.checked_add(packed_bytes)?)?;
            *at += packed_bytes;
            if width > 64 {
                return None;
            }
            for index in 0..per_mini.min(count - out.len()) {
                value = value
                    .wrapping_add(least)
                    .wrapping_add(bits(packed, index * width as usize, width) as i64);
                out.push(value);
            }
        }
    }
    Some(out)
}

/// `width` bits from bit `start`, the lowest bit first.
fn bits(bytes: &[u8], start: usize, width: u32) -> u64 {
    let mut value = 0u128;
    let first = start / 8;
    for (index, byte) in bytes[first..].iter().take(9).enumerate() {
        value |= u128::from(*byte) << (8 * index);
    }
    ((value >> (start % 8)) & ((1u128 << width) - 1)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_add_up() {
        // 7, 5, 3, 1, 2, 3, 4, 5 in one block of 32: minimum delta -2, bit width 2.
        let mut bytes = vec![32, 1, 8, 14, 3, 2];
        let differences = [0u8, 0, 0, 3, 3, 3, 3];
        let mut packed = vec![0u8; 8];
        for (index, difference) in differences.iter().enumerate() {
            packed[index / 4] |= difference << (2 * (index % 4));
        }
        bytes.extend(&packed);
        let mut at = 0;
        assert_eq!(integers(&bytes, &mut at, 8).unwrap(), [7, 5, 3, 1, 2, 3, 4, 5]);
        assert_eq!(at, bytes.len());
        assert_eq!(integers(&bytes[..10], &mut 0, 8), None);
        assert_eq!(integers(&bytes, &mut 0, 9), None);
    }
}
