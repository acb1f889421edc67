"""How other processes see statistics: the files, who writes them, and who removes them."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from stats_support import COUNTING, example, until
from support import run_python, start_python

import gdsstream
from gdsstream import stats_files, stats_publisher
from gdsstream.stats import ProcessStats, process_stats
from gdsstream.stats_files import StatsFile, published, write_file


@pytest.fixture
def process(counting: Path, checkpoint: Path) -> Iterator[subprocess.Popen[str]]:
    """One that counts, and has read a checkpoint; it ends when its standard input is closed."""
    started = start_python(COUNTING, checkpoint, GDSSTREAM_STATS="3")
    assert started.stdout is not None
    assert started.stdout.readline() == "reading\n"
    yield started
    if started.poll() is None:
        started.kill()
    started.communicate(timeout=20)


def found(pid: int) -> list[StatsFile]:
    return [one for one in published(pid) if one.read() is not None]


def read_enough(pid: int) -> ProcessStats:
    seen: list[ProcessStats] = []

    def there() -> bool:
        seen[:] = [stats for one in published(pid) if (stats := one.read()) and stats.reads.bytes > 2 * 10**6]
        return bool(seen)

    until(there, "the process shows what it read")
    return seen[0]


def test_a_process_shows_its_counters_until_it_ends(process: subprocess.Popen[str], counting: Path):
    seen = read_enough(process.pid)
    assert (seen.pid, seen.level) == (process.pid, 3)
    assert "-c import select, sys, gdsstream from" in seen.command_line
    assert [one.engine for one in seen.engines] == ["staged"]
    folder = counting / "gdsstream"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.iterdir())
    assert [one.pid for one in published()] == [process.pid]
    process.communicate("\n", timeout=20)
    assert process.returncode == 0
    assert list(folder.iterdir()) == []
    assert not stats_files.running(process.pid)


def test_the_file_is_renewed(process: subprocess.Popen[str]):
    first = read_enough(process.pid)
    until(lambda: read_enough(process.pid).taken_at > first.taken_at, "the file is written again")


def test_what_a_killed_process_leaves_is_removed(process: subprocess.Popen[str], counting: Path):
    read_enough(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait(20)
    left = list((counting / "gdsstream").iterdir())
    assert left
    left[0].with_name(left[0].name + ".tmp").write_text("{")
    assert published(process.pid) == []
    assert list((counting / "gdsstream").iterdir()) == []


def test_a_number_that_was_given_to_another_process_is_not_mistaken(counting: Path):
    folder = counting / "gdsstream"
    folder.mkdir(mode=0o700)
    own = stats_files.own_file()
    namespace, pid, start = own.stem.split("-")
    reused = folder / f"{namespace}-{pid}-{int(start) - 1}.json"
    for path in (own, reused):
        path.write_text(json.dumps(example(os.getpid()).as_dict()))
    assert [one.path for one in published(os.getpid())] == [own]
    assert not reused.exists()


def test_processes_of_other_containers_are_believed_while_they_write(counting: Path):
    folder = counting / "gdsstream"
    folder.mkdir(mode=0o700)
    other = folder / "1-77-5.json"
    other.write_text(json.dumps(example(77).as_dict()))
    assert [(one.pid, one.ours) for one in published(77)] == [(77, False)]
    silent = other.stat().st_mtime - 60
    os.utime(other, (silent, silent))
    assert published(77) == []
    assert other.exists(), "it may only be stopped"
    forgotten = silent - 2 * 24 * 3600
    os.utime(other, (forgotten, forgotten))
    assert published() == []
    assert not other.exists()


def test_other_files_in_the_folder_are_left_alone(counting: Path):
    folder = counting / "gdsstream"
    folder.mkdir(mode=0o700)
    for name in ("notes.txt", "1-2.json", "a-1-2.json"):
        (folder / name).write_text("mine")
    assert published() == []
    assert len(list(folder.iterdir())) == 3


def test_without_a_runtime_directory_it_is_in_shared_memory(
    counting: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert stats_files.own_file().parent.name == f"gdsstream-{os.getuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert stats_files.own_file().parent.name == f"gdsstream-{os.getuid()}"


def test_a_folder_that_others_may_write_to_is_not_used(
    counting: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture
):
    (counting / "gdsstream").mkdir()
    (counting / "gdsstream").chmod(0o777)
    with caplog.at_level(logging.WARNING), gdsstream.open_engine("staged", stats=1):
        until(lambda: "cannot be shown to other processes" in caplog.text, "the reason is logged")
        gdsstream.load_file(checkpoint, stats=1)
    assert "not a directory of this user's alone" in caplog.text
    assert process_stats().reads.bytes > 2 * 10**6
    assert list((counting / "gdsstream").iterdir()) == []


def test_a_reader_never_sees_half_a_file(counting: Path):
    path = stats_files.own_file()
    text = json.dumps(example(os.getpid()).as_dict())
    write_file(path, text)
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            write_file(path, text)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            assert found(os.getpid())[0].read() == example(os.getpid())
    finally:
        done.set()
        writer.join()


def test_a_forked_child_counts_for_itself(counting: Path, checkpoint: Path):
    code = """
import os, sys, time, gdsstream
from gdsstream.stats import process_stats
from gdsstream.stats_files import published
gdsstream.load_file(sys.argv[1])
def until(true):
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
until(lambda: [one.pid for one in published()] == [os.getpid()])
parent, mine = os.getpid(), process_stats().reads
sys.stdout.flush()
child = os.fork()
if child == 0:
    assert process_stats().level == 0
    gdsstream.load_file(sys.argv[1])
    assert process_stats().reads.bytes == mine.bytes and process_stats().pid == os.getpid() != parent
    until(lambda: {one.pid for one in published()} == {parent, os.getpid()})
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert process_stats().reads == mine
assert [one.pid for one in published()] == [parent]
"""
    run_python(code, checkpoint, GDSSTREAM_STATS="3")
    assert list((counting / "gdsstream").iterdir()) == []


def test_the_thread_outlives_what_goes_wrong_in_it(counting: Path, caplog: pytest.LogCaptureFixture):
    calls = 0

    def snapshot() -> ProcessStats:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise RuntimeError("for a test")
        return process_stats()

    publisher = stats_publisher.Publisher(snapshot, interval_s=0.01)
    publisher.start()
    until(lambda: bool(found(os.getpid())), "the third try is written")
    publisher.stop()
    assert caplog.text.count("cannot be shown to other processes: for a test") == 1
    assert published(os.getpid()) == []


def test_the_interpreter_exits_at_once(counting: Path, checkpoint: Path):
    code = "import sys, gdsstream; gdsstream.load_file(sys.argv[1]); import time; print(time.time())"
    out, err = run_python(code, checkpoint, GDSSTREAM_STATS="2")
    assert err == ""
    done = subprocess.run([sys.executable, "-c", "import time; print(time.time())"], capture_output=True, text=True)
    assert float(done.stdout) - float(out) < 5
