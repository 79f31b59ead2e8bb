//! The built-in workload of `demo`: agents that talk in turns over a growing context.
//!
//! Every session starts with one of a few system prompts (shared by all sessions of its kind), adds
//! its own first prompt, then grows by some blocks a turn: tool output and answers. Now and then a
//! turn hands work to a sub-agent, which has a system prompt of its own, starts from a short task
//! and ends after a few turns. Sessions run interleaved, a few at a time; a user who comes back
//! after the others finds the context where memory pressure has put it.

use crate::trace::{BlockRuns, Request};

/// Shape of the workload. Ranges are inclusive; lengths are in blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Sessions in all.
    pub sessions: u32,
    /// Sessions that are open at once; the next one starts when one ends.
    pub users: u32,
    /// Turns of a session.
    pub turns: (u32, u32),
    /// Different system prompts.
    pub kinds: u32,
    /// Length of a system prompt.
    pub system_blocks: (u32, u32),
    /// What the first prompt adds.
    pub first_blocks: (u32, u32),
    /// What each later turn adds.
    pub turn_blocks: (u32, u32),
    /// One turn in so many calls a sub-agent; 0 = never.
    pub subagent_every: u32,
    /// Turns of a sub-agent.
    pub subagent_turns: (u32, u32),
    /// Task that a sub-agent starts with.
    pub subagent_blocks: (u32, u32),
    /// Milliseconds between a session's turns.
    pub think_ms: (u32, u32),
    /// Tokens of a block.
    pub block_tokens: u32,
}

impl Shape {
    /// What `demo` runs: 30 agent sessions, 16 at a time, some thousand different pages.
    pub const DEMO: Self = Self {
        sessions: 30,
        users: 16,
        turns: (6, 12),
        kinds: 3,
        system_blocks: (24, 40),
        first_blocks: (8, 24),
        turn_blocks: (2, 12),
        subagent_every: 5,
        subagent_turns: (2, 4),
        subagent_blocks: (4, 10),
        think_ms: (500, 5000),
        block_tokens: 64,
    };
}

/// A small generator with a full period of 2^64: one addition, then a mix.
#[derive(Clone, Debug)]
pub struct SplitMix64 {
    state: u64,
}

impl SplitMix64 {
    /// The same seed gives the same numbers for ever.
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.state;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A number below `bound`, which must not be 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        // The high half of the product: uniform to within 2^-32 for the bounds used here.
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    fn within(&mut self, range: (u32, u32)) -> u64 {
        let (low, high) = (range.0.min(range.1), range.0.max(range.1));
        u64::from(low) + self.below(u64::from(high - low) + 1)
    }
}

/// One agent or sub-agent while it runs.
struct Agent {
    session: u64,
    blocks: BlockRuns,
    turns_left: u64,
    next_ms: u64,
}

/// The requests of the workload, in order of arrival: a pure function of shape and seed.
pub fn generate(shape: &Shape, seed: u64) -> Vec<Request> {
    let mut make = Generator { shape, random: SplitMix64::new(seed), next_block: 0 };
    let agents: Vec<BlockRuns> =
        (0..shape.kinds.max(1)).map(|_| make.fresh(shape.system_blocks)).collect();
    let helpers = make.fresh(shape.system_blocks);
    let mut open: Vec<Agent> = Vec::new();
    let mut started = 0;
    let mut requests = Vec::new();
    let mut now_ms = 0;
    loop {
        while started < shape.sessions && (open.len() as u32) < shape.users.max(1) {
            started += 1;
            let kind = make.random.below(agents.len() as u64) as usize;
            open.push(make.agent(u64::from(started), &agents[kind], shape.first_blocks, now_ms));
        }
        // The earliest turn is next; the session number decides between equals.
        let Some(index) =
            (0..open.len()).min_by_key(|index| (open[*index].next_ms, open[*index].session))
        else {
            // A sub-agent's turns were noted as one block; the order of one session stays.
            requests.sort_by_key(|request: &Request| request.t_ms);
            return requests;
        };
        now_ms = open[index].next_ms;
        make.turn(&mut open[index], &mut requests);
        let calls =
            shape.subagent_every > 0 && make.random.below(u64::from(shape.subagent_every)) == 0;
        if calls {
            make.subagent(&mut open[index], &helpers, &mut requests);
        }
        if open[index].turns_left == 0 {
            open.swap_remove(index);
        }
    }
}

struct Generator<'a> {
    shape: &'a Shape,
    random: SplitMix64,
    next_block: u64,
}

impl Generator<'_> {
    /// Blocks that nobody has had before.
    fn fresh(&mut self, range: (u32, u32)) -> BlockRuns {
        let mut blocks = BlockRuns::default();
        self.grow(&mut blocks, range);
        blocks
    }

    fn grow(&mut self, blocks: &mut BlockRuns, range: (u32, u32)) {
        let length = self.random.within(range);
        // A context that has reached the bound of a request stops growing.
        if blocks.push(self.next_block, length).is_ok() {
            self.next_block += length;
        }
    }

    fn agent(&mut self, session: u64, system: &BlockRuns, first: (u32, u32), at: u64) -> Agent {
        let mut blocks = system.clone();
        self.grow(&mut blocks, first);
        let turns_left = self.random.within(self.shape.turns).max(1);
        let next_ms = at + self.random.within(self.shape.think_ms);
        Agent { session, blocks, turns_left, next_ms }
    }

    fn turn(&mut self, agent: &mut Agent, requests: &mut Vec<Request>) {
        requests.push(self.request(agent.session, &agent.blocks, agent.next_ms));
        self.grow(&mut agent.blocks, self.shape.turn_blocks);
        agent.turns_left -= 1;
        agent.next_ms += self.random.within(self.shape.think_ms);
    }

    /// A sub-agent runs while its agent waits; what it found enters the agent's next turn.
    fn subagent(&mut self, agent: &mut Agent, system: &BlockRuns, requests: &mut Vec<Request>) {
        let mut blocks = system.clone();
        self.grow(&mut blocks, self.shape.subagent_blocks);
        for _ in 0..self.random.within(self.shape.subagent_turns) {
            requests.push(self.request(agent.session, &blocks, agent.next_ms));
            self.grow(&mut blocks, self.shape.turn_blocks);
            agent.next_ms += self.random.within(self.shape.think_ms);
        }
    }

    fn request(&mut self, session: u64, blocks: &BlockRuns, t_ms: u64) -> Request {
        let block = u64::from(self.shape.block_tokens);
        Request {
            t_ms,
            session: Some(session),
            // The last tokens do not fill a block and are never saved.
            input_tokens: blocks.len() * block + self.random.below(block),
            output_tokens: self.random.within(self.shape.turn_blocks) * block / 2,
            blocks: blocks.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn splitmix_gives_its_published_numbers() {
        let mut random = SplitMix64::new(1_234_567);
        assert_eq!(random.next_u64(), 6_457_827_717_110_365_317);
        assert_eq!(random.next_u64(), 3_203_168_211_198_807_973);
        assert!((0..1000).all(|_| random.below(7) < 7));
    }

    #[test]
    fn one_seed_one_workload() {
        let first = generate(&Shape::DEMO, 42);
        assert_eq!(first, generate(&Shape::DEMO, 42));
        assert_ne!(first, generate(&Shape::DEMO, 43));
    }

    #[test]
    fn the_demo_has_what_it_promises() {
        let requests = generate(&Shape::DEMO, 1);
        let mut seen = HashSet::new();
        let (mut accesses, mut hits) = (0_u64, 0_u64);
        for request in &requests {
            assert!(request.blocks.len() <= request.full_blocks(Shape::DEMO.block_tokens));
            accesses += request.blocks.len();
            hits += request.blocks.iter().take_while(|id| seen.contains(id)).count() as u64;
            seen.extend(request.blocks.iter());
        }
        let sessions: HashSet<_> = requests.iter().map(|request| request.session).collect();
        assert_eq!(sessions.len(), 30);
        assert!(requests.is_sorted_by_key(|request| request.t_ms));
        assert!(hits >= 5_000, "{hits} reusable pages of {accesses}");
        assert!((1_500..6_000).contains(&seen.len()), "{} different pages", seen.len());
    }

    #[test]
    fn extreme_shapes_end() {
        let none = Shape { sessions: 0, ..Shape::DEMO };
        assert!(generate(&none, 1).is_empty());
        let zero = Shape {
            users: 0,
            kinds: 0,
            turns: (0, 0),
            first_blocks: (0, 0),
            turn_blocks: (0, 0),
            system_blocks: (0, 0),
            ..Shape::DEMO
        };
        assert!(!generate(&zero, 1).is_empty());
    }
}
