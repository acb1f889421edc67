"""Memory that ios go to and come from, and the bytes that files hold.

A row lands in the device's memory, or in host memory where its route ends there. Both are allocated when first asked
for and used by all rows of a part, so that a registration happens once a row and is a part of its start-up.

The byte at offset o of file f is pool[(f * step + o + salt) mod length]: known without reading the file. Reading files
have salt 0; each sample that writes takes another, so that bytes of an earlier one cannot pass for its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bench.config_base import BenchError
from bench.files import memory_available
from bench.io_memory import used_memory
from bench.scenarios.base import VerificationError
from bench.transfer_ops import PAGE, Ops

if TYPE_CHECKING:
    import torch

_PIECE = 1 << 20  # a longer io is compared in pieces: the pool is extended by one
_BATCH_BYTES = 64 << 20
_LARGE = 64 << 10
_MOST_OF_ROOM = 0.8
_FILE_STEP = 1_000_002

_libc = ctypes.CDLL(None)
_memcmp, _memmove = _libc.memcmp, _libc.memmove
for _function in (_memcmp, _memmove):
    _function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = ctypes.c_void_p


def host_memory(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Bytes aligned to pages, page-locked for the GPU or ordinary."""
    import torch

    if pinned:
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    # The mapping lives as long as the tensor.
    return torch.frombuffer(used_memory(max(nbytes, PAGE)), dtype=torch.uint8, count=nbytes)


class Memory:
    """Room for the ios of one part: `nbytes`, on the device and on the host."""

    def __init__(self, device: str, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        self._found: dict[tuple[bool, bool], torch.Tensor] = {}
        self._registered: dict[int, int] = {}

    def tensor(self, *, host: bool, registered: bool) -> torch.Tensor:
        """uint8 [nbytes]. What is registered is other memory than what is not; on the host it is page-locked, unless
        there is no GPU."""
        import torch

        cuda = self.device.startswith("cuda")
        key = (host or not cuda, registered and cuda)
        if key not in self._found:
            self._check_room(host=key[0])
            if key[0]:
                self._found[key] = host_memory(self.nbytes, pinned=key[1])
            else:
                self._found[key] = torch.zeros(self.nbytes, dtype=torch.uint8, device=self.device)
        return self._found[key]

    def _check_room(self, *, host: bool) -> None:
        import torch

        room = memory_available() if host else int(torch.cuda.mem_get_info(self.device)[0])
        if self.nbytes > _MOST_OF_ROOM * room:
            where = "host memory" if host else self.device
            raise BenchError(
                f"a sample needs {self.nbytes / 1e9:.2f} GB of {where} to hold its bytes, and {room / 1e9:.2f} GB are "
                "free; lower scenario.total_bytes"
            )

    def register(self, memory: torch.Tensor, call: Callable[[], None]) -> None:
        """Make `call`, which registers `memory` with cuFile, unless another row has: cuFile refuses it twice."""
        place = memory.data_ptr()
        if not self._registered.get(place):
            call()
        self._registered[place] = self._registered.get(place, 0) + 1

    def deregister(self, memory: torch.Tensor, call: Callable[[], None]) -> None:
        """Make `call` for the last row that had registered `memory`."""
        place = memory.data_ptr()
        self._registered[place] -= 1
        if not self._registered[place]:
            call()

    def close(self) -> None:
        self._found.clear()


class Pattern:
    """What files hold, by `pool`; see the module."""

    def __init__(self, pool: npt.NDArray[np.uint8]) -> None:
        self._length = len(pool)
        self._wrapped = np.resize(pool, self._length + _PIECE)
        self._pools: dict[str, torch.Tensor] = {}

    def bytes_of(self, file: int, offset: int, nbytes: int, salt: int = 0) -> npt.NDArray[np.uint8]:
        """At most a piece of a file."""
        start = (file * _FILE_STEP + offset + salt) % self._length
        found: npt.NDArray[np.uint8] = self._wrapped[start : start + min(nbytes, _PIECE)]
        return found

    def scrub(self, memory: torch.Tensor, ops: Ops) -> None:
        """Nothing of an earlier sample shall be left where `ops` are to land."""
        memory[: ops.memory_bytes].zero_()

    def fill(self, memory: torch.Tensor, ops: Ops, salt: int) -> None:
        """Put the bytes that `ops` are to write into their places."""
        for places, starts, nbytes in self._pieces(ops, salt, ops.place):
            if memory.device.type == "cpu":
                base, source = memory.data_ptr(), self._wrapped.ctypes.data
                for place, start in zip(places.tolist(), starts.tolist(), strict=True):
                    _memmove(base + place, source + start, nbytes)
            else:
                pool = self._pool_on(memory.device)
                for place, start in zip(places.tolist(), starts.tolist(), strict=True):
                    memory[place : place + nbytes].copy_(pool[start : start + nbytes])

    def check(self, memory: torch.Tensor, ops: Ops) -> None:
        """Compare what was read, every byte. Raises VerificationError."""
        self._compare(memory, ops, ops.place, 0, "memory")

    def check_file(self, path: str, index: int, ops: Ops, salt: int) -> None:
        """Compare what was written into file `index`. Raises VerificationError."""
        import torch

        chosen = ops.file == index
        mine = Ops(ops.file[chosen], ops.offset[chosen], ops.nbytes[chosen], write=True)
        if len(mine):
            data = torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c"))
            self._compare(data, mine, mine.offset, salt, path)

    def _compare(self, memory: torch.Tensor, ops: Ops, at: npt.NDArray[np.int64], salt: int, where: str) -> None:
        for places, starts, nbytes in self._pieces(ops, salt, at):
            if memory.device.type == "cpu":
                base, pool = memory.data_ptr(), self._wrapped.ctypes.data
                pairs = zip(places.tolist(), starts.tolist(), strict=True)
                wrong = next((place for place, start in pairs if _memcmp(base + place, pool + start, nbytes)), None)
            else:
                wrong = self._first_wrong(memory, places, starts, nbytes)
            if wrong is not None:
                io = int(np.searchsorted(at, wrong, side="right") - 1) if at is ops.place else -1
                of = f"io {io} (file {ops.file[io]}, offset {ops.offset[io]})" if io >= 0 else "what was written"
                raise VerificationError(f"{of} differs within the {nbytes} bytes from {wrong} on in {where}")

    def _first_wrong(
        self, memory: torch.Tensor, places: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], nbytes: int
    ) -> int | None:
        import torch

        pool = self._pool_on(memory.device)
        if nbytes >= _LARGE:
            pairs = zip(places.tolist(), starts.tolist(), strict=True)
            same = torch.stack([(memory[p : p + nbytes] == pool[s : s + nbytes]).all() for p, s in pairs])
        else:
            # A row for every place; one look-up for all small ios instead of a kernel each.
            rows = (
                data.as_strided((data.numel() - nbytes + 1, nbytes), (1, 1)).index_select(
                    0, torch.from_numpy(where).to(memory.device)
                )
                for data, where in ((memory, places), (pool, starts))
            )
            same = torch.eq(*rows).all(dim=1)
        return None if bool(same.all()) else int(places[int((~same).to(torch.uint8).argmax())])

    def _pool_on(self, device: torch.device) -> torch.Tensor:
        import torch

        name = str(device)
        if name not in self._pools:
            self._pools[name] = torch.from_numpy(self._wrapped).to(device)
        return self._pools[name]

    def _pieces(
        self, ops: Ops, salt: int, at: npt.NDArray[np.int64]
    ) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]]:
        """(places, starts in the pool, bytes of each) of equally long pieces, a batch at a time."""
        begin = ops.file.astype(np.int64) * _FILE_STEP + ops.offset + salt
        for done in range(0, int(ops.nbytes.max(initial=0)), _PIECE):
            lengths = np.clip(ops.nbytes - done, 0, _PIECE)
            for nbytes in np.unique(lengths[lengths > 0]).tolist():
                chosen = np.flatnonzero(lengths == nbytes)
                for first in range(0, len(chosen), max(1, _BATCH_BYTES // nbytes)):
                    some = chosen[first : first + max(1, _BATCH_BYTES // nbytes)]
                    yield at[some] + done, (begin[some] + done) % self._length, int(nbytes)
