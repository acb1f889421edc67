"""What a command line chooses: the scenario, which has keys of its own, the loaders that are rows, and the directory.

Hydra refuses a key that the chosen scenario lacks, and an option of a loader that is no row, but advises `+key`, which
does not help; of a directory that it cannot make it shows a traceback. Here is said what is the matter. Choices that
are a sweep are left to Hydra.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.config import CONFIG_DIR, options, own_rows
from bench.config_base import BenchConfigError, nearest


def check(overrides: Sequence[str], config_dir: Path = CONFIG_DIR) -> None:
    """Check the keys of `key=value` arguments that `config.check_overrides` has passed. Raises BenchConfigError."""
    given = dict(each.split("=", 1) for each in overrides if "=" in each)
    own = [key.split(".") for key in given if key.startswith(("scenario.", "loaders."))]
    if not own:
        return
    scenario, rows = _chosen("scenario", given, config_dir), _chosen("loader", given, config_dir)
    experiment = given.get("experiment")
    if rows is not None and experiment in options("experiment", config_dir):
        rows += own_rows(str(experiment), config_dir)
    for head, name, *rest in own:
        if head == "scenario" and scenario is not None:
            _check_scenario(name, scenario[0], config_dir)
        elif head == "loaders" and rest and rows is not None and name not in rows:
            others = [each for each in options("experiment", config_dir) if name in own_rows(each, config_dir)]
            instead = (
                f"it is one of experiment={others[0]}" if others else f"add it with loader=[{','.join((*rows, name))}]"
            )
            raise BenchConfigError(
                f"'loaders.{name}.{'.'.join(rest)}' has no effect: {name} is no row of this run, which has "
                f"{', '.join(rows)}; {instead}"
            )


def check_directory(arguments: Sequence[str], config_dir: Path = CONFIG_DIR) -> None:
    """Check that the run's own directory can be made, as far as it is no interpolation. Raises BenchConfigError."""
    swept = any(each in ("-m", "--multirun") for each in arguments)
    if any(each.startswith("-") for each in arguments) and not swept:
        return  # --help, --cfg and others make none
    kind = "sweep" if swept else "run"
    given = dict(each.split("=", 1) for each in arguments if "=" in each)
    text = given.get(f"hydra.{kind}.dir", _load(config_dir / "bench.yaml")["hydra"][kind]["dir"])
    wanted = Path(str(text).strip("'\"").partition("${")[0]).absolute()
    there = next(place for place in (wanted, *wanted.parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "nothing can be written there" if there.is_dir() else "it is no directory"
        raise BenchConfigError(
            f"the run's directory {wanted} cannot be made in {there}: {why}; choose another with hydra.{kind}.dir="
        )


def _check_scenario(name: str, scenario: str, config_dir: Path) -> None:
    valid = _keys(scenario, config_dir)
    if name in valid:
        return
    others = [other for other in options("scenario", config_dir) if name in _keys(other, config_dir)]
    of = f", only of {', '.join(others)}" if others else ""
    raise BenchConfigError(f"'scenario.{name}' is no key of scenario {scenario}{of}; {nearest(name, valid)}")


def _keys(scenario: str, config_dir: Path) -> list[str]:
    return list(_load(config_dir / "scenario" / f"{scenario}.yaml"))


def _chosen(group: str, given: Mapping[str, str], config_dir: Path) -> list[str] | None:
    """The names that are chosen of a group; None where they are a sweep, or not known."""
    if group in given:
        value = given[group]
        names = value[1:-1].split(",") if value.startswith("[") and value.endswith("]") else [value]
    else:
        top = _defaults(config_dir / "bench.yaml")
        experiment = given.get("experiment", top["experiment"])
        if experiment not in options("experiment", config_dir):
            return None
        found = _defaults(config_dir / "experiment" / f"{experiment}.yaml").get(f"override /{group}", top[group])
        names = found if isinstance(found, list) else [found]
    names = [name.strip().strip("'\"") for name in names]
    return names if set(names) <= set(options(group, config_dir)) else None


def _defaults(path: Path) -> dict[str, Any]:
    found = _load(path).get("defaults", [])
    return {key: value for each in found if isinstance(each, dict) for key, value in each.items()}


def _load(path: Path) -> dict[str, Any]:
    from omegaconf import OmegaConf

    found = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


__all__ = ["check", "check_directory"]
