//! Text from a trained run: a prefill plan reads the prompt, a decode plan adds a token at a time, both over one cache
//! of keys and values.

use std::path::{Path, PathBuf};

use flatout_data::Vocabulary;
use flatout_ir::passes::input_path;
use flatout_ir::{Class, Program, Role, compile, random};
use flatout_models::decoder::{Form, build};
use flatout_runtime::Session;

use crate::config::Config;
use crate::device::Device;
use crate::failure::Failure;
use crate::settle::settle;
use crate::state::load;
use crate::trainer::tokenizer_path;
use crate::{checkpoint, initial, run};

/// How tokens are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the most likely token.
    pub temperature: f64,
    /// Only the most likely `top_k` tokens are drawn from; 0 is all.
    pub top_k: usize,
    pub seed: u64,
    pub max_tokens: usize,
}

/// A model with its cache.
pub struct Generator {
    session: Session,
    vocabulary: Vocabulary,
    context: usize,
    chunk: usize,
    /// Tokens in the cache.
    seen: usize,
    pub checkpoint: PathBuf,
    pub step: u64,
}

/// Prompt tokens read at once.
const CHUNK: usize = 64;

impl Generator {
    /// Opens the newest whole checkpoint of a run.
    pub fn open(dir: &Path, device: &Device) -> Result<Generator, Failure> {
        let config = run::config(dir)?;
        let Some(whole) = checkpoint::latest(&run::checkpoints_dir(dir))?.whole else {
            refused(format!(
                "the run in {} has no checkpoint yet: let it train until it saves",
                dir.display()
            ))?
        };
        let vocabulary = Vocabulary::load(&tokenizer_path(dir))?;
        let mut session = session(&config, device)?;
        let (_, mut file) = checkpoint::open(&whole.path).map_err(Failure::io(whole.path.display()))?;
        // What is frozen is in no checkpoint: it is what it was at the beginning.
        initial::write(&mut session, config.train.seed)?;
        load(&mut session, &mut file, |class| class == Class::Weight)?;
        let context = config.model.context;
        Ok(Generator {
            session,
            vocabulary,
            context,
            chunk: CHUNK.min(context),
            seen: 0,
            checkpoint: whole.path,
            step: whole.step,
        })
    }

    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// Forgets everything read so far.
    pub fn clear(&mut self) {
        self.seen = 0;
    }

    /// Reads tokens after those seen so far and gives the logits of what follows.
    pub fn read(&mut self, tokens: &[u32]) -> Result<Vec<f32>, Failure> {
        if tokens.is_empty() || self.seen + tokens.len() > self.context {
            let (seen, more, context) = (self.seen, tokens.len(), self.context);
            refused(format!(
                "{more} tokens after {seen} do not fit a context of {context} (or are none at all)"
            ))?;
        }
        let mut logits = vec![];
        let mut rest = tokens;
        while !rest.is_empty() {
            let (role, capacity) =
                if rest.len() == 1 { (Role::Decode, 1) } else { (Role::Prefill, self.chunk) };
            let (now, later) = rest.split_at(rest.len().min(capacity));
            self.feed(role, capacity, now)?;
            self.session.run(role)?;
            self.seen += now.len();
            if later.is_empty() {
                logits = self.session.result(role, "logits")?;
            }
            rest = later;
        }
        Ok(logits)
    }

    fn feed(&mut self, role: Role, capacity: usize, tokens: &[u32]) -> Result<(), Failure> {
        let (seen, count) = (self.seen as i32, tokens.len() as i32);
        let padded = |value: &dyn Fn(usize) -> i32, fill: i32| -> Vec<i32> {
            (0..capacity).map(|i| if i < tokens.len() { value(i) } else { fill }).collect()
        };
        let inputs = [
            ("tokens", padded(&|i| tokens[i] as i32, 0)),
            ("positions", padded(&|i| seen + i as i32, 0)),
            ("cache_rows", padded(&|i| seen + i as i32, -1)),
            ("new_start", vec![0]),
            ("new_len", vec![count]),
            ("seen_start", vec![0]),
            ("seen_len", vec![seen + count]),
            ("last", vec![count - 1]),
        ];
        for (name, values) in inputs {
            self.session.write_i32(&input_path(role, name), &values)?;
        }
        Ok(())
    }

    /// Continues a prompt, giving each piece of text as it comes; stops at the end of a document or a full context.
    pub fn generate(
        &mut self,
        prompt: &str,
        how: Sampling,
        mut piece: impl FnMut(&str),
    ) -> Result<String, Failure> {
        self.clear();
        let mut tokens = vec![self.vocabulary.bos()];
        tokens.extend(self.vocabulary.encode(prompt)?);
        let mut fresh = tokens.clone();
        let mut shown = self.vocabulary.decode(&tokens[1..]);
        piece(&shown);
        for i in 0..how.max_tokens {
            if self.seen + fresh.len() > self.context {
                break;
            }
            let logits = self.read(&fresh)?;
            let next = draw(&logits[..self.vocabulary.size()], how, i as u64);
            if next == self.vocabulary.eos() {
                break;
            }
            tokens.push(next);
            fresh = vec![next];
            // A character may take several tokens: only what is settled is shown.
            let text = self.vocabulary.decode(&tokens[1..]);
            if let Some(more) = text.strip_prefix(&shown).filter(|more| !more.ends_with('\u{fffd}')) {
                piece(more);
                shown = text;
            }
        }
        Ok(self.vocabulary.decode(&tokens[1..]))
    }
}

fn refused<T>(sentence: String) -> Result<T, Failure> {
    Err(Failure::User(crate::UserError(sentence)))
}

/// Prefill and decode, in the precision of the run.
fn session(config: &Config, device: &Device) -> Result<Session, Failure> {
    let target = &device.target(&config.switches);
    let model = &config.model;
    let capacity = model.context;
    let program =
        |role: Role, tokens: usize| Program { role, graph: build(model, Form::Cached { tokens, capacity }) };
    let programs = [program(Role::Prefill, CHUNK.min(capacity)), program(Role::Decode, 1)];
    let settled = settle(config, target, &programs[0].graph)?;
    device.session(compile(&programs, target, &settled.options)?, &settled)
}

/// A token drawn by its probability.
fn draw(logits: &[f32], how: Sampling, index: u64) -> u32 {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
    if how.temperature == 0.0 {
        return order[0];
    }
    order.truncate(if how.top_k == 0 { order.len() } else { how.top_k });
    let top = logits[order[0] as usize] as f64;
    let odds: Vec<f64> =
        order.iter().map(|t| ((logits[*t as usize] as f64 - top) / how.temperature).exp()).collect();
    let words = random::philox(
        [index as u32, (index >> 32) as u32, 0, 0],
        [how.seed as u32, (how.seed >> 32) as u32],
    );
    let unit = (((words[0] as u64) << 21) | (words[1] as u64 >> 11)) as f64 / (1u64 << 53) as f64;
    let mut left = unit * odds.iter().sum::<f64>();
    for (token, odd) in order.iter().zip(&odds) {
        left -= odd;
        if left < 0.0 {
            return *token;
        }
    }
    order[order.len() - 1]
}
