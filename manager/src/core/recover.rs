//! Warm restart: pages that start-up found on SSD become pages again.

use std::collections::HashMap;

use super::Core;
use super::effect::{Effects, ImageIdentity, Slot};
use super::index::PageId;
use super::namespace::NamespaceId;
use super::slots::slot_bytes;

/// One slot whose footer was whole; the highest generation of its key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecoveredPage {
    /// Where it is.
    pub slot: Slot,
    /// What its footer says.
    pub image: ImageIdentity,
}

impl Core {
    /// Takes over what is on SSD. A page whose parent is not is left out and its slot is free.
    /// Older generations come first in recency. Call before the first session.
    pub fn recover(&mut self, mut recovered: Vec<RecoveredPage>, out: &mut Effects) {
        recovered.sort_unstable_by_key(|page| page.image.generation);
        let mut by_key: HashMap<(NamespaceId, [u8; 32]), usize> =
            HashMap::with_capacity(recovered.len());
        let mut namespaces = Vec::with_capacity(recovered.len());
        for (at, page) in recovered.iter().enumerate() {
            let image = &page.image;
            let known = self.namespaces.find(&image.namespace);
            let fits =
                known.is_none_or(|id| self.namespaces.get(id).image_bytes == image.image_bytes);
            let sized = slot_bytes(image.image_bytes) == page.slot.bytes;
            let room = known.is_some() || self.namespaces.len() < self.config.namespaces_max;
            if !fits || !sized || !room {
                namespaces.push(None);
                continue;
            }
            let label = format!("{} (not attached yet)", short_hex(&image.namespace));
            let id = self.namespaces.intern(image.namespace, None, image.image_bytes, label);
            namespaces.push(Some(id));
            by_key.insert((id, image.hash.0), at);
        }
        let mut states = vec![State::Unseen; recovered.len()];
        let mut path = Vec::new();
        for (at, namespace) in namespaces.iter().enumerate() {
            let Some(namespace) = *namespace else { continue };
            if by_key.get(&(namespace, recovered[at].image.hash.0)) != Some(&at) {
                // An older image of a key that has a newer one.
                continue;
            }
            // Up to the first decided ancestor, then down again.
            let (mut next, mut whole) = (Some(at), true);
            path.clear();
            while let Some(index) = next {
                match states[index] {
                    State::Unseen => {
                        states[index] = State::OnPath;
                        path.push(index);
                        next = match recovered[index].image.parent {
                            None => None,
                            Some(parent) => {
                                let found = by_key.get(&(namespace, parent.0)).copied();
                                whole &= found.is_some();
                                found
                            }
                        };
                    }
                    // A cycle is no chain.
                    State::OnPath | State::Dropped => {
                        whole = false;
                        next = None;
                    }
                    State::Kept => next = None,
                }
            }
            for &index in path.iter().rev() {
                // What cannot be taken over takes its descendants with it.
                whole = whole && self.take_over(namespace, &recovered[index]);
                states[index] = if whole { State::Kept } else { State::Dropped };
            }
        }
        let kept = states.iter().filter(|state| **state == State::Kept).count() as u64;
        self.stats.recovered_pages += kept;
        self.stats.recovered_dropped += recovered.len() as u64 - kept;
        self.slots.settle();
        self.refresh_recovered(&recovered, &namespaces);
        out.clear();
    }

    /// Makes a page of what is in a slot. False when two footers claim it or it is retired.
    fn take_over(&mut self, namespace: NamespaceId, recovered: &RecoveredPage) -> bool {
        let image = &recovered.image;
        let parent = image.parent.and_then(|parent| self.find(namespace, &parent));
        let page = self.insert_page(namespace, image.hash, parent);
        if !self.slots.occupy(recovered.slot, page) {
            self.pages.orphan(page);
            self.index.remove(&mut self.pages, page);
            self.namespaces.get_mut(namespace).pages.remove(&mut self.pages, page);
            self.pages.remove(page);
            return false;
        }
        self.pages[page].slot = Some(recovered.slot);
        self.pages[page].generation = image.generation;
        self.pages[page].slot_checksum = image.checksum;
        self.namespaces.get_mut(namespace).ssd_pages += 1;
        self.ssd_pages += 1;
        true
    }

    /// Oldest generations coldest, parents hotter than their children.
    fn refresh_recovered(
        &mut self,
        recovered: &[RecoveredPage],
        namespaces: &[Option<NamespaceId>],
    ) {
        let mut leaves: Vec<PageId> = Vec::new();
        for (page, namespace) in recovered.iter().zip(namespaces) {
            let found = namespace.and_then(|id| self.find(id, &page.image.hash));
            if let Some(found) = found.filter(|&id| self.pages.first_child(id).is_none()) {
                leaves.push(found);
            }
        }
        let guard = self.next_guard();
        // Hottest chain first, each page once: a list built from its hot end.
        let mut order: Vec<PageId> = Vec::with_capacity(recovered.len());
        for &leaf in leaves.iter().rev() {
            let start = order.len();
            let mut next = Some(leaf);
            while let Some(page) = next.filter(|&page| self.pages[page].guard != guard) {
                self.pages[page].guard = guard;
                order.push(page);
                next = self.pages.parent(page);
            }
            order[start..].reverse();
        }
        for &page in order.iter().rev() {
            self.touch(page);
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Unseen,
    OnPath,
    Kept,
    Dropped,
}

fn short_hex(bytes: &[u8]) -> String {
    bytes.iter().take(6).map(|byte| format!("{byte:02x}")).collect()
}
