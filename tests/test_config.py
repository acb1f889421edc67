"""StreamConfig: who wins over whom, and which values are refused."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdsstream.config import DEFAULT_CHUNK_BYTES, StreamConfig, parse_bytes
from gdsstream.engine import merge, open_engine
from gdsstream.errors import ConfigError

# Every knob: a value, how the environment spells another one, and what that is.
KNOBS: dict[str, tuple[Any, str, Any]] = {
    "backend": ("mapped", "staged", "staged"),
    "reader": ("pread", "io_uring", "io_uring"),
    "direct_io": (True, "0", False),
    "chunk_size": (1 << 20, "2MiB", 2 << 20),
    "io_depth": (3, "7", 7),
    "num_threads": (5, "9", 9),
    "direct_threads": (2, "6", 6),
    "staging_bytes": (64 << 20, "512MiB", 512 << 20),
    "host_cache_bytes": (10**9, "2GB", 2 * 10**9),
    "numa": (True, "off", False),
    "compat_mode": ("on", "off", "off"),
    "bounce_buffer_bytes": (1 << 20, "4ki", 4096),
    "register_buffers": (False, "yes", True),
    "stats": (1, "3", 3),
    "faults": ("eio@1", "short@2", "short@2"),
}


def test_the_table_above_has_every_knob():
    assert KNOBS.keys() == {field.name for field in fields(StreamConfig)}


@pytest.mark.parametrize("name", KNOBS)
def test_argument_goes_before_environment_before_default(name: str):
    argument, text, value = KNOBS[name]
    environ = {f"GDSSTREAM_{name.upper()}": text, "HOME": "/root"}
    assert getattr(StreamConfig.resolve({}, environ={}), name) == getattr(StreamConfig(), name)
    assert getattr(StreamConfig.resolve({}, environ=environ), name) == value
    assert getattr(StreamConfig.resolve({name: argument}, environ=environ), name) == argument
    assert getattr(StreamConfig.resolve({name: None}, environ=environ), name) == value


def test_the_process_environment_counts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GDSSTREAM_CHUNK_SIZE", "128KiB")
    assert StreamConfig.resolve().chunk_size == 128 * 1024
    with open_engine("staged", num_threads=1) as engine:
        assert engine.config.chunk_size == 128 * 1024  # type: ignore[attr-defined]


def test_a_whole_config_leaves_the_environment_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GDSSTREAM_IO_DEPTH", "9")
    config = StreamConfig(chunk_size=1 << 20)
    merged = merge(config, {"num_threads": 2, "io_depth": None})
    assert merged == StreamConfig(chunk_size=1 << 20, num_threads=2)
    assert merge(None, {"num_threads": 2}) == StreamConfig(num_threads=2, io_depth=9)


def test_what_is_not_a_knob_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match="'chunksize' is no knob; did you mean 'chunk_size'"):
        StreamConfig.resolve({"chunksize": 1 << 20}, environ={})
    with pytest.raises(ConfigError, match="GDSSTREAM_IO_DEPHT is no knob; did you mean 'io_depth'"):
        StreamConfig.resolve({}, environ={"GDSSTREAM_IO_DEPHT": "3"})
    with pytest.raises(ConfigError, match=r"'xyzzy' is no knob$"):
        StreamConfig.resolve({"xyzzy": None}, environ={})
    with pytest.raises(ConfigError, match="'num_thread' is no knob"):
        open_engine("staged", num_thread=2)
    assert StreamConfig.resolve({}, environ={"GDSSTREAM_LIBCUDA": "/x/libfake.so", "GDS": "1"}) == StreamConfig()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("backend", "stagd"),
        ("backend", "auto "),
        ("backend", 3),
        ("reader", "uring"),
        ("compat_mode", "maybe"),
        ("direct_io", "yes"),
        ("direct_io", 2),
        ("chunk_size", 4096),
        ("chunk_size", 65537),
        ("chunk_size", 65536 + 2048),
        ("chunk_size", 2**30 + 4096),
        ("chunk_size", "4MiB"),
        ("chunk_size", 4e6),
        ("chunk_size", True),
        ("io_depth", 0),
        ("io_depth", 4097),
        ("io_depth", -1),
        ("num_threads", 0),
        ("num_threads", 1025),
        ("direct_threads", 0),
        ("num_threads", 1.0),
        ("staging_bytes", 0),
        ("staging_bytes", DEFAULT_CHUNK_BYTES - 1),
        ("staging_bytes", 2**40 + 1),
        ("stats", -1),
        ("stats", 4),
        ("stats", True),
        ("host_cache_bytes", -1),
        ("host_cache_bytes", 2**50 + 1),
        ("numa", 1),
        ("numa", "on"),
        ("register_buffers", None),
        ("bounce_buffer_bytes", 100),
        ("bounce_buffer_bytes", 2**31),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(name: str, value: Any):
    with pytest.raises(ConfigError, match=name):
        StreamConfig(**{name: value})


def test_staging_holds_at_least_one_slot():
    assert StreamConfig(chunk_size=8 << 20, staging_bytes=8 << 20).slot_bytes == 8 << 20
    with pytest.raises(ConfigError, match="staging_bytes"):
        StreamConfig(chunk_size=8 << 20, staging_bytes=4 << 20)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("CHUNK_SIZE", "much"),
        ("CHUNK_SIZE", "1.00001KiB"),
        ("CHUNK_SIZE", "-4MiB"),
        ("STAGING_BYTES", ""),
        ("IO_DEPTH", "4MiB"),
        ("NUM_THREADS", "two"),
        ("NUMA", "2"),
        ("DIRECT_IO", "perhaps"),
        ("REGISTER_BUFFERS", "auto"),
    ],
)
def test_the_environment_is_named_when_it_is_wrong(variable: str, text: str):
    with pytest.raises(ConfigError, match=f"GDSSTREAM_{variable}="):
        StreamConfig.resolve({}, environ={f"GDSSTREAM_{variable}": text})


def test_a_named_choice_is_refused_with_the_nearest_and_all():
    with pytest.raises(ConfigError, match=r"'stagd'; did you mean 'staged'\?; it is one of auto, staged, mapped"):
        StreamConfig(backend="stagd")


def test_auto_is_a_word_for_every_decision():
    environ = {"GDSSTREAM_CHUNK_SIZE": "1MiB", "GDSSTREAM_DIRECT_IO": "auto"}
    config = StreamConfig.resolve(dict.fromkeys(KNOBS, "auto"), environ=environ)
    assert config == StreamConfig()  # the argument "auto" takes back what the environment asked for
    assert StreamConfig.resolve({}, environ=environ).direct_io is None


@pytest.mark.parametrize(("text", "flag"), [("1", True), ("TRUE", True), (" on ", True), ("no", False), ("0", False)])
def test_flags(text: str, flag: bool):
    assert StreamConfig.resolve({}, environ={"GDSSTREAM_DIRECT_IO": text}).direct_io is flag


def test_a_config_is_frozen_comparable_and_plain():
    config = StreamConfig(chunk_size=1 << 20)
    with pytest.raises(FrozenInstanceError):
        config.chunk_size = 5  # type: ignore[misc]
    assert hash(config) == hash(StreamConfig(chunk_size=1 << 20))
    assert StreamConfig(**config.as_dict()) == config


@given(
    number=st.integers(0, 2**20),
    unit=st.sampled_from(
        [("", 1), ("k", 1000), ("Ki", 1024), ("M", 10**6), ("MI", 2**20), ("g", 10**9), ("GI", 2**30)]
    ),
    suffix=st.sampled_from(["", "b", "B"]),
    blanks=st.sampled_from(["", " "]),
)
def test_parse_bytes_multiplies(number: int, unit: tuple[str, int], suffix: str, blanks: str):
    assert parse_bytes(f"{blanks}{number}{blanks}{unit[0]}{suffix}{blanks}") == number * unit[1]


@given(st.integers(0, 2**63))
def test_parse_bytes_takes_plain_numbers_exactly(number: int):
    assert parse_bytes(str(number)) == number


@pytest.mark.parametrize(("text", "value"), [("1.5k", 1500), ("0.5MiB", 512 * 1024), ("0", 0), ("1b", 1)])
def test_parse_bytes_of_fractions(text: str, value: int):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "k", "1kk", "1 2", "-1", "1e6", "0x10", "1.5", "1/2", "4 MiBs", "1.", "nan"])
def test_parse_bytes_refuses(text: str):
    with pytest.raises(ValueError, match="is not a"):
        parse_bytes(text)
