//! Pages on a GPU, and every way that the driver has to copy them.
#![allow(unsafe_code, reason = "copies are begun by address")]

use std::hint::spin_loop;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use orbitkv_engine::cuda::EventPool;
use orbitkv_engine::{Client, Memory};

use super::elsewhere::Elsewhere;
use super::field::{Field, Raw, SLOTS, Side};
use super::shape::{Layout, Plan, Shape};
use crate::clock;
use crate::error::BenchError;
use crate::gpu::{Buffer, Content, Device, Pinned, PlacedPages, Stream, Transfer};
use crate::session::wrong;

/// Events of a session: more than operations of the benchmark at a time.
const EVENTS: u32 = 8;
/// The name of a copy by a kernel, which comes after the plans.
const KERNEL: &str = "kernel";
/// Longest raw copy.
const PATIENCE: Duration = Duration::from_secs(20);
/// Looks at a flag between two at the clock.
const LOOKS: u32 = 1 << 16;

/// Pages of one shape.
#[derive(Debug)]
pub(super) struct CudaField {
    // Dropped in this order: the other process lets go of the memory, streams wait for their work,
    // then what they use is freed.
    elsewhere: Elsewhere,
    raw: RawCopies,
    events: EventPool,
    wrong: Buffer,
    memory: Vec<Buffer>,
    device: Rc<Device>,
}

/// Copies between pages, whoever owns their memory, and pinned images of this process.
#[derive(Debug)]
pub(super) struct RawCopies {
    // Dropped in this order: streams wait for their work before what it uses is freed.
    streams: [Stream; 2],
    sides: [Placed; 2],
    images: Vec<Pinned>,
    /// A word for each stream, which counts its copies.
    flags: Pinned,
    counts: [u32; 2],
    device: Rc<Device>,
}

/// The pages of one side, as plans and as the kernels find them.
#[derive(Debug)]
struct Placed {
    plans: Vec<(&'static str, Vec<Transfer>)>,
    pages: PlacedPages,
}

impl CudaField {
    pub(super) fn new(shape: &Shape, device: &Rc<Device>) -> Result<Self, BenchError> {
        let memory = Layout::of(shape).allocations.into_iter().map(Buffer::new);
        let memory = memory.collect::<Result<Vec<_>, _>>()?;
        let export = |buffer: &Buffer| device.gpu.export(buffer.address(), buffer.bytes());
        let exported = memory.iter().map(export).collect::<Result<_, _>>()?;
        let addresses: Vec<_> = memory.iter().map(Buffer::address).collect();
        Ok(Self {
            elsewhere: Elsewhere::start(shape, exported)?,
            raw: RawCopies::new(shape, device, &addresses, SLOTS)?,
            events: EventPool::new(&device.gpu, EVENTS)?,
            wrong: Buffer::new(8)?,
            memory,
            device: Rc::clone(device),
        })
    }
}

impl RawCopies {
    /// Over allocations at `addresses`, with so many images of all pages.
    pub(super) fn new(
        shape: &Shape,
        device: &Rc<Device>,
        addresses: &[u64],
        slots: usize,
    ) -> Result<Self, BenchError> {
        let layout = Layout::of(shape);
        let (from, to) = layout.places(shape);
        let images = (0..slots).map(|_| Pinned::new(shape.bytes()));
        Ok(Self {
            streams: [Stream::new()?, Stream::new()?],
            sides: [placed(&layout, addresses, &from)?, placed(&layout, addresses, &to)?],
            images: images.collect::<Result<_, _>>()?,
            flags: Pinned::new(8)?,
            counts: [0; 2],
            device: Rc::clone(device),
        })
    }

    /// As [`Field::raw`].
    pub(super) fn copy(
        &mut self,
        save: Option<Raw>,
        restore: Option<Raw>,
    ) -> Result<u64, BenchError> {
        let begin = clock::now_ns();
        let both = [(Side::From, save), (Side::To, restore)];
        for (side, raw) in both {
            if let Some(raw) = raw {
                self.begin(side, raw)?;
            }
        }
        for (side, raw) in both {
            if raw.is_some() {
                self.finish(side)?;
            }
        }
        Ok(clock::now_ns() - begin)
    }

    /// Begins the copy of one side and a store to its flag behind it.
    fn begin(&mut self, side: Side, raw: Raw) -> Result<(), BenchError> {
        let at = side as usize;
        let (stream, placed) = (&self.streams[at], &self.sides[at]);
        let (images, to_device) = (&self.images[raw.slot], side == Side::To);
        if let Some((_, transfers)) = placed.plans.get(raw.way) {
            for transfer in transfers {
                let transfer = Transfer { host: images.address() + transfer.host, ..*transfer };
                // SAFETY: the plan covers pages and images of this field, which wait for their
                // stream before they are freed; no operation is under way, and the other direction
                // has other pages and images.
                unsafe { stream.copy(&transfer, to_device)? };
            }
        } else {
            let kernels = &self.device.kernels;
            // SAFETY: as above.
            unsafe { kernels.copy(stream, &placed.pages, images.address(), to_device)? };
        }
        self.counts[at] = self.counts[at].wrapping_add(1);
        let flag = self.flags.address() + 4 * at as u64;
        // SAFETY: the flags live until the stream is done.
        unsafe { stream.store(flag, self.counts[at])? };
        Ok(())
    }

    fn finish(&self, side: Side) -> Result<(), BenchError> {
        let at = side as usize;
        let flag = self.flags.word(at);
        let end = clock::now_ns() + PATIENCE.as_nanos() as u64;
        loop {
            for _ in 0..LOOKS {
                if flag.load(Ordering::Acquire) == self.counts[at] {
                    return Ok(());
                }
                spin_loop();
            }
            // Where a copy failed no flag comes: the stream knows why.
            if self.streams[at].is_done()? && flag.load(Ordering::Acquire) != self.counts[at] {
                return Err(BenchError::Wrong("a raw copy ended without its flag".into()));
            }
            if clock::now_ns() > end {
                return Err(BenchError::Wrong("a raw copy did not end within 20 s".into()));
            }
        }
    }
}

fn placed(layout: &Layout, memory: &[u64], pages: &[u32]) -> Result<Placed, BenchError> {
    let transfers = |plan: Plan| {
        let transfer = plan.rectangles.iter().map(|part| Transfer {
            device: memory[part.allocation] + part.offset,
            pitch: part.pitch,
            // From the start of the images: which ones is said later.
            host: part.image,
            host_pitch: part.image_pitch,
            width: part.width,
            height: part.height,
        });
        (plan.name, transfer.collect())
    };
    let bases = layout.segments.iter().map(|(at, offset)| memory[*at] + offset);
    let bases: Vec<_> = bases.collect();
    Ok(Placed {
        plans: layout.plans(pages).into_iter().map(transfers).collect(),
        pages: PlacedPages::new(&bases, pages, layout.stride, layout.length)?,
    })
}

impl Field for CudaField {
    fn register(&mut self, client: &mut Client) -> Result<Vec<Memory>, BenchError> {
        self.events.register(client).map_err(wrong("register events"))?;
        let gpu = &self.device.gpu;
        let register = |buffer: &Buffer| {
            let spec = gpu.export(buffer.address(), buffer.bytes())?;
            client.register_cuda(&spec).map_err(wrong("register memory of the GPU"))
        };
        self.memory.iter().map(register).collect()
    }

    fn fence(&mut self) -> Result<Option<u32>, BenchError> {
        let event = self.events.take();
        let event = event.ok_or_else(|| BenchError::Wrong("every event is in use".into()))?;
        // SAFETY: the stream lives as long as `self`.
        unsafe { self.events.record(event, self.raw.streams[0].raw())? };
        // How fast the GPU comes to an event is nothing of the copy, which raw begins without one.
        self.raw.streams[0].wait()?;
        Ok(Some(event))
    }

    fn end_fence(&mut self, fence: Option<u32>) {
        if let Some(event) = fence {
            self.events.give_back(event);
        }
    }

    fn fill(&mut self, side: Side, seed: u64) -> Result<(), BenchError> {
        let content = Content { seed, first_page: 0 };
        let stream = &self.raw.streams[0];
        self.device.kernels.fill(stream, &self.raw.sides[side as usize].pages, content)?;
        Ok(stream.wait()?)
    }

    fn poison(&mut self) -> Result<(), BenchError> {
        self.fill(Side::To, u64::MAX)
    }

    fn wrong_words(&mut self, seed: u64) -> Result<u64, BenchError> {
        self.wrong.set(0)?;
        let (stream, to) = (&self.raw.streams[0], &self.raw.sides[Side::To as usize].pages);
        let content = Content { seed, first_page: 0 };
        self.device.kernels.compare(stream, to, content, 0..to.segments(), &self.wrong)?;
        stream.wait()?;
        let bytes = self.wrong.read(8)?;
        Ok(u64::from_le_bytes(bytes.try_into().expect("eight bytes were read")))
    }

    fn ways(&self, side: Side) -> Vec<&'static str> {
        let plans = self.raw.sides[side as usize].plans.iter().map(|(name, _)| *name);
        plans.chain([KERNEL]).collect()
    }

    fn raw(&mut self, save: Option<Raw>, restore: Option<Raw>) -> Result<u64, BenchError> {
        self.raw.copy(save, restore)
    }

    fn elsewhere(
        &mut self,
        save: Option<Raw>,
        restore: Option<Raw>,
    ) -> Result<Option<u64>, BenchError> {
        self.elsewhere.copy(save, restore).map(Some)
    }
}
