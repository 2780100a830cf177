//! A sample of a shard: its frames in order, and the content of its JSON.

use crate::examples::conversation::wrong;
use crate::examples::row_error::RowError;
use crate::formats::{Field, Fields, Reason};
use crate::images::{Archive, ENDINGS, Entry, Flaw, OTHER_ENDINGS, Sample};

/// Endings of videos, which have to be split into frames first.
const VIDEOS: [&str; 6] = ["mp4", "webm", "mkv", "mov", "avi", "m4v"];

/// The members of a sample by kind.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Parts {
    /// Frames in the order of their numbers.
    pub frames: Vec<Entry>,
    pub json: Option<Entry>,
    pub text: Option<Entry>,
}

/// The text of a sample.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Content {
    /// A question, which may be empty, and its answer.
    Answer { user: String, assistant: String },
    /// A caption of the frames or of the still image.
    Caption(String),
    /// A tokenised text, and which of its tokens are learned; `None` means all of them.
    Tokens { ids: Vec<u32>, learned: Option<Vec<bool>> },
    /// A question and two answers, the better one first.
    Pair { user: String, answers: [String; 2] },
}

/// The JSON of a sample.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct SampleMetadata {
    pub content: Content,
    /// The set that it was taken from.
    pub source: String,
    pub frame_count: Option<u64>,
}

impl Parts {
    /// Sorts the members of a sample by kind; members of unknown kinds are ignored. `side` is for the message about videos,
    /// which has the command that splits them into frames.
    pub fn of(sample: &Sample, side: usize) -> Result<Parts, RowError> {
        let (key, mut parts) = (&sample.key, Parts::default());
        let mut numbered: Vec<(u64, &Entry)> = Vec::new();
        let mut still: Option<&Entry> = None;
        for (ending, entry) in &sample.members {
            let twice = |kept: &Option<Entry>| match kept {
                Some(_) => wrong(
                    Reason::KeyTwice,
                    format!("the member {} occurs twice; write the archive again", entry.name),
                ),
                None => Ok(Some(entry.clone())),
            };
            let (name, last) = ending.rsplit_once('.').unwrap_or(("", ending));
            match ending.as_str() {
                "json" => parts.json = twice(&parts.json)?,
                "txt" => parts.text = twice(&parts.text)?,
                _ if VIDEOS.contains(&last) => return Err(uncut(&entry.name, key, side)),
                _ if OTHER_ENDINGS.contains(&last) => {
                    let message = format!(
                        "the member {} is of another kind than JPEG, PNG and WebP; convert it",
                        entry.name
                    );
                    return wrong(Reason::NotAnImage, message);
                }
                _ if !ENDINGS.contains(&last) => {}
                _ if name.is_empty() => {
                    if let Some(other) = still.replace(entry) {
                        let message = format!(
                            "the sample {key} has two still images, {} and {}; number them as frames, as in {key}.000.jpg, or \
                             leave one out",
                            other.name, entry.name
                        );
                        return wrong(Reason::KeyTwice, message);
                    }
                }
                _ => match name.bytes().all(|byte| byte.is_ascii_digit()).then(|| name.parse()) {
                    Some(Ok(number)) => numbered.push((number, entry)),
                    _ => {
                        let message = format!(
                            "the member {} is an image without a number between {key} and its ending; name it as in \
                             {key}.000.jpg",
                            entry.name
                        );
                        return wrong(Reason::Unsupported, message);
                    }
                },
            }
        }
        numbered.sort_by_key(|(number, _)| *number);
        if let Some(pair) = numbered.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            let message =
                format!("{} and {} are the same frame; leave one out", pair[0].1.name, pair[1].1.name);
            return wrong(Reason::KeyTwice, message);
        }
        if let (Some(still), Some((_, frame))) = (still, numbered.first()) {
            let message = format!(
                "the sample {key} has a still image, {}, beside frames, {}; leave one out",
                still.name, frame.name
            );
            return wrong(Reason::KeyTwice, message);
        }
        parts.frames =
            still.into_iter().chain(numbered.into_iter().map(|(_, entry)| entry)).cloned().collect();
        Ok(parts)
    }

    /// Reads the JSON and the text of the sample.
    pub fn metadata(
        &self,
        key: &str,
        archive: &Archive,
        most: u64,
    ) -> std::io::Result<Result<SampleMetadata, RowError>> {
        let mut texts = [None, None];
        for (place, entry) in texts.iter_mut().zip([&self.json, &self.text]) {
            let Some(entry) = entry else { continue };
            let Some(bytes) = archive.read(entry, most)? else {
                let message =
                    format!("the member {} is longer than data.max_document_bytes; raise it", entry.name);
                return Ok(wrong(Reason::TooLong, message));
            };
            match String::from_utf8(bytes) {
                Ok(text) => *place = Some(text),
                Err(_) => {
                    let message = format!("the member {} is not UTF-8; convert it", entry.name);
                    return Ok(wrong(Reason::NotUtf8, message));
                }
            }
        }
        let [json, text] = texts;
        Ok(metadata(key, json.as_deref(), text, self.frames.len()))
    }
}

/// The text of a sample with this number of frames, from its JSON or from its caption file.
fn metadata(
    key: &str,
    json: Option<&str>,
    text: Option<String>,
    frames: usize,
) -> Result<SampleMetadata, RowError> {
    let fields = match json.map(serde_json::from_str::<Fields>) {
        Some(Ok(fields)) => Some(fields),
        Some(Err(error)) => {
            return wrong(
                Reason::BrokenJson,
                format!("the JSON of the sample {key} is not an object ({error}); correct it"),
            );
        }
        None => None,
    };
    let none = Fields::default();
    let fields_or_none = fields.as_ref().unwrap_or(&none);
    let frame_count = count(key, fields_or_none)?;
    let source = optional(key, fields_or_none, "source")?.unwrap_or_default();
    let content = match (&fields, text) {
        (None, None) => {
            return wrong(
                Reason::NoLabel,
                format!("the sample {key} has neither {key}.json nor {key}.txt; give it one"),
            );
        }
        (Some(fields), text) => content(key, fields, text)?,
        (None, Some(text)) => Content::Caption(filled(key, "its text", text)?),
    };
    if frames == 0 && frame_count != Some(0) {
        let says_some = frame_count.is_some() || matches!(content, Content::Caption(_));
        if says_some {
            let message = match frame_count {
                Some(count) => format!("the sample {key} says that it has {count} frames and has none"),
                None => format!("the sample {key} has a caption and no frame"),
            };
            return wrong(Reason::NoImage, format!("{message}; give it .jpg, .png or .webp members"));
        }
    }
    if frames > 0 && frame_count == Some(0) {
        let message =
            format!("the sample {key} says that it has no frames and has {frames}; correct its frame_count");
        return wrong(Reason::ImageCount, message);
    }
    Ok(SampleMetadata { content, source, frame_count })
}

fn content(key: &str, fields: &Fields, text: Option<String>) -> Result<Content, RowError> {
    if let Some(ids) = fields.get("token_ids") {
        return tokens(key, ids, fields.get("loss_mask"));
    }
    let user = || optional(key, fields, "user").map(Option::unwrap_or_default);
    if fields.has("chosen_assistant") || fields.has("rejected_assistant") {
        let answer = |name| match optional(key, fields, name)? {
            Some(answer) => filled(key, name, answer),
            None => wrong(
                Reason::MissingField,
                format!("the sample {key} has one answer of a pair and no `{name}`; give it both"),
            ),
        };
        let answers = [answer("chosen_assistant")?, answer("rejected_assistant")?];
        if answers[0] == answers[1] {
            let message = format!(
                "both answers of the sample {key} are equal, so there is nothing to prefer; correct one"
            );
            return wrong(Reason::Pair, message);
        }
        return Ok(Content::Pair { user: user()?, answers });
    }
    if let Some(assistant) = optional(key, fields, "assistant")? {
        return Ok(Content::Answer { user: user()?, assistant: filled(key, "assistant", assistant)? });
    }
    if let Some(caption) = optional(key, fields, "caption")?.or(text) {
        return Ok(Content::Caption(filled(key, "its caption", caption)?));
    }
    let message = format!(
        "the JSON of the sample {key} has the fields {}, and texts are read from `user` and `assistant`, `caption`, `token_ids`, or \
         `user` with `chosen_assistant` and `rejected_assistant`; rename them",
        fields.names()
    );
    wrong(Reason::MissingField, message)
}

/// A tokenised text.
fn tokens(key: &str, ids: &Field, mask: Option<&Field>) -> Result<Content, RowError> {
    let list = |field: &Field, name: &str| match field {
        Field::List(list) => Ok(list.clone()),
        other => wrong(
            Reason::Unsupported,
            format!("`{name}` of the sample {key} is {}, not a list of numbers; correct it", other.kind()),
        ),
    };
    let id = |field: &Field| match field {
        Field::Whole(id) => u32::try_from(*id).ok(),
        _ => None,
    };
    let is_learned = |field: &Field| match field {
        Field::Bool(learned) => Some(*learned),
        Field::Whole(0) => Some(false),
        Field::Whole(1) => Some(true),
        Field::Number(number) if *number == 0.0 || *number == 1.0 => Some(*number == 1.0),
        _ => None,
    };
    let Some(ids) = list(ids, "token_ids")?.iter().map(id).collect::<Option<Vec<u32>>>() else {
        let message = format!("`token_ids` of the sample {key} has a value that is not a token; correct it");
        return wrong(Reason::Unsupported, message);
    };
    if ids.is_empty() {
        return wrong(Reason::Empty, format!("`token_ids` of the sample {key} is empty; give it a text"));
    }
    let learned = match mask.filter(|mask| **mask != Field::Null) {
        None => None,
        Some(mask) => {
            let Some(mask) = list(mask, "loss_mask")?.iter().map(is_learned).collect::<Option<Vec<bool>>>()
            else {
                let message = format!(
                    "`loss_mask` of the sample {key} has a value that is neither 0 nor 1; correct it"
                );
                return wrong(Reason::Unsupported, message);
            };
            if mask.len() != ids.len() {
                let message = format!(
                    "`loss_mask` of the sample {key} has {} values and `token_ids` {}; give one a token",
                    mask.len(),
                    ids.len()
                );
                return wrong(Reason::Unsupported, message);
            }
            Some(mask)
        }
    };
    Ok(Content::Tokens { ids, learned })
}

/// The number of frames that the JSON of a sample gives.
fn count(key: &str, fields: &Fields) -> Result<Option<u64>, RowError> {
    match fields.get("frame_count") {
        None | Some(Field::Null) => Ok(None),
        Some(Field::Whole(count)) if u64::try_from(*count).is_ok() => Ok(Some(*count as u64)),
        Some(other) => {
            let message =
                format!("`frame_count` of the sample {key} is {}, not a count; correct it", other.kind());
            wrong(Reason::Unsupported, message)
        }
    }
}

/// A text that may be missing or null.
fn optional(key: &str, fields: &Fields, name: &str) -> Result<Option<String>, RowError> {
    match fields.get(name) {
        None | Some(Field::Null) => Ok(None),
        Some(Field::Text(text)) => Ok(Some(text.clone())),
        Some(other) => {
            let message =
                format!("`{name}` of the sample {key} is {}, not a string; correct it", other.kind());
            wrong(Reason::NotAString, message)
        }
    }
}

fn filled(key: &str, name: &str, text: String) -> Result<String, RowError> {
    match text.trim().is_empty() {
        true => wrong(Reason::Empty, format!("{name} of the sample {key} is empty; give it a text")),
        false => Ok(text),
    }
}

/// The error for a video that has to be split into frames first.
fn uncut(name: &str, key: &str, side: usize) -> RowError {
    let stem = key.rsplit('/').next().unwrap_or(key);
    let file = name.rsplit('/').next().unwrap_or(name);
    RowError::new(
        Reason::Video,
        format!(
            "{name} is a video, and frames are read from JPEG, PNG and WebP: make them, one a second, with `ffmpeg -i {file} -vf \
             \"fps=1,scale={side}:{side}:force_original_aspect_ratio=increase,crop={side}:{side}\" -start_number 0 -q:v 2 \
             {stem}.%03d.jpg`, and write the archive again"
        ),
    )
}

impl From<&Flaw> for RowError {
    fn from(flaw: &Flaw) -> RowError {
        RowError::new(flaw.reason, flaw.sentence())
    }
}
