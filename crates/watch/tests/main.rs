//! The integration tests of the crate in one binary: a server over real folders, asked as a browser asks it.

mod client;
mod fuzz;
mod hostile;
mod load;
mod news;
