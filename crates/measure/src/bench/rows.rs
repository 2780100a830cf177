//! The rows a measurement trains on: those of the recipe's data, made ahead as in a run, or drawn at random.

use flatout_data::{Rows, Segment, Waited};
use flatout_ir::random::philox;
use flatout_runtime::Session;

use flatout_train::Failure;
use flatout_train::UserError;
use flatout_train::config::{Config, Data, Source, Task};
use flatout_train::refuse;
use flatout_train::resolve::compile::Compiled;
use flatout_train::tasks::image_table;
use flatout_train::tasks::images;
use flatout_train::tasks::material::Material;
use flatout_train::tasks::supply::{self, Batch, Part};

/// A recipe's data, opened once for several measurements.
pub struct Text {
    material: Material,
    key: Key,
}

/// What an opened corpus depends on.
#[derive(Clone, PartialEq)]
struct Key {
    data: Data,
    /// Vocabulary and tokens of a row, or pixels of an image.
    extents: [usize; 3],
    seed: u64,
}

impl Key {
    fn of(config: &Config) -> Key {
        // What is found out when the data is opened does not make it other data.
        let data = Data { lengths: vec![], classes: vec![], decoded: vec![], ..config.data.clone() };
        let model = &config.model;
        let [height, width] = model.image_sides().unwrap_or([0, model.tokens()]);
        let extents = [model.vocab().unwrap_or(0), height, width];
        Key { data, extents, seed: config.train.seed }
    }
}

impl Text {
    /// `None` where the config names no data.
    pub fn open(config: &Config) -> Result<Option<Text>, Failure> {
        check_repeatable(config)?;
        match config.data.source() {
            Source::Synthetic => {}
            _ if config.data.has_files() => {}
            _ => return Ok(None),
        }
        Ok(Some(Text { material: Material::open(config, None, &mut |_| {})?, key: Key::of(config) }))
    }

    pub fn material(&self) -> &Material {
        &self.material
    }

    pub fn named(&self) -> &'static str {
        match self.key.data.source() {
            Source::Synthetic if self.key.data.task == Task::Images => "synthetic images",
            Source::Synthetic if self.key.data.has_examples() => "examples of the synthetic language",
            Source::Synthetic => "the synthetic language",
            _ => "the recipe's data",
        }
    }
}

/// Every measurement reads the same rows from the beginning, which standard input gives only once.
fn check_repeatable(config: &Config) -> Result<(), UserError> {
    let paths = config.data.path.iter().chain(config.data.mix.0.iter().map(|part| &part.path));
    if paths.flat_map(|paths| &paths.0).any(|path| path == "-") {
        refuse!(
            "`data.path` is standard input, which cannot be read once for every measurement: name a file, or leave it out"
        );
    }
    Ok(())
}

/// Where the next updates come from.
pub enum Supply {
    Training(supply::Supply),
    /// Micro-batches that are used one after another, again and again, so many an update.
    Drawn {
        parts: Vec<Batch>,
        next: usize,
        of_update: usize,
    },
}

/// Different micro-batches that are drawn: enough that no update trains on the rows of the one before.
const DRAWN_PARTS: usize = 8;

impl Supply {
    /// Images that lie on the device are written to the session.
    pub fn new(
        config: &Config,
        compiled: &Compiled,
        text: Option<&Text>,
        session: &mut Session,
    ) -> Result<Supply, Failure> {
        let mut training = |material: &Material| {
            image_table::write(session, material)?;
            supply::Supply::begin(config, compiled, material)
        };
        Ok(match text {
            Some(text) if text.key == Key::of(config) => Supply::Training(training(&text.material)?),
            Some(_) => {
                // Rows of another length, seed or vocabulary are other data.
                let own = Text::open(config)?.expect("a config with data");
                Supply::Training(training(&own.material)?)
            }
            None => {
                let micro_batch = compiled.micro_batch;
                let count = DRAWN_PARTS.max(2 * config.train.batch / micro_batch);
                let part = |part| match config.model.image_size() {
                    None => Batch::Rows(drawn(config, micro_batch, part), micro_batch),
                    Some(_) => Batch::Images(images::drawn(config, micro_batch, part)),
                };
                let parts = (0..count).map(part).collect();
                Supply::Drawn { parts, next: 0, of_update: config.train.batch / micro_batch }
            }
        })
    }

    /// Begins the next update and tells how many micro-batches it has.
    pub fn begin_update(&mut self) -> usize {
        match self {
            Supply::Training(supply) => supply.begin_update(),
            Supply::Drawn { of_update, .. } => *of_update,
        }
    }

    pub fn next_part(&mut self) -> Result<Part, Failure> {
        match self {
            Supply::Training(supply) => supply.next_part(),
            Supply::Drawn { parts, next, .. } => {
                let batch = parts[*next % parts.len()].clone();
                *next += 1;
                Ok(Part { batch, epoch: 0.0, waited: Waited::default() })
            }
        }
    }
}

/// Rows of tokens that are equally likely, by the seed: each row is one document.
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
