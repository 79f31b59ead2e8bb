//! The lines of a trace file, plain or compressed.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;

use super::error::{Problem, TraceError};

/// Longest line, in bytes: room for [`super::REQUEST_BLOCKS_MAX`] ids of 14 digits each.
pub(super) const LINE_BYTES_MAX: usize = 16 << 20;
/// Largest zstd window, as a power of two: 128 MiB.
const ZSTD_WINDOW_LOG_MAX: u32 = 27;
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// Reads one line after the other into one buffer. The compression is told by the file's first
/// bytes, not by its name.
pub(super) struct Lines {
    path: PathBuf,
    compressed: bool,
    reader: Box<dyn BufRead + Send>,
    buffer: Vec<u8>,
    line: u64,
}

impl Lines {
    /// Opens a file.
    ///
    /// # Errors
    /// [`TraceError::Io`] when it cannot be opened.
    pub(super) fn open(path: &Path) -> Result<Self, TraceError> {
        let io =
            |operation| move |source| TraceError::Io { path: path.to_owned(), operation, source };
        let file = File::open(path).map_err(io("open"))?;
        let mut head = BufReader::with_capacity(1 << 16, file);
        let start = head.fill_buf().map_err(io("read"))?;
        let (compressed, reader): (bool, Box<dyn BufRead + Send>) = if start
            .starts_with(&ZSTD_MAGIC)
        {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(head).map_err(io("read"))?;
            decoder.window_log_max(ZSTD_WINDOW_LOG_MAX).map_err(io("read"))?;
            (true, Box::new(BufReader::with_capacity(1 << 16, decoder)))
        } else if start.starts_with(&GZIP_MAGIC) {
            let decoder = MultiGzDecoder::new(head);
            (true, Box::new(BufReader::with_capacity(1 << 16, decoder)))
        } else {
            (false, Box::new(head))
        };
        Ok(Self { path: path.to_owned(), compressed, reader, buffer: Vec::new(), line: 0 })
    }

    /// The next line that is not blank, without its end; `None` after the last.
    ///
    /// # Errors
    /// A read or decompression error, a line above [`LINE_BYTES_MAX`], bytes that are no UTF-8.
    pub(super) fn next_line(&mut self) -> Result<Option<&str>, TraceError> {
        loop {
            self.line += 1;
            self.buffer.clear();
            let bound = LINE_BYTES_MAX as u64 + 1;
            let mut limited = (&mut self.reader).take(bound);
            match limited.read_until(b'\n', &mut self.buffer) {
                Ok(0) => return Ok(None),
                Ok(_) => {}
                Err(source) => return Err(self.read_error(source)),
            }
            if self.buffer.len() > LINE_BYTES_MAX {
                return Err(self.malformed("line", Problem::LineTooLong { max: LINE_BYTES_MAX }));
            }
            if self.buffer.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            break;
        }
        match std::str::from_utf8(&self.buffer) {
            Ok(text) => Ok(Some(text.trim_end())),
            Err(_) => Err(self.malformed("line", Problem::NotUtf8)),
        }
    }

    /// The file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// An error at the last line read.
    pub(super) fn malformed(&self, field: &'static str, problem: Problem) -> TraceError {
        TraceError::Malformed { path: self.path.clone(), line: self.line, field, problem }
    }

    fn read_error(&self, source: io::Error) -> TraceError {
        let path = self.path.clone();
        if self.compressed && source.raw_os_error().is_none() {
            TraceError::Compression { path, line: self.line, source }
        } else {
            TraceError::Io { path, operation: "read", source }
        }
    }
}
