//! What an engine on a GPU needs beside the ring client: its memory as the Manager can open it,
//! events that its copies wait for, and done words that its own streams wait for.
//!
//! No framework is asked for anything: device pointers and streams are the driver's, as every
//! framework gives them away. Everything here works in the *primary* context of a GPU, which is the
//! one that frameworks work in, and leaves the caller's current context as it was.
//!
//! ```no_run
//! # use orbitkv_engine::cuda::CUstream;
//! use orbitkv_engine::cuda::{EventPool, Gpu};
//! use orbitkv_engine::{Block, Client, Region, SaveOptions};
//!
//! # fn save(client: &mut Client, region: &Region, blocks: &[Block], stream: CUstream)
//! # -> Result<(), Box<dyn std::error::Error>> {
//! let gpu = Gpu::current()?;
//! let mut events = EventPool::new(&gpu, 256)?;
//! events.register(client)?;
//! // … from then on, for each save:
//! let event = events.take().ok_or("every event belongs to an operation that has not ended")?;
//! // SAFETY: the engine's stream, on which the pages were written.
//! unsafe { events.record(event, stream)? };
//! let options = SaveOptions { fence: Some(event), ..SaveOptions::default() };
//! let _save = client.save_chains(region, &[blocks.into()], options)?;
//! client.submit()?;
//! // … once its completion is there:
//! events.give_back(event);
//! # Ok(())
//! # }
//! ```

mod done_words;
mod driver;
mod error;
mod events;
mod gpu;

pub use cudarc::driver::sys::{CUdeviceptr, CUstream};
pub use done_words::DoneWordsOnGpu;
pub use error::CudaError;
pub use events::EventPool;
pub use gpu::Gpu;
