//! Reads rows with images: from their published formats to conversations, and from there to tokens.
//!
//! ```text
//! schema    the format of a row: a conversation whose parts or texts give the places of its images
//!    -> parts     contents in parts, and texts with `<image>` in them
//!    -> given     the images of a row: paths, bytes, data URLs; their columns
//! expand    replaces the token of an image by as many as the image has
//! ```

mod expand;
mod given;
mod parts;
mod schema;

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use super::conversation::Conversation;
use super::encoder::Encoder;
use super::preference::{JudgedSchema, PairSchema};
use super::row_error::RowError;
use crate::error::DataError;
use crate::formats::{Fields, SourceLocation};
use crate::images::MAX_PIXELS;
use crate::random::key;
use crate::text::tokenizer::Vocabulary;
use crate::vision::{EncodedImage, ImageReader, Patching};

use schema::ChatWithImages;

pub(super) use expand::{Expanded, ImageSpan, expand};
pub(super) use given::shows_images;
pub(super) use schema::VisualSchema;

/// Largest encoded image, which is read into memory as a whole.
pub const MAX_IMAGE_BYTES: usize = 64 << 20;

/// The tokens around and for an image and a video in tokenisers that are trained here.
pub(super) const VISION_TOKENS: [&str; 4] =
    ["<|vision_start|>", "<|vision_end|>", IMAGE_TOKEN, "<|video_pad|>"];
/// The usual spelling of the image token, which images replace.
const IMAGE_TOKEN: &str = "<|image_pad|>";

/// Options for reading images in rows and placing them among tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct VisionSpec {
    pub patching: Patching,
    /// Most pixels of an image.
    pub max_pixels: u64,
    /// The image token; `<|image_pad|>` where none is given.
    pub image_token: Option<u32>,
    /// The folder that paths are relative to; that of a row's file where none is given.
    pub root: Option<PathBuf>,
    /// The column with the images; found by its name where none is given.
    pub column: Option<String>,
    /// Marks around the learned part of an answer.
    pub answer_marks: Option<[String; 2]>,
}

impl Default for VisionSpec {
    fn default() -> Self {
        Self {
            patching: Patching::default(),
            max_pixels: MAX_PIXELS,
            image_token: None,
            root: None,
            column: None,
            answer_marks: None,
        }
    }
}

/// A conversation and its images in order, each with the number of its message.
pub(super) struct VisualChat {
    pub chat: Conversation,
    pub images: Vec<(usize, Arc<EncodedImage>)>,
}

impl VisualChat {
    /// Hash of messages and images.
    pub fn hash(&self) -> u64 {
        self.hashes().fold(self.chat.hash(), |hash, image| key(hash, key(image as u64, (image >> 64) as u64)))
    }

    /// The hashes of its images.
    pub fn hashes(&self) -> impl Iterator<Item = u128> {
        self.images.iter().map(|(_, image)| image.hash)
    }
}

/// Reads rows and their images.
pub(super) struct VisualReader<'s> {
    pub spec: &'s VisionSpec,
    pub reader: ImageReader,
    /// The image token, set once the tokeniser is known.
    pub token: OnceLock<u32>,
}

impl<'s> VisualReader<'s> {
    pub fn new(spec: &'s VisionSpec) -> Self {
        let reader = ImageReader::new(spec.patching, spec.max_pixels, MAX_IMAGE_BYTES as u64);
        Self { spec, reader, token: OnceLock::new() }
    }

    /// The conversations of a row, one or several about the same images.
    pub fn chats(
        &self,
        schema: &VisualSchema,
        fields: &Fields,
        place: &SourceLocation,
    ) -> Result<Vec<VisualChat>, RowError> {
        let shown = schema.read(fields, self.spec.column.as_deref())?;
        shown.into_iter().map(|shown| self.with_images(shown, place)).collect()
    }

    /// The prompt of a row with each of its answers, which have the same images.
    pub fn pair(
        &self,
        schema: &PairSchema,
        fields: &Fields,
        place: &SourceLocation,
    ) -> Result<[VisualChat; 2], RowError> {
        let [chosen, rejected] = schema::pair(*schema, fields, self.spec.column.as_deref())?;
        Ok([self.with_images(chosen, place)?, self.with_images(rejected, place)?])
    }

    /// The answer of a row, and whether it is wanted.
    pub fn judged(
        &self,
        schema: &JudgedSchema,
        fields: &Fields,
        place: &SourceLocation,
    ) -> Result<(VisualChat, bool), RowError> {
        let (shown, is_wanted) = schema::judged(*schema, fields, self.spec.column.as_deref())?;
        Ok((self.with_images(shown, place)?, is_wanted))
    }

    /// Reads the images of a conversation. Paths are relative to the given folder, or to that of the row's file.
    fn with_images(
        &self,
        ChatWithImages { chat, images }: ChatWithImages,
        place: &SourceLocation,
    ) -> Result<VisualChat, RowError> {
        let folder = place.file.parent().filter(|folder| !folder.as_os_str().is_empty());
        let root = self.spec.root.as_deref().or(folder).unwrap_or(Path::new("."));
        let look = |(turn, image)| Ok((turn, given::read_image(&self.reader, &image, root)?));
        let images = images.into_iter().map(look).collect::<Result<_, RowError>>()?;
        Ok(VisualChat { chat, images })
    }
}

/// The image token, which must be a special token that its spelling encodes to.
pub(super) fn image_token(
    spec: &VisionSpec,
    vocabulary: &Vocabulary,
    encoder: &Encoder,
    is_trained_here: bool,
) -> Result<u32, DataError> {
    let named =
        || (0..vocabulary.size() as u32).find(|id| vocabulary.token(*id).as_deref() == Some(IMAGE_TOKEN));
    let Some(token) = spec.image_token.or_else(named) else {
        return Err(DataError::input(format!(
            "The tokeniser has no token {IMAGE_TOKEN} for images: set data.tokenizer to the tokeniser of the model."
        )));
    };
    let spelled = vocabulary.token(token);
    if is_trained_here && spelled.as_deref() != Some(IMAGE_TOKEN) {
        let own = named().expect("a tokeniser of visual chats has it");
        return Err(DataError::input(format!(
            "The tokeniser that is trained here has {IMAGE_TOKEN} as token {own}, but model.vision.image_token is \
             {token}: set model.vision.image_token={own}, or give a tokeniser with data.tokenizer."
        )));
    }
    let pieces = spelled.as_deref().and_then(|spelled| encoder.pieces(spelled).ok());
    let is_itself = pieces.is_some_and(
        |pieces| matches!(pieces.as_slice(), [piece] if piece.token == token && piece.is_special),
    );
    if is_itself {
        return Ok(token);
    }
    let what = match &spelled {
        None => "which the tokeniser does not have".to_string(),
        Some(spelled) => {
            format!("which the tokeniser spells `{}` and does not treat as special", spelled.escape_debug())
        }
    };
    Err(DataError::input(format!(
        "The image token is {token} (model.vision.image_token), {what}: set data.tokenizer to the tokeniser of the \
         model, or correct model.vision.image_token."
    )))
}
