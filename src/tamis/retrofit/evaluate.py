"""A retrofitted model against its dense base, both as they run in the engine: perplexity, retrieval, attention mass.

The two run one after the other. What the dense base answered is kept in the cache directory, so that the next branch
for it, or an evaluation that was interrupted, need not ask again.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tamis.config import EngineConfig, LayerKind, ModelConfig
from tamis.engine.build import load_tokenizer
from tamis.engine.memory import resolve
from tamis.errors import ConfigError, TokenizerError
from tamis.kv.layout import check_int
from tamis.models import ModelSource, load_config
from tamis.models.fingerprint import model_fingerprint
from tamis.models.index_branch import read_index_branch
from tamis.progress import NoProgress, Progress
from tamis.retrofit import corpus
from tamis.retrofit.answers import Answers, Haystack, Item, Kept, ask
from tamis.retrofit.mass import Mass
from tamis.retrofit.passkey import Retrieval, asked_lengths, compare_retrieval, make_haystacks
from tamis.retrofit.scoring import Comparison, Scored, Window, compare, cut_windows

LONGEST = 8192
"""Tokens of the longest texts, where nothing else is asked for."""
SEQUENCES = 16
"""Questions about one text that run at once."""
FIRST_POSITION = 2048
"""Perplexity is counted from here on: before it a model that attends to few blocks still sees much of the text."""


@dataclass(frozen=True)
class EvalConfig:
    """What is measured, and how much of it."""

    context: int | None = None
    """Tokens of the longest texts; None: the model's context, up to 8,192."""
    windows: int = 4
    """Texts of `context` tokens that are read, of each kind; 0: no perplexity and no attention mass."""
    trials: int = 100
    """Passkeys asked for at least; 0: none."""
    seed: int = 0
    """Of the passkeys."""
    paths: tuple[Path, ...] = ()
    """Texts to measure with; none: those that are held out from the default training."""
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(max_num_seqs=SEQUENCES))

    def __post_init__(self) -> None:
        for name, least in (("context", 16), ("windows", 0), ("trials", 0)):
            value = getattr(self, name)
            if value is not None:
                check_int(name, value, least)
        if not self.windows and not self.trials:
            raise ConfigError("windows=0 and trials=0 leave nothing to measure")


@dataclass(frozen=True)
class Evaluation:
    """What was measured."""

    model: str
    base: str
    context: int
    num_layers: int
    sparse_layers: list[int]
    index_kv_layers: list[int]
    block_size: int
    topk: int
    init_blocks: int
    local_blocks: int
    attended_tokens: int
    """Tokens a query attends to in a sparse layer at most, forced blocks included."""
    perplexity: dict[str, Comparison]
    """By kind of text."""
    passkey: Retrieval | None
    attention_mass: Mass | None

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def evaluate(source: ModelSource, config: EvalConfig, progress: Progress | None = None) -> Evaluation:
    """Measure `source`, a dense model with an index branch, against the same model without it.

    Raises ConfigError for a model without an index branch, a context beyond the model's, or too little text;
    ModelNotFoundError, DownloadError, WeightError and TokenizerError as loading does.
    """
    told = progress or NoProgress()
    if source.branch is None:
        raise ConfigError(f"{source.name} has no index branch: eval compares a retrofitted model with its dense base")
    model = load_config(source)
    context = _context(config, model, source.name)
    windows, haystacks = _gather(source, config, context, told)
    base = replace(source, branch=None)
    dense_model = load_config(base)
    kept = Kept(model_fingerprint(base, dense_model, resolve(config.engine, dense_model)))
    items: list[Item] = [*windows, *haystacks]
    dense = ask(base, items, config.engine, told, kept=kept)
    sparse = ask(source, items, config.engine, told, meter_from=_first(context) if windows else None)
    return _report(source, model, context, windows, haystacks, dense, sparse)


def _context(config: EvalConfig, model: ModelConfig, name: str) -> int:
    context = config.context or min(model.context_length, LONGEST)
    if context > model.context_length:
        raise ConfigError(f"context={context} is more than the {model.context_length} tokens of {name}")
    return context


def _first(context: int) -> int:
    return min(FIRST_POSITION, context // 2)


def _gather(
    source: ModelSource, config: EvalConfig, context: int, progress: Progress
) -> tuple[list[Window], list[Haystack]]:
    """Everything that both models are asked, read before either is loaded: what is wrong with it is said at once."""
    tokenizer = load_tokenizer(source)
    if tokenizer is None:
        raise TokenizerError(f"{source.name} has no tokenizer: there is no text that it could be measured with")

    def encode(text: str) -> Sequence[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    documents = corpus.read_paths(config.paths) if config.paths else []
    if not documents and config.windows:
        documents = [*corpus.default(split="held_out", kind="prose", progress=progress),
                     *corpus.default(split="held_out", kind="code", progress=progress)]  # fmt: skip
    # A context that is full to the last token has no room for the reply that an engine must give.
    windows = cut_windows(documents, encode, context - 1, config.windows) if config.windows else []
    lengths = asked_lengths(context)
    return windows, make_haystacks(encode, lengths, config.trials, config.seed) if config.trials else []


def _report(
    source: ModelSource, model: ModelConfig, context: int, windows: Sequence[Window], haystacks: Sequence[Haystack],
    dense: Answers, sparse: Answers,
) -> Evaluation:  # fmt: skip
    assert model.sparse is not None and source.branch is not None
    kinds = model.layer_kinds
    return Evaluation(
        model=source.name,
        base=read_index_branch(source.branch).base,
        context=context,
        num_layers=model.num_layers,
        sparse_layers=[i for i, kind in enumerate(kinds) if kind is not LayerKind.DENSE],
        index_kv_layers=[i for i, kind in enumerate(kinds) if kind is LayerKind.SPARSE_KV],
        block_size=model.sparse.block_size,
        topk=model.sparse.topk,
        init_blocks=model.sparse.init_blocks,
        local_blocks=model.sparse.local_blocks,
        attended_tokens=model.sparse.topk * model.sparse.block_size,
        perplexity={
            kind: _compare(kind, windows, dense.scored, sparse.scored, _first(context))
            for kind in dict.fromkeys(window.kind for window in windows)
        },
        passkey=compare_retrieval(haystacks, dense.found, sparse.found) if haystacks else None,
        attention_mass=Mass.of(sparse.mass) if windows else None,
    )


def _compare(
    kind: str, windows: Sequence[Window], dense: Sequence[Scored], sparse: Sequence[Scored], first: int
) -> Comparison:
    places = [place for place, window in enumerate(windows) if window.kind == kind]
    return compare([dense[p] for p in places], [sparse[p] for p in places], first, max(1, first // 4))
