"""Verb `pipeline`: layers stream through a few slots while the layers before them are computed with.

A round of a route: compute alone (resident weights), transfer alone, a run of `short` and one of `long` layers, timed
on the wall with the device drained before and after, and nowhere between. A run begins by declaring its order, so that
its first layer is not free, and no layer is ever found in a slot: the files are used in turn, they are at least twice
as many as the slots, and each run is whole turns. `bench/slope.py` says what becomes of the times.

With `consume` the weights are views of the slot, as far as the layer's bytes reach: `derived.consumed` of the record
names them. What is left of the layer is summed, word by word. Every run's result, and every sum, has to be what the
same compute gives on resident weights that were never in a slot, bit for bit: a layer that is used before it has
arrived, or overwritten while it is in use, shows. Without `consume` the weights are resident, and nothing but the
order of the streams ties the compute to the bytes. After each sample the layers left in the slots are compared byte
for byte either way.

The first load of a route also makes a run in which the moments of single layers are marked (moments.py), for the plot.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench import moe, slope
from bench.clock import Clock
from bench.config import BenchConfigError, BenchError, PipelineConfig
from bench.files import BenchFiles
from bench.loaders.base import Job, LayerRequest, Loader
from bench.moments import Moments, Watch
from bench.scenarios.base import Alone, VerificationError, Workload
from bench.scenarios.contents import Contents
from bench.scenarios.layers import tensors_of, transfer_alone

if TYPE_CHECKING:
    import torch

    from bench.measure import Sample

_WARM_UP = 2
#: Layers whose moments are recorded, about.
_WATCHED = 12


class Pipeline(Workload):
    """One number of tokens on one set of layers."""

    verb = "pipeline"
    unit = "layers"
    units = 1
    computes = True

    def __init__(self, files: BenchFiles, device: str, scenario: PipelineConfig) -> None:
        import torch

        (self._tokens,) = scenario.tokens
        self._scenario, self._files = scenario, files
        self._distinct = len(files.paths)
        for name in ("short", "long"):
            if getattr(scenario, name) % self._distinct:
                raise BenchConfigError(
                    f"'scenario.{name}' is {getattr(scenario, name)}; it has to be a multiple of the {self._distinct} "
                    "files, so that each run begins where none of its layers is in a slot"
                )
        self._layers = [tensors_of(files, file) for file in range(self._distinct)]
        self._layer_bytes = files.data_bytes // self._distinct
        self.job = Job(files.paths, files.data_bytes, device, layers=LayerRequest(moe.PATTERN, scenario.num_slots))
        self._clock = Clock(device)
        self._contents = Contents(files, device)
        self._moe = moe.Moe(scenario.moe, self._tokens, device, backward=scenario.backward, seed=scenario.seed)
        self._streamed = [name for name in self._layers[0] if name != moe.REST] if scenario.consume else []
        self._rest = moe.REST if scenario.consume and moe.REST in self._layers[0] else None
        self._resident = self._resident_layer()
        longest = max(scenario.long, 2 * self._distinct)
        self._sums = torch.zeros(longest, dtype=torch.int64, device=device)
        self._sum_of = list(self._sums)  # views without dimensions, made once
        self._expected: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._lengths: dict[int, tuple[int, int]] = {}  # by the loader's id
        self._moments: dict[int, Moments | None] = {}  # likewise
        self._allocated = 0
        self._length = 0
        self._clock.synchronize()  # all of this was queued on the default stream

    @property
    def sample_bytes(self) -> int:
        return self._layer_bytes

    def before(self, loader: Loader, number: int) -> dict[str, float]:
        turn = self._distinct
        with self._clock.side():
            compute_s = self.alone().seconds
            counted = turn if number < 0 else max(self._lengths[id(loader)][0] // 2 // turn, 1) * turn
            transfer_s = transfer_alone(loader, self._clock, self._sequence(turn + counted), turn)
            if number < 0:
                # The first load only warms up, and tells how long a run may be.
                bound_s, limit_s = max(compute_s, transfer_s), self._scenario.sample_seconds
                chosen = slope.lengths(self._scenario.short, self._scenario.long, turn, bound_s, limit_s)
                self._lengths[id(loader)] = chosen
                short, self._length = turn, 2 * turn
            else:
                short, self._length = self._lengths[id(loader)]
            self._moe.start()
            self._clock.synchronize()
            began = time.perf_counter()
            self._pass(loader, short)
            self._clock.synchronize()
            short_s = time.perf_counter() - began
            self._verify_result(short)
            if number < 0:
                self._moments[id(loader)] = self._watched(loader, bound_s)
            self._moe.start()
            self._clock.synchronize()
        return {
            "compute_s": compute_s,
            "transfer_s": transfer_s,
            "short_s": short_s,
            "short_layers": short,
            "long_layers": self._length,
        }

    def run(self, loader: Loader) -> Any:
        self._allocated = self._clock.allocated_bytes()
        with self._clock.side():
            self._pass(loader, self._length)
        return loader

    def finish(self, delivered: Any) -> None:
        self._clock.synchronize()

    def tensors(self, delivered: Any) -> list[torch.Tensor]:
        return []  # the run itself used what arrived

    def amount(self, delivered: Any) -> tuple[int, int]:
        return self._length * self._layer_bytes, self._length

    def after(self, loader: Loader, delivered: Any) -> dict[str, float]:
        found = loader.statistics()
        if found["reads"] != self._length:
            raise BenchError(f"{found['reads']} of {self._length} layers were read; the others were still in a slot")
        return {**found, "grown_gpu_bytes": self._clock.peak_bytes() - self._allocated}

    def verify(self, delivered: Any) -> None:
        with self._clock.side():
            self._verify_result(self._length)
            left = self._sequence(self._distinct)[-self._scenario.num_slots :]
            for layer, found in zip(left, delivered.stream(left), strict=True):
                for name, info in self._layers[layer].items():
                    self._contents.check(info, found[name])
            self._clock.synchronize()
        if delivered.statistics()["reads"]:
            raise BenchError(f"layers {left} were read again: the slots did not hold what the run had left in them")

    def alone(self) -> Alone:
        """Compute alone, on one resident layer again and again; a layer is far larger than the caches."""
        count = max(self._scenario.short // 2, 1)
        with self._clock.side():
            self._moe.start()
            for _ in range(_WARM_UP):
                self._compute(self._resident, 0)
            begin = self._clock.mark()
            for _ in range(count):
                self._compute(self._resident, 0)
            end = self._clock.mark()
            self._clock.synchronize()
        return Alone(self._clock.seconds(begin, end) / count, self._layer_bytes)

    def details(self, loader: Loader) -> dict[str, Any]:
        found = self._moments.get(id(loader))
        return {"moments": found} if found is not None else {}

    def derive(self, samples: Sequence[Sample]) -> dict[str, Any]:
        short, long = (int(samples[0].figures[f"{name}_layers"]) for name in ("short", "long"))
        times = [
            slope.Round(s.figures["compute_s"], s.figures["transfer_s"], s.figures["short_s"], s.seconds)
            for s in samples
        ]
        found = slope.summarise(times, short, long)
        work = moe.flops(self._scenario.moe, self._tokens, backward=self._scenario.backward)
        return {
            "tokens": self._tokens,
            "pass": "backward" if self._scenario.backward else "forward",
            "layer_bytes": self._layer_bytes,
            "distinct_bytes": self._files.data_bytes,
            "num_slots": self._scenario.num_slots,
            "slot_bytes": self._scenario.num_slots * self._layer_bytes,
            "short_layers": short,
            "long_layers": long,
            "consumed": self._consumed(),
            "tflops_alone": work / found["compute_s"] / 1e12,
            **found,
        }

    def _pass(self, loader: Loader, count: int) -> None:
        """A run of `count` layers. Queues everything, and waits for nothing but what the loader waits for."""
        for step, layer in enumerate(loader.stream(self._sequence(count))):
            self._compute(layer, step)

    def _watched(self, loader: Loader, layer_s: float) -> Moments | None:
        """The moments of the layers of one more run, of a few turns of the files; None where the loader cannot tell."""
        turns = int(self._scenario.sample_seconds / (layer_s * self._distinct))
        count = min(max(turns, 1) * self._distinct, -(-_WATCHED // self._distinct) * self._distinct)
        self._moe.start()
        self._clock.synchronize()
        watch = Watch(self._clock)
        if (watching := loader.watched(watch)) is None:
            return None
        with watching:
            for step, layer in enumerate(loader.stream(self._sequence(count))):
                layer[next(iter(layer))]  # its look-up waits for the layer
                begin = self._clock.mark()
                self._compute(layer, step)
                watch.computed(begin, self._clock.mark())
        self._clock.synchronize()
        self._verify_result(count)
        return watch.moments()

    def _compute(self, layer: Mapping[str, torch.Tensor], step: int) -> None:
        if not self._scenario.consume:
            layer[next(iter(layer))]  # its look-up makes this stream wait for the layer
            self._moe.layer(self._resident)
            return
        self._moe.layer({**self._resident, **{name: layer[name] for name in self._streamed}})
        if self._rest is not None:
            moe.add_up(layer[self._rest], self._sum_of[step])

    def _sequence(self, count: int) -> list[int]:
        """The files in turn; the backward pass comes to them from the other end."""
        order = [step % self._distinct for step in range(count)]
        return [self._distinct - 1 - layer for layer in order] if self._scenario.backward else order

    def _resident_layer(self) -> dict[str, torch.Tensor]:
        """A layer outside of the slots: file 0, and random weights of the same size for what no file holds."""
        import torch

        device, dtype = self.job.device, torch.bfloat16
        wanted: dict[str, tuple[int, ...]] = dict(moe.matrices(self._scenario.moe))
        if self._rest is not None:
            wanted[self._rest] = self._layers[0][self._rest].shape
        found = {}
        for number, (name, shape) in enumerate(wanted.items()):
            if name not in self._layers[0]:
                found[name] = moe.random(shape, device, self._scenario.seed + 1 + number, moe.WEIGHT_SIZE)
                continue
            found[name] = torch.empty(shape, dtype=dtype, device=device)
            self._contents.fill(self._layers[0][name], found[name])
        return found

    def _expect(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What a run of `count` layers results in, computed on resident weights that are filled anew for each."""
        if count not in self._expected:
            done = max((known for known in self._expected if known < count), default=0)
            self._moe.start()
            if done:
                self._moe.state.copy_(self._expected[done][0])
                self._sums[:done].copy_(self._expected[done][1])
            for step, layer in list(enumerate(self._sequence(count)))[done:]:
                for name in [*self._streamed, *([self._rest] if self._rest is not None else [])]:
                    self._contents.fill(self._layers[layer][name], self._resident[name])
                self._compute(self._resident, step)
            self._expected[count] = self._moe.state.clone(), self._sums[:count].clone()
            self._clock.synchronize()
        return self._expected[count]

    def _verify_result(self, count: int) -> None:
        import torch

        result, sums = self._moe.state.clone(), self._sums[:count].clone()
        wanted, wanted_sums = self._expect(count)
        wrong = (sums != wanted_sums).nonzero().flatten().tolist()
        if self._rest is not None and wrong:
            raise VerificationError(f"step {wrong[0]} of {count} summed other bytes than its layer's {moe.REST} has")
        if not torch.equal(result, wanted):
            worst = float((result.float() - wanted.float()).abs().max())
            raise VerificationError(f"the result of {count} layers differs from resident weights' by up to {worst:g}")
        if not bool(torch.isfinite(result).all()):
            raise VerificationError(f"the result of {count} layers is not finite")

    def _consumed(self) -> str:
        if not self._scenario.consume:
            return "nothing: the weights are resident, and the compute waits for the layer only"
        held = self._layers[0]
        names = [name for name in self._streamed if name in self._resident]
        total = sum(held[name].nbytes for name in names)
        rest = held[self._rest].nbytes if self._rest is not None else 0
        every = len(moe.matrices(self._scenario.moe))
        return f"{len(names)} of {every} weight matrices are views of the slot ({total} bytes); {rest} bytes are summed"
