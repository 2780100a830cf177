//! Text out of tokens as they come, up to the first of some strings that end it.

use std::sync::Arc;

use flatout_data::Vocabulary;

use super::request::Told;

/// Tokens of the prompt that are decoded with the first ones behind it: whether a token begins with a space may depend on them.
const BEFORE: usize = 8;
/// Tokens that a character takes at most, one a byte. Bytes that are no character after as many never become one.
const MOST_OF_A_CHARACTER: usize = 4;
/// Tokens that are decoded together at most, where many of them have no text.
const LONGEST_WINDOW: usize = 64;

/// The text that follows a prompt, in whole characters. Every token is decoded with a few others and not with all, so a long text
/// costs no more a token than a short one.
pub struct GrowingText {
    vocabulary: Arc<Vocabulary>,
    /// The last tokens that are settled, and those behind them whose text is not settled yet.
    window: Vec<u32>,
    /// How many of the window are settled.
    settled: usize,
}

impl GrowingText {
    pub fn new(vocabulary: Arc<Vocabulary>, prompt: &[u32]) -> GrowingText {
        let window = prompt[prompt.len().saturating_sub(BEFORE)..].to_vec();
        let settled = window.len();
        GrowingText { vocabulary, window, settled }
    }

    /// Takes a token and gives the text that is settled now; none where the rest of a character is yet to come.
    pub fn push(&mut self, token: u32) -> Option<String> {
        self.window.push(token);
        let more = self.more();
        if more.ends_with('\u{fffd}') && self.window.len() - self.settled < MOST_OF_A_CHARACTER {
            return None;
        }
        // Tokens without text, such as special ones, hide whether a space stands before the next word: those before them stay.
        if !more.is_empty() || self.window.len() > LONGEST_WINDOW {
            self.window.drain(..self.settled);
        }
        self.settled = self.window.len();
        Some(more)
    }

    /// Gives the text that is left, where no more tokens come.
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

/// Such a text with its tokens, up to the first of some strings.
pub struct TextStream {
    text: GrowingText,
    stops: Vec<String>,
    /// Text that may be the beginning of a string that ends it.
    held: String,
    /// Tokens that were not given away, each with the place in all text at which it begins.
    waiting: Vec<(usize, Told)>,
    /// Bytes of text given away.
    given: usize,
}

/// Text that is settled, with its tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settled {
    pub text: String,
    pub tokens: Vec<Told>,
    /// The text ended with a string that ends it.
    pub is_end: bool,
}

impl TextStream {
    pub fn new(vocabulary: Arc<Vocabulary>, prompt: &[u32], stops: Vec<String>) -> TextStream {
        let text = GrowingText::new(vocabulary, prompt);
        TextStream { text, stops, held: String::new(), waiting: vec![], given: 0 }
    }

    /// Takes a token and gives what is settled now.
    pub fn push(&mut self, told: Told) -> Settled {
        let more = self.text.push(told.token);
        self.waiting.push((self.given + self.held.len(), told));
        let Some(more) = more else { return Settled::default() };
        self.held += &more;
        self.release(false)
    }

    /// Gives what is left, where no more tokens come.
    pub fn finish(&mut self) -> Settled {
        self.held += &self.text.finish();
        self.release(true)
    }

    /// Gives the text that is held, up to a string that ends it, or but for what may be the beginning of one.
    fn release(&mut self, all: bool) -> Settled {
        let found = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
        let end = match (found, all) {
            (Some(place), _) => place,
            (None, true) => self.held.len(),
            (None, false) => {
                self.held.len() - self.stops.iter().map(|stop| begun(&self.held, stop)).max().unwrap_or(0)
            }
        };
        let rest = self.held.split_off(end);
        let text = std::mem::replace(&mut self.held, rest);
        self.given += text.len();
        // A token without any text belongs to what stands before it.
        let is_given = |place: &usize| match found {
            Some(_) => *place < self.given,
            None => all || self.held.is_empty() || *place < self.given,
        };
        let count = self.waiting.iter().take_while(|(place, _)| is_given(place)).count();
        let tokens = self.waiting.drain(..count).map(|(_, told)| told).collect();
        Settled { text, tokens, is_end: found.is_some() }
    }
}

/// The bytes at the end of a text that a string begins with.
fn begun(text: &str, stop: &str) -> usize {
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

    /// Pushes every token and gives the pieces with how many tokens came with each.
    fn pieces(stops: &[&str]) -> (Vec<(String, usize)>, bool) {
        let vocabulary = vocabulary();
        let tokens = vocabulary.encode(TEXT).expect("tokens");
        let (prompt, rest) = tokens.split_at(3);
        let stops = stops.iter().map(|stop| stop.to_string()).collect();
        let mut stream = TextStream::new(vocabulary.into(), prompt, stops);
        let mut pieces = vec![];
        for token in rest {
            let settled = stream.push(Told { token: *token, ..Told::default() });
            pieces.push((settled.text, settled.tokens.len()));
            if settled.is_end {
                return (pieces, true);
            }
        }
        let settled = stream.finish();
        pieces.push((settled.text, settled.tokens.len()));
        (pieces, settled.is_end)
    }

    /// A text may end within a character: its bytes are shown as such, once.
    #[test]
    fn what_is_left_of_a_character_comes_at_the_end() {
        let vocabulary = Arc::new(Vocabulary::train([TEXT, TEXT].into_iter(), 262).expect("a vocabulary"));
        let fox = vocabulary.encode("🦊").expect("tokens");
        assert!(fox.len() > 1, "a character of several tokens");
        let mut text = GrowingText::new(vocabulary.clone(), &[]);
        assert!(fox[..fox.len() - 1].iter().all(|token| text.push(*token).is_none()));
        assert_eq!(text.finish(), "\u{fffd}");
        assert_eq!(text.finish(), "", "and nothing is left behind it");
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
    fn what_may_be_the_beginning_of_an_end_is_held() {
        assert_eq!(begun("a the", "the end"), 3);
        assert_eq!(begun("a the end", "the end"), 0, "all of it is found and not begun");
        assert_eq!(begun("ééx", "xé"), 1);
        assert_eq!(begun("a", "b"), 0);
        assert_eq!(begun("", "b"), 0);
    }
}
