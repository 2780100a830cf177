//! Images among the tokens of a text.
//!
//! ```text
//! patching   how an image is resized and cut into patches, from its size alone
//!    -> grid      the order of its patches, their learned positions, and the positions of tokens in a text with images
//!       -> tower     the inputs of a plan derived from grids
//! frames     the inputs of a plan derived from the image of every frame
//! store      the images of a set: the places of their bytes, their sizes and hashes
//!    -> patches   the bytes of an image's patches
//!    -> pruning   selects the blocks of an image that a text sees, where it does not see all
//!    -> loader    updates of examples with the patches, features or frames of their images, ahead of time
//! feature_cache   precomputed features of images, in a folder (feature_index: its index.json; feature_writer)
//! frame_store   frames of videos: the places of their bytes, and their pixels for a plan
//! data_url   images as data URLs
//!       -> scaling   resizes a whole image, byte for byte as published processors do (scaling_avx2: its inner loops)
//! ```

mod data_url;
mod feature_cache;
mod feature_index;
mod feature_writer;
mod frame_store;
mod frames;
mod grid;
mod loader;
mod patches;
mod patching;
mod pruning;
mod scaling;
#[cfg(target_arch = "x86_64")]
mod scaling_avx2;
mod store;
mod tower;

pub use data_url::{decode_data_url, is_data_url};
pub use feature_cache::{CachedImage, FeatureCache, StoredFeatures};
pub use feature_index::{FeatureFormat, FeatureIndex};
pub use feature_writer::{CacheWriter, PartSize};
pub(crate) use frame_store::FrameBytes;
pub use frame_store::FrameStore;
pub use frames::{FrameInputs, FrameRoom, LookRead, Video};
pub use grid::{Grid, Stretch, TAPS, positions};
pub use loader::{ImageLoader, ImageRows, SeenUpdate};
pub use patching::Patching;
pub use store::{EncodedImage, Given, ImageReader, ImageStore};
pub use tower::TowerInputs;
