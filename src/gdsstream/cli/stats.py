"""`gdsstream stats`: what a running process reads and writes, or what a saved report says."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from gdsstream.cli.cells import size
from gdsstream.cli.output import Block, Cell, Column, Lines, Marked, Report, Status, Table, emit, json_option, to_text
from gdsstream.errors import ConfigError

if TYPE_CHECKING:
    from gdsstream.stats import EngineStats, Operations, ProcessStats

# A process writes about once a second; one that has been silent for so long is stopped, or its machine is too busy.
_SILENT_S = 5.0
_TURN_ON = "start it with GDSSTREAM_STATS=3 (or 1 or 2, for less) in its environment"


@click.command("stats")
@click.argument("target", metavar="[PID | REPORT]", required=False)
@click.option(
    "--watch", is_flag=True, help="Show it again and again until the process ends, with the present bandwidth."
)
@click.option("--interval", type=click.FloatRange(min=0.1), default=1.0, help="Seconds between two looks of --watch.")
@click.option("--level", type=click.IntRange(1, 3), help="Show no more than this level has.")
@click.option("--prometheus", is_flag=True, help="Print Prometheus' text format (needs gdsstream[metrics]).")
@json_option
def command(
    target: str | None, watch: bool, interval: float, level: int | None, prometheus: bool, as_json: bool
) -> None:
    """Live counters of a running process, or those of a saved REPORT: what gds_stats is for cuFile.

    A process counts if GDSSTREAM_STATS=1, 2 or 3 is in its environment, or stats= in its StreamConfig. Level 1 has
    operations, bytes, bandwidth, latency, errors and retries; level 2 also size histograms and latency percentiles;
    level 3 also each device and route. The cost is too small to measure (docs/performance.md).

    Without PID, the only process of yours that counts, or a list of them. What --json prints can be read as a REPORT
    later, and so can the file that gdsstream.stats.process_stats().save(path) writes.
    """
    if as_json + prometheus + watch > 1:
        raise click.UsageError("--json, --prometheus and --watch exclude each other")
    read = _source(target)
    if read is None:
        if watch or prometheus:
            raise click.UsageError("several processes count: name one by its PID (gdsstream stats lists them)")
        emit(_list(), as_json=as_json)
        return
    if watch:
        _watch(read, level, interval)
        return
    stats = read()
    if stats is None:
        raise ConfigError(f"process {target} has just ended; its counters went with it")
    if prometheus:
        from gdsstream.metrics import to_prometheus

        click.echo(to_prometheus(stats.at_level(level or 3), {"pid": str(stats.pid)}), nl=False)
        return
    emit(report(stats, level), as_json=as_json)


def report(stats: ProcessStats, level: int | None = None, before: ProcessStats | None = None) -> Report:
    """What `stats` says of a snapshot; with the bandwidth since the one `before`."""
    shown = stats.at_level(level or stats.level)
    blocks: list[Block] = [_head(shown, stats), _sums(shown, before)]
    if shown.level >= 2:
        blocks.append(_sizes(shown))
    if shown.level >= 3:
        blocks += [_routes(shown), _memory(shown)]
    return Report("stats", shown.as_dict(), blocks)


# --- where from -------------------------------------------------------------------------------------------------------


def _source(target: str | None) -> Callable[[], ProcessStats | None] | None:
    """What reads a snapshot, None when the process has ended; None where several processes could be meant."""
    from gdsstream.stats import load_report
    from gdsstream.stats_files import published, running

    if target is None:
        found = published()
        if not found:
            raise ConfigError(f"no process of yours counts; {_TURN_ON}")
        return found[0].read if len(found) == 1 else None
    if not target.isdecimal():
        # click's own words and exit code for what does not exist.
        click.Path(exists=True, dir_okay=False).convert(target, None, click.get_current_context())
        return lambda: load_report(target)
    found = published(int(target))
    if found:
        return lambda: found[0].read() if found[0].alive() else None
    if not running(int(target)):
        raise click.UsageError(f"no process {target} runs here")
    raise ConfigError(f"process {target} does not count, or belongs to another user; {_TURN_ON}")


def _list() -> Report:
    """Which processes count."""
    from gdsstream.stats_files import published

    found = [stats for one in published() if (stats := one.read()) is not None]
    rows: list[list[Cell]] = [
        [str(one.pid), str(one.level), size(one.reads.bytes), _rate(one.bandwidth("read")), one.command_line]
        for one in found
    ]
    columns = [Column("PID", "right"), Column("level", "right"), Column("read", "right"), Column("bandwidth", "right")]
    table = Table([*columns, Column("command")], rows, note="gdsstream stats PID shows one of them.")
    names = ("pid", "command_line", "host", "level", "started_at", "taken_at", "read_bytes_per_s", "write_bytes_per_s")
    data = [{name: one.as_dict()[name] for name in names} for one in found]
    return Report("stats", {"processes": data}, [table])


def _watch(read: Callable[[], ProcessStats | None], level: int | None, interval: float) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    before: ProcessStats | None = None
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while (stats := read()) is not None:
            if before is None or stats.taken_at > before.taken_at:
                picture = report(stats, level, before)
                if console.is_terminal:
                    text = to_text(picture, colour=not console.no_color, width=min(console.width, 100))
                    live.update(Text.from_ansi(text), refresh=True)
                else:
                    click.echo(to_text(picture))
                before = stats
            time.sleep(interval)
    click.echo("the process has ended" if before is not None else "the process ended before it was looked at")


# --- for people -------------------------------------------------------------------------------------------------------


def _head(shown: ProcessStats, stats: ProcessStats) -> Lines:
    command = shown.command_line or "(unknown command)"
    seconds = max(0.0, shown.taken_at - shown.started_at)
    lines: list[Cell] = [f"process {shown.pid} on {shown.host}: {command}"[:100]]
    counted = f"level {shown.level}" if shown.level == stats.level else f"level {shown.level} of {stats.level}"
    lines.append(f"counted at {counted} for {_duration(seconds)}")
    silent = time.time() - stats.taken_at
    if silent > _SILENT_S and _runs(stats):
        lines.append(Marked(f"silent for {_duration(silent)}: the process is stopped, or too busy", Status.WARNING))
    if stats.level == 0:
        lines.append(f"nothing was counted; {_TURN_ON}")
    return Lines(lines)


def _runs(stats: ProcessStats) -> bool:
    from gdsstream.stats_files import published

    return stats.host == os.uname().nodename and bool(published(stats.pid))


def _sums(stats: ProcessStats, before: ProcessStats | None) -> Table:
    both = (stats.reads, stats.writes)
    rows: list[list[Cell]] = [
        ["operations", *(f"{io.operations:,}" for io in both)],
        ["bytes", *(size(io.bytes) for io in both)],
        ["bandwidth while active", _rate(stats.bandwidth("read")), _rate(stats.bandwidth("write"))],
    ]
    if before is not None and stats.taken_at > before.taken_at:
        seconds = stats.taken_at - before.taken_at
        moved = (stats.reads.bytes - before.reads.bytes, stats.writes.bytes - before.writes.bytes)
        rows.append(["bandwidth now", *(_rate(nbytes / seconds) for nbytes in moved)])
    rows.append(["average latency", *(_latency(io.average_s) for io in both)])
    if stats.level >= 2:
        for percent in (50, 90, 99, 99.9):
            rows.append([f"p{percent:g} latency", *(_latency(io.percentile_s(percent)) for io in both)])
    rows.append(["longest", *(_latency(io.longest_ns / 1e9 if io.timed else None) for io in both)])
    rows.append(["errors", *(_errors(io) for io in both)])
    rows.append(["retries", *(f"{io.retries:,}" for io in both)])
    memory = f"pinned {size(stats.pinned_bytes)}, registered {size(stats.registered_bytes)}"
    return Table(["", Column("read", "right"), Column("write", "right")], rows, title="All", note=memory)


def _sizes(stats: ProcessStats) -> Table:
    from gdsstream.histograms import SIZE_BUCKETS, size_label

    rows = [
        [size_label(bucket), f"{stats.reads.sizes[bucket]:,}", f"{stats.writes.sizes[bucket]:,}"]
        for bucket in range(SIZE_BUCKETS)
    ]
    return Table([Column("size", "right"), Column("reads", "right"), Column("writes", "right")], rows, title="Sizes")


def _routes(stats: ProcessStats) -> Table:
    rows: list[list[Cell]] = []
    for engine in stats.engines:
        for one in engine.routes:
            io = one.io
            if io.operations or io.errors:
                times = (io.average_s, io.percentile_s(50), io.percentile_s(99))
                rows.append(
                    [
                        engine.device or "-",
                        engine.engine,
                        one.route,
                        f"{io.operations:,}",
                        size(io.bytes),
                        *(_latency(seconds) for seconds in times),
                        _errors(io),
                        f"{io.retries:,}",
                    ]
                )
    names = ("operations", "bytes", "average", "p50", "p99", "errors", "retries")
    columns: list[Column | str] = ["device", "engine", "route", *(Column(name, "right") for name in names)]
    return Table(columns, rows, title="Devices and routes", empty="nothing was moved yet")


def _memory(stats: ProcessStats) -> Table:
    rows: list[list[Cell]] = [_engine(one) for one in stats.engines if one.device]
    names = ("open", "active", "bandwidth", "pinned", "slots in use", "registered", "waited for slots")
    columns: list[Column | str] = ["device", "engine", *(Column(name, "right") for name in names)]
    return Table(columns, rows, title="Engines")


def _engine(one: EngineStats) -> list[Cell]:
    nbytes = sum(route.io.bytes for route in one.routes)
    return [
        one.device,
        one.engine,
        str(one.open),
        _duration(one.active_s),
        _rate(nbytes / one.active_s if one.active_s else None),
        size(one.pinned_bytes),
        f"{one.slots_held} of {one.slots}",
        size(one.registered_bytes),
        _duration(one.ring_wait_s),
    ]


def _errors(io: Operations) -> Cell:
    return Marked(f"{io.errors:,}", Status.PROBLEM) if io.errors else "0"


def _rate(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{size(round(bytes_per_s))}/s"


def _latency(seconds: float | None) -> str:
    return "-" if seconds is None else _duration(seconds)


def _duration(seconds: float) -> str:
    if seconds == 0:
        return "0 s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            value = seconds / scale
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


__all__ = ["command", "report"]
