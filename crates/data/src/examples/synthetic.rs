//! Generated sets for fine-tuning without a download: exercises with exact answers, pairs of sentences, and pairs of answers of
//! which one is preferred.
//!
//! The sentences of a pair are about the same subject or not. Generated rows take the same path as rows of files.

use std::path::PathBuf;
use std::sync::Arc;

use crate::formats::{Field, Fields, Record, SourceLocation};
use crate::random::{Uniform, key};

/// The place of a generated row, for messages.
pub(super) fn place(row: u64) -> SourceLocation {
    SourceLocation { file: Arc::new(PathBuf::from("synthetic")), line: None, row: Some(row + 1), offset: 0 }
}

pub(super) struct Draw(pub Uniform);

impl Draw {
    pub fn below(&mut self, end: usize) -> usize {
        ((self.0.draw() * end as f64) as usize).min(end - 1)
    }

    /// A random permutation of the numbers below `end`.
    pub fn permutation(&mut self, end: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..end).collect();
        for last in (1..end).rev() {
            order.swap(last, self.below(last + 1));
        }
        order
    }

    fn pick<'w>(&mut self, words: &[&'w str]) -> &'w str {
        words[self.below(words.len())]
    }

    fn words(&mut self, words: &[&str], count: usize) -> Vec<String> {
        (0..count).map(|_| self.pick(words).to_string()).collect()
    }
}

const THINGS: [&str; 24] = [
    "apple", "boat", "candle", "drum", "engine", "feather", "garden", "hammer", "island", "jacket", "kettle",
    "lamp", "mirror", "needle", "orange", "pencil", "rabbit", "saddle", "table", "umbrella", "violin",
    "window", "yacht", "zebra",
];

/// Row `row` of the exercises: conversations of one or two turns about a few words, in which every answer follows from its
/// question. Skills that a small model learns on some rows carry over to the others, which use the same words.
pub(super) fn exercise(seed: u64, row: u64) -> Record {
    let mut draw = Draw(Uniform::new(key(key(seed, 0x6578_6572), row)));
    let message = |role: &str, content: String| {
        Field::Object(Fields(vec![("role".into(), role.into()), ("content".into(), content.into())]))
    };
    let turns = 1 + draw.below(2);
    let messages = (0..turns).flat_map(|_| {
        let (asked, answer) = turn(&mut draw);
        [message("user", asked), message("assistant", answer)]
    });
    let messages = Field::List(messages.collect());
    Record { fields: Fields(vec![("messages".into(), messages)]), place: place(row) }
}

/// A question about two to four words, and its answer.
fn turn(draw: &mut Draw) -> (String, String) {
    let count = 2 + draw.below(3);
    let mut words = draw.words(&THINGS, count);
    let said = words.join(" ");
    match draw.below(6) {
        0 => {
            words.reverse();
            (format!("Say these words in reverse: {said}."), words.join(" "))
        }
        1 => {
            words.sort();
            (format!("Sort these words: {said}."), words.join(" "))
        }
        2 => (format!("How many words are these: {said}?"), count.to_string()),
        3 => {
            let letters: Vec<&str> = words.iter().map(|word| &word[..1]).collect();
            (format!("Give the first letters of: {said}."), letters.join(" "))
        }
        4 => (format!("Which of these words is the last: {said}?"), words[count - 1].clone()),
        _ => {
            // Asks equally often about one of them and about any word.
            let asked = match draw.below(2) {
                0 => words[draw.below(count)].clone(),
                _ => draw.pick(&THINGS).to_string(),
            };
            let answer = if words.contains(&asked) { "yes" } else { "no" };
            (format!("Is {asked} one of these words: {said}?"), answer.into())
        }
    }
}

const COMPARED: [&str; 3] = [
    "Which comes first in the alphabet, {a} or {b}?",
    "Of {a} and {b}, name the word that comes first.",
    "Tell me the earlier word: {a} or {b}?",
];
const ANSWERED: [&str; 2] = ["The word is {w}.", "It must be {w}."];

/// A question about two words, an answer that names the alphabetically earlier one, and one of the same length that names the
/// other.
fn comparison(draw: &mut Draw) -> [String; 3] {
    let a = draw.below(THINGS.len());
    let b = (a + 1 + draw.below(THINGS.len() - 1)) % THINGS.len();
    let question = COMPARED[draw.below(COMPARED.len())].replace("{a}", THINGS[a]).replace("{b}", THINGS[b]);
    let frame = ANSWERED[draw.below(ANSWERED.len())];
    let (earlier, later) = (THINGS[a.min(b)], THINGS[a.max(b)]);
    [question, frame.replace("{w}", earlier), frame.replace("{w}", later)]
}

/// Row `row` of the preferences: the preferred answer follows a rule, and the other breaks it.
pub(super) fn preference(seed: u64, row: u64) -> Record {
    let mut draw = Draw(Uniform::new(key(key(seed, 0x7072_6566), row)));
    let [question, chosen, rejected] = comparison(&mut draw);
    let message = |role: &str, content: &str| {
        let fields = Fields(vec![("role".into(), role.into()), ("content".into(), content.into())]);
        Field::List(vec![Field::Object(fields)])
    };
    let fields = vec![
        ("prompt".into(), message("user", &question)),
        ("chosen".into(), message("assistant", &chosen)),
        ("rejected".into(), message("assistant", &rejected)),
    ];
    Record { fields: Fields(fields), place: place(row) }
}

/// Row `row` of the judgements: an answer that follows the rule of the preferences is wanted, one that breaks it is not.
pub(super) fn judgement(seed: u64, row: u64) -> Record {
    let mut draw = Draw(Uniform::new(key(key(seed, 0x6a75_6467), row)));
    let [question, right, wrong] = comparison(&mut draw);
    let is_wanted = draw.below(2) == 0;
    let message = |role: &str, content: &str| {
        Field::Object(Fields(vec![("role".into(), role.into()), ("content".into(), content.into())]))
    };
    let answer = if is_wanted { &right } else { &wrong };
    let messages = Field::List(vec![message("user", &question), message("assistant", answer)]);
    let fields = vec![("messages".into(), messages), ("label".into(), Field::Bool(is_wanted))];
    Record { fields: Fields(fields), place: place(row) }
}

const SUBJECTS: [(&str, [&str; 6]); 6] = [
    ("sea", ["harbour", "anchor", "sailor", "wave", "tide", "island"]),
    ("kitchen", ["oven", "spoon", "flour", "recipe", "kettle", "bread"]),
    ("music", ["violin", "melody", "drum", "choir", "concert", "rhythm"]),
    ("garden", ["rose", "spade", "hedge", "seed", "lawn", "orchard"]),
    ("railway", ["station", "engine", "signal", "carriage", "platform", "ticket"]),
    ("winter", ["snow", "glove", "sledge", "icicle", "frost", "scarf"]),
];
const FRAMES: [&str; 4] = [
    "the {a} stood near the {b}",
    "nobody forgot the {a} or the {b}",
    "a {a} and a {b} were seen",
    "she wrote of the {a} and the {b}",
];

/// Row `row` of the pairs: two sentences about the same or different subjects, which a bag of words can tell apart.
pub(super) fn pair(seed: u64, row: u64) -> Record {
    let mut draw = Draw(Uniform::new(key(key(seed, 0x7061_6972), row)));
    let is_same = draw.below(2) == 0;
    let first = draw.below(SUBJECTS.len());
    let second = if is_same { first } else { (first + 1 + draw.below(SUBJECTS.len() - 1)) % SUBJECTS.len() };
    let mut sentence = |subject: usize| {
        let words = &SUBJECTS[subject].1;
        let a = draw.below(words.len());
        let b = (a + 1 + draw.below(words.len() - 1)) % words.len();
        let frame = FRAMES[draw.below(FRAMES.len())];
        frame.replace("{a}", words[a]).replace("{b}", words[b])
    };
    let (a, b) = (sentence(first), sentence(second));
    let label = if is_same { "same" } else { "different" };
    let field = |name: &str, text: &str| (name.to_string(), Field::from(text));
    Record {
        fields: Fields(vec![field("text_a", &a), field("text_b", &b), field("label", label)]),
        place: place(row),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_the_same_every_time_and_differ_from_each_other() {
        for make in [exercise as fn(u64, u64) -> Record, pair, preference, judgement] {
            let rows: Vec<Record> = (0..500).map(|row| make(7, row)).collect();
            assert_eq!(rows, (0..500).map(|row| make(7, row)).collect::<Vec<_>>());
            let mut texts: Vec<String> = rows.iter().map(|row| format!("{:?}", row.fields)).collect();
            texts.sort();
            texts.dedup();
            assert!(texts.len() > 300, "{} different rows", texts.len());
        }
    }

    #[test]
    fn exercises_are_conversations_of_one_or_two_turns() {
        let mut turns = [0; 3];
        for row in 0..300 {
            let record = exercise(3, row).fields;
            let Some(Field::List(messages)) = record.get("messages") else { panic!("{record:?}") };
            for (at, message) in messages.iter().enumerate() {
                let Field::Object(message) = message else { panic!("{message:?}") };
                let role = message.get("role").and_then(Field::text);
                assert_eq!(role, Some(["user", "assistant"][at % 2]));
                assert!(message.get("content").and_then(Field::text).is_some_and(|text| !text.is_empty()));
            }
            turns[messages.len() / 2] += 1;
        }
        assert!(turns[0] == 0 && turns[1] > 100 && turns[2] > 100, "{turns:?}");
    }

    #[test]
    fn the_preferred_answer_is_as_long_and_names_the_earlier_word() {
        for row in 0..300 {
            let fields = preference(3, row).fields;
            let text = |name: &str| {
                let Some(Field::List(list)) = fields.get(name) else { panic!("{fields:?}") };
                let Field::Object(message) = &list[0] else { panic!("{list:?}") };
                message.get("content").and_then(Field::text).unwrap().to_string()
            };
            let (question, chosen, rejected) = (text("prompt"), text("chosen"), text("rejected"));
            let word = |answer: &str| answer.trim_end_matches('.').rsplit(' ').next().unwrap().to_string();
            assert!(word(&chosen) < word(&rejected), "{chosen} {rejected}");
            assert!(question.contains(&word(&chosen)) && question.contains(&word(&rejected)), "{question}");
            assert_eq!(chosen.split(' ').count(), rejected.split(' ').count());
        }
    }

    #[test]
    fn pairs_can_be_told_apart_by_their_words() {
        let subject = |text: &str| {
            SUBJECTS
                .iter()
                .position(|(_, words)| words.iter().any(|word| text.split(' ').any(|w| w == *word)))
        };
        let rows = (0..400).map(|row| pair(1, row).fields);
        let same = rows.filter(|row| {
            let text = |name| row.get(name).and_then(Field::text).unwrap();
            let is_same = subject(text("text_a")) == subject(text("text_b"));
            assert_eq!(is_same, text("label") == "same");
            is_same
        });
        assert!((150..250).contains(&same.count()));
    }
}
