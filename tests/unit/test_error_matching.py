"""Finding records by what people paste; see `support/mutate.py` for the pastes."""

import random
import time
from collections.abc import Callable

import pytest

from support.mutate import KINDS, Fault, mutants, unrelated
from tamis.errors.catalog import Catalog, ErrorRecord, load_catalog
from tamis.errors.catalog.template import parse_template
from tamis.errors.matching import Matcher
from tamis.errors.matching.paste import MAX_TEXT

COUNT = 200


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog()


@pytest.fixture(scope="module")
def matcher(catalog: Catalog) -> Matcher:
    return Matcher(catalog)


def made(*messages: str, kind: str = "ConfigError") -> Catalog:
    """A catalogue of these messages; their slugs are their numbers."""
    templates = [parse_template(message) for message in messages]
    return Catalog(tuple(
        ErrorRecord(
            id=f"{number:016x}", repo="x", slug=str(number), error_class=kind, error_message=template.text,
            message_pattern=template.pattern,
        )
        for number, template in enumerate(templates)
    ))  # fmt: skip


def slugs(matcher: Matcher, text: str) -> list[str]:
    return [match.record.slug for match in matcher.find(text).matches]


def test_of_200_mutated_lines_95_in_100_find_their_record(catalog: Catalog, matcher: Matcher) -> None:
    """The right page comes first, and of two errors in a paste both are found.

    Wordings of a fault share their page; what several classes say in the same words cannot be told apart without them.
    """
    pages = {record.slug: {record.documentation, record.template.skeleton} for record in catalog.records}
    faults = [Fault(record.slug, record.error_class, record.error_message) for record in catalog.records]
    pastes = mutants(faults, COUNT)
    assert {paste.kind for paste in pastes} == set(KINDS)
    missed = []
    for paste in pastes:
        found = [pages[slug] for slug in slugs(matcher, paste.text)]
        wanted = [pages[slug] for slug in paste.slugs]
        first_is_right = bool(found) and any(found[0] & page for page in wanted)
        if not first_is_right or not all(any(page & other for other in found) for page in wanted):
            missed.append((paste.kind, paste.slugs, paste.text[-200:]))
    assert len(missed) <= COUNT * 0.05, missed


def test_of_200_unrelated_lines_none_is_found(matcher: Matcher) -> None:
    lines = unrelated(COUNT)
    assert sum("layer" in line for line in lines) > 40
    assert [(line, slugs(matcher, line)) for line in lines if slugs(matcher, line)] == []


def test_every_message_finds_itself(catalog: Catalog, matcher: Matcher) -> None:
    """Pasted as Python prints it, with plain values; messages that say next to nothing are offered by their class."""
    silent = 0
    pages = {record.slug: {record.documentation, record.template.skeleton} for record in catalog.records}
    for record in catalog.records:
        message = "".join(text + ("x7" if hole else "") for text, hole in record.template.parts)
        found = matcher.find(f"tamis.errors.{record.error_class}: {message}")
        first = [*found.matches, *found.near_misses][0].record
        silent += not found.matches
        assert first.error_class == record.error_class
        assert not found.matches or pages[first.slug] & pages[record.slug], (message, first.error_message)
    assert silent <= len(catalog.records) * 0.02


@pytest.mark.parametrize(
    "line",
    [
        "layer_id=3 does not have an index V cache",
        "2026-12-01 ERROR layer_id=3 does not have an index V cache (either dense, or in",
        "ValueError: layer.layer_id=3 does not have an index V cache (either dense, or in the K-only group). "
        "index_kv layers: []",
        '{"error": {"message": "LAYER_ID=3 does\\u00a0not have an index V cache (either dense, or in the K-only '
        'group). index_kv layers: [1]"}}',
        "\x1b[1mlayer_id=3 does not have an index V cache \x1b[0m(either dense, or in the K-only group). index_kv "
        "layers: [4]",
        "have an index V cache (either dense, or in the K-only group). index_kv layers: [3, 5]",
    ],
)
def test_the_fault_that_gave_this_its_name_is_found(matcher: Matcher, line: str) -> None:
    assert slugs(matcher, line)[:1] == ["no-index-value"]


@pytest.mark.parametrize(
    "line",
    [
        "layer_id=3 does not have an index V cache yet, loading",
        "layer_id=3 is not a sparse attention mask",
        "the layer_id=3 is not in the K-only sparse set",
        "sparse layers: [1, 2]",
        "",
    ],
)
def test_what_goes_on_in_other_words_is_another_line(matcher: Matcher, line: str) -> None:
    assert slugs(matcher, line) == []


def test_a_near_miss_is_offered_as_such() -> None:
    matcher = Matcher(made("the session {name} cannot be found in this place"))
    found = matcher.find("the session x cannot be found anywhere")
    assert found.matches == ()
    assert [match.record.slug for match in found.near_misses] == ["0"]


def test_a_class_alone_leads_to_its_messages() -> None:
    found = Matcher(made("{origin}: {message}", kind="TokenizerError")).find("tamis.errors.TokenizerError: a: b")
    assert found.matches == ()
    assert [match.record.slug for match in found.near_misses] == ["0"]


def test_the_wording_that_says_more_wins() -> None:
    matcher = Matcher(made("{path}: cannot be read: {why}", "{path}: cannot be read: it is a directory"))
    assert slugs(matcher, "error: /tmp: cannot be read: it is a directory") == ["1"]
    assert slugs(matcher, "error: /tmp: cannot be read: it is on fire") == ["0"]


def test_equal_wordings_are_both_named() -> None:
    matcher = Matcher(made("the pool {a} ran out of room", "the pool {b} ran out of room"))
    assert set(slugs(matcher, "the pool x ran out of room")) == {"0", "1"}


@pytest.mark.parametrize("width", [40, 61, 97])
@pytest.mark.parametrize("between", ["words", "characters"])
def test_a_message_that_a_terminal_wrapped_is_put_together(matcher: Matcher, width: int, between: str) -> None:
    line = "error: the prompt has 900 tokens, which leaves no room for output in the model's context of 900"
    if between == "words":
        rows = [""]
        for word in line.split():
            rows = (
                [*rows, word] if len(rows[-1]) + 1 + len(word) > width else [*rows[:-1], f"{rows[-1]} {word}".strip()]
            )
    else:
        rows = [line[start : start + width] for start in range(0, len(line), width)]
    assert slugs(matcher, "\n".join(["first", *rows, "last"]))[:1] == slugs(matcher, line)[:1] != []


def test_neighbours_of_other_lengths_are_not_put_together() -> None:
    matcher = Matcher(made("the alpha {x} and its omega"))
    assert slugs(matcher, "the alpha 1 and its omega") == ["0"]
    assert slugs(matcher, "the alpha 1\nand its omega and many more words that are here on the second line") == []


def test_a_hint_in_the_text_is_taken_at_its_word(catalog: Catalog, matcher: Matcher) -> None:
    record = catalog.records[5]
    assert slugs(matcher, f"something else\nhint: tamis explain {record.id}\n")[:1] == [record.slug]


def test_a_pattern_of_alternatives_is_found_by_each() -> None:
    record = made("plain").records[0]
    pattern = r"(?:the first wording|another second wording) of (.+?)(, with a tail)?$"
    catalog = Catalog((ErrorRecord(**{**record.__dict__, "message_pattern": pattern}),))
    matcher = Matcher(catalog)
    for line in ("the first wording of x", "another second wording of x", "the first wording of x, with a tail"):
        assert slugs(matcher, line) == ["0"], line
    assert slugs(matcher, "the third wording of x") == []


SIZE = 10_000_000


def noise(between: str) -> str:
    rng = random.Random(5)
    lines = unrelated(500)
    return between.join(f"{rng.choice(lines)} {number:x}" for number in range(SIZE // 60))


def beginnings(between: str) -> str:
    rows = (f"layer_id={number % 100} does not have an index V cache ({number:x}" for number in range(SIZE // 50))
    return between.join(rows)


@pytest.mark.parametrize(
    "make",
    [
        lambda: noise("\n"),
        lambda: noise(" "),
        lambda: "a" * SIZE,
        lambda: " " * SIZE,
        lambda: "\n" * SIZE,
        lambda: beginnings(" "),
        lambda: beginnings("\n"),
        lambda: random.Random(5).randbytes(SIZE).decode("latin-1"),
    ],
    ids=["log", "long line", "long word", "spaces", "line breaks", "beginnings in a line", "beginnings", "bytes"],
)
def test_ten_megabytes_are_read_in_seconds(matcher: Matcher, make: Callable[[], str]) -> None:
    """The error at its end is found all the same."""
    text = make() + "\nerror: the prompt has 900 tokens, more than the model's context of 512\n"
    began = time.process_time()
    found = matcher.find(text)
    assert time.process_time() - began < 20
    assert "prompt-too-long" in [match.record.slug for match in found.matches]


def test_of_a_text_without_end_the_end_is_read(matcher: Matcher) -> None:
    message = "the prompt has 900 tokens, more than the model's context of 512"
    text = f"{message}\n" + "x\n" * (MAX_TEXT // 2)
    assert slugs(matcher, text) == []
    found = matcher.find(text + message).matches
    assert [match.record.slug for match in found] == ["prompt-too-long"]
    assert found[0].line_number == text.count("\n") + 1
