"""`gdsstream plan`: arguments and output of `gdsstream.planner` and `gdsstream.plan_compare`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gdsstream.cli.output import emit, json_option

if TYPE_CHECKING:
    from gdsstream.rates import Rate, Station


def _size(context: click.Context, parameter: click.Parameter, value: str) -> int:
    from gdsstream.config import parse_bytes

    try:
        return parse_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from None


def _measured(path: str) -> dict[Station, Rate]:
    """Storage and link, as far as this machine has them."""
    from gdsstream.devices import default_device
    from gdsstream.limits import limits

    device = default_device()
    click.echo(f"measuring what {path} and {device} can do ...", err=True)
    return dict(limits(path, device).rates())


_RATE = click.FloatRange(min=0, min_open=True)


@click.command("plan")
@click.argument("checkpoint", type=click.Path(exists=True))
@click.option("--tokens", type=click.IntRange(min=1), required=True, help="Tokens that pass through a layer at once.")
@click.option("--link-gbps", type=_RATE, help="Host memory to GPU, in gigabytes a second.")
@click.option("--storage-gbps", type=_RATE, help="Storage, in gigabytes a second; the link is the most that counts.")
@click.option("--host-gbps", type=_RATE, help="Host tier to GPU, in gigabytes a second; the link's rate otherwise.")
@click.option("--tflops", type=_RATE, help="Matrix products as they are reached, not the peak; the peak otherwise.")
@click.option("--compute-ms", type=_RATE, help="Instead of --tflops: a layer's forward pass at --tokens, measured.")
@click.option(
    "--slots", type=click.IntRange(1, 4096), default=2, show_default=True, help="Layers in GPU memory at once."
)
@click.option(
    "--host-cache-bytes",
    metavar="SIZE",
    callback=_size,
    default="0",
    help='Host tier: "96GB", "64GiB"; none otherwise.',
)
@click.option("--recompute", is_flag=True, help="Backward repeats the forward pass (activation checkpointing).")
@click.option("--active-experts", type=click.IntRange(min=1), help="Experts a token is sent to; from config.json.")
@click.option("--layers", metavar="PATTERN", help='Such as "model.layers.{i}."; found by itself otherwise.')
@click.option(
    "--compare", type=click.Path(exists=True, dir_okay=False), help="Records of the bench to predict as well."
)
@click.option("--loader", "loaders", multiple=True, help="Compare only these loaders of the records; may be repeated.")
@json_option
def command(
    checkpoint: str,
    tokens: int,
    link_gbps: float | None,
    storage_gbps: float | None,
    host_gbps: float | None,
    tflops: float | None,
    compute_ms: float | None,
    slots: int,
    host_cache_bytes: int,
    recompute: bool,
    active_experts: int | None,
    layers: str | None,
    compare: str | None,
    loaders: tuple[str, ...],
    as_json: bool,
) -> None:
    """What streaming the layers of CHECKPOINT will cost at a number of tokens, and what would hide it.

    Reads headers and config.json only, so the machine that is planned for need not be this one. Layer by layer the
    library's own schedule is played with the times that bytes and FLOPs give, for a training step (forward and backward
    through frozen layers) and for forward passes alone: overhead over the same compute with all weights in GPU memory,
    what it waits for, and how many tokens, slots or bytes of host memory would make it free.

    Rates are decimal GB/s. Link and storage are measured here where they are not given (some 20 seconds, as `gdsstream
    limits` does); of the rest, what is not given is assumed so that a plan promises too little. Every value is printed
    with its source.

    \b
      gdsstream plan Qwen3-30B-A3B --tokens 16384 --link-gbps 55 --storage-gbps 20 --tflops 600
      gdsstream plan ... --compare pipeline.jsonl   against what was measured; exit code 1 beyond 10 %
    """
    if tflops is not None and compute_ms is not None:
        raise click.UsageError("--tflops and --compute-ms say the same; give one of them")
    if loaders and compare is None:
        raise click.UsageError("--loader belongs to --compare")

    from gdsstream.checkpoint import Checkpoint
    from gdsstream.cli.plan_output import report
    from gdsstream.layer_work import model_work, read_model_config
    from gdsstream.layout import layer_layouts
    from gdsstream.machine import probe
    from gdsstream.plan_compare import compare as compare_records
    from gdsstream.planner import Setup, plan_streaming
    from gdsstream.rates import measured_compute, rates_for

    opened = Checkpoint.open(checkpoint)
    pattern, layouts = layer_layouts(opened, layers)
    work = model_work(layouts, read_model_config(opened), active_experts=active_experts)
    known: dict[Station, Rate] = {}
    if link_gbps is None or storage_gbps is None:
        known.update(_measured(checkpoint))
    gpu = None
    if compute_ms is not None:
        mean_flops = sum(layer.flops_per_token for layer in work.layers) / len(work.layers)
        known["compute"] = measured_compute(mean_flops, tokens, compute_ms / 1e3)
    elif tflops is None:
        gpu = next((one.name for one in probe().gpus), None)
    rates = rates_for(
        known, link_gbps=link_gbps, storage_gbps=storage_gbps, host_gbps=host_gbps, tflops=tflops, gpu=gpu
    )
    plan = plan_streaming(work.layers, rates, Setup(tokens, slots, host_cache_bytes, recompute))
    compared = None if compare is None else compare_records(compare, rates, loaders)
    emit(report(opened, pattern, plan, work.assumptions, compared), as_json=as_json)


__all__ = ["command"]
