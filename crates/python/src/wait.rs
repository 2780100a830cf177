//! A caller that waits for a thread of ours: without the GIL, passing on what the thread says, and awake for signals.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use flatout_train::Failure;
use pyo3::prelude::*;

use crate::fault::{Error, raised};

/// How often signals are looked for.
const SIGNALS_EVERY: Duration = Duration::from_millis(50);

/// Causes of an exception that are followed: they may go round in a circle.
const LONGEST_CHAIN: usize = 100;

/// What a thread tells the caller that waits for it.
pub enum WorkerEvent<M, T> {
    Message(M),
    Done(Result<T, Failure>),
}

/// The thread's side: messages are handed over one by one, so that the work is at most a message ahead of the caller. A
/// caller that has gone hears nothing more.
pub struct Speaker<M, T>(SyncSender<WorkerEvent<M, T>>);

impl<M, T> Speaker<M, T> {
    pub fn say(&self, message: M) {
        let _ = self.0.send(WorkerEvent::Message(message));
    }

    /// Does the work and says how it ended, also where it panicked. Gives whether it did not.
    pub fn conclude(self, work: impl FnOnce(&Self) -> Result<T, Failure>) -> bool {
        let worked = catch_unwind(AssertUnwindSafe(|| work(&self)));
        let is_sound = worked.is_ok();
        let _ = self.0.send(WorkerEvent::Done(worked.unwrap_or_else(|payload| Err(panicked(&*payload)))));
        is_sound
    }
}

fn panicked(payload: &(dyn Any + Send)) -> Failure {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    let text = text.or(payload.downcast_ref::<&str>().copied()).unwrap_or("no words");
    Failure::Environment(format!("a bug of flatout ended the work: {text}"))
}

/// Both ends of a conversation.
pub fn conversation<M, T>() -> (Speaker<M, T>, Receiver<WorkerEvent<M, T>>) {
    let (sender, receiver) = sync_channel(0);
    (Speaker(sender), receiver)
}

/// Waits until the work is done. `take` gets every message with the GIL held. Where it raises, or a signal's handler does, `stop`
/// asks the work to end, and the exception comes out, unchanged, when it has; where the work failed to end well, that is its cause. A
/// second signal does not wait for that: the thread ends by itself.
pub fn wait<M: Send, T: Send>(
    py: Python<'_>,
    mut said: Receiver<WorkerEvent<M, T>>,
    stop: &dyn Fn(),
    take: &mut dyn FnMut(M) -> PyResult<()>,
) -> PyResult<T> {
    let mut trouble: Option<PyErr> = None;
    loop {
        let heard = &mut said;
        match py.detach(move || heard.recv_timeout(SIGNALS_EVERY)) {
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

/// The exception of the caller with the failure of the work as its cause, or, where it has causes of its own, as the first of
/// them: a traceback shows them all.
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
