//! What the tests of this crate share: the Manager's `core` in a world of fakes, and real
//! Managers and engines in processes of their own.
//!
//! | module | is |
//! | --- | --- |
//! | `content` | what the bytes of a page are: a function of its key |
//! | `memory` | the fake DRAM pool |
//! | `disk` | the fake SSD tier, with what survives a crash |
//! | `client` | the fake engines: their sessions, regions and operations |
//! | `world` | `core` between them: every effect is carried out and checked |
//! | `simulator` | random engines, faults and crashes from a seed |
//! | `reference` | an independent model of the pool without SSD |
//! | `rig` | a world with one engine, for tests of single promises |
//! | `confine` | takes mounts, system calls and limits from what a test starts |
//! | `manager` | a real Manager process on a socket and SSD file of its own |
//! | `program` | a copy of a program that another user may run |
//! | `prometheus` | a strict reader of `/metrics` |
//! | `engine` | a real attached engine whose device pages can be checked byte for byte |
//! | `engine_process` | the same in a process of its own, to be stopped and killed |
//! | `raw` | clients that write any byte of their segment |
//! | `victim` | an honest engine beside them, which must stay exact |
//! | `broken_gpu` | a GPU that is lost to a Manager (feature `gpu`) |
//! | `faulty` | a disk that fails as it is told, for real processes |

#[cfg(feature = "gpu")]
pub mod broken_gpu;
pub mod client;
pub mod confine;
pub mod content;
pub mod disk;
pub mod engine;
pub mod engine_process;
pub mod faulty;
pub mod manager;
pub mod memory;
pub mod program;
pub mod prometheus;
pub mod raw;
pub mod reference;
pub mod rig;
pub mod simulator;
pub mod victim;
pub mod world;
