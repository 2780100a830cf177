//! Device-side clock: how long the plans of a rank ran, and how long of that they waited for exchanges.
//!
//! Two single-thread kernels bracket each timed span inside the captured plans and accumulate, so that a host that runs ahead
//! has nothing to read in between; it reads the sums together with the results of an update. They cost a few microseconds per
//! plan and per join, and exist only where there are several ranks.

use std::borrow::Cow;
use std::time::Duration;

use crate::cuda::context::{Arg, CudaError, Source, Stream, Work, launch};
use crate::cuda::driver::{DeviceMemory, Driver, Modules};

/// A timed span of the compute stream.
#[derive(Clone, Copy, Debug)]
pub enum Span {
    Plan,
    /// From the end of the preceding compute launches to the end of the exchange that the next launch waits for.
    Wait,
}

const SPANS: [Span; 2] = [Span::Plan, Span::Wait];
/// Byte offsets of the sums in microseconds, by span; they follow four words of eight bytes.
const SUMS: [usize; 2] = [32, 36];
const BYTES: usize = 40;

pub struct Clock {
    begins: Vec<Box<dyn Work>>,
    ends: Vec<Box<dyn Work>>,
    memory: DeviceMemory,
}

/// Sums of the device clock at a point of its stream, in microseconds that wrap around.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sums {
    ran: u32,
    waited: u32,
}

/// How long plans ran between two points of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanTimes {
    pub ran: Duration,
    /// The part of it in which launches waited for exchanges with other ranks.
    pub waited: Duration,
}

pub fn source() -> Source {
    Source { name: "clock.cu", code: Cow::Borrowed(include_str!("clock.cu")), defines: vec![] }
}

impl Clock {
    pub fn new(driver: &'static Driver, modules: &Modules, stream: Stream) -> Result<Clock, CudaError> {
        let memory = DeviceMemory::new(driver, BYTES)?;
        memory.fill(0, stream)?;
        let work = |entry: &str, span: Span| {
            let args = vec![Arg::Ptr(memory.address()), Arg::I32(span as i32)];
            Ok(launch(modules.function(&source(), entry)?, [1, 1, 1], 1, 0, args))
        };
        let works =
            |entry: &str| SPANS.iter().map(|span| work(entry, *span)).collect::<Result<_, CudaError>>();
        Ok(Clock { begins: works("begin")?, ends: works("end")?, memory })
    }

    pub fn begin(&self, span: Span, stream: Stream) -> Result<(), CudaError> {
        self.begins[span as usize].enqueue(stream)
    }

    pub fn end(&self, span: Span, stream: Stream) -> Result<(), CudaError> {
        self.ends[span as usize].enqueue(stream)
    }

    /// The memory that holds the sums, and their byte offsets in it.
    pub fn sums(&self) -> (&DeviceMemory, [usize; 2]) {
        (&self.memory, SUMS)
    }
}

impl Sums {
    /// Decodes two words as they were copied out.
    pub fn of(words: [f32; 2]) -> Sums {
        let [ran, waited] = words.map(f32::to_bits);
        Sums { ran, waited }
    }

    pub fn until(self, later: Sums) -> PlanTimes {
        let between = |from: u32, to: u32| Duration::from_micros(to.wrapping_sub(from).into());
        PlanTimes { ran: between(self.ran, later.ran), waited: between(self.waited, later.waited) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_of_sums_survive_wrap_around() {
        let at = |ran: u32, waited: u32| Sums::of([ran, waited].map(f32::from_bits));
        let times = |ran, waited| PlanTimes {
            ran: Duration::from_micros(ran),
            waited: Duration::from_micros(waited),
        };
        assert_eq!(at(1_000, 10).until(at(51_000, 2_010)), times(50_000, 2_000));
        assert_eq!(at(u32::MAX - 99, u32::MAX).until(at(900, 4)), times(1_000, 5));
        assert_eq!(at(7, 7).until(at(7, 7)), times(0, 0));
    }
}
