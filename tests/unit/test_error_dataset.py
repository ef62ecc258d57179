"""Data sets of error records: built, checked, read back; and the published example record, which is SGLang's."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.cli import invoke
from tamis.errors import CatalogError
from tamis.errors.catalog import ErrorRecord, load_catalog
from tamis.errors.catalog.build import build
from tamis.errors.catalog.dataset import check_dataset, write_dataset
from tamis.errors.catalog.patterns import pattern_fault
from tamis.errors.catalog.written import read_records

EXAMPLE = Path(__file__).parents[1] / "data" / "error_record.json"
GIVEN: dict[str, Any] = json.loads(EXAMPLE.read_text(encoding="utf-8"))["record"]
BEFORE = """\
class MiniMaxSparseKVPool:
    def _wait_for_layer(self, layer_id):
        if self.layer_transfer_counter is not None:
"""
AFTER = """
            f"sparse layers: {[]}"
        )
"""
"""What makes a module of the excerpt."""


@pytest.mark.parametrize("whole", [True, False], ids=["in a module", "by itself"])
def test_the_excerpt_of_the_example_gives_its_record_back(tmp_path: Path, whole: bool) -> None:
    start: int = GIVEN["sourceCodeStart"]
    before = BEFORE if whole else ""
    blank = "\n" * (start - 1 - before.count("\n"))
    path = tmp_path / "memory_pool.py"
    path.write_text(blank + before + GIVEN["sourceCode"] + (AFTER if whole else "\n"), encoding="utf-8")
    out = tmp_path / "set.jsonl"
    result = invoke("errors", "build", str(path), "--out", str(out), "--repo", "sgl-project/sglang")
    assert result.code == 0
    assert ("syntax error" in result.err) is not whole
    records = [json.loads(line)["record"] for line in out.read_text().splitlines()]
    (record,) = [record for record in records if record["lineNumber"] == GIVEN["lineNumber"]]
    same = ("repo", "slug", "errorMessage", "errorClass", "lineNumber", "sourceCode", "sourceCodeStart",
            "sourceCodeEnd", "schemaVersion")  # fmt: skip
    assert {name: record[name] for name in same} == {name: GIVEN[name] for name in same}
    assert set(GIVEN) <= set(record)


@pytest.mark.parametrize("layer", ["7", "layer.layer_id=3", "None", "-1", "x y"])
@pytest.mark.parametrize("layers", ["[]", "[3, 5]", "dict_keys([])", "[1, 2, ..."])
@pytest.mark.parametrize("start", ["", "2026-01-01 00:00:00 ERROR ValueError: ", "[rank 0] layer."])
def test_our_pattern_matches_what_the_examples_matches(layer: str, layers: str, start: str) -> None:
    message = GIVEN["errorMessage"].replace("{layer_id}", layer)
    message = start + re.sub(r"\{list.*\}", layers.replace("\\", ""), message)
    assert re.search(GIVEN["messagePattern"], message)
    ours = load_catalog().by_slug("no-index-value")
    example = ErrorRecord.from_json(GIVEN)
    assert ours is not None
    assert ours.regex.search(message) and re.search(example.template.pattern, message)


def test_the_example_passes_the_check_and_is_read() -> None:
    assert check_dataset(EXAMPLE) == (1, [])
    result = invoke("errors", "check", str(EXAMPLE))
    assert (result.code, result.out) == (0, f"{EXAMPLE}: 1 records, all as they should be\n")
    catalog = load_catalog(EXAMPLE)
    assert catalog.version == "2026-08-28T06:17:29.519Z"
    (record,) = catalog.records
    assert catalog.by_id("D66172781BA25644 ") is record is catalog.by_slug(GIVEN["slug"])
    assert {name: value for name, value in record.to_json().items() if name != "exampleSetup"} == GIVEN
    assert catalog.by_id("0" * 16) is None


def test_our_own_data_set_passes_its_check(tmp_path: Path) -> None:
    out = tmp_path / "tamis.jsonl"
    assert invoke("errors", "build", "--out", str(out)).code == 0
    count, faults = check_dataset(out)
    assert count == len(load_catalog().records) and not faults
    lines = [json.loads(line) for line in out.read_text(encoding="ascii").splitlines()]
    assert len({line["datasetVersion"] for line in lines}) == 1
    read = load_catalog(out)
    assert [record.id for record in read.records] == [record.id for record in load_catalog().records]
    assert all(record.documentation and record.solutions and record.example_fix for record in read.records)


def test_a_record_says_which_commit_it_was_made_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    package = tmp_path / "work" / "src" / "oven"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ValueError('too hot')\n")
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false")
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", "-C", str(tmp_path / "work"), *command], check=True, timeout=60)
    (record,) = build(package, repo="owner/oven").catalog.records
    sha = record.analyzed_sha
    assert sha is not None and re.fullmatch("[0-9a-f]{40}", sha)
    assert record.file_path == "src/oven/__init__.py"
    assert record.github_url == f"https://github.com/owner/oven/blob/{sha}/src/oven/__init__.py#L1-L1"
    assert record.analyzed_at is not None and record.analyzed_at.endswith("Z")


def test_written_fields_are_joined_to_any_package(tmp_path: Path) -> None:
    (tmp_path / "oven.py").write_text(
        "def f(x):\n    raise ValueError(f'{x!r} is too hot')\n    raise KeyError('cold')\n"
    )
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "oven.toml").write_text(RECORD)
    result = invoke("errors", "build", str(tmp_path / "oven.py"), "--records", str(tmp_path / "records"))
    hot, cold = (json.loads(line)["record"] for line in result.out.splitlines())
    assert (hot["slug"], hot["documentation"], hot["lineNumber"]) == ("too-hot", "It is too hot.", 2)
    assert hot["messagePattern"] == "(.*?) is too hot$"
    assert (cold["slug"], cold["documentation"], cold["solutions"]) == ("cold", None, [])
    assert "the source raises no ValueError with this message" in result.err
    assert "2 records" in result.err


RECORD = """
[defaults]
error_class = "ValueError"
error_type = "validation"
handling_strategy = "validation"
documentation = "It is too hot."
trigger_scenarios = "f(x)"
common_situations = "Fahrenheit."
solutions = ["Give degrees Celsius"]
before = "f(400)"
after = "f(200)"
validation_code = "print(1)"
prevention_tips = ["Name the unit"]
tags = ["heat"]

[[record]]
slug = "too-hot"
error_message = "{degrees} is too hot"

[[record]]
slug = "never"
error_message = "this is never said"
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('slug = "never"', 'slug = "never"\ncolour = "red"', "record 'never' has the unknown field 'colour'"),
        ('tags = ["heat"]', "", "record 'too-hot' has no tags"),
        ('tags = ["heat"]', 'tags = "heat"', "record 'too-hot': tags is 'heat', not a list of texts"),
        ('slug = "never"', 'slug = "never"\nhttp_status = "400"', "record 'never': http_status is '400', not a number"),
        ('slug = "never"', 'slug = "too-hot"', "record 'too-hot': 'slug too-hot' is there already, in"),
        ("this is never said", "{x} is too hot", "record 'never': 'ValueError {} is too hot' is there already, in"),
        ("this is never said", "this is {never said", "is no template: the brace at character 8 is not closed"),
        ("this is never said", "never}", "is no template: the brace at character 5 closes nothing"),
        ("this is never said", "{x}: {y}", "has no text of its own"),
        ('slug = "never"', 'slug = "never"\nmessage_pattern = "("', "message_pattern '(': it does not compile: "),
        ('slug = "never"', "slug = \"never\"\nmessage_pattern = '(a+)+$'", "it could backtrack without end: "),
        ("[defaults]", "[default]", "'default' is neither [defaults] nor [[record]]"),
        ("[defaults]", "[defaults", "not TOML in UTF-8: "),
        ("[[record]]", "[record]", "oven.toml: "),
    ],
)
def test_a_record_file_that_is_wrong_is_named_with_the_field(tmp_path: Path, old: str, new: str, words: str) -> None:
    (tmp_path / "oven.toml").write_text(RECORD.replace(old, new))
    with pytest.raises(CatalogError) as caught:
        read_records(tmp_path)
    assert str(tmp_path / "oven.toml") in str(caught.value)
    assert words in str(caught.value)


def test_a_record_file_of_bytes(tmp_path: Path) -> None:
    (tmp_path / "oven.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(CatalogError, match=r"oven\.toml: not TOML in UTF-8"):
        read_records(tmp_path)
    with pytest.raises(CatalogError, match="nowhere: cannot be read: No such file"):
        read_records(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$", "(a*)*b", "(a|aa)+$", "(?:a{1,100}){1,100}", ".*.*", "(.+?)(.+?)$", "a+(b?)a*", r"(\w+)\1", "(?=a+)b",
        "(x(y(z+)*)?)*", "(.*?|b)*", "|".join(f"{word}x" for word in "abcdefghijklmnopqrstuvwxyz"), "(.*)x?.*", "(",
    ],
)  # fmt: skip
def test_a_pattern_that_could_take_for_ever_is_refused(pattern: str) -> None:
    assert pattern_fault(pattern) is not None


@pytest.mark.parametrize(
    "pattern",
    ["a (.+?) b (.+?)$", r"(.+?)\s{1,64}(x|y)? [a-z]+\.$", "(a)?b*", "^x{2,3}y+$", r"layer_id=(\d+) is \(not\)$", ""],
)
def test_a_pattern_whose_time_is_bounded_is_taken(pattern: str) -> None:
    assert pattern_fault(pattern) is None


def test_a_message_whose_pattern_would_be_unsafe_is_left_out_and_told_of(tmp_path: Path) -> None:
    many = " ".join(f"word {{x{place}}}" for place in range(40))
    (tmp_path / "module.py").write_text(f"raise ValueError(f'{many}')\nraise ValueError('plain words')\n")
    result = invoke("errors", "build", str(tmp_path / "module.py"))
    assert [json.loads(line)["record"]["errorMessage"] for line in result.out.splitlines()] == ["plain words"]
    assert "module.py:1: left out, its pattern could backtrack without end" in result.err


def line_with(**changes: Any) -> str:
    return json.dumps({"record": {**GIVEN, **changes}, "datasetVersion": None})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense", "line 1: not JSON"),
        ("[]", "line 1: the line: [] is not of type 'object'"),
        ("[" * 100_000, "line 1: not JSON"),
        ('{"record": {}, "datasetVersion": null}', "is a required property"),
        (line_with(schemaVersion=1), "record.schemaVersion: 2 was expected"),
        (line_with(colour="red"), "Additional properties are not allowed ('colour' was unexpected)"),
        (line_with(id="X"), "record.id: 'X' does not match"),
        (line_with(lineNumber="7"), "record.lineNumber: '7' is not of type"),
        (line_with(solutions=[1]), "record.solutions.0: 1 is not of type 'string'"),
        (line_with(messagePattern="(a+)+$"), "record.messagePattern: it could backtrack without end"),
        (line_with(messagePattern="something else"), "messagePattern does not match errorMessage"),
        (line_with(lineNumber=3), "lineNumber 3 is outside the excerpt, lines 4940 to 4976"),
        (line_with(sourceCode="x"), "the excerpt has 1 lines, not the 37 from 4940 to 4976"),
        (line_with() + "\n" + line_with(), "line 2: record d66172781ba25644 is on line 1 already"),
        ("", "it holds no records"),
    ],
)
def test_a_data_set_that_is_wrong_is_told_line_by_line(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(line)
    result = invoke("errors", "check", str(path))
    assert result.code == 1
    assert words in result.out


def test_a_faulty_data_set_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(line_with() + "\n" + line_with(id="X"))
    with pytest.raises(CatalogError, match=r"set\.jsonl: line 2: record\.id: 'X' does not match"):
        load_catalog(path)
    path.write_bytes(b"\xff")
    with pytest.raises(CatalogError, match=r"set\.jsonl: not UTF-8 text \(byte 0\)"):
        load_catalog(path)
    with pytest.raises(CatalogError, match="nowhere: cannot be read: No such file"):
        load_catalog(tmp_path / "nowhere")


def test_a_data_set_of_two_versions_in_other_orders(tmp_path: Path) -> None:
    (record,) = load_catalog(EXAMPLE).records
    path = tmp_path / "set.jsonl"
    with path.open("w") as file:
        write_dataset(
            replace(load_catalog(EXAMPLE), records=(record, replace(record, id="0" * 16, slug="other"))), file
        )
    assert check_dataset(path) == (2, [])


def test_building_an_installed_package_by_its_name(tmp_path: Path) -> None:
    out = tmp_path / "set.jsonl"
    result = invoke("errors", "build", "jsonschema", "--out", str(out))
    assert result.code == 0
    catalog = load_catalog(out)
    assert len(catalog.records) > 10
    assert {record.repo for record in catalog.records} == {"jsonschema"}
    assert catalog.records[0].file_path is not None and catalog.records[0].file_path.startswith("jsonschema/")
    assert invoke("errors", "build", "no_such_package").code == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_large_package_gives_over_a_thousand_records_within_two_minutes(tmp_path: Path) -> None:
    import time

    import transformers

    began = time.process_time()
    built = build(Path(transformers.__file__).parent)
    # Of the processor: the machine that runs the tests has other work as well.
    assert time.process_time() - began < 120
    assert len(built.catalog.records) > 1000
    out = tmp_path / "set.jsonl"
    with out.open("w") as file:
        write_dataset(built.catalog, file)
    assert check_dataset(out) == (len(built.catalog.records), [])
