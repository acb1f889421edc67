"""cufile.json: where cuFile finds it, what it says, and what holds in the end.

Environment over file over what is built in. The file is JSON with // comments, as NVIDIA ships it.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gdsstream.machine import Tree

PATH_VARIABLE = "CUFILE_ENV_PATH_JSON"
_USUAL_PLACE = "/etc/cufile.json"

# What cuFile does without a file, as NVIDIA documents it; only what decides about routes and sizes.
BUILT_IN: dict[str, Any] = {
    "properties.allow_compat_mode": True,
    "properties.force_compat_mode": False,
    "properties.use_pci_p2pdma": False,
    "properties.use_poll_mode": False,
    "properties.max_direct_io_size_kb": 16384,
    "properties.max_device_cache_size_kb": 131072,
    "properties.max_device_pinned_mem_size_kb": 33554432,
    "execution.parallel_io": True,
    "execution.max_io_threads": 4,
    "execution.max_io_queue_depth": 128,
    "execution.min_io_threshold_size_kb": 8192,
    "execution.max_request_parallelism": 4,
    "profile.cufile_stats": 0,
}
_VARIABLES = {
    "CUFILE_ALLOW_COMPAT_MODE": "properties.allow_compat_mode",
    "CUFILE_FORCE_COMPAT_MODE": "properties.force_compat_mode",
    "CUFILE_USE_PCIP2PDMA": "properties.use_pci_p2pdma",
}
# Further keys that NVIDIA documents: only to tell a misspelt one from one that we do not show.
# fmt: off
_OTHER_KEYS = (
    "logging.dir", "logging.level", "profile.nvtx", "profile.io_batchsize", "properties.io_batchsize",
    "properties.io_priority", "properties.poll_mode_max_size_kb", "properties.rdma_dev_addr_list",
    "properties.rdma_load_balancing_policy", "properties.rdma_dynamic_routing",
    "properties.rdma_dynamic_routing_order", "properties.rdma_peer_affinity_policy", "properties.rdma_peer_type",
    "properties.gds_rdma_write_support", "properties.per_buffer_cache_size_kb", "properties.posix_pool_slab_size_kb",
    "properties.posix_pool_slab_count", "properties.max_batch_io_size", "properties.max_batch_io_timeout_msecs",
    "fs.generic.posix_unaligned_writes", "fs.lustre.posix_gds_min_kb", "denylist.drivers", "denylist.devices",
    "denylist.mounts", "denylist.filesystems", "miscellaneous.skip_topology_detection",
    "miscellaneous.api_check_aggressive",
)
# fmt: on
_KNOWN = {*BUILT_IN, *_OTHER_KEYS}


@dataclass(frozen=True, slots=True)
class CuFileConfig:
    """What holds for cuFile in this process.

    Attributes:
        path: the file that was read; None without one.
        error: why it cannot be used; None if it can, or there is none.
        values: by dotted name, `BUILT_IN`'s names first.
        origins: "file", "environment" or "built in" for each of `values`.
        denied: (kind, entry) of its deny lists: "drivers", "devices", "mounts", "filesystems".
        misspelt: (key, the key that is probably meant) for keys that cuFile does not know.
    """

    path: str | None
    error: str | None = None
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    denied: tuple[tuple[str, str], ...] = ()
    misspelt: tuple[tuple[str, str], ...] = ()

    def flag(self, name: str) -> bool:
        """A yes or no; cuFile takes what is not true for no."""
        return self.values.get(name) is True


def load(tree: Tree, environ: Mapping[str, str]) -> CuFileConfig:
    """The configuration of a process with this environment. Raises nothing: see `CuFileConfig.error`."""
    named = environ.get(PATH_VARIABLE)
    path = named or _USUAL_PLACE
    before = len(tree.failures)
    text = tree.read(path)
    if text is None:
        if len(tree.failures) > before:
            return _effective(path, {}, environ, tree.failures[-1][1])
        return _effective(named, {}, environ, f"{PATH_VARIABLE} names it, and it does not exist" if named else None)
    try:
        content = parse(text)
    except ValueError as error:
        return _effective(path, {}, environ, f"not the JSON that cuFile reads: {error}")
    return _effective(path, content, environ, None)


def parse(text: str) -> dict[str, Any]:
    """JSON with // and /* */ comments and trailing commas. Raises ValueError with line and column."""
    # Strings first, so that the slashes of a URL in one are not taken for a comment; blanks keep the columns.
    pattern = r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/'
    bare = re.sub(pattern, _blank, text, flags=re.DOTALL)
    bare = re.sub(r'"(?:\\.|[^"\\\n])*"|,(?=\s*[}\]])', lambda match: match[0] if match[0] != "," else " ", bare)
    content = json.loads(bare)
    if not isinstance(content, dict):
        raise ValueError("it has to be an object")
    return content


def _blank(match: re.Match[str]) -> str:
    return match[0] if match[0].startswith('"') else re.sub(r"[^\n]", " ", match[0])


def _effective(
    path: str | None, content: dict[str, Any], environ: Mapping[str, str], error: str | None
) -> CuFileConfig:
    said = dict(_flatten(content))
    values, origins = dict(BUILT_IN), dict.fromkeys(BUILT_IN, "built in")
    for name, value in said.items():
        values[name], origins[name] = value, "file"
    for variable, name in _VARIABLES.items():
        if text := environ.get(variable, "").strip().lower():
            values[name], origins[name] = text in ("1", "true", "yes", "on"), "environment"
    denied = [
        (kind, str(entry))
        for section in ("denylist", "blacklist")
        for kind in ("drivers", "devices", "mounts", "filesystems")
        for entry in _entries(said.get(f"{section}.{kind}"))
    ]
    return CuFileConfig(path, error, values, origins, tuple(denied), tuple(_misspelt(said)))


def _flatten(content: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in content.items():
        if isinstance(value, dict):
            found += _flatten(value, f"{prefix}{key}.")
        else:
            found.append((prefix + key, value))
    return found


def _entries(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _misspelt(said: dict[str, Any]) -> list[tuple[str, str]]:
    """Unknown keys that look like a known one of the same section, or like its last words ("num_io_threads")."""
    found = []
    for name in said:
        section, _, key = name.rpartition(".")
        if name in _KNOWN or section not in {one.rpartition(".")[0] for one in _KNOWN}:
            continue
        keys = [one.rpartition(".")[2] for one in _KNOWN if one.rpartition(".")[0] == section]
        if close := difflib.get_close_matches(key, keys, n=1, cutoff=0.75):
            found.append((name, f"{section}.{close[0]}"))
    return found


__all__ = ["BUILT_IN", "PATH_VARIABLE", "CuFileConfig", "load", "parse"]
