//! Files that a verb writes: opened before the work, so that a bad path costs nothing.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;

use serde::Serialize;

use crate::exit::ToolError;

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
        body: impl FnOnce(&mut BufWriter<File>) -> std::io::Result<()>,
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
