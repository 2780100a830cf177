//! A connection with a write timeout: it fails if the client reads nothing for a while.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep};

pub struct WriteTimeout {
    connection: TcpStream,
    timeout: Duration,
    /// The timer, while a write is pending.
    waiting: Option<Pin<Box<Sleep>>>,
}

impl WriteTimeout {
    pub fn new(connection: TcpStream, timeout: Duration) -> WriteTimeout {
        WriteTimeout { connection, timeout, waiting: None }
    }

    /// The result of a write, or an error once it has been pending for too long.
    fn bounded<T>(&mut self, context: &mut Context<'_>, wrote: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if wrote.is_ready() {
            self.waiting = None;
            return wrote;
        }
        let timeout = self.timeout;
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(sleep(timeout)));
        ready!(waiting.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for WriteTimeout {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_read(context, buffer)
    }
}

impl AsyncWrite for WriteTimeout {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let wrote = Pin::new(&mut self.connection).poll_write(context, bytes);
        self.bounded(context, wrote)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let wrote = Pin::new(&mut self.connection).poll_write_vectored(context, parts);
        self.bounded(context, wrote)
    }

    fn is_write_vectored(&self) -> bool {
        self.connection.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_reads_nothing_times_out() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let (connection, _) = listener.accept().await.unwrap();
            let mut connection = WriteTimeout::new(connection, Duration::from_millis(100));
            let writing = async {
                loop {
                    let part = std::future::poll_fn(|context| {
                        Pin::new(&mut connection).poll_write(context, &[0; 1 << 16])
                    });
                    if let Err(error) = part.await {
                        return error.kind();
                    }
                }
            };
            let ended = tokio::time::timeout(Duration::from_secs(60), writing).await;
            assert_eq!(ended.expect("it is given up"), io::ErrorKind::TimedOut);
            drop(client);
        });
    }
}
