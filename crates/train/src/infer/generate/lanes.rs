//! Schedules requests in the lanes of the cache: they arrive, wait for a lane, are read and continued step by step, and leave it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use flatout_ir::Role;
use flatout_ir::ops::sample::Draw;
use rayon::prelude::*;

use super::prompt::Rest;
use super::reader::{PlanRun, Portion, Reader};
use super::request::{Finish, Progress, Request, ScoredToken, Work};
use super::text::TextStream;
use super::tower::Tower;
use super::{Generator, Prompt};
use crate::Failure;
use crate::UserError;
use crate::infer::sampling::{likeliest, log_sum};
use crate::refuse;

/// Policy: the lanes that a step reads, and the plans it uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scheduling {
    /// All lanes by one plan, and no lane continues before all prompts in the lanes are read: for prompts that are all known from
    /// the start.
    Batch,
    /// First one token of every sequence that has begun, by the decode plan, then as much of the prompts as fits, in order of
    /// arrival, by a plan for many tokens. Plans differ in the last bits, so a given token always uses the same plan.
    Continuous,
}

/// The lanes that one run of a plan reads, in order of priority.
struct PlannedRun {
    /// `None` selects the plan that reads them with the least work.
    role: Option<Role>,
    lanes: Vec<usize>,
}

pub(super) struct Lanes {
    work: Vec<Option<Work>>,
    waiting: VecDeque<Work>,
    scheduling: Scheduling,
    /// The id of the next request.
    next: u64,
}

impl Lanes {
    pub fn new(sequences: usize, scheduling: Scheduling) -> Lanes {
        Lanes { work: (0..sequences).map(|_| None).collect(), waiting: VecDeque::new(), scheduling, next: 0 }
    }

    /// Drops all requests.
    pub fn clear(&mut self, reader: &mut Reader) {
        let lanes = self.work.iter_mut().filter_map(Option::take);
        lanes.chain(self.waiting.drain(..)).for_each(|work| reader.remove(&work.pictures));
    }

    /// Assigns free lanes to waiting requests, after clearing them in `reader`.
    fn admit(&mut self, reader: &mut Reader) {
        for (lane, place) in self.work.iter_mut().enumerate().filter(|(_, place)| place.is_none()) {
            let Some(work) = self.waiting.pop_front() else { return };
            reader.clear(lane);
            *place = Some(work);
        }
    }

    /// The runs of a step.
    fn planned_runs(&mut self, reader: &mut Reader) -> Vec<PlannedRun> {
        if self.scheduling == Scheduling::Continuous {
            self.admit(reader);
            let mut busy: Vec<(u64, usize, Role)> = vec![];
            for (lane, work) in self.work.iter().enumerate() {
                busy.extend(work.as_ref().map(|work| (work.id, lane, work.plan(reader.tower.is_some()))));
            }
            busy.sort_unstable_by_key(|(id, ..)| *id);
            let run_of = |role: Role| {
                let lanes =
                    busy.iter().filter(|(.., plan)| *plan == role).map(|(_, lane, _)| *lane).collect();
                PlannedRun { role: Some(role), lanes }
            };
            return [Role::Decode, Role::Prefill, Role::Logits].map(run_of).into();
        }
        if !self.work.iter().flatten().any(|work| work.is_due) {
            self.admit(reader);
            self.work.iter_mut().flatten().for_each(|work| work.is_due = true);
        }
        let is_due = |lane: &usize| self.work[*lane].as_ref().is_some_and(|work| work.is_due);
        vec![PlannedRun { role: None, lanes: (0..self.work.len()).filter(is_due).collect() }]
    }
}

/// A lane whose tokens have all been read.
struct ReadLane<'w> {
    /// The token that the device drew.
    drawn: Option<u32>,
    /// The logits from which the host draws a token; `None` if the device drew it, or no token is needed.
    row: Option<&'w [f32]>,
    request: &'w Request,
    made: &'w [u32],
}

impl Generator {
    /// Accepts a request and returns its id. It waits for a lane if all are occupied.
    pub fn submit(&mut self, request: Request) -> Result<u64, UserError> {
        let (count, capacity) = (request.prompt.tokens.len(), self.capacity());
        if count == 0 || count > capacity {
            refuse!(
                "a prompt has {count} tokens, and the context is {capacity}: give at least one and at most as many"
            );
        }
        if request.echo && (!self.scores || !request.prompt.images.is_empty()) {
            refuse!("the tokens of this prompt cannot be scored");
        }
        let (size, vocab) = (self.drawn_from(), self.reader.vocab);
        if let Some(token) = request.prompt.tokens.iter().find(|token| **token as usize >= vocab) {
            refuse!("token {token} of the prompt is not one of the model's {vocab}");
        }
        if let Some((token, _)) = request.adjustments.bias.iter().find(|(token, _)| *token as usize >= size) {
            refuse!("token {token} is not one of the vocabulary's {size}");
        }
        let text = match &request.text {
            None => None,
            Some(stops) => Some(TextStream::new(
                self.vocabulary_for_text()?.clone(),
                &request.prompt.tokens,
                stops.clone(),
            )),
        };
        let mut request = request;
        let (mut fresh, given) = (request.prompt.clone(), std::mem::take(&mut request.pictures));
        let mut pictures = vec![];
        // Pictures that were given at the start have numbers already.
        if !given.is_empty() {
            let fits = |tower: &Tower| given.iter().all(|picture| tower.fits(picture));
            let Some(tower) = self.reader.tower.as_mut().filter(|tower| fits(tower)) else {
                refuse!("the prompt has an image that this model cannot read, or one that is too large");
            };
            pictures = given.into_iter().map(|picture| tower.add(picture)).collect();
            fresh.images.iter_mut().for_each(|placed| placed.picture = pictures[placed.picture]);
        }
        let id = self.lanes.next;
        self.lanes.next += 1;
        let work =
            Work { id, request, fresh, read: 0, is_due: false, made: vec![], pictures, echoed: vec![], text };
        self.lanes.waiting.push_back(work);
        Ok(id)
    }

    /// Cancels a request, whether it waits or is in progress.
    pub fn cancel(&mut self, id: u64) {
        let Lanes { work, waiting, .. } = &mut self.lanes;
        let waits = waiting.iter().position(|work| work.id == id).and_then(|at| waiting.remove(at));
        let worked = work.iter_mut().find(|work| work.as_ref().is_some_and(|work| work.id == id));
        if let Some(work) = waits.or_else(|| worked.and_then(Option::take)) {
            self.reader.remove(&work.pictures);
        }
    }

    pub fn is_busy(&self) -> bool {
        !self.lanes.waiting.is_empty() || self.lanes.work.iter().any(Option::is_some)
    }

    /// Number of tokens that may be drawn: the model's vocabulary may be larger than the tokeniser's.
    fn drawn_from(&self) -> usize {
        self.vocabulary.as_ref().map_or(self.reader.vocab, |vocabulary| vocabulary.size())
    }

    /// Makes a step with the present requests, and returns the progress of those for which tokens were drawn.
    pub fn advance(&mut self) -> Result<Vec<Progress>, Failure> {
        let mut news = vec![];
        for planned in
            self.lanes.planned_runs(&mut self.reader).into_iter().filter(|run| !run.lanes.is_empty())
        {
            news.extend(self.run(planned)?);
        }
        Ok(news)
    }

    /// Runs a plan once.
    fn run(&mut self, PlannedRun { role, lanes }: PlannedRun) -> Result<Vec<Progress>, Failure> {
        let work = |lane: &usize| self.lanes.work[*lane].as_ref().expect("a lane that is read has work");
        let rest = |lane: &usize| (*lane, Rest::of(&work(lane).fresh).split_at(work(lane).read).1);
        let mut rests: Vec<(usize, Rest<'_>)> = lanes.iter().map(rest).collect();
        let role = role.unwrap_or_else(|| Reader::plan_for(&rests));
        let on_device = |lane: &usize| Some((*lane, work(lane).draw_on_device()?));
        let draws: BTreeMap<usize, Draw> = lanes.iter().filter_map(on_device).collect();
        let scored: BTreeSet<usize> = lanes.iter().copied().filter(|lane| work(lane).request.echo).collect();
        let ran = self.reader.run(role, &mut rests, (&draws, self.drawn_from()))?;
        let needs_logits = |portion: &Portion| {
            let is_scored = role == Role::Logits && scored.contains(&portion.lane);
            is_scored || (portion.is_last && !draws.contains_key(&portion.lane))
        };
        let logits = if ran.portions.iter().any(needs_logits) { self.reader.logits(&ran)? } else { vec![] };
        let is_drawn = |portion: &Portion| portion.is_last && draws.contains_key(&portion.lane);
        let tokens =
            if ran.portions.iter().any(is_drawn) { self.reader.drawn(&ran)? } else { BTreeMap::new() };
        let mut done = vec![];
        for portion in ran.portions.iter() {
            let lane = lanes[portion.index];
            let work = self.lanes.work[lane].as_mut().expect("a lane that is read has work");
            if work.request.echo && role == Role::Logits {
                score(&self.reader, &ran, &logits, portion, work);
            }
            work.read += portion.count;
            if portion.is_last {
                work.is_due = false;
                // A prompt that has been read no longer needs its images.
                self.reader.remove(&std::mem::take(&mut work.pictures));
                done.push((lane, portion));
            }
        }
        let mut read = vec![];
        for (lane, portion) in &done {
            let work = self.lanes.work[*lane].as_ref().expect("a lane that was read has work");
            let drawn = draws.contains_key(lane).then(|| tokens[lane]);
            let needs_row = drawn.is_none() && work.request.how.max_tokens > 0;
            let row = needs_row.then(|| self.reader.row(&ran, &logits, portion, portion.count - 1));
            read.push(ReadLane { drawn, row, request: &work.request, made: &work.made });
        }
        let drawn = draw_all(&read, self.drawn_from());
        let lanes = done.into_iter().map(|(lane, _)| lane);
        Ok(lanes.zip(drawn).map(|(lane, scored)| self.take(lane, scored)).collect())
    }

    /// Records the token that was drawn in a lane, and frees the lane if the text ends with it.
    fn take(&mut self, lane: usize, scored: Option<ScoredToken>) -> Progress {
        let place = &mut self.lanes.work[lane];
        let work = place.as_mut().expect("a lane that was read has work");
        let mut news = Progress {
            id: work.id,
            echoed: std::mem::take(&mut work.echoed),
            text: String::new(),
            tokens: vec![],
            is_drawn: scored.is_some(),
            finish: None,
        };
        match scored {
            None => news.finish = Some(Finish::Length),
            Some(scored)
                if self.stops.contains(&scored.token) || work.request.stops.contains(&scored.token) =>
            {
                news.finish = Some(Finish::Token(scored));
            }
            Some(scored) => {
                work.made.push(scored.token);
                (work.fresh, work.read) = (Prompt::from(vec![scored.token]), 0);
                if work.made.len() >= work.request.how.max_tokens || self.reader.is_full(lane) {
                    news.finish = Some(Finish::Length);
                }
                match &mut work.text {
                    None => news.tokens = vec![scored],
                    Some(text) => {
                        let settled = text.push(scored);
                        (news.text, news.tokens) = (settled.text, settled.tokens);
                        if settled.is_end {
                            news.finish = Some(Finish::Text);
                        }
                    }
                }
            }
        }
        if let Some(finish) = &mut news.finish {
            if let Some(text) = work.text.as_mut().filter(|_| *finish != Finish::Text) {
                let rest = text.finish();
                news.text += &rest.text;
                news.tokens.extend(rest.tokens);
                if rest.is_end {
                    *finish = Finish::Text;
                }
            }
            *place = None;
        }
        news
    }
}

/// The next token of every lane, as drawn by the device or else here from its logits, among the first `size` tokens; `None` for a
/// lane that needs none. Drawing sorts the vocabulary for each lane, in parallel on all threads.
fn draw_all(lanes: &[ReadLane<'_>], size: usize) -> Vec<Option<ScoredToken>> {
    let drawn =
        |ReadLane { drawn, row, request, made }: &ReadLane<'_>| {
            let Some(row) = row else {
                return drawn.map(|token| ScoredToken { token, ..ScoredToken::default() });
            };
            let Request { how, copy, adjustments, top, .. } = request;
            let draw = how.at(*copy, made.len());
            let token = match adjustments.is_none() {
                true => draw.token(&row[..size]),
                false => {
                    let mut changed = row[..size].to_vec();
                    adjustments.apply(&mut changed, made);
                    draw.token(&changed)
                }
            };
            Some(top.map_or(ScoredToken { token, ..ScoredToken::default() }, |top| {
                with_logps(row, size, token, top)
            }))
        };
    lanes.par_iter().map(drawn).collect()
}

/// Scores the tokens of a prompt that a run has read: each by the logits after the token before it.
fn score(reader: &Reader, ran: &PlanRun, logits: &[f32], portion: &Portion, work: &mut Work) {
    let (tokens, top) = (&work.request.prompt.tokens, work.request.top.unwrap_or(0));
    if work.read == 0 {
        work.echoed.push(ScoredToken { token: tokens[0], ..ScoredToken::default() });
    }
    let rows: Vec<(&[f32], u32)> = (0..portion.count)
        .filter_map(|at| Some((reader.row(ran, logits, portion, at), *tokens.get(work.read + at + 1)?)))
        .collect();
    work.echoed.par_extend(rows.par_iter().map(|(row, next)| with_logps(row, row.len(), *next, top)));
}

/// A token with its log-probability, and those of the most likely tokens at its position.
fn with_logps(row: &[f32], size: usize, token: u32, top: usize) -> ScoredToken {
    let sum = log_sum(row);
    let logp = |token: u32| (row[token as usize] as f64 - sum) as f32;
    let top = likeliest(&row[..size], top).into_iter().map(|token| (token, logp(token))).collect();
    ScoredToken { token, logp: Some(logp(token)), top }
}
