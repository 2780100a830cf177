//! Streams, the graphs captured from them, and events.

use std::ffi::{c_int, c_uint};
use std::ptr::null_mut;

use super::{Driver, Handle};
use crate::cuda::context::{CudaError, Stream};

const CU_STREAM_NON_BLOCKING: c_uint = 1;
const CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: c_int = 1;
const CU_EVENT_DEFAULT: c_uint = 0;
const CU_EVENT_DISABLE_TIMING: c_uint = 2;
const CUDA_ERROR_NOT_READY: c_int = 600;

/// A stream that does not synchronise with the default stream.
pub struct OwnedStream {
    driver: &'static Driver,
    raw: Handle,
}

impl OwnedStream {
    pub fn new(driver: &'static Driver) -> Result<OwnedStream, CudaError> {
        let mut raw = null_mut();
        // SAFETY: writes one handle.
        driver.ok(unsafe { (driver.stream_create)(&mut raw, CU_STREAM_NON_BLOCKING) }, "cuStreamCreate")?;
        Ok(OwnedStream { driver, raw })
    }

    pub fn get(&self) -> Stream {
        Stream(self.raw)
    }

    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.driver.synchronize(self.get())
    }

    /// Captures what `enqueue` puts on the stream instead of running it.
    pub fn capture(&self, enqueue: impl FnOnce(Stream) -> Result<(), CudaError>) -> Result<Graph, CudaError> {
        let driver = self.driver;
        let mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive and, as it is not shared, not capturing.
        driver.ok(unsafe { (driver.capture_begin)(self.raw, mode) }, "cuStreamBeginCapture")?;
        let enqueued = enqueue(self.get());
        let mut graph = null_mut();
        // SAFETY: writes one handle; the capture began above and must be ended even if enqueuing failed.
        let ended = driver.ok(unsafe { (driver.capture_end)(self.raw, &mut graph) }, "cuStreamEndCapture");
        let captured = enqueued.and(ended);
        let mut exec = null_mut();
        let made = captured.and_then(|()| {
            // SAFETY: the graph was captured; writes one handle.
            let status = unsafe { (driver.graph_instantiate)(&mut exec, graph, 0) };
            driver.ok(status, "cuGraphInstantiateWithFlags")
        });
        if !graph.is_null() {
            // SAFETY: the executable graph does not depend on its template.
            unsafe { (driver.graph_destroy)(graph) };
        }
        made?;
        let graph = Graph { driver, exec };
        // SAFETY: both are alive. Uploading now keeps the first launch from allocating.
        driver.ok(unsafe { (driver.graph_upload)(graph.exec, self.raw) }, "cuGraphUpload")?;
        Ok(graph)
    }
}

impl Drop for OwnedStream {
    fn drop(&mut self) {
        // SAFETY: created in `new`; pending work completes first.
        unsafe { (self.driver.stream_destroy)(self.raw) };
    }
}

/// An instantiated graph.
pub struct Graph {
    driver: &'static Driver,
    exec: Handle,
}

impl Graph {
    pub fn launch(&self, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: the graph is alive, as is all that it was captured from: the session owns both.
        self.driver.ok(unsafe { (self.driver.graph_launch)(self.exec, stream.0) }, "cuGraphLaunch")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: instantiated in `capture`.
        unsafe { (self.driver.graph_exec_destroy)(self.exec) };
    }
}

/// A point in a stream.
pub struct Event {
    driver: &'static Driver,
    raw: Handle,
}

// SAFETY: the driver's calls are thread-safe, and an event may be used on any thread where its context is current.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event with timing.
    pub fn new(driver: &'static Driver) -> Result<Event, CudaError> {
        Event::with_flags(driver, CU_EVENT_DEFAULT)
    }

    /// An event without timing, which costs the streams less.
    pub fn untimed(driver: &'static Driver) -> Result<Event, CudaError> {
        Event::with_flags(driver, CU_EVENT_DISABLE_TIMING)
    }

    fn with_flags(driver: &'static Driver, flags: c_uint) -> Result<Event, CudaError> {
        let mut raw = null_mut();
        // SAFETY: writes one handle.
        driver.ok(unsafe { (driver.event_create)(&mut raw, flags) }, "cuEventCreate")?;
        Ok(Event { driver, raw })
    }

    /// Makes later work on `stream` wait on the device for the most recent record, if any. Later records do not move the wait.
    pub fn hold(&self, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: both are alive; the flags are the header's default.
        self.driver.ok(unsafe { (self.driver.stream_wait)(stream.0, self.raw, 0) }, "cuStreamWaitEvent")
    }

    pub fn record(&self, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: both are alive.
        self.driver.ok(unsafe { (self.driver.event_record)(self.raw, stream.0) }, "cuEventRecord")
    }

    /// Waits for the most recent record to complete; returns at once if there is none.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: alive.
        self.driver.ok(unsafe { (self.driver.event_synchronize)(self.raw) }, "cuEventSynchronize")
    }

    /// Whether the most recent record has completed; does not wait.
    pub fn is_reached(&self) -> Result<bool, CudaError> {
        // SAFETY: alive.
        match unsafe { (self.driver.event_query)(self.raw) } {
            CUDA_ERROR_NOT_READY => Ok(false),
            status => self.driver.ok(status, "cuEventQuery").map(|()| true),
        }
    }

    /// Waits for `end` and returns the milliseconds since this event.
    pub fn elapsed_ms(&self, end: &Event) -> Result<f64, CudaError> {
        end.synchronize()?;
        let mut ms = 0.0;
        // SAFETY: writes one float; both events were recorded.
        let status = unsafe { (self.driver.event_elapsed)(&mut ms, self.raw, end.raw) };
        self.driver.ok(status, "cuEventElapsedTime")?;
        Ok(ms as f64)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created in `new`.
        unsafe { (self.driver.event_destroy)(self.raw) };
    }
}
