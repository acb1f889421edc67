"""Verb `write`: what is saved, how it is judged, what happens where it fails, and that nothing is left."""

from __future__ import annotations

import errno
import gc
import io
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from rich.console import Console
from steady import Steady
from test_bench_config import composed

from bench import cache, config, files, loaders, measure, record, report, run, scenarios
from bench.config import BenchConfigError
from bench.config_checkpoint import CheckpointConfig
from bench.loaders.base import Done, Loader, Saving
from bench.loaders.gdsstream_save import SaveFile
from bench.loaders.safetensors_save import SafetensorsSave
from bench.loaders.torch_dcp import TorchDcp
from bench.loaders.torch_save import TorchSave

MIB = 1 << 20
#: A layer and the embeddings of a narrow 8B: 1.6 MB.
SMALL = CheckpointConfig("checkpoint", "write", models=["8b"], checkpoint_bytes=3_000_000, shards=2, shrink=32)


@pytest.fixture(scope="module", autouse=True)
def quick_collection() -> Iterator[None]:
    """Garbage is collected before every sample, which takes a fifth of a second with all that torch has imported."""
    import torch.distributed.checkpoint

    assert torch.distributed.checkpoint
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@contextmanager
def workload(directory: Path, scenario: CheckpointConfig = SMALL, *, keep: bool = False) -> Iterator[Any]:
    chosen = files.choose(config.StorageConfig(str(directory), keep_files=keep), cuda=False, cold=False)
    with files.written(scenarios.plan(scenario, chosen, cold=False), keep=keep) as written:
        yield scenarios.build(scenario, written, "cpu")


def measured(work: Any, rows: dict[str, Loader]) -> measure.Measurement:
    return measure.Runner(work, rows, Steady(), cold=False, fresh_memory=False).run(3, 30.0)


def as_record(work: Any, name: str, result: measure.Measurement) -> record.Record:
    limit = {"kind": "steady", "detail": "", "samples": result.ceilings}
    env = dict.fromkeys(record._ENV)
    return record.make(
        name, result.outcomes[name], work, scenario="checkpoint", cold=False, ceiling=limit, config={}, env=env
    )


@dataclass
class Odd(SafetensorsSave):
    """A saver that misbehaves as it is told."""

    fault: str = ""
    saves: int = field(default=0, init=False)
    verbs: ClassVar[frozenset[str]] = frozenset({"write"})

    def save(self, shards: Mapping[str, Mapping[str, torch.Tensor]], folder: Path) -> Saving:
        self.saves += 1
        if self.fault == "lazy":  # as if it had copied the tensors, without having done so
            return _Lazy(self, shards, folder)
        if self.fault == "nothing":
            return Done()
        super().save(shards, folder)
        if self.fault == "full" and self.saves == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        if self.fault == "flip":
            path = sorted(folder.iterdir())[-1]
            data = bytearray(path.read_bytes())
            data[-5] ^= 1
            path.write_bytes(data)
        if self.fault == "drop":
            sorted(folder.iterdir())[0].unlink()
        return Done()

    def restore(self, folder: Path, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        found = super().restore(folder, tensors)
        if self.fault == "misread":
            name = sorted(found)[2]
            found[name] = found[name].clone()
            found[name].view(-1).view(torch.uint8)[7] ^= 1
        return found


class _Lazy(Saving):
    def __init__(self, loader: Odd, shards: Mapping[str, Mapping[str, torch.Tensor]], folder: Path) -> None:
        self._arguments = loader, shards, folder

    def wait(self) -> None:
        loader, shards, folder = self._arguments
        SafetensorsSave.save(loader, shards, folder)


# ---- configuration and room


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": []}, "'scenario.models' is empty"),
        ({"models": ["7b"]}, "'scenario.models' is '7b'; did you mean '70b'"),
        ({"shrink": 3}, "'scenario.shrink' is 3; it has to be a power of two"),
        ({"shards": 0}, "'scenario.shards' is 0"),
        ({"checkpoint_byte": 1}, "did you mean 'checkpoint_bytes'?"),
    ],
)
def test_a_wrong_value_is_named(changes: dict[str, Any], message: str) -> None:
    with composed("experiment=checkpoint") as plain:
        config.build(plain)
        plain["scenario"] |= changes
        with pytest.raises(BenchConfigError) as caught:
            config.build(plain)
    assert message in str(caught.value)


def test_sizes_of_the_storage_are_refused() -> None:
    with (
        composed("experiment=checkpoint", "storage.files=3") as plain,
        pytest.raises(BenchConfigError, match=r"'storage\.files' has to be null"),
    ):
        config.build(plain)


def test_each_model_is_a_part() -> None:
    with composed("experiment=checkpoint") as plain:
        scenario = config.build(plain).scenario
    parts = config.parts(scenario)
    assert [part.models for part in parts if isinstance(part, CheckpointConfig)] == [["8b"], ["70b"]]


def test_a_cold_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchConfigError, match="use cache=warm"):
        scenarios.plan(SMALL, files.Plan(tmp_path, 8, MIB, ""), cold=True)


def test_a_disk_with_less_room_gets_a_smaller_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = CheckpointConfig("checkpoint", "write", models=["8b"], checkpoint_bytes=50_000_000_000)
    monkeypatch.setattr(files, "room", lambda directory: 2_000_000_000)
    monkeypatch.setattr(files, "memory_available", lambda: 1 << 40)
    found = scenarios.plan(large, files.Plan(tmp_path, 8, MIB, ""), cold=False)
    assert found.total_bytes <= 2_000_000_000 - files.RESERVE_BYTES
    assert "8b: 4 layers without embeddings" in found.why
    monkeypatch.setattr(files, "room", lambda directory: 400_000_000)
    with pytest.raises(BenchConfigError, match=r"takes 0\.436 GB, and a checkpoint may have 0\.3"):
        scenarios.plan(large, files.Plan(tmp_path, 8, MIB, ""), cold=False)


def test_a_checkpoint_without_room_fails_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with workload(tmp_path) as work:
        monkeypatch.setattr(files, "room", lambda directory: 1000)
        saver = Odd()
        result = measured(work, {"odd": saver})
    assert result.outcomes["odd"].status == "failed"
    assert "GB, and" in str(result.outcomes["odd"].reason)
    assert saver.saves == 0
    assert list(tmp_path.iterdir()) == []


# ---- savers


SAVERS = {
    "save": {"kind": "gdsstream_save"},
    "threads": {"kind": "gdsstream_save", "num_threads": 3},
    "async": {"kind": "gdsstream_save", "background": True},
    "direct": {"kind": "gdsstream_save", "direct_io": True},
    "safetensors": {"kind": "safetensors_save"},
    "torch": {"kind": "torch_save"},
    "dcp": {"kind": "torch_dcp", "num_threads": 2},
    "dcp_async": {"kind": "torch_dcp", "background": True},
}


def test_every_saver_writes_the_same_bytes_and_leaves_none(tmp_path: Path) -> None:
    rows = {name: loaders.build(name, options) for name, options in SAVERS.items()}
    with workload(tmp_path) as work:
        result = measured(work, rows)
        found = {name: as_record(work, name, result) for name in rows}
        assert list(work.job.saves_to.rglob("*.*")) == []
    assert list(tmp_path.iterdir()) == []
    for name, row in found.items():
        if name == "direct" and row.status != "ok" and "Invalid argument" in str(row.reason):
            continue  # no O_DIRECT in the temporary directory
        assert (row.status, row.reason, row.verified, len(row.samples_s)) == ("ok", None, True, 3), name
        assert record.problems(json.loads(row.to_json())) == []
        assert row.route
        assert row.derived is not None
        assert row.derived["checkpoint_bytes"] == row.bytes
        assert row.derived["room_bytes"] >= row.bytes
        assert row.derived["fsyncs"] >= 3, name  # two files and the folder
        assert 0 < row.derived["fsync_share"] < 1
        assert row.derived["read_gb_per_s"] > 0
        assert row.derived["judged_by_safetensors"] is not name.startswith(("torch", "dcp"))
        assert all(waits <= saved for waits, saved in zip(row.figures["blocked_s"], row.samples_s, strict=True))


@pytest.mark.parametrize(
    ("fault", "verified", "reason"),
    [
        ("full", True, "No space left on device"),
        ("flip", False, "differs from byte"),
        ("drop", False, "tensors were read back, not"),
        ("nothing", False, "nothing was written"),
        ("misread", False, "differs from byte 7 on"),
        ("lazy", False, "differs from byte 0 on"),
    ],
)
def test_a_fault_is_a_failed_row_and_leaves_nothing(tmp_path: Path, fault: str, verified: bool, reason: str) -> None:
    with workload(tmp_path) as work:
        original = os.fsync
        result = measured(work, {"odd": Odd(fault=fault), "torch": TorchSave()})
        assert os.fsync is original
        assert [path for path in work.job.saves_to.rglob("*") if path.is_file()] == []
    outcome = result.outcomes["odd"]
    assert (outcome.status, outcome.verified) == ("failed", verified)
    assert reason in str(outcome.reason)
    assert len(result.outcomes["torch"].samples) == 3


def test_what_safetensors_reads_is_compared_too(tmp_path: Path) -> None:
    right: dict[str, torch.Tensor] = {}

    def remember(self: Odd, shards: Mapping[str, Mapping[str, torch.Tensor]], folder: Path) -> Saving:
        right.update({name: tensor.clone() for group in shards.values() for name, tensor in group.items()})
        return Odd.save(self, shards, folder)

    # The file is wrong, and its own library would hide that.
    faulty = type("Hiding", (Odd,), {"save": remember, "restore": lambda self, folder, tensors: dict(right)})
    with workload(tmp_path) as work:
        result = measured(work, {"odd": faulty(fault="flip")})
    assert result.outcomes["odd"].verified is False


def test_a_read_that_was_not_cold_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "evict", lambda paths, attempts=3: 4096)
    with workload(tmp_path) as work:
        result = measured(work, {"torch": TorchSave()})
        row = as_record(work, "torch", result)
    assert row.derived is not None
    assert row.derived["read_cold"] is False
    assert row.figures["read_cold"] == [0.0] * 3
    text = io.StringIO()
    report.show([row], Console(file=text, width=120))
    assert "pages stayed in the cache" in text.getvalue()


def test_the_last_checkpoint_is_kept(tmp_path: Path) -> None:
    with workload(tmp_path, keep=True) as work:
        measured(work, {"plain": SafetensorsSave(), "torch": TorchSave()})
    left = sorted(path.name for path in tmp_path.glob("gdsstream-bench-*/checkpoint-8b/*/*"))
    # Rounds take turns in who begins, and the third of them ends with torch.
    assert left == ["model-00001-of-00002.pt", "model-00002-of-00002.pt"]


def test_kept_checkpoints_have_room_beside_those_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = CheckpointConfig("checkpoint", "write", models=["8b", "70b"], checkpoint_bytes=10**12)
    monkeypatch.setattr(files, "room", lambda directory: 30_000_000_000)
    monkeypatch.setattr(files, "memory_available", lambda: 1 << 40)
    given = [files.Plan(tmp_path, 8, MIB, "", keep=keep) for keep in (False, True)]
    free, kept = (scenarios.plan(large, plan, cold=False).total_bytes for plan in given)
    assert kept <= free / 3 < kept + 10


class _Shard:
    """A save in the background that ends when it is told, or has failed."""

    def __init__(self, error: BaseException | None) -> None:
        self.error, self.cancelled, self.over = error, False, False

    def cancel(self) -> None:
        self.cancelled = True

    def wait(self) -> None:
        self.over = self.cancelled or self.error is not None
        if self.cancelled:
            raise RuntimeError("cancelled")
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_where_a_background_save_fails_the_others_are_ended_first(error: BaseException, tmp_path: Path) -> None:
    shards = [_Shard(error), _Shard(None)]
    left = iter(shards)

    class Library:
        @staticmethod
        def save_file_async(*_: object, **__: object) -> _Shard:
            return next(left)

    with workload(tmp_path) as work:
        loader = loaders.build("async", SAVERS["async"])
        assert isinstance(loader, SaveFile)
        loader._gdsstream = Library
        work.before(loader, 0)
        saved = work.run(loader)
        with pytest.raises(type(error)):
            work.finish(saved)
        assert [shard.cancelled and shard.over for shard in shards] == [True, True]
        assert not saved.folder.exists()


def test_where_a_background_save_does_not_start_the_others_are_ended(tmp_path: Path) -> None:
    started: list[_Shard] = []

    class Library:
        @staticmethod
        def save_file_async(*_: object, **__: object) -> _Shard:
            if started:
                raise MemoryError("no room for a copy")
            started.append(_Shard(None))
            return started[0]

    with workload(tmp_path) as work:
        loader = loaders.build("async", SAVERS["async"])
        assert isinstance(loader, SaveFile)
        loader._gdsstream = Library
        work.before(loader, 0)
        with pytest.raises(MemoryError):
            work.run(loader)
        assert started[0].over
        assert list(work.job.saves_to.iterdir()) == []


def test_what_dcp_raises_is_an_error_once_its_threads_are_over(tmp_path: Path) -> None:
    class Wrapped(BaseException):
        failures: ClassVar[Any] = {}

    begun, over = threading.Event(), threading.Event()

    def write() -> None:
        begun.set()
        time.sleep(0.1)
        over.set()

    class Library:
        FileSystemWriter = staticmethod(lambda *_, **__: None)

        @staticmethod
        def save(*_: object, **__: object) -> None:
            threading.Thread(target=write).start()
            begun.wait()
            try:
                try:
                    raise OSError(errno.ENOSPC, "No space left on device")
                except OSError:
                    raise RuntimeError("unexpected pos")  # noqa: B904
            except RuntimeError as error:
                failed = Wrapped()
                failed.failures = {0: (error, None)}
                raise failed from None

    loader = TorchDcp()
    loader._library = Library
    with pytest.raises(RuntimeError, match=r"Wrapped: .*No space left on device"):
        loader.save({}, tmp_path)
    assert over.is_set()


def test_a_full_disk_is_named_where_the_library_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def torch_save(*_: object) -> None:
        monkeypatch.setattr(files, "room", lambda directory: 100)
        raise RuntimeError("unexpected pos 704 vs 598")

    with workload(tmp_path) as work:
        monkeypatch.setattr(torch, "save", torch_save)
        result = measured(work, {"torch": TorchSave()})
    reason = str(result.outcomes["torch"].reason)
    assert "the disk is full, 100 bytes were left: RuntimeError: unexpected pos 704 vs 598" in reason


# ---- from end to end


def test_a_small_run_from_end_to_end(tmp_path: Path) -> None:
    chosen = ["safetensors_save", "torch_save"]
    with composed("experiment=checkpoint_smoke", f"loader=[{','.join(chosen)}]", f"storage.dir={tmp_path}") as plain:
        settings = config.build({**plain, "device": "cpu"})
    text = io.StringIO()
    out = Console(file=text, width=120)
    rows = run.measure(settings, tmp_path / "out" / "results.jsonl", out)
    report.show(rows, out)
    assert [(row.loader, row.status, row.reason) for row in rows] == [(name, "ok", None) for name in chosen] * 2
    assert all(row.ceiling["kind"].startswith("write_") for row in rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    printed = text.getvalue()
    assert "widths divided by 32" in printed
    assert "fsync %" in printed
    assert max(map(len, printed.splitlines())) <= 120
    assert "…" not in printed
