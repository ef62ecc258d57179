"""`tamis eval`: a retrofitted model against its dense base."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tamis.cli.options import AsJson, Debug, EngineKVDtype, Model, Quant, Quiet, Threads, WeightDtype
from tamis.cli.output import new_table, print_json, print_table

if TYPE_CHECKING:
    from rich.table import Table

    from tamis.retrofit.evaluate import Evaluation

Context = Annotated[
    int | None,
    typer.Option("--context", metavar="TOKENS", help="Of the longest texts. Default: the model's, up to 8192."),
]
Windows = Annotated[
    int, typer.Option("--windows", metavar="N", min=0, help="Texts as long as the context, of each kind; 0: none.")
]
Trials = Annotated[int, typer.Option("--trials", metavar="N", min=0, help="Passkeys to ask for at least; 0: none.")]
Texts = Annotated[
    list[Path] | None,
    typer.Option("--corpus", metavar="PATH", help="Text to measure with, a file or a directory; may be given several "
                 "times. Default: prose and code that the default training holds out."),
]  # fmt: skip
KeySeed = Annotated[int, typer.Option("--seed", metavar="N", help="Of the passkeys.")]
Plots = Annotated[Path | None, typer.Option("--plots", metavar="DIR", help="Write plots there, as SVG.")]


def evaluate(
    model: Model = None,
    context: Context = None,
    windows: Windows = 4,
    trials: Trials = 100,
    corpus: Texts = None,
    seed: KeySeed = 0,
    plots: Plots = None,
    dtype: WeightDtype = "auto",
    kv_dtype: EngineKVDtype = "auto",
    quant: Quant = "auto",
    threads: Threads = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    _debug: Debug = False,
) -> None:
    """Measure a retrofitted model against its dense base: perplexity, passkey retrieval, attention mass."""
    from tamis.cli.progress import make_progress
    from tamis.config import EngineConfig
    from tamis.models import resolve
    from tamis.retrofit.evaluate import SEQUENCES, EvalConfig
    from tamis.retrofit.evaluate import evaluate as measure

    engine = EngineConfig(dtype=dtype, kv_dtype=kv_dtype, quant=quant, threads=threads, max_num_seqs=SEQUENCES)
    config = EvalConfig(context, windows, trials, seed, tuple(corpus or ()), engine)
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)  # before the work: a path that cannot be one is said at once
    progress = make_progress(quiet=quiet)
    measured = measure(resolve(model, progress=progress), config, progress)
    if plots is not None:
        from tamis.retrofit.eval_plots import write_plots

        write_plots(measured, plots)
    if as_json:
        print_json(measured.as_json())
    else:
        sparse = len(measured.sparse_layers)
        print(
            f"{measured.model} against {measured.base}: {sparse} of {measured.num_layers} layers sparse, "
            f"{measured.attended_tokens} tokens attended to ({measured.topk} blocks of {measured.block_size})\n"
        )
        for table in _tables(measured):
            print_table(table)


def _tables(measured: "Evaluation") -> "list[Table]":
    tables = [_perplexity(measured)] if measured.perplexity else []
    if measured.passkey is not None:
        tables.append(_passkey(measured))
    if measured.attention_mass is not None:
        tables.append(_mass(measured))
    return tables


def _perplexity(measured: "Evaluation") -> "Table":
    table = new_table(
        "",
        [("perplexity", False), ("tokens", True), ("dense", True), ("sparse", True), ("change", True),
         ("same greedy token", True)],
    )  # fmt: skip
    for kind, found in measured.perplexity.items():
        table.add_row(
            f"{kind}, from position {found.first_position:,}", f"{found.tokens:,}", f"{found.dense:.3f}",
            f"{found.sparse:.3f}", f"{found.change:+.2%} \u00b1 {found.change_error:.2%}", f"{found.same_greedy:.2%}",
        )  # fmt: skip
        for piece in found.by_position:
            change = f"{piece.sparse / piece.dense - 1:+.2%}"
            table.add_row(f"  {piece.start:,} to {piece.end - 1:,}", f"{piece.tokens:,}", f"{piece.dense:.3f}",
                          f"{piece.sparse:.3f}", change, "")  # fmt: skip
    return table


def _passkey(measured: "Evaluation") -> "Table":
    passkey = measured.passkey
    assert passkey is not None
    table = new_table("", [("passkey found", False), ("trials", True), ("dense", True), ("sparse", True)])
    rows = {"all": passkey.total}
    if passkey.judged is not None:
        rows["where dense finds 80%"] = passkey.judged
    rows |= {f"  {length:,} tokens": found for length, found in passkey.by_length.items()}
    rows |= {f"  depth {depth}": found for depth, found in passkey.by_depth.items()}
    for name, found in rows.items():
        table.add_row(name, f"{found.trials:,}", f"{found.dense:.1%}", f"{found.sparse:.1%}")
    return table


def _mass(measured: "Evaluation") -> "Table":
    mass = measured.attention_mass
    assert mass is not None
    table = new_table("", [("attention mass", False), ("chosen blocks", True), ("best blocks", True)])
    table.add_row("all sparse layers", f"{mass.captured:.2%}", f"{mass.oracle:.2%}")
    worst = sorted(mass.by_layer.items(), key=lambda item: item[1][0] - item[1][1])[:5]
    for layer, (captured, oracle) in worst:
        table.add_row(f"  layer {layer}", f"{captured:.2%}", f"{oracle:.2%}")
    return table
