"""NVIDIA GPUs: PCI display controllers, and what the driver says about them where it is loaded.

They are numbered by PCI address, as nvidia-smi does, and as CUDA does with CUDA_DEVICE_ORDER=PCI_BUS_ID; CUDA's own
order puts the fastest first, which only differs where GPUs of several kinds are mixed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from gdsstream.machine.pci import NVIDIA, PciDevice
from gdsstream.machine.tree import Tree

_DISPLAY = 0x03
_INFORMATION = "/proc/driver/nvidia/gpus/{address}/information"
_WORKSTATION = r"\b(RTX (PRO|A?\d{4}\b(?=.*\bAda\b))|RTX A\d{4}|Quadro|T\d{3,4}\b)"
_DATA_CENTER = r"\b([ABHLPTV]\d{1,3}[LSX]?|GH200|GB\d{3}|Tesla|GRID|DGX)\b"
# What NVIDIA lists for reads by PCI P2PDMA: data centre GPUs since Ampere.
_P2PDMA = r"\b(A100|A800|A40|A30|A10|L4|L40S?|L20|H100|H800|H200|H20|GH200|B100|B200|B300|GB200|GB300)\b"
_OLD = r"\b(V100|P100|P40|P4|T4|K80|M60|M40)\b"


class GpuClass(StrEnum):
    """The product line, as far as the name tells: cuFile reads directly to the first two."""

    DATA_CENTER = "data centre"
    WORKSTATION = "workstation"
    GEFORCE = "GeForce"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Attributes:
        index: by PCI address, from 0.
        name: the driver's, such as "NVIDIA H200"; else its PCI ids.
        pci: its PCI function.
        uuid: None without the driver.
        bar1_bytes: the window through which other devices reach its memory; None where the system does not tell.
    """

    index: int
    name: str
    pci: PciDevice
    uuid: str | None
    bar1_bytes: int | None

    @property
    def line(self) -> GpuClass:
        """The product line."""
        return gpu_class(self.name)

    @property
    def p2pdma(self) -> bool | None:
        """Whether NVIDIA lists it for reads by PCI P2PDMA; None where the name does not tell."""
        if re.search(_P2PDMA, self.name):
            return True
        return False if re.search(_OLD, self.name) or self.line is GpuClass.GEFORCE else None


def scan(tree: Tree, devices: dict[str, PciDevice]) -> list[Gpu]:
    """The GPUs among `devices`, in the order of their addresses."""
    found = [one for one in devices.values() if one.vendor == NVIDIA and one.base_class == _DISPLAY]
    return [_gpu(tree, index, one) for index, one in enumerate(found)]


def _gpu(tree: Tree, index: int, device: PciDevice) -> Gpu:
    text = tree.read(_INFORMATION.format(address=device.address)) or ""
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    name = said.get("Model") or f"PCI {device.ids}"
    uuid = said.get("GPU UUID")
    return Gpu(index, name, device, uuid if uuid and "?" not in uuid else None, _bar1(tree, device))


def _bar1(tree: Tree, device: PciDevice) -> int | None:
    """The size of the second memory window: the resource file has a line "start end flags" for each."""
    lines = (tree.read(f"/sys/bus/pci/devices/{device.address}/resource") or "").splitlines()
    try:
        first, last = (int(word, 16) for word in lines[1].split()[:2])
    except (IndexError, ValueError):
        return None
    return last - first + 1 if last > first else None


def gpu_class(name: str) -> GpuClass:
    """The product line that a name tells."""
    if re.search(r"GeForce|TITAN", name):
        return GpuClass.GEFORCE
    if re.search(_WORKSTATION, name):
        return GpuClass.WORKSTATION
    if re.search(_DATA_CENTER, name):
        return GpuClass.DATA_CENTER
    return GpuClass.UNKNOWN


__all__ = ["Gpu", "GpuClass", "gpu_class", "scan"]
