//! One engine of the benchmark: attaches, saves, and times what it asks for, each answer checked.

use std::fs::File;
use std::hint::spin_loop;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use orbitkv_engine::{
    Block, Client, Code, Completion, Connect, Deadline, Lease, Operation, PageHash, PageOutcome,
    QueryMode, Region, RegionLayout, RestoreOptions, Scope, Segment, Status, Tier,
};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};

use crate::error::BenchError;
use crate::pages::{self, CHAIN_PAGES, PAGE_BYTES};
use crate::part::{Ask, Length, Wait};
use crate::stats::{Samples, Summary};
use crate::ticks::{self, Ticks};

/// Longest wait for any answer.
const PATIENCE: Duration = Duration::from_secs(20);
/// Empty polls between two looks at the clock.
const POLLS_PER_LOOK: u32 = 1 << 16;
/// Pause before a request that is to find everybody asleep: many times the spin of either side.
const SLEEP_GAP: Duration = Duration::from_micros(300);
/// Share of the time that passes before samples count.
const WARM_UP: u32 = 5;
/// Of so many queries one has every page's result read and checked.
const RESULTS_EVERY: u64 = 64;

/// An attached client with its namespace.
pub(crate) struct Session {
    client: Client,
    scope: Scope,
    chains: Vec<Vec<PageHash>>,
    queries: u64,
}

impl Session {
    /// Attaches to the Manager at `socket`, to ask about the pages of `chains` chains.
    pub(crate) fn attach(socket: &Path, chains: u32) -> Result<Self, BenchError> {
        let connected = Connect::new(socket).timeout(PATIENCE).connect();
        let mut client = connected.map_err(wrong("attach"))?;
        let defined = client.define_namespace(&pages::namespace());
        let scope = defined.map_err(wrong("define a namespace"))?;
        let chains = (0..chains).map(pages::chain).collect();
        Ok(Self { client, scope, chains, queries: 0 })
    }

    /// The client.
    pub(crate) fn client(&mut self) -> &mut Client {
        &mut self.client
    }

    /// How many chains it asks about.
    pub(crate) fn chains(&self) -> usize {
        self.chains.len()
    }

    /// Saves every page of every chain from a registered memfd, then restores the first and the
    /// last chain and compares their bytes. Returns how many pages are there.
    pub(crate) fn save_all(&mut self) -> Result<u64, BenchError> {
        let bytes = u64::from(CHAIN_PAGES) * PAGE_BYTES;
        let memory = device_memory(bytes).map_err(BenchError::system("make a memfd"))?;
        let region = self.register(&memory, bytes)?;
        let mut image = vec![0; bytes as usize];
        for chain in 0..self.chains.len() {
            fill(&self.chains[chain], &mut image);
            memory.write_all_at(&image, 0).map_err(BenchError::system("write a memfd"))?;
            let blocks = blocks(&self.chains[chain]);
            self.client.save(&region, &blocks).map_err(wrong("save"))?;
            let saved = self.answer(Wait::Park)?;
            if saved.status != Status::Ok || saved.pages + saved.pages_present != CHAIN_PAGES {
                return Err(no_room(&saved));
            }
        }
        for chain in [0, self.chains.len() - 1] {
            self.restore(&region, chain, &memory, &mut image)?;
        }
        Ok(self.chains.len() as u64 * u64::from(CHAIN_PAGES))
    }

    fn register(&mut self, memory: &File, bytes: u64) -> Result<Region, BenchError> {
        let memory =
            self.client.register_memfd(memory, bytes).map_err(wrong("register a memfd"))?;
        let segment =
            Segment { memory, offset: 0, stride: PAGE_BYTES, length: PAGE_BYTES, layer: 0 };
        let layout =
            RegionLayout { scope: self.scope, pages: CHAIN_PAGES, segments: vec![segment] };
        self.client.register_region(&layout).map_err(wrong("register a region"))
    }

    fn restore(
        &mut self,
        region: &Region,
        chain: usize,
        memory: &File,
        image: &mut [u8],
    ) -> Result<(), BenchError> {
        image.fill(0);
        memory.write_all_at(image, 0).map_err(BenchError::system("write a memfd"))?;
        let lease = self.hit(chain, CHAIN_PAGES, Wait::Park)?;
        let blocks = blocks(&self.chains[chain]);
        let asked = self.client.restore(&lease, 0, region, &blocks, RestoreOptions::default());
        asked.map_err(wrong("restore"))?;
        let restored = self.answer(Wait::Park)?;
        if restored.status != Status::Ok || restored.pages != CHAIN_PAGES {
            return Err(unexpected("restore", &restored));
        }
        memory.read_exact_at(image, 0).map_err(BenchError::system("read a memfd"))?;
        let mut expected = vec![0; image.len()];
        fill(&self.chains[chain], &mut expected);
        if image != expected {
            return Err(BenchError::Wrong(format!("restored bytes of chain {chain}").into()));
        }
        Ok(())
    }

    /// Times round trips of one kind: an unmeasured part, then samples until `length` is reached.
    pub(crate) fn round_trips(
        &mut self,
        ask: Ask,
        wait: Wait,
        length: Length,
        samples: &mut Samples,
    ) -> Result<Summary, BenchError> {
        let ticks = Ticks::calibrate();
        samples.clear();
        let begin = ticks::now();
        let slice = length.slice();
        let (warm, end) = (begin + ticks.of(slice / WARM_UP), begin + ticks.of(slice));
        for at in 0.. {
            if wait == Wait::Asleep {
                thread::sleep(SLEEP_GAP);
            }
            let taken = match ask {
                Ask::Ping => self.timed_ping(wait)?,
                Ask::Query { pages, one_chain } => {
                    let chain = if one_chain { 0 } else { at % self.chains.len() };
                    self.timed_query(chain, pages, wait)?
                }
            };
            let now = ticks::now();
            let over = now > end;
            if now > warm || over {
                samples.add(taken);
            }
            if over || length.count_max.is_some_and(|count| at as u64 + 1 >= count) {
                break;
            }
        }
        Ok(samples.summary(ticks, 1))
    }

    fn timed_ping(&mut self, wait: Wait) -> Result<u64, BenchError> {
        let before = ticks::now();
        self.client.ping().map_err(wrong("ping"))?;
        let answer = self.answer(wait)?;
        let after = ticks::now();
        match answer.status {
            Status::Ok => Ok(after - before),
            _ => Err(unexpected("ping", &answer)),
        }
    }

    /// A query, and its release outside of what is timed: the next request begins after the
    /// release has ended.
    fn timed_query(&mut self, chain: usize, pages: u32, wait: Wait) -> Result<u64, BenchError> {
        let before = ticks::now();
        self.ask(chain, pages, Deadline::DEFAULT)?;
        let answer = self.answer(wait)?;
        let after = ticks::now();
        let lease = self.check_hit(&answer, pages)?;
        self.release(lease, wait)?;
        Ok(after - before)
    }

    fn hit(&mut self, chain: usize, pages: u32, wait: Wait) -> Result<Lease, BenchError> {
        self.ask(chain, pages, Deadline::DEFAULT)?;
        let answer = self.answer(wait)?;
        self.check_hit(&answer, pages)
    }

    /// Stages a query of the first `pages` pages of a chain.
    pub(crate) fn ask(
        &mut self,
        chain: usize,
        pages: u32,
        deadline: Deadline,
    ) -> Result<Operation, BenchError> {
        let keys = &self.chains[chain][..pages as usize];
        let asked = self.client.query(&self.scope, keys, QueryMode::Demand, deadline);
        asked.map_err(wrong("query"))
    }

    /// Publishes what is staged and takes the next completion.
    pub(crate) fn answer(&mut self, wait: Wait) -> Result<Completion, BenchError> {
        self.client.submit().map_err(wrong("submit"))?;
        if wait != Wait::Spin {
            let answer = self.client.wait(PATIENCE).map_err(wrong("wait"))?;
            return answer.ok_or_else(no_answer);
        }
        let mut looks_end = None;
        loop {
            for _ in 0..POLLS_PER_LOOK {
                if let Some(answer) = self.client.poll().map_err(wrong("poll"))? {
                    return Ok(answer);
                }
                spin_loop();
            }
            self.client.check_manager().map_err(wrong("poll"))?;
            let now = Instant::now();
            if now > *looks_end.get_or_insert(now + PATIENCE) {
                return Err(no_answer());
            }
        }
    }

    /// The lease of an answer that must be a hit of exactly `pages` pages in DRAM.
    pub(crate) fn check_hit(
        &mut self,
        answer: &Completion,
        pages: u32,
    ) -> Result<Lease, BenchError> {
        let all = [answer.pages, answer.pages_dram].iter().all(|count| *count == pages);
        let lease = answer.lease.filter(|lease| lease.pages() == pages);
        let bytes = u64::from(pages) * PAGE_BYTES;
        let (true, true, Some(lease), Status::Ok) =
            (all, answer.bytes == bytes, lease, answer.status)
        else {
            return Err(unexpected("query", answer));
        };
        self.queries += 1;
        if self.queries % RESULTS_EVERY == 1 {
            let results = self.client.results(answer);
            let hits = results.filter(|page| {
                page.outcome == PageOutcome::Hit
                    && page.tier == Tier::Dram
                    && page.code == Code::None
            });
            let hits = hits.count();
            if hits != pages as usize {
                return Err(BenchError::Wrong(
                    format!("{hits} page results of {pages} are hits in DRAM").into(),
                ));
            }
        }
        Ok(lease)
    }

    fn release(&mut self, lease: Lease, wait: Wait) -> Result<(), BenchError> {
        self.client.release(lease).map_err(wrong("release"))?;
        let answer = self.answer(wait)?;
        check_release(&answer)
    }

    /// Stages the release of a lease.
    pub(crate) fn stage_release(&mut self, lease: Lease) -> Result<(), BenchError> {
        self.client.release(lease).map(drop).map_err(wrong("release"))
    }

    /// Waits until the session owns nothing, then ends it.
    pub(crate) fn end(mut self) -> Result<(), BenchError> {
        self.client.drain(Deadline::after(PATIENCE)).map_err(wrong("drain"))?;
        let answer = self.answer(Wait::Park)?;
        if answer.status != Status::Ok {
            return Err(unexpected("drain", &answer));
        }
        self.client.close();
        Ok(())
    }
}

/// Fails unless a release succeeded.
pub(crate) fn check_release(answer: &Completion) -> Result<(), BenchError> {
    match answer.status {
        Status::Ok => Ok(()),
        _ => Err(unexpected("release", answer)),
    }
}

fn blocks(chain: &[PageHash]) -> Vec<Block> {
    chain.iter().zip(0..).map(|(hash, page)| Block { hash: *hash, page }).collect()
}

fn fill(chain: &[PageHash], image: &mut [u8]) {
    for (hash, page) in chain.iter().zip(image.chunks_exact_mut(PAGE_BYTES as usize)) {
        pages::fill(*hash, page);
    }
}

fn device_memory(bytes: u64) -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memory = rustix::fs::memfd_create("orbitkv-bench-pages", flags)?;
    rustix::fs::ftruncate(&memory, bytes)?;
    rustix::fs::fallocate(&memory, FallocateFlags::empty(), 0, bytes)?;
    rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(File::from(memory))
}

/// A call that must not fail here did.
pub(crate) fn wrong<E: std::fmt::Display>(call: &'static str) -> impl FnOnce(E) -> BenchError {
    move |error| BenchError::Wrong(format!("{call}: {error}").into())
}

fn no_answer() -> BenchError {
    BenchError::Wrong(format!("no answer within {} s", PATIENCE.as_secs()).into())
}

fn unexpected(call: &str, answer: &Completion) -> BenchError {
    let Completion { status, code, pages, pages_dram, bytes, .. } = answer;
    let text = format!(
        "{call}: {status:?} ({code:?}), {pages} pages, {pages_dram} from DRAM, {bytes} bytes"
    );
    BenchError::Wrong(text.into())
}

fn no_room(saved: &Completion) -> BenchError {
    let Completion { status, code, pages, pages_refused, .. } = saved;
    let text = format!(
        "save: {status:?} ({code:?}), {pages} pages saved, {pages_refused} refused; the Manager's \
         DRAM pool, a quarter of free memory, must hold all pages: free some memory"
    );
    BenchError::Wrong(text.into())
}
