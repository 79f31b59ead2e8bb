//! `Client::poll` with an operation outstanding and nothing ready: its time, its system calls, its
//! allocations.
//!
//! The polls run in a forked child under a seccomp filter that kills on any system call, so the
//! child cannot even say that it is done: it stores its numbers in shared memory and spins until
//! it is killed. Before every measurement another child shows that one system call is death.

use std::hint::spin_loop;
use std::io::{PipeWriter, Read, Write, pipe};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use orbitkv_engine::{Client, Deadline};
use rustix::process::{Signal, WaitStatus, getppid};

use crate::allocations::Count;
use crate::error::BenchError;
use crate::pages::{CHAIN_PAGES, PAGE_BYTES};
use crate::part::Polled;
use crate::process::Forked;
use crate::seccomp::kill_on_any_system_call;
use crate::session::{Session, wrong};
use crate::shared::{LINES, SharedLines};
use crate::stats::median;
use crate::ticks::{self, Ticks};

/// Lines of the mapping: how far the child is, what it counted, then one line a batch.
const STATE: usize = 0;
const ALLOCATIONS: usize = 1;
const ANSWERS: usize = 2;
const BATCHES: usize = 3;
const FIRST_BATCH: usize = 4;
/// States of the child.
const UNDER_FILTER: u64 = 1;
const DONE: u64 = 2;
/// Polls whose time is taken together.
const POLLS_PER_BATCH: u64 = 100_000;
/// Longest set-up and measurement of the child.
const PATIENCE: Duration = Duration::from_secs(60);
/// A query that is not answered in this time waits for the budget.
const WAITS: Duration = Duration::from_millis(20);
/// Queries beyond the budget after which the Manager must have let one wait.
const QUERIES_BEYOND: u64 = 2;
/// Deadline of the query that stays outstanding.
const OUTSTANDING: Duration = Duration::from_secs(600);

/// Measures one slice.
pub(crate) fn measure(socket: &Path, slice: Duration) -> Result<Polled, BenchError> {
    prove_the_filter()?;
    let ticks = Ticks::calibrate();
    let lines = SharedLines::new().map_err(BenchError::system("map shared memory"))?;
    let (mut complaints, mut complaint) = pipe().map_err(BenchError::system("make a pipe"))?;
    let mut child = Forked::spawn(|| match poll_under_filter(socket, slice, &lines, ticks) {
        Ok(never) => match never {},
        Err(error) => complain(&mut complaint, &error),
    })
    .map_err(BenchError::system("fork"))?;
    drop(complaint);
    let end = Instant::now() + PATIENCE + slice;
    let state = || lines.word(STATE).load(Ordering::Acquire);
    while state() != DONE {
        if let Some(status) = child.ended().map_err(BenchError::system("wait for a child"))? {
            if state() == UNDER_FILTER && is_killed_by_filter(status) {
                // Which call it was, nobody can say; one is too many.
                return Ok(Polled { ns: 0.0, syscalls: 1, allocations: 0 });
            }
            let mut text = String::new();
            complaints
                .read_to_string(&mut text)
                .map_err(BenchError::system("read from a child"))?;
            return Err(BenchError::Wrong(text.into()));
        }
        if Instant::now() > end {
            return Err(BenchError::Wrong("the polling child did not end".into()));
        }
        thread::sleep(Duration::from_millis(2));
    }
    drop(child);
    let word = |line| lines.word(line).load(Ordering::Acquire);
    if word(ANSWERS) != 0 {
        return Err(BenchError::Wrong("a poll that had to find nothing found an answer".into()));
    }
    let batches = FIRST_BATCH..FIRST_BATCH + word(BATCHES) as usize;
    let times: Vec<f64> =
        batches.map(|line| ticks.ns(word(line) as f64) / POLLS_PER_BATCH as f64).collect();
    Ok(Polled { ns: median(&times), syscalls: 0, allocations: word(ALLOCATIONS) })
}

fn complain(to: &mut PipeWriter, error: &BenchError) -> u8 {
    let _untold = write!(to, "{error}");
    1
}

/// A child that makes one system call under the filter must die of it.
fn prove_the_filter() -> Result<(), BenchError> {
    let mut child = Forked::spawn(|| match kill_on_any_system_call() {
        Ok(()) => u8::from(getppid().is_some()),
        Err(_) => 2,
    })
    .map_err(BenchError::system("fork"))?;
    match child.wait().map_err(BenchError::system("wait for a child"))? {
        Some(status) if is_killed_by_filter(status) => Ok(()),
        _ => Err(BenchError::Wrong(
            "a child that made a system call under the seccomp filter lived on".into(),
        )),
    }
}

fn is_killed_by_filter(status: WaitStatus) -> bool {
    status.terminating_signal() == Some(Signal::SYS.as_raw())
}

/// What cannot be returned.
enum Never {}

fn poll_under_filter(
    socket: &Path,
    slice: Duration,
    lines: &SharedLines,
    ticks: Ticks,
) -> Result<Never, BenchError> {
    let mut session = Session::attach(socket, 1)?;
    leave_one_outstanding(&mut session)?;
    let client = session.client();
    // The first poll may still find its way; the others are what an engine makes.
    poll_batch(client);
    let duration = ticks.of(slice);
    let count = Count::begin().ok_or_else(|| {
        BenchError::Wrong("this program's allocator does not count allocations".into())
    })?;
    kill_on_any_system_call().map_err(BenchError::system("install a seccomp filter"))?;
    lines.word(STATE).store(UNDER_FILTER, Ordering::Release);
    let begin = ticks::now();
    let (mut batches, mut answers) = (0, 0);
    while batches < LINES - FIRST_BATCH {
        let before = ticks::now();
        answers += poll_batch(client);
        let after = ticks::now();
        lines.word(FIRST_BATCH + batches).store(after - before, Ordering::Relaxed);
        batches += 1;
        if after - begin > duration {
            break;
        }
    }
    lines.word(ALLOCATIONS).store(count.so_far(), Ordering::Relaxed);
    lines.word(ANSWERS).store(answers, Ordering::Relaxed);
    lines.word(BATCHES).store(batches as u64, Ordering::Relaxed);
    lines.word(STATE).store(DONE, Ordering::Release);
    loop {
        spin_loop();
    }
}

/// Polls that found anything but nothing.
#[inline(never)]
fn poll_batch(client: &mut Client) -> u64 {
    let mut answers = 0;
    for _ in 0..POLLS_PER_BATCH {
        // Nothing to hide from the compiler: every poll loads words that another process may write.
        if !matches!(client.poll(), Ok(None)) {
            answers += 1;
        }
    }
    answers
}

/// Leases the whole query budget, so that one more demand query waits for it.
fn leave_one_outstanding(session: &mut Session) -> Result<(), BenchError> {
    let budget = session.client().limits().session_budget_bytes;
    let queries = budget / (u64::from(CHAIN_PAGES) * PAGE_BYTES) + QUERIES_BEYOND;
    for _ in 0..queries {
        session.ask(0, CHAIN_PAGES, Deadline::after(OUTSTANDING))?;
        session.client().submit().map_err(wrong("submit"))?;
        let Some(answer) = session.client().wait(WAITS).map_err(wrong("wait"))? else {
            return Ok(());
        };
        if answer.pages < CHAIN_PAGES {
            return Err(BenchError::Wrong(
                format!("a query was cut to {} pages instead of waiting", answer.pages).into(),
            ));
        }
    }
    Err(BenchError::Wrong(format!("{queries} leases fit in a budget of {budget} bytes").into()))
}
