//! The synthetic language as a source: documents by index, and the lowest possible loss.

mod chain;
pub(crate) mod grammar;

use std::sync::Arc;

use self::chain::{END, State};
use self::grammar::{Grammar, grammar};
use crate::error::DataError;
use crate::order::documents::{Documents, Spent, TokenCount};
use crate::random::{self, Uniform};

/// The language: the same for every seed.
pub struct Language {
    grammar: Grammar,
    /// The mean of `-ln p(token | all tokens before it in its document)` over the endless stream of documents, each `<bos>
    /// words <eos>`. Every token counts: `<bos>`, which always follows `<eos>` and costs nothing, every word, and `<eos>`. A
    /// model that begins in the middle of a document knows less and has a higher loss.
    pub floor_nats: f64,
    /// The same mean for the best model that sees two previous tokens, also across document borders.
    pub trigram_nats: f64,
    /// Mean tokens per document, `<bos>` and `<eos>` included.
    pub mean_document_tokens: f64,
}

impl Language {
    pub fn new() -> Self {
        let grammar = grammar();
        let (floor_nats, trigram_nats) = (grammar.chain.entropy(), grammar.chain.trigram_entropy());
        Self { floor_nats, trigram_nats, mean_document_tokens: grammar.chain.mean_length(), grammar }
    }

    /// Changes whenever the document of an index changes.
    pub fn version(&self) -> u32 {
        grammar::VERSION
    }

    /// All words; a token is an index into them.
    pub fn words(&self) -> &[String] {
        &self.grammar.words
    }

    pub fn bos(&self) -> u32 {
        0
    }

    pub fn eos(&self) -> u32 {
        1
    }

    /// Document `index` of the endless series of `seed`, from `<bos>` to `<eos>`.
    pub fn document(&self, seed: u64, index: u64) -> Vec<u32> {
        let key = [u64::from(grammar::VERSION), seed, index].into_iter().fold(0, random::key);
        let mut uniform = Uniform::new(key);
        let mut document = Vec::new();
        let mut state = self.grammar.chain.start();
        loop {
            let edges = self.grammar.chain.edges(state);
            let mut left = uniform.draw();
            let edge = edges.iter().find(|edge| {
                left -= edge.probability;
                left < 0.0
            });
            // Rounding may leave a remainder of 1e-16 after the last edge.
            let edge = edge.unwrap_or(&edges[edges.len() - 1]);
            document.push(edge.word);
            state = edge.next;
            if state == END {
                return document;
            }
        }
    }

    /// `-ln p` of each token of a document given those before it; infinite from a word on that cannot follow.
    pub fn surprise(&self, document: &[u32]) -> Vec<f64> {
        let mut state: Option<State> = Some(self.grammar.chain.start());
        document
            .iter()
            .map(|word| {
                let edge = state
                    .and_then(|state| self.grammar.chain.edges(state).iter().find(|edge| edge.word == *word));
                state = edge.map(|edge| edge.next);
                edge.map_or(f64::INFINITY, |edge| -edge.probability.ln())
            })
            .collect()
    }
}

impl Default for Language {
    fn default() -> Self {
        Self::new()
    }
}

/// One side of the endless series: training reads the lower half of the indices, held-out text the upper half.
pub(crate) struct Sampled {
    pub language: Arc<Language>,
    pub seed: u64,
    pub held_out: bool,
}

const UPPER_HALF: u64 = 1 << 63;

impl Documents for Sampled {
    fn count(&self) -> Option<u64> {
        None
    }

    fn tokens(&self) -> Option<TokenCount> {
        None
    }

    fn append(&self, index: u64, out: &mut Vec<u32>, _: &mut Spent) -> Result<(), DataError> {
        assert!(index < UPPER_HALF, "an index beyond the half of the series");
        let document =
            self.language.document(self.seed, if self.held_out { index | UPPER_HALF } else { index });
        out.extend(&document[1..document.len() - 1]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn sample(language: &Language, tokens: usize) -> Vec<Vec<u32>> {
        let mut documents = Vec::new();
        let mut total = 0;
        for index in 0.. {
            if total >= tokens {
                break;
            }
            documents.push(language.document(3, index));
            total += documents[documents.len() - 1].len();
        }
        documents
    }

    #[test]
    fn the_language_has_the_documented_shape() {
        let language = Language::new();
        let Language { floor_nats, trigram_nats, mean_document_tokens, .. } = language;
        assert!((100..=400).contains(&language.words().len()), "{} words", language.words().len());
        assert!((1.2..=2.2).contains(&floor_nats), "floor {floor_nats}");
        assert!(trigram_nats >= 1.2 * floor_nats, "trigram {trigram_nats}, floor {floor_nats}");
        assert!((10.0..=40.0).contains(&mean_document_tokens), "{mean_document_tokens} tokens a document");
        assert_eq!(language.words()[language.bos() as usize], "<bos>");
        assert_eq!(language.words()[language.eos() as usize], "<eos>");
    }

    #[test]
    fn the_floor_is_what_samples_cost_under_the_true_source() {
        let language = Language::new();
        let surprises: Vec<f64> =
            sample(&language, 200_000).iter().flat_map(|text| language.surprise(text)).collect();
        let mean = surprises.iter().sum::<f64>() / surprises.len() as f64;
        assert!(
            (mean / language.floor_nats - 1.0).abs() < 0.01,
            "sampled {mean}, computed {}",
            language.floor_nats
        );
    }

    /// Trigram counts underestimate the loss on their own sample and overestimate it on another one: the true value lies
    /// between.
    #[test]
    fn counted_trigrams_enclose_the_computed_ones() {
        let language = Language::new();
        let stream: Vec<u32> = sample(&language, 2_000_000).concat();
        let (seen, unseen) = stream.split_at(stream.len() / 2);
        let mut counts: HashMap<[u32; 2], HashMap<u32, f64>> = HashMap::new();
        for words in seen.windows(3) {
            *counts.entry([words[0], words[1]]).or_default().entry(words[2]).or_default() += 1.0;
        }
        let vocabulary = language.words().len() as f64;
        let cost = |text: &[u32], smoothing: f64| {
            let costs = text.windows(3).map(|words| {
                let context = counts.get(&[words[0], words[1]]);
                let count = context.and_then(|context| context.get(&words[2])).copied().unwrap_or(0.0);
                let total: f64 = context.map_or(0.0, |context| context.values().sum());
                -((count + smoothing) / (total + smoothing * vocabulary)).ln()
            });
            costs.sum::<f64>() / (text.len() - 2) as f64
        };
        let (low, high) = (cost(seen, 0.0), cost(unseen, 0.01));
        let exact = language.trigram_nats;
        assert!(low < exact && exact < high, "{low} < {exact} < {high}");
        assert!(high - low < 0.2, "{low} to {high} encloses too much");
    }

    /// The loss of a reader who knows the language but not where in a document each row begins: the lowest loss of any model on
    /// rows of this length.
    #[test]
    fn rows_cut_in_the_middle_of_a_document_lose_little() {
        const CONTEXT: usize = 128;
        let language = Language::new();
        let chain = &language.grammar.chain;
        let documents = sample(&language, 60_000);
        let surprises: Vec<f64> = documents.iter().flat_map(|document| language.surprise(document)).collect();
        let informed = surprises.iter().sum::<f64>() / surprises.len() as f64;
        let stream: Vec<u32> = documents.concat();
        let visits: HashMap<State, f64> = (0..).zip(chain.visits()).collect();
        // The end of a document is the start of the next one.
        let canonical = |state| if state == END { chain.start() } else { state };
        let (mut nats, mut count) = (0.0, 0);
        for row in stream.windows(CONTEXT + 1).step_by(CONTEXT) {
            let mut belief = visits.clone();
            for (at, word) in row.iter().enumerate() {
                let total: f64 = belief.values().sum();
                let mut next: HashMap<State, f64> = HashMap::new();
                for (state, weight) in belief {
                    if let Some(edge) = chain.edges(state).iter().find(|edge| edge.word == *word) {
                        *next.entry(canonical(edge.next)).or_default() += weight / total * edge.probability;
                    }
                }
                // The first token of a row is given; the others are predicted.
                if at > 0 {
                    nats -= next.values().sum::<f64>().ln();
                    count += 1;
                }
                belief = next;
            }
        }
        let over = nats / f64::from(count) / informed - 1.0;
        assert!((0.0..0.02).contains(&over), "a perfect reader of rows pays {:.2}% more", 100.0 * over);
    }

    #[test]
    fn a_document_depends_on_seed_and_index_only() {
        let language = Language::new();
        let again = Language::new();
        for index in [0, 1, 17, u64::MAX] {
            assert_eq!(language.document(5, index), again.document(5, index));
        }
        assert_ne!(language.document(5, 0), language.document(5, 1));
        assert_ne!(language.document(5, 0), language.document(6, 0));
        let text: Vec<&str> =
            language.document(0, 0).iter().map(|token| language.words()[*token as usize].as_str()).collect();
        assert_eq!(
            text.join(" "),
            "<bos> today at the market the famous porter says that the modest porter hides the scale . <eos>",
            "the language changed: raise its version, then write down the new document"
        );
    }

    #[test]
    fn a_document_that_breaks_a_rule_costs_infinitely_much() {
        let language = Language::new();
        let tokens = |text: &str| -> Vec<u32> {
            let number =
                |word| language.words().iter().position(|known| known == word).expect("a known word") as u32;
            text.split(' ').map(number).collect()
        };
        let cost = |text: &str| language.surprise(&tokens(text)).iter().sum::<f64>();
        assert!(
            cost("<bos> today at the harbour the old captain who the sailors admire repairs a boat . <eos>")
                .is_finite()
        );
        assert!(
            cost("<bos> today at the harbour the captain who the sailors admire repair a boat . <eos>")
                .is_infinite()
        );
        assert!(cost("<bos> yesterday at the harbour the captain repairs a boat . <eos>").is_infinite());
        assert!(cost("<bos> today at the market the captain repairs a boat . <eos>").is_infinite());
        assert!(
            cost("<bos> today at the harbour the captain ( as the sailors say ] repairs a boat . <eos>")
                .is_infinite()
        );
    }
}
