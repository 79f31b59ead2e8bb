//! Ends of the work that `core` ordered: time, copies, reads, writes.

use orbitkv_manager::core::{
    CopyFault, CopyPage, Direction, Event, FenceWait, ImageIdentity, IoFault, Nanos, Ticket,
};
use orbitkv_shm_protocol::ids::{OperationId, RegionId, SessionId};

use super::{Fate, Work, World};
use crate::content::{Key, Word, checksum, is_image, units};

impl World {
    /// Time passes; deadlines and leases are looked at.
    pub fn advance(&mut self, nanos: Nanos) {
        self.now += nanos;
        self.handle(Event::Tick);
    }

    /// Ends one piece of work.
    pub fn finish(&mut self, at: usize, fate: Fate) {
        match self.work.remove(at) {
            Work::Copy { ticket, direction, session, region, pages, fence, done, .. } => {
                let fate = self.after_fence(session, fence, fate);
                self.finish_copy(ticket, direction, (session, region), &pages, done, fate);
            }
            Work::Read { ticket, slot, extent, image_bytes, checksum: expected } => {
                let fault = match fate {
                    Fate::Io(fault) => Some(fault),
                    _ => {
                        let words = self.disk.read(&slot, image_bytes);
                        let fault = (checksum(words) != expected).then_some(IoFault::Checksum);
                        self.memory.fill(&extent, words);
                        fault
                    }
                };
                self.memory.end(ticket);
                self.handle(Event::ReadEnded { ticket, fault });
            }
            Work::Write { ticket, extent, slot, image } => {
                let words = self.memory.words(&extent);
                let words = &words[..units(image.image_bytes)];
                let key = Key { namespace: image.namespace, hash: image.hash };
                assert!(is_image(words, &key), "{slot:?} gets wrong bytes for {key:?}");
                let known = image.checksum;
                assert!(known.is_none_or(|known| known == checksum(words)), "checksum of {key:?}");
                let image = summed(&image, words);
                let fault = match fate {
                    Fate::Io(fault) => {
                        let mut unit = 0;
                        self.disk.write_some(&slot, &image, words, |_| {
                            unit += 1;
                            unit % 2 == 0
                        });
                        Some(fault)
                    }
                    _ => {
                        self.disk.write(&slot, &image, words);
                        None
                    }
                };
                self.memory.end(ticket);
                self.handle(Event::WriteEnded { ticket, fault, checksum: image.checksum });
            }
            Work::Forget { ticket, namespace, generation } => {
                let fault = match fate {
                    Fate::Io(fault) => Some(fault),
                    _ => {
                        self.disk.record_forget(namespace, generation);
                        self.unrecorded.remove(&(namespace, generation));
                        None
                    }
                };
                self.handle(Event::ForgetRecorded { ticket, fault });
            }
        }
    }

    /// How a copy ends that waits for an event: it passes now at the latest, unless nobody may wait
    /// for it any more.
    fn after_fence(&mut self, session: SessionId, fence: Option<FenceWait>, fate: Fate) -> Fate {
        let Some(FenceWait { index, until }) = fence else { return fate };
        let now = self.now;
        let client = self.clients.get_mut(&session.0).expect("a copy of a session that is there");
        let event = &client.events[index as usize];
        if !event.passed && (event.given_up || until <= now) {
            return Fate::Copy(CopyFault::FenceTimeout, 0);
        }
        client.pass(index);
        fate
    }

    fn finish_copy(
        &mut self,
        ticket: Ticket,
        direction: Direction,
        (session, region): (SessionId, RegionId),
        pages: &[CopyPage],
        done: Option<OperationId>,
        fate: Fate,
    ) {
        let (fault, whole) = match fate {
            Fate::Copy(fault, whole) => (Some(fault), whole.min(pages.len() as u32)),
            _ => (None, pages.len() as u32),
        };
        let client = self.clients.get_mut(&session.0).expect("a copy of a session that is there");
        let found = client.regions[region.0 as usize].as_mut().expect("a copy of a region");
        let mut checksums = Vec::new();
        for (at, page) in pages.iter().enumerate() {
            let device = &mut found.pages[page.device_page as usize];
            // The page at which a faulty copy stops is torn.
            let arrives = if at < whole as usize { device.len() } else { device.len() / 2 };
            match direction {
                Direction::Save => {
                    self.memory.fill(&page.extent, &device[..arrives]);
                    checksums.push(checksum(device));
                }
                Direction::Restore => {
                    device[..arrives].copy_from_slice(&self.memory.words(&page.extent)[..arrives]);
                }
            }
            if at >= whole as usize {
                break;
            }
        }
        checksums.truncate(if self.sums { whole as usize } else { 0 });
        self.memory.end(ticket);
        if let Some(operation) = done.filter(|_| fault.is_none()) {
            let client = self.client(session);
            let asked =
                client.in_flight.get(&operation.index).filter(|s| s.request.operation == operation);
            if let Some(asked) = asked.filter(|_| !client.closed) {
                for at in 0..asked.entries.len() {
                    self.check_restored(session, asked, at);
                }
            }
            let client = self.client_mut(session);
            client.done_words.insert(operation.index, operation.done_word());
        }
        let (pages_done, ended_ns, checksums) = (whole, self.now, &checksums[..]);
        self.handle(Event::Copied { ticket, pages_done, fault, ended_ns, checksums });
    }

    /// Ends all work in the order in which it was ordered, and what follows from it.
    pub fn settle(&mut self) {
        while !self.work.is_empty() || self.core.has_forgotten_pages() {
            if self.work.is_empty() {
                self.pump();
            } else {
                self.finish(0, Fate::Good);
            }
        }
    }

    /// Ends work of one sort until there is none; other work stays.
    pub fn settle_only(&mut self, wanted: impl Fn(&Work) -> bool) {
        while let Some(at) = self.work.iter().position(&wanted) {
            self.finish(at, Fate::Good);
        }
    }

    /// Orders what may be ordered.
    pub fn pump(&mut self) {
        self.core.pump(self.now, &mut self.out);
        self.core.check_pumped();
        self.carry_out();
    }

    /// Says whether a device reads.
    pub fn set_readable(&mut self, device: u16, readable: bool) {
        self.core.set_device_readable(self.now, device, readable, &mut self.out);
        self.carry_out();
        if self.pumps {
            self.pump();
        }
        self.core.check_laws();
    }

    /// Drops what nothing holds from DRAM.
    pub fn evict_dram(&mut self) {
        let mut eviction = self.core.begin_eviction();
        while self.core.evict_some(&mut eviction, &mut self.out).is_none() {
            self.carry_out();
            self.core.check_laws();
        }
        self.carry_out();
        self.core.check_laws();
    }
}

/// What the footer of an image says.
pub(super) fn summed(image: &ImageIdentity, words: &[Word]) -> ImageIdentity {
    let sum = || checksum(&words[..units(image.image_bytes)]);
    ImageIdentity { checksum: image.checksum.or_else(|| Some(sum())), ..*image }
}
