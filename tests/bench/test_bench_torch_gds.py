"""The loader of torch.cuda.gds, whose calls are played by a file here: what it asks for, and what it says otherwise."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from record_rows import row
from rich.console import Console
from test_bench_config import composed

from bench import config, files, loaders, report, scenarios
from bench.loaders import torch_gds
from bench.loaders.base import Job, Unavailable
from bench.loaders.torch_gds import TorchGds
from bench.scenarios.base import VerificationError

READ = config.ScenarioConfig("load_model", "read")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[files.BenchFiles]:
    with files.written(files.Plan(tmp_path_factory.mktemp("bench"), 2, 2 << 20, "")) as found:
        yield found


class Gds:
    """torch.cuda.gds over plain reads into CPU memory."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.calls: list[str] = []
        gds = self

        class GdsFile:
            def __init__(self, filename: str, flags: int) -> None:
                assert flags == os.O_RDONLY
                if gds.fault == "handle":
                    raise RuntimeError("cuFileHandleRegister failed: 5030\nand more")
                self.filename = filename

            def load_storage(self, storage: Any, offset: int = 0) -> None:
                gds.calls.append("load")
                data = np.fromfile(self.filename, dtype=np.uint8)[offset : offset + storage.nbytes()]
                if gds.fault == "short":
                    data = data[:-3]
                if gds.fault == "zeros":
                    data = np.zeros_like(data)
                torch.tensor([], dtype=torch.uint8).set_(storage)[: len(data)] = torch.from_numpy(data)

        self.GdsFile = GdsFile

    def gds_register_buffer(self, storage: Any) -> None:
        assert storage.nbytes()
        self.calls.append("register")

    def gds_deregister_buffer(self, storage: Any) -> None:
        assert storage.nbytes()
        self.calls.append("deregister")


def prepared(
    written: files.BenchFiles, monkeypatch: pytest.MonkeyPatch, fault: str = "", *, register: bool = False
) -> tuple[TorchGds, Gds, Any]:
    gds, loader, work = Gds(fault), TorchGds(register), scenarios.build(READ, written, "cpu")
    monkeypatch.setattr(torch_gds, "need", lambda module, package: gds)
    loader.prepare(work.job)
    return loader, gds, work


@pytest.mark.parametrize("register", [False, True])
def test_every_byte_arrives(written: files.BenchFiles, monkeypatch: pytest.MonkeyPatch, register: bool) -> None:
    loader, gds, work = prepared(written, monkeypatch, register=register)
    gds.calls.clear()
    work.verify(loader.load())
    once = ["register", "load", "deregister"] if register else ["load"]
    assert gds.calls == 2 * once


def test_a_short_read_is_found(written: files.BenchFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    loader, gds, work = prepared(written, monkeypatch)
    gds.fault = "short"
    with pytest.raises(VerificationError, match="differs from byte"):
        work.verify(loader.load())


@pytest.mark.parametrize(
    ("fault", "reason"), [("handle", "cuFileHandleRegister failed: 5030"), ("zeros", "other bytes")]
)
def test_what_does_not_work_is_the_reason(
    written: files.BenchFiles, monkeypatch: pytest.MonkeyPatch, fault: str, reason: str
) -> None:
    with pytest.raises(Unavailable, match=reason) as caught:
        prepared(written, monkeypatch, fault)
    assert "\n" not in str(caught.value)


def test_a_torch_without_cufile_says_so(written: files.BenchFiles) -> None:
    if torch.cuda.is_available():
        pytest.skip("this torch may have cuFile")
    with pytest.raises(Unavailable, match="is not supported on this platform"):
        TorchGds().prepare(Job(written.paths, written.data_bytes, "cpu"))


def test_the_cpu_is_refused(written: files.BenchFiles) -> None:
    with pytest.raises(Unavailable, match="CUDA devices only"):
        TorchGds().check(Job(written.paths, written.data_bytes, "cpu"))


def test_files_that_refuse_o_direct_are_the_reason(
    written: files.BenchFiles, monkeypatch: pytest.MonkeyPatch, no_direct: None
) -> None:
    with pytest.raises(Unavailable, match=r"needs O_DIRECT, which .* refuses: Invalid argument"):
        prepared(written, monkeypatch)


@pytest.mark.parametrize("there", [False, True])
def test_the_route_never_claims_gds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(torch_gds, "_DRIVER", tmp_path if there else tmp_path / "no")
    route = str(TorchGds().route())
    assert ("only its own counters prove" in route) is there
    assert ("not shown to be GDS" in route) is not there


@pytest.mark.parametrize("experiment", ["peers", "disk_cold"])
def test_it_is_among_the_peers(experiment: str) -> None:
    with composed(f"experiment={experiment}") as plain:
        found = config.build(plain).loaders
    kinds = {type(loaders.build(name, options)) for name, options in found.items()}
    assert TorchGds in kinds


def test_first_load_start_up_and_steady_are_columns_of_their_own() -> None:
    measured = row("torch_gds", [10.0, 10.0, 10.0], kind="torch_gds", first_s=0.777, startup_s=0.333)
    text = io.StringIO()
    report.show([measured], Console(file=text, width=120))
    printed = text.getvalue()
    titles, cells = (printed.splitlines()[number] for number in (1, 3))
    assert [title for title in ("GB/s", "first", "start-up") if title in titles] == ["GB/s", "first", "start-up"]
    assert ("10.00" in cells, "0.777" in cells, "0.333" in cells) == (True, True, True)
    content = report.content([measured])
    by_title = {column.title: column.cell(measured) for column in content.columns}
    assert (by_title["GB/s"], by_title["first"], by_title["start-up"]) == ("10.00", "0.777", "0.333")
