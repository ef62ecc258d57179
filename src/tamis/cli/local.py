"""A model in the command's own process, for one user: loading it, and what is printed where."""

import sys
from typing import TYPE_CHECKING, Any

from tamis.units import format_size

if TYPE_CHECKING:
    from tamis.engine.llm import LLM


def load(model: str | None, settings: dict[str, Any], *, quiet: bool) -> "LLM":
    """An LLM that runs one reply at a time, with bars on standard error while it loads. Raises what LLM raises."""
    from tamis.cli.progress import make_progress
    from tamis.engine.llm import LLM

    progress = make_progress(quiet=quiet)
    try:
        return LLM(model, **settings, max_num_seqs=1, progress=progress)
    finally:
        progress.finish()  # also where loading was interrupted


def room(llm: "LLM") -> str:
    """What fits into the KV pool, in one line."""
    stats, layout = llm.stats, llm.layout
    size = format_size(stats.pages_total * layout.bytes_per_page)
    return f"KV pool:   room for {stats.pages_total * stats.page_size:,} tokens in {size}, {stats.page_size} a page"


def write(text: str) -> None:
    """A piece of a reply, to standard output at once."""
    print(text, end="", flush=True)


def say(*lines: str) -> None:
    """Lines beside the reply, to standard error."""
    print(*lines, sep="\n", file=sys.stderr, flush=True)
