//! The format version of checkpoints, and converters from older versions.

use serde_json::{Value, json};

/// The newest format that is read: the layout of a checkpoint and the contents of its files.
pub const FORMAT: u64 = IN_PARTS;
/// The format whose tensors lie in one file, written by a single rank and by earlier versions of the program.
pub const IN_ONE_FILE: u64 = 2;
/// The format whose tensors lie in one file per rank, with an index of their parts.
pub const IN_PARTS: u64 = 3;

/// Changes `state.json` from one format to the next. A file with valid hashes may still lack what its format promises; the error
/// says what.
type Converter = fn(&mut Value) -> Result<(), String>;

/// The first converts format 1 to 2, and so on.
const CONVERTERS: [Converter; FORMAT as usize - 1] = [count_skips, keep_one_file];

/// A record that cannot be converted to this format.
#[derive(Debug, PartialEq)]
pub enum Unconverted {
    /// Intact, but written by a newer version of the program.
    Newer(u64),
    Broken(String),
}

/// Converts a record to this format, one version at a time.
pub fn convert(mut record: Value) -> Result<Value, Unconverted> {
    let given = match record["format"].as_u64() {
        Some(format) if format > FORMAT => return Err(Unconverted::Newer(format)),
        Some(format) if format > 0 => format,
        _ => return Err(Unconverted::Broken("it has no format".into())),
    };
    for format in given..FORMAT {
        CONVERTERS[format as usize - 1](&mut record).map_err(Unconverted::Broken)?;
        record["format"] = json!(format + 1);
    }
    Ok(record)
}

/// Format 1 had no counts of updates that were left out; the tensor `optimizer.skipped` has them. The training loop counts from
/// 0.
fn count_skips(record: &mut Value) -> Result<(), String> {
    let counters = record["counters"].as_object_mut().ok_or("it has no counters")?;
    counters.insert("skipped".into(), json!(0));
    counters.insert("skipped_in_a_row".into(), json!(0));
    Ok(())
}

/// Format 2 has no index: the header of its tensor file serves as one.
fn keep_one_file(_: &mut Value) -> Result<(), String> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn older_records_become_records_of_this_format() {
        let first = json!({ "format": 1, "step": 7, "counters": { "tokens": 9, "samples": 3 } });
        let counters = json!({ "tokens": 9, "samples": 3, "skipped": 0, "skipped_in_a_row": 0 });
        assert_eq!(convert(first), Ok(json!({ "format": 3, "step": 7, "counters": counters })));
        let own = json!({ "format": FORMAT, "step": 7 });
        assert_eq!(convert(own.clone()), Ok(own), "this format stays as it is");
    }

    #[test]
    fn unconvertible_records_give_the_reason() {
        assert_eq!(convert(json!({ "format": 7 })), Err(Unconverted::Newer(7)));
        for (record, why) in [
            (json!({ "format": 1 }), "it has no counters"),
            (json!({ "format": 1, "counters": 3 }), "it has no counters"),
            (json!({ "format": 0 }), "it has no format"),
            (json!({ "format": -1 }), "it has no format"),
            (json!({}), "it has no format"),
            (json!([1, 2]), "it has no format"),
            (json!("format"), "it has no format"),
        ] {
            assert_eq!(convert(record.clone()), Err(Unconverted::Broken(why.into())), "{record}");
        }
    }
}
