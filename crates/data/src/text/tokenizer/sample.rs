//! The text a tokeniser is trained on: a bounded part of the training side, spread over all of it.

use flatout_waits::{self as waits, Unit};
use rayon::prelude::*;

use crate::error::DataError;
use crate::formats::{self, Document, Index, Input, ReadOptions};
use crate::order::split::Selection;
use crate::random::fingerprint;

/// More text than this does not improve a tokeniser noticeably, and takes minutes.
pub(crate) const SAMPLE_BYTES: u64 = 64 << 20;

/// Takes a share from the beginning of every input. Documents whose hash is below `threshold` are held out and are not used.
pub(crate) fn of_inputs(
    inputs: &[Input],
    options: &ReadOptions,
    threshold: u64,
    budget: u64,
) -> Result<Vec<String>, DataError> {
    let total: u64 = inputs.iter().map(|input| input.bytes).sum::<u64>().max(1);
    let wait =
        waits::begin("sampling text for a tokeniser", Unit::Things("files"), Some(inputs.len() as u64));
    let texts = inputs.par_iter().map(|input| {
        let quota = if total <= budget { u64::MAX } else { budget * input.bytes / total };
        // Compressed files give more text than they have bytes.
        let quota = quota.min(budget);
        let reader = formats::read(input, options)?;
        let taken = take(reader, threshold, quota);
        wait.add(1);
        taken
    });
    let texts: Vec<Vec<String>> = texts.collect::<Result<_, DataError>>()?;
    Ok(texts.concat())
}

/// The texts of documents on the training side, until they have `quota` bytes; at least one.
pub(crate) fn take(
    documents: impl Iterator<Item = Result<Document, DataError>>,
    threshold: u64,
    quota: u64,
) -> Result<Vec<String>, DataError> {
    let (mut texts, mut bytes) = (Vec::new(), 0);
    for document in documents {
        let text = document?.text;
        if fingerprint(text.as_bytes()) >= threshold {
            bytes += text.len() as u64;
            texts.push(text);
        }
        if bytes >= quota {
            break;
        }
    }
    Ok(texts)
}

/// Documents at equal distances over a side of an index, or all of them where they are few. `bytes` is the text of the whole
/// side.
pub(crate) fn of_index(
    index: &Index,
    side: &Selection,
    bytes: u64,
    budget: u64,
) -> Result<Vec<String>, DataError> {
    let count = side.count();
    let wanted = if bytes <= budget {
        count
    } else {
        ((count as f64 * budget as f64 / bytes as f64) as u64).clamp(1, count)
    };
    let text = |nth: u64| {
        let place = (u128::from(nth) * u128::from(count) / u128::from(wanted)) as u64;
        index.read(side.at(place)).map(|document| document.text)
    };
    let wait = waits::begin("sampling text for a tokeniser", Unit::Things("documents"), Some(wanted));
    (0..wanted).into_par_iter().map(text).inspect(|_| wait.add(1)).collect()
}
