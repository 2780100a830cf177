//! Sources of images: folders, tables, archives, files of CIFAR, and a generator.

pub(super) mod archive_index;
pub(super) mod cifar;
pub(super) mod cifar_python;
pub(super) mod encoded;
pub(super) mod folder;
pub(super) mod found;
pub(super) mod paths;
mod pickle;
pub(super) mod samples;
pub(super) mod synthetic;
pub(super) mod table;
pub(super) mod tar;
pub(super) mod webdataset;
