//! Public request traces: three formats, told apart by their fields, read line by line.
//!
//! Nothing of a file is trusted: lines, runs and numbers are bounded, and a line that breaks its
//! format ends the reading with a [`TraceError`] that names file, line and field.

mod bailian;
mod error;
mod field;
mod kvtrace;
mod lines;
mod mooncake;
mod request;

use std::env;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

pub use error::{Problem, TraceError};
use field::FieldError;
use lines::Lines;
pub use request::{BlockRuns, REQUEST_BLOCKS_MAX, Request};

/// Folder of the traces that have a bare name, when `ORBITKV_TRACES` does not say otherwise.
const TRACES_FOLDER_DEFAULT: &str = "../shared/traces";
const TRACES_FOLDER_VARIABLE: &str = "ORBITKV_TRACES";

/// Which format a file has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// Mooncake, 512-token blocks.
    Mooncake,
    /// Bailian, 16-token blocks.
    Bailian,
    /// kvtrace-1, blocks as its header says.
    Kvtrace,
}

/// What holds for every request of a trace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TraceInfo {
    /// Format of the file.
    pub format: Format,
    /// Name from the header, or the file's name up to its first dot.
    pub name: String,
    /// Tokens of a full block.
    pub block_tokens: u32,
    /// Whether a request lists its last block although it may be partial.
    pub partial_tail: bool,
}

/// A trace being read; iterates over its requests, at most one error, always the last item.
pub struct TraceReader {
    info: TraceInfo,
    lines: Lines,
    /// First line of the formats without a header, already parsed.
    pending: Option<Map<String, Value>>,
    chats: bailian::Chats,
    ended: bool,
}

impl TraceReader {
    /// Opens a trace by path or bare name and reads as far as its format shows.
    ///
    /// # Errors
    /// No such trace, or its first line is of no known format.
    pub fn open(name: &str) -> Result<Self, TraceError> {
        Self::open_path(&resolve(name)?)
    }

    /// Opens a trace file and reads as far as its format shows.
    ///
    /// # Errors
    /// The file cannot be read, or its first line is of no known format.
    pub fn open_path(path: &Path) -> Result<Self, TraceError> {
        let mut lines = Lines::open(path)?;
        let first = match lines.next_line()? {
            Some(text) => field::object(text),
            None => Err(("format", Problem::Empty)),
        };
        let first = first.map_err(|(field, problem)| lines.malformed(field, problem))?;
        let (info, pending) = if first.contains_key("format") {
            let info = kvtrace::header(&first)
                .map_err(|(field, problem)| lines.malformed(field, problem))?;
            (info, None)
        } else if first.contains_key("chat_id") {
            (bailian::info(stem(path)), Some(first))
        } else if first.contains_key("timestamp") || first.contains_key("hash_ids") {
            (mooncake::info(stem(path)), Some(first))
        } else {
            return Err(lines.malformed("format", Problem::UnknownFormat));
        };
        Ok(Self { info, lines, pending, chats: bailian::Chats::default(), ended: false })
    }

    /// What holds for every request.
    pub fn info(&self) -> &TraceInfo {
        &self.info
    }

    /// The file.
    pub fn path(&self) -> &Path {
        self.lines.path()
    }

    fn read(&mut self) -> Result<Option<Request>, TraceError> {
        if let Some(map) = self.pending.take() {
            let parsed = object_request(&self.info, &mut self.chats, &map);
            return self.finish(parsed).map(Some);
        }
        let Some(text) = self.lines.next_line()? else { return Ok(None) };
        let parsed = match self.info.format {
            Format::Kvtrace => kvtrace::request(text),
            Format::Mooncake | Format::Bailian => field::object(text)
                .and_then(|map| object_request(&self.info, &mut self.chats, &map)),
        };
        self.finish(parsed).map(Some)
    }

    fn finish(&self, parsed: Result<Request, FieldError>) -> Result<Request, TraceError> {
        parsed
            .and_then(|request| check_blocks(&self.info, request))
            .map_err(|(field, problem)| self.lines.malformed(field, problem))
    }
}

impl Iterator for TraceReader {
    type Item = Result<Request, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let item = self.read().transpose();
        self.ended = !matches!(item, Some(Ok(_)));
        item
    }
}

fn object_request(
    info: &TraceInfo,
    chats: &mut bailian::Chats,
    map: &Map<String, Value>,
) -> Result<Request, FieldError> {
    match info.format {
        Format::Bailian => chats.request(map),
        Format::Mooncake | Format::Kvtrace => mooncake::request(map),
    }
}

/// A request cannot have more blocks than its tokens fill. Bailian alone is let off: its lengths
/// do not count every token of the chat template, and the surplus blocks just count no tokens.
fn check_blocks(info: &TraceInfo, request: Request) -> Result<Request, FieldError> {
    if info.format == Format::Bailian {
        return Ok(request);
    }
    let block = u64::from(info.block_tokens);
    let tokens = request.input_tokens;
    let max = if info.partial_tail { tokens.div_ceil(block) } else { tokens / block };
    if request.blocks.len() > max {
        let blocks = request.blocks.len();
        let field = if info.format == Format::Kvtrace { "runs" } else { "hash_ids" };
        return Err((field, Problem::MoreBlocksThanTokens { blocks, tokens, max }));
    }
    Ok(request)
}

/// The folder that holds the traces with a bare name.
pub fn folder() -> PathBuf {
    env::var_os(TRACES_FOLDER_VARIABLE)
        .map_or_else(|| PathBuf::from(TRACES_FOLDER_DEFAULT), PathBuf::from)
}

/// The file that `name` stands for: itself, or a bare name in the folder of the traces.
///
/// # Errors
/// [`TraceError::NotFound`].
pub fn resolve(name: &str) -> Result<PathBuf, TraceError> {
    let path = PathBuf::from(name);
    if path.exists() || name.contains('/') {
        return Ok(path);
    }
    let folder = folder();
    ["", ".kvt.jsonl.zst", ".kvt.jsonl.gz", ".kvt.jsonl", ".jsonl.zst", ".jsonl.gz", ".jsonl"]
        .iter()
        .map(|suffix| folder.join(format!("{name}{suffix}")))
        .find(|path| path.is_file())
        .ok_or(TraceError::NotFound { name: name.to_owned(), folder })
}

fn stem(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let stem = name.split('.').find(|part| !part.is_empty()).unwrap_or("trace");
    stem.to_owned()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const HEADER: &str =
        r#"{"format":"kvtrace-1","name":"x","block_tokens":64,"partial_tail":false}"#;

    fn file(content: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::with_suffix(".jsonl").unwrap();
        file.write_all(content).unwrap();
        file
    }

    fn read(content: &[u8]) -> Result<(TraceInfo, Vec<Request>), TraceError> {
        let file = file(content);
        let reader = TraceReader::open_path(file.path())?;
        let info = reader.info().clone();
        Ok((info, reader.collect::<Result<_, _>>()?))
    }

    /// Line, field and problem of a file that must be refused.
    fn refused(content: &[u8]) -> (u64, &'static str, Problem) {
        match read(content) {
            Err(TraceError::Malformed { line, field, problem, .. }) => (line, field, problem),
            other => panic!("{}: {other:?}", String::from_utf8_lossy(content)),
        }
    }

    #[test]
    fn kvtrace_is_read() {
        let text = format!("{HEADER}\n[0,1,200,5,[0,2,9,1]]\n\n[3000,0,63,1,[]]\n");
        let (info, requests) = read(text.as_bytes()).unwrap();
        assert_eq!(info.format, Format::Kvtrace);
        assert_eq!((info.name.as_str(), info.block_tokens, info.partial_tail), ("x", 64, false));
        assert_eq!(requests.len(), 2);
        assert_eq!(requests[0].session, Some(1));
        assert!(requests[0].blocks.iter().eq([0, 1, 9]));
        assert_eq!(requests[1].t_ms, 3000);
        assert_eq!(requests[1].session, None);
        assert!(requests[1].blocks.is_empty());
    }

    #[test]
    fn mooncake_is_read() {
        let text =
            br#"{"timestamp": 27, "input_length": 600, "output_length": 3, "hash_ids": [46, 47]}"#;
        let (info, requests) = read(text).unwrap();
        assert_eq!(info.format, Format::Mooncake);
        assert_eq!((info.block_tokens, info.partial_tail), (512, true));
        assert_eq!(requests[0].full_blocks(info.block_tokens), 1);
        assert_eq!(requests[0].tokens_of(2, info.block_tokens), 600);
        assert_eq!(requests[0].t_ms, 27);
    }

    #[test]
    fn bailian_is_read_and_turns_share_a_session() {
        let line = |chat: i64, parent: i64, at: f64| {
            format!(
                r#"{{"chat_id": {chat}, "parent_chat_id": {parent}, "timestamp": {at:?}, "input_length": 40, "output_length": 9, "type": "text", "turn": 1, "hash_ids": [7, 8, 12]}}"#
            )
        };
        let text = [line(5, -1, 61.114), line(9, 5, 62.5), line(2, 9, 63.0), line(3, 77, 64.0)];
        let (info, requests) = read(text.join("\n").as_bytes()).unwrap();
        assert_eq!(info.format, Format::Bailian);
        assert_eq!(info.block_tokens, 16);
        assert_eq!(requests[0].t_ms, 61_114);
        let sessions: Vec<_> = requests.iter().map(|r| r.session.unwrap()).collect();
        assert_eq!(sessions, [5, 5, 5, 77]);
    }

    #[test]
    fn compression_is_told_by_content() {
        let text = format!("{HEADER}\n[0,1,200,5,[0,3]]\n");
        let zst = zstd::encode_all(text.as_bytes(), 3).unwrap();
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gz.write_all(text.as_bytes()).unwrap();
        let gz = gz.finish().unwrap();
        // Two members one after the other are one stream for both.
        let more = "[9,1,200,5,[0,3]]\n";
        let twice = [zst.clone(), zstd::encode_all(more.as_bytes(), 3).unwrap()].concat();
        for (content, requests) in [(&zst, 1), (&gz, 1), (&twice, 2)] {
            assert_eq!(read(content).unwrap().1.len(), requests);
        }
        for cut in [&zst[..zst.len() - 3], &gz[..gz.len() - 3]] {
            assert!(matches!(read(cut), Err(TraceError::Compression { .. })));
        }
    }

    #[test]
    fn a_zstd_window_of_27_bits_is_read() {
        let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
        encoder.window_log(27).unwrap();
        encoder.long_distance_matching(true).unwrap();
        writeln!(encoder, "{HEADER}\n[0,1,200,5,[0,3]]").unwrap();
        assert_eq!(read(&encoder.finish().unwrap()).unwrap().1.len(), 1);
    }

    #[test]
    fn a_malformed_line_names_line_and_field() {
        let lines: [(&str, &str, Problem); 16] = [
            ("[0,1,200,5,[0,3]", "line", Problem::Json { column: 16 }),
            (
                "{}",
                "line",
                Problem::Type {
                    expected: "[t_ms, session, in_tokens, out_tokens, [first, length, …]]",
                },
            ),
            (
                "[0,1,200,5]",
                "line",
                Problem::Type {
                    expected: "[t_ms, session, in_tokens, out_tokens, [first, length, …]]",
                },
            ),
            ("[-1,1,200,5,[0,3]]", "t_ms", Problem::Range { min: 0, max: 315_576_000_000_000 }),
            ("[0,1,-200,5,[0,3]]", "in_tokens", Problem::Range { min: 0, max: 1 << 32 }),
            ("[0,1,200,1e30,[0,3]]", "out_tokens", Problem::Range { min: 0, max: 1 << 32 }),
            ("[0,1.5,200,5,[0,3]]", "session", Problem::Type { expected: "a whole number" }),
            ("[0,1,\"200\",5,[0,3]]", "in_tokens", Problem::Type { expected: "a whole number" }),
            ("[0,1,200,5,7]", "runs", Problem::Type { expected: "a list" }),
            (
                "[0,1,200,5,[0,3,4]]",
                "runs",
                Problem::Type { expected: "pairs of first and length" },
            ),
            ("[0,1,200,5,[0,0]]", "runs.length", Problem::Range { min: 1, max: u64::MAX }),
            ("[0,1,200,5,[0,-3]]", "runs.length", Problem::Range { min: 1, max: u64::MAX }),
            (
                "[0,1,4294967296,5,[0,18446744073709551615]]",
                "runs",
                Problem::TooManyBlocks { max: REQUEST_BLOCKS_MAX },
            ),
            (
                "[0,1,4294967296,5,[1,1048576,0,1]]",
                "runs",
                Problem::TooManyBlocks { max: REQUEST_BLOCKS_MAX },
            ),
            (
                "[0,1,200,5,[18446744073709551615,2]]",
                "runs",
                Problem::RunOverflow { first: u64::MAX, length: 2 },
            ),
            (
                "[0,1,200,5,[0,4]]",
                "runs",
                Problem::MoreBlocksThanTokens { blocks: 4, tokens: 200, max: 3 },
            ),
        ];
        for (line, field, problem) in lines {
            let text = format!("{HEADER}\n[0,1,200,5,[0,3]]\n{line}\n");
            assert_eq!(refused(text.as_bytes()), (3, field, problem), "{line}");
        }
    }

    #[test]
    fn a_malformed_first_line_names_its_field() {
        for (line, field) in [
            ("", "format"),
            ("\n\n", "format"),
            ("[]", "line"),
            ("nonsense", "line"),
            ("{}", "format"),
            (
                r#"{"format":"kvtrace-2","name":"x","block_tokens":64,"partial_tail":false}"#,
                "format",
            ),
            (r#"{"format":"kvtrace-1","block_tokens":64,"partial_tail":false}"#, "name"),
            (
                r#"{"format":"kvtrace-1","name":"x","block_tokens":0,"partial_tail":false}"#,
                "block_tokens",
            ),
            (
                r#"{"format":"kvtrace-1","name":"x","block_tokens":64,"partial_tail":1}"#,
                "partial_tail",
            ),
            (r#"{"timestamp":1,"input_length":5,"output_length":1}"#, "hash_ids"),
            (r#"{"input_length":5,"output_length":1,"hash_ids":[]}"#, "timestamp"),
            (r#"{"timestamp":1,"input_length":5,"output_length":1,"hash_ids":[-1]}"#, "hash_ids"),
            (r#"{"timestamp":1,"input_length":5,"output_length":1,"hash_ids":[1,2]}"#, "hash_ids"),
            (
                r#"{"chat_id":1,"parent_chat_id":-1,"timestamp":-0.5,"input_length":5,"output_length":1,"type":"text","turn":1,"hash_ids":[1]}"#,
                "timestamp",
            ),
            (
                r#"{"chat_id":1,"parent_chat_id":-1,"timestamp":0.5,"input_length":5,"output_length":1,"turn":1,"hash_ids":[1]}"#,
                "type",
            ),
            (
                r#"{"chat_id":"a","parent_chat_id":-1,"timestamp":0.5,"input_length":5,"output_length":1,"type":"text","turn":1,"hash_ids":[1]}"#,
                "chat_id",
            ),
        ] {
            assert_eq!(refused(line.as_bytes()).1, field, "{line}");
        }
        assert_eq!(refused(b"{\"a\": \"\xff\"}").2, Problem::NotUtf8);
        let deep = "[".repeat(100_000);
        assert_eq!(refused(deep.as_bytes()).1, "line");
    }

    #[test]
    fn an_endless_line_is_refused_unread() {
        // Many zeros in a few KiB of zstd: a bomb.
        let zeros = vec![b'0'; 64 << 20];
        let bomb = zstd::encode_all(zeros.as_slice(), 1).unwrap();
        let (line, field, problem) = refused(&bomb);
        assert_eq!((line, field), (1, "line"));
        assert_eq!(problem, Problem::LineTooLong { max: lines::LINE_BYTES_MAX });
    }

    #[test]
    fn reading_stops_at_the_first_error() {
        let text = format!("{HEADER}\n[0,1,200,5,[0,3]]\nbad\n[0,1,200,5,[0,3]]\n");
        let file = file(text.as_bytes());
        let items: Vec<_> = TraceReader::open_path(file.path()).unwrap().collect();
        assert_eq!(items.len(), 2);
        let error = items[1].as_ref().unwrap_err();
        assert!(error.is_content());
        let message = error.to_string();
        assert!(message.contains("line 3") && !message.contains('\n'), "{message}");
    }

    #[test]
    fn a_name_that_is_nowhere_says_where_it_was_sought() {
        let error = TraceReader::open("no_such_trace").err().unwrap();
        assert!(matches!(error, TraceError::NotFound { .. }));
        assert!(!error.is_content());
        assert!(matches!(
            TraceReader::open("./no_such_trace").err().unwrap(),
            TraceError::Io { operation: "open", .. }
        ));
    }
}
