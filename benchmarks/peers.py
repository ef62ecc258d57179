"""transformers as a peer: one request after another."""

import inspect
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import DynamicCache

from tamis.cli.traffic import Job
from tamis.engine.tokenizer import Tokenizer
from tamis.models import resolve

# transformers itself reads GGUF only with a further package; the tests have the same weights in it already.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.smollm2 import smollm2_oracle

CHUNK = 512
"""Tokens of a prompt computed at once."""


@torch.inference_mode()
def ask_transformers(gguf: Path, jobs: Sequence[Job], threads: int) -> dict[str, float]:
    """Seconds, and greedy output tokens a second, of `jobs` on the built-in model's weights in bf16."""
    torch.set_num_threads(threads)
    tokenizer = Tokenizer.from_source(resolve(str(gguf)))
    model = smollm2_oracle(gguf).to(torch.bfloat16)
    # transformers is renaming this argument model by model.
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    prompts = [torch.tensor([tokenizer.encode(job.prompt)]) for job in jobs]
    started = time.perf_counter()
    for ids, job in zip(prompts, jobs, strict=True):
        cache = {keyword: DynamicCache(config=model.config)}
        for at in range(0, ids.shape[1], CHUNK):
            logits = model(ids[:, at : at + CHUNK], **cache, logits_to_keep=1).logits
        for _ in range(job.max_tokens - 1):
            logits = model(logits[:, -1:].argmax(-1), **cache).logits
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "tokens_s": sum(job.max_tokens for job in jobs) / seconds}
