//! `/metrics` and `/healthz` over HTTP/1.x, on one thread.
//!
//! Both pages are made from closures, so that this thread never asks the reactor anything: a hung
//! Manager still answers here, and says that it hangs.
//!
//! Every size, time and number is bounded, and nobody waits for anybody: a peer that sends half a
//! request or reads half an answer keeps one of [`CONNECTIONS_MAX`] places until its time is up, or
//! until somebody new needs the place.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags};
use rustix::time::Timespec;

/// Longest request head, in bytes. What follows it is never read.
pub const REQUEST_BYTES_MAX: usize = 8192;
/// Longest time for the request to come, and again for the answer to go.
pub const EXCHANGE_MAX: Duration = Duration::from_secs(2);
/// Connections that are served at a time. One more takes the place of the oldest.
pub const CONNECTIONS_MAX: usize = 16;
/// Connections that are accepted before those that are open get their turn.
const ACCEPTS_PER_TURN: usize = 16;
/// Parts that one connection may send in its turn.
const READS_PER_TURN: usize = 4;
/// Pause when the system has no descriptor for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What `/healthz` says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Health {
    /// 200 when true, else 503.
    pub healthy: bool,
    /// The body: the state in one word, and after a colon the reason if it is not the best one.
    pub state: String,
}

/// What the two pages hold.
pub trait Pages: Send + 'static {
    /// Prometheus text.
    fn metrics(&self) -> String;
    /// See [`Health`].
    fn health(&self) -> Health;
}

/// An address that is ours, and not served yet.
#[derive(Debug)]
pub struct HttpListener {
    listener: TcpListener,
    address: SocketAddr,
}

impl HttpListener {
    /// Takes the address; port 0 takes a free one.
    ///
    /// # Errors
    /// It is taken, not ours, or not allowed.
    pub fn bind(address: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok(Self { listener, address })
    }

    /// The address with its real port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until the thread is dropped.
    ///
    /// # Errors
    /// No eventfd, or no thread.
    pub fn serve(self, pages: impl Pages) -> io::Result<HttpThread> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let stop = Arc::new(Stop {
            bell: rustix::event::eventfd(0, flags)?,
            asked: AtomicBool::new(false),
        });
        let address = self.address;
        let seen = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("orbitkv-http".to_owned())
            .spawn(move || run(&self.listener, &seen, &pages))?;
        Ok(HttpThread { address, stop, thread: Some(thread) })
    }
}

/// The serving thread. Dropping it ends it, and with it the exchange under way.
#[derive(Debug)]
pub struct HttpThread {
    address: SocketAddr,
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Stop {
    bell: OwnedFd,
    asked: AtomicBool,
}

impl HttpThread {
    /// The address with its real port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for HttpThread {
    fn drop(&mut self) {
        self.stop.asked.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.stop.bell, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the http thread panicked");
        }
    }
}

fn run(listener: &TcpListener, stop: &Stop, pages: &impl Pages) {
    // In the order of their arrival.
    let mut open: Vec<Exchange> = Vec::with_capacity(CONNECTIONS_MAX);
    while !stop.asked.load(Ordering::Acquire) {
        let ready = wait(listener, stop, &open);
        let now = Instant::now();
        let mut ready = ready.into_iter();
        open.retain_mut(|exchange| {
            let ready = ready.next().unwrap_or(false);
            match exchange.step(ready, now, pages) {
                Ok(goes_on) => goes_on,
                Err(error) => {
                    tracing::debug!("http connection: {error}");
                    false
                }
            }
        });
        accept(listener, &mut open);
    }
}

/// Sleeps until something can be done or is too late; says which exchanges can go on.
fn wait(listener: &TcpListener, stop: &Stop, open: &[Exchange]) -> Vec<bool> {
    let mut polled = Vec::with_capacity(open.len() + 2);
    polled.push(PollFd::from_borrowed_fd(stop.bell.as_fd(), PollFlags::IN));
    polled.push(PollFd::new(listener, PollFlags::IN));
    polled.extend(open.iter().map(|exchange| PollFd::new(&exchange.connection, exchange.waits())));
    let timeout = open.iter().map(|exchange| exchange.deadline).min().map(|deadline| {
        let left = deadline.saturating_duration_since(Instant::now());
        Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
    });
    // Interrupted or not: what is ready shows.
    let _ = rustix::event::poll(&mut polled, timeout.as_ref());
    polled[2..].iter().map(|polled| !polled.revents().is_empty()).collect()
}

fn accept(listener: &TcpListener, open: &mut Vec<Exchange>) {
    for _ in 0..ACCEPTS_PER_TURN {
        match listener.accept() {
            Ok((connection, _)) => {
                if open.len() >= CONNECTIONS_MAX {
                    open.remove(0);
                }
                match Exchange::new(connection) {
                    Ok(exchange) => open.push(exchange),
                    Err(error) => tracing::debug!("http connection: {error}"),
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) => {
                tracing::debug!("http accept: {error}");
                std::thread::sleep(ACCEPT_PAUSE);
                return;
            }
        }
    }
}

/// One request and its answer.
struct Exchange {
    connection: TcpStream,
    deadline: Instant,
    head: Vec<u8>,
    /// What is still to be written, once the request is known.
    answer: Option<(Vec<u8>, usize)>,
}

impl Exchange {
    fn new(connection: TcpStream) -> io::Result<Self> {
        connection.set_nonblocking(true)?;
        let deadline = Instant::now() + EXCHANGE_MAX;
        Ok(Self { connection, deadline, head: Vec::new(), answer: None })
    }

    fn waits(&self) -> PollFlags {
        if self.answer.is_some() { PollFlags::OUT } else { PollFlags::IN }
    }

    /// Does what can be done without waiting. False when the exchange is over.
    fn step(&mut self, ready: bool, now: Instant, pages: &impl Pages) -> io::Result<bool> {
        if self.answer.is_none() {
            let answer = match if ready { self.read_head()? } else { Head::Part } {
                Head::Whole => answer(&self.head, pages),
                Head::TooLong => Answer::error(431, "request head is longer than 8192 bytes"),
                Head::Cut => return Ok(false),
                Head::Part if now >= self.deadline => {
                    Answer::error(408, "request did not come within 2 s")
                }
                Head::Part => return Ok(true),
            };
            self.answer = Some((answer.bytes(), 0));
            self.deadline = now + EXCHANGE_MAX;
        } else if !ready {
            return Ok(now < self.deadline);
        }
        self.write_answer()
    }

    fn read_head(&mut self) -> io::Result<Head> {
        let mut part = [0; 1024];
        for _ in 0..READS_PER_TURN {
            match self.connection.read(&mut part) {
                Ok(0) => return Ok(Head::Cut),
                Ok(bytes) => self.head.extend_from_slice(&part[..bytes]),
                Err(error) if try_again(&error) => return Ok(Head::Part),
                Err(error) => return Err(error),
            }
            if self.head.windows(4).any(|window| window == b"\r\n\r\n") {
                return Ok(Head::Whole);
            }
            if self.head.len() > REQUEST_BYTES_MAX {
                return Ok(Head::TooLong);
            }
        }
        Ok(Head::Part)
    }

    /// Writes what the peer takes now. False when that was all of it.
    fn write_answer(&mut self) -> io::Result<bool> {
        let Some((bytes, written)) = &mut self.answer else { return Ok(true) };
        match self.connection.write(&bytes[*written..]) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(more) => *written += more,
            Err(error) if try_again(&error) => {}
            Err(error) => return Err(error),
        }
        if *written < bytes.len() {
            return Ok(true);
        }
        self.connection.shutdown(std::net::Shutdown::Write)?;
        Ok(false)
    }
}

enum Head {
    Whole,
    Part,
    TooLong,
    /// The peer closed before its request was whole.
    Cut,
}

fn try_again(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}

struct Answer {
    status: u16,
    content_type: &'static str,
    body: String,
    /// The body is described and not sent.
    head_only: bool,
}

impl Answer {
    fn error(status: u16, text: &str) -> Self {
        let body = format!("{text}\n");
        Self { status, content_type: "text/plain; charset=utf-8", body, head_only: false }
    }

    fn bytes(&self) -> Vec<u8> {
        let reason = match self.status {
            200 => "OK",
            400 => "Bad Request",
            404 => "Not Found",
            405 => "Method Not Allowed",
            408 => "Request Timeout",
            431 => "Request Header Fields Too Large",
            _ => "Service Unavailable",
        };
        let (status, content_type, length) = (self.status, self.content_type, self.body.len());
        let allow = if status == 405 { "Allow: GET, HEAD\r\n" } else { "" };
        let mut bytes = format!(
            "HTTP/1.1 {status} {reason}\r\nContent-Type: {content_type}\r\n\
             Content-Length: {length}\r\n{allow}Connection: close\r\n\r\n"
        )
        .into_bytes();
        if !self.head_only {
            bytes.extend_from_slice(self.body.as_bytes());
        }
        bytes
    }
}

fn answer(head: &[u8], pages: &impl Pages) -> Answer {
    let line = head.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let Ok(line) = std::str::from_utf8(line) else {
        return Answer::error(400, "request line is no text");
    };
    let mut words = line.split(' ');
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Answer::error(400, "request line is not: METHOD TARGET VERSION");
    };
    if !version.starts_with("HTTP/1.") {
        return Answer::error(400, "only HTTP/1.x is spoken here");
    }
    if !matches!(method, "GET" | "HEAD") {
        return Answer::error(405, "only GET and HEAD are served");
    }
    let path = target.split('?').next().unwrap_or_default();
    let mut answer = match path {
        "/metrics" => Answer {
            status: 200,
            content_type: "text/plain; version=0.0.4; charset=utf-8",
            body: pages.metrics(),
            head_only: false,
        },
        "/healthz" => {
            let health = pages.health();
            Answer::error(if health.healthy { 200 } else { 503 }, &health.state)
        }
        _ => Answer::error(404, "only /metrics and /healthz are served"),
    };
    answer.head_only = method == "HEAD";
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Two;

    impl Pages for Two {
        fn metrics(&self) -> String {
            "orbitkv_up 1\n".repeat(100_000)
        }

        fn health(&self) -> Health {
            Health { healthy: false, state: "draining".to_owned() }
        }
    }

    fn start() -> HttpThread {
        let listener = HttpListener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        assert_ne!(listener.address().port(), 0);
        listener.serve(Two).unwrap()
    }

    fn ask(server: &HttpThread, request: &[u8]) -> String {
        let mut connection = TcpStream::connect(server.address()).unwrap();
        connection.write_all(request).unwrap();
        let mut answer = Vec::new();
        // A reset after the answer (what was sent on top of the head stays unread) is no loss.
        let mut part = [0; 65_536];
        while let Ok(bytes @ 1..) = connection.read(&mut part) {
            answer.extend_from_slice(&part[..bytes]);
        }
        String::from_utf8(answer).unwrap()
    }

    #[test]
    fn both_pages_are_served_whole() {
        let server = start();
        let answer = ask(&server, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        assert!(head.contains("Content-Length: 1300000") && head.contains("version=0.0.4"));
        assert_eq!(body.len(), 1_300_000);
        let answer = ask(&server, b"GET /healthz?x=1 HTTP/1.0\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 503 ") && answer.ends_with("\r\n\r\ndraining\n"));
        let answer = ask(&server, b"HEAD /healthz HTTP/1.1\r\n\r\n");
        assert!(answer.contains("Content-Length: 9\r\n") && answer.ends_with("\r\n\r\n"));
    }

    #[test]
    fn everything_else_is_answered_with_its_fault() {
        let server = start();
        for (request, status) in [
            (&b"GET / HTTP/1.1\r\n\r\n"[..], 404),
            (b"GET /metrics/../healthz HTTP/1.1\r\n\r\n", 404),
            (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
            (b"GET /metrics\r\n\r\n", 400),
            (b"GET  /metrics HTTP/1.1\r\n\r\n", 400),
            (b"GET /metrics HTTP/2\r\n\r\n", 400),
            (b"\xff\xfe\r\n\r\n", 400),
            (b"\r\n\r\n", 400),
        ] {
            let answer = ask(&server, request);
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{request:?}: {answer}");
        }
        let mut endless = b"GET /metrics HTTP/1.1\r\n".to_vec();
        endless.resize(REQUEST_BYTES_MAX + 1024, b'x');
        assert!(ask(&server, &endless).starts_with("HTTP/1.1 431 "));
    }

    #[test]
    fn a_peer_that_goes_away_or_dawdles_holds_nobody_for_ever() {
        let server = start();
        drop(TcpStream::connect(server.address()).unwrap());
        let mut dawdler = TcpStream::connect(server.address()).unwrap();
        dawdler.write_all(b"GET /met").unwrap();
        // Served beside the dawdler.
        let answer = ask(&server, b"GET /healthz HTTP/1.1\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 503 "));
        let mut text = String::new();
        dawdler.read_to_string(&mut text).unwrap();
        assert!(text.starts_with("HTTP/1.1 408 "), "{text}");
    }

    /// Goal: however many peers dawdle, the next request is served at once, not after their
    /// times. Method: far more of them than places, each with half a request or a whole one whose
    /// answer it does not read; every request beside them is answered whole.
    #[test]
    fn a_crowd_of_dawdlers_keeps_nobody_from_being_served() {
        let server = start();
        let mut crowd = Vec::new();
        let began = Instant::now();
        for round in 0..8 {
            for number in 0..CONNECTIONS_MAX {
                let mut dawdler = TcpStream::connect(server.address()).unwrap();
                let half = number % 2 == 0;
                let request: &[u8] =
                    if half { b"GET /met" } else { b"GET /metrics HTTP/1.1\r\n\r\n" };
                dawdler.write_all(request).unwrap();
                crowd.push(dawdler);
            }
            let answer = ask(&server, b"GET /healthz HTTP/1.1\r\n\r\n");
            assert!(answer.ends_with("\r\n\r\ndraining\n"), "round {round}: {answer}");
        }
        // One after the other the half requests alone, every second of all, would have had two
        // seconds each.
        assert!(began.elapsed() < EXCHANGE_MAX * (crowd.len() as u32 / 4), "one after the other");
    }

    struct Huge;

    impl Pages for Huge {
        fn metrics(&self) -> String {
            // More than the buffers of a connection take.
            "orbitkv_up 1\n".repeat(5_000_000)
        }

        fn health(&self) -> Health {
            Health { healthy: true, state: "ready".to_owned() }
        }
    }

    /// Goal: neither a request that never comes nor an answer that nobody reads holds up an end.
    /// Method: an exchange that had run to its bound would have answered 408, or every byte.
    #[test]
    fn an_end_does_not_wait_for_the_exchange_under_way() {
        for request in [&b"GET /met"[..], b"GET /metrics HTTP/1.1\r\n\r\n"] {
            let listener = HttpListener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
            let server = listener.serve(Huge).unwrap();
            let mut hung = TcpStream::connect(server.address()).unwrap();
            hung.write_all(request).unwrap();
            if request.len() > 10 {
                // The answer has begun.
                let mut byte = [0];
                hung.read_exact(&mut byte).unwrap();
            }
            drop(server);
            let mut answer = Vec::new();
            let _cut = hung.read_to_end(&mut answer);
            assert!(!answer.starts_with(b"HTTP/1.1 408"));
            assert!(answer.len() < 65_000_000, "{} bytes", answer.len());
        }
    }

    #[test]
    fn a_taken_address_is_an_error_and_dropping_frees_it() {
        let server = start();
        let address = server.address();
        let error = HttpListener::bind(address).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        drop(server);
        HttpListener::bind(address).unwrap();
    }
}
