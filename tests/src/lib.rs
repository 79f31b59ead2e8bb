//! What the tests of this crate share: the Manager's `core` in a world of fakes.
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

pub mod client;
pub mod content;
pub mod disk;
pub mod memory;
pub mod reference;
pub mod simulator;
pub mod world;
