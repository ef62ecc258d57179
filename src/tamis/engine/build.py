"""From a model on disk to an engine that runs it."""

import logging
from collections.abc import Sequence

import torch

from tamis.config import KV_DTYPES, EngineConfig, ModelConfig
from tamis.engine.engine import Engine
from tamis.engine.memory import build_layout, build_pool, resolve
from tamis.engine.runner import Runner
from tamis.engine.tokenizer import Tokenizer
from tamis.kernels import choose_ops
from tamis.kv import KVLayout
from tamis.kv.offload import OffloadConfig
from tamis.kv.tiers.spec import open_tiers
from tamis.kv.tiers.stack import TierStack
from tamis.models import ModelSource, load_config
from tamis.models.fingerprint import model_fingerprint
from tamis.models.gguf_file import GGUFFile
from tamis.models.loader import load_model
from tamis.progress import NoProgress, Progress

logger = logging.getLogger(__name__)


def build_engine(
    source: ModelSource, settings: EngineConfig, end_ids: Sequence[int], progress: Progress | None = None
) -> Engine:
    """Load `source` and size a pool for it; replies end at `end_ids`.

    Raises ConfigError for settings that do not suit the model, WeightError for weights that do not, TokenizerError for
    a tokenizer that cannot be read.
    """
    config = load_config(source)
    settings = resolve(settings, config)
    tokenizer = load_tokenizer(source)
    tiers = _open_tiers(settings, build_layout(settings, config))  # before the weights: a wrong path is said at once
    try:
        runner = _load_runner(source, config, settings, progress or NoProgress())
        return Engine(
            runner,
            max_batch_tokens=settings.max_batch_tokens,
            max_num_seqs=settings.max_num_seqs,
            tokenizer=tokenizer,
            end_ids=end_ids,
            prefix_cache=settings.prefix_cache,
            step_seconds=settings.step_seconds,
            tiers=tiers,
            fingerprint="" if tiers is None else model_fingerprint(source, config, settings),
            offload=OffloadConfig(write_through=settings.kv_write_through),
        )
    except BaseException:
        if tiers is not None:
            tiers.close()
        raise


def _load_runner(source: ModelSource, config: ModelConfig, settings: EngineConfig, progress: Progress) -> Runner:
    torch.set_num_threads(settings.threads or 1)
    model = load_model(source, config, dtype=KV_DTYPES[settings.dtype], quant=settings.quant, progress=progress)
    pool = build_pool(settings, config)
    ops, reason = choose_ops(settings)
    logger.info("%s in %s with %s kernels: %s", source.name, settings.dtype, ops.name, reason)
    runner = Runner(model, pool, ops, settings.device)
    runner.warm_up(progress)
    return runner


def _open_tiers(settings: EngineConfig, layout: KVLayout) -> TierStack | None:
    """The tiers that are asked for and, where they are optional, can be had. Raises ConfigError."""
    if not settings.kv_tiers:
        return None
    stack = open_tiers(settings.kv_tiers, layout, optional=settings.kv_tiers_optional)
    logger.info("KV tiers: %s", stack.name)
    return stack if stack.tiers else None


def load_tokenizer(source: ModelSource) -> Tokenizer | None:
    """The tokenizer that comes with a model; None where none does, so that it runs on token ids.

    Raises TokenizerError for one that is there but cannot be used.
    """
    if _has_tokenizer(source):
        return Tokenizer.from_source(source)
    logger.warning("%s has no tokenizer: prompts must be token ids, replies have no text", source.path)
    return None


def _has_tokenizer(source: ModelSource) -> bool:
    if source.kind == "directory":
        return (source.path / "tokenizer.json").is_file()
    with GGUFFile(source.path) as file:
        return file.find("tokenizer.ggml.model", str) not in (None, "none", "no_vocab")
