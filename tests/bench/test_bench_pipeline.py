"""Pipelines and training steps: what is measured, and that wrong bytes at any moment are found."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from conftest import ROOT
from rich.console import Console
from steady import Steady

from bench import config, files, loaders, measure, model, record, report, run, scenarios
from bench.ceilings import Overlap
from bench.clock import Clock
from bench.loaders.base import Job, Loader
from bench.loaders.gdsstream_layers import Layers
from bench.moments import Watch, waiting
from bench.scenarios.base import Alone
from bench.scenarios.layers import transfer_alone

MIB = 1 << 20
MOE = config.MoeConfig(hidden=64, shared=128, expert=32, active=2)
PIPELINE = config.PipelineConfig(
    "pipeline", "pipeline", tokens=[16], short=4, long=12, moe=MOE, sample_seconds=60.0, max_seconds=20.0
)
TRAINING = config.TrainingConfig("training_step", "train", tokens=[16], layers=6, steps=2, rank=4, moe=MOE)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[files.BenchFiles]:
    plan = files.Plan(tmp_path_factory.mktemp("layers"), 4, MIB, "")
    with files.written(scenarios.plan(PIPELINE, plan, cold=False)) as found:
        yield found


@dataclass(eq=False)
class InMemory(Loader):
    """Streams from a copy of the files that never changes, through slots that it only counts; or as it is told."""

    fault: str = ""
    verbs: ClassVar[frozenset[str]] = frozenset({"pipeline"})
    _layers: list[dict[str, torch.Tensor]] = field(default_factory=list, init=False)
    _slots: deque[int] = field(default_factory=deque, init=False)
    _counts: dict[str, float] = field(default_factory=dict, init=False)
    sequences: list[Sequence[int]] = field(default_factory=list, init=False)

    def prepare(self, job: Job) -> None:
        from safetensors.torch import load_file

        assert job.layers is not None
        self._slots = deque(maxlen=job.layers.num_slots)
        for number, path in enumerate(job.paths):
            prefix = job.layers.pattern.replace("{i}", str(number))
            self._layers.append({name.removeprefix(prefix): value for name, value in load_file(path).items()})

    def stream(self, sequence: Sequence[int]) -> Iterator[Mapping[str, torch.Tensor]]:
        self.sequences.append(list(sequence))
        self._counts = dict.fromkeys(("leases", "reads", "host_us", "stall_s"), 0.0)
        self._counts |= {f"stall_{cause}_s": 0.0 for cause in ("storage", "link", "slots", "order")}
        for step, layer in enumerate(sequence):
            self._counts["leases"] += 1
            self._counts["reads"] += layer not in self._slots
            self._slots.append(layer)
            # Only in the long runs, of twelve layers.
            late = step == 7 and len(sequence) == 12
            found = self._layers[layer]
            if self.fault == "other layer" and late:
                found = self._layers[(layer + 1) % len(self._layers)]
            if self.fault == "a weight" and late:
                found = {name: value.clone() for name, value in found.items()}
                found["mlp.experts.1.up_proj.weight"][3, 3] += 1
            if self.fault == "the rest" and late:
                found = {name: value.clone() for name, value in found.items()}
                found["mlp.rest"].view(torch.uint8)[12345] ^= 1
            if self.fault == "after use" and len(sequence) == 2 and step == 1:
                found = {name: value.clone() for name, value in found.items()}
                found["mlp.experts.0.gate_proj.weight"].view(-1).view(torch.uint8)[5] ^= 1
            if self.fault == "raise" and late:
                raise OSError("the disk broke")
            yield found
        if self.fault == "a hit" and len(sequence) == 12:
            self._counts["reads"] -= 1

    def statistics(self) -> dict[str, float]:
        return self._counts


@dataclass(eq=False)
class Overwritten(Layers):
    """Hands each layer out when its slot has been read into again: what a lease that ends too early would do."""

    def stream(self, sequence: Sequence[int]) -> Iterator[Mapping[str, torch.Tensor]]:
        held: list[Mapping[str, torch.Tensor]] = []
        for lease in super().stream(sequence):
            held.append(dict(lease))
            if len(held) > 2:
                yield held.pop(0)
        yield from held


def measured(
    written: files.BenchFiles, scenario: config.LayersConfig, rows: dict[str, Loader], rounds: int = 3
) -> dict[str, record.Record]:
    workload = scenarios.build(scenario, written, "cpu")
    ceiling = Overlap(Steady(), workload)
    result = measure.Runner(workload, rows, ceiling, cold=False, fresh_memory=False).run(rounds, 60.0)
    limit = {"kind": ceiling.kind, "detail": ceiling.describe(), "samples": result.ceilings}
    env = dict.fromkeys(record._ENV)
    found = {}
    for name, outcome in result.outcomes.items():
        found[name] = record.make(
            name, outcome, workload, scenario=scenario.name, cold=False, ceiling=limit, config={}, env=env
        )
        assert record.problems(json.loads(found[name].to_json())) == []
    return found


def stream(backend: str) -> Loader:
    return loaders.build(backend, {"kind": "gdsstream_layers", "backend": backend})


@pytest.mark.parametrize("consume", [True, False])
@pytest.mark.parametrize("backward", [False, True])
def test_routes_are_measured_and_verified(written: files.BenchFiles, consume: bool, backward: bool) -> None:
    scenario = replace(PIPELINE, consume=consume, backward=backward)
    routes = ("staged", "mapped", "traditional", "cufile")
    rows = measured(written, scenario, {name: stream(name) for name in routes})
    assert rows["cufile"].status == "skipped"
    assert "cannot run" in str(rows["cufile"].reason)
    for name in routes[:3]:
        row = rows[name]
        assert (row.status, row.reason, row.verified) == ("ok", None, True)
        assert (row.units, row.bytes, len(row.samples_s)) == (12, 12 * MIB, 3)
        assert row.figures["reads"] == row.figures["leases"] == [12, 12, 12]
        assert row.figures["order_misses"] == [0, 0, 0]
        found = row.derived
        assert found is not None
        assert (found["short_layers"], found["long_layers"]) == (4, 12)
        assert (found["tokens"], found["pass"]) == (16, "backward" if backward else "forward")
        assert (found["layer_bytes"], found["distinct_bytes"], found["slot_bytes"]) == (MIB, 4 * MIB, 2 * MIB)
        assert found["consumed"].startswith("9 of 9 weight" if consume else "nothing")
        slopes = [(long - short) / 8 for long, short in zip(row.samples_s, row.figures["short_s"], strict=True)]
        bounds = map(max, row.figures["compute_s"], row.figures["transfer_s"])
        ratios = sorted(slope / bound for slope, bound in zip(slopes, bounds, strict=True))
        assert found["overhead"] == pytest.approx(ratios[1] - 1)
        transfer, compute = found["moments"]["transfer"], found["moments"]["compute"]
        assert len(transfer) == len(compute) == 12
        for step, ((begin, end), (used, done)) in enumerate(zip(transfer, compute, strict=True)):
            assert 0 <= begin <= end <= used <= done
            if step >= 2:  # a slot is read into when the layer that was in it has been computed with
                assert begin >= compute[step - 2][1]
    assert "registered" in str(rows["mapped"].route)
    assert rows["mapped"].figures["host_bytes"] == [12 * MIB] * 3


@pytest.mark.parametrize("slots", [1, 3])
def test_any_number_of_slots_below_the_files(slots: int, tmp_path: Path) -> None:
    scenario = replace(PIPELINE, num_slots=slots, short=6, long=12)
    plan = scenarios.plan(scenario, files.Plan(tmp_path, 6, MIB, ""), cold=False)
    with files.written(plan) as found:
        row = measured(found, scenario, {"staged": stream("staged")}, rounds=1)["staged"]
    assert (row.reason, row.verified, row.figures["reads"]) == (None, True, [12])


@pytest.mark.parametrize(
    ("fault", "consume", "reason"),
    [
        ("other layer", True, "step 7 of 12 summed other bytes"),
        ("a weight", True, "the result of 12 layers differs from resident weights' by up to"),
        ("the rest", True, "step 7 of 12 summed other bytes"),
        ("after use", True, "mlp.experts.0.gate_proj.weight differs from byte 5 on"),
        ("after use", False, "mlp.experts.0.gate_proj.weight differs from byte 5 on"),
        ("a hit", True, "11.0 of 12 layers were read"),
        ("raise", True, "OSError: the disk broke"),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_a_fault_is_found(written: files.BenchFiles, fault: str, consume: bool, reason: str, backward: bool) -> None:
    scenario = replace(PIPELINE, consume=consume, backward=backward)
    rows = measured(written, scenario, {"bad": InMemory(fault), "good": InMemory()})
    assert rows["bad"].status == "failed"
    assert reason in str(rows["bad"].reason)
    assert rows["bad"].verified is (fault in ("a hit", "raise"))
    assert (rows["good"].status, rows["good"].verified) == ("ok", True)


def test_a_slot_that_is_read_into_while_it_is_used_is_found(written: files.BenchFiles) -> None:
    rows = measured(written, PIPELINE, {"early": Overwritten("staged")})
    assert rows["early"].status == "failed"
    assert rows["early"].verified is False
    assert "step 0 of 4 summed other bytes" in str(rows["early"].reason)


def test_weights_beyond_the_layers_bytes_are_resident(tmp_path: Path) -> None:
    # Of the 18 KiB each, the first three and two of the smaller ones fit; so nothing is left to be summed but 1 KiB.
    wide = config.MoeConfig(hidden=512, shared=512, expert=256, active=2)
    scenario = replace(PIPELINE, moe=wide)
    plan = scenarios.plan(scenario, files.Plan(tmp_path, 4, MIB + MIB // 2, ""), cold=False)
    with files.written(plan) as found:
        rows = measured(found, scenario, {"staged": stream("staged"), "bad": InMemory("the rest")}, rounds=1)
    assert (rows["staged"].reason, rows["staged"].verified) == (None, True)
    assert rows["staged"].derived is not None
    assert rows["staged"].derived["consumed"] == (
        "3 of 9 weight matrices are views of the slot (1572864 bytes); 0 bytes are summed"
    )


@pytest.mark.parametrize(("backward", "turn"), [(False, [0, 1, 2, 3]), (True, [3, 2, 1, 0])])
def test_layers_are_used_in_turn_and_backward_from_the_other_end(
    written: files.BenchFiles, backward: bool, turn: list[int]
) -> None:
    loader = InMemory()
    measured(written, replace(PIPELINE, backward=backward), {"row": loader}, rounds=1)
    # Of each round: transfer alone, the short and the long run, and what is left in the slots.
    first = [2 * turn, turn, 2 * turn, turn[-2:]]
    assert loader.sequences == [*first, 2 * turn, turn, 3 * turn, turn[-2:]]


def test_a_slow_route_gets_shorter_runs(written: files.BenchFiles) -> None:
    workload = scenarios.build(replace(PIPELINE, sample_seconds=1e-6), written, "cpu")
    result = measure.Runner(workload, {"row": InMemory()}, Steady(), cold=False, fresh_memory=False).run(2, 60.0)
    samples = result.outcomes["row"].samples
    assert [(s.figures["short_layers"], s.figures["long_layers"], s.units) for s in samples] == [(4, 8, 8)] * 2


@pytest.mark.parametrize(
    ("plan", "cold", "message"),
    [
        (
            files.Plan(Path(), 3, MIB, ""),
            False,
            "'storage.files' is 3; with scenario.num_slots=2 it has to be at least 4",
        ),
        (files.Plan(Path(), 3, MIB, "", tensors=5), False, "'storage.tensors' has to be null"),
        (files.Plan(Path(), 4, MIB, ""), True, "use cache=warm"),
    ],
)
def test_files_that_cannot_serve_are_refused(plan: files.Plan, cold: bool, message: str) -> None:
    with pytest.raises(config.BenchConfigError, match=message):
        scenarios.plan(PIPELINE, plan, cold=cold)


def test_runs_that_are_no_whole_turns_are_refused(written: files.BenchFiles) -> None:
    with pytest.raises(
        config.BenchConfigError, match=r"'scenario\.long' is 13; it has to be a multiple of the 4 files"
    ):
        scenarios.build(replace(PIPELINE, long=13), written, "cpu")


def test_transfer_alone_leaves_the_first_layers_out() -> None:
    class Counting(Clock):
        now = 0.0

        def mark(self) -> float:
            return self.now

    clock = Counting("cpu")

    class Slow(Loader):
        def prepare(self, job: Job) -> None: ...

        def stream(self, sequence: Sequence[int]) -> Iterator[Mapping[str, Any]]:
            for layer in sequence:
                clock.now += 100.0 if layer == 0 else 2.0
                yield {"x": None}

    assert transfer_alone(Slow(), clock, [0, 1, 2, 3, 4], 1) == 2.0


def test_the_ceiling_is_the_slower_of_compute_and_link() -> None:
    class Computing:
        def alone(self) -> Alone:
            return Alone(2.0, 10**9)

    ceilings = [Overlap(Steady(rate), Computing()) for rate in (0.1, 3.0)]  # type: ignore[arg-type]
    assert [ceiling.sample() for ceiling in ceilings] == [0.1, 0.5]
    assert "compute was the slower one in 1 rounds" in ceilings[1].describe()
    found_out = ceilings[1].in_hindsight([0.5])
    assert found_out == [0.5]
    ceilings[1]._link.in_hindsight = lambda samples: [0.2]  # type: ignore[method-assign]
    assert ceilings[1].in_hindsight([0.5]) == [0.2]
    assert "compute was the slower one in 0 rounds" in ceilings[1].describe()


# ---- training steps


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[files.BenchFiles]:
    plan = files.Plan(tmp_path_factory.mktemp("model"), 3, MIB, "")
    with files.written(scenarios.plan(TRAINING, plan, cold=False)) as found:
        yield found


@pytest.mark.parametrize("recompute", [True, False])
def test_training_steps_are_measured_and_verified(model_files: files.BenchFiles, recompute: bool) -> None:
    scenario = replace(TRAINING, recompute=recompute)
    rows = measured(model_files, scenario, {name: stream(name) for name in ("staged", "mapped", "traditional")})
    for row in rows.values():
        assert (row.status, row.reason, row.verified) == ("ok", None, True)
        assert (row.units, row.bytes) == (2, 2 * 2 * (6 - 2) * MIB)
        found = row.derived
        assert found is not None
        assert (found["reads_per_step"], found["least_reads_per_step"]) == (8, 8)
        assert row.figures["order_misses"] == [0, 0, 0]
        ratios = sorted(s / 2 / p for s, p in zip(row.samples_s, row.figures["predicted_s"], strict=True))
        assert found["difference"] == pytest.approx(ratios[1] - 1)
        assert 0 < found["forward_s"] < found["resident_s"]
        assert found["predicted_s"] >= found["resident_s"] * 0.5


@dataclass(eq=False)
class Spoilt(Layers):
    """Offloads another model than was asked for, in one number of one adapter."""

    def prepare(self, job: Job) -> None:
        super().prepare(job)
        with torch.no_grad():
            self._modules[3].adapter_in[1, 1] += 1


def test_a_read_that_fails_beside_its_marks_is_raised_at_the_end() -> None:
    clock = Clock("cpu")
    watch = Watch(clock)

    def broken() -> None:
        raise OSError("the disk broke")

    def run_broken() -> None:
        with waiting(watch) as tell:
            tell(clock.mark(), lambda: None)
            tell(clock.mark(), broken)

    before = sys.getswitchinterval()
    with pytest.raises(OSError, match="the disk broke"):
        run_broken()
    assert sys.getswitchinterval() == before
    watch.computed(clock.mark(), clock.mark())
    assert len(watch.moments()["transfer"]) == 1
    watch.computed(clock.mark(), clock.mark())
    with pytest.raises(config.BenchError, match="1 of 2 layers were seen to arrive"):
        watch.moments()


def test_a_wrong_gradient_is_found(model_files: files.BenchFiles) -> None:
    row = measured(model_files, TRAINING, {"spoilt": Spoilt("staged")})["spoilt"]
    assert (row.status, row.verified) == ("failed", False)
    assert "the gradient of" in str(row.reason)


def test_the_prediction_is_the_schedules(model_files: files.BenchFiles) -> None:
    workload: Any = scenarios.build(TRAINING, model_files, "cpu")
    # Transfers bound it: a step takes its reads, one after the other. Compute bounds it: a step takes its compute.
    assert workload._predict([0.001] * 12, 1.0) == pytest.approx(8.0, rel=0.01)
    assert workload._predict([1.0] * 12, 0.001) == pytest.approx(12.0, rel=0.01)


def test_marks_part_a_step_into_its_uses() -> None:
    modules = torch.nn.ModuleList(model.layer(MOE, None, 4, "cpu", seed) for seed in range(3))
    for number, module in enumerate(modules):
        names = {name: p for name, p in module.named_parameters() if p.is_meta}
        model.set_weights(
            module, {name: torch.full(p.shape, 0.01 * (number + 1)).bfloat16() for name, p in names.items()}
        )
    x, gradient = torch.randn(8, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    ticks = iter(range(100))
    found = {}
    for recompute in (True, False):
        marks = model.run_step(modules, x, gradient, recompute=recompute, mark=lambda: next(ticks))
        assert len(marks) == 2 * 3 + 1
        assert marks == sorted(marks)
        found[recompute] = model.adapter_gradients(modules)
    assert found[True].keys() == {f"{i}.adapter_{side}" for i in range(3) for side in ("in", "out")}
    assert all(torch.equal(found[True][name], found[False][name]) for name in found[True])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 3}, "it has to be at least 4"),
        ({"moe": config.MoeConfig()}, "has no room for mlp.experts.2.gate_proj"),
    ],
)
def test_models_that_cannot_be_streamed_are_refused(
    model_files: files.BenchFiles, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(config.BenchConfigError, match=message):
        scenarios.build(replace(TRAINING, **changes), model_files, "cpu")


# ---- runs


@pytest.fixture(scope="module")
def tables(written: files.BenchFiles, model_files: files.BenchFiles) -> list[list[record.Record]]:
    """The records of a pipeline with two numbers of tokens, and of training steps, with the longest names."""
    rows = list(measured(written, PIPELINE, {"stream_traditional": InMemory()}).values())
    rows += measured(written, replace(PIPELINE, tokens=[32768]), {"stream_staged": InMemory()}).values()
    return [rows, list(measured(model_files, TRAINING, {"stream_traditional": stream("traditional")}).values())]


@pytest.mark.parametrize("width", [120, 110, 100, 90, 80])
def test_the_tables_fit(tables: list[list[record.Record]], width: int) -> None:
    for records, titles in zip(
        tables, (("slope", "overhead %", "fill", "least"), ("predicted", "resident")), strict=True
    ):
        for row in records:
            # As wide as they become, with figures of their own for each place.
            assert row.derived is not None
            for name in ("compute_s", "transfer_s", "slope_s", "fill_s", "measured_s", "predicted_s", "resident_s"):
                if name in row.derived:
                    row.derived[name] = 1.2345
            for name in ("overhead", "difference"):
                if name in row.derived:
                    row.derived |= {name: -0.12345, f"{name}_ci95": [-0.12345, 12.345]}
        text = io.StringIO()
        report.show(records, Console(file=text, width=width))
        assert max(map(len, text.getvalue().splitlines())) <= width
        assert "…" not in text.getvalue()
        assert all(title in text.getvalue() for title in titles)


def test_a_run_of_two_numbers_of_tokens(tmp_path: Path) -> None:
    settings = config.BenchConfig(
        scenario=replace(PIPELINE, tokens=[16, 32]),
        storage=config.StorageConfig(str(tmp_path), 4, MIB),
        loaders={name: {"kind": "gdsstream_layers", "backend": name} for name in ("staged", "cufile")},
        device="cpu",
    )
    text = io.StringIO()
    rows = run.measure(settings, tmp_path / "out.jsonl", Console(file=text, width=120))
    report.show(rows, Console(file=text, width=120))
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(line["loader"], line["status"]) for line in lines] == [("staged", "ok"), ("cufile", "skipped")] * 2
    assert [line["config"]["scenario"]["tokens"] for line in lines] == [[16], [16], [32], [32]]
    assert [line["derived"]["tokens"] for line in lines[::2]] == [16, 32]
    assert all(record.problems(line) == [] for line in lines)
    assert text.getvalue().count("cannot run") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_an_ok_row_without_what_it_derived_is_no_valid_row(written: files.BenchFiles) -> None:
    row = json.loads(measured(written, PIPELINE, {"row": InMemory()}, rounds=1)["row"].to_json())
    assert record.problems(row | {"derived": None}) == ["derived: has to be given for an ok row of verb 'pipeline'"]
    assert record.problems(row | {"figures": {"x": [1.0, 2.0]}}) == ["figures.x: has no value for each sample"]


@pytest.mark.parametrize("experiment", ["pipeline_smoke", "training_step_smoke"])
def test_the_smoke_experiments_write_valid_rows(experiment: str, tmp_path: Path) -> None:
    where = [f"hydra.run.dir={tmp_path}/hydra", f"storage.dir={tmp_path}", f"output={tmp_path}/rows.jsonl"]
    command = [sys.executable, "-m", "bench.run", f"experiment={experiment}", "device=cpu", *where]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert all(record.problems(row) == [] for row in rows)
    assert {row["status"] for row in rows if row["loader"] != "stream_cufile"} == {"ok"}
    assert all(row["verified"] for row in rows if row["status"] == "ok")
