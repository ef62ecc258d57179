"""`tamis retrofit`: train an index branch for a dense model."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tamis.cli.options import AsJson, Debug, Quiet, Threads
from tamis.cli.output import key_values, print_json, print_table

if TYPE_CHECKING:
    from tamis.retrofit.job import Outcome

Base = Annotated[
    str, typer.Argument(metavar="MODEL", help="A dense model of the Llama family: as other commands take it.")
]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The directory to write; an interrupted run there goes on.")]


def _option(names: str, metavar: str, text: str, **more: Any) -> Any:
    return typer.Option(*names.split(), metavar=metavar, help=text, **more)


Corpus = Annotated[
    list[Path] | None,
    _option("--corpus", "PATH", "Text files or directories to train on; may be given several times. Default: Python's "
            "standard library and literature out of copyright."),
]  # fmt: skip
Context = Annotated[
    int, _option("--context", "TOKENS", "Of a training window. Default: the model's, up to 8192.", min=0)
]
Windows = Annotated[int, _option("--windows", "N", "Windows to train on.")]
Steps = Annotated[int, _option("--steps-per-window", "N", "Steps from each window, with other queries.")]
Queries = Annotated[int, _option("--queries", "N", "Queries a layer learns from in a step.")]
Rate = Annotated[float, _option("--learning-rate", "RATE", "At its highest; it falls along a cosine.")]
Budget = Annotated[int, _option("--budget", "TOKENS", "That a query attends to in a sparse layer.")]
BlockSize = Annotated[
    list[int] | None,
    _option("--block-size", "TOKENS", "Of a block; several: the one that loses least within the budget is taken."),
]
InitBlocks = Annotated[int, _option("--init-blocks", "N", "First blocks, always attended to.")]
LocalBlocks = Annotated[int, _option("--local-blocks", "N", "Last blocks, always attended to.")]
IndexDim = Annotated[int, _option("--index-head-dim", "N", "Default: the model's head dim.")]
DenseLayers = Annotated[
    str, _option("--dense-layers", "LAYERS", "Layers that stay dense, such as 0,1; auto: those that lose most.")
]
DenseBudget = Annotated[
    int | None,
    _option("--dense-budget", "N", "How many layers auto leaves dense. Default: two in fifteen."),
]
IndexValue = Annotated[bool, typer.Option("--index-value", help="Train K+V layers, which repair what selection loses.")]
Written = Annotated[float, _option("--written", "SHARE", "Share of the windows that the model writes itself.")]
Patience = Annotated[int, _option("--patience", "N", "Stop after N windows without progress. Default: train on all.")]
Seed = Annotated[int, _option("--seed", "N", "Same seed, same weights.")]
Restart = Annotated[bool, typer.Option("--restart", help="Begin anew; forget an earlier run in OUT.")]
EvalWindows = Annotated[
    int, _option("--eval-windows", "N", "Texts of each kind to measure the result with, for the report.", min=0)
]


def retrofit(
    model: Base,
    out: Out,
    corpus: Corpus = None,
    context: Context = 0,
    windows: Windows = 24,
    steps_per_window: Steps = 8,
    queries: Queries = 128,
    learning_rate: Rate = 0.2,
    budget: Budget = 512,
    block_size: BlockSize = None,
    init_blocks: InitBlocks = 1,
    local_blocks: LocalBlocks = 1,
    index_head_dim: IndexDim = 0,
    dense_layers: DenseLayers = "auto",
    dense_budget: DenseBudget = None,
    index_value: IndexValue = False,
    written: Written = 0.08,
    patience: Patience = 0,
    seed: Seed = 0,
    threads: Threads = None,
    eval_windows: EvalWindows = 1,
    restart: Restart = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    _debug: Debug = False,
) -> None:
    """Give a dense model block-sparse attention: train an index branch for it."""
    from tamis.cli.progress import make_progress
    from tamis.models import resolve
    from tamis.retrofit.job import Job, retrofit
    from tamis.retrofit.report import write_report
    from tamis.retrofit.settings import RetrofitSettings

    settings = RetrofitSettings(
        context=context, windows=windows, steps_per_window=steps_per_window, queries=queries,
        learning_rate=learning_rate, budget=budget, index_head_dim=index_head_dim,
        block_sizes=tuple(block_size or (8,)), init_blocks=init_blocks, local_blocks=local_blocks,
        dense_layers=_layers(dense_layers), dense_budget=dense_budget, index_value=index_value, written_share=written,
        patience=patience, seed=seed,
    )  # fmt: skip
    progress = make_progress(quiet=quiet)
    source = resolve(model, progress=progress)
    # Where the result lies is nobody else's concern.
    command = shlex.join(["tamis", *(out.name if part == str(out) else part for part in sys.argv[1:])])
    outcome = retrofit(Job(source, out, settings, tuple(corpus or ()), restart, command, progress, threads))
    report = write_report(out, outcome, eval_windows, progress)
    facts = _facts(out, outcome)
    if as_json:
        print_json(facts | {"report": str(report)})
    else:
        print_table(key_values(str(out), [(name.replace("_", " "), str(value)) for name, value in facts.items()]))
        print(f"report: {report}")


def _layers(text: str) -> tuple[int, ...] | None:
    if text == "auto":
        return None
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither auto nor a list of layers such as 0,1") from None


def _facts(out: Path, outcome: "Outcome") -> dict[str, Any]:
    branch = outcome.branch
    losses = outcome.losses[branch.block_size]
    sparse = branch.sparse_layers
    dense = sorted(set(range(len(branch.layer_kinds))) - set(sparse))
    return {
        "out": str(out),
        "sparse_layers": len(sparse),
        "dense_layers": dense,
        "block_size": branch.block_size,
        "topk": branch.topk,
        "attended_tokens": branch.block_size * branch.topk,
        "mass": round(sum(losses[layer]["mass"] for layer in sparse) / len(sparse), 4),
        "oracle_mass": round(sum(losses[layer]["oracle"] for layer in sparse) / len(sparse), 4),
    }
