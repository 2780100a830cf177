//! Splits the samples of a loader into the micro-batches of an update, lane by lane if there are several.

use std::vec::IntoIter;

use flatout_data::images::ImageBatch;
use flatout_data::{Lanes, Rows};

use crate::Failure;

/// Samples of a loader that can be distributed to lanes.
pub trait Samples: Sized {
    /// The global indices of the samples.
    fn numbers(&self) -> &[u64];
    /// The samples at these positions.
    fn picked(&self, places: &[usize]) -> Self;
    /// Takes over the facts that belong to the whole update: the time spent waiting and the samples left out.
    fn take_facts(&mut self, whole: &Self);
}

impl Samples for Rows {
    fn numbers(&self) -> &[u64] {
        &self.sample
    }

    fn picked(&self, places: &[usize]) -> Rows {
        Rows::picked(self, places)
    }

    fn take_facts(&mut self, whole: &Rows) {
        self.waited = whole.waited;
    }
}

impl Samples for ImageBatch {
    fn numbers(&self) -> &[u64] {
        &self.samples
    }

    fn picked(&self, places: &[usize]) -> ImageBatch {
        ImageBatch::picked(self, places)
    }

    fn take_facts(&mut self, whole: &ImageBatch) {
        (self.waited, self.left_out) = (whole.waited, whole.left_out.clone());
    }
}

/// Progress of a source within an update.
pub struct LaneBatches<S> {
    lanes: Lanes,
    /// The most samples of a micro-batch.
    most: usize,
    /// Samples of the update that the loader has not delivered yet, with one lane.
    left: usize,
    /// The remaining micro-batches of the update, with several lanes.
    portions: Option<IntoIter<(usize, S)>>,
}

impl<S: Samples> LaneBatches<S> {
    pub fn new(lanes: Lanes, most: usize) -> LaneBatches<S> {
        LaneBatches { lanes, most, left: 0, portions: None }
    }

    /// The tokens of an update on all ranks, with `of_sample` tokens per sample and `own` real and computed tokens on this rank.
    pub fn tokens(&self, of_sample: usize, own: [usize; 2]) -> [usize; 2] {
        if self.lanes.of == 1 { own } else { [self.lanes.batch * of_sample; 2] }
    }

    pub fn begin_update(&mut self) {
        (self.left, self.portions) = (self.lanes.batch, None);
    }

    /// The next samples of the update with the number of their lane. `read` returns this rank's samples among the next ones of
    /// all. One lane is read as it is computed; with several, the whole update must be read before the first lane is complete.
    pub fn next(
        &mut self,
        mut read: impl FnMut(usize) -> Result<S, Failure>,
    ) -> Result<Option<(usize, S)>, Failure> {
        if self.lanes.of == 1 {
            if self.left == 0 {
                return Ok(None);
            }
            self.left -= self.most;
            return Ok(Some((0, read(self.most)?)));
        }
        let portions = match &mut self.portions {
            Some(portions) => portions,
            None => self.portions.insert(by_lane(&self.lanes, &read(self.lanes.batch)?, self.most)),
        };
        Ok(portions.next())
    }
}

fn by_lane<S: Samples>(lanes: &Lanes, whole: &S, most: usize) -> IntoIter<(usize, S)> {
    let portions = lanes.portions(whole.numbers(), most).into_iter();
    let mut batches: Vec<(usize, S)> = portions.map(|(lane, places)| (lane, whole.picked(&places))).collect();
    batches.iter_mut().take(1).for_each(|(_, first)| first.take_facts(whole));
    batches.into_iter()
}
