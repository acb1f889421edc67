"""Places that a run cannot or can hardly use: refused before anything is written, or named for what they are."""

from __future__ import annotations

import errno
import glob
import io
import mmap
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from record_rows import row
from rich.console import Console
from runs import running
from test_bench_files import on_disk  # noqa: F401

from bench import cache, ceilings, config, environment, files, report, report_md, run, scenarios
from bench.config import BenchError
from bench.scenarios.base import Workload

MIB = 1 << 20
READ = config.ScenarioConfig("load_model", "read")
GATHER = config.ScenarioConfig("random_read", "gather", records=200)


def settings(directory: Path, **changes: Any) -> config.BenchConfig:
    given: dict[str, Any] = {
        "scenario": config.ScenarioConfig("load_model", "read", rounds=3),
        "storage": config.StorageConfig(str(directory), 2, MIB),
        "loaders": {"pread": {"kind": "pread"}},
        "device": "cpu",
    }
    return config.BenchConfig(**(given | changes))


def measure(given: config.BenchConfig, output: Path) -> list[Any]:
    return run.measure(given, output, Console(file=io.StringIO(), width=120))


# ---- directories that cannot be written in


def test_a_read_only_file_system_is_refused_by_trying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(BenchError, match=r"nothing can be written in .*: Read-only file system; choose another"):
        measure(settings(tmp_path), tmp_path / "out.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_without_permission_is_refused(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0o500)
    try:
        (closed / "x").mkdir()
    except PermissionError:
        with pytest.raises(BenchError, match=r"nothing can be written in .*: Permission denied"):
            measure(settings(closed), tmp_path / "out.jsonl")
    else:
        pytest.skip("this user may write everywhere")


def test_proc_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"nothing can be written in /proc|has room for 0\.00 GB"):
        measure(settings(Path("/proc")), tmp_path / "out.jsonl")


def test_what_a_scenario_cannot_write_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Workload:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(scenarios, "build", full)
    with pytest.raises(BenchError, match=r"the scenario's files cannot be written in .*: No space left on device"):
        measure(settings(tmp_path), tmp_path / "out.jsonl")
    assert list(tmp_path.iterdir()) == []


# ---- network file systems

MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:21 / /proc rw,nosuid shared:2 - proc proc rw
{number} 22 0:77 / {place} rw,relatime shared:40 - {kind} {source} rw,vers=4.2
"""


def mounted(directory: Path, kind: str, source: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str] | None:
    place = str(directory.resolve()).replace(" ", "\\040")
    text = MOUNTS.format(number=90, place=place, kind=kind, source=source)
    read = environment._read
    monkeypatch.setattr(environment, "_read", lambda path: text if path == "/proc/self/mountinfo" else read(path))
    return environment.filesystem(directory)


@pytest.mark.parametrize(
    ("kind", "source", "name"),
    [
        ("nfs4", "server:/export", "NFS"),
        ("nfs", "10.0.0.1:/export", "NFS"),
        ("lustre", "10.0.0.1@tcp:/scratch", "Lustre"),
        ("ceph", "mon1,mon2:/", "CephFS"),
        ("cifs", "//server/share", "SMB"),
        ("9p", "host0", "9P"),
        ("virtiofs", "host0", "virtiofs"),
        ("fuse.sshfs", "user@server:", "FUSE (sshfs)"),
        ("fuse.juicefs", "JuiceFS:x", "FUSE (juicefs)"),
    ],
)
def test_a_network_file_system_is_named_and_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, source: str, name: str
) -> None:
    directory = tmp_path / "with blank"
    directory.mkdir()
    found = mounted(directory, kind, source, monkeypatch)
    assert found == {"type": kind, "source": source, "mount": str(directory.resolve()), "network": name}
    if kind == "nfs4":
        rows = measure(settings(directory), tmp_path / "out.jsonl")
        assert [each.status for each in rows] == ["ok"]
        assert rows[0].env["filesystem"]["network"] == "NFS"


@pytest.mark.parametrize("kind", ["ext4", "xfs", "tmpfs", "overlay", "fuseblk", "fuse.fuse-overlayfs"])
def test_a_local_file_system_is_none_of_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    found = mounted(tmp_path, kind, "/dev/sda", monkeypatch)
    assert found is not None
    assert (found["type"], "network" in found) == (kind, False)


def test_reports_say_that_the_files_were_on_a_network(tmp_path: Path) -> None:
    place = {"type": "nfs4", "source": "server:/export", "mount": "/data", "network": "NFS"}
    near, far = row("pread", [1.0] * 3, kind="pread"), row("pread", [1.0] * 3, kind="pread")
    far.env = {**far.env, "filesystem": place}
    said = "The files are on NFS (server:/export): a cold cache is this machine's alone"
    assert any(note.startswith(said) for note in report.content([far]).notes)
    assert not any("cold cache is" in note for note in report.content([near]).notes)
    (tmp_path / "rows.jsonl").write_text(far.to_json() + "\n", encoding="utf-8")
    written = report_md.write([tmp_path / "rows.jsonl"], tmp_path / "report", plots=False).read_text(encoding="utf-8")
    assert said in written
    assert "nfs4 at /data (server:/export), NFS" in written


# ---- no O_DIRECT


@pytest.mark.usefixtures("no_direct")
@pytest.mark.parametrize(("scenario", "kind"), [(READ, "preadv_cold"), (GATHER, "pread_cold_records")])
def test_without_o_direct_a_cold_ceiling_says_so(tmp_path: Path, scenario: config.ScenarioConfig, kind: str) -> None:
    with files.written(files.Plan(tmp_path, 2, MIB, "")) as written:
        ceiling = ceilings.choose(scenarios.build(scenario, written, "cpu"), cold=True)
        assert ceiling.kind == kind
        assert ceiling.sample() > 0
        assert "through the page cache: O_DIRECT is refused here (Invalid argument)" in ceiling.describe()
        ceiling.close()


@pytest.mark.usefixtures("no_direct")
def test_without_o_direct_a_cold_run_has_rows(tmp_path: Path) -> None:
    given = settings(tmp_path, cache=config.CacheConfig("cold"))
    found = environment.filesystem(tmp_path)
    if found is None or found["type"] in ("tmpfs", "ramfs"):
        pytest.skip("memory cannot be cold")
    rows = measure(given, tmp_path / "out" / "rows.jsonl")
    assert rows[0].ceiling["kind"] == "preadv_cold"
    assert "refused" in rows[0].ceiling["detail"]


def test_a_file_that_takes_o_direct_is_not_said_to_refuse_it(on_disk: Path) -> None:  # noqa: F811
    path = on_disk / "x"
    path.write_bytes(b"x" * 8192)
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        assert cache.refuses_direct(str(path)) is not None
    else:
        assert cache.refuses_direct(str(path)) is None


# ---- a cache that cannot be emptied


def test_mapped_files_are_never_reported_as_cold(on_disk: Path) -> None:  # noqa: F811
    maps: list[mmap.mmap] = []
    build = scenarios.build

    def hold(scenario: config.ScenarioConfig, written: files.BenchFiles, device: str) -> Workload:
        """As if another process had them mapped."""
        for path in written.paths:
            with open(path, "rb") as file:
                maps.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
            assert sum(maps[-1][::4096]) > 0  # touches every page
        return build(scenario, written, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scenarios, "build", hold)
        rows = measure(settings(on_disk, cache=config.CacheConfig("cold")), on_disk / "rows.jsonl")
    for held in maps:
        held.close()
    assert (rows[0].status, rows[0].cold_verified, rows[0].gb_per_s) == ("failed", False, None)
    assert len(rows[0].sample_labels) == 3
    # The device moves fewer bytes as well, where it counts them.
    assert all("not_cold" in labels for labels in rows[0].sample_labels)
    assert "not_cold" in rows[0].reason


def test_where_nobody_can_look_it_is_neither_cold_nor_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x" * 5000)

    def blind(path: str) -> int:
        raise OSError(errno.ENODEV, "mmap for mincore failed")

    monkeypatch.setattr(cache, "resident_bytes", blind)
    assert cache.evict([str(path)]) == 5000
    assert cache.warm([str(path)]) == 5000


def test_other_failures_of_looking_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(b"x")

    def broken(path: str) -> int:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(cache, "resident_bytes", broken)
    with pytest.raises(OSError, match="I/O error"):
        cache.evict([str(tmp_path / "x")])


# ---- interrupts


def test_a_second_interrupt_does_not_leave_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove, calls = shutil.rmtree, []

    def impatient(path: Any, **more: Any) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise KeyboardInterrupt
        remove(path, **more)

    monkeypatch.setattr(shutil, "rmtree", impatient)
    with pytest.raises(KeyboardInterrupt), files.written(files.Plan(tmp_path, 1, MIB, "")):
        raise KeyboardInterrupt
    assert len(calls) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of `checkpoint` in the middle of its saves."""
    where = [f"hydra.run.dir={tmp_path}/hydra", f"storage.dir={tmp_path}", f"output={tmp_path}/rows.jsonl"]
    long = ["scenario.rounds=100000", "scenario.max_seconds=200", "loader=[safetensors_save,gdsstream_save_async]"]
    command = [sys.executable, "-m", "bench.run", "experiment=checkpoint_smoke", "device=cpu", *where, *long]
    with running(
        command,
        lambda: glob.glob(f"{tmp_path}/gdsstream-bench-*/checkpoint-8b/*/*.safetensors"),  # folders come and go
        "no checkpoint was written",
    ) as process:
        yield process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_save_leaves_no_files(
    tmp_path: Path, saving: subprocess.Popen[str], number: signal.Signals
) -> None:
    saving.send_signal(number)
    output, _ = saving.communicate(timeout=60)
    assert saving.returncode in (130, -signal.SIGINT), output
    assert list(tmp_path.glob("gdsstream-bench-*")) == []
    assert "interrupted" in output
