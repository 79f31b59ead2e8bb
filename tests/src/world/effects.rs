//! Effects are carried out here, and what they promise is checked.

use std::collections::HashMap;

use orbitkv_manager::core::{CopyPage, Direction, Effect, ImageIdentity, PageView, PeerFault};
use orbitkv_shm_protocol::ids::{PageHash, RegionId, SessionId};
use orbitkv_shm_protocol::record::{
    Code, Completion, PageOutcome, PageResult, QueryMode, RequestBody, RequestKind, Status,
};

use super::{Held, Work, World};
use crate::client::{Client, Ended, Submitted, check_answer, fence_of, outcome};
use crate::content::{Key, POISON, is_image};
use crate::memory::Use;

impl World {
    pub(super) fn carry_out(&mut self) {
        let mut out = std::mem::take(&mut self.out);
        for effect in out.list.drain(..) {
            match effect {
                Effect::Complete { session, completion, results, results_start } => {
                    self.completed(session, completion, &out.results[results], results_start);
                }
                Effect::RestoreFailed { session, operation } => {
                    let client = self.client_mut(session);
                    assert!(client.closed, "an attached client is told by its completion");
                    client.done_words.insert(operation.index, operation.failed_word());
                }
                Effect::Copy {
                    ticket,
                    direction,
                    session,
                    region,
                    pages,
                    fence,
                    done,
                    by_layer,
                } => {
                    let pages = out.copies[pages].to_vec();
                    self.copy(Work::Copy {
                        ticket,
                        direction,
                        session,
                        region,
                        pages,
                        fence,
                        done,
                        by_layer,
                    });
                }
                Effect::GiveUpFence { session, index } => {
                    let waits = |work: &Work| match work {
                        Work::Copy { session: of, fence: Some(fence), .. } => {
                            *of == session && fence.index == index
                        }
                        _ => false,
                    };
                    assert!(self.work.iter().any(waits), "nobody waits for event {index}");
                    self.client_mut(session).events[index as usize].given_up = true;
                }
                Effect::Read { ticket, slot, extent, image_bytes, checksum } => {
                    self.memory.begin(ticket, extent, Use::Fills);
                    assert!(self.core.device_is_readable(slot.device), "{slot:?} is not readable");
                    if let Some(footer) = self.disk.footer(&slot) {
                        assert_eq!(
                            footer.checksum,
                            Some(checksum),
                            "reads expect what was written"
                        );
                    }
                    self.work.push(Work::Read { ticket, slot, extent, image_bytes, checksum });
                }
                Effect::Write { ticket, extent, slot, image } => {
                    self.memory.begin(ticket, extent, Use::Reads);
                    self.disk.check_writable(&slot, &image);
                    let overlaps = |work: &Work| match work {
                        Work::Read { slot: other, .. } | Work::Write { slot: other, .. } => {
                            other.device == slot.device
                                && other.offset < slot.offset + u64::from(slot.bytes)
                                && slot.offset < other.offset + u64::from(other.bytes)
                        }
                        _ => false,
                    };
                    assert!(!self.work.iter().any(overlaps), "{slot:?} is in use");
                    self.check_found_again(&image);
                    self.check_write_budget(slot.bytes);
                    self.work.push(Work::Write { ticket, extent, slot, image });
                }
                Effect::RecordRegion { device, region, slot_bytes } => {
                    self.disk.record_region(device, region, slot_bytes);
                }
                Effect::RetireSlot { slot } => self.disk.retire(&slot),
                Effect::RecordForget { ticket, namespace, generation } => {
                    let hashes = self.unrecorded.remove(&(namespace, u64::MAX));
                    self.unrecorded.insert((namespace, generation), hashes.unwrap_or_default());
                    self.work.push(Work::Forget { ticket, namespace, generation });
                }
                Effect::RegionEnded { session, region } => {
                    assert!(!self.copies_touch(session, Some(region)), "region is being copied");
                    self.client_mut(session).regions[region.0 as usize] = None;
                }
                Effect::CloseSession { session, fault } => self.closed(session, fault),
                Effect::SessionEnded { session } => {
                    assert!(!self.copies_touch(session, None), "session is being copied");
                    let client = self.clients.remove(&session.0).expect("ends once");
                    assert!(client.closed, "a session ends after it was closed");
                    for asked in client.in_flight.values() {
                        check_done_word(&client, asked);
                    }
                }
                Effect::Dropped { hash } => self.dropped.push(hash),
            }
        }
        out.clear();
        self.out = out;
    }

    /// A page is written only when the parent that its footer names is on SSD or on its way there:
    /// else nobody could find it again.
    fn check_found_again(&self, image: &ImageIdentity) {
        let Some(parent) = image.parent else { return };
        let parent_key = (image.namespace, parent);
        let on_its_way = self.work.iter().any(|work| match work {
            Work::Write { image, .. } => (image.namespace, image.hash) == parent_key,
            _ => false,
        });
        let there = || {
            let mut pages = self.core.page_views();
            pages.any(|page| (page.namespace, page.hash) == parent_key && page.slot.is_some())
        };
        assert!(on_its_way || there(), "written without its parent: {image:?}");
    }

    /// No more is written than the budget of the time since the start, an hour more, and the slot
    /// that used it up.
    fn check_write_budget(&mut self, slot_bytes: u32) {
        let Some(bytes_a_day) = self.config.write_budget_bytes_a_day else { return };
        let hour = 3_600_000_000_000;
        let time = u128::from(self.now - self.began + hour);
        let allowed = u128::from(bytes_a_day) * time / (24 * u128::from(hour));
        assert!(u128::from(self.ordered_bytes) <= allowed, "over the write budget");
        self.ordered_bytes += u64::from(slot_bytes);
    }

    fn closed(&mut self, session: SessionId, fault: PeerFault) {
        let client = self.client_mut(session);
        assert_eq!(client.fault.replace(fault), None, "closed twice");
        client.closed = true;
        self.group_may_end(session);
    }

    fn copies_touch(&self, id: SessionId, only: Option<RegionId>) -> bool {
        self.work.iter().any(|work| match work {
            Work::Copy { session, region, .. } => {
                *session == id && only.is_none_or(|only| *region == only)
            }
            _ => false,
        })
    }

    fn copy(&mut self, work: Work) {
        let Work::Copy { ticket, direction, session, region, ref pages, .. } = work else { return };
        let client = self.clients.get(&session.0).expect("copy of a session that is there");
        let named = |page: &CopyPage| {
            client.in_flight.values().any(|submitted| {
                let of = match submitted.request.body {
                    RequestBody::Save { region, .. } => Some((region, Direction::Save)),
                    RequestBody::Restore { region, .. } => Some((region, Direction::Restore)),
                    _ => None,
                };
                let mut entries = submitted.entries.iter();
                of == Some((region, direction))
                    && entries.any(|e| !e.is_anchor() && e.device_page == page.device_page)
            })
        };
        assert!(!pages.is_empty() && client.regions[region.0 as usize].is_some());
        for page in pages {
            assert!(client.closed || named(page), "{direction:?} of a page that nobody named");
            let how = match direction {
                Direction::Save => Use::Fills,
                Direction::Restore => Use::Reads,
            };
            self.memory.begin(ticket, page.extent, how);
        }
        self.work.push(work);
    }

    fn completed(
        &mut self,
        session: SessionId,
        completion: Completion,
        results: &[PageResult],
        results_start: u32,
    ) {
        let client = self.clients.get_mut(&session.0).expect("completion of no session");
        assert!(!client.closed, "completion for a client that is gone: {completion:?}");
        if let Some(at) = client.wrong.iter().position(|wrong| *wrong == completion.operation) {
            client.wrong.swap_remove(at);
            assert_eq!((completion.status, results.len()), (Status::Error, 0));
            client.wrong_answers.push(completion);
            return;
        }
        let index = completion.operation.index;
        let submitted = client.in_flight.remove(&index);
        let submitted = submitted.filter(|s| s.request.operation == completion.operation);
        let submitted = submitted.unwrap_or_else(|| panic!("not asked for: {completion:?}"));
        if !results.is_empty() {
            assert_eq!(results_start, submitted.request.range.start);
        }
        if let Some(fence) = fence_of(&submitted.request)
            && completion.code != Code::BadFence
        {
            // What comes after it now is for whoever has the pages next.
            client.events[fence as usize].writes.clear();
        }
        let ended = Ended { submitted, completion, results: results.to_vec() };
        check_answer(&ended);
        assert!(completion.queued_ns > 0 && completion.queued_ns <= self.now);
        match completion.kind {
            RequestKind::Query => self.answered(session, &ended),
            RequestKind::Restore => self.restored(session, &ended),
            _ => {}
        }
        let region = match ended.submitted.request.body {
            RequestBody::Save { region, .. } | RequestBody::Restore { region, .. } => Some(region),
            _ => None,
        };
        let client = self.client_mut(session);
        let region = region.and_then(|region| client.regions.get_mut(region.0 as usize)?.as_mut());
        if let Some(region) = region {
            // The engine uses its pages for something else at once.
            let pages = ended.submitted.entries.iter().filter(|entry| !entry.is_anchor());
            for entry in pages {
                let Some(page) = region.pages.get_mut(entry.device_page as usize) else { continue };
                page.fill(POISON);
                region.free.push(entry.device_page);
            }
        }
        client.ended.push(ended);
    }

    fn restored(&self, session: SessionId, ended: &Ended) {
        for (at, result) in ended.results.iter().enumerate() {
            if outcome(result) == PageOutcome::Restored {
                self.check_restored(session, &ended.submitted, at);
            }
        }
        let operation = ended.completion.operation;
        let done = self.client(session).done_words.get(&operation.index);
        let said_done = done == Some(&operation.done_word());
        let pages = !ended.submitted.entries.is_empty();
        let ok = ended.completion.status == Status::Ok;
        assert_eq!(said_done, ok && pages, "done word of {ended:?}");
    }

    pub(super) fn check_restored(&self, session: SessionId, submitted: &Submitted, at: usize) {
        let RequestBody::Restore { region, .. } = submitted.request.body else { return };
        let region = self.client(session).regions[region.0 as usize].as_ref().expect("a region");
        let entry = &submitted.entries[at];
        let key = region.member.key(PageHash(entry.hash));
        let words = &region.pages[entry.device_page as usize];
        assert!(is_image(words, &key), "restored wrong bytes for page {at}: {key:?}");
    }

    /// A query was answered: its hit is no longer than what is there, never forgotten, and held.
    fn answered(&mut self, session: SessionId, ended: &Ended) {
        let RequestBody::Query { scope, mode } = ended.submitted.request.body else { return };
        let client = self.client(session);
        let Some(members) = client.scopes.get(scope.0 as usize).cloned() else { return };
        let engine = client.engine;
        let pages = ended.submitted.entries.iter().filter(|entry| !entry.is_anchor());
        let hashes: Vec<_> = pages.map(|entry| PageHash(entry.hash)).collect();
        let (completion, len) = (&ended.completion, ended.completion.pages as usize);
        let at_once = self.asked == Some((session, completion.operation));
        if completion.status == Status::Ok && at_once {
            assert_eq!(len, ended.submitted.restorable, "not the longest prefix: {ended:?}");
        }
        let Some(lease) = completion.lease else { return };
        let mut pinned: HashMap<Key, Vec<PageView>> = HashMap::new();
        for page in self.core.page_views().filter(|page| page.pins > 0) {
            let key = Key { namespace: page.namespace, hash: page.hash };
            pinned.entry(key).or_default().push(page);
        }
        for member in &members {
            for at in member.needed(len) {
                let key = member.key(hashes[at]);
                let known = self.known.get(&member.fingerprint);
                let known = known.is_some_and(|known| known.contains(&hashes[at]));
                let views = pinned.get(&key).map_or(&[][..], Vec::as_slice);
                // A query that had to wait may have found a page before it was forgotten.
                let forgotten = !at_once;
                assert!(known || forgotten, "hit of a page that nobody saved: {key:?}");
                let good =
                    |page: &PageView| mode == QueryMode::Candidate || page.resident.is_some();
                assert!(views.iter().any(good), "leased and not there: {key:?} {views:?}");
            }
        }
        let expires = completion.lease_expires_ns;
        let held = Held { engine, members, hashes, len, expires };
        assert!(self.held.insert(lease, held).is_none(), "{lease} was given before");
    }
}

/// A stream that waits for the done word of a restore passes whatever became of its client.
fn check_done_word(client: &Client, asked: &Submitted) {
    let restore = asked.request.kind() == RequestKind::Restore && !asked.entries.is_empty();
    let operation = asked.request.operation;
    let word = client.done_words.get(&operation.index);
    let passes = [operation.done_word(), operation.failed_word()];
    let stored = word.is_some_and(|word| passes.contains(word));
    assert!(!restore || stored, "word {word:?} of {asked:?}");
}
