//! The rectangles of one launch of the kernel, as it reads them from its parameters.

use super::plan::Rect;
use crate::core::Direction;

/// Most rectangles of a launch: as many as fit into 4 KiB, which every driver takes as parameters.
pub(super) const RECTS: usize = 112;
/// Units of a piece, which a warp moves at once.
const UNITS: u32 = 256;
/// Most bytes of a rectangle, whose units the kernel numbers in 32 bits.
const RECT_BYTES_MAX: u64 = 1 << 31;

/// `Table` of kernel/copy_rows.cu is the same.
#[derive(Clone, Debug)]
#[repr(C)]
pub(super) struct Table {
    device: [u64; RECTS],
    host: [u64; RECTS],
    width: [u32; RECTS],
    rows: [u32; RECTS],
    device_pitch: [u32; RECTS],
    host_pitch: [u32; RECTS],
    /// Pieces up to the end of each rectangle.
    end: [u32; RECTS],
    count: u32,
    to_host: u32,
}

const _: () = assert!(size_of::<Table>() == 4040 && size_of::<Table>() <= 4096);

/// Bytes that the kernel moves at once, as `unit` of kernel/copy_rows.cu picks them: what addresses,
/// pitches and width are multiples of.
pub(super) fn unit_bytes(rect: &Rect) -> u64 {
    let odd = rect.device | rect.host | rect.device_pitch | rect.host_pitch | rect.width;
    match odd {
        odd if odd.is_multiple_of(16) => 16,
        odd if odd.is_multiple_of(4) => 4,
        _ => 1,
    }
}

impl Table {
    pub(super) fn new() -> Self {
        Self {
            device: [0; RECTS],
            host: [0; RECTS],
            width: [0; RECTS],
            rows: [0; RECTS],
            device_pitch: [0; RECTS],
            host_pitch: [0; RECTS],
            end: [0; RECTS],
            count: 0,
            to_host: 0,
        }
    }

    /// Without rectangles, for copies in `direction`.
    pub(super) fn clear(&mut self, direction: Direction) {
        self.count = 0;
        self.to_host = u32::from(direction == Direction::Save);
    }

    /// Adds a rectangle; false where the table is full or the rectangle too large for the kernel.
    pub(super) fn push(&mut self, rect: &Rect) -> bool {
        let at = self.count as usize;
        let fields = [rect.width, rect.rows, rect.device_pitch, rect.host_pitch];
        let [Ok(width), Ok(rows), Ok(device_pitch), Ok(host_pitch)] = fields.map(u32::try_from)
        else {
            return false;
        };
        if at == RECTS || rect.bytes() > RECT_BYTES_MAX {
            return false;
        }
        let pieces = (rect.bytes() / unit_bytes(rect)).div_ceil(UNITS.into()) as u32;
        let Some(end) = self.pieces().checked_add(pieces) else { return false };
        (self.device[at], self.host[at]) = (rect.device, rect.host);
        (self.width[at], self.rows[at]) = (width, rows);
        (self.device_pitch[at], self.host_pitch[at]) = (device_pitch, host_pitch);
        self.end[at] = end;
        self.count += 1;
        true
    }

    /// Pieces of all rectangles.
    pub(super) fn pieces(&self) -> u32 {
        self.count.checked_sub(1).map_or(0, |last| self.end[last as usize])
    }
}

#[cfg(test)]
impl Table {
    pub(super) fn direction(&self) -> Direction {
        if self.to_host == 1 { Direction::Save } else { Direction::Restore }
    }

    /// Does piece `at` as the kernel does: `copy` is told the device and the host address of each
    /// unit, and its bytes.
    pub(super) fn each_unit(&self, at: u32, mut copy: impl FnMut(u64, u64, u64)) {
        let rect = self.end[..self.count as usize].partition_point(|end| *end <= at);
        let piece = at - rect.checked_sub(1).map_or(0, |before| self.end[before]);
        let (rect, rows) = (self.rect(rect), self.rows[rect]);
        let unit = unit_bytes(&rect);
        let per_row = (rect.width / unit) as u32;
        for number in (piece * UNITS..(piece + 1) * UNITS).take_while(|at| *at < per_row * rows) {
            let (row, in_row) = (u64::from(number / per_row), u64::from(number % per_row) * unit);
            let device = rect.device + row * rect.device_pitch + in_row;
            copy(device, rect.host + row * rect.host_pitch + in_row, unit);
        }
    }

    fn rect(&self, at: usize) -> Rect {
        Rect {
            device: self.device[at],
            host: self.host[at],
            width: self.width[at].into(),
            rows: self.rows[at].into(),
            device_pitch: self.device_pitch[at].into(),
            host_pitch: self.host_pitch[at].into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::ProptestConfig;
    use proptest::{collection, prop_assert, prop_assert_eq, proptest};

    use super::*;

    fn rect(width: u64, rows: u64) -> Rect {
        Rect { device: 0, host: 0, width, rows, device_pitch: width, host_pitch: width }
    }

    #[test]
    fn the_unit_divides_everything() {
        let even =
            Rect { device: 160, host: 16, width: 48, rows: 3, device_pitch: 64, host_pitch: 48 };
        assert_eq!(unit_bytes(&even), 16);
        assert_eq!(unit_bytes(&Rect { host: 20, ..even }), 4);
        assert_eq!(unit_bytes(&Rect { device: 164, ..even }), 4);
        assert_eq!(unit_bytes(&Rect { width: 40, ..even }), 4);
        assert_eq!(unit_bytes(&Rect { host_pitch: 50, ..even }), 1);
        assert_eq!(unit_bytes(&Rect { device_pitch: 65, ..even }), 1);
        assert_eq!(unit_bytes(&Rect { rows: 1, device_pitch: 0, host_pitch: 0, ..even }), 16);
    }

    #[test]
    fn what_does_not_fit_is_not_taken() {
        let mut table = Table::new();
        assert!(!table.push(&rect(RECT_BYTES_MAX + 1, 1)));
        assert!(!table.push(&Rect { host_pitch: 1 << 32, ..rect(16, 2) }));
        for number in 1..=RECTS as u32 {
            assert!(table.push(&rect(4096, 1)));
            assert_eq!(table.pieces(), number);
        }
        assert!(!table.push(&rect(4096, 1)));
        table.clear(Direction::Save);
        assert_eq!((table.pieces(), table.direction()), (0, Direction::Save));
        // 2^31 pieces, then as many again, which is one too many to count.
        assert!(table.push(&rect(RECT_BYTES_MAX, 1)));
        assert_eq!(u64::from(table.pieces()), RECT_BYTES_MAX / 16 / 256);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, cases: 300, ..ProptestConfig::default() })]

        /// The pieces of a table are the bytes of its rectangles, each once.
        #[test]
        fn pieces_are_every_byte_once(
            shapes in collection::vec((1..600u64, 1..9u64, 0..40u64, 0..40u64, 0..3u32), 1..20),
        ) {
            let mut table = Table::new();
            let (mut wanted, mut free) = (vec![], 0);
            for (width, rows, device_gap, host_gap, unit) in shapes {
                let unit = [1, 4, 16][unit as usize];
                let [width, device_gap, host_gap] = [width, device_gap, host_gap].map(|it| it * unit);
                free += 16;
                let rect = Rect {
                    device: free * 16,
                    host: (1 << 40) + free * 16,
                    width,
                    rows,
                    device_pitch: width + device_gap,
                    host_pitch: width + host_gap,
                };
                free += (rows * (width + device_gap + host_gap)).div_ceil(16);
                prop_assert!(unit_bytes(&rect) >= unit);
                prop_assert!(table.push(&rect));
                wanted.extend((0..rows).flat_map(|row| (0..width).map(move |byte| {
                    (rect.device + row * rect.device_pitch + byte, rect.host + row * rect.host_pitch + byte)
                })));
            }
            let mut found = vec![];
            for piece in 0..table.pieces() {
                let before = found.len();
                table.each_unit(piece, |device, host, bytes| {
                    found.extend((0..bytes).map(|byte| (device + byte, host + byte)));
                });
                prop_assert!(found.len() > before, "an empty piece");
            }
            found.sort_unstable();
            wanted.sort_unstable();
            prop_assert_eq!(found, wanted);
        }
    }
}
