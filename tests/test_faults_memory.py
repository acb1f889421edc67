"""Reader threads that find no memory: the transfer says so, and neither a slot nor a thread is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import NBYTES, NO_MEMORY, SLOTS, WHOLE, check_whole, open_small, read_all, write_data
from support import run_python, source_of

from gdsstream.errors import MemoryBudgetError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_data(tmp_path)


@pytest.mark.parametrize("number", [1, 3])
def test_a_read_that_finds_no_memory(path: Path, reader: dict[str, Any], number: int, no_leaks: None):
    with open_small(**reader, faults=f"nomem@{number}") as engine:
        transfer = engine.submit([source_of(path)], WHOLE, [torch.empty(NBYTES, dtype=torch.uint8)])
        for _ in range(2):
            with pytest.raises(MemoryBudgetError) as caught:
                transfer.wait(timeout_s=20)
            assert str(caught.value) == NO_MEMORY
        assert transfer.done()
        del transfer, caught
        check_whole(engine, path)
        assert engine.stats()["failed_tasks"] >= 1


def test_more_reads_without_memory_than_slots(path: Path, reader: dict[str, Any], no_leaks: None):
    count = 3 * SLOTS
    with open_small(**reader, faults=",".join(f"nomem@{number}" for number in range(1, count + 1))) as engine:
        for _ in range(count):
            with pytest.raises(MemoryBudgetError):
                read_all(engine, path)
        check_whole(engine, path)


def test_any_allocation_is_refused(path: Path, reader: dict[str, Any], refuse_memory: Path):
    code = "import sys, refusals; refusals.sweep_reader(*sys.argv[1:])"
    run_python(code, path, json.dumps(reader), timeout_s=200, LD_PRELOAD=str(refuse_memory))
