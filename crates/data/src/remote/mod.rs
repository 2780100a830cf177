//! Files that are read over HTTP: data sets of the Hugging Face hub, and objects of any server that answers ranges.
//!
//! ```text
//! access     who asks the hub, and where it answers: the variables that all of its tools read
//! http       one connection pool, redirections, the headers that ranges need
//! location   `hf://owner/set@revision/config:split` and `https://host/path-{000..146}.parquet`, read
//! hub        a data set at one commit: its files, found as its card or its folders say
//! object     a file on a server: any range of it, whatever breaks off, and an error where it changed
//! ranged     reads at any place of such a file by requests of some megabytes
//! cache      pieces of such files kept on disk, up to a bound
//! ```
//!
//! Nothing is written to disk unless a cache is asked for.

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
