"""The built-in models: the dense one against transformers on the same dequantised weights, the sparse against it."""

import argparse
import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support import tiny
from support.smollm2 import smollm2_oracle
from tamis import LLM, SamplingParams
from tamis.names import SPARSE_MODEL

PROMPTS = [
    "The sieve separates coarse flour from fine flour, and the miller",
    "def fibonacci(n):\n    ",
    "In 1969, the first people to land on the Moon",
    "Question: Why is the sky blue?\nAnswer:",
    "Once upon a time there was a drum maker who",
]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def oracle(builtin_gguf: Path) -> Any:
    return smollm2_oracle(builtin_gguf)


@pytest.fixture(scope="module")
def llm(builtin_gguf: Path) -> Iterator[LLM]:
    with LLM(str(builtin_gguf), dtype="fp32", max_batch_tokens=256, kv_budget=400 << 20) as llm:
        yield llm


def document(llm: LLM, tokens: int) -> list[int]:
    """Prose, then code, cut to a number of tokens."""
    text = (ROOT / "LICENSE").read_text() + inspect.getsource(argparse)
    ids = llm.encode(text)[:tokens]
    assert len(ids) == tokens
    return ids


def perplexity(llm: LLM, ids: list[int]) -> float:
    """exp of the mean negative log-likelihood of every token but the first."""
    (completion,) = llm.generate([ids], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    assert completion.prompt_logprobs is not None
    found = [entry.logprob for entry in completion.prompt_logprobs if entry is not None]
    assert len(found) == len(ids) - 1
    return math.exp(-math.fsum(found) / len(found))


def test_greedy_tokens_of_five_prompts(oracle: Any, llm: LLM) -> None:
    """Each of 64 tokens is the oracle's most probable one after the tokens before it."""
    prompts = [llm.encode(text) for text in PROMPTS]
    sampling = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    for prompt, completion in zip(prompts, llm.generate(prompts, sampling), strict=True):
        generated = list(completion.token_ids)
        assert len(generated) == 64
        wanted = tiny.oracle_logits(oracle, prompt + generated[:-1])[len(prompt) - 1 :].argmax(-1)
        assert generated == wanted.tolist()


def test_logits(oracle: Any, llm: LLM) -> None:
    """Log-probabilities of the 100 best tokens at every position; they differ from logits by a constant a row."""
    ids = document(llm, 300)
    (completion,) = llm.generate([ids], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=100))
    wanted = tiny.oracle_logits(oracle, ids).log_softmax(-1)
    assert completion.prompt_logprobs is not None
    for position, entry in enumerate(completion.prompt_logprobs):
        if entry is None:
            continue
        tokens = torch.tensor(list(entry.top))
        got = torch.tensor(list(entry.top.values()))
        torch.testing.assert_close(got, wanted[position - 1, tokens], atol=1e-3, rtol=0)


@pytest.mark.slow
def test_perplexity_of_a_long_document(oracle: Any, builtin_gguf: Path) -> None:
    """As the model runs by default: weights and pool rounded, kernels for this CPU."""
    with LLM(str(builtin_gguf), kv_budget=200 << 20) as llm:
        ids = document(llm, 3000)
        logprobs = tiny.oracle_logits(oracle, ids).log_softmax(-1)
        wanted = math.exp(-float(logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None]).double().mean()))
        assert perplexity(llm, ids) == pytest.approx(wanted, rel=0.005)


def test_within_what_it_attends_to_the_sparse_model_is_the_dense_one(llm: LLM) -> None:
    with LLM(SPARSE_MODEL, dtype="fp32", max_batch_tokens=256, kv_budget=50 << 20) as sparse:
        settings = sparse.config.sparse
        assert settings is not None
        ids = document(llm, min(settings.topk * settings.block_size, 400))
        assert perplexity(sparse, ids) == pytest.approx(perplexity(llm, ids), rel=1e-4)


@pytest.mark.slow
def test_beyond_that_the_sparse_model_stays_near_the_dense_one(builtin_gguf: Path) -> None:
    """What `tamis eval` measures at length, here as an alarm; with an untrained branch it is a fifth more."""
    found = []
    for name in (SPARSE_MODEL, str(builtin_gguf)):
        with LLM(name, kv_budget=200 << 20) as llm:
            found.append(perplexity(llm, document(llm, 3000)))
    assert found[0] == pytest.approx(found[1], rel=0.04)


def test_capital_of_france(builtin_gguf: Path) -> None:
    with LLM(str(builtin_gguf), kv_budget=50 << 20) as llm:
        reply = llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0))
    assert "Paris" in reply.text
