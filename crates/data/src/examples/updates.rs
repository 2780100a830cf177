//! Examples in the order of training, update by update.
//!
//! The series of all epochs is a permutation of the examples per epoch, and update `u` has the examples at `u * batch` and the
//! `batch - 1` after it. The number of an update therefore determines its examples, independent of the layout, and the cursor
//! is a count.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::ExampleTable;
use super::layout::{BatchAssignment, Layout, Member, MicroBatch};
use super::lengths::Extent;
use crate::error::DataError;
use crate::order::documents::Spent;
use crate::order::lanes::Lanes;
use crate::order::mixture::MixtureSource;
use crate::order::permutation::{Order, Permutation};
use crate::order::stall::Waited;
use crate::random::key;

/// State from which training resumes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExampleCursor {
    /// Position of the next example in the series; for pairs, of the next pair.
    pub sample: u64,
    /// Hash of everything the position refers to: examples and seed. A cursor is refused where the hash differs.
    pub data: String,
}

/// The examples of an update, laid out.
#[derive(Debug, Clone, PartialEq)]
pub struct ExampleUpdate {
    /// Micro-batches, lane by lane.
    pub parts: Vec<MicroBatch>,
    /// Indices of all examples of the update, also of those in other ranks' lanes.
    pub numbers: Vec<usize>,
    /// Its tokens on all ranks: those of examples, and those that are computed.
    pub tokens: [usize; 2],
    /// Passes over the examples after this update.
    pub epoch: f64,
    pub waited: Waited,
}

/// Endless updates from a cursor on.
pub struct Updates {
    table: Arc<ExampleTable>,
    order: Order,
    seed: u64,
    batch: usize,
    layout: Layout,
    class_weights: Vec<f32>,
    cursor: ExampleCursor,
    /// The window whose examples are sorted by length: its number and its order.
    window: Option<(u64, Vec<u64>)>,
    /// The epoch in which examples with a common prefix follow one another: its number and its order.
    epoch: Option<(u64, Vec<u32>)>,
    is_sorted: bool,
    /// The lanes of this rank.
    lanes: Lanes,
    waited: Waited,
}

/// Updates per window in which examples of similar length are grouped. More sort better and shuffle less.
const WINDOW_UPDATES: usize = 50;

/// The order, the size and the layout of updates.
#[derive(Debug, Clone, PartialEq)]
pub struct UpdateOptions {
    pub seed: u64,
    /// Examples per update, or pairs.
    pub batch: usize,
    pub layout: Layout,
    /// Whether examples of similar length share an update.
    pub is_sorted: bool,
    /// Weight of each class in the loss; 1 where none is given.
    pub class_weights: Vec<f32>,
}

impl Updates {
    /// The cursor of a new run.
    pub fn start(table: &ExampleTable, seed: u64) -> ExampleCursor {
        ExampleCursor { sample: 0, data: fingerprint_of(table, seed) }
    }

    /// Refuses a cursor of other examples or another seed, and a table without examples.
    pub fn new(
        table: Arc<ExampleTable>,
        options: UpdateOptions,
        cursor: ExampleCursor,
    ) -> Result<Updates, DataError> {
        if table.count() == 0 {
            return Err(DataError::input("There is no example to train on: check data.path."));
        }
        let UpdateOptions { seed, batch, layout, is_sorted, class_weights } = options;
        if cursor.data != fingerprint_of(&table, seed) {
            return Err(DataError::input(
                "The examples are not those this run began with (files, template, tokeniser or seed changed), so it \
                 cannot go on exactly: restore the data, or begin a new run.",
            ));
        }
        let order = table.order(seed);
        let (window, epoch, waited) = (None, None, Waited::default());
        Ok(Updates {
            table,
            order,
            seed,
            batch,
            layout,
            class_weights,
            cursor,
            window,
            epoch,
            is_sorted,
            lanes: Lanes::ONE,
            waited,
        })
    }

    /// The same updates, of which only these lanes are laid out.
    pub fn of_lanes(self, lanes: Lanes) -> Updates {
        Updates { lanes, ..self }
    }

    /// The next update.
    pub fn next_update(&mut self) -> ExampleUpdate {
        let since = Instant::now();
        let first = self.cursor.sample;
        let (units, together) = (first..first + self.batch as u64, self.table.together() as u64);
        let of_unit = |unit: u64| unit * together..(unit + 1) * together;
        let samples: Vec<u64> = units.clone().flat_map(of_unit).collect();
        let examples = units.map(|sample| self.unit(sample));
        let examples: Vec<usize> = examples.flat_map(of_unit).map(|example| example as usize).collect();
        let (parts, tokens) = self.parts(&examples, &samples);
        // With a single lane, in the order of the micro-batches.
        let numbers = match self.lanes.of {
            1 => parts.iter().flat_map(|part| part.numbers.iter().copied()).collect(),
            _ => examples,
        };
        self.cursor.sample += self.batch as u64;
        // Tokens are in memory, so laying them out is the only work to wait for.
        let spent = since.elapsed();
        let waited = Waited::new(spent, Spent::default(), spent);
        self.waited += waited;
        let epoch = self.cursor.sample as f64 / self.table.epoch_examples() as f64;
        ExampleUpdate { parts, numbers, tokens, epoch, waited }
    }

    /// Lays out this rank's lanes of an update, and counts the tokens of all lanes. Examples that share a prefix or are
    /// compared are one unit of a lane.
    fn parts(&self, examples: &[usize], samples: &[u64]) -> (Vec<MicroBatch>, [usize; 2]) {
        if self.lanes.of == 1 {
            let parts = laid_out(&self.table, examples, samples, &self.layout, &self.class_weights);
            let real = parts.iter().map(MicroBatch::real_tokens).sum();
            let computed = parts.iter().map(|part| part.tokens.len()).sum();
            return (parts, [real, computed]);
        }
        let (together, shares) = (self.table.together(), self.layout.trees().is_some());
        let mut units: HashMap<(bool, usize), usize> = HashMap::new();
        let mut lanes = vec![(vec![], vec![]); self.lanes.of];
        for (place, (example, sample)) in examples.iter().zip(samples).enumerate() {
            let member = self.table.member(*example);
            let unit = match shares && together == 1 && member.prefix.tokens > 0 {
                true => (true, member.group as usize),
                false => (false, place / together),
            };
            let next = units.len();
            let lane = *units.entry(unit).or_insert(next) % self.lanes.of;
            lanes[lane].0.push(*example);
            lanes[lane].1.push(*sample);
        }
        let mut places: Vec<Vec<BatchAssignment>> =
            lanes.iter().map(|(examples, _)| self.layout.places(&members(&self.table, examples))).collect();
        if self.lanes.are_in_step() {
            (0..self.lanes.count).for_each(|time| in_step(&mut places, self.lanes.at_the_time_of(time)));
        }
        let (mut parts, mut tokens) = (vec![], [0; 2]);
        for place in places.iter().flatten() {
            tokens[0] += place.used.tokens;
            tokens[1] += self.layout.shapes()[place.shape].tokens();
        }
        for (lane, ((examples, samples), places)) in lanes.iter().zip(places).enumerate() {
            let Some(own) = self.lanes.of_unit(lane) else { continue };
            let mut filled =
                filled(&self.table, (examples, samples), places, &self.layout, &self.class_weights);
            filled.iter_mut().for_each(|part| part.lane = own);
            parts.extend(filled);
        }
        (parts, tokens)
    }

    /// The example or pair at a position of the series.
    fn unit(&mut self, sample: u64) -> u64 {
        // Pairs share no prefix with one another, so their order is free.
        let is_grouped = self.layout.trees().is_some() && !self.table.is_paired;
        if let Some(prefixes) = self.table.prefixes.as_ref().filter(|_| is_grouped) {
            let count = self.table.count() as u64;
            let (number, at) = (sample / count, sample % count);
            if self.epoch.as_ref().is_none_or(|(of, _)| *of != number) {
                self.epoch = Some((number, prefixes.order(key(self.seed, number))));
            }
            return self.epoch.as_ref().expect("set above").1[at as usize] as u64;
        }
        if !self.is_sorted {
            return self.order.document(sample);
        }
        // Windows end with the epoch, so that no example occurs twice in one.
        let updates = (self.table.units() / self.batch).clamp(1, WINDOW_UPDATES);
        let size = (updates * self.batch) as u64;
        let (number, at) = (sample / size, sample % size);
        if self.window.as_ref().is_none_or(|(of, _)| *of != number) {
            let window: Vec<u64> =
                (number * size..(number + 1) * size).map(|s| self.order.document(s)).collect();
            let lengths: Vec<usize> = window.iter().map(|unit| self.table.unit_len(*unit as usize)).collect();
            let sorted = sorted_window(&lengths, self.batch, key(self.seed, number));
            self.window = Some((number, sorted.into_iter().map(|index| window[index]).collect()));
        }
        self.window.as_ref().expect("set above").1[at as usize]
    }

    /// Position of the update after the last one returned.
    pub fn cursor(&self) -> &ExampleCursor {
        &self.cursor
    }

    /// Total time that `next_update` has taken.
    pub fn waited(&self) -> Waited {
        self.waited
    }
}

/// Lays out every example of a table once, in order, up to a limit of examples or pairs; for evaluation.
pub fn once(table: &ExampleTable, most: usize, layout: &Layout, class_weights: &[f32]) -> Vec<MicroBatch> {
    some(table, 0..table.units().min(most), layout, class_weights)
}

/// Lays out a subset of a table's examples or pairs once, in the given order.
pub fn some(
    table: &ExampleTable,
    units: impl IntoIterator<Item = usize>,
    layout: &Layout,
    class_weights: &[f32],
) -> Vec<MicroBatch> {
    let together = table.together();
    let of_unit = |unit: usize| unit * together..(unit + 1) * together;
    let examples: Vec<usize> = units.into_iter().flat_map(of_unit).collect();
    let samples: Vec<u64> = examples.iter().map(|index| *index as u64).collect();
    laid_out(table, &examples, &samples, layout, class_weights)
}

fn laid_out(
    table: &ExampleTable,
    examples: &[usize],
    samples: &[u64],
    layout: &Layout,
    class_weights: &[f32],
) -> Vec<MicroBatch> {
    let places = layout.places(&members(table, examples));
    filled(table, (examples, samples), places, layout, class_weights)
}

fn members(table: &ExampleTable, examples: &[usize]) -> Vec<Member> {
    examples.iter().map(|example| table.member(*example)).collect()
}

/// Gives lanes that are computed at the same time equally many micro-batches, each in the largest shape that one of them needs,
/// so that ranks run the same plans.
fn in_step(places: &mut [Vec<BatchAssignment>], lanes: impl Iterator<Item = usize>) {
    let lanes: Vec<usize> = lanes.collect();
    let most = lanes.iter().map(|lane| places[*lane].len()).max().unwrap_or(0);
    for number in 0..most {
        let shapes = lanes.iter().filter_map(|lane| Some(places[*lane].get(number)?.shape));
        let shape = shapes.min().expect("a lane has as many");
        for lane in &lanes {
            match places[*lane].get_mut(number) {
                Some(place) => place.shape = shape,
                None => places[*lane].push(BatchAssignment { shape, used: Extent::default(), trees: vec![] }),
            }
        }
    }
}

/// Fills micro-batches with the examples that are assigned to them.
fn filled(
    table: &ExampleTable,
    (examples, samples): (&[usize], &[u64]),
    places: Vec<BatchAssignment>,
    layout: &Layout,
    class_weights: &[f32],
) -> Vec<MicroBatch> {
    let fill = |place: BatchAssignment| {
        let extents = layout.shapes()[place.shape];
        let mut batch = MicroBatch::empty(layout, place.shape);
        for tree in place.trees {
            let of_tree: Vec<_> = tree.iter().map(|i| (table.get(examples[*i]), samples[*i])).collect();
            let prefix = if tree.len() > 1 { table.member(examples[tree[0]]).prefix.tokens } else { 0 };
            batch.push(extents, &of_tree, prefix, class_weights);
            // Texts with types share no prefix, so each is a segment of its own.
            if let (&[one], Some(segment)) = (&tree[..], batch.segments.last()) {
                let (start, second) = (segment.start as usize, table.second_of(examples[one]));
                batch.types[start + second.start..start + second.end].fill(1);
            }
            batch.numbers.extend(tree.iter().map(|i| examples[*i]));
        }
        batch
    };
    places.into_iter().map(fill).collect()
}

/// An order of examples in which each `batch` have similar lengths, window by window.
pub(crate) fn sorted_windows(lengths: &[usize], batch: usize, seed: u64) -> Vec<usize> {
    let windows = lengths.chunks(WINDOW_UPDATES * batch).enumerate();
    let of_window = |(number, window): (usize, &[usize])| {
        let base = number * WINDOW_UPDATES * batch;
        sorted_window(window, batch, key(seed, number as u64)).into_iter().map(move |i| base + i)
    };
    windows.flat_map(of_window).collect()
}

/// Sorts by length and cuts into batches, which are shuffled, so that lengths do not grow over the window.
fn sorted_window(lengths: &[usize], batch: usize, key: u64) -> Vec<usize> {
    let mut sorted: Vec<usize> = (0..lengths.len()).collect();
    sorted.sort_by_key(|index| lengths[*index]);
    let batches: Vec<&[usize]> = sorted.chunks(batch).collect();
    let shuffled = Permutation::new(batches.len() as u64, key);
    (0..batches.len()).flat_map(|i| batches[shuffled.at(i as u64) as usize].to_vec()).collect()
}

/// Hash that changes with every token, weight, label and image, and with the seed.
fn fingerprint_of(table: &ExampleTable, seed: u64) -> String {
    let examples =
        table.iter().fold(key(seed, table.count() as u64), |hash, example| example.fold_into(hash));
    let of_source = |hash: u64, part: &MixtureSource| key(key(hash, part.count), part.weight.to_bits());
    let sources = table.mixture.as_ref().map(|mixture| mixture.parts.iter().fold(examples, of_source));
    format!("{:016x}", sources.unwrap_or(examples))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::examples::Example;
    use crate::examples::layout::Shape;

    /// Example `i` has 1 to 13 tokens, all of them `i`.
    fn table(count: u32) -> Arc<ExampleTable> {
        let mut table = ExampleTable::default();
        for index in 0..count {
            let len = 1 + (index as usize * 5) % 13;
            table.push(Example {
                tokens: &vec![index; len],
                weights: &vec![1.0; len],
                label: Some(index % 2),
                images: &[],
            });
        }
        Arc::new(table)
    }

    fn layouts() -> [Layout; 3] {
        let packed = |tokens| Shape::Packed { tokens, segments: 8 };
        let padded = |len| Shape::Padded { rows: 2, len };
        [
            Layout::new(vec![packed(24), packed(16)]),
            Layout::new(vec![padded(13), padded(8), padded(4)]),
            Layout::new(vec![padded(16)]),
        ]
    }

    fn updates(layout: &Layout, is_sorted: bool, sample: u64) -> Updates {
        let options = UpdateOptions {
            seed: 3,
            batch: 5,
            layout: layout.clone(),
            is_sorted,
            class_weights: vec![1.0, 2.0],
        };
        let start = Updates::start(&table(37), 3);
        Updates::new(table(37), options, ExampleCursor { sample, ..start }).unwrap()
    }

    fn next(updates: &mut Updates) -> ExampleUpdate {
        ExampleUpdate { waited: Waited::default(), ..updates.next_update() }
    }

    /// (sample, tokens, targets, label, label weight) of every example, by sample.
    type Read = Vec<(u64, Vec<i32>, Vec<i32>, i32, f32)>;

    fn read(update: &ExampleUpdate) -> Read {
        let mut all: Read = vec![];
        for part in &update.parts {
            for (i, (segment, sample)) in part.segments.iter().zip(&part.samples).enumerate() {
                let range = segment.start as usize..(segment.start + segment.len) as usize;
                let (tokens, targets) = (part.tokens[range.clone()].to_vec(), part.targets[range].to_vec());
                all.push((*sample, tokens, targets, part.labels[i], part.label_weights[i]));
            }
        }
        all.sort_by_key(|one| one.0);
        all
    }

    #[test]
    fn an_update_has_the_same_examples_in_every_layout() {
        for is_sorted in [false, true] {
            let mut all = layouts().map(|layout| updates(&layout, is_sorted, 0));
            for update in 0..20 {
                let [a, b, c] = all.each_mut().map(|updates| read(&next(updates)));
                assert_eq!(a, b);
                assert_eq!(a, c);
                assert!(a.iter().map(|one| one.0).eq(5 * update..5 * update + 5));
                assert!(a.iter().all(|one| one.4 == 1.0 + one.3 as f32));
            }
        }
    }

    /// The second text of a pair has type 1 in every layout; padding and single texts have type 0.
    #[test]
    fn types_follow_their_tokens_in_every_layout() {
        let mut pairs = ExampleTable::default();
        for (len, second) in [(5, Some(2)), (7, None), (3, Some(3)), (4, Some(1))] {
            let weights = vec![0.0; len];
            pairs.push(Example { tokens: &vec![9; len], weights: &weights, label: Some(0), images: &[] });
            pairs.set_second(second);
        }
        for layout in layouts() {
            for part in once(&pairs, 9, &layout, &[]) {
                for (segment, number) in part.segments.iter().zip(&part.numbers) {
                    let range = segment.start as usize..(segment.start + segment.len) as usize;
                    let wanted = [&[0, 0, 1, 1, 1][..], &[0; 7], &[0; 3], &[0, 1, 1, 1]][*number];
                    assert_eq!(part.types[range], *wanted, "{number} in {layout:?}");
                }
                let typed: i32 = part.numbers.iter().map(|number| [3, 0, 0, 3][*number]).sum();
                assert_eq!(part.types.iter().sum::<i32>(), typed);
            }
        }
    }

    /// For any number of ranks, a lane has the same micro-batches, and all lanes together make up the update.
    #[test]
    fn lanes_are_the_same_on_every_number_of_ranks() {
        for layout in layouts() {
            let of = |ranks: usize| -> Vec<(usize, MicroBatch)> {
                let of_rank = |rank: usize| {
                    let count = 4 / ranks;
                    let lanes = Lanes { first: rank * count, count, of: 4, together: 1, batch: 5 };
                    let mut updates = updates(&layout, false, 5).of_lanes(lanes);
                    let update = next(&mut updates);
                    assert_eq!((updates.cursor().sample, update.numbers.len()), (10, 5));
                    let numbered = move |mut part: MicroBatch| {
                        let lane = rank * count + std::mem::take(&mut part.lane);
                        (lane, part)
                    };
                    update.parts.into_iter().map(numbered)
                };
                (0..ranks).flat_map(of_rank).collect()
            };
            let whole = of(1);
            assert_eq!([of(2), of(4)], [whole.clone(), whole.clone()]);
            let mut samples: Vec<u64> = vec![];
            for (lane, part) in &whole {
                assert!(part.samples.iter().all(|sample| (sample - 5) % 4 == *lane as u64));
                samples.extend(&part.samples);
            }
            samples.sort_unstable();
            assert_eq!(samples, [5, 6, 7, 8, 9]);
        }
    }

    /// Ranks in step have equally many micro-batches in the same shapes, and the same examples as otherwise.
    #[test]
    fn ranks_in_step_run_the_same_plans() {
        for layout in layouts() {
            let of = |ranks: usize, together: usize| -> Vec<ExampleUpdate> {
                let count = 8 / ranks;
                let first = |rank: usize| rank / together * together * count + rank % together;
                let lanes = |rank| Lanes { first: first(rank), count, of: 8, together, batch: 5 };
                (0..ranks).map(|rank| next(&mut updates(&layout, false, 5).of_lanes(lanes(rank)))).collect()
            };
            let mut empty = 0;
            for (ranks, together) in [(2, 2), (4, 4), (4, 2)] {
                let all = of(ranks, together);
                let plans = |update: &ExampleUpdate| -> Vec<(usize, usize)> {
                    update.parts.iter().map(|part| (part.lane, part.shape)).collect()
                };
                for update in &all[1..] {
                    assert_eq!(plans(update), plans(&all[0]), "{ranks} ranks, {together} together");
                    assert_eq!(update.tokens, all[0].tokens, "of all ranks");
                }
                let computed: usize = all.iter().flat_map(|u| &u.parts).map(|part| part.tokens.len()).sum();
                assert_eq!(computed, all[0].tokens[1]);
                let by_sample = |all: &[ExampleUpdate]| {
                    let mut examples: Vec<_> = all.iter().flat_map(read).collect();
                    examples.sort_by_key(|one| one.0);
                    examples
                };
                assert_eq!(by_sample(&all), by_sample(&of(1, 1)));
                empty += all.iter().flat_map(|u| &u.parts).filter(|part| part.samples.is_empty()).count();
            }
            assert!(empty > 0, "eight lanes have five examples");
        }
    }

    #[test]
    fn every_epoch_has_every_example_once() {
        for is_sorted in [false, true] {
            let mut updates = updates(&layouts()[0], is_sorted, 0);
            let mut seen: Vec<i32> = vec![];
            // Windows of 35 examples end with an epoch of 37 after 35 epochs.
            for _ in 0..if is_sorted { 7 * 37 } else { 37 } {
                seen.extend(read(&next(&mut updates)).iter().map(|one| one.1[0]));
            }
            if is_sorted {
                (0..37).for_each(|example| assert_eq!(seen.iter().filter(|s| **s == example).count(), 35));
                continue;
            }
            assert_eq!(next(&mut updates).epoch, 5.0 * 38.0 / 37.0);
            for epoch in seen.chunks(37) {
                let mut epoch = epoch.to_vec();
                epoch.sort_unstable();
                assert!(epoch.into_iter().eq(0..37));
            }
        }
    }

    #[test]
    fn every_cursor_leads_to_the_same_updates_again() {
        for (layout, is_sorted) in
            layouts().into_iter().flat_map(|layout| [(layout.clone(), false), (layout, true)])
        {
            let mut whole = updates(&layout, is_sorted, 0);
            for _ in 0..20 {
                let mut again = updates(&layout, is_sorted, whole.cursor().sample);
                assert_eq!(next(&mut again), next(&mut whole));
                assert_eq!(again.cursor(), whole.cursor());
            }
        }
    }

    #[test]
    fn sorting_brings_like_lengths_together() {
        let spread = |is_sorted: bool| -> usize {
            let mut updates = updates(&layouts()[0], is_sorted, 0);
            let range = |update: ExampleUpdate| {
                let lengths: Vec<usize> = read(&update).iter().map(|one| one.1.len()).collect();
                lengths.iter().max().unwrap() - lengths.iter().min().unwrap()
            };
            (0..20).map(|_| range(next(&mut updates))).sum()
        };
        assert!(3 * spread(true) < spread(false), "{} {}", spread(true), spread(false));
    }

    #[test]
    fn other_examples_refuse_the_cursor() {
        let layout = layouts()[0].clone();
        let options = UpdateOptions { seed: 3, batch: 5, layout, is_sorted: false, class_weights: vec![] };
        let of = |table: Arc<ExampleTable>, seed: u64| {
            let cursor = Updates::start(&table, 3);
            let options = UpdateOptions { seed, ..options.clone() };
            (Updates::new(table, options, cursor).err(), Updates::start(&self::table(36), 3))
        };
        assert!(of(table(37), 3).0.is_none());
        assert!(of(table(37), 4).0.unwrap().to_string().starts_with("The examples are not those"));
        let (_, other) = of(table(37), 3);
        assert!(Updates::new(table(37), options.clone(), other).is_err());
        assert!(Updates::new(Arc::default(), options, Updates::start(&table(37), 3)).is_err());
    }

    #[test]
    fn an_evaluation_reads_every_example_once_in_order() {
        for layout in layouts() {
            let parts = once(&table(37), 30, &layout, &[]);
            let update = ExampleUpdate {
                parts,
                numbers: vec![],
                tokens: [0; 2],
                epoch: 0.0,
                waited: Waited::default(),
            };
            assert!(read(&update).iter().map(|one| one.1[0]).eq(0..30));
        }
    }
}
