"""Plans and engines for scenarios on the public side of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_route.harness import KIB
from support import source_of

import gdsstream
from gdsstream.engine import Engine, Transfer
from gdsstream.plan import ReadPlan


def one_buffer(extents: Sequence[tuple[int, int, int]], groups: int = 1) -> ReadPlan:
    """A plan of (offset in the file, nbytes, group), laid end to end in one buffer."""
    table = np.array(extents, dtype=np.int64).reshape(-1, 3)
    ends = np.cumsum(table[:, 1])
    zeros = np.zeros(len(table), dtype=np.int32)
    return ReadPlan(
        file=zeros,
        file_offset=np.ascontiguousarray(table[:, 0]),
        nbytes=np.ascontiguousarray(table[:, 1]),
        buffer=zeros,
        buffer_offset=ends - table[:, 1],
        group=np.ascontiguousarray(table[:, 2]).astype(np.int32),
        buffer_bytes=(int(ends[-1]) if len(table) else 0,),
        num_groups=groups,
        placements=(),
    )


def read_whole(engine: Engine, path: Path, out: torch.Tensor) -> Transfer:
    """Start to read the beginning of a file into all of `out`."""
    return engine.submit([source_of(path)], one_buffer([(0, out.nbytes, 0)]), [out])


def small_engine(device: str = "cuda:0", *, slots: int = 4, **knobs: Any) -> Engine:
    """A staged engine whose ring has `slots` slots of 64 KiB; more than five may become fewer and larger ones."""
    return gdsstream.open_engine(
        "staged",
        device=device,
        **{"chunk_size": 64 * KIB, "staging_bytes": slots * 64 * KIB, "num_threads": 2, "direct_io": False, **knobs},
    )
