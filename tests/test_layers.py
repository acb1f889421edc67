"""Layers through slots: right bytes in every order, leases that end, faults that leave everything usable."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from layer_files import LAYER_BYTES, layer_of, write_experts, write_layers
from support import assert_same

from gdsstream import ConfigError, EngineClosedError, FileChangedError, ForkedProcessError, LeaseError, ReadError
from gdsstream.layers import LayerStreamer
from gdsstream.schedule import Order

COUNT = 7


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, torch.Tensor]:
    return write_layers(tmp_path / "ck", COUNT, files=2)


@pytest.fixture
def folder(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    return tmp_path / "ck"


def use_all(streamer: LayerStreamer, steps: int) -> None:
    for _ in range(steps):
        for lease in streamer:
            lease.wait()


@pytest.mark.parametrize("order", ["forward", "training"])
@pytest.mark.parametrize("slots", [1, 2, 3, 5, 7, 9])
@pytest.mark.parametrize("host_bytes", [0, 60_000, 10**9])
def test_every_layer_has_its_bytes(
    folder: Path, tensors: dict[str, torch.Tensor], order: str, slots: int, host_bytes: int, no_leaks: None
) -> None:
    with LayerStreamer(folder, device="cpu", num_slots=slots, order=order, host_cache_bytes=host_bytes) as streamer:
        assert streamer.num_layers == COUNT
        assert len(streamer.host_layers) == {0: 0, 60_000: 2, 10**9: COUNT}[host_bytes]
        for _ in range(3):
            for lease in streamer:
                assert_same(dict(lease), layer_of(tensors, lease.layer))
        assert streamer.stats().order_misses == 0


@pytest.mark.parametrize("slots", [2, 3, 5])
def test_training_reads_what_does_not_fit_twice_a_step(folder: Path, slots: int) -> None:
    with LayerStreamer(folder, device="cpu", num_slots=slots, order="training") as streamer:
        for _ in range(2):
            for _ in streamer:
                pass
        for _ in streamer:
            pass
        step = streamer.last_step
        assert step is not None
        assert (step.leases, step.reads) == (2 * COUNT, 2 * (COUNT - slots))
        assert step.storage_bytes == step.reads * LAYER_BYTES
        assert step.host_bytes == 0
        assert f"{step.reads} read" in step.summary()


def test_host_layers_are_counted_apart(folder: Path) -> None:
    with LayerStreamer(folder, device="cpu", host_cache_bytes=80_000) as streamer:
        for _ in streamer:
            pass
        stats = streamer.stats()
        assert stats.host_bytes == 3 * LAYER_BYTES
        assert stats.storage_bytes == (COUNT - 3) * LAYER_BYTES
        assert stats.read_bytes == COUNT * LAYER_BYTES


def test_backend_mapped_keeps_every_layer_in_host_memory(folder: Path) -> None:
    with LayerStreamer(folder, device="cpu", backend="mapped") as streamer:
        assert streamer.host_layers == tuple(range(COUNT))


@pytest.mark.parametrize("backend", ["traditional"])
def test_other_engines(folder: Path, tensors: dict[str, torch.Tensor], backend: str) -> None:
    with LayerStreamer(folder, device="cpu", backend=backend) as streamer:
        for lease in streamer:
            assert_same(dict(lease), layer_of(tensors, lease.layer))
    with pytest.raises(ConfigError, match="needs the native engine"):
        LayerStreamer(folder, device="cpu", backend=backend, host_cache_bytes=10**6)


def test_any_order_works_and_is_counted(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(5)
    with LayerStreamer(folder, device="cpu", num_slots=3) as streamer:
        for layer in torch.randint(0, COUNT, (200,), generator=generator).tolist():
            with streamer.layer(layer) as weights:
                assert_same(dict(weights), layer_of(tensors, layer))
        assert 100 < streamer.stats().order_misses < 200


def test_an_explicit_order_that_ends(folder: Path) -> None:
    order = Order.explicit([2, 0, 2, 5])
    with LayerStreamer(folder, device="cpu", order=order) as streamer:
        assert [lease.layer for lease in streamer] == [2, 0, 2, 5]
        assert list(streamer) == []
        with streamer.layer(0):
            pass
        with streamer.layer(6) as weights:  # in no place of the order
            assert len(weights) == 5
        streamer.seek(2)
        assert [lease.layer for lease in streamer] == [2, 5]


def test_seek_and_prefetch_move_on_in_the_order(folder: Path) -> None:
    with LayerStreamer(folder, device="cpu") as streamer:
        streamer.prefetch(4)
        with streamer.layer(4), streamer.layer(5):
            pass
        streamer.seek(1)
        assert [lease.layer for lease in streamer] == [1, 2, 3, 4, 5, 6, 0]
        assert streamer.stats().order_misses == 0
        with pytest.raises(ConfigError, match="no layer 7"):
            streamer.prefetch(7)
        with pytest.raises(ConfigError, match="step -1"):
            streamer.seek(-1)


def test_a_read_is_under_way_while_a_layer_is_leased(folder: Path) -> None:
    with LayerStreamer(folder, device="cpu", faults="delay_us=20000", num_slots=2) as streamer:
        with streamer.layer(0) as weights:
            weights.wait()
            time.sleep(1.0)
            before = streamer.engine_stats()["bytes"]
            assert before == 2 * LAYER_BYTES, "layer 1 was to be read meanwhile, and nothing more"
        assert streamer.stats().stall_s_by_layer[0] > 0.015
        with streamer.layer(1) as weights:
            weights.wait()
        assert streamer.stats().stall_s_by_layer.get(1, 0) < 0.01


def test_a_released_slot_is_filled_before_anybody_asks(folder: Path) -> None:
    with LayerStreamer(folder, device="cpu", num_slots=2) as streamer:
        with streamer.layer(0) as weights:
            weights.wait()
        # Nothing was free for layer 2 while 0 was leased; no later call of the user's starts its read.
        end = time.monotonic() + 10
        while streamer.engine_stats()["bytes"] < 3 * LAYER_BYTES:
            assert time.monotonic() < end, "layer 2 is not being read"
            time.sleep(0.01)


def test_a_closed_streamer_lets_go_of_its_files(folder: Path) -> None:
    streamer = LayerStreamer(folder, device="cpu")
    use_all(streamer, 1)
    sources = streamer._sources
    assert sources._requests, "requests are kept while the streamer is open"
    streamer.close()
    assert not sources._requests, "each holds descriptors"


def test_a_lease_after_its_release(folder: Path) -> None:
    with LayerStreamer(folder, device="cpu") as streamer:
        lease = streamer.layer(3)
        name = next(iter(lease))
        assert lease[name].shape == (64,)
        with pytest.raises(KeyError):
            lease["no such tensor"]
        lease.release()
        lease.release()
        for use in (lambda: lease[name], lease.wait, lease.__enter__):
            with pytest.raises(LeaseError, match=r"lease of layer 3 .* was released"):
                use()
        assert "released" in repr(lease)


def test_every_slot_leased_is_an_error_and_not_a_wait(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    with LayerStreamer(folder, device="cpu", num_slots=2) as streamer:
        with streamer.layer(0), streamer.layer(4):
            with pytest.raises(LeaseError, match=r"layer 2 cannot be leased: all 2 slot\(s\) are \(layers 0, 4\)"):
                streamer.layer(2)
            with streamer.layer(4) as again:
                assert_same(dict(again), layer_of(tensors, 4))
        with streamer.layer(2) as weights:
            assert_same(dict(weights), layer_of(tensors, 2))


def test_leases_of_one_layer_share_its_slot(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    with LayerStreamer(folder, device="cpu", num_slots=1) as streamer:
        with streamer.layer(0) as first:
            second = streamer.layer(0)
            assert first.slot == second.slot
        with pytest.raises(LeaseError):
            streamer.layer(1)
        assert_same(dict(second), layer_of(tensors, 0))
        second.release()
        streamer.layer(1).release()


def test_an_exception_gives_the_slot_back(folder: Path) -> None:
    with LayerStreamer(folder, device="cpu", num_slots=1) as streamer:
        for layer in range(COUNT):
            with pytest.raises(ZeroDivisionError), streamer.layer(layer):
                raise ZeroDivisionError
        assert streamer.stats().reads == COUNT


def test_released_bytes_are_poisoned_in_debug_mode(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    with LayerStreamer(folder, device="cpu", num_slots=1, debug=True, faults="delay_us=50000") as streamer:
        with streamer.layer(0) as weights:
            kept = weights["mlp.up_proj.weight"]
            assert torch.equal(kept, layer_of(tensors, 0)["mlp.up_proj.weight"])
        with streamer.layer(1) as weights:
            assert kept.isnan().any()
            assert_same(dict(weights), layer_of(tensors, 1))


def test_aliases_of_a_slot_are_counted(folder: Path) -> None:
    with LayerStreamer(folder, device="cpu") as streamer, streamer.layer(0) as weights:
        dict(weights)
        assert weights.storage_use_count() == weights.baseline_use_count
        kept = weights["self_attn.q_proj.weight"].t()
        assert weights.storage_use_count() == weights.baseline_use_count + 1
        again = weights.restore(kept.data_ptr() - weights.address, kept.dtype, kept.size(), kept.stride())
        assert torch.equal(again, kept)
        del kept, again
        assert weights.storage_use_count() == weights.baseline_use_count


def test_groups_can_be_used_before_the_rest_is_there(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    with LayerStreamer(
        folder, device="cpu", num_slots=1, groups=["input*", "self_attn.*"], num_threads=1, faults="delay_us=200000"
    ) as streamer:
        assert streamer.num_groups(0) == 3
        with streamer.layer(0) as weights:
            started = time.monotonic()
            first = weights["input_layernorm.weight"]
            soon = time.monotonic() - started
            assert torch.equal(first, layer_of(tensors, 0)["input_layernorm.weight"])
            weights.wait()
            assert soon < 0.7 * (time.monotonic() - started)
            assert_same(dict(weights), layer_of(tensors, 0))


def test_some_experts(tmp_path: Path) -> None:
    tensors = write_experts(tmp_path / "moe", 3, 8)
    with LayerStreamer(tmp_path / "moe", device="cpu", fuse="auto", debug=True) as streamer:
        with streamer.layer(2, experts=[5, 1]) as weights:
            down = weights["mlp.experts.down_proj"]
            for e in (1, 5):
                assert torch.equal(down[e], tensors[f"model.layers.2.mlp.experts.{e}.down_proj.weight"])
            assert down[0].isnan().all()
            with streamer.layer(2, experts=[5]) as fewer:
                assert fewer.slot == weights.slot
        partial = streamer.stats().read_bytes
        with streamer.layer(2) as weights:  # what is partly there is read anew
            for e in range(8):
                stored = tensors[f"model.layers.2.mlp.experts.{e}.down_proj.weight"]
                assert torch.equal(weights["mlp.experts.down_proj"][e], stored)
        assert streamer.stats().read_bytes > 3 * partial


def test_a_failing_read_is_raised_once_and_tried_again(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    with LayerStreamer(folder, device="cpu", num_slots=2, num_threads=1, faults="eio@40") as streamer:
        failed: list[tuple[int, ReadError]] = []
        for _ in range(12):
            for layer in range(COUNT):
                try:
                    with streamer.layer(layer) as weights:
                        assert_same(dict(weights), layer_of(tensors, layer))
                except ReadError as error:
                    failed.append((layer, error))
        ((layer, error),) = failed
        assert "model-0000" in str(error)
        assert f"while layer {layer} (model.layers.{layer}.)" in error.__notes__[0]


def test_a_file_that_changes_in_the_middle(folder: Path, no_leaks: None) -> None:
    with LayerStreamer(folder, device="cpu", num_slots=2) as streamer:
        for _ in range(2):
            for _ in streamer:
                pass
        path = folder / "model-00002.safetensors"
        os.truncate(path, path.stat().st_size - 100)
        with pytest.raises(FileChangedError, match="truncated"):
            use_all(streamer, 2)


def test_ctrl_c_ends_a_wait_and_leaves_the_streamer_usable(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    with LayerStreamer(folder, device="cpu", num_threads=1, faults="delay_us=700000") as streamer:
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt), streamer.layer(1) as weights:
            weights.wait()
        timer.join()
        with streamer.layer(1) as weights:
            assert_same(dict(weights), layer_of(tensors, 1))


def test_two_threads_on_one_streamer(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    wrong: list[object] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for layer in torch.randint(0, COUNT, (60,), generator=generator).tolist():
            try:
                with streamer.layer(layer) as weights:
                    assert_same(dict(weights), layer_of(tensors, layer))
            except BaseException as error:
                wrong.append(error)

    with LayerStreamer(folder, device="cpu", num_slots=3) as streamer:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_after_close_and_in_a_child(folder: Path) -> None:
    streamer = LayerStreamer(folder, device="cpu")
    lease = streamer.layer(0)
    pid = os.fork()
    if pid == 0:
        try:
            streamer.layer(1)
        except ForkedProcessError:
            streamer.close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    streamer.close()
    streamer.close()
    with pytest.raises(LeaseError):
        lease.wait()
    lease.release()
    with pytest.raises(EngineClosedError, match="streamer was closed"):
        streamer.layer(0)


def test_a_lease_that_is_kept_does_not_keep_the_slots(folder: Path) -> None:
    with LayerStreamer(folder, device="cpu") as streamer:
        for lease in streamer:
            lease.wait()
        slots = [weakref.ref(slot.memory) for slot in streamer._ring.slots]
        assert all(slot() is not None for slot in slots)
    assert [slot() for slot in slots] == [None, None]
    assert lease.released


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_slots": 0}, "num_slots is 0"),
        ({"num_slots": True}, "num_slots is True"),
        ({"prefetch_depth": -1}, "prefetch_depth is -1"),
        ({"order": "backward"}, "order is 'backward'; it is \"forward\""),
        ({"order": Order.explicit([0, 9])}, "the order uses layer 9"),
        ({"layers": "model.h.{i}."}, "begins with"),
        ({"num_slot": 2}, "did you mean|no knob"),
    ],
)
def test_arguments_that_cannot_work(folder: Path, arguments: dict[str, object], message: str, no_leaks: None) -> None:
    with pytest.raises(ConfigError, match=message):
        LayerStreamer(folder, device="cpu", **arguments)  # type: ignore[arg-type]


def test_a_thousand_steps_leave_nothing_behind(folder: Path) -> None:
    def resident_kib() -> int:
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))

    with LayerStreamer(folder, device="cpu", num_slots=3, order="training", host_cache_bytes=60_000) as streamer:
        use_all(streamer, 100)
        gc.collect()
        before, objects = resident_kib(), len(gc.get_objects())
        use_all(streamer, 1000)
        gc.collect()
        assert resident_kib() - before < 4096
        assert len(gc.get_objects()) - objects < 200
        assert streamer.engine_stats()["quarantined"] == 0
        assert streamer.stats().leases == 1100 * 2 * COUNT
