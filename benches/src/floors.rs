//! What two processes of this machine can do at best, without a Manager: the floors that the
//! control path is compared with.

use std::hint::spin_loop;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::thread::futex;

use crate::error::BenchError;
use crate::part::Floor;
use crate::process::{Forked, pin};
use crate::shared::SharedLines;
use crate::stats::{Samples, Summary};
use crate::ticks::{self, Ticks};

/// Lines of the mapping.
const REQUEST: usize = 0;
const RESPONSE: usize = 1;
/// The request that ends the responder.
const STOP: u32 = u32::MAX;
/// Bytes of a message: those of a request record.
const MESSAGE_BYTES: usize = 64;
/// Share of the time that passes before samples count.
const WARM_UP: u32 = 5;

/// One slice of a floor: this process asks, a forked one pinned to `peer_cpu` answers.
pub(crate) fn measure(
    floor: Floor,
    peer_cpu: usize,
    slice: Duration,
    samples: &mut Samples,
) -> Result<Summary, BenchError> {
    match floor {
        Floor::TwoLine => two_line(peer_cpu, slice, samples),
        Floor::Futex => futexes(peer_cpu, slice, samples),
        Floor::UnixSocket => unix_socket(peer_cpu, slice, samples),
    }
}

/// Asks again and again: an unmeasured part, then samples until the slice is over.
fn ask_for(
    slice: Duration,
    samples: &mut Samples,
    mut ask: impl FnMut() -> Result<(), BenchError>,
) -> Result<Summary, BenchError> {
    let ticks = Ticks::calibrate();
    samples.clear();
    let begin = ticks::now();
    let (warm, end) = (begin + ticks.of(slice / WARM_UP), begin + ticks.of(slice));
    loop {
        let before = ticks::now();
        ask()?;
        let after = ticks::now();
        if after > warm || samples.is_full() {
            samples.add(after - before);
        }
        if after > end {
            return Ok(samples.summary(ticks, 1));
        }
    }
}

/// Forks who answers on `peer_cpu` until he is told to stop.
fn responder(
    peer_cpu: usize,
    answer: impl FnOnce() -> io::Result<()>,
) -> Result<Forked, BenchError> {
    let pinned = || {
        pin(&[peer_cpu])?;
        answer()
    };
    Forked::spawn(|| u8::from(pinned().is_err())).map_err(BenchError::system("fork"))
}

/// Request and response each in a cache line of its own, both sides spinning.
fn two_line(
    peer_cpu: usize,
    slice: Duration,
    samples: &mut Samples,
) -> Result<Summary, BenchError> {
    let lines = SharedLines::new().map_err(BenchError::system("map shared memory"))?;
    let (request, response) = (lines.futex(REQUEST), lines.futex(RESPONSE));
    let _responder = responder(peer_cpu, || {
        let mut seen = 0;
        while seen != STOP {
            let asked = request.load(Ordering::Acquire);
            if asked == seen {
                spin_loop();
            } else {
                seen = asked;
                response.store(asked, Ordering::Release);
            }
        }
        Ok(())
    })?;
    let mut number = 0;
    ask_for(slice, samples, || {
        number += 1;
        request.store(number, Ordering::Release);
        while response.load(Ordering::Acquire) != number {
            spin_loop();
        }
        Ok(())
    })
}

/// The same lines, but each side sleeps in the kernel until the other one wakes it.
fn futexes(peer_cpu: usize, slice: Duration, samples: &mut Samples) -> Result<Summary, BenchError> {
    let lines = SharedLines::new().map_err(BenchError::system("map shared memory"))?;
    let (request, response) = (lines.futex(REQUEST), lines.futex(RESPONSE));
    let mut responder = responder(peer_cpu, || {
        let mut seen = 0;
        while seen != STOP {
            sleep_while(request, seen)?;
            seen = request.load(Ordering::Acquire);
            say(response, seen)?;
        }
        Ok(())
    })?;
    let mut number = 0;
    let summary = ask_for(slice, samples, || {
        number += 1;
        say(request, number).map_err(BenchError::system("wake a futex"))?;
        sleep_while(response, number - 1).map_err(BenchError::system("wait on a futex"))
    })?;
    say(request, STOP).map_err(BenchError::system("wake a futex"))?;
    responder.wait().map_err(BenchError::system("wait for the responder"))?;
    Ok(summary)
}

fn say(word: &AtomicU32, number: u32) -> Result<(), Errno> {
    word.store(number, Ordering::Release);
    futex::wake(word, futex::Flags::empty(), 1).map(drop)
}

fn sleep_while(word: &AtomicU32, number: u32) -> Result<(), Errno> {
    while word.load(Ordering::Acquire) == number {
        match futex::wait(word, futex::Flags::empty(), number, None) {
            Ok(()) | Err(Errno::AGAIN | Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// A message of 64 bytes each way over a `SOCK_SEQPACKET` pair, blocking.
fn unix_socket(
    peer_cpu: usize,
    slice: Duration,
    samples: &mut Samples,
) -> Result<Summary, BenchError> {
    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(BenchError::system("make a socket pair"))?;
    let (mut ours, mut theirs) = (Socket(ours), Socket(theirs));
    let mut message = [0; MESSAGE_BYTES];
    let mut responder = responder(peer_cpu, || {
        let mut message = [0; MESSAGE_BYTES];
        while theirs.read(&mut message)? == MESSAGE_BYTES {
            theirs.write_all(&message)?;
        }
        Ok(())
    })?;
    let summary = ask_for(slice, samples, || {
        ours.write_all(&message).map_err(BenchError::system("write to a socket"))?;
        ours.read_exact(&mut message).map_err(BenchError::system("read from a socket"))
    })?;
    // A message of another length ends the responder.
    ours.write_all(&[0]).map_err(BenchError::system("write to a socket"))?;
    responder.wait().map_err(BenchError::system("wait for the responder"))?;
    Ok(summary)
}

/// A socket with the calls of a file.
struct Socket(OwnedFd);

impl Read for Socket {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::read(&self.0, bytes)?)
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::write(&self.0, bytes)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
