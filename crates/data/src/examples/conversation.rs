//! Turns rows into conversations: the published formats of instruction sets, recognised by their fields.

use std::borrow::Cow;
use std::fmt;

use super::row_error::RowError;
use super::template::is_reserved;
use crate::formats::{Field, Fields, Reason};
use crate::random::{fingerprint, key};

/// Messages between a model and others, in the form that templates take.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Conversation {
    /// Each has a `role` of [`ROLES`] and, unless it calls tools, a `content`.
    pub messages: Vec<Fields>,
    /// Descriptions of the tools that may be called.
    pub tools: Option<Field>,
    /// Other fields of the row that are passed to the template.
    pub options: Fields,
    /// For every message, whether it is an answer to be learned.
    pub learned: Vec<bool>,
}

/// The conversation of one row.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Dialogue {
    Chat(Conversation),
    /// Text without turns: the prompt, and the text that follows it.
    Plain {
        prompt: String,
        completion: String,
    },
}

/// The roles that messages may have.
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];
/// Other names for them.
const OTHER_ROLES: [(&str, &str); 12] = [
    ("human", "user"),
    ("prompter", "user"),
    ("gpt", "assistant"),
    ("chatgpt", "assistant"),
    ("model", "assistant"),
    ("bot", "assistant"),
    ("function_call", "assistant"),
    ("function", "tool"),
    ("function_response", "tool"),
    ("tool_response", "tool"),
    ("observation", "tool"),
    ("ipython", "tool"),
];

/// The known formats of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Schema {
    /// A list of messages under one of these names.
    Messages(&'static str),
    /// An instruction, optionally with an input, and the answer, which has this name.
    Alpaca(&'static str),
    /// Two texts, or two lists of messages, under these names.
    Pair(&'static str, &'static str),
}

const LISTS: [&str; 3] = ["messages", "conversations", "conversation"];
const PAIRS: [(&str, &str); 4] =
    [("prompt", "completion"), ("prompt", "response"), ("question", "answer"), ("query", "response")];
const ANSWERS: [&str; 2] = ["output", "response"];

impl fmt::Display for Schema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Schema::Messages("messages") => f.write_str("`messages` (role, content)"),
            Schema::Messages(name) => write!(f, "`{name}` as in ShareGPT (from, value)"),
            Schema::Alpaca(answer) => write!(f, "`instruction`, `input`, `{answer}` as in Alpaca"),
            Schema::Pair(prompt, completion) => write!(f, "`{prompt}` and `{completion}`"),
        }
    }
}

/// Converts a content that is a list of parts. The second argument is the number of its message.
pub(super) type TakeParts = fn(&[Field], usize) -> Result<Field, RowError>;

impl Schema {
    /// The format of a row with these fields.
    pub(crate) fn of(fields: &Fields) -> Result<Schema, RowError> {
        if let Some(name) = LISTS.into_iter().find(|name| fields.has(name)) {
            return Ok(Schema::Messages(name));
        }
        if let Some(answer) =
            ANSWERS.into_iter().find(|answer| fields.has("instruction") && fields.has(answer))
        {
            return Ok(Schema::Alpaca(answer));
        }
        if let Some((prompt, completion)) = PAIRS.into_iter().find(|(a, b)| fields.has(a) && fields.has(b)) {
            return Ok(Schema::Pair(prompt, completion));
        }
        Err(RowError::new(
            Reason::Schema,
            format!(
                "the row has the fields {}, and conversations are read from `messages`, from `conversations`, from \
                 `instruction` and `output`, or from `prompt` and `completion`; rename its fields",
                fields.names()
            ),
        ))
    }

    /// The conversation of a row. `parts` converts contents that are lists.
    pub(super) fn read(self, fields: &Fields, parts: TakeParts) -> Result<Dialogue, RowError> {
        let mut dialogue = match self {
            Schema::Messages(name) => {
                let mut chat = Conversation::default();
                if let Some(system) = optional_text(fields, "system")? {
                    chat.push(message("system", system.into()), false);
                }
                let list = list_of(fields, name)?;
                if list.is_empty() {
                    return wrong(
                        Reason::Conversation,
                        format!("`{name}` is empty; give it a question and an answer"),
                    );
                }
                for (at, field) in list.iter().enumerate() {
                    chat.add(field, at, name, true, parts)?;
                }
                Dialogue::Chat(chat)
            }
            Schema::Alpaca(answer) => {
                let mut chat = Conversation::default();
                if let Some(system) = optional_text(fields, "system")? {
                    chat.push(message("system", system.into()), false);
                }
                let instruction = text_of(fields, "instruction")?;
                let asked = match optional_text(fields, "input")? {
                    Some(input) => format!("{instruction}\n\n{input}"),
                    None => instruction.into(),
                };
                if asked.trim().is_empty() {
                    return wrong(Reason::Empty, "the field `instruction` is empty; give it a text".into());
                }
                chat.push(message("user", asked.into()), false);
                chat.push(message("assistant", answer_of(fields, answer)?.into()), true);
                Dialogue::Chat(chat)
            }
            Schema::Pair(prompt, completion) => match fields.get(prompt) {
                Some(Field::List(_)) => {
                    let mut chat = Conversation::default();
                    for (name, is_learned) in [(prompt, false), (completion, true)] {
                        for (at, field) in list_of(fields, name)?.iter().enumerate() {
                            chat.add(field, at, name, is_learned, parts)?;
                        }
                    }
                    Dialogue::Chat(chat)
                }
                _ => Dialogue::Plain {
                    prompt: text_of(fields, prompt)?.into(),
                    completion: answer_of(fields, completion)?.into(),
                },
            },
        };
        if let Dialogue::Chat(chat) = &mut dialogue {
            chat.tools = tools_of(fields)?;
            if let Some(Field::Object(options)) = fields.get("chat_template_kwargs") {
                chat.options = options.clone();
            }
            if !chat.learned.contains(&true) {
                return wrong(
                    Reason::NothingToLearn,
                    "the conversation has no answer of the assistant to learn from; give it one".into(),
                );
            }
        }
        Ok(dialogue)
    }
}

impl Dialogue {
    /// Hash of the content, independent of how it was written. It decides the side of a row.
    pub(crate) fn hash(&self) -> u64 {
        match self {
            Dialogue::Plain { prompt, completion } => {
                key(fingerprint(prompt.as_bytes()), fingerprint(completion.as_bytes()))
            }
            Dialogue::Chat(chat) => chat.hash(),
        }
    }
}

impl Conversation {
    /// Hash of the messages, independent of how they were written.
    pub(super) fn hash(&self) -> u64 {
        let field = |hash: u64, field: Option<&Field>| match field {
            Some(Field::Text(text)) => key(hash, fingerprint(text.as_bytes())),
            Some(other) => key(hash, fingerprint(format!("{other:?}").as_bytes())),
            None => key(hash, 0),
        };
        self.messages.iter().fold(self.messages.len() as u64, |hash, message| {
            ["role", "content", "tool_calls"].iter().fold(hash, |hash, name| field(hash, message.get(name)))
        })
    }

    /// A conversation with the tools and options of a row and its system message, where that is a field of its own.
    pub(super) fn without_messages(fields: &Fields) -> Result<Conversation, RowError> {
        let mut chat = Conversation { tools: tools_of(fields)?, ..Conversation::default() };
        if let Some(Field::Object(options)) = fields.get("chat_template_kwargs") {
            chat.options = options.clone();
        }
        if let Some(system) = optional_text(fields, "system")? {
            chat.push(message("system", system.into()), false);
        }
        Ok(chat)
    }

    /// The role that a name stands for.
    pub(super) fn role(named: &str) -> Option<&'static str> {
        let other = OTHER_ROLES.iter().find(|(other, _)| *other == named).map(|(_, role)| *role);
        ROLES.into_iter().find(|known| *known == named).or(other)
    }

    fn push(&mut self, message: Fields, is_learned: bool) {
        self.messages.push(message);
        self.learned.push(is_learned);
    }

    /// Adds a message as it was written, number `at` of the field `of`.
    pub(super) fn add(
        &mut self,
        field: &Field,
        at: usize,
        of: &str,
        may_learn: bool,
        parts: TakeParts,
    ) -> Result<(), RowError> {
        let turn = at + 1;
        let Field::Object(fields) = field else {
            let sentence = format!(
                "message {turn} of `{of}` is {}, not an object; give it a role and a content",
                field.kind()
            );
            return wrong(Reason::Conversation, sentence);
        };
        let role = ["role", "from"].iter().find_map(|name| fields.get(name));
        let Some(Field::Text(role)) = role else {
            let sentence = match role {
                None => format!(
                    "message {turn} of `{of}` has no `role`, only {}; give it one of {}",
                    fields.names(),
                    ROLES.join(", ")
                ),
                Some(other) => {
                    format!("the role of message {turn} is {}, not a string; correct it", other.kind())
                }
            };
            return wrong(Reason::Role, sentence);
        };
        let Some(role) = Conversation::role(role) else {
            let sentence = format!(
                "message {turn} has the role `{}`, which is none of {}; correct it",
                role.escape_debug(),
                ROLES.join(", ")
            );
            return wrong(Reason::Role, sentence);
        };
        let calls = match fields.get("tool_calls") {
            None | Some(Field::Null) => false,
            Some(Field::List(calls)) => !calls.is_empty(),
            Some(other) => {
                let sentence =
                    format!("`tool_calls` of message {turn} is {}, not a list; correct it", other.kind());
                return wrong(Reason::Conversation, sentence);
            }
        };
        let is_answer = role == "assistant";
        let content = ["content", "value"].iter().find_map(|name| fields.get(name));
        let content = match content {
            Some(Field::Text(text)) => Some(Field::Text(text.clone())),
            Some(Field::List(list)) => Some(parts(list, turn)?),
            Some(Field::Null) if is_answer && calls => Some(Field::Null),
            None if is_answer && calls => None,
            None | Some(Field::Null) => {
                let what =
                    if content.is_none() { "has no `content`" } else { "has a `content` that is null" };
                return wrong(Reason::Null, format!("message {turn} of `{of}` {what}; give it a text"));
            }
            Some(other) => {
                let sentence = format!(
                    "the content of message {turn} is {}, not a string or a list of parts; correct it",
                    other.kind()
                );
                return wrong(Reason::NotAString, sentence);
            }
        };
        let text = content.as_ref().map(spelled).unwrap_or_default();
        if is_reserved(&text) || text.contains('\0') {
            let sentence = format!(
                "message {turn} has a character that no text may have (NUL or U+FDD0 to U+FDD2); remove it"
            );
            return wrong(Reason::Nul, sentence);
        }
        if is_answer && !calls && text.trim().is_empty() {
            return wrong(Reason::Empty, format!("the assistant's message {turn} is empty; give it a text"));
        }
        let is_weighted = !matches!(fields.get("weight"), Some(Field::Whole(0)) | Some(Field::Bool(false)))
            && !matches!(fields.get("weight"), Some(Field::Number(weight)) if *weight == 0.0);
        let mut message = Fields(vec![("role".into(), role.into())]);
        if let Some(content) = content {
            message.set("content", content);
        }
        for (name, field) in &fields.0 {
            if !["role", "from", "content", "value", "weight"].contains(&name.as_str()) {
                message.set(name, field.clone());
            }
        }
        self.push(message, may_learn && is_answer && is_weighted);
        Ok(())
    }
}

pub(super) fn wrong<T>(reason: Reason, sentence: String) -> Result<T, RowError> {
    Err(RowError::new(reason, sentence))
}

pub(super) fn message(role: &str, content: Field) -> Fields {
    Fields(vec![("role".into(), role.into()), ("content".into(), content)])
}

/// The text of a content, without parts that are no text.
fn spelled(content: &Field) -> Cow<'_, str> {
    match content {
        Field::Text(text) => Cow::Borrowed(text),
        Field::List(parts) => {
            let text = |part: &Field| match part {
                Field::Object(fields) => fields.get("text").and_then(Field::text).map(String::from),
                _ => None,
            };
            Cow::Owned(parts.iter().filter_map(text).collect())
        }
        _ => Cow::Borrowed(""),
    }
}

/// A content in parts, all of them texts, as one text.
pub(super) fn joined(parts: &[Field], turn: usize) -> Result<Field, RowError> {
    let mut text = String::new();
    for part in parts {
        match part {
            Field::Text(part) => text.push_str(part),
            Field::Object(fields) => match (fields.get("type").and_then(Field::text), fields.get("text")) {
                (Some("text") | None, Some(Field::Text(part))) => text.push_str(part),
                (kind, _) => {
                    let remedy = match kind {
                        Some("image" | "image_url") => "give data.task=visual_chat, or leave it out",
                        _ => "leave it out",
                    };
                    let kind = kind.unwrap_or("something else").escape_debug();
                    let sentence = format!(
                        "message {turn} has a part of the type `{kind}`, and only `text` is read; {remedy}"
                    );
                    return wrong(Reason::Unsupported, sentence);
                }
            },
            other => {
                let sentence =
                    format!("a part of message {turn} is {}, not a text; correct it", other.kind());
                return wrong(Reason::NotAString, sentence);
            }
        }
    }
    Ok(Field::Text(text))
}

/// A list of messages. Tables without lists have it as JSON.
pub(super) fn list_of(fields: &Fields, name: &str) -> Result<Vec<Field>, RowError> {
    let broken = |sentence: String| {
        RowError::new(
            Reason::Conversation,
            format!("the field `{name}` {sentence}; write a list of messages"),
        )
    };
    match fields.get(name) {
        Some(Field::List(list)) => Ok(list.clone()),
        Some(Field::Text(text)) => match Field::from_json(text) {
            Ok(Field::List(list)) => Ok(list),
            Ok(other) => Err(broken(format!("is JSON of {}, not a list", other.kind()))),
            Err(_) => Err(broken("is a string, not a list".into())),
        },
        Some(other) => Err(broken(format!("is {}, not a list", other.kind()))),
        None => Err(missing(fields, name)),
    }
}

fn tools_of(fields: &Fields) -> Result<Option<Field>, RowError> {
    match fields.get("tools") {
        None | Some(Field::Null) => Ok(None),
        Some(Field::List(tools)) if tools.is_empty() => Ok(None),
        Some(list @ Field::List(_)) => Ok(Some(list.clone())),
        Some(Field::Text(text)) if text.trim().is_empty() => Ok(None),
        Some(Field::Text(text)) => match Field::from_json(text) {
            Ok(Field::List(tools)) if tools.is_empty() => Ok(None),
            Ok(list @ Field::List(_)) => Ok(Some(list)),
            _ => wrong(
                Reason::Conversation,
                "the field `tools` is a string that is not a JSON list; correct it".into(),
            ),
        },
        Some(other) => wrong(
            Reason::Conversation,
            format!("the field `tools` is {}, not a list; correct it", other.kind()),
        ),
    }
}

fn missing(fields: &Fields, name: &str) -> RowError {
    RowError::new(
        Reason::MissingField,
        format!(
            "the row has no field `{name}`, which the first row of the file has, only {}; give it one",
            fields.names()
        ),
    )
}

pub(super) fn text_of<'f>(fields: &'f Fields, name: &str) -> Result<&'f str, RowError> {
    match fields.get(name) {
        Some(Field::Text(text)) if text.contains('\0') || is_reserved(text) => {
            let sentence = format!(
                "the field `{name}` has a character that no text may have (NUL or U+FDD0 to U+FDD2); remove it"
            );
            wrong(Reason::Nul, sentence)
        }
        Some(Field::Text(text)) => Ok(text),
        Some(Field::Null) => wrong(Reason::Null, format!("the field `{name}` is null; give it a text")),
        Some(other) => wrong(
            Reason::NotAString,
            format!("the field `{name}` is {}, not a string; correct it", other.kind()),
        ),
        None => Err(missing(fields, name)),
    }
}

/// A field that may be missing, null or empty.
pub(super) fn optional_text<'f>(fields: &'f Fields, name: &str) -> Result<Option<&'f str>, RowError> {
    match fields.get(name) {
        None | Some(Field::Null) => Ok(None),
        Some(_) => text_of(fields, name).map(|text| Some(text).filter(|text| !text.trim().is_empty())),
    }
}

pub(super) fn answer_of<'f>(fields: &'f Fields, name: &str) -> Result<&'f str, RowError> {
    let text = text_of(fields, name)?;
    if text.trim().is_empty() {
        return wrong(
            Reason::NothingToLearn,
            format!("the field `{name}` is empty, so there is nothing to learn; give it a text"),
        );
    }
    Ok(text)
}
