//! A spin kernel, which delays a stream so that the work enqueued behind it starts without gaps.

use std::borrow::Cow;
use std::time::Duration;

use crate::cuda::context::{Arg, CudaError, Function, Source, Stream, launch};

pub fn source() -> Source {
    Source { name: "spin.cu", code: Cow::Borrowed(include_str!("spin.cu")), defines: vec![] }
}

/// Delays the stream for a time.
pub fn spin(function: &Function, time: Duration, stream: Stream) -> Result<(), CudaError> {
    let args = vec![Arg::I64(time.as_nanos() as i64)];
    launch(function.clone(), [1, 1, 1], 1, 0, args).enqueue(stream)
}
