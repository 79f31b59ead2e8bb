//! Staging operations: nothing is visible to the Manager before `submit` or `wait`.

use orbitkv_engine::{
    Block, Chain, Operation, PageHash, QueryMode, RestoreOptions, SaveOptions, SubmitError,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::{Attached, Client};
use crate::buffer::{self, Hashes, Numbers};
use crate::error;
use crate::handle::{Region, Scope};
use crate::lease::Lease;
use crate::time;

impl Attached {
    /// The number of what was staged.
    fn staged(&mut self, py: Python<'_>, staged: Result<Operation, SubmitError>) -> PyResult<u64> {
        match staged {
            Ok(operation) => Ok(self.operations.note(operation)),
            Err(error) => Err(error::submit(py, error)),
        }
    }

    /// Refuses more pages than the whole table has before anything is kept of them.
    fn check_count(&self, py: Python<'_>, entries: usize) -> PyResult<()> {
        let entries_max = self.client.limits().page_entries;
        if entries <= entries_max as usize {
            return Ok(());
        }
        Err(error::submit(py, SubmitError::TooManyPages { entries, entries_max }))
    }

    /// Reads the two arrays into `blocks`.
    fn read_blocks(
        &mut self,
        py: Python<'_>,
        hashes: &Hashes<'_>,
        pages: &Numbers<'_>,
    ) -> PyResult<()> {
        if hashes.len() != pages.len() {
            let words = format!("{} hashes and {} pages; give as many", hashes.len(), pages.len());
            return Err(PyValueError::new_err(words));
        }
        self.check_count(py, hashes.len())?;
        self.blocks.clear();
        let pairs = hashes.iter().zip(pages.iter());
        self.blocks.extend(pairs.map(|(hash, page)| Block { hash, page }));
        Ok(())
    }

    fn read_hashes(&mut self, py: Python<'_>, hashes: &Hashes<'_>) -> PyResult<()> {
        self.check_count(py, hashes.len())?;
        self.hashes.clear();
        self.hashes.extend(hashes.iter());
        Ok(())
    }
}

/// Cuts `blocks` into chains; a parent of zeros is none.
fn chains_of<'a>(
    mut blocks: &'a [Block],
    lengths: &Numbers<'_>,
    parents: &Hashes<'_>,
) -> PyResult<Vec<Chain<'a, Block>>> {
    if lengths.len() != parents.len() {
        let words =
            format!("{} lengths and {} parents; give as many", lengths.len(), parents.len());
        return Err(PyValueError::new_err(words));
    }
    let mut chains = Vec::with_capacity(lengths.len().min(blocks.len()));
    let mut asked = 0;
    for (length, parent) in lengths.iter().zip(parents.iter()) {
        asked += u64::from(length);
        let Some((chain, rest)) = blocks.split_at_checked(length as usize) else { continue };
        blocks = rest;
        let parent = Some(parent).filter(|parent| *parent != PageHash::default());
        chains.push(Chain { parent, blocks: chain });
    }
    let given = chains.iter().map(|chain| chain.blocks.len()).sum::<usize>() + blocks.len();
    if asked == given as u64 {
        return Ok(chains);
    }
    let words = format!("lengths sum to {asked} pages, but {given} are given");
    Err(PyValueError::new_err(words))
}

fn mode_of(name: &str) -> PyResult<QueryMode> {
    match name {
        "demand" => Ok(QueryMode::Demand),
        "speculative" => Ok(QueryMode::Speculative),
        "candidate" => Ok(QueryMode::Candidate),
        _ => {
            let words = format!("mode {name:?}; give \"demand\", \"speculative\" or \"candidate\"");
            Err(PyValueError::new_err(words))
        }
    }
}

#[pymethods]
impl Client {
    /// Copies the pages of one chain from the device to DRAM. `parent` is the hash of the page
    /// before the first, none at the root of a sequence; `fence` the index of a recorded event that
    /// the copy waits for; `deadline` in seconds.
    #[pyo3(signature = (region, hashes, pages, *, parent = None, fence = None, deadline = None))]
    #[allow(clippy::too_many_arguments, reason = "most are keywords")]
    fn save(
        &self,
        py: Python<'_>,
        region: &Region,
        hashes: &Bound<'_, PyAny>,
        pages: &Bound<'_, PyAny>,
        parent: Option<&Bound<'_, PyAny>>,
        fence: Option<u32>,
        deadline: Option<f64>,
    ) -> PyResult<u64> {
        let (hashes, pages) = (Hashes::read("hashes", hashes)?, Numbers::read("pages", pages)?);
        let parent = buffer::hash("parent", parent)?;
        let options = SaveOptions { fence, deadline: time::deadline(deadline)? };
        self.enter(py, |attached| {
            attached.read_blocks(py, &hashes, &pages)?;
            let chain = Chain { parent, blocks: &attached.blocks };
            let staged = attached.client.save_chains(&region.0, &[chain], options);
            attached.staged(py, staged)
        })
    }

    /// `save` of several chains at once, one behind the other in `hashes` and `pages`; a refusal in
    /// one does not end the others. `lengths` are unsigned 32-bit integers, the pages of each chain;
    /// `parents` 32 bytes each, zeros at the root.
    #[pyo3(signature = (region, hashes, pages, lengths, parents, *, fence = None, deadline = None))]
    #[allow(clippy::too_many_arguments, reason = "two are keywords")]
    fn save_chains(
        &self,
        py: Python<'_>,
        region: &Region,
        hashes: &Bound<'_, PyAny>,
        pages: &Bound<'_, PyAny>,
        lengths: &Bound<'_, PyAny>,
        parents: &Bound<'_, PyAny>,
        fence: Option<u32>,
        deadline: Option<f64>,
    ) -> PyResult<u64> {
        let (hashes, pages) = (Hashes::read("hashes", hashes)?, Numbers::read("pages", pages)?);
        let lengths = Numbers::read("lengths", lengths)?;
        let parents = Hashes::read("parents", parents)?;
        let options = SaveOptions { fence, deadline: time::deadline(deadline)? };
        self.enter(py, |attached| {
            attached.read_blocks(py, &hashes, &pages)?;
            attached.check_count(py, lengths.len())?;
            let chains = chains_of(&attached.blocks, &lengths, &parents)?;
            let staged = attached.client.save_chains(&region.0, &chains, options);
            attached.staged(py, staged)
        })
    }

    /// Looks up the longest restorable prefix and leases it. `mode`: "demand" waits for memory and
    /// SSD reads up to the deadline, "speculative" is skipped when the speculative budget is taken,
    /// "candidate" leases pages where they are and never waits.
    #[pyo3(signature = (scope, hashes, *, parent = None, mode = "demand", deadline = None))]
    fn query(
        &self,
        py: Python<'_>,
        scope: &Scope,
        hashes: &Bound<'_, PyAny>,
        parent: Option<&Bound<'_, PyAny>>,
        mode: &str,
        deadline: Option<f64>,
    ) -> PyResult<u64> {
        let hashes = Hashes::read("hashes", hashes)?;
        let parent = buffer::hash("parent", parent)?;
        let (mode, deadline) = (mode_of(mode)?, time::deadline(deadline)?);
        self.enter(py, |attached| {
            attached.read_hashes(py, &hashes)?;
            let chain = Chain { parent, blocks: &attached.hashes };
            let staged = attached.client.query(&scope.0, chain, mode, deadline);
            attached.staged(py, staged)
        })
    }

    /// Hints that pages will be asked for soon. Takes no lease.
    #[pyo3(signature = (scope, hashes, *, parent = None))]
    fn prepare(
        &self,
        py: Python<'_>,
        scope: &Scope,
        hashes: &Bound<'_, PyAny>,
        parent: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u64> {
        let hashes = Hashes::read("hashes", hashes)?;
        let parent = buffer::hash("parent", parent)?;
        self.enter(py, |attached| {
            attached.read_hashes(py, &hashes)?;
            let chain = Chain { parent, blocks: &attached.hashes };
            let staged = attached.client.prepare(&scope.0, chain);
            attached.staged(py, staged)
        })
    }

    /// Copies leased pages to the device: the i-th is page `offset + i` of the lease and must name
    /// its hash. Ends the lease for these pages, whatever the result, unless `keep`. `by_layer`
    /// copies in the order of the layers, and `is_layer_done` tells of each.
    #[pyo3(signature = (
        lease, offset, region, hashes, pages, *, keep = false, by_layer = false, fence = None,
        deadline = None
    ))]
    #[allow(clippy::too_many_arguments, reason = "most are keywords")]
    fn restore(
        &self,
        py: Python<'_>,
        lease: &Lease,
        offset: u32,
        region: &Region,
        hashes: &Bound<'_, PyAny>,
        pages: &Bound<'_, PyAny>,
        keep: bool,
        by_layer: bool,
        fence: Option<u32>,
        deadline: Option<f64>,
    ) -> PyResult<u64> {
        let (hashes, pages) = (Hashes::read("hashes", hashes)?, Numbers::read("pages", pages)?);
        let options = RestoreOptions { keep, by_layer, fence, deadline: time::deadline(deadline)? };
        self.enter(py, |attached| {
            attached.read_blocks(py, &hashes, &pages)?;
            let blocks = &attached.blocks;
            let staged = attached.client.restore(&lease.0, offset, &region.0, blocks, options);
            attached.staged(py, staged)
        })
    }

    /// Ends a lease for this session's rank.
    fn release(&self, py: Python<'_>, lease: &Lease) -> PyResult<u64> {
        self.enter(py, |attached| {
            let staged = attached.client.release(lease.0);
            attached.staged(py, staged)
        })
    }

    /// Ends an operation early. Its own completion comes before that of the cancel, and only after
    /// everything submitted for it has drained.
    fn cancel(&self, py: Python<'_>, operation: u64) -> PyResult<u64> {
        self.enter(py, |attached| {
            let found = attached.operations.find(operation).ok_or(SubmitError::StaleHandle);
            let staged = found.and_then(|operation| attached.client.cancel(operation));
            attached.staged(py, staged)
        })
    }

    /// Makes every page of a namespace unfindable, now and after a restart.
    fn forget(&self, py: Python<'_>, scope: &Scope) -> PyResult<u64> {
        self.enter(py, |attached| {
            let staged = attached.client.forget(&scope.0);
            attached.staged(py, staged)
        })
    }

    /// Ends the use of a region. When the operation has ended no copy touches its memory any more.
    fn unregister(&self, py: Python<'_>, region: &Region) -> PyResult<u64> {
        self.enter(py, |attached| {
            let staged = attached.client.unregister(region.0);
            attached.staged(py, staged)
        })
    }

    /// Asks for an answer and nothing else.
    fn ping(&self, py: Python<'_>) -> PyResult<u64> {
        self.enter(py, |attached| {
            let staged = attached.client.ping();
            attached.staged(py, staged)
        })
    }

    /// Asks for an answer once the session owns nothing: no operation before this one, no lease.
    #[pyo3(signature = (deadline = None))]
    fn drain(&self, py: Python<'_>, deadline: Option<f64>) -> PyResult<u64> {
        let deadline = time::deadline(deadline)?;
        self.enter(py, |attached| {
            let staged = attached.client.drain(deadline);
            attached.staged(py, staged)
        })
    }

    /// Publishes everything staged since the last time and wakes the Manager at most once, if it
    /// sleeps. Returns how many requests that were.
    fn submit(&self, py: Python<'_>) -> PyResult<u32> {
        self.enter(py, |attached| attached.client.submit().map_err(|gone| error::gone(py, gone)))
    }
}
