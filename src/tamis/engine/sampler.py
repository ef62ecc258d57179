"""The next token of every row of a batch.

A row's steps, in this order: log-probabilities (from the logits as they are), logit_bias, repetition, frequency and
presence penalties, what the reply's grammar rules out; then either the most probable token, or temperature, top_k,
top_p, min_p and a draw. All of it happens on that row alone, in memory of its own, with its own random numbers: what
else is in the batch changes no bit.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tamis.engine.grammar import Constraint
from tamis.engine.logprobs import broken_logits, keep_largest, prompt_logprobs, token_logprobs
from tamis.errors import KernelInputError, SamplingError, TamisError, TokenRangeError
from tamis.request import SamplingParams, TokenLogprobs

__all__ = ["Sampled", "SamplerRow", "check_token_ids", "prompt_logprobs", "sample"]

_NO_TOKEN = "logit_bias leaves no token: every one that the model allows has a bias of -inf"
_NO_TOKEN_IN_GRAMMAR = "logit_bias leaves no token: every one that model and grammar allow has a bias of -inf"
_FIRST_GUESS = 1024
"""Tokens that top_p looks at before it sorts the whole vocabulary."""


@dataclass(frozen=True)
class Sampled:
    """One row's next token."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    """Where SamplingParams.logprobs asks for them."""


class SamplerRow:
    """What sampling keeps of one completion: its parameters, the tokens it has seen, its random numbers.

    `index` tells the `n` completions of a request apart. Without a seed the random numbers start from the operating
    system's entropy. `constraint` belongs to this completion alone; None: any text. `observe` must be told every
    generated token that the completion keeps.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int] = (),
        index: int = 0,
        constraint: Constraint | None = None,
    ) -> None:
        self.params, self.constraint = params, constraint
        self.counts: dict[int, int] = {}
        """How often each token was generated."""
        self._random = random.Random() if params.seed is None else random.Random(_mix(params.seed, index))
        penalised = params.repetition_penalty != 1
        self._repeated = dict.fromkeys(prompt_ids) if penalised else {}
        changed = params.biases or self.has_penalties or constraint is not None
        self.plain = params.greedy and params.logprobs is None and not changed

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        params = self.params
        return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0

    def observe(self, token_id: int) -> None:
        """Count a generated token."""
        self.counts[token_id] = self.counts.get(token_id, 0) + 1
        if self.constraint is not None:
            self.constraint.accept(token_id)

    @property
    def done(self) -> bool:
        """Whether the completion is all that its grammar allows: no token may follow."""
        return self.constraint is not None and self.constraint.done

    def repeated_ids(self) -> list[int]:
        """Ids of the prompt and of what was generated."""
        return list(self._repeated | self.counts)

    def uniform(self) -> float:
        """The next random number of this row, 0 <= u < 1."""
        return self._random.random()


def sample(logits: Tensor, rows: Sequence[SamplerRow]) -> list[Sampled | TamisError]:
    """The next token of each row: `logits` [R, V], fp32 (unchanged), against R `rows`.

    Where a row cannot be sampled, its entry is the error to end that completion with, and the others are not affected:
    LogitsError where its logits hold NaN or +inf or nothing finite, SamplingError where its logit_bias leaves no token,
    GrammarError where its grammar cannot be followed any further.
    Greedy ties go to the lowest id.
    """
    if logits.dim() != 2 or len(logits) != len(rows):
        raise KernelInputError(f"logits of shape {list(logits.shape)} do not belong to {len(rows)} rows")
    results: list[Sampled | TamisError] = [Sampled(-1)] * len(rows)
    plain = [place for place, row in enumerate(rows) if row.plain]
    for place, result in zip(plain, _argmax(logits, plain), strict=True):
        results[place] = result
    for place, row in enumerate(rows):
        if not row.plain:
            try:
                results[place] = _sample_row(logits[place], row)
            except TamisError as error:
                results[place] = error
    return results


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise TokenRangeError where logit_bias or stop_token_ids name a token outside the vocabulary."""
    for name, ids in (("logit_bias", params.biases), ("stop_token_ids", params.stop_ids)):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise TokenRangeError(f"{name} holds token {token}, outside the vocabulary of {vocab_size} tokens")


def _mix(seed: int, index: int) -> int:
    """One non-negative number for each pair of a 64-bit `seed`, negative ones included, and `index`."""
    return (index << 64) | (seed & (1 << 64) - 1)


def _argmax(logits: Tensor, places: list[int]) -> list[Sampled | TamisError]:
    """Greedy tokens of the rows in `places`, all at once."""
    if not places:
        return []
    if len(places) < len(logits):
        logits = logits[torch.tensor(places, dtype=torch.int64, device=logits.device)]
    values, ids = logits.max(dim=-1)
    results: list[Sampled | TamisError] = [Sampled(token) for token in ids.tolist()]
    for place in torch.nonzero(~torch.isfinite(values)).flatten().tolist():
        results[place] = broken_logits(logits[place]) or results[place]
    return results


def _sample_row(logits: Tensor, row: SamplerRow) -> Sampled:
    raw = logits.to(torch.float32, copy=True)
    if not torch.isfinite(raw.max()) and (error := broken_logits(raw)) is not None:
        raise error
    token = _choose(_adjusted(raw, row), row)
    asked = row.params.logprobs
    return Sampled(token, None if asked is None else token_logprobs(raw, token, asked))


def _adjusted(raw: Tensor, row: SamplerRow) -> Tensor:
    """The logits after bias, penalties (vLLM's definitions) and grammar, fp32 [V]; `raw` stays as it is."""
    params = row.params
    if not params.biases and not row.has_penalties and row.constraint is None:
        return raw
    logits = raw.clone()
    if params.biases:
        ids, biases = _ids(list(params.biases), raw), list(params.biases.values())
        before = logits[ids]
        biased = before + torch.tensor(biases, dtype=torch.float32, device=raw.device)
        # What the model rules out stays out, under a bias of +inf too.
        logits[ids] = torch.where(before == -torch.inf, before, biased)
    if params.repetition_penalty != 1:
        ids = _ids(row.repeated_ids(), raw)
        seen, penalty = logits[ids], params.repetition_penalty
        logits[ids] = torch.where(seen > 0, seen / penalty, seen * penalty)
    if row.counts and (params.frequency_penalty or params.presence_penalty):
        counts = torch.tensor(list(row.counts.values()), dtype=torch.float32, device=raw.device)
        logits[_ids(list(row.counts), raw)] -= params.frequency_penalty * counts + params.presence_penalty
    if row.constraint is not None:
        row.constraint.mask(logits)
    highest = logits.max()
    if highest == -torch.inf:
        raise SamplingError(_NO_TOKEN if row.constraint is None else _NO_TOKEN_IN_GRAMMAR)
    if highest.isnan():
        raise SamplingError(f"repetition_penalty={params.repetition_penalty} leaves logits that are no numbers")
    return logits


def _ids(ids: list[int], like: Tensor) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=like.device)


def _choose(logits: Tensor, row: SamplerRow) -> int:
    """One of the places of `logits` [V], whose largest is not NaN or -inf."""
    params = row.params
    if params.greedy:
        return int(logits.argmax().item())
    ids = keep_largest(logits, params.top_k if params.top_k > 0 else len(logits))
    weights = _weights(logits[ids], params.temperature)
    if params.top_p < 1:
        kept = _nucleus(weights, params.top_p)
        ids, weights = ids[kept], weights[kept]
    if params.min_p > 0:
        kept = weights >= params.min_p * weights.max()
        ids, weights = ids[kept], weights[kept]
    return int(ids[_draw(weights, row.uniform())].item())


def _weights(logits: Tensor, temperature: float) -> Tensor:
    """Probabilities but for a common factor, fp64: the most probable token has 1."""
    highest = logits.max()
    if highest == torch.inf:
        return (logits == highest).double()
    return torch.exp((logits.double() - highest) / temperature)


def _nucleus(weights: Tensor, top_p: float) -> Tensor:
    """The places of the fewest weights that together reach the share `top_p`, ascending."""
    needed = top_p * weights.sum()
    falling = torch.topk(weights, min(_FIRST_GUESS, len(weights))).values.cumsum(0)
    if falling[-1] < needed:
        falling = weights.sort(descending=True).values.cumsum(0)
    return keep_largest(weights, int(torch.searchsorted(falling, needed).item()) + 1)


def _draw(weights: Tensor, uniform: float) -> int:
    """The place whose stretch of the summed weights holds `uniform`; never one of weight 0."""
    summed = weights.cumsum(0)
    place = int(torch.searchsorted(summed, uniform * summed[-1], right=True).item())
    last = int(torch.searchsorted(summed, summed[-1]).item())
    return min(place, last)
