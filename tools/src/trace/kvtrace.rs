//! kvtrace-1: a header object, then `[t_ms, session, in_tokens, out_tokens, [first, length, …]]`.

use serde_json::{Map, Value};

use super::error::Problem;
use super::field::{self, FieldError, TIME_MS_MAX, TOKENS_MAX};
use super::request::{BlockRuns, Request};
use super::{Format, TraceInfo};

/// Value of the header's `format`.
const FORMAT: &str = "kvtrace-1";
/// Largest block, in tokens.
const BLOCK_TOKENS_MAX: u64 = 1 << 20;
/// Longest trace name, in bytes: it is part of a namespace.
const NAME_BYTES_MAX: u64 = 256;

/// Reads the header line.
pub(super) fn header(map: &Map<String, Value>) -> Result<TraceInfo, FieldError> {
    let text = |field| {
        field::member(map, field)?.as_str().ok_or((field, Problem::Type { expected: "a text" }))
    };
    if text("format")? != FORMAT {
        return Err(("format", Problem::Type { expected: "\"kvtrace-1\"" }));
    }
    let name = text("name")?;
    if name.is_empty() || name.len() as u64 > NAME_BYTES_MAX {
        return Err(("name", Problem::Range { min: 1, max: NAME_BYTES_MAX }));
    }
    let block_tokens =
        field::whole(field::member(map, "block_tokens")?, "block_tokens", 1, BLOCK_TOKENS_MAX)?;
    let partial_tail = field::member(map, "partial_tail")?
        .as_bool()
        .ok_or(("partial_tail", Problem::Type { expected: "true or false" }))?;
    Ok(TraceInfo {
        format: Format::Kvtrace,
        name: name.to_owned(),
        block_tokens: block_tokens as u32,
        partial_tail,
    })
}

/// Reads a request line.
pub(super) fn request(text: &str) -> Result<Request, FieldError> {
    const LINE: &str = "[t_ms, session, in_tokens, out_tokens, [first, length, …]]";
    let line = field::json(text)?;
    let items = line.as_array().ok_or(("line", Problem::Type { expected: LINE }))?;
    let [t_ms, session, input, output, runs] = items.as_slice() else {
        return Err(("line", Problem::Type { expected: LINE }));
    };
    let mut blocks = BlockRuns::default();
    let pairs = field::list(runs, "runs")?;
    if pairs.len() % 2 != 0 {
        return Err(("runs", Problem::Type { expected: "pairs of first and length" }));
    }
    for pair in pairs.chunks_exact(2) {
        let first = field::whole(&pair[0], "runs.first", 0, u64::MAX)?;
        let length = field::whole(&pair[1], "runs.length", 1, u64::MAX)?;
        blocks.push(first, length).map_err(|problem| ("runs", problem))?;
    }
    let session = field::whole(session, "session", 0, u64::MAX)?;
    Ok(Request {
        t_ms: field::whole(t_ms, "t_ms", 0, TIME_MS_MAX)?,
        session: (session != 0).then_some(session),
        input_tokens: field::whole(input, "in_tokens", 0, TOKENS_MAX)?,
        output_tokens: field::whole(output, "out_tokens", 0, TOKENS_MAX)?,
        blocks,
    })
}
