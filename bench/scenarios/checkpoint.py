"""Verb `write`: a checkpoint whose tensors are on the device, onto the storage, and back.

A sample saves every tensor into a new, empty folder. It ends when the storage has everything: the bytes, by fsync of
every file, and the names, by fsync of the folder; so does the ceiling's. A saver that works in the background returns
earlier: `blocked_s` is the time after which the tensors may be changed, the work that it queued on the device included,
and small tensors are changed then, to see that it is true.

After the clock has stopped the checkpoint is read back onto the device by the library that wrote it, which has a figure
of its own: with the files out of the page cache where they can be (`read_cold`), which mincore tells. What comes back
is compared with the generator's bytes, and where the files are safetensors' so is what safetensors itself reads. Then
the folder goes, but for the last one of a part where files are to be kept; it goes at once where a save fails.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bench import cache, files, fsyncs, llama, stats
from bench.config import BenchConfigError, BenchError
from bench.config_checkpoint import CheckpointConfig
from bench.files import BenchFiles, Plan, TensorInfo
from bench.loaders.base import Job, Loader, Saving
from bench.scenarios.base import VerificationError, Workload, consume
from bench.scenarios.contents import Contents

if TYPE_CHECKING:
    import torch

    from bench.measure import Sample

# Beside the tensors on a GPU: a saver's copy of them, and what is read back; and some room.
_DEVICE_COPIES = 3.2
# Tensors of at most so many bytes are changed as soon as a saver says that they may be: it takes microseconds.
_CHANGED_BYTES = 64 << 10
_CHANGED_TENSORS = 8
# A disk with less room than that is full.
_FULL_BYTES = 1 << 20


def plan(scenario: CheckpointConfig, chosen: Plan, *, cold: bool) -> Plan:
    """As much as the scenario allows and there is room for. Raises BenchConfigError where a layer has none."""
    if cold:
        raise BenchConfigError(
            "a save reads no files that could be cold: use cache=warm; what was saved is read back with its pages out "
            "of the cache in any case, where they can be"
        )
    room = int((files.room(chosen.directory) - files.RESERVE_BYTES) / files.MARGIN)
    if chosen.keep:
        room //= len(scenario.models) + 1  # what stays of each part, and what is being written
    limit = min(scenario.checkpoint_bytes, room, files.memory_available() // 4)
    said = []
    for model in scenario.models:
        found = llama.scaled(model, limit, optimizer=scenario.optimizer, shrink=scenario.shrink)
        said.append(f"{model}: {found}")
    return dataclasses.replace(
        chosen, files=scenario.shards, file_bytes=limit // scenario.shards, why="; ".join(said), by_part=True
    )


class _Shard(NamedTuple):
    """One file of the checkpoint: its name without an ending, and its tensors."""

    stem: str
    tensors: dict[str, torch.Tensor]


class Saved(NamedTuple):
    """A sample's folder and what is known of its saving."""

    folder: Path
    saving: Saving
    blocked_s: float


class Checkpoint(Workload):
    """One model. `job.saves_to` is the folder that all of its checkpoints are written in."""

    verb = "write"
    unit = "tensors"

    def __init__(self, written: BenchFiles, device: str, scenario: CheckpointConfig) -> None:
        import torch

        assert written.plan is not None
        (self._model,) = scenario.models
        self._scenario, self._keep = scenario, written.plan.keep
        limit = written.plan.total_bytes
        self._scaled = llama.scaled(self._model, limit, optimizer=scenario.optimizer, shrink=scenario.shrink)
        groups = llama.shards(self._scaled.tensors, scenario.shards)
        self._stems = stems = [f"model-{number + 1:05d}-of-{len(groups):05d}" for number in range(len(groups))]
        infos = _infos(groups)
        self._expected = {info.name: info for info in infos}
        known = dataclasses.replace(written, paths=tuple(stems), tensors=self._expected)
        self._nbytes = known.data_bytes
        _check_device_memory(device, self._nbytes)
        directory = written.directory / f"checkpoint-{self._model}"
        directory.mkdir()
        self.units = len(infos)
        self.job = Job((), self._nbytes, device, saves_to=directory)
        self._on_device, self._on_cpu = Contents(known, device), Contents(known, "cpu")
        self._shards = [_Shard(stem, {}) for stem in stems]
        for info in infos:
            dtype = torch.float32 if info.dtype == "F32" else torch.bfloat16
            # Memory of its own for each: torch.save keeps whole storages.
            tensor = torch.empty(info.shape, dtype=dtype, device=device)
            self._on_device.fill(info, tensor)
            self._shards[info.file].tensors[info.name] = tensor
        self._fsyncs = fsyncs.Watch()
        self._folders: dict[int, Path] = {}
        self._saved: Saved | None = None

    @property
    def sample_bytes(self) -> int:
        return self._nbytes

    def close(self) -> None:
        self._shards = []
        assert self.job.saves_to is not None
        shutil.rmtree(self.job.saves_to)

    # ---- a sample

    def before(self, loader: Loader, number: int) -> dict[str, float]:
        assert self.job.saves_to is not None
        name = f"{len(self._folders)}-{type(loader).__name__}"
        folder = self._folders.setdefault(id(loader), self.job.saves_to / name)
        for other in self.job.saves_to.iterdir():  # what is kept is the last one
            self._remove(other)
        needed, room = int(self._nbytes * files.MARGIN), files.room(folder.parent)
        if needed > room:
            raise BenchError(
                f"a checkpoint needs {needed / 1e9:.3f} GB, and {folder.parent} has room for {room / 1e9:.3f} GB; "
                "lower scenario.checkpoint_bytes, choose another storage.dir, or leave storage.keep_files false"
            )
        folder.mkdir()
        fsyncs.directory(folder.parent)
        return {}

    def run(self, loader: Loader) -> Saved:
        folder = self._folders[id(loader)]
        self._fsyncs.start()
        began = time.perf_counter()
        try:
            saving = loader.save({shard.stem: shard.tensors for shard in self._shards}, folder)
            self._synchronize()
        except BaseException as error:
            self._give_up(folder, error)
            raise
        return Saved(folder, saving, time.perf_counter() - began)

    def finish(self, delivered: Saved) -> None:
        changed = self._change()
        try:
            delivered.saving.wait()
        except BaseException as error:
            self._give_up(delivered.folder, error)
            raise
        finally:
            self._fsyncs.stop()
            self._change_back(changed)

    def after(self, loader: Loader, delivered: Saved) -> dict[str, float]:
        """Reads the checkpoint back, verifies it, and removes it."""
        try:
            return self._read_back(loader, delivered)
        finally:
            if not self._keep:
                self._remove(delivered.folder)

    def tensors(self, delivered: Any) -> list[torch.Tensor]:
        """Of what was read back; what was saved is the scenario's own."""
        return list(delivered.values()) if isinstance(delivered, dict) else []

    def verify(self, delivered: Any) -> None:
        """Done by `after`, which has what was read back."""

    def derive(self, samples: Sequence[Sample]) -> dict[str, Any]:
        def middle(name: str) -> float:
            return stats.median([sample.figures[name] for sample in samples])

        cold = [sample for sample in samples if sample.figures["read_cold"]]
        reads = [self._nbytes / 1e9 / sample.figures["read_s"] for sample in cold or samples]
        scenario = self._scenario
        return {
            "model": self._model,
            "layers": self._scaled.layers,
            "model_layers": llama.SHAPES[self._model].layers,
            "embeddings": self._scaled.whole,
            "optimizer": scenario.optimizer,
            "shrink": scenario.shrink,
            "checkpoint_bytes": self._nbytes,
            "model_checkpoint_bytes": llama.full_bytes(self._model, optimizer=scenario.optimizer),
            "shards": len(self._stems),
            "saved_s": stats.median([sample.seconds for sample in samples]),
            "blocked_s": middle("blocked_s"),
            "fsync_s": middle("fsync_s"),
            "fsyncs": middle("fsyncs"),
            "fsync_share": stats.median([sample.figures["fsync_s"] / sample.seconds for sample in samples]),
            "room_bytes": middle("room_bytes"),
            "read_cold": bool(cold),
            "read_n": len(reads),
            "read_gb_per_s": stats.median(reads),
            "judged_by_safetensors": all(sample.figures["judged_by_safetensors"] for sample in samples),
        }

    # ---- around it

    def _read_back(self, loader: Loader, saved: Saved) -> dict[str, float]:
        paths = [path for path in saved.folder.rglob("*") if path.is_file()]
        if not paths:
            raise VerificationError(f"nothing was written into {saved.folder}")
        room = sum(path.stat().st_blocks for path in paths) * 512
        cold = cache.evict([str(path) for path in paths]) == 0
        wanted = {info.name: (info.shape, info.dtype) for info in self._expected.values()}
        began = time.perf_counter()
        found = loader.restore(saved.folder, wanted)
        if self.job.cuda:
            self._synchronize()
        else:
            consume(list(found.values()))
        seconds = time.perf_counter() - began
        self._check(found, self._on_device)
        if loader.delivers() == "owned":
            self.spoil(found)
        del found
        judged = self._judge(saved.folder)
        return {
            "blocked_s": saved.blocked_s,
            "fsync_s": self._fsyncs.seconds,
            "fsyncs": self._fsyncs.count,
            "room_bytes": room,
            "read_s": seconds,
            "read_cold": float(cold),
            "judged_by_safetensors": float(judged),
        }

    def _judge(self, folder: Path) -> bool:
        """Compare what safetensors itself reads; False where the files are not of its format."""
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            return False
        from safetensors.torch import load_file

        found: dict[str, torch.Tensor] = {}
        for path in paths:
            found.update(load_file(path))
        self._check(found, self._on_cpu)
        return True

    def _check(self, found: dict[str, torch.Tensor], contents: Contents) -> None:
        if found.keys() != self._expected.keys():
            example = sorted(found.keys() ^ self._expected.keys())[0]
            raise VerificationError(f"{len(found)} tensors were read back, not {self.units}; one is {example}")
        for name, info in self._expected.items():
            contents.check(info, found[name])

    def _synchronize(self) -> None:
        if self.job.cuda:
            import torch

            torch.cuda.current_stream(self.job.device).synchronize()

    def _change(self) -> list[tuple[TensorInfo, torch.Tensor]]:
        """Use the tensors as the training that goes on would. What was changed, the last ones that are small."""
        every = [(self._expected[name], tensor) for shard in self._shards for name, tensor in shard.tensors.items()]
        small = [each for each in every if each[0].nbytes <= _CHANGED_BYTES][-_CHANGED_TENSORS:]
        for _, tensor in small:
            tensor.fill_(1)
        return small

    def _change_back(self, changed: list[tuple[TensorInfo, torch.Tensor]]) -> None:
        for info, tensor in changed:
            self._on_device.fill(info, tensor)

    def _give_up(self, folder: Path, error: BaseException) -> None:
        """Remove what there is of a save that failed. Raises BenchError where that was for want of room, which not
        every library says."""
        self._fsyncs.stop()
        left = files.room(folder)
        self._remove(folder)
        if isinstance(error, Exception) and left < _FULL_BYTES:
            raise BenchError(f"the disk is full, {left} bytes were left: {type(error).__name__}: {error}") from error

    def _remove(self, folder: Path) -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)
            fsyncs.directory(folder.parent)  # what removing it costs is not the next sample's


def _infos(groups: Sequence[Sequence[files.Shaped]]) -> list[TensorInfo]:
    """The tensors with their shard as their file, and what each of them holds."""
    found: list[TensorInfo] = []
    for shard, group in enumerate(groups):
        for name, dtype, shape in group:
            size = llama.nbytes([(name, dtype, shape)])
            found.append(TensorInfo(name, dtype, shape, shard, 0, size, files.pool_offset(len(found))))
    return found


def _check_device_memory(device: str, nbytes: int) -> None:
    """Raise BenchError where a GPU has no room for the tensors and what is made of them."""
    if not device.startswith("cuda"):
        return
    import torch

    free, needed = int(torch.cuda.mem_get_info(device)[0]), int(_DEVICE_COPIES * nbytes)
    if needed > free:
        raise BenchError(
            f"a checkpoint of {nbytes / 1e9:.2f} GB needs {needed / 1e9:.2f} GB of {device}'s memory, for a copy "
            f"while it is saved and for what is read back, and {free / 1e9:.2f} GB are free; lower "
            "scenario.checkpoint_bytes"
        )
