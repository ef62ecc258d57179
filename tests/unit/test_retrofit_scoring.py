"""Windows of text, and perplexity by position."""

import hashlib
import math

import pytest

from tamis.errors import ConfigError
from tamis.request import Completion, FinishReason, TokenLogprobs, Usage
from tamis.retrofit.corpus import Document, Kind
from tamis.retrofit.scoring import Scored, compare, cut_windows


def encode(text: str) -> list[int]:
    """A token a character."""
    return [ord(character) for character in text]


def document(name: str, text: str, kind: Kind = "prose") -> Document:
    return Document(name, text, kind, "held_out", "", hashlib.sha256(text.encode()).hexdigest())


def texts_of(documents: list[Document], length: int, count: int) -> list[tuple[str, str]]:
    windows = cut_windows(documents, encode, length, count)
    return [(window.name, "".join(map(chr, window.token_ids))) for window in windows]


def test_windows_come_from_each_document_in_turn_and_share_no_token() -> None:
    documents = [document("a", "abcdefgh"), document("b", "ijklm")]
    assert texts_of(documents, 3, 3) == [("a", "abc"), ("b", "ijk"), ("a", "def")]


def test_short_documents_are_joined() -> None:
    documents = [document("a", "ab"), document("b", "cdef"), document("c", "ghi")]
    assert texts_of(documents, 4, 2) == [("b", "cdef"), ("a + c", "abgh")]


def test_each_kind_of_text_has_windows_of_its_own() -> None:
    windows = cut_windows([document("a", "x" * 20), document("b", "y" * 20, "code")], encode, 5, 2)
    assert [(window.kind, len(window.token_ids)) for window in windows] == [("prose", 5)] * 2 + [("code", 5)] * 2


def test_too_little_text_of_a_kind_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match="the code to measure with has fewer than 6 tokens"):
        cut_windows([document("a", "x" * 20), document("b", "y" * 5, "code")], encode, 6, 1)


def test_scores_are_read_from_prompt_logprobs() -> None:
    entries = (None, TokenLogprobs(-2.0, {9: -0.5, 4: -2.0}), TokenLogprobs(-0.1, {5: -0.1}))
    completion = Completion(
        0, (3, 4, 5), (1,), "", FinishReason.LENGTH, Usage(3, 1), prompt_logprobs=entries
    )  # fmt: skip
    assert Scored.of(completion) == Scored([-2.0, -0.1], [9, 5])


def test_perplexity_is_taken_from_the_first_position_on_and_by_stretches() -> None:
    # Tokens 1 to 5: what stands before position 4 counts in its stretch only.
    dense = [Scored([-9.0, -1.0, -1.0, -2.0, -2.0], [1, 2, 3, 4, 5])]
    sparse = [Scored([-9.0, -2.0, -2.0, -2.0, -3.0], [0, 2, 0, 4, 0])]
    result = compare(dense, sparse, first=4, step=2)
    assert (result.tokens, result.same_greedy) == (2, 0.5)
    assert result.dense == pytest.approx(math.exp(2.0))
    assert result.sparse == pytest.approx(math.exp(2.5))
    assert result.change == pytest.approx(math.exp(0.5) - 1)
    assert [(piece.start, piece.end, piece.tokens) for piece in result.by_position] == [(0, 2, 1), (2, 4, 2), (4, 6, 2)]
    assert result.by_position[1].dense == pytest.approx(math.exp(1.0))
    assert result.by_position[1].sparse == pytest.approx(math.exp(2.0))


def test_the_error_of_a_change_is_that_of_differing_stretches() -> None:
    dense = [Scored([-1.0] * 8, [0] * 8) for _ in range(2)]
    alike = [Scored([-1.5] * 8, [0] * 8) for _ in range(2)]
    assert compare(dense, alike, first=1, step=4).change_error == pytest.approx(0.0)
    uneven = [Scored([-1.0] * 8, [0] * 8), Scored([-2.0] * 8, [0] * 8)]
    result = compare(dense, uneven, first=1, step=8)
    # Two windows that differ by 1 in their means, in two stretches each: the last holds position 8 alone.
    assert result.change_error == pytest.approx(math.exp(0.5) * math.sqrt(4 * 0.25 / 3 / 4), rel=1e-6)
