//! One request of a trace, in the form that every format is turned into.

use super::error::Problem;

/// Most blocks of one request: the largest page table. 67 million tokens of 64-token blocks.
pub const REQUEST_BLOCKS_MAX: u64 = 1 << 20;

/// One request: when it arrives and the chain of blocks that its prompt consists of.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request {
    /// Arrival, in milliseconds from the start of the trace.
    pub t_ms: u64,
    /// Conversation or agent session that it belongs to, where the trace says so.
    pub session: Option<u64>,
    /// Tokens of the prompt.
    pub input_tokens: u64,
    /// Tokens of the answer.
    pub output_tokens: u64,
    /// Block ids in prompt order.
    pub blocks: BlockRuns,
}

/// Block ids in prompt order, as runs of consecutive ids; expanded only while iterated.
///
/// An id stands for its block and everything before it: equal id, equal prefix.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct BlockRuns {
    runs: Vec<Run>,
    count: u64,
}

/// `length` consecutive ids from `first`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// First id.
    pub first: u64,
    /// Number of ids, at least 1.
    pub length: u64,
}

impl BlockRuns {
    /// Appends ids; a run that goes on where the last one ended joins it.
    ///
    /// # Errors
    /// The last id would pass `u64::MAX`, or the request [`REQUEST_BLOCKS_MAX`]; the runs are
    /// unchanged then.
    pub fn push(&mut self, first: u64, length: u64) -> Result<(), Problem> {
        if length == 0 {
            return Ok(());
        }
        if length > REQUEST_BLOCKS_MAX || self.count + length > REQUEST_BLOCKS_MAX {
            return Err(Problem::TooManyBlocks { max: REQUEST_BLOCKS_MAX });
        }
        if first.checked_add(length).is_none() {
            return Err(Problem::RunOverflow { first, length });
        }
        self.count += length;
        match self.runs.last_mut() {
            Some(last) if last.first + last.length == first => last.length += length,
            _ => self.runs.push(Run { first, length }),
        }
        Ok(())
    }

    /// The runs.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Number of ids.
    pub fn len(&self) -> u64 {
        self.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The ids, in prompt order.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.runs.iter().flat_map(|run| run.first..run.first + run.length)
    }

    /// Keeps the first `count` ids.
    pub fn truncate(&mut self, count: u64) {
        let mut left = count;
        self.runs.retain_mut(|run| {
            run.length = run.length.min(left);
            left -= run.length;
            run.length > 0
        });
        self.count = count - left;
    }
}

impl Request {
    /// Blocks that are full, given the tokens of one block: these can be saved.
    pub fn full_blocks(&self, block_tokens: u32) -> u64 {
        self.blocks.len().min(self.input_tokens / u64::from(block_tokens))
    }

    /// Input tokens that the first `blocks` blocks stand for: a partial last block counts its own
    /// tokens.
    pub fn tokens_of(&self, blocks: u64, block_tokens: u32) -> u64 {
        blocks.saturating_mul(u64::from(block_tokens)).min(self.input_tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_join_expand_and_cut() {
        let mut blocks = BlockRuns::default();
        for (first, length) in [(0, 8), (8, 2), (100, 3), (7, 0), (5, 1)] {
            blocks.push(first, length).unwrap();
        }
        assert_eq!(blocks.runs().len(), 3);
        assert_eq!(blocks.len(), 14);
        let ids: Vec<u64> = blocks.iter().collect();
        assert_eq!(ids, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 100, 101, 102, 5]);
        for cut in (0..=15).rev() {
            blocks.truncate(cut);
            assert_eq!(blocks.len(), cut.min(14));
            assert!(blocks.iter().eq(ids[..blocks.len() as usize].iter().copied()));
        }
        assert!(blocks.is_empty());
    }

    #[test]
    fn runs_are_bounded() {
        let mut blocks = BlockRuns::default();
        assert!(matches!(blocks.push(u64::MAX, 1), Err(Problem::RunOverflow { .. })));
        assert!(matches!(blocks.push(0, u64::MAX), Err(Problem::TooManyBlocks { .. })));
        blocks.push(0, REQUEST_BLOCKS_MAX).unwrap();
        assert!(matches!(blocks.push(9, 1), Err(Problem::TooManyBlocks { .. })));
        assert_eq!(blocks.len(), REQUEST_BLOCKS_MAX);
    }

    #[test]
    fn a_partial_last_block_counts_its_own_tokens() {
        let mut blocks = BlockRuns::default();
        blocks.push(0, 3).unwrap();
        let request =
            Request { t_ms: 0, session: None, input_tokens: 1100, output_tokens: 1, blocks };
        assert_eq!(request.tokens_of(2, 512), 1024);
        assert_eq!(request.tokens_of(3, 512), 1100);
        assert_eq!(request.full_blocks(512), 2);
    }
}
