//! Contents of messages in parts, and texts in which `<image>` stands for an image.
//!
//! For a template, an image is `{"type": "image"}`; before that, the part also holds the image as the row gives it.

use crate::examples::conversation::{joined, wrong};
use crate::examples::row_error::RowError;
use crate::formats::{Field, Fields, Reason};

/// Placeholder of an image in a text.
const IMAGE_MARK: &str = "<image>";
/// Placeholder of a video.
pub(super) const VIDEO_MARK: &str = "<video>";

/// Names under which a part holds its image.
const HOLDERS: [&str; 3] = ["image", "image_url", "url"];
/// Fields of an image that is an object.
pub(super) const STORED: [&str; 2] = ["bytes", "path"];

/// The parts of message `turn` with their images; one text where there are no images.
pub(super) fn converted(parts: &[Field], turn: usize) -> Result<Field, RowError> {
    let mut list = Vec::with_capacity(parts.len());
    let mut has_images = false;
    for part in parts {
        let Field::Object(fields) = part else {
            // A text, or a value that is refused with the others.
            joined(std::slice::from_ref(part), turn)?;
            list.push(text_part(part.text().unwrap_or_default()));
            continue;
        };
        let kind = fields.get("type").and_then(Field::text);
        let held = held(fields);
        let is_image = match kind {
            Some(kind) => ["image", "image_url"].contains(&kind),
            None => held.is_some(),
        };
        if is_image {
            has_images = true;
            list.push(image_part(held));
            continue;
        }
        match (kind, fields.get("text")) {
            (Some("text") | None, Some(Field::Text(text))) => list.push(text_part(text)),
            (Some(kind), _) if kind.contains("video") => return video(turn),
            (None, _) if fields.has("video") => return video(turn),
            (kind, _) => {
                let kind = kind.unwrap_or("something else").escape_debug();
                let sentence = format!(
                    "message {turn} has a part of the type `{kind}`, and only `text` and `image` are read; leave it out"
                );
                return wrong(Reason::Unsupported, sentence);
            }
        }
    }
    if has_images { Ok(Field::List(list)) } else { joined(&list, turn) }
}

fn video(turn: usize) -> Result<Field, RowError> {
    wrong(
        Reason::Unsupported,
        format!("message {turn} has a part that is a video, and video is not read; leave the row out"),
    )
}

/// The image that a part gives.
fn held(part: &Fields) -> Option<Field> {
    let is_there = |field: &&Field| **field != Field::Null;
    let named = HOLDERS.iter().find_map(|name| part.get(name).filter(is_there));
    if named.is_some() {
        return named.cloned();
    }
    let stored = STORED.iter().any(|name| part.get(name).filter(is_there).is_some());
    stored.then(|| Field::Object(part.clone()))
}

fn text_part(text: &str) -> Field {
    Field::Object(Fields(vec![("type".into(), "text".into()), ("text".into(), text.into())]))
}

fn image_part(held: Option<Field>) -> Field {
    let mut fields = Fields(vec![("type".into(), "image".into())]);
    if let Some(held) = held {
        fields.set("image", held);
    }
    Field::Object(fields)
}

/// Removes the image from a part; `None` for a part that is no image.
pub(super) fn take_image(part: &mut Field) -> Option<Option<Field>> {
    let Field::Object(fields) = part else { return None };
    if fields.get("type").and_then(Field::text) != Some("image") {
        return None;
    }
    let at = fields.0.iter().position(|(name, _)| name == "image");
    Some(at.map(|at| fields.0.remove(at).1))
}

/// Splits a text at its image placeholders. Everything between them stays, line breaks too.
pub(super) fn split(text: &str) -> Option<Field> {
    text.contains(IMAGE_MARK).then(|| {
        let mut list = Vec::new();
        for (at, piece) in text.split(IMAGE_MARK).enumerate() {
            if at > 0 {
                list.push(image_part(None));
            }
            if !piece.is_empty() {
                list.push(text_part(piece));
            }
        }
        Field::List(list)
    })
}

/// A text after some images.
pub(super) fn before(images: usize, text: &str) -> Field {
    let images = (0..images).map(|_| image_part(None));
    Field::List(images.chain((!text.is_empty()).then(|| text_part(text))).collect())
}

/// Whether a text of a content has the placeholder of a video.
pub(super) fn spells_video(content: &Field) -> bool {
    match content {
        Field::Text(text) => text.contains(VIDEO_MARK),
        Field::List(parts) => parts.iter().any(spells_video),
        Field::Object(part) => part.get("text").is_some_and(spells_video),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(text: &str) -> Field {
        Field::from_json(text).unwrap()
    }

    fn converted_parts(parts: &str) -> Result<Field, String> {
        let Field::List(parts) = json(parts) else { panic!("{parts}") };
        converted(&parts, 3).map_err(|wrong| wrong.message)
    }

    #[test]
    fn parts_of_every_form_are_kept_in_one() {
        let image = r#"{"type":"image","image":"a.png"}"#;
        for given in [
            image,
            r#"{"type":"image","path":null,"url":"a.png"}"#,
            r#"{"type":"image_url","image_url":"a.png","text":null}"#,
            r#"{"image":"a.png"}"#,
        ] {
            let found =
                converted_parts(&format!(r#"["x",{given},{{"type":"text","text":"y"}},{{"text":"z"}}]"#));
            let wanted = format!(
                r#"[{{"type":"text","text":"x"}},{image},{{"type":"text","text":"y"}},{{"type":"text","text":"z"}}]"#
            );
            assert_eq!(found.unwrap(), json(&wanted), "{given}");
        }
        assert_eq!(converted_parts(r#"[{"type":"text","text":"x"},"y"]"#).unwrap(), "xy".into());
        assert_eq!(converted_parts(r#"[{"type":"image"}]"#).unwrap(), json(r#"[{"type":"image"}]"#));
        let url = converted_parts(r#"[{"type":"image_url","image_url":{"url":"a.png"}}]"#).unwrap();
        assert_eq!(url, json(r#"[{"type":"image","image":{"url":"a.png"}}]"#));
        for (given, why) in [
            (r#"[{"type":"video","video":"a.mp4"}]"#, "message 3 has a part that is a video"),
            (r#"[{"video":"a.mp4"}]"#, "a part that is a video"),
            (r#"[{"type":"audio"}]"#, "the type `audio`, and only `text` and `image`"),
            ("[7]", "a part of message 3 is a number"),
        ] {
            assert!(converted_parts(given).unwrap_err().contains(why), "{given}");
        }
    }

    #[test]
    fn a_text_is_split_at_its_marks() {
        let found = split("<image>\nWhat<image><image>?").unwrap();
        let wanted = r#"[{"type":"image"},{"type":"text","text":"\nWhat"},{"type":"image"},{"type":"image"},{"type":"text","text":"?"}]"#;
        assert_eq!(found, json(wanted));
        assert_eq!(split("no mark"), None);
        assert_eq!(before(1, ""), json(r#"[{"type":"image"}]"#));
    }
}
