"""The plots of an evaluation: perplexity by position, passkeys by length and depth, attention mass by layer."""

from pathlib import Path

from tamis.retrofit import plots
from tamis.retrofit.evaluate import Evaluation
from tamis.retrofit.passkey import DEPTHS, Retrieval


def write_plots(measured: Evaluation, folder: Path) -> list[Path]:
    """Write what `draw` draws as SVG files in `folder`, which is made where needed. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in draw(measured).items():
        path = folder / f"{name}.svg"
        path.write_text(text, "utf-8")
        paths.append(path)
    return paths


def draw(measured: Evaluation) -> dict[str, str]:
    """SVG texts by name, of what was measured."""
    drawn = {f"perplexity_{kind}": _perplexity(measured, kind) for kind in measured.perplexity}
    if measured.passkey is not None:
        drawn["passkey_dense"] = _passkeys(measured.passkey, "dense")
        drawn["passkey_sparse"] = _passkeys(measured.passkey, "sparse")
    if measured.attention_mass is not None:
        layers = measured.attention_mass.by_layer.items()
        drawn["attention_mass"] = plots.lines(
            "Attention mass in the blocks attended to", "layer", "share of the attention",
            {"chosen blocks": [(layer, pair[0]) for layer, pair in layers],
             "best blocks (oracle)": [(layer, pair[1]) for layer, pair in layers]},
        )  # fmt: skip
    return drawn


def _perplexity(measured: Evaluation, kind: str) -> str:
    pieces = measured.perplexity[kind].by_position
    series = {
        f"dense: {measured.base}": [((piece.start + piece.end) / 2, piece.dense) for piece in pieces],
        measured.model: [((piece.start + piece.end) / 2, piece.sparse) for piece in pieces],
    }
    return plots.lines(f"Perplexity by position, {kind}", "position", "perplexity", series)


def _passkeys(retrieval: Retrieval, which: str) -> str:
    lengths = list(retrieval.by_length)
    values = [
        [getattr(retrieval.cells[length][depth], which) if depth in retrieval.cells[length] else None
         for length in lengths]
        for depth in DEPTHS
    ]  # fmt: skip
    return plots.grid(f"Passkeys found, {which}", "tokens", "depth", [f"{n:,}" for n in lengths], DEPTHS, values)
