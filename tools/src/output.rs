//! Everything that a verb writes: its results on standard output, its complaints on standard error,
//! and files, opened before the work, so that a bad path costs nothing.

use std::fmt::Display;
use std::fs::File;
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

/// A file named by a flag.
#[derive(Debug)]
pub(crate) struct Output {
    flag: &'static str,
    path: PathBuf,
    file: File,
}

impl Output {
    /// Makes or empties the file of `--flag`, if one was given.
    pub(crate) fn open(
        flag: &'static str,
        path: Option<PathBuf>,
    ) -> Result<Option<Self>, ToolError> {
        let Some(path) = path else { return Ok(None) };
        match File::create(&path) {
            Ok(file) => Ok(Some(Self { flag, path, file })),
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
        self,
        body: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
    ) -> Result<(), ToolError> {
        let Self { flag, path, file } = self;
        let mut writer = BufWriter::new(file);
        body(&mut writer).and_then(|()| writer.flush()).map_err(|source| ToolError::Output {
            flag,
            path,
            source,
        })
    }
}
