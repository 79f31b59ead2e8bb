//! Staging requests: one store into shared memory each, made visible together by `submit`.

use std::time::Duration;

use orbitkv_shm_protocol::ids::{PageHash, ScopeId};
use orbitkv_shm_protocol::record::{QueryMode, RequestBody};

use crate::client::Client;
use crate::error::{Gone, SubmitError};
use crate::handles::{Block, Chain, Lease, Operation, Region, Scope};

/// How long an operation may take, counted from when the Manager takes it; then it ends with what
/// it has.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Deadline(u32);

impl Deadline {
    /// The Manager's own (`Limits::operation_timeout`).
    pub const DEFAULT: Self = Self(0);

    /// `time` after receipt, rounded up to whole milliseconds: 1 ms to about 49 days.
    pub fn after(time: Duration) -> Self {
        let ms = time.as_nanos().div_ceil(1_000_000).clamp(1, u32::MAX.into());
        Self(ms as u32)
    }

    pub(crate) fn ms(self) -> u32 {
        self.0
    }
}

/// What a save may carry besides its pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SaveOptions {
    /// Index of the event that the copy waits for before it reads a byte, see
    /// [`Client::register_events`]. A save from memory of a GPU needs one.
    pub fence: Option<u32>,
    /// Longest time the save waits for memory and for its event.
    pub deadline: Deadline,
}

/// What a restore may carry besides its pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RestoreOptions {
    /// The lease stays valid for the pages that the restore names.
    pub keep: bool,
    /// Copies layer by layer, first to last, and tells of each with
    /// [`Client::is_layer_done`]. Pages that come from SSD may arrive with the last copy only: then
    /// all layers are done at nearly the same time.
    pub by_layer: bool,
    /// Index of the event that the copy waits for before it writes a byte, see
    /// [`Client::register_events`].
    pub fence: Option<u32>,
    /// Longest time the restore waits for memory and for its event.
    pub deadline: Deadline,
}

/// Every method stages one request and returns the operation that its completion will name. The
/// Manager sees staged requests after the next [`submit`](Client::submit) or
/// [`wait`](Client::wait).
///
/// All of them fail with [`SubmitError::WouldBlock`] when no credit or page table space is free
/// (`release`, `cancel` and `drain` have credits of their own), [`SubmitError::StaleHandle`] for a
/// handle of another session, [`SubmitError::ManagerGone`] once the session is over, and
/// [`SubmitError::WrongProcess`] in a forked child.
impl Client {
    /// Copies the pages of `chain` from the device to DRAM. When the operation has ended its
    /// source pages are free to change.
    ///
    /// # Errors
    /// Also [`SubmitError::NoPages`], [`SubmitError::TooManyPages`] and [`SubmitError::BadPage`].
    pub fn save<'a>(
        &mut self,
        region: &Region,
        chain: impl Into<Chain<'a, Block>>,
    ) -> Result<Operation, SubmitError> {
        self.save_chains(region, &[chain.into()], SaveOptions::default())
    }

    /// [`save`](Self::save) of several chains at once; a refusal in one does not end the others.
    ///
    /// # Errors
    /// As `save`.
    pub fn save_chains(
        &mut self,
        region: &Region,
        chains: &[Chain<'_, Block>],
        options: SaveOptions,
    ) -> Result<Operation, SubmitError> {
        let session = self.session_of(region.tag)?;
        check_blocks(region, chains)?;
        let body = RequestBody::Save { region: region.id, fence: options.fence };
        session.stage_pages(body, options.deadline.ms(), chains)
    }

    /// Looks up the longest restorable prefix of `chain` and leases it. A set as scope asks for
    /// what every member has.
    ///
    /// # Errors
    /// Also [`SubmitError::NoPages`] and [`SubmitError::TooManyPages`].
    pub fn query<'a>(
        &mut self,
        scope: &Scope,
        chain: impl Into<Chain<'a, PageHash>>,
        mode: QueryMode,
        deadline: Deadline,
    ) -> Result<Operation, SubmitError> {
        let body = |scope| RequestBody::Query { scope, mode };
        self.look_up(scope, chain.into(), deadline, body)
    }

    /// Hints that the pages of `chain` will be asked for soon. Takes no lease.
    ///
    /// # Errors
    /// Also [`SubmitError::NoPages`] and [`SubmitError::TooManyPages`].
    pub fn prepare<'a>(
        &mut self,
        scope: &Scope,
        chain: impl Into<Chain<'a, PageHash>>,
    ) -> Result<Operation, SubmitError> {
        let body = |scope| RequestBody::Prepare { scope };
        self.look_up(scope, chain.into(), Deadline::DEFAULT, body)
    }

    fn look_up(
        &mut self,
        scope: &Scope,
        chain: Chain<'_, PageHash>,
        deadline: Deadline,
        body: impl FnOnce(ScopeId) -> RequestBody,
    ) -> Result<Operation, SubmitError> {
        let session = self.session_of(scope.tag)?;
        if chain.blocks.is_empty() {
            return Err(SubmitError::NoPages);
        }
        session.stage_pages(body(scope.id), deadline.ms(), &[chain])
    }

    /// Copies leased pages to the device: `blocks[i]` is page `offset + i` of the lease and must
    /// name its hash. Ends the lease for these pages, whatever the result, unless
    /// [`RestoreOptions::keep`] is set.
    ///
    /// Until the operation has ended its device pages belong to the copy.
    ///
    /// # Errors
    /// Also [`SubmitError::NoPages`], [`SubmitError::TooManyPages`] and [`SubmitError::BadPage`].
    pub fn restore(
        &mut self,
        lease: &Lease,
        offset: u32,
        region: &Region,
        blocks: &[Block],
        options: RestoreOptions,
    ) -> Result<Operation, SubmitError> {
        self.check_lease(lease)?;
        let session = self.session_of(region.tag)?;
        let chains = [Chain::from(blocks)];
        check_blocks(region, &chains)?;
        let body = RequestBody::Restore {
            region: region.id,
            lease: lease.to_parts().lease,
            offset,
            fence: options.fence,
            keep: options.keep,
            by_layer: options.by_layer,
        };
        let operation = session.stage_pages(body, options.deadline.ms(), &chains)?;
        let last_word = if options.by_layer { region.last_layer } else { 0 };
        Ok(session.with_last_word(operation, last_word))
    }

    /// Ends a lease for this session's rank.
    ///
    /// # Errors
    /// See the list above.
    pub fn release(&mut self, lease: Lease) -> Result<Operation, SubmitError> {
        self.check_lease(&lease)?;
        let body = RequestBody::Release { lease: lease.to_parts().lease };
        self.bound.enter()?.stage(body, 0)
    }

    /// Ends an operation early. Its own completion comes before that of the cancel, and only after
    /// everything submitted for it has drained.
    ///
    /// # Errors
    /// See the list above; `StaleHandle` also when the operation has already ended.
    pub fn cancel(&mut self, operation: Operation) -> Result<Operation, SubmitError> {
        let session = self.bound.enter()?;
        if let Some(gone) = session.gone() {
            return Err(gone.into());
        }
        if !session.is_outstanding(&operation) {
            return Err(SubmitError::StaleHandle);
        }
        session.stage(RequestBody::Cancel { operation: operation.id }, 0)
    }

    /// Makes every page of a namespace unfindable, now and after a restart. Ends
    /// [`Partial`](crate::Status::Partial) with [`Code::Deadline`](crate::Code::Deadline) when no page
    /// can be found any more, but a device keeps the record of that waiting: until it is made, a
    /// restart could find the pages of the device again.
    ///
    /// # Errors
    /// See the list above.
    pub fn forget(&mut self, scope: &Scope) -> Result<Operation, SubmitError> {
        let session = self.session_of(scope.tag)?;
        session.stage(RequestBody::Forget { scope: scope.id }, 0)
    }

    /// Ends the use of a region. When the operation has ended no copy touches its memory any more.
    ///
    /// # Errors
    /// See the list above.
    pub fn unregister(&mut self, region: Region) -> Result<Operation, SubmitError> {
        let session = self.session_of(region.tag)?;
        session.stage(RequestBody::Unregister { region: region.id }, 0)
    }

    /// Asks for an answer and nothing else.
    ///
    /// # Errors
    /// See the list above.
    pub fn ping(&mut self) -> Result<Operation, SubmitError> {
        self.bound.enter()?.stage(RequestBody::Ping, 0)
    }

    /// Asks for an answer once the session owns nothing: no operation before this one, no lease.
    ///
    /// # Errors
    /// See the list above.
    pub fn drain(&mut self, deadline: Deadline) -> Result<Operation, SubmitError> {
        self.bound.enter()?.stage(RequestBody::Drain, deadline.ms())
    }

    /// Publishes everything staged since the last time and wakes the Manager at most once, if it
    /// sleeps. Returns how many requests that were.
    ///
    /// # Errors
    /// [`Gone`] once the session is over.
    pub fn submit(&mut self) -> Result<u32, Gone> {
        let session = self.bound.enter()?;
        match session.gone() {
            Some(gone) => Err(gone),
            None => Ok(session.publish()),
        }
    }
}

fn check_blocks(region: &Region, chains: &[Chain<'_, Block>]) -> Result<(), SubmitError> {
    let pages = region.pages;
    let mut any = false;
    for block in chains.iter().flat_map(|chain| chain.blocks) {
        any = true;
        if block.page >= pages {
            return Err(SubmitError::BadPage { page: block.page, pages });
        }
    }
    if any { Ok(()) } else { Err(SubmitError::NoPages) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_never_becomes_the_default_by_rounding() {
        assert_eq!(Deadline::after(Duration::ZERO).ms(), 1);
        assert_eq!(Deadline::after(Duration::from_nanos(1)).ms(), 1);
        assert_eq!(Deadline::after(Duration::from_micros(1001)).ms(), 2);
        assert_eq!(Deadline::after(Duration::from_millis(250)).ms(), 250);
        assert_eq!(Deadline::after(Duration::MAX).ms(), u32::MAX);
        assert_eq!(Deadline::DEFAULT.ms(), 0);
    }
}
