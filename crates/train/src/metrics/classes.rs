//! Classification metrics: a confusion matrix, and the numbers computed from it.
//!
//! Of two classes the second one is the positive class. A number that would be 0 / 0, such as the precision of a class that was
//! never predicted, is 0. Means over classes leave out those that neither occur nor were predicted.

use serde::{Deserialize, Serialize};

/// Counts by true class (row) and predicted class (column).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Confusion(pub Vec<Vec<u64>>);

/// Precision, recall and their harmonic mean.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Score {
    pub precision: f64,
    pub recall: f64,
    pub f1: f64,
}

/// Metrics computed from a confusion matrix.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClassMetrics {
    pub accuracy: f64,
    /// Score of the positive class, where there are two classes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub positive: Option<Score>,
    /// Mean over classes.
    pub mean: Score,
    pub confusion: Confusion,
    /// Share of rows whose class is among the five most likely; present with more than five classes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top5: Option<f64>,
}

/// Running counts for the metrics.
#[derive(Clone, Debug)]
pub struct Tally {
    confusion: Confusion,
    among_five: u64,
}

/// Number of classes that top-5 accepts.
const FIVE: usize = 5;

impl Tally {
    pub fn new(classes: usize) -> Tally {
        Tally { confusion: Confusion::new(classes), among_five: 0 }
    }

    /// Counts the rows of a micro-batch: logits [S, C] in row-major order, and classes, -1 for padding.
    pub fn see_all(&mut self, logits: &[f32], classes: &[i32]) {
        self.confusion.see_all(logits, classes);
        let rows = logits.chunks_exact(self.confusion.classes().max(1)).zip(classes);
        for (logits, class) in rows.filter(|(_, class)| **class >= 0) {
            let own = logits[*class as usize];
            let above = logits.iter().filter(|logit| **logit > own).count();
            let before = logits[..*class as usize].iter().filter(|logit| **logit == own).count();
            self.among_five += (above + before < FIVE) as u64;
        }
    }

    pub fn metrics(&self) -> ClassMetrics {
        let counts = self.confusion.classes() > FIVE;
        let top5 = counts.then(|| share(self.among_five, self.confusion.total()));
        ClassMetrics { top5, ..self.confusion.metrics() }
    }
}

impl Confusion {
    pub fn new(classes: usize) -> Confusion {
        Confusion(vec![vec![0; classes]; classes])
    }

    pub fn classes(&self) -> usize {
        self.0.len()
    }

    /// Counts one text.
    pub fn see(&mut self, class: usize, predicted: usize) {
        self.0[class][predicted] += 1;
    }

    /// Counts the texts of a micro-batch: logits [S, C] in row-major order, and classes, -1 for padding.
    pub fn see_all(&mut self, logits: &[f32], classes: &[i32]) {
        let rows = logits.chunks_exact(self.classes());
        for (logits, class) in rows.zip(classes).filter(|(_, class)| **class >= 0) {
            self.see(*class as usize, likeliest(logits));
        }
    }

    /// Number of texts counted.
    pub fn total(&self) -> u64 {
        self.0.iter().flatten().sum()
    }

    fn predicted(&self, class: usize) -> u64 {
        self.0.iter().map(|row| row[class]).sum()
    }

    /// Score of one class against all others.
    pub fn score(&self, class: usize) -> Score {
        let right = self.0[class][class];
        let (occurs, predicted) = (self.0[class].iter().sum(), self.predicted(class));
        let precision = share(right, predicted);
        let recall = share(right, occurs);
        Score { precision, recall, f1: share(2 * right, predicted + occurs) }
    }

    pub fn metrics(&self) -> ClassMetrics {
        let right: u64 = (0..self.classes()).map(|class| self.0[class][class]).sum();
        let is_met = |class: &usize| self.0[*class].iter().sum::<u64>() + self.predicted(*class) > 0;
        let met: Vec<Score> = (0..self.classes()).filter(is_met).map(|class| self.score(class)).collect();
        let mean = |of: fn(&Score) -> f64| met.iter().map(of).sum::<f64>() / met.len().max(1) as f64;
        ClassMetrics {
            accuracy: share(right, self.total()),
            positive: (self.classes() == 2).then(|| self.score(1)),
            mean: Score { precision: mean(|s| s.precision), recall: mean(|s| s.recall), f1: mean(|s| s.f1) },
            confusion: self.clone(),
            top5: None,
        }
    }
}

pub(super) fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// The class with the largest logit; the first one among equals.
pub fn likeliest(logits: &[f32]) -> usize {
    let mut best = 0;
    for (class, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = class;
        }
    }
    best
}

/// Softmax of the logits.
pub fn probabilities(logits: &[f32]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
    let powers: Vec<f64> = logits.iter().map(|logit| (*logit as f64 - largest).exp()).collect();
    let total: f64 = powers.iter().sum();
    powers.into_iter().map(|power| power / total).collect()
}

impl ClassMetrics {
    /// One line for people.
    pub fn words(&self) -> String {
        let Score { precision, recall, f1 } = self.mean;
        let mean = format!("macro F1 {f1:.4}");
        match self.positive {
            Some(Score { precision, recall, f1 }) => format!(
                "accuracy {:.4}  F1 {f1:.4}  precision {precision:.4}  recall {recall:.4}  {mean}",
                self.accuracy
            ),
            None => {
                let top5 = self.top5.map(|share| format!("  top-5 {share:.4}")).unwrap_or_default();
                format!(
                    "accuracy {:.4}{top5}  {mean}  precision {precision:.4}  recall {recall:.4}",
                    self.accuracy
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(table: &[&[u64]]) -> Confusion {
        Confusion(table.iter().map(|row| row.to_vec()).collect())
    }

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-12
    }

    /// By hand: 50 true negatives, 10 false positives, 5 false negatives, 35 true positives.
    #[test]
    fn two_classes_have_a_positive_one() {
        let m = counted(&[&[50, 10], &[5, 35]]).metrics();
        assert!(close(m.accuracy, 0.85));
        let positive = m.positive.unwrap();
        assert!(close(positive.precision, 35.0 / 45.0) && close(positive.recall, 35.0 / 40.0));
        assert!(close(positive.f1, 70.0 / 85.0));
        // The other class: precision 50/55, recall 50/60, F1 100/115.
        assert!(close(m.mean.precision, (35.0 / 45.0 + 50.0 / 55.0) / 2.0));
        assert!(close(m.mean.recall, (35.0 / 40.0 + 50.0 / 60.0) / 2.0));
        assert!(close(m.mean.f1, (70.0 / 85.0 + 100.0 / 115.0) / 2.0));
    }

    /// By hand: class 0 has precision 2/3 and recall 1, class 1 2/2 and 2/3, class 2 0/0 and 0; class 3 does not occur.
    #[test]
    fn means_leave_out_classes_that_do_not_occur() {
        let m = counted(&[&[2, 0, 0, 0], &[1, 2, 0, 0], &[0, 0, 0, 0], &[0, 0, 0, 0]]).metrics();
        assert!(m.positive.is_none());
        assert!(close(m.accuracy, 4.0 / 5.0));
        assert!(close(m.mean.precision, (2.0 / 3.0 + 1.0) / 2.0));
        assert!(close(m.mean.recall, (1.0 + 2.0 / 3.0) / 2.0));
        assert!(close(m.mean.f1, 0.8));
        let never_said = counted(&[&[3, 0], &[2, 0]]).metrics().positive.unwrap();
        assert_eq!(never_said, Score { precision: 0.0, recall: 0.0, f1: 0.0 });
        assert_eq!(Confusion::new(2).metrics().accuracy, 0.0, "of nothing, nothing");
    }

    #[test]
    fn logits_become_classes_and_probabilities() {
        assert_eq!([likeliest(&[1.0, 3.0, 2.0]), likeliest(&[2.0, 2.0])], [1, 0]);
        let p = probabilities(&[1000.0, 1000.0 + 3f32.ln()]);
        assert!((p[1] - 0.75).abs() < 1e-4 && close(p.iter().sum(), 1.0), "{p:?}");
        let mut table = Confusion::new(2);
        table.see_all(&[0.0, 1.0, 1.0, 0.0, 5.0, 5.0], &[1, 1, -1]);
        assert_eq!(table, counted(&[&[0, 0], &[1, 1]]));
        assert_eq!(table.total(), 2);
    }

    #[test]
    fn five_guesses_are_counted_where_there_are_more_classes() {
        let mut tally = Tally::new(7);
        let logits = [0.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0];
        tally.see_all(&[logits, logits, logits, logits].concat(), &[1, 5, 6, -1]);
        let metrics = tally.metrics();
        assert!(close(metrics.accuracy, 1.0 / 3.0) && close(metrics.top5.unwrap(), 2.0 / 3.0), "{metrics:?}");
        assert!(
            metrics.words().starts_with("accuracy 0.3333  top-5 0.6667  macro F1"),
            "{}",
            metrics.words()
        );
        // Among equal logits the class of the lower number ranks first, as in top-1.
        let mut even = Tally::new(6);
        even.see_all(&[[0.0; 6], [0.0; 6]].concat(), &[4, 5]);
        assert!(close(even.metrics().top5.unwrap(), 0.5));
        assert_eq!(Tally::new(5).metrics().top5, None);
    }

    #[test]
    fn a_table_is_a_list_of_rows_in_json() {
        let m = counted(&[&[1, 0], &[0, 1]]).metrics();
        let text = serde_json::to_string(&m).unwrap();
        assert!(text.contains(r#""confusion":[[1,0],[0,1]]"#), "{text}");
        assert_eq!(serde_json::from_str::<ClassMetrics>(&text).unwrap(), m);
        assert_eq!(m.words(), "accuracy 1.0000  F1 1.0000  precision 1.0000  recall 1.0000  macro F1 1.0000");
    }
}
