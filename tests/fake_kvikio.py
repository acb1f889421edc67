"""Stand-ins for kvikio, over CPU tensors, and for the cuFile counters of cuda.bindings."""

from __future__ import annotations

import os
import threading
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


class FakeFuture:
    """Reads when the gate opens, in a thread of its own; or in `get`, as kvikio's small reads do."""

    def __init__(self, read: Callable[[], int], fake: FakeKvikio) -> None:
        self._read, self._deferred, self._taken = read, fake.deferred, False
        self._result: int | Exception | None = None
        self._done = threading.Event()
        if not self._deferred:
            threading.Thread(target=self._run, args=(fake.gate,), daemon=True).start()

    def _run(self, gate: threading.Event) -> None:
        gate.wait()
        try:
            self._result = self._read()
        except Exception as error:
            self._result = error
        self._done.set()

    def done(self) -> bool:
        assert not self._taken, "kvikio refuses a future whose result was taken"
        return self._deferred or self._done.is_set()

    def get(self) -> int:
        assert not self._taken
        self._taken = True
        if self._deferred:
            return self._read()
        self._done.wait()
        if isinstance(self._result, Exception):
            raise self._result
        assert self._result is not None
        return self._result


class FakeKvikio(types.ModuleType):
    """As much of kvikio as the engine uses, over CPU tensors."""

    class CompatMode:
        OFF, ON, AUTO = "OFF", "ON", "AUTO"

        def __new__(cls, value: str) -> Any:
            return value

    def __init__(self) -> None:
        super().__init__("kvikio")
        self.gate = threading.Event()
        self.gate.set()
        self.deferred = False
        self.short_by = 0
        self.failure: Exception | None = None
        self.opened: list[str] = []
        self.begun = 0
        self.registered: list[int] = []
        self.compat = True
        self.backends = {"GDS": 0, "POSIX": 0}
        self.values: dict[str, Any] = {
            "compat_mode": "AUTO",
            "num_threads": 1,
            "task_size": 4 << 20,
            "bounce_buffer_size": 16 << 20,
            "auto_direct_io_read": False,
        }
        self.before = dict(self.values)
        self.defaults = SimpleNamespace(
            get=self.values.__getitem__, set=self.values.update, is_compat_mode_preferred=lambda: self.compat
        )
        fake = self

        class CuFile:
            def __init__(self, path: str, flags: str) -> None:
                assert flags == "r"
                self._file = open(path, "rb")  # noqa: SIM115
                fake.opened.append(path)

            def fileno(self) -> int:
                return self._file.fileno()

            def pread(self, buf: torch.Tensor, size: int, file_offset: int, task_size: int) -> FakeFuture:
                assert buf.numel() == size
                fake.begun += 1
                target, fd = buf.numpy().data, self.fileno()

                def read() -> int:
                    if fake.failure is not None:
                        raise fake.failure
                    fake.backends["POSIX" if fake.compat else "GDS"] += size
                    return os.preadv(fd, [target], file_offset) - fake.short_by

                return FakeFuture(read, fake)

        class SummaryMonitor:
            def get(self) -> Any:
                return SimpleNamespace(by_backend={k: {"bytes_transferred": v} for k, v in fake.backends.items()})

            def stop(self) -> None: ...

        self.CuFile, self.SummaryMonitor = CuFile, SummaryMonitor

    def memory_register(self, buf: torch.Tensor) -> None:
        if self.failure is not None:
            raise self.failure
        self.registered.append(buf.data_ptr())

    def memory_deregister(self, buf: torch.Tensor) -> None:
        self.registered.remove(buf.data_ptr())


class FakeCounters:
    """cuda.bindings.cufile, whose counts a test sets."""

    def __init__(self) -> None:
        self.level = 0
        self.counts = {"nvfs": 5, "p2p": 0, "posix": 2}

    def get_stats_level(self) -> int:
        return self.level

    def set_stats_level(self, level: int) -> None:
        self.level = level

    def stats_start(self) -> None: ...

    def StatsLevel3(self) -> Any:
        arrays = {f"n_{key}_reads": np.array([value, 0], dtype=np.uint64) for key, value in self.counts.items()}
        return SimpleNamespace(ptr=1, per_gpu_stats=SimpleNamespace(**arrays))

    def get_stats_l3(self, ptr: int) -> None: ...
