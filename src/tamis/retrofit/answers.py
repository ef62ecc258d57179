"""Asking a model what it is measured by, and keeping what it answered."""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tamis.cache import cache_dir
from tamis.config import EngineConfig
from tamis.engine.build import build_engine
from tamis.engine.llm import LLM
from tamis.engine.memory import build_layout, resolve
from tamis.engine.runner import Runner
from tamis.models import ModelSource, load_config
from tamis.progress import Progress
from tamis.retrofit.mass import LayerMass, metering
from tamis.retrofit.passkey import GREEDY, Question
from tamis.retrofit.scoring import SCORING, Scored, Window

logger = logging.getLogger(__name__)

TEXTS_IN_POOL = 3
"""More would be kept for prefixes that nobody asks for again."""
_PURPOSE = "tamis eval 1"
Haystack = list[Question]
Item = Window | Haystack
"""What a model is asked in one go."""


@dataclass
class Answers:
    """What one model made of everything it was asked."""

    scored: list[Scored] = field(default_factory=list)
    """By window."""
    found: list[list[bool]] = field(default_factory=list)
    """By haystack and question: whether the number was told."""
    mass: dict[int, LayerMass] = field(default_factory=dict)
    """By sparse layer, where it was asked for."""


class Kept:
    """Answers of one model, each in a file named after what was asked. What cannot be written costs time only."""

    def __init__(self, fingerprint: str, folder: Path | None = None) -> None:
        self._fingerprint = fingerprint
        self._folder = folder or cache_dir() / "eval"

    def recall(self, item: Item) -> Any:
        """The kept answer; None where there is none."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads(self._path(item).read_text("utf-8"))
        return None

    def keep(self, item: Item, answer: Any) -> None:
        """Write it, whole or not at all."""
        path = self._path(item)
        temporary = path.with_suffix(f".{os.getpid()}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(answer), "utf-8")
            temporary.replace(path)
        except OSError as error:
            logger.info("%s cannot be written: %s", path, error)
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _path(self, item: Item) -> Path:
        asked = [_PURPOSE, self._fingerprint, type(item).__name__, _prompts(item)]
        return self._folder / f"{hashlib.sha256(json.dumps(asked).encode()).hexdigest()}.json"


def ask(
    source: ModelSource, items: Sequence[Item], settings: EngineConfig, progress: Progress,
    *, kept: Kept | None = None, meter_from: int | None = None,
) -> Answers:  # fmt: skip
    """All of `items`, of one model; what is `kept` is not asked again, and without need the model is not loaded.

    With `meter_from` the attention mass of windows is metered too, from that position on. Raises as loading does.
    """
    known = {place: kept.recall(item) for place, item in enumerate(items)} if kept is not None else {}
    missing = [place for place in range(len(items)) if known.get(place) is None]
    answers = Answers()
    if missing:
        engine = build_engine(source, _with_room(source, items, settings), (), progress)
        with LLM.from_engine(engine) as llm, _maybe_metering(engine.runner, meter_from) as answers.mass:
            progress.start(f"measuring {Path(source.name).name}", sum(_tokens(items[p]) for p in missing), "tokens")
            try:
                for place in missing:
                    known[place] = _answer(llm, items[place])
                    if kept is not None:
                        kept.keep(items[place], known[place])
                    progress.advance(_tokens(items[place]))
            finally:
                progress.finish()
    for place, item in enumerate(items):
        if isinstance(item, Window):
            answers.scored.append(Scored(**known[place]))
        else:
            answers.found.append(known[place])
    return answers


def _with_room(source: ModelSource, items: Sequence[Item], settings: EngineConfig) -> EngineConfig:
    """`settings` with a pool that holds the longest text, the one before it, and what is asked about them."""
    if settings.kv_budget is not None:
        return settings
    config = load_config(source)
    layout = build_layout(resolve(settings, config), config)
    longest = max(len(ids) for item in items for ids in _prompts(item))
    return replace(settings, kv_budget=TEXTS_IN_POOL * (longest // layout.page_size + 1) * layout.bytes_per_page)


@contextlib.contextmanager
def _maybe_metering(runner: Runner, first: int | None) -> Any:
    if first is None:
        yield {}
        return
    with metering(runner, first) as meter:
        yield meter.layers


def _answer(llm: LLM, item: Item) -> Any:
    """As JSON takes it."""
    if isinstance(item, Window):
        return asdict(Scored.of(llm.generate([item.token_ids], SCORING)[0]))
    # The longest alone: the others find all that they share with it.
    replies = llm.generate([item[0].token_ids], GREEDY)
    if len(item) > 1:
        replies += llm.generate([question.token_ids for question in item[1:]], GREEDY)
    return [question.is_answered(reply.text) for question, reply in zip(item, replies, strict=True)]


def _prompts(item: Item) -> list[list[int]]:
    return [list(each.token_ids) for each in ([item] if isinstance(item, Window) else item)]


def _tokens(item: Item) -> int:
    """What a model reads, about: of a haystack what is behind the number, for the rest is read already."""
    if isinstance(item, Window):
        return len(item.token_ids)
    return int(len(item[0].token_ids) * (1 - item[0].depth))
