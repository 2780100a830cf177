//! Rows with images: from the forms they are published in to conversations, and from there to tokens.
//!
//! ```text
//! schema    the form of a row: a conversation whose parts or texts say where its images stand
//!    -> parts     contents in parts, and texts with `<image>` in them
//!    -> given     images as rows give them: paths, bytes, data URLs; their columns
//! expand    the token that stands for an image becomes as many as the image has
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
use super::wrong::Wrong;
use crate::error::DataError;
use crate::formats::{Fields, SourceLocation};
use crate::images::MAX_PIXELS;
use crate::random::key;
use crate::text::tokenizer::Vocabulary;
use crate::vision::{EncodedImage, ImageReader, Patching};

use schema::Shown;

pub(super) use expand::{Expanded, ImageSpan, expand};
pub(super) use given::shows_images;
pub(super) use schema::VisualSchema;

/// The largest encoded image: generous, and bounded because all of it is taken into memory.
pub const MAX_IMAGE_BYTES: usize = 64 << 20;

/// The tokens around and for an image and a video in tokenisers that are trained here.
pub(super) const VISION_TOKENS: [&str; 4] =
    ["<|vision_start|>", "<|vision_end|>", IMAGE_TOKEN, "<|video_pad|>"];
/// The usual spelling of the token whose places images take.
const IMAGE_TOKEN: &str = "<|image_pad|>";

/// How images in rows are read and take their places among tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct VisionSpec {
    pub patching: Patching,
    /// Pixels that an image may have.
    pub max_pixels: u64,
    /// The token whose places images take; `<|image_pad|>` where none is given.
    pub image_token: Option<u32>,
    /// The folder that paths begin in; that of a row's file where none is given.
    pub root: Option<PathBuf>,
    /// The column with the images; where none is given, found by its name.
    pub column: Option<String>,
    /// Texts around what is learned of an answer.
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

/// A conversation and its images in their order, each with the number of its message.
pub(super) struct SightedChat {
    pub chat: Conversation,
    pub images: Vec<(usize, Arc<EncodedImage>)>,
}

impl SightedChat {
    /// Equal for equal messages and images.
    pub fn hash(&self) -> u64 {
        self.hashes().fold(self.chat.hash(), |hash, image| key(hash, key(image as u64, (image >> 64) as u64)))
    }

    /// The hashes of its images.
    pub fn hashes(&self) -> impl Iterator<Item = u128> {
        self.images.iter().map(|(_, image)| image.hash)
    }
}

/// Reads rows and looks into their images.
pub(super) struct Sight<'s> {
    pub spec: &'s VisionSpec,
    pub reader: ImageReader,
    /// The token whose places images take, once the tokeniser is known.
    pub token: OnceLock<u32>,
}

impl<'s> Sight<'s> {
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
    ) -> Result<Vec<SightedChat>, Wrong> {
        let shown = schema.read(fields, self.spec.column.as_deref())?;
        shown.into_iter().map(|shown| self.looked_into(shown, place)).collect()
    }

    /// The prompt of a row with each of its answers, which are about the same images.
    pub fn pair(
        &self,
        schema: &PairSchema,
        fields: &Fields,
        place: &SourceLocation,
    ) -> Result<[SightedChat; 2], Wrong> {
        let [chosen, rejected] = schema::pair(*schema, fields, self.spec.column.as_deref())?;
        Ok([self.looked_into(chosen, place)?, self.looked_into(rejected, place)?])
    }

    /// The answer of a row, and whether it is wanted.
    pub fn judged(
        &self,
        schema: &JudgedSchema,
        fields: &Fields,
        place: &SourceLocation,
    ) -> Result<(SightedChat, bool), Wrong> {
        let (shown, is_wanted) = schema::judged(*schema, fields, self.spec.column.as_deref())?;
        Ok((self.looked_into(shown, place)?, is_wanted))
    }

    /// Looks into the images of a conversation. Paths begin in the given folder, or where the row's file is.
    fn looked_into(
        &self,
        Shown { chat, images }: Shown,
        place: &SourceLocation,
    ) -> Result<SightedChat, Wrong> {
        let folder = place.file.parent().filter(|folder| !folder.as_os_str().is_empty());
        let root = self.spec.root.as_deref().or(folder).unwrap_or(Path::new("."));
        let look = |(turn, image)| Ok((turn, given::look(&self.reader, &image, root)?));
        let images = images.into_iter().map(look).collect::<Result<_, Wrong>>()?;
        Ok(SightedChat { chat, images })
    }
}

/// The token that stands for images in texts, which must be a special one that its spelling gives.
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
            "The tokeniser has no token {IMAGE_TOKEN}, whose places images take: give the one that came with the model with \
             data.tokenizer."
        )));
    };
    let spelled = vocabulary.token(token);
    if is_trained_here && spelled.as_deref() != Some(IMAGE_TOKEN) {
        let own = named().expect("a tokeniser of visual chats has it");
        return Err(DataError::input(format!(
            "The tokeniser that is trained here has {IMAGE_TOKEN} as token {own}, and images take the places of token \
             {token}: give model.vision.image_token={own}, or a tokeniser with data.tokenizer."
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
            format!("which the tokeniser spells `{}` and has not as a special token", spelled.escape_debug())
        }
    };
    Err(DataError::input(format!(
        "Images take the places of token {token} (model.vision.image_token), {what}: give the tokeniser that came with the \
         model with data.tokenizer, or correct model.vision.image_token."
    )))
}
