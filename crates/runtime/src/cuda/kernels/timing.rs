//! Times work on this device, to choose between kernels, in the session's own arena and stream.

use crate::cuda::context::{CudaError, Prepare, Work};
use crate::cuda::driver::Event;

/// Timed runs, after one warm-up; the median counts.
const RUNS: usize = 5;
/// Work whose first run took this many times the best time is not timed further.
const HOPELESS: f64 = 4.0;

/// The median time of a few runs; `best` is the shortest time known so far.
pub(super) fn median_ms(work: &dyn Work, best: f64, at: &Prepare<'_>) -> Result<f64, CudaError> {
    let stream = at.stream();
    let mark = || Event::new(at.driver());
    let (begin, end) = (mark()?, mark()?);
    work.enqueue(stream)?;
    begin.record(stream)?;
    work.enqueue(stream)?;
    end.record(stream)?;
    let first = begin.elapsed_ms(&end)?;
    if first > HOPELESS * best {
        return Ok(first);
    }
    let marks: Vec<Event> = (0..=RUNS).map(|_| mark()).collect::<Result<_, CudaError>>()?;
    for (i, mark) in marks.iter().enumerate() {
        mark.record(stream)?;
        if i < RUNS {
            work.enqueue(stream)?;
        }
    }
    let mut times = vec![];
    for pair in marks.windows(2) {
        times.push(pair[0].elapsed_ms(&pair[1])?);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[RUNS / 2])
}
