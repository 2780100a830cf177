//! Files that are read over HTTP: data sets of the Hugging Face hub, and objects of any server that supports range requests.
//!
//! ```text
//! access     the hub's endpoint and the user's token, from the environment
//! http       the connection pool, redirects, the headers of range requests
//! location   parses `hf://owner/set@revision/config:split` and `https://host/path-{000..146}.parquet`
//! hub        the files of a data set at one commit, by its card or its folders
//! object     a remote file: reads ranges, resumes interrupted transfers, detects changes
//! ranged     random access to a remote file with buffered range requests
//! cache      an on-disk cache of pieces of remote files, of bounded size
//! ```
//!
//! Nothing is written to disk unless a cache is configured.

pub mod access;
pub(crate) mod cache;
#[cfg(test)]
pub(crate) mod exchange;
pub mod http;
pub(crate) mod hub;
pub mod location;
pub(crate) mod object;
pub(crate) mod ranged;
#[cfg(test)]
pub(crate) mod server;
#[cfg(test)]
mod tests;

pub use hub::pinned;
pub use location::is_remote;
pub use object::{Object, shown};
