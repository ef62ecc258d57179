"""Passkey trials: what is asked, at which lengths, and how answers are counted."""

import itertools

import pytest

from tamis.errors import ConfigError
from tamis.retrofit.passkey import ANSWER_TOKENS, QUESTION, Question, asked_lengths, compare_retrieval, make_haystacks


def encode(text: str) -> list[int]:
    """A token a character."""
    return [ord(character) for character in text]


def text_of(question: Question) -> str:
    return "".join(map(chr, question.token_ids))


def test_lengths_go_from_a_quarter_of_the_context_to_all_of_it() -> None:
    lengths = asked_lengths(8192)
    assert lengths[0] == 2048 and lengths[-1] == 8192
    assert {b - a for a, b in itertools.pairwise(lengths)} == {512}


def test_a_haystack_holds_its_number_and_the_question_and_has_the_length_that_is_asked_for() -> None:
    for stack in make_haystacks(encode, [600, 1000, 1400], trials=20):
        assert [question.length for question in stack] == sorted((q.length for q in stack), reverse=True)
        for question in stack:
            text = text_of(question)
            assert len(question.token_ids) + ANSWER_TOKENS == question.length
            assert text.count(question.key) == 2 and text.endswith(QUESTION)
            assert 0 <= question.depth < 1
            before, after = text.split("\n\nThe pass key is ")
            told = len(before.split("\n\n", 1)[1]) / (
                len(before.split("\n\n", 1)[1]) + len(after.split("\n\n", 1)[1]) - len(QUESTION)
            )
            assert question.depth == pytest.approx(told)


def test_there_are_as_many_trials_as_asked_for_over_all_lengths_and_depths() -> None:
    stacks = make_haystacks(encode, asked_lengths(2048), trials=300)
    questions = [question for stack in stacks for question in stack]
    assert 300 <= len(questions) < 320
    for length in asked_lengths(2048):
        depths = [question.depth for question in questions if question.length == length]
        assert min(depths) < 0.25 and max(depths) > 0.75


def test_prefixes_are_shared_so_that_an_engine_reads_them_once() -> None:
    stacks = make_haystacks(encode, [800, 1200], trials=12)
    for earlier, later in itertools.pairwise(stacks):
        a, b = text_of(earlier[0]), text_of(later[0])
        told = b.index("\n\nThe pass key is ")
        assert a[:told] == b[:told]
    for stack in stacks:
        for question in stack[1:]:
            asked = text_of(question).removesuffix(QUESTION)
            assert text_of(stack[0]).startswith(asked)


def test_the_same_seed_hides_the_same_numbers() -> None:
    def keys(seed: int) -> list[str]:
        return [stack[0].key for stack in make_haystacks(encode, [1000], 10, seed)]

    assert keys(1) == keys(1) != keys(2)


def test_a_length_without_room_is_left_out_and_none_at_all_is_an_error() -> None:
    stacks = make_haystacks(encode, [64, 1000], trials=5)
    assert {question.length for stack in stacks for question in stack} == {1000}
    with pytest.raises(
        ConfigError, match=r"passkey retrieval needs 2.. tokens at least, the longest text asked for has 64"
    ):
        make_haystacks(encode, [32, 64], trials=5)


@pytest.mark.parametrize(
    ("reply", "found"),
    [(" 12345. Remember", True), ("12345", True), (" 1234", False), (" it is 12345", False), ("", False)],
)
def test_an_answer_begins_with_the_number(reply: str, found: bool) -> None:
    assert Question(100, 0.5, "12345", (1,)).is_answered(reply) is found


def test_shares_are_counted_by_length_and_depth_and_judged_where_the_dense_model_is_good() -> None:
    haystacks = [[Question(2000, 0.1, "1", ()), Question(1000, 0.3, "1", ())], [Question(2000, 0.95, "2", ())]]
    result = compare_retrieval(haystacks, [[True, False], [True]], [[True, True], [False]])
    assert (result.total.trials, result.total.dense, result.total.sparse) == (3, 2 / 3, 2 / 3)
    assert result.judged is not None
    assert (result.judged.trials, result.judged.dense, result.judged.sparse) == (2, 1.0, 0.5)
    assert (result.by_length[1000].dense, result.by_length[1000].sparse) == (0.0, 1.0)
    assert list(result.by_depth) == ["0-20%", "20-40%", "80-100%"]
    assert result.cells[2000]["80-100%"].sparse == 0.0


def test_a_dense_model_that_finds_nothing_judges_nothing() -> None:
    assert compare_retrieval([[Question(10, 0.5, "1", ())]], [[False]], [[True]]).judged is None
