//! What is copied: where the pages of a shape lie, and how a raw copy goes over them.

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// Layers of the shapes that have some, each with one part or two.
const LAYERS: u32 = 36;

/// How the parts of the pages lie in the engine's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Order {
    /// One block after the other, each with all its layers: a page is one part.
    Blocks,
    /// One layer after the other, each with all blocks.
    Layers,
    /// The same, each layer an allocation of its own.
    Allocations,
}

/// Pages of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Its name in the results.
    pub name: &'static str,
    /// Pages that are copied at once.
    pub pages: u32,
    /// Parts of a page.
    pub segments: u32,
    /// Bytes of a part.
    pub length: u64,
    order: Order,
    /// Device pages in random order, not one after the other.
    shuffled: bool,
    /// Measured in both directions at once, too.
    pub both: bool,
}

impl Shape {
    /// The same copied again and again.
    pub(super) fn again(&self) -> Self {
        match self.name {
            "4k" => Self { name: "4k_again", ..*self },
            _ => *self,
        }
    }

    const fn new(
        name: &'static str,
        pages: u32,
        (segments, length): (u32, u64),
        order: Order,
    ) -> Self {
        let both = pages as u64 * segments as u64 * length >= 18 * MIB;
        Self { name, pages, segments, length, order, shuffled: false, both }
    }

    const fn shuffled(mut self, name: &'static str) -> Self {
        self.name = name;
        self.shuffled = true;
        self
    }

    /// Bytes of one page image.
    pub fn image_bytes(&self) -> u64 {
        u64::from(self.segments) * self.length
    }

    /// Bytes of all pages.
    pub fn bytes(&self) -> u64 {
        u64::from(self.pages) * self.image_bytes()
    }

    /// Parts of all pages.
    pub fn parts(&self) -> u64 {
        u64::from(self.pages) * u64::from(self.segments)
    }

    /// Layers of the model; 1 where a page is one part.
    pub(super) fn layers(&self) -> u32 {
        self.segments.min(LAYERS)
    }

    /// Layer of a part.
    pub(super) fn layer(&self, part: u32) -> u32 {
        part * self.layers() / self.segments
    }
}

const LARGE_BLOCKS: Shape = Shape::new("576m_block_outermost", 64, (1, 9 * MIB), Order::Blocks);
const LARGE_36: Shape = Shape::new("576m_36x256k", 64, (36, 256 * KIB), Order::Layers);
const LARGE_72: Shape = Shape::new("576m_72x128k", 64, (72, 128 * KIB), Order::Layers);
const LARGE_APART: Shape =
    Shape::new("576m_36_allocations", 64, (36, 256 * KIB), Order::Allocations);
const CONTIGUOUS: Shape = Shape::new("18m_contiguous", 128, (1, 144 * KIB), Order::Blocks);
const SPLIT: Shape = Shape::new("18m_split", 128, (72, 2 * KIB), Order::Layers);

/// Everything that is measured, small to large.
pub const SHAPES: [Shape; 13] = [
    Shape::new("4k", 1, (1, 4 * KIB), Order::Blocks),
    Shape::new("9m_page", 1, (72, 128 * KIB), Order::Layers),
    CONTIGUOUS,
    CONTIGUOUS.shuffled("18m_contiguous_shuffled"),
    SPLIT,
    SPLIT.shuffled("18m_split_shuffled"),
    LARGE_BLOCKS,
    LARGE_BLOCKS.shuffled("576m_block_outermost_shuffled"),
    LARGE_36,
    LARGE_36.shuffled("576m_36x256k_shuffled"),
    LARGE_72,
    LARGE_72.shuffled("576m_72x128k_shuffled"),
    LARGE_APART,
];

/// Part 0 of device page 0 and of every other part, and how far pages are apart.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Layout {
    /// Bytes of each allocation.
    pub(super) allocations: Vec<u64>,
    /// Of each part: its allocation, and where page 0's begins in it.
    pub(super) segments: Vec<(usize, u64)>,
    /// From a page's part to the next page's.
    pub(super) stride: u64,
    /// Bytes of a part.
    pub(super) length: u64,
    /// Device pages.
    pub(super) pages: u32,
}

impl Layout {
    /// Room for the pages that are saved and as many to restore into, and some around a few.
    pub(super) fn of(shape: &Shape) -> Self {
        let pages = (2 * shape.pages).max(4);
        let layer = u64::from(pages) * shape.length;
        let layers = u64::from(shape.segments);
        let (allocations, segments, stride) = match shape.order {
            Order::Blocks => {
                let image = shape.image_bytes();
                let parts = (0..layers).map(|at| (0, at * shape.length)).collect();
                (vec![u64::from(pages) * image], parts, image)
            }
            Order::Layers => {
                let parts = (0..layers).map(|at| (0, at * layer)).collect();
                (vec![layers * layer], parts, shape.length)
            }
            Order::Allocations => {
                let parts = (0..layers as usize).map(|at| (at, 0)).collect();
                (vec![layer; layers as usize], parts, shape.length)
            }
        };
        Self { allocations, segments, stride, length: shape.length, pages }
    }

    /// Device pages that are saved, and those that are restored into.
    pub(super) fn places(&self, shape: &Shape) -> (Vec<u32>, Vec<u32>) {
        let mut all: Vec<u32> = (0..self.pages).collect();
        if shape.shuffled {
            let mut random = fastrand::Rng::with_seed(1);
            random.shuffle(&mut all);
        }
        let count = shape.pages as usize;
        (all[..count].to_vec(), all[self.pages as usize - count..].to_vec())
    }

    /// Bytes of one page image.
    pub(super) fn image_bytes(&self) -> u64 {
        self.segments.len() as u64 * self.length
    }

    /// Every part, joined with the next where both lie side by side in the image too.
    fn runs(&self, pages: &[u32]) -> Vec<Rectangle> {
        let mut runs: Vec<Rectangle> = Vec::new();
        for (&page, at) in pages.iter().zip(0_u64..) {
            for (&(allocation, start), part) in self.segments.iter().zip(0_u64..) {
                let offset = start + u64::from(page) * self.stride;
                let image = at * self.image_bytes() + part * self.length;
                match runs.last_mut() {
                    Some(run)
                        if (run.allocation, run.offset + run.width, run.image + run.width)
                            == (allocation, offset, image) =>
                    {
                        run.width += self.length;
                    }
                    _ => runs.push(Rectangle::row(allocation, offset, image, self.length)),
                }
            }
        }
        runs
    }

    /// One rectangle a page, its parts the rows; none where they are not evenly spaced in one
    /// allocation.
    fn by_page(&self, pages: &[u32]) -> Option<Vec<Rectangle>> {
        let (allocation, start) = self.segments[0];
        let pitch = self.segments.get(1)?.1.checked_sub(start)?;
        let even = self.segments.iter().zip(0_u64..);
        if even.clone().any(|(part, at)| *part != (allocation, start + at * pitch)) {
            return None;
        }
        let rectangle = |(page, at): (&u32, u64)| Rectangle {
            allocation,
            offset: start + u64::from(*page) * self.stride,
            pitch,
            image: at * self.image_bytes(),
            image_pitch: self.length,
            width: self.length,
            height: self.segments.len() as u64,
        };
        Some(pages.iter().zip(0..).map(rectangle).collect())
    }

    /// For each part one rectangle a run of pages, the pages its rows; none for a single page.
    fn by_layer(&self, pages: &[u32]) -> Option<Vec<Rectangle>> {
        let mut all = Vec::new();
        for (&(allocation, start), part) in self.segments.iter().zip(0_u64..) {
            let mut at = 0_u64;
            for run in pages.chunk_by(|page, next| page + 1 == *next) {
                all.push(Rectangle {
                    allocation,
                    offset: start + u64::from(run[0]) * self.stride,
                    pitch: self.stride,
                    image: at * self.image_bytes() + part * self.length,
                    image_pitch: self.image_bytes(),
                    width: self.length,
                    height: run.len() as u64,
                });
                at += run.len() as u64;
            }
        }
        (all.len() as u64 != self.segments.len() as u64 * pages.len() as u64).then_some(all)
    }

    /// All ways in which rectangles cover `pages`.
    pub(super) fn plans(&self, pages: &[u32]) -> Vec<Plan> {
        let runs = self.runs(pages);
        let joined = runs.len() < pages.len() * self.segments.len();
        let name = if joined || runs.len() == 1 { "memcpy_contiguous" } else { "memcpy_each" };
        // A small copy in one row takes another way to the GPU than one in two.
        let halves = match runs[..] {
            [run] => {
                let half = run.width / 2;
                let halves =
                    Rectangle { pitch: half, image_pitch: half, width: half, height: 2, ..run };
                Some(Plan { name: "2d_two_rows", rectangles: vec![halves] })
            }
            _ => None,
        };
        let named = |name| move |rectangles| Plan { name, rectangles };
        let mut plans = vec![Plan { name, rectangles: runs }];
        plans.extend(halves);
        plans.extend(self.by_page(pages).map(named("2d_a_page")));
        plans.extend(self.by_layer(pages).map(named("2d_a_layer")));
        plans
    }
}

/// A way to copy, by its name in the results.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Plan {
    /// Its name.
    pub(super) name: &'static str,
    /// All copies.
    pub(super) rectangles: Vec<Rectangle>,
}

/// One copy: `height` rows of `width` bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Rectangle {
    /// Of the device.
    pub(super) allocation: usize,
    /// First byte in the allocation.
    pub(super) offset: u64,
    /// From row to row in the allocation.
    pub(super) pitch: u64,
    /// First byte in the images, which lie one behind the other.
    pub(super) image: u64,
    /// From row to row in the images.
    pub(super) image_pitch: u64,
    /// Bytes of a row.
    pub(super) width: u64,
    /// Rows.
    pub(super) height: u64,
}

impl Rectangle {
    fn row(allocation: usize, offset: u64, image: u64, width: u64) -> Self {
        Self { allocation, offset, pitch: width, image, image_pitch: width, width, height: 1 }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashSet};

    use super::*;

    /// Goal: every plan copies every byte of every page to its place in the image, once. Method:
    /// all shapes, made smaller, against the definition of a page image.
    #[test]
    fn every_plan_covers_every_byte_once() {
        for shape in SHAPES {
            // Eight bytes a part keep their place in the geometry.
            let small = Shape { length: 8, pages: shape.pages.min(16), ..shape };
            let layout = Layout::of(&small);
            for pages in <[Vec<u32>; 2]>::from(layout.places(&small)) {
                let mut wanted = BTreeMap::new();
                for (&page, at) in pages.iter().zip(0_u64..) {
                    for (&(allocation, start), part) in layout.segments.iter().zip(0_u64..) {
                        for byte in 0..8 {
                            let image = at * layout.image_bytes() + part * 8 + byte;
                            let offset = start + u64::from(page) * layout.stride + byte;
                            assert!(offset < layout.allocations[allocation], "{small:?}");
                            wanted.insert(image, (allocation, offset));
                        }
                    }
                }
                assert_eq!(wanted.len() as u64, small.bytes());
                for plan in layout.plans(&pages) {
                    let mut found = BTreeMap::new();
                    for part in &plan.rectangles {
                        for (row, byte) in
                            (0..part.height).flat_map(|row| (0..part.width).map(move |b| (row, b)))
                        {
                            let image = part.image + row * part.image_pitch + byte;
                            let offset = part.offset + row * part.pitch + byte;
                            let twice = found.insert(image, (part.allocation, offset));
                            assert_eq!(twice, None, "{} of {small:?}", plan.name);
                        }
                    }
                    assert_eq!(found, wanted, "{} of {small:?}", plan.name);
                }
            }
        }
    }

    #[test]
    fn the_shapes_are_those_of_the_contract() {
        let of = |name: &str| SHAPES.into_iter().find(|shape| shape.name == name).unwrap();
        assert_eq!((of("4k").bytes(), of("4k").parts()), (4 * KIB, 1));
        assert_eq!((of("18m_contiguous").bytes(), of("18m_contiguous").parts()), (18 * MIB, 128));
        assert_eq!((of("18m_split").bytes(), of("18m_split").parts()), (18 * MIB, 9216));
        assert_eq!((of("9m_page").bytes(), of("9m_page").parts()), (9 * MIB, 72));
        for large in SHAPES.iter().filter(|shape| shape.name.starts_with("576m")) {
            assert_eq!((large.bytes(), large.both), (576 * MIB, true), "{large:?}");
        }
        let names: HashSet<_> = SHAPES.iter().map(|shape| shape.name).collect();
        assert_eq!(names.len(), SHAPES.len());
    }

    #[test]
    fn what_is_saved_and_what_is_restored_into_never_overlap() {
        for shape in SHAPES {
            let (from, to) = Layout::of(&shape).places(&shape);
            let all: HashSet<u32> = from.iter().chain(&to).copied().collect();
            assert_eq!(all.len(), 2 * shape.pages as usize, "{shape:?}");
            assert_eq!(shape.shuffled, !from.is_sorted() && from.len() > 1, "{shape:?}");
        }
    }
}
