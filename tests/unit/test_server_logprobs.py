import math

from support.vocab import byte_level
from tamis.request import TokenLogprobs
from tamis.server.logprobs import TokenNames, chat_logprobs, completion_logprobs, prompt_logprobs

A, B, HALF, OTHER_HALF = 0, 1, 2, 3
NAMES = TokenNames(byte_level([b"a", b"b", b"\xf0\x9f", b"\x8c\x8d"]))


def test_two_pieces_of_a_character_are_called_differently() -> None:
    assert NAMES.key(HALF) == r"bytes:\xf0\x9f"
    assert NAMES.key(OTHER_HALF) == r"bytes:\x8c\x8d"
    assert NAMES.text(HALF) == "\ufffd"
    assert NAMES.bytes_of(HALF) + NAMES.bytes_of(OTHER_HALF) == "\U0001f30d".encode()


def test_a_model_without_a_tokenizer_names_ids() -> None:
    assert TokenNames(None).text(7) == "<7>"


def test_a_chat_lists_as_many_alternatives_as_asked_for() -> None:
    found = TokenLogprobs(-3.0, {B: -0.1, HALF: -2.0, A: -3.0})
    for top, listed in ((0, []), (1, ["b"]), (2, ["b", "\ufffd"])):
        (entry,) = chat_logprobs(NAMES, [(A, found)], top).content
        assert (entry.token, entry.logprob, entry.bytes) == ("a", -3.0, [97])
        assert [other.token for other in entry.top_logprobs] == listed


def test_minus_infinity_is_a_number_json_has() -> None:
    found = TokenLogprobs(-math.inf, {B: -0.1, A: -math.inf})
    assert chat_logprobs(NAMES, [(A, found)], 2).content[0].logprob == -9999.0
    assert completion_logprobs(NAMES, [(A, found, 0)], 2).top_logprobs == [{"b": -0.1, "a": -9999.0}]


def test_a_completion_lists_tokens_side_by_side() -> None:
    tokens = [(A, None, 0), (B, TokenLogprobs(-0.5, {B: -0.5}), 1)]
    told = completion_logprobs(NAMES, tokens, 1)
    assert told.tokens == ["a", "b"]
    assert told.token_logprobs == [None, -0.5]
    assert told.top_logprobs == [None, {"b": -0.5}]
    assert told.text_offset == [0, 1]
    assert completion_logprobs(NAMES, tokens, 0).top_logprobs is None


def test_a_prompt_lists_alternatives_by_id() -> None:
    first, second = prompt_logprobs(NAMES, [None, TokenLogprobs(-2.0, {B: -0.5, A: -2.0})])
    assert first is None
    assert second is not None
    assert {key: (entry.rank, entry.logprob, entry.decoded_token) for key, entry in second.items()} == {
        "1": (1, -0.5, "b"), "0": (2, -2.0, "a")}  # fmt: skip
