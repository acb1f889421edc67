"""What of a command line is for the parts of a reference run, and what cannot be.

A part is an experiment of its own, with the rows, files and sizes that its claims are of. What says where and how a run
is made goes on to every part; what would change what a part is has no effect on all of them, and is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.config import BenchConfigError

#: For every part, over what the part says itself; but for the place of the files, which some parts are about.
_EVERY_PART = (
    "device",
    "allow_busy_gpu",
    "isolate",
    "hang_seconds",
    "storage.keep_files",
    "scenario.rounds",
    "scenario.max_seconds",
)
_UNLESS_SAID = "storage.dir"
#: Of the reference run itself.
_OWN = ("experiment", "reference", "output")
_INSTEAD = {
    "resume": "a reference run goes on with reference.resume=DIRECTORY",
    "loader": "claims are of rows that the parts name",
    "loaders": "claims are of rows that the parts name",
    "cache": "each part says whether its files are in memory",
}


def check(given: Sequence[str]) -> list[str]:
    """The overrides among `given`, a command line's, that are for the parts. Raises BenchConfigError for those that
    are for nothing here."""
    found = []
    for override in given:
        key = override.partition("=")[0].lstrip("+~")
        head = key.partition(".")[0]
        if head in ("hydra", *_OWN) or key.startswith("hydra/"):
            continue
        if key not in (*_EVERY_PART, _UNLESS_SAID):
            why = _INSTEAD.get(head, "its parts say it themselves")
            raise BenchConfigError(
                f"'{key}' has no effect on a reference run: {why}; change a part with "
                "reference.parts.NAME.overrides=[...], or make its experiment alone, without experiment=reference"
            )
        found.append(override)
    return found


def for_part(overrides: Sequence[str], given: Sequence[str]) -> list[str]:
    """Of what `check` found, that which a part with these overrides gets."""
    own = any(each.startswith(f"{_UNLESS_SAID}=") for each in overrides)
    return [each for each in given if not (own and each.startswith(f"{_UNLESS_SAID}="))]
