//! Recency lists: who was used last, and who goes next.
//!
//! Lists are intrusive: their links live in the pages, so that a touch is a few stores. Recency is
//! refreshed from a chain's tail to its head, which keeps every parent hotter than its children;
//! the coldest page of a list is therefore always the deepest of its chain.

use super::index::{PageId, PageSlab};

/// Which of a page's links a list uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ListKind {
    /// Unpinned pages with a DRAM replica.
    Dram = 0,
    /// Unpinned pages of one slot size in any tier: whose slot goes next.
    Ssd = 1,
    /// Resident pages that wait to be written.
    Spill = 2,
    /// All pages of one namespace.
    Namespace = 3,
}

/// Links that one page has.
pub(super) const LINKS: usize = 4;

const NIL: u32 = u32::MAX;
const ABSENT: u32 = u32::MAX - 1;

/// A page's place in one list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Link {
    colder: u32,
    hotter: u32,
}

impl Link {
    /// In no list.
    pub(super) const ABSENT: Self = Self { colder: ABSENT, hotter: ABSENT };

    fn is_member(self) -> bool {
        self.hotter != ABSENT
    }
}

/// Pages from coldest to hottest.
#[derive(Debug)]
pub(super) struct Recency {
    kind: ListKind,
    coldest: u32,
    hottest: u32,
    len: usize,
}

impl Recency {
    pub(super) const fn new(kind: ListKind) -> Self {
        Self { kind, coldest: NIL, hottest: NIL, len: 0 }
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The next victim.
    pub(super) fn coldest(&self) -> Option<PageId> {
        (self.coldest != NIL).then_some(PageId(self.coldest))
    }

    /// The last to go.
    pub(super) fn hottest(&self) -> Option<PageId> {
        (self.hottest != NIL).then_some(PageId(self.hottest))
    }

    /// Takes over the members of `other`, a list of the same kind, as the hottest.
    pub(super) fn append(&mut self, pages: &mut PageSlab, other: Self) {
        debug_assert_eq!(self.kind, other.kind);
        let k = self.kind as usize;
        match (self.hottest, other.coldest) {
            (_, NIL) => return,
            (NIL, _) => self.coldest = other.coldest,
            (old, next) => {
                pages[PageId(old)].links[k].hotter = next;
                pages[PageId(next)].links[k].colder = old;
            }
        }
        self.hottest = other.hottest;
        self.len += other.len;
    }

    /// The page after `page`, towards the hot end.
    pub(super) fn hotter(&self, pages: &PageSlab, page: PageId) -> Option<PageId> {
        let next = pages[page].links[self.kind as usize].hotter;
        (next < ABSENT).then_some(PageId(next))
    }

    pub(super) fn contains(&self, pages: &PageSlab, page: PageId) -> bool {
        pages[page].links[self.kind as usize].is_member()
    }

    /// Every member, coldest first. For checks.
    pub(super) fn walk(&self, pages: &PageSlab) -> Vec<PageId> {
        let mut walked: Vec<PageId> = Vec::with_capacity(self.len);
        let mut next = self.coldest();
        while let Some(page) = next {
            assert!(walked.len() < self.len, "list longer than its count");
            let colder = walked.last().map_or(NIL, |page| page.0);
            assert_eq!(pages[page].links[self.kind as usize].colder, colder, "links disagree");
            walked.push(page);
            next = self.hotter(pages, page);
        }
        assert_eq!(walked.len(), self.len, "list shorter than its count");
        assert_eq!(walked.last().map_or(NIL, |page| page.0), self.hottest);
        walked
    }

    /// Makes `page` the hottest, whether it was a member or not.
    pub(super) fn touch(&mut self, pages: &mut PageSlab, page: PageId) {
        if self.hottest == page.0 {
            return;
        }
        self.remove(pages, page);
        let k = self.kind as usize;
        pages[page].links[k] = Link { colder: self.hottest, hotter: NIL };
        match self.hottest {
            NIL => self.coldest = page.0,
            old => pages[PageId(old)].links[k].hotter = page.0,
        }
        self.hottest = page.0;
        self.len += 1;
    }

    /// Puts `page`, member or not, right below the member `above`.
    pub(super) fn place_below(&mut self, pages: &mut PageSlab, page: PageId, above: PageId) {
        debug_assert!(page != above && self.contains(pages, above));
        self.remove(pages, page);
        let k = self.kind as usize;
        let colder = pages[above].links[k].colder;
        pages[page].links[k] = Link { colder, hotter: above.0 };
        match colder {
            NIL => self.coldest = page.0,
            at => pages[PageId(at)].links[k].hotter = page.0,
        }
        pages[above].links[k].colder = page.0;
        self.len += 1;
    }

    /// Makes `page`, which is no member, the coldest.
    pub(super) fn place_coldest(&mut self, pages: &mut PageSlab, page: PageId) {
        match self.coldest() {
            None => self.touch(pages, page),
            Some(above) => self.place_below(pages, page, above),
        }
    }

    /// Takes `page` out; nothing happens when it is no member.
    pub(super) fn remove(&mut self, pages: &mut PageSlab, page: PageId) {
        let k = self.kind as usize;
        let link = pages[page].links[k];
        if !link.is_member() {
            return;
        }
        match link.colder {
            NIL => self.coldest = link.hotter,
            colder => pages[PageId(colder)].links[k].hotter = link.hotter,
        }
        match link.hotter {
            NIL => self.hottest = link.colder,
            hotter => pages[PageId(hotter)].links[k].colder = link.colder,
        }
        pages[page].links[k] = Link::ABSENT;
        self.len -= 1;
    }
}
