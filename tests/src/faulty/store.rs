//! The files of the disk: names, lengths, bytes, and the blocks that they take.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

/// What space is counted in.
pub(super) const BLOCK: u64 = 4096;

/// One file.
#[derive(Debug)]
pub(super) struct Node {
    /// Without a name, in the folder of the store.
    bytes: File,
    pub(super) len: u64,
    pub(super) mode: u16,
    pub(super) owner: (u32, u32),
    blocks: BTreeSet<u64>,
    is_named: bool,
    /// Times that the kernel has it in mind.
    known: u64,
}

/// All files.
#[derive(Debug)]
pub(super) struct Store {
    folder: PathBuf,
    names: BTreeMap<String, u64>,
    nodes: HashMap<u64, Node>,
    next: u64,
    blocks_max: u64,
    reserves: bool,
}

impl Node {
    pub(super) fn blocks(&self) -> u64 {
        self.blocks.len() as u64
    }
}

impl Store {
    pub(super) fn new(folder: &Path) -> Self {
        Self {
            folder: folder.to_owned(),
            names: BTreeMap::new(),
            nodes: HashMap::new(),
            next: 2,
            blocks_max: 1 << 40,
            reserves: true,
        }
    }

    pub(super) fn names(&self) -> impl Iterator<Item = (&str, u64)> {
        self.names.iter().map(|(name, node)| (name.as_str(), *node))
    }

    /// A file by its name; the kernel knows it once more.
    pub(super) fn look_up(&mut self, name: &str) -> Result<(u64, &Node), Errno> {
        let number = *self.names.get(name).ok_or(Errno::NOENT)?;
        let node = self.nodes.get_mut(&number).ok_or(Errno::NOENT)?;
        node.known += 1;
        Ok((number, node))
    }

    pub(super) fn node(&self, number: u64) -> Result<&Node, Errno> {
        self.nodes.get(&number).ok_or(Errno::NOENT)
    }

    pub(super) fn node_mut(&mut self, number: u64) -> Result<&mut Node, Errno> {
        self.nodes.get_mut(&number).ok_or(Errno::NOENT)
    }

    /// A new empty file.
    pub(super) fn create(
        &mut self,
        name: &str,
        mode: u16,
        owner: (u32, u32),
    ) -> Result<u64, Errno> {
        if self.names.contains_key(name) {
            return Err(Errno::EXIST);
        }
        let bytes = tempfile::tempfile_in(&self.folder)
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        let node =
            Node { bytes, len: 0, mode, owner, blocks: BTreeSet::new(), is_named: true, known: 0 };
        let number = self.next;
        self.next += 1;
        self.nodes.insert(number, node);
        self.names.insert(name.to_owned(), number);
        Ok(number)
    }

    /// Takes a name away; the bytes go when nobody has them open.
    pub(super) fn unlink(&mut self, name: &str) -> Result<(), Errno> {
        let number = self.names.remove(name).ok_or(Errno::NOENT)?;
        if let Some(node) = self.nodes.get_mut(&number) {
            node.is_named = false;
        }
        self.forget(number, 0);
        Ok(())
    }

    /// The kernel knows a file `times` less.
    pub(super) fn forget(&mut self, number: u64, times: u64) {
        let Some(node) = self.nodes.get_mut(&number) else { return };
        node.known = node.known.saturating_sub(times);
        if node.known == 0 && !node.is_named {
            self.nodes.remove(&number);
        }
    }

    /// Fills `bytes` from `offset` as far as the file goes; returns how far.
    pub(super) fn read(&self, number: u64, bytes: &mut [u8], offset: u64) -> Result<usize, Errno> {
        let node = self.node(number)?;
        let there = node.len.saturating_sub(offset).min(bytes.len() as u64) as usize;
        let bytes = &mut bytes[..there];
        node.bytes
            .read_exact_at(bytes, offset)
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        Ok(there)
    }

    /// Writes `bytes`, which must find room.
    pub(super) fn write(&mut self, number: u64, bytes: &[u8], offset: u64) -> Result<(), Errno> {
        self.take_blocks(number, offset, bytes.len() as u64)?;
        let node = self.node_mut(number)?;
        node.bytes
            .write_all_at(bytes, offset)
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        node.len = node.len.max(offset + bytes.len() as u64);
        Ok(())
    }

    /// Reserves space and grows the file to it.
    pub(super) fn reserve(&mut self, number: u64, offset: u64, bytes: u64) -> Result<(), Errno> {
        if !self.reserves {
            return Err(Errno::OPNOTSUPP);
        }
        self.take_blocks(number, offset, bytes)?;
        let len = self.node(number)?.len.max(offset + bytes);
        self.set_len(number, len)
    }

    pub(super) fn set_len(&mut self, number: u64, len: u64) -> Result<(), Errno> {
        let node = self.node_mut(number)?;
        node.bytes
            .set_len(len)
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        node.len = len;
        let _cut = node.blocks.split_off(&len.div_ceil(BLOCK));
        Ok(())
    }

    fn take_blocks(&mut self, number: u64, offset: u64, bytes: u64) -> Result<(), Errno> {
        let (used, max) = (self.blocks_used(), self.blocks_max);
        let node = self.node_mut(number)?;
        let wanted = offset / BLOCK..(offset + bytes).div_ceil(BLOCK);
        let new = wanted.clone().filter(|block| !node.blocks.contains(block)).count() as u64;
        if new > 0 && used + new > max {
            return Err(Errno::NOSPC);
        }
        node.blocks.extend(wanted);
        Ok(())
    }

    pub(super) fn blocks_used(&self) -> u64 {
        self.nodes.values().map(Node::blocks).sum()
    }

    /// Blocks that the disk has at all, and those that are free.
    pub(super) fn space(&self) -> (u64, u64) {
        (self.blocks_max, self.blocks_max.saturating_sub(self.blocks_used()))
    }

    pub(super) fn set_space(&mut self, bytes: u64) {
        self.blocks_max = self.blocks_used() + bytes / BLOCK;
    }

    pub(super) fn refuse_fallocate(&mut self) {
        self.reserves = false;
    }

    fn named(&self, name: &str) -> &Node {
        let node = self.names.get(name).and_then(|number| self.nodes.get(number));
        node.unwrap_or_else(|| panic!("no file {name}"))
    }

    pub(super) fn rot(&mut self, name: &str, offset: u64) {
        let node = self.named(name);
        let mut byte = [0];
        node.bytes.read_exact_at(&mut byte, offset).unwrap();
        node.bytes.write_all_at(&[byte[0] ^ 1], offset).unwrap();
    }

    pub(super) fn bytes(&self, name: &str) -> Vec<u8> {
        let node = self.named(name);
        let mut bytes = vec![0; node.len as usize];
        node.bytes.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }
}
