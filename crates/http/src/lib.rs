//! HTTP for this program: a thread that listens, checks access, and passes each request to one function.
//!
//! The crate does not depend on runs or models. `guard` is access control, `request` the input of a function and `answer` its
//! output: a complete body, or a stream that is written later. hyper implements the protocol on one thread; functions run on a
//! few further threads, so that a slow one delays no other.
#![forbid(unsafe_code)]

pub mod answer;
pub mod guard;
pub mod request;
mod server;
mod write_timeout;

pub use answer::{Answer, Messages, Promise, Reply, Stream};
pub use guard::{Guard, random_word};
pub use request::Request;
pub use server::{Bodies, Server, Settings, start, start_with};
