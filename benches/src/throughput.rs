//! A closed loop of queries, as an engine makes them: the next query and the release of the last
//! lease go in one submit.

use std::time::Duration;

use orbitkv_engine::{Completion, Deadline, Operation, RequestKind};

use crate::error::BenchError;
use crate::part::{Rate, Wait};
use crate::session::{Session, check_release, wrong};
use crate::stats::Samples;
use crate::ticks::{self, Ticks};

/// Share of the time that passes before anything counts.
const WARM_UP: u32 = 5;

/// A query under way.
struct Asked {
    operation: Operation,
    at: u64,
}

/// Keeps `depth` queries of one page under way for a slice.
pub(crate) fn measure(
    session: &mut Session,
    depth: u32,
    slice: Duration,
    samples: &mut Samples,
) -> Result<Rate, BenchError> {
    let ticks = Ticks::calibrate();
    samples.clear();
    let mut loops = Loop { session, asked: Vec::with_capacity(depth as usize), chain: 0 };
    let begin = ticks::now();
    let (warm, end) = (begin + ticks.of(slice / WARM_UP), begin + ticks.of(slice));
    for _ in 0..depth {
        loops.ask()?;
    }
    let (mut counted, mut first, mut last) = (0_u64, None, begin);
    while let Some(answer) = loops.next()? {
        let now = ticks::now();
        let Some(taken) = loops.took(&answer, now)? else { continue };
        let more = now <= end;
        loops.answered(&answer, more)?;
        if now > warm && more {
            // The first one counted only starts the clock.
            if first.is_some() {
                counted += 1;
                samples.add(taken);
            }
            first.get_or_insert(now);
            last = now;
        }
    }
    let seconds = ticks.ns((last - first.unwrap_or(last)) as f64) / 1e9;
    let per_second = if counted > 0 { counted as f64 / seconds } else { 0.0 };
    Ok(Rate { per_second, latency: samples.summary(ticks, 1) })
}

struct Loop<'a> {
    session: &'a mut Session,
    asked: Vec<Asked>,
    chain: usize,
}

impl Loop<'_> {
    fn ask(&mut self) -> Result<(), BenchError> {
        let at = ticks::now();
        self.chain = (self.chain + 1) % self.session.chains();
        let operation = self.session.ask(self.chain, 1, Deadline::DEFAULT)?;
        self.asked.push(Asked { operation, at });
        Ok(())
    }

    /// The next completion; none once nothing is outstanding. What is staged is published only
    /// when nothing more is ready: one submit, one wake.
    fn next(&mut self) -> Result<Option<Completion>, BenchError> {
        let client = self.session.client();
        if let Some(answer) = client.poll().map_err(wrong("poll"))? {
            return Ok(Some(answer));
        }
        if client.outstanding() == 0 {
            return Ok(None);
        }
        self.session.answer(Wait::Park).map(Some)
    }

    /// How long a query took; none for a release.
    fn took(&mut self, answer: &Completion, now: u64) -> Result<Option<u64>, BenchError> {
        if answer.kind == RequestKind::Release {
            return check_release(answer).map(|()| None);
        }
        let asked = self.asked.iter().position(|asked| asked.operation == answer.operation);
        match asked {
            Some(at) => Ok(Some(now - self.asked.swap_remove(at).at)),
            None => Err(BenchError::Wrong("an answer to no query".into())),
        }
    }

    fn answered(&mut self, answer: &Completion, more: bool) -> Result<(), BenchError> {
        let lease = self.session.check_hit(answer, 1)?;
        self.session.stage_release(lease)?;
        if more { self.ask() } else { Ok(()) }
    }
}
