"""Storage that fails, files that change while they are read, transfers that are given up: errors, never garbage."""

from __future__ import annotations

import errno
import gc
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import need_direct, need_uring, random_bytes, run_python, source_of, write_checkpoint

import gdsstream
from gdsstream.checkpoint import Checkpoint, TensorSpec
from gdsstream.engine import Engine, Transfer
from gdsstream.errors import (
    ConfigError,
    EngineClosedError,
    FileChangedError,
    GdsStreamError,
    ReadError,
    ShortReadError,
    TransferCancelledError,
)
from gdsstream.plan import ReadPlan, plan_separate

KIB, MIB = 1024, 1 << 20
CHUNK = 64 * KIB

# One thread, so that the N-th read is known.
READERS: dict[str, dict[str, Any]] = {
    "pread": {"backend": "staged", "reader": "pread", "direct_io": False},
    "io_uring": {"backend": "staged", "reader": "io_uring", "direct_io": False, "io_depth": 4},
    "pread O_DIRECT": {"backend": "staged", "reader": "pread", "direct_io": True},
    "io_uring O_DIRECT": {"backend": "staged", "reader": "io_uring", "direct_io": True, "io_depth": 4},
    "mapped": {"backend": "mapped", "host_cache_bytes": 64 * MIB},
}
NBYTES = 16 * CHUNK + 5


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "data.bin"
    path.write_bytes(random_bytes(NBYTES))
    return path


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    knobs = READERS[request.param]
    if knobs.get("reader") == "io_uring":
        need_uring()
    if knobs.get("direct_io"):
        need_direct(tmp_path)
    return knobs


@pytest.fixture
def opened() -> Iterator[Callable[..., Engine]]:
    """opened(**knobs) -> an engine of small chunks, closed after the test."""
    with ExitStack() as stack:

        def make(**knobs: Any) -> Engine:
            small = {"chunk_size": CHUNK, "staging_bytes": MIB, "num_threads": 1}
            return stack.enter_context(gdsstream.open_engine(**{**small, **knobs}))

        yield make


def plan_of(*parts: tuple[int, int], groups: tuple[int, ...] = ()) -> ReadPlan:
    """(offset, nbytes) of file 0, a buffer each; and their groups."""
    specs = [TensorSpec(str(i), "U8", (n,), 0, offset, n) for i, (offset, n) in enumerate(parts)]
    return plan_separate(specs, (lambda name: groups[int(name)]) if groups else None)


WHOLE = plan_of((0, NBYTES))


def buffers_for(plan: ReadPlan) -> list[torch.Tensor]:
    return [torch.full((size,), 0xEE, dtype=torch.uint8) for size in plan.buffer_bytes]


def read_all(engine: Engine, path: Path) -> bytes:
    (buffer,) = buffers_for(WHOLE)
    engine.submit([source_of(path)], WHOLE, [buffer]).wait()
    return buffer.numpy().tobytes()


def drained(engine: Engine, seconds: float = 10) -> dict[str, int | float]:
    """Stats once nothing is held any more, or at the end of the time."""
    until = time.monotonic() + seconds
    while True:
        stats = engine.stats()
        if (stats["quarantined"] == stats["staging_slots_held"] == 0) or time.monotonic() > until:
            return stats
        time.sleep(0.01)


def check_place(message: str, path: Path) -> int:
    """That a message names the file and a read in the middle of it; how many bytes that wanted."""
    found = re.match(rf"{re.escape(str(path))}: read of (\d+) bytes at offset (\d+) ", message)
    assert found, message
    wanted, offset = int(found[1]), int(found[2])
    assert 0 < wanted <= CHUNK
    assert 0 < offset <= NBYTES - wanted
    return wanted


# --- reads that fail --------------------------------------------------------------------------------------------------


def test_a_failed_read_names_file_offset_and_reason(
    path: Path, reader: dict[str, Any], opened: Callable[..., Engine], no_leaks: None
):
    engine = opened(**reader, faults="eio@5")
    transfer = engine.submit([source_of(path)], WHOLE, buffers_for(WHOLE))
    with pytest.raises(ReadError, match=r"failed: .*check") as caught:
        transfer.wait()
    check_place(str(caught.value), path)
    assert caught.value.errno == errno.EIO
    assert type(caught.value) is ReadError
    assert transfer.done()
    with pytest.raises(ReadError, match="failed"):
        transfer.wait()  # and again
    del transfer
    assert read_all(engine, path) == path.read_bytes()
    stats = drained(engine)
    assert stats["quarantined"] == stats["staging_slots_held"] == 0
    assert stats["failed_tasks"] >= 1
    engine.close()


def test_a_short_read_names_what_arrived(
    path: Path, reader: dict[str, Any], opened: Callable[..., Engine], no_leaks: None
):
    engine = opened(**reader, faults="short@3,short@17")
    transfer = engine.submit([source_of(path)], WHOLE, buffers_for(WHOLE))
    with pytest.raises(ShortReadError, match=rf"although the file has {NBYTES} bytes") as caught:
        transfer.wait(timeout_s=20)
    wanted = check_place(str(caught.value), path)
    assert f"ended after {wanted // 2} " in str(caught.value)
    del caught
    transfer = None  # type: ignore[assignment]
    for _ in range(3):  # the reads that were under way count too: the second fault comes somewhere in here
        try:
            assert read_all(engine, path) == path.read_bytes()
        except ShortReadError:
            continue
    assert read_all(engine, path) == path.read_bytes()
    engine.close()


def test_the_last_odd_bytes_are_wanted_exactly(path: Path, reader: dict[str, Any], opened: Callable[..., Engine]):
    engine = opened(**reader)
    plan = plan_of((NBYTES - 3, 3), (NBYTES - 4096, 4096), (1, 4097))
    buffers = buffers_for(plan)
    engine.submit([source_of(path)], plan, buffers).wait()
    data = path.read_bytes()
    assert [buffer.numpy().tobytes() for buffer in buffers] == [data[-3:], data[-4096:], data[1:4098]]


@pytest.mark.parametrize("extent", [(NBYTES - 4, 5), (NBYTES + 1, 1), (0, NBYTES + 1), (2**62, 8)])
def test_a_plan_beyond_the_end_is_refused(
    path: Path, reader: dict[str, Any], opened: Callable[..., Engine], extent: tuple[int, int]
):
    engine = opened(**reader)
    plan = plan_of((0, min(extent[1], 8)))
    plan.file_offset[:], plan.nbytes[:] = extent
    whole = torch.empty(2 * MIB, dtype=torch.uint8)
    with pytest.raises((ConfigError, ShortReadError), match=r"data\.bin|outside its buffer"):
        engine.submit([source_of(path)], plan, [whole]).wait()
    assert read_all(engine, path) == path.read_bytes()


def test_a_file_that_is_gone(path: Path, reader: dict[str, Any], opened: Callable[..., Engine], no_leaks: None):
    engine = opened(**reader)
    source = source_of(path)
    path.unlink()
    with pytest.raises(ReadError, match=r"data\.bin") as caught:
        engine.submit([source], WHOLE, buffers_for(WHOLE)).wait()
    assert caught.value.errno == errno.ENOENT
    os.mkfifo(path)  # whoever opens it for reading would wait for a writer
    with pytest.raises(FileChangedError, match=r"data\.bin: it"):
        engine.submit([source], WHOLE, buffers_for(WHOLE)).wait()
    engine.close()


def test_groups_that_had_landed_stay(path: Path, opened: Callable[..., Engine], reader: dict[str, Any]):
    engine = opened(**reader, faults="delay_us=20000,eio@9")
    plan = plan_of((0, 1000), (CHUNK, NBYTES - CHUNK), groups=(0, 1))
    buffers = buffers_for(plan)
    transfer = engine.submit([source_of(path)], plan, buffers)
    transfer.wait(0)
    assert not transfer.done(1)
    first = buffers[0].numpy().tobytes()
    assert first == path.read_bytes()[:1000]
    with pytest.raises(ReadError, match="failed"):
        transfer.wait(1)
    with pytest.raises(ReadError, match="failed"):
        transfer.wait()
    assert buffers[0].numpy().tobytes() == first
    for group in (2, -1):
        with pytest.raises(ConfigError, match=f"no group {group}"):
            transfer.wait(group)


@pytest.mark.parametrize("faults", ["eio", "eio@x", "eio@", "delay_us", "explode@3", "eio@1;short@2"])
def test_faults_that_are_not_understood(path: Path, opened: Callable[..., Engine], faults: str):
    with pytest.raises(ConfigError, match="fault"):
        read_all(opened(backend="staged", faults=faults), path)


# --- files that change ------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(CHUNK // 2)


def rewrite(path: Path) -> None:
    time.sleep(0.02)  # beyond the resolution of the file's times
    with path.open("r+b") as file:
        file.write(bytes(NBYTES))


def replace(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(bytes(NBYTES))
    other.rename(path)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


CHANGES = pytest.mark.parametrize("change", [truncate, rewrite, replace, grow])


@CHANGES
def test_changed_between_stamp_and_submit(
    path: Path,
    reader: dict[str, Any],
    opened: Callable[..., Engine],
    change: Callable[[Path], None],
    no_leaks: None,
):
    engine = opened(**reader)
    stale = source_of(path)
    change(path)
    with pytest.raises(FileChangedError, match=r"data\.bin: it"):
        engine.submit([stale], WHOLE, buffers_for(WHOLE)).wait()
    if change is not truncate:
        assert read_all(engine, path) == path.read_bytes()[:NBYTES]
    engine.close()


@CHANGES
def test_changed_while_it_is_open(
    path: Path,
    reader: dict[str, Any],
    opened: Callable[..., Engine],
    change: Callable[[Path], None],
    no_leaks: None,
):
    engine = opened(**reader)
    kept = engine.open([source_of(path)])  # type: ignore[attr-defined]
    buffers = buffers_for(WHOLE)
    engine.submit(kept, WHOLE, buffers).wait()
    assert buffers[0].numpy().tobytes() == path.read_bytes()
    change(path)
    with pytest.raises(FileChangedError, match=r"data\.bin: it"):
        engine.submit(kept, WHOLE, buffers_for(WHOLE)).wait()
    engine.close()


@CHANGES
def test_changed_while_it_is_read(
    path: Path,
    reader: dict[str, Any],
    opened: Callable[..., Engine],
    change: Callable[[Path], None],
    no_leaks: None,
):
    engine = opened(**reader, faults="delay_us=15000")
    source = source_of(path)
    transfer = engine.submit([source], WHOLE, buffers_for(WHOLE))
    time.sleep(0.05)
    assert not transfer.done(), "the change comes too late to test anything"
    change(path)
    with pytest.raises((FileChangedError, ShortReadError), match=r"data\.bin") as caught:
        transfer.wait(timeout_s=20)
    assert isinstance(caught.value, FileChangedError)
    if change is not truncate:
        assert read_all(engine, path) == path.read_bytes()[:NBYTES]
    engine.close()


def test_a_mapping_that_lost_its_pages_is_never_touched(path: Path, opened: Callable[..., Engine], no_leaks: None):
    """Truncated and grown again, its pages are back in place, empty: only the stamp tells."""
    engine = opened(**READERS["mapped"])
    kept = engine.open([source_of(path)])  # type: ignore[attr-defined]
    os.truncate(path, 0)
    with pytest.raises(FileChangedError):
        engine.submit(kept, WHOLE, buffers_for(WHOLE)).wait()
    os.truncate(path, NBYTES)
    with pytest.raises(FileChangedError):
        engine.submit(kept, WHOLE, buffers_for(WHOLE)).wait()
    kept.clear()
    assert read_all(engine, path) == bytes(NBYTES)
    engine.close()


@pytest.mark.parametrize("knobs", [{"backend": "staged", "direct_io": False}, {"backend": "traditional"}])
def test_load_file_of_a_file_cut_off_after_its_header_was_read(tmp_path: Path, knobs: dict[str, Any]):
    data = random_bytes(NBYTES)
    path = write_checkpoint(tmp_path / "m.safetensors", {"a": ("U8", (NBYTES,), data)})
    checkpoint = Checkpoint.open(path)
    os.truncate(path, path.stat().st_size - 100)
    with gdsstream.open_engine(**knobs) as engine:
        plan = plan_separate(checkpoint.select())
        with pytest.raises(FileChangedError):
            engine.submit(checkpoint.files, plan, buffers_for(plan)).wait()


# --- waiting, cancelling, dropping, closing ---------------------------------------------------------------------------


def test_waiting_has_a_limit_and_goes_on(path: Path, opened: Callable[..., Engine], reader: dict[str, Any]):
    engine = opened(**reader, faults="delay_us=20000")
    (buffer,) = buffers_for(WHOLE)
    transfer = engine.submit([source_of(path)], WHOLE, [buffer])
    begin = time.monotonic()
    for limit in (0, 0.001, 0.03):
        with pytest.raises(TimeoutError, match=f"not complete after {limit} s"):
            transfer.wait(timeout_s=limit)
    with pytest.raises(TimeoutError, match="group 0"):
        transfer.wait(0, timeout_s=0.001)
    assert time.monotonic() - begin < 0.25
    assert not transfer.done()
    assert not transfer.done(0)
    transfer.wait(timeout_s=20)
    assert transfer.done()
    transfer.wait(0, timeout_s=0)
    assert buffer.numpy().tobytes() == path.read_bytes()


def test_cancel_returns_at_once(path: Path, opened: Callable[..., Engine], reader: dict[str, Any], no_leaks: None):
    engine = opened(**reader, faults="delay_us=200000")
    transfer = engine.submit([source_of(path)], WHOLE, buffers_for(WHOLE))
    time.sleep(0.05)
    begin = time.monotonic()
    transfer.cancel()
    with pytest.raises(TransferCancelledError, match=f"{NBYTES} bytes was cancelled"):
        transfer.wait()
    assert transfer.done()
    transfer.cancel()
    del transfer
    assert time.monotonic() - begin < 0.1  # less than the read takes that is under way
    assert drained(engine)["quarantined"] == 0
    assert time.monotonic() - begin < 1.5  # and not the 3.4 s that were planned
    small = plan_of((7, 100))
    buffers = buffers_for(small)
    engine.submit([source_of(path)], small, buffers).wait()
    assert buffers[0].numpy().tobytes() == path.read_bytes()[7:107]
    engine.close()


def test_cancelling_what_is_complete_changes_nothing(path: Path, opened: Callable[..., Engine]):
    engine = opened(backend="staged")
    (buffer,) = buffers_for(WHOLE)
    transfer = engine.submit([source_of(path)], WHOLE, [buffer])
    transfer.wait()
    transfer.cancel()
    transfer.wait()
    assert buffer.numpy().tobytes() == path.read_bytes()


def test_transfers_behind_a_cancelled_one_are_not_held_up(
    path: Path, opened: Callable[..., Engine], reader: dict[str, Any]
):
    engine = opened(**reader, faults="delay_us=20000")
    waiting = [engine.submit([source_of(path)], WHOLE, buffers_for(WHOLE)) for _ in range(20)]
    small = plan_of((7, 100))
    buffers = buffers_for(small)
    last = engine.submit([source_of(path)], small, buffers)
    begin = time.monotonic()
    for transfer in waiting:
        transfer.cancel()
    last.wait()
    assert time.monotonic() - begin < 1  # the twenty would take 6.8 s
    assert buffers[0].numpy().tobytes() == path.read_bytes()[7:107]


CYCLES = 300  # for each of four: more than a thousand


@pytest.mark.parametrize("name", ["pread", "pread O_DIRECT", "io_uring O_DIRECT", "mapped"])
def test_a_thousand_random_cycles_leave_nothing(
    path: Path, name: str, opened: Callable[..., Engine], tmp_path: Path, no_leaks: None
):
    knobs = READERS[name]
    if knobs.get("reader") == "io_uring":
        need_uring()
    if knobs.get("direct_io"):
        need_direct(tmp_path)
    dice = random.Random(name)
    data = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    engine = opened(**{**knobs, "num_threads": 3, "faults": "delay_us=100"})
    source = source_of(path)
    kept: list[Transfer] = []
    canaries: list[torch.Tensor] = []
    finished = 0
    for _ in range(CYCLES):
        spans = [(dice.randrange(NBYTES), dice.randrange(200_000)) for _ in range(dice.randrange(1, 4))]
        spans = [(offset, min(nbytes, NBYTES - offset)) for offset, nbytes in spans]
        plan = plan_of(*spans)
        buffers = buffers_for(plan)
        transfer = engine.submit([source], plan, buffers)
        what = dice.randrange(8)
        if what == 0:
            transfer.wait(timeout_s=20)
            for (offset, nbytes), buffer in zip(spans, buffers, strict=True):
                assert np.array_equal(buffer.numpy(), data[offset : offset + nbytes])
            finished += 1
        if what in (1, 2):
            transfer.cancel()
        if what == 2 and transfer.done():
            with suppress(TransferCancelledError):
                transfer.wait()
        if what == 3:
            with suppress(TimeoutError):
                transfer.wait(timeout_s=dice.random() * 1e-3)
        if what == 4:
            kept.append(transfer)
        if what == 5 and kept:
            kept.pop(dice.randrange(len(kept))).cancel()
        if what == 6:
            kept.clear()
        sizes = [buffer.numel() for buffer in buffers]
        del transfer, buffers  # memory that may still be written to must not be given out again
        canaries = canaries[-50:] + [torch.full((size,), 0x5A, dtype=torch.uint8) for size in sizes]
    assert finished > CYCLES // 20
    kept.clear()
    gc.collect()
    stats = drained(engine)
    assert stats["quarantined"] == stats["staging_slots_held"] == 0
    assert stats["transfers"] == CYCLES
    assert stats["threads"] <= 3
    assert all(bool((canary == 0x5A).all()) for canary in canaries)
    assert read_all(engine, path) == data.tobytes()
    engine.close()


def test_closing_ends_what_is_under_way(path: Path, opened: Callable[..., Engine], reader: dict[str, Any]):
    engine = opened(**reader, faults="delay_us=20000")
    waiting = [engine.submit([source_of(path)], WHOLE, buffers_for(WHOLE)) for _ in range(5)]
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            waiting[4].wait()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    begin = time.monotonic()
    engine.close()
    # What was begun may come to its end; the rest, 1.3 s of it, is given up.
    assert time.monotonic() - begin < 0.8
    thread.join(5)
    assert [type(error) for error in errors] == [EngineClosedError]
    for transfer in waiting:
        assert transfer.done()
        transfer.cancel()
    with pytest.raises(EngineClosedError, match="under way"):
        waiting[3].wait()
    for use in (
        lambda: engine.submit([source_of(path)], WHOLE, buffers_for(WHOLE)),
        lambda: engine.open([source_of(path)]),  # type: ignore[attr-defined]
        engine.__enter__,
    ):
        with pytest.raises(EngineClosedError):
            use()
    assert engine.stats()["staging_bytes"] == 0
    engine.close()


def test_a_transfer_outlives_its_engine(path: Path):
    engine = gdsstream.open_engine("staged")
    (buffer,) = buffers_for(WHOLE)
    transfer = engine.submit([source_of(path)], WHOLE, [buffer])
    transfer.wait()
    engine.close()
    del engine
    gc.collect()
    transfer.wait()
    assert transfer.done()
    assert buffer.numpy().tobytes() == path.read_bytes()


def test_an_engine_that_is_dropped_while_it_reads(path: Path, no_leaks: None):
    engine = gdsstream.open_engine("staged", chunk_size=CHUNK, num_threads=2, faults="delay_us=5000")
    buffers = buffers_for(WHOLE)
    transfer = engine.submit([source_of(path)], WHOLE, buffers)
    del engine, buffers
    gc.collect()
    transfer.wait(timeout_s=20)  # it holds what it needs
    del transfer
    gc.collect()


RACE = """
import random, sys, threading
import torch
import gdsstream
from gdsstream.errors import EngineClosedError
from gdsstream.plan import plan_separate
from gdsstream.checkpoint import TensorSpec
from support import source_of
from pathlib import Path

path = Path(sys.argv[1])
source = source_of(path)
nbytes = path.stat().st_size
plan = plan_separate([TensorSpec("a", "U8", (nbytes,), 0, 0, nbytes)])
unexpected = []
for turn in range(150):
    engine = gdsstream.open_engine("staged", chunk_size=65536, staging_bytes=1 << 20, num_threads=2,
                                   direct_io=turn % 2 == 0, reader="pread")
    start = threading.Barrier(4)

    def work():
        start.wait()
        try:
            while True:
                engine.submit([source], plan, [torch.empty(nbytes, dtype=torch.uint8)]).wait(timeout_s=20)
                engine.stats()
        except EngineClosedError:
            pass
        except BaseException as error:
            unexpected.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    start.wait()
    if turn % 3:
        threading.Event().wait(random.random() * 0.004)
    engine.close()
    for thread in threads:
        thread.join()
assert not unexpected, unexpected
"""


def test_closing_while_other_threads_submit(path: Path):
    need_direct(path)
    run_python(RACE, path)


# --- limits of the process --------------------------------------------------------------------------------------------

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


def test_every_error_is_ours(path: Path, opened: Callable[..., Engine]):
    engine = opened(backend="staged")
    for plan, buffers in (
        (WHOLE, []),
        (WHOLE, [torch.empty(NBYTES - 1, dtype=torch.uint8)]),
        (WHOLE, [torch.empty(NBYTES, dtype=torch.int8)]),
        (WHOLE, [torch.empty(2 * NBYTES, dtype=torch.uint8)[::2]]),
    ):
        with pytest.raises(GdsStreamError):
            engine.submit([source_of(path)], plan, buffers)
    with pytest.raises(ConfigError, match="not among the 0"):
        engine.submit([], WHOLE, buffers_for(WHOLE))
