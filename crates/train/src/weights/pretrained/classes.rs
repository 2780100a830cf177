//! Matches the names of a model's classes with those of the data.

use crate::UserError;
use crate::refuse;

/// The names of classes in the order of a model's outputs: its own, or those of `data.classes`. One of the model's own names at
/// another position is refused, because it would assign every example of that class to another output.
pub fn class_names(given: &[String], own: &[String], origin: &str) -> Result<Vec<String>, UserError> {
    if given.is_empty() {
        return Ok(own.to_vec());
    }
    for (at, name) in given.iter().enumerate() {
        let is_same = |other: &String| other.to_lowercase() == name.to_lowercase();
        if let Some(place) = own.iter().position(is_same).filter(|_| !own.get(at).is_some_and(is_same)) {
            refuse!(
                "`data.classes` has `{}` as class {at}, counted from 0, and in the model of {origin} it is class {place}: \
                 leave data.classes out, or give the names in the order of its outputs",
                name.escape_debug()
            );
        }
    }
    Ok(given.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| name.to_string()).collect()
    }

    #[test]
    fn names_are_the_models_unless_others_are_given_for_its_outputs() {
        let names = |given: &[&str], own: &[&str]| class_names(&words(given), &words(own), "there");
        assert_eq!(names(&[], &["good", "bad"]).unwrap(), ["good", "bad"]);
        assert_eq!(names(&["good", "bad"], &["good", "bad"]).unwrap(), ["good", "bad"]);
        assert_eq!(names(&["POS", "neg"], &["pos", "NEG"]).unwrap(), ["POS", "neg"]);
        assert_eq!(names(&["yes", "no"], &["LABEL_0", "LABEL_1"]).unwrap(), ["yes", "no"]);
        assert_eq!(names(&["a", "b"], &[]).unwrap(), ["a", "b"]);
        let refused = names(&["bad", "good"], &["good", "bad"]).unwrap_err().0;
        assert!(refused.contains("`bad` as class 0") && refused.contains("it is class 1"), "{refused}");
        assert!(names(&["neg", "POS"], &["pos", "NEG"]).is_err(), "in other letter cases too");
    }
}
