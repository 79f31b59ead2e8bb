//! Where the pages of a region lie: checks an engine's layout once, then answers without checks.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use orbitkv_shm_protocol::bootstrap::message::{LAYOUT_SEGMENTS_MAX, RegionSpec};

use super::{DeviceKind, DeviceMemory};

/// Why a region was refused. Numbers are the engine's; segments count from 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RegionError {
    /// No device pages.
    #[error("region has 0 pages: give at least 1")]
    NoPages,
    /// No segments, or too many.
    #[error("region has {segments} segments a page: give 1 to {LAYOUT_SEGMENTS_MAX}")]
    SegmentCount {
        /// As given.
        segments: usize,
    },
    /// Unknown memory.
    #[error("segment {segment} names memory {memory}, which this session did not register")]
    UnknownMemory {
        /// Which segment.
        segment: usize,
        /// As given.
        memory: u32,
    },
    /// Memories that no one device reaches.
    #[error(
        "memories {first} and {second} are not of one device: register a region a device (host, or \
         one GPU)"
    )]
    MixedDevices {
        /// One.
        first: u32,
        /// The other.
        second: u32,
    },
    /// A segment without bytes.
    #[error("segment {segment} has 0 bytes")]
    EmptySegment {
        /// Which segment.
        segment: usize,
    },
    /// A segment leaves its memory on some page, overflow included.
    #[error(
        "segment {segment} leaves its memory of {memory_bytes} bytes on the last of {pages} pages"
    )]
    OutOfBounds {
        /// Which segment.
        segment: usize,
        /// Bytes of the memory.
        memory_bytes: u64,
        /// Device pages.
        pages: u32,
    },
    /// Neighbouring pages share bytes.
    #[error(
        "segment {segment}: stride {stride} bytes is below its length {length}, so pages overlap"
    )]
    PagesOverlap {
        /// Which segment.
        segment: usize,
        /// As given.
        stride: u64,
        /// As given.
        length: u64,
    },
    /// Two segments of device page 0 share bytes.
    #[error("segments {first} and {second} of one page overlap")]
    SegmentsOverlap {
        /// One.
        first: usize,
        /// The other.
        second: usize,
    },
    /// The segments are not one page image.
    #[error("segments add up to {sum} bytes a page, the namespace has {image_bytes}")]
    SizeMismatch {
        /// Sum of lengths; `u64::MAX` stands for more than that.
        sum: u64,
        /// Page bytes of the namespace.
        image_bytes: u64,
    },
    /// No extent can hold such an image.
    #[error("page image of {image_bytes} bytes: at most {} bytes", u32::MAX)]
    ImageTooLarge {
        /// As given.
        image_bytes: u64,
    },
}

/// One run of bytes that is contiguous on the device and in the image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Placement {
    /// Position in the region's list of memories.
    pub memory: u16,
    /// Offset in that memory, in bytes.
    pub offset: u64,
    /// Length in bytes, at least 1.
    pub bytes: u32,
}

/// A checked page layout: for every device page below `pages`, every run lies within its memory.
///
/// Pages of one segment never overlap, nor do segments on device page 0. Segments with different
/// strides may still overlap on other pages: that harms nobody but the engine that asked for it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PageLayout {
    pages: u32,
    image_bytes: u32,
    layers: u32,
    /// In image order, neighbours merged where they are contiguous on every page.
    runs: Vec<Run>,
    /// By layer, then in image order; no two layers share one. Empty with a single layer.
    layer_runs: Vec<LayerRun>,
    /// Memory handles in the order of `Run::memory`.
    memories: Vec<u32>,
}

/// Bytes that are contiguous on the device and in the image, on every page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Run {
    /// Position in the region's list of memories.
    pub(super) memory: u16,
    /// On device page 0.
    pub(super) offset: u64,
    /// From device page to device page.
    pub(super) stride: u64,
    pub(super) image_offset: u32,
    pub(super) bytes: u32,
}

/// A run of one layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct LayerRun {
    layer: u32,
    /// Of its first byte among those of the layer.
    layer_offset: u32,
    run: Run,
}

impl LayerRun {
    fn end(&self) -> u32 {
        self.layer_offset + self.run.bytes
    }
}

impl PageLayout {
    /// Checks `spec` against the sizes of the memories it names. `image_bytes` is the page size of
    /// its namespace.
    ///
    /// # Errors
    ///
    /// The first [`RegionError`] found; any field of `spec` may have any value.
    pub fn new(
        spec: &RegionSpec,
        image_bytes: u64,
        mut memory_bytes: impl FnMut(u32) -> Option<u64>,
    ) -> Result<Self, RegionError> {
        if spec.pages == 0 {
            return Err(RegionError::NoPages);
        }
        let segments = spec.segments.len();
        if segments == 0 || segments > LAYOUT_SEGMENTS_MAX {
            return Err(RegionError::SegmentCount { segments });
        }
        let image_bytes_u32 =
            u32::try_from(image_bytes).map_err(|_| RegionError::ImageTooLarge { image_bytes })?;
        let mut layout = Self {
            pages: spec.pages,
            image_bytes: image_bytes_u32,
            layers: 1,
            runs: vec![],
            layer_runs: vec![],
            memories: vec![],
        };
        let mut positions: HashMap<u32, u16> = HashMap::new();
        let mut intervals = Vec::with_capacity(segments);
        let mut layer_segments = Vec::with_capacity(segments);
        let mut sum = 0u64;
        for (index, segment) in spec.segments.iter().enumerate() {
            let unknown = RegionError::UnknownMemory { segment: index, memory: segment.memory };
            let capacity = memory_bytes(segment.memory).ok_or(unknown)?;
            if segment.length == 0 {
                return Err(RegionError::EmptySegment { segment: index });
            }
            if spec.pages > 1 && segment.stride < segment.length {
                let (stride, length) = (segment.stride, segment.length);
                return Err(RegionError::PagesOverlap { segment: index, stride, length });
            }
            let end = u64::from(spec.pages - 1)
                .checked_mul(segment.stride)
                .and_then(|last| last.checked_add(segment.offset))
                .and_then(|last| last.checked_add(segment.length));
            if end.is_none_or(|end| end > capacity) {
                let pages = spec.pages;
                let memory_bytes = capacity;
                return Err(RegionError::OutOfBounds { segment: index, memory_bytes, pages });
            }
            let image_offset = sum;
            sum = sum.saturating_add(segment.length);
            // Too long a sum is a mismatch, so that both conversions below fit.
            if sum > image_bytes {
                continue;
            }
            let next = layout.memories.len() as u16;
            let memory = *positions.entry(segment.memory).or_insert_with(|| {
                layout.memories.push(segment.memory);
                next
            });
            intervals.push((memory, segment.offset..segment.offset + segment.length, index));
            let run = Run {
                memory,
                offset: segment.offset,
                stride: segment.stride,
                image_offset: image_offset as u32,
                bytes: segment.length as u32,
            };
            lengthen_or_push(&mut layout.runs, run, spec.pages);
            layer_segments.push((segment.layer, run));
        }
        if sum != image_bytes {
            return Err(RegionError::SizeMismatch { sum, image_bytes });
        }
        disjoint(intervals)?;
        layout.divide(layer_segments);
        Ok(layout)
    }

    /// Sorts the segments by layer.
    fn divide(&mut self, mut segments: Vec<(u32, Run)>) {
        self.layers = segments.iter().map(|(layer, _)| layer.saturating_add(1)).max().unwrap_or(1);
        if self.layers == 1 {
            return;
        }
        segments.sort_by_key(|(layer, _)| *layer);
        for of_layer in segments.chunk_by(|(layer, _), (next, _)| layer == next) {
            let layer = of_layer[0].0;
            let mut runs = Vec::new();
            for (_, run) in of_layer {
                lengthen_or_push(&mut runs, *run, self.pages);
            }
            let mut layer_offset = 0;
            for run in runs {
                self.layer_runs.push(LayerRun { layer, layer_offset, run });
                layer_offset += run.bytes;
            }
        }
    }

    /// The runs of a page, in image order.
    pub(super) fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// The runs of one layer of a page, in image order; of a layout of one layer none.
    pub(super) fn runs_of_layer(&self, layer: u32) -> impl Iterator<Item = &Run> {
        let first = self.layer_runs.partition_point(|run| run.layer < layer);
        let runs = self.layer_runs[first..].iter();
        runs.take_while(move |run| run.layer == layer).map(|run| &run.run)
    }

    /// Device pages.
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// Bytes of one page image.
    pub fn image_bytes(&self) -> u32 {
        self.image_bytes
    }

    /// Layers: one more than the highest that a segment names.
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// Bytes of one layer of a page image; 0 when no segment names it.
    pub fn layer_bytes(&self, layer: u32) -> u32 {
        if self.layers == 1 {
            return if layer == 0 { self.image_bytes } else { 0 };
        }
        let next = self.layer_runs.partition_point(|run| run.layer <= layer);
        let last = next.checked_sub(1).map(|last| &self.layer_runs[last]);
        last.filter(|run| run.layer == layer).map_or(0, LayerRun::end)
    }

    /// Handles of the memories, in the order of [`Placement::memory`].
    pub fn memories(&self) -> &[u32] {
        &self.memories
    }

    /// Where the image bytes from `image_offset` on lie on the device, up to the first jump.
    /// `None` when there is no such page or byte.
    pub fn locate(&self, device_page: u32, image_offset: u32) -> Option<Placement> {
        if device_page >= self.pages || image_offset >= self.image_bytes {
            return None;
        }
        let next = self.runs.partition_point(|run| run.image_offset <= image_offset);
        let run = self.runs.get(next.checked_sub(1)?)?;
        Some(run.place(device_page, image_offset - run.image_offset))
    }

    /// Where the bytes of a layer from `layer_offset` on lie, in the image and on the device, up to
    /// the first jump in either. `None` when there is no such page or byte.
    pub fn locate_in_layer(
        &self,
        layer: u32,
        device_page: u32,
        layer_offset: u32,
    ) -> Option<(u32, Placement)> {
        if self.layers == 1 && layer == 0 {
            return Some((layer_offset, self.locate(device_page, layer_offset)?));
        }
        if device_page >= self.pages {
            return None;
        }
        let before = |run: &LayerRun| (run.layer, run.layer_offset) <= (layer, layer_offset);
        let next = self.layer_runs.partition_point(before);
        let found = self.layer_runs.get(next.checked_sub(1)?)?;
        if found.layer != layer || layer_offset >= found.end() {
            return None;
        }
        let within = layer_offset - found.layer_offset;
        Some((found.run.image_offset + within, found.run.place(device_page, within)))
    }
}

impl Run {
    /// The rest of the run on a device page, from its byte `within` on.
    fn place(&self, device_page: u32, within: u32) -> Placement {
        // No overflow: `PageLayout::new` computed the end of the last page.
        let offset = self.offset + u64::from(device_page) * self.stride + u64::from(within);
        Placement { memory: self.memory, offset, bytes: self.bytes - within }
    }
}

/// Appends a run, or lengthens the last one where both are contiguous on every page and in the image.
fn lengthen_or_push(runs: &mut Vec<Run>, run: Run, pages: u32) {
    if let Some(last) = runs.last_mut()
        && last.memory == run.memory
        && last.offset + u64::from(last.bytes) == run.offset
        && last.image_offset + last.bytes == run.image_offset
        && (last.stride == run.stride || pages == 1)
    {
        last.bytes += run.bytes;
    } else {
        runs.push(run);
    }
}

/// Whether the byte ranges of one page are pairwise disjoint.
fn disjoint(mut intervals: Vec<(u16, Range<u64>, usize)>) -> Result<(), RegionError> {
    intervals.sort_unstable_by_key(|(memory, range, _)| (*memory, range.start));
    for pair in intervals.windows(2) {
        if let [(memory, range, first), (next_memory, next_range, second)] = pair
            && memory == next_memory
            && next_range.start < range.end
        {
            let (first, second) = (*first.min(second), *first.max(second));
            return Err(RegionError::SegmentsOverlap { first, second });
        }
    }
    Ok(())
}

/// A layout together with the memories it names. Immutable; alive as long as a command uses it.
#[derive(Debug)]
pub struct DeviceRegion {
    layout: PageLayout,
    memories: Vec<Arc<DeviceMemory>>,
}

impl DeviceRegion {
    /// See [`PageLayout::new`]. `memory` resolves the handles of the session that sent `spec`.
    ///
    /// # Errors
    ///
    /// The first [`RegionError`] found.
    pub fn new(
        spec: &RegionSpec,
        image_bytes: u64,
        mut memory: impl FnMut(u32) -> Option<Arc<DeviceMemory>>,
    ) -> Result<Self, RegionError> {
        let mut known: HashMap<u32, Arc<DeviceMemory>> = HashMap::new();
        let layout = PageLayout::new(spec, image_bytes, |handle| {
            if let Some(memory) = known.get(&handle) {
                return Some(memory.bytes());
            }
            let resolved = memory(handle)?;
            let bytes = resolved.bytes();
            known.insert(handle, resolved);
            Some(bytes)
        })?;
        let memories = layout.memories().iter().filter_map(|handle| known.get(handle).cloned());
        let memories: Vec<Arc<DeviceMemory>> = memories.collect();
        if let Some(first) = memories.first()
            && let Some(at) = memories.iter().position(|memory| !memory.is_beside(first))
        {
            let (first, second) = (layout.memories()[0], layout.memories()[at]);
            return Err(RegionError::MixedDevices { first, second });
        }
        Ok(Self { layout, memories })
    }

    /// Its checked layout.
    pub fn layout(&self) -> &PageLayout {
        &self.layout
    }

    /// Whether work that is queued on a device writes its memory, so that a save needs a fence.
    pub fn needs_fence(&self) -> bool {
        self.memories.iter().any(|memory| memory.needs_fence())
    }

    /// What copies from it and to it.
    pub fn device(&self) -> Option<DeviceKind> {
        self.memories.first().map(|memory| memory.device())
    }

    /// The memory of a [`Placement`].
    pub fn memory(&self, position: u16) -> Option<&DeviceMemory> {
        self.memories.get(usize::from(position)).map(Arc::as_ref)
    }
}

#[cfg(test)]
mod tests {
    use orbitkv_shm_protocol::bootstrap::message::SegmentSpec;
    use proptest::prelude::{Just, ProptestConfig, Strategy, any, prop_oneof};
    use proptest::{collection, prop_assert_eq, proptest};

    use super::*;

    fn segment(memory: u32, offset: u64, stride: u64, length: u64) -> SegmentSpec {
        SegmentSpec { memory, offset, stride, length, layer: 0 }
    }

    fn region(pages: u32, segments: Vec<SegmentSpec>) -> RegionSpec {
        RegionSpec { scope: 0, pages, segments }
    }

    fn check(spec: &RegionSpec, image_bytes: u64) -> Result<PageLayout, RegionError> {
        PageLayout::new(spec, image_bytes, |memory| (memory < 2).then_some(1000))
    }

    #[test]
    fn each_defect_is_named() {
        let ok = segment(0, 0, 100, 100);
        assert!(check(&region(10, vec![ok]), 100).is_ok());
        assert_eq!(check(&region(0, vec![ok]), 100), Err(RegionError::NoPages));
        assert_eq!(check(&region(1, vec![]), 100), Err(RegionError::SegmentCount { segments: 0 }));
        assert_eq!(
            check(&region(1, vec![ok; LAYOUT_SEGMENTS_MAX + 1]), 100),
            Err(RegionError::SegmentCount { segments: LAYOUT_SEGMENTS_MAX + 1 })
        );
        assert_eq!(
            check(&region(1, vec![segment(7, 0, 0, 100)]), 100),
            Err(RegionError::UnknownMemory { segment: 0, memory: 7 })
        );
        assert_eq!(
            check(&region(1, vec![segment(0, 0, 0, 0)]), 0),
            Err(RegionError::EmptySegment { segment: 0 })
        );
        assert_eq!(
            check(&region(11, vec![ok]), 100),
            Err(RegionError::OutOfBounds { segment: 0, memory_bytes: 1000, pages: 11 })
        );
        assert_eq!(
            check(&region(2, vec![segment(0, 0, 99, 100)]), 100),
            Err(RegionError::PagesOverlap { segment: 0, stride: 99, length: 100 })
        );
        assert_eq!(
            check(&region(2, vec![segment(0, 50, 200, 60), segment(0, 0, 200, 51)]), 111),
            Err(RegionError::SegmentsOverlap { first: 0, second: 1 })
        );
        assert_eq!(
            check(&region(1, vec![ok, segment(1, 0, 0, 1)]), 100),
            Err(RegionError::SizeMismatch { sum: 101, image_bytes: 100 })
        );
        assert_eq!(
            check(&region(1, vec![ok]), 1 << 32),
            Err(RegionError::ImageTooLarge { image_bytes: 1 << 32 })
        );
        // The stride of a single page means nothing.
        assert!(check(&region(1, vec![segment(0, 900, u64::MAX, 100)]), 100).is_ok());
    }

    #[test]
    fn neighbours_merge_only_where_every_page_is_contiguous() {
        let runs = |pages, segments: Vec<SegmentSpec>| {
            let sum = segments.iter().map(|segment| segment.length).sum();
            check(&region(pages, segments), sum).expect("layout").runs.len()
        };
        assert_eq!(runs(5, vec![segment(0, 0, 64, 32), segment(0, 32, 64, 32)]), 1);
        // Contiguous on page 0 alone.
        assert_eq!(runs(5, vec![segment(0, 0, 32, 32), segment(0, 32, 64, 32)]), 2);
        assert_eq!(runs(1, vec![segment(0, 0, 0, 32), segment(0, 32, 9, 32)]), 1);
        // Contiguous on the device, but the other way round in the image.
        assert_eq!(runs(5, vec![segment(0, 32, 64, 32), segment(0, 0, 64, 32)]), 2);
        assert_eq!(runs(5, vec![segment(0, 0, 64, 32), segment(1, 32, 64, 32)]), 2);
    }

    #[test]
    fn layers_merge_in_themselves_and_come_in_their_order() {
        let of = |layer, offset| SegmentSpec { layer, ..segment(0, offset, 64, 16) };
        let spec = region(5, vec![of(3, 0), of(0, 16), of(0, 32), of(3, 48)]);
        let layout = check(&spec, 64).expect("layout");
        assert_eq!((layout.layers(), layout.runs().len()), (4, 1));
        let runs_of = |layer| -> Vec<_> {
            layout.runs_of_layer(layer).map(|run| (run.image_offset, run.bytes)).collect()
        };
        assert_eq!(
            [runs_of(0), runs_of(1), runs_of(3)],
            [vec![(16, 32)], vec![], vec![(0, 16), (48, 16)]]
        );
        assert_eq!([0, 1, 2, 3, 4].map(|layer| layout.layer_bytes(layer)), [32, 0, 0, 32, 0]);
        let place = |offset, bytes| Placement { memory: 0, offset, bytes };
        assert_eq!(layout.locate_in_layer(3, 2, 15), Some((15, place(2 * 64 + 15, 1))));
        assert_eq!(layout.locate_in_layer(3, 2, 16), Some((48, place(2 * 64 + 48, 16))));
        for (layer, page, offset) in [(0, 2, 32), (1, 2, 0), (4, 2, 0), (3, 2, 32), (3, 5, 0)] {
            assert_eq!(layout.locate_in_layer(layer, page, offset), None);
        }
        // One layer is the whole image.
        let single = check(&region(5, vec![segment(0, 0, 64, 32)]), 32).expect("layout");
        assert_eq!((single.layers(), single.layer_bytes(0), single.layer_bytes(1)), (1, 32, 0));
        assert_eq!(single.locate_in_layer(0, 1, 5), Some((5, place(69, 27))));
    }

    fn hostile_number() -> impl Strategy<Value = u64> {
        prop_oneof![
            Just(0),
            Just(1),
            Just(u64::MAX),
            Just(1 << 63),
            Just(u64::from(u32::MAX)),
            0..5000u64,
            any::<u64>(),
        ]
    }

    fn hostile_region() -> impl Strategy<Value = RegionSpec> {
        let pages = prop_oneof![Just(0), Just(1), Just(u32::MAX), 0..20u32, any::<u32>()];
        let segment = (0..3u32, hostile_number(), hostile_number(), hostile_number())
            .prop_map(|(memory, offset, stride, length)| segment(memory, offset, stride, length));
        (pages, collection::vec(segment, 0..6))
            .prop_map(|(pages, segments)| region(pages, segments))
    }

    /// The rules in numbers too wide to overflow, without names for the defects.
    fn naive_accepts(spec: &RegionSpec, image_bytes: u64, memories: [u64; 2]) -> bool {
        let wide = |number: u64| u128::from(number);
        let sum: u128 = spec.segments.iter().map(|segment| wide(segment.length)).sum();
        let each = spec.segments.iter().all(|segment| {
            memories.get(segment.memory as usize).is_some_and(|&bytes| {
                let last = u128::from(spec.pages.max(1) - 1) * wide(segment.stride);
                segment.length > 0
                    && (spec.pages == 1 || segment.stride >= segment.length)
                    && last + wide(segment.offset) + wide(segment.length) <= wide(bytes)
            })
        });
        let apart = spec.segments.iter().enumerate().all(|(index, a)| {
            spec.segments[..index].iter().all(|b| {
                a.memory != b.memory
                    || wide(a.offset) + wide(a.length) <= wide(b.offset)
                    || wide(b.offset) + wide(b.length) <= wide(a.offset)
            })
        });
        spec.pages > 0
            && !spec.segments.is_empty()
            && each
            && apart
            && sum == wide(image_bytes)
            && image_bytes <= u64::from(u32::MAX)
    }

    /// Layouts that are mostly right: one or two memories, tensors of `pages` blocks.
    fn plausible_region() -> impl Strategy<Value = RegionSpec> {
        let piece = (0..2u32, 1..9u64, 0..3u64, 0..3u64, 0..4u32);
        (1..6u32, collection::vec(piece, 1..7)).prop_map(|(pages, pieces)| {
            let mut free = [0u64; 2];
            let segments = pieces.into_iter().map(|(memory, length, gap, slack, layer)| {
                let offset = free[memory as usize] + gap;
                let stride = length + slack;
                free[memory as usize] = offset + stride * u64::from(pages - 1) + length;
                SegmentSpec { layer, ..segment(memory, offset, stride, length) }
            });
            region(pages, segments.collect())
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, cases: 2000, ..ProptestConfig::default() })]

        #[test]
        fn hostile_specs_are_accepted_exactly_when_wide_arithmetic_agrees(
            spec in prop_oneof![hostile_region(), plausible_region()],
            any_image in hostile_number(),
            sum_right in any::<bool>(),
            memories in [hostile_number(), hostile_number()],
        ) {
            let sum = spec.segments.iter().fold(0u64, |sum, segment| sum.saturating_add(segment.length));
            let image_bytes = if sum_right { sum } else { any_image };
            let layout = PageLayout::new(&spec, image_bytes, |memory| memories.get(memory as usize).copied());
            prop_assert_eq!(layout.is_ok(), naive_accepts(&spec, image_bytes, memories), "{:?}", layout);
            if let Ok(layout) = layout {
                // Every run of the first and the last page stays inside.
                for page in [0, spec.pages - 1] {
                    let mut at = 0;
                    while let Some(place) = layout.locate(page, at) {
                        let capacity = memories[layout.memories()[usize::from(place.memory)] as usize];
                        proptest::prop_assert!(u128::from(place.offset) + u128::from(place.bytes) <= u128::from(capacity));
                        at += place.bytes;
                    }
                    prop_assert_eq!(u64::from(at), image_bytes);
                }
                prop_assert_eq!(layout.locate(spec.pages, 0), None);
            }
        }

        #[test]
        fn every_image_byte_is_located_where_the_segments_say(spec in plausible_region()) {
            let image_bytes: u64 = spec.segments.iter().map(|segment| segment.length).sum();
            let layout = PageLayout::new(&spec, image_bytes, |_| Some(1 << 20)).expect("plausible");
            for page in 0..spec.pages {
                let naive: Vec<(u32, u64)> = spec.segments.iter().flat_map(|segment| {
                    let start = segment.offset + u64::from(page) * segment.stride;
                    (start..start + segment.length).map(move |byte| (segment.memory, byte))
                }).collect();
                let mut located = Vec::new();
                while let Some(place) = layout.locate(page, located.len() as u32) {
                    let memory = layout.memories()[usize::from(place.memory)];
                    located.extend((0..u64::from(place.bytes)).map(|byte| (memory, place.offset + byte)));
                }
                prop_assert_eq!(&located, &naive);
                for (byte, &(memory, offset)) in naive.iter().enumerate() {
                    let place = layout.locate(page, byte as u32).expect("byte of the image");
                    prop_assert_eq!((layout.memories()[usize::from(place.memory)], place.offset), (memory, offset));
                }
                // By layer, each byte once, at its place in the image.
                let of_segment = |segment: &SegmentSpec| vec![segment.layer; segment.length as usize];
                let layer_of: Vec<u32> = spec.segments.iter().flat_map(of_segment).collect();
                for layer in 0..5 {
                    let wanted: Vec<usize> = (0..naive.len()).filter(|&at| layer_of[at] == layer).collect();
                    prop_assert_eq!(layout.layer_bytes(layer) as usize, wanted.len());
                    let mut found = Vec::new();
                    while let Some((image, place)) = layout.locate_in_layer(layer, page, found.len() as u32) {
                        for at in 0..place.bytes {
                            let memory = layout.memories()[usize::from(place.memory)];
                            let byte = (image + at) as usize;
                            prop_assert_eq!(naive[byte], (memory, place.offset + u64::from(at)));
                            found.push(byte);
                        }
                    }
                    prop_assert_eq!(found, wanted);
                }
            }
        }
    }
}
