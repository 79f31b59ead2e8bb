//! Which bytes go where, as rectangles: few orders to the copy engine, each as large as the layout
//! allows.
//!
//! A copy engine moves a rectangle (rows of one width, evenly spaced on either side) at the speed
//! of the bus down to rows of 2 KiB, in one order of about 1.5 µs; a copy for each row costs 3 to
//! 5 µs a row. The rows are found in two ways: the segments of one page (layers at an even distance),
//! or one segment of many pages (blocks and extents at an even distance).

use crate::device::region::{DeviceRegion, Run};

/// A single row of so many bytes can go with others in one order: shorter ones would wait for the
/// engine's kernels.
const BATCHED_BYTES_MIN: u64 = 64 << 10;

/// Bytes in rows.
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
    /// From row to row on the GPU, at least `width`; with one row 0 will do.
    pub(super) device_pitch: u64,
    /// From row to row in host memory, likewise.
    pub(super) host_pitch: u64,
}

impl Rect {
    pub(super) fn bytes(&self) -> u64 {
        self.width * self.rows
    }

    /// Whether it can go with others in one order.
    pub(super) fn is_batched(&self) -> bool {
        self.rows == 1 && self.width >= BATCHED_BYTES_MIN
    }

    /// One row where the rows touch each other on both sides.
    fn joined(self) -> Self {
        let touch = self.device_pitch == self.width && self.host_pitch == self.width;
        if self.rows > 1 && touch {
            let width = self.bytes();
            // The driver looks at the pitches of one row too.
            return Self { width, rows: 1, device_pitch: width, host_pitch: width, ..self };
        }
        self
    }

    /// Cuts off about `bytes`, at least one row or `bytes` of one; what is left stays. `None` when
    /// nothing is: a small rest goes along.
    pub(super) fn split_at(self, bytes: u64) -> (Self, Option<Self>) {
        if self.bytes() <= bytes + bytes / 4 {
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
        for run in region.layout().runs(by_layer) {
            let layer = run.layer as usize;
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

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::Arc;

    use orbitkv_shm_protocol::bootstrap::message::{RegionSpec, SegmentSpec};
    use proptest::prelude::{ProptestConfig, any};
    use proptest::{collection, prop_assert, prop_assert_eq, proptest};

    use super::*;
    use crate::device::cuda::twin::TwinMemory;

    const BASE: [u64; 2] = [1 << 40, 1 << 41];

    /// A region over two memories of 1 GiB, whose addresses are made up: nothing is copied.
    fn region(pages: u32, segments: Vec<SegmentSpec>) -> DeviceRegion {
        let image_bytes = segments.iter().map(|segment| segment.length).sum();
        let spec = RegionSpec { scope: 0, pages, segments };
        DeviceRegion::new(&spec, image_bytes, |memory| {
            (memory < 2).then(|| Arc::new(TwinMemory::made_up(1 << 30)))
        })
        .expect("layout")
    }

    fn plan(region: &DeviceRegion, by_layer: bool) -> Plan {
        let address = |memory: u16| {
            let handle = region.layout().memories()[usize::from(memory)];
            Some(BASE[handle as usize])
        };
        Plan::new(region, by_layer, (1 << 31) - 1, address).expect("addresses")
    }

    /// Layers × K/V of one tensor: `[layers][kv][pages][length]`, K and V of a layer side by side in
    /// the image.
    fn stacked(layers: u64, pages: u32, length: u64) -> DeviceRegion {
        let tensor = u64::from(pages) * length;
        let segment = |at: u64| SegmentSpec {
            memory: 0,
            offset: at * tensor,
            stride: length,
            length,
            layer: (at / 2) as u32,
        };
        region(pages, (0..2 * layers).map(segment).collect())
    }

    fn rects(plan: &Plan, pages: &[Page]) -> Vec<Rect> {
        let mut rects = vec![];
        (0..plan.layers()).for_each(|layer| plan.rects(layer, pages, &mut rects));
        rects
    }

    fn page(device_page: u32, host: u64) -> Page {
        Page { device_page, host }
    }

    #[test]
    fn stacked_layers_are_one_order_a_page() {
        let region = stacked(36, 100, 2048);
        let image = 72 * 2048;
        let scattered = [page(7, 0), page(3, 50 * image), page(90, 10 * image)];
        let rects = rects(&plan(&region, false), &scattered);
        assert_eq!(rects.len(), 3);
        let expected = Rect {
            device: BASE[0] + 7 * 2048,
            host: 0,
            width: 2048,
            rows: 72,
            device_pitch: 100 * 2048,
            host_pitch: 2048,
        };
        assert_eq!(rects[0], expected);
    }

    #[test]
    fn pages_side_by_side_are_one_order_a_segment_where_that_is_fewer() {
        // One layer an allocation: no rows within a page.
        let segment = |memory: u32| SegmentSpec {
            memory,
            offset: 0,
            stride: 4096,
            length: 4096,
            layer: memory,
        };
        let region = region(64, vec![segment(0), segment(1)]);
        let pages: Vec<Page> = (0..64).map(|at| page(at, u64::from(at) * 8192)).collect();
        let rects = rects(&plan(&region, false), &pages);
        assert_eq!(rects.len(), 2);
        assert_eq!((rects[0].rows, rects[0].device_pitch, rects[0].host_pitch), (64, 4096, 8192));
    }

    #[test]
    fn whole_blocks_side_by_side_are_one_row() {
        let segment =
            SegmentSpec { memory: 0, offset: 0, stride: 9 << 20, length: 9 << 20, layer: 0 };
        let region = region(4, vec![segment]);
        let pages: Vec<Page> = (0..4).map(|at| page(at, u64::from(at) * (9 << 20))).collect();
        let rects = rects(&plan(&region, false), &pages);
        assert_eq!(rects.len(), 1);
        assert_eq!((rects[0].rows, rects[0].width), (1, 36 << 20));
    }

    #[test]
    fn keys_and_values_far_apart_are_two_orders_a_page() {
        // `[kv][layers][pages][length]`.
        let (layers, pages, length) = (10u64, 20u32, 512u64);
        let tensor = u64::from(pages) * length;
        let segments = (0..layers).flat_map(|layer| {
            [0, 1].map(|kv| SegmentSpec {
                memory: 0,
                offset: (kv * (layers + 3) + layer) * tensor,
                stride: length,
                length,
                layer: layer as u32,
            })
        });
        let region = region(pages, segments.collect());
        let rects = rects(&plan(&region, false), &[page(5, 0)]);
        let shape = |rect: &Rect| (rect.rows, rect.device_pitch, rect.host_pitch);
        assert_eq!(rects.iter().map(shape).collect::<Vec<_>>(), [(10, tensor, 1024); 2]);
    }

    #[test]
    fn rows_beyond_the_pitch_of_the_gpu_are_orders_of_their_own() {
        let region = stacked(2, 4, 4096);
        let mut plan = plan(&region, false);
        plan.pitch_max = 4096 * 4 - 1;
        let narrow = Plan::new(&region, false, plan.pitch_max, |_| Some(BASE[0])).expect("plan");
        assert_eq!(rects(&narrow, &[page(0, 0)]).len(), 4);
    }

    #[test]
    fn a_split_keeps_every_byte_once() {
        let rect = Rect {
            device: 0,
            host: 1 << 20,
            width: 100,
            rows: 7,
            device_pitch: 300,
            host_pitch: 200,
        };
        let (head, tail) = rect.split_at(250);
        assert_eq!(
            (head.rows, tail.map(|tail| (tail.rows, tail.device, tail.host))),
            (2, Some((5, 600, (1 << 20) + 400)))
        );
        let row = Rect { rows: 1, ..rect };
        let (head, tail) = row.split_at(30);
        let tail = tail.expect("more");
        assert_eq!((head.width, tail.width, tail.device), (30, 70, 30));
        assert_eq!(rect.split_at(700), (rect, None));
        assert_eq!(rect.split_at(560), (rect, None));
        // A row wider than asked for is not cut apart as long as there are several.
        assert_eq!(rect.split_at(1).0.rows, 1);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, cases: 500, ..ProptestConfig::default() })]

        /// Byte by byte against the definition of a layout.
        #[test]
        fn every_byte_goes_where_the_layout_says(
            pieces in collection::vec((0..2u32, 1..40u64, 0..5u64, 0..3u32), 1..12),
            regular in any::<bool>(),
            order in collection::vec((0..6u32, 0..9u64), 1..9),
            by_layer in any::<bool>(),
        ) {
            let mut free = [0u64; 2];
            let segments: Vec<SegmentSpec> = pieces.iter().map(|&(memory, length, gap, layer)| {
                let (memory, length, gap) = if regular { (0, 16, 3) } else { (memory, length, gap) };
                let offset = free[memory as usize] + gap;
                let stride = length + gap;
                free[memory as usize] = offset + stride * 5 + length;
                SegmentSpec { memory, offset, stride, length, layer }
            }).collect();
            let image: u64 = segments.iter().map(|segment| segment.length).sum();
            let region = region(6, segments.clone());
            // Images may be named twice: what a caller asks for is its own affair.
            let pages: Vec<Page> = order.iter().map(|&(at, slot)| page(at, slot * image)).collect();
            let mut wanted: Vec<(u64, u64)> = pages.iter().flat_map(|page| {
                let mut host = page.host;
                segments.iter().flat_map(move |segment| {
                    let device = BASE[segment.memory as usize] + segment.offset + u64::from(page.device_page) * segment.stride;
                    let start = host;
                    host += segment.length;
                    (0..segment.length).map(move |byte| (device + byte, start + byte))
                }).collect::<Vec<_>>()
            }).collect();
            let rects = rects(&plan(&region, by_layer), &pages);
            let mut found: Vec<(u64, u64)> = rects.iter().flat_map(|rect| {
                (0..rect.rows).flat_map(move |row| (0..rect.width).map(move |byte| {
                    (rect.device + row * rect.device_pitch + byte, rect.host + row * rect.host_pitch + byte)
                }))
            }).collect();
            for rect in &rects {
                prop_assert!(rect.rows == 1 || rect.width <= rect.device_pitch.min(rect.host_pitch), "{rect:?}");
            }
            wanted.sort_unstable();
            found.sort_unstable();
            prop_assert_eq!(found, wanted);
        }

        /// Layers come one after the other, whole.
        #[test]
        fn layers_are_complete_in_their_order(layers in 1..5u64, order in collection::vec(0..6u32, 1..9)) {
            let region = stacked(layers, 6, 64);
            let plan = plan(&region, true);
            prop_assert_eq!(plan.layers() as u64, layers);
            let image = layers * 128;
            let pages: Vec<Page> = order.iter().zip(0..).map(|(&at, slot)| page(at, slot * image)).collect();
            for layer in 0..plan.layers() {
                let mut rects = vec![];
                plan.rects(layer, &pages, &mut rects);
                let mut bytes: HashMap<u64, u32> = HashMap::new();
                for rect in &rects {
                    for row in 0..rect.rows {
                        (0..rect.width).for_each(|byte| *bytes.entry(rect.host + row * rect.host_pitch + byte).or_default() += 1);
                    }
                }
                let start = layer as u64 * 128;
                prop_assert_eq!(bytes.len(), pages.len() * 128);
                prop_assert!(bytes.iter().all(|(host, count)| *count == 1 && (start..start + 128).contains(&(host % image))));
            }
        }
    }
}
