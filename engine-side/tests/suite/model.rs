//! What the twin answers: save, query, restore and the rest over a map of pages.

use std::collections::hash_map::Entry;

use orbitkv_shm_protocol::ids::{LeaseId, OperationId, PageHash, RegionId};
use orbitkv_shm_protocol::record::{
    Code, Completion, PageEntry, PageOutcome, PageResult, Request, RequestBody, Status, Tier,
};

use crate::twin::{Seat, Store, TwinLease};

impl Seat {
    /// Answers one request at once.
    pub(crate) fn answer(&mut self, request: Request, entries: &[PageEntry], store: &mut Store) {
        let mut completion = Completion::ok(request.operation, request.kind());
        completion.queued_ns = 1;
        let mut results = Vec::new();
        let outcome = match request.body {
            RequestBody::Save { region, .. } => {
                self.save(region, entries, store, &mut completion, &mut results)
            }
            RequestBody::Query { scope, .. } => {
                self.query(scope.0, entries, store, &mut completion, &mut results)
            }
            RequestBody::Restore { .. } => {
                self.restore(&request, entries, store, &mut completion, &mut results)
            }
            RequestBody::Release { lease } => match store.leases.remove(&lease.0) {
                Some(owned) if owned.engine == self.engine => Ok(()),
                Some(other) => {
                    store.leases.insert(lease.0, other);
                    Err(Code::UnknownLease)
                }
                None => Err(Code::UnknownLease),
            },
            RequestBody::Cancel { operation } => {
                self.cancel(operation);
                Ok(())
            }
            RequestBody::Prepare { .. } | RequestBody::Ping => Ok(()),
            RequestBody::Forget { scope } => {
                let namespace = &self.scopes[scope.0 as usize][0];
                let before = store.pages.len();
                store.pages.retain(|(owner, _), _| owner != namespace);
                completion.pages = (before - store.pages.len()) as u32;
                Ok(())
            }
            RequestBody::Unregister { region } => match self.regions.get_mut(region.0 as usize) {
                Some(slot) if slot.is_some() => {
                    *slot = None;
                    Ok(())
                }
                _ => Err(Code::UnknownRegion),
            },
            RequestBody::Drain => {
                let owns = store.leases.values().any(|lease| lease.engine == self.engine);
                // Without a deadline it comes here only once that is so.
                let is_late = request.deadline_ms > 0 && (owns || !self.held.is_empty());
                if is_late { Err(Code::Deadline) } else { Ok(()) }
            }
        };
        if let Err(code) = outcome {
            completion.status = Status::Error;
            completion.code = code;
        }
        self.complete(request.range.start, &results, completion);
    }

    fn cancel(&mut self, target: OperationId) {
        if let Some(at) = self.held.iter().position(|(held, _)| held.operation == target) {
            let (request, _) = self.held.remove(at);
            let mut completion = Completion::ok(request.operation, request.kind());
            completion.status = Status::Error;
            completion.code = Code::Cancelled;
            self.complete(request.range.start, &[], completion);
        }
    }

    fn save(
        &self,
        region: RegionId,
        entries: &[PageEntry],
        store: &mut Store,
        completion: &mut Completion,
        results: &mut Vec<PageResult>,
    ) -> Result<(), Code> {
        let operation = completion.operation;
        let spec = self.regions.get(region.0 as usize).and_then(Option::as_ref);
        let spec = spec.ok_or(Code::UnknownRegion)?;
        let namespace = &self.scopes[spec.scope as usize][0];
        let mut is_reachable = true;
        for entry in entries {
            let key = (namespace.clone(), PageHash(entry.hash));
            if entry.is_anchor() {
                is_reachable = store.pages.contains_key(&key);
                results.push(PageResult::new(operation, PageOutcome::None, Tier::None, Code::None));
                continue;
            }
            is_reachable |= entry.is_root();
            let (outcome, tier, code) = if !is_reachable {
                completion.pages_refused += 1;
                (PageOutcome::Refused, Tier::None, Code::ParentAbsent)
            } else if let Entry::Vacant(vacant) = store.pages.entry(key) {
                let mut image = Vec::new();
                for segment in &spec.segments {
                    let start = image.len();
                    image.resize(start + segment.length as usize, 0);
                    let at = segment.offset + u64::from(entry.device_page) * segment.stride;
                    self.memories[segment.memory as usize].read(at, &mut image[start..]);
                }
                completion.bytes += image.len() as u64;
                completion.pages += 1;
                vacant.insert(image);
                (PageOutcome::Stored, Tier::Dram, Code::None)
            } else {
                completion.pages_present += 1;
                (PageOutcome::Present, Tier::Dram, Code::None)
            };
            results.push(PageResult::new(operation, outcome, tier, code));
        }
        if completion.pages_refused > 0 {
            completion.status = Status::Partial;
            completion.code = Code::ParentAbsent;
        }
        Ok(())
    }

    fn query(
        &self,
        scope: u32,
        entries: &[PageEntry],
        store: &mut Store,
        completion: &mut Completion,
        results: &mut Vec<PageResult>,
    ) -> Result<(), Code> {
        let members = self.scopes.get(scope as usize).ok_or(Code::UnknownScope)?;
        let has = |entry: &PageEntry| {
            let hash = PageHash(entry.hash);
            members.iter().all(|member| store.pages.contains_key(&(member.clone(), hash)))
        };
        let reached = entries.iter().take_while(|entry| has(entry)).count();
        let pages = |entries: &[PageEntry]| -> Vec<PageHash> {
            entries.iter().filter(|e| !e.is_anchor()).map(|e| PageHash(e.hash)).collect()
        };
        let hashes = pages(&entries[..reached]);
        for (i, entry) in entries.iter().enumerate() {
            let (outcome, tier) = match (entry.is_anchor(), i < reached) {
                (true, _) => (PageOutcome::None, Tier::None),
                (false, true) => (PageOutcome::Hit, Tier::Dram),
                (false, false) => (PageOutcome::Miss, Tier::None),
            };
            results.push(PageResult::new(completion.operation, outcome, tier, Code::None));
        }
        completion.pages = hashes.len() as u32;
        completion.pages_dram = completion.pages;
        if !hashes.is_empty() {
            store.leases_granted += 1;
            completion.lease = Some(LeaseId(store.leases_granted));
            completion.lease_expires_ns = u64::MAX;
            let lease = TwinLease { engine: self.engine.clone(), hashes };
            store.leases.insert(store.leases_granted, lease);
        }
        Ok(())
    }

    fn restore(
        &self,
        request: &Request,
        entries: &[PageEntry],
        store: &mut Store,
        completion: &mut Completion,
        results: &mut Vec<PageResult>,
    ) -> Result<(), Code> {
        let RequestBody::Restore { region, lease, offset, keep, by_layer, .. } = request.body
        else {
            return Err(Code::BadRequest);
        };
        let done = |word, value| self.side.done.store(request.operation.index, word, value);
        let outcome = (|| {
            let owned = store.leases.get(&lease.0).filter(|owned| owned.engine == self.engine);
            let owned = owned.ok_or(Code::UnknownLease)?;
            let spec = self.regions.get(region.0 as usize).and_then(Option::as_ref);
            let spec = spec.ok_or(Code::UnknownRegion)?;
            let namespace = &self.scopes[spec.scope as usize][0];
            for (i, entry) in entries.iter().enumerate() {
                let hash = PageHash(entry.hash);
                if owned.hashes.get(offset as usize + i) != Some(&hash) {
                    return Err(Code::BadRequest);
                }
                let image = &store.pages[&(namespace.clone(), hash)];
                let mut rest = &image[..];
                for segment in &spec.segments {
                    let (part, after) = rest.split_at(segment.length as usize);
                    rest = after;
                    let at = segment.offset + u64::from(entry.device_page) * segment.stride;
                    self.memories[segment.memory as usize].write(at, part);
                }
                completion.pages += 1;
                completion.bytes += image.len() as u64;
                results.push(PageResult::new(
                    request.operation,
                    PageOutcome::Restored,
                    Tier::Dram,
                    Code::None,
                ));
            }
            Ok(spec.segments.iter().map(|segment| segment.layer).max().unwrap_or(0))
        })();
        completion.pages_dram = completion.pages;
        match outcome {
            Ok(last) if by_layer => {
                (0..=last).for_each(|word| done(word, request.operation.done_word()));
            }
            Ok(_) => done(0, request.operation.done_word()),
            Err(_) => {
                completion.first_failed = Some(completion.pages);
                let words = self.side.geometry().done_words;
                (0..words).for_each(|word| done(word, request.operation.failed_word()));
            }
        }
        if !keep {
            store.leases.remove(&lease.0);
        }
        outcome.map(drop)
    }
}
