"""What users may rely on: names, what importing them costs, and a stub that fits the native module."""

from __future__ import annotations

import ast
from pathlib import Path

from support import run_python

import gdsstream
from gdsstream import _native, errors

NAMES = {
    "Engine",
    "Jagged",
    "LayerStreamer",
    "LayerwiseAccumulation",
    "Lease",
    "LoaderStats",
    "OffloadHandle",
    "Order",
    "PendingSave",
    "ShardDataset",
    "ShardLoader",
    "StreamConfig",
    "StreamStats",
    "Transfer",
    "dequantize_nf4",
    "load_file",
    "offload",
    "open_engine",
    "read_many",
    "release_engines",
    "safe_open",
    "save_file",
    "save_file_async",
}


def test_the_public_names() -> None:
    assert set(gdsstream.__all__) == NAMES | set(errors.__all__)
    assert all(hasattr(gdsstream, name) for name in gdsstream.__all__)


def test_every_error_is_a_gdsstream_error() -> None:
    assert all(issubclass(getattr(errors, name), errors.GdsStreamError) for name in errors.__all__)


def test_errors_and_headers_need_no_torch() -> None:
    code = "import sys, gdsstream, gdsstream.checkpoint, gdsstream.storage; print('torch' in sys.modules)"
    assert run_python(code)[0].strip() == "False"


def test_importing_adds_little_to_torch() -> None:
    code = "import torch, time; start = time.perf_counter(); import gdsstream; gdsstream.load_file; "
    code += "print(time.perf_counter() - start)"
    # 0.01 to 0.03 s where nothing else runs; the limit is for a machine that is busy.
    assert float(run_python(code)[0]) < 1.0


def test_the_stub_names_what_the_native_module_has() -> None:
    stub = Path(gdsstream.__file__).with_name("_native.pyi").read_text(encoding="utf-8")
    for node in ast.parse(stub).body:
        if isinstance(node, ast.FunctionDef):
            assert callable(getattr(_native, node.name))
        if isinstance(node, ast.ClassDef):
            listed = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            actual = {name for name in vars(getattr(_native, node.name)) if not name.startswith("_")}
            assert {name for name in listed if not name.startswith("_")} == actual, node.name
