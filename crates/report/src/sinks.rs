//! Everyone beside the log who is told the events of a run, whichever program trains it.

use flatout_train::training::trainer::Sink;

use crate::report::AtEnd;
use crate::tensorboard::Board;

/// TensorBoard's file and the report.
#[derive(Default)]
pub struct Sinks {
    board: Board,
    report: AtEnd,
}

impl Sinks {
    pub fn all(&mut self) -> [&mut dyn Sink; 2] {
        [&mut self.board, &mut self.report]
    }
}
