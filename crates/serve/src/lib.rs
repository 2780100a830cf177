//! Serves a model over HTTP in the formats of OpenAI's API: programs for that API only need another address.
//!
//! ```text
//! api        requests and responses as JSON, and the fields that are refused
//! model      the served model: its name, tokenisation of texts and conversations, names of tokens
//! front      turns HTTP requests into jobs, on the threads of the server
//! outlet     writes the response to a job, whole or as a stream, while its texts grow
//! worker     the loop that submits jobs to the generator and passes its progress to their outlets
//! ```
//! Only the worker uses the generator; requests reach it through a bounded queue. A job whose client has disconnected is
//! cancelled at the next step.
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

/// The most bytes of a body: a prompt as long as any context, as token ids.
const BODY_BYTES: usize = 4 << 20;
/// The same for a model that sees images, which are in the body.
const BODY_BYTES_WITH_IMAGES: usize = 32 << 20;
/// The most bytes of all bodies that are read and not processed yet.
const BODIES_BYTES: usize = 64 << 20;
/// The most simultaneous connections; further ones wait.
const CONNECTIONS: usize = 512;

/// A server that listens and does not answer yet.
pub struct Service {
    server: Server,
    front: Arc<Front>,
    jobs: mpsc::Receiver<Job>,
}

impl Service {
    /// Starts to listen. Requests wait until [`Service::run`].
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

    /// Answers requests until `stop` returns true; then refuses new ones and gives running ones a few seconds to end. `log` is
    /// called with a line for every request that has ended.
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
