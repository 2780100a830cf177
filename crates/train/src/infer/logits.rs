//! Computes every logit of given rows of tokens, for comparison with other libraries.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use flatout_ir::passes::input_path;
use flatout_ir::{Program, Role};
use flatout_models::config::Attention;
use flatout_models::form::Form;
use flatout_runtime::Session;

use crate::Failure;
use crate::UserError;
use crate::device::Device;
use crate::refuse;
use crate::run::checkpoint::{Dtype, header};
use crate::weights::loaded::Loaded;

/// Reads rows of token ids: a JSON list of lists.
pub fn read_ids(path: &Path) -> Result<Vec<Vec<u32>>, UserError> {
    let shown = path.display();
    let bytes = std::fs::read(path).map_err(|error| UserError(format!("{shown} cannot be read: {error}")))?;
    let rows: Vec<Vec<u32>> = serde_json::from_slice(&bytes).map_err(|error| {
        UserError(format!("{shown} must hold rows of token ids, as [[1, 2], [3]]: {error}"))
    })?;
    if rows.is_empty() {
        refuse!("{shown} has no rows");
    }
    if let Some(empty) = rows.iter().position(Vec::is_empty) {
        refuse!("{shown}: row {empty} has no tokens");
    }
    Ok(rows)
}

/// Checks that the model has a logit for every token of the rows.
pub fn check(loaded: &Loaded, rows: &[Vec<u32>]) -> Result<(), UserError> {
    let model = &loaded.config.model;
    if model.vocab().is_none() {
        refuse!("{} reads images, and has no logits of tokens", loaded.dir.display());
    }
    if model.classes().is_some() {
        refuse!("{} has a head of classes, and no logits of tokens", loaded.dir.display());
    }
    let sees_both_ways = model.as_decoder().is_some_and(|d| d.attention == Attention::Bidirectional);
    if sees_both_ways && rows.iter().any(|row| row.len() != rows[0].len()) {
        refuse!("{} sees both ways: give it rows of one length", loaded.dir.display());
    }
    check_tokens(loaded, rows)
}

/// Checks that the model's vocabulary contains the tokens, and that its positions suffice for the rows.
pub fn check_tokens(loaded: &Loaded, rows: &[Vec<u32>]) -> Result<(), UserError> {
    let (vocab, positions) = (loaded.config.model.vocab().unwrap_or(0), loaded.positions);
    for (number, row) in rows.iter().enumerate() {
        if let Some(token) = row.iter().find(|token| **token as usize >= vocab) {
            refuse!("row {number} has token {token}, and the model's vocabulary is {vocab}");
        }
        if row.len() > positions {
            refuse!("row {number} has {} tokens, and the model was made for {positions}", row.len());
        }
    }
    Ok(())
}

/// Tokens per batch.
const AT_ONCE: usize = 4096;

/// Computes the logits of rows, several per batch.
pub struct Logits {
    session: Session,
    /// Rows per batch.
    at_once: usize,
    /// Tokens of a row; shorter rows are padded at the end, because no token sees what comes after it.
    len: usize,
    vocab: usize,
}

impl Logits {
    /// For rows of at most `len` tokens; `rows` is their usual number.
    pub fn new(loaded: &mut Loaded, device: &Device, rows: usize, len: usize) -> Result<Logits, Failure> {
        let at_once = (AT_ONCE / len).clamp(1, rows.max(1));
        loaded.config.model.set_context(len);
        let vocab = loaded.config.model.vocab().expect("a model that was checked reads tokens");
        let graph = loaded.config.model.build(Form::Logits { rows: at_once, len, seen: None });
        let mut session = loaded.session(device, &[Program { role: Role::Logits, graph }])?;
        let positions: Vec<i32> = (0..at_once).flat_map(|_| 0..len as i32).collect();
        let axes = loaded.config.model.as_decoder().map_or(1, |decoder| decoder.position_axes());
        session.write_i32(&input_path(Role::Logits, "positions"), &positions.repeat(axes))?;
        Ok(Logits { session, at_once, len, vocab })
    }

    /// Number of tokens to which rows are padded.
    pub fn row_tokens(&self) -> usize {
        self.len
    }

    /// Logits of rows that passed [`check`], batch by batch: the rows of each batch and their logits, `len` times the vocabulary
    /// per row.
    pub fn of<'r>(
        &mut self,
        rows: &'r [Vec<u32>],
        take: &mut dyn FnMut(&'r [Vec<u32>], Vec<f32>) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        for chunk in rows.chunks(self.at_once) {
            let mut tokens = vec![0; self.at_once * self.len];
            for (row, place) in chunk.iter().zip(tokens.chunks_mut(self.len)) {
                place.iter_mut().zip(row).for_each(|(place, token)| *place = *token as i32);
            }
            self.session.write_i32(&input_path(Role::Logits, "tokens"), &tokens)?;
            self.session.run(Role::Logits)?;
            take(chunk, self.session.result(Role::Logits, "logits")?)?;
        }
        Ok(())
    }
}

/// Writes safetensors: one tensor `logits` [rows, length, vocabulary] if all rows are equally long, otherwise `logits.0`,
/// `logits.1` and so on, [length, vocabulary] each. The file appears atomically.
pub fn write(loaded: &mut Loaded, device: &Device, rows: &[Vec<u32>], out: &Path) -> Result<(), Failure> {
    check(loaded, rows)?;
    let longest = rows.iter().map(Vec::len).max().unwrap_or(1);
    let mut model = Logits::new(loaded, device, rows.len(), longest)?;
    let vocab = model.vocab;
    let partial = PathBuf::from(format!("{}.partial", out.display()));
    let opened = File::create(&partial).map_err(Failure::io(partial.display()))?;
    let mut writer = BufWriter::with_capacity(4 << 20, opened);
    let head = shapes(rows, vocab);
    let described: Vec<_> =
        head.iter().map(|(name, shape)| (name.as_str(), Dtype::F32, shape.as_slice())).collect();
    header(&described, &[])
        .and_then(|head| writer.write_all(&head))
        .map_err(Failure::io(partial.display()))?;
    model.of(rows, &mut |chunk, logits| {
        for (row, logits) in chunk.iter().zip(logits.chunks(longest * vocab)) {
            let bytes: Vec<u8> = logits[..row.len() * vocab].iter().flat_map(|x| x.to_le_bytes()).collect();
            writer.write_all(&bytes).map_err(Failure::io(partial.display()))?;
        }
        Ok(())
    })?;
    writer.flush().map_err(Failure::io(partial.display()))?;
    std::fs::rename(&partial, out).map_err(Failure::io(out.display()))
}

/// The tensors of the file, in the order of the rows.
fn shapes(rows: &[Vec<u32>], vocab: usize) -> Vec<(String, Vec<usize>)> {
    if rows.iter().all(|row| row.len() == rows[0].len()) {
        return vec![("logits".into(), vec![rows.len(), rows[0].len(), vocab])];
    }
    let named = |(number, row): (usize, &Vec<u32>)| (format!("logits.{number}"), vec![row.len(), vocab]);
    rows.iter().enumerate().map(named).collect()
}
