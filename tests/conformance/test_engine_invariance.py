"""DESIGN 7, through the engine: fp32 tokens do not depend on what else runs, on chunks, cache hits or retraction.

Contexts reach over several sparse blocks, beyond what top-k picks, so that a wrong index plane shows.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from support import spellings, tiny
from support.branches import retrofitted
from support.engines import complete, greedy, run
from support.running import greedy as model_greedy
from support.running import random_ids
from tamis.engine.engine import Engine
from tamis.engine.runner import Runner
from tamis.kernels import ReferenceOps
from tamis.kernels.cpu.ops import CpuOps
from tamis.kv import KVLayout, SparseKVPool
from tamis.models import load_config
from tamis.models.decoder import CausalLM
from tamis.models.hub import ModelSource
from tamis.models.loader import load_model
from tamis.request import Request, SamplingParams

BLOCK = 16
PAGE = 8
STEPS = 12
LENGTHS = (1, BLOCK - 1, 4 * BLOCK, 5 * BLOCK + 3)


@pytest.fixture(scope="module", params=["dense", "K-only", "K+V", "index branch"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    path = tmp_path_factory.mktemp("model")
    if request.param in ("dense", "index branch"):
        layers = 2 if request.param == "dense" else 3
        tiny.save(tiny.build(tiny.llama_config("llama", num_hidden_layers=layers), seed=1), path)
    else:
        oracle = tiny.build(tiny.m3_config(2, topk=2, block=BLOCK), seed=2)
        index_value = [1] if request.param == "K+V" else []
        spellings.add_index_value(oracle, index_value)
        spellings.write_released(oracle, path, index_value=index_value)
    source = ModelSource(path.name, path, "directory")
    if request.param == "index branch":
        source = retrofitted(path, tmp_path_factory.mktemp("branch"), block_size=BLOCK, topk=2, init_blocks=0)
    return load_model(source, load_config(source), dtype=torch.float32)


Make = Callable[..., Engine]


@pytest.fixture(params=["reference", "cpu"])
def make(request: pytest.FixtureRequest, model: CausalLM) -> Any:
    ops = ReferenceOps() if request.param == "reference" else CpuOps(2)

    def build(pages: int = 200, page_size: int = PAGE, max_batch_tokens: int = 512, **options: Any) -> Engine:
        layout = KVLayout.from_model(model.config, page_size=page_size, dtype=torch.float32)
        return Engine(
            Runner(model, SparseKVPool(layout, pages), ops),
            max_batch_tokens=max_batch_tokens, max_num_seqs=64, **options,
        )  # fmt: skip

    yield build
    ops.close()


@pytest.fixture(scope="module")
def prompts(model: CausalLM) -> list[list[int]]:
    return [random_ids(length, model.config, seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def alone(model: CausalLM, prompts: list[list[int]]) -> list[list[int]]:
    """What the model says without an engine, a prompt at a time, on one page a block."""
    return [model_greedy(model, ids, STEPS, page_size=BLOCK) for ids in prompts]


def replies(engine: Engine, prompts: Sequence[Sequence[int]], steps: int = STEPS) -> list[list[int]]:
    results = complete(engine, prompts, greedy(steps, ignore_eos=True))
    assert engine.pages_used == 0
    return [list(done.token_ids) for (done,) in results]


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_in_chunks_of_any_size_and_once_more_from_the_cache(
    make: Make, prompts: list[list[int]], alone: list[list[int]], chunk: int
) -> None:
    engine = make(max_batch_tokens=chunk)
    assert replies(engine, prompts) == alone
    assert engine.stats.hit_tokens == 0
    assert replies(engine, prompts) == alone
    assert engine.stats.hit_tokens == sum((length - 1) // PAGE * PAGE for length in LENGTHS)


@pytest.mark.parametrize("cache", [True, False])
def test_in_a_batch_of_32(
    make: Make, model: CausalLM, prompts: list[list[int]], alone: list[list[int]], cache: bool
) -> None:
    others = [random_ids(1 + 3 * seed, model.config, 100 + seed) for seed in range(28)]
    engine = make(pages=400, prefix_cache=cache)
    ids = [
        engine.add_request(Request(ids, greedy(STEPS, ignore_eos=True)))
        for ids in (*others[:14], *prompts, *others[14:])
    ]
    done = {event.request_id: event.completion for event in run(engine) if event.completion is not None}
    assert [list(done[request_id].token_ids) for request_id in ids[14:18]] == alone
    assert max(len(prompt) for prompt in others) > 5 * BLOCK


def test_behind_a_warm_prefix_of_every_length(make: Make, prompts: list[list[int]], alone: list[list[int]]) -> None:
    prompt, wanted = prompts[-1], alone[-1]
    for length in range(1, len(prompt) + 1, 1 if len(prompt) < 20 else 3):
        engine = make(pages=40)
        replies(engine, [prompt[:length]], steps=1)
        assert replies(engine, [prompt]) == [wanted], f"a prefix of {length} tokens"
        hit = min(length, len(prompt) - 1) // PAGE * PAGE
        assert engine.stats.hit_tokens == hit


@pytest.mark.parametrize("page_size", [1, 16, 48])
def test_behind_a_reply_that_is_cached_as_well(
    make: Make, model: CausalLM, prompts: list[list[int]], page_size: int
) -> None:
    """The next turn of a conversation: pages that were decoded, a token at a time, are read like computed ones."""
    engine = make(pages=1600 // page_size, page_size=page_size)
    prompt = prompts[-1]
    (reply,) = replies(engine, [prompt], steps=2 * BLOCK)
    following = [*prompt, *reply, *random_ids(5, model.config, 77)]
    assert replies(engine, [following]) == [model_greedy(model, following, STEPS, page_size=BLOCK)]
    assert engine.stats.hit_tokens == (len(prompt) + len(reply) - 1) // page_size * page_size


@pytest.mark.parametrize(("chunk", "cache"), [(5, True), (512, True), (7, False)])
def test_under_retraction(make: Make, model: CausalLM, chunk: int, cache: bool) -> None:
    prompts = [random_ids(2 * BLOCK + 3 * seed, model.config, seed) for seed in range(4)]
    steps = 2 * BLOCK + 5
    wanted = [model_greedy(model, ids, steps, page_size=BLOCK) for ids in prompts]
    engine = make(pages=18, max_batch_tokens=chunk, prefix_cache=cache)
    assert replies(engine, prompts, steps) == wanted
    assert engine.stats.retractions > 0


def test_samples_with_penalties_and_seeds_do_not_notice_a_retraction(make: Make, model: CausalLM) -> None:
    """The random numbers and counts of a sample go on where they were."""
    params = SamplingParams(n=2, seed=5, max_tokens=3 * BLOCK, temperature=1.5, presence_penalty=0.5,
                            repetition_penalty=1.2, frequency_penalty=0.3, ignore_eos=True)  # fmt: skip
    prompts = [random_ids(2 * BLOCK + 1 + seed, model.config, seed) for seed in range(3)]
    plenty, tight = make(pages=300), make(pages=26)
    wanted, got = (complete(engine, prompts, params) for engine in (plenty, tight))
    assert [[s.token_ids for s in samples] for samples in got] == [[s.token_ids for s in samples] for samples in wanted]
    assert (plenty.stats.retractions, tight.stats.retractions > 0) == (0, True)


@pytest.mark.parametrize("pages", [200, 16])
def test_prompt_logprobs_are_the_same_with_a_warm_prefix_and_in_a_tight_pool(
    make: Make, prompts: list[list[int]], pages: int
) -> None:
    prompt = prompts[-1]
    (cold,) = complete(make(), [prompt], greedy(2, prompt_logprobs=3))[0]
    engine = make(pages=pages, max_batch_tokens=3)
    replies(engine, [prompt], steps=9)
    other = random.Random(0).sample(range(3, 150), 20)
    _, (warm,) = complete(engine, [other, prompt], greedy(40, ignore_eos=True), greedy(2, prompt_logprobs=3))
    assert (engine.stats.retractions > 0) == (pages < 20)
    assert warm.usage.cached_tokens == 0
    assert cold.prompt_logprobs is not None
    assert warm.prompt_logprobs is not None
    assert warm.token_ids == cold.token_ids
    for before, after in zip(cold.prompt_logprobs[1:], warm.prompt_logprobs[1:], strict=True):
        assert before is not None
        assert after is not None
        assert after.logprob == pytest.approx(before.logprob, abs=1e-4)
        assert after.top == pytest.approx(before.top, abs=1e-4)
