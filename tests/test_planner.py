"""Plans: FLOPs from shapes, rates with their sources, and figures that follow from the schedule and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from layer_files import write_experts, write_layers
from support import random_raw, write_checkpoint

from gdsstream import layers as streamer
from gdsstream import stream_model
from gdsstream.checkpoint import Checkpoint
from gdsstream.errors import ConfigError
from gdsstream.layer_work import LayerWork, ModelWork, model_work, read_model_config
from gdsstream.layout import layer_layouts
from gdsstream.planner import Setup, around, plan_streaming
from gdsstream.rates import Rate, measured_compute, rates_for

# One second for a token of a layer of 1 GB, and for 1 GB on the link; storage takes two.
FLOPS = 1e12
RATES = rates_for(link_gbps=1, storage_gbps=0.5, tflops=1)


def layers(count: int, nbytes: int = 10**9) -> list[LayerWork]:
    return [LayerWork(i, nbytes, nbytes, int(FLOPS / 2), 0, 0, 0) for i in range(count)]


def work_of(folder: Path, **options: int) -> ModelWork:
    checkpoint = Checkpoint.open(folder)
    return model_work(layer_layouts(checkpoint)[1], read_model_config(checkpoint), **options)


# ---- FLOPs


def test_a_dense_layer_counts_two_flops_for_each_weight_of_a_matrix(tmp_path: Path):
    write_layers(tmp_path / "model", 2)
    work = work_of(tmp_path / "model")
    # The matrices of layer_files.SHAPES; norms and biases are no products.
    assert [layer.flops_per_token for layer in work.layers] == [2 * (64 * 64 + 128 * 64 + 3 * 7)] * 2
    assert [layer.num_experts for layer in work.layers] == [0, 0]
    assert not any("expert" in line for line in work.assumptions)


@pytest.mark.parametrize("mixtral", [False, True])
def test_only_the_chosen_experts_are_computed_with_and_all_are_read(tmp_path: Path, mixtral: bool):
    write_experts(tmp_path, 2, 8, mixtral=mixtral)
    (tmp_path / "config.json").write_text(json.dumps({"num_experts_per_tok": 2}))
    work = work_of(tmp_path)
    assert {layer.flops_per_token for layer in work.layers} == {2 * 2 * 3 * 24 * 16}
    assert work.layers[0].nbytes == 4 * (16 + 8 * 3 * 24 * 16)
    assert any("2 of 8 experts" in line and "config.json" in line for line in work.assumptions)


def test_what_is_given_goes_before_the_config_and_shared_experts_are_dense(tmp_path: Path):
    tensors = {f"model.layers.0.mlp.experts.{e}.up_proj.weight": random_raw("BF16", (4, 8)) for e in range(4)}
    tensors["model.layers.0.mlp.shared_experts.up_proj.weight"] = random_raw("BF16", (16, 8))
    write_checkpoint(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_experts_per_tok": 2}}))
    assert work_of(tmp_path).layers[0].flops_per_token == 2 * (16 * 8 + 2 * 4 * 8)
    assert work_of(tmp_path, active_experts=3).layers[0].flops_per_token == 2 * (16 * 8 + 3 * 4 * 8)
    with pytest.raises(ConfigError, match="5 experts, but a layer has 4"):
        work_of(tmp_path, active_experts=5)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "no config.json"),
        ("{", "not valid JSON"),
        ("[1]", "not a JSON object"),
        ('{"top_k": "x"}', "does not tell"),
    ],
)
def test_without_a_usable_config_one_expert_counts_and_the_line_says_why(tmp_path: Path, text: str | None, why: str):
    write_experts(tmp_path, 1, 4)
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    work = work_of(tmp_path)
    assert work.layers[0].active_experts == 1
    assert any(why in line and "--active-experts" in line for line in work.assumptions)


def test_packed_weights_count_with_the_values_they_stand_for(tmp_path: Path):
    p = "model.layers.0."
    tensors = {
        f"{p}a.weight": random_raw("U8", (50, 1)),  # bitsandbytes: 100 values
        f"{p}a.weight.absmax": random_raw("F32", (2,)),
        f"{p}a.weight.quant_state.bitsandbytes__nf4": random_raw("U8", (9, 9)),
        f"{p}b.qweight": random_raw("I32", (4, 10)),  # GPTQ of 4 bits: 320 values
        f"{p}b.qzeros": random_raw("I32", (2, 10)),
        f"{p}b.scales": random_raw("F16", (2, 10)),
        f"{p}mlp.experts.up_proj_blocks": random_raw("U8", (2, 3, 4, 16)),  # MXFP4: 768 values in two experts
        f"{p}mlp.experts.up_proj_scales": random_raw("U8", (2, 3, 4)),
        f"{p}c.weight": random_raw("F8_E4M3", (6, 5)),
        f"{p}c.weight_scale_inv": random_raw("F32", (1, 1)),
    }
    write_checkpoint(tmp_path / "model.safetensors", tensors)
    config = {"num_experts_per_tok": 1, "quantization_config": {"bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    work = work_of(tmp_path)
    assert (work.layers[0].dense_values, work.layers[0].expert_values) == (100 + 320 + 30, 768)
    assert work.layers[0].flops_per_token == 2 * (450 + 384)
    (tmp_path / "config.json").unlink()
    assert work_of(tmp_path).layers[0].dense_values == 100 + 160 + 30
    assert any("8-bit values" in line for line in work_of(tmp_path).assumptions)


def test_bytes_of_no_known_packing_are_said(tmp_path: Path):
    write_checkpoint(tmp_path / "model.safetensors", {"model.layers.0.odd.weight": random_raw("U8", (5, 7))})
    work = work_of(tmp_path)
    assert work.layers[0].dense_values == 35
    assert any("model.layers.0.odd.weight" in line and "one value a byte" in line for line in work.assumptions)


def test_layers_without_a_matrix_are_refused(tmp_path: Path):
    write_checkpoint(tmp_path / "model.safetensors", {"model.layers.0.norm.weight": random_raw("BF16", (8,))})
    with pytest.raises(ConfigError, match=r"no layer .* has a matrix"):
        work_of(tmp_path)


# ---- rates


def test_rates_come_with_their_sources():
    rates = rates_for({"link": Rate(50e9, "limits of /data", "measured")}, storage_gbps=10, gpu="NVIDIA A100-SXM4-80GB")
    assert (rates.link.value, rates.link.origin) == (50e9, "measured")
    assert (rates.storage.value, rates.storage.origin) == (10e9, "given")
    assert (rates.host.value, rates.host.origin) == (50e9, "measured")
    assert (rates.compute.value, rates.compute.origin) == (312e12, "assumed")
    assert rates_for({"link": rates.link}, link_gbps=20, storage_gbps=10).link.value == 20e9


@pytest.mark.parametrize(
    ("given", "lacking"),
    [
        ({}, ["--link-gbps", "--storage-gbps"]),
        ({"link_gbps": 1.0}, ["--storage-gbps"]),
        ({"storage_gbps": 1.0}, ["--link-gbps"]),
    ],
)
def test_a_rate_that_is_not_known_is_asked_for(given: dict[str, float], lacking: list[str]):
    with pytest.raises(ConfigError, match="gdsstream limits") as refused:
        rates_for(**given)
    assert [option for option in ("--link-gbps", "--storage-gbps") if option in str(refused.value)] == lacking


def test_a_rate_has_to_be_positive():
    with pytest.raises(ConfigError, match="positive"):
        rates_for(link_gbps=0, storage_gbps=1)


def test_the_slower_of_tier_and_link_counts():
    rates = rates_for(link_gbps=10, storage_gbps=20, host_gbps=5)
    assert (rates.from_storage, rates.from_host) == (10e9, 5e9)


def test_a_measured_layer_is_a_rate_of_compute():
    assert measured_compute(2e9, 1000, 0.5).value == pytest.approx(4e12)


# ---- plans


def test_reads_that_take_longer_than_compute_set_the_pace():
    plan = plan_streaming(layers(10), RATES, Setup(tokens=1))
    whole, forward, backward, fill_s = plan.steady["training"]
    # 2(n - k) reads of 2 s; two layers of compute, 1 s each, turn round in either end's slots.
    assert whole.reads == 16
    assert whole.transfer_s == pytest.approx(32)
    assert whole.compute_s == pytest.approx(20)
    assert 32 <= whole.total_s <= 36
    assert whole.total_s == pytest.approx(whole.compute_s + sum(whole.stall_s.values()))
    assert backward is not None
    assert forward.total_s + backward.total_s == pytest.approx(whole.total_s)
    assert whole.storage_bytes == 16 * 10**9
    assert (whole.host_bytes, whole.bound) == (0, "storage")
    assert fill_s == pytest.approx(2)
    alone = plan.steady["forward"].whole
    assert (alone.total_s, alone.overhead) == (pytest.approx(20), pytest.approx(1))


def test_twice_the_tokens_hide_twice_the_bytes():
    plan = plan_streaming(layers(10), RATES, Setup(tokens=2))
    for kind in stream_model.KINDS:
        assert plan.steady[kind].whole.bound == "none"
        assert plan.steady[kind].whole.overhead <= stream_model.FREE
        assert plan.needs[kind].tokens == 2
    cells = {(cell.tokens, cell.host_bytes): cell.overhead for cell in plan.table["forward"]}
    assert {tokens for tokens, _ in cells} == set(around(2)) == {1, 2, 4, 8}
    assert cells[1, 0] == pytest.approx(1)
    assert cells[2, 0] == pytest.approx(0, abs=1e-9)
    assert cells[1, 10 * 10**9] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("kind", stream_model.KINDS)
@pytest.mark.parametrize("setup", [Setup(1), Setup(1, 3), Setup(1, 2, 3 * 10**9), Setup(3, 2, recompute=True)])
def test_what_makes_it_free_does_and_less_does_not(kind: stream_model.Kind, setup: Setup):
    rates = rates_for(link_gbps=1.01, storage_gbps=0.23, tflops=1)
    plan = plan_streaming(layers(9), rates, setup)
    model = stream_model.StreamModel(kind, plan.layers, rates, setup.backward_factor)
    needs, given = plan.needs[kind], setup.host_cache_bytes
    assert needs.tokens is not None
    assert needs.host_bytes is not None
    assert model.overhead(needs.tokens, setup.num_slots, given) <= stream_model.FREE
    assert needs.tokens == 1 or model.overhead(needs.tokens - 1, setup.num_slots, given) > stream_model.FREE
    assert model.overhead(setup.tokens, needs.num_slots, given) <= stream_model.FREE
    assert needs.num_slots == 1 or model.overhead(setup.tokens, needs.num_slots - 1, given) > stream_model.FREE
    assert model.overhead(setup.tokens, setup.num_slots, needs.host_bytes) <= stream_model.FREE
    if needs.host_bytes:
        assert model.overhead(setup.tokens, setup.num_slots, needs.host_bytes - 1) > stream_model.FREE


def test_recomputing_makes_backward_twice_as_long():
    short, long = (plan_streaming(layers(6), RATES, Setup(4, recompute=value)) for value in (False, True))
    assert short.times[0].backward_s == short.times[0].forward_s == pytest.approx(4)
    assert long.times[0].backward_s == pytest.approx(8)
    assert long.steady["training"].whole.compute_s == pytest.approx(6 * 12)


def test_a_single_slot_never_reads_ahead():
    plan = plan_streaming(layers(6), RATES, Setup(1, num_slots=1))
    whole = plan.steady["forward"].whole
    assert (whole.total_s, whole.bound) == (pytest.approx(6 * 3), "slots")
    assert plan.needs["forward"].host_bytes is None


def test_no_tier_helps_a_link_that_is_too_slow():
    plan = plan_streaming(layers(6), rates_for(link_gbps=0.5, storage_gbps=9, tflops=1), Setup(1))
    assert plan.steady["forward"].whole.bound == "link"
    assert plan.needs["forward"].host_bytes is None
    assert plan.needs["forward"].num_slots <= 6


def test_with_a_slot_for_each_layer_nothing_is_read():
    plan = plan_streaming(layers(5), RATES, Setup(1, num_slots=5))
    for kind in stream_model.KINDS:
        whole = plan.steady[kind].whole
        assert (whole.reads, whole.storage_bytes, whole.overhead, whole.bound) == (0, 0, 0, "none")


def test_the_host_layers_are_those_of_a_streamer(tmp_path: Path):
    assert stream_model.STREAMER_HOST_BYTES_PER_S == streamer._ASSUMED_HOST_BYTES_PER_S
    assert stream_model.STREAMER_STORAGE_BYTES_PER_S == streamer._ASSUMED_STORAGE_BYTES_PER_S
    write_layers(tmp_path / "model", 8)
    work = work_of(tmp_path / "model")
    budget = 3 * work.layers[0].nbytes
    plan = plan_streaming(work.layers, RATES, Setup(1, 3, budget))
    for kind in stream_model.KINDS:
        with streamer.LayerStreamer(
            tmp_path / "model", device="cpu", num_slots=3, order=kind, host_cache_bytes=budget
        ) as opened:
            assert plan.host_layers[kind] == opened.host_layers
            assert plan.slot_bytes == opened.slot_bytes
    assert len(plan.host_layers["training"]) == 3


def test_layers_of_several_sizes_and_one_alone():
    uneven = [SimpleNamespace(nbytes=n) for n in (10**9, 3 * 10**9, 0, 10**9)]
    works = [LayerWork(i, one.nbytes, one.nbytes, int(FLOPS / 2), 0, 0, 0) for i, one in enumerate(uneven)]
    plan = plan_streaming(works, RATES, Setup(3))
    assert plan.slot_bytes >= 3 * 10**9
    assert plan.steady["forward"].whole.total_s >= 12
    one = plan_streaming(layers(1), RATES, Setup(1))
    assert one.steady["training"].whole.overhead == 0


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"tokens": True}, {"num_slots": 0}, {"host_cache_bytes": -1}])
def test_settings_that_cannot_work_are_refused(wrong: dict[str, int]):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Setup(**{"tokens": 1, **wrong})


def test_layers_without_compute_are_refused():
    with pytest.raises(ConfigError, match="no layer with compute"):
        plan_streaming([LayerWork(0, 1, 1, 0, 0, 0, 0)], RATES, Setup(1))
