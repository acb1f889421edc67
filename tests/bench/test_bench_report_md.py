"""Records read back, their groups and sweeps, report.md and its plots."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import record_rows
from conftest import ROOT
from record_rows import CPU, H200, row, unmeasured, write
from rich.console import Console

from bench import record, report_md, results, sweeps, table
from bench.config import BenchError
from bench.plots import overhead, overlap, samples, sweep, timeline
from bench.record import Record

RATES = [40.0, 41.0, 39.0]


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each Markdown table, without its rule; a table whose rows differ in width fails."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in block.splitlines()]
        assert len({len(cells) for cells in rows}) == 1, block
        assert all(set(cell) <= set("-:") for cell in rows[1]), block
        found.append([rows[0], *rows[2:]])
    return found


def picture(path: Path) -> tuple[int, int]:
    """Width and height of a PNG; one that is empty paper fails."""
    from matplotlib import image

    pixels = image.imread(path)
    assert pixels[..., :3].std() > 0.02, path
    assert pixels[..., :3].mean() > 0.5, f"{path} is dark"
    return int(pixels.shape[1]), int(pixels.shape[0])


def made(tmp_path: Path, rows: list[Record], **options: bool) -> str:
    return report_md.write([write(tmp_path / "rows.jsonl", rows)], tmp_path, **options).read_text(encoding="utf-8")


# Records.


def test_every_published_record_is_read_in_any_version() -> None:
    for path in sorted((ROOT / "docs" / "results").glob("*/*.jsonl")):
        rows = results.read(path)
        assert len(rows) == len(path.read_text(encoding="utf-8").splitlines())
        for each in rows:
            if each.gb_per_s is not None:
                assert statistics.median(results.rates(each)) == pytest.approx(each.gb_per_s["median"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no records"),
        ('{"status": "ok', r"rows.jsonl:2 is no JSON"),
        ("[1]", r"rows.jsonl:2 is a list"),
        ('{"schema_version": 99}', "schema_version 99"),
        ('{"schema_version": 1}', r"rows.jsonl:2 is no valid record: status: missing"),
        ('{"schema_version": 0}', "no valid record"),
    ],
)
def test_what_is_no_record_is_refused_with_its_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text((row("x", RATES).to_json() + "\n" if text else "") + text, encoding="utf-8")
    with pytest.raises(BenchError, match=problem):
        results.read(path)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"none\.jsonl cannot be read"):
        results.read(tmp_path / "none.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(BenchError, match=r"binary\.jsonl cannot be read"):
        results.read(tmp_path / "binary.jsonl")


def test_a_group_is_a_run_or_a_point_of_a_sweep() -> None:
    one, other = {"tensors": 1}, {"tensors": 1000}
    rows = [
        row("x", RATES, storage=one),
        row("y", RATES, storage=one),
        row("x", RATES, storage=other),
        unmeasured("z", "skipped", "no"),
        row("x", RATES, storage=one),  # the run made again
    ]
    found = results.groups(rows)
    assert [[each.loader for each in group.measured] for group in found] == [["x", "y"], ["x"], ["x"], []]
    assert [len(group.rest) for group in found] == [0, 0, 0, 1]


def test_parts_of_a_run_are_one_group_and_machines_are_not() -> None:
    rows = results.read(H200 / "pipeline.jsonl")
    (group,) = results.groups(rows)
    assert len(group.measured) == 15
    assert [results.part(each) for each in rows[::5]] == ["8192 tokens", "16384 tokens", "22528 tokens"]
    env = {**record_rows.golden()["env"], "gpu": "NVIDIA H100"}
    assert len(results.groups([row("x", RATES), row("y", RATES, env=env)])) == 2


# Sweeps.


def swept() -> list[Record]:
    return [
        row(
            "staged",
            [size / (1 << 20) + depth + noise for noise in (0.0, 0.2, 0.1)],
            options={"chunk_size": size, "io_depth": depth, "reader": "pread"},
        )
        for depth in (1, 8)
        for size in (1 << 20, 1 << 22, 1 << 24)
    ]


def test_a_grid_is_a_sweep_of_each_knob_with_the_other_as_lines() -> None:
    found = {each.knob: each for each in sweeps.find(swept())}
    assert set(found) == {"loader.chunk_size", "loader.io_depth"}
    assert [(line.fixed, [at for at, _ in line.points]) for line in found["loader.chunk_size"].lines] == [
        ("io depth 1", [1 << 20, 1 << 22, 1 << 24]),
        ("io depth 8", [1 << 20, 1 << 22, 1 << 24]),
    ]
    assert [line.fixed for line in found["loader.io_depth"].lines] == [
        "chunk size 1 MiB",
        "chunk size 4 MiB",
        "chunk size 16 MiB",
    ]


def test_what_is_no_sweep() -> None:
    assert sweeps.find(results.read(H200 / "peers.jsonl")) == []  # loaders with settings of their own
    assert sweeps.find(swept()[:1]) == []
    left_to_the_library = [row("x", RATES, options={"chunk_size": None}), swept()[0]]
    assert sweeps.find(left_to_the_library) == []
    assert sweeps.find([row("x", RATES, options={"copy": value}) for value in (True, False)]) == []
    assert sweeps.find(results.read(H200 / "pipeline.jsonl")) == []  # tokens have a plot of their own


def test_real_sweeps() -> None:
    (growth,) = sweeps.find(results.read(H200 / "growth.jsonl"))
    assert (growth.knob, [line.loader for line in growth.lines]) == (
        "storage.tensors",
        ["gdsstream_staged", "gdsstream_mapped"],
    )
    assert [at for at, _ in growth.lines[0].points] == [1, 1000, 100000]
    sizes = next(each for each in sweeps.find(results.read(H200 / "loader_epoch.jsonl")) if "sizes" in each.knob)
    assert len(sizes.lines) == 5


def test_a_sweep_is_drawn_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    rows = swept() + [
        row("staged", [1.0 + depth], options={"chunk_size": size, "io_depth": depth, "reader": "pread"})
        for depth in range(20, 27)
        for size in (1 << 20, 1 << 22)
    ]
    chunk = next(each for each in sweeps.find(rows) if each.knob == "loader.chunk_size")
    path, caption = sweep.draw(chunk, tmp_path / "chunk.png")
    assert picture(path)[0] > 900
    assert "Throughput against chunk size" in caption
    assert "1 slower lines" in caption


# Plots.


def test_samples_are_drawn_with_outliers_and_what_was_not_cold(tmp_path: Path) -> None:
    rows = [
        row("ours", [40.0, 41.0, 20.0, 39.0], labels=[[], [], ["outlier"], []]),
        row("theirs", [10.0, 11.0, 12.0, 90.0], kind="kvikio", labels=[[], [], [], ["not_cold"]]),
    ]
    path, caption = samples.draw(rows, tmp_path / "samples.png")
    width, height = picture(path)
    assert width > 900
    assert height > 180
    assert "ceiling (steady)" in caption
    assert set(samples._legend(rows)) == {
        "gdsstream", "other libraries", "outlier", "not cold, not counted", "ceiling", "its range",
    }  # fmt: skip


def test_one_sample_and_a_row_without_ceiling_samples_are_drawn(tmp_path: Path) -> None:
    ceiling = {"kind": "none", "detail": "", "gb_per_s": None, "samples": []}
    picture(samples.draw([row("x", [40.0], ceiling=[50.0])], tmp_path / "one.png")[0])
    picture(samples.draw([row("x", RATES)], tmp_path / "three.png")[0])
    picture(samples.draw([row("x", RATES, **{"pct_ceiling": None}) for _ in range(1)], tmp_path / "no_share.png")[0])
    bare = row("x", RATES)
    bare.ceiling = ceiling
    picture(samples.draw([bare], tmp_path / "bare.png")[0])


def test_overhead_needs_two_numbers_of_tokens(tmp_path: Path) -> None:
    rows = results.read(H200 / "pipeline.jsonl")
    drawn = overhead.draw(rows, tmp_path / "overhead.png")
    assert drawn is not None
    picture(drawn[0])
    assert overhead.draw(rows[:5], tmp_path / "none.png") is None
    assert not (tmp_path / "none.png").exists()
    assert overhead.draw(results.read(H200 / "peers.jsonl"), tmp_path / "none.png") is None


def test_moments_are_drawn_as_they_were_and_a_budget_where_there_are_none(tmp_path: Path) -> None:
    old = results.read(H200 / "pipeline.jsonl")[:5]
    lanes = {
        "transfer": [[0.001 * at, 0.001 * at + 0.002] for at in range(12)],
        "compute": [[0.001 * at + 0.002, 0.001 * at + 0.0028] for at in range(12)],
    }
    new = [replace(each, derived={**(each.derived or {}), "moments": lanes}) for each in old[:3]]
    assert all(record.problems(json.loads(each.to_json())) == [] for each in new)
    assert timeline.moments(old[0]) is None
    said = {}
    for name, rows in (("old", old), ("new", new), ("mixed", [*new, *old[3:]])):
        found = overlap.draw(rows, tmp_path / f"{name}.png")
        assert found is not None
        said[name] = found[1]
        picture(found[0])
    assert "no trace" in said["old"]
    assert said["new"] == said["mixed"]
    assert "by marks on the device" in said["new"]
    for wrong in (
        {"transfer": []},
        {**lanes, "compute": lanes["compute"][:-1]},
        {**lanes, "compute": [[2.0, 1.0]] * 12},
    ):
        broken = replace(new[0], derived={**(new[0].derived or {}), "moments": wrong})
        assert "derived.moments" in "; ".join(record.problems(json.loads(broken.to_json())))


def test_the_budget_of_a_layer_and_of_a_step() -> None:
    layers = {each.loader: overlap.budget(each) for each in results.read(H200 / "pipeline.jsonl")[:5]}
    mapped = layers["stream_mapped"]
    assert mapped is not None
    assert (round(1e3 * mapped.compute_s, 2), round(1e3 * (mapped.transfer_s or 0), 2)) == (9.70, 22.32)
    assert mapped.measured_s == pytest.approx(22.35e-3, rel=1e-3)
    assert mapped.stall_s == pytest.approx(13.3e-3, rel=0.02)
    step = next(
        found for each in results.read(H200 / "training_step.jsonl") if (found := overlap.budget(each)) is not None
    )
    assert step.transfer_s == pytest.approx(36 * 22.63e-3, rel=1e-3)
    assert step.predicted_s == pytest.approx(0.8785, rel=1e-3)
    batch = overlap.budget(results.read(H200 / "loader_epoch_compute.jsonl")[0])
    assert batch is not None
    assert (batch.transfer_s, round(batch.compute_s, 3)) == (None, 0.024)
    assert overlap.budget(results.read(H200 / "loader_epoch.jsonl")[0]) is None


# The report.


def test_a_report_of_real_records(tmp_path: Path) -> None:
    names = ("peers", "pipeline_200mb", "training_step")
    target = report_md.write([H200 / f"{name}.jsonl" for name in names], tmp_path)
    text = target.read_text(encoding="utf-8")
    assert target == tmp_path / "report.md"
    links = re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)
    assert sorted(links) == sorted(path.name for path in tmp_path.glob("*.png"))
    assert sorted(links) == [
        "peers-samples.png",
        "pipeline_200mb-overhead.png",
        "pipeline_200mb-overlap.png",
        "pipeline_200mb-samples.png",
        "training_step-overlap.png",
        "training_step-samples.png",
    ]
    for name in links:
        picture(tmp_path / name)
    environment, *_ = tables(text)
    assert ["GPU", "NVIDIA H200"] in environment
    loaded = next(table for table in tables(text) if "x peer" in table[0])
    by_loader = {cells[0]: dict(zip(loaded[0], cells, strict=True)) for cells in loaded[1:]}
    mapped = by_loader["gdsstream_mapped"]
    assert (mapped["GB/s"], mapped["± MAD"], mapped["% of ceiling"], mapped["n"]) == ("54.75", "0.04", "99.1", "8")
    assert (mapped["x peer"], by_loader["kvikio_tuned"]["x peer"], mapped["bytes"]) == ("1.14", "1.00", "ok")
    assert by_loader["*ceiling*"]["GB/s"] == "*55.28*"
    assert "kvikio's POSIX path, pinned bounce buffers: not GDS" in text
    assert "2 of 88 samples are outliers" in text
    assert "## pipeline" in text
    assert "[green]" not in text
    titles = {title for table in tables(text) for title in table[0]}
    assert {"overhead %", "95 % CI", "± MAD", "% of ceiling", "n", "predicted", "diff %"} <= titles


def test_a_record_file_in_the_same_folder_is_linked(tmp_path: Path) -> None:
    assert "Records: [rows.jsonl](rows.jsonl)" in made(tmp_path, [row("x", RATES)], plots=False)


def test_rows_that_were_not_measured_are_listed_with_their_reasons(tmp_path: Path) -> None:
    rows = [row("x", RATES), unmeasured("bad", "failed", "ValueError: a|b\nsecond line")]
    text = made(tmp_path, rows, plots=False)
    assert "| bad | failed | ValueError: a\\|b |" in text
    cpu = report_md.write([CPU / "warm.jsonl"], tmp_path, plots=False).read_text(encoding="utf-8")
    missing = next(table for table in tables(cpu) if table[0] == ["loader", "status", "reason"])
    assert len(missing) == 1 + 6
    assert ["fastsafetensors", "skipped", "not installed: pip install fastsafetensors"] in missing


def test_a_report_of_failures_alone(tmp_path: Path) -> None:
    text = made(tmp_path, [unmeasured("x", "failed", "broken")])
    assert "| x | failed | broken |" in text
    assert list(tmp_path.glob("*.png")) == []


def test_a_swept_file_has_a_table_and_a_plot_of_each_point(tmp_path: Path) -> None:
    text = made(tmp_path, swept())
    assert text.count("### load_model") == 6
    names = sorted(path.name for path in tmp_path.glob("*.png"))
    assert names == [
        *[f"rows-{number}-samples.png" for number in range(1, 7)],
        "sweep-load_model-chunk_size.png",
    ]  # and none of the two depths
    assert all(f"]({name})" in text for name in names)
    assert "\n- Best of 6 for load_model, staged: chunk size 16 MiB, io depth 8: " in text


def test_two_machines_are_told_apart(tmp_path: Path) -> None:
    env = {**record_rows.golden()["env"], "gpu": "NVIDIA H100"}
    text = made(tmp_path, [row("x", RATES), row("y", RATES, env=env)], plots=False)
    assert "**Environment 2**" in text
    assert "| GPU | NVIDIA H100 |" in text
    assert ", environment 2, commit" in text


def test_without_matplotlib_the_report_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name))
    path = write(tmp_path / "rows.jsonl", [row("x", RATES)])
    report_md.main([str(path)])
    assert report_md.NO_PLOTS in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert list(tmp_path.glob("*.png")) == []


def test_the_command(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "bench.report", str(H200 / "random_warm.jsonl"), "--out", str(tmp_path / "new" / "one")],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert sorted(path.name for path in (tmp_path / "new" / "one").iterdir()) == [
        "random_warm-samples.png",
        "report.md",
    ]


def test_a_run_is_named_by_its_directory(tmp_path: Path) -> None:
    write(tmp_path / "results.jsonl", [row("x", RATES)])
    report_md.main([str(tmp_path), "--no-plots"])
    assert "| x " in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_what_cannot_be_reported_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "rows.jsonl", [row("x", RATES)])
    for arguments, problem in (
        ([str(tmp_path / "none.jsonl")], "cannot be read"),
        ([str(path), "--out", str(path)], "cannot be written"),
    ):
        with pytest.raises(SystemExit) as end:
            report_md.main(arguments)
        assert end.value.code == 2
        assert problem in " ".join(capsys.readouterr().out.split())


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, bench.report_md, bench.compare, bench.plots, bench.sweeps;"
        "print([name for name in ('torch', 'matplotlib', 'kvikio') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(("width", "folded"), [(120, False), (90, False), (75, True)])
def test_a_narrow_terminal_gets_whole_figures(width: int, folded: bool) -> None:
    name = "a_route_that_is_called_at_length"
    figures = [table.Column("figure", lambda record: "12,345.67") for _ in range(5)]
    columns = [table.Column("route", lambda record: record.loader), *figures]
    text = io.StringIO()
    table.show(table.Content("", columns, [table.Section([row(name, [1.0])], {})], []), Console(file=text, width=width))
    printed = text.getvalue()
    assert printed.count("12,345.67") == 5
    assert max(map(len, printed.splitlines())) <= width
    assert (name in printed) != folded
    assert "".join(re.findall(r"^[a-z_]+", printed, re.MULTILINE)) == f"route{name}"
