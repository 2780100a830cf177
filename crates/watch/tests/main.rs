//! The integration tests of the crate in one binary: a server over real folders, with requests like a browser's.

mod client;
mod fuzz;
mod hostile;
mod load;
mod news;
