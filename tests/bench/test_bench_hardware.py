"""What an environment says of drives, links, NUMA nodes and the host."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import record_rows
from conftest import ROOT

sys.path.append(str(ROOT / "tests" / "machine"))
import trees

from bench import environment, hardware, record
from gdsstream.machine import Machine, probe
from gdsstream.machine.mounts import of_path

SCHEMA = json.loads((ROOT / "bench" / "record_schema.json").read_text(encoding="utf-8"))


def described(tmp_path: Path, name: str, directory: str) -> tuple[Machine, dict[str, Any]]:
    machine = probe(trees.build(name, tmp_path / name))
    return machine, hardware.describe(machine, of_path(machine.tree, directory), machine.gpus[0].pci)


def test_a_raid_its_drives_and_the_gpus_link_are_named(tmp_path: Path) -> None:
    _, found = described(tmp_path, "workstation", "/home/tim/files")
    storage = found["storage"]
    five = [f"nvme{number}n1" for number in (0, 2, 3, 4, 5)]
    assert (storage["device"], storage["raid_level"], storage["members"]) == ("md0", "raid0", five)
    assert [drive["name"] for drive in storage["drives"]] == five
    assert {drive["model"] for drive in storage["drives"]} == {"WD_BLACK SN8100 4000GB"}
    whole = {"generation": 5, "width": 4, "max_generation": 5, "max_width": 4}
    assert [drive["link"] for drive in storage["drives"]] == [whole, whole, {**whole, "width": 2}, whole, whole]
    # Idle, as the tree was recorded.
    assert found["gpu_link"] == {"generation": 1, "width": 16, "max_generation": 5, "max_width": 16}
    assert (found["gpu_numa_node"], found["numa_nodes"], found["virtual"]) == (0, 1, False)
    row = record_rows.golden()
    row["env"] |= found
    assert list(jsonschema.Draft202012Validator(SCHEMA).iter_errors(row)) == []
    assert record.problems(row) == []


def test_a_virtual_machine_says_so(tmp_path: Path) -> None:
    _, found = described(tmp_path, "cloud_h200", "/")
    assert found["virtual"] is True
    assert [drive["transport"] for drive in found["storage"]["drives"]] in (["virtio"], [])


def test_this_machine_has_all_of_it_and_a_valid_record(tmp_path: Path) -> None:
    found = json.loads(json.dumps(environment.collect(tmp_path, "cpu")))
    row = record_rows.golden()
    row["env"] = found
    assert list(jsonschema.Draft202012Validator(SCHEMA).iter_errors(row)) == []
    assert {"storage", "gpu_link", "gpu_numa_node", "numa_nodes", "virtual", "host_id"} <= set(found)


def test_hosts_and_boots_are_told_apart_and_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / "machine", tmp_path / "boot"]
    monkeypatch.setattr(hardware, "_IDENTITY", tuple(map(str, paths)))
    assert hardware.host_id() is None
    found = set()
    for machine, boot in (("aa11", "1"), ("aa11", "2"), ("bb22", "1")):
        for path, text in zip(paths, (machine, boot), strict=True):
            path.write_text(text + "\n")
        said = hardware.host_id()
        assert said is not None
        assert machine not in said
        found.add(said)
        assert hardware.host_id() == said
    assert len(found) == 3
    assert os.uname().nodename not in found
