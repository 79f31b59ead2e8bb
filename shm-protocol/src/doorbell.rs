//! Sleeping until a peer publishes, without a lost wake and without a system call when nobody
//! sleeps.
//!
//! Two words, each written by one side only. The waiter owns `sleep_generation` (odd = asleep),
//! the publisher owns `doorbell`, a counter and the futex word:
//!
//! ```text
//! waiter                                   publisher
//! seen = doorbell                          publish to the ring
//! sleep_generation += 1     (odd)          full fence                        wake-fence
//! full fence              wake-fence       g = sleep_generation
//! re-check the ring                        if g is odd and not the last woken:
//! futex wait on doorbell while == seen         doorbell += 1                 bell
//! sleep_generation += 1     (even)             futex wake
//! ```
//!
//! Of the two fences one comes first. If the publisher's, the re-check sees what was published; if
//! the waiter's, the publisher sees an odd generation and rings. A publisher rings once for one
//! sleep, so a batch costs at most one wake. Wakes are hints: every wait has a timeout, and the
//! ring says what there is. A hostile peer can make a waiter sleep to its timeout or a publisher
//! make one needless system call per batch, and no more.

use std::cell::Cell;
use std::time::Duration;

use crate::layout::WORD_BLOCK;
use crate::memory::{FenceSide, SharedMemory, WordReader, WordWriter, full_fence, futex_wait_many};
pub use crate::memory::{NAP_MAX, WAIT_WORDS_MAX, WaitEnd};

/// The waiting side of a doorbell.
#[derive(Debug)]
pub struct Sleeper {
    sleep_generation: WordWriter<u32>,
    doorbell: WordReader<u32>,
    /// What the word holds; never read back from shared memory.
    generation: Cell<u32>,
}

impl Sleeper {
    /// Joins the waiter's own generation word, which holds zero, and the publisher's doorbell.
    pub fn new(sleep_generation: WordWriter<u32>, doorbell: WordReader<u32>) -> Self {
        Self { sleep_generation, doorbell, generation: Cell::new(0) }
    }

    /// Announces a sleep and returns the doorbell to pass to [`wait`](Self::wait). The caller
    /// then looks at its rings once more, waits only if they are empty, and calls
    /// [`end`](Self::end) in either case.
    pub fn begin(&self) -> u32 {
        // `bell`: before the sleep is announced, so that a ring in answer to it is not `seen`.
        let seen = self.doorbell.load_acquire();
        debug_assert!(self.generation.get().is_multiple_of(2), "begin() twice without end()");
        self.step();
        // `wake-fence`
        full_fence(FenceSide::Waiter);
        seen
    }

    /// Whether a sleep was announced and not ended.
    pub fn is_announced(&self) -> bool {
        !self.generation.get().is_multiple_of(2)
    }

    /// Sleeps while the doorbell holds `seen`, at most `timeout`.
    pub fn wait(&self, seen: u32, timeout: Duration) -> WaitEnd {
        debug_assert!(!self.generation.get().is_multiple_of(2), "wait() without begin()");
        self.doorbell.futex_wait(seen, timeout)
    }

    /// Ends the announced sleep, so that publishers make no system calls any more.
    pub fn end(&self) {
        debug_assert!(!self.generation.get().is_multiple_of(2), "end() without begin()");
        self.step();
    }

    fn step(&self) {
        let next = self.generation.get().wrapping_add(1);
        self.generation.set(next);
        // Relaxed: ordered by the fence in `begin`, and by nothing in `end`, where a publisher that
        // still sees the sleep makes one needless system call.
        self.sleep_generation.store_relaxed(next);
    }
}

/// Sleeps until one of several doorbells rings, at most `timeout`: [`Sleeper::wait`] over many.
/// Each pair holds what [`Sleeper::begin`] returned for it.
///
/// Where the kernel has no `futex_waitv` this naps for at most [`NAP_MAX`] and says so by
/// [`WaitEnd::Napped`].
///
/// # Panics
/// When there are no sleepers, or more than [`WAIT_WORDS_MAX`].
pub fn wait_many(sleepers: &[(&Sleeper, u32)], timeout: Duration) -> WaitEnd {
    futex_wait_many(sleepers.iter().map(|(sleeper, seen)| (&sleeper.doorbell, *seen)), timeout)
}

/// The publishing side of a doorbell.
#[derive(Debug)]
pub struct Ringer {
    doorbell: WordWriter<u32>,
    sleep_generation: WordReader<u32>,
    /// What the doorbell holds; never read back from shared memory.
    rings: u32,
    /// Generation that was last woken; zero is even, so never asleep.
    last_woken: u32,
}

impl Ringer {
    /// Joins the publisher's own doorbell, which holds zero, and the waiter's generation word.
    pub fn new(doorbell: WordWriter<u32>, sleep_generation: WordReader<u32>) -> Self {
        Self { doorbell, sleep_generation, rings: 0, last_woken: 0 }
    }

    /// Wakes the waiter if it sleeps and was not woken from this sleep yet. Call it after
    /// publishing, once for a batch. Returns whether it made the system call.
    #[inline]
    pub fn ring(&mut self) -> bool {
        // `wake-fence`
        full_fence(FenceSide::Publisher);
        let generation = self.sleep_generation.load_relaxed();
        if generation.is_multiple_of(2) || generation == self.last_woken {
            return false;
        }
        self.wake(generation);
        true
    }

    #[cold]
    fn wake(&mut self, generation: u32) {
        self.last_woken = generation;
        self.rings = self.rings.wrapping_add(1);
        // `bell`
        self.doorbell.store_release(self.rings);
        self.doorbell.futex_wake();
    }
}

/// Offset of the doorbell in the memory of a [`ControlBell`].
const CONTROL_DOORBELL: usize = 0;
/// Offset of the generation last woken, which the ringers share.
const CONTROL_LAST_WOKEN: usize = 8;
/// Offset of the sleep generation, in a block of its own: the sleeper writes it.
const CONTROL_SLEEP_GENERATION: usize = WORD_BLOCK;

/// A doorbell inside one process: one sleeper, any number of ringers on any threads.
///
/// Its [`sleeper`](Self::sleeper) joins the peers' in [`wait_many`].
#[derive(Debug)]
pub struct ControlBell {
    sleeper: Sleeper,
    ringer: ControlRinger,
}

impl ControlBell {
    /// A bell that nobody has rung.
    pub fn new() -> Self {
        let memory = SharedMemory::heap(2 * WORD_BLOCK);
        Self {
            sleeper: Sleeper::new(
                memory.word_writer(CONTROL_SLEEP_GENERATION),
                memory.word_reader(CONTROL_DOORBELL),
            ),
            ringer: ControlRinger {
                doorbell: memory.word_writer(CONTROL_DOORBELL),
                sleep_generation: memory.word_reader(CONTROL_SLEEP_GENERATION),
                last_woken: memory.word_writer(CONTROL_LAST_WOKEN),
            },
        }
    }

    /// The waiting side.
    pub fn sleeper(&self) -> &Sleeper {
        &self.sleeper
    }

    /// Another ringer of this bell.
    pub fn ringer(&self) -> ControlRinger {
        self.ringer.clone()
    }
}

impl Default for ControlBell {
    fn default() -> Self {
        Self::new()
    }
}

/// A ringing side of a [`ControlBell`]; clones share the gate.
#[derive(Clone, Debug)]
pub struct ControlRinger {
    doorbell: WordWriter<u32>,
    sleep_generation: WordReader<u32>,
    last_woken: WordWriter<u32>,
}

impl ControlRinger {
    /// Wakes the sleeper if it sleeps and nobody woke it from this sleep yet. Call it after
    /// publishing. Returns whether it made the system call.
    #[inline]
    pub fn ring(&self) -> bool {
        // `wake-fence`
        full_fence(FenceSide::Publisher);
        let generation = self.sleep_generation.load_relaxed();
        if generation.is_multiple_of(2) {
            return false;
        }
        // `bell-gate`: whoever changes it to this generation owes the wake. A ringer that was delayed
        // here may put an older generation back: a needless wake, never one too few.
        if self.last_woken.swap(generation) == generation {
            return false;
        }
        // `bell`
        self.doorbell.increment();
        self.doorbell.futex_wake();
        true
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[derive(Clone, Copy)]
    enum Step {
        Begin,
        /// By this ringer.
        Ring(usize),
        Wait,
        End,
    }

    /// What anyone would write in one thread.
    #[derive(Default)]
    struct Model {
        /// Doorbell that `begin` returned.
        asleep: Option<u32>,
        rung: bool,
    }

    /// Runs every history of `length` steps; those that no caller may make are cut short.
    fn check_all(length: u32, steps: &[Step], mut bell: impl FnMut() -> Bell) {
        for mut history in 0..(steps.len() as u64).pow(length) {
            let mut bell = bell();
            let mut model = Model::default();
            for _ in 0..length {
                let step = steps[(history % steps.len() as u64) as usize];
                history /= steps.len() as u64;
                match (step, model.asleep) {
                    (Step::Begin, None) => {
                        model = Model { asleep: Some(bell.sleeper.begin()), rung: false };
                    }
                    (Step::Ring(by), asleep) => {
                        let wakes = asleep.is_some() && !model.rung;
                        assert_eq!((bell.ring)(by), wakes, "one wake a sleep");
                        model.rung |= wakes;
                    }
                    (Step::Wait, Some(seen)) => {
                        let end = bell.sleeper.wait(seen, Duration::ZERO);
                        let expected = if model.rung { WaitEnd::Rung } else { WaitEnd::TimedOut };
                        assert_eq!(end, expected);
                    }
                    (Step::End, Some(_)) => {
                        bell.sleeper.end();
                        model.asleep = None;
                    }
                    _ => break,
                }
                assert_eq!(bell.sleeper.is_announced(), model.asleep.is_some());
            }
        }
    }

    struct Bell {
        sleeper: Sleeper,
        ring: Box<dyn FnMut(usize) -> bool>,
    }

    /// Both words wrap within the first steps.
    const GENERATION: u32 = u32::MAX - 1;
    const RINGS: u32 = u32::MAX - 1;

    #[test]
    fn all_short_histories_ring_once_a_sleep() {
        let steps = [Step::Begin, Step::Ring(0), Step::Wait, Step::End];
        check_all(8, &steps, || {
            let memory = SharedMemory::heap(2 * WORD_BLOCK);
            memory.write(0, RINGS);
            memory.write(WORD_BLOCK, GENERATION);
            let sleeper = Sleeper {
                sleep_generation: memory.word_writer(WORD_BLOCK),
                doorbell: memory.word_reader(0),
                generation: Cell::new(GENERATION),
            };
            let mut ringer = Ringer {
                doorbell: memory.word_writer(0),
                sleep_generation: memory.word_reader(WORD_BLOCK),
                rings: RINGS,
                last_woken: GENERATION - 1,
            };
            Bell { sleeper, ring: Box::new(move |_| ringer.ring()) }
        });
    }

    #[test]
    fn all_short_histories_of_two_ringers_ring_once_a_sleep() {
        let steps = [Step::Begin, Step::Ring(0), Step::Ring(1), Step::Wait, Step::End];
        check_all(7, &steps, || {
            let ControlBell { sleeper, ringer } = ControlBell::new();
            sleeper.generation.set(GENERATION);
            sleeper.sleep_generation.store_relaxed(GENERATION);
            ringer.doorbell.store_relaxed(RINGS);
            ringer.last_woken.store_relaxed(GENERATION - 1);
            let ringers = [ringer.clone(), ringer];
            Bell { sleeper, ring: Box::new(move |by| ringers[by].ring()) }
        });
    }
}
