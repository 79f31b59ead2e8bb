//! The coordinator's side of the parts: start them, let them measure together, take the numbers.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::BenchError;
use crate::part::{Answer, Job, VERB};

/// Longest silence of a part; its own waits are shorter.
const PATIENCE: Duration = Duration::from_secs(120);
const PAUSE: Duration = Duration::from_millis(20);
/// Longest wait for the exit of a part that has been told to end.
const EXIT_MAX: Duration = Duration::from_secs(30);

/// Parts of one kind that measure at the same time. Dropping it kills them.
#[derive(Debug)]
pub(crate) struct Crew {
    name: &'static str,
    parts: Vec<Part>,
    interrupted: fn() -> bool,
}

#[derive(Debug)]
struct Part {
    child: Child,
    /// Closed to tell the part that it is to end.
    input: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Crew {
    /// Starts `count` processes and waits until all are ready.
    pub(crate) fn start(
        name: &'static str,
        count: usize,
        job: &Job,
        interrupted: fn() -> bool,
    ) -> Result<Self, BenchError> {
        let mut crew = Self { name, parts: Vec::with_capacity(count), interrupted };
        for _ in 0..count {
            crew.parts.push(Part::start(job)?);
        }
        for at in 0..count {
            match crew.answer(at)? {
                Answer::Ready => {}
                _ => return Err(crew.silent("it said something else than that it is ready")),
            }
        }
        Ok(crew)
    }

    /// One measurement of all parts, side by side.
    pub(crate) fn measure(&mut self) -> Result<Vec<Answer>, BenchError> {
        self.ask("")
    }

    /// The same, of what the parts read from `line`.
    pub(crate) fn ask(&mut self, line: &str) -> Result<Vec<Answer>, BenchError> {
        for at in 0..self.parts.len() {
            let input = self.parts[at].input.as_mut();
            if input.is_none_or(|input| writeln!(input, "{line}").is_err()) {
                // Its last words say why.
                self.answer(at)?;
                return Err(self.silent("it hung up"));
            }
        }
        (0..self.parts.len()).map(|at| self.answer(at)).collect()
    }

    /// Lets the parts end; each must end well.
    pub(crate) fn end(mut self) -> Result<(), BenchError> {
        for part in &mut self.parts {
            part.input = None;
        }
        for at in 0..self.parts.len() {
            let end = Instant::now() + EXIT_MAX;
            loop {
                match self.parts[at].child.try_wait() {
                    Ok(Some(status)) if status.success() => break,
                    Ok(None) if Instant::now() < end => thread::sleep(Duration::from_millis(1)),
                    Ok(Some(_)) => {
                        self.answer(at)?;
                        return Err(self.silent("it ended with an error"));
                    }
                    _ => return Err(self.silent("it did not end")),
                }
            }
        }
        Ok(())
    }

    fn answer(&self, at: usize) -> Result<Answer, BenchError> {
        let end = Instant::now() + PATIENCE;
        loop {
            if (self.interrupted)() {
                return Err(BenchError::Interrupted);
            }
            match self.parts[at].lines.recv_timeout(PAUSE) {
                Ok(line) => match serde_json::from_str(&line) {
                    Ok(Answer::Failed { is_wrong: true, message }) => {
                        return Err(BenchError::Wrong(message.into()));
                    }
                    Ok(Answer::Failed { message, .. }) => {
                        return Err(BenchError::PartFailed {
                            part: self.name,
                            message: message.into(),
                        });
                    }
                    Ok(answer) => return Ok(answer),
                    Err(_) => return Err(self.silent("its line cannot be read")),
                },
                Err(RecvTimeoutError::Timeout) if Instant::now() < end => {}
                Err(RecvTimeoutError::Timeout) => return Err(self.silent("silence")),
                Err(RecvTimeoutError::Disconnected) => return Err(self.silent("it died")),
            }
        }
    }

    fn silent(&self, cause: &'static str) -> BenchError {
        BenchError::Part { part: self.name, cause }
    }
}

impl Part {
    fn start(job: &Job) -> Result<Self, BenchError> {
        let program = std::env::current_exe().map_err(BenchError::system("find this program"))?;
        let mut child = Command::new(program)
            .arg(VERB)
            // Its own group: a SIGINT from the terminal is for the coordinator to act on.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(BenchError::system("start a part of the benchmark"))?;
        let mut input = child.stdin.take();
        let (sender, lines) = channel();
        if let Some(output) = child.stdout.take() {
            thread::spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    if sender.send(line).is_err() {
                        return;
                    }
                }
            });
        }
        let text = serde_json::to_string(job).unwrap_or_default();
        if let Some(input) = &mut input {
            let told = writeln!(input, "{text}");
            told.map_err(BenchError::system("tell a part of the benchmark what to do"))?;
        }
        Ok(Self { child, input, lines })
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _gone = self.child.kill();
            let _reaped = self.child.wait();
        }
    }
}
