"""Verb `train`: forward and backward steps through an offloaded model, against what the schedule predicts.

The model's layers are the files' in turn, and its resident twin has the same weights, so that it always fits. A round
of a route: steps of the twin, with a mark at every boundary of a layer, which gives each use's compute; transfer alone,
through the same slots; one step to warm up; then `steps` steps of the offloaded model, timed on the wall with the
device drained before and after. The prediction is `gdsstream.makespan`'s for the compute and the transfer of that
round, in the steady state. What is trained gets the twin's gradients, bit for bit, or the row has failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from bench import model, moe, slope, stats
from bench.clock import Clock
from bench.config import BenchConfigError, BenchError, TrainingConfig
from bench.files import BenchFiles
from bench.loaders.base import Job, LayerRequest, Loader, need
from bench.scenarios.base import Alone, VerificationError, Workload
from bench.scenarios.contents import Contents
from bench.scenarios.layers import tensors_of, transfer_alone

if TYPE_CHECKING:
    import torch
    from torch import nn

    from bench.measure import Sample

_RESIDENT_STEPS = 2


class TrainingStep(Workload):
    """One number of tokens on one model."""

    verb = "train"
    unit = "steps"
    computes = True

    def __init__(self, files: BenchFiles, device: str, scenario: TrainingConfig) -> None:
        (self._tokens,) = scenario.tokens
        self._scenario, self._files = scenario, files
        if scenario.layers <= scenario.num_slots + 1:
            raise BenchConfigError(
                f"'scenario.layers' is {scenario.layers}; with scenario.num_slots={scenario.num_slots} it has to be at "
                f"least {scenario.num_slots + 2}, or nothing would be left to stream"
            )
        self._layers = [tensors_of(files, file) for file in range(len(files.paths))]
        wanted = moe.matrices(scenario.moe)
        lacking = [name for name in wanted if name not in self._layers[0]]
        if lacking:
            needed = 2 * sum(rows * columns for rows, columns in wanted.values())
            raise BenchConfigError(
                f"'storage.file_bytes': a layer has no room for {lacking[0]}; its weights take {needed} bytes"
            )
        self._layer_bytes = files.data_bytes // len(files.paths)
        self._clock = Clock(device)
        self._device = device
        self.units = scenario.steps
        self.job = Job(
            files.paths,
            files.data_bytes,
            device,
            layers=LayerRequest(moe.PATTERN, scenario.num_slots, self._modules),
        )
        shape = (self._tokens, scenario.moe.hidden)
        self._first, self._gradient = (moe.random(shape, device, scenario.seed + number) for number in range(2))
        self._twin = self._resident_twin()
        self._clock.synchronize()
        with self._clock.side():
            self._step(self._twin)
            self._expected = model.adapter_gradients(self._twin)
            self._clock.synchronize()
        self._offloaded: Any = None
        self._allocated = 0

    @property
    def sample_bytes(self) -> int:
        return self._reads * self._layer_bytes

    @property
    def _reads(self) -> int:
        """Layers that a step reads in the steady state."""
        return 2 * (self._scenario.layers - self._scenario.num_slots)

    def before(self, loader: Loader, number: int) -> dict[str, float]:
        with self._clock.side():
            uses_s = self._use_seconds()
            # A step ends in the first layers, so that these may still be in the slots, and the others are not.
            sequence = range(self._scenario.num_slots, self._scenario.layers)
            transfer_s = transfer_alone(loader, self._clock, sequence, 1)
            if loader.statistics()["reads"] != len(sequence):
                raise BenchError("layers were found in their slots where transfer alone was to be measured")
            self._step(loader.modules())
            self._clock.synchronize()
        self._offloaded = loader.modules()
        return {
            "resident_s": sum(uses_s),
            "forward_s": sum(uses_s[: self._scenario.layers]),
            "transfer_s": transfer_s,
            "predicted_s": self._predict(uses_s, transfer_s),
        }

    def run(self, loader: Loader) -> Any:
        self._allocated = self._clock.allocated_bytes()
        with self._clock.side():
            for _ in range(self._scenario.steps):
                self._step(self._offloaded)
        return self._offloaded

    def finish(self, delivered: Any) -> None:
        self._clock.synchronize()

    def tensors(self, delivered: Any) -> list[torch.Tensor]:
        return []  # the steps themselves used what arrived

    def amount(self, delivered: Any) -> tuple[int, int]:
        return self._scenario.steps * self.sample_bytes, self._scenario.steps

    def after(self, loader: Loader, delivered: Any) -> dict[str, float]:
        found = loader.statistics()
        return {**found, "grown_gpu_bytes": self._clock.peak_bytes() - self._allocated}

    def verify(self, delivered: Any) -> None:
        import torch

        found = model.adapter_gradients(delivered)
        if found.keys() != self._expected.keys():
            lacking = sorted(self._expected.keys() - found.keys())
            raise VerificationError(f"{len(lacking)} parameters got no gradient, such as {lacking[:1]}")
        for name, wanted in self._expected.items():
            if not torch.equal(found[name], wanted):
                worst = float((found[name].float() - wanted.float()).abs().max())
                raise VerificationError(f"the gradient of {name} differs from the resident twin's by up to {worst:g}")
            if not bool(wanted.isfinite().all()):
                raise VerificationError(f"the gradient of {name} is not finite")

    def alone(self) -> Alone:
        with self._clock.side():
            return Alone(sum(self._use_seconds()), self.sample_bytes)

    def derive(self, samples: Sequence[Sample]) -> dict[str, Any]:
        steps, scenario = self._scenario.steps, self._scenario

        def middle(name: str) -> float:
            return stats.median([sample.figures[name] for sample in samples])

        return {
            "tokens": self._tokens,
            "layers": scenario.layers,
            "num_slots": scenario.num_slots,
            "layer_bytes": self._layer_bytes,
            "distinct_bytes": self._files.data_bytes,
            "slot_bytes": scenario.num_slots * self._layer_bytes,
            "steps": steps,
            "recompute": scenario.recompute,
            "reads_per_step": middle("reads") / steps,
            "least_reads_per_step": self._reads,
            "resident_s": middle("resident_s"),
            "forward_s": middle("forward_s"),
            "transfer_s": middle("transfer_s"),
            **slope.difference([s.seconds / steps for s in samples], [s.figures["predicted_s"] for s in samples]),
        }

    def _step(self, modules: Any, mark: Any = None) -> list[Any]:
        return model.run_step(modules, self._first, self._gradient, recompute=self._scenario.recompute, mark=mark)

    def _use_seconds(self) -> list[float]:
        """Seconds of each use of a layer in a step of the twin: forward from the first, backward from the last."""
        runs = [self._step(self._twin, self._clock.mark) for _ in range(_RESIDENT_STEPS)]
        self._clock.synchronize()
        uses = [[self._clock.seconds(*pair) for pair in pairwise(marks)] for marks in runs]
        return [stats.median(values) for values in zip(*uses, strict=True)]

    def _predict(self, uses_s: Sequence[float], transfer_s: float) -> float:
        order = need("gdsstream", "gdsstream").Order.training(self._scenario.layers)
        slots = self._scenario.num_slots
        arrivals = [transfer_s] * self._scenario.layers
        makespan = need("gdsstream.makespan", "gdsstream")
        return float(makespan.steady_cycle_s(order, slots, uses_s, arrivals, prefetch_depth=min(1, slots - 1)))

    def _modules(self) -> nn.ModuleList:
        """New layers on the meta device, with their adapters on the device."""
        from torch import nn

        rest = self._layers[0].get(moe.REST)
        shape, scenario = rest.shape if rest is not None else None, self._scenario
        return nn.ModuleList(
            model.layer(scenario.moe, shape, scenario.rank, self._device, scenario.seed + number)
            for number in range(scenario.layers)
        )

    def _resident_twin(self) -> nn.ModuleList:
        """The model with its weights on the device; layers of the same file share them."""
        import torch

        contents = Contents(self._files, self._device)
        weights: list[dict[str, torch.Tensor]] = []
        for tensors in self._layers:
            found = {}
            for name, info in tensors.items():
                found[name] = torch.empty(info.shape, dtype=torch.bfloat16, device=self._device)
                contents.fill(info, found[name])
            weights.append(found)
        twin = self._modules()
        for number, module in enumerate(twin):
            model.set_weights(module, weights[number % len(weights)])
        return twin
