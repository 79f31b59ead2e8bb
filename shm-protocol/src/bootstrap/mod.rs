//! The bootstrap socket: messages and how they travel.

pub mod message;
