"""`retrofit`: from a dense model and texts to a directory with an index branch, step by step, each resumable."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tamis.config import LayerKind
from tamis.engine.build import load_tokenizer
from tamis.errors import TokenizerError
from tamis.models import ModelSource, load_config
from tamis.models.fingerprint import base_fingerprint
from tamis.models.index_branch import BaseArchitecture, IndexBranch, write_index_branch
from tamis.progress import NoProgress, NotedProgress
from tamis.retrofit import corpus
from tamis.retrofit.checkpoint import WINDOWS, check_plan, read_tensors, write_tensors
from tamis.retrofit.choose import Losses, choose_block_size, choose_dense, measure, selection_of
from tamis.retrofit.repair import repair
from tamis.retrofit.settings import RetrofitSettings
from tamis.retrofit.teacher import LayerView, Teacher, check_base
from tamis.retrofit.train import Run
from tamis.retrofit.windows import training_windows
from tamis.retrofit.written import write_windows

MEASURED = 2
"""Texts, not trained on, that layers and block sizes are chosen by."""


@dataclass(frozen=True)
class Job:
    """What `tamis retrofit` was asked to do."""

    source: ModelSource
    out: Path
    settings: RetrofitSettings
    paths: Sequence[Path] = ()
    """Texts to train on; none: the default corpus."""
    restart: bool = False
    """Forget what an earlier run left in `out`."""
    command: str = ""
    """As it was typed, for the record."""
    progress: NotedProgress = field(default_factory=NoProgress)
    threads: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    branch: IndexBranch
    losses: Losses
    history: list[dict[str, Any]]
    layers: list[int]
    """Those that learned, as the entries of the history count them."""
    repairs: list[dict[str, Any]]


def retrofit(job: Job) -> Outcome:
    """Train an index branch and write it to `job.out`; goes on where an earlier run with the same settings stopped.

    Raises ConfigError for a base or settings that cannot be trained, or an empty or binary corpus; what loading a model
    raises; OSError where the disk is full: the last checkpoint stays, and the same call goes on from it.
    """
    config = check_base(job.source, load_config(job.source))
    settings = job.settings.resolve(config)
    if job.restart:
        shutil.rmtree(job.out / "training", ignore_errors=True)
    windows, listing = _gather(job, settings)
    torch.set_num_threads(job.threads or torch.get_num_threads())
    teacher = Teacher(job.source, progress=job.progress)
    fingerprint = base_fingerprint(job.source)
    plan = {"settings": settings.plan(), "base": fingerprint, "corpus": listing}
    run = Run(teacher, settings, windows[: settings.windows], job.out / "training", plan, job.progress)
    run.resume()
    run.train()
    losses = measure(teacher, run.learners, settings, windows[settings.windows :], job.progress)
    size = choose_block_size(losses)
    dense = choose_dense(losses[size], settings, config.num_layers)
    if settings.index_value:
        _repair(run, settings, size)
    branch = _branch(job, settings, run, fingerprint, size, dense)
    write_index_branch(job.out, branch, _tensors(run, branch))
    return Outcome(branch, losses, run.state.history, list(run.learners), run.state.repairs)


def _gather(job: Job, settings: RetrofitSettings) -> tuple[list[Tensor], list[dict[str, str]]]:
    """The windows, int64, those to measure with last, and the texts they are from; as an earlier run gathered them."""
    path = job.out / "training" / WINDOWS
    groups = (
        [corpus.read_paths(job.paths)]
        if job.paths
        else [
            corpus.default(split="train", kind="code"),
            corpus.default(split="train", kind="prose", progress=job.progress),
        ]
    )
    listing = corpus.listing(document for group in groups for document in group)
    plan = {"corpus": listing, "base": base_fingerprint(job.source), "settings": settings.plan()}
    if path.exists():
        tensors, facts = read_tensors(path)
        check_plan(path, facts, plan)
        return list(tensors["windows"].long()), listing
    windows = _new_windows(job, settings, groups)
    write_tensors(path, {"windows": torch.stack(windows).int()}, plan)
    return windows, listing


def _new_windows(job: Job, settings: RetrofitSettings, groups: Sequence[Sequence[corpus.Document]]) -> list[Tensor]:
    tokenizer = load_tokenizer(job.source)
    if tokenizer is None:
        raise TokenizerError(f"{job.source.name} has no tokenizer, so there is no text to train on")

    def encode(text: str) -> Sequence[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    own = round(settings.written_share * settings.windows)
    read = training_windows(groups, encode, settings.context, settings.windows + MEASURED - own, settings.seed)
    written = write_windows(job.source.name, settings.context, own, settings.seed, job.progress, job.threads)
    # Its own text is spread evenly; what is measured comes last and is none of it.
    for number, window in enumerate(written):
        read.insert(number * settings.windows // own, window)
    return read


def _repair(run: Run, settings: RetrofitSettings, block_size: int) -> None:
    """Train the index values on the same windows."""
    selection, state, teacher = selection_of(settings, block_size), run.state, run.teacher
    run.progress.start("training index values", settings.windows, "steps")
    try:
        run.progress.advance(state.repaired)
        for window in range(state.repaired, settings.windows):
            token_ids = run.windows[window]
            rope, left = teacher.rope(len(token_ids)), list[float]()

            def learn(view: LayerView, window: int = window, rope: Any = rope, left: list[float] = left) -> None:
                if view.layer in run.learners:
                    o_proj = teacher.attention(view.layer).o_proj
                    learner = run.learners[view.layer]
                    left.append(repair(learner, selection, settings, view, o_proj, rope, window))

            teacher.visit(token_ids, learn)
            state.repairs.append({"left": [round(share, 5) for share in left]})
            state.repaired += 1
            run.save_if_due()
            run.progress.advance(1)
            run.progress.note(f"error left {sum(left) / len(left):.3f}")
    finally:
        run.progress.finish()
    run.save()


def _branch(
    job: Job, settings: RetrofitSettings, run: Run, fingerprint: str, block_size: int, dense: Sequence[int]
) -> IndexBranch:
    config = run.teacher.config
    kind = LayerKind.SPARSE_KV if settings.index_value else LayerKind.SPARSE_K
    return IndexBranch(
        base=_base_name(job.source),
        base_fingerprint=fingerprint,
        base_architecture=BaseArchitecture.of(config),
        layer_kinds=tuple(LayerKind.DENSE if i in dense else kind for i in range(config.num_layers)),
        index_heads=config.kv_heads,
        index_head_dim=settings.index_head_dim,
        index_rotary_dim=config.rope.rotary_dim,
        norm_eps=config.norm_eps,
        block_size=block_size,
        topk=settings.budget // block_size,
        init_blocks=settings.init_blocks,
        local_blocks=settings.local_blocks,
        training={
            "command": job.command, "tamis": version("tamis"), "torch": torch.__version__,
            "settings": settings.record(), "windows": run.state.done, "last": _last(run.state.history),
            "corpus": run.plan["corpus"],
        },
    )  # fmt: skip


def _base_name(source: ModelSource) -> str:
    """As it was given; a path in full, so that the branch finds its base from anywhere on this machine."""
    return str(Path(source.name).absolute()) if Path(source.name).exists() else source.name


def _last(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Loss, mass and oracle, the mean over layers and the last eight windows."""
    recent = history[-8:]
    return {
        name: round(sum(sum(entry[name]) / len(entry[name]) for entry in recent) / len(recent), 5)
        for name in ("loss", "mass", "oracle")
    }


def _tensors(run: Run, branch: IndexBranch) -> dict[str, Tensor]:
    """The tensors of the sparse layers by the names that the file gives them."""
    found = {}
    for layer in branch.sparse_layers:
        for name, value in run.learners[layer].student.state_dict().items():
            found[f"layers.{layer}.self_attn.index_{name}.weight"] = value
    return found
