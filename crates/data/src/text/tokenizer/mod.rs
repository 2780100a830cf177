//! Text to tokens and back: a trained byte-level BPE, a list of words, or any `tokenizer.json`.

mod byte_level;
mod bytes;
mod frame;
pub(crate) mod guarded;
pub(crate) mod sample;

use std::path::Path;
use std::sync::{Arc, OnceLock};

use flatout_waits::{self as waits, Unit};
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::models::wordlevel::WordLevel;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::whitespace::WhitespaceSplit;
use tokenizers::{AddedToken, Model, ModelWrapper, PostProcessorWrapper, Tokenizer};

pub use self::frame::TOKENIZER_CONFIG;

use self::byte_level::ByteLevelEncoder;
use self::frame::Frame;
use self::guarded::{GuardedTokenizer, Unencodable};
use crate::contained::contained;
use crate::durable;
use crate::error::DataError;
use crate::pointer::{IS_POINTER, is_pointer};
use crate::random::{fingerprint, key};
use crate::text::synthetic::grammar::{BOS, EOS};

/// Size of the smallest byte-level vocabulary: every byte, and the two ends of a document.
pub const MIN_TRAINED_VOCAB: usize = 256 + 2;
/// Size of the largest vocabulary that can be trained: the trainer allocates all of it before it begins.
const MAX_TRAINED_VOCAB: usize = 1 << 20;

/// Texts longer than this are encoded in pieces.
const PIECE_BYTES: usize = 1 << 20;

#[derive(Debug, Clone)]
pub struct Vocabulary {
    tokenizer: GuardedTokenizer,
    /// The fast path, where the tokeniser allows it.
    fast: Option<ByteLevelEncoder>,
    size: usize,
    frame: Frame,
    /// The number of bytes of every token, computed on first use.
    bytes: Arc<OnceLock<Option<Vec<u32>>>>,
}

/// Encodes prompts as the tokeniser's own model expects them.
pub struct PromptEncoder {
    tokenizer: GuardedTokenizer,
    /// The token of an empty prompt.
    empty: u32,
}

impl PromptEncoder {
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        let encoding = self.tokenizer.encode_fast(text, true);
        let encoding = encoding.map_err(|error| {
            DataError::input(format!("The prompt cannot be encoded: {}.", error.message()))
        })?;
        let tokens = encoding.get_ids().to_vec();
        Ok(if tokens.is_empty() { vec![self.empty] } else { tokens })
    }
}

impl Vocabulary {
    /// Trains a byte-level BPE of `vocab` tokens, `<bos>` = 0 and `<eos>` = 1 among them. Any UTF-8 text survives encoding and
    /// decoding unchanged. A text with too few different pairs gives fewer tokens than requested: see [`Vocabulary::size`]. The
    /// same texts give the same tokens for any number of threads.
    pub fn train<'t>(texts: impl Iterator<Item = &'t str> + Send, vocab: usize) -> Result<Self, DataError> {
        Self::train_with(texts, vocab, &[])
    }

    /// As [`Vocabulary::train`], with `more` special tokens after `<eos>`.
    pub(crate) fn train_with<'t>(
        texts: impl Iterator<Item = &'t str> + Send,
        vocab: usize,
        more: &[&str],
    ) -> Result<Self, DataError> {
        if vocab < MIN_TRAINED_VOCAB + more.len() {
            return Err(DataError::input(format!(
                "A tokeniser of {vocab} tokens cannot be trained: the 256 bytes, {BOS} and {EOS} need \
                 {}; set model.vocab to at least that.",
                MIN_TRAINED_VOCAB + more.len()
            )));
        }
        if vocab > MAX_TRAINED_VOCAB {
            return Err(DataError::input(format!(
                "A tokeniser of {vocab} tokens cannot be trained: the limit is {MAX_TRAINED_VOCAB}, and 200000 are many; lower \
                 model.vocab (--vocab of data prepare)."
            )));
        }
        let named = [BOS, EOS].into_iter().chain(more.iter().copied());
        let specials: Vec<AddedToken> = named.map(|token| AddedToken::from(token, true)).collect();
        let mut trainer = BpeTrainer::builder()
            .vocab_size(vocab)
            .min_frequency(2)
            .show_progress(false)
            .special_tokens(specials.clone())
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .build();
        let mut trained = tokenizers::TokenizerBuilder::<
            BPE,
            tokenizers::NormalizerWrapper,
            ByteLevel,
            ByteLevel,
            ByteLevel,
        >::new()
        .with_model(BPE::default())
        .with_pre_tokenizer(Some(ByteLevel::new(false, true, true)))
        .with_decoder(Some(ByteLevel::default()))
        .build()
        .expect("model, pre-tokeniser and decoder are given");
        let _wait = waits::begin(format!("training a tokeniser of {vocab} tokens"), Unit::Nothing, None);
        trained.train(&mut trainer, texts).map_err(|error| {
            DataError::environment(format!("The tokeniser could not be trained: {error}."))
        })?;
        let mut tokenizer = Tokenizer::new(ModelWrapper::BPE(trained.get_model().clone()));
        tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
        tokenizer.with_decoder(Some(ByteLevel::default()));
        tokenizer.add_special_tokens(specials).expect("special tokens are in the vocabulary");
        Ok(Self::plain(tokenizer))
    }

    /// A list of words, each one token, separated by white space. `<bos>` and `<eos>` are among them.
    pub fn from_words(words: &[String]) -> Self {
        let numbered = words.iter().enumerate().map(|(number, word)| (word.clone(), number as u32)).collect();
        let model = WordLevel::builder().vocab(numbered).build().expect("a list of words needs no file");
        let mut tokenizer = Tokenizer::new(model);
        tokenizer.with_pre_tokenizer(Some(WhitespaceSplit));
        Self::plain(tokenizer)
    }

    /// A tokeniser made here, which has both special tokens.
    fn plain(tokenizer: Tokenizer) -> Self {
        let frame = Frame::known(&tokenizer).expect("both special tokens are among its tokens");
        Self::framed(tokenizer, frame).expect("its parts make no text too long")
    }

    /// A vocabulary of numbers: each token is spelled as its number, except `end`.
    pub(crate) fn from_numbers(size: usize, end: u32) -> Self {
        let words: Vec<String> = (0..size as u32)
            .map(|token| if token == end { "<|endoftext|>".into() } else { token.to_string() })
            .collect();
        Self::from_words(&words)
    }

    /// Reads a `tokenizer.json`, of this program or of any model; the files in its folder name the tokens that begin and end a
    /// document.
    pub fn load(path: &Path) -> Result<Self, DataError> {
        let shown = path.display();
        let bytes = std::fs::read(path)
            .map_err(|error| DataError::input(format!("The tokeniser {shown} cannot be read: {error}.")))?;
        if is_pointer(&bytes) {
            return Err(DataError::input(format!("{shown} {IS_POINTER}.")));
        }
        let unusable =
            |message: String| DataError::input(format!("{shown} is not a usable tokenizer.json: {message}."));
        // The library panics on some files: on truncated JSON, on ids at the end of their range.
        let folder = path.parent().unwrap_or(Path::new(""));
        let read = contained(|| -> Result<Self, String> {
            let tokenizer = Tokenizer::from_bytes(bytes).map_err(|error| error.to_string())?;
            let frame = Frame::beside(folder, &tokenizer)?;
            Self::framed(tokenizer, frame)
        });
        let read = read.and_then(|read| read).map_err(unusable)?;
        read.try_out().map_err(unusable)?;
        Ok(read)
    }

    /// The same tokeniser with these tokens added at the end; each is found wherever a text spells it.
    pub fn with_tokens(self, tokens: &[String]) -> Result<Self, DataError> {
        let Some(first) = tokens.first() else { return Ok(self) };
        let is_repeated = |at: &usize| tokens[..*at].contains(&tokens[*at]);
        if let Some(at) = (1..tokens.len()).find(is_repeated) {
            return Err(DataError::input(format!(
                "data.new_tokens has {:?} twice: leave one out.",
                tokens[at]
            )));
        }
        if tokens.iter().any(|token| token.trim().is_empty()) {
            return Err(DataError::input(
                "data.new_tokens has a blank token: write how each is spelled.".to_string(),
            ));
        }
        let known = tokens.iter().find_map(|token| Some((token, self.id(token)?)));
        if let Some((token, id)) = known {
            return Err(DataError::input(format!(
                "data.new_tokens has {token:?}, which the tokeniser has already as token {id}: leave it out."
            )));
        }
        let mut library = self.library().clone();
        let added = tokens.iter().map(|token| AddedToken::from(token.as_str(), false).normalized(false));
        let grown = library.add_tokens(added).map_err(|error| error.to_string());
        let grown = grown.and_then(|_| Self::framed(library, self.frame));
        let unusable = |message: String| {
            DataError::input(format!(
                "data.new_tokens cannot be added to the tokeniser, {first:?} first: {message}."
            ))
        };
        let grown = grown.map_err(unusable)?;
        match grown.size == self.size + tokens.len() {
            true => Ok(grown),
            false => Err(unusable(format!(
                "its tokens are numbered up to {}, and with {} more they would be numbered up to {}",
                self.size - 1,
                tokens.len(),
                grown.size - 1
            ))),
        }
    }

    /// The token with this spelling.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.library().token_to_id(token)
    }

    /// Writes a `tokenizer.json` for `load` and other tools, atomically, and a `tokenizer_config.json` in the same folder where
    /// the tokens at the ends of a document would otherwise be unknown.
    pub fn save(&self, path: &Path) -> Result<(), DataError> {
        let failed = |error: &dyn std::fmt::Display| {
            DataError::environment(format!("The tokeniser cannot be written to {}: {error}.", path.display()))
        };
        if let Some(config) = self.frame_json() {
            let beside = path.with_file_name(TOKENIZER_CONFIG);
            durable::replace(&beside, config.as_bytes()).map_err(|error| failed(&error))?;
        }
        durable::replace(path, self.to_json().as_bytes()).map_err(|error| failed(&error))
    }

    /// The content of the `tokenizer_config.json` that names the tokens at the ends of a document, where `tokenizer.json` does
    /// not determine them.
    pub fn frame_json(&self) -> Option<String> {
        (Frame::known(self.library()) != Some(self.frame)).then(|| self.frame.to_json(self.library()))
    }

    /// The content of `tokenizer.json`.
    pub fn to_json(&self) -> String {
        self.library().to_string(true).expect("a tokeniser that was built or read can be written")
    }

    /// Whether both give every text the same tokens, apart from those put around it.
    pub fn gives_the_same_tokens(&self, other: &Vocabulary) -> bool {
        let bare = |vocabulary: &Vocabulary| {
            let mut tokenizer = vocabulary.library().clone();
            tokenizer.with_post_processor(None::<PostProcessorWrapper>);
            tokenizer.to_string(false).expect("a tokeniser that was built or read can be written")
        };
        bare(self) == bare(other)
    }

    /// Tokens of a text, without `<bos>` and `<eos>`: their spelling inside a text is ordinary text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        if let ModelWrapper::WordLevel(words) = self.library().get_model() {
            let unknown =
                |word: &&str| self.id(word).is_none() && words.token_to_id(&words.unk_token).is_none();
            if let Some(word) = text.split_whitespace().find(unknown) {
                let word = word.escape_debug();
                return Err(DataError::input(format!(
                    "The word \"{word}\" is not one of the {} words that the tokeniser knows: use a model whose tokeniser splits \
                     words into pieces, such as one trained on text.",
                    self.size
                )));
            }
        }
        let tokens = match &self.fast {
            Some(fast) => fast.encode(text),
            None => {
                let encoding = self.tokenizer.encode_fast(text, false);
                encoding.map(|encoding| encoding.get_ids().to_vec()).map_err(Unencodable::message)
            }
        };
        tokens.map_err(|error| DataError::input(format!("The text cannot be encoded: {error}.")))
    }

    /// Tokens of a text of any length, as [`Vocabulary::encode`] gives them. A very long one is encoded in pieces, because
    /// encoding needs a hundred times the memory of the text; a word at a seam may be split differently.
    pub(crate) fn encode_document(&self, text: &str) -> Result<Vec<u32>, DataError> {
        if text.len() <= PIECE_BYTES {
            return self.encode(text);
        }
        let mut tokens = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let seam = seam(rest);
            let (head, tail) = rest.split_at(seam);
            tokens.extend(self.encode(head)?);
            rest = tail;
        }
        Ok(tokens)
    }

    /// Tokens of prompts as the tokeniser's own model expects them: spelled-out special tokens become those tokens, and the
    /// file's post-processor adds its tokens. An empty prompt becomes `<bos>`.
    pub fn encode_prompts(&self, texts: &[String]) -> Result<Vec<Vec<u32>>, DataError> {
        let encoder = self.prompt_encoder();
        texts.iter().map(|text| encoder.encode(text)).collect()
    }

    /// An encoder of single prompts; see [`Vocabulary::encode_prompts`].
    pub fn prompt_encoder(&self) -> PromptEncoder {
        let mut tokenizer = self.tokenizer.clone();
        tokenizer.change(|library| library.set_encode_special_tokens(false));
        PromptEncoder { tokenizer, empty: self.bos() }
    }

    /// The bytes that every token stands for; a special one stands for its own spelling.
    pub fn pieces(&self) -> Vec<Vec<u8>> {
        bytes::pieces(self.library())
    }

    /// The text of tokens. `<bos>`, `<eos>` and tokens outside the vocabulary are omitted.
    pub fn decode(&self, tokens: &[u32]) -> String {
        let tokens: Vec<u32> = tokens.iter().copied().filter(|token| !self.is_end(*token)).collect();
        self.tokenizer.decode(&tokens, true).unwrap_or_else(|message| undecodable(&message))
    }

    /// As [`Vocabulary::decode`], with `<bos>` and `<eos>` spelled out.
    pub fn spell(&self, tokens: &[u32]) -> String {
        let runs = tokens.chunk_by(|a, b| !self.is_end(*a) && !self.is_end(*b));
        let spelled = runs.map(|run| match run {
            [token] if self.is_end(*token) => self.token(*token).unwrap_or_default(),
            text => self.decode(text),
        });
        spelled.collect()
    }

    /// As [`Vocabulary::decode`], with every special token spelled out.
    pub fn spell_out(&self, tokens: &[u32]) -> String {
        self.tokenizer.decode(tokens, false).unwrap_or_else(|message| undecodable(&message))
    }

    /// The spelling of a token in the vocabulary.
    pub fn token(&self, token: u32) -> Option<String> {
        self.library().id_to_token(token)
    }

    /// The number of bytes of text per token, 0 for special ones. `None` where tokens do not determine it.
    pub fn byte_lengths(&self) -> Option<&[u32]> {
        self.bytes.get_or_init(|| bytes::byte_lengths(self.library())).as_deref()
    }

    /// One more than the largest token, and the smallest vocabulary that a model may have.
    pub fn size(&self) -> usize {
        self.size
    }

    pub fn bos(&self) -> u32 {
        self.frame.bos
    }

    pub fn eos(&self) -> u32 {
        self.frame.eos
    }

    fn is_end(&self, token: u32) -> bool {
        token == self.frame.bos || token == self.frame.eos
    }

    /// An error where a model of `model_vocab` tokens has no row for some token of this vocabulary.
    pub fn fits(&self, model_vocab: usize) -> Result<(), DataError> {
        if self.size <= model_vocab {
            return Ok(());
        }
        Err(DataError::input(format!(
            "The tokeniser has {} tokens but the model only {model_vocab}: set model.vocab={} or larger, or use a \
             smaller tokeniser.",
            self.size, self.size
        )))
    }

    /// Equal for vocabularies that give the same tokens.
    pub(crate) fn fingerprint(&self) -> u64 {
        let text =
            self.library().to_string(false).expect("a tokeniser that was built or read can be written");
        let frame = self.frame_json().map_or(0, |frame| fingerprint(frame.as_bytes()));
        key(fingerprint(text.as_bytes()), self.size as u64 ^ frame)
    }

    /// The tokeniser with its frame. The error names the part that makes it unsafe to use.
    fn framed(mut tokenizer: Tokenizer, frame: Frame) -> Result<Self, String> {
        let specials =
            [frame.bos, frame.eos].map(|id| tokenizer.id_to_token(id).expect("the id was just looked up"));
        let added = tokenizer.add_special_tokens(specials.map(|token| AddedToken::from(token, true)));
        added.map_err(|error| error.to_string())?;
        // Padding and truncation are settings of the file's author; documents here are whole.
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|error| error.to_string())?;
        tokenizer.set_encode_special_tokens(true);
        let largest = tokenizer.get_vocab(true).into_values().max().unwrap_or(0);
        let fast = ByteLevelEncoder::of(&tokenizer);
        Ok(Self {
            tokenizer: GuardedTokenizer::new(tokenizer)?,
            fast,
            size: largest as usize + 1,
            frame,
            bytes: Arc::default(),
        })
    }

    /// Encodes and decodes a few characters: a tokeniser that fails on these fails on every text.
    fn try_out(&self) -> Result<(), String> {
        for text in ["", "a", "The end. 1\n"] {
            match self.tokenizer.encode(text, true) {
                Ok(encoding) => drop(self.tokenizer.decode(encoding.get_ids(), false)?),
                Err(Unencodable::Tokenizer(message)) => return Err(message),
                // Unknown words are no fault of a list of words.
                Err(Unencodable::Text(_)) => {}
            }
        }
        Ok(())
    }

    /// The tokeniser with its bounds.
    pub(crate) fn guarded(&self) -> &GuardedTokenizer {
        &self.tokenizer
    }

    /// The library's tokeniser.
    pub(crate) fn library(&self) -> &Tokenizer {
        self.tokenizer.library()
    }
}

/// A text that stands for tokens that the tokeniser cannot decode.
fn undecodable(message: &str) -> String {
    format!("(the tokeniser cannot decode these tokens: {message})")
}

/// The end of the first piece of a text: before its last white space, since byte-level tokenisers join a space to the word that
/// follows.
fn seam(text: &str) -> usize {
    if text.len() <= PIECE_BYTES {
        return text.len();
    }
    let most = (0..=PIECE_BYTES).rev().find(|at| text.is_char_boundary(*at)).expect("0 is a boundary");
    let late = |at: &usize| *at >= most / 2;
    let head = &text[..most];
    head.rfind('\n').filter(late).or_else(|| head.rfind(' ').filter(late)).unwrap_or(most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    const TEXTS: [&str; 3] = [
        "The quick brown fox jumps over the lazy dog.\nThe dog sleeps on, and on, and on.\n",
        "A fox is quick; a dog is lazy; the quick fox and the lazy dog are friends.\n",
        "Gräßliche Füße, naïve café, 東京の犬, 🦊🐶.\n",
    ];
    const ODD: [&str; 6] = [
        "",
        " leading and  double  spaces \t\r\n\n",
        "never seen: Żółć ☃ \u{0} \u{1F9EA}",
        "<bos> in text <eos>",
        "\u{feff}mark",
        "e\u{301}",
    ];

    fn trained(vocab: usize) -> Vocabulary {
        Vocabulary::train(TEXTS.into_iter(), vocab).unwrap()
    }

    /// Added tokens follow the last one, are found inside words, and survive saving; existing ones are refused.
    #[test]
    fn tokens_can_be_added() {
        let vocabulary = Vocabulary::train(["the cat sat on the mat"].into_iter(), 270).unwrap();
        let size = vocabulary.size() as u32;
        let tokens = ["<tool>", "</tool>"].map(String::from);
        let grown = vocabulary.clone().with_tokens(&tokens).unwrap();
        assert_eq!((grown.id("<tool>"), grown.id("</tool>")), (Some(size), Some(size + 1)));
        let encoded = grown.encode("the<tool>cat</tool>").unwrap();
        assert_eq!(encoded.iter().filter(|token| **token >= size).count(), 2);
        assert_eq!(grown.decode(&encoded), "the<tool>cat</tool>");
        assert_eq!(grown.encode("the cat").unwrap(), vocabulary.encode("the cat").unwrap());
        let scratch = Scratch::new("tokens-added");
        let path = scratch.path().join("tokenizer.json");
        grown.save(&path).unwrap();
        assert!(Vocabulary::load(&path).unwrap().gives_the_same_tokens(&grown));
        assert!(!grown.gives_the_same_tokens(&vocabulary));
        let refused = grown.with_tokens(&tokens).unwrap_err().sentence;
        assert!(
            refused.contains(&format!("has \"<tool>\", which the tokeniser has already as token {size}")),
            "{refused}"
        );
    }

    #[test]
    fn training_gives_the_requested_size_where_the_text_allows_it() {
        for vocab in [258, 259, 280] {
            let vocabulary = trained(vocab);
            assert_eq!((vocabulary.size(), vocabulary.bos(), vocabulary.eos()), (vocab, 0, 1));
        }
        let most = trained(5000).size();
        assert!((281..400).contains(&most), "{most} tokens from three sentences");
    }

    #[test]
    fn training_twice_gives_the_same_tokeniser() {
        // Every hash map in the trainer has its own random key, so a dependence on its order shows within one process.
        let first = trained(5000).library().to_string(false).unwrap();
        for _ in 0..10 {
            assert_eq!(trained(5000).library().to_string(false).unwrap(), first);
        }
    }

    #[test]
    fn any_text_survives_training_saving_and_loading() {
        let scratch = Scratch::new("tokenizer");
        let path = scratch.path().join("tokenizer.json");
        let vocabulary = trained(280);
        vocabulary.save(&path).unwrap();
        let loaded = Vocabulary::load(&path).unwrap();
        assert_eq!((loaded.size(), loaded.bos(), loaded.eos()), (280, 0, 1));
        assert_eq!(loaded.fingerprint(), vocabulary.fingerprint());
        for text in TEXTS.into_iter().chain(ODD) {
            let tokens = vocabulary.encode(text).unwrap();
            assert!(!tokens.contains(&0) && !tokens.contains(&1), "{text:?} was read as a special token");
            assert_eq!(vocabulary.decode(&tokens), text);
            assert_eq!(loaded.encode(text).unwrap(), tokens);
            assert_eq!(loaded.decode(&tokens), text);
        }
    }

    #[test]
    fn texts_of_any_length_round_trip() {
        let vocabulary = trained(280);
        let solid = "x".repeat(PIECE_BYTES + 10);
        for text in
            [&"a line of text\n".repeat(200_000), &"word ".repeat(300_000), &solid, &"ß".repeat(PIECE_BYTES)]
        {
            let tokens = vocabulary.encode_document(text).unwrap();
            assert_eq!(vocabulary.decode(&tokens), *text);
        }
        let lines = "a line of text\n".repeat(200_000);
        assert_eq!(vocabulary.encode_document(&lines).unwrap(), vocabulary.encode(&lines).unwrap());
    }

    #[test]
    fn numbers_are_a_vocabulary() {
        let vocabulary = Vocabulary::from_numbers(50, 7);
        assert_eq!((vocabulary.size(), vocabulary.bos(), vocabulary.eos()), (50, 7, 7));
        assert_eq!(vocabulary.decode(&[7, 1, 49, 7]), "1 49");
    }

    #[test]
    fn a_list_of_words_is_a_tokeniser_too() {
        let scratch = Scratch::new("words");
        let path = scratch.path().join("tokenizer.json");
        let words = ["<bos>", "<eos>", "the", "captain", "."].map(String::from);
        Vocabulary::from_words(&words).save(&path).unwrap();
        let vocabulary = Vocabulary::load(&path).unwrap();
        assert_eq!((vocabulary.size(), vocabulary.bos(), vocabulary.eos()), (5, 0, 1));
        assert_eq!(vocabulary.encode("the captain\n.").unwrap(), [2, 3, 4]);
        assert_eq!(vocabulary.decode(&[0, 2, 3, 4, 1]), "the captain .");
        assert_eq!(vocabulary.token(3).as_deref(), Some("captain"));
        let error = vocabulary.encode("the admiral .").unwrap_err();
        assert_eq!(
            error,
            DataError::input(
                "The word \"admiral\" is not one of the 5 words that the tokeniser knows: use a model whose tokeniser splits words into pieces, such as one trained on text."
            )
        );
    }

    #[test]
    fn unusable_tokenisers_are_named() {
        let scratch = Scratch::new("bad-tokenizer");
        let missing = Vocabulary::load(&scratch.path().join("none.json")).err().unwrap();
        assert!(missing.is_input() && missing.sentence.contains("none.json cannot be read"), "{missing}");
        let broken = Vocabulary::load(&scratch.write("broken.json", b"{}")).err().unwrap();
        assert!(broken.sentence.contains("broken.json is not a usable tokenizer.json"), "{broken}");
        let small = Vocabulary::train(TEXTS.into_iter(), 257).err().unwrap();
        assert!(small.sentence.contains("need 258"), "{small}");
        let vocabulary = trained(280);
        assert!(vocabulary.fits(280).is_ok());
        assert!(vocabulary.fits(279).unwrap_err().sentence.contains("280 tokens but the model only 279"));
        let model = WordLevel::builder().vocab([("x".to_string(), 0)].into_iter().collect()).build().unwrap();
        let frameless = scratch.path().join("frameless.json");
        Tokenizer::new(model).save(&frameless, false).unwrap();
        let frameless = Vocabulary::load(&frameless).err().unwrap();
        assert!(frameless.sentence.contains("no tokens for the beginning"), "{frameless}");
    }
}
