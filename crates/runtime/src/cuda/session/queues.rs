//! Maps the two queues of a plan to two streams, ordered by events: compute launches and exchanges between ranks.
//!
//! An exchange waits for an event recorded after the compute launches before it; a launch that joins an exchange waits for an
//! event recorded after that exchange. During capture the events become edges of the graph, so a replay needs none of them.

use flatout_ir::{Launch, Plan, Queue};

use super::clock::{Clock, Span};
use crate::cuda::context::{CudaError, Stream, Work};
use crate::cuda::driver::{Driver, Event, OwnedStream};

/// The stream of exchanges, and the events that order it against the compute stream.
pub struct WireStream {
    stream: OwnedStream,
    /// Recorded after the compute launches that precede an exchange.
    forked: Event,
    /// Recorded after each exchange, in plan order; as many as the plan with the most exchanges has.
    ended: Vec<Event>,
    /// Present with several ranks.
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

    /// From now on plans measure how long they run and wait.
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

    /// Makes later work on `compute` wait for the first `exchanges` exchanges of a plan.
    fn join(&self, exchanges: usize, compute: Stream) -> Result<(), CudaError> {
        self.begin(Span::Wait, compute)?;
        self.ended[exchanges - 1].hold(compute)?;
        self.end(Span::Wait, compute)
    }

    /// The stream of a launch, given the compute stream.
    pub fn stream_of(&self, launch: &Launch, compute: Stream) -> Stream {
        match launch.queue {
            Queue::Compute => compute,
            Queue::Wire => self.stream.get(),
        }
    }

    /// Enqueues a plan, each launch on its stream. Later work on `compute` waits for all of it. An error names its launch.
    pub fn enqueue<'p>(
        &self,
        plan: &'p Plan,
        works: &[Box<dyn Work>],
        compute: Stream,
    ) -> Result<(), (&'p Launch, CudaError)> {
        let wire = self.stream.get();
        let Some(first) = plan.launches.first() else { return Ok(()) };
        self.begin(Span::Plan, compute).map_err(|why| (first, why))?;
        // Launch indices of the exchanges so far; whether the wire stream is ordered after all compute launches so far.
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
