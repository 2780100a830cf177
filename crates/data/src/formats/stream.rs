//! The bytes of an input as a stream, and their decompression.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use super::Compression;
use super::find::{Input, STDIN};
use crate::remote::ranged::Sequential;

const COMPRESSED_BUFFER_BYTES: usize = 64 << 10;

/// The inner error for data that cannot be decompressed, which tells a damaged file from an I/O error.
#[derive(Debug)]
pub(super) struct Damaged(pub String);

impl std::fmt::Display for Damaged {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Damaged {}

pub(super) fn damaged(message: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, Damaged(message.into()))
}

/// The bytes of an input as stored, from the beginning.
pub(super) fn open(input: &Input) -> io::Result<Box<dyn Read + Send>> {
    Ok(match &input.remote {
        Some(object) => Box::new(Sequential::new(object.clone(), 0, object.bytes())),
        None if input.path.as_os_str() == STDIN => Box::new(io::stdin()),
        None => Box::new(File::open(&input.path)?),
    })
}

/// The bytes from `at` on. Little is read past `until`.
fn open_at(input: &Input, at: u64, until: u64) -> io::Result<Box<dyn Read + Send>> {
    if let Some(object) = &input.remote {
        return Ok(Box::new(Sequential::new(object.clone(), at, until)));
    }
    let mut file = File::open(&input.path)?;
    file.seek(SeekFrom::Start(at))?;
    Ok(Box::new(file))
}

/// The lines of an input that begin at or after `at`, and the offset of the first of them. Little is read past `until`.
pub(super) fn lines_from(input: &Input, at: u64, until: u64) -> io::Result<(Box<dyn Read + Send>, u64)> {
    if at == 0 {
        return Ok((open_at(input, 0, until)?, 0));
    }
    // A line that begins at `at` follows a line break, so the search starts one byte earlier.
    let mut bytes = BufReader::with_capacity(COMPRESSED_BUFFER_BYTES, open_at(input, at - 1, until)?);
    let skipped = bytes.skip_until(b'\n')?;
    Ok((Box::new(bytes), at - 1 + skipped as u64))
}

pub(super) fn decompress(bytes: Box<dyn Read + Send>, compression: Compression) -> Box<dyn Read + Send> {
    let compressed =
        |bytes| BufReader::with_capacity(COMPRESSED_BUFFER_BYTES, Compressed { bytes, failed: None });
    match compression {
        Compression::None => bytes,
        Compression::Gzip => Box::new(Gzip(MultiGzDecoder::new(compressed(bytes)))),
        Compression::Zstd => {
            Box::new(Zstd { compressed: compressed(bytes), decoder: FrameDecoder::new(), in_frame: false })
        }
    }
}

/// The compressed bytes. Decoders replace I/O errors by their own, so the original error is stored here.
struct Compressed {
    bytes: Box<dyn Read + Send>,
    failed: Option<io::Error>,
}

impl Read for Compressed {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.bytes.read(out).map_err(|error| match error.kind() {
            io::ErrorKind::Interrupted => error,
            kind => {
                self.failed = Some(error);
                kind.into()
            }
        })
    }
}

/// Consecutive gzip members, as `cat a.gz b.gz` produces them.
struct Gzip(MultiGzDecoder<BufReader<Compressed>>);

impl Read for Gzip {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.0.read(out).map_err(|error| {
            if let Some(failed) = self.0.get_mut().get_mut().failed.take() {
                return failed;
            }
            match error.kind() {
                io::ErrorKind::Interrupted => error,
                io::ErrorKind::UnexpectedEof => damaged("the gzip data ends too early"),
                _ => damaged(format!("the gzip data is damaged ({error})")),
            }
        })
    }
}

/// Consecutive zstd frames; skippable frames are ignored.
struct Zstd {
    compressed: BufReader<Compressed>,
    decoder: FrameDecoder,
    in_frame: bool,
}

impl Zstd {
    fn begin_frame(&mut self) -> Result<(), FrameDecoderError> {
        match self.decoder.reset(&mut self.compressed) {
            Ok(()) => self.in_frame = true,
            Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                length, ..
            })) => {
                let skipped = io::copy(&mut (&mut self.compressed).take(u64::from(length)), &mut io::sink());
                if skipped.ok() != Some(u64::from(length)) {
                    return Err(FrameDecoderError::FailedToSkipFrame);
                }
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn decompress(&mut self, out: &mut [u8]) -> Result<usize, String> {
        loop {
            if !self.in_frame {
                match self.compressed.fill_buf() {
                    Ok([]) => return Ok(0),
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(error) => return Err(error.to_string()),
                }
                self.begin_frame().map_err(|error| error.to_string())?;
                continue;
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                let decoded =
                    self.decoder.decode_blocks(&mut self.compressed, BlockDecodingStrategy::UptoBlocks(1));
                decoded.map_err(|error| error.to_string())?;
            }
            if self.decoder.can_collect() > 0 {
                return self.decoder.read(out).map_err(|error| error.to_string());
            }
            let stored = self.decoder.get_checksum_from_data();
            if stored.is_some() && stored != self.decoder.get_calculated_checksum() {
                return Err("its checksum is wrong".into());
            }
            self.in_frame = false;
        }
    }
}

impl Read for Zstd {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if out.is_empty() {
            return Ok(0);
        }
        self.decompress(out).map_err(|message| match self.compressed.get_mut().failed.take() {
            Some(failed) => failed,
            None => damaged(format!("the zstd data is damaged or ends too early ({message})")),
        })
    }
}
