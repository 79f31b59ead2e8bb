//! Which bytes go where, as rectangles: few orders to the copy engine, each as large as the layout
//! allows.
//!
//! A copy engine moves a rectangle (rows of one width, evenly spaced on either side) at the speed
//! of the bus down to rows of 2 KiB, in one order of about 1.5 µs; a copy for each row costs 3 to
//! 5 µs a row. The rows are found in two ways: the segments of one page (layers at an even distance),
//! or one segment of many pages (blocks and extents at an even distance).

use crate::device::region::{DeviceRegion, Run};

/// Bytes in rows. With one row the pitches mean nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Rect {
    /// Address of the first row on the GPU.
    pub(super) device: u64,
    /// Address of the first row in host memory.
    pub(super) host: u64,
    /// Bytes of a row.
    pub(super) width: u64,
    /// At least 1.
    pub(super) rows: u64,
    /// From row to row on the GPU, at least `width`.
    pub(super) device_pitch: u64,
    /// From row to row in host memory, at least `width`.
    pub(super) host_pitch: u64,
}

impl Rect {
    pub(super) fn bytes(&self) -> u64 {
        self.width * self.rows
    }

    /// One row where the rows touch each other on both sides.
    fn joined(self) -> Self {
        let touch = self.device_pitch == self.width && self.host_pitch == self.width;
        if self.rows > 1 && touch {
            return Self { width: self.bytes(), rows: 1, ..self };
        }
        self
    }

    /// Cuts off at most about `bytes`, at least one row or `bytes` of one; what is left stays.
    /// `None` when nothing is.
    pub(super) fn split_at(self, bytes: u64) -> (Self, Option<Self>) {
        if self.bytes() <= bytes {
            return (self, None);
        }
        if self.rows == 1 {
            let head = Self { width: bytes, ..self };
            let (device, host) = (self.device + bytes, self.host + bytes);
            return (head, Some(Self { device, host, width: self.width - bytes, ..self }));
        }
        let rows = (bytes / self.width).max(1);
        let head = Self { rows, ..self };
        let device = self.device + rows * self.device_pitch;
        let host = self.host + rows * self.host_pitch;
        (head, Some(Self { device, host, rows: self.rows - rows, ..self }))
    }
}

/// One page of a copy: where its image lies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Page {
    pub(super) device_page: u32,
    /// Address of the image in host memory.
    pub(super) host: u64,
}

/// Runs of one page that form rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Strip {
    /// Address on the GPU, on device page 0.
    device: u64,
    /// From device page to device page.
    stride: u64,
    image_offset: u64,
    width: u64,
    rows: u64,
    device_pitch: u64,
    host_pitch: u64,
    memory: u16,
}

impl Strip {
    fn of(run: &Run, device: u64) -> Self {
        Self {
            device,
            stride: run.stride,
            image_offset: run.image_offset.into(),
            width: run.bytes.into(),
            rows: 1,
            device_pitch: 0,
            host_pitch: 0,
            memory: run.memory,
        }
    }

    /// Takes `run` in as the next row, if it is one.
    fn take(&mut self, run: &Run, device: u64, pitch_max: u64) -> bool {
        let (image_offset, width) = (u64::from(run.image_offset), u64::from(run.bytes));
        if (run.memory, run.stride, width) != (self.memory, self.stride, self.width) {
            return false;
        }
        // Another allocation, or backwards: no rows.
        let Some(device_step) = device.checked_sub(self.device) else { return false };
        let Some(host_step) = image_offset.checked_sub(self.image_offset) else { return false };
        if self.rows == 1 {
            if !(width..=pitch_max).contains(&device_step) {
                return false;
            }
            (self.device_pitch, self.host_pitch) = (device_step, host_step);
        } else if device_step != self.rows * self.device_pitch
            || host_step != self.rows * self.host_pitch
        {
            return false;
        }
        self.rows += 1;
        true
    }

    /// Its rows on one page.
    fn on(&self, page: Page) -> Rect {
        Rect {
            device: self.device + u64::from(page.device_page) * self.stride,
            host: page.host + self.image_offset,
            width: self.width,
            rows: self.rows,
            device_pitch: self.device_pitch,
            host_pitch: self.host_pitch,
        }
        .joined()
    }

    /// One of its rows on evenly spaced pages.
    fn across(&self, row: u64, pages: &Even) -> Rect {
        let first = self.on(pages.first);
        Rect {
            device: first.device + row * self.device_pitch,
            host: first.host + row * self.host_pitch,
            width: self.width,
            rows: pages.count as u64,
            device_pitch: u64::from(pages.device_step) * self.stride,
            host_pitch: pages.host_step,
        }
        .joined()
    }
}

/// Pages whose device pages and images are evenly spaced.
struct Even {
    first: Page,
    count: usize,
    device_step: u32,
    host_step: u64,
}

impl Even {
    /// As many of `pages` as are evenly spaced, at least the first.
    fn start(pages: &[Page]) -> Option<Self> {
        let first = *pages.first()?;
        let mut even = Self { first, count: 1, device_step: 0, host_step: 0 };
        let steps = |a: &Page, b: &Page| {
            let device = b.device_page.checked_sub(a.device_page).filter(|step| *step > 0)?;
            let host = b.host.checked_sub(a.host).filter(|step| *step > 0)?;
            Some((device, host))
        };
        for pair in pages.windows(2) {
            let [last, next] = pair else { break };
            let Some(step) = steps(last, next) else { break };
            if even.count == 1 {
                (even.device_step, even.host_step) = step;
            } else if step != (even.device_step, even.host_step) {
                break;
            }
            even.count += 1;
        }
        Some(even)
    }
}

/// The layout of a region as strips, each layer's apart.
#[derive(Debug)]
pub(super) struct Plan {
    /// One group, or one a layer, in layer order.
    layers: Vec<Vec<Strip>>,
    pitch_max: u64,
}

impl Plan {
    /// `address` gives the address on the GPU of a memory of the region by its position.
    /// `pitch_max` is the longest distance of rows that the GPU takes.
    pub(super) fn new(
        region: &DeviceRegion,
        by_layer: bool,
        pitch_max: u64,
        address: impl Fn(u16) -> Option<u64>,
    ) -> Option<Self> {
        let mut layers: Vec<Vec<(Run, u64)>> = vec![];
        for run in region.layout().runs() {
            let layer = if by_layer { run.layer as usize } else { 0 };
            if layers.len() <= layer {
                layers.resize_with(layer + 1, Vec::new);
            }
            layers[layer].push((*run, address(run.memory)? + run.offset));
        }
        let layers = layers.iter().map(|runs| strips(runs, pitch_max)).collect();
        Some(Self { layers, pitch_max })
    }

    pub(super) fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Appends the rectangles of one layer of `pages`.
    pub(super) fn rects(&self, layer: usize, mut pages: &[Page], out: &mut impl Extend<Rect>) {
        let Some(strips) = self.layers.get(layer) else { return };
        let rows: u64 = strips.iter().map(|strip| strip.rows).sum();
        while let Some(even) = Even::start(pages) {
            let (these, rest) = pages.split_at(even.count);
            pages = rest;
            let fits = |strip: &Strip| {
                let device_pitch = u64::from(even.device_step).checked_mul(strip.stride);
                let host_pitch = strip.width..=self.pitch_max;
                device_pitch.is_some_and(|pitch| (strip.width..=self.pitch_max).contains(&pitch))
                    && host_pitch.contains(&even.host_step)
            };
            // One order a row, or one a page and strip: whichever is fewer.
            let by_row = even.count > 1
                && rows < even.count as u64 * strips.len() as u64
                && strips.iter().all(fits);
            for strip in strips {
                if by_row {
                    out.extend((0..strip.rows).map(|row| strip.across(row, &even)));
                } else {
                    out.extend(these.iter().map(|page| strip.on(*page)));
                }
            }
        }
    }
}

/// The fewest strips that a few simple orders of the runs give: as they come, or every second apart
/// (K and V of a layer side by side in the image, far from each other on the GPU).
fn strips(runs: &[(Run, u64)], pitch_max: u64) -> Vec<Strip> {
    let in_order = |period: usize| {
        let mut strips: Vec<Strip> = vec![];
        for start in 0..period {
            let first = strips.len();
            for (run, device) in runs.iter().skip(start).step_by(period) {
                let fits = strips.len() > first
                    && strips.last_mut().is_some_and(|last| last.take(run, *device, pitch_max));
                if !fits {
                    strips.push(Strip::of(run, *device));
                }
            }
        }
        strips
    };
    let (one, two) = (in_order(1), in_order(2));
    if two.len() < one.len() { two } else { one }
}
