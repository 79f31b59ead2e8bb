//! Saves one page, finds it again and restores it elsewhere: `first_page [SOCKET]`.

use std::{
    env, error::Error, fs::File, os::unix::fs::FileExt, path::Path, process::ExitCode,
    time::Duration,
};

use orbitkv_engine::{
    Block, Connect, Deadline, DependencySpec, NamespaceSpec, PageHash, QueryMode, RegionLayout,
    RestoreOptions, Segment, Status, socket_default_path,
};
use rustix::fs::{MemfdFlags, SealFlags};

const PATIENCE: Duration = Duration::from_secs(10);

/// Everything an engine does for one page; returns the bytes that came back.
pub(crate) fn run(socket: &Path) -> Result<[u8; 4096], Box<dyn Error>> {
    // The engine's KV memory: two pages of 4 KiB in a memfd that cannot shrink.
    let kv = File::from(rustix::fs::memfd_create("kv", MemfdFlags::ALLOW_SEALING)?);
    kv.set_len(2 * 4096)?;
    rustix::fs::fcntl_add_seals(&kv, SealFlags::SHRINK)?;
    kv.write_all_at(&[42; 4096], 0)?;

    // Once: attach, say whose bytes these are and where they lie.
    let mut client = Connect::new(socket).connect()?;
    let scope = client.define_namespace(&NamespaceSpec {
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
    })?;
    let memory = client.register_memfd(&kv, 2 * 4096)?;
    let segments = vec![Segment { memory, offset: 0, stride: 4096, length: 4096, layer: 0 }];
    let region = client.register_region(&RegionLayout { scope, pages: 2, segments })?;

    // Per request: save page 0, look it up, restore it into page 1. An engine polls, not waits.
    let hash = PageHash([7; 32]);
    client.save(&region, &[Block { hash, page: 0 }])?;
    client.wait(PATIENCE)?.filter(|saved| saved.status == Status::Ok).ok_or("not saved")?;
    client.query(&scope, &[hash], QueryMode::Demand, Deadline::DEFAULT)?;
    let lease = client.wait(PATIENCE)?.and_then(|hit| hit.lease).ok_or("not a hit")?;
    client.restore(&lease, 0, &region, &[Block { hash, page: 1 }], RestoreOptions::default())?;
    client.wait(PATIENCE)?.filter(|done| done.status == Status::Ok).ok_or("not restored")?;

    let mut restored = [0; 4096];
    kv.read_exact_at(&mut restored, 4096)?;
    Ok(restored)
}

fn main() -> ExitCode {
    let socket = env::args_os().nth(1).map_or_else(socket_default_path, Into::into);
    match run(&socket) {
        Ok(page) => println!("restored 4096 bytes, the first is {}", page[0]),
        Err(error) => {
            eprintln!("first_page: {error}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
