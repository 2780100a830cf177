//! Runs the plans over the cache: reads tokens of some lanes, each after those the lane has read, and returns logits and the
//! tokens that the device draws from them.

use std::collections::BTreeMap;

use flatout_ir::ops::sample::{Draw, NUMBERS, SHARES};
use flatout_ir::passes::input_path;
use flatout_ir::{Class, Role};
use flatout_runtime::Session;

use super::prompt::{Grids, Rest};
use super::tower::{Showing, Tower};
use crate::Failure;
use crate::UserError;

/// A session with the lanes of its cache.
pub(super) struct Reader {
    pub session: Session,
    /// The model's vocabulary, which may be larger than the tokeniser's.
    pub vocab: usize,
    /// The most tokens of a lane.
    pub capacity: usize,
    /// Tokens per run of the prefill plan.
    pub chunk: usize,
    /// Axes of a token's position.
    pub position_axes: usize,
    /// Number of tokens in the cache, by lane.
    seen: Vec<usize>,
    /// The position of the next token, by lane.
    next: Vec<usize>,
    /// Present for a model that reads images.
    pub tower: Option<Tower>,
}

/// A run of a plan.
pub(super) struct PlanRun {
    pub role: Role,
    pub portions: Vec<Portion>,
}

/// The tokens of a lane that a run has read.
pub(super) struct Portion {
    /// Index of its lane among the requested ones.
    pub index: usize,
    pub lane: usize,
    /// Its first row among all rows of the run.
    start: usize,
    pub count: usize,
    /// Whether all requested tokens of the lane have been read.
    pub is_last: bool,
}

impl PlanRun {
    /// The row of a run's results for a token of a portion; only `Logits` has rows for tokens other than the last.
    fn row(&self, portion: &Portion, token: usize) -> usize {
        if self.role == Role::Logits { portion.start + token } else { portion.lane }
    }
}

impl Reader {
    pub fn new(
        session: Session,
        vocab: usize,
        [sequences, capacity, chunk]: [usize; 3],
        position_axes: usize,
        tower: Option<Tower>,
    ) -> Reader {
        let [seen, next] = [(); 2].map(|()| vec![0; sequences]);
        Reader { session, vocab, capacity, chunk, position_axes, seen, next, tower }
    }

    pub fn lanes(&self) -> usize {
        self.seen.len()
    }

    /// Clears a lane.
    pub fn clear(&mut self, lane: usize) {
        (self.seen[lane], self.next[lane]) = (0, 0);
    }

    pub fn is_full(&self, lane: usize) -> bool {
        self.seen[lane] >= self.capacity
    }

    /// Releases a request's hold on pictures.
    pub fn remove(&mut self, pictures: &[usize]) {
        if let Some(tower) = &mut self.tower {
            pictures.iter().for_each(|number| tower.pictures.remove(*number));
        }
    }

    /// Bytes of the cache, over all lanes.
    pub fn cache_bytes(&self) -> usize {
        let slots = self.session.plans().slots.iter().filter(|slot| slot.class == Class::Cache);
        slots.map(|slot| slot.view.dims.iter().product::<usize>() * slot.view.dtype.bytes()).sum()
    }

    /// Checks that tokens fit a lane after those it has read.
    pub fn check(&self, lane: usize, more: usize) -> Result<(), UserError> {
        let (seen, capacity) = (self.seen[lane], self.capacity);
        if more == 0 || seen + more > capacity {
            return Err(UserError(format!(
                "{more} tokens after {seen} do not fit a context of {capacity} (or are none at all)"
            )));
        }
        Ok(())
    }

    /// The plan that reads these tokens with the least work, if the logits after the last token of each lane suffice.
    pub fn plan_for(rests: &[(usize, Rest<'_>)]) -> Role {
        let is_single = |(_, rest): &(usize, Rest<'_>)| rest.tokens.len() <= 1 && !rest.has_images();
        if rests.iter().all(is_single) { Role::Decode } else { Role::Prefill }
    }

    /// Reads as many of these tokens as fit one run of a plan, giving priority to the first lanes. `Decode` reads one token per
    /// lane, `Prefill` more, and `Logits` as many as `Prefill` with logits after every one. The token after a lane's last one is
    /// drawn on the device if `draws` has an entry for the lane, among the first `size` tokens.
    pub fn run(
        &mut self,
        role: Role,
        rests: &mut [(usize, Rest<'_>)],
        (draws, size): (&BTreeMap<usize, Draw>, usize),
    ) -> Result<PlanRun, Failure> {
        let mut room = if role == Role::Decode { self.lanes() } else { self.chunk };
        let none = Grids::default();
        let (mut portions, mut parts, mut showing) = (vec![], vec![], Showing::default());
        let mut start = 0;
        for (index, (lane, rest)) in rests.iter_mut().enumerate() {
            let (lane, read) = (*lane, self.seen[*lane]);
            let count = match &self.tower {
                None => rest.fitting(room, &none, |_| false),
                Some(tower) => {
                    let grids = &tower.pictures.grids;
                    rest.fitting(room, grids, |placed| tower.take(&mut showing, placed, lane, read))
                }
            };
            let (now, later) = rest.split_at(count);
            room -= count;
            *rest = later;
            if count > 0 {
                let is_last = later.tokens.is_empty();
                portions.push(Portion { index, lane, start, count, is_last });
                parts.push((lane, now));
                start += count;
            }
        }
        self.feed(role, &parts, showing)?;
        let ran = PlanRun { role, portions };
        self.feed_draws(&ran, draws, size)?;
        self.session.run(role)?;
        Ok(ran)
    }

    /// The tokens that the last run drew, by lane.
    pub fn drawn(&self, ran: &PlanRun) -> Result<BTreeMap<usize, u32>, Failure> {
        let rows = self.session.result(ran.role, "drawn")?;
        let last = ran.portions.iter().filter(|portion| portion.is_last);
        Ok(last.map(|portion| (portion.lane, rows[2 * ran.row(portion, portion.count - 1)] as u32)).collect())
    }

    /// Writes the parameters of the draws after lanes whose tokens are all read in this run; other rows draw nothing.
    fn feed_draws(
        &mut self,
        ran: &PlanRun,
        draws: &BTreeMap<usize, Draw>,
        size: usize,
    ) -> Result<(), Failure> {
        let rows = if ran.role == Role::Logits { self.chunk } else { self.lanes() };
        let (mut numbers, mut shares) = (vec![0; rows * NUMBERS], vec![0.0; rows * SHARES]);
        for portion in ran.portions.iter().filter(|portion| portion.is_last) {
            let Some(draw) = draws.get(&portion.lane) else { continue };
            let row = ran.row(portion, portion.count - 1);
            numbers[row * NUMBERS..][..NUMBERS].copy_from_slice(&draw.numbers(size));
            shares[row * SHARES..][..SHARES].copy_from_slice(&draw.shares());
        }
        self.session.write_i32(&input_path(ran.role, "numbers"), &numbers)?;
        Ok(self.session.write_f32(&input_path(ran.role, "shares"), &shares)?)
    }

    /// All logits of the last run.
    pub fn logits(&self, ran: &PlanRun) -> Result<Vec<f32>, Failure> {
        Ok(self.session.result(ran.role, "logits")?)
    }

    /// The logits after a token of a portion, among all logits of a run.
    pub fn row<'l>(&self, ran: &PlanRun, all: &'l [f32], portion: &Portion, token: usize) -> &'l [f32] {
        let row = ran.row(portion, token);
        &all[row * self.vocab..(row + 1) * self.vocab]
    }

    /// Writes the inputs of a plan: the portions one after another; the remaining tokens are padding.
    fn feed(&mut self, role: Role, portions: &[(usize, Rest<'_>)], showing: Showing) -> Result<(), Failure> {
        let room = if role == Role::Decode { self.seen.len() } else { self.chunk };
        let lanes = self.seen.len();
        let scores_all = role == Role::Logits;
        let mut inputs: BTreeMap<&str, Vec<i32>> = BTreeMap::new();
        for (name, count, fill) in [
            ("tokens", room, 0),
            ("positions", self.position_axes * room, 0),
            ("cache_rows", room, -1),
            ("new_start", lanes, 0),
            ("new_len", lanes, 0),
            ("seen_start", lanes, 0),
            ("seen_len", lanes, 0),
            ("last", if scores_all { room } else { lanes }, -1),
        ] {
            inputs.insert(name, vec![fill; count]);
        }
        let tower = self.tower.as_ref().filter(|_| role == Role::Prefill);
        if tower.is_some() {
            inputs.insert("seen", vec![-1; room]);
        }
        let mut set = |name: &str, at: usize, value: i32| {
            inputs.get_mut(name).expect("a named input")[at] = value;
        };
        let none = Grids::default();
        let grids = tower.map_or(&none, |tower| &tower.pictures.grids);
        let mut at = 0;
        for &(lane, portion) in portions {
            let (seen, first, count) = (self.seen[lane], lane * self.capacity, portion.tokens.len());
            let (positions, next) = portion.positions(self.next[lane], grids);
            for (i, (token, position)) in portion.tokens.iter().zip(positions).enumerate() {
                set("tokens", at + i, *token as i32);
                for (axis, position) in position.into_iter().take(self.position_axes).enumerate() {
                    set("positions", axis * room + at + i, position);
                }
                set("cache_rows", at + i, (first + seen + i) as i32);
                if scores_all {
                    set("last", at + i, (at + i) as i32);
                }
            }
            for (tower, placed) in
                tower.into_iter().flat_map(|tower| portion.images().map(move |p| (tower, p)))
            {
                let row = tower.row(&showing, placed.picture, lane);
                for (i, block) in grids.blocks(placed.picture).enumerate() {
                    // A row of the features stands there instead of one of the embedding.
                    set("tokens", at + placed.at + i, -1);
                    set("seen", at + placed.at + i, (row + block) as i32);
                }
            }
            set("new_start", lane, at as i32);
            set("new_len", lane, count as i32);
            set("seen_start", lane, first as i32);
            set("seen_len", lane, (seen + count) as i32);
            at += count;
            if !scores_all {
                set("last", lane, at as i32 - 1);
            }
            self.seen[lane] += count;
            self.next[lane] = next;
        }
        for (name, values) in inputs {
            self.session.write_i32(&input_path(role, name), &values)?;
        }
        if let Some(tower) = self.tower.as_mut().filter(|_| role == Role::Prefill) {
            tower.feed(&mut self.session, role, showing)?;
        }
        Ok(())
    }
}
