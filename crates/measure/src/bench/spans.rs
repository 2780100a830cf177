//! Records spans of the host's work while updates are made.

use std::time::Instant;

/// A stretch of the host's time, in seconds since recording began.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    pub what: &'static str,
    pub begin: f64,
    pub end: f64,
}

/// Recorded spans in the order they ended; none while recording is off.
#[derive(Default)]
pub struct Spans {
    began: Option<Instant>,
    spans: Vec<Span>,
}

impl Spans {
    /// Discards recorded spans and starts recording.
    pub fn begin(&mut self) {
        (self.began, self.spans) = (Some(Instant::now()), vec![]);
    }

    /// Stops recording and returns the spans.
    pub fn take(&mut self) -> Vec<Span> {
        self.began = None;
        std::mem::take(&mut self.spans)
    }

    /// Runs `work` and, where recording is on, records its span.
    pub fn within<T>(&mut self, what: &'static str, work: impl FnOnce() -> T) -> T {
        let Some(began) = self.began else { return work() };
        let begin = began.elapsed().as_secs_f64();
        let made = work();
        self.spans.push(Span { what, begin, end: began.elapsed().as_secs_f64() });
        made
    }

    /// Like `within`, for work that may find nothing left to do, which records no span.
    pub fn within_some<T, E>(
        &mut self,
        what: &'static str,
        work: impl FnOnce() -> Result<Option<T>, E>,
    ) -> Result<Option<T>, E> {
        let made = self.within(what, work);
        if matches!(made, Ok(None)) {
            self.spans.pop();
        }
        made
    }
}
