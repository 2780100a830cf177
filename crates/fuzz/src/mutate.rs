//! Damages an input, as a function of a number.

/// Sizes and counts that often break parsers.
const INTEGERS: [u64; 20] = [
    0,
    1,
    2,
    7,
    0x7f,
    0x80,
    0xff,
    0x100,
    0x7fff,
    0x8000,
    0xffff,
    0x1_0000,
    0x100_0000,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x1_0000_0000,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    0xffff_ffff_ffff_ffff,
];

/// Bytes and words with a meaning for some parser.
const WORDS: [&[u8]; 40] = [
    b"\n",
    b"\r\n",
    b"\r",
    b"\0",
    b"\"",
    b"\"\"",
    b"\\",
    b",",
    b"\t",
    b"{",
    b"}",
    b"[",
    b"]",
    b"[[",
    b"=",
    b":",
    b"#",
    b"'",
    b"\\u0000",
    b"\\ud800",
    b"null",
    b"true",
    b"-1",
    b"1e999",
    b"0x10",
    b"NaN",
    b"18446744073709551616",
    b"\"text\"",
    b"\xff",
    b"\xc3",
    b"\xe2\x82",
    b"\xf4\x90\x80\x80",
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"PAR1",
    b"\x1f\x8b\x08",
    b"..",
    b"/",
    b"%",
    b" ",
];

/// Maximum size of an input, whatever is repeated in it.
const MOST_BYTES: usize = 1 << 20;

/// Random numbers for one key (SplitMix64).
struct Draw {
    state: u64,
}

impl Draw {
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let value = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    /// A number below `end`, more often small than large.
    fn short(&mut self, end: usize) -> usize {
        let most = 1 << self.below(12);
        self.below(most.min(end) + 1)
    }

    fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }
}

/// Input `number`: first the seeds themselves, then one seed after the other with one to eight kinds of damage. The same seeds
/// and number result in the same bytes on every machine.
pub fn mutate(seeds: &[Vec<u8>], number: u64) -> Vec<u8> {
    if let Some(seed) = seeds.get(number as usize) {
        return seed.clone();
    }
    let mut draw = Draw { state: number.wrapping_mul(0xd134_2543_de82_ef95) };
    let mut bytes = draw.pick(seeds).clone();
    for _ in 0..1 << draw.below(4) {
        damage(&mut bytes, seeds, &mut draw);
        bytes.truncate(MOST_BYTES);
    }
    bytes
}

fn damage(bytes: &mut Vec<u8>, seeds: &[Vec<u8>], draw: &mut Draw) {
    let at = draw.below(bytes.len() + 1);
    let left = bytes.len() - at;
    match draw.below(12) {
        0 | 1 if left > 0 => bytes[at] ^= 1 << draw.below(8),
        2 if left > 0 => bytes[at] = draw.next() as u8,
        3 => drop(bytes.splice(at..at + draw.short(left), [])),
        4 => bytes.truncate(at),
        5 => {
            let word = draw.pick(&WORDS).to_vec();
            let replaced = if draw.below(2) == 0 { 0 } else { word.len().min(left) };
            drop(bytes.splice(at..at + replaced, word));
        }
        6 => {
            let value = *draw.pick(&INTEGERS);
            let width = 1 << draw.below(4);
            let little = draw.below(2) == 0;
            let encoded = value.to_le_bytes();
            for index in 0..width.min(left) {
                bytes[at + index] = encoded[if little { index } else { width - 1 - index }];
            }
        }
        7 => {
            let varint = varint(*draw.pick(&INTEGERS));
            let replaced = draw.below(varint.len() + 1).min(left);
            drop(bytes.splice(at..at + replaced, varint));
        }
        8 => decimal(bytes, draw),
        9 => {
            // A piece of another seed, or of this one, replaces a piece.
            let other = draw.pick(seeds);
            let from = draw.below(other.len() + 1);
            let piece = other[from..from + draw.short(other.len() - from)].to_vec();
            let replaced = draw.short(left);
            drop(bytes.splice(at..at + replaced, piece));
        }
        10 => {
            // The beginning of this one and the end of another.
            let other = draw.pick(seeds);
            bytes.truncate(at);
            bytes.extend_from_slice(&other[draw.below(other.len() + 1)..]);
        }
        _ => {
            let piece = bytes[at..at + draw.short(left)].to_vec();
            let times = 1 << draw.below(12);
            let times = times.min(MOST_BYTES / 16 / piece.len().max(1));
            drop(bytes.splice(at..at, piece.repeat(times)));
        }
    }
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut out = Vec::new();
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
    out
}

/// Replaces a decimal number.
fn decimal(bytes: &mut Vec<u8>, draw: &mut Draw) {
    let from = draw.below(bytes.len());
    let Some(start) = (from..bytes.len()).find(|at| bytes[*at].is_ascii_digit()) else { return };
    let end = (start..bytes.len()).find(|at| !bytes[*at].is_ascii_digit()).unwrap_or(bytes.len());
    let value = *draw.pick(&INTEGERS);
    let written = if draw.below(4) == 0 { (value as i64).to_string() } else { value.to_string() };
    drop(bytes.splice(start..end, written.into_bytes()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_are_bounded_various_and_the_same_every_time() {
        let seeds = [b"{\"text\": \"one\", \"n\": 12}\n".repeat(9), b"PAR1 and more".to_vec(), Vec::new()];
        let inputs: Vec<Vec<u8>> = (0..3000).map(|number| mutate(&seeds, number)).collect();
        assert_eq!(inputs[..3], seeds);
        assert!(inputs.iter().all(|input| input.len() <= MOST_BYTES));
        assert!(inputs.iter().enumerate().all(|(number, input)| *input == mutate(&seeds, number as u64)));
        let mut different = inputs.clone();
        different.sort_unstable();
        different.dedup();
        assert!(different.len() > 2000, "{} different ones", different.len());
    }
}
