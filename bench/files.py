"""The test checkpoint: safetensors shards like those of a mixture-of-experts model, known byte for byte.

One file holds one layer with the shapes of a 30B-A3B model (2048 hidden, 768 per expert, bf16; 128 experts make the
1.24 GB of the usual test); smaller files scale the widths down. Scenarios that compute bring shapes of their own. The
bytes come from one pool of random bytes whose length is twice a prime: each tensor starts at its own place in the pool
and wraps around, so all tensors differ, no two places of a file that are a power of two apart hold the same bytes, and
what every tensor has to contain is known without reading the files. Every two bytes of the pool can be made a bf16 of a
weight's size, so that products with them stay finite.

Files live in a directory of their own, created inside the directory that was asked for, and go when the run ends,
however it ends; nothing outside that directory is written or removed.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.config import BenchError, StorageConfig

PREFIX = "gdsstream-bench-"
#: The eight layers of the usual test, in bytes a file.
LAYER_BYTES = 1_240_000_000
_POOL_BYTES = 2 * 8_388_593  # twice a prime, so that a pair of bytes stays one where a tensor wraps around
_POOL_STEP = 1_000_002
_SHARED_MEMORY = "/dev/shm"
_GIB = 1 << 30
#: What files need beside their bytes: a share for headers and the file system's own, and a reserve.
MARGIN = 1.01
RESERVE_BYTES = 64 << 20


#: Of one tensor: name, dtype (safetensors') and shape.
Shaped = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: where it is, in bytes, and where its content starts in the pool."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int
    nbytes: int
    pool_offset: int


@dataclass(frozen=True, slots=True)
class BenchFiles:
    """The checkpoint on disk and what is in it."""

    directory: Path
    paths: tuple[str, ...]
    tensors: dict[str, TensorInfo]
    pool: npt.NDArray[np.uint8]
    plan: Plan | None = None

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors, headers excluded."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def expected(self, tensor: TensorInfo) -> Iterator[tuple[int, int, int]]:
        """(offset in the tensor, offset in the pool, bytes) of each piece of the tensor's content."""
        done, place = 0, tensor.pool_offset
        while done < tensor.nbytes:
            piece = min(tensor.nbytes - done, _POOL_BYTES - place)
            yield done, place, piece
            done, place = done + piece, (place + piece) % _POOL_BYTES


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be written where; `why` says how it was chosen."""

    directory: Path
    files: int
    file_bytes: int
    why: str
    tensors: int | None = None  # equal ones in each file; None: a layer's
    #: (layer, bytes) -> its tensors; None: layer_shapes.
    shapes: Callable[[int, int], list[Shaped]] | None = None
    #: Whether every two bytes are a bf16 of about 0.014 as a standard deviation, finite and never 0.
    weights: bool = False
    #: Whether nothing is written at first: each part of the scenario then writes as much, in a form of its own.
    by_part: bool = False
    #: Whether the files stay when the run ends.
    keep: bool = False
    #: Whether what is read twice in a sample would come from a cache that was emptied before.
    cold: bool = False

    @property
    def total_bytes(self) -> int:
        return self.files * self.file_bytes


def check_directory(directory: Path) -> None:
    """Raise BenchError where `storage.dir` is none."""
    if not directory.is_dir():
        raise BenchError(f"storage.dir: {directory} is not a directory; create it or choose another with storage.dir=")


def choose(storage: StorageConfig, *, cuda: bool, cold: bool) -> Plan:
    """Fill in what the configuration leaves open. Raises BenchError when the directory is missing or too small.

    Warm files go to /dev/shm, cold ones to the temporary directory, since memory cannot be cold. A machine with a GPU
    and 24 GiB to spare gets eight layers of 1.24 GB; any other gets 1 GiB in eight files, and less where room is short.
    """
    directory = Path(storage.dir) if storage.dir else Path(tempfile.gettempdir())
    why = "as configured"
    if storage.dir is None and not cold and room(Path(_SHARED_MEMORY)) >= 2 * _GIB:
        directory = Path(_SHARED_MEMORY)
    check_directory(directory)
    free = room(directory)
    if storage.files is None or storage.file_bytes is None:
        if cuda and free >= 12 * _GIB and memory_available() >= 24 * _GIB:
            files, file_bytes, why = 8, LAYER_BYTES, "a GPU and at least 24 GiB of memory"
        else:
            total = min(_GIB, free // 4)
            files, file_bytes, why = 8, max(total // 8, 1 << 20), "1 GiB without a GPU or without room for more"
    files = storage.files or files
    file_bytes = storage.file_bytes or file_bytes
    plan = Plan(directory, files, file_bytes, why, storage.tensors, keep=storage.keep_files)
    needed = int(plan.total_bytes * MARGIN) + RESERVE_BYTES
    if needed > free:
        raise BenchError(
            f"{files} files of {file_bytes / 1e9:.2f} GB need {needed / 1e9:.2f} GB, but {directory} has room for "
            f"{free / 1e9:.2f} GB; lower storage.files or storage.file_bytes, or choose another storage.dir"
        )
    return plan


@contextmanager
def written(plan: Plan, *, keep: bool = False) -> Iterator[BenchFiles]:
    """Write the files, hand them out, and remove them, also when the block or the writing is interrupted.

    Raises BenchError where the directory cannot be written in, and where the disk is full although it was not before.
    """
    try:
        directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=plan.directory))
    except OSError as error:
        raise BenchError(
            f"storage.dir: nothing can be written in {plan.directory}: {error.strerror}; choose another with "
            "storage.dir="
        ) from error
    try:
        yield _written(directory, plan)
    finally:
        if not keep:
            _remove(directory)


def _written(directory: Path, plan: Plan) -> BenchFiles:
    try:
        return _write(directory, plan)
    except OSError as error:
        raise BenchError(
            f"test files of {plan.total_bytes / 1e9:.2f} GB cannot be written in {plan.directory}, which has room for "
            f"{room(directory) / 1e9:.2f} GB more by now: {error.strerror}; choose another with storage.dir="
        ) from error


def _remove(directory: Path) -> None:
    """Also where Ctrl-C comes once more meanwhile, as it does from the impatient."""
    try:
        shutil.rmtree(directory)
    except KeyboardInterrupt:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _write(directory: Path, plan: Plan) -> BenchFiles:
    pool = np.random.default_rng(20240229).integers(0, 256, _POOL_BYTES, dtype=np.uint8)
    if plan.weights:
        words = pool.view("<u2")
        # Sign and fraction stay random; two random bits choose among the exponents of 2**-9 to 2**-6.
        words[:] = words & 0x807F | (118 + (words >> 7 & 3)) << 7
    if plan.by_part:
        return BenchFiles(directory, (), {}, pool, plan)
    paths = [directory / f"model-{i + 1:05d}-of-{plan.files:05d}.safetensors" for i in range(plan.files)]
    tensors: dict[str, TensorInfo] = {}
    headers: list[bytes] = []
    for index in range(plan.files):
        header, infos = _layout(index, plan, len(tensors))
        headers.append(header)
        tensors.update((info.name, info) for info in infos)
    files = BenchFiles(directory, tuple(map(str, paths)), tensors, pool, plan)
    stop: list[bool] = []
    with ThreadPoolExecutor(max_workers=min(plan.files, os.cpu_count() or 1, 8)) as threads:
        jobs = [threads.submit(_write_file, files, index, headers[index], stop) for index in range(plan.files)]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            stop.append(True)  # lets the writers end soon after Ctrl-C or a full disk
            raise
    index_json = {
        "metadata": {"total_size": files.data_bytes},
        "weight_map": {name: paths[info.file].name for name, info in tensors.items()},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index_json), encoding="utf-8")
    return files


def _write_file(files: BenchFiles, index: int, header: bytes, stop: list[bool]) -> None:
    pool = files.pool.data
    descriptor = os.open(files.paths[index], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        _pwrite_all(descriptor, memoryview(header), 0)
        for tensor in files.tensors.values():
            if tensor.file != index:
                continue
            for done, place, piece in files.expected(tensor):
                if stop:
                    return
                _pwrite_all(descriptor, pool[place : place + piece], tensor.offset + done)
    finally:
        os.close(descriptor)


def _pwrite_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def _layout(layer: int, plan: Plan, first_tensor: int) -> tuple[bytes, list[TensorInfo]]:
    """Header and tensors of one file of about `plan.file_bytes`."""
    shapes = (plan.shapes or layer_shapes)(layer, plan.file_bytes)
    if plan.tensors is not None:
        elements = max(1, plan.file_bytes // 2 // plan.tensors)
        shapes = [(f"file.{layer}.tensor.{i}", "BF16", (elements,)) for i in range(plan.tensors)]
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset, sized = 0, []
    for name, dtype, shape in shapes:
        nbytes = int(np.prod(shape)) * (4 if dtype == "F32" else 2)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        sized.append((name, dtype, shape, offset, nbytes))
        offset += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return header, [
        TensorInfo(name, dtype, shape, layer, len(header) + offset, nbytes, pool_offset(first_tensor + i))
        for i, (name, dtype, shape, offset, nbytes) in enumerate(sized)
    ]


def pool_offset(number: int) -> int:
    """Where in the pool the content of a checkpoint's tensor starts: elsewhere for each."""
    return number * _POOL_STEP % _POOL_BYTES


def layer_shapes(layer: int, target_bytes: int) -> list[Shaped]:
    """(name, dtype, shape) of a MoE layer of at most `target_bytes`, F32 first as safetensors itself orders them."""
    for hidden in (2048, 1024, 512, 256, 128, 64):
        inner, keys = hidden * 3 // 8, hidden // 4
        attention = 2 * (2 * hidden * 2 * hidden + 2 * keys * hidden)
        expert = 2 * 3 * hidden * inner
        if target_bytes >= attention + 16 * expert:
            break
    fixed = attention + 2 * 2 * hidden + 64 * 1024  # norms, the router and the header, rounded up
    experts = max(1, (target_bytes - fixed) // (expert + 2 * hidden + 8))
    prefix = f"model.layers.{layer}"
    shapes: list[Shaped] = [
        (f"{prefix}.mlp.gate.e_score_correction_bias", "F32", (experts + experts % 2,)),
        (f"{prefix}.input_layernorm.weight", "BF16", (hidden,)),
        (f"{prefix}.self_attn.q_proj.weight", "BF16", (2 * hidden, hidden)),
        (f"{prefix}.self_attn.k_proj.weight", "BF16", (keys, hidden)),
        (f"{prefix}.self_attn.v_proj.weight", "BF16", (keys, hidden)),
        (f"{prefix}.self_attn.o_proj.weight", "BF16", (hidden, 2 * hidden)),
        (f"{prefix}.post_attention_layernorm.weight", "BF16", (hidden,)),
        (f"{prefix}.mlp.gate.weight", "BF16", (experts, hidden)),
    ]
    for expert_index in range(experts):
        mlp = f"{prefix}.mlp.experts.{expert_index}"
        shapes += [
            (f"{mlp}.gate_proj.weight", "BF16", (inner, hidden)),
            (f"{mlp}.up_proj.weight", "BF16", (inner, hidden)),
            (f"{mlp}.down_proj.weight", "BF16", (hidden, inner)),
        ]
    return shapes


def room(directory: Path) -> int:
    """Bytes that may be written there: free space, and on a memory filesystem also free memory less a reserve."""
    try:
        free = shutil.disk_usage(directory).free
    except OSError:
        return 0
    if str(directory).startswith(_SHARED_MEMORY):
        return max(0, min(free, memory_available() - 2 * _GIB))
    return free


def memory_available() -> int:
    """Bytes of host memory that the system can give without swapping; 0 where it does not say."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def left_over(directory: Path) -> list[str]:
    """Directories of runs that were killed before they could remove their files."""
    found = []
    for path in sorted(directory.glob(f"{PREFIX}*-*")):
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            found.append(str(path))
    return found
