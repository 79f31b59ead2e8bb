//! `replay`: engines in processes of their own play a trace against a Manager.

mod device;
mod engine;
#[cfg(test)]
mod fake;
mod job;
mod latency;
mod link;
mod tally;
