//! The fake SSD tier.
//!
//! Fault model. A write that has ended is on disk whole: image and footer. A write in flight when
//! the Manager dies leaves any subset of its units new and the rest old; a footer is one unit and
//! never torn. A failed write leaves the same. A region's slot size and a synced forget survive; a
//! retired slot survives or not. Reads give what is there; the checksum is the caller's to check.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use orbitkv_manager::core::{
    DeviceLayout, FOOTER_BYTES, ImageIdentity, NamespaceFingerprint, Recovered, RecoveredPage,
    RegionGeometry, Slot, UNIT_BYTES, slot_bytes,
};

use crate::content::{POISON, Word, units};

/// What start-up finds.
#[derive(Debug)]
pub struct Found {
    /// How each device is cut.
    pub layouts: Vec<DeviceLayout>,
    /// What a census of all footers says: the highest generation of each key.
    pub census: Recovered,
}

#[derive(Clone, Debug)]
struct Device {
    geometry: RegionGeometry,
    region_slot_bytes: Vec<u32>,
    words: Vec<Word>,
    /// By unit.
    footers: BTreeMap<u64, ImageIdentity>,
    retired: BTreeSet<u64>,
}

/// All devices of the tier.
#[derive(Clone, Debug)]
pub struct Disk {
    devices: Vec<Device>,
    forgotten: Vec<(NamespaceFingerprint, u64)>,
}

impl Disk {
    /// Blank devices.
    pub fn new(geometries: &[RegionGeometry]) -> Self {
        let device = |geometry: &RegionGeometry| Device {
            geometry: *geometry,
            region_slot_bytes: vec![0; geometry.regions() as usize],
            words: vec![POISON; (geometry.capacity_bytes / UNIT_BYTES) as usize],
            footers: BTreeMap::new(),
            retired: BTreeSet::new(),
        };
        Self { devices: geometries.iter().map(device).collect(), forgotten: Vec::new() }
    }

    /// How blank devices look to `core`.
    pub fn layouts(geometries: &[RegionGeometry]) -> Vec<DeviceLayout> {
        let layout = |&geometry: &RegionGeometry| DeviceLayout {
            geometry,
            region_slot_bytes: Vec::new(),
            retired: Vec::new(),
        };
        geometries.iter().map(layout).collect()
    }

    /// A region gets its slot size.
    pub fn record_region(&mut self, device: u16, region: u32, slot_bytes: u32) {
        self.devices[usize::from(device)].region_slot_bytes[region as usize] = slot_bytes;
    }

    /// A slot is never used again.
    pub fn retire(&mut self, slot: &Slot) {
        let fresh = self.devices[usize::from(slot.device)].retired.insert(slot.offset);
        assert!(fresh, "{slot:?} was retired before");
    }

    /// A forget is synced.
    pub fn record_forget(&mut self, namespace: NamespaceFingerprint, generation: u64) {
        self.forgotten.push((namespace, generation));
    }

    fn first_unit(slot: &Slot) -> u64 {
        slot.offset / UNIT_BYTES
    }

    fn footer_unit(slot: &Slot) -> u64 {
        (slot.offset + u64::from(slot.bytes) - u64::from(FOOTER_BYTES)) / UNIT_BYTES
    }

    /// Panics when the slot is not one that may be written.
    pub fn check_writable(&self, slot: &Slot, image: &ImageIdentity) {
        let device = &self.devices[usize::from(slot.device)];
        assert_eq!(slot.bytes, slot_bytes(image.image_bytes));
        assert!(!device.retired.contains(&slot.offset), "write into retired {slot:?}");
        let place = device.geometry.slot_at(slot.offset, slot.bytes);
        let (region, _) = place.expect("a slot lies on its region's grid");
        let recorded = device.region_slot_bytes[region as usize];
        assert_eq!(recorded, slot.bytes, "region {region} is written before it is recorded");
    }

    /// A write that ends well.
    pub fn write(&mut self, slot: &Slot, image: &ImageIdentity, words: &[Word]) {
        self.write_some(slot, image, words, |_| true);
    }

    /// A write of which only the units arrive that `arrives` names; the last is the footer.
    pub fn write_some(
        &mut self,
        slot: &Slot,
        image: &ImageIdentity,
        words: &[Word],
        mut arrives: impl FnMut(usize) -> bool,
    ) {
        let (first, footer) = (Self::first_unit(slot), Self::footer_unit(slot));
        let device = &mut self.devices[usize::from(slot.device)];
        for (at, &word) in words[..units(image.image_bytes)].iter().enumerate() {
            if arrives(at) {
                device.footers.remove(&(first + at as u64));
                device.words[first as usize + at] = word;
            }
        }
        if arrives(units(image.image_bytes)) {
            device.footers.insert(footer, *image);
        }
    }

    /// The image's units, whatever they hold.
    pub fn read(&self, slot: &Slot, image_bytes: u32) -> &[Word] {
        let first = Self::first_unit(slot) as usize;
        &self.devices[usize::from(slot.device)].words[first..first + units(image_bytes)]
    }

    /// The footer of a slot.
    pub fn footer(&self, slot: &Slot) -> Option<&ImageIdentity> {
        self.devices[usize::from(slot.device)].footers.get(&Self::footer_unit(slot))
    }

    /// Changes one unit of an image behind everybody's back.
    pub fn rot(&mut self, slot: &Slot, unit: usize) {
        let first = Self::first_unit(slot) as usize;
        self.devices[usize::from(slot.device)].words[first + unit] ^= 1;
    }

    /// Reads all footers, as start-up does. `keeps_retired` says whether a retired slot's record
    /// had reached the disk.
    pub fn recover(&mut self, mut keeps_retired: impl FnMut() -> bool) -> Found {
        let mut best: HashMap<(NamespaceFingerprint, [u8; 32]), RecoveredPage> = HashMap::new();
        let forgotten = self.forgotten.iter().map(|(_, generation)| *generation);
        let mut last_generation = forgotten.max().unwrap_or(0);
        for (number, device) in self.devices.iter_mut().enumerate() {
            device.retired.retain(|_| keeps_retired());
            for region in 0..device.geometry.regions() {
                let bytes = device.region_slot_bytes[region as usize];
                for index in 0..device.geometry.slots(region, bytes) {
                    let offset = device.geometry.slot_offset(region, bytes, index);
                    let slot = Slot { device: number as u16, offset, bytes };
                    let footer = device.footers.get(&Self::footer_unit(&slot));
                    let fits = |image: &&ImageIdentity| slot_bytes(image.image_bytes) == bytes;
                    let Some(&image) = footer.filter(fits) else { continue };
                    last_generation = last_generation.max(image.generation);
                    let is_old = |(namespace, generation): &(NamespaceFingerprint, u64)| {
                        *namespace == image.namespace && image.generation < *generation
                    };
                    let retired = device.retired.contains(&offset);
                    if retired || self.forgotten.iter().any(is_old) {
                        continue;
                    }
                    let page = RecoveredPage { slot, image };
                    let known = best.entry((image.namespace, image.hash.0)).or_insert(page);
                    if known.image.generation < image.generation {
                        *known = page;
                    }
                }
            }
        }
        let layout = |device: &Device| DeviceLayout {
            geometry: device.geometry,
            region_slot_bytes: device.region_slot_bytes.clone(),
            retired: device.retired.iter().copied().collect(),
        };
        let mut pages: Vec<_> = best.into_values().collect();
        pages.sort_unstable_by_key(|page| (page.slot.device, page.slot.offset));
        let census = Recovered::new(pages, last_generation, Vec::new());
        Found { layouts: self.devices.iter().map(layout).collect(), census }
    }
}
