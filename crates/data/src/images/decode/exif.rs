//! EXIF orientation: reads it, and rotates and mirrors pixels upright.

/// The EXIF orientation, from 1 (upright) to 8.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Orientation(u8);

impl Default for Orientation {
    fn default() -> Self {
        Self(1)
    }
}

const ORIENTATION: u16 = 0x0112;
const SHORT: u16 = 3;

impl Orientation {
    /// Parses EXIF data, which begin with a TIFF header; upright where they are missing or invalid.
    pub fn of(exif: &[u8]) -> Self {
        Self::find(exif)
            .filter(|number| (1..=8).contains(number))
            .map_or_else(Self::default, |number| Self(number as u8))
    }

    fn find(exif: &[u8]) -> Option<u16> {
        let is_little = match exif.get(..4)? {
            b"II*\0" => true,
            b"MM\0*" => false,
            _ => return None,
        };
        let short = |at: usize| -> Option<u16> {
            let bytes = exif.get(at..at.checked_add(2)?)?.try_into().ok()?;
            Some(if is_little { u16::from_le_bytes(bytes) } else { u16::from_be_bytes(bytes) })
        };
        let long = |at: usize| -> Option<usize> {
            let bytes = exif.get(at..at.checked_add(4)?)?.try_into().ok()?;
            Some(if is_little { u32::from_le_bytes(bytes) } else { u32::from_be_bytes(bytes) } as usize)
        };
        let directory = long(4)?;
        let entries = (0..usize::from(short(directory)?)).map(|entry| directory + 2 + 12 * entry);
        for entry in entries {
            if short(entry)? == ORIENTATION {
                return if short(entry + 2)? == SHORT { short(entry + 8) } else { None };
            }
        }
        None
    }

    /// Whether rows become columns.
    pub fn is_turned(self) -> bool {
        self.0 >= 5
    }

    /// Turns stored pixels upright and returns width and height of the result.
    pub fn upright(self, width: usize, height: usize, pixels: &mut Vec<u8>) -> (usize, usize) {
        if self.0 == 1 {
            return (width, height);
        }
        let (w, h) = if self.is_turned() { (height, width) } else { (width, height) };
        let mut turned = Vec::with_capacity(pixels.len());
        for y in 0..h {
            for x in 0..w {
                let (column, row) = match self.0 {
                    2 => (width - 1 - x, y),
                    3 => (width - 1 - x, height - 1 - y),
                    4 => (x, height - 1 - y),
                    5 => (y, x),
                    6 => (y, height - 1 - x),
                    7 => (width - 1 - y, height - 1 - x),
                    8 => (width - 1 - y, x),
                    _ => unreachable!("orientations are 1 to 8"),
                };
                turned.extend(&pixels[(row * width + column) * 3..][..3]);
            }
        }
        *pixels = turned;
        (w, h)
    }
}

#[cfg(test)]
pub(super) fn exif_of(orientation: u16, is_little: bool) -> Vec<u8> {
    let short = |number: u16| if is_little { number.to_le_bytes() } else { number.to_be_bytes() };
    let long = |number: u32| if is_little { number.to_le_bytes() } else { number.to_be_bytes() };
    let mut bytes = if is_little { b"II*\0".to_vec() } else { b"MM\0*".to_vec() };
    bytes.extend(long(8));
    bytes.extend(short(2));
    for (tag, value) in [(0x0100, 77), (ORIENTATION, orientation)] {
        bytes.extend([short(tag), short(SHORT)].concat());
        bytes.extend(long(1));
        bytes.extend([short(value), short(0)].concat());
    }
    bytes.extend(long(0));
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tag_is_found_in_both_byte_orders() {
        for number in 1..=8 {
            for is_little in [false, true] {
                assert_eq!(Orientation::of(&exif_of(number, is_little)), Orientation(number as u8));
            }
        }
        for wrong in [0, 9, 0x0600] {
            assert_eq!(Orientation::of(&exif_of(wrong, true)), Orientation::default());
        }
        let whole = exif_of(6, true);
        (0..whole.len() - 5).for_each(|end| {
            Orientation::of(&whole[..end]);
        });
        assert_eq!(Orientation::of(b"II*\0\xff\xff\xff\xff"), Orientation::default());
    }

    /// EXIF defines orientations by the side of the image at which the first stored row and column lie.
    #[test]
    fn pictures_are_turned_as_the_numbers_are_defined() {
        // Stored: a row of a b c over a row of d e f.
        let stored: Vec<u8> = b"abcdef".iter().flat_map(|letter| [*letter; 3]).collect();
        for (number, upright) in [
            (1, ["abc", "def", ""]),
            (2, ["cba", "fed", ""]),
            (3, ["fed", "cba", ""]),
            (4, ["def", "abc", ""]),
            (5, ["ad", "be", "cf"]),
            (6, ["da", "eb", "fc"]),
            (7, ["fc", "eb", "da"]),
            (8, ["cf", "be", "ad"]),
        ] {
            let mut pixels = stored.clone();
            let (width, height) = Orientation(number).upright(3, 2, &mut pixels);
            let letters: String = pixels.chunks(3).map(|pixel| char::from(pixel[0])).collect();
            assert_eq!(letters, upright.concat(), "orientation {number}");
            assert_eq!((width, height), if number < 5 { (3, 2) } else { (2, 3) });
        }
    }
}
