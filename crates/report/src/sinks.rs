//! All sinks of a run's events besides the log, for every program that trains.

use flatout_train::training::trainer::Sink;

use crate::mlflow::Mlflow;
use crate::report::AtEnd;
use crate::tensorboard::Board;

/// TensorBoard's file, the report, and an MLflow server.
#[derive(Default)]
pub struct Sinks {
    board: Board,
    report: AtEnd,
    mlflow: Mlflow,
}

impl Sinks {
    pub fn all(&mut self) -> [&mut dyn Sink; 3] {
        [&mut self.board, &mut self.report, &mut self.mlflow]
    }
}
