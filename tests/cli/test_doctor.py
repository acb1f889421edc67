"""`gdsstream doctor`: what it says of recorded machines and of this one, and that only counters prove anything."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trees
from click.testing import Result
from conditions import READY
from fake_kvikio import FakeCounters, FakeKvikio

from gdsstream import doctor, proofs
from gdsstream.doctor import prove
from gdsstream.engine import cufile, cufile_transfer
from gdsstream.engine.cufile import CuFileEngine
from gdsstream.errors import ConfigError, ReadError
from gdsstream.storage import describe

Machines = Callable[..., Path]


def lines(document: Any) -> dict[str, tuple[str, str]]:
    """Topic -> (status, found)."""
    return {
        one["topic"]: (one["status"], one["found"]) for section in document["sections"] for one in section["findings"]
    }


# --- recorded machines ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "path", "more", "code"),
    [
        ("dgx_a100", "/raid/model", READY, 0),
        ("dgx2", "/nvme23/gds_dir", "", 1),
        ("workstation", "/home/tim/model.safetensors", "", 1),
        ("cloud_h200", "/dev/shm/model", "", 1),
    ],
)
def test_what_people_see(
    machine: Machines,
    run: Callable[..., Result],
    snapshot: Callable[..., None],
    name: str,
    path: str,
    more: str,
    code: int,
):
    result = run("doctor", path, "--root", machine(name, more))
    assert result.exit_code == code
    snapshot(f"doctor_{name}", result.stdout)


def test_a_machine_with_nothing_in_the_way_is_still_not_called_proven(
    machine: Machines, run: Callable[..., Result], run_json: Callable[..., Any]
):
    root = machine("dgx_a100", READY)
    found = run_json("doctor", "/raid/model", "--root", root)
    assert (found["verdict"], found["open_ways"], found["counts"]["problem"]) == ("unproven", ["nvidia-fs"], 0)
    text = run("doctor", "/raid/model", "--root", root).stdout
    assert "Nothing was found in its way (nvidia-fs), which proves nothing." in text
    assert "gdsstream doctor /raid/model --prove" in " ".join(text.split())


def test_every_problem_and_warning_says_what_to_do(machine: Machines, run_json: Callable[..., Any]):
    for name, path in (("dgx2", "/nvme23/x"), ("workstation", "/home/tim/x"), ("cloud_h200", "/x")):
        for section in run_json("doctor", path, "--root", machine(name))["sections"]:
            for one in section["findings"]:
                assert one["remedy"] or one["status"] in ("ok", "info"), one


def test_without_a_path_problems_are_no_reason_to_fail(machine: Machines, run: Callable[..., Result]):
    result = run("doctor", "--root", machine("workstation"))
    assert result.exit_code == 0
    assert "problem" in result.stdout
    assert "\nPath\n" not in result.stdout


def test_an_empty_tree_is_all_problems_and_no_crash(tmp_path: Path, run_json: Callable[..., Any]):
    (tmp_path / "proc").mkdir()
    found = run_json("doctor", "/data/model", "--root", tmp_path)
    assert found["verdict"] == "blocked"
    said = lines(found)
    assert said["NVIDIA driver"][0] == said["GPU"][0] == said["udev"][0] == "problem"
    assert said["file system"] == ("warning", "no mount was found for the path")
    assert not any("could not be checked" in text for _, text in said.values())


def test_what_may_not_be_read_is_a_line_and_the_rest_runs(run_json: Callable[..., Any]):
    with trees.open_folder() as root:
        trees.build("dgx_a100", root, READY)
        for path in ("etc/cufile.json", "proc/driver/nvidia-fs/version", "proc/self/limits"):
            (root / path).chmod(0)
        (root / "run/udev").chmod(0)
        with trees.without_rights():
            found = run_json("doctor", "/raid/model", "--root", root)
        (root / "run/udev").chmod(0o755)
    said = lines(found)
    assert said["cufile.json"] == ("problem", "/etc/cufile.json: Permission denied")
    assert said["nvidia-fs"] == ("warning", "loaded, but its version cannot be read")
    assert said["udev"] == ("problem", "/run/udev is Permission denied: kvikio then keeps to its POSIX path")
    assert said["file system"][0] == said["GPU"][0] == "ok"
    assert {one["path"] for one in found["unreadable"]} == {
        "/etc/cufile.json",
        "/proc/driver/nvidia-fs/version",
        "/proc/self/limits",
        "/run/udev",
    }


def test_a_check_that_fails_is_a_line_and_the_others_run(machine: Machines, monkeypatch: pytest.MonkeyPatch):
    def gpus(context: Any) -> Any:
        raise ValueError("a tree that nobody thought of")

    monkeypatch.setattr(doctor, "_MACHINE", (doctor.system.kernel, gpus, doctor.system.io_uring))
    found = doctor.examine(root=machine("workstation"))
    assert [one.topic for one in found.sections[0].findings] == ["kernel", "gpus", "io_uring"]
    assert found.sections[0].findings[1].found == ("could not be checked: ValueError: a tree that nobody thought of")


# --- this machine ---------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(3 << 20))
    os.sync()
    return path


def test_a_file_of_this_machine(file: Path, run_json: Callable[..., Any]):
    info = describe(file)
    found = run_json("doctor", file)
    said = lines(found)
    assert found["path"] == str(file)
    assert said["path"] == ("info", f"{file} (3,145,728 bytes)")
    assert info.filesystem in said["file system"][1]
    assert f"offsets in {info.offset_alignment} bytes" in said["O_DIRECT"][1] or info.is_memory
    if not info.is_memory:
        assert said["O_DIRECT"][0] == ("ok" if info.direct_io else "problem")
        assert said["page cache"][1].startswith("100% of model.safetensors is cached")
    assert said["kernel"][1].startswith(f"Linux {os.uname().release}")
    assert said["proof"][1].startswith("none stored for this mount")
    assert said["io_uring"][0] in ("ok", "warning")
    assert "not asked" not in json.dumps(found)


def test_a_folder_is_tried_by_its_largest_file(file: Path, run_json: Callable[..., Any]):
    (file.parent / "small.bin").write_bytes(b"x")
    (file.parent / ".hidden").write_bytes(bytes(4 << 20))
    found = run_json("doctor", file.parent)
    assert lines(found)["path"][1] == f"{file} (3,145,728 bytes)"


def test_a_path_that_does_not_exist(run: Callable[..., Result], tmp_path: Path):
    result = run("doctor", tmp_path / "nothing")
    assert result.exit_code == 2
    assert "does not exist" in result.stderr


def test_prove_needs_a_path_of_this_machine(run: Callable[..., Result], machine: Machines):
    assert run("doctor", "--prove").exit_code == 2
    assert run("doctor", "/raid", "--prove", "--root", machine("dgx_a100")).exit_code == 2
    with pytest.raises(ConfigError, match="on this machine"):
        doctor.examine("/raid", root=machine("dgx2"), prove=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_prove_without_a_gpu_is_a_problem_and_the_rest_is_shown(file: Path, run: Callable[..., Result]):
    result = run("doctor", file, "--prove")
    assert result.exit_code == 1
    assert "cuFile read" in result.stdout
    assert "torch finds no CUDA device here" in " ".join(result.stdout.split())
    assert "file system" in result.stdout
    assert not proofs.proofs_path().exists()


# --- --prove over the stand-in --------------------------------------------------------------------------------------


class Setup:
    """kvikio and cuFile's counters, whose reads count as a test says."""

    def __init__(self, kvikio: FakeKvikio, counters: FakeCounters) -> None:
        self.kvikio, self.counters = kvikio, counters
        self.ways: list[str] = ["p2p"]
        kvikio.compat = False
        plain = kvikio.CuFile.pread

        def pread(handle: Any, buf: torch.Tensor, size: int, file_offset: int, task_size: int) -> Any:
            for way in self.ways:
                counters.counts[way] += 1
            return plain(handle, buf, size, file_offset, task_size)

        kvikio.CuFile.pread = pread


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    kvikio, counters = FakeKvikio(), FakeCounters()
    monkeypatch.setitem(sys.modules, "kvikio", kvikio)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", kvikio.defaults)
    monkeypatch.setitem(sys.modules, "cuda.bindings.cufile", counters)  # type: ignore[arg-type]
    monkeypatch.setattr(CuFileEngine, "_require_cuda", lambda self: None)
    monkeypatch.setattr(CuFileEngine, "_drain_stream", lambda self: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(prove, "_QUIET_S", 0.01)
    real = prove.prove
    monkeypatch.setattr(prove, "prove", lambda path, info: real(path, info, device="cpu"))
    yield Setup(kvikio, counters)
    assert not cufile_transfer.PARKED


def test_counted_direct_reads_are_a_proof(setup: Setup, file: Path, run_json: Callable[..., Any]):
    assert proofs.proven([file]) is None
    found = run_json("doctor", file, "--prove")
    assert found["verdict"] == "proven"
    assert found["prove"]["counted"] == {"nvfs": 0, "p2p": 1, "posix": 0}, "the read that opens the driver is not ours"
    assert (found["prove"]["proven"], found["prove"]["bytes"]) == (True, 3 << 20)
    assert (found["proof"]["evidence"], found["proof"]["reads"]) == ("cufile", 1)
    assert found["sentence"].startswith(f"Proven for {describe(file).mount_point} by cufile's own counters.")
    stored = proofs.proven([file])
    assert stored is not None, "which is what backend auto goes by"
    assert stored.mount_point == describe(file).mount_point


def test_a_proof_is_success_whatever_else_was_found(setup: Setup, file: Path, run: Callable[..., Result]):
    result = run("doctor", file, "--prove")
    assert result.exit_code == 0
    assert "reads counted during ours: 0 nvfs, 1 p2p, 0 posix" in result.stdout
    # Later, without --prove, the conditions that fail here count again; the proof is still shown.
    later = run("doctor", file)
    assert later.exit_code == 1
    assert "cufile's counters saw 1 direct reads" in later.stdout
    assert "now in its way, though" in " ".join(later.stdout.split())


@pytest.mark.parametrize(
    ("ways", "reason"),
    [
        ([], "no read was counted as direct"),
        (["posix"], "no read was counted as direct"),
        (["p2p", "posix"], "1 of 2 reads took cuFile's POSIX path"),
    ],
)
def test_reads_by_posix_are_no_proof(
    setup: Setup, file: Path, run_json: Callable[..., Any], ways: list[str], reason: str
):
    setup.ways = ways
    found = run_json("doctor", file, "--prove")
    assert (found["prove"]["proven"], found["prove"]["reason"], found["proof"]) == (False, reason, None)
    assert found["verdict"] != "proven"
    assert lines(found)["proven"] == ("problem", f"no: {reason}")
    assert not proofs.proofs_path().exists()


def test_kvikios_own_posix_path_is_no_proof(setup: Setup, file: Path, run: Callable[..., Result]):
    setup.kvikio.compat = True
    result = run("doctor", file, "--prove")
    assert result.exit_code == 1
    assert "nothing counts here" in result.stdout
    assert not proofs.proofs_path().exists()


def test_reads_of_others_are_no_proof(setup: Setup, file: Path, monkeypatch: pytest.MonkeyPatch):
    class Busy:
        """nvidia-fs counts for the whole machine, and somebody else is reading."""

        def __init__(self) -> None:
            self.before = self.now = 0

        def delta(self) -> dict[str, int]:
            self.now += 5
            return {prove._MACHINE_WIDE: self.now}

        def verdict(self) -> str:
            return "unproven"

    monkeypatch.setattr(cufile, "Counters", Busy)
    monkeypatch.setattr(prove, "Counters", Busy)
    outcome = prove.prove(str(file), describe(file))
    assert outcome.proof is None
    assert "other processes read through nvidia-fs" in outcome.reason


def test_other_bytes_are_an_error_and_no_proof(setup: Setup, file: Path, monkeypatch: pytest.MonkeyPatch):
    read = prove._read
    monkeypatch.setattr(prove, "_read", lambda *arguments: read(*arguments) ^ 1)
    with pytest.raises(ReadError, match="delivered other bytes than the file has"):
        prove.prove(str(file), describe(file))
    assert not proofs.proofs_path().exists()


def test_a_file_below_kvikios_threshold(setup: Setup, tmp_path: Path, run: Callable[..., Result]):
    (tmp_path / "tiny").write_bytes(bytes((1 << 20) - 1))
    result = run("doctor", tmp_path / "tiny", "--prove")
    assert result.exit_code == 3
    assert "a proof needs a file of at least 1048576" in result.stderr
    (tmp_path / "empty").mkdir()
    assert run("doctor", tmp_path / "empty", "--prove").exit_code == 3
