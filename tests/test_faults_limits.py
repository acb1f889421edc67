"""Processes that may lock little memory, or have no io_uring, descriptors, threads or memory left."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_support import NBYTES
from support import need_direct, need_uring, random_bytes, run_python, write_checkpoint

LIMITED = """
import ctypes, logging, os, resource, struct, sys
import torch
import gdsstream
from gdsstream import _native
from support import assert_same, reference

logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="%(levelname)s %(message)s")
path = sys.argv[1]
expected = reference(path)
libc = ctypes.CDLL(None, use_errno=True)


def drop_capability(number):
    header = struct.pack("<Ii", 0x20080522, 0)
    data = ctypes.create_string_buffer(24)
    assert libc.capget(header, data) == 0
    words = list(struct.unpack("<6I", data.raw))
    low = 3 * (number // 32)
    for i in range(2):  # effective and permitted
        words[low + i] &= ~(1 << number % 32)
    assert libc.capset(header, struct.pack("<6I", *words)) == 0


def forbid_system_call(number):
    class Statement(ctypes.Structure):
        _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint)]

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(Statement))]

    statements = (Statement * 4)(
        Statement(0x20, 0, 0, 0),  # load the number
        Statement(0x15, 0, 1, number),
        Statement(0x06, 0, 0, 0x00050000 | 1),  # EPERM
        Statement(0x06, 0, 0, 0x7FFF0000),  # allowed
    )
    long = ctypes.c_ulong
    assert libc.prctl(38, long(1), long(0), long(0), long(0)) == 0
    program = Program(4, statements)
    if libc.prctl(22, long(2), ctypes.byref(program), long(0), long(0)) != 0:
        print("seccomp is not to be had")
        sys.exit(0)
"""


def warnings_in(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("WARNING")]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model.safetensors", {"a": ("U8", (NBYTES,), random_bytes(NBYTES))})


def test_a_small_locked_memory_limit_costs_fixed_buffers_only(model: Path):
    need_uring()
    need_direct(model)
    code = f"""{LIMITED}
drop_capability(14)  # CAP_IPC_LOCK
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
for _ in range(3):
    assert_same(gdsstream.load_file(path, reader="io_uring", direct_io=True, num_threads=2), expected)
gdsstream.release_engines()
"""
    out, _ = run_python(code, model)
    (warning,) = warnings_in(out)
    assert "without fixed buffers" in warning
    assert "ulimit -l" in warning


def test_with_enough_locked_memory_nothing_is_said(model: Path):
    need_uring()
    need_direct(model)
    code = f"""{LIMITED}
if os.geteuid() != 0:
    sys.exit(0)
assert_same(gdsstream.load_file(path, reader="io_uring", direct_io=True), expected)
"""
    assert warnings_in(run_python(code, model)[0]) == []


def test_without_io_uring_threads_read_and_it_is_said_once(model: Path):
    need_direct(model)
    code = f"""{LIMITED}
forbid_system_call(425)  # io_uring_setup
assert "forbidden" in _native.io_uring_reason(), _native.io_uring_reason()
for chunk_size in (65536, 1 << 20):  # two engines
    assert_same(gdsstream.load_file(path, direct_io=True, chunk_size=chunk_size), expected)
from gdsstream.load import shared_engine
route = shared_engine(torch.device("cpu"), gdsstream.StreamConfig(direct_io=True, chunk_size=65536)).route
assert "O_DIRECT by pread" in route, route
try:
    gdsstream.load_file(path, reader="io_uring")
except gdsstream.BackendUnavailableError as error:
    assert "io_uring" in str(error) and "forbidden" in str(error), error
else:
    raise AssertionError("reader='io_uring' was not refused")
print("refused by name")
"""
    out, _ = run_python(code, model)
    if "seccomp is not to be had" in out:
        pytest.skip("this sandbox has no seccomp filters")
    (warning,) = warnings_in(out)
    assert "threads instead of io_uring" in warning
    assert "refused by name" in out


def test_out_of_descriptors(model: Path):
    code = f"""{LIMITED}
engine = gdsstream.open_engine("staged", reader="pread", direct_io=True)
from gdsstream.checkpoint import Checkpoint
from gdsstream.plan import plan_separate
checkpoint = Checkpoint.open(path)
plan = plan_separate(checkpoint.select())
buffers = [torch.empty(n, dtype=torch.uint8) for n in plan.buffer_bytes]
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
spare = []
opened = engine.open(checkpoint.files)
resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(fd) for fd in os.listdir("/proc/self/fd")), hard))
while True:
    try:
        spare.append(os.dup(0))
    except OSError:
        break
import errno
for files in (checkpoint.files, opened):  # neither for the file, nor for its second descriptor
    try:
        engine.submit(files, plan, buffers).wait()
    except gdsstream.ReadError as error:
        assert error.errno == errno.EMFILE, error
        assert path in str(error), error
    else:
        raise AssertionError("read without a descriptor")
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
engine.submit(opened, plan, buffers).wait()
assert bytes(buffers[0].numpy()) == bytes(expected["a"].numpy())
"""
    need_direct(model)
    run_python(code, model)


def test_out_of_threads(model: Path):
    """The limit of memory stands in for that of threads, which does not bind root."""
    code = f"""{LIMITED}
assert_same(gdsstream.load_file(path, num_threads=1, direct_io=False), expected)
gdsstream.release_engines()
pages = int(open("/proc/self/statm").read().split()[0])
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (int(sys.argv[2]) << 20), hard))
try:
    tensors = gdsstream.load_file(path, num_threads=500, direct_io=False)
except (gdsstream.GdsStreamError, MemoryError) as error:
    tensors = None
    print("refused:", error)
resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
if tensors is not None:
    assert_same(tensors, expected)
    print("loaded")
assert_same(gdsstream.load_file(path, num_threads=500, direct_io=False), expected)
"""
    assert "loaded" in run_python(code, model, 100)[0]  # room for a few: they do all the work
    out, _ = run_python(code, model, 4)
    assert "refused" in out or "loaded" in out


def test_no_room_for_the_ring(model: Path):
    need_direct(model)
    code = f"""{LIMITED}
def load():
    return gdsstream.load_file(path, direct_io=True, reader="pread", num_threads=1, staging_bytes=1 << 30,
                               chunk_size=512 << 20)

pages = int(open("/proc/self/statm").read().split()[0])
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (256 << 20), hard))
try:
    load()
except gdsstream.MemoryBudgetError as error:
    assert "staging" in str(error), error
else:
    raise AssertionError("512 MiB in 256")
resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
assert_same(gdsstream.load_file(path, direct_io=True), expected)
"""
    run_python(code, model)
