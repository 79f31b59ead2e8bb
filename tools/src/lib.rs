//! What the `orbitkv` command line is made of, one verb a module, and the trace readers that the
//! tests share with it.
// `println!` and `eprintln!` panic when the reader is gone: `output` is the way out.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod bench;
pub mod cli;
pub mod content;
mod demo;
mod evict;
mod exit;
mod html;
mod inspect;
mod output;
mod place;
mod progress;
pub mod replay;
mod serve;
mod signal;
pub mod simulate;
mod table;
pub mod trace;
mod verify;
pub mod workload;
