"""What a part of a reference run gets from the command line, from the time that it has, and from the machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import config, files
from bench.config import BenchConfigError, TransferConfig
from bench.reference import fit, forward, parts
from bench.reference.plan import Part

MIB, GIB = 1 << 20, 1 << 30


def test_what_is_for_every_part_goes_on_and_the_runs_own_does_not() -> None:
    own = ["experiment=reference", "reference.only=[gdsio]", "+reference.parts.x={}", "output=x", "hydra.run.dir=y"]
    every = ["device=cpu", "storage.dir=/x", "scenario.rounds=9", "scenario.max_seconds=3", "isolate=false"]
    assert forward.check([*own, *every]) == every
    # A part that is about a place stays there.
    assert forward.for_part(["storage.dir=/dev/shm"], every) == [each for each in every if "dir" not in each]
    assert forward.for_part(["cache=warm"], every) == every


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("storage.files=2", "'storage.files' has no effect"),
        ("storage=disk", "'storage' has no effect"),
        ("loader=[pread]", "rows that the parts name"),
        ("+loaders.x.kind=pread", "'loaders.x.kind' has no effect"),
        ("cache=warm", "whether its files are in memory"),
        ("resume=x", "reference.resume=DIRECTORY"),
        ("scenario.threads=[1]", "reference.parts.NAME.overrides="),
    ],
)
def test_what_has_no_effect_is_refused_by_name(override: str, says: str) -> None:
    with pytest.raises(BenchConfigError) as caught:
        forward.check(["experiment=reference", override])
    assert says in str(caught.value)


def fitted(tmp_path: Path, budget_s: float, gb_per_s: float, *overrides: str) -> TransferConfig:
    """The scenario of a part after fitting."""
    part = Part("p", "random_io", [f"storage.dir={tmp_path}", *overrides], grows=True)
    given = ["device=cpu"]
    settings = fit.composed(part, given)
    found = fit.samples(part, given, settings, budget_s, lambda _: gb_per_s) + fit.seconds(
        part, given, settings, budget_s
    )
    made = fit.composed(Part("p", "random_io", [*part.overrides, *found]), given)
    assert isinstance(made.scenario, TransferConfig)
    count, size = made.storage.files, made.storage.file_bytes
    assert count is not None
    assert size is not None
    assert count * size >= made.scenario.total_bytes[0], "no byte of a sample is read twice"
    return made.scenario


def test_samples_are_as_long_as_time_allows_and_as_large_as_the_machine_is_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "room", lambda _: 100 * GIB)
    monkeypatch.setattr(files, "memory_available", lambda: 200 * GIB)
    one = ["scenario.pairs=['read:4194304']", "scenario.rounds=6"]
    ample = fitted(tmp_path, 600.0, 0.5, *one)
    assert (ample.sample_seconds, ample.total_bytes) == (0.5, [268435456])
    # 0.6 of 60 s for 7 loads of 6, half of which is timed; 0.1 s at least.
    assert fitted(tmp_path, 60.0, 0.5, *one).sample_seconds == pytest.approx(0.43)
    short = fitted(tmp_path, 1.0, 0.5, *one)
    # So that the ceiling's samples are shorter, too.
    assert (short.sample_seconds, short.total_bytes) == (pytest.approx(0.1), [64 * MIB])
    # 0.1 s of 2.5 GB/s is what it has; the 0.3 s of ample time would be four times that.
    assert fitted(tmp_path, 1.0, 2.5, *one).total_bytes == [256 * MIB]
    assert fitted(tmp_path, 1.0, 0.0, *one).total_bytes == ample.total_bytes, "of a rate that is not known"
    fast = fitted(tmp_path, 600.0, 50.0, *one)
    assert fast.total_bytes == [16 * GIB]
    assert fast.total_bytes[0] / 50e9 >= 0.3
    writes = ["scenario.pairs=['write:4194304']", "scenario.rounds=6"]
    monkeypatch.setattr(files, "room", lambda _: 20 * GIB)
    assert fitted(tmp_path, 600.0, 50.0, *one).total_bytes == [8 * GIB]
    assert fitted(tmp_path, 600.0, 50.0, *writes).total_bytes == [4 * GIB]


def test_what_is_said_stays(tmp_path: Path) -> None:
    part = Part("p", "raw_read_sizes", [f"storage.dir={tmp_path}"])
    settings = fit.composed(part, [])
    assert fit.samples(part, [], settings, 60.0, pytest.fail) == []
    assert fit.seconds(part, [], settings, 60.0) == ["scenario.max_seconds=12", "hang_seconds=30"]
    assert fit.seconds(part, ["scenario.max_seconds=3"], settings, 60.0) == []


def test_a_directory_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    assert fit.rate(tmp_path) > 0.01
    assert list(tmp_path.iterdir()) == []


def test_every_part_has_enough_rounds_for_an_interval() -> None:
    from test_bench_reference import composed

    from bench.reference import plan

    for name in ("documents", "smoke"):
        for part in plan.build(config.build(composed(f"reference={name}")).reference).parts:
            if part.experiment in config.options("experiment"):
                assert fit.composed(part, []).scenario.rounds >= 6, part.name


def test_a_part_that_is_cut_when_every_row_is_complete_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import record_rows

    part = Part("p", "smoke", ["loader=[pread,safetensors]"])
    rows: list[str] = []

    def cut(command: list[str], place: Path, limit_s: float) -> tuple[None, str]:
        assert command[0] == sys.executable
        assert limit_s > 0
        (place / "results.jsonl").write_text("".join(f"{row}\n" for row in rows))
        return None, ""

    monkeypatch.setattr(parts, "_run", cut)
    for count, problem in ((1, "it was ended after"), (2, None)):
        rows[:] = [record_rows.row(name, [1.0] * 3).to_json() for name in ("pread", "safetensors")[:count]]
        made = parts._make(part, 5.0, 5.0, [], tmp_path, pytest.fail)
        assert len(made.rows) == count
        assert (made.problem or "").startswith(problem or "")
        assert (made.problem is None) == (problem is None)
        assert (parts._earlier(part, tmp_path, []) is None) == (problem is not None)
