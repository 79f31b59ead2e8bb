//! Every error of the ring client as one exception, with its words and a stable `reason`.

use orbitkv_engine::cuda::CudaError as EngineCudaError;
use orbitkv_engine::{
    ConnectError as EngineConnectError, Gone as EngineGone, Refusal,
    RegisterError as EngineRegisterError, SubmitError as EngineSubmitError,
};
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::{PyTypeInfo, create_exception};

create_exception!(
    orbitkv,
    OrbitKVError,
    PyException,
    "What every exception of this module is. `reason` is a stable name of the cause."
);
create_exception!(orbitkv, ConnectError, OrbitKVError, "Why a client could not attach.");
create_exception!(
    orbitkv,
    RegisterError,
    OrbitKVError,
    "Why something was not registered. `refusal` names the Manager's cause when it refused."
);
create_exception!(
    orbitkv,
    SubmitError,
    OrbitKVError,
    "Why an operation was not staged. The Manager sees nothing of it."
);
create_exception!(
    orbitkv,
    WouldBlock,
    SubmitError,
    "No credit or page table space is free: consume completions, then try again."
);
create_exception!(
    orbitkv,
    Gone,
    OrbitKVError,
    "The session is over. While `copies_may_run` the pages of lost operations are not free."
);
create_exception!(orbitkv, CudaError, OrbitKVError, "Why something of the GPU is not there.");
create_exception!(
    orbitkv,
    UsageError,
    OrbitKVError,
    "A client was used after `close`, or entered by two threads at once."
);

/// Adds the exceptions to the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("OrbitKVError", py.get_type::<OrbitKVError>())?;
    module.add("ConnectError", py.get_type::<ConnectError>())?;
    module.add("RegisterError", py.get_type::<RegisterError>())?;
    module.add("SubmitError", py.get_type::<SubmitError>())?;
    module.add("WouldBlock", py.get_type::<WouldBlock>())?;
    module.add("Gone", py.get_type::<Gone>())?;
    module.add("CudaError", py.get_type::<CudaError>())?;
    module.add("UsageError", py.get_type::<UsageError>())
}

/// An exception of class `E` that says `words` and has a `reason`.
fn raised<E: PyTypeInfo>(py: Python<'_>, words: String, reason: &'static str) -> PyErr {
    let error = PyErr::new::<E, _>(words);
    with(py, error, "reason", reason)
}

fn with<'py>(py: Python<'py>, error: PyErr, name: &str, value: impl IntoPyObject<'py>) -> PyErr {
    match error.value(py).setattr(name, value) {
        Ok(()) => error,
        Err(failed) => failed,
    }
}

/// The client was closed.
#[cold]
pub(crate) fn closed(py: Python<'_>) -> PyErr {
    raised::<UsageError>(py, "the client is closed; make another".into(), "closed")
}

/// Another thread is inside.
#[cold]
pub(crate) fn entered_twice(py: Python<'_>) -> PyErr {
    let words = "another call of this client is running, in another thread or in what a signal \
                 interrupted; use one client a thread, or a lock";
    raised::<UsageError>(py, words.into(), "entered_twice")
}

#[cold]
pub(crate) fn gone(py: Python<'_>, gone: EngineGone) -> PyErr {
    let error = raised::<Gone>(py, gone.to_string(), gone_reason(gone));
    with(py, error, "copies_may_run", gone.copies_may_run())
}

const fn gone_reason(gone: EngineGone) -> &'static str {
    match gone {
        EngineGone::Died => "died",
        EngineGone::Closed => "closed",
        EngineGone::Protocol(_) => "protocol",
        EngineGone::WrongProcess => "wrong_process",
    }
}

#[cold]
pub(crate) fn submit(py: Python<'_>, error: EngineSubmitError) -> PyErr {
    let reason = match error {
        EngineSubmitError::WouldBlock => {
            return raised::<WouldBlock>(py, error.to_string(), "would_block");
        }
        EngineSubmitError::ManagerGone(cause) => return gone(py, cause),
        EngineSubmitError::WrongProcess => return gone(py, EngineGone::WrongProcess),
        EngineSubmitError::TooManyPages { .. } => "too_many_pages",
        EngineSubmitError::NoPages => "no_pages",
        EngineSubmitError::BadPage { .. } => "bad_page",
        EngineSubmitError::Draining => "draining",
        EngineSubmitError::StaleHandle => "stale_handle",
    };
    raised::<SubmitError>(py, error.to_string(), reason)
}

#[cold]
pub(crate) fn connect(py: Python<'_>, error: &EngineConnectError) -> PyErr {
    let mut refused = None;
    let reason = match error {
        EngineConnectError::NoSocket { .. } => "no_socket",
        EngineConnectError::NotListening { .. } => "not_listening",
        EngineConnectError::NotPermitted { .. } => "not_permitted",
        EngineConnectError::Environment { .. } => "environment",
        EngineConnectError::Refused { refusal, .. } => {
            refused = Some(refusal_name(*refusal));
            "refused"
        }
        EngineConnectError::AbiMismatch { .. } => "abi_mismatch",
        EngineConnectError::LayoutMismatch { .. } => "layout_mismatch",
        EngineConnectError::BadGeometry { .. } => "bad_geometry",
        EngineConnectError::Timeout { .. } => "timeout",
        EngineConnectError::BadAnswer { .. } => "bad_answer",
        EngineConnectError::Transport(_) => "transport",
        EngineConnectError::Peer(_) => "peer",
        EngineConnectError::Attach(_) => "segments",
        EngineConnectError::System(_) => "system",
    };
    let raised = raised::<ConnectError>(py, error.to_string(), reason);
    with(py, raised, "refusal", refused)
}

#[cold]
pub(crate) fn register(py: Python<'_>, error: &EngineRegisterError) -> PyErr {
    let mut refused = None;
    let reason = match error {
        EngineRegisterError::Refused { refusal, .. } => {
            refused = Some(refusal_name(*refusal));
            "refused"
        }
        EngineRegisterError::StaleHandle => "stale_handle",
        EngineRegisterError::Timeout { .. } => "timeout",
        EngineRegisterError::BadAnswer { .. } => "bad_answer",
        EngineRegisterError::WrongProcess => "wrong_process",
        EngineRegisterError::ManagerGone(cause) => gone_reason(*cause),
        EngineRegisterError::Environment(_) => "environment",
        EngineRegisterError::Transport(_) => "transport",
    };
    let raised = raised::<RegisterError>(py, error.to_string(), reason);
    with(py, raised, "refusal", refused)
}

const fn refusal_name(refusal: Refusal) -> &'static str {
    match refusal {
        Refusal::AbiMismatch => "abi_mismatch",
        Refusal::NotAllowed => "not_allowed",
        Refusal::LimitReached => "limit_reached",
        Refusal::BadMessage => "bad_message",
        Refusal::OutOfOrder => "out_of_order",
        Refusal::LayoutConflict => "layout_conflict",
        Refusal::UnsupportedMemory => "unsupported_memory",
        Refusal::TooLarge => "too_large",
        Refusal::NoResources => "no_resources",
        Refusal::Draining => "draining",
    }
}

#[cold]
pub(crate) fn cuda(py: Python<'_>, error: &EngineCudaError) -> PyErr {
    let reason = match error {
        EngineCudaError::NoDriver => "no_driver",
        EngineCudaError::Driver { .. } => "driver",
        EngineCudaError::NoContext => "no_context",
        EngineCudaError::OutOfAllocation { .. } => "out_of_allocation",
        EngineCudaError::NotExportable { .. } => "not_exportable",
        EngineCudaError::OtherGpu { .. } => "other_gpu",
        EngineCudaError::NoReadOnlyRegistration { .. } => "no_read_only_registration",
        EngineCudaError::WordOutOfReach { .. } => "word_out_of_reach",
        EngineCudaError::NoSuchWord { .. } => "no_such_word",
    };
    raised::<CudaError>(py, error.to_string(), reason)
}
