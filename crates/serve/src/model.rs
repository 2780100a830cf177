//! The served model: its name, tokenisation of texts and conversations, names of tokens.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use flatout_data::examples::{Date, QuestionPart, Questions, Turn};
use flatout_data::{PromptEncoder, Vocabulary};
use flatout_train::infer::generate::{Picture, PictureReader, Prompt};
use flatout_train::run::BESIDE;
use flatout_train::weights::loaded::Loaded;
use flatout_train::{Failure, UserError};

use crate::api::chat::{ContentPart, Message};
use crate::api::completions;
use crate::api::error::ApiError;
use crate::api::logprobs::Pieces;

pub struct Model {
    pub name: String,
    /// Unix time at which the server was started.
    pub created: u64,
    /// The most tokens of a prompt and its continuation.
    pub capacity: usize,
    /// The maximum number of bytes of a text with this number of tokens.
    pub most_bytes: usize,
    pub vocabulary: Vocabulary,
    pub pieces: Arc<Pieces>,
    /// The encoder of a model with its own tokeniser; none for runs of flatout, whose prompts begin with `bos`.
    encoder: Option<PromptEncoder>,
    /// The model's chat template, or the reason why there is none.
    questions: Result<Questions, String>,
    /// The token that ends an answer.
    end: Option<u32>,
    /// The image reader of a model that sees images, with the placeholder token of an image.
    images: Option<(PictureReader, u32)>,
}

/// The least bound on the bytes of a token, whatever the longest in the vocabulary: some tokens stand for any word.
const TOKEN_BYTES: usize = 64;

/// The prompt of a conversation, up to the begin of the answer.
pub struct Conversation {
    pub prompt: Prompt,
    pub pictures: Vec<Picture>,
    /// Number of tokens of the pictures.
    pub image_tokens: usize,
    /// The token that ends the answer.
    pub end: Option<u32>,
}

impl Model {
    /// The model of a run or a folder, with `capacity` tokens per request.
    pub fn of(loaded: &Loaded, capacity: usize) -> Result<Model, Failure> {
        let Some(vocabulary) = loaded.vocabulary.clone() else {
            let dir = loaded.dir.display();
            let sentence =
                format!("{dir} has no tokenizer.json, so there is no text: put the model's own there");
            return Err(Failure::User(UserError(sentence)));
        };
        let folders = [loaded.dir.join(BESIDE), loaded.dir.clone()];
        let data = &loaded.config.data;
        let date = data.date.as_deref().and_then(Date::parse);
        let questions = Questions::open(&vocabulary, data.template.as_deref(), &folders, date);
        let ended = questions.and_then(|questions| questions.end().map(|end| (questions, end)));
        let (questions, end) = match ended {
            Ok((questions, end)) => (Ok(questions), end),
            Err(error) => (Err(error.sentence), None),
        };
        let name = loaded.dir.canonicalize().unwrap_or_else(|_| loaded.dir.clone());
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let pieces = Pieces::of(&vocabulary);
        let place = loaded.config.model.as_qwen3_vl().map(|vision| vision.image_token as u32);
        Ok(Model {
            name: name.file_name().map_or("model".into(), |name| name.to_string_lossy().into_owned()),
            created: since.as_secs(),
            capacity,
            most_bytes: capacity.saturating_mul(pieces.longest().max(TOKEN_BYTES)),
            pieces: Arc::new(pieces),
            encoder: (!loaded.is_run).then(|| vocabulary.prompt_encoder()),
            vocabulary,
            questions,
            end,
            images: PictureReader::of(loaded, capacity)?.zip(place),
        })
    }

    /// Whether messages may have images.
    pub fn sees(&self) -> bool {
        self.images.is_some()
    }

    /// The image reader of a model that sees images.
    pub fn images(&self) -> Option<&PictureReader> {
        self.images.as_ref().map(|(reader, _)| reader)
    }

    /// The reason why the model cannot chat, if it cannot.
    pub fn chat_error(&self) -> Option<&str> {
        self.questions.as_ref().err().map(String::as_str)
    }

    /// The tokens of a prompt.
    pub fn tokens(&self, prompt: &completions::Prompt) -> Result<Vec<u32>, ApiError> {
        let to_error = |error: flatout_data::DataError| ApiError::field("prompt", error.sentence);
        match (prompt, &self.encoder) {
            (completions::Prompt::Tokens(tokens), _) if tokens.is_empty() => {
                Err(ApiError::field("prompt", "`prompt` has a list without tokens: give at least one"))
            }
            (completions::Prompt::Tokens(tokens), _) => Ok(tokens.clone()),
            (completions::Prompt::Text(text), Some(encoder)) => encoder.encode(text).map_err(to_error),
            (completions::Prompt::Text(text), None) => {
                Ok([vec![self.vocabulary.bos()], self.vocabulary.encode(text).map_err(to_error)?].concat())
            }
        }
    }

    /// The tokens of a conversation, with its images.
    pub fn conversation(&self, messages: &[Message]) -> Result<Conversation, ApiError> {
        let questions = self.questions.as_ref().map_err(|why| {
            ApiError::bad(format!("there is no chat with this model, use /v1/completions: {why}"))
        })?;
        let wrong = |sentence: String| ApiError::field("messages", sentence);
        let turns: Vec<Turn<'_>> = messages.iter().map(turn).collect();
        let tokens = || questions.tokens_of_turns(&turns).map_err(|error| wrong(error.sentence));
        let files = messages.iter().flat_map(|message| &message.parts).filter_map(|part| match part {
            ContentPart::Text(_) => None,
            ContentPart::Image(bytes) => Some(bytes),
        });
        let files: Vec<&Vec<u8>> = files.collect();
        let Some((reader, place)) = self.images.as_ref().filter(|_| !files.is_empty()) else {
            return match files.is_empty() {
                true => {
                    let (prompt, end) = (tokens()?.into(), self.end);
                    Ok(Conversation { prompt, pictures: vec![], image_tokens: 0, end })
                }
                false => Err(wrong("this model sees no images: leave them out".into())),
            };
        };
        let refused = |error: UserError| wrong(error.to_string());
        let tokens = tokens()?;
        let mut budget = TokenBudget {
            capacity: self.capacity,
            text: tokens.len().saturating_sub(files.len()),
            images: 0,
        };
        let mut pictures: Vec<Picture> = vec![];
        for bytes in files {
            // An image takes at least one token, so none is decoded when the capacity is used up.
            budget.check(1)?;
            let picture = reader.read(bytes).map_err(refused)?;
            let shown = reader.placed(&[*place], std::slice::from_ref(&picture)).map_err(refused)?;
            budget.check(shown.tokens.len())?;
            budget.images += shown.tokens.len();
            pictures.push(picture);
        }
        let prompt = reader.placed(&tokens, &pictures).map_err(refused)?;
        Ok(Conversation { prompt, pictures, image_tokens: budget.images, end: self.end })
    }
}

/// Counts the tokens of a conversation while its images are read.
struct TokenBudget {
    capacity: usize,
    text: usize,
    images: usize,
}

impl TokenBudget {
    /// Checks that an image of `more` tokens fits.
    fn check(&self, more: usize) -> Result<(), ApiError> {
        let TokenBudget { capacity, text, images } = self;
        if text + images + more <= *capacity {
            return Ok(());
        }
        let sentence = format!(
            "the messages have {text} tokens of text and more than {images} of images, and this server reads {capacity} of a request: \
             show fewer or smaller images, or start the server with more --tokens"
        );
        Err(ApiError::field("messages", sentence).with_code("context_length_exceeded"))
    }
}

/// A message as the template takes it.
fn turn(message: &Message) -> Turn<'_> {
    let parts = message.parts.iter().map(|part| match part {
        ContentPart::Text(text) => QuestionPart::Text(text),
        ContentPart::Image(_) => QuestionPart::Image,
    });
    Turn { role: message.role, parts: parts.collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_added_up_while_they_are_read() {
        let mut budget = TokenBudget { capacity: 100, text: 20, images: 0 };
        assert_eq!(budget.check(80), Ok(()));
        budget.images = 60;
        assert_eq!(budget.check(20), Ok(()));
        let error = budget.check(21).unwrap_err();
        assert_eq!((error.status, error.code), (400, Some("context_length_exceeded")));
        assert!(error.message.contains("reads 100 of a request"), "{error:?}");
    }
}
