"""Log-probabilities of tokens, from logits as the model gave them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tamis.errors import LogitsError
from tamis.request import TokenLogprobs


def keep_largest(values: Tensor, count: int) -> Tensor:
    """The places of the `count` largest of `values` [V], int64, ascending; equal values go to the lowest places.

    `values` holds no NaN.
    """
    if count >= len(values):
        return torch.arange(len(values), device=values.device)
    smallest = torch.topk(values, count).values[-1]
    larger = torch.nonzero(values > smallest).flatten()
    equal = torch.nonzero(values == smallest).flatten()[: count - len(larger)]
    return torch.cat((larger, equal)).sort().values


def log_sum_exp(row: Tensor) -> float:
    """ln of the sum of exp of `row`, fp32 [V], summed in fp64. Of this row alone, so the same in any batch."""
    highest = row.max()
    return highest.item() + math.log(torch.exp(row - highest).sum(dtype=torch.float64).item())


def token_logprobs(row: Tensor, token_id: int, top: int) -> TokenLogprobs:
    """The log-probability of `token_id` under softmax(`row`), fp32 [V], beside those of the `top` most probable tokens.

    Equal ones come in the order of their ids. The token itself is always among them.
    """
    total = log_sum_exp(row)
    ids = keep_largest(row, top) if top else torch.empty(0, dtype=torch.int64, device=row.device)
    found = dict(zip(ids.tolist(), row[ids].tolist(), strict=True))
    logit = row[token_id].item()
    found[token_id] = logit
    ordered = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    return TokenLogprobs(logit - total, {key: value - total for key, value in ordered})


def broken_logits(row: Tensor) -> LogitsError | None:
    """What makes the logits `row` [V] unusable, if anything does."""
    bad = row.isnan() | (row == torch.inf)
    if bad.any():
        token = int(torch.nonzero(bad)[0].item())
        return LogitsError(f"the model's logits are broken: the one of token {token} is {row[token].item()}")
    if row.max() == -torch.inf:
        return LogitsError("the model's logits leave no token: all of them are -inf")
    return None


def prompt_logprobs(logits: Tensor, next_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
    """What the model gave to each prompt token that follows: row r of `logits` [R, V] against `next_ids[r]`.

    Raises LogitsError where a row holds NaN or +inf or nothing finite.
    """
    results = []
    for row, token in zip(logits.float(), next_ids, strict=True):
        if (error := broken_logits(row)) is not None:
            raise error
        results.append(token_logprobs(row, token, top))
    return results
