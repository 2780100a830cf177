//! Spans of the host's work while updates were made.

use std::time::Instant;

/// A stretch of the host's time, in seconds since recording began.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    pub what: &'static str,
    pub begin: f64,
    pub end: f64,
}

/// Spans in the order they ended, where somebody asked for them.
#[derive(Default)]
pub struct Spans {
    began: Option<Instant>,
    spans: Vec<Span>,
}

impl Spans {
    /// Records from now on, forgetting what there was.
    pub fn begin(&mut self) {
        (self.began, self.spans) = (Some(Instant::now()), vec![]);
    }

    /// The recorded spans; recording ends.
    pub fn take(&mut self) -> Vec<Span> {
        self.began = None;
        std::mem::take(&mut self.spans)
    }

    /// Does something, and notes how long it took where recording is on.
    pub fn within<T>(&mut self, what: &'static str, work: impl FnOnce() -> T) -> T {
        let Some(began) = self.began else { return work() };
        let begin = began.elapsed().as_secs_f64();
        let made = work();
        self.spans.push(Span { what, begin, end: began.elapsed().as_secs_f64() });
        made
    }

    /// The same of work that may find nothing left to do, which is no span.
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
