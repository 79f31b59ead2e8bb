//! Mooncake: one object a line with `timestamp` (ms), `input_length`, `output_length`, `hash_ids`
//! (512-token blocks, the last one possibly partial).

use serde_json::{Map, Value};

use super::field::{self, FieldError, TIME_MS_MAX};
use super::request::{BlockRuns, Request};
use super::{Format, TraceInfo};

/// Tokens of a block.
const BLOCK_TOKENS: u32 = 512;

/// What the format fixes.
pub(super) fn info(name: String) -> TraceInfo {
    TraceInfo { format: Format::Mooncake, name, block_tokens: BLOCK_TOKENS, partial_tail: true }
}

/// Reads a request line.
pub(super) fn request(map: &Map<String, Value>) -> Result<Request, FieldError> {
    let timestamp = field::member(map, "timestamp")?;
    Ok(Request {
        t_ms: field::whole(timestamp, "timestamp", 0, TIME_MS_MAX)?,
        session: None,
        input_tokens: field::tokens(map, "input_length")?,
        output_tokens: field::tokens(map, "output_length")?,
        blocks: hash_ids(map)?,
    })
}

/// The list of block ids that Mooncake and Bailian share.
pub(super) fn hash_ids(map: &Map<String, Value>) -> Result<BlockRuns, FieldError> {
    let mut blocks = BlockRuns::default();
    for id in field::list(field::member(map, "hash_ids")?, "hash_ids")? {
        let id = field::whole(id, "hash_ids", 0, u64::MAX - 1)?;
        blocks.push(id, 1).map_err(|problem| ("hash_ids", problem))?;
    }
    Ok(blocks)
}
