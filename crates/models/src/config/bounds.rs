//! Checks of keys that all kinds of models share; each refusal is one sentence that names the key.

use super::Head;

/// The largest extents accepted, such that no product of them here overflows 64 bits.
pub const MAX_EXTENT: usize = 1 << 24;
pub const MAX_LAYERS: usize = 1 << 12;
/// Classes are counted in a table of all pairs of classes.
pub const MAX_CLASSES: usize = 1 << 12;

/// Checks extents, each given as key, value and maximum.
pub fn extents(keys: &[(&str, usize, usize)]) -> Result<(), String> {
    for &(key, value, most) in keys {
        if value == 0 {
            return Err(format!("`model.{key}` is 0 and must be at least 1"));
        }
        if value > most {
            return Err(format!("`model.{key}` is {value} and may be {most} at most"));
        }
    }
    Ok(())
}

pub fn positive(keys: &[(&str, f64)]) -> Result<(), String> {
    match keys.iter().find(|(_, value)| !value.is_finite() || *value <= 0.0) {
        Some((key, value)) => Err(format!("`model.{key}` is {value} and must be a number above 0")),
        None => Ok(()),
    }
}

/// Checks dropout probabilities.
pub fn dropped(keys: &[(&str, f64)]) -> Result<(), String> {
    match keys.iter().find(|(_, value)| !(0.0..1.0).contains(value)) {
        Some((key, value)) => Err(format!("`model.{key}` is {value} and must be at least 0 and below 1")),
        None => Ok(()),
    }
}

/// Whether a head and its number of classes are consistent.
pub fn head(head: Head, classes: Option<usize>) -> Result<(), String> {
    match (head, classes) {
        (Head::Tokens, None) => Ok(()),
        (Head::Tokens, Some(_)) => Err(
            "`model.classes` is given and `model.head` is tokens, which has none: give model.head=classes"
                .into(),
        ),
        (Head::Classes, None) => {
            Err("`model.classes` is missing: `model.head` is classes, so say how many".into())
        }
        (Head::Classes, Some(classes)) if !(2..=MAX_CLASSES).contains(&classes) => {
            Err(format!("`model.classes` is {classes} and must be from 2 to {MAX_CLASSES}"))
        }
        (Head::Classes, Some(_)) => Ok(()),
    }
}

/// Whether the sides of images, rows and columns, are whole numbers of patches.
pub fn cut(patch: usize, sides: [usize; 2]) -> Result<(), String> {
    // For a square the message names the key that was set.
    for (key, side) in [("image_size", sides[1]), ("image_height", sides[0])] {
        if !side.is_multiple_of(patch) {
            return Err(format!(
                "`model.patch` = {patch} does not divide `model.{key}` = {side}: {} and {} are the nearest",
                side / patch * patch,
                side.next_multiple_of(patch)
            ));
        }
    }
    Ok(())
}
