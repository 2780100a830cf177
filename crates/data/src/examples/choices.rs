//! Multiple-choice questions: reads the formats of public sets, recognised by their fields.
//!
//! Prompts and answers are spelled as the lm-evaluation-harness spells them without few-shot examples, so that accuracies are
//! comparable.

use std::fmt;

use super::conversation::{text_of, wrong};
use super::row_error::RowError;
use crate::error::DataError;
use crate::formats::{Field, Fields, OnError, ReadOptions, Reason, Records, Skipped, SourceLocation, find};

/// A prompt, its possible continuations, and the right one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    pub prompt: String,
    /// Each follows the prompt after a space.
    pub choices: Vec<String>,
    /// Index of the right choice.
    pub answer: usize,
    pub place: SourceLocation,
}

/// The questions of a path.
#[derive(Debug, Clone, PartialEq)]
pub struct QuestionSet {
    pub form: ChoiceForm,
    pub questions: Vec<Question>,
    /// Rows that were skipped, where that is allowed.
    pub skipped: Skipped,
}

/// The known formats of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChoiceForm {
    /// A context and four endings.
    HellaSwag,
    /// A question, and answers with labels of their own.
    Arc,
    /// A question with lettered answers, whose continuation is a letter.
    Mmlu,
    /// A goal and two ways to reach it.
    Piqa,
    /// A prompt with this field name, and answers, both used as written.
    Plain(&'static str),
}

/// Names of the field of a prompt that is used as written.
const PROMPTS: [&str; 3] = ["prompt", "context", "query"];
/// Names of the field with the index of the right answer.
const ANSWERS: [&str; 4] = ["answer", "label", "gold", "target"];
const LETTERS: [&str; 4] = ["A", "B", "C", "D"];

impl fmt::Display for ChoiceForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ChoiceForm::HellaSwag => f.write_str("hellaswag"),
            ChoiceForm::Arc => f.write_str("arc"),
            ChoiceForm::Mmlu => f.write_str("mmlu"),
            ChoiceForm::Piqa => f.write_str("piqa"),
            ChoiceForm::Plain(prompt) => write!(f, "`{prompt}` and `choices`"),
        }
    }
}

/// A prompt, its answers, and the index of the right one.
type SpelledQuestion = (String, Vec<String>, usize);

impl ChoiceForm {
    /// The format of a row with these fields.
    fn of(fields: &Fields) -> Result<ChoiceForm, RowError> {
        let has = |names: &[&str]| names.iter().all(|name| fields.has(name));
        if has(&["activity_label", "ctx_a", "ctx_b", "endings"]) {
            return Ok(ChoiceForm::HellaSwag);
        }
        if has(&["question", "choices", "answerKey"]) {
            return Ok(ChoiceForm::Arc);
        }
        if has(&["question", "choices"]) && ANSWERS.iter().any(|name| fields.has(name)) {
            return Ok(ChoiceForm::Mmlu);
        }
        if has(&["goal", "sol1", "sol2"]) {
            return Ok(ChoiceForm::Piqa);
        }
        if let Some(prompt) = PROMPTS.into_iter().find(|name| has(&[name, "choices"])) {
            return Ok(ChoiceForm::Plain(prompt));
        }
        wrong(
            Reason::Schema,
            format!(
                "the row has the fields {}, and questions are read as HellaSwag, ARC, MMLU and PIQA write them, or from `prompt`, \
                 `choices` and `answer`; rename its fields",
                fields.names()
            ),
        )
    }

    /// Reads the question of a row.
    fn read(self, fields: &Fields) -> Result<SpelledQuestion, RowError> {
        let (prompt, choices, answer) = match self {
            ChoiceForm::HellaSwag => {
                let [activity, a, b] = ["activity_label", "ctx_a", "ctx_b"].map(|name| text_of(fields, name));
                let scene = format!("{}: {} {}", activity?, a?, capitalised(b?));
                let endings = texts(fields.get("endings"), "endings")?;
                let endings = endings.iter().map(|ending| without_markup(ending)).collect();
                (without_markup(&scene), endings, numbered(fields, &["label"])?)
            }
            ChoiceForm::Arc => {
                let Some(Field::Object(choices)) = fields.get("choices") else {
                    return wrong(
                        Reason::Schema,
                        "`choices` is not an object with `text` and `label`; correct it".into(),
                    );
                };
                let labels = texts(choices.get("label"), "choices.label")?;
                let key = text_of(fields, "answerKey")?;
                let Some(answer) = labels.iter().position(|label| label == key) else {
                    return wrong(
                        Reason::Label,
                        format!("`answerKey` is {key:?}, which is not a label; correct it"),
                    );
                };
                let prompt = format!("Question: {}\nAnswer:", text_of(fields, "question")?);
                (prompt, texts(choices.get("text"), "choices.text")?, answer)
            }
            ChoiceForm::Mmlu => {
                let choices = texts(fields.get("choices"), "choices")?;
                if choices.len() != LETTERS.len() {
                    let message =
                        format!("`choices` has {} answers, and such a question has four", choices.len());
                    return wrong(
                        Reason::Schema,
                        format!("{message}; name the prompt `prompt` where it has others"),
                    );
                }
                // The harness begins the questions of every subject with a sentence that names it.
                let subject = fields.get("subject").and_then(Field::text).filter(|text| !text.is_empty());
                let about = subject.map_or(String::new(), |subject| {
                    let subject = subject.replace('_', " ");
                    format!("The following are multiple choice questions (with answers) about {subject}.\n\n")
                });
                let lettered: String = LETTERS
                    .iter()
                    .zip(&choices)
                    .map(|(letter, text)| format!("{letter}. {text}\n"))
                    .collect();
                let question = text_of(fields, "question")?.trim();
                let letters = LETTERS.map(String::from).to_vec();
                (format!("{about}{question}\n{lettered}Answer:"), letters, numbered(fields, &ANSWERS)?)
            }
            ChoiceForm::Piqa => {
                let ways = ["sol1", "sol2"].map(|name| text_of(fields, name).map(String::from));
                let ways = ways.into_iter().collect::<Result<_, _>>()?;
                let prompt = format!("Question: {}\nAnswer:", text_of(fields, "goal")?);
                (prompt, ways, numbered(fields, &["label"])?)
            }
            ChoiceForm::Plain(name) => {
                let prompt = text_of(fields, name)?.to_string();
                (prompt, texts(fields.get("choices"), "choices")?, numbered(fields, &ANSWERS)?)
            }
        };
        if choices.len() < 2 || choices.iter().any(String::is_empty) {
            return wrong(
                Reason::Empty,
                "the question has fewer than two answers, or an empty one; correct it".into(),
            );
        }
        if answer >= choices.len() {
            let message = format!("the right answer is number {answer} of {}, counted from 0", choices.len());
            return wrong(Reason::Label, format!("{message}; correct it"));
        }
        Ok((prompt, choices, answer))
    }
}

/// The texts of a list.
fn texts(list: Option<&Field>, name: &str) -> Result<Vec<String>, RowError> {
    let text = |field: &Field| field.text().map(String::from);
    let read = match list {
        Some(Field::List(list)) => list.iter().map(text).collect::<Option<Vec<String>>>(),
        _ => None,
    };
    read.ok_or_else(|| RowError::new(Reason::Schema, format!("`{name}` is not a list of texts; correct it")))
}

/// The index of the right answer: a number from 0, as a number or a text, or a letter from A.
fn numbered(fields: &Fields, names: &[&str]) -> Result<usize, RowError> {
    let found = names.iter().find_map(|name| fields.get(name).map(|field| (name, field)));
    let Some((name, field)) = found else {
        return wrong(
            Reason::MissingField,
            format!("the row does not say which answer is right; give it `{}`", names[0]),
        );
    };
    let number = match field {
        Field::Whole(number) => usize::try_from(*number).ok(),
        Field::Text(text) => match text.trim().as_bytes() {
            [letter @ b'A'..=b'Z'] => Some(usize::from(letter - b'A')),
            _ => text.trim().parse().ok(),
        },
        _ => None,
    };
    number.ok_or_else(|| {
        RowError::new(
            Reason::Label,
            format!("`{name}` is neither the number of an answer nor its letter; correct it"),
        )
    })
}

/// Capitalises the first letter and lowers all others.
fn capitalised(text: &str) -> String {
    let mut letters = text.chars();
    let first = letters.next().map(|first| first.to_uppercase().to_string());
    first.unwrap_or_default() + &letters.as_str().to_lowercase()
}

/// Removes the markup of the web pages that HellaSwag's texts come from.
fn without_markup(text: &str) -> String {
    let text = text.trim().replace(" [title]", ". ");
    let (mut kept, mut rest) = (String::new(), text.as_str());
    while let Some(start) = rest.find('[') {
        let (before, marked) = rest.split_at(start);
        kept.push_str(before);
        match marked.find([']', '\n']).filter(|end| marked.as_bytes()[*end] == b']') {
            Some(end) => rest = &marked[end + 1..],
            None => {
                kept.push('[');
                rest = &marked[1..];
            }
        }
    }
    (kept + rest).replace("  ", " ")
}

/// Reads the questions of a file, a folder or a pattern.
pub fn read(path: &str, options: &ReadOptions) -> Result<QuestionSet, DataError> {
    let mut set: Option<QuestionSet> = None;
    let mut skipped = Skipped::default();
    for input in find(&[path.to_string()], options)? {
        let mut records = Records::open(&input, options)?;
        for record in records.by_ref() {
            let record = record?;
            let form = set.as_ref().map_or_else(|| ChoiceForm::of(&record.fields), |set| Ok(set.form));
            match form.and_then(|form| Ok((form, form.read(&record.fields)?))) {
                Ok((form, (prompt, choices, answer))) => {
                    let empty = || QuestionSet { form, questions: vec![], skipped: Skipped::default() };
                    let question = Question { prompt, choices, answer, place: record.place };
                    set.get_or_insert_with(empty).questions.push(question);
                }
                Err(wrong) if options.on_error == OnError::Fail => return Err(wrong.error(&record.place)),
                Err(wrong) => skipped.note(wrong.reason, record.place),
            }
        }
        skipped.merge(records.skipped());
    }
    match set {
        Some(set) => Ok(QuestionSet { skipped, ..set }),
        None => Err(DataError::input(format!("{path} has no usable question: {skipped}."))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(text: &str) -> Result<(ChoiceForm, SpelledQuestion), RowError> {
        let Ok(Field::Object(fields)) = Field::from_json(text) else { panic!("{text} is no object") };
        let form = ChoiceForm::of(&fields)?;
        Ok((form, form.read(&fields)?))
    }

    #[test]
    fn public_forms_are_spelled_as_the_harness_spells_them() {
        let hellaswag = r#"{"activity_label": "Cooking", "ctx_a": "A man [header] stands.", "ctx_b": "he Then",
            "endings": ["cuts [step] bread.", "sings [title] loudly"], "label": "1"}"#;
        let (form, (prompt, choices, answer)) = row(hellaswag).unwrap();
        assert_eq!(form, ChoiceForm::HellaSwag);
        assert_eq!(prompt, "Cooking: A man stands. He then");
        assert_eq!(choices, ["cuts bread.", "sings.  loudly".replace("  ", " ").as_str()]);
        assert_eq!(answer, 1);
        let arc = r#"{"question": "Why?", "choices": {"text": ["so", "not"], "label": ["1", "2"]}, "answerKey": "2"}"#;
        let spelled = ("Question: Why?\nAnswer:".to_string(), vec!["so".to_string(), "not".into()], 1);
        assert_eq!(row(arc).unwrap(), (ChoiceForm::Arc, spelled));
        let mmlu = r#"{"question": " Why? ", "choices": ["p", "q", "r", "s"], "answer": 2, "subject": "high_school_x"}"#;
        let (_, (prompt, choices, answer)) = row(mmlu).unwrap();
        assert_eq!(
            prompt,
            "The following are multiple choice questions (with answers) about high school x.\n\nWhy?\nA. p\nB. q\nC. r\n\
             D. s\nAnswer:"
        );
        assert_eq!((choices.join(""), answer), ("ABCD".into(), 2));
        let piqa = r#"{"goal": "g", "sol1": "a", "sol2": "b", "label": 0}"#;
        assert_eq!(row(piqa).unwrap().1.0, "Question: g\nAnswer:");
        let plain = r#"{"prompt": "2 + 2 =", "choices": ["3", "4"], "answer": "B"}"#;
        assert_eq!(row(plain).unwrap().1.2, 1);
    }

    #[test]
    fn invalid_rows_are_named() {
        let wrong = [
            (r#"{"text": "x"}"#, "questions are read as HellaSwag"),
            (r#"{"prompt": "x", "choices": ["a"], "answer": 0}"#, "fewer than two answers"),
            (r#"{"prompt": "x", "choices": ["a", "b"], "answer": 2}"#, "number 2 of 2"),
            (r#"{"prompt": "x", "choices": ["a", 3], "answer": 0}"#, "not a list of texts"),
            (r#"{"prompt": "x", "choices": ["a", "b"], "answer": "yes"}"#, "neither the number"),
            (r#"{"prompt": "x", "choices": ["a", "b"]}"#, "which answer is right"),
            (r#"{"question": "x", "choices": ["a", "b"], "answer": 0}"#, "such a question has four"),
            (
                r#"{"question": "x", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "C"}"#,
                "which is not a label",
            ),
        ];
        for (text, message) in wrong {
            let found = row(text).expect_err(text).message;
            assert!(found.contains(message), "{text}: {found}");
        }
    }

    #[test]
    fn marks_that_do_not_end_on_their_line_stay() {
        assert_eq!(without_markup("a [b\n] c"), "a [b\n] c");
        assert_eq!(without_markup("[x] a [y [z] b"), " a  b".replace("  ", " "));
        assert_eq!(capitalised("éA B"), "Éa b");
        assert_eq!(capitalised(""), "");
    }
}
