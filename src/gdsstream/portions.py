"""Tensors of files as a stream of bytes in a few buffers: for those who look at each byte once, however many there are.

What `pack` and `verify` read with. Tensors come in the order in which they are asked for, long ones in parts, packed
into portions; while one portion is used, the next is under way. A portion never spans two sources, so that what goes
wrong in one costs only itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from gdsstream.checksum import BLOCK_BYTES, Piece
from gdsstream.devices import allocate
from gdsstream.engine.base import Engine, SourceFile, Transfer
from gdsstream.engine.native import NativeEngine
from gdsstream.errors import GdsStreamError
from gdsstream.header import TensorSpec
from gdsstream.plan import build_plan

# A GPU is asked for more at a time: a portion costs the calling thread about as long as a few MB cost the link.
CPU_PORTION_BYTES, GPU_PORTION_BYTES = 64 << 20, 256 << 20

_ALIGNMENT_BYTES = 16  # of each part in a buffer; most sizes are such that neighbours stay one extent all the same


class Source(NamedTuple):
    """Files, and tensors of them in the order in which they are wanted; a spec's `file` indexes `files`."""

    files: Sequence[SourceFile]
    specs: Sequence[TensorSpec]


class Part(NamedTuple):
    """A tensor, or what of it begins at byte `piece.start`."""

    spec: TensorSpec
    piece: Piece


class Portion(NamedTuple):
    """Parts of tensors of one source, in order, and the error that their read ended with: their bytes are not there."""

    source: Source
    parts: list[Part]
    error: GdsStreamError | None


class _Cut(NamedTuple):
    spec: TensorSpec
    start: int  # in the tensor
    nbytes: int
    at: int  # in the buffer


def read_portions(
    engine: Engine, sources: Iterable[Source], *, portion_bytes: int | None = None, kept: int = 0
) -> Iterator[Portion]:
    """Read all tensors of `sources`, portion by portion, through `kept` + 2 buffers of `portion_bytes`.

    A portion's bytes can be used on the current stream until the next is asked for; with `kept`, until so many more
    were asked for. A tensor without bytes is one part, too. Of a tensor that is cut, each part but the last has a
    multiple of checksum.BLOCK_BYTES; `portion_bytes`, which None chooses by the device, is a multiple of four times
    that. All portions of a source but the last are filled to three quarters at least.

    Raises MemoryBudgetError where there is no room for a buffer; what goes wrong with files is in their portions.
    """
    if portion_bytes is None:
        portion_bytes = CPU_PORTION_BYTES if engine.device.type == "cpu" else GPU_PORTION_BYTES
    buffers: list[torch.Tensor | None] = [None] * (kept + 2)
    ahead: _Reading | None = None
    number = 0
    for source in sources:
        largest = min(
            portion_bytes, sum(-(-spec.nbytes // _ALIGNMENT_BYTES) for spec in source.specs) * _ALIGNMENT_BYTES
        )
        opened = _Opened(engine, source)
        for cuts in _portions(source.specs, portion_bytes):
            slot = number % len(buffers)
            buffer = buffers[slot]
            if buffer is None or buffer.numel() < largest:
                # Not before its last bytes are of no use any more, and never more than is needed: many files are small.
                buffers[slot] = None
                buffer = buffers[slot] = allocate((largest,), torch.uint8, engine.device)
            reading = _Reading(opened, cuts, buffer)
            number += 1
            if ahead is not None:
                yield from _landed(ahead, buffers)
            ahead = reading
    if ahead is not None:
        yield from _landed(ahead, buffers)


def _landed(reading: _Reading, buffers: list[torch.Tensor | None]) -> Iterator[Portion]:
    portion = reading.finish()
    if portion.error is not None:
        # A read that failed may still write to its buffer; the engine keeps it until then.
        buffers[:] = [None if buffer is reading.buffer else buffer for buffer in buffers]
    yield portion


def _portions(specs: Sequence[TensorSpec], portion_bytes: int) -> Iterator[list[_Cut]]:
    """Tensors cut and packed, first come, first served, into portions of at most so many bytes."""
    cuts: list[_Cut] = []
    end = 0
    for spec in specs:
        start = 0
        while True:
            left, room = spec.nbytes - start, portion_bytes - end
            # What does not fit is cut, unless the portion is nearly full: each part costs as much as a small tensor.
            fits = left if left <= room else 0 if room < portion_bytes // 4 else room // BLOCK_BYTES * BLOCK_BYTES
            if left and not fits:
                yield cuts
                cuts, end = [], 0
                continue
            cuts.append(_Cut(spec, start, fits, end))
            start += fits
            end += -(-fits // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            if start == spec.nbytes:
                break
    if cuts:
        yield cuts


class _Opened:
    """A source's files, opened when the first of its bytes are wanted."""

    def __init__(self, engine: Engine, source: Source) -> None:
        self.engine = engine
        self.source = source
        self._files: list[SourceFile] | None = None

    def files(self) -> list[SourceFile]:
        if self._files is None:
            files = list(self.source.files)
            if isinstance(self.engine, NativeEngine):
                used = sorted({spec.file for spec in self.source.specs})
                for number, file in zip(used, self.engine.open([files[number] for number in used]), strict=True):
                    files[number] = file
            self._files = files
        return self._files


class _Reading:
    """A portion under way."""

    def __init__(self, opened: _Opened, cuts: list[_Cut], buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self._source = opened.source
        self._cuts = cuts
        self._error: GdsStreamError | None = None
        self._transfer: Transfer | None = None
        try:
            files = opened.files()
            numbers = sorted({cut.spec.file for cut in cuts})
            index = {number: position for position, number in enumerate(numbers)}
            rows = [(index[c.spec.file], c.spec.offset + c.start, c.nbytes, 0, c.at, 0) for c in cuts]
            plan = build_plan(rows, (buffer.numel(),), ())
            self._transfer = opened.engine.submit([files[number] for number in numbers], plan, [buffer])
        except GdsStreamError as error:
            self._error = error

    def finish(self) -> Portion:
        try:
            if self._transfer is not None:
                self._transfer.wait()
        except GdsStreamError as error:
            self._error = error
        parts = [Part(cut.spec, Piece(self.buffer[cut.at : cut.at + cut.nbytes], cut.start)) for cut in self._cuts]
        return Portion(self._source, parts, self._error)


__all__ = ["CPU_PORTION_BYTES", "GPU_PORTION_BYTES", "Part", "Portion", "Source", "read_portions"]
