//! The rows that a measurement trains on: from the recipe's data, prefetched as in training, or random.

use flatout_data::{Rows, Segment, Waited};
use flatout_ir::Role;
use flatout_ir::passes::lanes::lanes_a_rank;
use flatout_ir::random::philox;
use flatout_runtime::Session;

use flatout_train::Failure;
use flatout_train::UserError;
use flatout_train::config::{Config, Data, SourceKind, Task};
use flatout_train::device::Device;
use flatout_train::refuse;
use flatout_train::resolve::compile::Compiled;
use flatout_train::resolve::lanes;
use flatout_train::switches::data::VisualTokens;
use flatout_train::tasks;
use flatout_train::tasks::batch::{Batch, BatchSource};
use flatout_train::tasks::dataset::Dataset;
use flatout_train::tasks::{examples, images, text};
use flatout_train::training::vision_cache;
use serde_json::Value;

/// A recipe's data, opened once for several measurements.
pub struct OpenData {
    data: Box<dyn Dataset>,
    key: Key,
}

/// The settings that open data depends on.
#[derive(Clone, PartialEq)]
struct Key {
    data: Data,
    /// Vocabulary, then the sides of an image, or 0 and the tokens of a row.
    extents: [usize; 3],
    seed: u64,
    /// Whether examples were searched for shared prefixes.
    shares_prefixes: bool,
    /// The share of an image's tokens that examples were read with.
    visual_tokens: VisualTokens,
}

impl Key {
    fn of(config: &Config) -> Key {
        // Values that are derived when data is opened are not part of the key.
        let mut data = Data { classes: vec![], decoded: vec![], ..config.data.clone() };
        if data.has_files() {
            (data.lengths, data.learned, data.trees) = (vec![], vec![], vec![]);
            (data.images, data.patches, data.tree_images) = (vec![], vec![], vec![]);
            data.largest_image = None;
        }
        let model = &config.model;
        let [height, width] = model.image_sides().unwrap_or([0, model.tokens()]);
        let extents = [model.vocab().unwrap_or(0), height, width];
        let shares_prefixes = examples::shares_prefixes(config);
        let visual_tokens = config.switches.data.visual_tokens;
        Key { data, extents, seed: config.train.seed, shares_prefixes, visual_tokens }
    }
}

impl OpenData {
    /// Opens a config's data; `None` where it names none. Image features that the config caches are computed on the device.
    pub fn open(config: &Config, device: &Device) -> Result<Option<OpenData>, Failure> {
        check_repeatable(config)?;
        match config.data.source() {
            SourceKind::Synthetic => {}
            _ if config.data.has_files() => {}
            _ => return Ok(None),
        }
        let mut data = tasks::open(config, None, &mut |_| {})?;
        vision_cache::prepare(config, &mut *data, None, device, &mut |_| {})?;
        Ok(Some(OpenData { data, key: Key::of(config) }))
    }

    /// Whether this is the data of a config; another row length, seed or vocabulary makes it other data.
    pub fn is_of(&self, config: &Config) -> bool {
        self.key == Key::of(config)
    }

    pub fn data(&self) -> &dyn Dataset {
        &*self.data
    }

    pub fn named(&self) -> &'static str {
        match self.key.data.source() {
            SourceKind::Synthetic if self.key.data.task == Task::Images => "synthetic images",
            SourceKind::Synthetic if self.key.data.has_examples() => "examples of the synthetic language",
            SourceKind::Synthetic => "the synthetic language",
            _ => "the recipe's data",
        }
    }
}

/// Refuses standard input: it can be read only once, and every measurement reads the same rows from the beginning.
fn check_repeatable(config: &Config) -> Result<(), UserError> {
    let paths = config.data.path.iter().chain(config.data.mix.0.iter().map(|part| &part.path));
    if paths.flat_map(|paths| &paths.0).any(|path| path == "-") {
        refuse!(
            "`data.path` is standard input, which cannot be read once for every measurement: name a file, or leave it out"
        );
    }
    Ok(())
}

/// The least number of distinct random micro-batches. Enough are drawn that no update trains on the rows of the one before.
const DRAWN_BATCHES: usize = 8;

/// Opens the batches of a rank's share of a measurement. Data that keeps tensors on the device writes them to the session.
pub fn source(
    config: &Config,
    compiled: &Compiled,
    rank: usize,
    data: Option<&OpenData>,
    session: &mut Session,
) -> Result<Box<dyn BatchSource>, Failure> {
    let mut of = |data: &dyn Dataset| {
        data.prepare(session)?;
        data.source(config, compiled.feeding_rank(rank), None)
    };
    match data {
        Some(open) => of(&*open.data),
        None => Ok(Box::new(Drawn::new(config, compiled, rank))),
    }
}

/// Random batches, reused in a cycle.
struct Drawn {
    batches: Vec<Batch>,
    next: usize,
    /// Batches per update, batches per lane of this rank, and batches of the current update still to come.
    of_update: usize,
    of_lane: usize,
    left: usize,
}

impl Drawn {
    fn new(config: &Config, compiled: &Compiled, rank: usize) -> Drawn {
        let (micro_batch, inputs) = (compiled.micro_batch, compiled.feeding().inputs());
        let options = &compiled.settled.options;
        let of_lane = lanes::rows_a_lane(config, options.lanes).div_ceil(micro_batch);
        let of_update = of_lane * lanes_a_rank(options);
        let count = DRAWN_BATCHES.max(2 * of_update);
        // Each rank draws its own rows.
        let numbers = rank * count..(rank + 1) * count;
        let batch = |number| match config.model.image_size() {
            None => text::batch(Role::GRAD, &drawn(config, micro_batch, number), 0, micro_batch, &inputs),
            Some(_) => images::drawn(config, micro_batch, number, inputs.clone()),
        };
        Drawn { batches: numbers.map(batch).collect(), next: 0, of_update, of_lane, left: 0 }
    }
}

impl BatchSource for Drawn {
    fn begin_update(&mut self) {
        self.left = self.of_update;
    }

    fn next_batch(&mut self) -> Result<Option<Batch>, Failure> {
        if self.left == 0 {
            return Ok(None);
        }
        let lane = (self.of_update - self.left) / self.of_lane;
        self.left -= 1;
        self.next += 1;
        Ok(Some(Batch { lane, ..self.batches[(self.next - 1) % self.batches.len()].clone() }))
    }

    /// A measurement is never resumed.
    fn cursor(&self) -> Value {
        Value::Null
    }

    fn sample(&self) -> u64 {
        self.next as u64
    }

    fn waited(&self) -> Waited {
        Waited::default()
    }
}

/// Rows of uniformly distributed random tokens; each row is one document.
fn drawn(config: &Config, count: usize, part: usize) -> Rows {
    let (context, vocab) = (config.model.tokens(), config.model.vocab().unwrap_or(1) as u32);
    let seed = [config.train.seed as u32, (config.train.seed >> 32) as u32];
    let mut rows = Rows { context, ..Rows::default() };
    for row in 0..count {
        let sample = part * count + row;
        let token = |t: usize| (philox([t as u32, sample as u32, 0, 0], seed)[0] % vocab) as i32;
        rows.tokens.extend((0..context).map(token));
        rows.targets.extend((1..=context).map(token));
        rows.positions.extend(0..context as i32);
        rows.segments.push(vec![Segment { start: 0, len: context as u32 }]);
        rows.sample.push(sample as u64);
    }
    rows.weights = vec![1.0; count * context];
    rows
}
