//! The faulty disk does what its fault model says: what the tests on it rely on.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::{Command, Stdio};
use std::time::Duration;

use orbitkv_tests::confine::in_private_mounts;
use orbitkv_tests::faulty::{Effect, Fault, FaultyDisk, On, Requests};
use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;

const KIB: u64 = 1 << 10;

/// Runs `body` with an empty disk of each kind and one open file on it.
fn on_a_disk(body: impl Fn(&FaultyDisk, &File) + Send + Sync) {
    for requests in [Requests::Parallel, Requests::ByThread] {
        in_private_mounts(|| {
            let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            let disk = FaultyDisk::mount(&folder.path().join("disk"), requests);
            let options = File::options().read(true).write(true).create(true).clone();
            let file = options.open(disk.path().join("file")).unwrap();
            body(&disk, &file);
            drop((file, disk));
            assert_eq!(folder.path().read_dir().unwrap().count(), 0, "left behind");
        });
    }
}

fn bytes(seed: u8, len: u64) -> Vec<u8> {
    (0..len).map(|at| (at as u8).wrapping_mul(31) ^ (at >> 8) as u8 ^ seed).collect()
}

#[test]
fn bytes_come_back_and_each_request_is_served_once_as_it_was_made() {
    on_a_disk(|disk, file| {
        let written = bytes(1, 512 * KIB);
        file.write_all_at(&written, 64 * KIB).unwrap();
        let mut read = vec![0; written.len()];
        file.read_exact_at(&mut read, 64 * KIB).unwrap();
        assert!(read == written && disk.stored("file")[64 << 10..] == written);
        let served = disk.served();
        assert_eq!((served.reads, served.writes), (1, 1));
        assert_eq!((served.read_bytes, served.written_bytes), (512 * KIB, 512 * KIB));
        assert_eq!((served.faults, served.waiting), (0, 0));
    });
}

#[test]
fn failures_have_their_range_their_times_and_an_end() {
    on_a_disk(|disk, file| {
        file.write_all_at(&bytes(2, 16 * KIB), 0).unwrap();
        let mut block = vec![0; 4096];
        let fault = Fault::new(On::Reads, Effect::Errno(Errno::IO)).within(4096..8192).times(2);
        let injected = disk.inject(fault);
        let mut read = |offset| file.read_at(&mut block, offset).map_err(|e| e.raw_os_error());
        assert_eq!(read(0), Ok(4096));
        for _ in 0..2 {
            assert_eq!(read(4096), Err(Some(libc::EIO)));
        }
        assert_eq!(read(4096), Ok(4096), "twice only");
        drop(injected);
        let all = disk.inject(Fault::new(On::Both, Effect::Errno(Errno::AGAIN)));
        assert_eq!(read(0), Err(Some(libc::EAGAIN)));
        assert_eq!(file.write_at(&[7; 4096], 0).map_err(|e| e.kind()), Err(ErrorKind::WouldBlock));
        drop(all);
        assert_eq!(read(0), Ok(4096));
        assert_eq!(disk.stored("file"), bytes(2, 16 * KIB), "a failed write has written nothing");
        assert_eq!(disk.served().faults, 4);
    });
}

#[test]
fn short_transfers_move_what_they_say_and_wrong_bits_are_one() {
    on_a_disk(|disk, file| {
        let stored = bytes(3, 16 * KIB);
        file.write_all_at(&stored, 0).unwrap();
        let mut read = vec![0xaa; 8192];
        let short = disk.inject(Fault::new(On::Reads, Effect::Short(4096)));
        assert_eq!(file.read_at(&mut read, 0).unwrap(), 4096);
        assert!(read[..4096] == stored[..4096] && read[4096..] == [0xaa; 4096]);
        drop(short);
        let flip = disk.inject(Fault::new(On::Reads, Effect::Flip).within(5000..5001));
        file.read_exact_at(&mut read, 0).unwrap();
        let wrong: Vec<_> = (0..8192).filter(|&at| read[at] != stored[at]).collect();
        assert_eq!(wrong, [5000]);
        drop(flip);
        file.read_exact_at(&mut read, 0).unwrap();
        assert_eq!(read, stored[..8192]);
        disk.rot("file", 5000);
        file.read_exact_at(&mut read, 0).unwrap();
        assert_eq!(read[5000], stored[5000] ^ 1);
    });
}

/// Goal: a short write is one for a single thread, and writes only what it says.
#[test]
fn a_short_write_stores_its_beginning() {
    on_a_disk(|disk, file| {
        file.set_len(16 * KIB).unwrap();
        let _short = disk.inject(Fault::new(On::Writes, Effect::Short(4096)));
        assert_eq!(file.write_at(&[9; 8192], 0).unwrap(), 4096);
        assert!(disk.stored("file")[..4096] == [9; 4096]);
        assert!(disk.stored("file")[4096..] == vec![0; 12 << 10]);
    });
}

#[test]
fn space_runs_out_comes_back_and_can_be_reserved_or_not() {
    on_a_disk(|disk, file| {
        disk.set_space(64 * KIB);
        let reserve = |bytes| rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes);
        assert_eq!(reserve(128 * KIB), Err(Errno::NOSPC));
        assert_eq!(reserve(32 * KIB), Ok(()));
        assert_eq!(file.metadata().unwrap().blocks() * 512, 32 * KIB);
        let free = || {
            let stat = rustix::fs::statvfs(disk.path()).unwrap();
            stat.f_bavail * stat.f_frsize
        };
        assert_eq!(free(), 32 * KIB);
        file.write_all_at(&bytes(4, 32 * KIB), 0).unwrap();
        assert_eq!(free(), 32 * KIB, "it had its space");
        let full = file.write_at(&vec![1; 64 << 10], 32 * KIB).unwrap_err();
        assert_eq!(full.kind(), ErrorKind::StorageFull);
        disk.set_space(64 * KIB);
        file.write_all_at(&vec![1; 64 << 10], 32 * KIB).unwrap();
        disk.refuse_fallocate();
        assert_eq!(reserve(32 * KIB), Err(Errno::OPNOTSUPP));
    });
}

#[test]
fn a_file_that_is_cut_or_removed_keeps_who_has_it_open() {
    on_a_disk(|disk, file| {
        file.write_all_at(&bytes(5, 16 * KIB), 0).unwrap();
        let path = disk.path().join("file");
        File::options().write(true).open(&path).unwrap().set_len(6000).unwrap();
        let mut read = vec![0; 8192];
        assert_eq!(file.read_at(&mut read, 0).unwrap(), 6000);
        assert_eq!(file.read_at(&mut read, 8192).unwrap(), 0);
        fs::remove_file(&path).unwrap();
        assert_eq!(path.metadata().unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(file.read_at(&mut read, 0).unwrap(), 6000);
        assert_eq!(fs::read_dir(disk.path()).unwrap().count(), 0);
    });
}

/// Goal: answers come late or not before they are released, with the bytes of that time.
#[test]
fn late_answers_move_their_bytes_when_they_come() {
    on_a_disk(|disk, file| {
        file.write_all_at(&[1; 4096], 0).unwrap();
        let hang = disk.inject(Fault::new(On::Reads, Effect::Hang));
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut read = vec![0; 4096];
                file.read_exact_at(&mut read, 0).unwrap();
                read
            });
            disk.settle("a read hangs", |served| served.waiting == 1);
            file.write_all_at(&[2; 4096], 0).unwrap();
            drop(hang);
            assert_eq!(reader.join().unwrap(), [2; 4096]);
        });
        let delay = Effect::Delay(Duration::from_millis(20));
        let _slow = disk.inject(Fault::new(On::Both, delay));
        let start = std::time::Instant::now();
        file.write_all_at(&[3; 4096], 0).unwrap();
        assert!(start.elapsed() >= Duration::from_millis(20), "at least");
    });
}

/// Goal: whoever hangs in the disk is let go, and the mount is gone, when the disk is dropped. It
/// could not be killed: method, a killed process that does not end before.
#[test]
fn nobody_hangs_in_a_disk_that_is_gone() {
    for requests in [Requests::Parallel, Requests::ByThread] {
        in_private_mounts(|| {
            let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            let at = folder.path().join("disk");
            let disk = FaultyDisk::mount(&at, requests);
            fs::write(at.join("file"), vec![1; 8192]).unwrap();
            let injected = disk.inject(Fault::new(On::Reads, Effect::Hang));
            let mut reader = Command::new("cat")
                .arg(at.join("file"))
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            disk.settle("it hangs", |served| served.waiting == 1);
            reader.kill().unwrap();
            // Of this thread: those of the process never have it.
            let is_mounted = || {
                let mounts = fs::read_to_string("/proc/thread-self/mounts").unwrap();
                mounts.lines().any(|line| line.contains(at.to_str().unwrap()))
            };
            assert!(is_mounted());
            drop(disk);
            assert!(!reader.wait().unwrap().success());
            drop(injected);
            assert!(!at.exists());
            assert!(!is_mounted());
        });
    }
}

#[test]
fn direct_files_are_served_as_any() {
    on_a_disk(|disk, file| {
        file.write_all_at(&bytes(6, 8192), 0).unwrap();
        let flags = rustix::fs::fcntl_getfl(file).unwrap();
        rustix::fs::fcntl_setfl(file, flags | OFlags::DIRECT).unwrap();
        let mut read = vec![0; 8192];
        file.read_exact_at(&mut read, 0).unwrap();
        assert_eq!(read, bytes(6, 8192));
        assert_eq!(disk.served().reads, 1);
    });
}
