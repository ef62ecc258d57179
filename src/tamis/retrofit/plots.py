"""Plots as SVG text, for reports and for files. matplotlib is loaded when the first one is drawn."""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (7.0, 3.6)
"""Of a plot, in inches."""


def lines(title: str, across: str, up: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Curves by name. Those with "dense" or "oracle" in their names are dashed: the others are held to them."""
    figure = _figure()
    axes = figure.add_subplot(title=title, xlabel=across, ylabel=up)
    for name, points in series.items():
        held_to = "dense" in name or "oracle" in name
        axes.plot([x for x, _ in points], [y for _, y in points], "--" if held_to else "-", label=name, linewidth=1.3)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return _svg(figure)


def grid(
    title: str, across: str, up: str, columns: Sequence[str], rows: Sequence[str],
    values: Sequence[Sequence[float | None]],
) -> str:  # fmt: skip
    """Shares from 0 to 1 in a table of coloured cells, `values[row][column]`; None: nothing was measured there."""
    figure = _figure()
    axes = figure.add_subplot(title=title, xlabel=across, ylabel=up)
    filled = [[float("nan") if value is None else value for value in row] for row in values]
    picture = axes.imshow(filled, vmin=0.0, vmax=1.0, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(columns)), columns, fontsize="small", rotation=45)
    axes.set_yticks(range(len(rows)), rows, fontsize="small")
    figure.colorbar(picture, ax=axes)
    return _svg(figure)


def _figure() -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=SIZE, layout="constrained")


def _svg(figure: "Figure") -> str:
    """Without a date and with fixed ids, so that the same numbers give the same bytes."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "tamis", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
