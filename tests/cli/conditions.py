"""Machines on which nothing stands in the way of GPUDirect Storage through nvidia-fs."""

# Two sockets with a GPU and two drives below a switch each, all four drives in a set; a system drive far from both.
SMALL = """
pci0000:00 node=0
  00:01.0 port 16x16
    01:00.0 port 16x16
      02:00.0 port 16x16
        03:00.0 gpu 10de:20b0 16x16 NVIDIA A100-SXM4-80GB
      02:01.0 port 16x4
        04:00.0 nvme nvme0 16x4 3.84T SAMSUNG
      02:02.0 port 16x4
        05:00.0 nvme nvme1 16x4 3.84T SAMSUNG
pci0000:40 node=2
  40:01.0 port 16x4
    41:00.0 nvme nvme4 16x4 1.92T SYSTEM
pci0000:80 node=1
  80:01.0 port 16x16
    81:00.0 port 16x16
      82:00.0 port 16x16
        83:00.0 gpu 10de:20b0 16x16 NVIDIA A100-SXM4-80GB
      82:01.0 port 16x4
        84:00.0 nvme nvme2 16x4 3.84T SAMSUNG
      82:02.0 port 16x4
        85:00.0 nvme nvme3 16x4 3.84T SAMSUNG
node 0 cpus=0-15 memory=135G distances=10,20,20
node 1 cpus=16-31 memory=135G distances=20,10,20
node 2 cpus=32-47 memory=135G distances=20,20,10
md md1 raid0 nvme0n1 nvme1n1 nvme2n1 nvme3n1
mount md1 /raid ext4 rw,data=ordered
"""

# What makes a machine with its data on md1 ready: further lines for SMALL, or for a DGX A100.

READY = r"""
file /proc/sys/kernel/osrelease 5.15.0-1042-nvidia
file /proc/sys/kernel/arch x86_64
file /proc/sys/kernel/io_uring_disabled 0
file /proc/driver/nvidia/version NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC
file /proc/driver/nvidia-fs/version version: 2.17
file /proc/driver/nvidia-fs/modules nvme: 1
file /proc/cmdline BOOT_IMAGE=/vmlinuz iommu=off
file /proc/self/limits Max locked memory         unlimited            unlimited            bytes
file /etc/cufile.json { "properties": {"allow_compat_mode": false} }
file /run/udev/data/b9:0 E:MD_LEVEL=raid0
file /run/udev/data/b9:1 E:MD_LEVEL=raid0
file /dev/nvidia-fs0
"""
