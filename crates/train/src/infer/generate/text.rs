//! Decodes tokens to text as they arrive, up to the first stop string.

use std::sync::Arc;

use flatout_data::Vocabulary;

use super::request::ScoredToken;

/// Tokens of the prompt that are decoded along with the first new ones: whether a token begins with a space may depend on them.
const BEFORE: usize = 8;
/// The most tokens of a character, one per byte. Bytes that form no character after this many tokens never will.
const MOST_OF_A_CHARACTER: usize = 4;
/// The most tokens that are decoded together, where many of them have no text.
const LONGEST_WINDOW: usize = 64;

/// The text after a prompt, in whole characters. Every token is decoded with a few others instead of all, so the cost per token
/// does not depend on the length of the text.
pub struct GrowingText {
    vocabulary: Arc<Vocabulary>,
    /// The last settled tokens, followed by those whose text is not settled yet.
    window: Vec<u32>,
    /// Number of settled tokens in the window.
    settled: usize,
}

impl GrowingText {
    pub fn new(vocabulary: Arc<Vocabulary>, prompt: &[u32]) -> GrowingText {
        let window = prompt[prompt.len().saturating_sub(BEFORE)..].to_vec();
        let settled = window.len();
        GrowingText { vocabulary, window, settled }
    }

    /// Adds a token and returns the text that is settled now; `None` if the rest of a character is missing.
    pub fn push(&mut self, token: u32) -> Option<String> {
        self.window.push(token);
        let more = self.more();
        if more.ends_with('\u{fffd}') && self.window.len() - self.settled < MOST_OF_A_CHARACTER {
            return None;
        }
        // Tokens without text, such as special ones, hide whether a space comes before the next word, so the tokens before them
        // are kept.
        if !more.is_empty() || self.window.len() > LONGEST_WINDOW {
            self.window.drain(..self.settled);
        }
        self.settled = self.window.len();
        Some(more)
    }

    /// Returns the remaining text, once no more tokens come.
    pub fn finish(&mut self) -> String {
        let more = self.more();
        (self.window, self.settled) = (vec![], 0);
        more
    }

    /// The text of the tokens that are not settled.
    fn more(&self) -> String {
        if self.window.len() == self.settled {
            return String::new();
        }
        let before = self.vocabulary.decode(&self.window[..self.settled]);
        let all = self.vocabulary.decode(&self.window);
        // The prompt may end within a character, which the first tokens complete.
        let before = if all.starts_with(&before) { &before[..] } else { before.trim_end_matches('\u{fffd}') };
        all.get(before.len()..).unwrap_or_default().to_string()
    }
}

/// A growing text with its tokens, up to the first of some stop strings.
pub struct TextStream {
    text: GrowingText,
    stops: Vec<String>,
    /// Text that may be the beginning of a stop string.
    held: String,
    /// Tokens that were not returned yet, each with the position in the text at which it begins.
    waiting: Vec<(usize, ScoredToken)>,
    /// Bytes of text returned so far.
    given: usize,
}

/// Settled text with its tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settled {
    pub text: String,
    pub tokens: Vec<ScoredToken>,
    /// Whether the text reached a stop string.
    pub is_end: bool,
}

impl TextStream {
    pub fn new(vocabulary: Arc<Vocabulary>, prompt: &[u32], stops: Vec<String>) -> TextStream {
        let text = GrowingText::new(vocabulary, prompt);
        TextStream { text, stops, held: String::new(), waiting: vec![], given: 0 }
    }

    /// Adds a token and returns what is settled now.
    pub fn push(&mut self, scored: ScoredToken) -> Settled {
        let more = self.text.push(scored.token);
        self.waiting.push((self.given + self.held.len(), scored));
        let Some(more) = more else { return Settled::default() };
        self.held += &more;
        self.release(false)
    }

    /// Returns what is left, once no more tokens come.
    pub fn finish(&mut self) -> Settled {
        self.held += &self.text.finish();
        self.release(true)
    }

    /// Returns the held text up to a stop string, or else without what may be the beginning of one.
    fn release(&mut self, all: bool) -> Settled {
        let found = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
        let end = match (found, all) {
            (Some(place), _) => place,
            (None, true) => self.held.len(),
            (None, false) => {
                self.held.len()
                    - self.stops.iter().map(|stop| stop_overlap(&self.held, stop)).max().unwrap_or(0)
            }
        };
        let rest = self.held.split_off(end);
        let text = std::mem::replace(&mut self.held, rest);
        self.given += text.len();
        // A token without text belongs to the text before it.
        let is_given = |place: &usize| match found {
            Some(_) => *place < self.given,
            None => all || self.held.is_empty() || *place < self.given,
        };
        let count = self.waiting.iter().take_while(|(place, _)| is_given(place)).count();
        let tokens = self.waiting.drain(..count).map(|(_, scored)| scored).collect();
        Settled { text, tokens, is_end: found.is_some() }
    }
}

/// Length of the longest end of a text that is a beginning of a stop string.
fn stop_overlap(text: &str, stop: &str) -> usize {
    let most = text.len().min(stop.len().saturating_sub(1));
    let is_begun = |count: &usize| {
        text.as_bytes().ends_with(&stop.as_bytes()[..*count]) && text.is_char_boundary(text.len() - count)
    };
    (1..=most).rev().find(is_begun).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "the fox — größer als der Hund 🦊 said: the end, the fox";

    fn vocabulary() -> Vocabulary {
        Vocabulary::train([TEXT, TEXT].into_iter(), 280).expect("a vocabulary")
    }

    /// Pushes every token and returns the pieces with the number of tokens in each.
    fn pieces(stops: &[&str]) -> (Vec<(String, usize)>, bool) {
        let vocabulary = vocabulary();
        let tokens = vocabulary.encode(TEXT).expect("tokens");
        let (prompt, rest) = tokens.split_at(3);
        let stops = stops.iter().map(|stop| stop.to_string()).collect();
        let mut stream = TextStream::new(vocabulary.into(), prompt, stops);
        let mut pieces = vec![];
        for token in rest {
            let settled = stream.push(ScoredToken { token: *token, ..ScoredToken::default() });
            pieces.push((settled.text, settled.tokens.len()));
            if settled.is_end {
                return (pieces, true);
            }
        }
        let settled = stream.finish();
        pieces.push((settled.text, settled.tokens.len()));
        (pieces, settled.is_end)
    }

    /// A text may end within a character: its bytes are shown as replacement characters, once.
    #[test]
    fn an_incomplete_character_is_returned_at_the_end() {
        let vocabulary = Arc::new(Vocabulary::train([TEXT, TEXT].into_iter(), 262).expect("a vocabulary"));
        let fox = vocabulary.encode("🦊").expect("tokens");
        assert!(fox.len() > 1, "a character of several tokens");
        let mut text = GrowingText::new(vocabulary.clone(), &[]);
        assert!(fox[..fox.len() - 1].iter().all(|token| text.push(*token).is_none()));
        assert_eq!(text.finish(), "\u{fffd}");
        assert_eq!(text.finish(), "", "and nothing is left after it");
        let mut text = GrowingText::new(vocabulary, &fox[..1]);
        let rest: Vec<Option<String>> = fox[1..].iter().map(|token| text.push(*token)).collect();
        assert_eq!(rest.last(), Some(&Some("🦊".into())), "the first tokens complete the prompt's");
    }

    #[test]
    fn pieces_make_the_text_and_no_character_is_cut() {
        let vocabulary = vocabulary();
        let tokens = vocabulary.encode(TEXT).expect("tokens");
        let whole = TEXT.strip_prefix(&vocabulary.decode(&tokens[..3])).expect("a beginning");
        let (pieces, is_end) = pieces(&[]);
        assert_eq!(pieces.iter().map(|(text, _)| text.as_str()).collect::<String>(), whole);
        assert!(!is_end && pieces.iter().all(|(text, _)| !text.contains('\u{fffd}')), "{pieces:?}");
        assert_eq!(pieces.iter().map(|(_, tokens)| tokens).sum::<usize>(), tokens.len() - 3);
    }

    #[test]
    fn a_text_ends_before_the_first_of_its_strings() {
        for (stops, end) in [
            (&["the end"][..], " said: "),
            (&["nowhere", "end", "d, "][..], "the "),
            (&[" Hund 🦊", "🦊"][..], "der"),
            (&["g"][..], "— "),
        ] {
            let (pieces, is_end) = pieces(stops);
            let text: String = pieces.iter().map(|(text, _)| text.as_str()).collect();
            assert!(is_end && text.ends_with(end), "{stops:?}: {text:?}");
        }
        let (pieces, is_end) = pieces(&["foxes", "the end of it"]);
        let text: String = pieces.iter().map(|(text, _)| text.as_str()).collect();
        assert!(!is_end && text.ends_with("the end, the fox"), "what was only begun is given: {text:?}");
    }

    #[test]
    fn possible_beginnings_of_stop_strings_are_held() {
        assert_eq!(stop_overlap("a the", "the end"), 3);
        assert_eq!(stop_overlap("a the end", "the end"), 0, "all of it is found and not begun");
        assert_eq!(stop_overlap("ééx", "xé"), 1);
        assert_eq!(stop_overlap("a", "b"), 0);
        assert_eq!(stop_overlap("", "b"), 0);
    }
}
