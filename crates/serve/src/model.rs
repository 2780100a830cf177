//! The model as requests see it: its name, tokens of texts and conversations, names of tokens.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use flatout_data::examples::{Date, QuestionPart, Questions, Turn};
use flatout_data::{PromptEncoder, Vocabulary};
use flatout_train::infer::generate::{Picture, PictureReader, Prompt};
use flatout_train::run::BESIDE;
use flatout_train::weights::loaded::Loaded;
use flatout_train::{Failure, UserError};

use crate::api::chat::{Message, Part};
use crate::api::completions;
use crate::api::error::ApiError;
use crate::api::logprobs::Pieces;

pub struct Model {
    pub name: String,
    /// When it began to be served, in seconds since 1970.
    pub created: u64,
    /// Tokens of a prompt with what follows it.
    pub capacity: usize,
    pub vocabulary: Vocabulary,
    pub pieces: Arc<Pieces>,
    /// Of a model that brings its own tokeniser; a run of ours frames its documents itself.
    encoder: Option<PromptEncoder>,
    /// The model's template, or why there is none.
    questions: Result<Questions, String>,
    /// The token that ends an answer.
    end: Option<u32>,
    /// Of a model that sees.
    images: Option<PictureReader>,
}

/// A conversation up to where the answer begins.
pub struct Conversation {
    pub prompt: Prompt,
    pub pictures: Vec<Picture>,
    /// The token that ends the answer.
    pub end: Option<u32>,
}

impl Model {
    /// Of a run or a folder, with as many tokens for each request.
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
        Ok(Model {
            name: name.file_name().map_or("model".into(), |name| name.to_string_lossy().into_owned()),
            created: since.as_secs(),
            capacity,
            pieces: Arc::new(Pieces::of(&vocabulary)),
            encoder: (!loaded.is_run).then(|| vocabulary.prompt_encoder()),
            vocabulary,
            questions,
            end,
            images: PictureReader::of(loaded, capacity)?,
        })
    }

    /// Whether messages may have images.
    pub fn sees(&self) -> bool {
        self.images.is_some()
    }

    /// The reader of images, of a model that sees.
    pub fn images(&self) -> Option<&PictureReader> {
        self.images.as_ref()
    }

    /// Why there are no conversations, where there are none.
    pub fn chat_error(&self) -> Option<&str> {
        self.questions.as_ref().err().map(String::as_str)
    }

    /// The tokens of a prompt.
    pub fn tokens(&self, prompt: &completions::Prompt) -> Result<Vec<u32>, ApiError> {
        let said = |error: flatout_data::DataError| ApiError::field("prompt", error.sentence);
        match (prompt, &self.encoder) {
            (completions::Prompt::Tokens(tokens), _) if tokens.is_empty() => {
                Err(ApiError::field("prompt", "`prompt` has a list without tokens: give at least one"))
            }
            (completions::Prompt::Tokens(tokens), _) => Ok(tokens.clone()),
            (completions::Prompt::Text(text), Some(encoder)) => encoder.encode(text).map_err(said),
            (completions::Prompt::Text(text), None) => {
                Ok([vec![self.vocabulary.bos()], self.vocabulary.encode(text).map_err(said)?].concat())
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
            Part::Text(_) => None,
            Part::Image(bytes) => Some(bytes),
        });
        let files: Vec<&Vec<u8>> = files.collect();
        let Some(reader) = self.images.as_ref().filter(|_| !files.is_empty()) else {
            return match files.is_empty() {
                true => Ok(Conversation { prompt: tokens()?.into(), pictures: vec![], end: self.end }),
                false => Err(wrong("this model sees no images: leave them out".into())),
            };
        };
        let pictures: Result<Vec<Picture>, UserError> =
            files.iter().map(|bytes| reader.read(bytes)).collect();
        let pictures = pictures.map_err(|error| wrong(error.to_string()))?;
        let prompt = reader.placed(&tokens()?, &pictures).map_err(|error| wrong(error.to_string()))?;
        Ok(Conversation { prompt, pictures, end: self.end })
    }
}

/// A message as the template takes it.
fn turn(message: &Message) -> Turn<'_> {
    let parts = message.parts.iter().map(|part| match part {
        Part::Text(text) => QuestionPart::Text(text),
        Part::Image(_) => QuestionPart::Image,
    });
    Turn { role: message.role, parts: parts.collect() }
}
