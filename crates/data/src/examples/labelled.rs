//! Turns rows into labelled texts and pairs of texts, and labels into classes.

use std::collections::BTreeMap;
use std::fmt;

use super::row_error::RowError;
use crate::error::DataError;
use crate::formats::{Field, Fields, Reason, SourceLocation};
use crate::random::{fingerprint, key};

/// The columns of texts and labels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Columns {
    pub text_a: String,
    pub text_b: Option<String>,
    /// `None` where labels are to be predicted.
    pub label: Option<String>,
}

/// Known column names of texts, where none are given.
const PAIRS: [(&str, &str); 5] = [
    ("text_a", "text_b"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
];
const TEXTS: [&str; 4] = ["text", "sentence", "content", "text_a"];
const LABELS: [&str; 4] = ["label", "labels", "class", "target"];

impl fmt::Display for Columns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.text_b {
            Some(b) => write!(f, "pairs of `{}` and `{b}`", self.text_a)?,
            None => write!(f, "texts in `{}`", self.text_a)?,
        }
        match &self.label {
            Some(label) => write!(f, ", labels in `{label}`"),
            None => f.write_str(", without labels"),
        }
    }
}

impl Columns {
    /// The columns for rows like this one: the given ones, and known names for the others.
    pub(crate) fn of(
        fields: &Fields,
        [text_a, text_b, label]: [Option<&str>; 3],
        needs_label: bool,
    ) -> Result<Columns, RowError> {
        let found = |name: &&str| fields.has(name);
        let (text_a, text_b) = match (text_a, text_b) {
            (Some(a), b) => (Some(a), b),
            (None, Some(b)) => {
                let first = PAIRS.iter().find(|(a, second)| *second == b && fields.has(a)).map(|(a, _)| *a);
                (first.or_else(|| TEXTS.into_iter().find(found)), Some(b))
            }
            (None, None) => match PAIRS.into_iter().find(|(a, b)| fields.has(a) && fields.has(b)) {
                Some((a, b)) => (Some(a), Some(b)),
                None => (TEXTS.into_iter().find(found), None),
            },
        };
        let label = label.or_else(|| LABELS.into_iter().find(found));
        let missing = |what: &str, key: &str| {
            let message = format!(
                "no field of the row is known to hold {what}, of {}; name it with {key} (the first line of a table names its columns)",
                fields.names()
            );
            RowError::new(Reason::Schema, message)
        };
        let text_a = text_a.ok_or_else(|| missing("a text", "data.text_a"))?;
        if needs_label && label.is_none() {
            return Err(missing("a label", "data.label"));
        }
        for name in [Some(text_a), text_b, label].into_iter().flatten() {
            if !fields.has(name) && (needs_label || Some(name) != label) {
                let message = format!("the row has no field `{name}`, only {}; name another", fields.names());
                return Err(RowError::new(Reason::Schema, message));
            }
        }
        Ok(Columns {
            text_a: text_a.into(),
            text_b: text_b.map(String::from),
            label: label.filter(|label| fields.has(label)).map(String::from),
        })
    }

    pub(crate) fn read(&self, fields: &Fields) -> Result<Labelled, RowError> {
        let a = text_of(fields, &self.text_a)?;
        let b = self.text_b.as_deref().map(|name| text_of(fields, name)).transpose()?;
        let label = self.label.as_deref().map(|name| label_of(fields, name)).transpose()?;
        Ok(Labelled { a: a.into(), b: b.map(String::from), label })
    }
}

/// The texts and the label of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Labelled {
    pub a: String,
    pub b: Option<String>,
    /// The label as it is written.
    pub label: Option<String>,
}

impl Labelled {
    /// Hash of the texts alone, so that repeated texts are on the same side whatever their labels.
    pub fn hash(&self) -> u64 {
        let b = self.b.as_ref().map_or(0, |b| fingerprint(b.as_bytes()));
        key(fingerprint(self.a.as_bytes()), b)
    }
}

fn missing(fields: &Fields, name: &str) -> RowError {
    let message = format!("the row has no field `{name}`, only {}; give it one", fields.names());
    RowError::new(Reason::MissingField, message)
}

fn text_of<'f>(fields: &'f Fields, name: &str) -> Result<&'f str, RowError> {
    let wrong = |reason, message: &str| Err(RowError::new(reason, format!("the field `{name}` {message}")));
    match fields.get(name) {
        Some(Field::Text(text)) if text.trim().is_empty() => wrong(Reason::Empty, "is empty; give it a text"),
        Some(Field::Text(text)) if text.contains('\0') => {
            wrong(Reason::Nul, "has a NUL character, as binary data does; remove it")
        }
        Some(Field::Text(text)) => Ok(text),
        Some(Field::Null) => wrong(Reason::Null, "is null; give it a text"),
        Some(other) => wrong(Reason::NotAString, &format!("is {}, not a string; correct it", other.kind())),
        None => Err(missing(fields, name)),
    }
}

/// A label as text: names as they are, numbers and booleans by their spelling.
pub(crate) fn label_of(fields: &Fields, name: &str) -> Result<String, RowError> {
    let wrong = |reason, message: &str| Err(RowError::new(reason, format!("the label `{name}` {message}")));
    match fields.get(name) {
        Some(Field::Text(text)) if text.trim().is_empty() => {
            wrong(Reason::Label, "is empty; give it a class")
        }
        Some(Field::Text(text)) => Ok(text.trim().into()),
        Some(Field::Whole(number)) => Ok(number.to_string()),
        Some(Field::Bool(value)) => Ok(value.to_string()),
        Some(Field::Number(number)) if number.fract() == 0.0 && number.abs() < 1e15 => {
            Ok(format!("{number:.0}"))
        }
        Some(Field::Number(number)) => {
            wrong(Reason::Label, &format!("is {number}, and a class is a name or a whole number; correct it"))
        }
        Some(Field::Null) => wrong(Reason::Label, "is null; give it a class"),
        Some(other) => {
            wrong(Reason::Label, &format!("is {}, not a name or a number; correct it", other.kind()))
        }
        None => Err(missing(fields, name)),
    }
}

/// Classes in order, and the number of each label.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Classes {
    pub names: Vec<String>,
    /// Whether labels may be numbers of classes, which is so where no name is a number.
    by_number: bool,
}

impl Classes {
    /// The given classes.
    pub fn given(names: &[String]) -> Result<Self, DataError> {
        if let Some(twice) = (1..names.len()).find(|at| names[..*at].contains(&names[*at])) {
            return Err(DataError::input(format!(
                "data.classes has `{}` twice: give every class once.",
                names[twice]
            )));
        }
        if names.len() == 1 {
            return Err(DataError::input("data.classes has one class only: there is nothing to tell apart."));
        }
        let by_number = names.iter().all(|name| name.parse::<i128>().is_err());
        Ok(Self { names: names.to_vec(), by_number })
    }

    /// The class number of a label.
    pub fn number(&self, label: &str) -> Result<u32, RowError> {
        if let Some(at) = self.names.iter().position(|name| name == label) {
            return Ok(at as u32);
        }
        let number = label.parse::<i128>().ok();
        if let Some(number) = number.filter(|_| self.by_number)
            && let Some(at) = usize::try_from(number).ok().filter(|at| *at < self.names.len())
        {
            return Ok(at as u32);
        }
        let shown: Vec<String> = self.names.iter().take(12).map(|name| format!("`{name}`")).collect();
        let message = match number.filter(|_| self.by_number) {
            Some(number) => format!(
                "the label {number} is beyond the {} classes, which are numbered from 0; correct it or data.classes",
                self.names.len()
            ),
            None => format!(
                "the label `{}` is none of the classes {}; correct it or data.classes",
                label.escape_debug(),
                shown.join(", ")
            ),
        };
        Err(RowError::new(Reason::Label, message))
    }
}

/// The labels found in the rows, where no classes are given.
#[derive(Debug, Default)]
pub(crate) struct LabelCounts {
    /// Count and first place of each label.
    labels: BTreeMap<String, (u64, SourceLocation)>,
}

impl LabelCounts {
    pub fn add(&mut self, label: &str, place: &SourceLocation) {
        self.labels.entry(label.into()).or_insert_with(|| (0, place.clone())).0 += 1;
    }

    /// The first label that occurs once: its row could be learned or evaluated, not both.
    pub fn first_singleton(&self) -> Option<(&str, &SourceLocation)> {
        let singletons = self.labels.iter().filter(|(_, (count, _))| *count == 1);
        let singletons = singletons.map(|(label, (_, place))| (label.as_str(), place));
        singletons.min_by_key(|(_, place)| (place.file.clone(), place.line, place.row))
    }

    pub fn is_singleton(&self, label: &str) -> bool {
        self.labels.get(label).is_some_and(|(count, _)| *count == 1)
    }

    /// The classes, sorted: numbers by value, names alphabetically. Labels that occur once are no classes unless
    /// `allows_singletons`.
    pub fn classes(&self, shown: &str, allows_singletons: bool) -> Result<Classes, DataError> {
        let mut names: Vec<String> = self
            .labels
            .iter()
            .filter(|(_, (count, _))| *count > 1 || allows_singletons)
            .map(|(label, _)| label.clone())
            .collect();
        if let Some(numbers) = names.iter().map(|name| name.parse().ok()).collect::<Option<Vec<i128>>>() {
            let mut numbered: Vec<(i128, String)> = numbers.into_iter().zip(names).collect();
            numbered.sort();
            names = numbered.into_iter().map(|(_, name)| name).collect();
        }
        match names.as_slice() {
            [] => Err(DataError::input(format!(
                "There is no labelled row in {shown}: data.path needs rows with a text and a label, whose columns the first line of a table names."
            ))),
            [only] => Err(DataError::input(format!(
                "Every row of {shown} has the label `{only}`: there is nothing to tell apart; give rows of other classes."
            ))),
            _ => Classes::given(&names),
        }
    }
}

/// The error for a label that only one row has.
pub(crate) fn singleton_label(label: &str) -> RowError {
    RowError::new(
        Reason::Label,
        format!(
            "no other row has the label `{}`, so it could be learned or evaluated, not both; correct it, give more rows \
             of it, or name the classes with data.classes",
            label.escape_debug()
        ),
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn fields(json: &str) -> Fields {
        match Field::from_json(json).unwrap() {
            Field::Object(fields) => fields,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn columns_are_found_by_their_names() {
        let of =
            |json: &str, given| Columns::of(&fields(json), given, true).map(|columns| columns.to_string());
        let none = [None, None, None];
        assert_eq!(of(r#"{"label":1,"text":"x"}"#, none).unwrap(), "texts in `text`, labels in `label`");
        assert_eq!(
            of(r#"{"premise":"x","hypothesis":"y","text":"z","label":1}"#, none).unwrap(),
            "pairs of `premise` and `hypothesis`, labels in `label`"
        );
        assert_eq!(
            of(r#"{"a":"x","b":"y","c":"z"}"#, [Some("b"), None, Some("c")]).unwrap(),
            "texts in `b`, labels in `c`"
        );
        assert!(of(r#"{"a":"x","label":1}"#, none).unwrap_err().message.contains("name it with data.text_a"));
        assert!(of(r#"{"text":"x","y":1}"#, none).unwrap_err().message.contains("name it with data.label"));
        assert!(
            of(r#"{"text":"x","y":1}"#, [None, None, Some("z")])
                .unwrap_err()
                .message
                .contains("no field `z`")
        );
        assert!(Columns::of(&fields(r#"{"text":"x"}"#), none, false).is_ok());
    }

    #[test]
    fn labels_are_names_or_places() {
        let named = Classes::given(&["no".into(), "yes".into()]).unwrap();
        assert_eq!(["no", "yes", "0", "1"].map(|label| named.number(label).unwrap()), [0, 1, 0, 1]);
        assert!(named.number("2").unwrap_err().message.contains("the label 2 is beyond the 2 classes"));
        assert!(named.number("maybe").unwrap_err().message.contains("none of the classes `no`, `yes`"));
        let numbered = Classes::given(&["1".into(), "2".into()]).unwrap();
        assert_eq!(numbered.number("1").unwrap(), 0);
        assert!(numbered.number("0").is_err());
        assert!(Classes::given(&["a".into(), "a".into()]).is_err());
    }

    #[test]
    fn collected_numbers_are_sorted_by_size() {
        let place = SourceLocation { file: Arc::new("a".into()), line: Some(1), row: None, offset: 0 };
        let mut collected = LabelCounts::default();
        for label in ["10", "9", "-1", "9", "10", "-1", "7"] {
            collected.add(label, &place);
        }
        assert_eq!(collected.first_singleton().map(|(label, _)| label), Some("7"));
        assert_eq!(collected.classes("a", false).unwrap().names, ["-1", "9", "10"]);
    }
}
