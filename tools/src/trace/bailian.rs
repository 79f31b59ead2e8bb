//! Bailian: one object a line with `chat_id`, `parent_chat_id` (-1 = none), `timestamp` (seconds),
//! `input_length`, `output_length`, `type`, `turn`, `hash_ids` (16-token blocks).

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::error::Problem;
use super::field::{self, FieldError};
use super::mooncake::hash_ids;
use super::request::Request;
use super::{Format, TraceInfo};

/// Tokens of a block.
const BLOCK_TOKENS: u32 = 16;

/// What the format fixes.
pub(super) fn info(name: String) -> TraceInfo {
    TraceInfo { format: Format::Bailian, name, block_tokens: BLOCK_TOKENS, partial_tail: true }
}

/// Follows the turns of a chat to its first one. Grows by 16 bytes a request of the file.
#[derive(Default)]
pub(super) struct Chats {
    root: HashMap<i64, u64>,
}

impl Chats {
    /// Reads a request line.
    pub(super) fn request(&mut self, map: &Map<String, Value>) -> Result<Request, FieldError> {
        let chat = signed(map, "chat_id")?;
        let parent = signed(map, "parent_chat_id")?;
        if chat < 0 {
            return Err(("chat_id", Problem::Range { min: 0, max: i64::MAX as u64 }));
        }
        if !field::member(map, "type")?.is_string() {
            return Err(("type", Problem::Type { expected: "a text" }));
        }
        field::whole(field::member(map, "turn")?, "turn", 0, u64::from(u32::MAX))?;
        let request = Request {
            t_ms: field::seconds(field::member(map, "timestamp")?, "timestamp")?,
            session: None,
            input_tokens: field::tokens(map, "input_length")?,
            output_tokens: field::tokens(map, "output_length")?,
            blocks: hash_ids(map)?,
        };
        // A parent outside the recorded window still names the chat.
        let session = if parent < 0 {
            chat as u64
        } else {
            self.root.get(&parent).copied().unwrap_or(parent as u64)
        };
        self.root.insert(chat, session);
        Ok(Request { session: Some(session), ..request })
    }
}

fn signed(map: &Map<String, Value>, field: &'static str) -> Result<i64, FieldError> {
    field::member(map, field)?.as_i64().ok_or((field, Problem::Type { expected: "a whole number" }))
}
