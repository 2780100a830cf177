//! Thumbnails of images, as PNG files of a bounded size.

use super::CHANNELS;

/// Sizes of the longer side to try, down to one that fits into four kilobytes whatever the image shows.
const SIDES: [usize; 4] = [64, 48, 40, 32];

/// A thumbnail of an image of this height and width, whose file has at most `most` bytes where the smallest size allows it.
/// Smaller images keep their size.
pub fn png([height, width]: [usize; 2], rgb: &[u8], most: usize) -> Vec<u8> {
    assert_eq!(rgb.len(), height * width * CHANNELS, "three bytes a pixel");
    let mut file = vec![];
    for side in SIDES {
        let longer = height.max(width);
        let scaled = |length: usize| if longer <= side { length } else { (length * side / longer).max(1) };
        let (rows, columns) = (scaled(height), scaled(width));
        file = encoded([rows, columns], &reduced([height, width], rgb, [rows, columns]));
        if file.len() <= most {
            break;
        }
    }
    file
}

/// Downscales by averaging rectangles.
fn reduced([height, width]: [usize; 2], rgb: &[u8], [rows, columns]: [usize; 2]) -> Vec<u8> {
    let span = |at: usize, of: usize, length: usize| at * length / of..((at + 1) * length).div_ceil(of);
    let mut small = Vec::with_capacity(rows * columns * CHANNELS);
    for row in 0..rows {
        for column in 0..columns {
            let (down, across) = (span(row, rows, height), span(column, columns, width));
            let count = (down.len() * across.len()) as u32;
            for channel in 0..CHANNELS {
                let pixels =
                    down.clone().flat_map(|y| across.clone().map(move |x| (y * width + x) * CHANNELS));
                let sum: u32 = pixels.map(|at| u32::from(rgb[at + channel])).sum();
                small.push(((sum + count / 2) / count) as u8);
            }
        }
    }
    small
}

fn encoded([rows, columns]: [usize; 2], rgb: &[u8]) -> Vec<u8> {
    let mut file = vec![];
    let mut encoder = png::Encoder::new(&mut file, columns as u32, rows as u32);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::High);
    let written = encoder.write_header().and_then(|mut writer| writer.write_image_data(rgb));
    written.expect("memory takes everything, and the size is right");
    file
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(file: &[u8]) -> ([usize; 2], Vec<u8>) {
        let mut reader = png::Decoder::new(std::io::Cursor::new(file)).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut pixels).unwrap();
        ([info.height as usize, info.width as usize], pixels)
    }

    #[test]
    fn small_images_stay_as_they_are() {
        let rgb: Vec<u8> = (0..5 * 7 * 3).map(|i| i as u8).collect();
        assert_eq!(read(&png([5, 7], &rgb, 4096)), ([5, 7], rgb));
    }

    #[test]
    fn large_images_are_scaled_by_means_and_fit() {
        let noise: Vec<u8> = (0..320 * 200 * 3u64).map(|i| (crate::random::key(1, i) >> 11) as u8).collect();
        let file = png([320, 200], &noise, 4096);
        assert!(file.len() <= 4096, "{} bytes", file.len());
        let [height, width] = read(&file).0;
        assert!(SIDES.contains(&height) && width == height * 200 / 320, "{height} x {width}");
        // Noise of the smallest size fits although it does not compress.
        assert!(png([32, 32], &noise[..32 * 32 * 3], 4096).len() <= 4096);
        let halves: Vec<u8> = (0..128 * 64).flat_map(|i| [if i < 64 * 64 { 0 } else { 200 }; 3]).collect();
        let (size, pixels) = read(&png([128, 64], &halves, 4096));
        assert_eq!(size, [64, 32]);
        assert_eq!((pixels[0], pixels[pixels.len() - 1]), (0, 200));
    }
}
