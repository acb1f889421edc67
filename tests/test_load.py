"""load_file and read_many against safetensors and numpy, on every route that this machine allows."""

from __future__ import annotations

import json
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from support import (
    Raw,
    as_bytes,
    assert_same,
    evict,
    need_direct,
    need_reader,
    random_bytes,
    random_raw,
    reference,
    run_python,
    start_python,
    write_checkpoint,
)

import gdsstream
from gdsstream import _native
from gdsstream.config import StreamConfig
from gdsstream.dtypes import DTYPES, torch_dtype, torch_shape
from gdsstream.errors import (
    BackendUnavailableError,
    CheckpointNotFoundError,
    ConfigError,
    ReadError,
    TensorNotFoundError,
    TruncatedFileError,
)
from gdsstream.load import shared_engine

Make = Callable[..., Path]
KIB, MIB = 1024, 1 << 20

# Every way to a CPU tensor. Small chunks, so that a few megabytes are many tasks.
ROUTES: dict[str, dict[str, Any]] = {
    "auto": {},
    "auto, cached": {"host_cache_bytes": 64 * MIB},
    "auto, cache too small": {"host_cache_bytes": 4096},
    "pread": {"backend": "staged", "reader": "pread", "direct_io": False},
    "pread, one thread": {"backend": "staged", "reader": "pread", "direct_io": False, "num_threads": 1},
    "pread, many threads": {"backend": "staged", "reader": "pread", "direct_io": False, "num_threads": 40},
    "io_uring": {"backend": "staged", "reader": "io_uring", "direct_io": False},
    "pread O_DIRECT": {"backend": "staged", "reader": "pread", "direct_io": True},
    "io_uring O_DIRECT": {"backend": "staged", "reader": "io_uring", "direct_io": True},
    "io_uring O_DIRECT, depth 1": {"backend": "staged", "reader": "io_uring", "direct_io": True, "io_depth": 1},
    "mapped": {"backend": "mapped", "host_cache_bytes": 64 * MIB},
    "traditional": {"backend": "traditional"},
}


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    knobs = ROUTES[request.param]
    need_reader(knobs, tmp_path)
    return {"chunk_size": 64 * KIB, "staging_bytes": MIB, **knobs}


def stats(**knobs: Any) -> dict[str, int | float]:
    """Counters of the engine that load_file shares for these knobs."""
    return shared_engine(torch.device("cpu"), StreamConfig.resolve(knobs)).stats()


# --- load_file: what comes back ---------------------------------------------------------------------------------------


def test_every_route_gives_safetensors_bits(checkpoint: Path, route: dict[str, Any], no_leaks: None):
    for _ in range(2):
        assert_same(gdsstream.load_file(checkpoint, **route), reference(checkpoint))
    if _native.resident_bytes(str(checkpoint), 0, checkpoint.stat().st_size):
        evict(checkpoint)
    assert_same(gdsstream.load_file(checkpoint, **route), reference(checkpoint))


@pytest.mark.parametrize("dtype", [name for name, info in DTYPES.items() if info.torch_name])
def test_every_dtype(make_checkpoint: Make, dtype: str):
    try:
        wanted = torch_dtype(dtype)
    except gdsstream.DtypeError:
        pytest.skip(f"torch {torch.__version__} has no {dtype}")
    shapes = {"matrix": (6, 8), "scalar": (), "row": (2,), "empty": (3, 0)}
    if dtype == "F4":
        del shapes["scalar"]
    raw = {name: random_raw(dtype, shape, seed=len(name)) for name, shape in shapes.items()}
    path = make_checkpoint(tensors=raw)
    got = gdsstream.load_file(path)
    assert got.keys() == raw.keys()
    for name, (_, shape, data) in raw.items():
        assert got[name].dtype == wanted
        assert tuple(got[name].shape) == torch_shape(dtype, tuple(shape))
        assert as_bytes(got[name]) == data
    assert_same(got, reference(path))


def test_names_come_in_the_order_of_their_bytes(make_checkpoint: Make):
    raw = {name: random_raw("F32", (i + 1,), seed=i) for i, name in enumerate("zmab")}
    path = make_checkpoint(tensors=raw, header_order=["a", "z", "b", "m"], padding=5)
    got = gdsstream.load_file(path)
    assert list(got) == ["z", "m", "a", "b"]
    assert_same(got, reference(path))


def sharded(directory: Path) -> dict[str, torch.Tensor]:
    """Three shards with an index, and what they hold."""
    everything: dict[str, torch.Tensor] = {}
    weight_map = {}
    for shard in range(3):
        raw = {f"layer.{shard}.{i}": random_raw("F32", (50, i + 1), seed=10 * shard + i) for i in range(4)}
        path = write_checkpoint(directory / f"model-{shard + 1:05}-of-00003.safetensors", raw)
        everything.update(reference(path))
        weight_map.update(dict.fromkeys(raw, path.name))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return everything


def test_directory_index_list_and_links(tmp_path: Path, route: dict[str, Any]):
    directory = tmp_path / "model"
    directory.mkdir()
    everything = sharded(directory)
    files = sorted(directory.glob("*.safetensors"))
    (tmp_path / "linked").symlink_to(directory)
    snapshot = tmp_path / "snapshot"  # as a Hugging Face cache lays it out: links to blobs, one by one
    snapshot.mkdir()
    for path in directory.iterdir():
        (snapshot / path.name).symlink_to(Path("..") / "model" / path.name)
    for source in (
        directory,
        str(directory / "model.safetensors.index.json"),
        files,
        [str(path) for path in reversed(files)],
        tmp_path / "linked",
        snapshot,
        snapshot / "model.safetensors.index.json",
    ):
        assert_same(gdsstream.load_file(source, **route), everything)


def test_a_relative_path_and_a_changed_directory(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(checkpoint.parent)
    assert_same(gdsstream.load_file(checkpoint.name), reference(checkpoint))


def test_only_the_bytes_asked_for_are_read(checkpoint: Path, no_leaks: None):
    knobs: dict[str, Any] = {"backend": "staged", "direct_io": False, "num_threads": 3}
    expected = reference(checkpoint)
    chosen = ["layer.7.weight", "layer.1.weight", "layer.3.weight"]
    got = gdsstream.load_file(checkpoint, names=chosen, **knobs)
    assert list(got) == chosen
    assert_same(got, {name: expected[name] for name in chosen})
    nbytes = sum(tensor.nbytes for tensor in got.values())
    assert stats(**knobs)["read_bytes"] == nbytes
    got = gdsstream.load_file(checkpoint, names=lambda name: expected[name].dtype == torch.float32, **knobs)
    assert list(got) == ["layer.0.weight", "layer.8.weight"]
    nbytes += sum(tensor.nbytes for tensor in got.values())
    assert stats(**knobs)["read_bytes"] == nbytes
    assert gdsstream.load_file(checkpoint, names=[], **knobs) == {}
    assert gdsstream.load_file(checkpoint, names=lambda name: False, **knobs) == {}
    assert stats(**knobs)["read_bytes"] == nbytes


def test_direct_reads_are_widened_by_less_than_a_block_at_each_end(checkpoint: Path, no_leaks: None):
    need_direct(checkpoint)
    knobs: dict[str, Any] = {"backend": "staged", "direct_io": True, "chunk_size": 64 * KIB}
    got = gdsstream.load_file(checkpoint, names=["layer.7.weight"], **knobs)
    assert_same(got, {"layer.7.weight": reference(checkpoint)["layer.7.weight"]})
    nbytes = got["layer.7.weight"].nbytes
    read = stats(**knobs)["read_bytes"]
    assert nbytes <= read <= nbytes + 2 * 4095


def test_a_shard_that_is_not_needed_is_not_opened(tmp_path: Path):
    everything = sharded(tmp_path)
    names = ["layer.2.1"]
    with gdsstream.open_engine("staged") as engine:
        assert engine.stats()["read_bytes"] == 0
    gdsstream.release_engines()
    got = gdsstream.load_file(tmp_path, names=names, backend="staged")
    assert_same(got, {name: everything[name] for name in names})
    assert stats(backend="staged")["read_bytes"] == everything["layer.2.1"].nbytes


def test_every_tensor_owns_its_memory(checkpoint: Path, route: dict[str, Any]):
    tensors = gdsstream.load_file(checkpoint, **route)
    for tensor in tensors.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.storage_offset() == 0
        assert tensor.is_contiguous()
    addresses = [tensor.data_ptr() for tensor in tensors.values() if tensor.nbytes]
    assert len(set(addresses)) == len(addresses)
    tensors["layer.0.weight"].fill_(7)
    assert_same(gdsstream.load_file(checkpoint, **route), reference(checkpoint))  # the file is as it was


# In a process of its own: what other tests have left to the allocator would come and go meanwhile.
KEEPING = """
import gc, os, sys, gdsstream
path, size = sys.argv[1], int(sys.argv[2])

def anonymous_bytes():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

gdsstream.load_file(path, backend="staged", direct_io=False)  # what torch and an engine need once
gc.collect()
before = anonymous_bytes()
tensors = gdsstream.load_file(path, backend="staged", direct_io=False)
assert anonymous_bytes() - before > 2.5 * size, "three tensors"
kept = tensors["b"]
del tensors
gc.collect()
assert anonymous_bytes() - before < 1.5 * size, "one tensor"
assert int(kept[0]) == int(kept[-1]) == 65
os.unlink(path)
assert int(kept[size // 2]) == 65
"""


def test_keeping_one_tensor_keeps_no_other(tmp_path: Path):
    size = 40 * MIB  # beyond what malloc keeps for reuse
    raw: dict[str, Raw] = {name: ("U8", (size,), bytes([65]) * size) for name in "abc"}
    run_python(KEEPING, write_checkpoint(tmp_path / "model.safetensors", raw), size)


def test_auto_goes_past_the_page_cache_for_what_is_not_in_it(tmp_path: Path):
    need_direct(tmp_path)
    path = write_checkpoint(tmp_path / "model.safetensors", {"a": random_raw("U8", (8 * MIB,))})
    expected = reference(path)
    with gdsstream.open_engine("staged") as engine:
        assert engine.stats()["reads"] == 0
    gdsstream.release_engines()
    assert_same(gdsstream.load_file(path), expected)
    assert "page cache" in shared_engine(torch.device("cpu"), StreamConfig()).route
    gdsstream.release_engines()
    evict(path)
    assert_same(gdsstream.load_file(path), expected)
    route = shared_engine(torch.device("cpu"), StreamConfig()).route
    assert "O_DIRECT" in route
    assert "page cache" not in route
    assert _native.resident_bytes(str(path), MIB, 6 * MIB) == 0  # and left the cache alone


# --- load_file: what is refused ---------------------------------------------------------------------------------------


def test_devices(checkpoint: Path):
    assert_same(gdsstream.load_file(checkpoint, torch.device("cpu")), reference(checkpoint))
    for device in ("mps", "banana", "cpu:x", "meta", None, 1.5, -1):
        with pytest.raises(ConfigError, match="device"):
            gdsstream.load_file(checkpoint, device)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there(checkpoint: Path):
    for device in ("cuda", "cuda:0", 0, torch.device("cuda", 1)):
        with pytest.raises(BackendUnavailableError, match="no CUDA device"):
            gdsstream.load_file(checkpoint, device)


def test_bad_requests(checkpoint: Path, tmp_path: Path):
    with pytest.raises(TensorNotFoundError, match=r"did you mean 'layer\.1\.weight'"):
        gdsstream.load_file(checkpoint, names=["layer.1.weigth"])
    with pytest.raises(ConfigError, match="names is a list"):
        gdsstream.load_file(checkpoint, names="layer.1.weight")
    with pytest.raises(ConfigError, match="did you mean 'num_threads'"):
        gdsstream.load_file(checkpoint, num_thread=3)
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        gdsstream.load_file(tmp_path / "nowhere.safetensors")
    with pytest.raises(ConfigError, match="fault"):
        gdsstream.load_file(checkpoint, faults="gremlin@3")
    content = checkpoint.read_bytes()
    checkpoint.write_bytes(content[:-1])
    with pytest.raises(TruncatedFileError):
        gdsstream.load_file(checkpoint)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs at /dev/shm")
def test_direct_io_in_memory_works_or_is_refused_by_name():
    path = Path(f"/dev/shm/gdsstream-test-{os.getpid()}.safetensors")
    try:
        write_checkpoint(path, {"a": random_raw("U8", (100_001,))})
        if _native.direct_io_works(str(path)):  # tmpfs takes O_DIRECT since Linux 6.6
            assert_same(gdsstream.load_file(path, direct_io=True), reference(path))
        else:
            with pytest.raises(ConfigError, match="refuses O_DIRECT"):
                gdsstream.load_file(path, direct_io=True)
        assert_same(gdsstream.load_file(path), reference(path))
    finally:
        path.unlink(missing_ok=True)


# --- load_file: many tensors, many threads, processes, signals --------------------------------------------------------


def test_100_000_tensors(tmp_path: Path, no_leaks: None):
    count = 100_000
    data = np.arange(4 * count, dtype=np.int32)
    pieces = data.reshape(count, 4)
    raw: dict[str, Raw] = {
        f"model.layers.{i // 1000}.experts.{i % 1000}.weight": ("I32", (2, 2), pieces[i].tobytes())
        for i in range(count)
    }
    path = write_checkpoint(tmp_path / "model.safetensors", raw)
    del raw
    begin = time.perf_counter()
    tensors = gdsstream.load_file(path)
    seconds = time.perf_counter() - begin
    assert len(tensors) == count
    assert np.array_equal(torch.stack(list(tensors.values())).numpy().reshape(-1), data)
    # 25 us a tensor here; a cost that grows with the square would be minutes.
    assert seconds / count < 200e-6


def test_threads_load_at_the_same_time(make_checkpoint: Make, no_leaks: None):
    paths = [
        make_checkpoint(f"m{i}.safetensors", {"a": random_raw("F32", (3, 50_001), seed=i), "b": random_raw("U8", (i,))})
        for i in range(1, 7)
    ]
    expected = [reference(path) for path in paths]
    failures: list[BaseException] = []
    start = threading.Barrier(len(paths))

    def work(index: int) -> None:
        try:
            start.wait()
            for turn in range(8):
                which = (index + turn) % len(paths)
                assert_same(gdsstream.load_file(paths[which], chunk_size=64 * KIB), expected[which])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(paths))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


FORK = """
import os, sys
import gdsstream
from gdsstream.errors import ForkedProcessError
from support import assert_same, reference, source_of
from gdsstream.checkpoint import Checkpoint
from gdsstream.plan import plan_separate
import torch

path = sys.argv[1]
expected = reference(path)
assert_same(gdsstream.load_file(path), expected)
checkpoint = Checkpoint.open(path)
engine = gdsstream.open_engine("staged", chunk_size=65536, num_threads=1, faults="delay_us=20000")
plan = plan_separate(checkpoint.select())
buffers = [torch.empty(n, dtype=torch.uint8) for n in plan.buffer_bytes]
under_way = engine.submit(checkpoint.files, plan, buffers)  # its reader is in the middle of a read
handle = gdsstream.safe_open(path)
assert_same(handle.tensors(), expected)
mapped = gdsstream.safe_open(path, host_cache_bytes=1 << 30)
assert_same(mapped.tensors(), expected)

def refused(call):
    try:
        call()
    except ForkedProcessError as error:
        assert str(os.getppid()) in str(error), error
    else:
        raise AssertionError("not refused")

child = os.fork()
if child == 0:
    refused(lambda: engine.submit(checkpoint.files, plan, buffers))
    refused(lambda: under_way.wait())
    refused(lambda: under_way.wait(0, timeout_s=0.1))
    refused(lambda: under_way.done())
    refused(lambda: mapped.tensors())
    refused(lambda: engine.__enter__())
    under_way.cancel()
    engine.close()
    assert_same(gdsstream.load_file(path), expected)
    assert_same(handle.tensors(), expected)  # its shared engine is opened anew
    with gdsstream.open_engine("staged") as own:
        own.submit(checkpoint.files, plan, buffers).wait()
    grandchild = os.fork()
    if grandchild:
        assert os.waitpid(grandchild, 0)[1] == 0
    else:
        assert_same(gdsstream.load_file(path), expected)
    sys.exit(0)  # by the ordinary way out, destructors and atexit included
assert os.waitpid(child, 0)[1] == 0, "the child did not exit cleanly"
under_way.wait()
assert_same(mapped.tensors(), expected)
assert_same(gdsstream.load_file(path), expected)
print("done")
"""


def test_a_forked_child_opens_its_own_engine(checkpoint: Path):
    out, _ = run_python(FORK, checkpoint)
    assert out.split()[-1] == "done"


FORKED_MAPPING = """
import gc, mmap, os, sys
import gdsstream

handle = gdsstream.safe_open(sys.argv[1], host_cache_bytes=1 << 30)
nbytes = os.path.getsize(sys.argv[1])
child = os.fork()
if child == 0:
    # The parent's mapping is not inherited; what the child maps now may lie where it was.
    mine = [mmap.mmap(-1, nbytes) for _ in range(8)]
    for one in mine:
        one[:] = b"x" * nbytes
    handle.close()
    del handle
    gc.collect()
    for one in mine:
        assert one[:] == b"x" * nbytes
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0, "the child lost memory of its own"
"""


def test_a_forked_child_keeps_its_memory_when_it_drops_the_parents_mapping(tmp_path: Path):
    path = write_checkpoint(tmp_path / "model.safetensors", {"a": random_raw("U8", (3 * MIB,))})
    run_python(FORKED_MAPPING, path)


INTERRUPTED = """
import sys, time
import gdsstream
from support import assert_same, reference

path = sys.argv[1]
expected = reference(path)
slow = {"backend": "staged", "reader": sys.argv[2], "direct_io": sys.argv[3] == "direct", "chunk_size": 65536}
slow |= {"num_threads": 1, "io_depth": 4, "faults": "delay_us=50000"}
print("ready", flush=True)
begin = time.monotonic()
try:
    gdsstream.load_file(path, **slow)
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - begin, flush=True)
names = [next(iter(expected))]
assert_same(gdsstream.load_file(path, names=names, **slow), {name: expected[name] for name in names})
assert_same(gdsstream.load_file(path), expected)
gdsstream.release_engines()
print("done", time.monotonic() - begin, flush=True)
"""


@pytest.mark.parametrize(("reader", "mode"), [("pread", "cached"), ("pread", "direct"), ("io_uring", "direct")])
def test_ctrl_c_ends_a_load_at_once(tmp_path: Path, reader: str, mode: str):
    need_reader({"reader": reader, "direct_io": mode == "direct"}, tmp_path)
    # 160 reads of 50 ms each: eight seconds.
    raw = {"small": random_raw("U8", (1000,)), "big": random_raw("U8", (160 * 64 * KIB,), seed=1)}
    path = write_checkpoint(tmp_path / "model.safetensors", raw)
    process = start_python(INTERRUPTED, path, reader, mode)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0, err
    lines = [line.split() for line in out.splitlines()]
    assert [line[0] for line in lines] == ["interrupted", "done"]
    assert float(lines[0][1]) < 2
    assert float(lines[1][1]) < 5


# --- read_many --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("shards")
    paths = [directory / f"shard{i}.bin" for i in range(3)]
    for i, path in enumerate(paths):
        path.write_bytes(random_bytes(300_000 + 777 * i, seed=i))
    return paths


def gathered(paths: Sequence[Path], index: Sequence[int], offsets: Sequence[int], length: int) -> np.ndarray:
    data = [np.frombuffer(path.read_bytes(), dtype=np.uint8) for path in paths]
    rows = [data[i][o : o + length] for i, o in zip(index, offsets, strict=True)]
    return np.stack(rows) if rows else np.empty((0, length), dtype=np.uint8)


NATIVE_ROUTES = [name for name in ROUTES if name != "traditional"]


@pytest.mark.parametrize("name", NATIVE_ROUTES)
def test_read_many_is_numpys_gather(shards: list[Path], name: str):
    knobs = {"chunk_size": 64 * KIB, "staging_bytes": MIB, **ROUTES[name]}
    need_reader(knobs, shards[0])
    random = np.random.default_rng(5)

    @settings(max_examples=12, deadline=None)
    @given(n=st.integers(0, 300), length=st.sampled_from([1, 13, 512, 4096, 5000, 65_536, 70_001]))
    def check(n: int, length: int) -> None:
        index = random.integers(0, len(shards), n)
        last = np.array([path.stat().st_size for path in shards])[index] - length
        offsets = random.integers(0, last + 1) if n else last
        # The very first and the very last record of a file, and one that is asked for twice.
        if n > 3:
            offsets[0], offsets[1], index[2], offsets[2] = 0, last[1], index[3], offsets[3]
        got = gdsstream.read_many(shards, index, offsets, length, **knobs)
        assert got.dtype == torch.uint8
        assert np.array_equal(got.numpy(), gathered(shards, index.tolist(), offsets.tolist(), length))

    check()
    gdsstream.release_engines()


def test_read_many_into_a_given_tensor(shards: list[Path]):
    out = torch.zeros(4, 100, dtype=torch.uint8)
    got = gdsstream.read_many(shards, [0, 1, 2, 0], [5, 6, 7, 5], 100, out=out)
    assert got is out
    assert np.array_equal(out.numpy(), gathered(shards, [0, 1, 2, 0], [5, 6, 7, 5], 100))
    rows = torch.zeros(6, 100, dtype=torch.uint8)
    gdsstream.read_many(shards, [1], [9], 100, out=rows[2:3])
    assert np.array_equal(rows[2].numpy(), gathered(shards, [1], [9], 100)[0])
    assert not rows[:2].any()
    assert not rows[3:].any()


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(2, 99, dtype=torch.uint8),
        torch.zeros(3, 100, dtype=torch.uint8),
        torch.zeros(200, dtype=torch.uint8),
        torch.zeros(2, 100, dtype=torch.int8),
        torch.zeros(100, 2, dtype=torch.uint8).T,
        torch.zeros(2, 200, dtype=torch.uint8)[:, ::2],
        torch.zeros(2, 100, dtype=torch.uint8, device="meta"),
    ],
)
def test_read_many_refuses_an_out_that_does_not_fit(shards: list[Path], out: torch.Tensor):
    with pytest.raises(ConfigError, match=r"out is .*it has to be a contiguous torch.uint8 tensor of shape \(2, 100\)"):
        gdsstream.read_many(shards, [0, 1], [0, 0], 100, out=out)


def test_read_many_of_nothing(shards: list[Path]):
    assert gdsstream.read_many(shards, [], [], 100).shape == (0, 100)
    assert gdsstream.read_many([], [], [], 1).shape == (0, 1)
    empty = np.array([], dtype=np.int64)
    assert gdsstream.read_many(shards[0], empty, torch.tensor([], dtype=torch.int64), 7).shape == (0, 7)


def test_read_many_takes_integers_of_any_kind(shards: list[Path]):
    expected = gathered(shards, [2, 1], [10, 20], 8)
    for index, offsets in (
        ((2, 1), range(10, 30, 10)),
        (np.array([2, 1], dtype=np.uint8), np.array([10, 20], dtype=np.uint64)),
        (torch.tensor([2, 1]), torch.tensor([10, 20], dtype=torch.int32)),
    ):
        assert np.array_equal(gdsstream.read_many(shards, index, offsets, 8).numpy(), expected)
    assert np.array_equal(gdsstream.read_many(shards, [2, 1], [10, 20], int(np.int64(8))).numpy(), expected)
    one = gdsstream.read_many(shards[1], [0], [20], 8)
    assert np.array_equal(one.numpy()[0], expected[1])


@pytest.mark.parametrize(
    ("index", "offsets", "length", "words"),
    [
        ([0, 3], [0, 0], 8, "record 1 names file 3; there are 3"),
        ([0, -1], [0, 0], 8, "record 1 names file -1"),
        ([0, 0], [0, -5], 8, "record 1 has the negative offset -5"),
        ([0], [0, 1], 8, "equally long"),
        ([[0]], [[1]], 8, "equally long"),
        ([0], [0], 0, "at least 1"),
        ([0], [0], -3, "at least 1"),
        ([0.0], [0], 8, "hold integers"),
        ([0], ["x"], 8, "hold integers"),
        ([True], [0], 8, "hold integers"),
        ([2**40], [0], 8, "beyond int32"),
        ([0], [2**63], 8, "beyond int64|hold integers"),
        ([0], [300_000 - 7], 8, "past the file's end at 300000"),
        ([0], [2**63 - 1], 8, "past the file's end"),
        ([1, 0], [5, 299_999], 2, r"shard0\.bin: extent 1 wants 2 bytes at offset 299999"),
        ([0], [0], 2**62, "past the file's end|no room"),
        ([0], [0], 1.5, "whole number"),
        ([0], [0], "8", "whole number"),
    ],
)
def test_read_many_names_the_bad_record(shards: list[Path], index: Any, offsets: Any, length: Any, words: str):
    with pytest.raises((ConfigError, gdsstream.MemoryBudgetError), match=words):
        gdsstream.read_many(shards, index, offsets, length)


def test_read_many_wants_files_and_a_native_engine(shards: list[Path], tmp_path: Path):
    with pytest.raises(ReadError, match="missing"):
        gdsstream.read_many([tmp_path / "missing.bin"], [0], [0], 1)
    with pytest.raises(ConfigError, match="native engine only"):
        gdsstream.read_many(shards, [0], [0], 1, backend="traditional")
    with pytest.raises(ReadError):
        gdsstream.read_many([tmp_path], [0], [0], 1)


def test_read_many_reads_each_record_once(shards: list[Path], no_leaks: None):
    knobs: dict[str, Any] = {"backend": "staged", "reader": "pread", "direct_io": False, "num_threads": 2}
    gdsstream.read_many(shards, [0, 1, 2] * 100, np.arange(300) * 512, 512, **knobs)
    counters = stats(**knobs)
    assert counters["read_bytes"] == 300 * 512
    assert counters["transfers"] == 1
    assert counters["bytes"] == 300 * 512


def test_views_equal_safetensors_and_share_the_files_pages(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(300, 7), "b": torch.arange(9, dtype=torch.int64), "empty": torch.empty(0, 3)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    views = gdsstream.load_file(path, copy=False)
    assert {name: tensor.tolist() for name, tensor in views.items()} == {n: t.tolist() for n, t in tensors.items()}
    assert views["a"].untyped_storage().data_ptr() == views["b"].untyped_storage().data_ptr()
    views["a"].zero_()
    assert torch.equal(gdsstream.load_file(path)["a"], tensors["a"])  # the mapping is private
    assert list(gdsstream.load_file(path, names=["b"], copy=False)) == ["b"]


def test_views_copy_what_torch_cannot_view(tmp_path: Path) -> None:
    # A one-byte tensor before a four-byte one: legal in the format, and misaligned for torch.
    header = b'{"u":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
    header += b'"f":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}'
    header += b" " * (-len(header) % 8)
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\x07" + struct.pack("<2f", 1.5, -2.0))
    views = gdsstream.load_file(path, copy=False)
    assert views["u"].tolist() == [7]
    assert views["f"].tolist() == [1.5, -2.0]


def test_views_are_for_the_cpu_only(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(gdsstream.ConfigError, match="copy=False"):
        gdsstream.load_file(path, copy=False, backend="staged")
