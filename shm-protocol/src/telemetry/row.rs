//! Rows of the segment's tables, and text in words.

use bytemuck::{Pod, Zeroable};

/// One SSD device. All numbers as the reader shows them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct DeviceRow {
    /// Path of the file, zero-padded; see [`text_words`].
    pub path: [u64; 32],
    /// Bytes that slots may take.
    pub capacity_bytes: u64,
    /// Bytes of the slots that hold a page.
    pub used_bytes: u64,
    /// Slots that hold a page.
    pub slots: u64,
    /// Page reads queued or in the kernel.
    pub reading: u64,
    /// Page writes queued or in the kernel.
    pub writing: u64,
    /// [`SsdEngine`](super::SsdEngine) as a word.
    pub engine: u64,
    /// 1 when the file is open with `O_DIRECT`.
    pub direct: u64,
    /// 1 when its space was reserved.
    pub preallocated: u64,
    /// 1 when the DRAM arenas are registered with its rings.
    pub registered: u64,
    /// [`SsdHealth`](super::SsdHealth) as a word.
    pub health: u64,
    /// Image bytes of writes in the kernel.
    pub write_inflight_bytes: u64,
    /// What these are held below at the moment.
    pub write_inflight_limit_bytes: u64,
    /// Nanoseconds that reads of pages up to 256 KiB take, without and with writes beside them:
    /// the 98th percentile of the last 64, 0 when there were none.
    pub small_read_ns: [u64; 2],
    /// The same for larger pages.
    pub large_read_ns: [u64; 2],
    /// [`SsdRecovery`](super::SsdRecovery) as a word.
    pub recovery: u64,
    /// Slots of its regions at the start.
    pub scan_slots: u64,
    /// Those that were looked at since.
    pub scanned_slots: u64,
    /// Bytes that were read for that.
    pub scan_read_bytes: u64,
}

/// One session and its rings.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct SessionRow {
    /// Session id.
    pub id: u64,
    /// Process id of the client.
    pub pid: u64,
    /// Its uid.
    pub uid: u64,
    /// [`SessionState`](super::SessionState) as a word; 0 = the row is empty.
    pub state: u64,
    /// Producer position of the request ring, as the Manager last saw it.
    pub requests_submitted: u64,
    /// Consumer position of the request ring.
    pub requests_taken: u64,
    /// Producer position of the completion ring.
    pub completions_published: u64,
    /// Consumer position of the completion ring, as the Manager last saw it.
    pub completions_consumed: u64,
    /// Operations taken and not yet ended.
    pub outstanding: u64,
    /// Operations that it may have outstanding.
    pub credits: u64,
    /// Bytes that its leases pin.
    pub leased_bytes: u64,
    /// Device regions that it registered.
    pub regions: u64,
    /// CLOCK_MONOTONIC nanoseconds at which an index of one of its rings last moved.
    pub last_progress_ns: u64,
    /// Engine id, the first eight bytes in the first word.
    pub engine: [u64; 2],
}

/// One operation that runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct OperationRow {
    /// [`crate::ids::OperationId::to_bits`].
    pub id: u64,
    /// [`crate::record::RequestKind`] as a number.
    pub kind: u64,
    /// [`OperationStage`](super::OperationStage) as a word.
    pub stage: u64,
    /// CLOCK_MONOTONIC nanoseconds at which it was taken from its ring.
    pub taken_ns: u64,
}

/// One lease that is held.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct LeaseRow {
    /// Lease id.
    pub id: u64,
    /// Engine id of its attachment group, the first eight bytes in the first word.
    pub group: [u64; 2],
    /// Bytes that it pins.
    pub bytes: u64,
    /// Pages that it pins.
    pub pages: u64,
    /// CLOCK_MONOTONIC nanoseconds at which it expires.
    pub expires_ns: u64,
}

/// What the tiers hold of one namespace.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct NamespaceRow {
    /// Name for a person, zero-padded; see [`text_words`].
    pub name: [u64; 16],
    /// Pages in DRAM.
    pub dram_pages: u64,
    /// Their image bytes.
    pub dram_bytes: u64,
    /// Pages on SSD.
    pub ssd_pages: u64,
    /// Their image bytes.
    pub ssd_bytes: u64,
}

/// Bytes as zero-padded words, cut to fit between two characters; a zero byte ends them.
pub fn text_words<const N: usize>(text: &[u8]) -> [u64; N] {
    let mut words = [0; N];
    let mut len = text.len().min(N * 8);
    if len < text.len() {
        // Never half a character: step back over continuation bytes.
        while len > 0 && text[len] & 0xc0 == 0x80 {
            len -= 1;
        }
    }
    for (word, chunk) in words.iter_mut().zip(text[..len].chunks(8)) {
        let mut bytes = [0; 8];
        bytes[..chunk.len()].copy_from_slice(chunk);
        *word = u64::from_le_bytes(bytes);
    }
    words
}

/// The bytes in front of the first zero byte of `words`.
pub fn text_bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).take_while(|&byte| byte != 0).collect()
}

/// Text for a terminal: invalid bytes and control characters (which could steer it) replaced, line
/// feeds and tabs kept.
pub fn printable(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes)
        .chars()
        .map(|c| if c.is_control() && c != '\n' && c != '\t' { '\u{fffd}' } else { c })
        .collect()
}

/// [`printable`] on one line: line feeds and tabs are replaced too.
pub fn printable_line(bytes: &[u8]) -> String {
    printable(bytes).replace(['\n', '\t'], "\u{fffd}")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Text that fits comes back; text that does not is cut between two characters.
        #[test]
        fn text_survives_or_is_cut_between_characters(text in "[^\0]{0,40}") {
            let kept = text_bytes(&text_words::<4>(text.as_bytes()));
            let kept = String::from_utf8(kept).expect("whole characters");
            prop_assert!(text.starts_with(&kept));
            if text.len() <= 32 {
                prop_assert_eq!(kept, text);
            } else {
                prop_assert!(kept.len() > 32 - 4);
            }
        }

        #[test]
        fn printable_text_cannot_steer_a_terminal(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let text = printable(&bytes);
            prop_assert!(text.chars().all(|c| !c.is_control() || c == '\n' || c == '\t'));
        }
    }
}
