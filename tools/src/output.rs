//! Everything that a verb writes: its results on standard output, its complaints on standard error,
//! and files, opened before the work, so that a bad path costs nothing.

use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, BufWriter, ErrorKind, Write, stderr, stdout};
use std::path::PathBuf;

use serde::Serialize;

use crate::exit::ToolError;

/// Writes to standard output; the text has its own line ends. A reader that closed its end
/// (`orbitkv replay … | head`) has seen enough: no error.
pub(crate) fn print(text: impl Display) -> Result<(), ToolError> {
    ignore_closed(print_to(&mut stdout().lock(), &text))
        .map_err(|source| ToolError::System { operation: "write to standard output", source })
}

/// Writes a line to standard error. When nobody can be told, nobody is.
pub(crate) fn complain(line: impl Display) {
    let _untold = writeln!(stderr().lock(), "{line}");
}

fn print_to(out: &mut impl Write, text: &impl Display) -> io::Result<()> {
    write!(out, "{text}")?;
    out.flush()
}

fn ignore_closed(written: io::Result<()>) -> io::Result<()> {
    match written {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// A file named by a flag. What was there stays until something is written; a file that was made
/// and never written goes when this is dropped.
#[derive(Debug)]
pub(crate) struct Output {
    flag: &'static str,
    path: PathBuf,
    file: File,
    made: bool,
    written: bool,
}

impl Output {
    /// Makes or opens the file of `--flag`, if one was given.
    pub(crate) fn open(
        flag: &'static str,
        path: Option<PathBuf>,
    ) -> Result<Option<Self>, ToolError> {
        let Some(path) = path else { return Ok(None) };
        let mut options = File::options();
        options.write(true);
        // Made only where nothing was, so that a run that is refused leaves nothing behind.
        let (made, opened) = match options.open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                (true, options.create_new(true).open(&path))
            }
            opened => (false, opened),
        };
        match opened {
            Ok(file) => Ok(Some(Self { flag, path, file, made, written: false })),
            Err(source) => Err(ToolError::Output { flag, path, source }),
        }
    }

    /// Writes a value as JSON, indented, with a line end.
    pub(crate) fn json(self, value: &impl Serialize) -> Result<(), ToolError> {
        self.write(|file| {
            serde_json::to_writer_pretty(&mut *file, value)?;
            file.write_all(b"\n")
        })
    }

    /// Writes a text.
    pub(crate) fn text(self, text: &str) -> Result<(), ToolError> {
        self.write(|file| file.write_all(text.as_bytes()))
    }

    fn write(
        mut self,
        body: impl FnOnce(&mut BufWriter<&File>) -> io::Result<()>,
    ) -> Result<(), ToolError> {
        self.written = true;
        let mut writer = BufWriter::new(&self.file);
        // A pipe or a terminal has no length.
        let emptied = match self.file.metadata() {
            Ok(metadata) if metadata.is_file() => self.file.set_len(0),
            _ => Ok(()),
        };
        emptied.and_then(|()| body(&mut writer)).and_then(|()| writer.flush()).map_err(|source| {
            ToolError::Output { flag: self.flag, path: self.path.clone(), source }
        })
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if self.made && !self.written {
            let _gone = fs::remove_file(&self.path);
        }
    }
}
