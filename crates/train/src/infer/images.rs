//! Classifies images with a trained model.

use flatout_data::images::{self, ImageSource, ImageSpec, UnlabelledImages};
use flatout_ir::{Program, Role};

use crate::Failure;
use crate::config::keys_of;
use crate::device::Device;
use crate::infer::classify::{Classified, Prediction};
use crate::metrics::{Tally, likeliest, probabilities};
use crate::tasks;
use crate::tasks::capacities::{self, Capacities};
use crate::tasks::dataset::Share;
use crate::tasks::images::{OrderedImages, spec};
use crate::training::evaluate::evaluate_all;
use crate::weights::loaded::Loaded;

/// Images per batch if eval.micro_batch is not set.
const AT_ONCE: usize = 64;

/// Evaluates a model on images: all of a path given on the command line, otherwise a run's held-out images.
pub fn classify(
    loaded: &mut Loaded,
    device: &Device,
    overrides: &[String],
) -> Result<(Classified, Share), Failure> {
    let keys = keys_of(overrides)?;
    let share = if keys.iter().any(|key| key == "data.path") { Share::All } else { Share::HeldOut };
    if share == Share::All {
        (loaded.config.data.held_out, loaded.config.data.held_out_path) = (0.0, None);
    }
    let data = tasks::open(&loaded.config, None, &mut |_| {})?;
    data.check_classes(&loaded.config)?;
    let most = if keys.iter().any(|key| key == "eval.rows") { loaded.config.eval.rows } else { usize::MAX };
    let set = data.eval_set(&loaded.config, share, most, None)?;
    let at_once = loaded.config.eval.micro_batch.given().unwrap_or(AT_ONCE);
    let capacities = Capacities::of_rows(&loaded.config, at_once);
    let graph = capacities::of_images(&loaded.config, &capacities, false);
    let mut session = loaded.session(device, &[Program { role: Role::Eval, graph }])?;
    let mut tally = Tally::new(loaded.config.model.classes().unwrap_or(0));
    let sums = evaluate_all(&mut session, &*set, at_once, &mut |batch, results| {
        tally.see_all(&results.class_logits, batch.i32s("labels"))
    })?;
    let found = Classified { loss: sums.mean(), texts: set.samples() as u64, metrics: tally.metrics() };
    Ok((found, share))
}

/// Predictions, with the images they belong to.
pub struct ImagePredictions {
    pub predictions: Vec<Prediction>,
    /// The location of each image.
    pub places: Vec<String>,
    pub classes: Vec<String>,
    /// A message for each row that could not be used, if data.on_error=skip allows that.
    pub left_out: Vec<String>,
}

/// Opens the images in a path: files, a folder, a table that names them, or archives. Labels are not needed.
pub fn read_inputs(loaded: &Loaded, path: &str) -> Result<UnlabelledImages, Failure> {
    let own = spec(&loaded.config);
    // The run's root belongs to the table that it read.
    let root = None;
    Ok(images::open_unlabelled(&ImageSpec {
        source: ImageSource::Auto,
        path: vec![path.into()],
        root,
        ..own
    })?)
}

/// Classifies every image, in the view of evaluation.
pub fn predict(
    loaded: &mut Loaded,
    device: &Device,
    asked: UnlabelledImages,
) -> Result<ImagePredictions, Failure> {
    let UnlabelledImages { set, names, left_out } = asked;
    let count = loaded.config.model.classes().expect("a model of images has classes");
    let classes = match &loaded.config.data.classes {
        given if given.len() == count => given.clone(),
        _ => (0..count).map(|class| class.to_string()).collect(),
    };
    let at_once = loaded.config.eval.micro_batch.given().unwrap_or(AT_ONCE).min(set.count() as usize);
    let capacities = Capacities::of_rows(&loaded.config, at_once);
    let graph = capacities::of_images(&loaded.config, &capacities, false);
    let mut session = loaded.session(device, &[Program { role: Role::Eval, graph }])?;
    let mut result = ImagePredictions {
        predictions: vec![],
        places: vec![],
        classes,
        left_out: left_out.into_iter().collect(),
    };
    let ordered = OrderedImages::new(&loaded.config, set.into(), usize::MAX);
    evaluate_all(&mut session, &ordered, at_once, &mut |batch, results| {
        let samples = batch.samples.iter().zip(batch.i32s("labels"));
        for ((sample, label), logits) in samples.zip(results.class_logits.chunks_exact(count)) {
            // An image that could not be decoded has no label.
            if *label >= 0 {
                let (class, probabilities) = (likeliest(logits), probabilities(logits));
                result.predictions.push(Prediction { class, probabilities });
                result.places.push(names[*sample as usize].clone());
            }
        }
        result.left_out.extend(batch.left_out);
    })?;
    Ok(result)
}
