//! The words and phrases of the synthetic language, written down as a [`Chain`].
//!
//! A document reads like this:
//! `<bos> yesterday at the harbour the old captain who the sailors admired repaired a wooden boat . <eos>`
//!
//! Dependencies over a distance, which a trigram model cannot carry:
//! - the place, announced once, decides which people and things may be named until `<eos>`;
//! - the day, announced once, decides the tense of every verb;
//! - the subject's number decides the form of its verbs, across a relative clause, an aside or a noun of the
//!   other number, and which pronoun may refer to it in the next sentence;
//! - an aside closes with the mark that opened it.
//!
//! Place, day and number also determine words within three tokens (`harbour the captain`, `then they sold`, `sailors hide`), so
//! that a model finds near examples of each rule it has to learn over a distance.
//!
//! Phrases are built from their end: each function takes the state that follows and returns the state to enter. Where the
//! number matters later, functions take one following state per number.
//!
//! Every change here changes every document and the floor: raise [`VERSION`] with it.

use std::collections::HashMap;

use super::chain::{Chain, END, Edge, State};

pub(crate) const VERSION: u32 = 1;
pub(crate) const BOS: &str = "<bos>";
pub(crate) const EOS: &str = "<eos>";

/// A document has one sentence (45%), two (25%) or three (30%).
const SENTENCES: usize = 3;
const ONE_MORE_SENTENCE: f64 = 0.55;

struct Place {
    name: &'static str,
    people: [&'static str; 6],
    things: [&'static str; 6],
}

#[rustfmt::skip]
const PLACES: [Place; 6] = [
    Place { name: "harbour", people: ["sailor", "captain", "diver", "smuggler", "pilot", "lookout"],
        things: ["boat", "net", "compass", "lantern", "rope", "barrel"] },
    Place { name: "market", people: ["baker", "merchant", "grocer", "porter", "butcher", "beggar"],
        things: ["basket", "loaf", "cart", "melon", "cheese", "scale"] },
    Place { name: "castle", people: ["knight", "king", "jester", "servant", "queen", "wizard"],
        things: ["crown", "sword", "banner", "shield", "throne", "goblet"] },
    Place { name: "theatre", people: ["actor", "singer", "dancer", "poet", "violinist", "clown"],
        things: ["mask", "mirror", "costume", "piano", "curtain", "drum"] },
    Place { name: "station", people: ["driver", "traveller", "conductor", "engineer", "clerk", "guide"],
        things: ["train", "ticket", "suitcase", "timetable", "signal", "whistle"] },
    Place { name: "farm", people: ["farmer", "shepherd", "miller", "rider", "beekeeper", "milkmaid"],
        things: ["plough", "fence", "bucket", "tractor", "saddle", "beehive"] },
];

/// A verb: its singular, plural and past form.
type Verb = [&'static str; 3];

#[rustfmt::skip]
const DEEDS: [Verb; 12] = [
    ["repairs", "repair", "repaired"], ["paints", "paint", "painted"], ["carries", "carry", "carried"],
    ["finds", "find", "found"], ["cleans", "clean", "cleaned"], ["hides", "hide", "hid"],
    ["sells", "sell", "sold"], ["buys", "buy", "bought"], ["brings", "bring", "brought"],
    ["loses", "lose", "lost"], ["keeps", "keep", "kept"], ["borrows", "borrow", "borrowed"],
];

#[rustfmt::skip]
const FEELINGS: [Verb; 4] = [
    ["admires", "admire", "admired"], ["trusts", "trust", "trusted"], ["helps", "help", "helped"],
    ["follows", "follow", "followed"],
];

const SAYINGS: [Verb; 3] =
    [["says", "say", "said"], ["hopes", "hope", "hoped"], ["claims", "claim", "claimed"]];

const PRESENT_DAYS: [&str; 2] = ["today", "nowadays"];
const PAST_DAYS: [&str; 2] = ["yesterday", "once"];

#[rustfmt::skip]
const OF_PEOPLE: [&str; 16] = [
    "old", "young", "tired", "clever", "proud", "brave", "quiet", "cheerful",
    "lonely", "polite", "sleepy", "famous", "modest", "gentle", "hungry", "curious",
];

#[rustfmt::skip]
const OF_THINGS: [&str; 16] = [
    "new", "heavy", "broken", "wooden", "small", "strange", "bright", "dusty",
    "golden", "tiny", "precious", "rare", "plain", "shiny", "crooked", "striped",
];

const SINGULAR_PRONOUNS: [&str; 2] = ["she", "he"];
const MARKS: [(&str, &str); 2] = [("(", ")"), ("[", "]")];

const SMALL_WORDS: [&str; 15] =
    [BOS, EOS, "at", "the", "a", ".", "who", "near", "and", "with", "that", "as", "then", "often", "they"];

/// Values for singular and plural, in this order.
type ByNumber<T> = [T; 2];
const NUMBERS: ByNumber<usize> = [0, 1];

/// A transition from a state: one of `words`, the most frequent first, then `next`.
#[derive(Clone)]
struct Branch {
    weight: f64,
    words: Vec<String>,
    next: State,
}

/// The place and tense of a document.
struct Setting {
    place: &'static Place,
    past: bool,
}

pub(crate) struct Grammar {
    pub chain: Chain,
    /// The word of each number in the chain.
    pub words: Vec<String>,
    numbers: HashMap<String, u32>,
}

/// The whole language.
pub(crate) fn grammar() -> Grammar {
    let words = words();
    let numbers = words.iter().enumerate().map(|(number, word)| (word.clone(), number as u32)).collect();
    let mut grammar = Grammar { chain: Chain::new(), words, numbers };
    let days = [(false, PRESENT_DAYS), (true, PAST_DAYS)].map(|(past, days)| {
        let weights = zipf(PLACES.len(), 0.3);
        let places = PLACES.iter().zip(weights).map(|(place, weight)| Branch {
            weight,
            words: vec![place.name.to_string()],
            next: grammar.story(&Setting { place, past }),
        });
        let places = places.collect();
        let name = grammar.state(places);
        let the = grammar.word("the", name);
        branch(0.5, &days, grammar.word("at", the))
    });
    let day = grammar.state(days.to_vec());
    let start = grammar.word(BOS, day);
    grammar.chain.begin_at(start);
    grammar
}

impl Grammar {
    /// `SENTENCE . then SENTENCE . <eos>`, with one to three sentences.
    fn story(&mut self, setting: &Setting) -> State {
        let end = self.word(EOS, END);
        let link = if setting.past { "then" } else { "often" };
        let mut after: ByNumber<State> = [end, end];
        for _ in 1..SENTENCES {
            let clauses = NUMBERS.map(|number| self.verb_phrase(setting, number, after[number]));
            let noun = self.subject(setting, &clauses);
            after = NUMBERS.map(|number| {
                let pronouns: &[&str] = [&SINGULAR_PRONOUNS[..], &["they"]][number];
                let resumed = self.state(clauses[number].clone());
                let sentence = self.state(vec![branch(0.4, pronouns, resumed), branch(0.6, &["the"], noun)]);
                let stop = branch(1.0 - ONE_MORE_SENTENCE, &[EOS], END);
                self.state(vec![branch(ONE_MORE_SENTENCE, &[link], sentence), stop])
            });
        }
        let clauses = NUMBERS.map(|number| self.verb_phrase(setting, number, after[number]));
        let noun = self.subject(setting, &clauses);
        self.word("the", noun)
    }

    /// The words that may follow the `the` of a subject: `(old) captain`, perhaps with a clause before the verb.
    fn subject(&mut self, setting: &Setting, clauses: &ByNumber<Vec<Branch>>) -> State {
        let modified = NUMBERS.map(|number| {
            let verb = self.state(clauses[number].clone());
            let mut branches = share(0.48, &clauses[number]);
            branches.push(branch(0.26, &["who"], self.relative_clause(setting, number, verb)));
            for (weight, (open, close)) in [0.09, 0.06].into_iter().zip(MARKS) {
                branches.push(branch(weight, &[open], self.aside(setting, close, verb)));
            }
            branches.push(branch(0.11, &["near"], self.thing(setting, verb)));
            self.state(branches)
        });
        self.described(&OF_PEOPLE, &people(setting, modified))
    }

    /// `the sailors admire` or `admires the sailor`, after `who`.
    fn relative_clause(&mut self, setting: &Setting, number: usize, next: State) -> State {
        let feeling = NUMBERS.map(|inner| self.one_of(&forms(&FEELINGS, inner, setting.past), next));
        let inner = self.state(people(setting, feeling));
        let object = self.state(people(setting, [next, next]));
        let object = self.word("the", object);
        let feelings = forms(&FEELINGS, number, setting.past);
        self.state(vec![branch(0.6, &["the"], inner), branch(0.4, &feelings, object)])
    }

    /// `as the sailors claim )`, after the opening mark.
    fn aside(&mut self, setting: &Setting, close: &str, next: State) -> State {
        let close = self.word(close, next);
        let saying = NUMBERS.map(|inner| self.one_of(&forms(&SAYINGS, inner, setting.past), close));
        let inner = self.state(people(setting, saying));
        let the = self.word("the", inner);
        self.word("as", the)
    }

    /// `repairs a wooden boat and paints the net .` or `says that the sailor hides a rope .`
    fn verb_phrase(&mut self, setting: &Setting, number: usize, after: State) -> Vec<Branch> {
        let stop = self.word(".", after);
        let companion = self.state(people(setting, [stop, stop]));
        let companion = self.word("the", companion);
        let second = self.thing(setting, stop);
        let second = self.one_of(&forms(&DEEDS, number, setting.past), second);
        let rest = vec![
            branch(0.56, &["."], after),
            branch(0.26, &["and"], second),
            branch(0.18, &["with"], companion),
        ];
        let rest = self.state(rest);
        let object = self.thing(setting, rest);

        let told_object = self.thing(setting, stop);
        let told = NUMBERS.map(|inner| self.one_of(&forms(&DEEDS, inner, setting.past), told_object));
        let told = self.described(&OF_PEOPLE, &people(setting, told));
        let told = self.word("the", told);
        let that = self.word("that", told);

        let sayings = forms(&SAYINGS, number, setting.past);
        vec![branch(0.8, &forms(&DEEDS, number, setting.past), object), branch(0.2, &sayings, that)]
    }

    /// `the (wooden) boat` or `a (wooden) boat`.
    fn thing(&mut self, setting: &Setting, next: State) -> State {
        let noun = self.described(&OF_THINGS, &[branch(1.0, &setting.place.things, next)]);
        self.one_of(&["the", "a"], noun)
    }

    /// One of the nouns, or an adjective first.
    fn described(&mut self, adjectives: &[&str], nouns: &[Branch]) -> State {
        let noun = self.state(nouns.to_vec());
        let mut branches = share(0.5, nouns);
        branches.push(branch(0.5, adjectives, noun));
        self.state(branches)
    }

    fn one_of<W: AsRef<str>>(&mut self, words: &[W], next: State) -> State {
        self.state(vec![branch(1.0, words, next)])
    }

    fn word(&mut self, word: &str, next: State) -> State {
        self.one_of(&[word], next)
    }

    fn state(&mut self, branches: Vec<Branch>) -> State {
        let mut edges = Vec::new();
        for Branch { weight, words, next } in branches {
            for (word, share) in words.iter().zip(zipf(words.len(), 0.5)) {
                edges.push(Edge { word: self.numbers[word], probability: weight * share, next });
            }
        }
        self.chain.push(edges)
    }
}

fn branch<W: AsRef<str>>(weight: f64, words: &[W], next: State) -> Branch {
    Branch { weight, words: words.iter().map(|word| word.as_ref().to_string()).collect(), next }
}

/// The same branches with `weight` times their probability.
fn share(weight: f64, branches: &[Branch]) -> Vec<Branch> {
    branches.iter().map(|branch| Branch { weight: weight * branch.weight, ..branch.clone() }).collect()
}

/// The people of a place, singular (slightly more often) or plural.
fn people(setting: &Setting, next: ByNumber<State>) -> Vec<Branch> {
    let plural: Vec<String> = setting.place.people.iter().map(|person| format!("{person}s")).collect();
    vec![branch(0.55, &setting.place.people, next[0]), branch(0.45, &plural, next[1])]
}

fn forms(verbs: &[Verb], number: usize, past: bool) -> Vec<&'static str> {
    verbs.iter().map(|verb| verb[if past { 2 } else { number }]).collect()
}

/// Probabilities that fall with the rank: 1, 2^-s, 3^-s and so on, normalised.
fn zipf(count: usize, exponent: f64) -> Vec<f64> {
    let weights: Vec<f64> = (1..=count).map(|rank| (rank as f64).powf(-exponent)).collect();
    let total: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / total).collect()
}

/// Every word of the language once; `<bos>` and `<eos>` have the numbers 0 and 1.
fn words() -> Vec<String> {
    let mut words: Vec<String> = SMALL_WORDS.iter().map(|word| word.to_string()).collect();
    words.extend(MARKS.iter().flat_map(|(open, close)| [open.to_string(), close.to_string()]));
    for list in [&PRESENT_DAYS[..], &PAST_DAYS, &SINGULAR_PRONOUNS, &OF_PEOPLE, &OF_THINGS] {
        words.extend(list.iter().map(|word| word.to_string()));
    }
    words.extend(DEEDS.iter().chain(&FEELINGS).chain(&SAYINGS).flatten().map(|form| form.to_string()));
    for place in &PLACES {
        words.push(place.name.to_string());
        words.extend(place.people.iter().flat_map(|person| [person.to_string(), format!("{person}s")]));
        words.extend(place.things.iter().map(|thing| thing.to_string()));
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_listed_once_and_can_occur() {
        let grammar = grammar();
        assert_eq!(grammar.numbers.len(), grammar.words.len(), "a word is listed twice");
        let mut said = vec![false; grammar.words.len()];
        grammar.chain.all_edges().for_each(|edge| said[edge.word as usize] = true);
        let silent: Vec<_> = grammar.words.iter().zip(said).filter(|(_, said)| !said).collect();
        assert!(silent.is_empty(), "never said: {silent:?}");
    }
}
