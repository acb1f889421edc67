"""kvikio's process-wide settings, how it is loaded, its registered buffers, and the counters that prove a route."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_kvikio import FakeCounters

from gdsstream.config import StreamConfig
from gdsstream.engine.kvikio_process import Counters, CuFileSettings, Registrations, load_kvikio
from gdsstream.errors import BackendUnavailableError, ConfigError


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("num_threads", 0),
        ("num_threads", True),
        ("num_threads", 2.0),
        ("task_size_bytes", -4096),
        ("task_size_bytes", 5000),
        ("bounce_buffer_bytes", 0),
        ("direct_io", 1),
        ("direct_io", "auto"),
        ("register_buffers", None),
        ("compat_mode", "OFF"),
        ("compat_mode", True),
    ],
)
def test_settings_are_validated(knob: str, value: object):
    with pytest.raises(ConfigError, match=knob):
        CuFileSettings(**{knob: value})


@pytest.mark.parametrize(
    ("knobs", "wanted"),
    [
        ({}, CuFileSettings(12, 8 << 20, 8 << 20)),
        ({"chunk_size": 32 << 20, "staging_bytes": 256 << 20}, CuFileSettings(8, 32 << 20, 32 << 20)),
        ({"num_threads": 30, "direct_io": True}, CuFileSettings(30, 8 << 20, 8 << 20, direct_io=True)),
        ({"staging_bytes": 4 << 20}, CuFileSettings(1, 4 << 20, 4 << 20)),
        (
            {"bounce_buffer_bytes": 2 << 20, "compat_mode": "on", "register_buffers": True},
            CuFileSettings(12, 8 << 20, 2 << 20, compat_mode="on", register_buffers=True),
        ),
    ],
)
def test_settings_of_a_config(knobs: dict[str, Any], wanted: CuFileSettings):
    assert CuFileSettings.of(StreamConfig(**knobs)) == wanted


def test_a_missing_kvikio_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "kvikio", None)
    monkeypatch.setattr(sys, "meta_path", [])
    with pytest.raises(BackendUnavailableError, match=r"pip install gdsstream\[cu12\] or gdsstream\[cu13"):
        load_kvikio()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModuleNotFoundError("No module named 'kvikio'", name="kvikio"), "kvikio is not installed; pip install"),
        (ModuleNotFoundError("No module named 'cupy'", name="cupy"), "kvikio needs the module cupy"),
        (
            ImportError("libcuda.so.1: cannot open shared object file"),
            "libcuda.so.1, .* is missing",
        ),
        (RuntimeError('Failure finding "libcufile.so.0"'), "libcufile is missing; install nvidia-cufile"),
        (OSError("libkvikio.so: undefined symbol"), "kvikio cannot be loaded: .*undefined symbol"),
    ],
)
def test_a_kvikio_that_does_not_load_names_the_cause(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str):
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(BackendUnavailableError, match=message):
        load_kvikio()


def test_nvidia_fs_counts_only_with_its_statistics_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.cufile", None)  # type: ignore[arg-type]
    stats = tmp_path / "driver/nvidia-fs/stats"
    stats.parent.mkdir(parents=True)
    stats.write_text("IO stats: Disabled\nReads\t\t\t\t: err=0 io_state_err=0\nOps : Read=7 Write=0\n")
    assert Counters(str(tmp_path)).verdict().startswith("unproven: neither")
    text = "IO stats: Enabled\nReads\t\t\t\t: n={n} ok={n} err=0 readMiB=4\nSparse Reads : n=9 io=0\n"
    stats.write_text(text.format(n=40))
    counters = Counters(str(tmp_path))
    assert counters.verdict().startswith("unproven: cuFile counted no direct read")
    stats.write_text(text.format(n=46))
    assert counters.verdict() == "proven by cuFile's counters of reads: 6 nvidia-fs (machine-wide)"


def test_counters_that_change_their_kind_prove_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stats = tmp_path / "driver/nvidia-fs/stats"
    stats.parent.mkdir(parents=True)
    stats.write_text("Reads : n=4000 ok=4000\n")
    counters = FakeCounters()
    monkeypatch.setitem(sys.modules, "cuda.bindings.cufile", counters)  # type: ignore[arg-type]
    counting = Counters(str(tmp_path))

    def gone(ptr: int) -> None:
        raise RuntimeError("DRIVER_NOT_INITIALIZED (5001)")

    monkeypatch.setattr(counters, "get_stats_l3", gone)
    assert counting.verdict().startswith("unproven: neither")


class Registered:
    """The registering half of kvikio."""

    def __init__(self) -> None:
        self.pointers: list[int] = []

    def memory_register(self, buffer: torch.Tensor) -> None:
        self.pointers.append(buffer.data_ptr())

    def memory_deregister(self, buffer: torch.Tensor) -> None:
        self.pointers.remove(buffer.data_ptr())
        raise RuntimeError("cuFile: 5000")


def test_an_allocation_is_registered_while_anyone_uses_it(caplog: pytest.LogCaptureFixture):
    kvikio, registrations = Registered(), Registrations()
    buffer, other = torch.zeros(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    bases = [registrations.add(kvikio, one) for one in (buffer, other, buffer)]
    assert kvikio.pointers == [buffer.data_ptr(), other.data_ptr()]
    registrations.remove(bases[0])
    assert buffer.data_ptr() in kvikio.pointers
    registrations.remove(bases[2])
    assert kvikio.pointers == [other.data_ptr()]
    assert "cannot deregister a buffer of 100 bytes: cuFile: 5000" in caplog.text
    registrations.remove(bases[1])
    assert kvikio.pointers == []
