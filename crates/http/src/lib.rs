//! HTTP for this program: a thread that listens, checks who asks, and hands each request to one function.
//!
//! It knows nothing of runs and models. `guard` decides who may ask, `request` is what a function is given, `answer` what it
//! gives back: a whole body, or a stream that somebody goes on writing to, at once or later. hyper speaks the protocol; everything happens on one
//! thread, and functions run on a few threads beside it, so that a slow one delays nobody.
#![forbid(unsafe_code)]

pub mod answer;
pub mod guard;
mod patient;
pub mod request;
mod server;

pub use answer::{Answer, Messages, Promise, Reply, Stream};
pub use guard::{Guard, random_word};
pub use request::Request;
pub use server::{Bodies, Server, Settings, start, start_with};
