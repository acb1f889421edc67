"""What is drawn and said of a sweep: places, ceilings, and which setting is the best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from record_rows import REFERENCE, row

from bench import results, sweeps, sweeps_best
from bench.plots import sweep
from bench.record import Record


def drawn(
    found: sweeps.Sweep, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[tuple[list[float], list[float], Any]], str]:
    """The x, y and label of every line of the figure, and the caption."""
    kept: list[Any] = []
    monkeypatch.setattr(sweep.style, "save", lambda figure, _: kept.append(figure))
    _, caption = sweep.draw(found, Path("never-written.png"))
    lines = [line for panel in kept[0].axes for line in panel.lines]
    return [(list(line.get_xdata()), list(line.get_ydata()), line.get_label()) for line in lines], caption


def shifted() -> list[Record]:
    """A row for each shift, the second with ceilings that it beats."""
    points = ((0, [2.0, 2.2, 2.1], [2.5, 2.6, 2.4]), (1, [1.8, 1.9, 2.0], [1.5, 1.4, 1.6]), (512, [2.0] * 3, [2.5] * 3))
    return [row("direct", rates, ceiling=limits, options={"shift": shift}) for shift, rates, limits in points]


def test_a_zero_has_a_place_and_each_point_the_ceilings_of_its_own_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = sweeps.find(shifted())
    lines, caption = drawn(found, monkeypatch)
    assert next(line[1] for line in lines if line[2] == "direct") == pytest.approx([2.1, 1.9, 2.0])
    spans = [line[:2] for line in lines if line[0] in ([0.0, 0.0], [1.0, 1.0], [2.0, 2.0])]
    assert spans == [([0.0, 0.0], [2.4, 2.6]), ([1.0, 1.0], [1.4, 1.6]), ([2.0, 2.0], [2.5, 2.5])]
    assert "Open marks: more than 105 % of the ceilings of its own rounds" in caption
    assert [line[2] for line in lines if line[2] == "ceiling not believed"] == ["ceiling not believed"]


def test_what_is_believed_needs_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = sweeps.find([each for each in shifted() if each.pct_ceiling < 100])  # type: ignore[operator]
    lines, caption = drawn(found, monkeypatch)
    assert "ceiling not believed" not in [line[2] for line in lines]
    assert "Open marks" not in caption
    assert sweep.values(found) == [0, 512]


def test_the_best_setting_is_named_with_the_next_one() -> None:
    grid = [
        row(
            "staged", [depth + at + noise for noise in (0.0, 0.2, 0.1)], options={"chunk_size": size, "io_depth": depth}
        )
        for depth in (1, 8)
        for at, size in ((1, 1 << 20), (4, 1 << 22), (16, 1 << 24))
    ]
    (line,) = sweeps_best.lines(grid)
    assert line == (
        "Best of 6 for load_model, staged: chunk size 16 MiB, io depth 8: 24.10 GB/s, range (n=3) 24.00-24.20. "
        "The next, chunk size 16 MiB, io depth 1: 17.10 GB/s, range (n=3) 17.00-17.20, lies below it."
    )


def test_a_next_one_whose_interval_overlaps_may_be_the_best() -> None:
    wide = [row("x", [rate, 40.0, *[rate] * 4], options={"io_depth": depth}) for depth, rate in ((1, 30.0), (2, 31.0))]
    (line,) = sweeps_best.lines(wide)
    assert "io depth 2: 31.00 GB/s, 95 % CI 31.00-40.00. The next, io depth 1: 30.00" in line
    assert line.endswith("overlaps, so that either may be the best.")


def test_what_is_no_choice_has_no_best_and_every_loader_its_own() -> None:
    every = results.read(REFERENCE)
    assert sweeps_best.lines([each for each in every if each.scenario in ("alignment", "raw_read_sizes")]) == []
    said = sweeps_best.lines([each for each in every if each.scenario == "queue_depth"])
    assert [line.split(":")[0] for line in said] == [
        f"Best of 8 for queue_depth, {name}" for name in ("storage_cpu_aio", "engine_direct", "gpu_async_stream")
    ]


@pytest.mark.parametrize("own", [False, True])
def test_what_a_route_decides_itself_was_not_swept(own: bool) -> None:
    rows = []
    for depth, rate in ((1, 30.0), (4, 31.0)):
        in_flight = {"threads": None, "depth": None} if own else {"threads": 2, "depth": depth}
        found = row("route", [rate] * 3, verb="transfer", derived=in_flight)
        found.config["scenario"] |= {"verb": "transfer", "depth": [depth]}
        rows.append(found)
    said = sweeps_best.lines(rows)
    assert len(said) == (0 if own else 1)
    assert own or "ios in flight in each thread 4: 31.00 GB/s" in said[0]
