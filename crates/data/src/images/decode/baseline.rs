//! A JPEG decoder for baseline and progressive images that decodes only the parts a view needs.
//!
//! It supports a single sequential scan or progressive scans, with one component or YCbCr; other images go to the library's
//! decoder. Blocks outside the crop are entropy-decoded but not transformed, MCU rows below it are not read, and each component
//! is transformed at the smallest scale (1, 1/2, 1/4, 1/8) that still has two pixels per pixel of the view.
//!
//! Components stay separate planes of their own size. They are resampled one by one and converted to RGB at the size of the
//! view, which differs from converting first only by rounding and clipping.

use std::cell::RefCell;

use pulp::{Simd, WithSimd};

use super::colours::colours;
use super::huffman::{Bits, Broken, Huffman, Scan};
use super::inverse::{Portable, Transform, reduced, steps};
use super::progressive::{Blocks, coefficients};
use crate::images::resample::{Region, byte};
use crate::images::view::Crop;

/// The pixels of a component that cover the crop, and the position of the crop in them.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::images) struct Plane {
    pub width: usize,
    pub height: usize,
    /// Distance between rows.
    pub stride: usize,
    pub bytes: Vec<u8>,
    pub part: Region,
}

thread_local! {
    /// Pool of freed planes: touching fresh memory page by page would cost a twentieth of the time of an image.
    static POOL: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// Number of planes in a thread's pool, and the largest size of one.
const MOST_POOLED: usize = 3;
const MOST_POOLED_BYTES: usize = 4 << 20;

/// A buffer of `bytes` bytes with arbitrary content.
fn pooled_buffer(bytes: usize) -> Vec<u8> {
    let mut found = POOL.with_borrow_mut(Vec::pop).unwrap_or_default();
    found.resize(bytes, 0);
    found
}

impl Drop for Plane {
    fn drop(&mut self) {
        if self.bytes.capacity() > MOST_POOLED_BYTES {
            return;
        }
        let bytes = std::mem::take(&mut self.bytes);
        // The pool no longer exists while the thread ends.
        let _ = POOL.try_with(|pool| {
            let mut pool = pool.borrow_mut();
            if pool.len() < MOST_POOLED {
                pool.push(bytes);
            }
        });
    }
}

/// The segments before the entropy-coded data, of an image that this decoder supports.
pub(super) struct Baseline<'a> {
    width: usize,
    height: usize,
    is_progressive: bool,
    pub components: Vec<Component>,
    /// Quantisation tables by number.
    quantisation: [Option<Box<[u16; 64]>>; 4],
    pub dc_tables: [Option<Huffman>; 4],
    pub ac_tables: [Option<Huffman>; 4],
    /// Restart interval in MCUs; 0 for none.
    pub restart: usize,
    /// The entropy-coded data of the only scan; of a progressive image, everything from the first SOS marker on.
    pub data: &'a [u8],
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Component {
    pub id: u8,
    /// Horizontal and vertical sampling factor: blocks per MCU.
    pub across: usize,
    pub down: usize,
    quantisation: usize,
    dc_table: usize,
    ac_table: usize,
}

/// Least pixels of a reduced scale per pixel of the view, in each direction. With fewer, edges would be visibly sharper than in
/// a downscaled full image.
const SPARE: f64 = 2.0;
pub(super) const DAMAGED: Broken = "a table is damaged";

impl<'a> Baseline<'a> {
    /// `None` for an unsupported JPEG. The segments were validated before: their lengths fit.
    pub fn read(bytes: &'a [u8]) -> Result<Option<Self>, Broken> {
        let mut found = Self {
            width: 0,
            height: 0,
            is_progressive: false,
            components: Vec::new(),
            quantisation: [const { None }; 4],
            dc_tables: [const { None }; 4],
            ac_tables: [const { None }; 4],
            restart: 0,
            data: &[],
        };
        let mut at = 2;
        loop {
            let marker = *bytes.get(at).ok_or(DAMAGED)?;
            at += 1;
            if matches!(marker, 0xff | 0x01 | 0xd0..=0xd7) {
                continue;
            }
            let length = bytes.get(at..at + 2).ok_or(DAMAGED)?;
            let length = usize::from(u16::from_be_bytes([length[0], length[1]])).max(2);
            let body = bytes.get(at + 2..at + length).ok_or(DAMAGED)?;
            at += length;
            match marker {
                0xdb => found.take_quantisation(body)?,
                0xc4 => table_of_codes(body, &mut found.dc_tables, &mut found.ac_tables)?,
                0xdd => found.restart = body.first_chunk().map_or(0, |two| u16::from_be_bytes(*two).into()),
                0xc0..=0xc2 => {
                    let is_read_here = found.take_frame(body)?;
                    if !is_read_here {
                        return Ok(None);
                    }
                    found.is_progressive = marker == 0xc2;
                }
                // Colour transform 1 of Adobe's APP14 segment is YCbCr; other values are left to the library's decoder.
                0xee if body.starts_with(b"Adobe") && body.get(11) != Some(&1) => return Ok(None),
                0xda if found.is_progressive => {
                    found.data = &bytes[at - length - 1..];
                    // Quantisation tables between scans are left to the library's decoder. Entropy-coded data never contains
                    // their marker.
                    let has_steps_later = memchr::memmem::find(found.data, &[0xff, 0xdb]).is_some();
                    return Ok((!has_steps_later && !found.components.is_empty()).then_some(found));
                }
                0xda => {
                    found.data = &bytes[at..];
                    return Ok(found.take_scan(body)?.then_some(found));
                }
                _ => {}
            }
        }
    }

    fn take_quantisation(&mut self, mut body: &[u8]) -> Result<(), Broken> {
        while let [kind, rest @ ..] = body {
            let (is_wide, number) = (kind >> 4 != 0, usize::from(kind & 3));
            let (table, after) = rest.split_at_checked(if is_wide { 128 } else { 64 }).ok_or(DAMAGED)?;
            let step = |at: usize| match is_wide {
                true => u16::from_be_bytes([table[2 * at], table[2 * at + 1]]),
                false => table[at].into(),
            };
            self.quantisation[number] = Some(Box::new(std::array::from_fn(step)));
            body = after;
        }
        Ok(())
    }

    /// Parses the frame header. Returns whether it is supported: one or three components, chroma no finer than luma.
    fn take_frame(&mut self, body: &[u8]) -> Result<bool, Broken> {
        let [8, h1, h0, w1, w0, count, rest @ ..] = body else { return Ok(false) };
        (self.width, self.height) =
            (u16::from_be_bytes([*w1, *w0]).into(), u16::from_be_bytes([*h1, *h0]).into());
        let of = |three: &[u8]| Component {
            id: three[0],
            across: (three[1] >> 4).into(),
            down: (three[1] & 15).into(),
            quantisation: (three[2] & 3).into(),
            dc_table: 0,
            ac_table: 0,
        };
        self.components = rest.chunks_exact(3).map(of).collect();
        if self.components.len() != usize::from(*count) {
            return Err(DAMAGED);
        }
        Ok(match self.components.as_mut_slice() {
            [grey] => {
                // The blocks of a scan with one component are not interleaved, whatever its sampling factors.
                (grey.across, grey.down) = (1, 1);
                true
            }
            [light, blue, red] => {
                let is_rgb = [light.id, blue.id, red.id] == *b"RGB";
                let finest = matches!((light.across, light.down), (1 | 2, 1 | 2));
                !is_rgb && finest && [blue, red].iter().all(|colour| (colour.across, colour.down) == (1, 1))
            }
            _ => false,
        })
    }

    /// Parses the scan header. Returns whether the scan has all components in order.
    fn take_scan(&mut self, body: &[u8]) -> Result<bool, Broken> {
        let [count, rest @ ..] = body else { return Err(DAMAGED) };
        let named = rest.get(..2 * usize::from(*count)).ok_or(DAMAGED)?;
        if self.components.is_empty() || usize::from(*count) != self.components.len() {
            return Ok(false);
        }
        for (component, two) in self.components.iter_mut().zip(named.chunks_exact(2)) {
            if component.id != two[0] {
                return Ok(false);
            }
            (component.dc_table, component.ac_table) = ((two[1] >> 4 & 3).into(), (two[1] & 3).into());
        }
        Ok(true)
    }

    pub fn size(&self) -> (usize, usize) {
        (self.width, self.height)
    }

    /// The largest sampling factors, horizontal and vertical.
    fn finest(&self) -> (usize, usize) {
        (self.components[0].across, self.components[0].down)
    }

    /// Number of MCUs, horizontal and vertical.
    pub fn groups(&self) -> (usize, usize) {
        let finest = self.finest();
        (self.width.div_ceil(8 * finest.0), self.height.div_ceil(8 * finest.1))
    }

    /// Number of blocks of a component that contain pixels of the image, horizontal and vertical.
    pub fn blocks(&self, number: usize) -> (usize, usize) {
        let (component, finest) = (&self.components[number], self.finest());
        let blocks = |pixels: usize, own: usize, finest: usize| (pixels * own).div_ceil(finest).div_ceil(8);
        (blocks(self.width, component.across, finest.0), blocks(self.height, component.down, finest.1))
    }

    /// Decodes the whole image to RGB.
    pub fn whole(&self, out: &mut Vec<u8>) -> Result<(), Broken> {
        let (width, height) = (self.width, self.height);
        let planes =
            self.planes(Crop { left: 0, top: 0, width, height, is_flipped: false }, width, height)?;
        // Every byte is overwritten.
        out.resize(width * height * 3, 0);
        colours(&planes, width, out);
        Ok(())
    }

    /// The planes of a crop, for a view of `width` x `height`.
    pub fn planes(&self, crop: Crop, width: usize, height: usize) -> Result<Vec<Plane>, Broken> {
        let scan = Scan::new(if self.is_progressive { &[] } else { self.data });
        // Uses the widest vectors available. Operations are not fused, so the result does not depend on them.
        #[cfg(target_arch = "x86_64")]
        if let Some(transform) = pulp::x86::V3::try_new() {
            let view = (width, height);
            return Simd::vectorize(
                transform,
                VectorisedPlanes { image: self, scan: &scan, crop, view, transform },
            );
        }
        self.decode_planes(&scan, crop, (width, height), Portable)
    }

    #[inline(always)]
    fn decode_planes(
        &self,
        scan: &Scan,
        crop: Crop,
        view: (usize, usize),
        transform: impl Transform,
    ) -> Result<Vec<Plane>, Broken> {
        let (finest, groups) = (self.finest(), self.groups());
        let across = Span::of(crop.left, crop.width, 8 * finest.0);
        let down = Span::of(crop.top, crop.height, 8 * finest.1);
        let mut decoders = Vec::new();
        for component in &self.components {
            decoders.push(ComponentDecoder::new(self, component, crop, view, (across, down))?);
        }
        if self.is_progressive {
            for (decoder, blocks) in decoders.iter_mut().zip(coefficients(self)?) {
                decoder.read = Some(blocks);
            }
        }
        let mut bits = scan.bits();
        let mut predictions = [0i32; 3];
        for row in 0..down.end {
            for column in 0..groups.0 {
                let number = row * groups.0 + column;
                let restart = if self.is_progressive { 0 } else { self.restart };
                if restart > 0 && number > 0 && number.is_multiple_of(restart) {
                    bits.restart()?;
                    predictions = [0; 3];
                }
                let is_seen = row >= down.begin && across.contains(column);
                for (decoder, prediction) in decoders.iter_mut().zip(&mut predictions) {
                    let at = is_seen.then(|| (column - across.begin, row - down.begin));
                    decoder.group(&mut bits, prediction, (column, row), at, transform)?;
                }
            }
            if bits.is_past_end() {
                return Err("its entropy-coded data ends too early");
            }
        }
        Ok(decoders.into_iter().map(|decoder| decoder.plane).collect())
    }
}

/// Parses the Huffman tables of a DHT segment.
pub(super) fn table_of_codes(
    mut body: &[u8],
    dc_tables: &mut [Option<Huffman>; 4],
    ac_tables: &mut [Option<Huffman>; 4],
) -> Result<(), Broken> {
    while let [kind, rest @ ..] = body {
        let (counts, rest) = rest.split_first_chunk::<16>().ok_or(DAMAGED)?;
        let total = counts.iter().map(|count| usize::from(*count)).sum();
        let (symbols, after) = rest.split_at_checked(total).ok_or(DAMAGED)?;
        let tables = if kind >> 4 == 0 { &mut *dc_tables } else { &mut *ac_tables };
        tables[usize::from(kind & 3)] = Some(Huffman::new(counts, symbols)?);
        body = after;
    }
    Ok(())
}

/// The arguments of [`Baseline::decode_planes`], for vectorisation.
#[cfg_attr(
    not(target_arch = "x86_64"),
    expect(dead_code, reason = "only x86-64 has vectors of two widths to choose from")
)]
struct VectorisedPlanes<'a, T> {
    image: &'a Baseline<'a>,
    scan: &'a Scan,
    crop: Crop,
    view: (usize, usize),
    transform: T,
}

impl<T: Transform> WithSimd for VectorisedPlanes<'_, T> {
    type Output = Result<Vec<Plane>, Broken>;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> Self::Output {
        self.image.decode_planes(self.scan, self.crop, self.view, self.transform)
    }
}

/// The MCUs that cover a range of pixels.
#[derive(Debug, Clone, Copy)]
struct Span {
    begin: usize,
    end: usize,
}

impl Span {
    fn of(start: usize, extent: usize, group: usize) -> Self {
        Self { begin: start / group, end: (start + extent).div_ceil(group) }
    }

    fn contains(&self, at: usize) -> bool {
        (self.begin..self.end).contains(&at)
    }

    fn count(&self) -> usize {
        self.end - self.begin
    }
}

/// The state of a component during decoding.
struct ComponentDecoder<'a> {
    /// Table of the only scan; progressive scans have their own.
    dc_table: Option<&'a Huffman>,
    ac_table: Option<&'a Huffman>,
    /// The coefficients of progressive scans.
    read: Option<Blocks>,
    steps: [f32; 64],
    /// Sampling factors: blocks per MCU.
    across: usize,
    down: usize,
    /// Width and height of a transformed block in pixels.
    size: usize,
    plane: Plane,
}

impl<'a> ComponentDecoder<'a> {
    fn new(
        image: &'a Baseline<'_>,
        component: &Component,
        crop: Crop,
        view: (usize, usize),
        (across, down): (Span, Span),
    ) -> Result<Self, Broken> {
        let finest = image.finest();
        let share = (component.across as f64 / finest.0 as f64, component.down as f64 / finest.1 as f64);
        let seen = (crop.width as f64 * share.0, crop.height as f64 * share.1);
        let suffices = |size: &usize| {
            let scale = *size as f64 / 8.0;
            seen.0 * scale >= SPARE * view.0 as f64 && seen.1 * scale >= SPARE * view.1 as f64
        };
        let size = [1, 2, 4].into_iter().find(suffices).unwrap_or(8);
        let scale = (share.0 * size as f64 / 8.0, share.1 * size as f64 / 8.0);
        let first = (across.begin * component.across * size, down.begin * component.down * size);
        // Blocks beyond the image are the encoder's padding; their pixels are dropped.
        let end = |pixels: usize, scale: f64| (pixels as f64 * scale).ceil() as usize;
        let stride = across.count() * component.across * size;
        let rows = down.count() * component.down * size;
        let table =
            image.quantisation[component.quantisation].as_ref().ok_or("a quantisation table is missing")?;
        let codes = |tables: &'a [Option<Huffman>; 4], number: usize| {
            let table = tables[number].as_ref();
            if table.is_none() && !image.is_progressive {
                Err("a Huffman table is missing")
            } else {
                Ok(table)
            }
        };
        Ok(Self {
            dc_table: codes(&image.dc_tables, component.dc_table)?,
            ac_table: codes(&image.ac_tables, component.ac_table)?,
            read: None,
            steps: steps(table, size),
            across: component.across,
            down: component.down,
            size,
            plane: Plane {
                width: (end(image.width, scale.0) - first.0).min(stride),
                height: (end(image.height, scale.1) - first.1).min(rows),
                stride,
                // Every MCU of the crop is transformed, so every byte is overwritten.
                bytes: pooled_buffer(stride * rows),
                part: Region {
                    left: crop.left as f64 * scale.0 - first.0 as f64,
                    top: crop.top as f64 * scale.1 - first.1 as f64,
                    width: crop.width as f64 * scale.0,
                    height: crop.height as f64 * scale.1,
                    is_flipped: crop.is_flipped,
                },
            },
        })
    }

    /// Decodes the blocks of an MCU, and transforms them where the MCU has a position `at` in the crop.
    #[inline(always)]
    fn group(
        &mut self,
        bits: &mut Bits<'_>,
        prediction: &mut i32,
        group: (usize, usize),
        at: Option<(usize, usize)>,
        transform: impl Transform,
    ) -> Result<(), Broken> {
        for y in 0..self.down {
            for x in 0..self.across {
                let mut block = [0i16; 64];
                let is_flat = match (&self.read, self.dc_table, self.ac_table) {
                    (Some(read), ..) => {
                        let row = (group.1 * self.down + y) * read.across;
                        block = read.all[row + group.0 * self.across + x];
                        block[1..].iter().all(|coefficient| *coefficient == 0)
                    }
                    (None, Some(dc_table), Some(ac_table)) => {
                        *prediction = prediction.wrapping_add(dc_table.difference(bits)?);
                        if at.is_none() {
                            ac_table.coefficients::<false>(bits, &mut block)?;
                            continue;
                        }
                        let is_flat = !ac_table.coefficients::<true>(bits, &mut block)?;
                        block[0] = *prediction as i16;
                        is_flat
                    }
                    _ => return Err(DAMAGED),
                };
                let Some((column, row)) = at else { continue };
                // This must stay the only call site: otherwise the transform is not inlined here, and its vectors do not stay
                // in registers.
                self.put(&block, is_flat, (column * self.across + x, row * self.down + y), transform);
            }
        }
        Ok(())
    }

    /// Writes the pixels of the block at a column and a row of the crop.
    #[inline(always)]
    fn put(&mut self, block: &[i16; 64], is_flat: bool, at: (usize, usize), transform: impl Transform) {
        let (left, top) = (at.0 * self.size, at.1 * self.size);
        let stride = self.plane.stride;
        let (plane, steps) = (&mut self.plane.bytes[top * stride + left..], &self.steps);
        match self.size {
            8 if is_flat => {
                let grey = byte(f32::from(block[0]) * steps[0] + 128.0);
                (0..8).for_each(|row| plane[row * stride..row * stride + 8].fill(grey));
            }
            8 => transform.full(block, steps, plane, stride),
            4 => reduced::<4>(block, steps, plane, stride),
            2 => reduced::<2>(block, steps, plane, stride),
            _ => reduced::<1>(block, steps, plane, stride),
        }
    }
}
