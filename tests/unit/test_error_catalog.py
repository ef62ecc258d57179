"""The catalogue is whole: every error that users meet has a record, and every record an error."""

import ast
import random
import re
import time
from collections import Counter
from pathlib import Path

import pytest

import tamis.errors
from support.raised import errors_have_records
from tamis.errors import ConfigError, NoIndexValueError, NotSparseLayerError, TamisError, TokenizerError
from tamis.errors.catalog import ErrorRecord, id_of, load_catalog
from tamis.errors.catalog.build import PACKAGE, build_own
from tamis.errors.catalog.catalog import REPO
from tamis.errors.catalog.patterns import pattern_fault
from tamis.errors.catalog.scan import Site, scan
from tamis.errors.catalog.template import parse_template
from tamis.errors.catalog.written import read_records
from tamis.units import parse_size

WRITTEN = read_records()
RECORDS = load_catalog().records
SLUG = {record.id: written.slug for written in WRITTEN for _, record in written.records(REPO)}
"""The written record that each one comes from."""
SHOWN = {"ApiError", "HTTPException"}
"""Errors of the server that are not in tamis.errors."""


def is_public(site: Site) -> bool:
    """Whether users can meet what is raised here."""
    kind = site.found.error_class
    in_schema = kind == "ValueError" and site.source.name == "server/schema.py"
    return hasattr(tamis.errors, kind) or kind in SHOWN or in_schema


def test_every_public_error_that_is_raised_has_a_record() -> None:
    known = {(record.error_class, record.template.skeleton) for record in RECORDS}
    sites = [site for site in scan(PACKAGE, PACKAGE).sites if is_public(site) and site.found.speaks]
    assert len(sites) > 400
    missing = [site for site in sites if (site.found.error_class, site.found.template.skeleton) not in known]
    # What a new record begins with; docs/error-data.md says how it goes on.
    wanted = [f"error_class = {site.found.error_class!r}\nerror_message = {site.found.template.text!r}  # {site.place}"
              for site in missing]  # fmt: skip
    assert not missing, "no record has:\n" + "\n".join(wanted)


def test_every_record_is_raised_somewhere() -> None:
    assert not [f"{record.error_class}: {record.error_message}" for record in build_own().unraised]
    assert {record.id for record in RECORDS} == set(SLUG)
    for record in RECORDS:
        assert record.line_number is not None and record.source_code is not None and record.file_path is not None
        line = record.source_code.split("\n")[record.line_number - (record.source_code_start or 0)]
        path = PACKAGE / Path(record.file_path).relative_to("src/tamis")
        assert path.read_text(encoding="utf-8").split("\n")[record.line_number - 1] == line


def test_every_class_has_a_record_or_only_kinds_of_it_are_raised() -> None:
    kinds = {record.error_class for record in RECORDS}
    for name, kind in vars(tamis.errors).items():
        if isinstance(kind, type) and issubclass(kind, TamisError):
            assert name in kinds or kind.__subclasses__(), f"{name} has no record"


def test_every_answer_of_the_server_has_a_record() -> None:
    codes: Counter[str] = Counter()
    for path in sorted((PACKAGE / "server").glob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("ApiError", "_Rule"):
                codes.update(str(part.value) for part in call.args[1:2] if isinstance(part, ast.Constant))
        for pair in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            # The codes that _invalid_body and _http_error choose from.
            if path.name == "errors.py" and isinstance(pair, ast.Constant) and isinstance(pair.value, str):
                codes.update(re.findall(r"^(?:missing|unknown|invalid|not|method|http)_[a-z_]+$", pair.value))
    codes.pop("invalid_request_error")  # OpenAI's type of an error, not a code
    assert len(codes) > 25
    known = {record.error_code for record in RECORDS}
    assert not set(codes) - known


def test_ids_and_slugs_are_unique_and_patterns_are_safe() -> None:
    assert len({record.id for record in RECORDS}) == len({record.slug for record in RECORDS}) == len(RECORDS)
    for record in RECORDS:
        assert pattern_fault(record.message_pattern) is None
        assert record.message_pattern.endswith("$")


@pytest.mark.parametrize("record", RECORDS, ids=[record.slug for record in RECORDS])
def test_a_message_finds_its_own_record(record: ErrorRecord) -> None:
    kind = type(record.error_class, (Exception,), {})
    found = id_of(kind(record.example_message))
    assert record.example_message is not None and found is not None
    assert record.regex.search(record.example_message) and SLUG[found] == SLUG[record.id]


def test_what_sglang_says_finds_our_record() -> None:
    record = load_catalog().by_slug("no-index-value")
    assert record is not None
    end = "does not have an index V cache (either dense, or in the K-only group). index_kv layers: [3, 5]"
    for start in ("layer_id=7", "layer.layer_id=3", "2026-01-01 ERROR scheduler: ValueError: layer_id=12"):
        assert record.regex.search(f"{start} {end}")


def test_the_fix_of_a_layer_without_index_value_is_right_here() -> None:
    record = load_catalog().by_slug("no-index-value")
    assert record is not None and record.example_fix is not None
    told = " ".join(record.solutions)
    assert "pool.get_index_k_buffer(layer_id)" in told  # for a K-only layer
    assert "they wait" in told
    assert "main_pool" not in told + record.example_fix  # a sub-pool would not wait
    assert record.example_fix.count("get_index_k_buffer") == 1


def test_an_error_that_carries_the_message_of_another_is_found_by_that() -> None:
    inner = id_of(ConfigError("config.json: malformed JSON at line 1, column 2: Expecting value"))
    assert inner is not None
    assert (
        id_of(TokenizerError("model/tokenizer_config.json: malformed JSON at line 1, column 2: Expecting value"))
        == inner
    )


def test_an_error_that_nobody_knows_has_no_id() -> None:
    assert id_of(ZeroDivisionError("division by zero")) is None
    assert id_of(NoIndexValueError("something new")) is None


def test_a_long_message_takes_no_longer() -> None:
    began = time.process_time()
    for text in ("x" * 100_000, "a: " * 30_000, "layer_id=" * 10_000, "7 " * 50_000):
        assert id_of(ConfigError(text)) is None
    assert time.process_time() - began < 5


def test_an_id_is_the_same_wherever_the_code_moves() -> None:
    text = "layer_id=3 is not a sparse attention layer; sparse layers: [1]"
    assert id_of(NotSparseLayerError(text)) == "a98f6cf3772983ad"
    assert parse_template("a {x!r} b").skeleton == parse_template("a {self.y}{z} b").skeleton


def test_a_wording_fits_what_its_pattern_finds() -> None:
    rng = random.Random(7)
    values = ("", "7", "a b", "x: y", " is not ", ": ")
    lines = [
        rng.choice(("", "E: ")) + "".join(text + (rng.choice(values) if hole else "") for text, hole in parts)[cut:]
        for parts in (record.template.parts for record in RECORDS)
        for cut in (0, 2)
    ]
    plain = [record for record in RECORDS if record.message_pattern == record.template.pattern]
    for record in rng.sample(plain, 60):
        for line in lines:
            assert record.fits(line) == (record.regex.search(line) is not None), (record.error_message, line)


def test_an_error_without_a_record_is_noticed_while_tests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with errors_have_records(), pytest.raises(ConfigError):
        parse_size("8 gigs")
    monkeypatch.setattr("support.raised.id_of", lambda _: None)
    words = r"no record fits:\nunits\.py:\d+: ConfigError: size '8 gigs' is not a number"
    with pytest.raises(AssertionError, match=words), errors_have_records(), pytest.raises(ConfigError):
        parse_size("8 gigs")
