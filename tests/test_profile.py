"""Profiles: kept by machine, mount and device; picked up below argument and environment; ignored where not ours."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gdsstream
from gdsstream import load, notices
from gdsstream.config import StreamConfig
from gdsstream.engine import merge
from gdsstream.errors import ConfigError, WriteError
from gdsstream.profile import TUNED, Here, Profile, find_profile, here, profiles_folder, store_profile, tuned_knobs

CPU = torch.device("cpu")
KIB = 1024

# Every knob of a profile: its value there, how the environment spells another, what that is, and an argument.
KNOBS: dict[str, tuple[Any, str, Any, Any]] = {
    "backend": ("staged", "traditional", "traditional", "mapped"),
    "reader": ("pread", "io_uring", "io_uring", "pread"),
    "direct_io": (False, "1", True, False),
    "chunk_size": (128 * KIB, "256KiB", 256 * KIB, 512 * KIB),
    "io_depth": (7, "8", 8, 9),
    "num_threads": (3, "4", 4, 5),
    "direct_threads": (2, "6", 6, 7),
    "staging_bytes": (48 << 20, "64MiB", 64 << 20, 80 << 20),
}


@pytest.fixture(autouse=True)
def _own_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(notices, "_said", set())


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(8192))
    return path


def keep(path: Path, where: Callable[[Here], Here] = lambda now: now, **knobs: Any) -> Path:
    """Store a profile for a path, moved elsewhere by `where`."""
    now = here(path, CPU)
    assert now is not None
    return store_profile(Profile(where(now), knobs, 1.0, 1.5, 1.5))


def test_the_table_above_has_every_knob():
    assert KNOBS.keys() == set(TUNED)


@pytest.mark.parametrize("name", KNOBS)
def test_argument_environment_profile_built_in(name: str, data: Path, monkeypatch: pytest.MonkeyPatch):
    tuned, text, from_environment, argument = KNOBS[name]

    def value(**knobs: Any) -> Any:
        return getattr(merge(None, knobs, path=data, device=CPU), name)

    assert value() == getattr(StreamConfig(), name)
    keep(data, **{name: tuned})
    assert value() == tuned
    monkeypatch.setenv(f"GDSSTREAM_{name.upper()}", text)
    assert value() == from_environment
    assert value(**{name: argument}) == argument
    assert value(**{name: None}) == from_environment


def test_auto_leaves_the_decision_to_the_profile(data: Path, monkeypatch: pytest.MonkeyPatch):
    keep(data, backend="cufile", chunk_size=128 * KIB)
    monkeypatch.setenv("GDSSTREAM_CHUNK_SIZE", "1MiB")
    found = merge(None, {"backend": "auto", "chunk_size": "auto"}, path=data, device=CPU)
    assert (found.backend, found.chunk_size) == ("cufile", 128 * KIB)


def test_a_whole_config_leaves_the_profile_out(data: Path):
    keep(data, num_threads=3)
    assert merge(StreamConfig(io_depth=5), {}, path=data, device=CPU) == StreamConfig(io_depth=5)


def test_what_was_tuned_for_one_route_is_not_for_another(data: Path):
    def given(**knobs: Any) -> StreamConfig:
        return merge(None, knobs, path=data, device=CPU)

    keep(data, backend="cufile", num_threads=32, chunk_size=1 << 20)
    assert given(backend="staged") == StreamConfig(backend="staged")
    assert given(backend="cufile").num_threads == 32
    assert given(host_cache_bytes=10**9) == StreamConfig(host_cache_bytes=10**9)
    keep(data, backend="staged", num_threads=3)
    assert given(backend="cufile") == StreamConfig(backend="cufile")
    assert given(backend="mapped") == StreamConfig(backend="mapped", num_threads=3)
    # "auto" leads to the host tier; "staged" would not.
    assert given(host_cache_bytes=10**9) == StreamConfig(host_cache_bytes=10**9, num_threads=3)


def test_a_profile_gives_way_to_a_size_that_does_not_go_with_it(data: Path, caplog: pytest.LogCaptureFixture):
    keep(data, chunk_size=8 << 20, num_threads=3)
    found = merge(None, {"staging_bytes": 4 << 20}, path=data, device=CPU)
    assert found == StreamConfig(staging_bytes=4 << 20)
    assert "are left out: staging_bytes is 4194304" in caplog.text
    with pytest.raises(ConfigError, match="chunk_size"):
        merge(None, {"chunk_size": 5}, path=data, device=CPU)


def test_the_library_reads_with_it(checkpoint: Path, no_leaks: None):
    name = "layer.7.weight"
    expected = gdsstream.load_file(checkpoint)[name]
    keep(checkpoint, backend="staged", direct_io=False, num_threads=3, chunk_size=64 * KIB)
    assert torch.equal(gdsstream.load_file(checkpoint)[name], expected)
    gdsstream.read_many(checkpoint, [0], [0], 16)
    with gdsstream.safe_open(checkpoint) as handle:
        assert torch.equal(handle.get_tensor(name), expected)
    gdsstream.load_file(checkpoint, num_threads=2)
    threads = {config.num_threads: engine.stats()["transfers"] for (_, config), engine in load._engines.items()}
    assert set(threads) == {None, 3, 2}, "one engine before, one for the profile, one for the argument"
    assert threads[3] == 3, "load_file, read_many and the handle"


def test_batches_and_verification_go_by_it(tmp_path: Path):
    import numpy as np
    from layer_files import write_layers

    from gdsstream.pack import pack_checkpoint
    from gdsstream.verify import verify_checkpoint

    np.save(tmp_path / "records.npy", np.arange(64, dtype=np.int64).reshape(16, 4))
    write_layers(tmp_path / "source", 2)
    keep(tmp_path / "records.npy", backend="staged", direct_io=False, num_threads=3)
    with gdsstream.ShardLoader(tmp_path / "records.npy", 4, device="cpu") as loader:
        assert len(list(loader)) == 4
        assert "x3" in loader.route
    pack_checkpoint(tmp_path / "source", tmp_path / "packed")
    assert "x3" in verify_checkpoint(tmp_path / "packed", device="cpu").route


def test_threads_of_the_direct_lane_are_its_own():
    from gdsstream.engine.lanes import make_lanes

    def threads(**knobs: Any) -> list[str]:
        _, names = make_lanes(StreamConfig(**knobs), [None] * 3, gpu=False)
        return [name.split(" x")[1].split(" ")[0] for name in names[:2]]

    built_in = threads()
    assert threads(direct_threads=7) == [built_in[0], "7"], "what a disk likes leaves files that are cached alone"
    assert threads(num_threads=3) == ["3", "3"]
    assert threads(num_threads=3, direct_threads=5) == ["3", "5"]


def test_layers_stream_with_it(make_checkpoint: Callable[..., Path]):
    from support import random_raw

    tensors = {f"layers.{i}.w": random_raw("F32", (16, 16), seed=i) for i in range(3)}
    path = make_checkpoint(tensors=tensors)
    keep(path, backend="staged", direct_io=False, num_threads=3)
    with gdsstream.LayerStreamer(path, device="cpu", num_slots=2) as streamer:
        assert streamer._sources.engine.config.num_threads == 3  # type: ignore[attr-defined]


def test_what_only_the_native_engine_can_do_goes_on(checkpoint: Path):
    keep(checkpoint, backend="cufile", num_threads=32)
    assert gdsstream.read_many(checkpoint, [0], [0], 16).shape == (1, 16)
    assert (
        gdsstream.load_file(checkpoint, copy=False).keys() == gdsstream.load_file(checkpoint, backend="staged").keys()
    )


# --- whose it is ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [{"host": "elsewhere"}, {"cores": 4711}, {"gpu": "NVIDIA H200"}])
def test_one_of_another_machine_is_ignored_with_one_warning(
    other: dict[str, Any], data: Path, caplog: pytest.LogCaptureFixture
):
    keep(data, lambda now: replace(now, **other), num_threads=3)
    assert [tuned_knobs(data, CPU) for _ in range(3)] == [{}, {}, {}]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "is ignored: it was tuned on" in record.message
    assert str(next(iter(other.values()))) in record.message
    assert "run gdsstream tune" in record.message


def test_machines_that_share_a_home_have_one_each(data: Path, caplog: pytest.LogCaptureFixture):
    keep(data, lambda now: replace(now, host="elsewhere"), num_threads=3)
    keep(data, num_threads=5)
    assert tuned_knobs(data, CPU) == {"num_threads": 5}
    assert caplog.records == []
    assert len(list(profiles_folder().iterdir())) == 2


@pytest.mark.parametrize("other", [{"mount_point": "/other"}, {"source": "/dev/other"}, {"device": "0000:3b:00.0"}])
def test_one_of_another_place_is_none(other: dict[str, str], data: Path, caplog: pytest.LogCaptureFixture):
    keep(data, lambda now: replace(now, **other), num_threads=3)
    assert tuned_knobs(data, CPU) == {}
    assert caplog.records == []


def test_a_newer_one_takes_the_older_ones_place(data: Path):
    first = keep(data, num_threads=3)
    assert tuned_knobs(data, CPU) == {"num_threads": 3}
    assert keep(data) == first
    found = find_profile(data, CPU)
    assert found is not None
    assert (found.knobs, found.gain) == ({}, 1.5)
    assert [one.name for one in profiles_folder().iterdir()] == [first.name]


def test_names_that_read_alike_are_two_files(data: Path):
    names = {keep(data, lambda now, p=point: replace(now, mount_point=p)).name for point in ("/a-b", "/a/b", "/a.b")}
    assert len(names) == 3


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda found: found["knobs"].update(chunk_size=5), "chunk_size is 5"),
        (lambda found: found["knobs"].update(faults="eio@1"), "faults: not a setting of profiles"),
        (lambda found: found.update(version=2), "version 2, not 1"),
        (lambda found: found["here"].update(host=3), "host is 3"),
        (lambda found: found["here"].pop("device"), "device"),
        (lambda found: found.pop("gain"), "gain"),
    ],
)
def test_what_is_no_profile_is_named_and_ignored(
    change: Callable[[dict[str, Any]], Any], why: str, data: Path, caplog: pytest.LogCaptureFixture
):
    path = keep(data, num_threads=3)
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    assert [tuned_knobs(data, CPU) for _ in range(2)] == [{}, {}]
    (record,) = caplog.records
    assert record.message.startswith(f"{path} is ignored: it is no profile")
    assert why in record.message


def test_half_a_file_does_not_hide_a_whole_one(data: Path, caplog: pytest.LogCaptureFixture):
    path = keep(data, num_threads=3)
    (path.parent / "a-half.json").write_text('{"version": 1, "here"')
    assert tuned_knobs(data, CPU) == {"num_threads": 3}
    assert "a-half.json is ignored" in caplog.text


def test_profiles_can_be_left_out(data: Path, monkeypatch: pytest.MonkeyPatch):
    keep(data, num_threads=3)
    monkeypatch.setenv("GDSSTREAM_PROFILE", "0")
    assert merge(None, {}, path=data, device=CPU) == StreamConfig()
    monkeypatch.setenv("GDSSTREAM_PROFILE", "perhaps")
    with pytest.raises(ConfigError, match="GDSSTREAM_PROFILE='perhaps'"):
        merge(None, {}, path=data, device=CPU)


def test_paths_that_lead_nowhere_have_none(data: Path, tmp_path: Path):
    keep(data, num_threads=3)
    assert tuned_knobs(tmp_path / "missing", CPU) == {}
    assert tuned_knobs([], CPU) == {}
    assert tuned_knobs([data, tmp_path / "missing"], CPU) == {"num_threads": 3}


def test_where_it_cannot_be_kept(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    with pytest.raises(WriteError, match="set XDG_CONFIG_HOME to a writable folder"):
        keep(data)
    assert tuned_knobs(data, CPU) == {}
