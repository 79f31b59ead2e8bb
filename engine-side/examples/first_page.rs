//! Saves one page, finds it again and restores it elsewhere.
//!
//! `cargo run --example first_page [SOCKET]`, with a Manager running.

use std::error::Error;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use orbitkv_engine::{
    Block, Client, Completion, Connect, Deadline, DependencySpec, NamespaceSpec, PageHash,
    QueryMode, RegionLayout, RestoreOptions, Segment,
};
use rustix::fs::{MemfdFlags, SealFlags};

/// Everything an engine does for one page; returns the bytes that came back.
pub(crate) fn run(socket: &Path) -> Result<[u8; 4096], Box<dyn Error>> {
    // The engine's KV memory: two pages of 4 KiB in a memfd that cannot shrink.
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let kv = File::from(rustix::fs::memfd_create("kv", flags)?);
    kv.set_len(2 * 4096)?;
    rustix::fs::fcntl_add_seals(&kv, SealFlags::SHRINK)?;
    kv.write_all_at(&[42; 4096], 0)?;

    // Once: attach, say whose bytes these are and where they lie.
    let mut client = Connect::new(socket).connect()?;
    let scope = client.define_namespace(&namespace())?;
    let memory = client.register_memfd(&kv, 2 * 4096)?;
    let segments = vec![Segment { memory, offset: 0, stride: 4096, length: 4096 }];
    let region = client.register_region(&RegionLayout { scope, pages: 2, segments })?;

    // Per request: save page 0, look it up, restore it into page 1.
    let hash = PageHash([7; 32]);
    client.save(&region, &[Block { hash, page: 0 }])?;
    finish(&mut client)?;
    client.query(&scope, &[hash], QueryMode::Demand, Deadline::DEFAULT)?;
    let lease = finish(&mut client)?.lease.ok_or("not a hit")?;
    client.restore(&lease, 0, &region, &[Block { hash, page: 1 }], RestoreOptions::default())?;
    finish(&mut client)?;

    let mut restored = [0; 4096];
    kv.read_exact_at(&mut restored, 4096)?;
    Ok(restored)
}

/// Waits for the one operation in flight. An engine polls instead.
fn finish(client: &mut Client) -> Result<Completion, Box<dyn Error>> {
    Ok(client.wait(Duration::from_secs(10))?.ok_or("no completion within 10 s")?)
}

fn namespace() -> NamespaceSpec {
    NamespaceSpec {
        model: "example/tiny@1".into(),
        dtype: "uint8".into(),
        page_tokens: 64,
        page_bytes: 4096,
        layout: "flat".into(),
        group: 0,
        tp_rank: 0,
        tp_size: 1,
        pp_rank: 0,
        pp_size: 1,
        adapter: String::new(),
        salt: String::new(),
        dependency: DependencySpec::Chain,
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let given = std::env::args_os().nth(1).map(Into::into);
    let restored = run(&given.unwrap_or_else(orbitkv_engine::socket_default_path))?;
    println!("restored 4096 bytes, the first is {}", restored[0]);
    Ok(())
}
