"""What `gdsstream plan` says: a plan, and a comparison, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from gdsstream.checkpoint import Checkpoint
from gdsstream.cli.output import Block, Cell, Column, Lines, Marked, Report, Status, Table
from gdsstream.cli.progress import size
from gdsstream.plan_compare import AIM, Comparison, Row
from gdsstream.planner import Needs, StreamingPlan
from gdsstream.rates import Rate
from gdsstream.stream_model import FREE, KINDS, Bound, Kind, PassTimes

_MOST_ROWS = 12
_KIND: dict[Kind, str] = {"training": "training step", "forward": "forward only"}
_BOUND: dict[Bound, str] = {
    "storage": "storage",
    "link": "link",
    "slots": "a free slot",
    "none": "nothing",
}


def report(
    checkpoint: Checkpoint,
    pattern: str,
    plan: StreamingPlan,
    assumptions: Sequence[str],
    compared: Comparison | None = None,
) -> Report:
    """The whole report; a problem where a comparison misses its aim."""
    said = (*assumptions, *_assumed(plan))
    blocks: list[Block] = [
        _head(checkpoint, pattern, plan),
        _rates(plan),
        _layers(plan),
        _passes(plan),
        _needs(plan),
        *(_table(plan, kind) for kind in KINDS),
        Lines([f"- {line}" for line in said], title="What was taken for granted"),
    ]
    if compared is not None:
        blocks += _comparison(compared)
    data = _data(checkpoint, pattern, plan, said, compared)
    return Report("plan", data, blocks, problem=compared is not None and not compared.within)


def _assumed(plan: StreamingPlan) -> list[str]:
    backward = (
        "twice the forward FLOPs: the forward pass again, and the gradient's way back (--recompute)"
        if plan.setup.recompute
        else "as many FLOPs as forward, the gradient's way back; --recompute adds the forward pass again"
    )
    return [
        f"Backward has {backward}. Weights are frozen: they get no gradient.",
        "Layers arrive one after the other, each at the slower rate of its tier and the link, with nothing else on "
        "them; every layer is read whole.",
        "Figures are of the steady state. Tokens, slots and host tier each are the least that does, by bisection.",
    ]


def _head(checkpoint: Checkpoint, pattern: str, plan: StreamingPlan) -> Lines:
    rest = sum(spec.nbytes for spec in checkpoint.tensors.values()) - plan.total_bytes
    slots = plan.setup.num_slots
    lines: list[Cell] = [
        f"{checkpoint.path}: {_count(len(plan.layers), 'layer')} ({pattern or 'by names'}), "
        f"{size(plan.total_bytes)}; {size(rest)} beside them stay in GPU memory.",
        f"{plan.setup.tokens:,} tokens at once, {_count(slots, 'slot')} ({size(slots * plan.slot_bytes)} of GPU "
        f"memory), host tier of {size(plan.setup.host_cache_bytes)}.",
    ]
    for kind in KINDS:
        whole, name = plan.steady[kind].whole, _KIND[kind].capitalize()
        if whole.bound == "none":
            lines.append(Marked(f"{name}: streaming is free.", Status.OK))
        else:
            more = f"{_percent(whole.overhead)} over the compute alone"
            lines.append(Marked(f"{name}: {more}; it waits for {_BOUND[whole.bound]}.", Status.WARNING))
    return Lines(lines)


def _rates(plan: StreamingPlan) -> Table:
    rates = plan.rates

    def row(name: str, rate: Rate, scale: float, unit: str) -> list[Cell]:
        source: Cell = Marked(rate.source, Status.WARNING) if rate.origin == "assumed" else rate.source
        return [name, f"{rate.value / scale:.4g} {unit}", source]

    return Table(
        [Column("rate", width=8), Column("value", justify="right", width=14), Column("source", width=72, wrap=True)],
        [
            row("link", rates.link, 1e9, "GB/s"),
            row("storage", rates.storage, 1e9, "GB/s"),
            row("host", rates.host, 1e9, "GB/s"),
            row("compute", rates.compute, 1e12, "TFLOP/s"),
        ],
    )


def _layers(plan: StreamingPlan) -> Table:
    """One row for each kind of layer."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for layer, times in zip(plan.layers, plan.times, strict=True):
        kinds.setdefault((layer.nbytes, layer.num_experts, times), []).append(layer.index)
    rows: list[list[Cell]] = []
    for members in kinds.values():
        layer, times = plan.layers[members[0]], plan.times[members[0]]
        rows.append(
            [
                _ranges(members),
                size(layer.nbytes),
                f"{layer.active_experts} of {layer.num_experts}" if layer.num_experts else "-",
                _ms(times.forward_s),
                _ms(times.backward_s),
                _ms(times.from_storage_s),
                _ms(times.from_host_s),
            ]
        )
    right = [Column(heading, justify="right") for heading in ("bytes", "experts", "forward", "backward")]
    arrive = [Column(heading, justify="right") for heading in ("from storage", "from host")]
    more = len(rows) - _MOST_ROWS
    return Table(
        [Column("layers", width=22), *right, *arrive],
        rows[:_MOST_ROWS],
        title="A layer, in ms: compute of each pass, and its transfer",
        note=f"{more} more kinds of layers; --json has every layer" if more > 0 else "",
    )


def _passes(plan: StreamingPlan) -> Table:
    training, forward = plan.steady["training"], plan.steady["forward"]
    rows = [
        _pass("training step", training.whole),
        _pass("  its forward", training.forward),
        *([_pass("  its backward", training.backward)] if training.backward is not None else []),
        _pass("forward only", forward.whole),
    ]
    right = [Column(heading, justify="right") for heading in ("compute", "transfer", "streamed", "overhead", "reads")]
    return Table(
        [Column("pass", width=16), *right, Column("from storage", justify="right"), Column("waits for")],
        rows,
        title=f"In the steady state, at {plan.setup.tokens:,} tokens, in ms",
        note="overhead: over the same compute with all weights in GPU memory",
    )


def _pass(name: str, times: PassTimes) -> list[Cell]:
    return [
        name,
        _ms(times.compute_s),
        _ms(times.transfer_s),
        _ms(times.total_s),
        _overhead(times.overhead),
        f"{times.reads:.4g}",
        size(round(times.storage_bytes)),
        _BOUND[times.bound],
    ]


def _needs(plan: StreamingPlan) -> Table:
    setup = plan.setup

    def of(need: Needs) -> tuple[str, str, str]:
        return (
            "none does" if need.tokens is None else f"{need.tokens:,}",
            f"{need.num_slots} ({size(need.num_slots * plan.slot_bytes)})",
            "none does" if need.host_bytes is None else size(need.host_bytes),
        )

    columns = [of(plan.needs[kind]) for kind in KINDS]
    present = (f"{setup.tokens:,}", str(setup.num_slots), size(setup.host_cache_bytes))
    names = ("tokens", "slots (GPU memory)", "host tier")
    right = [Column(heading, justify="right", width=20) for heading in ("now", *_KIND.values())]
    return Table(
        [Column("smallest number of", width=24), *right],
        [list(row) for row in zip(names, present, *columns, strict=True)],
        title="What makes streaming free, each with the others as they are",
        note=f"free: at most {FREE:.1%} longer than the compute; {len(plan.layers)} slots hold every layer",
    )


def _table(plan: StreamingPlan, kind: Kind) -> Table:
    given = min(plan.setup.host_cache_bytes, plan.total_bytes)
    names = {
        plan.total_bytes // 2: "half in host",
        given: "as asked for",
        0: "storage",
        plan.total_bytes: "all in host",
    }
    headings = [
        Column(f"{names[tier]}, {size(tier)}" if tier else "all from storage", justify="right") for tier in plan.tiers
    ]
    rows: list[list[Cell]] = []
    for tokens, cells in groupby(plan.table[kind], key=lambda cell: cell.tokens):
        rows.append([f"{tokens:,}", *(_cell(cell.total_s, cell.overhead) for cell in cells)])
    return Table(
        [Column("tokens", justify="right", width=11), *headings],
        rows,
        title=f"{_KIND[kind].capitalize()} over tokens and tiers, {_count(plan.setup.num_slots, 'slot')}: ms, overhead",
    )


def _cell(total_s: float, overhead: float) -> Cell:
    text = f"{_ms(total_s)} {_percent(overhead):>8}"
    return Marked(text, Status.OK) if overhead <= FREE else text


def _comparison(compared: Comparison) -> list[Block]:
    rows: list[list[Cell]] = []
    for row in compared.rows:
        status = Status.INFO if not row.judged else Status.OK if row.within else Status.PROBLEM
        rows.append(
            [
                "training" if row.what == "step" else "pipeline",
                row.what,
                f"{row.tokens:,}",
                row.loader,
                _ms(row.measured_s),
                _ms(row.planned_s),
                Marked(_signed(row.planned_difference), status),
                _ms(row.alone_s),
                _signed(row.alone_difference),
            ]
        )
    columns: list[Column | str] = ["scenario", "pass", Column("tokens", justify="right"), "loader"]
    columns += [Column(name, justify="right") for name in ("measured", "planned", "diff", "alone", "diff")]
    judged = [row for row in compared.rows if row.judged]
    good = sum(row.within for row in judged)
    verdict = Marked(
        f"{good} of {len(judged)} rows that are judged are within {AIM:.0%} of what was planned"
        + (f"; the largest difference is {_signed(_worst(judged))}." if judged else "."),
        Status.OK if compared.within else Status.PROBLEM,
    )
    lines: list[Cell] = [
        verdict,
        "- planned: from the rates above"
        + (", with the compute that each run measured alone" if any(row.compute_measured for row in judged) else "")
        + "; alone: from compute and transfer of a layer that each run measured alone; "
        "diff: how much longer it was.",
    ]
    if len(judged) < len(compared.rows):
        lines.append(
            "- Rows of other routes (kvikio, traditional) are not judged: these rates are not theirs. --loader NAME "
            "judges them."
        )
    lines += [f"- not compared: {reason}" for reason in _few(compared.skipped)]
    table = Table(columns, rows, title=f"Predicted and measured, ms a layer or step: {compared.path}")
    return [table, Lines(lines)]


def _worst(rows: Iterable[Row]) -> float:
    return max((row.planned_difference for row in rows), key=abs)


def _few(reasons: Sequence[str]) -> list[str]:
    if len(reasons) <= _MOST_ROWS:
        return list(reasons)
    return [*reasons[: _MOST_ROWS - 1], f"{len(reasons) - _MOST_ROWS + 1} more lines; --json has all of them"]


def _data(
    checkpoint: Checkpoint, pattern: str, plan: StreamingPlan, assumptions: Sequence[str], compared: Comparison | None
) -> dict[str, Any]:
    setup, rates = plan.setup, plan.rates
    host = frozenset(plan.host_layers["training"])
    return {
        "checkpoint": checkpoint.path,
        "pattern": pattern,
        "num_layers": len(plan.layers),
        "layer_bytes": plan.total_bytes,
        "other_bytes": sum(spec.nbytes for spec in checkpoint.tensors.values()) - plan.total_bytes,
        "tokens": setup.tokens,
        "num_slots": setup.num_slots,
        "slot_bytes": plan.slot_bytes,
        "host_cache_bytes": setup.host_cache_bytes,
        "recompute": setup.recompute,
        "rates": {
            "link_gb_per_s": _rate(rates.link, 1e9),
            "storage_gb_per_s": _rate(rates.storage, 1e9),
            "host_gb_per_s": _rate(rates.host, 1e9),
            "compute_tflops": _rate(rates.compute, 1e12),
        },
        "assumptions": list(assumptions),
        "layers": [
            {
                "index": layer.index,
                "nbytes": layer.nbytes,
                "num_experts": layer.num_experts,
                "active_experts": layer.active_experts,
                "flops_per_token": layer.flops_per_token,
                "tier": "host" if index in host else "storage",
                "transfer_s": times.from_host_s if index in host else times.from_storage_s,
                **times._asdict(),
            }
            for index, (layer, times) in enumerate(zip(plan.layers, plan.times, strict=True))
        ],
        "passes": {
            kind: {
                **_times(plan.steady[kind].whole),
                "fill_s": plan.steady[kind].fill_s,
                "host_layers": list(plan.host_layers[kind]),
                "forward": _times(plan.steady[kind].forward),
                "backward": None if (back := plan.steady[kind].backward) is None else _times(back),
                "free_at": plan.needs[kind]._asdict(),
                "table": [cell._asdict() for cell in plan.table[kind]],
            }
            for kind in KINDS
        },
        "compare": None
        if compared is None
        else {
            "path": compared.path,
            "aim": AIM,
            "within": compared.within,
            "rows": [{**row._asdict(), "within": row.within} for row in compared.rows],
            "skipped": list(compared.skipped),
        },
    }


def _rate(rate: Rate, scale: float) -> dict[str, Any]:
    return {"value": rate.value / scale, "origin": rate.origin, "source": rate.source}


def _times(times: PassTimes) -> dict[str, Any]:
    return {
        "compute_s": times.compute_s,
        "transfer_s": times.transfer_s,
        "total_s": times.total_s,
        "overhead": times.overhead,
        "stall_s": times.stall_s,
        "waits_for": times.bound,
        "reads": times.reads,
        "storage_bytes": times.storage_bytes,
        "host_bytes": times.host_bytes,
    }


def _ranges(numbers: Sequence[int]) -> str:
    """ "0-2, 5" for ascending numbers; cut where it gets long."""
    parts: list[str] = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        parts.append(str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}")
    text = ", ".join(parts)
    return text if len(text) <= 22 else f"{', '.join(parts[:2])}, ... ({len(numbers)})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:,.0f}" if ms >= 1000 else f"{ms:.1f}" if ms >= 100 else f"{ms:.2f}" if ms >= 0.1 else f"{ms:.4f}"


def _overhead(value: float) -> Cell:
    return Marked(_percent(value), Status.OK if value <= FREE else Status.WARNING)


def _percent(value: float) -> str:
    return f"+{value:,.0%}" if value >= 0.9995 else f"+{value:.1%}"


def _signed(value: float) -> str:
    return f"{value:+,.0%}" if abs(value) >= 0.9995 else f"{value:+.1%}"


__all__ = ["report"]
