//! Images that stand among the tokens of a text.
//!
//! ```text
//! patching   how an image is scaled and cut, from its sides alone
//!    -> grid      its patches, their order, the learned positions each reads, and where tokens of a text with images stand
//!       -> tower     the inputs of a plan that follow from grids
//! frames     the inputs of a plan that follow from which image every frame of a video is
//! store      the images of a set: where their bytes lie, their sides and hashes
//!    -> patches   the bytes of an image's patches
//!    -> pruning   which of its blocks a text is shown, where not all
//!    -> loader    updates of examples with the patches, features or frames of their images, ahead of time
//! feature_cache   features of images that a tower made before, in a folder (feature_index: its index.json; feature_writer)
//! frame_store   frames of videos: where their bytes lie, and the pixels that a plan reads of them
//! data_url   images that are written into a text
//!       -> scaling   a whole image at another size, byte for byte as published processors make it (scaling_avx2: its inner loops)
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
