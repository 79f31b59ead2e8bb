//! The hidden verb `replay-engine`: one engine of a replay, in a process of its own.

use std::io::{self, BufRead, Write};
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use super::attach::{AttachError, Attached};
use super::control::{Failure, FromEngine, Open, ToEngine};
use super::device::DevicePages;
use super::engine::{Engine, EngineError};
use crate::content::PageSpace;
use crate::exit::Exit;

/// Requests that may wait in this process; the coordinator sends at most the concurrency.
const INBOX: usize = 256;
/// Longest sleep before the inbox is looked at again while requests are under way.
const TURN: Duration = Duration::from_micros(500);
/// Pause between two attempts to attach again.
const REATTACH_PAUSE: Duration = Duration::from_millis(50);

/// Plays what standard input says until it ends or says `finish`.
pub(crate) fn run() -> Exit {
    let inbox = read_inbox();
    let Ok(ToEngine::Open(open)) = inbox.recv() else { return Exit::Usage };
    let mut played = Played::default();
    let failure = play(&inbox, &open, &mut played).err();
    let exit = failure.as_ref().map_or(Exit::Ok, |failure| Exit::from_code(failure.exit));
    say(&FromEngine::Report {
        mismatches: played.mismatches,
        requests_restarted: played.requests_restarted,
        reattached: played.reattached,
        drained: played.drained,
        latencies: played.latencies,
        failure,
    });
    exit
}

/// What the last line reports.
#[derive(Default)]
struct Played {
    mismatches: u64,
    requests_restarted: u64,
    reattached: u64,
    drained: bool,
    latencies: super::tally::LatencyLists,
}

fn play(inbox: &Receiver<ToEngine>, open: &Open, played: &mut Played) -> Result<(), Failure> {
    let device = reserve(open)?;
    let link = Attached::attach(&open.socket, open, &device).map_err(|e| attach_failure(&e))?;
    let space = PageSpace::new(&open.name, open.page_bytes, open.seed);
    let mut engine = Engine::new(link, device, space, open.concurrency as usize);
    say(&FromEngine::Ready);
    let outcome = serve(inbox, open, &mut engine, played);
    played.mismatches = engine.mismatches();
    played.latencies = engine.latencies().lists();
    outcome?;
    played.drained = engine.into_link().drain();
    Ok(())
}

fn serve(
    inbox: &Receiver<ToEngine>,
    open: &Open,
    engine: &mut Engine<Attached>,
    played: &mut Played,
) -> Result<(), Failure> {
    let mut finishing = false;
    loop {
        while !finishing {
            let message = if engine.is_idle() {
                // The coordinator's death ends the engine too.
                inbox.recv().map_err(|_| TryRecvError::Disconnected)
            } else {
                inbox.try_recv()
            };
            let outcome = match message {
                Ok(ToEngine::Play { index, runs }) => engine.start(index, expand(runs)),
                Ok(ToEngine::Finish) | Err(TryRecvError::Disconnected) => {
                    finishing = true;
                    Ok(())
                }
                Ok(ToEngine::Open(_)) => Ok(()),
                Err(TryRecvError::Empty) => break,
            };
            recover(outcome, open, engine, played)?;
            report_finished(engine);
        }
        if engine.is_idle() {
            if finishing {
                return Ok(());
            }
            continue;
        }
        let outcome = engine.turn(TURN);
        report_finished(engine);
        recover(outcome, open, engine, played)?;
    }
}

fn report_finished(engine: &mut Engine<Attached>) {
    for finished in engine.take_finished() {
        say(&FromEngine::Done { index: finished.index, tally: finished.tally });
    }
}

fn expand(runs: Vec<(u64, u64)>) -> impl Iterator<Item = u64> {
    runs.into_iter().flat_map(|(first, length)| first..first.saturating_add(length))
}

/// Attaches again after a loss, for as long as the Manager may be away.
fn recover(
    outcome: Result<(), EngineError>,
    open: &Open,
    engine: &mut Engine<Attached>,
    played: &mut Played,
) -> Result<(), Failure> {
    let mut outcome = outcome;
    let end = Instant::now() + Duration::from_millis(open.reattach_ms);
    loop {
        match outcome {
            Ok(()) => return Ok(()),
            Err(EngineError::Gone) => {}
            Err(error) => return Err(failure(Exit::Failed, &error.to_string())),
        }
        let device = reserve(open)?;
        outcome = match Attached::attach(&open.socket, open, &device) {
            Ok(link) => {
                played.reattached += 1;
                engine.reattach(link, device).map(|restarted| {
                    played.requests_restarted += restarted;
                })
            }
            Err(error) if error.may_pass() && Instant::now() < end => {
                thread::sleep(REATTACH_PAUSE);
                Err(EngineError::Gone)
            }
            Err(error) => {
                let ms = open.reattach_ms;
                let text = format!("the Manager was gone for longer than {ms} ms: {error}");
                return Err(failure(Exit::Failed, &text));
            }
        };
    }
}

fn reserve(open: &Open) -> Result<DevicePages, Failure> {
    DevicePages::reserve(open.device_pages, open.page_bytes).map_err(|error| {
        let (pages, bytes) = (open.device_pages, open.page_bytes);
        let text = format!(
            "--device-pages {pages}: cannot reserve {pages} pages of {bytes} bytes: {error}; lower it"
        );
        failure(Exit::System, &text)
    })
}

fn attach_failure(error: &AttachError) -> Failure {
    failure(Exit::System, &error.to_string())
}

fn failure(exit: Exit, message: &str) -> Failure {
    Failure { exit: exit.code(), message: message.to_owned() }
}

/// Lines of standard input, read by a thread so that the ring is never kept waiting.
fn read_inbox() -> Receiver<ToEngine> {
    let (sender, inbox) = sync_channel(INBOX);
    thread::spawn(move || {
        for line in io::stdin().lock().lines() {
            let Ok(line) = line else { return };
            let Ok(message) = serde_json::from_str(&line) else { return };
            if sender.send(message).is_err() {
                return;
            }
        }
    });
    inbox
}

/// One line to the coordinator; when it is gone, its hang-up ends this process soon.
fn say(message: &FromEngine) {
    let mut out = io::stdout().lock();
    if let Ok(line) = serde_json::to_string(message) {
        let _closed = writeln!(out, "{line}").and_then(|()| out.flush());
    }
}
