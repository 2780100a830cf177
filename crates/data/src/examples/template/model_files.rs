//! Finds the chat template and the special tokens in the folder of a tokeniser, in the Hugging Face layout.

use std::fs;
use std::path::{Path, PathBuf};

use super::{CHATML, ChatTemplate, Date};
use crate::error::DataError;
use crate::formats::{Field, Fields};
use crate::pointer::{IS_POINTER, is_pointer};

/// The name of the built-in template in `data.template`.
pub const CHATML_NAME: &str = "chatml";

/// Special tokens that templates know by name.
const SPECIALS: [&str; 8] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
    "image_token",
];

/// The template that `given` names: the built-in one, a file, or the text of a template. Without it, the template of the first
/// folder that has one; `None` where none has.
pub fn find(
    given: Option<&str>,
    folders: &[PathBuf],
    fallback: &[(&str, String)],
    date: Option<Date>,
) -> Result<Option<ChatTemplate>, DataError> {
    let mut specials = Vec::new();
    for folder in folders {
        for (name, token) in specials_in(folder)? {
            if !specials.iter().any(|(known, _)| *known == name) {
                specials.push((name, token));
            }
        }
    }
    for (name, token) in fallback {
        if !specials.iter().any(|(known, _)| known == name) {
            specials.push((name.to_string(), token.clone()));
        }
    }
    if let Some(given) = given {
        let (source, shown) = named(given)?;
        return ChatTemplate::compile(&source, &shown, specials, date).map(Some);
    }
    for folder in folders {
        for name in ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"] {
            let path = folder.join(name);
            let Some(text) = read(&path)? else { continue };
            let source = match name.ends_with(".jinja") {
                true => Some(text),
                false => of_object(&object(&path, &text)?),
            };
            if let Some(source) = source {
                return ChatTemplate::compile(&source, &path.display().to_string(), specials, date).map(Some);
            }
        }
    }
    Ok(None)
}

/// The text of the template that `data.template` names, and a name for messages.
pub fn named(given: &str) -> Result<(String, String), DataError> {
    if given == CHATML_NAME {
        return Ok((CHATML.to_string(), "data.template=chatml".to_string()));
    }
    if given.contains("{{") || given.contains("{%") {
        return Ok((given.to_string(), "data.template".into()));
    }
    let read = fs::read_to_string(given).map_err(|error| {
        DataError::input(format!(
            "data.template={given} is neither {CHATML_NAME} nor a template, and cannot be read as a file: {error}."
        ))
    })?;
    Ok((in_file(Path::new(given), read)?, given.to_string()))
}

fn in_file(path: &Path, text: String) -> Result<String, DataError> {
    if path.extension().is_none_or(|ending| ending != "json") {
        return Ok(text);
    }
    of_object(&object(path, &text)?).ok_or_else(|| {
        DataError::input(format!(
            "{} has no `chat_template`: give another file with data.template.",
            path.display()
        ))
    })
}

/// The `chat_template` of an object: a text, or a list of named ones, of which the default is used.
fn of_object(fields: &Fields) -> Option<String> {
    match fields.get("chat_template")? {
        Field::Text(text) => Some(text.clone()),
        Field::List(named) => named.iter().find_map(|entry| {
            let Field::Object(entry) = entry else { return None };
            let is_default = entry.get("name").and_then(Field::text) == Some("default");
            is_default.then(|| entry.get("template").and_then(Field::text).map(String::from))?
        }),
        _ => None,
    }
}

/// Special tokens of a folder by name: from its configuration, then from its map of them.
fn specials_in(folder: &Path) -> Result<Vec<(String, String)>, DataError> {
    let mut found: Vec<(String, String)> = Vec::new();
    for name in ["tokenizer_config.json", "special_tokens_map.json"] {
        let path = folder.join(name);
        let Some(text) = read(&path)? else { continue };
        let fields = object(&path, &text)?;
        for special in SPECIALS {
            // Newer files contain the whole entry of the added token.
            let token = match fields.get(special) {
                Some(Field::Text(token)) => token.clone(),
                Some(Field::Object(entry)) => match entry.get("content").and_then(Field::text) {
                    Some(token) => token.into(),
                    None => continue,
                },
                _ => continue,
            };
            if !found.iter().any(|(known, _)| known == special) {
                found.push((special.into(), token));
            }
        }
    }
    Ok(found)
}

fn read(path: &Path) -> Result<Option<String>, DataError> {
    if !path.is_file() {
        return Ok(None);
    }
    let text = fs::read_to_string(path)
        .map_err(|error| DataError::input(format!("{} cannot be read: {error}.", path.display())))?;
    match is_pointer(text.as_bytes()) {
        true => Err(DataError::input(format!("{} {IS_POINTER}.", path.display()))),
        false => Ok(Some(text)),
    }
}

fn object(path: &Path, text: &str) -> Result<Fields, DataError> {
    let unusable =
        |message: String| DataError::input(format!("{} is not usable: {message}.", path.display()));
    match Field::from_json(text).map_err(|error| unusable(error.to_string()))? {
        Field::Object(fields) => Ok(fields),
        _ => Err(unusable("it is JSON but not an object".into())),
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::conversation::Conversation;
    use super::*;
    use crate::scratch::Scratch;

    fn written(template: Option<ChatTemplate>) -> String {
        template.unwrap().render(&Conversation::default(), 0, true).unwrap().text
    }

    #[test]
    fn templates_are_found_where_models_have_them() {
        let scratch = Scratch::new("beside");
        let folders = [scratch.path().join("a"), scratch.path().join("b")];
        let look = |given: Option<&str>| find(given, &folders, &[("bos_token", "<bos>".into())], None);
        assert!(look(None).unwrap().is_none());
        scratch.write(
            "b/tokenizer_config.json",
            br#"{"bos_token":{"content":"<s>"},"chat_template":"config {{ bos_token }}"}"#,
        );
        assert_eq!(written(look(None).unwrap()), "config <s>");
        let named = br#"{"chat_template":[{"name":"tool_use","template":"tools"},{"name":"default","template":"named {{ eos_token }}"}],"eos_token":"</s>"}"#;
        scratch.write("a/tokenizer_config.json", named);
        assert_eq!(written(look(None).unwrap()), "named </s>");
        scratch.write("a/chat_template.jinja", b"file {{ bos_token }}");
        assert_eq!(written(look(None).unwrap()), "file <s>");
        assert_eq!(written(look(Some("inline {{ bos_token }}")).unwrap()), "inline <s>");
        assert_eq!(written(look(Some("chatml")).unwrap()), "<|im_start|>assistant\n");
        let file = scratch.write("own.txt", b"own");
        assert_eq!(written(look(Some(file.to_str().unwrap())).unwrap()), "own");
        let missing = look(Some("no/such.jinja")).unwrap_err();
        assert!(missing.sentence.contains("data.template=no/such.jinja is neither chatml"), "{missing}");
        scratch.write("a/chat_template.jinja", b"version https://git-lfs.github.com/spec/v1\nsize 3\n");
        assert!(look(None).unwrap_err().sentence.contains("chat_template.jinja is a pointer of Git LFS"));
        scratch.write("a/tokenizer_config.json", b"[");
        assert!(look(None).unwrap_err().sentence.contains("tokenizer_config.json is not usable"));
    }
}
