//! Images with their classes: files in, batches of pixels out, in an order that can be resumed exactly.
//!
//! ```text
//! sources
//!    synthetic   ten classes, drawn as they are asked for
//!    cifar       records of labels and pixels, in memory
//!    paths       files behind the words of data.path
//!       -> folder      a folder a class
//!       -> table       rows that name images
//!       -> tar         members of archives
//!          -> samples      those that belong together
//!          -> webdataset   samples of images with a label
//!          -> archive_index   what was found in an archive, kept between runs
//!       -> found       encoded images and their labels as they are written
//!          -> encoded  with their classes, to be read one by one
//! stored      what the loader needs to know of any source: pixels or encoded bytes, and a class
//! flaw        what can be wrong with all of it
//!    -> sets        a specification opened: classes, and training and held-out images by the hash of their index or name
//!    -> decode      JPEG, PNG and WebP to pixels
//!    -> view        which part of an image is seen, at what size
//!    -> resample    that part, at that size, by one of the filters
//!    -> augment     RandAugment and random erasing of what training sees
//!    -> seen        all four of an image, whatever it is stored as
//!    -> loader      images in their global order, ahead of time, and the cursor
//! asked       images of any of these sources whose classes nobody knows
//! resident    a small set as one table of bytes, and what samples see of it
//! inspect     a look into all of it, and how fast it is
//! ```
//!
//! A sample's pixels are a function of the set, the view, the seed and the sample's place in the series of all samples:
//! threads, batches and where a run was stopped change nothing.

mod asked;
mod augment;
mod decode;
mod filter;
mod flaw;
mod inspect;
mod loader;
mod resample;
mod resident;
mod seen;
mod set;
mod sets;
mod sources;
mod stored;
pub mod thumbnail;
mod view;

pub use asked::{AskedImages, asked};
pub use augment::{Changes, ErasedWith, Erasing, RandAugment};
pub use decode::MAX_PIXELS;
pub(crate) use decode::{decode, header};
pub use filter::Filter;
pub use flaw::Flaw;
pub use inspect::{ImageInspection, ImageSample, ImageSpeed, inspect, time};
pub use loader::{ImageBatch, ImageLoader, ordered};
pub use resident::{ByteTable, PartLoader};
pub(crate) use seen::seen;
pub use set::ImageSet;
pub use sets::{ImageDescription, ImageSets, ImageSource, ImageSpec, open};
pub(crate) use sources::encoded::{Archive as OpenArchive, Member};
pub(crate) use sources::folder::{ENDINGS, OTHER_ENDINGS};
pub(crate) use sources::paths::files;
pub(crate) use sources::samples::{Sample, Samples};
pub(crate) use sources::tar::{Archive, Entry};
pub(crate) use stored::Stored;
pub use view::{Augment, Scaled, View};

/// Red, green and blue: all that images are fed with, whatever they are stored as.
pub const CHANNELS: usize = 3;
