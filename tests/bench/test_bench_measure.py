from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from rich.console import Console
from steady import Steady

from bench import cache, ceilings, config, files, loaders, measure, record, report, run, scenarios
from bench.loaders.base import Job, Loader, Unavailable
from bench.loaders.pread import Pread
from bench.loaders.safetensors import Safetensors
from bench.scenarios.base import VerificationError, Workload, consume

MIB = 1 << 20
READ = config.ScenarioConfig("load_model", "read")
GATHER = config.ScenarioConfig("random_read", "gather", records=500)


@dataclass
class Odd(Pread):
    """A loader that misbehaves as it is told."""

    fault: str = ""
    log: list[str] = field(default_factory=list)
    loads: int = field(default=0, init=False)
    kept: dict[str, torch.Tensor] = field(default_factory=dict, init=False)
    pins_page_cache: ClassVar[bool] = False

    def prepare(self, job: Job) -> None:
        if self.fault == "missing":
            raise Unavailable("not installed: pip install odd")
        super().prepare(job)

    def load(self) -> dict[str, torch.Tensor]:
        self.log.append(f"{id(self)}")
        self.loads += 1
        tensors = self.kept if self.fault == "stale" and self.loads == 2 else super().load()
        self.kept = tensors
        name = sorted(tensors)[3]
        if self.fault == "flip" and self.loads == 2:
            tensors[name].view(-1).view(torch.uint8)[5] ^= 1
        if self.fault == "drop":
            del tensors[name]
        if self.fault == "dtype":
            tensors[name] = tensors[name].view(torch.float16)
        if self.fault == "raise" and self.loads == 3:
            raise RuntimeError("it broke\nin two lines")
        return tensors


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[files.BenchFiles]:
    with files.written(files.Plan(tmp_path_factory.mktemp("bench"), 2, 2 * MIB, "")) as found:
        yield found


def measured(written: files.BenchFiles, rows: dict[str, Loader], *, cold: bool = False, rounds: int = 3) -> Any:
    workload = scenarios.build(READ, written, "cpu")
    runner = measure.Runner(workload, rows, Steady(), cold=cold, fresh_memory=True)
    result = runner.run(rounds, 30.0)
    return workload, result


def as_record(workload: Workload, name: str, result: measure.Measurement, *, cold: bool = False) -> record.Record:
    limit = {"kind": "steady", "detail": "", "samples": result.ceilings}
    env = dict.fromkeys(record._ENV)
    return record.make(
        name, result.outcomes[name], workload, scenario="x", cold=cold, ceiling=limit, config={}, env=env
    )


def test_an_ok_row_is_verified_and_complete(written: files.BenchFiles) -> None:
    workload, result = measured(written, {"pread": Pread(), "safetensors": Safetensors()})
    for name in ("pread", "safetensors"):
        row = as_record(workload, name, result)
        assert (row.status, row.verified, len(row.samples_s)) == ("ok", True, 3)
        assert row.gb_per_s is not None
        assert row.pct_ceiling == pytest.approx(row.gb_per_s["median"] * 10, rel=1e-6)
        assert record.problems(json.loads(row.to_json())) == []
        assert all(back <= total for back, total in zip(row.lazy_return_s, row.samples_s, strict=True))
    assert result.outcomes["safetensors"].delivers == "file mapping"
    assert result.outcomes["pread"].delivers == "owned"


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ("missing", "skipped", "pip install odd"),
        ("flip", "failed", "differs from byte 5 on"),
        ("drop", "failed", "1 tensors are missing"),
        ("stale", "failed", "differs from byte 0 on"),
        ("dtype", "failed", "torch.float16"),
        ("raise", "failed", "RuntimeError: it broke"),
    ],
)
def test_a_fault_is_a_row_with_a_reason_and_the_others_go_on(
    written: files.BenchFiles, fault: str, status: str, reason: str
) -> None:
    workload, result = measured(written, {"odd": Odd(fault=fault), "pread": Pread()})
    row = as_record(workload, "odd", result)
    assert row.status == status
    assert reason in str(row.reason)
    assert row.verified is not True or fault == "raise"
    assert record.problems(json.loads(row.to_json())) == []
    assert len(result.outcomes["pread"].samples) == 3


def test_rounds_interleave_and_rotate(written: files.BenchFiles) -> None:
    log: list[str] = []
    rows: dict[str, Loader] = {name: Odd(log=log) for name in "abc"}
    names = {str(id(loader)): name for name, loader in rows.items()}
    measured(written, rows)
    assert "".join(names[entry] for entry in log) == "abc" + "abc" + "bca" + "cab"


def test_at_least_three_rounds_are_made_and_no_more_after_the_time(written: files.BenchFiles) -> None:
    runner = measure.Runner(
        scenarios.build(READ, written, "cpu"), {"p": Pread()}, Steady(), cold=False, fresh_memory=True
    )
    assert len(runner.run(50, 0.0).ceilings) == 3


def test_a_warm_cache_is_never_reported_as_cold(written: files.BenchFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "evict", lambda paths, attempts=3: 4096)
    workload, result = measured(written, {"pread": Pread()}, cold=True)
    row = as_record(workload, "pread", result, cold=True)
    assert row.status == "failed"
    assert "not_cold" in str(row.reason)
    assert row.gb_per_s is None
    assert row.first_s is None
    assert row.cold_verified is False
    assert row.sample_labels == [["not_cold"]] * 3
    assert record.problems(json.loads(row.to_json())) == []


def test_the_limits_of_the_rounds_are_known_in_hindsight(
    written: files.BenchFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Steady, "in_hindsight", lambda self, samples: [each / 2 for each in samples])
    _, result = measured(written, {"pread": Pread()})
    assert result.ceilings == [5.0] * 3


@pytest.mark.parametrize("cold", [True, False])
def test_files_are_cold_or_warm_when_they_are_opened(
    written: files.BenchFiles, monkeypatch: pytest.MonkeyPatch, cold: bool
) -> None:
    log: list[str] = []
    monkeypatch.setattr(cache, "evict", lambda paths: log.append("evict") or 0)
    monkeypatch.setattr(cache, "warm", lambda paths: log.append("warm") or 0)
    monkeypatch.setattr(Pread, "prepare", lambda self, job: log.append("prepare"))
    monkeypatch.setattr(Pread, "load", lambda self: log.append("load") or {})
    measured(written, {"pread": Pread()}, cold=cold, rounds=0)
    state = "evict" if cold else "warm"
    assert log == [state, "prepare", state, "load"]


def test_one_sample_that_was_not_cold_does_not_count(
    written: files.BenchFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter([0, 0, 0, 4096, 0, 0])  # before it is opened, the first load, the rounds
    monkeypatch.setattr(cache, "evict", lambda paths, attempts=3: next(left))
    workload, result = measured(written, {"pread": Pread()}, cold=True, rounds=4)
    row = as_record(workload, "pread", result, cold=True)
    assert row.gb_per_s is not None
    assert (row.status, row.gb_per_s["n"], len(row.samples_s), row.cold_verified) == ("ok", 3, 4, False)


def test_a_loader_that_pins_the_cache_has_no_cold_row(written: files.BenchFiles) -> None:
    handle = loaders.build("mapped", {"kind": "gdsstream_handle"})
    _, result = measured(written, {"mapped": handle}, cold=True)
    assert result.outcomes["mapped"].status == "skipped"
    assert "cold" in str(result.outcomes["mapped"].reason)


@pytest.mark.parametrize("kind", ["instanttensor", "kvikio"])
def test_loaders_for_cuda_only_say_so_on_the_cpu(written: files.BenchFiles, kind: str) -> None:
    _, result = measured(written, {kind: loaders.build(kind, {"kind": kind})})
    assert result.outcomes[kind].status == "skipped"
    assert "CUDA" in str(result.outcomes[kind].reason)


def test_gather_delivers_the_records_and_finds_a_wrong_one(written: files.BenchFiles) -> None:
    workload = scenarios.build(GATHER, written, "cpu")
    loader = Pread(num_threads=3)
    loader.prepare(workload.job)
    records = loader.gather()
    workload.verify(records)
    records[17, 100] ^= 1
    with pytest.raises(VerificationError, match="record 17 differs"):
        workload.verify(records)
    loader.close()


@pytest.mark.parametrize("count", [1, 7, 8, 4096, 4099])
def test_the_consumer_reads_every_byte(count: int) -> None:
    data = np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8)
    whole, rest = data[: count // 8 * 8].view(np.uint64), data[count // 8 * 8 :]
    expected = (int(whole.sum(dtype=np.uint64)) + int(rest.sum())) % (1 << 64)
    assert consume([torch.from_numpy(data)]) == expected


def test_ceilings_give_a_rate_and_give_their_memory_back(written: files.BenchFiles) -> None:
    read, gather = scenarios.build(READ, written, "cpu"), scenarios.build(GATHER, written, "cpu")
    for workload, kind in ((read, "preadv_warm"), (gather, "index_select_mapped")):
        ceiling = ceilings.choose(workload, cold=False)
        assert ceiling.kind == kind
        assert ceiling.sample() > 0
        assert ceiling.describe()
        ceiling.close()


def test_threads_that_wake_up_late_lower_no_ceiling(written: files.BenchFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = scenarios.build(GATHER, written, "cpu")
    ceiling = ceilings.choose(workload, cold=False)
    asleep, gather, threads = [0.15], torch.index_select, torch.get_num_threads()

    def late(*args: object, **options: object) -> object:
        # At first with one thread, too, and whenever there are others to wait for.
        time.sleep(0.15 if torch.get_num_threads() > 1 else asleep.pop() if asleep else 0)
        return gather(*args, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "index_select", late)
    assert workload.job.request is not None
    assert ceiling.sample() > workload.job.request.total_bytes / 0.15 / 1e9
    assert torch.get_num_threads() == threads
    ceiling.close()


def test_the_direct_ceilings_read_the_disk(written: files.BenchFiles) -> None:
    for scenario, kind in ((READ, "disk_o_direct"), (GATHER, "disk_o_direct_records")):
        workload = scenarios.build(scenario, written, "cpu")
        try:
            ceiling = ceilings.choose(workload, cold=True)
        except (OSError, config.BenchError) as error:
            pytest.skip(f"no O_DIRECT or no kernel AIO here: {error}")
        assert ceiling.kind == kind
        assert ceiling.sample() > 0
        ceiling.close()


def test_a_small_run_from_end_to_end(tmp_path: Path) -> None:
    settings = config.BenchConfig(
        scenario=config.ScenarioConfig("load_model", "read", rounds=3),
        storage=config.StorageConfig(str(tmp_path), 2, 2 * MIB),
        loaders={"pread": {"kind": "pread"}, "plain": {"kind": "safetensors"}, "kvikio": {"kind": "kvikio"}},
        device="cpu",
    )
    text = io.StringIO()
    out = Console(file=text, width=120)
    rows = run.measure(settings, tmp_path / "out" / "results.jsonl", out)
    report.show(rows, out)
    lines = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [line["status"] for line in lines] == ["ok", "ok", "skipped"]
    assert all(record.problems(line) == [] for line in lines)
    assert lines[0]["env"]["filesystem"]["type"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    printed = text.getvalue()
    assert "% of ceiling" in printed
    assert "Not measured" in printed
    assert max(map(len, printed.splitlines())) <= 120
    assert "…" not in printed


def test_asking_for_cuda_without_it_gives_rows_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    settings = config.BenchConfig(
        scenario=READ,
        storage=config.StorageConfig(str(tmp_path), 1, MIB),
        loaders={"pread": {"kind": "pread"}},
        device="cuda",
    )
    rows = run.measure(settings, tmp_path / "out" / "results.jsonl", Console(file=io.StringIO()))
    assert [(row.status, row.reason) for row in rows] == [
        ("skipped", "device=cuda was asked for, and there is no CUDA device")
    ]
    assert [record.problems(json.loads(row.to_json())) for row in rows] == [[]]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_loader_without_the_verb_is_a_row_with_the_reason(written: files.BenchFiles) -> None:
    rows: dict[str, Loader] = {"plain": Safetensors(), "pread": Pread()}
    workload = scenarios.build(GATHER, written, "cpu")
    result = measure.Runner(workload, rows, Steady(), cold=False, fresh_memory=True).run(3, 30.0)
    assert result.outcomes["plain"].status == "skipped"
    assert result.outcomes["plain"].reason == "it has no verb 'gather', only read"
    assert len(result.outcomes["pread"].samples) == 3


@pytest.mark.parametrize("backend", ["staged", "mapped", "traditional"])
def test_gdsstream_itself_is_measured(written: files.BenchFiles, backend: str) -> None:
    pytest.importorskip("gdsstream._native", reason="the native module is not built")
    kind = {"kind": "gdsstream_handle"} if backend == "mapped" else {"kind": "gdsstream", "backend": backend}
    workload, result = measured(written, {"row": loaders.build("row", kind)})
    row = as_record(workload, "row", result)
    assert (row.status, row.reason, row.verified, row.delivers) == ("ok", None, True, "owned")
    assert row.route
    assert "nothing read yet" not in row.route


def test_gdsstream_gathers_records(written: files.BenchFiles) -> None:
    pytest.importorskip("gdsstream._native", reason="the native module is not built")
    workload = scenarios.build(GATHER, written, "cpu")
    rows = {"row": loaders.build("row", {"kind": "gdsstream", "backend": "staged"})}
    result = measure.Runner(workload, rows, Steady(), cold=False, fresh_memory=True).run(3, 30.0)
    assert (result.outcomes["row"].reason, result.outcomes["row"].verified) == (None, True)


@pytest.mark.parametrize("width", [120, 100, 80])
def test_the_table_fits(written: files.BenchFiles, width: int) -> None:
    workload, result = measured(written, {"gdsstream_traditional": Pread(), "plain": Safetensors()})
    text = io.StringIO()
    report.show([as_record(workload, name, result) for name in result.outcomes], Console(file=text, width=width))
    table = text.getvalue().partition("ceiling: ")[0]
    assert max(map(len, table.splitlines())) <= width
    assert "…" not in table


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("schema_version", 99, "schema_version"),
        ("status", "fine", "status"),
        ("reason", "why", "reason"),
        ("samples_s", [1.0, -1.0, 1.0], "positive"),
        ("samples_s", [1.0], "differ in length"),
        ("verified", "yes", "verified"),
        ("bytes", True, "bytes"),
        ("gb_per_s", {"median": 1.0}, "gb_per_s"),
        ("pct_ceiling", None, "pct_ceiling"),
        ("env", {}, "env.commit"),
        ("surprise", 1, "surprise: unknown"),
    ],
)
def test_the_validator_finds_what_is_wrong(written: files.BenchFiles, key: str, value: object, problem: str) -> None:
    workload, result = measured(written, {"pread": Pread()})
    row = json.loads(as_record(workload, "pread", result).to_json())
    assert record.problems(row) == []
    assert any(problem in found for found in record.problems(row | {key: value}))
    del row["loader"]
    assert record.problems(row) == ["loader: missing"]
