"""The page that a retrofit run leaves behind: what was trained, how it went, and how good it became."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

from tamis.models import resolve
from tamis.progress import Progress
from tamis.retrofit.evaluate import EvalConfig, Evaluation, evaluate
from tamis.retrofit.job import Outcome
from tamis.retrofit.plots import lines

REPORT = "report.html"
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>tamis retrofit: {{ title }}</title>
<style>body{font:16px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}
table{border-collapse:collapse}td{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}
td:first-child{text-align:left}svg{max-width:100%;height:auto}</style></head>
<body><h1>{{ title }}</h1>
{% for heading, rows in tables %}<h2>{{ heading }}</h2><table>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>{% endfor %}
<h2>Plots</h2>{% for plot in plots %}<figure>{{ plot|safe }}</figure>{% endfor %}
</body></html>
"""


def write_report(out: Path, outcome: Outcome, eval_windows: int, progress: Progress) -> Path:
    """Write `out`/report.html and return its path; `eval_windows` texts of each kind are measured for it.

    Raises ConfigError where plots cannot be drawn, OSError where the page cannot be written.
    """
    evaluation = _evaluate(out, outcome, eval_windows, progress)
    tables = [("Branch", _branch_rows(outcome)), ("Layers", _layer_rows(outcome))]
    if evaluation is not None:
        tables.insert(1, ("Perplexity", _perplexity_rows(evaluation)))
    page = Environment(autoescape=True).from_string(_PAGE)
    text = page.render(title=str(out), tables=tables, plots=_plots(outcome, evaluation))
    path = out / REPORT
    path.write_text(text, "utf-8")
    return path


def _evaluate(out: Path, outcome: Outcome, windows: int, progress: Progress) -> Evaluation | None:
    if not windows:
        return None
    context = int(outcome.branch.training["settings"]["context"])
    return evaluate(resolve(str(out)), EvalConfig(context=context, windows=windows, trials=0), progress)


def _branch_rows(outcome: Outcome) -> list[Sequence[Any]]:
    branch = outcome.branch
    dense = [layer for layer in range(len(branch.layer_kinds)) if layer not in branch.sparse_layers]
    facts = {
        "base": branch.base,
        "sparse layers": len(branch.sparse_layers),
        "dense layers": ", ".join(map(str, dense)) or "none",
        "tokens a query attends to": f"{branch.block_size * branch.topk} ({branch.topk} blocks of {branch.block_size})",
        "windows trained on": branch.training["windows"],
        "command": branch.training["command"],
    }
    return list(facts.items())


def _layer_rows(outcome: Outcome) -> list[Sequence[Any]]:
    losses = outcome.losses[outcome.branch.block_size]
    rows: list[Sequence[Any]] = [("layer", "kind", "mass", "best mass", "loss of output", "by best blocks")]
    for layer, loss in losses.items():
        kind = outcome.branch.layer_kinds[layer].value
        rows.append((layer, kind, f"{loss['mass']:.4f}", f"{loss['oracle']:.4f}", f"{loss['loss']:.2e}",
                     f"{loss['oracle_loss']:.2e}"))  # fmt: skip
    return rows


def _perplexity_rows(evaluation: Evaluation) -> list[Sequence[Any]]:
    rows: list[Sequence[Any]] = [("text", "tokens", "dense", "sparse", "change")]
    for kind, found in evaluation.perplexity.items():
        rows.append((kind, found.tokens, f"{found.dense:.3f}", f"{found.sparse:.3f}", f"{found.change:+.2%}"))
    return rows


def _plots(outcome: Outcome, evaluation: Evaluation | None) -> list[str]:
    means = {
        name: [(i, sum(entry[name]) / len(entry[name])) for i, entry in enumerate(outcome.history)]
        for name in ("loss", "mass", "oracle")
    }
    losses = outcome.losses[outcome.branch.block_size]
    by_layer = {name: [(layer, loss[name]) for layer, loss in losses.items()] for name in ("mass", "oracle")}
    plots = [
        lines("Loss", "window", "KL, mean over layers", {"loss": means["loss"]}),
        lines(
            "Attention mass in the chosen blocks",
            "window",
            "mass",
            {"chosen": means["mass"], "oracle": means["oracle"]},
        ),
        lines("Attention mass by layer", "layer", "mass", {"chosen": by_layer["mass"], "oracle": by_layer["oracle"]}),
    ]
    if outcome.repairs:
        left = [(i, sum(entry["left"]) / len(entry["left"])) for i, entry in enumerate(outcome.repairs)]
        plots.append(lines("Error that index values leave", "window", "share", {"left": left}))
    if evaluation is not None:
        for kind, found in evaluation.perplexity.items():
            curves = {
                "dense": [(each.start, each.dense) for each in found.by_position],
                "sparse": [(each.start, each.sparse) for each in found.by_position],
            }
            plots.append(lines(f"Perplexity by position: {kind}", "position", "perplexity", curves))
    return plots
