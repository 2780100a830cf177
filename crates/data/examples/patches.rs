//! Measures how many images per second one thread turns into patches.
//!
//! ```text
//! cargo run --release -p flatout-data --example patches -- photos/*.jpg
//! ```

use std::path::PathBuf;

use flatout_data::images::MAX_PIXELS;
use flatout_data::vision::{ImageReader, ImageStore, Patching};

/// Seconds spent on each image.
const SECONDS: f64 = 2.0;

/// CPU time of this thread, which does not depend on other processes.
fn on_cpu() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux counts them");
    1e-9 * text.split_whitespace().next().and_then(|first| first.parse::<f64>().ok()).expect("a number")
}

fn main() {
    let patching = Patching {
        patch: 16,
        merge: 2,
        least_pixels: 65_536,
        most_pixels: 16_777_216,
        ..Patching::default()
    };
    for path in std::env::args().skip(1).map(PathBuf::from) {
        let reader = ImageReader::new(patching, MAX_PIXELS, 1 << 30);
        let image = match reader.read_file(path.clone()) {
            Ok(image) => image,
            Err(flaw) => {
                eprintln!("{}", flaw.sentence());
                std::process::exit(2);
            }
        };
        let mut store = ImageStore::new(patching, MAX_PIXELS);
        let number = store.number(&image);
        let mut out = vec![0; image.grid.patches() * patching.patch * patching.patch * 3];
        store.patches(number, &mut out).expect("an image that was looked into");
        let (began, mut made) = (on_cpu(), 0);
        while on_cpu() - began < SECONDS {
            store.patches(number, &mut out).expect("an image that was looked into");
            made += 1;
        }
        let each = (on_cpu() - began) / f64::from(made);
        println!(
            "{}: {} x {} to {} x {} patches, {:.1} images/s, {:.2} ms, {:.1} ns a pixel",
            path.display(),
            image.width,
            image.height,
            image.grid.columns,
            image.grid.rows,
            1.0 / each,
            1e3 * each,
            1e9 * each / (image.width * image.height) as f64
        );
    }
}
