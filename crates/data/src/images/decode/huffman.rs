//! Codes of a JPEG scan: bits out of bytes, symbols out of bits, coefficients out of symbols.

/// Bits that are looked up at once. Nearly all codes are shorter, and most with their values.
const LOOK: u32 = 11;

/// The place of coefficient `i` of the zigzag in a block of 8 x 8, by columns: see [`super::inverse`].
const PLACES: [u8; 64] = [
    0, 8, 1, 2, 9, 16, 24, 17, 10, 3, 4, 11, 18, 25, 32, 40, 33, 26, 19, 12, 5, 6, 13, 20, 27, 34, 41, 48,
    56, 49, 42, 35, 28, 21, 14, 7, 15, 22, 29, 36, 43, 50, 57, 58, 51, 44, 37, 30, 23, 31, 38, 45, 52, 59,
    60, 53, 46, 39, 47, 54, 61, 62, 55, 63,
];

/// Where a coefficient of the zigzag is in a block.
pub(super) fn place(zigzag: usize) -> usize {
    PLACES[zigzag].into()
}

/// The reason why a scan is unreadable, in a few words.
pub(super) type Broken = &'static str;

/// Coded data without what was stuffed into them, in the parts that restart markers make of them.
pub(super) struct Scan {
    /// All parts, and zeros behind the last.
    bytes: Vec<u8>,
    /// Where each part ends.
    ends: Vec<usize>,
}

/// Zeros behind coded data: as many as are read at once.
const BEHIND: usize = 8;

impl Scan {
    /// Up to the first marker that is no restart.
    pub fn new(data: &[u8]) -> Self {
        Self::split(data).0
    }

    /// The same, and what follows from that marker on.
    pub fn split(data: &[u8]) -> (Self, &[u8]) {
        let mut scan = Self { bytes: Vec::with_capacity(data.len() + BEHIND), ends: Vec::new() };
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
        scan.bytes.extend([0; BEHIND]);
        (scan, &rest[memchr::memchr(0xff, rest).unwrap_or(rest.len())..])
    }

    /// The bits of the first part.
    pub fn bits(&self) -> Bits<'_> {
        let (end, later) = self.ends.split_first().expect("there is a first part");
        Bits { bytes: &self.bytes, at: 0, buffer: 0, count: 0, end: *end, later }
    }
}

/// The bits of coded data, a value that is copied while a block is read so that it stays in registers. Past the end of
/// a part come those of the next, and then zeros; taking either is noticed.
#[derive(Clone, Copy)]
pub(super) struct Bits<'a> {
    bytes: &'a [u8],
    /// Behind the last byte of which all bits are in the buffer.
    at: usize,
    /// The next bit is the highest. Behind those that are counted there may be some of the byte at `at`.
    buffer: u64,
    count: u32,
    end: usize,
    /// Ends of later parts.
    later: &'a [usize],
}

impl Bits<'_> {
    /// Makes sure of 56 bits: a code with its value has at most 31.
    #[inline(always)]
    fn refill(&mut self) {
        let next = match self.bytes.get(self.at..self.at + BEHIND) {
            Some(eight) => u64::from_be_bytes(eight.try_into().expect("eight bytes")),
            None => 0,
        };
        self.buffer |= next >> self.count;
        self.at += ((63 - self.count) >> 3) as usize;
        self.count |= 56;
    }

    #[inline(always)]
    fn look(&self) -> usize {
        (self.buffer >> (64 - LOOK)) as usize
    }

    #[inline(always)]
    fn drop(&mut self, bits: u32) {
        self.buffer <<= bits;
        self.count -= bits;
    }

    /// A value of `bits` bits, as JPEG codes it: the lower half of its numbers are negative.
    #[inline(always)]
    fn value(&mut self, bits: u32) -> i32 {
        if bits == 0 {
            return 0;
        }
        let value = (self.buffer >> (64 - bits)) as i32;
        self.drop(bits);
        if value < 1 << (bits - 1) { value - (1 << bits) + 1 } else { value }
    }

    /// Takes `bits` bits, 15 at most.
    #[inline(always)]
    fn take(&mut self, bits: u32) -> u32 {
        if bits == 0 {
            return 0;
        }
        if self.count < bits {
            self.refill();
        }
        let taken = (self.buffer >> (64 - bits)) as u32;
        self.drop(bits);
        taken
    }

    #[inline(always)]
    pub fn bit(&mut self) -> u32 {
        self.take(1)
    }

    /// Whether more was taken than is there.
    pub fn is_overdrawn(&self) -> bool {
        self.at * 8 > self.end * 8 + self.count as usize
    }

    /// Goes on behind the next restart marker.
    pub fn restart(&mut self) -> Result<(), Broken> {
        if self.is_overdrawn() {
            return Err("it ends in the middle");
        }
        let (end, later) = self.later.split_first().ok_or("a restart marker is missing")?;
        (self.at, self.end, self.later) = (self.end, *end, later);
        (self.buffer, self.count) = (0, 0);
        Ok(())
    }
}

/// A table of codes.
pub(super) struct Huffman {
    /// For the next bits: what they begin with.
    table: Box<[Decoded; 1 << LOOK]>,
    /// Codes of each length end before this, as the highest of 16 bits.
    ends: [u32; 17],
    /// The number to add to a code of each length to have its place in `symbols`.
    offsets: [i32; 17],
    symbols: Box<[u8; 256]>,
}

impl Huffman {
    /// Out of how many codes there are of each length, from 1 on, and their symbols in order.
    pub fn new(counts: &[u8; 16], given: &[u8]) -> Result<Self, Broken> {
        let mut table = Self {
            table: Box::new([Decoded::NOTHING; 1 << LOOK]),
            ends: [0; 17],
            offsets: [0; 17],
            symbols: Box::new([0; 256]),
        };
        let total: usize = counts.iter().map(|count| usize::from(*count)).sum();
        if total > 256 || total != given.len() {
            return Err("a table of codes is damaged");
        }
        table.symbols[..total].copy_from_slice(given);
        let (mut code, mut place) = (0u32, 0usize);
        for length in 1..=16u32 {
            let count = usize::from(counts[length as usize - 1]);
            table.offsets[length as usize] = place as i32 - code as i32;
            for symbol in &given[place..place + count] {
                if code >= 1 << length {
                    return Err("a table of codes is damaged");
                }
                if length <= LOOK {
                    let first = (code << (LOOK - length)) as usize;
                    for bits in first..first + (1 << (LOOK - length)) {
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

    /// A symbol whose code is longer than what is looked up.
    #[cold]
    #[inline(never)]
    fn long_symbol(&self, next: u32) -> Result<(u8, u32), Broken> {
        for length in LOOK + 1..=16 {
            if next < self.ends[length as usize] {
                let place = (next >> (16 - length)) as i32 + self.offsets[length as usize];
                return Ok((self.symbols[place as usize & 255], length));
            }
        }
        Err("a code is in no table")
    }

    /// The difference of a block's DC coefficient from that of the block before it.
    #[inline(always)]
    pub fn difference(&self, bits: &mut Bits<'_>) -> Result<i32, Broken> {
        bits.refill();
        let found = self.table[bits.look()];
        let size = match found.0 {
            0 => {
                let (symbol, length) = self.long_symbol((bits.buffer >> 48) as u32)?;
                bits.drop(length);
                u32::from(symbol)
            }
            _ => {
                bits.drop(found.bits());
                // The symbol of a DC difference is its size alone; a table that says otherwise has a run.
                if found.run() != 0 {
                    return Err("a mean has too many bits");
                }
                if found.value() != 0 {
                    return Ok(found.value());
                }
                found.size()
            }
        };
        if size > 11 { Err("a mean has too many bits") } else { Ok(bits.value(size)) }
    }

    /// The other coefficients of a block into their places. Gives whether there are any.
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
            let mut found = self.table[bits.look()];
            // A value that was looked up with its code takes few bits: there are enough left for any other.
            if found.value() != 0 {
                at += found.run();
                bits.drop(found.bits());
                if KEEP {
                    put(block, at, found.value())?;
                }
                at += 1;
                if at >= 64 {
                    break;
                }
                found = self.table[bits.look()];
            }
            if found.0 == 0 {
                let (symbol, length) = self.long_symbol((bits.buffer >> 48) as u32)?;
                found = Decoded::of(length, symbol);
            }
            at += found.run();
            let mut value = found.value();
            bits.drop(found.bits());
            if value == 0 {
                let size = found.size();
                if size == 0 {
                    // Sixteen zeros, or nothing but zeros.
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

/// Coefficients of the zigzag that a scan of a progressive JPEG adds to, and the lowest bit it knows of them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Band {
    pub first: usize,
    pub last: usize,
    pub low: u32,
}

impl Huffman {
    /// Reads the next code: a run of zeros, and the value behind it, 0 for none; then the size it would have had.
    #[inline(always)]
    fn run_and_value(&self, bits: &mut Bits<'_>) -> Result<(usize, i32), Broken> {
        bits.refill();
        let mut found = self.table[bits.look()];
        if found.0 == 0 {
            let (symbol, length) = self.long_symbol((bits.buffer >> 48) as u32)?;
            found = Decoded::of(length, symbol);
        }
        bits.drop(found.bits());
        let value = match found.value() {
            0 => bits.value(found.size()),
            known => known,
        };
        Ok((found.run(), value))
    }

    /// The first bits of a block's coefficients. `over` counts blocks that have none in this scan.
    #[inline(always)]
    pub fn first_of_band(
        &self,
        kept: &mut Bits<'_>,
        band: Band,
        over: &mut u32,
        block: &mut [i16; 64],
    ) -> Result<(), Broken> {
        if *over > 0 {
            *over -= 1;
            return Ok(());
        }
        let mut bits = *kept;
        let mut at = band.first;
        while at <= band.last {
            let (run, value) = self.run_and_value(&mut bits)?;
            if value == 0 {
                if run < 15 {
                    *over = (1 << run) - 1 + bits.take(run as u32);
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

    /// One more bit of a block's coefficients, and those that begin with it.
    #[inline(always)]
    pub fn refined_band(
        &self,
        kept: &mut Bits<'_>,
        band: Band,
        over: &mut u32,
        block: &mut [i16; 64],
    ) -> Result<(), Broken> {
        let mut bits = *kept;
        let mut at = band.first;
        // A bit for a coefficient that is there: it grows away from 0.
        let refine = |bits: &mut Bits<'_>, coefficient: &mut i16| {
            if bits.bit() == 1 && *coefficient >> band.low & 1 == 0 {
                *coefficient += coefficient.signum() << band.low;
            }
        };
        if *over == 0 {
            while at <= band.last {
                let (mut run, value) = self.run_and_value(&mut bits)?;
                if value == 0 && run < 15 {
                    *over = (1 << run) + bits.take(run as u32);
                    break;
                }
                if !(-1..=1).contains(&value) {
                    return Err("a bit has too many bits");
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
        if *over > 0 {
            while at <= band.last {
                let coefficient = &mut block[place(at)];
                if *coefficient != 0 {
                    refine(&mut bits, coefficient);
                }
                at += 1;
            }
            *over -= 1;
        }
        *kept = bits;
        Ok(())
    }
}

/// Puts a coefficient of the zigzag in its place.
#[inline(always)]
fn put(block: &mut [i16; 64], at: usize, value: i32) -> Result<(), Broken> {
    let Some(place) = PLACES.get(at) else { return Err("a block has too many coefficients") };
    block[usize::from(*place) & 63] = value as i16;
    Ok(())
}

/// The code that the next bits begin with: from the lowest, 8 bits of how many to drop, 4 of the size of the value that
/// follows, 4 of the run of zeros before it, and 16 of the value itself where it is known; then nothing of it follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Decoded(u32);

impl Decoded {
    /// A code that is longer than what is looked up, or none.
    const NOTHING: Decoded = Decoded(0);

    fn of(length: u32, symbol: u8) -> Self {
        Self(length | u32::from(symbol & 15) << 8 | u32::from(symbol >> 4) << 12)
    }

    /// With the value, where all of it is among the bits that are looked up.
    fn new(bits: u32, length: u32, symbol: u8) -> Self {
        let size = u32::from(symbol & 15);
        if size == 0 || length + size > LOOK {
            return Self::of(length, symbol);
        }
        let value = (bits >> (LOOK - length - size) & ((1 << size) - 1)) as i32;
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
