"""The ratio to the best peer, and who is one."""

from __future__ import annotations

import pytest
from record_rows import H200, REFERENCE, row

from bench import peers, report, results, stats

RATES = [40.0, 41.0, 39.0]


def test_the_best_peer_is_compared_round_by_round() -> None:
    ours = row("ours", [40.0, 20.0, 60.0])
    fast = row("fast", [10.0, 15.0, 50.0], kind="kvikio")
    slow = row("slow", [1.0, 2.0, 3.0], kind="safetensors")
    found = peers.beside([[slow, ours, fast]], 0)
    assert found is not None
    ratio, sure = found.columns
    assert [ratio.cell(each) for each in (ours, fast, slow)] == [
        "1.33",
        "1.00",
        "0.10",
    ]  # not 40 / 15, the ratio of the medians
    assert (sure.title, sure.cell(ours)) == ("x range (n=3)", "1.20-4.00")
    assert "fast." in found.note


def test_routes_of_transfers_are_compared_with_the_best_that_is_not_ours_and_ends_where_they_do() -> None:
    rows = results.groups(results.read(REFERENCE))[0].measured
    of = {each.loader: each for each in rows}
    assert {name for name in of if peers.is_own(of[name])} == {name for name in of if name.startswith("engine_")}
    plain = {name for name, each in of.items() if peers.is_plain(each)}
    assert plain == {"storage_cpu", "storage_cpu_gpu", "storage_cpu_gpu_async", "aio_as_fio_4x16"}
    shown = report.content(rows)
    column = next(each for each in shown.columns if each.title == "x peer")
    best = of["storage_cpu_gpu"]
    assert column.cell(of["engine_staged"]) == f"{stats.median(peers.ratios(of['engine_staged'], best)):.2f}" == "1.09"
    assert (column.cell(best), column.cell(of["storage_cpu"])) == ("1.00", ""), "host memory is not the GPU"
    assert any("within the rounds: storage_cpu_gpu (plain ios). x 95 % CI: of these" in note for note in shown.notes)


def test_rounds_that_were_not_cold_are_left_out_of_both() -> None:
    ours = row("ours", [40.0, 20.0, 60.0], labels=[[], ["not_cold"], []])
    other = row("other", [10.0, 1.0, 20.0], kind="kvikio")
    assert peers.ratios(ours, other) == pytest.approx([4.0, 3.0])


def test_without_a_peer_or_beside_peers_alone_there_is_no_ratio() -> None:
    assert peers.beside([[row("x", RATES), row("limit", RATES, kind="pinned_copies")]], 0) is None
    assert peers.beside([[row("x", RATES, kind="kvikio"), row("y", RATES, kind="pread")]], 0) is None


def test_every_kind_of_loader_is_ours_a_limit_or_a_peer() -> None:
    from bench.loaders import KINDS

    ours = {kind for kind in KINDS if peers.is_own(row("x", RATES, kind=kind))}
    theirs = {kind for kind in KINDS if peers.is_peer(row("x", RATES, kind=kind))}
    assert {*peers._OWN, *peers._LIMITS, *peers._PLAIN} <= set(KINDS)
    assert {"gdsstream", "gdsstream_handle", "gdsstream_layers", "shard_loader", "transfer_engine"} <= ours
    assert {"kvikio", "safetensors", "torch_dataloader", "pread"} <= theirs
    assert not ours & theirs


def test_the_terminal_shows_the_ratio_where_there_is_room() -> None:
    rows = [row for row in results.read(H200 / "peers.jsonl") if row.status == "ok"]
    column = next(each for each in report.content(rows).columns if each.title == "x peer")
    assert column.from_width <= 120
