//! Encodes texts with spelled-out special tokens as tokens with their offsets, and texts and pairs with the tokeniser's own
//! frame.

use std::collections::HashSet;
use std::ops::Range;

use tokenizers::{Encoding, PostProcessorWrapper, Tokenizer};

use crate::contained::contained;
use crate::error::DataError;
use crate::text::tokenizer::Vocabulary;
use crate::text::tokenizer::guarded::{GuardedTokenizer, Unencodable};

/// A token and the bytes of the text it stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TokenSpan {
    pub token: u32,
    pub bytes: Range<usize>,
    /// Whether it is one of the tokeniser's special tokens.
    pub is_special: bool,
    /// Whether it belongs to the frame and stands for no part of the text.
    pub is_frame: bool,
}

/// The tokens before and after a single text.
type Around = [Vec<u32>; 2];
/// The frame of two texts.
struct Pair {
    /// The tokens before, between and after them.
    around: [Vec<u32>; 3],
    /// The first token of type 1, counted from the end of the first text, where it lies between the texts or begins the second.
    second: Option<usize>,
}

/// A text or a pair in its frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Framed {
    pub tokens: Vec<u32>,
    /// The first token of type 1; all tokens after it have type 1 too. It marks the second text of a pair, as the tokeniser
    /// defines it.
    pub second: Option<usize>,
    /// Whether tokens had to be cut.
    pub is_cut: bool,
}

/// Encodes as a model's own tokeniser does: spelled-out special tokens become those tokens.
pub(crate) struct Encoder {
    tokenizer: GuardedTokenizer,
    special: HashSet<u32>,
    single: Around,
    pair: Pair,
    eos: u32,
}

impl Encoder {
    pub fn new(vocabulary: &Vocabulary) -> Result<Self, DataError> {
        let mut tokenizer = vocabulary.guarded().clone();
        tokenizer.change(|library| library.set_encode_special_tokens(false));
        let library = tokenizer.library();
        let (single, pair) = match library.get_post_processor() {
            // Tokenisers of this program have no post-processor: documents are framed by both ends, and the second text follows
            // the first.
            None => {
                let [bos, eos] = [vec![vocabulary.bos()], vec![vocabulary.eos()]];
                let between = eos.clone();
                ([bos.clone(), eos.clone()], Pair { around: [bos, between, eos], second: Some(1) })
            }
            Some(_) => frames(library)?,
        };
        let added = library.get_added_tokens_decoder();
        let special = added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
        tokenizer.change(|library| {
            library.with_post_processor(None::<PostProcessorWrapper>);
        });
        Ok(Self { tokenizer, special, single, pair, eos: vocabulary.eos() })
    }

    /// The tokens of a text without a frame.
    pub fn pieces(&self, text: &str) -> Result<Vec<TokenSpan>, Unencodable> {
        let encoding = self.tokenizer.encode(text, false)?;
        let offsets = encoding.get_offsets().iter();
        let piece = |(token, (start, end)): (&u32, &(usize, usize))| TokenSpan {
            token: *token,
            bytes: *start..*end,
            is_special: self.special.contains(token),
            is_frame: false,
        };
        Ok(encoding.get_ids().iter().zip(offsets).map(piece).collect())
    }

    /// The tokens of a text in the frame of a single text, with an end token: a completion of a prompt ends somewhere.
    pub fn document(&self, text: &str) -> Result<Vec<TokenSpan>, Unencodable> {
        let around =
            |token: u32, at: usize, is_frame| TokenSpan { token, bytes: at..at, is_special: true, is_frame };
        let mut pieces: Vec<TokenSpan> = self.single[0].iter().map(|token| around(*token, 0, true)).collect();
        pieces.extend(self.pieces(text)?);
        // The end token is learned with the text it ends, so its offset is the one after the last byte.
        pieces.push(around(self.eos, text.len(), false));
        Ok(pieces)
    }

    /// A text or a pair in the tokeniser's own frame, with at most `most` tokens. The longer text is cut first, from its end.
    pub fn framed(&self, a: &str, b: Option<&str>, most: usize) -> Result<Framed, Unencodable> {
        let bare = |text: &str| -> Result<Vec<u32>, Unencodable> {
            Ok(self.tokenizer.encode_fast(text, false)?.get_ids().to_vec())
        };
        let first = bare(a)?;
        let Some(b) = b else {
            let [before, behind] = &self.single;
            let kept = first.len().min(most.saturating_sub(before.len() + behind.len()));
            let tokens = [before, &first[..kept], behind].concat();
            return Ok(Framed { tokens, second: None, is_cut: kept < first.len() });
        };
        let second = bare(b)?;
        let [before, between, behind] = &self.pair.around;
        let room = most.saturating_sub(before.len() + between.len() + behind.len());
        let (kept, kept_second) = longest_first(first.len(), second.len(), room);
        let tokens = [before, &first[..kept], between, &second[..kept_second], behind].concat();
        let is_cut = kept < first.len() || kept_second < second.len();
        Ok(Framed { tokens, second: self.pair.second.map(|at| before.len() + kept + at), is_cut })
    }

    /// Number of tokens of a frame.
    pub fn frame_tokens(&self, is_pair: bool) -> usize {
        match is_pair {
            true => self.pair.around.iter().map(Vec::len).sum(),
            false => self.single.iter().map(Vec::len).sum(),
        }
    }
}

/// Number of tokens that remain of two texts that have `room` together: the longer one is cut first, and of two that are too
/// long each keeps half.
fn longest_first(first: usize, second: usize, room: usize) -> (usize, usize) {
    if first + second <= room {
        return (first, second);
    }
    let (shorter, is_first_longer) = (first.min(second), first > second);
    let half = room / 2;
    let (short, long) = match shorter <= half {
        true => (shorter, room - shorter),
        false => (half, room - half),
    };
    if is_first_longer { (long, short) } else { (short, long) }
}

/// The tokens that the tokeniser's post-processor puts around one text, and around and between two, found by encoding a single
/// letter.
fn frames(library: &Tokenizer) -> Result<(Around, Pair), DataError> {
    let encoded = |encode: &dyn Fn() -> tokenizers::Result<Encoding>| {
        let encoded = contained(encode).and_then(|encoded| encoded.map_err(|error| error.to_string()));
        encoded.map_err(|message| {
            DataError::input(format!(
                "The tokeniser cannot encode a single letter: {message}; give another with data.tokenizer."
            ))
        })
    };
    let single = encoded(&|| library.encode("a", true))?;
    let pair = encoded(&|| library.encode(("a", "a"), true))?;
    let is_added = |encoding: &Encoding| -> Vec<bool> {
        encoding.get_special_tokens_mask().iter().map(|mask| *mask == 1).collect()
    };
    let taken = |encoding: &Encoding, range: Range<usize>| encoding.get_ids()[range].to_vec();
    let added_run =
        |added: &[bool], from: usize| from + added[from..].iter().take_while(|added| **added).count();
    let letter = encoded(&|| library.encode("a", false))?.len();
    let added = is_added(&single);
    let text = added_run(&added, 0);
    let frame = [taken(&single, 0..text), taken(&single, text + letter..added.len())];
    let added = is_added(&pair);
    let text = added_run(&added, 0);
    let second = added_run(&added, text + letter);
    let around = [
        taken(&pair, 0..text),
        taken(&pair, text + letter..second),
        taken(&pair, second + letter..added.len()),
    ];
    let typed = pair.get_type_ids().iter().position(|kind| *kind == 1);
    let second = typed.filter(|at| (text + letter..=second).contains(at)).map(|at| at - text - letter);
    Ok((frame, Pair { around, second }))
}

#[cfg(test)]
mod tests {
    use tokenizers::processors::template::TemplateProcessing;
    use tokenizers::{TruncationDirection, TruncationParams, TruncationStrategy};

    use super::*;
    use crate::scratch::Scratch;

    const TEXTS: [&str; 3] = ["the fox and the dog", "a dog, a fox", "Füße und 東京 🦊"];

    /// A byte-level tokeniser that frames its texts as encoders do.
    fn processed(single: &str, pair: &str) -> Vocabulary {
        let vocabulary = Vocabulary::train(TEXTS.into_iter(), 300).unwrap();
        let mut library = vocabulary.library().clone();
        let processing = TemplateProcessing::builder()
            .try_single(single)
            .unwrap()
            .try_pair(pair)
            .unwrap()
            .special_tokens(vec![("<bos>", 0), ("<eos>", 1)])
            .build()
            .unwrap();
        library.with_post_processor(Some(processing));
        let scratch = Scratch::new(&format!("encoder-{}", pair.len()));
        let path = scratch.path().join("tokenizer.json");
        library.save(&path, false).unwrap();
        Vocabulary::load(&path).unwrap()
    }

    #[test]
    fn texts_and_pairs_are_framed_and_cut_as_the_library_does() {
        for (single, pair) in [
            ("<bos> $A", "<bos> $A <bos>:1 $B:1"),
            ("<bos> $A <eos>", "<bos> $A <eos> $B:1 <eos>:1"),
            ("$A <eos>", "$A $B:1 <eos>:1"),
        ] {
            let vocabulary = processed(single, pair);
            let encoder = Encoder::new(&vocabulary).unwrap();
            let long = "the fox and the dog and 東京 ".repeat(3);
            for a in ["the fox", "dog", &long] {
                for b in [None, Some("a dog, a fox"), Some(long.as_str())] {
                    for most in [9, 10, 11, 17, 40, 400] {
                        let mut library = vocabulary.library().clone();
                        let truncation = TruncationParams {
                            max_length: most,
                            strategy: TruncationStrategy::LongestFirst,
                            stride: 0,
                            direction: TruncationDirection::Right,
                        };
                        library.with_truncation(Some(truncation)).unwrap();
                        let wanted = match b {
                            Some(b) => library.encode((a, b), true).unwrap(),
                            None => library.encode(a, true).unwrap(),
                        };
                        let framed = encoder.framed(a, b, most).unwrap();
                        assert_eq!(framed.tokens, wanted.get_ids(), "{pair} {most}: {a:?} {b:?}");
                        let second = framed.second.unwrap_or(framed.tokens.len());
                        let types: Vec<u32> =
                            (0..framed.tokens.len()).map(|at| u32::from(at >= second)).collect();
                        assert_eq!(types, wanted.get_type_ids(), "{pair} {most}: {a:?} {b:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn pieces_cover_the_text_and_special_tokens_are_themselves() {
        let vocabulary = Vocabulary::train(TEXTS.into_iter(), 300).unwrap();
        let encoder = Encoder::new(&vocabulary).unwrap();
        let text = "<bos>Füße <eos> the 🦊";
        let pieces = encoder.pieces(text).unwrap();
        assert_eq!(pieces[0], TokenSpan { token: 0, bytes: 0..5, is_special: true, is_frame: false });
        assert_eq!(pieces.iter().filter(|piece| piece.is_special).count(), 2);
        let covered = pieces.iter().fold(0, |end, piece| {
            assert!(piece.bytes.start <= end, "a gap before {piece:?}");
            end.max(piece.bytes.end)
        });
        assert_eq!(covered, text.len());
        let Framed { tokens, second, is_cut } = encoder.framed("the fox", Some("dog"), 64).unwrap();
        assert_eq!((tokens[0], tokens[tokens.len() - 1], is_cut), (0, 1, false));
        assert_eq!(tokens.iter().filter(|token| **token == 1).count(), 2);
        assert_eq!(tokens[second.unwrap() - 1], 1, "the second text begins behind the end of the first");
    }
}
