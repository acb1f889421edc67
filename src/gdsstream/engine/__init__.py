"""Engines: one small module for each route, one contract, chosen by `open_engine`."""

from __future__ import annotations

import logging
from typing import Any

import torch

from gdsstream.config import StreamConfig
from gdsstream.devices import parse_device
from gdsstream.engine.base import Engine, Transfer
from gdsstream.engine.native import NativeEngine
from gdsstream.errors import ConfigError
from gdsstream.profile import AnyPath, tuned_knobs

log = logging.getLogger(__name__)
_logged: set[tuple[str, str]] = set()


def open_engine(
    backend: str | None = None,
    *,
    device: torch.device | str | int = "cpu",
    config: StreamConfig | None = None,
    **knobs: Any,
) -> Engine:
    """Open an engine on `device`; a context manager that closes itself.

    `backend` is "auto" or a route by name ("staged", "mapped", "cufile", "traditional"); further knobs are those of
    StreamConfig, and go before a `config` given whole. "auto" logs its choice once, with the reason. It is staged, or
    mapped with `host_cache_bytes` (files beyond the budget then go staged). It never is GPUDirect Storage, since only
    a proof for the files' mount could justify that, and no file is known yet: ask for "cufile" by name. No
    profile counts here, for the same reason.

    Raises ConfigError for knobs and devices that cannot work, BackendUnavailableError where a named backend cannot
    run here, and where "cuda" is asked for on a machine without.
    """
    if backend is not None:
        knobs["backend"] = backend
    settings = merge(config, knobs)
    target = parse_device(device)
    if settings.backend == "auto":
        return _auto(target, settings)
    if settings.backend == "staged":
        from gdsstream.engine.staged import StagedEngine

        return StagedEngine(target, settings)
    if settings.backend == "mapped":
        from gdsstream.engine.mapped import MappedEngine

        return MappedEngine(target, settings)
    if settings.backend == "cufile":
        from gdsstream.engine.cufile import CuFileEngine
        from gdsstream.engine.kvikio_process import CuFileSettings

        return CuFileEngine(target, CuFileSettings.of(settings), stats=settings.stats)
    from gdsstream.engine.traditional import TraditionalEngine

    return TraditionalEngine(target, stats=settings.stats)


def merge(
    config: StreamConfig | None,
    knobs: dict[str, Any],
    *,
    path: AnyPath | None = None,
    device: torch.device | None = None,
    native: bool = False,
) -> StreamConfig:
    """A whole config with knobs over it, or knobs over environment over profile over defaults. Raises ConfigError.

    The profile is that of the mount of `path` (of several the first) and of `device`; None: there is none. `native`
    leaves out a profile for another engine than the native one.
    """
    if config is None:
        tuned = tuned_knobs(path, device) if path is not None and device is not None else {}
        if native and tuned.get("backend") not in (None, "staged"):
            tuned = {}
        return StreamConfig.resolve(knobs, profile=tuned)
    if not isinstance(config, StreamConfig):
        raise ConfigError(f"config is {config!r}; it has to be a StreamConfig, or None")
    return StreamConfig.resolve({**config.as_dict(), **{k: v for k, v in knobs.items() if v is not None}}, environ={})


def _auto(device: torch.device, config: StreamConfig) -> NativeEngine:
    from gdsstream.engine.mapped import MappedEngine
    from gdsstream.engine.staged import StagedEngine

    engine: NativeEngine
    if config.host_cache_bytes:
        engine = MappedEngine(device, config, fallback=True)
        reason = f"host_cache_bytes={config.host_cache_bytes} lets files stay registered for reading again"
    else:
        engine = StagedEngine(device, config)
        reason = "nothing is kept between reads (host_cache_bytes=0), so a pass through the staging ring is fastest"
    if (engine.name, str(device)) not in _logged:
        _logged.add((engine.name, str(device)))
        log.info("backend auto on %s: %s, because %s", device, engine.name, reason)
    return engine


__all__ = ["Engine", "Transfer", "merge", "open_engine"]
