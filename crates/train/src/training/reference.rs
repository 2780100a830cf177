//! The reference's log-probability of every answer: computed once, before the first update, and stored with the run.
//!
//! The reference is the model at the start of training, which the session holds at that time: a fresh adapter adds nothing. So no
//! second model lies in memory, and training makes no second forward pass. Another model may be named; it is opened and closed
//! before the run's own session is opened. A resumed run reads the stored scores.

use std::path::{Path, PathBuf};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use flatout_data::{Layout, durable};
use flatout_ir::{Plan, Program, Role};
use flatout_runtime::Session;
use flatout_waits::{self as waits, Unit};

use crate::config::Config;
use crate::device::Device;
use crate::ranks::Ranks;
use crate::run::checkpoint::tensors::{Dtype, Tensor, TensorFile, write};
use crate::tasks::batch::Inputs;
use crate::tasks::capacities::{self, Capacities};
use crate::tasks::dataset::Dataset;
use crate::tasks::preference::{AnswerSplit, ComparedAnswers, Scores};
use crate::training::shared_eval::run_for_others;
use crate::weights::loaded::Loaded;
use crate::weights::pretrained::{Origin, Source, open};
use crate::{Failure, UserError, refuse};

/// The file of a run that keeps the scores.
const FILE: &str = "reference.safetensors";
/// Its tensors: the scores of each split, and the key that they belong to, as bytes of text.
const SPLITS: [&str; 4] = ["train", "held_out", "train_mismatched", "held_out_mismatched"];
const KEY: &str = "key";

/// Interval between two progress lines; the first one comes after a second.
const FIRST_LINE: Duration = Duration::from_secs(1);
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Micro-batches that are prepared ahead of the one being scored.
const AHEAD: usize = 2;

/// Prints a progress line.
pub type Say<'a> = &'a mut dyn FnMut(String);

/// The answers of a set that have no reference score yet.
pub fn unscored<'d>(config: &Config, data: &'d dyn Dataset) -> Option<&'d ComparedAnswers> {
    data.compared().filter(|compared| config.has_reference() && compared.scores().is_none())
}

/// The scores that another model gives, where one is named and the run has not stored them. Must be called before the run's own
/// session is opened, so that both never lie in memory together. Every rank scores its share.
pub fn score_by_named_model(
    ranks: &Ranks,
    config: &Config,
    data: &dyn Dataset,
    run: &Path,
    layout: Option<&Layout>,
    device: &Device,
    say: Say<'_>,
) -> Result<Option<Scores>, Failure> {
    let (Some(compared), Some(layout)) = (unscored(config, data), layout) else { return Ok(None) };
    let Some(named) = &config.preference.reference else { return Ok(None) };
    // Rank 0 checks for all ranks.
    if ranks.of_first(path(run).is_file())? {
        return Ok(None);
    }
    let mut other = open_reference(config, data, named)?;
    Ok(Some(by_model_among(ranks, &mut other, compared, layout, device, say)?))
}

/// Opens the model to compare with: that of a run, of a folder or of a name on the hub. It must have the same vocabulary and at
/// least as many positions.
pub fn open_reference(config: &Config, data: &dyn Dataset, named: &str) -> Result<Loaded, UserError> {
    let folder = match Source::parse(named) {
        Ok(source @ Source::Hub(_)) => open(&source, &mut |_| {})?.description.folder,
        _ => PathBuf::from(named),
    };
    let named = folder.as_path();
    let mut other = Loaded::open(named, &[])?;
    if let (Some(own), Some(theirs)) = (data.vocabulary(), &other.vocabulary)
        && !own.gives_the_same_tokens(theirs)
    {
        refuse!(
            "{} has another vocabulary than this run, so its log-probabilities cannot be compared: name another preference.reference",
            named.display()
        );
    }
    let (own, theirs) = (config.model.vocab(), other.config.model.vocab());
    if own != theirs || other.config.model.as_decoder().is_none() || other.config.model.class_head().is_some()
    {
        refuse!(
            "{} is not a decoder with this run's vocabulary: name another preference.reference",
            named.display()
        );
    }
    let context = config.model.tokens();
    if other.positions < context {
        refuse!(
            "{} was made for {} tokens and `model.context` is {context}: lower it, or name another preference.reference",
            named.display(),
            other.positions
        );
    }
    other.config.model.set_context(context);
    other.config.data.task = config.data.task;
    other.config.data.still_frames = config.data.still_frames;
    other.config.preference = config.preference.clone();
    if input_sizes(config) != input_sizes(&other.config) {
        refuse!(
            "{} reads images or frames of other sizes than this run's model: name another preference.reference",
            named.display()
        );
    }
    Ok(other)
}

/// The form in which a model is given images (the sides of patches, of blocks and of learned positions) or frames (their side).
fn input_sizes(config: &Config) -> Option<Vec<usize>> {
    let of_patches = config.model.as_qwen3_vl().map(|tower| vec![tower.patch, tower.merge, tower.positions]);
    of_patches.or_else(|| config.model.as_fovea().map(|tower| vec![tower.image_size]))
}

/// The scores that an opened model gives.
pub fn by_model(
    model: &mut Loaded,
    compared: &ComparedAnswers,
    layout: &Layout,
    device: &Device,
    say: Say<'_>,
) -> Result<Scores, Failure> {
    by_model_among(&Ranks::alone(), model, compared, layout, device, say)
}

fn by_model_among(
    ranks: &Ranks,
    model: &mut Loaded,
    compared: &ComparedAnswers,
    layout: &Layout,
    device: &Device,
    say: Say<'_>,
) -> Result<Scores, Failure> {
    let capacities = Capacities::of_shape(&model.config, layout, 0);
    let graph = capacities::texts(&model.config, &capacities, false);
    let mut session = model.session(device, &[Program { role: Role::Eval, graph }])?;
    score_among(ranks, &mut session, compared, layout, say)
}

/// Sets the scores of the answers: the stored ones, those of another model, or those that the session computes, whose weights are
/// still the initial ones where `is_fresh`. New scores are stored. Rank 0 decides which of the three applies, and answers that
/// are to be scored are divided among the ranks.
pub fn set_scores(
    (ranks, run): (&Ranks, &Path),
    config: &Config,
    data: &dyn Dataset,
    (session, layout): (&mut Session, Option<&Layout>),
    known: Option<Scores>,
    is_fresh: bool,
    say: Say<'_>,
) -> Result<(), Failure> {
    let (Some(compared), Some(layout)) = (unscored(config, data), layout) else { return Ok(()) };
    let scores = match known {
        Some(scores) => scores,
        None => {
            let kept = match ranks.is_first() {
                true => stored(config, compared, run, is_fresh)?,
                false => None,
            };
            if ranks.of_first(kept.is_some())? {
                let scores = kept.map_or_else(|| of_run(config, compared, run), Ok)?;
                compared.give(scores);
                return Ok(());
            }
            score_among(ranks, session, compared, layout, say)?
        }
    };
    if ranks.is_first() {
        store(&path(run), &key(config, compared, run)?, &scores)?;
    }
    compared.give(scores);
    Ok(())
}

/// The stored scores of a run; `None` where they have to be computed.
fn stored(
    config: &Config,
    compared: &ComparedAnswers,
    run: &Path,
    is_fresh: bool,
) -> Result<Option<Scores>, Failure> {
    let path = path(run);
    if path.is_file() {
        let is_own = config.preference.reference.is_none();
        return match of_run(config, compared, run) {
            Ok(scores) => Ok(Some(scores)),
            // A process that ended before its first checkpoint may have had other data.
            Err(_) if is_fresh && is_own => Ok(None),
            Err(failure) => Err(failure),
        };
    }
    if is_fresh {
        return Ok(None);
    }
    Err(Failure::User(UserError(format!(
        "{} is not there, and the model that gave its scores has been trained since: restore the file, or begin a new run",
        path.display()
    ))))
}

/// The stored scores of a run's own answers.
pub fn of_run(config: &Config, compared: &ComparedAnswers, run: &Path) -> Result<Scores, Failure> {
    read(&path(run), &key(config, compared, run)?, &compared.counts())
}

/// Runs the plan `eval`, which applies no dropout, over all answers of both splits, with their images.
pub fn score(
    session: &mut Session,
    compared: &ComparedAnswers,
    layout: &Layout,
    say: Say<'_>,
) -> Result<Scores, Failure> {
    score_among(&Ranks::alone(), session, compared, layout, say)
}

/// The same as [`score`] on several ranks: each scores its share of the micro-batches and receives the scores of the others. The
/// score of an answer does not depend on the rank that computes it.
fn score_among(
    ranks: &Ranks,
    session: &mut Session,
    compared: &ComparedAnswers,
    layout: &Layout,
    say: Say<'_>,
) -> Result<Scores, Failure> {
    let counts = compared.counts();
    let total: usize = counts.iter().sum();
    let mut scores = Scores(counts.iter().map(|count| vec![0.0; *count]).collect());
    let inputs = Inputs::of(session.plans(), Role::Eval);
    let (began, mut last_line, mut done) = (Instant::now(), None::<Instant>, 0);
    let (count, rank) = (ranks.count(), ranks.rank());
    let mut own: Vec<(AnswerSplit, usize)> = vec![];
    // Where `eval` exchanges, other ranks wait inside it for one that fails.
    let exchanges = session.plans().plan(Role::Eval).is_some_and(Plan::has_exchanges);
    let score = || {
        std::thread::scope(|threads| -> Result<(), Failure> {
            // Images are decoded while the device computes.
            let (sender, ready) = sync_channel(AHEAD);
            threads.spawn(move || {
                let parts = compared.parts(layout);
                let parts = parts.flat_map(|(split, parts)| parts.into_iter().map(move |part| (split, part)));
                let mut parts_of_all = 0;
                for (split, laid_out) in parts {
                    parts_of_all += 1;
                    if (parts_of_all - 1) % count != rank {
                        continue;
                    }
                    let batch = compared.batch(Role::Eval, split, laid_out.clone(), &inputs);
                    let is_last = batch.is_err();
                    if sender.send(batch.map(|batch| Some((split, laid_out, batch)))).is_err() || is_last {
                        return;
                    }
                }
                // The last group may have fewer micro-batches than there are ranks.
                if (1..=rank).contains(&(parts_of_all % count)) {
                    _ = sender.send(Ok(None));
                }
            });
            let wait =
                waits::begin("scoring answers by the reference", Unit::Things("answers"), Some(total as u64));
            for made in ready {
                let Some((split, laid_out, batch)) = made? else {
                    run_for_others(session)?;
                    continue;
                };
                let by_answer = compared.sums(session, batch)?;
                compared.take(split, &laid_out, &by_answer, &mut scores);
                own.extend(laid_out.numbers.iter().map(|number| (split, *number)));
                // The other ranks have scored about as many.
                done = (done + count * laid_out.samples.len()).min(total);
                wait.set(done as u64);
                let is_due = match last_line {
                    None => began.elapsed() >= FIRST_LINE,
                    Some(last_line) => last_line.elapsed() >= LINE_EVERY,
                };
                if is_due && done < total {
                    let left = began.elapsed().as_secs_f64() * (total - done) as f64 / done as f64;
                    say(format!("the reference has scored {done} of {total} answers, {left:.0} s left"));
                    last_line = Some(Instant::now());
                }
            }
            Ok(())
        })
    };
    if exchanges {
        ranks.at_once(score)?
    } else {
        score()?
    }
    exchange(ranks, &own, &mut scores)?;
    if let Some(number) = scores.0.iter().flatten().position(|score| !score.is_finite()) {
        return Err(Failure::User(UserError(format!(
            "the reference gives answer {number} no finite log-probability: its weights or its precision cannot be used"
        ))));
    }
    if last_line.is_some() {
        say(format!("the reference scored {total} answers in {:.0} s", began.elapsed().as_secs_f64()));
    }
    Ok(scores)
}

/// Exchanges scores with the other ranks.
fn exchange(ranks: &Ranks, own: &[(AnswerSplit, usize)], scores: &mut Scores) -> Result<(), Failure> {
    if !ranks.are_many() {
        return Ok(());
    }
    let word = |(split, number): &(AnswerSplit, usize)| {
        let score = scores.0[*split as usize][*number].to_bits();
        [*split as u32, *number as u32, score].into_iter().flat_map(u32::to_le_bytes)
    };
    let bytes: Vec<u8> = own.iter().flat_map(word).collect();
    for bytes in ranks.gather_bytes(&bytes)? {
        for word in bytes.chunks_exact(12) {
            let at = |i: usize| u32::from_le_bytes([word[i], word[i + 1], word[i + 2], word[i + 3]]);
            scores.0[at(0) as usize][at(4) as usize] = f32::from_bits(at(8));
        }
    }
    Ok(())
}

fn path(run: &Path) -> PathBuf {
    run.join(FILE)
}

/// Identifies the answers and the weights that scored them, as JSON text.
fn key(config: &Config, compared: &ComparedAnswers, run: &Path) -> Result<String, UserError> {
    let origin = match config.model.from() {
        Some(_) => serde_json::to_value(Origin::of(run)?).expect("a record has a JSON form"),
        None => serde_json::json!({ "seed": config.train.seed }),
    };
    // A run may be resumed from another working directory, where relative paths differ.
    let name = |path: &Option<String>| {
        let named = path.as_deref().and_then(|path| Path::new(path).file_name());
        named.map(|name| name.to_string_lossy().into_owned())
    };
    let whole = serde_json::json!({
        "answers": compared.mark,
        "origin": origin,
        "adapter": name(&config.adapter.from),
        "reference": name(&config.preference.reference),
    });
    Ok(whole.to_string())
}

fn store(path: &Path, key: &str, scores: &Scores) -> Result<(), Failure> {
    let bytes = |split: &Vec<f32>| split.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let splits: Vec<(Vec<u8>, [usize; 1])> =
        scores.0.iter().map(|split| (bytes(split), [split.len()])).collect();
    let key_shape = [key.len()];
    let key = Tensor { name: KEY, dtype: Dtype::U8, shape: &key_shape, bytes: key.as_bytes() };
    let of_splits = SPLITS.iter().zip(&splits);
    let of_splits = of_splits.map(|(name, (bytes, shape))| Tensor { name, dtype: Dtype::F32, shape, bytes });
    let tensors: Vec<Tensor> = of_splits.chain([key]).collect();
    let mut file = vec![];
    write(&mut file, &tensors)
        .and_then(|()| durable::replace(path, &file))
        .map_err(Failure::io(path.display()))
}

fn read(path: &Path, key: &str, counts: &[usize]) -> Result<Scores, Failure> {
    let unreadable = |error: std::io::Error| {
        Failure::User(UserError(format!("{} cannot be used: {error}; restore it", path.display())))
    };
    let file = TensorFile::open(path).map_err(unreadable)?;
    let mut own = vec![0; key.len()];
    let is_own = file.read_into(KEY, &mut own).is_ok() && own == key.as_bytes();
    if !is_own {
        return Err(Failure::User(UserError(format!(
            "{} belongs to other answers or other weights than this run's: restore its data, or begin a new run",
            path.display()
        ))));
    }
    let split = |at: usize| -> Result<Vec<f32>, Failure> {
        let mut bytes = vec![0; 4 * counts[at]];
        file.read_into(SPLITS[at], &mut bytes).map_err(unreadable)?;
        Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    };
    Ok(Scores((0..counts.len()).map(split).collect::<Result<_, _>>()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_scores_read_back_to_the_bit_and_only_for_their_key() {
        let folder = tempfile::tempdir().unwrap();
        let path = path(folder.path());
        let scores = Scores(vec![vec![-1.5, f32::MIN_POSITIVE, -1e-30], vec![-0.1]]);
        store(&path, "mine", &scores).unwrap();
        assert_eq!(read(&path, "mine", &[3, 1]).unwrap(), scores);
        for (key, counts, words) in [
            ("yours", [3, 1], "other answers or other weights"),
            ("mine!", [3, 1], "other answers or other weights"),
            ("mine", [2, 1], "cannot be used"),
        ] {
            let Err(Failure::User(error)) = read(&path, key, &counts) else { panic!("{key} is refused") };
            assert!(error.0.contains(words), "{}", error.0);
        }
        std::fs::write(&path, b"broken").unwrap();
        assert!(matches!(read(&path, "mine", &[3, 1]), Err(Failure::User(_))));
    }
}
