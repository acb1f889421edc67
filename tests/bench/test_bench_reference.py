"""A reference run: its plan, its parts, and what it keeps."""

from __future__ import annotations

import dataclasses
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from rich.console import Console

from bench import config, reference, results
from bench.config import BenchConfigError, BenchError, ReferenceConfig
from bench.reference import claims, parts, plan, show
from bench.reference.claims import FAILS, INCOMPARABLE
from bench.reference.plan import Selector


def composed(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(str(config.CONFIG_DIR), version_base="1.3"):
        plain = OmegaConf.to_container(compose("bench", list(overrides)), resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


@pytest.mark.parametrize("name", ["documents", "smoke"])
def test_what_is_published_is_a_valid_plan_whose_claims_find_their_rows(name: str) -> None:
    planned = plan.build(config.build(composed(f"reference={name}")).reference)
    assert planned.parts
    known = {}
    for part in planned.parts:
        if part.experiment in config.options("experiment"):
            config.check_overrides(part.overrides)
            known[part.name] = composed(f"experiment={part.experiment}", *part.overrides)
            config.build(known[part.name])
    assert known
    for each in planned.claims:
        for selector in (each.ours, each.over):
            if selector is not None and selector.part in known:
                loaders = set(known[selector.part]["loaders"])
                assert selector.loader is None or selector.loader in loaders, each.name
                for key, value in selector.where.items():
                    assert key.startswith("derived.") or value in _held(known[selector.part], key), each.name


def _held(settings: dict[str, Any], key: str) -> list[Any]:
    """What rows of these settings have there, in each part of the run."""
    found: list[Any] = []
    for part in config.parts(config.build(settings).scenario):
        value: Any = {**settings, "scenario": dataclasses.asdict(part)}
        for name in key.split("."):
            value = value[name]
        found += value if isinstance(value, list) else [value]
    return found


def test_claims_of_parts_that_are_not_chosen_are_left_out() -> None:
    whole = config.build(composed("reference=smoke")).reference
    every = ["load_model", "pipeline"]
    assert [each.name for each in plan.build(whole).claims_of(every)][-2:] == ["overhead", "network"]
    some = plan.build(replace(whole, only=["pipeline"]))
    assert some.chosen == {"pipeline"}
    assert [each.name for each in some.claims_of(["pipeline"])] == ["overhead"]
    # What an earlier call has made of the others is shown too.
    assert [each.name for each in some.claims_of(every)] == ["rate", "ratio", "false_claim", "overhead"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"only": ["pipline"]}, "did you mean 'pipeline'?"),
        ({"max_seconds": 0.0}, "has to be positive"),
        ({"parts": {"p": {"experimant": "smoke"}}}, "did you mean 'experiment'?"),
        ({"parts": {"p": {"experiment": "smoke", "share": 0}}}, "'reference.parts.p.share' is 0"),
        ({"parts": {"p": 3}}, "has to be a mapping"),
        ({"documents": {"d": {"document": "d", "claim": {}}}}, "did you mean 'claims'?"),
    ],
)
def test_a_wrong_plan_is_named(changes: dict[str, Any], message: str) -> None:
    whole = config.build(composed("reference=smoke")).reference
    with pytest.raises(BenchConfigError) as caught:
        plan.build(replace(whole, **changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"unit": "GiB/s"}, "did you mean 'GB/s'?"),
        ({"needs": "gpudirekt"}, "did you mean 'gpudirect'?"),
        ({"ours": None}, "either 'ours'"),
        ({"never": "why"}, "either 'ours'"),
        ({"ours": {"part": "other"}}, "of part 'other'"),
        ({"ours": {"parts": "p"}}, "did you mean 'part'?"),
        ({"unit": "GB/s", "over": {"part": "p"}}, "it has to be 'x'"),
    ],
)
def test_a_wrong_claim_is_named(values: dict[str, Any], message: str) -> None:
    good = {"says": "fast", "unit": "x", "ours": {"part": "p"}}
    document = {"document": "d", "hardware": "h"}

    def built(each: dict[str, Any]) -> plan.Plan:
        documents = {"d": {**document, "claims": {"c": each}}}
        return plan.build(ReferenceConfig(parts={"p": {"experiment": "smoke"}}, documents=documents))

    assert built(good).claims[0].ours == Selector("p")
    with pytest.raises(BenchConfigError) as caught:
        built({**good, **values})
    assert message in str(caught.value)


def test_a_part_may_be_changed_on_the_command_line() -> None:
    config.check_overrides(["reference.parts.load_model.share=3", "reference.max_seconds=5"])
    with pytest.raises(BenchConfigError, match="did you mean 'max_seconds'"):
        config.check_overrides(["reference.max_second=5"])


# ---- a whole run


def test_a_reference_run_from_end_to_end_and_resumed(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    where = ["device=cpu", f"storage.dir={tmp_path}/files"]
    smaller = "['loader=[pread,safetensors]','storage.files=1','storage.file_bytes=1048576','scenario.rounds=9']"
    small = [
        f"reference.parts.load_model.overrides={smaller}",
        "+reference.parts.none={experiment: smokd}",
        "reference.only=[load_model,none]",
    ]
    given = ["experiment=reference_smoke", *where, *small, "scenario.rounds=6", f"output={tmp_path}/all.jsonl"]
    settings = config.build(composed(*given))
    out = Console(file=io.StringIO(), width=120)
    first = reference.run(settings, tmp_path / "run", out, given)
    assert [(row.loader, row.status) for row in first] == [("pread", "ok"), ("safetensors", "ok")]
    assert [len(row.samples_s) for row in first] == [6, 6], "the command line goes before the part"
    lines = (tmp_path / "run" / results.NAME).read_text(encoding="utf-8").splitlines()
    assert (tmp_path / "all.jsonl").read_text(encoding="utf-8").splitlines() == lines
    assert [json.loads(line) for line in lines] == [json.loads(row.to_json()) for row in first]
    report = (tmp_path / "run" / "report.md").read_text(encoding="utf-8")
    assert "| Reading is a million times as fast as mapping | 1,000,000 x |" in report
    assert "did you mean 'smoke'?" in report
    assert report.count("# Benchmark report") == 1
    printed = out.file.getvalue()  # type: ignore[attr-defined]
    assert FAILS in printed
    assert "3 claims: 1 holds, 1 does not hold here, 0 undecided, 1 side by side, 0 not comparable." in printed

    again = replace(settings, reference=replace(settings.reference, resume=str(tmp_path / "run")))
    second = reference.run(again, tmp_path / "elsewhere", out, given)
    assert (tmp_path / "all.jsonl").read_text(encoding="utf-8").splitlines() == lines
    assert [row.to_json() for row in second] == [row.to_json() for row in first]
    assert not (tmp_path / "elsewhere").exists()
    other = {**again.reference.parts, "load_model": {"experiment": "smoke", "overrides": ["scenario.rounds=4"]}}
    changed = replace(again, reference=replace(again.reference, parts=other))
    with pytest.raises(BenchError, match="overrides was"):
        reference.run(changed, tmp_path / "elsewhere", out, given)


def test_parts_for_which_no_time_is_left_say_so(tmp_path: Path) -> None:
    settings = config.build(composed("experiment=reference_smoke", "reference.max_seconds=0.5"))
    found = parts.run(plan.build(settings.reference), settings, tmp_path, Console(file=io.StringIO()))
    assert all("no time was left" in str(each.problem) for each in found.values())
    judged = [claims.judge(each, found) for each in plan.build(settings.reference).claims]
    assert {each.verdict for each in judged} == {INCOMPARABLE}
    target = show.write(judged, found, tmp_path)
    assert "no time was left" in target.read_text(encoding="utf-8")


def test_a_directory_that_is_none_is_refused_before_any_part(tmp_path: Path) -> None:
    given = ["experiment=reference_smoke", f"storage.dir={tmp_path}/missing"]
    settings = config.build(composed(*given))
    with pytest.raises(BenchError, match="is not a directory; create it"):
        reference.run(settings, tmp_path / "run", Console(file=io.StringIO()), given)
    assert not (tmp_path / "run").exists()


def test_an_error_of_a_part_is_its_reason() -> None:
    printed = "4 files\nerror: 'x' is bad; do\nthis\n"
    assert parts._last_line(printed) == "'x' is bad; do this"
    raised = (
        "Traceback (most recent call last):\n  File x\nNameError: name 'y' is not defined\nSet HYDRA_FULL_ERROR=1\n"
    )
    assert parts._last_line(raised) == "NameError: name 'y' is not defined"
    assert parts._last_line("") == ""
