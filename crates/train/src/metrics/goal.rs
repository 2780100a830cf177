//! The metric that the best checkpoint and early stopping follow.

use flatout_settings::choice;

use crate::metrics::Metrics;

choice! {
    /// A number of an evaluation. Lower is better for the loss, higher for all others. `f1`, `precision` and `recall` belong to
    /// the positive class of two; `exact` and `token_accuracy` to answers, `reward_accuracy` and `reward_margin` to preferences.
    pub enum Metric {
        Loss = "loss",
        Accuracy = "accuracy",
        F1 = "f1",
        Precision = "precision",
        Recall = "recall",
        MacroF1 = "macro_f1",
        MacroPrecision = "macro_precision",
        MacroRecall = "macro_recall",
        Exact = "exact",
        TokenAccuracy = "token_accuracy",
        RewardAccuracy = "reward_accuracy",
        RewardMargin = "reward_margin",
    }
}

impl Metric {
    /// Its value, if the evaluation has it.
    pub fn of(self, loss: f32, metrics: Option<&Metrics>) -> Option<f64> {
        let answers = metrics.and_then(Metrics::answers);
        let rewards = metrics.and_then(Metrics::rewards);
        let metrics = metrics.and_then(Metrics::classes);
        let positive = || metrics?.positive;
        match self {
            Metric::Loss => Some(loss as f64),
            Metric::Exact => Some(answers?.exact),
            Metric::TokenAccuracy => Some(answers?.token_accuracy),
            Metric::RewardAccuracy => Some(rewards?.reward_accuracy),
            Metric::RewardMargin => Some(rewards?.reward_margin),
            Metric::Accuracy => Some(metrics?.accuracy),
            Metric::F1 => Some(positive()?.f1),
            Metric::Precision => Some(positive()?.precision),
            Metric::Recall => Some(positive()?.recall),
            Metric::MacroF1 => Some(metrics?.mean.f1),
            Metric::MacroPrecision => Some(metrics?.mean.precision),
            Metric::MacroRecall => Some(metrics?.mean.recall),
        }
    }

    pub fn is_better(self, new: f64, old: f64) -> bool {
        match self {
            Metric::Loss => new < old,
            _ => new > old,
        }
    }

    /// Whether it requires classes.
    pub fn is_of_classes(self) -> bool {
        self != Metric::Loss && !self.is_of_answers() && !self.is_of_rewards()
    }

    /// Whether it requires answers.
    pub fn is_of_answers(self) -> bool {
        matches!(self, Metric::Exact | Metric::TokenAccuracy)
    }

    /// Whether it requires preferences.
    pub fn is_of_rewards(self) -> bool {
        matches!(self, Metric::RewardAccuracy | Metric::RewardMargin)
    }

    /// Whether it requires a positive class.
    pub fn is_of_positive(self) -> bool {
        matches!(self, Metric::F1 | Metric::Precision | Metric::Recall)
    }
}

/// Tracks how long a run has been waiting for a better evaluation. Part of a run's state.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Patience {
    /// The best value so far.
    best: Option<f64>,
    /// Evaluations since the best one.
    pub since: u64,
}

/// Names of its counters in a checkpoint.
const SINCE: &str = "evaluations_since_best";
const BEST: &str = "best_evaluation_bits";

impl Patience {
    /// Takes the value of an evaluation; NaN is no improvement.
    pub fn see(&mut self, metric: Metric, value: f64) {
        if !value.is_nan() && self.best.is_none_or(|best| metric.is_better(value, best)) {
            *self = Patience { best: Some(value), since: 0 };
        } else {
            self.since += 1;
        }
    }

    /// The best value so far.
    pub fn best(&self) -> Option<f64> {
        self.best
    }

    pub fn counters(&self) -> Vec<(&'static str, u64)> {
        let best = self.best.map(|best| (BEST, best.to_bits()));
        [(SINCE, self.since)].into_iter().chain(best).collect()
    }

    /// Restores it from a checkpoint's counters; without them it starts anew.
    pub fn read(counter: impl Fn(&str) -> Option<u64>) -> Patience {
        Patience { best: counter(BEST).map(f64::from_bits), since: counter(SINCE).unwrap_or(0) }
    }

    /// The reason why a run with a goal ends here, if it does: an evaluation reached the goal.
    pub fn reached(&self, metric: Metric, goal: Option<f64>) -> Option<String> {
        let (goal, best) = (goal?, self.best?);
        let is_there = best == goal || metric.is_better(best, goal);
        is_there.then(|| format!("{metric} reached {best:.4}, and {goal} was asked for (eval.goal)"))
    }

    /// The reason why a run with this patience ends here, if it does.
    pub fn ends(&self, metric: Metric, patience: Option<u64>) -> Option<String> {
        let most = patience.filter(|most| self.since >= *most)?;
        let best = self.best.map_or("never a number".into(), |best| format!("{best:.4} at best"));
        Some(format!("{metric} was {best} and no better in {most} evaluations (train.patience)"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Confusion;

    #[test]
    fn a_metric_is_found_where_the_evaluation_has_it() {
        let two = Confusion(vec![vec![50, 10], vec![5, 35]]).metrics();
        let value = |metric: Metric| metric.of(0.5, Some(&Metrics::Classes(two.clone()))).unwrap();
        assert_eq!(value(Metric::Loss), 0.5);
        assert_eq!(value(Metric::Accuracy), 0.85);
        assert_eq!(value(Metric::F1), two.positive.unwrap().f1);
        assert_eq!(value(Metric::MacroRecall), two.mean.recall);
        let three = Confusion::new(3).metrics();
        assert_eq!(Metric::F1.of(0.5, Some(&Metrics::Classes(three))), None);
        assert_eq!(Metric::Accuracy.of(0.5, None), None);
    }

    #[test]
    fn patience_runs_out_in_both_directions() {
        for (metric, values) in
            [(Metric::Loss, [2.0, 1.5, 1.6, 1.5, 1.7]), (Metric::F1, [0.2, 0.5, 0.4, 0.5, f64::NAN])]
        {
            let mut patience = Patience::default();
            let mut ended = vec![];
            for value in values {
                patience.see(metric, value);
                ended.push(patience.ends(metric, Some(3)).is_some());
            }
            assert_eq!(ended, [false, false, false, false, true], "{metric}");
            assert_eq!(patience.ends(metric, None), None);
            let why = patience.ends(metric, Some(3)).unwrap();
            assert!(why.contains("at best and no better in 3 evaluations"), "{why}");
        }
    }

    #[test]
    fn a_goal_is_reached_from_either_side() {
        for (metric, values, goal) in
            [(Metric::Loss, [2.0, f64::NAN, 1.6, 1.5], 1.5), (Metric::F1, [0.2, 0.4, f64::NAN, 0.6], 0.55)]
        {
            let mut patience = Patience::default();
            let mut ended = vec![];
            for value in values {
                patience.see(metric, value);
                ended.push(patience.reached(metric, Some(goal)).is_some());
            }
            assert_eq!(ended, [false, false, false, true], "{metric}");
            assert_eq!(patience.reached(metric, None), None);
        }
    }

    #[test]
    fn patience_is_restored_from_a_checkpoint() {
        let mut patience = Patience::default();
        for value in [0.1, 0.3, 0.2] {
            patience.see(Metric::F1, value);
        }
        let kept = patience.counters();
        let read = |name: &str| kept.iter().find(|(known, _)| *known == name).map(|(_, count)| *count);
        assert_eq!(Patience::read(read), patience);
        assert_eq!(Patience::read(|_| None), Patience::default());
    }
}
