//! Images with classes: from files to batches of pixels, in an order that can be resumed exactly.
//!
//! ```text
//! sources
//!    synthetic   ten generated classes
//!    cifar       records of labels and pixels, in memory
//!    paths       files that the entries of data.path name
//!       -> folder      one folder per class
//!       -> table       rows that name images
//!       -> tar         members of archives
//!          -> samples      members that belong together
//!          -> webdataset   samples of images with a label
//!          -> archive_index   the members of an archive, cached between runs
//!       -> found       encoded images with their labels as written
//!          -> encoded  with classes, read on demand
//! stored      the trait of a source: pixels or encoded bytes, and a class
//! flaw        what can be wrong with an image or an archive
//!    -> sets        opens a specification: classes, and training and held-out images by the hash of their index or name
//!    -> decode      JPEG, PNG and WebP to pixels
//!    -> view        the crop of an image and its size
//!    -> resample    resizes that crop with one of the filters
//!    -> augment     RandAugment and random erasing for training
//!    -> apply_view  applies all four to an image
//!    -> loader      images in their global order, ahead of time, and the cursor
//! unlabelled       images to classify, of any of these sources
//! resident    a small set as one table of bytes, with the crops of samples
//! inspect     statistics of a set, and the decoding speed
//! ```
//!
//! A sample's pixels are a function of the set, the view, the seed and the sample's index in the series of all samples;
//! threads, batches and interruptions do not change them.

mod apply_view;
mod augment;
mod decode;
mod filter;
mod flaw;
mod inspect;
mod loader;
mod resample;
mod resident;
mod set;
mod sets;
mod sources;
mod stored;
pub mod thumbnail;
mod unlabelled;
mod view;

pub(crate) use apply_view::apply_view;
pub use augment::{Changes, ErasedWith, Erasing, RandAugment};
pub use decode::MAX_PIXELS;
pub(crate) use decode::{decode, header};
pub use filter::Filter;
pub use flaw::Flaw;
pub use inspect::{ImageInspection, ImageSample, ImageSpeed, inspect, time};
pub use loader::{ImageBatch, ImageLoader, ordered};
pub use resident::{ByteTable, PartLoader};
pub use set::ImageSet;
pub use sets::{ImageDescription, ImageSets, ImageSource, ImageSpec, open};
pub(crate) use sources::encoded::{Archive as OpenArchive, Member};
pub(crate) use sources::folder::{ENDINGS, OTHER_ENDINGS};
pub(crate) use sources::paths::files;
pub(crate) use sources::samples::{Sample, Samples};
pub(crate) use sources::tar::{Archive, Entry};
pub(crate) use stored::Stored;
pub use unlabelled::{UnlabelledImages, open_unlabelled};
pub use view::{Augment, Scaled, View};

/// Red, green and blue: the channels of every image, whatever its stored form.
pub const CHANNELS: usize = 3;
