"""storage -> GPU, batches in the order of a CUDA stream: gdsio's transfer type 7.

cuFile's batch API takes no stream, so that a batch is what its stream API makes of one: each of `threads` threads puts
`depth` cuFileReadAsync or cuFileWriteAsync on a stream of its own, registered with cuFile, and waits for the stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bench.loaders.base import Unavailable
from bench.loaders.transfer_cufile_batch import CuFileRoute

if TYPE_CHECKING:
    from bench.transfer_ops import Ops

#: Buffer and file offset, size and place are known at submission and aligned to 4 KiB.
_ALL_KNOWN = 0xF


@dataclass
class CuFileBatchStream(CuFileRoute):
    """One registered stream a thread."""

    _streams: list[Any] = field(default_factory=list, init=False, repr=False)

    def start(self) -> None:
        super().start()
        aligned = not any(offset % 4096 or nbytes % 4096 for _, offset, nbytes, _ in self.ops().rows)
        try:
            for _ in range(self.num_threads):
                stream = self.new_stream()
                self.session.api.stream_register(stream.cuda_stream, _ALL_KNOWN if aligned else _ALL_KNOWN >> 1)
                self._streams.append(stream)
            if not self.request.write:
                self.move(0, self.ops(), [0])
        except Exception as error:
            raise Unavailable(f"cuFile refuses ios on a stream: {type(error).__name__}: {error}") from error

    def move(self, thread: int, ops: Ops, batch: Sequence[int]) -> None:
        stream, api = self._streams[thread], self.session.api
        start = api.write_async if self.request.write else api.read_async
        base = self.memory().data_ptr()
        # cuFile reads these when the stream gets there.
        given = [
            (ctypes.c_size_t(nbytes), ctypes.c_int64(offset), ctypes.c_int64(place), ctypes.c_ssize_t(0))
            for _, offset, nbytes, place in (ops.rows[number] for number in batch)
        ]
        for number, numbers in zip(batch, given, strict=True):
            start(self.session.handles[ops.file[number]], base, *map(ctypes.addressof, numbers), stream.cuda_stream)
        stream.synchronize()
        for size, offset, _, moved in given:
            if moved.value != size.value:
                raise OSError(f"cuFile moved {moved.value} of {size.value} bytes at offset {offset.value}")

    def close(self) -> None:
        for stream in self._streams:
            self.session.api.stream_deregister(stream.cuda_stream)
        self._streams = []
        super().close()
