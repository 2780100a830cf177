//! `data inspect` of conversations, with images or without, labelled texts and preferences: schema, counts, lengths, balance of
//! classes, and some examples as the loss sees them.

use flatout_data::ExampleTable;
use flatout_data::examples::{ExampleSets, ImageCounts, SetDescription, Sighting, frames_in_words, spans};
use flatout_data::formats::SourceLocation;
use flatout_data::inspect::Span;
use serde_json::json;

use crate::data::{shortened, show_lengths};
use crate::palette::Ink;
use crate::screen::{Screen, count, one_line, printable};

pub fn show(sets: &ExampleSets, samples: usize, screen: &Screen) {
    let taken: Vec<usize> = spread(&sets.train, samples);
    if screen.json {
        let samples: Vec<_> = taken
            .iter()
            .map(|at| {
                let example = sets.train.get(*at);
                let class = example.label.and_then(|label| sets.classes.get(label as usize));
                let mut sample = json!({
                    "place": sets.train_places[*at].to_string(),
                    "tokens": example.tokens.len(),
                    "learned_tokens": example.weights.iter().filter(|weight| **weight > 0.0).count(),
                    "class": class,
                    "spans": spans(&sets.vocabulary, example),
                });
                if let Some(answer) = answer(sets, *at) {
                    sample["answer"] = answer.into();
                }
                if sets.frames.count() > 0 {
                    let different = example.images.chunk_by(|a, b| a.image == b.image);
                    let frame = |of: &[Sighting]| {
                        json!({ "place": sets.frames.place(of[0].image).to_string(), "frames": of.len() })
                    };
                    sample["images"] = different.map(frame).collect();
                } else if sets.description.images.is_some() {
                    let image = |sighting: &Sighting| {
                        let image = sets.images.get(sighting.image);
                        json!({
                            "file": image.path(),
                            "width": image.width,
                            "height": image.height,
                            "tokens": sighting.tokens,
                        })
                    };
                    sample["images"] = example.images.iter().map(image).collect();
                }
                sample
            })
            .collect();
        screen.object(&json!({
            "description": sets.description,
            "vocabulary": sets.vocabulary.size(),
            "classes": sets.classes,
            "samples": samples,
        }));
        return;
    }
    summary(&sets.description, sets.train.together() > 1, screen);
    balance(sets, screen);
    show_lengths(&sets.description.lengths, screen);
    let colours = screen.result_colours;
    if sets.classes.is_empty() {
        let legend = match colours {
            true => "green text is trained on",
            false => "text in [[ ]] is read but not trained on",
        };
        screen.result(format!("\nexamples as the loss sees them; {legend}:"));
    }
    for at in taken {
        sample(sets, at, &sets.train_places[at], colours, screen);
    }
}

fn summary(described: &SetDescription, is_paired: bool, screen: &Screen) {
    screen.result(format!("schema   {}", described.schema.join("; then ")));
    if let Some(template) = &described.template {
        screen.result(format!("template {template}"));
    }
    let files = match described.files {
        0 => String::new(),
        1 => " of 1 file".into(),
        files => format!(" of {} files", count(files as u64)),
    };
    screen.result(format!(
        "{} {} to train on, {} held out, from {} rows{files}",
        if is_paired { "pairs   " } else { "examples" },
        count(described.train),
        count(described.held_out),
        count(described.rows)
    ));
    if described.classes.is_empty() {
        screen.result(format!(
            "tokens   {}, of which {} are learned",
            count(described.tokens),
            count(described.learned_tokens)
        ));
    } else {
        screen.result(format!("tokens   {}", count(described.tokens)));
    }
    if let Some(ImageCounts { images, examples, tokens, broken }) = &described.images {
        screen.result(format!(
            "images   {} different in {} examples, {} tokens; broken: {}",
            count(*images),
            count(*examples),
            count(*tokens),
            count(*broken)
        ));
    }
    if described.cut + described.too_long > 0 {
        screen.result(format!(
            "too long {} were cut, {} left out",
            count(described.cut),
            count(described.too_long)
        ));
    }
    for (reason, unusable, place) in &described.unusable {
        screen.result(format!("unusable {} {reason} (first: {place})", count(*unusable)));
    }
}

fn balance(sets: &ExampleSets, screen: &Screen) {
    let classes = &sets.description.classes;
    let total: u64 = classes.iter().map(|class| class.train + class.held_out).sum::<u64>().max(1);
    let width = classes.iter().map(|class| one_line(&class.name).chars().count()).max().unwrap_or(0).min(32);
    for class in classes {
        let here = class.train + class.held_out;
        screen.result(format!(
            "class    {:<width$}  {:>5.1}%  {} to train on, {} held out",
            one_line(&class.name),
            100.0 * here as f64 / total as f64,
            count(class.train),
            count(class.held_out)
        ));
    }
}

fn sample(sets: &ExampleSets, at: usize, place: &SourceLocation, colours: bool, screen: &Screen) {
    let example = sets.train.get(at);
    let spans = spans(&sets.vocabulary, example);
    match example.label.and_then(|label| sets.classes.get(label as usize)) {
        Some(class) => {
            let tokens = count(example.tokens.len() as u64);
            screen.result(format!("\n{place}: {tokens} tokens, class {}", one_line(class)));
            let text: String = spans.iter().map(|span| span.text.as_str()).collect();
            screen.result(shortened(&text));
        }
        None => {
            let learned: usize = spans.iter().filter(|span| span.is_trained).map(|span| span.tokens).sum();
            let which = answer(sets, at).map_or(String::new(), |answer| format!("{answer}, "));
            screen.result(format!("\n{place}: {which}{learned} of {} tokens learned", example.tokens.len()));
            if sets.frames.count() > 0 {
                let size = sets.frames.side();
                let first = example.images.first().map(|seen| sets.frames.place(seen.image));
                let from = first.map_or(String::new(), |first| {
                    format!(" of {size} x {size} pixels, from {}", one_line(&first.to_string()))
                });
                screen.result(format!("frames   {}{from}", frames_in_words(example.images)));
            }
            for sighting in example.images.iter().filter(|_| sets.frames.count() == 0) {
                let image = sets.images.get(sighting.image);
                let named = image.path().map(|path| one_line(&path.to_string_lossy()).into_owned());
                let file = named.unwrap_or("in the row".into());
                screen.result(format!(
                    "image    {} x {} pixels, {} tokens ({file})",
                    image.width,
                    image.height,
                    count(u64::from(sighting.tokens))
                ));
            }
            screen.coloured(spans.iter().map(|span| marked(span, colours)).collect::<String>());
        }
    }
}

/// Whether an answer is chosen or rejected, or wanted or unwanted; `None` where answers are not compared.
fn answer(sets: &ExampleSets, at: usize) -> Option<&'static str> {
    match (sets.train.together(), sets.train.get(at).label) {
        (1, Some(label)) if sets.classes.is_empty() => Some(["unwanted", "wanted"][label as usize % 2]),
        (1, _) => None,
        _ => Some(["chosen", "rejected"][at % 2]),
    }
}

fn marked(Span { is_trained, text, .. }: &Span, colours: bool) -> String {
    let text = printable(text);
    match (is_trained, colours) {
        (true, true) => Ink::Good.paint(&text, true),
        (false, true) => Ink::Faint.paint(&text, true),
        (true, false) => text.into_owned(),
        (false, false) => format!("[[{text}]]"),
    }
}

/// Numbers of evenly spaced examples, with both answers of a pair.
fn spread(table: &ExampleTable, samples: usize) -> Vec<usize> {
    let (samples, together) = (samples.min(table.units()), table.together());
    let of_unit = |unit: usize| unit * together..(unit + 1) * together;
    (0..samples).flat_map(|nth| of_unit(nth * table.units() / samples)).collect()
}
