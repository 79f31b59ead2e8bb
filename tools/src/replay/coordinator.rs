//! Hands requests to engine processes in trace order and adds up what they did.

use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use super::control::{FromEngine, Open, ToEngine};
use super::tally::{Latencies, Tally};
use crate::exit::{Exit, ToolError};
use crate::progress::Progress;
use crate::signal;
use crate::trace::{Request, TraceError};

/// Lines of engines that may wait here.
const INBOX: usize = 4096;
/// Longest sleep before signals are looked at again.
const PAUSE: Duration = Duration::from_millis(100);
/// Longest start of an engine: it reserves its device pages.
const READY_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest end of an engine after its last request: it drains.
const FINISH_TIMEOUT: Duration = Duration::from_secs(60);

/// Requests, in trace order.
pub(crate) type Requests = Box<dyn Iterator<Item = Result<Request, TraceError>>>;

/// What every engine process is told, and how many there are.
pub(super) struct Plan {
    /// For each engine alike.
    pub(super) open: Open,
    /// Engine processes.
    pub(super) engines: usize,
    /// Wall time over trace time; 0 = as fast as engines take requests.
    pub(super) time_scale: f64,
}

/// What the engines did.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    /// Sum over all requests that ended.
    pub(super) tally: Tally,
    /// Of every engine.
    pub(super) latencies: Latencies,
    /// Engines whose session owned nothing at its end.
    pub(super) engines_drained: usize,
    /// First request to last completion.
    pub(super) work: Duration,
    /// Why the run ended early, if it did.
    pub(super) failure: Option<ToolError>,
}

struct Engine {
    child: Child,
    stdin: Option<BufWriter<ChildStdin>>,
    room: u32,
    ready: bool,
    reported: bool,
    ended: bool,
}

impl Drop for Engine {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _gone = self.child.kill();
            let _reaped = self.child.wait();
        }
    }
}

/// A line of an engine, or its end.
type Note = (usize, Option<FromEngine>);

struct Coordinator<'a> {
    plan: &'a Plan,
    engines: Vec<Engine>,
    inbox: Receiver<Note>,
    outcome: Outcome,
    /// Session of each request under way, by its number.
    under_way: HashMap<u64, Option<u64>>,
    /// Sessions with a request under way.
    busy: HashSet<u64>,
    progress: &'a mut Progress,
}

/// Plays `requests` and returns what came of it, also when it ended early.
pub(super) fn run(plan: &Plan, requests: Requests, progress: &mut Progress) -> Outcome {
    let (sender, inbox) = sync_channel(INBOX);
    let mut coordinator = Coordinator {
        plan,
        engines: Vec::new(),
        inbox,
        outcome: Outcome::default(),
        under_way: HashMap::new(),
        busy: HashSet::new(),
        progress,
    };
    if let Err(error) = coordinator.run(sender, requests) {
        coordinator.fail(error);
    }
    coordinator.outcome
}

impl Coordinator<'_> {
    fn run(&mut self, sender: SyncSender<Note>, requests: Requests) -> Result<(), ToolError> {
        for number in 0..self.plan.engines {
            let engine = spawn(number, &self.plan.open, sender.clone())?;
            self.engines.push(engine);
        }
        drop(sender);
        self.pump_until(READY_TIMEOUT, "not attached within 60 s", |engine| {
            engine.ready || engine.ended
        });
        let start = Instant::now();
        if let Err(error) = self.dispatch(requests, start) {
            self.fail(error);
        }
        self.outcome.work = start.elapsed();
        // Whatever happened, what the engines counted is wanted.
        for engine in &mut self.engines {
            send(engine, &ToEngine::Finish);
            engine.stdin = None;
        }
        self.pump_until(FINISH_TIMEOUT, "not drained within 60 s", |engine| engine.ended);
        Ok(())
    }

    /// Keeps the first failure: the others follow from it.
    fn fail(&mut self, error: ToolError) {
        self.outcome.failure.get_or_insert(error);
    }

    /// Sends requests while there is room, and takes notes, until every request ended.
    fn dispatch(&mut self, mut requests: Requests, start: Instant) -> Result<(), ToolError> {
        let mut head: Option<Request> = None;
        let mut index = 0;
        let mut exhausted = false;
        while self.outcome.failure.is_none() {
            signal::check()?;
            if head.is_none() && !exhausted {
                head = requests.next().transpose()?;
                exhausted = head.is_none();
            }
            let due = head.as_ref().map(|request| self.due(request, start));
            if due.is_some_and(|due| due.is_zero())
                && let Some(engine) = self.roomiest()
                && !self.must_wait(head.as_ref())
                && let Some(request) = head.take()
            {
                self.send_request(engine, index, &request);
                index += 1;
                continue;
            }
            if exhausted && self.under_way.is_empty() {
                return Ok(());
            }
            self.pump(due.filter(|due| !due.is_zero()).unwrap_or(PAUSE).min(PAUSE));
        }
        Ok(())
    }

    /// Time until a request arrives.
    fn due(&self, request: &Request, start: Instant) -> Duration {
        let at = Duration::from_millis(request.t_ms).as_secs_f64() * self.plan.time_scale;
        Duration::try_from_secs_f64(at).unwrap_or(Duration::MAX).saturating_sub(start.elapsed())
    }

    /// Without arrival times the turns of one session still follow each other: a turn that ran
    /// beside the one before it would miss what that one is about to save.
    fn must_wait(&self, request: Option<&Request>) -> bool {
        self.plan.time_scale == 0.0
            && request.and_then(|r| r.session).is_some_and(|session| self.busy.contains(&session))
    }

    fn roomiest(&self) -> Option<usize> {
        let open = self.engines.iter().enumerate().filter(|(_, engine)| engine.room > 0);
        open.max_by_key(|(number, engine)| (engine.room, usize::MAX - number)).map(|(n, _)| n)
    }

    fn send_request(&mut self, engine: usize, index: u64, request: &Request) {
        let full = request.full_blocks(self.plan.open.block_tokens);
        let mut blocks = request.blocks.clone();
        blocks.truncate(full);
        let runs = blocks.runs().iter().map(|run| (run.first, run.length)).collect();
        if let Some(session) = request.session {
            self.busy.insert(session);
        }
        self.under_way.insert(index, request.session);
        let engine = &mut self.engines[engine];
        engine.room -= 1;
        // An engine that is gone says so in the inbox.
        send(engine, &ToEngine::Play { index, runs });
    }

    fn pump_until(
        &mut self,
        timeout: Duration,
        late: &'static str,
        enough: impl Fn(&Engine) -> bool,
    ) {
        let end = Instant::now() + timeout;
        while let Some(engine) = self.engines.iter().position(|engine| !enough(engine)) {
            self.pump(PAUSE);
            if Instant::now() >= end {
                let message = late.into();
                return self.fail(ToolError::Engine { engine, exit: Exit::Failed, message });
            }
        }
    }

    /// Takes one note, waiting at most `timeout`.
    fn pump(&mut self, timeout: Duration) {
        if let Ok((number, note)) = self.inbox.recv_timeout(timeout) {
            self.note(number, note);
        }
    }

    fn note(&mut self, number: usize, note: Option<FromEngine>) {
        match note {
            Some(FromEngine::Ready) => {
                self.engines[number].ready = true;
                self.engines[number].room = self.plan.open.concurrency;
            }
            Some(FromEngine::Done { index, tally }) => {
                if let Some(session) = self.under_way.remove(&index).flatten() {
                    self.busy.remove(&session);
                }
                self.engines[number].room += 1;
                self.outcome.tally.add(&tally);
                self.progress.advance(&self.outcome.tally.progress());
            }
            Some(FromEngine::Report {
                mismatches,
                requests_restarted,
                reattached,
                drained,
                latencies,
                failure,
            }) => {
                self.engines[number].reported = true;
                let tally = &mut self.outcome.tally;
                tally.mismatches_seen += mismatches;
                tally.requests_restarted += requests_restarted;
                tally.reattached += reattached;
                self.outcome.engines_drained += usize::from(drained);
                self.outcome.latencies.add(&latencies);
                if let Some(failure) = failure {
                    let (exit, message) = (Exit::from_code(failure.exit), failure.message.into());
                    self.fail(ToolError::Engine { engine: number, exit, message });
                }
            }
            None => {
                let engine = &mut self.engines[number];
                engine.ended = true;
                engine.room = 0;
                if !engine.reported {
                    let message = "its process died".into();
                    self.fail(ToolError::Engine { engine: number, exit: Exit::Failed, message });
                }
            }
        }
    }
}

fn spawn(number: usize, open: &Open, sender: SyncSender<Note>) -> Result<Engine, ToolError> {
    let system = |source| ToolError::System { operation: "start an engine process", source };
    let program = std::env::current_exe().map_err(system)?;
    let mut child = Command::new(program)
        .arg("replay-engine")
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(system)?;
    let stdin = child.stdin.take().map(BufWriter::new);
    let stdout = child.stdout.take();
    let mut engine = Engine { child, stdin, room: 0, ready: false, reported: false, ended: false };
    send(&mut engine, &ToEngine::Open(open.clone()));
    thread::spawn(move || {
        let lines = stdout.into_iter().flat_map(|out| BufReader::new(out).lines());
        for line in lines.map_while(Result::ok) {
            let Ok(message) = serde_json::from_str(&line) else { break };
            if sender.send((number, Some(message))).is_err() {
                return;
            }
        }
        let _over = sender.send((number, None));
    });
    Ok(engine)
}

fn send(engine: &mut Engine, message: &ToEngine) {
    let Some(stdin) = &mut engine.stdin else { return };
    let sent = serde_json::to_writer(&mut *stdin, message)
        .map_err(std::io::Error::from)
        .and_then(|()| stdin.write_all(b"\n"))
        .and_then(|()| stdin.flush());
    if sent.is_err() {
        engine.stdin = None;
    }
}
