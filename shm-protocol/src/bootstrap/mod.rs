//! The bootstrap socket: messages, how they travel, and who is at the other end.

pub mod message;
pub mod peer;
pub mod transport;
