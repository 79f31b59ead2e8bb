//! The yardstick of a longer query: the standard library's hash map, the same keys in the same
//! order.

use std::collections::HashMap;
use std::hint::black_box;
use std::time::Duration;

use orbitkv_engine::PageHash;

use crate::error::BenchError;
use crate::pages;
use crate::part::Walk;
use crate::stats::{Samples, Summary};
use crate::ticks::{self, Ticks};

/// All pages by name, with the default hasher.
pub(crate) struct Lookup {
    map: HashMap<PageHash, u32>,
    chains: Vec<Vec<PageHash>>,
}

impl Lookup {
    /// A map of the pages of `chains` chains.
    pub(crate) fn new(chains: u32) -> Self {
        let chains: Vec<Vec<PageHash>> = (0..chains).map(pages::chain).collect();
        let map = chains.iter().flatten().zip(0..).map(|(hash, page)| (*hash, page)).collect();
        Self { map, chains }
    }

    /// Time of one lookup: the length of a prefix, as a query finds it, over its pages.
    pub(crate) fn measure(
        &self,
        walk: Walk,
        slice: Duration,
        samples: &mut Samples,
    ) -> Result<Summary, BenchError> {
        let ticks = Ticks::calibrate();
        samples.clear();
        let pages = walk.pages as usize;
        // Once before anything counts, so that every page of the map has been touched.
        for at in 0..self.chains.len() {
            self.prefix(&self.chains[at][..pages])?;
        }
        let end = ticks::now() + ticks.of(slice);
        for at in 0.. {
            let chain = if walk.one_chain { 0 } else { at % self.chains.len() };
            let keys = &self.chains[chain][..pages];
            let before = ticks::now();
            self.prefix(keys)?;
            let after = ticks::now();
            samples.add(after - before);
            if after > end {
                break;
            }
        }
        Ok(samples.summary(ticks, walk.pages))
    }

    fn prefix(&self, keys: &[PageHash]) -> Result<(), BenchError> {
        let mut found = 0;
        for key in black_box(keys) {
            match self.map.get(key) {
                Some(value) => drop(black_box(*value)),
                None => break,
            }
            found += 1;
        }
        if found == keys.len() {
            Ok(())
        } else {
            Err(BenchError::Wrong(format!("{found} of {} keys in the map", keys.len()).into()))
        }
    }
}
