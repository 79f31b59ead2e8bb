//! The census of all files beside a Manager that serves: a thread a file reads its footers through
//! memory of its own, and one joins what they find. A file that cannot be read is left out.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};

use super::device::{Notify, spawn};
use super::engine::{EngineSpec, Resolved};
use super::error::SsdError;
use super::file::SsdFile;
use super::format::{Forgotten, Superblock};
use super::recover::{Census, SlotCounts};
use super::sweep::{ASIDE_BYTES, ScanEnd, ScanProgress, ScanWatch, UNREAD_MAX, scan, slots_of};
use super::worker::Control;
use crate::core::{GENERATIONS_END, IoFault, Recovered};
use crate::image::{HeapImages, ImageMemory};

/// A file that gives no footer for so long is left out.
const STALL_MAX: Duration = Duration::from_secs(30);
/// Pause between two looks at whether footers still come.
const STALL_LOOK: Duration = Duration::from_secs(1);
/// Generations left out when some footers could not be read: more than any drive lives to write, so
/// that nothing in those slots is younger than what is written or forgotten from now on.
const UNREAD_GENERATIONS: u64 = 1 << 40;

/// How the search of one file for pages stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ScanState {
    /// Footers are being read.
    Running,
    /// Every slot was looked at.
    Complete,
    /// The file could not be read.
    Failed,
    /// It gave no footer for 30 s.
    Stalled,
}

impl ScanState {
    /// Whether the file is left out, in this life.
    pub const fn is_lost(self) -> bool {
        matches!(self, Self::Failed | Self::Stalled)
    }
}

/// How far the search of one file for pages is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScanStatus {
    /// How it stands.
    pub state: ScanState,
    /// Slots there are.
    pub slots: u64,
    /// Slots that were looked at.
    pub scanned: u64,
    /// Bytes that were read for that.
    pub read_bytes: u64,
}

/// What was on SSD.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Recovery {
    /// The newest slot of each page that is neither forgotten nor retired; its ancestors may be in
    /// no slot. Those of files that were left out are not among them.
    pub found: Recovered,
    /// Some slots could not be read, so that generations go on far above all that was seen. Every
    /// file is told so before anything is written: what they hold is above no later start's base.
    pub has_jumped: bool,
    /// Namespaces whose older pages some slot may still hold.
    pub forgotten: Vec<Forgotten>,
    /// Those of which no slot holds any more; their records go.
    pub needless: Vec<Forgotten>,
    /// What the slots held.
    pub counts: SlotCounts,
    /// How the search of each file ended, in configuration order.
    pub ends: Vec<ScanState>,
    /// How long it took.
    pub elapsed: Duration,
}

/// A census under way.
pub(crate) struct Survey {
    progress: Vec<Arc<ScanProgress>>,
    ends: Vec<ScanState>,
    found: Receiver<Recovery>,
    began: Instant,
    /// The highest generation that a file has recorded.
    known: u64,
    forgotten: Arc<[Forgotten]>,
    control: Arc<Control>,
}

/// What a survey needs of a tier.
pub(crate) struct SurveyParts {
    pub(crate) files: Vec<(Arc<SsdFile>, Superblock)>,
    pub(crate) forgotten: Vec<Forgotten>,
    pub(crate) resolved: Resolved,
    pub(crate) control: Arc<Control>,
    pub(crate) notify: Notify,
    pub(crate) alive: Sender<()>,
}

impl Survey {
    /// Starts the threads. `notify` is called when [`poll`](Self::poll) has something.
    pub(crate) fn start(parts: SurveyParts) -> Result<Self, SsdError> {
        let began = Instant::now();
        let (tell, told) = channel();
        let (hand_over, found) = channel();
        let forgotten: Arc<[Forgotten]> = parts.forgotten.into();
        let mut progress = Vec::new();
        let mut paths = Vec::new();
        let known = recorded(parts.files.iter().map(|(_, state)| state));
        for (number, (file, state)) in parts.files.into_iter().enumerate() {
            let seen = Arc::new(ScanProgress::default());
            seen.slots.store(slots_of(&state), Ordering::Relaxed);
            progress.push(seen.clone());
            paths.push(file.path().to_owned());
            let look = Look {
                device: number as u16,
                file,
                state,
                forgotten: forgotten.clone(),
                progress: seen,
                control: parts.control.clone(),
            };
            let (tell, resolved) = (tell.clone(), parts.resolved);
            spawn("ssd-scan", &parts.alive, move || {
                let (device, end) = (look.device, look.run(resolved));
                // Nobody listens to what comes too late.
                let _ = tell.send((device, end));
            })?;
        }
        drop(tell);
        let control = parts.control;
        let join = Join {
            progress: progress.clone(),
            paths,
            known,
            forgotten: forgotten.clone(),
            control: control.clone(),
        };
        let notify = parts.notify;
        spawn("ssd-census", &parts.alive, move || {
            if let Some(recovery) = join.run(&told, began) {
                let _ = hand_over.send(recovery);
                notify();
            }
        })?;
        let ends = vec![ScanState::Running; progress.len()];
        Ok(Self { progress, ends, found, began, known, forgotten, control })
    }

    /// What was found, once, when every file was read or left out.
    pub(crate) fn poll(&mut self) -> Option<Recovery> {
        let recovery = match self.found.try_recv() {
            Ok(recovery) => recovery,
            Err(TryRecvError::Disconnected) if self.is_broken() => self.nothing(),
            Err(_) => return None,
        };
        self.ends.clone_from(&recovery.ends);
        Some(recovery)
    }

    /// Whether what was to tell has gone without a word.
    fn is_broken(&self) -> bool {
        self.ends.contains(&ScanState::Running) && !self.control.is_stopping()
    }

    /// What is known then: every file is left out.
    fn nothing(&self) -> Recovery {
        tracing::error!("the search of the ssd files broke off, all are off until the next start");
        let ends = vec![ScanState::Failed; self.ends.len()];
        conclude(Census::default(), ends, self.known, &self.forgotten, self.began.elapsed())
    }

    /// Every file, in configuration order.
    pub(crate) fn status(&self) -> impl Iterator<Item = ScanStatus> + '_ {
        self.progress.iter().zip(&self.ends).map(|(seen, &state)| ScanStatus {
            state,
            slots: seen.slots.load(Ordering::Relaxed),
            scanned: seen.scanned.load(Ordering::Relaxed),
            read_bytes: seen.bytes.load(Ordering::Relaxed),
        })
    }
}

/// The search of one file.
struct Look {
    device: u16,
    file: Arc<SsdFile>,
    state: Superblock,
    forgotten: Arc<[Forgotten]>,
    progress: Arc<ScanProgress>,
    control: Arc<Control>,
}

/// Why a file was not searched to its end.
#[derive(Debug)]
enum Unseen {
    Stopped,
    Failed(String),
}

impl Look {
    fn run(&self, resolved: Resolved) -> Result<Census, Unseen> {
        let memory: Arc<dyn ImageMemory> = Arc::new(HeapImages::new(ASIDE_BYTES));
        let engine = EngineSpec::for_scan(resolved, self.file.clone(), memory.clone());
        let engine = engine.map_err(|error| Unseen::Failed(error.to_string()))?;
        let mut census = Census::default();
        let watch = ScanWatch {
            progress: &self.progress,
            stops: &|| self.control.is_stopping(),
            unread_max: Some(UNREAD_MAX),
        };
        let found = scan(engine, &*memory, &self.state, self.device, &watch, |slot, found, _| {
            census.take(&self.state, &self.forgotten, slot, found);
        });
        match found {
            Ok(()) => Ok(census),
            Err(ScanEnd::Stopped) => Err(Unseen::Stopped),
            Err(ScanEnd::NoRoom) => Err(Unseen::Failed(SsdError::NO_ROOM.to_string())),
            Err(ScanEnd::Failed(fault)) => Err(Unseen::Failed(match fault {
                IoFault::Errno(errno) => {
                    format!("reads fail: {}", std::io::Error::from_raw_os_error(errno))
                }
                _ => "reads come short".to_owned(),
            })),
        }
    }
}

/// What joins the searches of all files.
struct Join {
    progress: Vec<Arc<ScanProgress>>,
    paths: Vec<PathBuf>,
    /// The highest generation that a file has recorded, also one that cannot be searched.
    known: u64,
    forgotten: Arc<[Forgotten]>,
    control: Arc<Control>,
}

type Told = Receiver<(u16, Result<Census, Unseen>)>;

impl Join {
    /// `None` when the tier stops first.
    fn run(self, told: &Told, began: Instant) -> Option<Recovery> {
        let mut ends = vec![ScanState::Running; self.paths.len()];
        let mut moved: Vec<_> = self.progress.iter().map(|seen| (scanned(seen), began)).collect();
        let mut all = Census::default();
        while ends.contains(&ScanState::Running) {
            match told.recv_timeout(STALL_LOOK) {
                Ok((device, end)) => {
                    let place = usize::from(device);
                    if ends[place] != ScanState::Running {
                        continue;
                    }
                    ends[place] = match end {
                        Ok(census) => {
                            all.merge(census);
                            ScanState::Complete
                        }
                        Err(Unseen::Stopped) => return None,
                        Err(Unseen::Failed(reason)) => {
                            self.leave_out(place, &reason);
                            ScanState::Failed
                        }
                    };
                }
                Err(RecvTimeoutError::Timeout) => {}
                // Nobody is left who could.
                Err(RecvTimeoutError::Disconnected) => {
                    for (place, end) in ends.iter_mut().enumerate() {
                        if *end == ScanState::Running {
                            self.leave_out(place, "its search broke off");
                            *end = ScanState::Failed;
                        }
                    }
                }
            }
            if self.control.is_stopping() {
                return None;
            }
            let now = Instant::now();
            for (place, (last, since)) in moved.iter_mut().enumerate() {
                let seen = scanned(&self.progress[place]);
                if seen != *last {
                    (*last, *since) = (seen, now);
                } else if ends[place] == ScanState::Running && now - *since >= STALL_MAX {
                    self.leave_out(place, "no read comes back");
                    ends[place] = ScanState::Stalled;
                }
            }
        }
        Some(self.conclude(all, ends, began))
    }

    fn leave_out(&self, place: usize, reason: &str) {
        let path = self.paths[place].display();
        let scanned = scanned(&self.progress[place]);
        let slots = self.progress[place].slots.load(Ordering::Relaxed);
        tracing::error!(
            %path,
            slots,
            scanned,
            "the pages of an ssd file cannot be found, it is off until the next start: {reason}"
        );
    }

    fn conclude(self, all: Census, ends: Vec<ScanState>, began: Instant) -> Recovery {
        let elapsed = began.elapsed();
        let slots: u64 = self.progress.iter().map(|seen| scanned(seen)).sum();
        let bytes = self.progress.iter().map(|seen| seen.bytes.load(Ordering::Relaxed));
        let bytes: u64 = bytes.sum();
        let SlotCounts { valid, torn, stale, empty, .. } = all.counts;
        tracing::info!(
            slots,
            read_bytes = bytes,
            ?elapsed,
            valid,
            torn,
            stale,
            empty,
            "ssd slots were read"
        );
        conclude(all, ends, self.known, &self.forgotten, elapsed)
    }
}

/// What follows from the searches of all files, of which the highest recorded generation is `known`.
fn conclude(
    all: Census,
    ends: Vec<ScanState>,
    known: u64,
    forgotten: &[Forgotten],
    elapsed: Duration,
) -> Recovery {
    let lost = ends.iter().enumerate().filter(|(_, end)| end.is_lost());
    let lost: Vec<u16> = lost.map(|(number, _)| number as u16).collect();
    let is_needed = |entry: &Forgotten| !lost.is_empty() || all.still_needs(entry);
    let (forgotten, needless) = forgotten.iter().copied().partition(is_needed);
    let mut highest = known.max(all.highest_generation);
    let has_jumped = all.has_unread() || !lost.is_empty();
    if has_jumped {
        highest = highest.saturating_add(UNREAD_GENERATIONS).min(GENERATIONS_END);
    }
    let counts = all.counts;
    let (unread, pages) = all.into_parts();
    let found = Recovered::new(pages, highest, lost).with_unread(unread);
    Recovery { found, has_jumped, forgotten, needless, counts, ends, elapsed }
}

/// The highest generation that superblocks tell of.
fn recorded<'a>(states: impl Iterator<Item = &'a Superblock>) -> u64 {
    let of_one = |state: &Superblock| {
        let forgotten = state.forgotten.iter().map(|entry| entry.generation);
        forgotten.fold(state.generation.max(state.generation_floor), u64::max)
    };
    states.map(of_one).max().unwrap_or(0)
}

fn scanned(progress: &ScanProgress) -> u64 {
    progress.scanned.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ssd::format::FileId;

    fn state(generation: u64, floor: u64, forgotten: u64) -> Superblock {
        let mut state = Superblock::new(FileId([1; 16]), 64 << 20, 0).unwrap();
        (state.generation, state.generation_floor) = (generation, floor);
        state.forget([1; 32], forgotten);
        state
    }

    /// What two files of these states give, of which the second cannot be searched.
    fn half_lost(states: &[Superblock; 2]) -> Recovery {
        let (tell, told) = channel();
        tell.send((0, Ok(Census::default()))).unwrap();
        tell.send((1, Err(Unseen::Failed("for a test".to_owned())))).unwrap();
        let join = Join {
            progress: vec![Arc::default(), Arc::default()],
            paths: vec!["first".into(), "second".into()],
            known: recorded(states.iter()),
            forgotten: Vec::new().into(),
            control: Arc::default(),
        };
        join.run(&told, Instant::now()).unwrap()
    }

    #[test]
    fn a_file_that_cannot_be_searched_still_tells_which_generations_are_given() {
        let low = state(5, 6, 7);
        for high in [state(900, 6, 7), state(5, 900, 7), state(5, 6, 900)] {
            let found = half_lost(&[low.clone(), high]);
            assert_eq!(found.ends, [ScanState::Complete, ScanState::Failed]);
            assert!(found.has_jumped);
            assert_eq!(found.found.last_generation(), 900 + UNREAD_GENERATIONS);
        }
    }

    #[test]
    fn a_search_that_breaks_off_leaves_its_file_out() {
        let (tell, told) = channel();
        tell.send((1, Ok(Census::default()))).unwrap();
        drop(tell);
        let join = Join {
            progress: vec![Arc::default(), Arc::default()],
            paths: vec!["first".into(), "second".into()],
            known: 3,
            forgotten: Vec::new().into(),
            control: Arc::default(),
        };
        let found = join.run(&told, Instant::now()).unwrap();
        assert_eq!(found.ends, [ScanState::Failed, ScanState::Complete]);
        assert_eq!(found.found.last_generation(), 3 + UNREAD_GENERATIONS);
    }

    #[test]
    fn a_census_that_breaks_off_leaves_all_files_out_once() {
        let (hand_over, found) = channel();
        let mut survey = Survey {
            progress: vec![Arc::default(), Arc::default()],
            ends: vec![ScanState::Running; 2],
            found,
            began: Instant::now(),
            known: 3,
            forgotten: Vec::new().into(),
            control: Arc::default(),
        };
        assert_eq!(survey.poll(), None);
        drop(hand_over);
        let found = survey.poll().unwrap();
        assert_eq!(found.ends, [ScanState::Failed; 2]);
        assert_eq!(found.found.last_generation(), 3 + UNREAD_GENERATIONS);
        assert_eq!(survey.poll(), None);
        assert!(survey.status().all(|scan| scan.state.is_lost()));
    }
}
