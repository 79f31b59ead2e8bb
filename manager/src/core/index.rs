//! The pages that exist and how they are found: a slab, a hash index and the prefix tree.

use std::cell::Cell;
use std::ops::{Index as IndexOp, IndexMut};

use hashbrown::HashTable;
use orbitkv_shm_protocol::ids::PageHash;

use super::effect::{Extent, Slot};
use super::namespace::NamespaceId;
use super::replacement::{LINKS, Link};

/// A page's place in the slab. Reused after the page is gone: never kept without a pin.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct PageId(pub(super) u32);

const NIL: u32 = u32::MAX;

/// One page: where its image is and what holds it there.
#[derive(Debug)]
pub(super) struct Page {
    pub(super) hash: PageHash,
    pub(super) namespace: NamespaceId,
    /// How often its namespace had been forgotten when the page was made: no lookup finds a page of
    /// an earlier count.
    pub(super) era: u32,
    parent: u32,
    first_child: u32,
    next_sibling: u32,
    prev_sibling: u32,
    pub(super) links: [Link; LINKS],
    /// DRAM replica, or the memory that a read from SSD is filling.
    pub(super) extent: Option<Extent>,
    /// SSD replica.
    pub(super) slot: Option<Slot>,
    /// xxh3-64 of the image in DRAM, where that is known.
    pub(super) checksum: Option<u64>,
    /// xxh3-64 of the image on SSD. Two computations of a page need not agree in every bit, so the
    /// two replicas may differ and be equally good.
    pub(super) slot_checksum: u64,
    /// Generation of the slot.
    pub(super) generation: u64,
    /// Leases and operations that need the page to stay.
    pub(super) pins: u32,
    /// Copies, reads and writes that touch the extent now.
    pub(super) io: u32,
    /// When it last became the hottest, in touches of any page.
    pub(super) touched: u64,
    /// Number of the allocation that must not take this page.
    pub(super) guard: u64,
    /// First of the operations that wait for the read.
    pub(super) waiters: u32,
    /// When the page was last asked for; read by the `reuse` spill policy.
    pub(super) hits: u32,
    /// A read from SSD is filling the extent.
    pub(super) reading: bool,
    /// A read from SSD is filling memory that is the page's no more: a save brought the image.
    pub(super) overtaken: bool,
    /// Operations wait for room to read it: they are looked at when a save brings the image.
    pub(super) wanted: bool,
    /// A write to SSD is reading the extent.
    pub(super) writing: bool,
    /// In the index. A page that is not is gone as soon as nothing holds it.
    pub(super) indexed: bool,
    /// Its children wait to be looked at: it left, or has no place on SSD any more.
    pub(super) unsettled: bool,
    /// The child to be looked at next.
    next_unsettled: u32,
    /// What a look at its ancestors found: see [`Standing`].
    pub(super) standing: Standing,
    /// Placed in the slab.
    live: bool,
}

impl Page {
    /// Whether the image is in DRAM, whole and verified.
    pub(super) fn is_resident(&self) -> bool {
        self.extent.is_some() && !self.reading
    }

    /// Whether the image is in some tier.
    pub(super) fn is_restorable(&self) -> bool {
        self.is_resident() || self.slot.is_some()
    }
}

/// Whether a page stands on ancestors that are all in the index, as far as anybody has looked.
#[derive(Debug, Default)]
pub(super) struct Standing(Cell<u64>);

impl Standing {
    const CUT: u64 = u64::MAX;

    /// What is known when subtrees were cut off `cuts` times: whether it is cut off.
    fn known(&self, cuts: u64) -> Option<bool> {
        match self.0.get() {
            Self::CUT => Some(true),
            at if at == cuts => Some(false),
            _ => None,
        }
    }

    fn note(&self, cuts: u64, cut: bool) {
        self.0.set(if cut { Self::CUT } else { cuts });
    }
}

/// Storage of all pages.
#[derive(Debug, Default)]
pub(super) struct PageSlab {
    pages: Vec<Page>,
    free: Vec<u32>,
    /// Live pages of each namespace.
    of_namespace: Vec<u32>,
}

impl IndexOp<PageId> for PageSlab {
    type Output = Page;
    fn index(&self, id: PageId) -> &Page {
        &self.pages[id.0 as usize]
    }
}

impl IndexMut<PageId> for PageSlab {
    fn index_mut(&mut self, id: PageId) -> &mut Page {
        &mut self.pages[id.0 as usize]
    }
}

impl PageSlab {
    /// Live pages.
    pub(super) fn len(&self) -> usize {
        self.pages.len() - self.free.len()
    }

    /// Live pages of a namespace, findable or not.
    pub(super) fn len_of(&self, namespace: NamespaceId) -> u32 {
        self.of_namespace.get(namespace.0 as usize).copied().unwrap_or(0)
    }

    pub(super) fn is_live(&self, id: PageId) -> bool {
        self[id].live
    }

    fn insert(&mut self, namespace: NamespaceId, era: u32, hash: PageHash) -> PageId {
        let namespaces = self.of_namespace.len().max(namespace.0 as usize + 1);
        self.of_namespace.resize(namespaces, 0);
        self.of_namespace[namespace.0 as usize] += 1;
        let page = Page {
            hash,
            namespace,
            era,
            parent: NIL,
            first_child: NIL,
            next_sibling: NIL,
            prev_sibling: NIL,
            links: [Link::ABSENT; LINKS],
            extent: None,
            slot: None,
            checksum: None,
            slot_checksum: 0,
            generation: 0,
            pins: 0,
            io: 0,
            touched: 0,
            guard: 0,
            waiters: NIL,
            hits: 0,
            reading: false,
            overtaken: false,
            wanted: false,
            writing: false,
            indexed: true,
            unsettled: false,
            next_unsettled: NIL,
            standing: Standing::default(),
            live: true,
        };
        match self.free.pop() {
            Some(index) => {
                self.pages[index as usize] = page;
                PageId(index)
            }
            None => {
                self.pages.push(page);
                PageId(self.pages.len() as u32 - 1)
            }
        }
    }

    /// Gives the slab entry back. The page must be out of the index, of every list and of the tree.
    pub(super) fn remove(&mut self, id: PageId) {
        let page = &mut self[id];
        debug_assert!(page.live && !page.indexed && page.pins == 0 && page.io == 0);
        debug_assert!(page.extent.is_none() && page.slot.is_none() && page.waiters == NIL);
        debug_assert!(page.links.iter().all(|link| *link == Link::ABSENT));
        debug_assert!(page.first_child == NIL && !page.unsettled);
        page.live = false;
        let namespace = page.namespace.0 as usize;
        self.of_namespace[namespace] -= 1;
        self.free.push(id.0);
    }

    pub(super) fn parent(&self, id: PageId) -> Option<PageId> {
        let parent = self[id].parent;
        (parent != NIL).then_some(PageId(parent))
    }

    /// The nearest ancestor of `id` that `wanted` accepts.
    pub(super) fn ancestor(&self, id: PageId, wanted: impl Fn(PageId) -> bool) -> Option<PageId> {
        std::iter::successors(self.parent(id), |&above| self.parent(above))
            .find(|&above| wanted(above))
    }

    pub(super) fn first_child(&self, id: PageId) -> Option<PageId> {
        let child = self[id].first_child;
        (child != NIL).then_some(PageId(child))
    }

    /// The pages whose parent `id` is.
    pub(super) fn children(&self, id: PageId) -> impl Iterator<Item = PageId> {
        std::iter::successors(self.first_child(id), |&child| {
            let next = self[child].next_sibling;
            (next != NIL).then_some(PageId(next))
        })
    }

    /// Whether a page hangs on one that left the index: nobody may find it, and it goes too. Each
    /// cut-off subtree raises `cuts`, above 0. What was found is remembered, so that a walk down a
    /// chain looks at each page once.
    pub(super) fn is_cut_off(&self, id: PageId, cuts: u64) -> bool {
        let mut at = id;
        let cut = loop {
            if let Some(known) = self[at].standing.known(cuts) {
                break known;
            }
            match self.parent(at) {
                Some(parent) => at = parent,
                None => break !self[at].indexed,
            }
        };
        self[id].standing.note(cuts, cut);
        cut
    }

    /// Begins to look at the children that a page has now.
    pub(super) fn unsettle(&mut self, id: PageId) {
        let page = &mut self[id];
        page.unsettled = true;
        page.next_unsettled = page.first_child;
    }

    /// The next child to be looked at; each comes once.
    pub(super) fn next_unsettled(&mut self, id: PageId) -> Option<PageId> {
        let next = self[id].next_unsettled;
        if next == NIL {
            return None;
        }
        self[id].next_unsettled = self[PageId(next)].next_sibling;
        Some(PageId(next))
    }

    /// The page after `id` in a walk over the descendants of `top`, parents first.
    pub(super) fn next_below(&self, id: PageId, top: PageId) -> Option<PageId> {
        self.first_child(id).or_else(|| self.next_beside(id, top))
    }

    /// The page after `id` and all its descendants in a walk over those of `top`.
    pub(super) fn next_beside(&self, id: PageId, top: PageId) -> Option<PageId> {
        let mut at = id;
        while at != top {
            let next = self[at].next_sibling;
            if next != NIL {
                return Some(PageId(next));
            }
            at = self.parent(at)?;
        }
        None
    }

    /// Makes `child`, which has no parent, a child of `parent`.
    pub(super) fn adopt(&mut self, parent: PageId, child: PageId) {
        debug_assert_eq!(self[child].parent, NIL);
        let first = self[parent].first_child;
        self[child].parent = parent.0;
        self[child].next_sibling = first;
        self[child].prev_sibling = NIL;
        if first != NIL {
            self[PageId(first)].prev_sibling = child.0;
        }
        self[parent].first_child = child.0;
    }

    /// Cuts `child` from its parent, if it has one.
    pub(super) fn orphan(&mut self, child: PageId) {
        let (parent, next, prev) = {
            let page = &self[child];
            (page.parent, page.next_sibling, page.prev_sibling)
        };
        if parent == NIL {
            return;
        }
        if self[PageId(parent)].next_unsettled == child.0 {
            self[PageId(parent)].next_unsettled = next;
        }
        if prev == NIL {
            self[PageId(parent)].first_child = next;
        } else {
            self[PageId(prev)].next_sibling = next;
        }
        if next != NIL {
            self[PageId(next)].prev_sibling = prev;
        }
        let page = &mut self[child];
        page.parent = NIL;
        page.next_sibling = NIL;
        page.prev_sibling = NIL;
    }

    /// Every live page with its id, in slab order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (PageId, &Page)> {
        let live = self.pages.iter().enumerate().filter(|(_, page)| page.live);
        live.map(|(index, page)| (PageId(index as u32), page))
    }
}

/// Where tables keep a key. `seed` is odd.
#[inline]
pub(super) fn key_hash(seed: u64, namespace: NamespaceId, hash: &PageHash) -> u64 {
    let word = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&hash.0[at..at + 8]);
        u64::from_le_bytes(bytes)
    };
    let folded = |a: u64, b: u64| {
        let product = u128::from(a) * u128::from(b);
        (product as u64) ^ (product >> 64) as u64
    };
    let first = folded(word(0) ^ seed, word(8) ^ seed.rotate_left(32));
    let second = folded(word(16) ^ first, word(24) ^ seed.rotate_left(17));
    folded(second ^ u64::from(namespace.0), 0x9e37_79b9_7f4a_7c15)
}

/// Finds pages by namespace, era and hash.
#[derive(Debug)]
pub(super) struct Index {
    table: HashTable<u32>,
    seed: u64,
}

impl Index {
    /// `seed` keeps clients, who choose the hashes, from choosing collisions.
    pub(super) fn new(seed: u64) -> Self {
        Self { table: HashTable::new(), seed: seed | 1 }
    }

    /// Findable pages.
    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    /// The page with this key that `counts`: of one that waits to be dropped there may be another.
    #[inline]
    pub(super) fn find(
        &self,
        pages: &PageSlab,
        namespace: NamespaceId,
        era: u32,
        hash: &PageHash,
        counts: impl Fn(PageId) -> bool,
    ) -> Option<PageId> {
        let key = key_hash(self.seed, namespace, hash);
        let matches = |&id: &u32| {
            let page = &pages[PageId(id)];
            let is_it = page.hash == *hash && page.namespace == namespace && page.era == era;
            is_it && counts(PageId(id))
        };
        self.table.find(key, matches).map(|&id| PageId(id))
    }

    /// Makes room for `more` pages, so that adding them moves none.
    pub(super) fn reserve(&mut self, pages: &mut PageSlab, more: usize) {
        pages.pages.reserve(more.saturating_sub(pages.free.len()));
        let seed = self.seed;
        self.table.reserve(more, |&other| {
            let page = &pages[PageId(other)];
            key_hash(seed, page.namespace, &page.hash)
        });
    }

    /// Adds a page that is not there yet.
    pub(super) fn insert(
        &mut self,
        pages: &mut PageSlab,
        namespace: NamespaceId,
        era: u32,
        hash: PageHash,
    ) -> PageId {
        let id = pages.insert(namespace, era, hash);
        let seed = self.seed;
        self.table.insert_unique(key_hash(seed, namespace, &hash), id.0, |&other| {
            let page = &pages[PageId(other)];
            key_hash(seed, page.namespace, &page.hash)
        });
        id
    }

    /// Makes a page unfindable; it stays in the slab.
    pub(super) fn remove(&mut self, pages: &mut PageSlab, id: PageId) {
        if !pages[id].indexed {
            return;
        }
        let key = key_hash(self.seed, pages[id].namespace, &pages[id].hash);
        if let Ok(entry) = self.table.find_entry(key, |&other| other == id.0) {
            entry.remove();
        }
        pages[id].indexed = false;
    }
}
