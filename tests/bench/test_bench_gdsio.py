"""gdsio's job files and result lines, against the examples that its guide prints."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import gdsio_jobs, gdsio_line, gdsio_run
from bench.config import BenchConfig, BenchConfigError, BenchError, StorageConfig, TransferConfig
from bench.gdsio_line import Result
from gdsstream import machine
from gdsstream.machine.numa import NumaNode

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

RANDOM = """\
[global]
name=nfs_random_read
#0,1,2,3,4,5
xfer_type=0
#IO type, rw=read, rw=write, rw=randread, rw=randwrite
rw=randread
#block size, for variable block size can specify range e.g. bs=1M:4M:1M, (1M : start block size, ...)
bs=4k
#file-size
size=500M
#secs
runtime=120
[job1]
#numa node
numa_node=0
#gpu device index (check nvidia-smi)
gpu_dev_id=0
num_threads=16
directory=/mnt/nfs/ib0/data/0/gds_dir
[job2]
numa_node=0
gpu_dev_id=2
num_threads=16
directory=/mnt/nfs/ib1/data/0/gds_dir
"""
LARGE = """\
[global]
name=nfs_large_read
xfer_type=0
rw=read
bs=1M
size=1G
runtime=120
do_verify=0
[job1]
numa_node=0
gpu_dev_id=0
num_threads=8
directory=/mnt/nfs/ib0/data/0/gds_dir
[job15]
numa_node=1
gpu_dev_id=14
num_threads=8
directory=/mnt/nfs/ib9/data/1/gds_dir
"""

# The lines of the guide, in the order of its pages, and what they say.
LINES = [
    (
        Result("READ", "GPUD", 8, 1, 818796544 * KIB, 4096000 * KIB, 1024 * KIB, 1197.370995, 799606, 119.679102),
        "IoType: READ XferType: GPUD Threads: 8 DataSetSize: 818796544/4096000(KiB) IOSize: 1024(KiB) Throughput: "
        "6.524658 GiB/sec, Avg_Latency: 1197.370995 usecs ops: 799606 total_time 119.679102 secs",
    ),
    (
        Result("RANDREAD", "GPUD", 4, 1, 11736528 * KIB, 4194304 * KIB, 4 * KIB, 163.478958, 2934132, 119.917332),
        "IoType: RANDREAD XferType: GPUD Threads: 4 DataSetSize: 11736528/4194304(KiB) IOSize: 4(KiB) Throughput: "
        "0.093338 GiB/sec, Avg_Latency: 163.478958 usecs ops: 2934132 total_time 119.917332 secs",
    ),
    (
        Result("RANDWRITE", "GPUD", 32, 1, 81017740 * KIB, 16384000 * KIB, 4 * KIB, 189.166333, 20254435, 119.732906),
        "IoType: RANDWRITE XferType: GPUD Threads: 32 DataSetSize: 81017740/16384000(KiB) IOSize: 4(KiB) Throughput: "
        "0.645307 GiB/sec, Avg_Latency: 189.166333 usecs ops: 20254435 total_time 119.732906 secs",
    ),
    (
        Result("READ", "GPUD", 64, 1, 1608664064 * KIB, 67108864 * KIB, MIB, 4896.861494, 1570961, 120.200944),
        "IoType: READ XferType: GPUD Threads: 64 DataSetSize: 1608664064/67108864(KiB) IOSize: 1024(KiB) Throughput: "
        "12.763141 GiB/sec, Avg_Latency: 4896.861494 usecs ops: 1570961 total_time 120.200944 secs",
    ),
]


@pytest.mark.parametrize(("result", "line"), LINES)
def test_a_line_is_the_one_that_the_guide_prints(result: Result, line: str) -> None:
    assert gdsio_line.text(result) == line


def test_batches_have_a_depth_and_what_nobody_can_tell_is_not_invented() -> None:
    batch = Result("READ", "GPU_BATCH", 1, 8, GIB, GIB, 16 * MIB, None, 64, 1.0)
    assert gdsio_line.text(batch) == (
        "IoType: READ XferType: GPU_BATCH Threads: 1 IoDepth: 8 DataSetSize: 1048576/1048576(KiB) IOSize: 16384(KiB) "
        "Throughput: 1.000000 GiB/sec, Avg_Latency: n/a ops: 64 total_time 1.000000 secs"
    )


def test_the_guides_job_files_are_read() -> None:
    first, second = gdsio_jobs.parse(RANDOM, "nfs_rr.gdsio")
    assert (first.name, first.rw, first.io_bytes, first.size) == ("job1", "randread", 4 * KIB, 500 * MIB)
    assert (first.runtime, first.xfer_type, first.num_threads, first.gpu_dev_id) == (120, 0, 16, 0)
    assert first.directory == "/mnt/nfs/ib0/data/0/gds_dir"
    assert (second.gpu_dev_id, second.directory) == (2, "/mnt/nfs/ib1/data/0/gds_dir")
    assert (first.numa_node, first.not_applied) == (0, {})
    large = gdsio_jobs.parse(LARGE, "nfs_sr.gdsio")
    assert [(job.rw, job.io_bytes, job.size, job.do_verify) for job in large] == [("read", MIB, GIB, False)] * 2
    assert [job.name for job in large] == ["job1", "job15"]


def test_a_jobs_own_keys_go_before_the_global_ones() -> None:
    text = RANDOM.replace("[job2]", "[job2]\nrw=write\nbs=1M:4M:1M\nskip_bufregister=1\nstart_offset=4k\nrandom_seed=7")
    first, second = gdsio_jobs.parse(text, "x")
    assert (first.rw, first.io_range, first.skip_bufregister) == ("randread", None, False)
    assert (second.rw, second.io_bytes, second.io_range) == ("write", 4 * MIB, (MIB, 4 * MIB, MIB))
    assert (second.skip_bufregister, second.start_offset, second.random_seed) == (True, 4096, 7)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("bs=4k", "hs=4k", r"a\.gdsio:8: unknown key 'hs'; did you mean 'bs'\?"),
        ("[job1]", "[jb1]", r"a\.gdsio:13: unknown section \[jb1\]; did you mean 'job1'\?"),
        ("[job2]", "[job1]", r"a\.gdsio:20: section \[job1\] comes twice"),
        ("bs=4k", "bs=4k\nbs=8k", r"a\.gdsio:9: 'bs' comes twice in its section, first in line 8"),
        (
            "\nrw=randread\n",
            "\nrw=ranread\n",
            r"a\.gdsio:6: rw=ranread: .*; did you mean 'randread'\?",
        ),
        ("xfer_type=0", "xfer_type=8", r"a\.gdsio:4: xfer_type=8: it has to be a whole number, 0 to 7"),
        ("bs=4k", "bs=4q", r"a\.gdsio:8: bs=4q: it has to be a size, such as 4k, 1M or 1G"),
        ("bs=4k", "bs=4M:1M:1M", r"a\.gdsio:8: bs=4M:1M:1M: .*least:most:step"),
        ("size=500M", "size=1k", r"a\.gdsio:10: size=1k is less than an io of bs=4k"),
        ("size=500M", "", r"a\.gdsio:13: \[job1\] has no 'size'; add size=1G"),
        ("num_threads=16", "num_threads=0", r"a\.gdsio:18: num_threads=0: .*at least 1"),
        ("directory=/mnt/nfs/ib0/data/0/gds_dir", "", r"a\.gdsio:13: \[job1\] has no 'directory'"),
        ("runtime=120", "runtime", r"a\.gdsio:12: 'runtime' is neither a section such as \[job1\] nor key=value"),
        ("[global]\n", "", r"a\.gdsio:1: 'name' stands before the first section"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_line(old: str, new: str, message: str) -> None:
    text = RANDOM.replace(old, new, 1)
    assert text != RANDOM
    with pytest.raises(BenchConfigError, match=message):
        gdsio_jobs.parse(text, "a.gdsio")


def test_a_file_without_jobs_is_refused() -> None:
    with pytest.raises(BenchConfigError, match=r"a\.gdsio: there is no job; add a section \[job1\]"):
        gdsio_jobs.parse("[global]\nrw=read\n", "a.gdsio")


def settings(path: Path) -> BenchConfig:
    scenario = TransferConfig("gdsio", "transfer", rounds=3, depth=[4], job_file=str(path))
    return BenchConfig(scenario, StorageConfig(), loaders={"storage_cpu": {"kind": "transfer_posix"}})


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one NUMA node of the cores that this process has, and one of others."""
    own = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    found = [NumaNode(0, own, 1, None, {}), NumaNode(1, "8000-8001", 2, None, {})]
    monkeypatch.setattr(machine, "probe", lambda: SimpleNamespace(nodes=found))


@pytest.mark.usefixtures("nodes")
def test_each_job_becomes_a_run_with_its_gpu_and_its_cores(tmp_path: Path) -> None:
    path = tmp_path / "a.gdsio"
    path.write_text(
        RANDOM + "[job3]\nxfer_type=6\nnum_threads=200\nenable_nvlinks=1\ndirectory=/mnt/nfs/ib1/data/0/gds_dir\n"
    )
    said: list[str] = []
    one, two, three = gdsio_run.jobs(settings(path), said.append)
    assert [note.partition(" (")[0] for note in said] == ["enable_nvlinks=1"]
    assert [(job.name, job.gpu) for job in (one, two, three)] == [("job1", 0), ("job2", 2), ("job3", 0)]
    assert (one.cpus, three.cpus) == (sorted(os.sched_getaffinity(0)), None)
    run = one.settings
    assert run.storage.dir == "/mnt/nfs/ib0/data/0/gds_dir"
    assert (run.storage.files, run.storage.file_bytes) == (16, 500 * MIB)
    assert isinstance(run.scenario, TransferConfig)
    assert (run.scenario.ops, run.scenario.io_bytes, run.scenario.verify) == (["randread"], [4096], False)
    assert run.scenario.sample_seconds == pytest.approx(40)
    assert (run.loaders["job1"]["kind"], run.loaders["job1"]["threads"], run.loaders["job1"]["depth"]) == (
        "transfer_kvikio",
        16,
        1,
    )
    # Threads of a batch job are ios in flight, and cuFile takes 128.
    batch = three.settings.loaders["job3"]
    assert [batch[key] for key in ("kind", "threads", "depth")] == ["transfer_cufile_batch", 1, 128]


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize(
    ("node", "message"),
    [
        (7, r"\[job1\] numa_node=7: this machine has node 0, 1"),
        (1, r"\[job1\] numa_node=1: no core of it \(8000-8001\)"),
    ],
)
def test_a_numa_node_that_cannot_be_used_is_refused(tmp_path: Path, node: int, message: str) -> None:
    path = tmp_path / "a.gdsio"
    path.write_text(RANDOM.replace("numa_node=0", f"numa_node={node}", 1))
    with pytest.raises(BenchConfigError, match=message):
        gdsio_run.jobs(settings(path), pytest.fail)


def test_settings_without_a_job_file_have_no_jobs() -> None:
    assert gdsio_run.jobs(BenchConfig(TransferConfig("transfer", "transfer"), loaders={"x": {}}), pytest.fail) == []


def test_jobs_in_one_process_are_refused(tmp_path: Path) -> None:
    given = dataclasses.replace(settings(tmp_path / "a.gdsio"), isolate=False)
    with pytest.raises(BenchConfigError, match="'isolate' is False"):
        gdsio_run.jobs(given, pytest.fail)


def test_a_job_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchConfigError, match=r"'scenario\.job_file': .*no\.gdsio cannot be read"):
        gdsio_run.jobs(settings(tmp_path / "no.gdsio"), pytest.fail)


def test_a_line_of_something_else_is_refused() -> None:
    from record_rows import row

    with pytest.raises(BenchError, match="measured rows of verb 'transfer'"):
        gdsio_line.of(row("pread", [1.0]))
