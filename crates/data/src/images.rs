//! Images with their classes: files in, batches of pixels out, in an order that can be resumed exactly.
//!
//! ```text
//! synthetic  ten classes, drawn as they are asked for
//! cifar      records of labels and pixels, in memory
//!    -> stored     what a sample needs to know of a source: pixels or encoded bytes, and a class
//!    -> sets       a specification opened: classes, and training and held-out images by the hash of their index or name
//!    -> view       which part of an image is seen, at what size
//!    -> resample   that part, at that size
//!    -> loader     images in their global order, ahead of time, and the cursor
//! ```
//!
//! A sample's pixels are a function of the set, the view, the seed and the sample's place in the series of all samples:
//! threads, batches and where a run was stopped change nothing.

mod cifar;
mod loader;
mod resample;
mod set;
mod sets;
mod stored;
mod synthetic;
mod view;

pub use loader::{ImageBatch, ImageLoader, ordered};
pub use set::ImageSet;
pub use sets::{ImageDescription, ImageSets, ImageSource, ImageSpec, open};
pub use view::{Augment, View};

/// Red, green and blue: all that images are fed with, whatever they are stored as.
pub const CHANNELS: usize = 3;
