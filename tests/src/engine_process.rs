//! An engine in a process of its own that does what a test says, one line at a time.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};

use orbitkv_engine::{
    Connect, Deadline, EngineId, Epoch, Lease, LeaseId, LeaseParts, PageHash, QueryMode,
    RestoreOptions, Status,
};
use rustix::process::{Pid, Signal};

use crate::engine::{Engine, Shape, Way, blocks, hashes, namespace};
use crate::manager::{PATIENCE, Setup};

/// Who an engine process is.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Attachment group.
    pub engine: EngineId,
    /// Model of its namespace.
    pub model: String,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Its rank.
    pub rank: u32,
    /// Ranks of the engine.
    pub ranks: u32,
    /// Device pages.
    pub pages: u32,
    /// How the Manager reaches them.
    pub way: Way,
}

impl Identity {
    /// Rank 0 of 1 over a sealed memfd, in a group of `engine`.
    pub fn new(engine: EngineId, model: &str, page_bytes: u64, pages: u32) -> Self {
        let model = model.into();
        Self { engine, model, page_bytes, rank: 0, ranks: 1, pages, way: Way::Sealed }
    }

    /// Its namespace.
    pub fn spec(&self) -> orbitkv_engine::NamespaceSpec {
        let mut spec = namespace(&self.model, self.page_bytes);
        (spec.tp_rank, spec.tp_size) = (self.rank, self.ranks);
        spec
    }

    fn connect(&self, socket: &std::path::Path) -> Engine {
        let connect = Connect::new(socket).engine_id(self.engine);
        Engine::connect(&connect, self.spec(), self.pages, self.way, Shape::Contiguous)
    }
}

/// The test's end of an engine process. Killed when dropped.
#[derive(Debug)]
pub struct EngineProcess {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl EngineProcess {
    /// Starts an engine and waits until it has attached.
    ///
    /// # Panics
    /// When it does not.
    pub fn start(setup: &Setup, identity: &Identity) -> Self {
        Self::start_under(setup, identity, &[])
    }

    /// [`start`](Self::start) through a program that runs what follows its own arguments.
    ///
    /// # Panics
    /// When it does not attach.
    pub fn start_under(setup: &Setup, identity: &Identity, runner: &[&str]) -> Self {
        let mut command = match runner {
            [] => Command::new(setup.program()),
            [program, arguments @ ..] => {
                let mut command = Command::new(program);
                command.args(arguments).arg(setup.program());
                command
            }
        };
        let mut child =
            command.arg("engine").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (orders, answers) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut process = Self { child, orders, answers: BufReader::new(answers) };
        let Identity { engine, model, page_bytes, rank, ranks, pages, way } = identity;
        let socket = setup.socket();
        let answer = process.ask(&format!(
            "{} {engine} {model} {page_bytes} {rank} {ranks} {pages} {way:?}",
            socket.display()
        ));
        assert_eq!(answer, "attached");
        process
    }

    /// Gives an order without waiting for its answer.
    ///
    /// # Panics
    /// When the process is gone.
    pub fn order(&mut self, order: &str) {
        writeln!(self.orders, "{order}").unwrap();
    }

    /// The next answer.
    ///
    /// # Panics
    /// When the process is gone.
    pub fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// Gives an order and waits for its answer.
    pub fn ask(&mut self, order: &str) -> String {
        self.order(order);
        self.answer()
    }

    /// Restores the first `pages` pages of `sequence` from a lease of its group.
    pub fn restore(&mut self, lease: &Lease, sequence: u64, pages: u32) -> String {
        self.ask(&with_lease("restore", lease, &format!("{sequence} {pages}")))
    }

    /// Releases a lease of its group.
    pub fn release(&mut self, lease: &Lease) -> String {
        self.ask(&with_lease("release", lease, ""))
    }

    /// Sends it a signal.
    ///
    /// # Panics
    /// When it is gone.
    pub fn signal(&self, signal: Signal) {
        rustix::process::kill_process(self.pid(), signal).unwrap();
    }

    /// Its process.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Kills it and waits for its end.
    pub fn kill(self) {}
}

impl Drop for EngineProcess {
    fn drop(&mut self) {
        let _killed = self.child.kill();
        let _reaped = self.child.wait();
    }
}

fn with_lease(verb: &str, lease: &Lease, rest: &str) -> String {
    let parts = lease.to_parts();
    let (lease, epoch, engine) = (parts.lease, parts.epoch.0, parts.engine);
    format!("{verb} {lease} {epoch} {engine} {} {} {rest}", parts.pages, parts.expires_ns)
}

/// What the process does: reads who it is, then one order a line until its input ends.
///
/// # Panics
/// On anything unexpected: the test sees that as an answer that never comes.
pub fn obey() -> ExitCode {
    let mut lines = std::io::stdin().lines().map_while(Result::ok);
    let Some(first) = lines.next() else { return ExitCode::FAILURE };
    let words: Vec<&str> = first.split(' ').collect();
    let &[socket, engine, model, page_bytes, rank, ranks, pages, way] = words.as_slice() else {
        return ExitCode::FAILURE;
    };
    let identity = Identity {
        engine: engine_id(engine),
        model: model.into(),
        page_bytes: number(page_bytes),
        rank: number(rank) as u32,
        ranks: number(ranks) as u32,
        pages: number(pages) as u32,
        way: match way {
            "Sealed" => Way::Sealed,
            "Process" => Way::Process,
            _ => Way::Unsealed,
        },
    };
    let mut engine = identity.connect(socket.as_ref());
    say("attached");
    for line in lines {
        let words: Vec<&str> = line.split_whitespace().collect();
        let answer = follow(&mut engine, &words);
        say(&answer);
    }
    ExitCode::SUCCESS
}

fn follow(engine: &mut Engine, words: &[&str]) -> String {
    match *words {
        // Saves pages of a sequence, all at once.
        ["save", sequence, pages] => {
            let ended = engine.save(&blocks(&sequence_of(sequence, pages), 0));
            format!("{:?} {} {}", ended.status, ended.pages, ended.pages_present)
        }
        // Saves one sequence of `pages` pages after the other until the Manager is gone.
        ["save-on", first, pages] => save_on(engine, number(first), number(pages), u64::MAX),
        // The same, until `max` pages or a few more were taken.
        ["save-on", first, pages, max] => {
            save_on(engine, number(first), number(pages), number(max))
        }
        // As many saves as there are credits, and never a look at what becomes of them.
        ["flood", sequence, pages] => {
            let blocks = blocks(&sequence_of(sequence, pages), 0);
            engine.fill(&blocks);
            let mut staged = 0;
            while engine.client.save(&engine.region, &blocks).is_ok() {
                staged += 1;
            }
            engine.client.submit().unwrap();
            staged.to_string()
        }
        // What it takes itself for.
        ["pid"] => std::process::id().to_string(),
        // Looks the first pages of a sequence up and keeps the lease.
        ["lease", sequence, pages] => {
            let hit = engine.query(&sequence_of(sequence, pages), QueryMode::Demand);
            format!("{:?} {}", hit.status, hit.pages)
        }
        // Gives its region back.
        ["unregister"] => {
            let unregister = engine.client.unregister(engine.region);
            unregister.map_or_else(
                |refused| format!("{refused:?}"),
                |operation| format!("{:?}", engine.end(operation).status),
            )
        }
        // Says so, and then sleeps until the session owns nothing.
        ["drain"] => {
            let drain = engine.client.drain(Deadline::after(2 * PATIENCE)).unwrap();
            say("waiting");
            format!("{:?}", engine.end(drain).status)
        }
        // Takes every completion that is outstanding.
        ["collect"] => {
            let mut ended = 0;
            while engine.client.outstanding() > 0 {
                let _any_status = engine.next_end();
                ended += 1;
            }
            ended.to_string()
        }
        ["restore", lease, epoch, group, leased, expires, sequence, pages] => {
            let lease = lease_of(lease, epoch, group, leased, expires);
            let blocks = blocks(&sequence_of(sequence, pages), 0);
            engine.poison(&blocks);
            let options = RestoreOptions::default();
            let region = engine.region;
            match engine.client.restore(&lease, 0, &region, &blocks, options) {
                Err(error) => format!("{error:?}"),
                Ok(restore) => {
                    let ended = engine.end(restore);
                    let right = blocks.iter().filter(|block| engine.holds(block)).count();
                    let poison = blocks.iter().filter(|block| engine.is_poison(block)).count();
                    let mut answer = String::new();
                    let _ = write!(answer, "{:?} {} ", ended.status, ended.code);
                    let _ = write!(answer, "right={right} untouched={poison}");
                    answer
                }
            }
        }
        ["release", lease, epoch, group, leased, expires] => {
            let lease = lease_of(lease, epoch, group, leased, expires);
            match engine.client.release(lease) {
                Err(error) => format!("{error:?}"),
                Ok(release) => {
                    let ended = engine.end(release);
                    format!("{:?} {}", ended.status, ended.code)
                }
            }
        }
        _ => format!("unknown order {words:?}"),
    }
}

fn save_on(engine: &mut Engine, first: u64, pages: u64, max: u64) -> String {
    let mut taken = 0;
    for sequence in first.. {
        let blocks = blocks(&hashes(sequence, 0..pages as u32), 0);
        engine.fill(&blocks);
        let saved = match engine.client.save(&engine.region, &blocks) {
            Ok(_) => engine.client.wait(PATIENCE),
            Err(refused) => return format!("{refused:?}"),
        };
        // Refused for want of memory is as good as stored; gone is the end.
        match saved {
            Ok(Some(saved)) if saved.status != Status::Gone => taken += u64::from(saved.pages),
            _ => return "gone".into(),
        }
        if taken >= max {
            break;
        }
    }
    taken.to_string()
}

fn say(answer: &str) {
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{answer}").unwrap();
    stdout.flush().unwrap();
}

fn number(word: &str) -> u64 {
    word.parse().unwrap()
}

fn engine_id(word: &str) -> EngineId {
    EngineId(u128::from_str_radix(word, 16).unwrap().to_be_bytes())
}

fn sequence_of(sequence: &str, pages: &str) -> Vec<PageHash> {
    hashes(number(sequence), 0..number(pages) as u32)
}

fn lease_of(lease: &str, epoch: &str, group: &str, leased: &str, expires: &str) -> Lease {
    Lease::from_parts(LeaseParts {
        lease: LeaseId(number(lease)),
        epoch: Epoch(number(epoch) as u32),
        engine: engine_id(group),
        pages: number(leased) as u32,
        expires_ns: number(expires),
    })
}
