//! Weights of classes in the loss of texts: equal, by how rare the class is, or given.

use flatout_data::ExampleTable;
use flatout_settings::{Setting, ValueKind};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::UserError;
use crate::refuse;

#[derive(Clone, Debug, Default, PartialEq)]
pub enum ClassWeights {
    /// Every text counts 1.
    #[default]
    None,
    /// Texts of a class count texts / (classes * texts of the class): every class counts alike, and the mean weight of a text is 1.
    Balanced,
    /// A weight per class.
    Given(Vec<f64>),
}

const NAMES: &[&str] = &["none", "balanced"];

impl Setting for ClassWeights {
    fn kind() -> ValueKind {
        ValueKind::WordOrNumbers(NAMES)
    }
}

impl Serialize for ClassWeights {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            ClassWeights::None => serializer.serialize_str(NAMES[0]),
            ClassWeights::Balanced => serializer.serialize_str(NAMES[1]),
            ClassWeights::Given(weights) => weights.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for ClassWeights {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Numbers(Vec<f64>),
            Word(String),
        }
        match Written::deserialize(deserializer)? {
            Written::Numbers(weights) => Ok(ClassWeights::Given(weights)),
            Written::Word(word) if word == NAMES[0] => Ok(ClassWeights::None),
            Written::Word(word) if word == NAMES[1] => Ok(ClassWeights::Balanced),
            Written::Word(word) => {
                Err(serde::de::Error::custom(format!("`{word}` is neither none nor balanced")))
            }
        }
    }
}

impl ClassWeights {
    /// Checks that the weights fit `classes` classes.
    pub fn validate(&self, classes: usize) -> Result<(), UserError> {
        let ClassWeights::Given(weights) = self else { return Ok(()) };
        if weights.len() != classes {
            refuse!(
                "`train.class_weights` has {} numbers and `model.classes` is {classes}: give one number per class",
                weights.len()
            );
        }
        if let Some(weight) = weights.iter().find(|weight| !weight.is_finite() || **weight < 0.0) {
            refuse!("`train.class_weights` has {weight}, and each must be a number of at least 0");
        }
        if weights.iter().all(|weight| *weight == 0.0) {
            refuse!("`train.class_weights` are all 0: give at least one above 0");
        }
        Ok(())
    }

    /// The weight of each class for training on these examples.
    pub fn of(&self, examples: &ExampleTable, classes: usize) -> Result<Vec<f32>, UserError> {
        let mut counts = vec![0u64; classes];
        for label in examples.iter().filter_map(|example| example.label) {
            counts[label as usize] += 1;
        }
        self.of_counts(&counts)
    }

    /// The weight of each class, given how often each occurs in the training data.
    pub fn of_counts(&self, counts: &[u64]) -> Result<Vec<f32>, UserError> {
        let classes = counts.len();
        match self {
            ClassWeights::None => Ok(vec![1.0; classes]),
            ClassWeights::Given(weights) => Ok(weights.iter().map(|weight| *weight as f32).collect()),
            ClassWeights::Balanced => {
                if let Some(class) = counts.iter().position(|count| *count == 0) {
                    refuse!(
                        "`train.class_weights` is balanced and no training example has class {class}: leave the class out, \
                         or give the weights as a list"
                    );
                }
                let total: u64 = counts.iter().sum();
                let weight = |count: &u64| (total as f64 / (classes as f64 * *count as f64)) as f32;
                Ok(counts.iter().map(weight).collect())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use flatout_data::Example;

    use super::*;

    fn examples(labels: &[u32]) -> ExampleTable {
        let mut table = ExampleTable::default();
        for label in labels {
            table.push(Example { tokens: &[1], weights: &[0.0], label: Some(*label), images: &[] });
        }
        table
    }

    #[test]
    fn rare_classes_count_more() {
        let table = examples(&[0, 0, 0, 1]);
        assert_eq!(ClassWeights::Balanced.of(&table, 2), Ok(vec![4.0 / 6.0, 2.0]));
        assert_eq!(ClassWeights::None.of(&table, 2), Ok(vec![1.0, 1.0]));
        assert_eq!(ClassWeights::Given(vec![0.5, 3.0]).of(&table, 2), Ok(vec![0.5, 3.0]));
        let none = ClassWeights::Balanced.of(&table, 3).unwrap_err().0;
        assert!(none.contains("no training example has class 2"), "{none}");
    }

    #[test]
    fn weights_that_fit_no_classes_are_refused() {
        let refused = |weights: &[f64]| ClassWeights::Given(weights.to_vec()).validate(2).unwrap_err().0;
        assert!(refused(&[1.0]).contains("has 1 numbers and `model.classes` is 2"));
        assert!(refused(&[1.0, -1.0]).contains("has -1"));
        assert!(refused(&[0.0, 0.0]).contains("all 0"));
        assert_eq!(ClassWeights::Given(vec![0.0, 1.0]).validate(2), Ok(()));
    }
}
