import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tamis.engine.sampler import Sampled, SamplerRow, check_token_ids, prompt_logprobs, sample
from tamis.errors import KernelInputError, LogitsError, SamplingError, TamisError, TokenRangeError
from tamis.request import SamplingParams

INF = math.inf
LOGITS = torch.tensor([1.5, -0.5, 3.0, 0.0, 2.25, 2.25, -4.0, 1.0, 0.5, -INF, 2.9, -1.0])


def token(result: Sampled | TamisError) -> int:
    assert isinstance(result, Sampled)
    return result.token_id


def draw(logits: Tensor, row: SamplerRow) -> int:
    return token(sample(logits[None], [row])[0])


def expected_distribution(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int] = (), output: Sequence[int] = ()
) -> dict[int, float]:
    """Token probabilities by the definitions, one token at a time in Python floats."""
    values = list(logits)
    for i, bias in params.biases.items():
        values[i] += bias
    for i in {*prompt, *output}:
        values[i] = values[i] / params.repetition_penalty if values[i] > 0 else values[i] * params.repetition_penalty
    for i, count in Counter(output).items():
        values[i] -= params.frequency_penalty * count + params.presence_penalty
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if params.top_k > 0:
        order = order[: params.top_k]
    weights = {i: math.exp((values[i] - values[order[0]]) / params.temperature) for i in order}
    total, reached, nucleus = sum(weights.values()), 0.0, []
    for i in order:
        if reached >= params.top_p * total:
            break
        reached += weights[i]
        nucleus.append(i)
    kept = {i: weights[i] for i in nucleus if weights[i] >= params.min_p * weights[order[0]]}
    return {i: weight / sum(kept.values()) for i, weight in kept.items() if weight > 0}


class Grid(SamplerRow):
    """A row whose random numbers are the middles of `steps` equal parts of [0, 1), in turn."""

    def __init__(self, params: SamplingParams, steps: int, prompt: Sequence[int] = ()) -> None:
        super().__init__(params, prompt)
        self.numbers = iter([(i + 0.5) / steps for i in range(steps)])

    def uniform(self) -> float:
        return next(self.numbers)


CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 5.0, "top_k": 4},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_k": -1, "top_p": 0.8},
    {"top_p": 1e-6},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"temperature": 1.7, "top_k": 6, "top_p": 0.9, "min_p": 0.2},
    {"logit_bias": {2: -INF, 3: 4.0, 6: 5.5}},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6, "top_p": 0.95},
    {"presence_penalty": 1.5, "frequency_penalty": 0.25},
    {"frequency_penalty": -2.0},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -1.0, "logit_bias": {7: 2.0}, "top_k": 7},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_every_token_is_drawn_as_often_as_the_definitions_say(options: dict[str, Any]) -> None:
    params, steps, prompt, output = SamplingParams(**options), 500, [2, 3, 11, 2], [4, 4, 4, 0, 10]
    row = Grid(params, steps, prompt)
    for i in output:
        row.observe(i)
    counts = Counter(draw(LOGITS, row) for _ in range(steps))
    expected = expected_distribution(LOGITS.tolist(), params, prompt, output)
    assert set(counts) <= set(expected)
    for i, probability in expected.items():
        assert counts[i] / steps == pytest.approx(probability, abs=1.001 / steps)


@pytest.mark.parametrize("options", [{}, {"temperature": 2.0, "top_k": 6}, {"top_p": 0.9, "min_p": 0.1}], ids=str)
def test_random_draws_follow_the_distribution(options: dict[str, Any]) -> None:
    params, draws = SamplingParams(seed=7, **options), 3000
    row = SamplerRow(params)
    counts = Counter(draw(LOGITS, row) for _ in range(draws))
    expected = expected_distribution(LOGITS.tolist(), params)
    assert set(counts) <= set(expected)
    chi_square = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in expected.items())
    # The mean is len - 1 and the variance twice that; five deviations above is one chance in a million or so.
    freedom = len(expected) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


def test_greedy_takes_the_most_probable_token_and_the_lowest_id_of_equals() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 3.0, 3.0], [-INF, -1.0, -1.0]])
    greedy = SamplingParams(temperature=0)
    for params in (greedy, SamplingParams(temperature=0, logprobs=0), SamplingParams(temperature=0, logit_bias={0: 0})):
        results = sample(logits, [SamplerRow(params) for _ in range(3)])
        assert [token(result) for result in results] == [1, 0, 1]


def test_greedy_is_after_bias_and_penalties() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0])
    assert draw(logits, SamplerRow(SamplingParams(temperature=0, logit_bias={0: 2.5}))) == 0
    assert draw(logits, SamplerRow(SamplingParams(temperature=0, repetition_penalty=2), [1])) == 2
    row = SamplerRow(SamplingParams(temperature=0, frequency_penalty=0.6))
    tokens = []
    for _ in range(4):
        tokens.append(draw(logits, row))
        row.observe(tokens[-1])
    assert tokens == [1, 1, 2, 1]


def mixed_rows(seed: int) -> list[SamplerRow]:
    """Rows of every kind, the same each time."""
    greedy: list[dict[str, Any]] = [{}, {"logprobs": 3}, {"presence_penalty": 1.0}]
    options = [*CASES, *({"temperature": 0, **case} for case in greedy), {"logprobs": 2, "top_p": 0.7}]
    return [SamplerRow(SamplingParams(seed=seed + i, **case), [1, 5], i) for i, case in enumerate(options)]


def test_a_row_is_sampled_alike_alone_and_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(3)
    alone, together = mixed_rows(11), mixed_rows(11)
    order = list(range(len(alone)))
    for step in range(6):
        logits = torch.randn(len(alone), 301, generator=generator) * 2
        random.Random(step).shuffle(order)
        batch = dict(zip(order, sample(logits[order], [together[i] for i in order]), strict=True))
        for i, row in enumerate(alone):
            (result,) = sample(logits[i : i + 1], [row])
            assert result == batch[i]
            row.observe(token(result))
            together[i].observe(token(result))


def test_seed_and_index_decide_the_draws() -> None:
    def draws(seed: int | None, index: int) -> list[int]:
        row = SamplerRow(SamplingParams(seed=seed, temperature=3), index=index)
        return [draw(LOGITS, row) for _ in range(20)]

    assert draws(5, 0) == draws(5, 0)
    different = [draws(5, 0), draws(5, 1), draws(6, 0), draws(-5, 0), draws(None, 0), draws(None, 0)]
    assert len({tuple(tokens) for tokens in different}) == len(different)


def test_ties_at_the_edge_of_top_k_and_top_p_go_to_the_lowest_ids() -> None:
    logits = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 2.0])
    for options, kept in (({"top_k": 3}, {1, 2, 5}), ({"top_p": 0.6}, {1, 2, 5}), ({"top_k": 1}, {5})):
        row = Grid(SamplingParams(**options), 100)
        assert {draw(logits, row) for _ in range(100)} == kept


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.999])
def test_top_p_keeps_the_right_number_of_a_wide_vocabulary(top_p: float) -> None:
    size = 5000
    logits = torch.linspace(0, 1e-3, size)  # nearly even: the nucleus is far larger than the tokens looked at first
    weights = torch.exp(logits.double()).flip(0)
    kept = int((weights.cumsum(0) < top_p * weights.sum()).sum()) + 1
    params = SamplingParams(top_p=top_p)
    lowest = draw(logits, type("Lowest", (Grid,), {"uniform": lambda self: 0.0})(params, 1))
    assert size - lowest == kept
    assert draw(logits, type("Highest", (Grid,), {"uniform": lambda self: 1 - 2**-53})(params, 1)) == size - 1


def test_a_weight_of_zero_is_never_drawn() -> None:
    logits = torch.tensor([-INF, 0.0, 500.0, 0.0, -INF])
    for number in (0.0, 0.5, 1 - 2**-53):
        row = SamplerRow(SamplingParams(temperature=0.01))
        row.uniform = lambda number=number: number  # type: ignore[method-assign, misc]
        assert draw(logits, row) == 2


def test_infinite_bias_forces_and_forbids() -> None:
    assert draw(LOGITS, SamplerRow(SamplingParams(logit_bias={6: INF}))) == 6
    assert draw(LOGITS, SamplerRow(SamplingParams(temperature=0, logit_bias={6: INF}))) == 6
    # Token 9 is ruled out by the model itself.
    assert draw(LOGITS, SamplerRow(SamplingParams(temperature=0, logit_bias={9: INF}))) == 2


def test_a_bias_that_leaves_no_token_ends_that_row_only() -> None:
    bias = dict.fromkeys(range(len(LOGITS)), -INF)
    rows = [SamplerRow(SamplingParams(temperature=t, logit_bias=b)) for t, b in ((0, {}), (1, bias), (0, bias))]
    good, *bad = sample(LOGITS.repeat(3, 1), rows)
    assert token(good) == 2
    for error in bad:
        assert isinstance(error, SamplingError)
        assert "logit_bias leaves no token" in str(error)


@pytest.mark.parametrize(
    ("value", "message"), [(math.nan, "token 4 is nan"), (INF, "token 4 is inf"), (-INF, "all of them are -inf")]
)
def test_broken_logits_end_that_row_only(value: float, message: str) -> None:
    logits = LOGITS.repeat(4, 1)
    logits[1:3, 4] = value
    if value == -INF:
        logits[1:3] = value
    params = [SamplingParams(temperature=t, seed=1) for t in (0, 0, 1, 1)]
    results = sample(logits, [SamplerRow(p) for p in params])
    assert token(results[0]) == 2
    assert token(results[3]) == draw(LOGITS, SamplerRow(params[3]))
    for error in results[1:3]:
        assert isinstance(error, LogitsError)
        assert message in str(error)
    with pytest.raises(LogitsError, match=message):
        prompt_logprobs(logits[:2], [0, 0], 1)


def test_logprobs_are_those_of_the_model_before_any_change() -> None:
    expected = torch.log_softmax(LOGITS.double(), 0)
    params = SamplingParams(temperature=0, logprobs=3, logit_bias={6: 100.0}, repetition_penalty=1.5)
    (result,) = sample(LOGITS[None], [SamplerRow(params, [2])])
    assert isinstance(result, Sampled)
    assert result.logprobs is not None
    assert result.token_id == 6
    assert result.logprobs.logprob == pytest.approx(expected[6].item(), abs=1e-6)
    assert list(result.logprobs.top) == [2, 10, 4, 6]  # the best three, the lower id of equals, and the token itself
    for i, logprob in result.logprobs.top.items():
        assert logprob == pytest.approx(expected[i].item(), abs=1e-6)


@pytest.mark.parametrize(("asked", "ids"), [(0, [2]), (1, [2]), (2, [2, 10]), (100, [2, 10, 4, 5, 0, 7, 8, 3, 1])])
def test_as_many_logprobs_come_as_were_asked_for(asked: int, ids: list[int]) -> None:
    (result,) = sample(LOGITS[None], [SamplerRow(SamplingParams(temperature=0, logprobs=asked))])
    assert isinstance(result, Sampled)
    assert result.logprobs is not None
    assert list(result.logprobs.top)[:9] == ids
    assert len(result.logprobs.top) == max(1, min(asked, len(LOGITS)))


def test_prompt_logprobs_are_those_of_the_tokens_that_follow() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    following = [3, 39, 0, 17, 3]
    expected = torch.log_softmax(logits.double(), -1)
    results = prompt_logprobs(logits, following, 2)
    for place, result in enumerate(results):
        best = expected[place].topk(2).indices.tolist()
        assert result.logprob == pytest.approx(expected[place, following[place]].item(), abs=1e-6)
        assert list(result.top) == list(dict.fromkeys([*best, following[place]]))
        assert result == prompt_logprobs(logits[place : place + 1], following[place : place + 1], 2)[0]


def test_logits_are_left_as_they_were() -> None:
    logits = LOGITS.repeat(len(mixed_rows(0)), 1)
    sample(logits, mixed_rows(0))
    assert torch.equal(logits, LOGITS.repeat(len(logits), 1))


def test_rows_must_fit_the_logits() -> None:
    with pytest.raises(KernelInputError, match=r"\[1, 12\] do not belong to 2 rows"):
        sample(LOGITS[None], [SamplerRow(SamplingParams())] * 2)
    assert sample(LOGITS[:0].reshape(0, 12), []) == []


def test_extreme_penalties_are_an_error_and_not_garbage() -> None:
    (result,) = sample(torch.zeros(1, 4), [SamplerRow(SamplingParams(repetition_penalty=1e300), [1])])
    assert isinstance(result, SamplingError)
    assert "repetition_penalty=1e+300" in str(result)


def test_token_ids_of_parameters_are_checked_against_the_vocabulary() -> None:
    check_token_ids(SamplingParams(logit_bias={0: 1, 9: 1}, stop_token_ids=[9]), 10)
    with pytest.raises(TokenRangeError, match="logit_bias holds token 10, outside the vocabulary of 10 tokens"):
        check_token_ids(SamplingParams(logit_bias={10: 1}), 10)
    with pytest.raises(TokenRangeError, match="stop_token_ids holds token -1,"):
        check_token_ids(SamplingParams(stop_token_ids=[-1]), 10)
