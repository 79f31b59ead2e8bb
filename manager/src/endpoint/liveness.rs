//! Who is at the other end, whether it may be there, and whether it still lives.
//!
//! Death is learnt from the peer's pidfd alone: a forked grandchild can hold the socket open for
//! ever. The other way round a hang-up means that no process holds the other end any more, so
//! nobody can speak on this connection again: it ends the session of a living client too (that is
//! how a client detaches), but it says nothing about copies under way, which drain as always.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use orbitkv_shm_protocol::bootstrap::peer::{
    PeerCredentials, PeerError, peer_credentials, peer_pidfd,
};
use rustix::event::{PollFd, PollFlags};
use rustix::time::Timespec;

use crate::config::SocketConfig;

/// Who may attach.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Access {
    /// The Manager's own user.
    pub owner_uid: u32,
    /// Further users.
    pub uids: Vec<u32>,
    /// Groups whose members may.
    pub gids: Vec<u32>,
}

impl Access {
    /// As configured, for the user that runs this process.
    pub fn new(config: &SocketConfig) -> Self {
        Self {
            owner_uid: rustix::process::geteuid().as_raw(),
            uids: config.allow_uids.clone(),
            gids: config.allow_gids.clone(),
        }
    }

    /// Whether `peer` may attach. Its groups are the effective one and, where the process can be
    /// looked at, the supplementary ones.
    pub fn allows(&self, peer: &Peer) -> bool {
        let who = &peer.credentials;
        who.uid == self.owner_uid
            || self.uids.contains(&who.uid)
            || self.gids.contains(&who.gid)
            || (!self.gids.is_empty()
                && peer.supplementary_groups().iter().any(|gid| self.gids.contains(gid)))
    }

    /// Whether `peer` may administrate: the owner's uid only.
    pub fn is_owner(&self, peer: &Peer) -> bool {
        peer.credentials.uid == self.owner_uid
    }
}

/// The process that connected.
#[derive(Debug)]
pub struct Peer {
    /// As it was when it connected.
    pub credentials: PeerCredentials,
    pidfd: Arc<OwnedFd>,
}

impl Peer {
    /// Asks the kernel who connected.
    ///
    /// # Errors
    /// The peer is dead already, or cannot be watched from here.
    pub fn of(socket: impl AsFd) -> Result<Self, PeerError> {
        let socket = socket.as_fd();
        Ok(Self { credentials: peer_credentials(socket)?, pidfd: Arc::new(peer_pidfd(socket)?) })
    }

    /// Readable once the process, all threads of it, has ended.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// The same descriptor, for whoever has to know that the process is still the one that
    /// connected. Every clone of one peer is the same `Arc`.
    pub fn shared_pidfd(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.pidfd)
    }

    /// Whether the process has ended.
    pub fn is_dead(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut polled = [PollFd::from_borrowed_fd(self.pidfd(), PollFlags::IN)];
        rustix::event::poll(&mut polled, Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// Our process id as the peer sees it, or 0 when it lives in another process-id namespace.
    pub fn manager_pid(&self) -> u32 {
        let namespace = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/pid")).ok();
        let theirs = namespace(&self.credentials.pid.to_string());
        if theirs.is_some() && theirs == namespace("self") { std::process::id() } else { 0 }
    }

    fn supplementary_groups(&self) -> Vec<u32> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.credentials.pid));
        let groups = status.map_or_else(|_| Vec::new(), |status| groups_of(&status));
        // Only while the process lives does its number name it and nobody else.
        if self.is_dead() { Vec::new() } else { groups }
    }
}

/// The `Groups:` line of a process's status.
fn groups_of(status: &str) -> Vec<u32> {
    status
        .lines()
        .find_map(|line| line.strip_prefix("Groups:"))
        .map(|groups| groups.split_whitespace().filter_map(|gid| gid.parse().ok()).collect())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_read_from_their_line_only() {
        let status = "Name:\tGroups: 9\nUid:\t0\t0\nGroups:\t4 24 1000 \nNStgid:\t7\n";
        assert_eq!(groups_of(status), [4, 24, 1000]);
        assert!(groups_of("Groups:\t\n").is_empty());
        assert!(groups_of("").is_empty());
    }
}
