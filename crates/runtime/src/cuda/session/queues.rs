//! The two queues of a plan as two streams: compute launches on one, exchanges between ranks on the other, ordered by events.
//!
//! An exchange waits for an event behind the launches before it, and a launch that joins one for an event behind that. Captured,
//! the events become edges of the graph, so that a replay needs none of them.

use flatout_ir::{Launch, Plan, Queue};

use super::clock::{Clock, Span};
use crate::cuda::context::{CudaError, Stream, Work};
use crate::cuda::driver::{Driver, Event, OwnedStream};

/// The stream of exchanges, and the events that order it with the stream of compute launches.
pub struct WireStream {
    stream: OwnedStream,
    /// Behind the compute launches before an exchange.
    forked: Event,
    /// Behind each exchange, in the order of a plan: as many as the plan with most has.
    ended: Vec<Event>,
    /// Where there are several ranks.
    clock: Option<Clock>,
}

impl WireStream {
    pub fn new(driver: &'static Driver, plans: &[Plan]) -> Result<WireStream, CudaError> {
        let exchanges = |plan: &Plan| plan.launches.iter().filter(|l| l.queue == Queue::Wire).count();
        let most = plans.iter().map(exchanges).max().unwrap_or(0);
        Ok(WireStream {
            stream: OwnedStream::new(driver)?,
            forked: Event::untimed(driver)?,
            ended: (0..most).map(|_| Event::untimed(driver)).collect::<Result<_, _>>()?,
            clock: None,
        })
    }

    /// From here on plans tell how long they run and wait.
    pub fn set_clock(&mut self, clock: Clock) {
        self.clock = Some(clock);
    }

    pub fn clock(&self) -> Option<&Clock> {
        self.clock.as_ref()
    }

    fn begin(&self, span: Span, compute: Stream) -> Result<(), CudaError> {
        self.clock.as_ref().map_or(Ok(()), |clock| clock.begin(span, compute))
    }

    fn end(&self, span: Span, compute: Stream) -> Result<(), CudaError> {
        self.clock.as_ref().map_or(Ok(()), |clock| clock.end(span, compute))
    }

    /// Makes what follows on `compute` wait for the first exchanges of a plan, of this number.
    fn join(&self, exchanges: usize, compute: Stream) -> Result<(), CudaError> {
        self.begin(Span::Wait, compute)?;
        self.ended[exchanges - 1].hold(compute)?;
        self.end(Span::Wait, compute)
    }

    /// The stream that a launch is put on, where compute launches go to `compute`.
    pub fn stream_of(&self, launch: &Launch, compute: Stream) -> Stream {
        match launch.queue {
            Queue::Compute => compute,
            Queue::Wire => self.stream.get(),
        }
    }

    /// Enqueues a plan, each launch on its stream. Whatever comes behind it on `compute` waits for all of it. A failure comes
    /// with the launch that it was met at.
    pub fn enqueue<'p>(
        &self,
        plan: &'p Plan,
        works: &[Box<dyn Work>],
        compute: Stream,
    ) -> Result<(), (&'p Launch, CudaError)> {
        let wire = self.stream.get();
        let Some(first) = plan.launches.first() else { return Ok(()) };
        self.begin(Span::Plan, compute).map_err(|why| (first, why))?;
        // Exchanges so far, by index of their launch; and whether the last one began behind all compute launches so far.
        let (mut exchanges, mut is_behind): (Vec<usize>, bool) = (vec![], false);
        for (at, (launch, work)) in plan.launches.iter().zip(works).enumerate() {
            let met = |why: CudaError| (launch, why);
            match launch.queue {
                Queue::Compute => {
                    if let Some(joined) = launch.joins {
                        let count = exchanges.partition_point(|exchange| *exchange <= joined);
                        self.join(count, compute).map_err(met)?;
                    }
                    work.enqueue(compute).map_err(met)?;
                    is_behind = false;
                }
                Queue::Wire => {
                    if !is_behind {
                        self.forked.record(compute).and_then(|()| self.forked.hold(wire)).map_err(met)?;
                    }
                    work.enqueue(wire).map_err(met)?;
                    self.ended[exchanges.len()].record(wire).map_err(met)?;
                    exchanges.push(at);
                    is_behind = true;
                }
            }
        }
        if let Some(last) = exchanges.last() {
            self.join(exchanges.len(), compute).map_err(|why| (&plan.launches[*last], why))?;
        }
        self.end(Span::Plan, compute).map_err(|why| (first, why))
    }

    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.stream.synchronize()
    }
}
