//! Waits for a worker thread without the GIL, while handling its messages and signals.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use flatout_train::Failure;
use pyo3::prelude::*;

use crate::fault::{Error, raised};

/// The interval at which signals are checked.
const SIGNALS_EVERY: Duration = Duration::from_millis(50);

/// The most causes of an exception that are followed, because they may form a cycle.
const LONGEST_CHAIN: usize = 100;

/// A message from a worker thread to the waiting caller, or its result.
pub enum WorkerEvent<M, T> {
    Message(M),
    Done(Result<T, Failure>),
}

/// The worker's end of the channel. It is unbuffered, so that the work is at most one message ahead of the caller. Messages to a
/// caller that has gone are dropped.
pub struct Reporter<M, T>(SyncSender<WorkerEvent<M, T>>);

impl<M, T> Reporter<M, T> {
    pub fn report(&self, message: M) {
        let _ = self.0.send(WorkerEvent::Message(message));
    }

    /// Runs the work and sends its result, also after a panic. Returns false if it panicked.
    pub fn run(self, work: impl FnOnce(&Self) -> Result<T, Failure>) -> bool {
        let worked = catch_unwind(AssertUnwindSafe(|| work(&self)));
        let is_sound = worked.is_ok();
        let _ = self.0.send(WorkerEvent::Done(worked.unwrap_or_else(|payload| Err(panicked(&*payload)))));
        is_sound
    }
}

fn panicked(payload: &(dyn Any + Send)) -> Failure {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    let text = text.or(payload.downcast_ref::<&str>().copied()).unwrap_or("no message");
    Failure::Environment(format!("a bug of flatout ended the work: {text}"))
}

/// Both ends of an unbuffered channel.
pub fn worker_channel<M, T>() -> (Reporter<M, T>, Receiver<WorkerEvent<M, T>>) {
    let (sender, receiver) = sync_channel(0);
    (Reporter(sender), receiver)
}

/// Waits until the work is done. `take` is called with every message, with the GIL held. If it or a signal handler raises, `stop`
/// asks the work to end, and the exception is raised unchanged once it has; if the work then fails, that error becomes its cause.
/// A second signal does not wait for the thread, which ends by itself.
pub fn wait<M: Send, T: Send>(
    py: Python<'_>,
    mut events: Receiver<WorkerEvent<M, T>>,
    stop: &dyn Fn(),
    take: &mut dyn FnMut(M) -> PyResult<()>,
) -> PyResult<T> {
    let mut trouble: Option<PyErr> = None;
    loop {
        let receiver = &mut events;
        match py.detach(move || receiver.recv_timeout(SIGNALS_EVERY)) {
            Ok(WorkerEvent::Message(message)) => {
                if trouble.is_none()
                    && let Err(error) = take(message)
                {
                    trouble = Some(error);
                    stop();
                }
            }
            Ok(WorkerEvent::Done(result)) => {
                return match (result.map_err(raised), trouble) {
                    (result, None) => result,
                    (Ok(_), Some(trouble)) => Err(trouble),
                    (Err(failure), Some(trouble)) => Err(caused(py, trouble, failure)),
                };
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                let lost = || Error::new_err("the thread that worked is gone");
                return Err(trouble.unwrap_or_else(lost));
            }
        }
        if let Err(error) = py.check_signals() {
            if trouble.is_some() {
                return Err(error);
            }
            trouble = Some(error);
            stop();
        }
    }
}

/// The caller's exception with the failure of the work as its cause, or, if it has causes already, at the end of their chain, so
/// that a traceback shows them all.
fn caused(py: Python<'_>, trouble: PyErr, failure: PyErr) -> PyErr {
    let mut first = trouble.clone_ref(py);
    for _ in 0..LONGEST_CHAIN {
        let hides_context = || first.value(py).getattr("__suppress_context__")?.is_truthy();
        let before = first.cause(py).or_else(|| match hides_context() {
            Ok(false) => first.context(py),
            _ => None,
        });
        let Some(before) = before else { break };
        first = before;
    }
    first.set_cause(py, Some(failure));
    trouble
}
