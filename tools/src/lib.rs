//! What the `orbitkv` command line is made of, one verb a module, and the trace readers that the
//! tests share with it.

pub mod content;
pub mod replay;
pub mod trace;
pub mod workload;
