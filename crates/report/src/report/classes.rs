//! Classification metrics in the report: the newest evaluation, the best one, and the confusion matrix.

use std::fmt::Write;

use super::cell;
use crate::history::History;
use crate::words::count;
use flatout_train::metrics::{ClassMetrics, Score};

/// Rows of the result for the newest evaluation and, by `eval.metric`, the best.
pub(super) fn rows(history: &History, newest: &ClassMetrics) -> Vec<(&'static str, String)> {
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

/// The confusion matrix, a row per class, with the names of classes where they are known.
pub(super) fn table(metrics: &ClassMetrics, names: &[String]) -> String {
    let classes = metrics.confusion.classes();
    let name = |class: usize| names.get(class).map_or_else(|| class.to_string(), |name| cell(name));
    let mut out = String::from("## Confusion matrix\n\n| class |");
    for class in 0..classes {
        let _ = write!(out, " predicted {} |", name(class));
    }
    let _ = writeln!(out, "\n|---|{}", "---|".repeat(classes));
    for (class, row) in metrics.confusion.0.iter().enumerate() {
        let _ = write!(out, "| {} |", name(class));
        for texts in row {
            let _ = write!(out, " {} |", count(*texts));
        }
        out.push('\n');
    }
    out.push('\n');
    out
}

/// The most classes for which the matrix is shown.
pub(super) const MOST_IN_TABLE: usize = 20;

#[cfg(test)]
mod tests {
    use super::*;
    use flatout_train::metrics::Confusion;

    #[test]
    fn every_class_has_a_row() {
        let metrics = Confusion(vec![vec![50, 10], vec![5, 1035]]).metrics();
        let rows =
            |names: &[String]| table(&metrics, names).lines().skip(2).map(String::from).collect::<Vec<_>>();
        assert_eq!(
            rows(&[]),
            [
                "| class | predicted 0 | predicted 1 |",
                "|---|---|---|",
                "| 0 | 50 | 10 |",
                "| 1 | 5 | 1,035 |",
                ""
            ]
        );
        let named = rows(&["bad".into(), "good|better".into()]);
        assert_eq!(named[0], "| class | predicted bad | predicted good\\|better |");
        assert_eq!(named[3], "| good\\|better | 5 | 1,035 |");
    }
}
