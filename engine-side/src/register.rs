//! Registration over the bootstrap socket: namespaces, sets, memory, events and regions.
//!
//! Blocking, each call at most the timeout of [`Connect`](crate::Connect); done before serving
//! starts, not per request.

use std::os::fd::{AsFd, BorrowedFd};

use orbitkv_shm_protocol::bootstrap::message::{
    ClientMessage, GpuId, IpcHandle, ManagerMessage, MemorySpec, NamespaceSpec, RegionSpec,
    SegmentSpec,
};
use orbitkv_shm_protocol::bootstrap::transport::TransportError;
use orbitkv_shm_protocol::ids::{RegionId, ScopeId};

use rustix::io::Errno;

use crate::client::Client;
use crate::error::{RegisterError, message_of};
use crate::handles::{Memory, Region, Scope, Tag};

/// Where the pages of a region lie.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RegionLayout {
    /// Namespace that the pages belong to; not a set.
    pub scope: Scope,
    /// Device pages, at least 1.
    pub pages: u32,
    /// Segments of one page, in image order, at most 1,024.
    pub segments: Vec<Segment>,
}

/// One part of every page: of device page p the `length` bytes at `offset + p * stride` of
/// `memory`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    /// Where the bytes lie.
    pub memory: Memory,
    /// Offset of device page 0's segment, in bytes.
    pub offset: u64,
    /// Distance to the same segment of the next device page, in bytes.
    pub stride: u64,
    /// Length, in bytes.
    pub length: u64,
    /// Layer that it belongs to, for [`RestoreOptions::by_layer`](crate::RestoreOptions::by_layer):
    /// below the session's done words. 0 where nobody restores by layer.
    pub layer: u32,
}

/// All of them fail as [`RegisterError`] says. After [`RegisterError::Timeout`] the client stays
/// usable: a late answer is dropped.
impl Client {
    /// Names the identity of page bytes. The same fields name the same pages in every session.
    ///
    /// # Errors
    /// See above.
    pub fn define_namespace(&mut self, spec: &NamespaceSpec) -> Result<Scope, RegisterError> {
        self.check_process()?;
        self.define(&ClientMessage::DefineNamespace(spec.clone()))
    }

    /// Names an ordered set of namespaces, so that one query asks for what all of them have.
    ///
    /// # Errors
    /// See above; [`RegisterError::StaleHandle`] for a scope of another client.
    pub fn define_set(&mut self, members: &[Scope]) -> Result<Scope, RegisterError> {
        self.check_process()?;
        for member in members {
            self.check_tag(member.tag)?;
        }
        let members = members.iter().map(|scope| scope.id.0).collect();
        self.define(&ClientMessage::DefineSet { members })
    }

    fn define(&mut self, question: &ClientMessage) -> Result<Scope, RegisterError> {
        match self.ask(question, &[])? {
            ManagerMessage::Scope { scope, page_bytes } => {
                Ok(Scope { tag: self.tag(), id: ScopeId(scope), page_bytes })
            }
            _ => Err(self.bad_answer("scope")),
        }
    }

    /// Offers the first `bytes` of a memfd. Sealed against shrinking (`F_SEAL_SHRINK`) the Manager
    /// maps it, which is the fastest way; unsealed it is read and written through the descriptor.
    ///
    /// The descriptor is duplicated to the Manager and may be closed afterwards.
    ///
    /// # Errors
    /// See above.
    pub fn register_memfd(
        &mut self,
        memfd: impl AsFd,
        bytes: u64,
    ) -> Result<Memory, RegisterError> {
        self.register_memory(MemorySpec::Memfd { bytes }, bytes, Some(memfd.as_fd()))
    }

    /// Offers memory of a GPU: a [`MemorySpec::Cuda`]. Its handle stands for a whole allocation,
    /// whatever address in it was asked for, so the offset counts from the allocation's own start. The
    /// allocation must live until every region over it was unregistered or the session has ended.
    /// Its bytes come back to the GPU once the Manager has let go of it too: see
    /// [`release_memory`](Self::release_memory).
    ///
    /// Kernels that write the pages run when the GPU comes to them, so each save from such memory
    /// names a fence: see [`register_events`](Self::register_events).
    ///
    /// # Errors
    /// See above; [`RegisterError::Refused`] also when the Manager runs without CUDA, does not see
    /// that GPU, or cannot open the allocation.
    pub fn register_cuda(&mut self, spec: &MemorySpec) -> Result<Memory, RegisterError> {
        self.check_process()?;
        let MemorySpec::Cuda { bytes, .. } = *spec else {
            return Err(RegisterError::Environment(Errno::INVAL));
        };
        self.register_memory(spec.clone(), bytes, None)
    }

    /// Appends events of one GPU to the session's pool, at most
    /// [`EVENTS_PER_MESSAGE_MAX`](orbitkv_shm_protocol::bootstrap::message::EVENTS_PER_MESSAGE_MAX)
    /// a call: what `cuIpcGetEventHandle` gave for each. Returns the index of the first, which
    /// [`SaveOptions::fence`](crate::SaveOptions::fence) and
    /// [`RestoreOptions::fence`](crate::RestoreOptions::fence) name; the others follow.
    ///
    /// An event belongs to one operation from [`submit`](Self::submit) to its completion. Before that
    /// it must have been recorded (one that never was passes at once), and until then it must not be
    /// recorded again. The pool ends with the session.
    ///
    /// # Errors
    /// See above.
    pub fn register_events(
        &mut self,
        gpu: GpuId,
        handles: &[IpcHandle],
    ) -> Result<u32, RegisterError> {
        self.check_process()?;
        let handles = handles.to_vec();
        match self.ask(&ClientMessage::RegisterEvents { gpu, handles }, &[])? {
            ManagerMessage::Events { first } => Ok(first),
            _ => Err(self.bad_answer("events")),
        }
    }

    pub(crate) fn register_memory(
        &mut self,
        spec: MemorySpec,
        bytes: u64,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<Memory, RegisterError> {
        match self.ask(&ClientMessage::RegisterMemory(spec), descriptor.as_slice())? {
            ManagerMessage::Memory { memory } => Ok(Memory { tag: self.tag(), id: memory, bytes }),
            _ => Err(self.bad_answer("memory")),
        }
    }

    /// Ends the use of memory: no region can be registered over it any more, and a copy of the
    /// handle is refused. Regions over it go on. The Manager lets go of the memory when the last of
    /// them was unregistered ([`unregister`](Self::unregister)), so a GPU's or a memfd's bytes are
    /// free soon after both that and this call: an engine that re-allocates its pages releases the
    /// old memory, else the Manager keeps it until the session ends.
    ///
    /// # Errors
    /// See above; [`RegisterError::StaleHandle`] for memory of another client, and
    /// [`RegisterError::Refused`] for memory that was released before.
    pub fn release_memory(&mut self, memory: Memory) -> Result<(), RegisterError> {
        self.check_process()?;
        self.check_tag(memory.tag)?;
        match self.ask(&ClientMessage::ReleaseMemory { memory: memory.id }, &[])? {
            ManagerMessage::MemoryReleased => Ok(()),
            _ => Err(self.bad_answer("memory released")),
        }
    }

    /// Joins memory, page layout and namespace into a region that can be saved and restored.
    ///
    /// # Errors
    /// See above; [`RegisterError::StaleHandle`] for a scope or memory of another client.
    pub fn register_region(&mut self, layout: &RegionLayout) -> Result<Region, RegisterError> {
        self.check_process()?;
        self.check_tag(layout.scope.tag)?;
        for segment in &layout.segments {
            self.check_tag(segment.memory.tag)?;
        }
        let spec = RegionSpec {
            scope: layout.scope.id.0,
            pages: layout.pages,
            segments: layout.segments.iter().map(segment_spec).collect(),
        };
        match self.ask(&ClientMessage::RegisterRegion(spec), &[])? {
            ManagerMessage::Region { region, page_bytes } => {
                let pages = layout.pages;
                let last = layout.segments.iter().map(|segment| segment.layer).max();
                Ok(Region {
                    tag: self.tag(),
                    id: RegionId(region),
                    pages,
                    page_bytes,
                    last_layer: last.unwrap_or(0),
                })
            }
            _ => Err(self.bad_answer("region")),
        }
    }

    /// An answer to another question ends the session, as an unreadable one does.
    fn bad_answer(&mut self, expected: &'static str) -> RegisterError {
        self.control.shut_down();
        RegisterError::BadAnswer { expected }
    }

    fn check_tag(&self, tag: Tag) -> Result<(), RegisterError> {
        if tag == self.tag() { Ok(()) } else { Err(RegisterError::StaleHandle) }
    }

    fn ask(
        &mut self,
        question: &ClientMessage,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<ManagerMessage, RegisterError> {
        let session = self.bound.enter()?;
        if let Some(gone) = session.gone() {
            return Err(gone.into());
        }
        match self.control.ask(question, descriptors) {
            Ok(ManagerMessage::Refused { refusal, message }) => {
                Err(RegisterError::Refused { refusal, message: message_of(&message) })
            }
            Ok(answer) => Ok(answer),
            Err(TransportError::TimedOut(timeout)) => {
                Err(RegisterError::Timeout { timeout_ms: timeout.as_millis() as u64 })
            }
            Err(TransportError::Closed) => {
                let gone = self.control.cause_of_hang_up();
                session.lose(gone);
                Err(gone.into())
            }
            Err(error) => Err(RegisterError::Transport(error)),
        }
    }
}

fn segment_spec(segment: &Segment) -> SegmentSpec {
    SegmentSpec {
        memory: segment.memory.id,
        offset: segment.offset,
        stride: segment.stride,
        length: segment.length,
        layer: segment.layer,
    }
}
