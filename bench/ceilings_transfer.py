"""The limits of verb `transfer`, measured as those of ceilings.py:

| run                         | ceiling                                                                         |
|-----------------------------|---------------------------------------------------------------------------------|
| warm reads to a GPU         | one large copy from pinned memory                                               |
| warm reads on the CPU       | bare threads, preadv; of random ios index_select out of a mapping of the files  |
| cold reads                  | the best O_DIRECT rate (ceilings_disk.py): blocks by threads or by kernel AIO,  |
|                             | the part's own size and depth among them; of random ios below 64 KiB one io     |
|                             | each, of those below 1 MiB either                                               |
| writes                      | the same of writes; of random ios below 1 MiB one io each                       |

No consumer's pass here, as in the rows. Where O_DIRECT is not to be had, writes through the page cache are the limit
of writes, and `kind` says so. Ios that are not aligned are held against aligned ones. A route that ends in host memory
has the ceiling of its run too, so that in a warm run it can pass 100 % of the link.
"""

from __future__ import annotations

from bench.ceilings import Ceiling, MappedGather, ParallelRead, PinnedCopy
from bench.ceilings_disk import Disk
from bench.scenarios.base import Workload

_SAMPLE_BYTES = 1 << 30


def choose(workload: Workload, *, cold: bool) -> Ceiling:
    """The ceiling that the table above names for this part."""
    job = workload.job
    assert job.transfer is not None
    nbytes = min(workload.sample_bytes, _SAMPLE_BYTES)
    own = (job.transfer.io_bytes, job.transfer.threads * job.transfer.depth)
    if cold or job.transfer.write:
        return Disk(job.paths, nbytes, request=job.request, own=own, write=job.transfer.write)
    if job.cuda:
        return PinnedCopy(job.device, nbytes)
    if job.request is not None:
        return MappedGather(job.paths, job.request, consumer=False)
    return ParallelRead(job.paths, consumer=False, nbytes=nbytes)
