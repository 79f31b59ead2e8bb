//! Whose bytes a page holds.

use orbitkv_engine::{DependencySpec, NamespaceSpec};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// The identity of page bytes. Two namespaces never share a page.
///
/// `dependency` says what a hit at page k needs beside page k: "chain" all before it, "window" the
/// last `window` pages, k included, "state" nothing.
#[pyclass(frozen, eq, module = "orbitkv")]
#[derive(PartialEq, Eq)]
pub(crate) struct Namespace(pub(crate) NamespaceSpec);

#[pymethods]
impl Namespace {
    #[new]
    #[pyo3(signature = (
        *, model, dtype, page_tokens, page_bytes, layout, group = 0, tp_rank = 0, tp_size = 1,
        pp_rank = 0, pp_size = 1, adapter = String::new(), salt = String::new(),
        dependency = "chain", window = 0
    ))]
    #[allow(clippy::too_many_arguments, reason = "each is a keyword")]
    fn new(
        model: String,
        dtype: String,
        page_tokens: u32,
        page_bytes: u64,
        layout: String,
        group: u32,
        tp_rank: u32,
        tp_size: u32,
        pp_rank: u32,
        pp_size: u32,
        adapter: String,
        salt: String,
        dependency: &str,
        window: u32,
    ) -> PyResult<Self> {
        let dependency = match (dependency, window) {
            ("chain", 0) => DependencySpec::Chain,
            ("state", 0) => DependencySpec::State,
            ("window", 1..) => DependencySpec::Window(window),
            _ => {
                let words = format!(
                    "dependency {dependency:?} with window {window}; give \"chain\", \"state\", or \
                     \"window\" with a window of at least 1"
                );
                return Err(PyValueError::new_err(words));
            }
        };
        Ok(Self(NamespaceSpec {
            model,
            dtype,
            page_tokens,
            page_bytes,
            layout,
            group,
            tp_rank,
            tp_size,
            pp_rank,
            pp_size,
            adapter,
            salt,
            dependency,
        }))
    }

    fn __repr__(&self) -> String {
        format!("<orbitkv.Namespace {:?}>", self.0)
    }
}
