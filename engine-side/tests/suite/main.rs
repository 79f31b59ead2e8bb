//! The ring client against a twin of the Manager: real sockets, real segments, real processes
//! where a process is the point.

mod allocations;
mod attach;
mod death;
mod example;
mod fork;
mod hostile;
mod model;
mod operations;
mod pressure;
mod quiet;
mod rig;
mod twin;
