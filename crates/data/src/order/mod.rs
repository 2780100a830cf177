//! The order of documents: held-out sides, permutations, mixtures, rows, and the loader that resumes exactly.
//!
//! ```text
//! documents   numbered documents, whatever they come from
//!    -> split         training and held-out documents, by the hash of their content
//!    -> permutation   an order of the documents an epoch, by index   (mixture: of several sources)
//!    -> pack          streams of documents, cut into rows
//!    -> loader        rows in their global order, ahead of time, and the cursor
//! lanes       which rows of an update a rank computes
//! stall       how long a loader was waited for
//! ```

pub(crate) mod documents;
pub(crate) mod lanes;
pub(crate) mod loader;
pub(crate) mod mixture;
pub(crate) mod pack;
pub(crate) mod permutation;
pub(crate) mod split;
pub(crate) mod stall;
