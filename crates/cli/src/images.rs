//! `data inspect` of images, from files or a recipe: counts, sizes, balance of classes, unusable files, and decoding speed.

use std::process::ExitCode;

use flatout_data::OpenEvent;
use flatout_data::formats::OnError;
use flatout_data::images::{
    Augment, Changes, Filter, ImageInspection, ImageSample, ImageSets, ImageSpec, View, inspect as look,
    open, time,
};
use flatout_train::Failure;
use flatout_train::config;
use serde_json::json;

use crate::args::Inspect;
use crate::screen::{Screen, count, one_line};

/// Characters of the largest class's bar.
const BAR: u64 = 40;

/// Inspects the images that the words name, or without words the synthetic set.
pub fn inspect(args: &Inspect, screen: &Screen) -> Result<ExitCode, Failure> {
    // The default share is held out, as in training.
    let held_out = config::Data::default().held_out;
    let spec =
        ImageSpec { path: args.words.clone(), held_out, on_error: OnError::Skip, ..ImageSpec::default() };
    let sets = open(&spec, &mut |event| {
        if let OpenEvent::Note(note) = event {
            screen.note(format!("data     {note}"));
        }
    })?;
    show(&sets, args.samples, args.time, Changes::NONE, screen)?;
    Ok(ExitCode::SUCCESS)
}

/// Shows the images of the sets, and with `seconds` how fast one core prepares them with training's augmentation.
pub fn show(
    sets: &ImageSets,
    samples: usize,
    seconds: Option<f64>,
    changes: Changes,
    screen: &Screen,
) -> Result<(), Failure> {
    let found = look(sets, samples)?;
    let augment = Augment::Train { scale: (0.08, 1.0), ratio: (0.75, 4.0 / 3.0), flip: 0.5, changes };
    // The training view of most models.
    let view = View { width: 224, height: 224, augment, filter: Filter::Bilinear };
    let speed = seconds.map(|seconds| time(&sets.train, &view, seconds)).transpose()?;
    if screen.json {
        screen.object(&json!({ "images": found, "speed": speed }));
        return Ok(());
    }
    let ImageInspection { sets: described, looked_at, kinds, widths, heights, samples, unusable } = &found;
    screen.result(format!("{described}"));
    for (reason, left_out, first) in &described.unusable {
        screen.result(format!("unusable  {} {reason} (first: {first})", count(*left_out)));
    }
    let kinds: Vec<String> =
        kinds.iter().map(|(kind, images)| format!("{} {kind}", count(*images))).collect();
    screen.result(format!("looked at {}: {}", count(*looked_at), kinds.join(", ")));
    for (reason, left_out, first) in unusable {
        screen.result(format!("unusable  {} of these: {reason} (first: {first})", count(*left_out)));
    }
    for (side, sizes) in [("wide", widths), ("high", heights)] {
        screen.result(format!("{} to {} pixels {side}, median {}", sizes.least, sizes.most, sizes.median));
    }
    let largest = described.classes.iter().map(|class| class.train).max().unwrap_or(0).max(1);
    for class in &described.classes {
        let drawn = "#".repeat((class.train * BAR).div_ceil(largest) as usize);
        screen.result(format!(
            "{:>20}  {drawn:<40}  {} to train on, {} held out",
            one_line(&class.name),
            count(class.train),
            count(class.held_out)
        ));
    }
    for ImageSample { place, kind, width, height, class } in samples {
        let class = one_line(class.as_deref().unwrap_or("no class"));
        screen.result(format!("{place}: {kind}, {width} x {height}, {class}"));
    }
    if let Some(speed) = speed {
        screen.result(format!(
            "one core reads and decodes {:.0} images a second, and prepares {:.0} a second for training at {} x {}",
            speed.decoded, speed.fed, view.width, view.height
        ));
    }
    Ok(())
}
