//! Closed sets of label values: the only values that a metric's label can take.

use crate::bootstrap::message::Refusal;
use crate::record::{Code, RequestKind, Status};

/// A label with a closed set of values.
pub trait Label: Copy {
    /// Name of the label in Prometheus text.
    const NAME: &'static str;
    /// Every value, in the order of [`position`](Self::position).
    const VALUES: &'static [&'static str];

    /// Index of this value in [`VALUES`](Self::VALUES).
    fn position(self) -> usize;
}

macro_rules! label_enum {
    ($(#[$meta:meta])* $name:ident, $label_name:literal { $($(#[$vmeta:meta])* $variant:ident => $label:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[repr(u8)]
        pub enum $name { $($(#[$vmeta])* $variant,)+ }

        impl $name {
            /// Every value, in wire order.
            pub const ALL: &'static [$name] = &[$($name::$variant,)+];

            /// Stable lower-case name, as metrics, JSON and messages spell it.
            pub const fn label(self) -> &'static str {
                match self { $(Self::$variant => $label,)+ }
            }

            /// The number that stands for this value in the segment: from 1, so that an untouched
            /// word means no value.
            pub const fn to_word(self) -> u64 {
                self as u64 + 1
            }

            /// The value that `word` stands for, or `None`.
            pub fn from_word(word: u64) -> Option<Self> {
                let index = usize::try_from(word.checked_sub(1)?).ok()?;
                Self::ALL.get(index).copied()
            }
        }

        impl Label for $name {
            const NAME: &'static str = $label_name;
            const VALUES: &'static [&'static str] = &[$($label,)+];

            #[inline]
            fn position(self) -> usize {
                self as usize
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.label())
            }
        }
    };
}

label_enum! {
    /// Where bytes were when they were wanted.
    HeldIn, "tier" {
        /// In the Manager's DRAM.
        Dram => "dram",
        /// On SSD.
        Ssd => "ssd",
    }
}

label_enum! {
    /// Why a page was missed, refused or failed: [`Code`] folded to what can happen to a page.
    Reason, "reason" {
        /// The page is in no tier.
        Absent => "absent",
        /// Its parent is in no tier.
        ParentAbsent => "parent_absent",
        /// No DRAM could be freed for it.
        NoMemory => "no_memory",
        /// The query or speculative budget was taken.
        OverBudget => "over_budget",
        /// Larger than a limit that no waiting can lift.
        TooLarge => "too_large",
        /// The deadline passed first.
        Deadline => "deadline",
        /// Ended by a `Cancel`, or with its session.
        Cancelled => "cancelled",
        /// The SSD read failed or the image did not match its checksum.
        IoError => "io_error",
        /// The copy to or from the engine's memory failed.
        DeviceError => "device_error",
        /// The fence is missing, unknown or invalid.
        BadFence => "bad_fence",
        /// The namespace was forgotten meanwhile.
        Forgotten => "forgotten",
        /// The lease was unknown or had expired.
        NoLease => "no_lease",
        /// The Manager is stopping.
        Draining => "draining",
        /// The request was malformed.
        BadRequest => "bad_request",
    }
}

impl Reason {
    /// The reason that counts pages which ended with `code`. Total, so that reasons sum to the
    /// whole whatever codes are added.
    pub const fn of(code: Code) -> Self {
        match code {
            Code::NoMemory => Self::NoMemory,
            Code::OverBudget => Self::OverBudget,
            Code::Deadline => Self::Deadline,
            Code::Cancelled => Self::Cancelled,
            Code::IoError => Self::IoError,
            Code::DeviceError => Self::DeviceError,
            Code::ParentAbsent => Self::ParentAbsent,
            Code::TooLarge => Self::TooLarge,
            Code::Draining => Self::Draining,
            Code::Forgotten => Self::Forgotten,
            Code::BadFence => Self::BadFence,
            Code::UnknownLease | Code::ExpiredLease => Self::NoLease,
            Code::None | Code::Absent => Self::Absent,
            _ => Self::BadRequest,
        }
    }
}

label_enum! {
    /// What became of a page that was offered to the spill set. Every offered page ends in exactly
    /// one of them.
    SpillOutcome, "outcome" {
        /// Image and footer are on SSD.
        Written => "written",
        /// A slot held it already.
        AlreadyThere => "already_there",
        /// Forgotten, or offered again, before its write began.
        Superseded => "superseded",
        /// The spill policy did not want it, or it had to leave while the write budget was used up.
        SkippedByPolicy => "skipped_by_policy",
        /// DRAM turned over faster than the device could write.
        EvictedUnwritten => "evicted_unwritten",
        /// The write failed.
        Failed => "failed",
    }
}

label_enum! {
    /// What became of a page that a `Prepare` named.
    PrepareOutcome, "outcome" {
        /// Read from SSD into DRAM.
        Prepared => "prepared",
        /// It was in DRAM, or on its way there.
        AlreadyThere => "already_there",
        /// In no tier.
        Absent => "absent",
        /// No budget or memory for a hint.
        Skipped => "skipped",
        /// The read failed, or its device is off.
        Failed => "failed",
    }
}

label_enum! {
    /// Why an SSD operation failed; same order as the Manager's own causes.
    SsdFault, "reason" {
        /// The kernel answered with an error number.
        Errno => "errno",
        /// Fewer bytes than asked for, also on the second try.
        Short => "short",
        /// The image did not match the checksum of its footer.
        Checksum => "checksum",
        /// The tier did not take the work (breaker, shutdown).
        Off => "off",
        /// The file system had no space.
        NoSpace => "no_space",
    }
}

label_enum! {
    /// Which way bytes were copied between an engine's pages and DRAM.
    CopyDirection, "direction" {
        /// Device → DRAM (save).
        DeviceToHost => "d2h",
        /// DRAM → device (restore).
        HostToDevice => "h2d",
    }
}

label_enum! {
    /// What moved the bytes of a copy.
    CopyMethod, "method" {
        /// A core: pages in host memory.
        Cpu => "cpu",
        /// An order to the copy engine of a GPU for bytes side by side.
        Engine => "engine",
        /// An order to the copy engine for rows at an even distance.
        Strided => "strided",
        /// One of many copies that the driver took in one call, for bytes side by side.
        Batch => "batch",
        /// A launch of a kernel for many rows.
        Kernel => "kernel",
    }
}

label_enum! {
    /// Why a copy stopped before its last page.
    DeviceFault, "reason" {
        /// The engine's memory is gone, shorter than registered, or no longer the engine's.
        Peer => "peer",
        /// The device or driver failed.
        Device => "device",
        /// The fence was missing, unknown or invalid.
        Fence => "fence",
    }
}

label_enum! {
    /// Why a session ended.
    CloseReason, "reason" {
        /// The client closed its socket.
        Detached => "detached",
        /// The client's process died.
        PeerDied => "peer_died",
        /// The client broke the protocol.
        PeerFault => "peer_fault",
        /// The GPU of its memory, or the Manager's context on it, is lost.
        DeviceLost => "device_lost",
        /// The Manager is stopping.
        Draining => "draining",
    }
}

label_enum! {
    /// Why a connection never became a session.
    RefuseReason, "reason" {
        /// The caller's uid and gid are not allowed.
        NotAllowed => "not_allowed",
        /// Another ABI version or layout.
        AbiMismatch => "abi_mismatch",
        /// All session slots are taken.
        LimitReached => "limit_reached",
        /// No message, a malformed one, or one out of order.
        BadMessage => "bad_message",
        /// No memory or descriptors left for a session.
        NoResources => "no_resources",
        /// The Manager is stopping.
        Draining => "draining",
    }
}

impl RefuseReason {
    /// The reason that counts a connection which was refused with `refusal`. Total.
    pub const fn of(refusal: Refusal) -> Self {
        match refusal {
            Refusal::NotAllowed => Self::NotAllowed,
            Refusal::AbiMismatch => Self::AbiMismatch,
            Refusal::LimitReached => Self::LimitReached,
            Refusal::NoResources => Self::NoResources,
            Refusal::Draining => Self::Draining,
            _ => Self::BadMessage,
        }
    }
}

label_enum! {
    /// How a lease ended.
    LeaseEnd, "cause" {
        /// By `Release`.
        Released => "released",
        /// Every page of it was restored.
        Restored => "restored",
        /// Its time to live passed.
        Expired => "expired",
        /// The last session of its group went.
        Orphaned => "orphaned",
    }
}

label_enum! {
    /// State of the Manager, as the Manager says it.
    ManagerState, "state" {
        /// Not serving yet: memory and the SSD tier are being prepared.
        Starting => "starting",
        /// Serving.
        Ready => "ready",
        /// Serving, but an SSD device or another part of it is limited or off.
        Degraded => "degraded",
        /// Stopping: ends what runs, takes nothing new.
        Draining => "draining",
    }
}

label_enum! {
    /// State of a session.
    SessionState, "state" {
        /// Its requests are taken.
        Attached => "attached",
        /// Its client is gone or was cut off; what it owned is being ended.
        Closing => "closing",
    }
}

label_enum! {
    /// How far an operation has come.
    OperationStage, "stage" {
        /// Taken from the ring, nothing done yet.
        Queued => "queued",
        /// Waits for budget or memory.
        Waiting => "waiting",
        /// Its SSD pages are being read.
        Preparing => "preparing",
        /// Bytes move between the device and DRAM.
        Copying => "copying",
        /// Cancelled or failed: waits for submitted I/O and copies.
        Ending => "ending",
    }
}

label_enum! {
    /// How an SSD device is driven.
    SsdEngine, "engine" {
        /// io_uring.
        Uring => "uring",
        /// A pair of threads with `preadv` and `pwritev`.
        Blocking => "blocking",
    }
}

label_enum! {
    /// Whether what an SSD device holds was found again after the start.
    SsdRecovery, "recovery" {
        /// Its footers are being read: no reads, no writes, no hits yet.
        Scanning => "scanning",
        /// The pages that were found are being taken over: hits as they come, no writes yet.
        TakingOver => "taking_over",
        /// It is in use.
        Done => "done",
        /// Its footers could not be read: off until the next start.
        Unreadable => "unreadable",
        /// No footer came for 30 s: off until the next start.
        Stalled => "stalled",
    }
}

label_enum! {
    /// What an SSD device still does.
    SsdHealth, "health" {
        /// Reads and writes.
        Healthy => "healthy",
        /// Writes fail or hang: reads only.
        ReadOnly => "read_only",
        /// Reads fail or hang: unused.
        Off => "off",
        /// So slow that nothing new is written.
        Degraded => "degraded",
    }
}

label_enum! {
    /// Why an SSD device ceased to take some work.
    SsdStop, "reason" {
        /// Too many orders failed.
        Errors => "errors",
        /// The file system has no space.
        NoSpace => "no_space",
        /// It takes seconds.
        Slow => "slow",
        /// The kernel does not give back what it was handed.
        Hung => "hung",
    }
}

label_enum! {
    /// Why a transfer between memory and an SSD device was not over at once.
    SsdRetry, "reason" {
        /// It moved fewer bytes than asked.
        Short => "short",
        /// The kernel broke it off.
        Interrupted => "interrupted",
    }
}

macro_rules! wire_label {
    ($name:ident, $label_name:literal, first = $first:literal) => {
        impl Label for $name {
            const NAME: &'static str = $label_name;
            const VALUES: &'static [&'static str] = &{
                let mut labels = [""; $name::ALL.len()];
                let mut i = 0;
                while i < labels.len() {
                    labels[i] = $name::ALL[i].label();
                    i += 1;
                }
                labels
            };

            #[inline]
            fn position(self) -> usize {
                self as usize - $first
            }
        }
    };
}

wire_label!(RequestKind, "kind", first = 1);
wire_label!(Status, "status", first = 1);
wire_label!(Code, "code", first = 0);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_of_wire_enums_match_their_values() {
        for (i, kind) in RequestKind::ALL.iter().enumerate() {
            assert_eq!((kind.position(), RequestKind::VALUES[i]), (i, kind.label()));
        }
        for (i, status) in Status::ALL.iter().enumerate() {
            assert_eq!((status.position(), Status::VALUES[i]), (i, status.label()));
        }
        for (i, code) in Code::ALL.iter().enumerate() {
            assert_eq!((code.position(), Code::VALUES[i]), (i, code.label()));
        }
    }

    #[test]
    fn words_round_trip_and_unknown_words_are_none() {
        for &stage in OperationStage::ALL {
            assert_eq!(OperationStage::from_word(stage.to_word()), Some(stage));
        }
        assert_eq!(OperationStage::from_word(0), None);
        assert_eq!(OperationStage::from_word(6), None);
        assert_eq!(OperationStage::from_word(u64::MAX), None);
    }

    #[test]
    fn codes_of_pages_keep_their_own_reason() {
        for &code in Code::ALL {
            let reason = Reason::of(code);
            if let Some(same) = Reason::ALL.iter().find(|reason| reason.label() == code.label()) {
                assert_eq!(reason, *same, "{code}");
            }
        }
    }
}
