//! Arrays of Python without a Python object per element.
//!
//! CPython 3.10 has no buffer protocol in its stable ABI, so what is not `bytes` already is copied
//! into one `bytes` by its memoryview: one object and one copy a call, whatever its length.

use orbitkv_engine::PageHash;
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyMemoryView};

/// Bytes of a page hash.
const HASH_BYTES: usize = size_of::<PageHash>();

/// Page hashes, 32 bytes each.
pub(crate) struct Hashes<'py>(Bound<'py, PyBytes>);

impl<'py> Hashes<'py> {
    /// `name` is the argument, for the message.
    pub(crate) fn read(name: &str, object: &Bound<'py, PyAny>) -> PyResult<Self> {
        let bytes = match object.cast::<PyBytes>() {
            Ok(bytes) => bytes.clone(),
            Err(_) => copied(&PyMemoryView::from(object)?)?,
        };
        let len = bytes.as_bytes().len();
        if !len.is_multiple_of(HASH_BYTES) {
            let words = format!("{name} has {len} bytes; give {HASH_BYTES} for each page");
            return Err(PyValueError::new_err(words));
        }
        Ok(Self(bytes))
    }

    pub(crate) fn len(&self) -> usize {
        self.0.as_bytes().len() / HASH_BYTES
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = PageHash> {
        self.0.as_bytes().as_chunks().0.iter().copied().map(PageHash)
    }
}

/// The one hash of a page that is not named otherwise.
pub(crate) fn hash(name: &str, object: Option<&Bound<'_, PyAny>>) -> PyResult<Option<PageHash>> {
    let Some(object) = object else { return Ok(None) };
    let hashes = Hashes::read(name, object)?;
    match hashes.len() {
        1 => Ok(hashes.iter().next()),
        others => {
            let words = format!("{name} has {others} hashes; give the {HASH_BYTES} bytes of one");
            Err(PyValueError::new_err(words))
        }
    }
}

/// Numbers of 32 bits.
pub(crate) struct Numbers<'py>(Bound<'py, PyBytes>);

impl<'py> Numbers<'py> {
    /// `name` is the argument, for the message.
    pub(crate) fn read(name: &str, object: &Bound<'py, PyAny>) -> PyResult<Self> {
        let py = object.py();
        let view = PyMemoryView::from(object)?;
        let format = view.getattr(intern!(py, "format"))?;
        let spelled = format.cast::<pyo3::types::PyString>()?.to_str()?;
        // On the little-endian machines that the ring is for, these are one.
        if !matches!(spelled, "I" | "@I" | "=I" | "<I") {
            let words = format!(
                "{name} has items of format {spelled:?}; give unsigned 32-bit integers, as \
                 array.array(\"I\") or numpy.uint32"
            );
            return Err(PyValueError::new_err(words));
        }
        copied(&view).map(Self)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.as_bytes().len() / size_of::<u32>()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> {
        self.0.as_bytes().as_chunks().0.iter().copied().map(u32::from_ne_bytes)
    }
}

/// Numbers as the bytes that [`Numbers`] reads.
pub(crate) fn bytes_of(py: Python<'_>, numbers: impl Iterator<Item = u32>) -> Bound<'_, PyBytes> {
    let bytes: Vec<u8> = numbers.flat_map(u32::to_ne_bytes).collect();
    PyBytes::new(py, &bytes)
}

fn copied<'py>(view: &Bound<'py, PyMemoryView>) -> PyResult<Bound<'py, PyBytes>> {
    let bytes = view.call_method0(intern!(view.py(), "tobytes"))?;
    Ok(bytes.cast_into::<PyBytes>()?)
}
