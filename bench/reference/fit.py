"""A part of a reference run, fitted to the machine and to the time that it has.

Time. A part's rounds may take a share of it. Of transfers each sample gets a part of that, so that where time is short
samples are shorter, and not fewer: without six of them a median has no 95 % interval.

Bytes. What a sample of a part with `grows` moves is raised until it takes about a third of a second at the rate that a
short measurement of the directory gives, as far as disk, host memory and the GPU have room. Files grow with it, since
what is read twice in a sample is not read from a cold cache the second time. A sample of a few milliseconds would say
more about how threads start than about the storage. Where samples are shorter than that for lack of time, they move
less, too, and so do the ceiling's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from bench import cache, ceilings, ceilings_disk, config, files, nvml
from bench.config import BenchConfig, TransferConfig
from bench.reference.plan import Part

#: Of a part's time, what its rounds may take; the rest is for files, start-ups and first loads.
_ROUNDS_SHARE = 0.6
#: Of a round's time, what is timed; the rest empties the cache and compares bytes.
_TIMED_SHARE = 0.5
_LONGEST_S, _SHORTEST_S = 0.5, 0.1
_SAMPLE_S = 0.3
_MOST_BYTES = 16 << 30
_LEAST_BYTES, _LEAST_IOS = 64 << 20, 4
_HANG_S = 30.0
_DISK_SHARE, _MEMORY_SHARE, _GPU_SHARE = 0.5, 0.125, 0.25
_PROBE_FILES, _PROBE_FILE_BYTES = 4, 64 << 20


def composed(part: Part, given: Sequence[str]) -> BenchConfig:
    """The part's own configuration. Raises BenchConfigError, and HydraException for what Hydra refuses."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    overrides = [*part.overrides, *given]
    config.check_overrides(overrides)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config.CONFIG_DIR), version_base="1.3"):
        plain = OmegaConf.to_container(compose("bench", [f"experiment={part.experiment}", *overrides]), resolve=True)
    assert isinstance(plain, dict)
    return config.build({str(key): value for key, value in plain.items()})


def seconds(part: Part, given: Sequence[str], settings: BenchConfig, budget_s: float) -> list[str]:
    """The time of each of the parts that the experiment itself has, unless it is said."""
    if _said("scenario.max_seconds", part, given):
        return []
    each_s = _ROUNDS_SHARE * budget_s / len(config.parts(settings.scenario))
    # A library that hangs shall not take the time of the other rows.
    hang = [] if _said("hang_seconds", part, given) else [f"hang_seconds={max(_HANG_S, budget_s / 2):.0f}"]
    return [f"scenario.max_seconds={max(1.0, each_s):.0f}", *hang]


def samples(
    part: Part, given: Sequence[str], settings: BenchConfig, budget_s: float, rate: Callable[[Path], float]
) -> list[str]:
    """How long samples take and how much they move, of transfers, unless it is said. `rate` gives a directory's, in
    GB/s."""
    scenario = settings.scenario
    if not isinstance(scenario, TransferConfig) or not part.grows:
        return []
    found, sample_s = [], scenario.sample_seconds or _LONGEST_S
    if not _said("scenario.sample_seconds", part, given):
        each_s = _ROUNDS_SHARE * budget_s / len(config.parts(scenario))
        loads = (scenario.rounds + 1) * (len(settings.loaders) + 1)
        sample_s = min(sample_s, max(_SHORTEST_S, _TIMED_SHARE * each_s / loads))
        found.append(f"scenario.sample_seconds={sample_s:.2f}")
    directory = Path(settings.storage.dir or "/")
    if len(scenario.total_bytes) > 1 or not directory.is_dir():
        return found
    gb_per_s, now = rate(directory), scenario.total_bytes[0]
    if not gb_per_s:
        return found
    total, short = _grown(scenario, directory, gb_per_s, gpu=settings.device != "cpu"), sample_s < _SAMPLE_S
    if short:
        least = max(_LEAST_BYTES, _LEAST_IOS * _largest_io(settings, scenario))
        total = min(total, max(least, _power(sample_s * gb_per_s * 1e9)))
    if short and total < now:
        found.append(f"scenario.total_bytes=[{total}]")
    elif total > now:
        count = settings.storage.files or 1
        held = max(settings.storage.file_bytes or 0, -(-total // count))
        found += [f"scenario.total_bytes=[{total}]", f"storage.files={count}", f"storage.file_bytes={held}"]
    return found


def rate(directory: Path) -> float:
    """GB/s that reads get there, past the page cache where that can be; a short measurement. Raises BenchError."""
    plan = files.Plan(directory, _PROBE_FILES, _PROBE_FILE_BYTES, "a short measurement", tensors=1)
    if plan.total_bytes * 2 > files.room(directory):
        return 0.0
    with files.written(plan) as written:
        limit: ceilings.Ceiling
        if cache.refuses_direct(written.paths[0]):  # as memory does
            limit = ceilings.ParallelRead(written.paths, consumer=False, nbytes=plan.total_bytes // 2)
        else:
            limit = ceilings_disk.Disk(written.paths, plan.total_bytes // 2)
        try:
            return limit.sample()
        finally:
            limit.close()


def _grown(scenario: TransferConfig, directory: Path, gb_per_s: float, *, gpu: bool) -> int:
    """Bytes of a sample: a power of two, as page-locked memory is allocated, or what there is room for."""
    wanted = _power(_SAMPLE_S * gb_per_s * 1e9)
    limits = [
        _MOST_BYTES,
        int(_DISK_SHARE * files.room(directory)) // (2 if scenario.writes else 1),
        int(_MEMORY_SHARE * files.memory_available()),
    ]
    if gpu:
        with suppress(nvml.NvmlError):  # no GPU: host memory is the limit then
            limits.append(int(_GPU_SHARE * nvml.open_device().free_bytes()))
    most = min(limits)
    return wanted if wanted <= most else 1 << most.bit_length() - 1


def _power(nbytes: float) -> int:
    """The next power of two."""
    return 1 << max(0, int(nbytes) - 1).bit_length()


def _largest_io(settings: BenchConfig, scenario: TransferConfig) -> int:
    sizes = [part.io_bytes[0] for part in scenario.parts()]
    own = [int(row["io_bytes"]) for row in settings.loaders.values() if row.get("io_bytes")]
    return max(sizes + own)


def _said(key: str, part: Part, given: Sequence[str]) -> bool:
    return any(each.startswith(f"{key}=") for each in (*part.overrides, *given))
