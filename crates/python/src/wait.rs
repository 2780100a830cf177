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

/// Said by a thread to the caller that waits for it.
pub enum Said<M, T> {
    Message(M),
    Done(Result<T, Failure>),
}

/// The thread's side: messages are handed over one by one, so that the work is at most a message ahead of the caller. A
/// caller that has gone hears nothing more.
pub struct Speaker<M, T>(SyncSender<Said<M, T>>);

impl<M, T> Speaker<M, T> {
    pub fn say(&self, message: M) {
        let _ = self.0.send(Said::Message(message));
    }

    /// Does the work and says how it ended, also where it panicked. Gives whether it did not.
    pub fn conclude(self, work: impl FnOnce(&Self) -> Result<T, Failure>) -> bool {
        let worked = catch_unwind(AssertUnwindSafe(|| work(&self)));
        let is_sound = worked.is_ok();
        let _ = self.0.send(Said::Done(worked.unwrap_or_else(|payload| Err(panicked(&*payload)))));
        is_sound
    }
}

fn panicked(payload: &(dyn Any + Send)) -> Failure {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    let text = text.or(payload.downcast_ref::<&str>().copied()).unwrap_or("no words");
    Failure::Environment(format!("a bug of flatout ended the work: {text}"))
}

/// Both ends of a conversation.
pub fn conversation<M, T>() -> (Speaker<M, T>, Receiver<Said<M, T>>) {
    let (sender, receiver) = sync_channel(0);
    (Speaker(sender), receiver)
}

/// Waits until the work is done. `take` gets every message with the GIL held. Where it raises, or a signal's handler does, `stop`
/// asks the work to end, and the exception comes out, unchanged, when it has. A second signal does not wait for that: the thread ends
/// by itself.
pub fn wait<M: Send, T: Send>(
    py: Python<'_>,
    mut said: Receiver<Said<M, T>>,
    stop: &dyn Fn(),
    take: &mut dyn FnMut(M) -> PyResult<()>,
) -> PyResult<T> {
    let mut trouble: Option<PyErr> = None;
    loop {
        let heard = &mut said;
        match py.detach(move || heard.recv_timeout(SIGNALS_EVERY)) {
            Ok(Said::Message(message)) => {
                if trouble.is_none()
                    && let Err(error) = take(message)
                {
                    trouble = Some(error);
                    stop();
                }
            }
            Ok(Said::Done(result)) => return trouble.map_or_else(|| result.map_err(raised), Err),
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
