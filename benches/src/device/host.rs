//! Pages in host memory: a sealed memfd that the Manager maps.
#![allow(unsafe_code, reason = "pages are copied inside a mapping that the Manager writes to")]

use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};
use std::thread;

use orbitkv_engine::{Client, Memory};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use super::field::{Field, Raw, SLOTS, Side};
use super::pattern;
use super::shape::{Layout, Plan, Shape};
use crate::clock;
use crate::error::BenchError;
use crate::session::wrong;

/// What no page holds for long.
const POISON: u8 = 0xa5;

/// A mapping of this process.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: addresses; whoever copies between them says why nobody else does.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// `bytes` of a memfd, or of memory of this process alone, all of it touched.
    fn new(bytes: u64, memfd: Option<&OwnedFd>) -> Result<Self, BenchError> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let bytes = bytes as usize;
        let mapped = match memfd {
            Some(memfd) => {
                let flags = MapFlags::SHARED | MapFlags::POPULATE;
                // SAFETY: a new mapping at an address of the kernel's choice.
                unsafe { rustix::mm::mmap(ptr::null_mut(), bytes, access, flags, memfd, 0) }
            }
            None => {
                let flags = MapFlags::PRIVATE | MapFlags::POPULATE;
                // SAFETY: as above.
                unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), bytes, access, flags) }
            }
        };
        let start = mapped.map_err(BenchError::system("map memory for pages"))?;
        let start = NonNull::new(start.cast()).expect("a mapping has an address");
        Ok(Self { start, bytes })
    }

    /// # Panics
    /// When the range leaves the mapping.
    fn at(&self, offset: u64, bytes: u64) -> *mut u8 {
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.bytes as u64));
        // SAFETY: inside the mapping, as was checked.
        unsafe { self.start.add(offset as usize) }.as_ptr()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped once, unmapped once; no address of it outlives its owner.
        let _unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// Pages of one shape.
#[derive(Debug)]
pub(super) struct HostField {
    layout: Layout,
    memory: Vec<(OwnedFd, Mapping)>,
    images: [Mapping; SLOTS],
    from: Vec<u32>,
    to: Vec<u32>,
    save: Plan,
    restore: Plan,
}

impl HostField {
    pub(super) fn new(shape: &Shape) -> Result<Self, BenchError> {
        let layout = Layout::of(shape);
        let memory = layout.allocations.iter().map(|bytes| {
            let memfd = sealed(*bytes).map_err(BenchError::system("make a memfd"))?;
            let mapping = Mapping::new(*bytes, Some(&memfd))?;
            Ok((memfd, mapping))
        });
        let memory = memory.collect::<Result<_, BenchError>>()?;
        let images = [Mapping::new(shape.bytes(), None)?, Mapping::new(shape.bytes(), None)?];
        let (from, to) = layout.places(shape);
        // A row at a time is what a CPU does anyway.
        let [save, restore] = [&from, &to].map(|pages| layout.plans(pages).swap_remove(0));
        Ok(Self { layout, memory, images, from, to, save, restore })
    }

    /// Each part of the pages of one side: number of its page, first word, address.
    fn parts(&self, side: Side) -> impl Iterator<Item = (u32, u64, *mut u8)> {
        let pages = if side == Side::From { &self.from } else { &self.to };
        let Layout { segments, stride, length, .. } = &self.layout;
        pages.iter().zip(0_u32..).flat_map(move |(&page, number)| {
            segments.iter().zip(0_u64..).map(move |(&(allocation, start), part)| {
                let offset = start + u64::from(page) * stride;
                let address = self.memory[allocation].1.at(offset, *length);
                (number, part * length / 8, address)
            })
        })
    }
}

impl Field for HostField {
    fn register(&mut self, client: &mut Client) -> Result<Vec<Memory>, BenchError> {
        let register = |(memfd, mapping): &(OwnedFd, Mapping)| {
            let registered = client.register_memfd(memfd, mapping.bytes as u64);
            registered.map_err(wrong("register a memfd"))
        };
        self.memory.iter().map(register).collect()
    }

    fn fence(&mut self) -> Result<Option<u32>, BenchError> {
        Ok(None)
    }

    fn end_fence(&mut self, _fence: Option<u32>) {}

    fn fill(&mut self, side: Side, seed: u64) -> Result<(), BenchError> {
        for (page, first, address) in self.parts(side) {
            let address = address.cast::<u64>();
            for word in 0..self.layout.length / 8 {
                let value = pattern::word(seed, page, first + word);
                // SAFETY: within the part, of whole words; no operation is under way.
                unsafe { address.wrapping_add(word as usize).write(value) };
            }
        }
        Ok(())
    }

    fn poison(&mut self) -> Result<(), BenchError> {
        for (_, _, address) in self.parts(Side::To) {
            // SAFETY: the part; no operation is under way.
            unsafe { address.write_bytes(POISON, self.layout.length as usize) };
        }
        Ok(())
    }

    fn wrong_words(&mut self, seed: u64) -> Result<u64, BenchError> {
        let mut wrong = 0;
        for (page, first, address) in self.parts(Side::To) {
            let address = address.cast::<u64>();
            for word in 0..self.layout.length / 8 {
                // SAFETY: within the part, of whole words; no operation is under way.
                let found = unsafe { address.wrapping_add(word as usize).read() };
                wrong += u64::from(found != pattern::word(seed, page, first + word));
            }
        }
        Ok(wrong)
    }

    fn ways(&self, side: Side) -> Vec<&'static str> {
        vec![if side == Side::From { self.save.name } else { self.restore.name }]
    }

    fn raw(&mut self, save: Option<Raw>, restore: Option<Raw>) -> Result<u64, BenchError> {
        let (memory, images) = (&self.memory, &self.images);
        let copy = |plan: &Plan, slot: usize, to_device: bool| {
            for part in &plan.rectangles {
                let page = memory[part.allocation].1.at(part.offset, part.width);
                let image = images[slot].at(part.image, part.width);
                let (source, target) = if to_device { (image, page) } else { (page, image) };
                // SAFETY: both ranges were checked, of different mappings; no operation is under
                // way, and the other direction has other pages and images.
                unsafe { ptr::copy_nonoverlapping(source, target, part.width as usize) };
            }
        };
        let begin = clock::now_ns();
        match (save, restore) {
            (Some(save), Some(restore)) => thread::scope(|scope| {
                scope.spawn(|| copy(&self.save, save.slot, false));
                copy(&self.restore, restore.slot, true);
            }),
            (Some(save), None) => copy(&self.save, save.slot, false),
            (None, Some(restore)) => copy(&self.restore, restore.slot, true),
            (None, None) => {}
        }
        Ok(clock::now_ns() - begin)
    }

    fn elsewhere(&mut self, _: Option<Raw>, _: Option<Raw>) -> Result<Option<u64>, BenchError> {
        Ok(None)
    }
}

fn sealed(bytes: u64) -> rustix::io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memory = rustix::fs::memfd_create("orbitkv-bench-pages", flags)?;
    rustix::fs::ftruncate(&memory, bytes)?;
    rustix::fs::fallocate(&memory, FallocateFlags::empty(), 0, bytes)?;
    rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(memory)
}
