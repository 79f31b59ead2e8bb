//! What is measured in a round, in which order, and under which name.

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use super::pinned::Pinned;
use super::{CLIENTS, Options};
use crate::crew::Crew;
use crate::error::BenchError;
use crate::pages::CHAIN_PAGES;
use crate::part::{Answer, Ask, Floor, Job, Length, Rate, Wait, Walk, Work};
use crate::series::Series;
use crate::stats::{Summary, median};

/// Pages of the middle query.
const MIDDLE_PAGES: u32 = 128;
/// Time before the idle Manager is watched: what it did for others has ended then.
const SETTLE: Duration = Duration::from_secs(1);
/// Longest pause between two looks for a signal.
const PAUSE: Duration = Duration::from_millis(100);
/// A rate needs more time than a round trip: clients begin and end one after the other.
const RATE_SLICES: u32 = 3;

/// Round trips that every kind of client makes, and their names.
const ASKS: [(Ask, &str); 4] = [
    (Ask::Ping, "ping_ns_p50"),
    (Ask::Query { pages: 1, one_chain: false }, "query1_ns_p50"),
    (Ask::Query { pages: MIDDLE_PAGES, one_chain: false }, "query128_ns_p50"),
    (Ask::Query { pages: CHAIN_PAGES, one_chain: false }, "query1024_ns_p50"),
];
/// Those that only one spinning client makes: the same chain again and again.
const ONE_CHAIN: [(Ask, &str); 2] = [
    (Ask::Query { pages: MIDDLE_PAGES, one_chain: true }, "one_chain/query128_ns_p50"),
    (Ask::Query { pages: CHAIN_PAGES, one_chain: true }, "one_chain/query1024_ns_p50"),
];
/// The first so many of them are short enough to be compared with lines between two cores.
const BESIDE_THE_FLOOR: usize = 2;
/// Walks over the hash map.
const WALKS: [(Walk, &str); 3] = [
    (Walk { pages: CHAIN_PAGES, one_chain: false }, "hashmap_lookup_ns"),
    (Walk { pages: MIDDLE_PAGES, one_chain: false }, "hashmap_lookup_ns_128"),
    (Walk { pages: CHAIN_PAGES, one_chain: true }, "one_chain/hashmap_lookup_ns"),
];
const WAITS: [(Wait, &str); 3] =
    [(Wait::Spin, "spinning"), (Wait::Park, "waiting"), (Wait::Asleep, "sleeping")];

/// Steps of a round and beside the rounds, for the progress.
pub(super) const STEPS_A_ROUND: u64 = 23;
pub(super) const STEPS_BESIDE: u64 = 3;

/// The rounds under way.
pub(super) struct Rounds<'a> {
    options: &'a Options,
    /// CPU of the clients and the second one.
    cpus: [usize; 2],
    two: &'a Pinned,
    one: &'a Pinned,
    series: Series,
    steps: u64,
    progress: &'a mut dyn FnMut(u64),
}

impl<'a> Rounds<'a> {
    pub(super) fn new(
        options: &'a Options,
        cpus: [usize; 2],
        two: &'a Pinned,
        one: &'a Pinned,
        progress: &'a mut dyn FnMut(u64),
    ) -> Self {
        Self { options, cpus, two, one, series: Series::default(), steps: 0, progress }
    }

    /// Everything, in order.
    pub(super) fn run(mut self) -> Result<Series, BenchError> {
        self.save(self.two.socket())?;
        self.save(self.one.socket())?;
        for _ in 0..self.options.runs {
            self.round()?;
        }
        self.idle()?;
        Ok(self.series)
    }

    fn round(&mut self) -> Result<(), BenchError> {
        let [ours, peer] = self.cpus;
        self.main_client()?;
        self.lookup()?;
        self.poll()?;
        self.floor(Floor::Futex, peer, "floor_futex_ns")?;
        self.floor(Floor::UnixSocket, peer, "floor_unix_socket_ns")?;
        self.floor(Floor::Futex, ours, "one_core/floor_futex_ns")?;
        self.floor(Floor::UnixSocket, ours, "one_core/floor_unix_socket_ns")?;
        for one_core in [true, false] {
            for clients in [1, CLIENTS] {
                for (wait, name) in WAITS {
                    if !one_core && clients == 1 && wait == Wait::Spin {
                        // The main client, measured beside its floor.
                        continue;
                    }
                    self.group(one_core, clients, wait, name)?;
                }
            }
        }
        let both = self.cpus.to_vec();
        self.rate(&both, 1, "eight_clients")?;
        self.rate(&both, 4, "eight_clients/depth_4")?;
        self.rate(&[ours], 1, "eight_clients/clients_on_one_core")
    }

    fn job(&self, cpus: &[usize], work: Work) -> Job {
        Job { cpus: cpus.to_vec(), work }
    }

    fn slice_ns(&self) -> u64 {
        self.options.slice.as_nanos() as u64
    }

    fn step(&mut self) {
        self.steps += 1;
        (self.progress)(self.steps);
    }

    /// One measurement of one part.
    fn single(&mut self, name: &'static str, job: &Job) -> Result<Answer, BenchError> {
        let mut crew = Crew::start(name, 1, job, self.options.interrupted)?;
        let answer = crew.measure()?.pop();
        crew.end()?;
        self.step();
        answer.ok_or(BenchError::Part { part: name, cause: "no measurement" })
    }

    fn save(&mut self, socket: PathBuf) -> Result<(), BenchError> {
        let chains = self.options.chains;
        let job = self.job(&self.cpus, Work::Save { socket, chains });
        match self.single("save", &job)? {
            Answer::Saved { pages } if pages == u64::from(chains) * u64::from(CHAIN_PAGES) => {
                Ok(())
            }
            other => Err(unexpected("save", &other)),
        }
    }

    fn floor(&mut self, floor: Floor, peer_cpu: usize, name: &str) -> Result<(), BenchError> {
        let found = self.floor_ns(floor, peer_cpu)?;
        self.series.add(name, found);
        Ok(())
    }

    fn floor_ns(&mut self, floor: Floor, peer_cpu: usize) -> Result<f64, BenchError> {
        let work = Work::Floor { floor, peer_cpu, slice_ns: self.slice_ns() };
        let job = self.job(&[self.cpus[0]], work);
        let answer = self.single("floor", &job)?;
        Ok(times("floor", &answer)?.p50_ns)
    }

    /// One spinning client on a core of its own: the numbers that the contract names. What a line
    /// takes from core to core changes threefold within seconds where the machine is virtual, so
    /// the shortest round trips have their floor measured right before and right after them.
    fn main_client(&mut self) -> Result<(), BenchError> {
        let peer = self.cpus[1];
        let asks: Vec<(Ask, &str)> = ASKS.into_iter().chain(ONE_CHAIN).collect();
        let (short, long) = asks.split_at(BESIDE_THE_FLOOR);
        let mut crew = self.attach(&[self.cpus[0]], 1, Wait::Spin, &asks, false)?;
        let before = self.floor_ns(Floor::TwoLine, peer)?;
        let mut answers = measure(&mut crew, short)?;
        let after = self.floor_ns(Floor::TwoLine, peer)?;
        self.series.add("floor_two_line_ns", (before + after) / 2.0);
        answers.extend(measure(&mut crew, long)?);
        crew.end()?;
        self.step();
        for (name, value) in answers {
            self.series.add(name, value);
            if !name.contains('/') {
                self.series.add(format!("round_trips/two_cores/one_client/spinning/{name}"), value);
            }
        }
        self.further_pages("", ["query1_ns_p50", "query128_ns_p50", "query1024_ns_p50"]);
        let one_chain =
            ["query1_ns_p50", "one_chain/query128_ns_p50", "one_chain/query1024_ns_p50"];
        self.further_pages("one_chain/", one_chain);
        Ok(())
    }

    /// What each page after the first adds to a query.
    fn further_pages(&mut self, prefix: &str, [one, middle, long]: [&str; 3]) {
        let one = self.series.last(one);
        for (name, pages) in [(middle, MIDDLE_PAGES), (long, CHAIN_PAGES)] {
            let each = (self.series.last(name) - one) / f64::from(pages - 1);
            self.series.add(format!("{prefix}query_each_further_page_ns_{pages}"), each);
        }
    }

    /// One cell of the table: how many cores, how many clients, how they wait.
    fn group(
        &mut self,
        one_core: bool,
        clients: usize,
        wait: Wait,
        wait_name: &str,
    ) -> Result<(), BenchError> {
        let cpus = if one_core { vec![self.cpus[0]] } else { self.cpus.to_vec() };
        let mut crew = self.attach(&cpus, clients, wait, &ASKS, one_core)?;
        let answers = measure(&mut crew, &ASKS)?;
        crew.end()?;
        self.step();
        let cores = if one_core { "one_core" } else { "two_cores" };
        let many = if clients == 1 { "one_client" } else { "eight_clients" };
        for (name, value) in answers {
            self.series.add(format!("round_trips/{cores}/{many}/{wait_name}/{name}"), value);
            let contract = one_core && clients == 1 && wait == Wait::Park;
            if contract && ["ping_ns_p50", "query1_ns_p50"].contains(&name) {
                self.series.add(format!("one_core/{name}"), value);
            }
        }
        Ok(())
    }

    /// Clients that will ask at the same time.
    fn attach(
        &self,
        cpus: &[usize],
        clients: usize,
        wait: Wait,
        asks: &[(Ask, &'static str)],
        one_core: bool,
    ) -> Result<Crew, BenchError> {
        let manager = if one_core { self.one } else { self.two };
        let work = Work::RoundTrips {
            socket: manager.socket(),
            chains: self.options.chains,
            asks: asks.iter().map(|(ask, _)| *ask).collect(),
            wait,
            length: Length { slice_ns: self.slice_ns(), count_max: None },
        };
        let job = self.job(cpus, work);
        Crew::start("round trips", clients, &job, self.options.interrupted)
    }

    fn lookup(&mut self) -> Result<(), BenchError> {
        let work = Work::Lookup {
            chains: self.options.chains,
            walks: WALKS.iter().map(|(walk, _)| *walk).collect(),
            slice_ns: self.slice_ns(),
        };
        let job = self.job(&[self.cpus[0]], work);
        let mut crew = Crew::start("hash map", 1, &job, self.options.interrupted)?;
        for (_, name) in WALKS {
            for answer in crew.measure()? {
                self.series.add(name, times("hash map", &answer)?.p50_ns);
            }
        }
        crew.end()?;
        self.step();
        Ok(())
    }

    fn poll(&mut self) -> Result<(), BenchError> {
        let work = Work::Poll { socket: self.two.socket(), slice_ns: self.slice_ns() };
        let job = self.job(&[self.cpus[0]], work);
        match self.single("poll", &job)? {
            Answer::Polled(polled) => {
                self.series.add("poll_empty_ns", polled.ns);
                self.series.add("poll_empty_syscalls", polled.syscalls as f64);
                self.series.add("poll_empty_allocations", polled.allocations as f64);
                Ok(())
            }
            other => Err(unexpected("poll", &other)),
        }
    }

    /// Eight clients on `cpus` in a closed loop beside the Manager, which may use both cores.
    fn rate(&mut self, cpus: &[usize], depth: u32, prefix: &str) -> Result<(), BenchError> {
        let work = Work::Throughput {
            socket: self.two.socket(),
            chains: self.options.chains,
            depth,
            slice_ns: self.slice_ns() * u64::from(RATE_SLICES),
        };
        let job = self.job(cpus, work);
        let mut crew = Crew::start("rate", CLIENTS, &job, self.options.interrupted)?;
        let answers = crew.measure()?;
        crew.end()?;
        self.step();
        let rates: Result<Vec<Rate>, BenchError> = answers
            .iter()
            .map(|answer| match answer {
                Answer::Rate(rate) => Ok(*rate),
                other => Err(unexpected("rate", other)),
            })
            .collect();
        let rates = rates?;
        let all = |value: fn(&Rate) -> f64| rates.iter().map(value).collect::<Vec<f64>>();
        let per_second = all(|rate| rate.per_second).iter().sum();
        self.series.add(format!("{prefix}/queries_per_second"), per_second);
        let p50 = median(&all(|rate| rate.latency.p50_ns));
        self.series.add(format!("{prefix}/query1_ns_p50"), p50);
        let p99 = median(&all(|rate| rate.latency.p99_ns));
        self.series.add(format!("{prefix}/query1_ns_p99"), p99);
        Ok(())
    }

    /// Eight attached clients that ask nothing.
    fn idle(&mut self) -> Result<(), BenchError> {
        let work = Work::RoundTrips {
            socket: self.two.socket(),
            chains: 1,
            asks: Vec::new(),
            wait: Wait::Park,
            length: Length { slice_ns: 0, count_max: None },
        };
        let job = self.job(&self.cpus, work);
        let crew = Crew::start("idle", CLIENTS, &job, self.options.interrupted)?;
        self.pause(SETTLE)?;
        let (began, before) = (Instant::now(), self.two.cpu_time()?);
        self.pause(self.options.idle)?;
        let (elapsed, after) = (began.elapsed(), self.two.cpu_time()?);
        crew.end()?;
        self.step();
        let used = after.saturating_sub(before);
        self.series.add("idle_manager_cpu_ratio", used.as_secs_f64() / elapsed.as_secs_f64());
        Ok(())
    }

    fn pause(&self, time: Duration) -> Result<(), BenchError> {
        let end = Instant::now() + time;
        while let Some(left) = end.checked_duration_since(Instant::now()) {
            if (self.options.interrupted)() {
                return Err(BenchError::Interrupted);
            }
            thread::sleep(left.min(PAUSE));
        }
        Ok(())
    }
}

/// The next round trips of every client: the median of their medians.
fn measure(
    crew: &mut Crew,
    asks: &[(Ask, &'static str)],
) -> Result<Vec<(&'static str, f64)>, BenchError> {
    let mut found = Vec::with_capacity(asks.len());
    for (_, name) in asks {
        let answers = crew.measure()?;
        let each: Result<Vec<f64>, BenchError> = answers
            .iter()
            .map(|answer| times("round trips", answer).map(|times| times.p50_ns))
            .collect();
        found.push((*name, median(&each?)));
    }
    Ok(found)
}

fn times(part: &'static str, answer: &Answer) -> Result<Summary, BenchError> {
    match answer {
        Answer::Times(summary) if summary.samples > 0 => Ok(*summary),
        other => Err(unexpected(part, other)),
    }
}

fn unexpected(part: &'static str, _answer: &Answer) -> BenchError {
    BenchError::Part { part, cause: "its answer is of another kind, or empty" }
}
