//! Text from a model: a prefill plan reads prompts, a decode plan adds a token to each sequence at a time, both over one
//! cache of keys and values. Both are static: a sequence has a lane of the cache, and a lane without one costs its share
//! of a step and nothing else.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};

use flatout_data::Vocabulary;
use flatout_ir::passes::input_path;
use flatout_ir::{Program, Role};
use flatout_models::config::Attention;
use flatout_models::form::Form;
use flatout_runtime::Session;

use crate::Failure;
use crate::UserError;
use crate::device::Device;
use crate::infer::sampling::{Sampling, draw};
use crate::refuse;
use crate::weights::loaded::Loaded;

/// A model with its cache.
pub struct Generator {
    session: Session,
    vocabulary: Option<Vocabulary>,
    /// The model's vocabulary, which may be larger than the tokeniser's.
    vocab: usize,
    stops: Vec<u32>,
    /// Whether a text begins with `<bos>`, whatever the tokeniser does.
    frames: bool,
    /// Tokens a lane holds at most.
    capacity: usize,
    /// Tokens that are read at once.
    chunk: usize,
    /// Positions of a token.
    position_axes: usize,
    /// Tokens in the cache, by lane.
    seen: Vec<usize>,
    /// Tokens made by the last call.
    pub made: usize,
    pub checkpoint: PathBuf,
    pub step: u64,
}

/// How much is generated at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Sequences at a time.
    pub sequences: usize,
    /// Tokens of a sequence, prompt and all; more than the model was made for are cut to that.
    pub tokens: usize,
}

/// Prompt tokens read at once, at least.
const CHUNK: usize = 64;

impl Generator {
    /// Opens the newest whole checkpoint of a run for one sequence as long as its context.
    pub fn open(dir: &Path, device: &Device) -> Result<Generator, Failure> {
        Generator::new(Loaded::open(dir, &[])?, device, Room { sequences: 1, tokens: usize::MAX })
    }

    pub fn new(mut loaded: Loaded, device: &Device, room: Room) -> Result<Generator, Failure> {
        predicts_tokens(&loaded)?;
        let capacity = room.tokens.clamp(1, loaded.positions);
        let sequences = room.sequences.max(1);
        let chunk = CHUNK.max(2 * sequences).min(sequences * capacity);
        // The rotation's table has a row a position, and a model with learned positions keeps all of its own.
        loaded.config.model.set_context(capacity);
        let program = |role: Role, tokens: usize| {
            let form = Form::Cached { sequences, tokens, capacity, seen: None };
            Program { role, graph: loaded.config.model.build(form) }
        };
        let programs = [program(Role::Prefill, chunk), program(Role::Decode, sequences)];
        let session = loaded.session(device, &programs)?;
        Ok(Generator {
            session,
            vocab: loaded.config.model.vocab().expect("it predicts tokens"),
            vocabulary: loaded.vocabulary,
            stops: loaded.stops,
            frames: loaded.is_run,
            capacity,
            chunk,
            position_axes: loaded.config.model.as_decoder().map_or(1, |decoder| decoder.position_axes()),
            seen: vec![0; sequences],
            made: 0,
            checkpoint: loaded.place,
            step: loaded.step.unwrap_or(0),
        })
    }

    pub fn vocabulary(&self) -> Option<&Vocabulary> {
        self.vocabulary.as_ref()
    }

    /// Forgets everything read so far.
    pub fn clear(&mut self) {
        self.seen.fill(0);
    }

    /// Reads tokens of the first lane after those seen so far and gives the logits of what follows.
    pub fn read(&mut self, tokens: &[u32]) -> Result<Vec<f32>, Failure> {
        Ok(self.read_lanes(&[(0, tokens)])?.remove(0))
    }

    /// Reads tokens of some lanes, each after those its lane has seen, and gives the logits of what follows in each.
    pub fn read_lanes(&mut self, wanted: &[(usize, &[u32])]) -> Result<Vec<Vec<f32>>, Failure> {
        for (lane, tokens) in wanted {
            let (seen, more, capacity) = (self.seen[*lane], tokens.len(), self.capacity);
            if more == 0 || seen + more > capacity {
                return Err(Failure::User(UserError(format!(
                    "{more} tokens after {seen} do not fit a context of {capacity} (or are none at all)"
                ))));
            }
        }
        let mut rests: Vec<&[u32]> = wanted.iter().map(|(_, tokens)| *tokens).collect();
        let mut logits = vec![vec![]; wanted.len()];
        while rests.iter().any(|rest| !rest.is_empty()) {
            let (role, mut room) = match rests.iter().all(|rest| rest.len() <= 1) {
                true => (Role::Decode, self.seen.len()),
                false => (Role::Prefill, self.chunk),
            };
            let mut portions = vec![];
            for (index, rest) in rests.iter_mut().enumerate() {
                let (now, later) = rest.split_at(rest.len().min(room));
                room -= now.len();
                if !now.is_empty() {
                    portions.push((index, wanted[index].0, now));
                }
                *rest = later;
            }
            self.feed(role, &portions)?;
            self.session.run(role)?;
            let done: Vec<_> = portions.iter().filter(|(index, ..)| rests[*index].is_empty()).collect();
            if !done.is_empty() {
                let all = self.session.result(role, "logits")?;
                for (index, lane, _) in done {
                    logits[*index] = all[lane * self.vocab..(lane + 1) * self.vocab].to_vec();
                }
            }
        }
        Ok(logits)
    }

    /// Writes the inputs of a plan: the portions one after another, the rest of its tokens belonging to nobody.
    fn feed(&mut self, role: Role, portions: &[(usize, usize, &[u32])]) -> Result<(), Failure> {
        let room = if role == Role::Decode { self.seen.len() } else { self.chunk };
        let lanes = self.seen.len();
        let mut inputs: BTreeMap<&str, Vec<i32>> = BTreeMap::new();
        for (name, count, fill) in [
            ("tokens", room, 0),
            ("positions", room, 0),
            ("cache_rows", room, -1),
            ("new_start", lanes, 0),
            ("new_len", lanes, 0),
            ("seen_start", lanes, 0),
            ("seen_len", lanes, 0),
            ("last", lanes, -1),
        ] {
            inputs.insert(name, vec![fill; count]);
        }
        let mut set = |name: &str, at: usize, value: usize| {
            inputs.get_mut(name).expect("a named input")[at] = value as i32;
        };
        let mut at = 0;
        for &(_, lane, tokens) in portions {
            let (seen, first) = (self.seen[lane], lane * self.capacity);
            for (i, token) in tokens.iter().enumerate() {
                set("tokens", at + i, *token as usize);
                set("positions", at + i, seen + i);
                set("cache_rows", at + i, first + seen + i);
            }
            set("new_start", lane, at);
            set("new_len", lane, tokens.len());
            set("seen_start", lane, first);
            set("seen_len", lane, seen + tokens.len());
            at += tokens.len();
            set("last", lane, at - 1);
            self.seen[lane] += tokens.len();
        }
        let positions = inputs.get_mut("positions").expect("a named input");
        *positions = positions.repeat(self.position_axes);
        for (name, values) in inputs {
            self.session.write_i32(&input_path(role, name), &values)?;
        }
        Ok(())
    }

    /// Continues a prompt, giving each piece of text as it comes; stops at the end of a document or a full context.
    pub fn generate(
        &mut self,
        prompt: &str,
        how: Sampling,
        mut piece: impl FnMut(&str),
    ) -> Result<String, Failure> {
        let vocabulary = self.words()?.clone();
        let mut tokens = encode(&vocabulary, self.frames, &[prompt.to_string()])?.remove(0);
        let mut shown = vocabulary.decode(&tokens);
        piece(&shown);
        let prompts = [tokens.clone()];
        self.continue_all(&prompts, how, &mut |_, token| {
            tokens.push(token);
            // A character may take several tokens: only what is settled is shown.
            let text = vocabulary.decode(&tokens);
            if let Some(more) = text.strip_prefix(&shown).filter(|more| !more.ends_with('\u{fffd}')) {
                piece(more);
                shown = text;
            }
        })?;
        Ok(vocabulary.decode(&tokens))
    }

    fn words(&self) -> Result<&Vocabulary, Failure> {
        let without = || "the model has no tokenizer.json beside it, so there is no text".to_string();
        self.vocabulary.as_ref().ok_or_else(|| Failure::User(UserError(without())))
    }

    /// Continues every prompt, as many at a time as there are lanes, each by itself: what follows a prompt does not
    /// depend on the others. A lane that is done takes the next prompt. Gives each token as it comes, with its prompt's
    /// number, and in the end the tokens that followed each prompt.
    pub fn continue_all(
        &mut self,
        prompts: &[Vec<u32>],
        how: Sampling,
        token: &mut dyn FnMut(usize, u32),
    ) -> Result<Vec<Vec<u32>>, Failure> {
        self.clear();
        let mut made: Vec<Vec<u32>> = vec![vec![]; prompts.len()];
        let copies = copies(prompts);
        let mut waiting: VecDeque<usize> = (0..prompts.len()).filter(|_| how.max_tokens > 0).collect();
        // By lane: the prompt it works on, and the tokens it has not read yet.
        let mut lanes: Vec<Option<(usize, Vec<u32>)>> = vec![None; self.seen.len()];
        loop {
            for (lane, work) in lanes.iter_mut().enumerate().filter(|(_, work)| work.is_none()) {
                let Some(index) = waiting.pop_front() else { break };
                self.seen[lane] = 0;
                *work = Some((index, prompts[index].clone()));
            }
            let busy =
                lanes.iter().enumerate().filter_map(|(lane, work)| work.as_ref().map(|work| (lane, work)));
            let wanted: Vec<(usize, &[u32])> =
                busy.map(|(lane, (_, fresh))| (lane, fresh.as_slice())).collect();
            if wanted.is_empty() {
                self.made = made.iter().map(Vec::len).sum();
                return Ok(made);
            }
            let logits = self.read_lanes(&wanted)?;
            let numbers: Vec<usize> = wanted.iter().map(|(lane, _)| *lane).collect();
            let size = self.vocabulary.as_ref().map_or(self.vocab, Vocabulary::size);
            for (lane, logits) in numbers.into_iter().zip(logits) {
                let (index, fresh) = lanes[lane].as_mut().expect("a lane that was read works");
                let next = draw(&logits[..size], how, copies[*index], made[*index].len() as u64);
                let ends = self.stops.contains(&next);
                if !ends {
                    made[*index].push(next);
                    token(*index, next);
                }
                let full = self.seen[lane] >= self.capacity || made[*index].len() >= how.max_tokens;
                if ends || full {
                    lanes[lane] = None;
                } else {
                    *fresh = vec![next];
                }
            }
        }
    }
}

/// Whether there is a next token to ask a model for.
fn predicts_tokens(loaded: &Loaded) -> Result<(), UserError> {
    let place = loaded.dir.display();
    let model = &loaded.config.model;
    if model.image_size().is_some() {
        refuse!("{place} reads images and predicts no text");
    }
    if model.classes().is_some() {
        refuse!("{place} predicts classes, not text: flatout eval --predict FILE asks it for some");
    }
    if model.as_decoder().is_some_and(|d| d.attention == Attention::Bidirectional) {
        refuse!("{place} sees both ways (model.attention), so it has no next token to continue a text with");
    }
    Ok(())
}

/// How many equal prompts stand before each: copies of a prompt are continued differently, and a prompt by itself as it
/// is among others.
fn copies(prompts: &[Vec<u32>]) -> Vec<u32> {
    let mut seen: BTreeMap<&[u32], u32> = BTreeMap::new();
    let mut numbers = vec![];
    for prompt in prompts {
        let count = seen.entry(prompt).or_default();
        numbers.push(*count);
        *count += 1;
    }
    numbers
}

/// Tokens of prompts: for a run of ours what a document begins with in training, for others' models what their own
/// tokeniser makes of a prompt.
pub fn encode(vocabulary: &Vocabulary, is_run: bool, prompts: &[String]) -> Result<Vec<Vec<u32>>, Failure> {
    if !is_run {
        return Ok(vocabulary.encode_prompts(prompts)?);
    }
    let framed = |prompt: &String| Ok([vec![vocabulary.bos()], vocabulary.encode(prompt)?].concat());
    prompts.iter().map(framed).collect()
}
