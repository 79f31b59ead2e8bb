//! Why a trace cannot be read.

use std::path::PathBuf;

/// Why a trace cannot be read. One line each, with the file and, for its content, line and field.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// Neither a file nor a name known in the trace folder.
    #[error(
        "trace {name}: no such file, and no {name}.kvt.jsonl.zst (or .jsonl, .zst, .gz) in {folder}; \
         give a path or set ORBITKV_TRACES to the folder of the traces"
    )]
    NotFound {
        /// As typed.
        name: String,
        /// Folder that was searched.
        folder: PathBuf,
    },
    /// The file cannot be opened or read.
    #[error("{path}: {operation}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// `open` or `read`.
        operation: &'static str,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The compressed stream is damaged, cut short, or needs a window above 128 MiB.
    #[error("{path}: line {line}: cannot decompress: {source}", path = path.display())]
    Compression {
        /// The file.
        path: PathBuf,
        /// Line at which it broke, from 1.
        line: u64,
        /// What the decompressor says.
        source: std::io::Error,
    },
    /// A line does not have the form that its format demands.
    #[error("{path}: line {line}: field {field}: {problem}", path = path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: u64,
        /// Name of the field.
        field: &'static str,
        /// What is wrong with it.
        problem: Problem,
    },
}

impl TraceError {
    /// Whether the text of the file alone shows the error; otherwise only the system could tell.
    pub fn is_content(&self) -> bool {
        matches!(self, Self::Malformed { .. } | Self::Compression { .. })
    }
}

/// What is wrong with a field.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Problem {
    /// The line is no JSON.
    #[error("not valid JSON (byte {column})")]
    Json {
        /// Column that the parser names.
        column: usize,
    },
    /// The file ends before its first line.
    #[error("the file is empty")]
    Empty,
    /// The first line belongs to none of the three formats.
    #[error(
        "none of the known formats: kvtrace-1 (format, name, block_tokens, …), Bailian \
         (chat_id, hash_ids, …), Mooncake (timestamp, hash_ids, …)"
    )]
    UnknownFormat,
    /// The line is longer than any request can be.
    #[error("longer than {max} bytes")]
    LineTooLong {
        /// The bound.
        max: usize,
    },
    /// Bytes that are no UTF-8.
    #[error("not UTF-8")]
    NotUtf8,
    /// The field is not there.
    #[error("missing")]
    Missing,
    /// The field has another type.
    #[error("expected {expected}")]
    Type {
        /// What it should be.
        expected: &'static str,
    },
    /// The number is outside its range.
    #[error("outside {min} to {max}")]
    Range {
        /// Smallest.
        min: u64,
        /// Largest.
        max: u64,
    },
    /// A run reaches past the largest block id.
    #[error("run of {length} blocks from {first} passes the largest block id")]
    RunOverflow {
        /// First id.
        first: u64,
        /// Length.
        length: u64,
    },
    /// More blocks than the input tokens fill.
    #[error("{blocks} blocks, but {tokens} input tokens fill at most {max}")]
    MoreBlocksThanTokens {
        /// Blocks listed.
        blocks: u64,
        /// Input tokens.
        tokens: u64,
        /// Blocks that these fill.
        max: u64,
    },
    /// More blocks than a request may have.
    #[error("more than {max} blocks in one request")]
    TooManyBlocks {
        /// The bound.
        max: u64,
    },
}
