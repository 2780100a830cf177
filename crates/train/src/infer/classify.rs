//! Classifies texts with a trained model.

use std::sync::Arc;

use flatout_data::examples::ExampleSpec;
use flatout_data::{ExampleTable, Layout, Shape, once};
use flatout_ir::{Program, Role};
use flatout_models::config::{Head, Positions};
use serde::Serialize;

use crate::Failure;
use crate::UserError;
use crate::config::{Paths, SourceKind, Task, keys_of};
use crate::device::Device;
use crate::infer::evaluate::Share;
use crate::metrics::{ClassMetrics, Confusion, likeliest, probabilities};
use crate::refuse;
use crate::tasks::capacities::{self, Capacities};
use crate::tasks::dataset::Dataset;
use crate::tasks::examples::{self, LaidOut};
use crate::training::evaluate::evaluate_all;
use crate::weights::loaded::Loaded;

/// A model's prediction for a text.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prediction {
    pub class: usize,
    /// Indexed by class.
    pub probabilities: Vec<f64>,
}

/// Result of classifying texts with known classes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Classified {
    /// Mean nats per text.
    pub loss: f64,
    pub texts: u64,
    pub metrics: ClassMetrics,
}

/// The texts to evaluate on: all of a path given on the command line, otherwise a run's held-out texts.
pub fn texts(loaded: &mut Loaded, overrides: &[String]) -> Result<(Arc<ExampleTable>, Share), Failure> {
    let keys = keys_of(overrides)?;
    let share = if keys.iter().any(|key| key == "data.path") { Share::All } else { Share::HeldOut };
    if share == Share::All {
        (loaded.config.data.held_out, loaded.config.data.held_out_path) = (0.0, None);
        (loaded.config.train.fold, loaded.config.train.folds) = (None, None);
    }
    loaded.config.data.task = Task::Classes;
    let texts = examples::read(&loaded.config, Some(&loaded.dir), &mut |_| {})?;
    texts.check_classes(&loaded.config)?;
    Ok((if share == Share::All { texts.train } else { texts.held_out }, share))
}

/// The texts to classify: the rows of a file, with or without labels, the location of each, and the names of classes.
pub struct TextInputs {
    pub texts: ExampleTable,
    pub places: Vec<String>,
    pub classes: Vec<String>,
}

/// Reads a file in the way in which the model's own texts were read.
pub fn read_inputs(loaded: &Loaded, file: &str) -> Result<TextInputs, Failure> {
    let mut config = loaded.config.clone();
    config.data.task = Task::Classes;
    config.data.source = SourceKind::Auto;
    config.data.path = Some(Paths(vec![file.to_string()]));
    // Groups keep the rows of a document on one side; here there is only one side.
    config.data.group = None;
    let spec = ExampleSpec {
        unlabelled: true,
        held_out: 0.0,
        fold: None,
        ..examples::spec(&config, Some(&loaded.dir))
    };
    let sets = flatout_data::examples::open(&spec)?;
    let mut classes = config.data.classes;
    if classes.is_empty() {
        classes = (0..config.model.decoder().classes()).map(|class| class.to_string()).collect();
    }
    let places = sets.train_places.iter().map(ToString::to_string).collect();
    Ok(TextInputs { texts: sets.train, places, classes })
}

/// Tokens per batch if texts are short.
const AT_ONCE: usize = 4096;
/// The most texts per batch.
const TEXTS_AT_ONCE: usize = 64;

/// Class logits of every text, in order.
pub fn logits(loaded: &mut Loaded, device: &Device, texts: &ExampleTable) -> Result<Vec<Vec<f32>>, Failure> {
    let longest = (0..texts.count()).map(|index| texts.len_of(index)).max().unwrap_or(0);
    check(loaded, longest)?;
    let mut rows = vec![vec![]; texts.count()];
    if rows.is_empty() {
        return Ok(rows);
    }
    // The table of rotary positions has one row per position, and a model with learned positions keeps all of its own.
    if loaded.config.model.decoder().positions != Positions::Learned {
        loaded.config.model.decoder_mut().context = longest;
    }
    let tokens = AT_ONCE.max(longest).next_multiple_of(128);
    let shape = Shape::Packed { tokens, segments: TEXTS_AT_ONCE };
    let layout = Layout::new(vec![shape]);
    let graph = capacities::texts(&loaded.config, &Capacities::of_shape(&loaded.config, &layout, 0), false);
    let mut session = loaded.session(device, &[Program { role: Role::Eval, graph }])?;
    let classes = loaded.config.model.decoder().classes();
    let laid_out = LaidOut { parts: once(texts, usize::MAX, &layout, &[]), images: None, compared: None };
    evaluate_all(&mut session, &laid_out, TEXTS_AT_ONCE, &mut |batch, results| {
        for (sample, logits) in batch.samples.iter().zip(results.class_logits.chunks_exact(classes)) {
            rows[*sample as usize] = logits.to_vec();
        }
    })?;
    Ok(rows)
}

fn check(loaded: &Loaded, longest: usize) -> Result<(), UserError> {
    let (dir, positions) = (loaded.dir.display(), loaded.positions);
    if loaded.config.model.decoder().head != Head::Classes {
        refuse!("{dir} has no head of classes: it predicts text; use flatout generate");
    }
    if longest > positions {
        refuse!(
            "a text has {longest} tokens, and the model in {dir} was made for {positions}: lower data.max_tokens"
        );
    }
    Ok(())
}

/// Predicts the class of every text, in order.
pub fn predict(
    loaded: &mut Loaded,
    device: &Device,
    texts: &ExampleTable,
) -> Result<Vec<Prediction>, Failure> {
    let prediction =
        |logits: &Vec<f32>| Prediction { class: likeliest(logits), probabilities: probabilities(logits) };
    Ok(logits(loaded, device, texts)?.iter().map(prediction).collect())
}

/// Evaluates the model on texts that all have a class.
pub fn classify(loaded: &mut Loaded, device: &Device, texts: &ExampleTable) -> Result<Classified, Failure> {
    let predictions = predict(loaded, device, texts)?;
    let mut confusion = Confusion::new(loaded.config.model.decoder().classes());
    let mut loss = 0.0;
    for (prediction, text) in predictions.iter().zip(texts.iter()) {
        let class = text.label.expect("a text that is judged has a class") as usize;
        confusion.see(class, prediction.class);
        loss -= prediction.probabilities[class].ln();
    }
    let count = predictions.len();
    Ok(Classified { loss: loss / count.max(1) as f64, texts: count as u64, metrics: confusion.metrics() })
}
