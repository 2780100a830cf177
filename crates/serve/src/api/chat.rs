//! `/v1/chat/completions`: requests and responses of chat.

use flatout_data::vision::{decode_data_url, is_data_url};
use flatout_train::infer::generate::{Finish, ScoredToken};
use serde_json::{Value, json};

use super::error::ApiError;
use super::fields::Fields;
use super::finish_reason;
use super::logprobs::{Pieces, of_chat};
use super::parameters::{MOST_LOGPROBS, Parameters};

/// A chat request.
#[derive(Clone, Debug)]
pub struct Chat {
    pub messages: Vec<Message>,
    pub parameters: Parameters,
    /// Where log-probabilities are requested: how many of the likeliest tokens each has.
    pub top: Option<usize>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    pub role: &'static str,
    pub parts: Vec<ContentPart>,
}

impl Message {
    /// Bytes of its texts.
    pub fn text_bytes(&self) -> usize {
        let bytes = |part: &ContentPart| if let ContentPart::Text(text) = part { text.len() } else { 0 };
        self.parts.iter().map(bytes).sum()
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ContentPart {
    Text(String),
    /// The bytes of a file.
    Image(Vec<u8>),
}

/// The most images in a conversation.
const MOST_IMAGES: usize = 256;

/// The roles of messages, each with the role that templates know.
const ROLES: [(&str, &str); 4] =
    [("system", "system"), ("developer", "system"), ("user", "user"), ("assistant", "assistant")];

impl Chat {
    pub fn read(body: &Value, capacity: usize) -> Result<Chat, ApiError> {
        let fields = Fields::of(body)?;
        let parameters = Parameters::read(&fields, &["max_completion_tokens", "max_tokens"], capacity)?;
        let top = match (fields.flag("logprobs")?, fields.whole("top_logprobs")?) {
            (_, Some(top)) if top > MOST_LOGPROBS => {
                let sentence = format!("`top_logprobs` must be at most {MOST_LOGPROBS}");
                return Err(ApiError::field("top_logprobs", sentence));
            }
            (false, Some(_)) => {
                return Err(ApiError::field(
                    "top_logprobs",
                    "`top_logprobs` needs `logprobs`: set it to true",
                ));
            }
            (false, None) => None,
            (true, top) => Some(top.unwrap_or(0) as usize),
        };
        let messages = fields.list("messages")?.filter(|messages| !messages.is_empty()).ok_or_else(|| {
            ApiError::field("messages", "`messages` must be a list of at least one message")
        })?;
        let messages: Vec<Message> =
            messages.iter().enumerate().map(|(at, value)| message(value, at)).collect::<Result<_, _>>()?;
        let images = messages.iter().flat_map(|message| &message.parts);
        let images = images.filter(|part| matches!(part, ContentPart::Image(_))).count();
        if images > MOST_IMAGES {
            let sentence = format!("the messages have {images} images, and at most {MOST_IMAGES} are seen");
            return Err(ApiError::field("messages", sentence));
        }
        Ok(Chat { messages, parameters, top })
    }
}

fn message(value: &Value, at: usize) -> Result<Message, ApiError> {
    let wrong =
        |sentence: &str| ApiError::field(&format!("messages[{at}]"), format!("message {at} {sentence}"));
    let role = value["role"].as_str().ok_or_else(|| wrong("has no role"))?;
    let Some((_, role)) = ROLES.iter().find(|(name, _)| *name == role) else {
        let known: Vec<&str> = ROLES.iter().map(|(name, _)| *name).collect();
        return Err(wrong(&format!("has the role {role:?}, which is none of {}", known.join(", "))));
    };
    let calls = |name: &str| value.get(name).is_some_and(|calls| !calls.is_null() && *calls != json!([]));
    if calls("tool_calls") || calls("function_call") {
        return Err(wrong("calls a tool, and this server calls none"));
    }
    let parts: Vec<ContentPart> = match &value["content"] {
        Value::String(text) => vec![ContentPart::Text(text.clone())],
        Value::Array(list) => {
            list.iter().map(|part| part_of(part).map_err(|why| wrong(&why))).collect::<Result<_, _>>()?
        }
        _ => return Err(wrong("has no content: give it a string or a list of parts")),
    };
    Ok(Message { role, parts: joined(parts) })
}

/// Joins parts without images to one text, because not every template takes a list.
fn joined(parts: Vec<ContentPart>) -> Vec<ContentPart> {
    let texts: Option<Vec<&str>> = parts
        .iter()
        .map(|part| if let ContentPart::Text(text) = part { Some(text.as_str()) } else { None })
        .collect();
    texts.map(|texts| vec![ContentPart::Text(texts.join("\n"))]).unwrap_or(parts)
}

fn part_of(part: &Value) -> Result<ContentPart, String> {
    match part["type"].as_str() {
        Some("text") => part["text"]
            .as_str()
            .map(|text| ContentPart::Text(text.into()))
            .ok_or("has a part of text without a text".into()),
        Some("image_url") => {
            let url = part["image_url"]["url"].as_str().or(part["image_url"].as_str());
            image(url.ok_or("has a part image_url without a url")?).map(ContentPart::Image)
        }
        Some(other) => Err(format!("has a part of type {other:?}, and parts are text or image_url")),
        None => Err("has a part without a type".into()),
    }
}

/// The bytes of an image in a data URL. Nothing is fetched.
fn image(url: &str) -> Result<Vec<u8>, String> {
    const FORM: &str = "give it as data:image/...;base64,...";
    if !is_data_url(url) {
        return Err(format!("has an image at another address, and this server fetches nothing: {FORM}"));
    }
    // The size of the body is bounded already.
    decode_data_url(url, usize::MAX)
        .map_err(|flaw| format!("has an image that is broken: {}; {FORM}", flaw.said))
}

/// A choice of a response.
pub fn choice(
    index: usize,
    text: &str,
    scored: Option<(&Pieces, &[ScoredToken])>,
    finish: Option<&Finish>,
) -> Value {
    let logprobs = scored.map(|(pieces, scored)| of_chat(pieces, &scored.iter().collect::<Vec<_>>()));
    let message = json!({ "role": "assistant", "content": text, "refusal": null });
    json!({ "index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason(finish) })
}

/// A part of a choice in a stream; the first has the role of the message.
pub fn part(
    index: usize,
    text: &str,
    scored: Option<(&Pieces, &[ScoredToken])>,
    finish: Option<&Finish>,
    is_first: bool,
) -> Value {
    let logprobs = scored.map(|(pieces, scored)| of_chat(pieces, &scored.iter().collect::<Vec<_>>()));
    let mut delta = json!({});
    if is_first {
        delta["role"] = "assistant".into();
    }
    if !text.is_empty() || is_first {
        delta["content"] = text.into();
    }
    json!({ "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason(finish) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(message: Value) -> Result<Message, ApiError> {
        Chat::read(&json!({ "messages": [message] }), 100).map(|mut chat| chat.messages.remove(0))
    }

    #[test]
    fn messages_have_texts_and_images() {
        let user = |parts| Ok(Message { role: "user", parts });
        assert_eq!(
            read(json!({ "role": "user", "content": "hi" })),
            user(vec![ContentPart::Text("hi".into())])
        );
        let image = json!({ "type": "image_url", "image_url": { "url": "data:image/png;base64,AQID/w==" } });
        let parts = json!([{ "type": "text", "text": "a" }, image]);
        let wanted = vec![ContentPart::Text("a".into()), ContentPart::Image(vec![1, 2, 3, 255])];
        assert_eq!(read(json!({ "role": "user", "content": parts })), user(wanted));
        for url in [
            "data:image/png;base64,AQID_w",
            "data:image/png;base64,AQ\nID\r\n/w==\n",
            "DATA:image/png;name=a.png;BASE64,AQID/w==",
        ] {
            let parts = json!([{ "type": "image_url", "image_url": url }]);
            let wanted = vec![ContentPart::Image(vec![1, 2, 3, 255])];
            assert_eq!(read(json!({ "role": "user", "content": parts })), user(wanted), "{url:?}");
        }
        let texts = json!([{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }]);
        assert_eq!(
            read(json!({ "role": "user", "content": texts })),
            user(vec![ContentPart::Text("a\nb".into())])
        );
        assert_eq!(read(json!({ "role": "developer", "content": "x" })).unwrap().role, "system");
    }

    #[test]
    fn unsupported_messages_are_refused_with_a_sentence() {
        let image = |url: &str| json!([{ "type": "image_url", "image_url": { "url": url } }]);
        for (message, sentence) in [
            (json!({ "content": "x" }), "has no role"),
            (json!({ "role": "tool", "content": "x" }), "none of system"),
            (json!({ "role": "user" }), "has no content"),
            (json!({ "role": "assistant", "content": null, "tool_calls": [{}] }), "calls a tool"),
            (
                json!({ "role": "user", "content": [{ "type": "input_audio" }] }),
                "parts are text or image_url",
            ),
            (json!({ "role": "user", "content": image("https://example.com/a.png") }), "fetches nothing"),
            (json!({ "role": "user", "content": image("data:image/png,abc") }), "is not written in base64"),
            (
                json!({ "role": "user", "content": image("data:image/png;base64,a!b") }),
                "that base64 does not",
            ),
            // The end is missing: three characters of four, and one of the next four.
            (json!({ "role": "user", "content": image("data:image/png;base64,AQL") }), "or ends early"),
            (json!({ "role": "user", "content": image("data:image/png;base64,AQID/") }), "or ends early"),
            (json!({ "role": "user", "content": image("data:image/png;base64,AQ==AQID") }), "or ends early"),
            (json!("hi"), "has no role"),
        ] {
            let error = read(message.clone()).expect_err("a refusal");
            assert!(error.message.contains(sentence), "{message}: {error:?}");
            assert_eq!(error.param.as_deref(), Some("messages[0]"));
        }
        for body in [json!({}), json!({ "messages": [] }), json!({ "messages": 7 })] {
            assert_eq!(Chat::read(&body, 9).unwrap_err().param.as_deref(), Some("messages"));
        }
        let image = json!({ "role": "user", "content": image("data:image/png;base64,AQID") });
        assert!(Chat::read(&json!({ "messages": vec![image.clone(); 256] }), 9).is_ok());
        let many = Chat::read(&json!({ "messages": vec![image; 257] }), 9).unwrap_err();
        assert!(many.message.contains("257 images, and at most 256"), "{many:?}");
        let lonely = json!({ "messages": [{ "role": "user", "content": "x" }], "top_logprobs": 2 });
        assert!(Chat::read(&lonely, 9).unwrap_err().message.contains("needs `logprobs`"));
    }
}
