//! engine-side
