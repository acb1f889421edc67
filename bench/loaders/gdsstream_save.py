"""gdsstream.save_file and save_file_async, a file for each shard; read back with load_file."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from bench.loaders.base import Done, Job, Loader, Saving, Unavailable, need

if TYPE_CHECKING:
    import torch


@dataclass
class SaveFile(Loader):
    """`background` saves in threads, all shards at once, while the caller goes on; `direct_io` passes the cache.

    `num_threads` save so many shards at a time, as training that saves from several ranks does.
    """

    background: bool = False
    direct_io: bool = False
    num_threads: int = 1

    verbs: ClassVar[frozenset[str]] = frozenset({"write"})

    _gdsstream: Any = field(default=None, init=False, repr=False)
    _job: Job | None = field(default=None, init=False, repr=False)

    def check(self, job: Job) -> None:
        del job
        if self.num_threads < 1 or (self.background and self.num_threads > 1):
            raise Unavailable("num_threads has to be at least 1, and 1 with background")

    def prepare(self, job: Job) -> None:
        self._gdsstream = need("gdsstream", "gdsstream")
        if not hasattr(self._gdsstream, "save_file_async"):
            raise Unavailable("this gdsstream has no save_file_async")
        self._job = job

    def save(self, shards: Mapping[str, Mapping[str, torch.Tensor]], folder: Path) -> Saving:
        if self.background:
            return _Pending(self._gdsstream, shards, folder, self.direct_io)
        with ThreadPoolExecutor(self.num_threads) as threads:
            list(threads.map(lambda stem: self._save_shard(shards[stem], folder / f"{stem}.safetensors"), shards))
        return Done()

    def _save_shard(self, tensors: Mapping[str, torch.Tensor], path: Path) -> None:
        self._gdsstream.save_file(tensors, path, direct_io=self.direct_io)

    def restore(self, folder: Path, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        assert self._job is not None
        found: dict[str, torch.Tensor] = self._gdsstream.load_file(
            sorted(map(str, folder.glob("*.safetensors"))), device=self._job.device
        )
        return found

    def close(self) -> None:
        if self._gdsstream is not None:
            self._gdsstream.release_engines()  # all of them: loaders are closed together

    def route(self) -> str | None:
        assert self._job is not None
        source = "GPU -> two pinned buffers a save -> " if self._job.cuda else ""
        way = "O_DIRECT" if self.direct_io else "page cache, written back early"
        threads = f", {self.num_threads} files at a time" if self.num_threads > 1 else ""
        return f"{source}{way}, fsync{'; from copies, all files at a time' if self.background else threads}"


class _Pending(Saving):
    """All shards under way."""

    def __init__(
        self, library: Any, shards: Mapping[str, Mapping[str, torch.Tensor]], folder: Path, direct_io: bool
    ) -> None:
        self._saves: list[Any] = []
        try:
            for stem, tensors in shards.items():
                path = folder / f"{stem}.safetensors"
                self._saves.append(library.save_file_async(tensors, path, direct_io=direct_io))
        except BaseException:
            self._end()
            raise

    def wait(self) -> None:
        try:
            for save in self._saves:
                save.wait()
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        for save in self._saves:
            save.cancel()
        for save in self._saves:
            with suppress(Exception):  # the first error is the one that is told
                save.wait()
