//! A finite-state source of tokens whose state follows from the history, with exactly computed entropies.
//!
//! A state lists the words that may come next, each with its probability and its next state. A word leads to one state only, so
//! a reader of the document from its beginning knows the state. The entropy rate is therefore the mean entropy of the next
//! word, weighted by the visits of each state: neither sampled nor bounded, but exact.
//!
//! A document is one walk from the start to the end, and the stream is one document after another. A state is created after the
//! states it leads to, so one sweep in descending order of state numbers gives the visits.

use std::collections::HashMap;

pub(crate) type State = u32;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Edge {
    pub word: u32,
    pub probability: f64,
    pub next: State,
}

#[derive(Debug)]
pub(crate) struct Chain {
    /// State 0 is the end of a document: it has no edges of its own, and the start follows it.
    states: Vec<Vec<Edge>>,
    start: State,
}

pub(crate) const END: State = 0;

impl Chain {
    pub(crate) fn new() -> Self {
        Self { states: vec![Vec::new()], start: END }
    }

    /// Adds a state. Panics where a word is ambiguous, an edge does not lead to an earlier state, or the probabilities do not
    /// sum to one: each would make the entropies wrong.
    pub(crate) fn push(&mut self, edges: Vec<Edge>) -> State {
        let state = self.states.len() as State;
        let total: f64 = edges.iter().map(|edge| edge.probability).sum();
        assert!((total - 1.0).abs() < 1e-12, "the probabilities of state {state} sum to {total}");
        let mut words: Vec<u32> = edges.iter().map(|edge| edge.word).collect();
        words.sort_unstable();
        assert!(words.windows(2).all(|pair| pair[0] != pair[1]), "state {state} lists a word twice");
        assert!(edges.iter().all(|edge| edge.next < state), "state {state} leads to a state not made yet");
        self.states.push(edges);
        state
    }

    pub(crate) fn begin_at(&mut self, start: State) {
        self.start = start;
    }

    pub(crate) fn start(&self) -> State {
        self.start
    }

    /// Every edge of every state.
    #[cfg(test)]
    pub(crate) fn all_edges(&self) -> impl Iterator<Item = &Edge> {
        self.states.iter().flatten()
    }

    pub(crate) fn edges(&self, state: State) -> &[Edge] {
        let state = if state == END { self.start } else { state };
        &self.states[state as usize]
    }

    /// Mean number of visits of each state per document.
    pub(crate) fn visits(&self) -> Vec<f64> {
        let mut visits = vec![0.0; self.states.len()];
        visits[self.start as usize] = 1.0;
        for state in (1..self.states.len()).rev() {
            for edge in &self.states[state] {
                visits[edge.next as usize] += visits[state] * edge.probability;
            }
        }
        // The edges of the start leave the end state, and they have been counted.
        visits[END as usize] = 0.0;
        visits
    }

    /// Mean number of words per document.
    pub(crate) fn mean_length(&self) -> f64 {
        self.visits().iter().sum()
    }

    /// Entropy of the next word given everything before it, in nats.
    pub(crate) fn entropy(&self) -> f64 {
        let visits = self.visits();
        let entropies = self.states.iter().map(|edges| entropy(edges.iter().map(|edge| edge.probability)));
        visits.iter().zip(entropies).map(|(visits, entropy)| visits * entropy).sum::<f64>()
            / visits.iter().sum::<f64>()
    }

    /// Entropy of the next word given the previous two, in nats: the lowest loss of any model that sees only those.
    pub(crate) fn trigram_entropy(&self) -> f64 {
        // For each pair of words, the states it may have led to and their frequencies.
        let mut contexts: HashMap<(u32, u32), HashMap<State, f64>> = HashMap::new();
        for (state, visits) in self.visits().into_iter().enumerate().filter(|(_, visits)| *visits > 0.0) {
            for first in &self.states[state] {
                for second in self.edges(first.next) {
                    let weight = visits * first.probability * second.probability;
                    *contexts
                        .entry((first.word, second.word))
                        .or_default()
                        .entry(second.next)
                        .or_default() += weight;
                }
            }
        }
        // Sums in a fixed order, so that the figure is the same to the last bit in every process.
        let mut contexts: Vec<_> = contexts.into_iter().collect();
        contexts.sort_unstable_by_key(|(words, _)| *words);
        let (mut nats, mut total) = (0.0, 0.0);
        let mut mixture: HashMap<u32, f64> = HashMap::new();
        for (_, states) in contexts {
            let mut states: Vec<(State, f64)> = states.into_iter().collect();
            states.sort_unstable_by_key(|(state, _)| *state);
            let weight: f64 = states.iter().map(|(_, weight)| weight).sum();
            mixture.clear();
            for (state, share) in states {
                for edge in self.edges(state) {
                    *mixture.entry(edge.word).or_default() += share / weight * edge.probability;
                }
            }
            let mut words: Vec<_> = mixture.drain().collect();
            words.sort_unstable_by_key(|(word, _)| *word);
            nats += weight * entropy(words.into_iter().map(|(_, probability)| probability));
            total += weight;
        }
        nats / total
    }
}

fn entropy(probabilities: impl Iterator<Item = f64>) -> f64 {
    probabilities
        .filter(|probability| *probability > 0.0)
        .map(|probability| -probability * probability.ln())
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edge(word: u32, probability: f64, next: State) -> Edge {
        Edge { word, probability, next }
    }

    /// Documents are `0 1 5 3` and `0 2 5 4`: the fourth word repeats the choice of the second.
    fn echo(between: usize) -> Chain {
        let mut chain = Chain::new();
        let mut third = chain.push(vec![edge(3, 1.0, END)]);
        let mut fourth = chain.push(vec![edge(4, 1.0, END)]);
        for _ in 0..between {
            third = chain.push(vec![edge(5, 1.0, third)]);
            fourth = chain.push(vec![edge(5, 1.0, fourth)]);
        }
        let choice = chain.push(vec![edge(1, 0.5, third), edge(2, 0.5, fourth)]);
        let start = chain.push(vec![edge(0, 1.0, choice)]);
        chain.begin_at(start);
        chain
    }

    #[test]
    fn one_coin_a_document_is_one_bit_a_document() {
        let chain = echo(1);
        assert_eq!(chain.mean_length(), 4.0);
        assert!((chain.entropy() - 2f64.ln() / 4.0).abs() < 1e-15);
        // The coin is within two words, so a trigram model sees it.
        assert!((chain.trigram_entropy() - chain.entropy()).abs() < 1e-15);
    }

    #[test]
    fn a_trigram_model_pays_for_longer_dependencies() {
        let chain = echo(2);
        assert!((chain.entropy() - 2f64.ln() / 5.0).abs() < 1e-15);
        assert!((chain.trigram_entropy() - 2.0 * 2f64.ln() / 5.0).abs() < 1e-15);
    }
}
