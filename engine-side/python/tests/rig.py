"""A real Manager on host memory, and an engine with pages of 4 KiB."""

import array
import ctypes
import fcntl
import mmap
import os
import subprocess
import tempfile

import orbitkv

PAGE = 4096
PATIENCE = 20.0
POISON = 0xEE
F_ADD_SEALS, F_SEAL_SHRINK = 1033, 2


class Manager:
    """`orbitkv serve` with a socket of its own; the same one after a restart."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="orbitkv-python-")
        self.socket = os.path.join(self._folder.name, "socket")
        self._process = None

    def start(self, device="host", dram="32MiB"):
        command = [orbitkv.binary(), "serve", "--socket", self.socket, "--device", device]
        self._process = subprocess.Popen(
            [*command, "--dram", dram],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout.readline().startswith("ready")
        return self

    @property
    def pid(self):
        return self._process.pid

    def kill(self):
        """SIGKILL; it is gone when this returns."""
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def stop(self):
        """SIGTERM, so that it removes what it made; the folder goes too."""
        self._process.terminate()
        self._process.wait(PATIENCE)
        self._process.stdout.close()
        self._folder.cleanup()


def namespace(name="rig", **fields):
    fields = {"page_bytes": PAGE, **fields}
    return orbitkv.Namespace(
        model=f"test/{name}", dtype="uint8", page_tokens=16, layout="flat", **fields
    )


def hashes(first, count):
    return b"".join(number.to_bytes(32, "big") for number in range(first, first + count))


def numbers(*values):
    return array.array("I", values)


def content(number):
    """The bytes of the page with this hash number: different in every 8 bytes."""
    words = (number * 1_000_003 + at for at in range(PAGE // 8))
    return b"".join(word.to_bytes(8, "little") for word in words)


class Engine:
    """A client with one region, in a memfd or in memory of this process."""

    def __init__(self, socket, *, pages=64, kind="memfd", name="rig", dependency="chain", **options):
        self.client = orbitkv.Client(socket, timeout=PATIENCE, **options)
        window = 2 if dependency == "window" else 0
        spec = namespace(name, dependency=dependency, window=window)
        self.scope = self.client.define_namespace(spec)
        self.pages = pages
        bytes_all = pages * PAGE
        if kind == "memfd":
            fd = os.memfd_create("kv", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
            os.ftruncate(fd, bytes_all)
            fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK)
            self.kv = mmap.mmap(fd, bytes_all)
            self.memory = self.client.register_memfd(fd, bytes_all)
            os.close(fd)
        else:
            self.kv = mmap.mmap(-1, bytes_all)
            address = ctypes.addressof(ctypes.c_char.from_buffer(self.kv))
            self.memory = self.client.register_process(address, bytes_all)
        segments = [(self.memory, 0, PAGE, PAGE, 0)]
        self.region = self.client.register_region(self.scope, pages, segments)

    def page(self, at):
        return self.kv[at * PAGE : (at + 1) * PAGE]

    def fill(self, first, count, at=0):
        for offset in range(count):
            begin = (at + offset) * PAGE
            self.kv[begin : begin + PAGE] = content(first + offset)

    def poison(self):
        self.kv[:] = bytes([POISON]) * len(self.kv)

    def end(self, operation):
        """The completion of the only operation in flight."""
        ended = self.client.wait(PATIENCE)
        assert ended is not None, "no completion in time"
        assert ended.operation == operation
        return ended

    def save(self, first, count, at=0, **options):
        self.fill(first, count, at)
        pages = numbers(*range(at, at + count))
        return self.end(self.client.save(self.region, hashes(first, count), pages, **options))

    def query(self, first, count, **options):
        return self.end(self.client.query(self.scope, hashes(first, count), **options))

    def restore(self, lease, first, count, at):
        pages = numbers(*range(at, at + count))
        wanted = hashes(first, count)
        return self.end(self.client.restore(lease, 0, self.region, wanted, pages))


class _Step(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_uint16),
        ("jt", ctypes.c_uint8),
        ("jf", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("count", ctypes.c_uint16), ("steps", ctypes.POINTER(_Step))]


def forbid_system_calls():
    """The kernel kills this process at its next system call that does not end it."""
    load_number, jump_if_equal, answer = 0x20, 0x15, 0x06
    exit_group = {"x86_64": 231, "aarch64": 94}[os.uname().machine]
    allow, kill = 0x7FFF0000, 0x80000000
    steps = (_Step * 4)(
        (load_number, 0, 0, 0),
        (jump_if_equal, 0, 1, exit_group),
        (answer, 0, 0, allow),
        (answer, 0, 0, kill),
    )
    program = _Program(4, steps)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    no_new_privileges, seccomp, by_filter = 38, 22, 2
    assert prctl(no_new_privileges, 1, 0, 0, 0) == 0
    # The very next instruction of Python runs under the filter.
    assert prctl(seccomp, by_filter, ctypes.byref(program), 0, 0) == 0
