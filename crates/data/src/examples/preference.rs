//! Turns rows into answers that are compared: a preferred and a rejected answer to one prompt, or one answer judged as wanted
//! or not.
//!
//! The published formats of preference sets are recognised by their fields. Rows that cannot be compared are refused here:
//! without a prompt, with an empty answer, or with two equal answers.

use std::fmt;

use super::conversation::{
    Conversation, Dialogue, Schema, TakeParts, answer_of, list_of, message, optional_text, text_of, wrong,
};
use super::row_error::RowError;
use crate::formats::{Field, Fields, Reason};

/// Two answers to one prompt, as conversations that include it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Pair {
    pub chosen: Dialogue,
    pub rejected: Dialogue,
}

/// An answer, and whether it is wanted.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Judged {
    pub dialogue: Dialogue,
    pub is_wanted: bool,
}

/// The known formats of rows with two answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PairSchema {
    /// A prompt with this field name, and two answers: texts, messages, or conversations that begin with the prompt.
    Prompted(&'static str),
    /// An instruction, optionally with an input, and two answers.
    Instruction,
    /// Two texts or conversations whose prompt is their common prefix.
    Implicit,
    /// Messages with this field name that end with a question, and two answers.
    Asked(&'static str),
    /// Messages with the first field name that end with the chosen answer, and the rejected one as a text with the second name.
    Answered(&'static str, &'static str),
    /// Messages that end with the chosen answer, and the same messages with the rejected one.
    Twice(&'static str, &'static str),
}

const LISTS: [&str; 3] = ["messages", "conversations", "conversation"];
const PROMPTS: [&str; 3] = ["prompt", "question", "query"];
const CHOSEN: &str = "chosen";
const REJECTED: &str = "rejected";
const RESPONSE: &str = "rejected_response";
const MESSAGES: &str = "rejected_messages";
/// Names of the field that says whether an answer is wanted.
const LABELS: [&str; 2] = ["label", "kto_tag"];

impl fmt::Display for PairSchema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PairSchema::Prompted(prompt) => write!(f, "`{prompt}`, `{CHOSEN}` and `{REJECTED}`"),
            PairSchema::Instruction => write!(f, "`instruction`, `input`, `{CHOSEN}` and `{REJECTED}`"),
            PairSchema::Implicit => write!(f, "`{CHOSEN}` and `{REJECTED}`, which begin with the prompt"),
            PairSchema::Asked(list) => write!(f, "`{list}`, `{CHOSEN}` and `{REJECTED}`"),
            PairSchema::Answered(list, other) | PairSchema::Twice(list, other) => {
                write!(f, "`{list}` and `{other}`")
            }
        }
    }
}

impl PairSchema {
    /// The format of a row with these fields.
    pub fn of(fields: &Fields) -> Result<PairSchema, RowError> {
        let list = LISTS.into_iter().find(|name| fields.has(name));
        let has_both = fields.has(CHOSEN) && fields.has(REJECTED);
        let prompt = PROMPTS.into_iter().find(|name| fields.has(name));
        match (list, has_both) {
            (Some(list), true) => Ok(PairSchema::Asked(list)),
            (Some(list), _) if fields.has(RESPONSE) => Ok(PairSchema::Answered(list, RESPONSE)),
            (Some(list), _) if fields.has(MESSAGES) => Ok(PairSchema::Twice(list, MESSAGES)),
            (None, true) if fields.has("instruction") => Ok(PairSchema::Instruction),
            (None, true) => Ok(prompt.map_or(PairSchema::Implicit, PairSchema::Prompted)),
            _ => wrong(
                Reason::Schema,
                format!(
                    "the row has the fields {}, and pairs are read from `{CHOSEN}` and `{REJECTED}` with or without \
                     `prompt`, or from `messages` and `{RESPONSE}`; rename its fields",
                    fields.names()
                ),
            ),
        }
    }

    /// Whether the prompt is a text field of the row, not a list of messages.
    pub fn asks_in_a_text(self, fields: &Fields) -> bool {
        let is_text =
            |name| matches!(fields.get(name), Some(Field::Text(text)) if messages_in(text).is_none());
        match self {
            PairSchema::Prompted(name) => is_text(name),
            PairSchema::Implicit => is_text(CHOSEN),
            PairSchema::Instruction => true,
            PairSchema::Asked(_) | PairSchema::Answered(..) | PairSchema::Twice(..) => false,
        }
    }

    /// The answers of a row. `parts` converts contents that are lists.
    pub fn read(self, fields: &Fields, parts: TakeParts) -> Result<Pair, RowError> {
        let (prompt, [chosen, rejected]) = match self {
            PairSchema::Prompted(name) => prompted(fields, name)?,
            PairSchema::Instruction => {
                let instruction = text_of(fields, "instruction")?;
                let asked = match optional_text(fields, "input")? {
                    Some(input) => format!("{instruction}\n\n{input}"),
                    None => instruction.into(),
                };
                let question = Field::Object(message("user", asked.into()));
                let answers = [answers_of(fields, CHOSEN)?, answers_of(fields, REJECTED)?];
                (Prompt::Messages(vec![question]), answers.map(RawAnswer::into_messages))
            }
            PairSchema::Implicit => match (answers_of(fields, CHOSEN)?, answers_of(fields, REJECTED)?) {
                (RawAnswer::Text(chosen), RawAnswer::Text(rejected)) => common_text(&chosen, &rejected)?,
                (chosen, rejected) => common_messages([chosen, rejected].map(RawAnswer::into_messages))?,
            },
            PairSchema::Asked(name) => {
                let answers = [answers_of(fields, CHOSEN)?, answers_of(fields, REJECTED)?];
                (Prompt::Messages(list_of(fields, name)?), answers.map(RawAnswer::into_messages))
            }
            PairSchema::Answered(name, other) => {
                let mut list = list_of(fields, name)?;
                let Some(last) = list.pop().filter(|_| !list.is_empty()) else {
                    return wrong(
                        Reason::Conversation,
                        format!("`{name}` has no question before its last message; give it one"),
                    );
                };
                let rejected = Field::Object(message("assistant", answer_of(fields, other)?.into()));
                (Prompt::Messages(list), [vec![last], vec![rejected]])
            }
            PairSchema::Twice(name, other) => {
                common_messages([list_of(fields, name)?, list_of(fields, other)?])?
            }
        };
        let answer = |messages: Vec<Field>, name: &str| -> Result<Dialogue, RowError> {
            match &prompt {
                Prompt::Text(prompt) => plain(prompt, &messages, name),
                Prompt::Messages(prompt) => {
                    Ok(Dialogue::Chat(conversation(fields, prompt, &messages, name, parts)?))
                }
            }
        };
        let pair = Pair { chosen: answer(chosen, CHOSEN)?, rejected: answer(rejected, REJECTED)? };
        if pair.chosen == pair.rejected {
            return wrong(
                Reason::Pair,
                "both answers are equal, so there is nothing to prefer; correct one of them".into(),
            );
        }
        Ok(pair)
    }
}

/// Rows with one answer that is wanted or not: a conversation of any format, and the field with the judgement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct JudgedSchema {
    of: Schema,
    label: &'static str,
}

impl fmt::Display for JudgedSchema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, with `{}`", self.of, self.label)
    }
}

impl JudgedSchema {
    pub fn of(fields: &Fields) -> Result<JudgedSchema, RowError> {
        let Some(label) = LABELS.into_iter().find(|name| fields.has(name)) else {
            let sentence = format!(
                "the row has the fields {}, and whether its answer is wanted is read from `label`; give it one, or compare \
                 pairs of answers with another preference.loss",
                fields.names()
            );
            return wrong(Reason::Schema, sentence);
        };
        Ok(JudgedSchema { of: Schema::of(fields)?, label })
    }

    /// The format of its conversation.
    pub fn dialogue(self) -> Schema {
        self.of
    }

    /// The answer of a row. `parts` converts contents that are lists.
    pub fn read(self, fields: &Fields, parts: TakeParts) -> Result<Judged, RowError> {
        let mut dialogue = self.of.read(fields, parts)?;
        if let Dialogue::Chat(chat) = &mut dialogue {
            // The judgement is about the last answer; earlier ones belong to the prompt.
            let last = chat.learned.len() - 1;
            if !chat.learned[last] || last == 0 {
                return wrong(
                    Reason::Conversation,
                    "the conversation does not end with an answer of the assistant to a question; correct it"
                        .into(),
                );
            }
            chat.learned[..last].fill(false);
        }
        if let Dialogue::Plain { prompt, .. } = &dialogue
            && prompt.is_empty()
        {
            return wrong(Reason::Empty, "the prompt is empty; give it a text".into());
        }
        let is_wanted = match fields.get(self.label) {
            Some(Field::Bool(wanted)) => *wanted,
            Some(Field::Whole(number @ (0 | 1))) => *number == 1,
            Some(Field::Text(text)) if ["true", "1"].contains(&text.to_lowercase().as_str()) => true,
            Some(Field::Text(text)) if ["false", "0"].contains(&text.to_lowercase().as_str()) => false,
            other => {
                let sentence = format!(
                    "`{}` is {}, and says whether the answer is wanted; give true or false",
                    self.label,
                    other.map_or("missing", |field| field.kind())
                );
                return wrong(Reason::Label, sentence);
            }
        };
        Ok(Judged { dialogue, is_wanted })
    }
}

/// The prompt that both answers follow.
enum Prompt {
    Text(String),
    Messages(Vec<Field>),
}

/// An answer as a row has it.
enum RawAnswer {
    Text(String),
    Messages(Vec<Field>),
}

impl RawAnswer {
    fn into_messages(self) -> Vec<Field> {
        match self {
            RawAnswer::Text(text) => vec![Field::Object(message("assistant", text.into()))],
            RawAnswer::Messages(messages) => messages,
        }
    }
}

/// An answer of a row: a text, a message, or a list of messages. Tables without lists have it as JSON.
fn answers_of(fields: &Fields, name: &str) -> Result<RawAnswer, RowError> {
    match fields.get(name) {
        Some(Field::Object(_)) => {
            Ok(RawAnswer::Messages(vec![fields.get(name).cloned().expect("the field was just found")]))
        }
        Some(Field::List(list)) if list.is_empty() => {
            wrong(Reason::Empty, format!("`{name}` is an empty list; give it an answer"))
        }
        Some(Field::List(list)) => Ok(RawAnswer::Messages(list.clone())),
        Some(Field::Text(text)) => match messages_in(text) {
            Some(messages) => Ok(RawAnswer::Messages(messages)),
            None => Ok(RawAnswer::Text(answer_of(fields, name)?.into())),
        },
        _ => Ok(RawAnswer::Text(answer_of(fields, name)?.into())),
    }
}

/// The messages in a text that is JSON; `None` where it is not.
fn messages_in(text: &str) -> Option<Vec<Field>> {
    if !text.trim_start().starts_with('[') {
        return None;
    }
    let Ok(Field::List(list)) = Field::from_json(text) else { return None };
    let is_message = |field: &Field| matches!(field, Field::Object(of) if role_of(of).is_some());
    (!list.is_empty() && list.iter().all(is_message)).then_some(list)
}

fn role_of(fields: &Fields) -> Option<&str> {
    ["role", "from"].iter().find_map(|name| fields.get(name)).and_then(Field::text)
}

/// Whether a message is the assistant's, by any name of that role.
fn is_answer(field: &Field) -> bool {
    let Field::Object(fields) = field else { return false };
    role_of(fields).is_some_and(|role| Conversation::role(role) == Some("assistant"))
}

/// The prompt that a row names, and its answers.
fn prompted(fields: &Fields, name: &str) -> Result<(Prompt, [Vec<Field>; 2]), RowError> {
    let answers = [answers_of(fields, CHOSEN)?, answers_of(fields, REJECTED)?];
    let is_whole = |answer: &RawAnswer| matches!(answer, RawAnswer::Messages(messages) if messages.first().is_some_and(|first| !is_answer(first)));
    // Answers that do not begin with the assistant are whole conversations, which contain the prompt.
    if answers.iter().any(is_whole) {
        return common_messages(answers.map(RawAnswer::into_messages));
    }
    let are_texts = answers.iter().all(|answer| matches!(answer, RawAnswer::Text(_)));
    let answers = answers.map(RawAnswer::into_messages);
    match fields.get(name) {
        Some(Field::List(_)) => Ok((Prompt::Messages(list_of(fields, name)?), answers)),
        Some(Field::Text(text)) if messages_in(text).is_some() => {
            Ok((Prompt::Messages(messages_in(text).expect("just found")), answers))
        }
        _ => {
            let prompt = text_of(fields, name)?;
            if prompt.trim().is_empty() {
                return wrong(Reason::Empty, format!("the field `{name}` is empty; give it a text"));
            }
            // Texts without turns stay as they are, unless a system message shows that they are turns.
            match are_texts && optional_text(fields, "system")?.is_none() {
                true => Ok((Prompt::Text(prompt.into()), answers)),
                false => {
                    let question = Field::Object(message("user", prompt.into()));
                    Ok((Prompt::Messages(vec![question]), answers))
                }
            }
        }
    }
}

/// Splits two texts where they begin to differ; a space before that point belongs to the answers.
fn common_text(chosen: &str, rejected: &str) -> Result<(Prompt, [Vec<Field>; 2]), RowError> {
    let both = chosen.char_indices().zip(rejected.chars());
    let mut cut: usize = both.take_while(|((_, a), b)| a == b).map(|((_, a), _)| a.len_utf8()).sum();
    if cut == chosen.len() || cut == rejected.len() {
        let sentence = if chosen == rejected {
            "both answers are equal"
        } else {
            "one answer is only the beginning of the other"
        };
        return wrong(
            Reason::Pair,
            format!("{sentence}, so there is nothing to prefer; correct one of them"),
        );
    }
    if chosen[..cut].ends_with(' ') {
        cut -= 1;
    }
    if cut == 0 {
        return wrong(
            Reason::Pair,
            format!("`{CHOSEN}` and `{REJECTED}` begin differently and there is no `prompt`; give it one"),
        );
    }
    let answer = |text: &str| vec![Field::Object(message("assistant", text[cut..].to_string().into()))];
    Ok((Prompt::Text(chosen[..cut].into()), [answer(chosen), answer(rejected)]))
}

/// Splits two conversations where they begin to differ, which must be at the beginning of an answer.
fn common_messages([chosen, rejected]: [Vec<Field>; 2]) -> Result<(Prompt, [Vec<Field>; 2]), RowError> {
    let cut = chosen.iter().zip(&rejected).take_while(|(a, b)| a == b).count();
    if cut == chosen.len() || cut == rejected.len() {
        let sentence = if chosen == rejected {
            "both conversations are equal"
        } else {
            "one conversation is only the beginning of the other"
        };
        return wrong(
            Reason::Pair,
            format!("{sentence}, so there is nothing to prefer; correct one of them"),
        );
    }
    if cut == 0 {
        return wrong(
            Reason::Pair,
            format!("`{CHOSEN}` and `{REJECTED}` have no first message in common; give both the same prompt"),
        );
    }
    let (prompt, chosen, rejected) =
        (chosen[..cut].to_vec(), chosen[cut..].to_vec(), rejected[cut..].to_vec());
    Ok((Prompt::Messages(prompt), [chosen, rejected]))
}

/// An answer without turns.
fn plain(prompt: &str, messages: &[Field], name: &str) -> Result<Dialogue, RowError> {
    let texts = messages.iter().filter_map(|message| match message {
        Field::Object(fields) => fields.get("content").and_then(Field::text),
        _ => None,
    });
    let completion: String = texts.collect();
    if completion.trim().is_empty() {
        return wrong(Reason::Empty, format!("the answer `{name}` is empty; give it a text"));
    }
    Ok(Dialogue::Plain { prompt: prompt.into(), completion })
}

/// A prompt and one of its answers as a conversation, of which the answer is learned.
fn conversation(
    fields: &Fields,
    prompt: &[Field],
    answer: &[Field],
    name: &str,
    parts: TakeParts,
) -> Result<Conversation, RowError> {
    let mut chat = Conversation::without_messages(fields)?;
    for (at, field) in prompt.iter().enumerate() {
        chat.add(field, at, "the prompt", false, parts)?;
    }
    if prompt.is_empty() {
        return wrong(Reason::Pair, "the row has no prompt; give it one".into());
    }
    if !answer.first().is_some_and(is_answer) {
        return wrong(
            Reason::Pair,
            format!("`{name}` does not begin with an answer of the assistant after the prompt; correct it"),
        );
    }
    for (at, field) in answer.iter().enumerate() {
        chat.add(field, at, name, true, parts)?;
    }
    if !chat.learned.contains(&true) {
        return wrong(Reason::NothingToLearn, format!("nothing of `{name}` is learned; give it an answer"));
    }
    Ok(chat)
}

#[cfg(test)]
mod tests {
    use super::super::conversation::joined;
    use super::*;

    fn row(json: &str) -> Fields {
        let Ok(Field::Object(fields)) = Field::from_json(json) else { panic!("an object: {json}") };
        fields
    }

    fn pair(json: &str) -> Result<Pair, RowError> {
        let fields = row(json);
        PairSchema::of(&fields).and_then(|schema| schema.read(&fields, joined))
    }

    /// The roles and contents of both answers' conversations.
    fn chats(json: &str) -> [Vec<(String, String, bool)>; 2] {
        let Pair { chosen, rejected } = pair(json).unwrap();
        [chosen, rejected].map(|dialogue| {
            let Dialogue::Chat(chat) = dialogue else { panic!("a conversation: {json}") };
            let text =
                |fields: &Fields, name: &str| fields.get(name).and_then(Field::text).unwrap().to_string();
            let turns = chat.messages.iter().zip(&chat.learned);
            turns.map(|(m, learned)| (text(m, "role"), text(m, "content"), *learned)).collect()
        })
    }

    fn turn(role: &str, content: &str, learned: bool) -> (String, String, bool) {
        (role.into(), content.into(), learned)
    }

    #[test]
    fn every_form_of_a_pair_is_the_same_pair() {
        let forms = [
            r#"{"prompt":[{"role":"user","content":"Hi"}],"chosen":[{"role":"assistant","content":"Yes"}],"rejected":[{"role":"assistant","content":"No"}]}"#,
            r#"{"chosen":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Yes"}],"rejected":[{"role":"user","content":"Hi"},{"role":"assistant","content":"No"}]}"#,
            // The prompt as a text, with answers that are whole conversations.
            r#"{"prompt":"Hi","chosen":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Yes"}],"rejected":[{"role":"user","content":"Hi"},{"role":"assistant","content":"No"}]}"#,
            r#"{"prompt":"Hi","chosen":[{"role":"assistant","content":"Yes"}],"rejected":[{"role":"assistant","content":"No"}]}"#,
            r#"{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Yes"}],"rejected_response":"No"}"#,
            r#"{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Yes"}],"rejected_messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"No"}]}"#,
            r#"{"conversations":[{"from":"human","value":"Hi"}],"chosen":{"from":"gpt","value":"Yes"},"rejected":{"from":"gpt","value":"No"}}"#,
            r#"{"instruction":"Hi","input":"","chosen":"Yes","rejected":"No"}"#,
            // Tables without lists have them as JSON.
            r#"{"chosen":"[{\"role\":\"user\",\"content\":\"Hi\"},{\"role\":\"assistant\",\"content\":\"Yes\"}]","rejected":"[{\"role\":\"user\",\"content\":\"Hi\"},{\"role\":\"assistant\",\"content\":\"No\"}]"}"#,
        ];
        for form in forms {
            let answer = |text: &str| vec![turn("user", "Hi", false), turn("assistant", text, true)];
            assert_eq!(chats(form), [answer("Yes"), answer("No")], "{form}");
        }
        let [chosen, _] = chats(r#"{"system":"Be kind","question":"Hi","chosen":"Yes","rejected":"No"}"#);
        assert_eq!(chosen[0], turn("system", "Be kind", false), "a system's message makes turns of texts");
        let turns = r#"{"chosen":[{"role":"user","content":"a"},{"role":"assistant","content":"b"},{"role":"user","content":"c"},{"role":"assistant","content":"d"}],
            "rejected":[{"role":"user","content":"a"},{"role":"assistant","content":"b"},{"role":"user","content":"c"},{"role":"assistant","content":"e"}]}"#;
        let learned: Vec<bool> = chats(turns)[0].iter().map(|(_, _, learned)| *learned).collect();
        assert_eq!(learned, [false, false, false, true], "earlier answers are part of the prompt");
    }

    #[test]
    fn texts_stay_texts() {
        let of = |json: &str| match pair(json).unwrap() {
            Pair {
                chosen: Dialogue::Plain { prompt, completion },
                rejected: Dialogue::Plain { prompt: same, completion: other },
            } => {
                assert_eq!(prompt, same);
                (prompt, completion, other)
            }
            other => panic!("{other:?}"),
        };
        let texts = |a: &str, b: &str, c: &str| (a.to_string(), b.to_string(), c.to_string());
        assert_eq!(
            of(r#"{"prompt":"The sky is","chosen":" blue.","rejected":" green."}"#),
            texts("The sky is", " blue.", " green.")
        );
        assert_eq!(
            of(r#"{"chosen":"The sky is blue.","rejected":"The sky is green."}"#),
            texts("The sky is", " blue.", " green.")
        );
        assert_eq!(of(r#"{"chosen":"ä ö","rejected":"ä ü"}"#), texts("ä", " ö", " ü"));
        assert_eq!(
            of(r#"{"prompt":"x","chosen":"[1, 2]","rejected":"[2, 1]"}"#).1,
            "[1, 2]",
            "a list that is no messages"
        );
    }

    #[test]
    fn what_cannot_be_compared_is_refused() {
        let cases = [
            (r#"{"prompt":"a","chosen":"b","rejected":"b"}"#, "both answers are equal"),
            (r#"{"prompt":"a","chosen":"b","rejected":" "}"#, "`rejected` is empty"),
            (r#"{"prompt":"a","chosen":[],"rejected":"b"}"#, "`chosen` is an empty list"),
            (r#"{"prompt":" ","chosen":"b","rejected":"c"}"#, "`prompt` is empty"),
            (r#"{"prompt":"a","chosen":null,"rejected":"c"}"#, "`chosen` is null"),
            (r#"{"prompt":"a","chosen":5,"rejected":"c"}"#, "`chosen` is a number"),
            (r#"{"chosen":"The sky","rejected":"The sky is green."}"#, "only the beginning of the other"),
            (r#"{"chosen":"Yes","rejected":"No"}"#, "begin differently"),
            (r#"{"prompt":"a","chosen":"b"}"#, "pairs are read from"),
            (
                r#"{"chosen":[{"role":"user","content":"a"}],"rejected":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}"#,
                "only the beginning",
            ),
            (
                r#"{"chosen":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}],"rejected":[{"role":"user","content":"c"},{"role":"assistant","content":"d"}]}"#,
                "no first message in common",
            ),
            (
                r#"{"chosen":[{"role":"user","content":"a"},{"role":"user","content":"b"}],"rejected":[{"role":"user","content":"a"},{"role":"assistant","content":"d"}]}"#,
                "does not begin with an answer",
            ),
            (
                r#"{"messages":[{"role":"assistant","content":"b"}],"rejected_response":"c"}"#,
                "no question before its last message",
            ),
            (
                r#"{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}],"rejected_response":"b"}"#,
                "both answers are equal",
            ),
            (
                r#"{"conversations":[],"chosen":{"from":"gpt","value":"b"},"rejected":{"from":"gpt","value":"c"}}"#,
                "has no prompt",
            ),
            (
                r#"{"conversations":[{"from":"human","value":"a"}],"chosen":{"from":"human","value":"b"},"rejected":{"from":"gpt","value":"c"}}"#,
                "does not begin with an answer",
            ),
        ];
        for (json, words) in cases {
            let sentence = pair(json).unwrap_err().message;
            assert!(sentence.contains(words), "{json}: {sentence:?} lacks {words:?}");
        }
    }

    #[test]
    fn judged_answers_are_wanted_or_not() {
        let of = |json: &str| {
            let fields = row(json);
            JudgedSchema::of(&fields).and_then(|schema| schema.read(&fields, joined))
        };
        assert!(of(r#"{"prompt":"a","completion":"b","label":true}"#).unwrap().is_wanted);
        assert!(!of(r#"{"prompt":"a","completion":"b","label":"False"}"#).unwrap().is_wanted);
        let chat = of(r#"{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"},{"role":"user","content":"c"},{"role":"assistant","content":"d"}],"kto_tag":1}"#).unwrap();
        let Dialogue::Chat(conversation) = &chat.dialogue else { panic!("a conversation") };
        assert_eq!((chat.is_wanted, &conversation.learned[..]), (true, &[false, false, false, true][..]));
        for (json, words) in [
            (r#"{"prompt":"a","completion":"b"}"#, "read from `label`"),
            (r#"{"prompt":"a","completion":"b","label":"maybe"}"#, "give true or false"),
            (r#"{"prompt":"a","completion":"b","label":2}"#, "give true or false"),
            (r#"{"prompt":"","completion":"b","label":true}"#, "the prompt is empty"),
            (
                r#"{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"},{"role":"user","content":"c"}],"label":true}"#,
                "does not end with an answer",
            ),
        ] {
            let sentence = of(json).unwrap_err().message;
            assert!(sentence.contains(words), "{json}: {sentence:?} lacks {words:?}");
        }
    }
}
