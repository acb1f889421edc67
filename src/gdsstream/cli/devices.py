"""Which device a command works for where none was named."""

from __future__ import annotations


def default_device() -> str:
    """A GPU where torch finds one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


__all__ = ["default_device"]
