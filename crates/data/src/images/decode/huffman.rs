//! Entropy decoding of a JPEG scan: bits from bytes, symbols from bits, coefficients from symbols.

/// Number of bits per table lookup. Nearly all codes are shorter, and most fit together with their values.
const LOOKUP_BITS: u32 = 11;

/// The position of coefficient `i` of the zigzag order in a block of 8 x 8, stored by columns: see [`super::inverse`].
const PLACES: [u8; 64] = [
    0, 8, 1, 2, 9, 16, 24, 17, 10, 3, 4, 11, 18, 25, 32, 40, 33, 26, 19, 12, 5, 6, 13, 20, 27, 34, 41, 48,
    56, 49, 42, 35, 28, 21, 14, 7, 15, 22, 29, 36, 43, 50, 57, 58, 51, 44, 37, 30, 23, 31, 38, 45, 52, 59,
    60, 53, 46, 39, 47, 54, 61, 62, 55, 63,
];

/// The position of a coefficient of the zigzag order in a block.
pub(super) fn place(zigzag: usize) -> usize {
    PLACES[zigzag].into()
}

/// The reason why a scan is invalid, in a few words.
pub(super) type Broken = &'static str;

/// Entropy-coded data without stuffed bytes, divided at restart markers.
pub(super) struct Scan {
    /// All intervals, followed by zeros.
    bytes: Vec<u8>,
    /// End of each interval.
    ends: Vec<usize>,
}

/// Number of zeros after the data, which is the size of a read.
const PADDING: usize = 8;

impl Scan {
    /// Reads up to the first marker that is no restart marker.
    pub fn new(data: &[u8]) -> Self {
        Self::split(data).0
    }

    /// As [`Self::new`], and returns the data from that marker on.
    pub fn split(data: &[u8]) -> (Self, &[u8]) {
        let mut scan = Self { bytes: Vec::with_capacity(data.len() + PADDING), ends: Vec::new() };
        let mut rest = data;
        loop {
            let mark = memchr::memchr(0xff, rest).unwrap_or(rest.len());
            scan.bytes.extend_from_slice(&rest[..mark]);
            rest = match &rest[mark..] {
                [0xff, 0, rest @ ..] => {
                    scan.bytes.push(0xff);
                    rest
                }
                [0xff, 0xd0..=0xd7, rest @ ..] => {
                    scan.ends.push(scan.bytes.len());
                    rest
                }
                _ => break,
            };
        }
        scan.ends.push(scan.bytes.len());
        scan.bytes.extend([0; PADDING]);
        (scan, &rest[memchr::memchr(0xff, rest).unwrap_or(rest.len())..])
    }

    /// The bits of the first interval.
    pub fn bits(&self) -> Bits<'_> {
        let (end, later) = self.ends.split_first().expect("there is a first part");
        Bits { bytes: &self.bytes, at: 0, buffer: 0, count: 0, end: *end, later }
    }
}

/// A bit reader over entropy-coded data, copied while a block is read so that it stays in registers. Reads past the end of an
/// interval return bits of the next one, then zeros; `is_past_end` detects both.
#[derive(Clone, Copy)]
pub(super) struct Bits<'a> {
    bytes: &'a [u8],
    /// Offset after the last byte whose bits are all counted.
    at: usize,
    /// The next bit is the highest one. Below the counted bits there may be some of the byte at `at`.
    buffer: u64,
    count: u32,
    end: usize,
    /// Ends of later intervals.
    later: &'a [usize],
}

impl Bits<'_> {
    /// Buffers at least 56 bits: a code with its value has at most 31.
    #[inline(always)]
    fn refill(&mut self) {
        let next = match self.bytes.get(self.at..self.at + PADDING) {
            Some(eight) => u64::from_be_bytes(eight.try_into().expect("eight bytes")),
            None => 0,
        };
        self.buffer |= next >> self.count;
        self.at += ((63 - self.count) >> 3) as usize;
        self.count |= 56;
    }

    #[inline(always)]
    fn peek(&self) -> usize {
        (self.buffer >> (64 - LOOKUP_BITS)) as usize
    }

    #[inline(always)]
    fn consume(&mut self, bits: u32) {
        self.buffer <<= bits;
        self.count -= bits;
    }

    /// Reads a value of `bits` bits in JPEG's sign-extended coding: the lower half of the range is negative.
    #[inline(always)]
    fn value(&mut self, bits: u32) -> i32 {
        if bits == 0 {
            return 0;
        }
        let value = (self.buffer >> (64 - bits)) as i32;
        self.consume(bits);
        if value < 1 << (bits - 1) { value - (1 << bits) + 1 } else { value }
    }

    /// Reads `bits` bits, at most 15.
    #[inline(always)]
    fn take(&mut self, bits: u32) -> u32 {
        if bits == 0 {
            return 0;
        }
        if self.count < bits {
            self.refill();
        }
        let taken = (self.buffer >> (64 - bits)) as u32;
        self.consume(bits);
        taken
    }

    #[inline(always)]
    pub fn bit(&mut self) -> u32 {
        self.take(1)
    }

    /// Whether more bits were read than the interval has.
    pub fn is_past_end(&self) -> bool {
        self.at * 8 > self.end * 8 + self.count as usize
    }

    /// Continues after the next restart marker.
    pub fn restart(&mut self) -> Result<(), Broken> {
        if self.is_past_end() {
            return Err("its entropy-coded data ends too early");
        }
        let (end, later) = self.later.split_first().ok_or("a restart marker is missing")?;
        (self.at, self.end, self.later) = (self.end, *end, later);
        (self.buffer, self.count) = (0, 0);
        Ok(())
    }
}

/// A Huffman table.
pub(super) struct Huffman {
    /// Lookup table by the next bits.
    table: Box<[Decoded; 1 << LOOKUP_BITS]>,
    /// Upper bound of the codes of each length, left-aligned in 16 bits.
    ends: [u32; 17],
    /// Offset from a code of each length to its index in `symbols`.
    offsets: [i32; 17],
    symbols: Box<[u8; 256]>,
}

impl Huffman {
    /// Builds a table from the number of codes of each length, from 1 on, and their symbols in order.
    pub fn new(counts: &[u8; 16], given: &[u8]) -> Result<Self, Broken> {
        let mut table = Self {
            table: Box::new([Decoded::NOTHING; 1 << LOOKUP_BITS]),
            ends: [0; 17],
            offsets: [0; 17],
            symbols: Box::new([0; 256]),
        };
        let total: usize = counts.iter().map(|count| usize::from(*count)).sum();
        if total > 256 || total != given.len() {
            return Err("a Huffman table is damaged");
        }
        table.symbols[..total].copy_from_slice(given);
        let (mut code, mut place) = (0u32, 0usize);
        for length in 1..=16u32 {
            let count = usize::from(counts[length as usize - 1]);
            table.offsets[length as usize] = place as i32 - code as i32;
            for symbol in &given[place..place + count] {
                if code >= 1 << length {
                    return Err("a Huffman table is damaged");
                }
                if length <= LOOKUP_BITS {
                    let first = (code << (LOOKUP_BITS - length)) as usize;
                    for bits in first..first + (1 << (LOOKUP_BITS - length)) {
                        table.table[bits] = Decoded::new(bits as u32, length, *symbol);
                    }
                }
                code += 1;
            }
            place += count;
            table.ends[length as usize] = code << (16 - length);
            code <<= 1;
        }
        Ok(table)
    }

    /// A symbol whose code is longer than a lookup.
    #[cold]
    #[inline(never)]
    fn long_symbol(&self, next: u32) -> Result<(u8, u32), Broken> {
        for length in LOOKUP_BITS + 1..=16 {
            if next < self.ends[length as usize] {
                let place = (next >> (16 - length)) as i32 + self.offsets[length as usize];
                return Ok((self.symbols[place as usize & 255], length));
            }
        }
        Err("a code is not in its Huffman table")
    }

    /// The DC difference of a block from the previous block.
    #[inline(always)]
    pub fn difference(&self, bits: &mut Bits<'_>) -> Result<i32, Broken> {
        bits.refill();
        let found = self.table[bits.peek()];
        let size = match found.0 {
            0 => {
                let (symbol, length) = self.long_symbol((bits.buffer >> 48) as u32)?;
                bits.consume(length);
                u32::from(symbol)
            }
            _ => {
                bits.consume(found.bits());
                // The symbol of a DC difference is a size without a zero run, unless the table is invalid.
                if found.run() != 0 {
                    return Err("a DC difference has too many bits");
                }
                if found.value() != 0 {
                    return Ok(found.value());
                }
                found.size()
            }
        };
        if size > 11 { Err("a DC difference has too many bits") } else { Ok(bits.value(size)) }
    }

    /// Decodes the AC coefficients of a block. Returns whether there are any.
    #[inline(always)]
    pub fn coefficients<const KEEP: bool>(
        &self,
        kept: &mut Bits<'_>,
        block: &mut [i16; 64],
    ) -> Result<bool, Broken> {
        let mut bits = *kept;
        let mut at = 1;
        while at < 64 {
            bits.refill();
            let mut found = self.table[bits.peek()];
            // A value found in the lookup took few bits, so there are enough left for another symbol.
            if found.value() != 0 {
                at += found.run();
                bits.consume(found.bits());
                if KEEP {
                    put(block, at, found.value())?;
                }
                at += 1;
                if at >= 64 {
                    break;
                }
                found = self.table[bits.peek()];
            }
            if found.0 == 0 {
                let (symbol, length) = self.long_symbol((bits.buffer >> 48) as u32)?;
                found = Decoded::of(length, symbol);
            }
            at += found.run();
            let mut value = found.value();
            bits.consume(found.bits());
            if value == 0 {
                let size = found.size();
                if size == 0 {
                    // ZRL (sixteen zeros), or EOB.
                    if found.run() != 15 {
                        break;
                    }
                    at += 1;
                    continue;
                }
                value = bits.value(size);
            }
            if KEEP {
                put(block, at, value)?;
            }
            at += 1;
        }
        *kept = bits;
        if at > 64 { Err("a block has too many coefficients") } else { Ok(at > 1) }
    }
}

/// The spectral selection of a progressive scan, and its successive approximation bit (Al).
#[derive(Debug, Clone, Copy)]
pub(super) struct Band {
    pub first: usize,
    pub last: usize,
    pub low: u32,
}

impl Huffman {
    /// Decodes a symbol: a run of zeros, and the value after it, or 0.
    #[inline(always)]
    fn run_and_value(&self, bits: &mut Bits<'_>) -> Result<(usize, i32), Broken> {
        bits.refill();
        let mut found = self.table[bits.peek()];
        if found.0 == 0 {
            let (symbol, length) = self.long_symbol((bits.buffer >> 48) as u32)?;
            found = Decoded::of(length, symbol);
        }
        bits.consume(found.bits());
        let value = match found.value() {
            0 => bits.value(found.size()),
            known => known,
        };
        Ok((found.run(), value))
    }

    /// First scan of a band of AC coefficients. `eob_run` is the EOB run: the number of further blocks without coefficients.
    #[inline(always)]
    pub fn first_of_band(
        &self,
        kept: &mut Bits<'_>,
        band: Band,
        eob_run: &mut u32,
        block: &mut [i16; 64],
    ) -> Result<(), Broken> {
        if *eob_run > 0 {
            *eob_run -= 1;
            return Ok(());
        }
        let mut bits = *kept;
        let mut at = band.first;
        while at <= band.last {
            let (run, value) = self.run_and_value(&mut bits)?;
            if value == 0 {
                if run < 15 {
                    *eob_run = (1 << run) - 1 + bits.take(run as u32);
                    break;
                }
                at += 16;
                continue;
            }
            at += run;
            if at > band.last {
                return Err("a block has too many coefficients");
            }
            put(block, at, value << band.low)?;
            at += 1;
        }
        *kept = bits;
        Ok(())
    }

    /// Refinement scan of a band: one more bit of known coefficients, and new coefficients of magnitude 1.
    #[inline(always)]
    pub fn refined_band(
        &self,
        kept: &mut Bits<'_>,
        band: Band,
        eob_run: &mut u32,
        block: &mut [i16; 64],
    ) -> Result<(), Broken> {
        let mut bits = *kept;
        let mut at = band.first;
        // The correction bit of a known coefficient increases its magnitude.
        let refine = |bits: &mut Bits<'_>, coefficient: &mut i16| {
            if bits.bit() == 1 && *coefficient >> band.low & 1 == 0 {
                *coefficient += coefficient.signum() << band.low;
            }
        };
        if *eob_run == 0 {
            while at <= band.last {
                let (mut run, value) = self.run_and_value(&mut bits)?;
                if value == 0 && run < 15 {
                    *eob_run = (1 << run) + bits.take(run as u32);
                    break;
                }
                if !(-1..=1).contains(&value) {
                    return Err("a coefficient of a refinement scan has too many bits");
                }
                while at <= band.last {
                    let coefficient = &mut block[place(at)];
                    if *coefficient != 0 {
                        refine(&mut bits, coefficient);
                    } else if run == 0 {
                        break;
                    } else {
                        run -= 1;
                    }
                    at += 1;
                }
                if at <= band.last {
                    block[place(at)] = (value << band.low) as i16;
                } else if value != 0 {
                    return Err("a block has too many coefficients");
                }
                at += 1;
            }
        }
        if *eob_run > 0 {
            while at <= band.last {
                let coefficient = &mut block[place(at)];
                if *coefficient != 0 {
                    refine(&mut bits, coefficient);
                }
                at += 1;
            }
            *eob_run -= 1;
        }
        *kept = bits;
        Ok(())
    }
}

/// Stores a coefficient at its position in the block.
#[inline(always)]
fn put(block: &mut [i16; 64], at: usize, value: i32) -> Result<(), Broken> {
    let Some(place) = PLACES.get(at) else { return Err("a block has too many coefficients") };
    block[usize::from(*place) & 63] = value as i16;
    Ok(())
}

/// A lookup result. From the lowest bit: 8 bits for the number of bits to consume, 4 for the size of the value that follows, 4
/// for the run of zeros before it, and 16 for the value itself, where the lookup contains all of it and nothing follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Decoded(u32);

impl Decoded {
    /// No code, or one longer than a lookup.
    const NOTHING: Decoded = Decoded(0);

    fn of(length: u32, symbol: u8) -> Self {
        Self(length | u32::from(symbol & 15) << 8 | u32::from(symbol >> 4) << 12)
    }

    /// Includes the value where all of it is within the lookup.
    fn new(bits: u32, length: u32, symbol: u8) -> Self {
        let size = u32::from(symbol & 15);
        if size == 0 || length + size > LOOKUP_BITS {
            return Self::of(length, symbol);
        }
        let value = (bits >> (LOOKUP_BITS - length - size) & ((1 << size) - 1)) as i32;
        let value = if value < 1 << (size - 1) { value - (1 << size) + 1 } else { value };
        Self((length + size) | u32::from(symbol >> 4) << 12 | (value as u32) << 16)
    }

    #[inline(always)]
    fn bits(self) -> u32 {
        self.0 & 255
    }

    #[inline(always)]
    fn size(self) -> u32 {
        self.0 >> 8 & 15
    }

    #[inline(always)]
    fn run(self) -> usize {
        (self.0 >> 12 & 15) as usize
    }

    #[inline(always)]
    fn value(self) -> i32 {
        self.0 as i32 >> 16
    }
}
