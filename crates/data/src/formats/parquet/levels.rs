//! The hybrid of run-length encoding and bit-packing for levels and dictionary indices.

/// Calls `take` with `count` integers of `width` bits. `None` where the bytes end too early.
pub(super) fn decode(bytes: &[u8], width: u32, count: usize, mut take: impl FnMut(u32)) -> Option<()> {
    if width > 32 {
        return None;
    }
    let (mut at, mut left) = (0, count);
    while left > 0 {
        let header = varint(bytes, &mut at)?;
        let run = usize::try_from(header >> 1).ok()?;
        if header & 1 == 0 {
            let value_bytes = (width as usize).div_ceil(8);
            let mut value = [0u8; 4];
            value[..value_bytes].copy_from_slice(bytes.get(at..at + value_bytes)?);
            at += value_bytes;
            let value = u32::from_le_bytes(value);
            let run = run.min(left);
            (0..run).for_each(|_| take(value));
            left -= run;
        } else {
            let values = run.checked_mul(8)?.min(left);
            let packed = bytes.get(at..)?;
            // The last group may be truncated after the values that are needed.
            let needed = (values.checked_mul(width as usize)?).div_ceil(8);
            unpack(packed.get(..needed)?, width, values, &mut take);
            at = at.checked_add(run.checked_mul(width as usize)?)?;
            left -= values;
        }
    }
    Some(())
}

/// Unpacks `count` integers of `width` bits from `bytes`, the lowest bits first.
fn unpack(bytes: &[u8], width: u32, count: usize, take: &mut impl FnMut(u32)) {
    let mask = (1u64 << width) - 1;
    let (mut held, mut bits) = (0u64, 0);
    let mut rest = bytes.iter();
    for _ in 0..count {
        while bits < width {
            held |= u64::from(*rest.next().expect("the bytes hold every value")) << bits;
            bits += 8;
        }
        take((held & mask) as u32);
        held >>= width;
        bits -= width;
    }
}

pub(super) fn varint(bytes: &[u8], at: &mut usize) -> Option<u64> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let byte = *bytes.get(*at)?;
        *at += 1;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(bytes: &[u8], width: u32, count: usize) -> Option<Vec<u32>> {
        let mut out = Vec::new();
        decode(bytes, width, count, |value| out.push(value)).map(|()| out)
    }

    #[test]
    fn runs_and_packed_groups_follow_each_other() {
        // Eight values of three bits, as in the specification, then a run of four sevens.
        let bytes = [0b0000_0011, 0b1000_1000, 0b1100_0110, 0b1111_1010, 8, 7];
        assert_eq!(decoded(&bytes, 3, 12).unwrap(), [0, 1, 2, 3, 4, 5, 6, 7, 7, 7, 7, 7]);
        assert_eq!(decoded(&bytes, 3, 5).unwrap(), [0, 1, 2, 3, 4]);
        assert_eq!(decoded(&bytes, 3, 13), None);
        assert_eq!(decoded(&[6, 1, 2], 16, 3).unwrap(), [513; 3]);
        assert_eq!(decoded(&[20], 0, 9).unwrap(), [0; 9]);
        assert_eq!(decoded(&[0xff; 12], 1, 3), None);
        assert_eq!(decoded(&[0], 1, 1), None);
    }
}
