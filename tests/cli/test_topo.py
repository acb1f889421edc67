"""`gdsstream topo` on the guide's machines: its own affinity tables; and on machines that are less tidy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trees
from click.testing import Result

from gdsstream import affinity
from gdsstream.machine import probe

Machines = Callable[..., Path]

# The guide's table 1 (DGX-2) and table 4 (DGX A100): GPUs, their buses, NVMe drives, theirs.
TABLES = {
    "dgx2": [
        ([0, 1, 2, 3], "34 36 39 3b", [2, 3], "2e 2f"),
        ([4, 5, 6, 7], "57 59 5c 5e", [4, 5], "51 52"),
        ([8, 9, 10, 11], "b7 b9 bc be", [6, 7], "b1 b2"),
        ([12, 13, 14, 15], "e0 e2 e5 e7", [8, 9], "da db"),
    ],
    "dgx_a100": [
        ([0, 1], "07 0f", [0, 1], "08 09"),
        ([2, 3], "47 4e", [4, 5], "52 53"),
        ([4, 5], "87 90", [6, 7], "89 8a"),
        ([6, 7], "b7 bd", [8, 9], "c8 c9"),
    ],
}


@pytest.mark.parametrize("name", TABLES)
def test_the_guides_affinity_tables(machine: Machines, run_json: Callable[..., Any], name: str):
    found = run_json("topo", "--root", machine(name))
    bus = {one["name"]: one["pci"][5:7] for one in found["drives"]}
    bus |= {f"GPU{one['index']}": one["pci"][5:7] for one in found["gpus"]}
    rows = [(one["gpus"], one["drives"]) for one in found["groups"]]
    wanted = [([f"GPU{g}" for g in gpus], [f"nvme{d}n1" for d in drives]) for gpus, _, drives, _ in TABLES[name]]
    assert rows == wanted
    for (gpus, drives), (_, gpu_buses, _, drive_buses) in zip(rows, TABLES[name], strict=True):
        assert [bus[one] for one in gpus] == gpu_buses.split()
        assert [bus[one] for one in drives] == drive_buses.split()
    # The same table from each end: the best GPUs of a drive, and the best drives of a GPU.
    for gpus, drives in wanted:
        for one in found["drives"]:
            if one["name"] in drives:
                assert (one["nearest_gpus"]["path"], one["nearest_gpus"]["names"]) == ("PXB", gpus)
        for one in found["gpus"]:
            if f"GPU{one['index']}" in gpus:
                assert (one["nearest_drives"]["path"], one["nearest_drives"]["names"]) == ("PXB", drives)


def test_cards_of_the_guides_dgx2(machine: Machines, run_json: Callable[..., Any]):
    found = run_json("topo", "--root", machine("dgx2"))
    best = {one["name"]: one["nearest_gpus"] for one in found["nics"]}
    assert best["mlx5_0"] == {"path": "PIX", "names": ["GPU0", "GPU1"], "first": ["GPU0", "GPU1"]}
    assert best["mlx5_1"]["names"] == ["GPU2", "GPU3"]
    assert found["gpus"][0]["nearest_nics"]["names"] == ["mlx5_0"]
    assert found["paths"]["GPU0"]["mlx5_3"] == found["paths"]["mlx5_3"]["GPU0"] == "NODE"


def test_fewer_bridges_go_first_within_a_class(machine: Machines, run_json: Callable[..., Any]):
    # As the guide reads it from lstopo: GPU 0 (07) and GPU 1 (0f) are both PXB to nvme0, and GPU 0 is nearer.
    found = run_json("topo", "--root", machine("dgx_a100"))
    assert found["drives"][0]["nearest_gpus"] == {"path": "PXB", "names": ["GPU0", "GPU1"], "first": ["GPU0"]}


def test_the_distance_of_nodes_decides_where_all_is_far(machine: Machines, run_json: Callable[..., Any]):
    found = run_json("topo", "--root", machine("dgx_a100"))
    system = next(one for one in found["drives"] if one["name"] == "nvme2n1")
    # No GPU is on node 2; those of nodes 1 and 3 are on the same socket.
    assert system["nearest_gpus"]["path"] == "SYS"
    assert system["nearest_gpus"]["names"] == ["GPU0", "GPU1", "GPU2", "GPU3"]


def test_a_set_that_is_torn_apart(machine: Machines, run_json: Callable[..., Any], run: Callable[..., Result]):
    root = machine("dgx_a100")
    data = {one["name"]: one for one in run_json("topo", "--root", root)["stacks"]}
    assert (data["md1"]["longest_path"], data["md1"]["apart"]) == ("SYS", True)
    assert data["md1"]["parts"] == [
        ["nvme0n1", "nvme1n1"],
        ["nvme4n1", "nvme5n1"],
        ["nvme6n1", "nvme7n1"],
        ["nvme8n1", "nvme9n1"],
    ]
    assert (data["md0"]["longest_path"], data["md0"]["apart"]) == ("PHB", False)
    assert "md1 (raid0): its members sit on different NUMA nodes" in run("topo", "--root", root).stdout


def test_a_set_below_one_switch_is_whole(machine: Machines):
    found = probe(machine("dgx2"))
    spread = affinity.spread(found, next(one for one in found.stacks if one.name == "md127"))
    assert (spread.path, spread.parts, spread.apart) == ("PIX", (("nvme2n1", "nvme3n1"),), False)


def test_a_set_over_several_host_bridges_of_a_node(machine: Machines):
    found = probe(machine("workstation"))
    spread = affinity.spread(found, found.stacks[0])
    assert (spread.path, spread.apart) == ("NODE", False)
    assert spread.parts == (("nvme0n1", "nvme2n1"), ("nvme3n1",), ("nvme4n1", "nvme5n1"))


def test_links_below_their_best(machine: Machines, run_json: Callable[..., Any]):
    (note,) = run_json("topo", "--root", machine("workstation"))["links_below_best"]
    assert note.startswith("nvme3n1 (0000:41:00.0) runs at 32 GT/s x2 where 32 GT/s x4 is possible")


@pytest.mark.parametrize("name", ["dgx2", "dgx_a100", "workstation", "cloud_h200"])
def test_what_people_see(machine: Machines, run: Callable[..., Result], snapshot: Callable[..., None], name: str):
    result = run("topo", "--root", machine(name))
    assert result.exit_code == 0
    snapshot(f"topo_{name}", result.stdout)


def test_an_empty_machine(tmp_path: Path, run: Callable[..., Result], run_json: Callable[..., Any]):
    (tmp_path / "sys").mkdir()
    result = run("topo", "--root", tmp_path)
    assert result.exit_code == 0
    assert "no NVIDIA GPU on the PCI bus" in result.stdout
    assert run_json("topo", "--root", tmp_path)["groups"] == []


def test_what_may_not_be_read_is_a_line_and_the_rest_runs(run: Callable[..., Result], run_json: Callable[..., Any]):
    with trees.open_folder() as root:
        trees.build("dgx2", root)
        (root / "sys/bus/pci/devices/0000:2e:00.0/numa_node").chmod(0)
        (root / "sys/class/block/nvme5n1/size").chmod(0)
        with trees.without_rights():
            text = run("topo", "--root", root).stdout
            data = run_json("topo", "--root", root)
    assert [one["reason"] for one in data["unreadable"]] == ["Permission denied"] * 2
    assert "nvme5n1/size could not be read: Permission denied" in text
    assert len(data["drives"]) == 10
    assert data["groups"][0]["drives"] == ["nvme2n1", "nvme3n1"], "where it hangs is known all the same"


def test_this_machine(run_json: Callable[..., Any]):
    assert run_json("topo")["root"] == "/"
