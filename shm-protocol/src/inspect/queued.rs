//! Where the clients of a Manager that does not look at them are: read from their submission
//! segments, which the Manager holds open.
//!
//! The numbers are the clients' own words, so each can lie about its own ring and about no other:
//! whose segment it is stands in the name that the Manager gave it. A client may give that name to
//! memory of its own, but of a client's memory the Manager keeps open only what can shrink, and
//! what can shrink is not looked at.

use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, fcntl_get_seals};

use super::snapshot::Snapshot;
use crate::ids::SessionId;
use crate::layout::{COMPLETION_HEAD, REQUEST_TAIL};
use crate::segment::{SegmentKind, submission_name};

/// A Manager that has not beaten for longer may be stopped; one that sleeps beats more often.
pub(super) const LOOK_AFTER_MS: u64 = 100;
/// Descriptors of the Manager that are looked at: more than its limit commonly allows.
const DESCRIPTORS_MAX: usize = 65_536;

/// Corrects what a snapshot says of rings by where the clients are now. Whatever cannot be read
/// (another user's process, another process-id namespace) stays as it was mirrored.
pub(super) fn look_at_clients(snapshot: &mut Snapshot) {
    let folder = format!("/proc/{}/fd", snapshot.manager.pid);
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.take(DESCRIPTORS_MAX).map_while(Result::ok) {
        let Ok(target) = std::fs::read_link(entry.path()) else { continue };
        let Some(name) = target.to_str().and_then(|name| name.strip_prefix("/memfd:")) else {
            continue;
        };
        let name = name.trim_end_matches(" (deleted)");
        let is_its =
            |id: u64| u32::try_from(id).is_ok_and(|id| name == submission_name(SessionId(id)));
        let Some(at) = snapshot.sessions.iter().position(|session| is_its(session.id)) else {
            continue;
        };
        let Some(words) = client_words(&entry.path()) else { continue };
        let session = &mut snapshot.sessions[at];
        let Some(ring) = snapshot.rings.iter_mut().find(|ring| ring.session == session.id) else {
            continue;
        };
        // Only forward, and no further than any client can be.
        let submitted = words.request_tail.saturating_sub(session.requests_submitted);
        let consumed = words.completion_head.saturating_sub(session.completions_consumed);
        if submitted <= ring.credits && consumed <= ring.completions_queued {
            session.requests_submitted += submitted;
            session.completions_consumed += consumed;
            ring.requests_queued += submitted;
            ring.completions_queued -= consumed;
            ring.credits_used = (ring.credits_used + submitted).saturating_sub(consumed);
        }
    }
}

/// The positions that a client writes.
struct ClientWords {
    request_tail: u64,
    completion_head: u64,
}

fn client_words(descriptor: &Path) -> Option<ClientWords> {
    // The link may lead elsewhere by now: nothing is waited for, nothing but a file is read.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = rustix::fs::open(descriptor, flags, Mode::empty()).ok()?;
    let stat = rustix::fs::fstat(&file).ok()?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return None;
    }
    let seals = fcntl_get_seals(&file).ok()?;
    if !seals.contains(SegmentKind::Submission.seals()) {
        return None;
    }
    let word = |offset: usize| {
        let mut bytes = [0; 8];
        let read = rustix::io::pread(&file, &mut bytes, offset as u64).ok()?;
        (read == bytes.len()).then(|| u64::from_le_bytes(bytes))
    };
    Some(ClientWords { request_tail: word(REQUEST_TAIL)?, completion_head: word(COMPLETION_HEAD)? })
}
