//! What a run learns from: rows of text, examples one by one, or images.

use std::path::Path;
use std::sync::Arc;

use flatout_data::examples::ExampleSets;
use flatout_data::images::{ByteTable, ImageSets};
use flatout_data::{
    Corpus, Description, ExampleTable, Floor, Layout, Lengths, MicroBatch, OpenEvent, Rows, Shape,
    Vocabulary, drawn_examples, once,
};

use crate::Failure;
use crate::UserError;
use crate::config::{Config, Task};
use crate::refuse;
use crate::resolve::arranged;
use crate::tasks::corpus::{corpus_saying, total_steps};
use crate::tasks::example_sets::example_sets;
use crate::tasks::images::{self, HeldOutImages};

pub enum Material {
    Text(Corpus),
    Examples(Examples),
    Images(ImageSets),
}

/// Examples of both sides, and the tokeniser they went through.
pub struct Examples {
    pub train: Arc<ExampleTable>,
    pub held_out: Arc<ExampleTable>,
    pub vocabulary: Vocabulary,
    /// Their classes by name, in order, where they have classes that are named.
    pub classes: Vec<String>,
}

/// Synthetic examples that are drawn: so many that few meet twice in a measurement.
const DRAWN: usize = 8192;

impl Material {
    /// Opens what a config names; `say` is told what takes long and what was left out.
    pub fn open(
        config: &Config,
        run: Option<&Path>,
        say: &mut dyn FnMut(OpenEvent),
    ) -> Result<Material, Failure> {
        if config.data.task == Task::Images {
            return Ok(Material::Images(images::open(config, say)?));
        }
        if config.data.task != Task::Text {
            let ExampleSets { train, held_out, vocabulary, classes, .. } =
                example_sets(config, run, config.held_out_fold(), say)?;
            let (train, held_out) = (Arc::new(train), Arc::new(held_out));
            return Ok(Material::Examples(Examples { train, held_out, vocabulary, classes }));
        }
        let Some(lengths) = arranged::lengths(config) else {
            return Ok(Material::Text(corpus_saying(config, run, say)?));
        };
        let counts = [DRAWN, config.eval.rows];
        let drawn = drawn_examples(&lengths, counts, config.train.seed, config.model.vocab().unwrap_or(0))?;
        Ok(Material::Examples(Examples {
            train: Arc::new(drawn.train),
            held_out: Arc::new(drawn.held_out),
            vocabulary: drawn.vocabulary,
            classes: vec![],
        }))
    }

    /// Writes down how long examples are, where the config does not say it: plans are made from it, today and when the
    /// run goes on.
    pub fn measure(&self, config: &mut Config) {
        if let Material::Images(sets) = self {
            config.data.classes.clone_from(&sets.classes);
            config.data.decoded = ByteTable::extents(&sets.train).map_or(vec![], |extents| extents.to_vec());
        }
        let Material::Examples(Examples { train, held_out, classes, .. }) = self else { return };
        // What each output of the model stands for is found in the run's own config, whatever files come later.
        config.data.classes.clone_from(classes);
        if config.data.mean_tokens.is_some() || !config.data.lengths.is_empty() {
            return;
        }
        let mut shares = Lengths::of(train).map_or(vec![], |lengths| lengths.shares().to_vec());
        // What is evaluated must fit too.
        let longest = (0..held_out.count()).map(|index| held_out.len_of(index)).max();
        if let (Some(last), Some(longest)) = (shares.last_mut(), longest) {
            *last = longest.max(*last);
        }
        config.data.lengths = shares;
    }

    /// Whether a head of classes finds a class of its own on every example.
    pub fn check_classes(&self, config: &Config) -> Result<(), UserError> {
        let Some(classes) = config.model.classes() else { return Ok(()) };
        let (names, tables) = match self {
            Material::Examples(Examples { train, held_out, classes, .. }) => {
                (classes, [train, held_out].to_vec())
            }
            Material::Images(sets) => (&sets.classes, vec![]),
            Material::Text(_) => {
                refuse!(
                    "`model.head` is classes and the data is text without classes: give data.task=classes"
                )
            }
        };
        if !names.is_empty() && names.len() != classes {
            refuse!(
                "the labels are of {} classes ({}) and `model.classes` is {classes}: give model.classes={}",
                names.len(),
                some(names),
                names.len()
            );
        }
        for example in tables.iter().flat_map(|table| table.iter()) {
            match example.label {
                Some(label) if (label as usize) < classes => {}
                Some(label) => {
                    refuse!("an example has class {label}, counted from 0, and `model.classes` is {classes}")
                }
                None => refuse!("`model.head` is classes and an example has none"),
            }
        }
        Ok(())
    }

    /// What text was tokenised by.
    pub fn vocabulary(&self) -> Option<&Vocabulary> {
        match self {
            Material::Text(corpus) => Some(corpus.vocabulary()),
            Material::Examples(examples) => Some(&examples.vocabulary),
            Material::Images(_) => None,
        }
    }

    /// The loss that cannot be beaten, where it is known.
    pub fn floor(&self) -> Option<Floor> {
        match self {
            Material::Text(corpus) => corpus.floor(),
            Material::Examples(_) | Material::Images(_) => None,
        }
    }

    pub fn describe(&self) -> Description {
        let tokens =
            |table: &ExampleTable| (0..table.count()).map(|index| table.len_of(index) as u64).sum::<u64>();
        match self {
            Material::Text(corpus) => corpus.describe(),
            Material::Examples(Examples { train, held_out, .. }) => Description {
                documents: Some(train.count() as u64),
                tokens: Some(tokens(train)),
                held_out_documents: Some(held_out.count() as u64),
                held_out_tokens: Some(tokens(held_out)),
                is_estimated: false,
            },
            Material::Images(sets) => Description {
                documents: Some(sets.train.count()),
                tokens: None,
                held_out_documents: Some(sets.held_out.count()),
                held_out_tokens: None,
                is_estimated: false,
            },
        }
    }

    /// The updates of a whole run.
    pub fn total_steps(&self, config: &Config) -> Result<u64, Failure> {
        match (self, config.train.steps) {
            (_, Some(steps)) => Ok(steps),
            (Material::Text(corpus), None) => total_steps(config, corpus),
            (Material::Examples(examples), None) => Ok(of_epochs(config, examples.train.count() as u64)),
            (Material::Images(sets), None) => Ok(of_epochs(config, sets.train.count())),
        }
    }
}

/// The updates of a run over so many samples an epoch.
fn of_epochs(config: &Config, samples: u64) -> u64 {
    let epochs = config.train.epochs.expect("validated: steps or epochs");
    (epochs * samples).div_ceil(config.train.batch as u64).max(1)
}

/// A few names, and that there are more.
fn some(names: &[String]) -> String {
    let more = if names.len() > 5 { ", ..." } else { "" };
    names[..names.len().min(5)].join(", ") + more
}

/// What is evaluated on, laid out for the plan `eval`.
pub enum HeldOut {
    /// Rows that are cut into batches of so many.
    Rows(Box<Rows>, usize),
    Examples(Vec<MicroBatch>),
    Images(HeldOutImages),
}

impl HeldOut {
    /// As many rows or examples as `eval.rows` asks for.
    pub fn new(
        material: &Material,
        config: &Config,
        batch: usize,
        layout: Option<&Layout>,
    ) -> Result<HeldOut, Failure> {
        match (material, layout) {
            (Material::Text(corpus), _) => {
                Ok(HeldOut::Rows(Box::new(corpus.held_out_rows(config.eval.rows)?), batch))
            }
            (Material::Examples(examples), Some(layout)) if examples.held_out.count() > 0 => {
                Ok(HeldOut::Examples(once(&examples.held_out, config.eval.rows, layout, &[])))
            }
            (Material::Images(sets), _) => {
                Ok(HeldOut::Images(HeldOutImages::new(config, &sets.held_out, config.eval.rows, batch)?))
            }
            (Material::Examples(_), _) => Err(Failure::User(UserError(
                "no example is held out to evaluate on: raise data.held_out or give eval.rows=0".into(),
            ))),
        }
    }

    /// Runs of `eval`.
    pub fn parts(&self) -> usize {
        match self {
            HeldOut::Rows(rows, batch) => rows.count().div_ceil(*batch),
            HeldOut::Examples(parts) => parts.len(),
            HeldOut::Images(images) => images.parts(),
        }
    }
}

/// Examples as rows of `context` tokens each, filled up behind them: for commands that take rows.
pub fn as_rows(table: &ExampleTable, most: usize, context: usize) -> Rows {
    let layout = Layout::new(vec![Shape::Padded { rows: 1, len: context }]);
    let mut rows = Rows { context, ..Rows::default() };
    for part in once(table, most, &layout, &[]) {
        let MicroBatch { tokens, targets, weights, positions, mut segments, samples, .. } = part;
        rows.tokens.extend(tokens);
        rows.targets.extend(targets);
        rows.weights.extend(weights);
        rows.positions.extend(positions);
        let len = segments[0].len;
        let rest = flatout_data::Segment { start: len, len: context as u32 - len };
        segments.extend((rest.len > 0).then_some(rest));
        rows.segments.push(segments);
        rows.sample.extend(samples);
    }
    rows
}
