//! Classes in the report: the numbers of the newest evaluation, the best one, and the table of what was taken for what.

use std::fmt::Write;

use crate::history::History;
use crate::words::count;
use flatout_train::metrics::{Metrics, Score};

/// Rows of the result for the newest evaluation and, by `eval.metric`, the best.
pub(super) fn rows(history: &History, newest: &Metrics) -> Vec<(&'static str, String)> {
    let three = |score: Score| {
        format!("{:.4} (precision {:.4}, recall {:.4})", score.f1, score.precision, score.recall)
    };
    let mut rows = vec![("accuracy", format!("{:.4}", newest.accuracy))];
    rows.extend(newest.positive.map(|score| ("F1 of the positive class", three(score))));
    rows.push(("macro F1", three(newest.mean)));
    let metric = history.config.eval.metric;
    let mut best: Option<(u64, f64)> = None;
    for (step, metrics) in &history.metrics {
        let loss = history.evals.iter().find(|(at, _)| at == step).map_or(f32::NAN, |(_, loss)| *loss);
        let Some(value) = metric.of(loss, Some(metrics)) else { continue };
        if best.is_none_or(|(_, before)| metric.is_better(value, before)) {
            best = Some((*step, value));
        }
    }
    rows.extend(
        best.map(|(step, value)| {
            ("best evaluation", format!("{metric} {value:.4} after step {}", count(step)))
        }),
    );
    rows
}

/// The table, a row a class.
pub(super) fn table(metrics: &Metrics) -> String {
    let classes = metrics.confusion.classes();
    let mut out = String::from("## What was taken for what\n\n| class |");
    for class in 0..classes {
        let _ = write!(out, " taken for {class} |");
    }
    let _ = writeln!(out, "\n|---|{}", "---|".repeat(classes));
    for (class, row) in metrics.confusion.0.iter().enumerate() {
        let _ = write!(out, "| {class} |");
        for texts in row {
            let _ = write!(out, " {} |", count(*texts));
        }
        out.push('\n');
    }
    out.push('\n');
    out
}

/// Classes beyond which the table fills no page any more.
pub(super) const MOST_IN_TABLE: usize = 20;

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_train::metrics::Confusion;

    #[test]
    fn a_row_a_class() {
        let metrics = Confusion(vec![vec![50, 10], vec![5, 1035]]).metrics();
        assert_eq!(
            table(&metrics),
            "## What was taken for what\n\n| class | taken for 0 | taken for 1 |\n|---|---|---|\n| 0 | 50 | 10 |\n\
             | 1 | 5 | 1,035 |\n\n"
        );
    }
}
