"""`tamis plan`: what a model takes on each rank, and how many tokens and requests fit."""

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from tamis.cli import local
from tamis.cli.options import (
    AsJson,
    Debug,
    DeviceMemory,
    IndexDtype,
    KVDtypes,
    MaxBatchTokens,
    MaxSeqs,
    Memory,
    ModelOrConfig,
    PageSizes,
    PlanTier,
    PlanWeightDtype,
    Quant,
    Quiet,
    RequestTokens,
    Stage,
    Stages,
    TensorRanks,
)
from tamis.units import parse_size

if TYPE_CHECKING:
    from tamis.config import ModelConfig
    from tamis.engine.planning import StagePlan
    from tamis.models import ModelSource

NOTHING_FITS = 1
"""Exit code where the memory holds no page."""


@dataclass(frozen=True)
class Wanted:
    """What is planned, whatever the combination of types and ranks."""

    index_dtype: str | None
    pp_rank: int | None
    weight_dtype: str
    quant: str
    max_batch_tokens: int
    max_num_seqs: int
    memory: int | None
    device_memory: int | None


@dataclass(frozen=True)
class Combination:
    """One of each list."""

    kv_dtype: str
    tp_size: int
    pp_size: int
    page_size: int | None


def plan(
    model: ModelOrConfig = None,
    memory: Memory = None,
    device_memory: DeviceMemory = None,
    page_size: PageSizes = None,
    kv_dtype: KVDtypes = "bf16",
    index_dtype: IndexDtype = None,
    tp_size: TensorRanks = "1",
    pp_size: Stages = "1",
    pp_rank: Stage = None,
    weight_dtype: PlanWeightDtype = "auto",
    quant: Quant = "auto",
    max_batch_tokens: MaxBatchTokens = 512,
    max_seqs: MaxSeqs = 64,
    request_tokens: RequestTokens = None,
    kv_tier: PlanTier = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    _debug: Debug = False,
) -> None:
    """Show what weights, KV pool and scratch take on a rank, and how many tokens and requests fit.

    A config.json is enough: no weights are read. A list (`--kv-dtype bf16,fp8_e4m3 --tp-size 1,4,8`) gives a Markdown
    table. Exit code 1 where not a single page fits.
    """
    from tamis.cli.output import print_json, print_table
    from tamis.cli.plan_facts import markdown, plan_facts, plan_table
    from tamis.cli.progress import make_progress
    from tamis.models import load_config, resolve

    lengths = None if request_tokens is None else _numbers("--request-tokens", request_tokens)
    combinations = [
        Combination(*parts)
        for parts in itertools.product(
            _parts(kv_dtype), _numbers("--tp-size", tp_size), _numbers("--pp-size", pp_size),
            [None] if page_size is None else _numbers("--page-size", page_size, least=None),
        )
    ]  # fmt: skip
    wanted = Wanted(
        index_dtype, pp_rank, weight_dtype, quant, max_batch_tokens, max_seqs, *map(_size, (memory, device_memory))
    )
    source = resolve(model, weights=False, progress=make_progress(quiet=quiet))
    config = load_config(source)
    plans = [_plan(source, config, each, wanted) for each in combinations]
    facts = [plan_facts(source.name, config, each, lengths, kv_tier or ()) for each in plans]
    if len(facts) > 1:
        print_json({"plans": facts}) if as_json else print(markdown(facts))
    else:
        print_json(facts[0]) if as_json else print_table(plan_table(facts[0]))
    _refuse_nothing(plans, memory, device_memory)


def _plan(source: "ModelSource", config: "ModelConfig", each: Combination, wanted: Wanted) -> "StagePlan":
    """The plan of the stage that is asked for, else of the one with the least room."""
    from tamis.cli.layouts import build_layout
    from tamis.config import ParallelContext
    from tamis.engine.planning import Load, plan_dtype, plan_stage

    load = Load(wanted.max_batch_tokens, wanted.max_num_seqs)
    dtype = plan_dtype(wanted.weight_dtype, config)
    found = []
    for rank in range(each.pp_size) if wanted.pp_rank is None else [wanted.pp_rank]:
        place = ParallelContext(tp_size=each.tp_size, pp_rank=rank, pp_size=each.pp_size)
        layout = build_layout(
            config, kv_dtype=each.kv_dtype, index_dtype=wanted.index_dtype, page_size=each.page_size, parallel=place
        )
        found.append(
            plan_stage(
                config, layout, place, dtype=dtype, quant=wanted.quant, load=load, source=source,
                memory=wanted.memory, device_memory=wanted.device_memory,
            )
        )  # fmt: skip
    return min(found, key=lambda stage: (stage.tokens or 0, -stage.layout.bytes_per_page, -stage.weights["total"]))


def _refuse_nothing(plans: list["StagePlan"], memory: str | None, device_memory: str | None) -> None:
    """Say so, and exit with NOTHING_FITS, where there is a budget and no plan has a page."""
    if any(stage.pages != 0 for stage in plans):
        return
    stage = min(plans, key=lambda one: (one.weights["total"], one.layout.bytes_per_page))
    page = f"{stage.layout.bytes_per_page:,} bytes ({stage.layout.page_size:,} tokens)"
    if memory is not None:
        text = f"--memory {memory} is {parse_size(memory):,} bytes and holds no page: one takes {page}"
    else:
        assert device_memory is not None
        text = (
            f"--device-memory {device_memory} is {parse_size(device_memory):,} bytes and holds no page: weights take "
            f"{stage.weights['total']:,} bytes, scratch {stage.scratch:,}, the padding page and one more {page} each"
        )
    local.say(f"error: {text}")
    raise typer.Exit(NOTHING_FITS)


def _size(text: str | None) -> int | None:
    return None if text is None else parse_size(text)


def _parts(text: str) -> list[str]:
    """The entries of a list, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",")))


def _numbers(option: str, text: str, least: int | None = 1) -> list[int]:
    """The whole numbers of a list. Raises a usage error that names the option."""
    numbers = []
    for part in _parts(text):
        try:
            number = int(part)
        except ValueError:
            raise typer.BadParameter(f"{part!r} is not a whole number.", param_hint=f"'{option}'") from None
        if least is not None and number < least:
            raise typer.BadParameter(f"{number} is not in the range x>={least}.", param_hint=f"'{option}'")
        numbers.append(number)
    return numbers
