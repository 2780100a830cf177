//! Text from a model: a prefill plan reads prompts, a decode plan adds a token to each sequence at a time, both over one
//! cache of keys and values. Both are static: a sequence has a lane of the cache, and a lane without one costs its share
//! of a step and nothing else.
//!
//! A model that sees reads images with their prompt: the prefill plan has the tower, as large as the images that are given
//! ask for, and an image is read whole in one run of it. Frames are read one by one, because the state behind a frame says how
//! the next is looked at. The decode plan has no tower.
//!
//! ```text
//! pictures   images: files to patches
//!    -> prompt   their places among the tokens of a prompt, and portions of it that cut none
//!    -> tower    the inputs of the prefill plan's tower
//! ```

mod pictures;
mod prompt;
mod tower;

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};

use flatout_data::Vocabulary;
use flatout_ir::passes::input_path;
use flatout_ir::{Program, Role};
use flatout_models::config::Attention;
use flatout_models::form::{Form, Seen};
use flatout_runtime::Session;

pub use pictures::Pictures;
pub use prompt::{Placed, Prompt};

use self::prompt::{Grids, Rest};
use self::tower::{Showing, Tower};
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
    /// The position of the next token, by lane.
    next: Vec<usize>,
    /// Of a model that is shown images.
    tower: Option<Tower>,
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
/// The same where there are images, of which a run of the tower serves all prompts that are read with it.
pub const CHUNK_WITH_IMAGES: usize = 1024;
/// The same where there are frames, of which a run reads one a sequence.
pub const CHUNK_WITH_FRAMES: usize = CHUNK;

impl Generator {
    /// Opens the newest whole checkpoint of a run for one sequence as long as its context.
    pub fn open(dir: &Path, device: &Device) -> Result<Generator, Failure> {
        Generator::new(Loaded::open(dir, &[])?, device, Room { sequences: 1, tokens: usize::MAX })
    }

    pub fn new(loaded: Loaded, device: &Device, room: Room) -> Result<Generator, Failure> {
        Generator::seeing(loaded, device, room, Pictures::default(), CHUNK)
    }

    /// Opens a model that is shown pictures. Prompts are read `chunk` tokens at a time, or as many as the largest picture asks
    /// for with the text around it.
    pub fn seeing(
        mut loaded: Loaded,
        device: &Device,
        room: Room,
        pictures: Pictures,
        chunk: usize,
    ) -> Result<Generator, Failure> {
        predicts_tokens(&loaded)?;
        let capacity = room.tokens.clamp(1, loaded.positions);
        let sequences = room.sequences.max(1);
        let grids = &pictures.grids;
        let largest = (0..grids.all.len()).map(|picture| grids.tokens(picture) + CHUNK).max().unwrap_or(0);
        let chunk = chunk.max(2 * sequences).max(largest).min(sequences * capacity);
        let longest_side = grids.all.iter().map(|grid| grid.rows.max(grid.columns)).max().unwrap_or(0);
        // The rotation's table has a row a position, of a token or of a patch, and a model with learned positions keeps all
        // of its own.
        loaded.config.model.set_context(capacity.max(longest_side));
        let decoder = loaded.config.model.as_decoder();
        let position_axes = decoder.map_or(1, |decoder| decoder.position_axes());
        let vision = loaded.config.model.vision().filter(|_| !pictures.grids.all.is_empty());
        let tower = vision.map(|vision| Tower::new(vision, pictures, chunk, sequences));
        let program = |role: Role, tokens: usize, seen: Option<Seen>| {
            let form = Form::Cached { sequences, tokens, capacity, seen };
            Program { role, graph: loaded.config.model.build(form) }
        };
        let seen = tower.as_ref().map(Tower::seen);
        let programs = [program(Role::Prefill, chunk, seen), program(Role::Decode, sequences, None)];
        let session = loaded.session(device, &programs)?;
        Ok(Generator {
            session,
            vocab: loaded.config.model.vocab().expect("it predicts tokens"),
            vocabulary: loaded.vocabulary,
            stops: loaded.stops,
            frames: loaded.is_run,
            capacity,
            chunk,
            position_axes,
            seen: vec![0; sequences],
            next: vec![0; sequences],
            tower,
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
        self.next.fill(0);
    }

    /// Reads tokens of the first lane after those seen so far and gives the logits of what follows.
    pub fn read(&mut self, tokens: &[u32]) -> Result<Vec<f32>, Failure> {
        Ok(self.read_lanes(&[(0, tokens)])?.remove(0))
    }

    /// Reads tokens of some lanes, each after those its lane has seen, and gives the logits of what follows in each.
    pub fn read_lanes(&mut self, wanted: &[(usize, &[u32])]) -> Result<Vec<Vec<f32>>, Failure> {
        let rests: Vec<(usize, Rest<'_>)> =
            wanted.iter().map(|(lane, tokens)| (*lane, Rest::text(tokens))).collect();
        self.read_rests(&rests)
    }

    fn read_rests(&mut self, wanted: &[(usize, Rest<'_>)]) -> Result<Vec<Vec<f32>>, Failure> {
        for (lane, rest) in wanted {
            let (seen, more, capacity) = (self.seen[*lane], rest.tokens.len(), self.capacity);
            if more == 0 || seen + more > capacity {
                return Err(Failure::User(UserError(format!(
                    "{more} tokens after {seen} do not fit a context of {capacity} (or are none at all)"
                ))));
            }
        }
        let mut rests: Vec<Rest<'_>> = wanted.iter().map(|(_, rest)| *rest).collect();
        let mut logits = vec![vec![]; wanted.len()];
        let none = Grids::default();
        while rests.iter().any(|rest| !rest.tokens.is_empty()) {
            let is_single = |rest: &Rest<'_>| rest.tokens.len() <= 1 && !rest.has_images();
            let (role, mut room) = match rests.iter().all(is_single) {
                true => (Role::Decode, self.seen.len()),
                false => (Role::Prefill, self.chunk),
            };
            let (mut portions, mut showing) = (vec![], Showing::default());
            for (index, rest) in rests.iter_mut().enumerate() {
                let count = match &self.tower {
                    None => rest.fitting(room, &none, |_| false),
                    Some(tower) => {
                        let (grids, lane) = (&tower.pictures.grids, wanted[index].0);
                        let read = self.seen[lane];
                        rest.fitting(room, grids, |placed| tower.take(&mut showing, placed, lane, read))
                    }
                };
                let (now, later) = rest.split_at(count);
                room -= count;
                if count > 0 {
                    portions.push((index, wanted[index].0, now));
                }
                *rest = later;
            }
            self.feed(role, &portions, showing)?;
            self.session.run(role)?;
            let done: Vec<_> =
                portions.iter().filter(|(index, ..)| rests[*index].tokens.is_empty()).collect();
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
    fn feed(
        &mut self,
        role: Role,
        portions: &[(usize, usize, Rest<'_>)],
        showing: Showing,
    ) -> Result<(), Failure> {
        let room = if role == Role::Decode { self.seen.len() } else { self.chunk };
        let lanes = self.seen.len();
        let mut inputs: BTreeMap<&str, Vec<i32>> = BTreeMap::new();
        for (name, count, fill) in [
            ("tokens", room, 0),
            ("positions", self.position_axes * room, 0),
            ("cache_rows", room, -1),
            ("new_start", lanes, 0),
            ("new_len", lanes, 0),
            ("seen_start", lanes, 0),
            ("seen_len", lanes, 0),
            ("last", lanes, -1),
        ] {
            inputs.insert(name, vec![fill; count]);
        }
        let tower = self.tower.as_ref().filter(|_| role == Role::Prefill);
        if tower.is_some() {
            inputs.insert("seen", vec![-1; room]);
        }
        let mut set = |name: &str, at: usize, value: i32| {
            inputs.get_mut(name).expect("a named input")[at] = value;
        };
        let none = Grids::default();
        let grids = tower.map_or(&none, |tower| &tower.pictures.grids);
        let mut at = 0;
        for &(_, lane, portion) in portions {
            let (seen, first, count) = (self.seen[lane], lane * self.capacity, portion.tokens.len());
            let (positions, next) = portion.positions(self.next[lane], grids);
            for (i, (token, position)) in portion.tokens.iter().zip(positions).enumerate() {
                set("tokens", at + i, *token as i32);
                for (axis, position) in position.into_iter().take(self.position_axes).enumerate() {
                    set("positions", axis * room + at + i, position);
                }
                set("cache_rows", at + i, (first + seen + i) as i32);
            }
            for (tower, placed) in
                tower.into_iter().flat_map(|tower| portion.images().map(move |p| (tower, p)))
            {
                let row = tower.row(&showing, placed.picture, lane);
                for (i, block) in grids.blocks(placed.picture).enumerate() {
                    // No row of the embedding stands there, but one of the features.
                    set("tokens", at + placed.at + i, -1);
                    set("seen", at + placed.at + i, (row + block) as i32);
                }
            }
            set("new_start", lane, at as i32);
            set("new_len", lane, count as i32);
            set("seen_start", lane, first as i32);
            set("seen_len", lane, (seen + count) as i32);
            at += count;
            set("last", lane, at as i32 - 1);
            self.seen[lane] += count;
            self.next[lane] = next;
        }
        for (name, values) in inputs {
            self.session.write_i32(&input_path(role, name), &values)?;
        }
        if let Some(tower) = self.tower.as_mut().filter(|_| role == Role::Prefill) {
            tower.feed(&mut self.session, role, showing)?;
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

    /// Continues every prompt, as [`Generator::continue_prompts`] does, of texts alone.
    pub fn continue_all(
        &mut self,
        prompts: &[Vec<u32>],
        how: Sampling,
        token: &mut dyn FnMut(usize, u32),
    ) -> Result<Vec<Vec<u32>>, Failure> {
        let prompts: Vec<Prompt> = prompts.iter().map(|tokens| tokens.clone().into()).collect();
        self.continue_prompts(&prompts, how, token)
    }

    /// Continues every prompt, as many at a time as there are lanes, each by itself: what follows a prompt does not
    /// depend on the others. A lane that is done takes the next prompt. Gives each token as it comes, with its prompt's
    /// number, and in the end the tokens that followed each prompt.
    pub fn continue_prompts(
        &mut self,
        prompts: &[Prompt],
        how: Sampling,
        token: &mut dyn FnMut(usize, u32),
    ) -> Result<Vec<Vec<u32>>, Failure> {
        self.clear();
        let mut made: Vec<Vec<u32>> = vec![vec![]; prompts.len()];
        let copies = copies(prompts);
        let mut waiting: VecDeque<usize> = (0..prompts.len()).filter(|_| how.max_tokens > 0).collect();
        // By lane: the prompt it works on, and the tokens it has not read yet.
        let mut lanes: Vec<Option<(usize, Prompt)>> = vec![None; self.seen.len()];
        loop {
            for (lane, work) in lanes.iter_mut().enumerate().filter(|(_, work)| work.is_none()) {
                let Some(index) = waiting.pop_front() else { break };
                (self.seen[lane], self.next[lane]) = (0, 0);
                *work = Some((index, prompts[index].clone()));
            }
            let busy =
                lanes.iter().enumerate().filter_map(|(lane, work)| work.as_ref().map(|work| (lane, work)));
            let wanted: Vec<(usize, Rest<'_>)> =
                busy.map(|(lane, (_, fresh))| (lane, Rest::of(fresh))).collect();
            if wanted.is_empty() {
                self.made = made.iter().map(Vec::len).sum();
                return Ok(made);
            }
            let logits = self.read_rests(&wanted)?;
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
                    *fresh = vec![next].into();
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
fn copies(prompts: &[Prompt]) -> Vec<u32> {
    let mut seen: BTreeMap<&Prompt, u32> = BTreeMap::new();
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
