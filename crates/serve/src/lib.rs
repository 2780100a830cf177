//! A model behind HTTP, in the forms of OpenAI's API: programs that know that API need only another address.
//!
//! ```text
//! api        requests and answers as JSON: what is asked for, what is refused by name, what is said
//! model      the model as requests see it: its name, tokens of texts and conversations, names of tokens
//! front      a request of HTTP to a job, on the threads of the server
//! outlet     the answer to a job, whole or as a stream, as its texts grow
//! worker     the loop that gives jobs to the generator and its news to their outlets
//! ```
//!
//! The worker has the generator to itself; a queue of bounded length leads to it. Who goes away is forgotten by the next step.
#![forbid(unsafe_code)]

pub mod api;
mod front;
mod model;
mod outlet;
mod worker;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::mpsc;

use flatout_http::{Bodies, Guard, Server, Settings};
use flatout_train::Failure;
use flatout_train::infer::generate::Generator;

use api::error::ApiError;
use front::Front;
pub use model::{Conversation, Model};
use worker::Job;

/// Bytes of a body: a prompt as long as any context, as token ids.
const BODY_BYTES: usize = 4 << 20;
/// The same of a model that sees: images are in the body.
const BODY_BYTES_WITH_IMAGES: usize = 32 << 20;
/// Bytes of all bodies that are read and not used yet.
const BODIES_BYTES: usize = 64 << 20;
/// Connections at once: more wait.
const CONNECTIONS: usize = 512;

/// A server whose model is not worked with yet.
pub struct Service {
    server: Server,
    front: Arc<Front>,
    jobs: mpsc::Receiver<Job>,
}

impl Service {
    /// Listens. Requests wait until [`Service::run`].
    pub fn start(listener: TcpListener, model: Model, key: Option<String>) -> io::Result<Service> {
        let most_bytes = if model.sees() { BODY_BYTES_WITH_IMAGES } else { BODY_BYTES };
        let settings = Settings {
            guard: Guard::with_key(listener.local_addr()?, key),
            bodies: Some(Bodies { most_bytes, all_bytes: BODIES_BYTES }),
            immediate: front::health,
            connections: CONNECTIONS,
            refusal: |status, sentence| ApiError::with_status(status, sentence).answer(),
        };
        let (sender, jobs) = mpsc::channel();
        let front = Arc::new(Front::new(model, sender));
        let answering = Arc::clone(&front);
        let server = flatout_http::start_with(listener, settings, move |request| answering.reply(request))?;
        Ok(Service { server, front, jobs })
    }

    pub fn url(&self) -> &str {
        self.server.url()
    }

    pub fn address(&self) -> SocketAddr {
        self.server.address
    }

    /// Answers requests until `stop` says so, and then no new ones: what was begun has a few seconds to end. `log` is given a line
    /// for every request that has ended.
    pub fn run(
        self,
        generator: &mut Generator,
        stop: &dyn Fn() -> bool,
        log: &dyn Fn(String),
    ) -> Result<(), Failure> {
        let outcome = worker::work(generator, &self.jobs, &self.front, stop, log);
        self.server.close();
        outcome
    }
}
