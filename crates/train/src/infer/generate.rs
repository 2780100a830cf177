//! Text from a model: a prefill plan reads prompts, a decode plan adds a token to each sequence at a time, both over one
//! cache of keys and values. Both are static: a sequence has a lane of the cache, and a lane without one costs its share
//! of a step and nothing else.
//!
//! Requests come at any time. Each step reads one more token of everyone who has begun, and as much as a run has room for of the
//! prompts that are new. A request has a lane to itself and its own random numbers, and its tokens go through the same plans
//! whoever else is there, so what follows a prompt does not depend on the others.
//!
//! A model that sees reads images with their prompt: the prefill plan has the tower, as large as the images that are given
//! ask for, and an image is read whole in one run of it. Frames are read one by one, because the state behind a frame says how
//! the next is looked at. The decode plan has no tower.
//!
//! ```text
//! pictures   images: files to patches
//!    -> prompt   their places among the tokens of a prompt, and portions of it that cut none
//!    -> tower    the inputs of the prefill plan's tower
//! request    a prompt to be continued, and the news of it
//!    -> reader   the plans over the cache: tokens in, logits out
//!    -> lanes    requests in the lanes of the cache, step by step
//!    -> text     text out of tokens as they come, up to a string that ends it
//! ```

mod lanes;
mod pictures;
mod prompt;
mod reader;
mod request;
mod text;
mod tower;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flatout_data::Vocabulary;
use flatout_ir::{Program, Role};
use flatout_models::config::Attention;
use flatout_models::form::{Form, ImageExtents};

pub use pictures::{Picture, PictureReader, Pictures};
pub use prompt::{Placed, Prompt};
pub use request::{Finish, Progress, Request, Told};
pub use text::GrowingText;

use self::lanes::{Lanes, Turns};
use self::prompt::Rest;
use self::reader::Reader;
use self::tower::Tower;
use crate::Failure;
use crate::UserError;
use crate::device::Device;
use crate::infer::sampling::Sampling;
use crate::refuse;
use crate::weights::loaded::Loaded;

/// A model with its cache, and the requests it works on.
pub struct Generator {
    reader: Reader,
    lanes: Lanes,
    vocabulary: Option<Arc<Vocabulary>>,
    stops: Vec<u32>,
    /// Whether a text begins with `<bos>`, whatever the tokeniser does.
    frames: bool,
    /// The tokens of prompts can be scored.
    scores: bool,
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

/// The static sizes of the plans.
struct Extents {
    sequences: usize,
    capacity: usize,
    chunk: usize,
    /// Of an image, in patches.
    longest_side: usize,
}

impl Extents {
    /// For prompts that are read at least `chunk` tokens at a time, or the largest image with the text around it.
    fn new(
        loaded: &Loaded,
        room: Room,
        chunk: usize,
        largest: Option<usize>,
        longest_side: usize,
    ) -> Extents {
        let (capacity, sequences) = (room.tokens.clamp(1, loaded.positions), room.sequences.max(1));
        let with_image = largest.map_or(0, |tokens| tokens + CHUNK);
        let chunk = chunk.max(2 * sequences).max(with_image).min(sequences * capacity);
        Extents { sequences, capacity, chunk, longest_side }
    }
}

/// Prompt tokens read at once, at least.
const CHUNK: usize = 64;
/// The same where there are images, of which a run of the tower serves all prompts that are read with it.
pub const CHUNK_WITH_IMAGES: usize = 1024;
/// The same where there are frames, of which a run reads one a sequence.
pub const CHUNK_WITH_FRAMES: usize = CHUNK;
/// The same where requests come at any time, on a GPU.
const CHUNK_OF_SERVER: usize = 512;

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
        loaded: Loaded,
        device: &Device,
        room: Room,
        pictures: Pictures,
        chunk: usize,
    ) -> Result<Generator, Failure> {
        predicts_tokens(&loaded)?;
        let grids = &pictures.grids;
        let largest = (0..grids.all.len()).map(|picture| grids.tokens(picture)).max();
        let longest_side = grids.all.iter().map(|grid| grid.rows.max(grid.columns)).max().unwrap_or(0);
        let extents = Extents::new(&loaded, room, chunk, largest, longest_side);
        let vision = loaded.config.model.vision().filter(|_| largest.is_some());
        let tower = vision.map(|vision| Tower::new(vision, pictures, extents.chunk, extents.sequences));
        Generator::with(loaded, device, extents, tower, Turns::Together)
    }

    /// Opens a model for requests that come at any time, whose prompts may be scored, or have images of a reader where there is
    /// one.
    pub fn serving(
        loaded: Loaded,
        device: &Device,
        room: Room,
        images: Option<&PictureReader>,
    ) -> Result<Generator, Failure> {
        predicts_tokens(&loaded)?;
        let chunk = if matches!(device, Device::Cpu { .. }) { CHUNK } else { CHUNK_OF_SERVER };
        let largest = images.map(PictureReader::most_tokens);
        let vision = loaded.config.model.as_qwen3_vl();
        // The longest image is one block high.
        let longest_side = vision.zip(largest).map_or(0, |(vision, tokens)| vision.merge * tokens);
        let extents = Extents::new(&loaded, room, chunk, largest, longest_side);
        let tower = vision.zip(images).map(|(vision, images)| Tower::later(vision, images, extents.chunk));
        Generator::with(loaded, device, extents, tower, Turns::Own)
    }

    fn with(
        mut loaded: Loaded,
        device: &Device,
        extents: Extents,
        tower: Option<Tower>,
        turns: Turns,
    ) -> Result<Generator, Failure> {
        let Extents { sequences, capacity, chunk, longest_side } = extents;
        // The rotation's table has a row a position, of a token or of a patch, and a model with learned positions keeps all
        // of its own.
        loaded.config.model.set_context(capacity.max(longest_side));
        let decoder = loaded.config.model.as_decoder();
        let position_axes = decoder.map_or(1, |decoder| decoder.position_axes());
        let program = |role: Role, tokens: usize, read: usize, seen: Option<ImageExtents>| {
            let form = Form::Cached { sequences, tokens, capacity, read, seen };
            Program { role, graph: loaded.config.model.build(form) }
        };
        let seen = tower.as_ref().map(Tower::seen);
        let mut programs = vec![
            program(Role::Prefill, chunk, sequences, seen),
            program(Role::Decode, sequences, sequences, None),
        ];
        let scores = turns == Turns::Own;
        programs.extend(scores.then(|| program(Role::Logits, chunk, chunk, None)));
        let session = loaded.session(device, &programs)?;
        let vocab = loaded.config.model.vocab().expect("it predicts tokens");
        Ok(Generator {
            reader: Reader::new(session, vocab, [sequences, capacity, chunk], position_axes, tower),
            lanes: Lanes::new(sequences, turns),
            vocabulary: loaded.vocabulary.map(Arc::new),
            stops: loaded.stops,
            frames: loaded.is_run,
            scores,
            made: 0,
            checkpoint: loaded.place,
            step: loaded.step.unwrap_or(0),
        })
    }

    pub fn vocabulary(&self) -> Option<&Vocabulary> {
        self.vocabulary.as_deref()
    }

    /// Tokens of a prompt with what follows it, at most.
    pub fn capacity(&self) -> usize {
        self.reader.capacity
    }

    /// Bytes of the cache.
    pub fn cache_bytes(&self) -> usize {
        self.reader.cache_bytes()
    }

    /// Forgets everything read so far, and all requests.
    pub fn clear(&mut self) {
        self.lanes.clear(&mut self.reader);
        (0..self.reader.lanes()).for_each(|lane| self.reader.clear(lane));
    }

    /// Reads tokens of the first lane after those seen so far and gives the logits of what follows.
    pub fn read(&mut self, tokens: &[u32]) -> Result<Vec<f32>, Failure> {
        Ok(self.read_lanes(&[(0, tokens)])?.remove(0))
    }

    /// Reads tokens of some lanes, each after those its lane has seen, and gives the logits of what follows in each.
    pub fn read_lanes(&mut self, wanted: &[(usize, &[u32])]) -> Result<Vec<Vec<f32>>, Failure> {
        for (lane, tokens) in wanted {
            self.reader.check(*lane, tokens.len())?;
        }
        let mut rests: Vec<(usize, Rest<'_>)> =
            wanted.iter().map(|(lane, tokens)| (*lane, Rest::text(tokens))).collect();
        let mut logits = vec![vec![]; wanted.len()];
        while rests.iter().any(|(_, rest)| !rest.tokens.is_empty()) {
            let ran = self.reader.run(Reader::plan_for(&rests), &mut rests, (&BTreeMap::new(), 0))?;
            let done: Vec<_> = ran.portions.iter().filter(|portion| portion.is_last).collect();
            if !done.is_empty() {
                let all = self.reader.logits(&ran)?;
                for portion in done {
                    let row = self.reader.row(&ran, &all, portion, portion.count - 1);
                    logits[portion.index] = row.to_vec();
                }
            }
        }
        Ok(logits)
    }

    /// Continues a prompt, giving each piece of text as it comes, an empty one where none is settled; stops at the end of a document or a full context.
    pub fn generate(
        &mut self,
        prompt: &str,
        how: Sampling,
        mut piece: impl FnMut(&str),
    ) -> Result<String, Failure> {
        let vocabulary = self.words()?.clone();
        let prompts = encode(&vocabulary, self.frames, &[prompt.to_string()])?;
        piece(&vocabulary.decode(&prompts[0]));
        let mut text = GrowingText::new(vocabulary.clone(), &prompts[0]);
        let made = self.continue_all(&prompts, how, &mut |_, token| {
            piece(&text.push(token).unwrap_or_default());
        })?;
        piece(&text.finish());
        Ok(vocabulary.decode(&[&prompts[0][..], &made[0]].concat()))
    }

    fn words(&self) -> Result<&Arc<Vocabulary>, UserError> {
        let without = || "the model has no tokenizer.json beside it, so there is no text".to_string();
        self.vocabulary.as_ref().ok_or_else(|| UserError(without()))
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
        let mut numbers = BTreeMap::new();
        let wanted = prompts.iter().zip(copies(prompts)).enumerate().filter(|_| how.max_tokens > 0);
        for (number, (prompt, copy)) in wanted {
            let request = Request { copy, ..Request::new(prompt.clone(), how) };
            numbers.insert(self.submit(request)?, number);
        }
        while self.is_busy() {
            for Progress { id, tokens, .. } in self.advance()? {
                for told in tokens {
                    made[numbers[&id]].push(told.token);
                    token(numbers[&id], told.token);
                }
            }
        }
        self.made = made.iter().map(Vec::len).sum();
        Ok(made)
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
