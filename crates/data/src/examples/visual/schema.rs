//! The formats of rows with images, and the places of the images in their conversations.

use std::fmt;

use super::given::{self, Column};
use super::parts;
use crate::examples::conversation::{Conversation, Dialogue, Schema, answer_of, message, text_of, wrong};
use crate::examples::preference::{Judged, JudgedSchema, Pair, PairSchema};
use crate::examples::row_error::RowError;
use crate::formats::{Field, Fields, Reason};

/// The known formats of rows with images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::examples) enum VisualSchema {
    /// A conversation, or a question and its answer.
    Dialogue(Schema),
    /// Several questions and answers about the same images, each a conversation of its own.
    Turns,
}

/// The field of [`VisualSchema::Turns`], and the fields of its items.
const TURNS: &str = "texts";
const TURN: (&str, &str) = ("user", "assistant");

/// A conversation and its images as the row gives them, each with the number of its message.
pub(super) struct ChatWithImages {
    pub chat: Conversation,
    pub images: Vec<(usize, Field)>,
}

impl fmt::Display for VisualSchema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            VisualSchema::Dialogue(schema) => write!(f, "{schema}, with images"),
            VisualSchema::Turns => write!(f, "`images` and `{TURNS}` ({}, {})", TURN.0, TURN.1),
        }
    }
}

impl VisualSchema {
    /// The format of a row with these fields.
    pub fn of(fields: &Fields) -> Result<VisualSchema, RowError> {
        let known = Schema::of(fields);
        if let Ok(schema @ Schema::Messages(_)) = known {
            return Ok(VisualSchema::Dialogue(schema));
        }
        if fields.has(TURNS) {
            return Ok(VisualSchema::Turns);
        }
        if let Ok(schema) = known {
            return Ok(VisualSchema::Dialogue(schema));
        }
        if fields.has("instruction") && fields.has("answer") {
            return Ok(VisualSchema::Dialogue(Schema::Pair("instruction", "answer")));
        }
        wrong(
            Reason::Schema,
            format!(
                "the row has the fields {}, and rows with images are read from `messages` or `conversations`, from \
                 `question` and `answer`, or from `{TURNS}`, with their images in parts or in `images`; rename its fields",
                fields.names()
            ),
        )
    }

    /// The conversations of a row. `column` names the column of images.
    pub(super) fn read(self, fields: &Fields, column: Option<&str>) -> Result<Vec<ChatWithImages>, RowError> {
        given::no_video(fields)?;
        match self {
            VisualSchema::Turns => {
                let column = Column::of(fields, column, false)?;
                turns(fields)?
                    .into_iter()
                    .map(|(asked, answer)| place_images(question(asked, answer), &column, true))
                    .collect()
            }
            VisualSchema::Dialogue(schema) => {
                Ok(vec![of_dialogue(schema, schema.read(fields, parts::converted)?, fields, column)?])
            }
        }
    }
}

/// The conversation of a row, with its images.
fn of_dialogue(
    schema: Schema,
    dialogue: Dialogue,
    fields: &Fields,
    column: Option<&str>,
) -> Result<ChatWithImages, RowError> {
    let column = Column::of(fields, column, !matches!(schema, Schema::Messages(_)))?;
    let (chat, is_text) = in_turns(dialogue);
    place_images(chat, &column, is_text || matches!(schema, Schema::Alpaca(_)))
}

/// The conversation, and whether it was a text without turns.
fn in_turns(dialogue: Dialogue) -> (Conversation, bool) {
    match dialogue {
        Dialogue::Chat(chat) => (chat, false),
        Dialogue::Plain { prompt, completion } => (question(prompt, completion), true),
    }
}

/// The column of other images for the rejected answer, which are not supported.
const REJECTED_IMAGES: &str = "rejected_images";

/// The prompt of a row with each of its two answers. Images are in the prompt.
pub(super) fn pair(
    schema: PairSchema,
    fields: &Fields,
    column: Option<&str>,
) -> Result<[ChatWithImages; 2], RowError> {
    given::no_video(fields)?;
    if !matches!(fields.get(REJECTED_IMAGES), None | Some(Field::Null)) {
        return wrong(
            Reason::ImageCount,
            format!(
                "the row has `{REJECTED_IMAGES}`, and both answers of a pair are about the same images; leave the row out"
            ),
        );
    }
    let Pair { chosen, rejected } = schema.read(fields, parts::converted)?;
    let is_asked = schema.asks_in_a_text(fields);
    let column = Column::of(fields, column, is_asked)?;
    let of = |dialogue: Dialogue| {
        let (chat, is_text) = in_turns(dialogue);
        without_images_in_answers(place_images(chat, &column, is_asked || is_text)?)
    };
    Ok([of(chosen)?, of(rejected)?])
}

/// The prompt of a row with its answer, and whether that is wanted.
pub(super) fn judged(
    schema: JudgedSchema,
    fields: &Fields,
    column: Option<&str>,
) -> Result<(ChatWithImages, bool), RowError> {
    given::no_video(fields)?;
    let Judged { dialogue, is_wanted } = schema.read(fields, parts::converted)?;
    let place_images = of_dialogue(schema.dialogue(), dialogue, fields, column)?;
    Ok((without_images_in_answers(place_images)?, is_wanted))
}

/// Refuses images in compared answers.
fn without_images_in_answers(place_images: ChatWithImages) -> Result<ChatWithImages, RowError> {
    match place_images.images.iter().find(|(turn, _)| place_images.chat.learned[*turn]) {
        None => Ok(place_images),
        Some((turn, _)) => wrong(
            Reason::ImageCount,
            format!("message {} is an answer with an image, and answers are texts; correct it", turn + 1),
        ),
    }
}

/// A question and its answer as a conversation.
fn question(asked: String, answer: String) -> Conversation {
    Conversation {
        messages: vec![message("user", asked.into()), message("assistant", answer.into())],
        learned: vec![false, true],
        ..Conversation::default()
    }
}

/// The questions and answers of a row.
fn turns(fields: &Fields) -> Result<Vec<(String, String)>, RowError> {
    let broken = |sentence: String| RowError::new(Reason::Conversation, sentence);
    let list = match fields.get(TURNS) {
        Some(Field::List(list)) if !list.is_empty() => list,
        Some(Field::List(_)) => {
            return Err(broken(format!("`{TURNS}` is empty; give it a question and an answer")));
        }
        Some(other) => {
            return Err(broken(format!("the field `{TURNS}` is {}, not a list; correct it", other.kind())));
        }
        None => {
            let sentence = format!("the row has no field `{TURNS}`, only {}; give it one", fields.names());
            return Err(RowError::new(Reason::MissingField, sentence));
        }
    };
    let turn = |(at, turn): (usize, &Field)| match turn {
        Field::Object(turn) => Ok((text_of(turn, TURN.0)?.to_string(), answer_of(turn, TURN.1)?.to_string())),
        other => Err(broken(format!(
            "text {} of `{TURNS}` is {}, not an object with `{}` and `{}`; correct it",
            at + 1,
            other.kind(),
            TURN.0,
            TURN.1
        ))),
    };
    list.iter().enumerate().map(turn).collect()
}

/// Fills the places of images in a conversation. Where none are given and `comes_first`, images come before the text of the
/// first question.
fn place_images(
    mut chat: Conversation,
    column: &Column,
    comes_first: bool,
) -> Result<ChatWithImages, RowError> {
    let contents = |chat: &mut Conversation, of: &mut dyn FnMut(usize, &mut Field)| {
        for (at, message) in chat.messages.iter_mut().enumerate() {
            if let Some((_, content)) = message.0.iter_mut().find(|(name, _)| name == "content") {
                of(at, content);
            }
        }
    };
    let mut spells_video = None;
    let mut has_parts = false;
    contents(&mut chat, &mut |at, content| {
        has_parts |= matches!(content, Field::List(_));
        spells_video = spells_video.or(parts::spells_video(content).then_some(at + 1));
    });
    if let Some(turn) = spells_video {
        return wrong(
            Reason::Unsupported,
            format!("message {turn} has a `{}`, and video is not read; leave the row out", parts::VIDEO_MARK),
        );
    }
    if !has_parts {
        contents(&mut chat, &mut |_, content| {
            if let Some(split) = content.text().and_then(parts::split) {
                (*content, has_parts) = (split, true);
            }
        });
    }
    if !has_parts && comes_first && !column.images.is_empty() {
        let asked = chat.messages.iter_mut().find(|message| message.get("role") == Some(&"user".into()));
        let asked = asked.expect("a question is asked by someone");
        let text = asked.get("content").and_then(Field::text).unwrap_or_default().to_string();
        asked.set("content", parts::before(column.images.len(), &text));
    }
    let mut places: Vec<(usize, Option<Field>)> = Vec::new();
    contents(&mut chat, &mut |at, content| {
        if let Field::List(list) = content {
            places.extend(list.iter_mut().filter_map(parts::take_image).map(|held| (at, held)));
        }
    });
    Ok(ChatWithImages { chat, images: column.fill(places)? })
}
