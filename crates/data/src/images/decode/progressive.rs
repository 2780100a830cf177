//! Collects the coefficients of a progressive JPEG over its scans.
//!
//! Each scan adds coefficients, or a bit to existing ones. All are stored, 128 bytes per block, until the last scan is read;
//! then they are transformed like those of any other JPEG.

use super::baseline::{Baseline, DAMAGED, table_of_codes};
use super::huffman::{Band, Bits, Broken, Huffman, Scan};

/// The blocks of a component, in rows of `across`.
pub(super) struct Blocks {
    pub across: usize,
    pub all: Vec<[i16; 64]>,
}

/// Limit on scans, above what encoders write: a short scan may still cover the whole image.
const MOST_SCANS: usize = 256;

/// A scan header.
struct Header {
    /// Each component in the scan: its number, its DC table and its AC table.
    of: Vec<(usize, usize, usize)>,
    band: Band,
    is_first: bool,
}

impl Header {
    fn read(image: &Baseline<'_>, body: &[u8]) -> Result<Self, Broken> {
        let [count, rest @ ..] = body else { return Err(DAMAGED) };
        let (named, rest) = rest.split_at_checked(2 * usize::from(*count)).ok_or(DAMAGED)?;
        let [first, last, bits, ..] = *rest else { return Err(DAMAGED) };
        let mut of = Vec::new();
        for two in named.chunks_exact(2) {
            let number = image.components.iter().position(|component| component.id == two[0]);
            of.push((number.ok_or(DAMAGED)?, (two[1] >> 4 & 3).into(), (two[1] & 3).into()));
        }
        let band = Band { first: first.into(), last: last.into(), low: u32::from(bits & 15) };
        let is_dc = band.first == 0 && band.last == 0 && (1..=image.components.len()).contains(&of.len());
        let is_ac = band.first > 0 && band.first <= band.last && band.last < 64 && of.len() == 1;
        if !(is_dc || is_ac) || band.low > 13 {
            return Err(DAMAGED);
        }
        Ok(Self { of, band, is_first: bits >> 4 == 0 })
    }
}

/// All coefficients of all components.
pub(super) fn coefficients(image: &Baseline<'_>) -> Result<Vec<Blocks>, Broken> {
    let groups = image.groups();
    let blocks = |across: usize, down: usize| Blocks {
        across: groups.0 * across,
        all: vec![[0; 64]; groups.0 * across * groups.1 * down],
    };
    let mut all: Vec<Blocks> = image.components.iter().map(|of| blocks(of.across, of.down)).collect();
    let mut codes = HuffmanTables { image, dc_tables: [const { None }; 4], ac_tables: [const { None }; 4] };
    let (mut restart, mut scans) = (image.restart, 0);
    let mut rest = image.data;
    // A marker follows, after any number of fill bytes 0xff.
    while let [marker, after @ ..] = rest {
        rest = after;
        match marker {
            0xff | 0x01 | 0xd0..=0xd7 => continue,
            0xd9 => break,
            _ => {}
        }
        let (length, _) = rest.split_first_chunk().ok_or(DAMAGED)?;
        let length = usize::from(u16::from_be_bytes(*length)).max(2);
        let body = rest.get(2..length).ok_or(DAMAGED)?;
        rest = &rest[length..];
        match marker {
            0xc4 => table_of_codes(body, &mut codes.dc_tables, &mut codes.ac_tables)?,
            0xdd => restart = body.first_chunk().map_or(0, |two| u16::from_be_bytes(*two).into()),
            0xda => {
                scans += 1;
                if scans > MOST_SCANS {
                    return Err("it has too many scans");
                }
                let header = Header::read(image, body)?;
                let (scan, behind) = Scan::split(rest);
                rest = behind;
                let pass = Pass { image, header: &header, scan: &scan, restart, codes: &codes };
                match header.band.first {
                    0 => dc_scan(&pass, &mut all)?,
                    _ => ac_scan(&pass, &mut all)?,
                }
            }
            _ => {}
        }
    }
    if scans == 0 { Err("it has no scan") } else { Ok(all) }
}

/// Huffman tables: those before the first scan, replaced by those between scans.
struct HuffmanTables<'a> {
    image: &'a Baseline<'a>,
    dc_tables: [Option<Huffman>; 4],
    ac_tables: [Option<Huffman>; 4],
}

impl HuffmanTables<'_> {
    fn dc_table(&self, number: usize) -> Result<&Huffman, Broken> {
        self.dc_tables[number]
            .as_ref()
            .or(self.image.dc_tables[number].as_ref())
            .ok_or("a Huffman table is missing")
    }
    fn ac_table(&self, number: usize) -> Result<&Huffman, Broken> {
        self.ac_tables[number]
            .as_ref()
            .or(self.image.ac_tables[number].as_ref())
            .ok_or("a Huffman table is missing")
    }
}

/// A scan with its header and tables.
struct Pass<'a> {
    image: &'a Baseline<'a>,
    header: &'a Header,
    scan: &'a Scan,
    /// Restart interval in MCUs; 0 for none.
    restart: usize,
    codes: &'a HuffmanTables<'a>,
}

/// Continues after a restart marker where one is due before a unit (MCU or block).
fn restarts(bits: &mut Bits<'_>, unit: usize, restart: usize) -> Result<bool, Broken> {
    if restart == 0 || unit == 0 || !unit.is_multiple_of(restart) {
        return Ok(false);
    }
    bits.restart()?;
    Ok(true)
}

fn end(bits: &Bits<'_>) -> Result<(), Broken> {
    if bits.is_past_end() { Err("its entropy-coded data ends too early") } else { Ok(()) }
}

/// A scan of DC coefficients: block by block with one component, interleaved in MCUs with several.
fn dc_scan(pass: &Pass<'_>, all: &mut [Blocks]) -> Result<(), Broken> {
    let Pass { image, header, scan, restart, codes } = *pass;
    let (mut bits, low) = (scan.bits(), header.band.low);
    let is_alone = header.of.len() == 1;
    let (across, down) = if is_alone { image.blocks(header.of[0].0) } else { image.groups() };
    let mut tables = Vec::new();
    for (_, table, _) in header.of.iter().filter(|_| header.is_first) {
        tables.push(codes.dc_table(*table)?);
    }
    let mut last = [0i32; 4];
    for unit in 0..across * down {
        if restarts(&mut bits, unit, restart)? {
            last = [0; 4];
        }
        let (column, row) = (unit % across, unit / across);
        for (at, (number, ..)) in header.of.iter().enumerate() {
            let component = &image.components[*number];
            let (wide, high) = if is_alone { (1, 1) } else { (component.across, component.down) };
            let blocks = &mut all[*number];
            for y in 0..high {
                for x in 0..wide {
                    let block = &mut blocks.all[(row * high + y) * blocks.across + column * wide + x];
                    if header.is_first {
                        last[at] = last[at].wrapping_add(tables[at].difference(&mut bits)?);
                        block[0] = last[at].wrapping_shl(low) as i16;
                    } else {
                        block[0] |= (bits.bit() << low) as i16;
                    }
                }
            }
        }
        if column == 0 {
            end(&bits)?;
        }
    }
    end(&bits)
}

/// A scan of AC coefficients, which always has one component.
fn ac_scan(pass: &Pass<'_>, all: &mut [Blocks]) -> Result<(), Broken> {
    let Pass { image, header, scan, restart, codes } = *pass;
    let (number, _, table) = header.of[0];
    let (table, mut bits) = (codes.ac_table(table)?, scan.bits());
    let (across, down) = image.blocks(number);
    let blocks = &mut all[number];
    // The EOB run: further blocks without coefficients in this scan.
    let mut eob_run = 0u32;
    for row in 0..down {
        let line = &mut blocks.all[row * blocks.across..][..across];
        for (column, block) in line.iter_mut().enumerate() {
            if restarts(&mut bits, row * across + column, restart)? {
                eob_run = 0;
            }
            match header.is_first {
                true => table.first_of_band(&mut bits, header.band, &mut eob_run, block)?,
                false => table.refined_band(&mut bits, header.band, &mut eob_run, block)?,
            }
        }
        end(&bits)?;
    }
    Ok(())
}
