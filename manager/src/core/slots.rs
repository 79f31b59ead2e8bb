//! SSD slots: which region has which slot size, which slots are free, which page is coldest.

use super::effect::{GENERATIONS_END, Slot};
use super::geometry::RegionGeometry;
use super::index::{PageId, PageSlab};
use super::replacement::{ListKind, Recency};

/// Slot length for an image: the image in whole 4 KiB, then the footer.
pub const fn slot_bytes(image_bytes: u32) -> u32 {
    match RegionGeometry::slot_bytes_for(image_bytes) {
        Some(bytes) => bytes,
        // Larger than any page may be; no region holds it.
        None => u32::MAX,
    }
}

/// What start-up found on one device.
#[derive(Clone, Debug)]
pub struct DeviceLayout {
    /// How it is cut.
    pub geometry: RegionGeometry,
    /// Slot size of each region, 0 where none is recorded.
    pub region_slot_bytes: Vec<u32>,
    /// Offsets of slots that are never used again.
    pub retired: Vec<u64>,
}

/// Bytes of slots that a device gives before another's turn: what its writer joins into one write.
const RUN_BYTES: u64 = 1 << 20;
/// Cold pages looked at in search of one with a slot.
const RECLAIM_PROBES_MAX: usize = 64;

const FREE: u32 = u32::MAX;
const RETIRED: u32 = u32::MAX - 1;
/// What is in it is not known yet, or will never be.
const UNREAD: u32 = u32::MAX - 2;
const TAKEN: u32 = u32::MAX - 3;

#[derive(Debug)]
struct Region {
    slot_bytes: u32,
    /// Free slot indices, the lowest on top, so that consecutive writes land side by side.
    free: Vec<u32>,
    /// Page of each slot, or one of the marks above.
    owners: Vec<u32>,
    /// Listed in its class as having free slots.
    open: bool,
}

#[derive(Debug)]
struct Device {
    geometry: RegionGeometry,
    regions: Vec<Region>,
    unused: Vec<u32>,
    intake: Intake,
    /// Its slots could not be read: it is not used in this life.
    lost: bool,
    used_bytes: u64,
    used_slots: u64,
    /// Bytes of slots that are never used again.
    retired_bytes: u64,
    /// How far it is behind its share of the runs.
    behind: i128,
}

/// What a device takes of new images.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Intake {
    /// As many as come.
    All,
    /// The next one, to see whether it works again.
    One,
    /// None, until it is told otherwise.
    Nothing,
}

/// Slots of one size.
#[derive(Debug)]
pub(super) struct Class {
    slot_bytes: u32,
    /// Regions with free slots, of each device; a full one leaves when it is looked at.
    open: Vec<Vec<u32>>,
    /// Slots in use.
    used: u64,
    /// Unpinned pages that have or want a slot of this size.
    pub(super) recency: Recency,
}

/// A slot for a new image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Allocation {
    pub(super) slot: Slot,
    /// The region got its slot size just now: it must be recorded first.
    pub(super) first_of_region: Option<u32>,
}

/// All slots of all devices.
#[derive(Debug)]
pub(super) struct Slots {
    devices: Vec<Device>,
    classes: Vec<Class>,
    next_generation: u64,
    /// The device that gives slots now, and the bytes that it gives before another's turn.
    run: (usize, u64),
}

impl Slots {
    pub(super) fn new(layouts: &[DeviceLayout]) -> Self {
        let mut slots = Self {
            devices: Vec::with_capacity(layouts.len()),
            classes: Vec::new(),
            next_generation: 1,
            run: (0, 0),
        };
        for (number, layout) in layouts.iter().enumerate() {
            slots.add_device(number as u16, layout);
        }
        slots
    }

    fn add_device(&mut self, number: u16, layout: &DeviceLayout) {
        let geometry = layout.geometry;
        let mut device = Device {
            geometry,
            regions: Vec::new(),
            unused: Vec::new(),
            intake: Intake::All,
            lost: false,
            used_bytes: 0,
            used_slots: 0,
            retired_bytes: 0,
            behind: 0,
        };
        let mut open = Vec::new();
        for index in 0..geometry.regions() {
            let bytes = layout.region_slot_bytes.get(index as usize).copied().unwrap_or(0);
            let mut region = Region::with_slot_size(&geometry, index, bytes);
            for &offset in &layout.retired {
                if let Some((at, slot)) = geometry.slot_at(offset, bytes)
                    && at == index
                {
                    region.owners[slot as usize] = RETIRED;
                    region.free.retain(|&free| free != slot);
                    device.retired_bytes += u64::from(bytes);
                }
            }
            if bytes == 0 {
                device.unused.push(index);
            } else {
                open.push((bytes, index));
                region.open = true;
            }
            device.regions.push(region);
        }
        // Popped from the end: low regions first.
        device.unused.reverse();
        self.devices.push(device);
        for (bytes, region) in open {
            let class = self.class_index(bytes);
            self.open(class, number).push(region);
        }
    }

    /// Regions of a device that may have free slots of a size.
    fn open(&mut self, class: usize, number: u16) -> &mut Vec<u32> {
        let open = &mut self.classes[class].open;
        let devices = open.len().max(usize::from(number) + 1);
        open.resize_with(devices, Vec::new);
        &mut open[usize::from(number)]
    }

    pub(super) fn is_empty(&self) -> bool {
        self.devices.is_empty()
    }

    fn class_index(&mut self, slot_bytes: u32) -> usize {
        if let Some(at) = self.classes.iter().position(|class| class.slot_bytes == slot_bytes) {
            return at;
        }
        self.classes.push(Class {
            slot_bytes,
            open: Vec::new(),
            used: 0,
            recency: Recency::new(ListKind::Ssd),
        });
        self.classes.len() - 1
    }

    /// Recency list of the pages whose slots have or would have `slot_bytes`.
    pub(super) fn recency(&mut self, slot_bytes: u32) -> &mut Recency {
        let class = self.class_index(slot_bytes);
        &mut self.classes[class].recency
    }

    /// Largest slot that any region could ever hold.
    pub(super) fn largest_slot_bytes(&self) -> u64 {
        let regions = self.devices.iter().map(|device| device.geometry.region_len(0));
        regions.max().unwrap_or(0)
    }

    /// Bytes of all regions.
    pub(super) fn data_bytes(&self) -> u64 {
        self.devices.iter().map(Device::data_bytes).sum()
    }

    /// The next number of the tier's one generation counter.
    pub(super) fn take_generation(&mut self) -> u64 {
        let generation = self.next_generation;
        self.next_generation += 1;
        generation
    }

    /// A free slot, from a region that has one or from an unused region. Devices take turns by the
    /// space that they have left: all of them are busy, and all are full at the same time. One for
    /// which `has_room` says no is passed over: it has enough to write.
    pub(super) fn allocate(
        &mut self,
        slot_bytes: u32,
        has_room: impl Fn(u16) -> bool,
    ) -> Option<Allocation> {
        let class = self.class_index(slot_bytes);
        let (mut number, mut left) = self.run;
        if left == 0 || !has_room(number as u16) || !self.can_give(class, number) {
            number = self.next_turn(class, has_room)?;
            left = RUN_BYTES;
        }
        self.run = (number, left.saturating_sub(slot_bytes.into()));
        let device = &mut self.devices[number];
        let (region, first_of_region) = match self.classes[class].open[number].last() {
            Some(&region) => (region, None),
            None => {
                let fits = |&region: &u32| device.geometry.slots(region, slot_bytes) > 0;
                let at = device.unused.iter().rposition(fits)?;
                let region = device.unused.remove(at);
                device.regions[region as usize] =
                    Region::with_slot_size(&device.geometry, region, slot_bytes);
                device.regions[region as usize].open = true;
                self.classes[class].open[number].push(region);
                (region, Some(region))
            }
        };
        let slot = device.take(number as u16, region)?;
        if device.intake == Intake::One {
            device.intake = Intake::Nothing;
        }
        self.classes[class].used += 1;
        Some(Allocation { slot, first_of_region })
    }

    /// Whether some device has a free slot for new images of a size.
    pub(super) fn has_free(&mut self, slot_bytes: u32) -> bool {
        let class = self.class_index(slot_bytes);
        (0..self.devices.len()).any(|number| self.can_give(class, number))
    }

    /// Whether a device has a free slot of a size: in an open region, which is then the last one, or
    /// in an unused one.
    fn can_give(&mut self, class: usize, number: usize) -> bool {
        let slot_bytes = self.classes[class].slot_bytes;
        let Some(device) = self.devices.get(number) else { return false };
        if device.intake == Intake::Nothing {
            return false;
        }
        while let Some(&region) = self.open(class, number as u16).last() {
            let found = &mut self.devices[number].regions[region as usize];
            if !found.free.is_empty() {
                return true;
            }
            found.open = false;
            self.open(class, number as u16).pop();
        }
        let device = &self.devices[number];
        device.unused.iter().any(|&region| device.geometry.slots(region, slot_bytes) > 0)
    }

    /// The device whose share of free space is furthest behind its share of the runs.
    fn next_turn(&mut self, class: usize, has_room: impl Fn(u16) -> bool) -> Option<usize> {
        let mut all = 0;
        let mut next: Option<usize> = None;
        for number in 0..self.devices.len() {
            if !has_room(number as u16) || !self.can_give(class, number) {
                continue;
            }
            let free = i128::from(self.devices[number].free_bytes());
            all += free;
            self.devices[number].behind += free;
            let behind = self.devices[number].behind;
            if next.is_none_or(|next| behind > self.devices[next].behind) {
                next = Some(number);
            }
        }
        self.devices[next?].behind -= all;
        next
    }

    /// Notes which page a slot holds.
    pub(super) fn assign(&mut self, slot: Slot, page: PageId) {
        if let Some(owner) = self.owner_mut(slot) {
            *owner = page.0;
        }
    }

    /// No slot is known to be free until [`settle`](Self::settle) says so. Returns how many may hold
    /// a page.
    pub(super) fn begin_census(&mut self) -> usize {
        let mut unread = 0;
        for region in self.devices.iter_mut().flat_map(|device| &mut device.regions) {
            region.free.clear();
            let free = region.owners.iter_mut().filter(|owner| **owner == FREE);
            free.for_each(|owner| {
                *owner = UNREAD;
                unread += 1;
            });
        }
        unread
    }

    /// Every slot was read but those of the `lost` devices. Generations go on above
    /// `last_generation`.
    pub(super) fn end_census(&mut self, last_generation: u64, lost: &[u16]) {
        self.next_generation = self.next_generation.max(last_generation.min(GENERATIONS_END) + 1);
        for &number in lost {
            if let Some(device) = self.devices.get_mut(usize::from(number)) {
                (device.lost, device.intake) = (true, Intake::Nothing);
            }
        }
    }

    /// Whether a slot is one of a region in use, and nobody has claimed or retired it.
    pub(super) fn is_unread(&self, slot: Slot) -> bool {
        let Some(device) = self.devices.get(usize::from(slot.device)) else { return false };
        let Some((index, at)) = device.geometry.slot_at(slot.offset, slot.bytes) else {
            return false;
        };
        let region = &device.regions[index as usize];
        let is_unread = region.owners.get(at as usize) == Some(&UNREAD);
        region.slot_bytes == slot.bytes && is_unread && !device.lost
    }

    /// Takes a slot that is [unread](Self::is_unread); [`assign`](Self::assign) names its page.
    pub(super) fn occupy(&mut self, slot: Slot) {
        debug_assert!(self.is_unread(slot));
        let Some(owner) = self.owner_mut(slot) else { return };
        *owner = TAKEN;
        let device = &mut self.devices[usize::from(slot.device)];
        device.used_bytes += u64::from(slot.bytes);
        device.used_slots += 1;
        let class = self.class_index(slot.bytes);
        self.classes[class].used += 1;
    }

    /// Takes a slot that is [unread](Self::is_unread) out of use for ever. False for any other.
    pub(super) fn retire_unread(&mut self, slot: Slot) -> bool {
        let is_unread = self.is_unread(slot);
        if let Some(owner) = self.owner_mut(slot).filter(|_| is_unread) {
            *owner = RETIRED;
            self.devices[usize::from(slot.device)].retired_bytes += u64::from(slot.bytes);
        }
        is_unread
    }

    /// Lists the unread slots of the next regions as free, one region at least and then up to
    /// `slots_max` slots; `next` remembers how far it is. True when none is left.
    pub(super) fn settle(&mut self, next: &mut (usize, usize), slots_max: usize) -> bool {
        let mut slots = 0;
        while let Some(device) = self.devices.get_mut(next.0) {
            if slots >= slots_max {
                return false;
            }
            let Some(region) = device.regions.get_mut(next.1).filter(|_| !device.lost) else {
                *next = (next.0 + 1, 0);
                continue;
            };
            slots += region.owners.len();
            let opened = region.settle().then_some((region.slot_bytes, next.1 as u32));
            let number = next.0 as u16;
            next.1 += 1;
            if let Some((bytes, index)) = opened {
                let class = self.class_index(bytes);
                self.open(class, number).push(index);
            }
        }
        true
    }

    /// Gives a slot back.
    pub(super) fn free(&mut self, slot: Slot) {
        self.end(slot, FREE);
    }

    /// Takes a slot out of use for ever.
    pub(super) fn retire(&mut self, slot: Slot) {
        self.end(slot, RETIRED);
    }

    fn end(&mut self, slot: Slot, mark: u32) {
        let Some(device) = self.devices.get_mut(usize::from(slot.device)) else { return };
        let Some((index, at)) = device.geometry.slot_at(slot.offset, slot.bytes) else { return };
        let region = &mut device.regions[index as usize];
        debug_assert!(region.owners[at as usize] < UNREAD, "slot freed twice");
        region.owners[at as usize] = mark;
        if mark == RETIRED {
            device.retired_bytes += u64::from(slot.bytes);
        }
        device.used_bytes -= u64::from(slot.bytes);
        device.used_slots -= 1;
        let mut opens = false;
        if mark == FREE {
            region.free.push(at);
            opens = !std::mem::replace(&mut region.open, true);
        }
        let class = self.class_index(slot.bytes);
        self.classes[class].used -= 1;
        if opens {
            self.open(class, slot.device).push(index);
        }
    }

    /// A region of another slot size that a slot of `slot_bytes` fits into, as the pages to evict
    /// from it, when every one of them may go. Of each size only the region of its coldest page is
    /// looked at.
    pub(super) fn reclaimable_region(
        &self,
        pages: &PageSlab,
        slot_bytes: u32,
        mut evictable: impl FnMut(PageId) -> bool,
    ) -> Option<(u16, u32, Vec<PageId>)> {
        for class in self.classes.iter().filter(|class| class.slot_bytes != slot_bytes) {
            let mut next = class.recency.coldest();
            let mut slot = None;
            for _ in 0..RECLAIM_PROBES_MAX {
                let Some(page) = next else { break };
                slot = pages[page].slot;
                if slot.is_some() {
                    break;
                }
                next = class.recency.hotter(pages, page);
            }
            let Some(slot) = slot else { continue };
            let device = &self.devices[usize::from(slot.device)];
            let (region, _) = device.geometry.slot_at(slot.offset, slot.bytes)?;
            if device.geometry.slots(region, slot_bytes) == 0 || device.intake == Intake::Nothing {
                continue;
            }
            let owners = &device.regions[region as usize].owners;
            let held = owners.iter().filter(|owner| **owner != FREE);
            let residents: Option<Vec<_>> = held
                .map(|&owner| {
                    (owner < TAKEN).then_some(PageId(owner)).filter(|&page| evictable(page))
                })
                .collect();
            if let Some(residents) = residents {
                return Some((slot.device, region, residents));
            }
        }
        None
    }

    /// Makes an emptied region usable for another slot size.
    pub(super) fn release_region(&mut self, number: u16, region: u32) {
        let device = &mut self.devices[usize::from(number)];
        debug_assert!(device.regions[region as usize].owners.iter().all(|owner| *owner == FREE));
        device.regions[region as usize] = Region::with_slot_size(&device.geometry, region, 0);
        device.unused.push(region);
        for open in self.classes.iter_mut().filter_map(|of| of.open.get_mut(usize::from(number))) {
            open.retain(|&at| at != region);
        }
    }

    /// Whether any device is used for new images.
    pub(super) fn take_writes(&self) -> bool {
        self.devices.iter().any(|device| device.intake != Intake::Nothing)
    }

    /// Whether a device is used for new images.
    pub(super) fn accepts_writes(&self, number: u16) -> bool {
        self.intake(number) != Intake::Nothing
    }

    /// What a device takes.
    pub(super) fn intake(&self, number: u16) -> Intake {
        self.devices.get(usize::from(number)).map_or(Intake::Nothing, |device| device.intake)
    }

    /// Stops or resumes the use of a device for new images.
    pub(super) fn set_intake(&mut self, number: u16, intake: Intake) {
        let Some(device) = self.devices.get_mut(usize::from(number)) else { return };
        device.intake = if device.lost { Intake::Nothing } else { intake };
        if device.intake == Intake::Nothing {
            return;
        }
        let mut open = Vec::new();
        for (index, region) in device.regions.iter_mut().enumerate() {
            if region.slot_bytes != 0 && !region.open && !region.free.is_empty() {
                region.open = true;
                open.push((region.slot_bytes, index as u32));
            }
        }
        for (bytes, region) in open {
            let class = self.class_index(bytes);
            self.open(class, number).push(region);
        }
    }

    /// `(used_bytes, used_slots)` of one device.
    pub(super) fn usage(&self, number: usize) -> (u64, u64) {
        self.devices.get(number).map_or((0, 0), |device| (device.used_bytes, device.used_slots))
    }

    /// Recency list of each slot size. For checks.
    pub(super) fn recencies(&self) -> impl Iterator<Item = (u32, &Recency)> {
        self.classes.iter().map(|class| (class.slot_bytes, &class.recency))
    }

    /// Shows every slot in use to `see`, with its page or as being written. For tests.
    ///
    /// # Panics
    /// When counters, free stacks and owners disagree.
    pub(super) fn check(&self, mut see: impl FnMut(Slot, Option<PageId>)) {
        let mut used = vec![0; self.classes.len()];
        for (number, device) in self.devices.iter().enumerate() {
            let (mut bytes, mut slots, mut retired) = (0, 0, 0);
            for (index, region) in device.regions.iter().enumerate() {
                let at = (number as u16, index as u32);
                let unused = device.unused.iter().filter(|&&other| other == at.1).count();
                assert_eq!(unused, usize::from(region.slot_bytes == 0), "region {at:?}");
                for class in &self.classes {
                    let listed = class.open.get(number).into_iter().flatten();
                    let listed = listed.filter(|&&other| other == at.1).count();
                    let open = region.open && class.slot_bytes == region.slot_bytes;
                    assert_eq!(listed, usize::from(open), "open list of region {at:?}");
                }
                let usable = device.intake != Intake::Nothing && !region.free.is_empty();
                assert!(region.open || !usable, "free slots of region {at:?} are lost");
                let mut free = region.free.clone();
                free.sort_unstable();
                let marked = region.owners.iter().enumerate().filter(|(_, o)| **o == FREE);
                assert!(free.iter().copied().eq(marked.map(|(slot, _)| slot as u32)), "{at:?}");
                for (slot, &owner) in region.owners.iter().enumerate() {
                    retired += if owner == RETIRED { u64::from(region.slot_bytes) } else { 0 };
                    if matches!(owner, FREE | RETIRED | UNREAD) {
                        continue;
                    }
                    let slot_bytes = region.slot_bytes;
                    let offset = device.geometry.slot_offset(at.1, slot_bytes, slot as u32);
                    let slot = Slot { device: at.0, offset, bytes: slot_bytes };
                    see(slot, (owner != TAKEN).then_some(PageId(owner)));
                    (bytes, slots) = (bytes + u64::from(slot_bytes), slots + 1);
                    let class = self.classes.iter().position(|c| c.slot_bytes == slot_bytes);
                    used[class.expect("a region in use has a class")] += 1;
                }
            }
            assert_eq!((device.used_bytes, device.used_slots), (bytes, slots), "device {number}");
            assert_eq!(device.retired_bytes, retired, "retired slots of device {number}");
        }
        assert!(self.classes.iter().map(|class| class.used).eq(used), "slots in use by size");
    }

    fn owner_mut(&mut self, slot: Slot) -> Option<&mut u32> {
        let device = self.devices.get_mut(usize::from(slot.device))?;
        let (region, at) = device.geometry.slot_at(slot.offset, slot.bytes)?;
        device.regions[region as usize].owners.get_mut(at as usize)
    }
}

impl Region {
    fn with_slot_size(geometry: &RegionGeometry, region: u32, slot_bytes: u32) -> Self {
        let slots = geometry.slots(region, slot_bytes);
        Self {
            slot_bytes,
            free: (0..slots).rev().collect(),
            owners: vec![FREE; slots as usize],
            open: false,
        }
    }
}

impl Region {
    /// Lists the unread slots as free. True when the region is to be listed as open.
    fn settle(&mut self) -> bool {
        for owner in self.owners.iter_mut().filter(|owner| **owner == UNREAD) {
            *owner = FREE;
        }
        self.free.clear();
        let free = self.owners.iter().enumerate().rev().filter(|(_, owner)| **owner == FREE);
        self.free.extend(free.map(|(index, _)| index as u32));
        !self.free.is_empty() && !std::mem::replace(&mut self.open, true)
    }
}

impl Device {
    /// Bytes of all regions.
    fn data_bytes(&self) -> u64 {
        self.geometry.capacity_bytes.saturating_sub(self.geometry.data_offset)
    }

    /// Bytes that new images could have.
    fn free_bytes(&self) -> u64 {
        self.data_bytes().saturating_sub(self.used_bytes + self.retired_bytes)
    }

    fn take(&mut self, number: u16, region: u32) -> Option<Slot> {
        let of = &mut self.regions[region as usize];
        let index = of.free.pop()?;
        of.owners[index as usize] = TAKEN;
        self.used_bytes += u64::from(of.slot_bytes);
        self.used_slots += 1;
        Some(Slot {
            device: number,
            offset: self.geometry.slot_offset(region, of.slot_bytes, index),
            bytes: of.slot_bytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(capacity: u64, region: u64) -> DeviceLayout {
        DeviceLayout {
            geometry: RegionGeometry {
                data_offset: 65_536,
                capacity_bytes: capacity,
                region_bytes: region,
            },
            region_slot_bytes: Vec::new(),
            retired: Vec::new(),
        }
    }

    #[test]
    fn every_slot_lies_inside_its_region_and_is_given_once() {
        let layout = device(65_536 + (5 << 20), 2 << 20);
        let mut slots = Slots::new(&[layout]);
        let mut seen = Vec::new();
        while let Some(allocation) = slots.allocate(slot_bytes(130_000), |_| true) {
            let Slot { offset, bytes, .. } = allocation.slot;
            assert!(offset >= 65_536 && offset + u64::from(bytes) <= 65_536 + (5 << 20));
            assert!(seen.iter().all(|&(other, len): &(u64, u32)| {
                other + u64::from(len) <= offset || offset + u64::from(bytes) <= other
            }));
            seen.push((offset, bytes));
        }
        // 135,168 bytes a slot: 15, 15 and 7 in regions of 2, 2 and 1 MiB.
        assert_eq!(seen.len(), 37);
        assert_eq!(slots.usage(0), (37 * 135_168, 37));
    }

    #[test]
    fn consecutive_slots_are_adjacent_so_that_writes_coalesce() {
        let mut slots = Slots::new(&[device(1 << 30, 64 << 20)]);
        let first = slots.allocate(8192, |_| true).unwrap();
        let second = slots.allocate(8192, |_| true).unwrap();
        assert_eq!(first.first_of_region, Some(0));
        assert_eq!(second.first_of_region, None);
        assert_eq!(second.slot.offset, first.slot.offset + 8192);
    }

    #[test]
    fn whatever_a_census_says_generations_have_a_next_one() {
        let mut slots = Slots::new(&[]);
        slots.end_census(u64::MAX, &[]);
        assert_eq!(slots.take_generation(), GENERATIONS_END + 1);
        assert_eq!(slots.take_generation(), GENERATIONS_END + 2);
    }

    #[test]
    fn retired_slots_stay_retired() {
        let mut layout = device(65_536 + (1 << 20), 1 << 20);
        layout.region_slot_bytes = vec![262_144];
        layout.retired = vec![65_536 + 262_144];
        let mut slots = Slots::new(&[layout]);
        let mut offsets = Vec::new();
        while let Some(allocation) = slots.allocate(262_144, |_| true) {
            offsets.push(allocation.slot.offset);
        }
        assert_eq!(offsets, [65_536, 65_536 + 524_288, 65_536 + 786_432]);
        let slot = Slot { device: 0, offset: offsets[0], bytes: 262_144 };
        slots.retire(slot);
        assert_eq!(slots.allocate(262_144, |_| true), None);
    }

    /// Two files share what comes in while it comes in, in whole runs, and one that is ahead waits.
    #[test]
    fn devices_take_turns_by_the_space_they_have_left() {
        let both = [device((64 << 20) + 65_536, 64 << 20), device((32 << 20) + 65_536, 32 << 20)];
        let mut slots = Slots::new(&both);
        let bytes = slot_bytes(60_000);
        let per_run = (RUN_BYTES as usize).div_ceil(bytes as usize);
        let mut order = Vec::new();
        for _ in 0..12 * per_run {
            let slot = slots.allocate(bytes, |_| true).unwrap().slot;
            order.push(slot.device);
        }
        assert!(order.chunks(per_run).all(|run| run.iter().all(|&at| at == run[0])), "{order:?}");
        let runs = order.chunks(per_run).filter(|run| run[0] == 0).count();
        assert_eq!(runs, 8, "two of three runs go to the larger one");
        assert!(order[..3 * per_run].contains(&1), "it does not fill one first");
        // One that was away has more room and gets more, not all.
        slots.set_intake(1, Intake::Nothing);
        for _ in 0..16 * per_run {
            assert_eq!(slots.allocate(bytes, |_| true).unwrap().slot.device, 0);
        }
        slots.set_intake(1, Intake::All);
        let mut counts = [0, 0];
        for _ in 0..12 * per_run {
            counts[usize::from(slots.allocate(bytes, |_| true).unwrap().slot.device)] += 1;
        }
        assert!(counts[0] > 0 && counts[1] > 0, "{counts:?}");
        while let Some(allocation) = slots.allocate(bytes, |_| true) {
            counts[usize::from(allocation.slot.device)] += 1;
        }
        assert!(!slots.has_free(bytes));
        slots.free(Slot { device: 1, offset: 65_536, bytes });
        assert!(slots.has_free(bytes));
        let again = slots.allocate(bytes, |_| true).unwrap().slot;
        assert_eq!((again.device, again.offset), (1, 65_536));
        slots.check(|_, _| {});
    }

    #[test]
    fn a_device_that_takes_no_writes_is_passed_over() {
        let both = [device(64 << 20, 8 << 20), device(64 << 20, 8 << 20)];
        let mut slots = Slots::new(&both);
        slots.set_intake(0, Intake::Nothing);
        for _ in 0..20 {
            assert_eq!(slots.allocate(8192, |_| true).unwrap().slot.device, 1);
        }
        slots.set_intake(1, Intake::Nothing);
        assert_eq!(slots.allocate(8192, |_| true), None);
        slots.set_intake(1, Intake::All);
        assert!(slots.allocate(8192, |_| true).is_some());
    }
}
