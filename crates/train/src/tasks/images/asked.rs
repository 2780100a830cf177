//! What a model says of images whose classes nobody knows.

use flatout_data::images::{self, AskedImages, ImageSource, ImageSpec};
use flatout_ir::{Program, Role};
use flatout_models::form::{Form, ImageForm};

use super::{AT_ONCE, Feeding, feed_images, spec, view};
use crate::Failure;
use crate::device::Device;
use crate::infer::classify::Prediction;
use crate::metrics::{likeliest, probabilities};
use crate::tasks::feed::Draw;
use crate::weights::pretrained::Loaded;

/// What was said, and of which images.
pub struct Told {
    pub predictions: Vec<Prediction>,
    /// Where each image is.
    pub places: Vec<String>,
    pub classes: Vec<String>,
    /// What could not be used, a line each, where data.on_error=skip allows it.
    pub left_out: Vec<String>,
}

/// Opens what a path holds: images, a folder of them, a table that names them, archives. Labels are not needed.
pub fn asked(loaded: &Loaded, path: &str) -> Result<AskedImages, Failure> {
    let own = spec(&loaded.config);
    // A root is of the table that the run read.
    let root = None;
    Ok(images::asked(&ImageSpec { source: ImageSource::Auto, path: vec![path.into()], root, ..own })?)
}

/// Asks the model about every image, seen as evaluation sees it.
pub fn predict(loaded: &mut Loaded, device: &Device, asked: AskedImages) -> Result<Told, Failure> {
    let AskedImages { set, names, left_out } = asked;
    let count = loaded.config.model.classes().expect("a model of images has classes");
    let classes = match &loaded.config.data.classes {
        given if given.len() == count => given.clone(),
        _ => (0..count).map(|class| class.to_string()).collect(),
    };
    let at_once = loaded.config.eval.micro_batch.given().unwrap_or(AT_ONCE).min(set.count() as usize);
    let graph = loaded.config.model.build(Form::Images(ImageForm::plain(at_once)));
    let mut session = loaded.session(device, &[Program { role: Role::Eval, graph }])?;
    let (view, feeding) = (view(&loaded.config, false), Feeding::plain(&loaded.config, at_once));
    let mut told =
        Told { predictions: vec![], places: vec![], classes, left_out: left_out.into_iter().collect() };
    for first in (0..set.count()).step_by(at_once) {
        let range = first..(first + at_once as u64).min(set.count());
        let part = feeding.part(images::ordered(&set, &view, range)?, 0);
        feed_images(&mut session, Role::Eval, &part, Draw { seed: 0, step: 0 })?;
        session.run(Role::Eval)?;
        let all = session.result(Role::Eval, "class_logits")?;
        let samples = part.batch.samples.iter().zip(&part.batch.labels);
        for ((sample, label), logits) in samples.zip(all.chunks_exact(count)) {
            // One that could not be decoded has no label.
            if *label >= 0 {
                let (class, probabilities) = (likeliest(logits), probabilities(logits));
                told.predictions.push(Prediction { class, probabilities });
                told.places.push(names[*sample as usize].clone());
            }
        }
        told.left_out.extend(part.batch.left_out);
    }
    Ok(told)
}
