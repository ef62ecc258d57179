import io
import json
import sys
from pathlib import Path

import pytest

from support.cli import Result, invoke
from tamis.errors.catalog import load_catalog

LINE = "layer_id=7 does not have an index V cache (either dense, or in the K-only group). index_kv layers: [3, 5]"


def piped(monkeypatch: pytest.MonkeyPatch, text: bytes, *arguments: str) -> Result:
    """`tamis explain` behind a pipe."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    return invoke("explain", *arguments)


def test_a_pasted_line_gives_cause_circumstances_fix_and_a_check() -> None:
    result = invoke("explain", LINE)
    assert (result.code, result.err) == (0, "")
    record = load_catalog().by_slug("no-index-value")
    assert record is not None
    assert result.out.startswith(f"NoIndexValueError  (no-index-value, id {record.id})\n")
    for heading in (
        "What it means",
        "When it happens",
        "How one gets there",
        "What helps",
        "Example",
        "A check to run",
    ):
        assert f"\n\n{heading}\n" in result.out
    assert "    # before\n" in result.out
    assert "src/tamis/kv/" in result.out


def test_words_without_quotes_are_one_line() -> None:
    assert invoke("explain", *LINE.split()).out == invoke("explain", LINE).out


@pytest.mark.parametrize("name", ["id", "slug", "class"])
def test_a_record_is_found_by_its_names(name: str) -> None:
    record = load_catalog().by_slug("no-index-value")
    assert record is not None
    asked = {"id": f" {record.id.upper()} ", "slug": record.slug, "class": "tamis.errors.NoIndexValueError"}[name]
    result = invoke("explain", asked)
    assert result.code == 0
    assert result.out.startswith("NoIndexValueError  (no-index-value, ")


@pytest.mark.parametrize("name", ["ConfigError", "invalid_request"])
def test_a_name_of_many_errors_lists_them(name: str) -> None:
    records = [record for record in load_catalog().records if name in (record.error_class, record.error_code)]
    result = invoke("explain", name)
    assert result.code == 0
    assert result.out.startswith(f"{len(records)} errors go by this name:\n")
    assert result.out.count("\n  tamis explain ") == len(records) > 1


def test_a_traceback_on_standard_input_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nValueError: {LINE}\n'
    result = piped(monkeypatch, text.encode(), "--json")
    told = json.loads(result.out)
    assert result.code == 0
    assert told["near_misses"] == []
    match = told["matches"][0]
    assert (match["line"], match["line_number"], match["whole"]) == (f"ValueError: {LINE}", 3, True)
    assert match["record"]["slug"] == "no-index-value"
    assert match["record"]["errorClass"] == "NoIndexValueError"


def test_two_errors_in_a_text_are_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    other = "the prompt has 900 tokens, more than the model's context of 512"
    result = piped(monkeypatch, f"{other}\n\n{LINE}\n".encode(), "-")
    assert "NoIndexValueError" in result.out
    assert "PromptTooLongError" in result.out
    assert "\nAlso found here:\n  tamis explain " in result.out


def test_nothing_that_matches_is_said_plainly() -> None:
    result = invoke("explain", "the cat sat on the mat")
    assert (result.code, result.out, result.err) == (1, "Nothing in the catalogue matches this text.\n", "")


def test_near_misses_are_offered_as_such() -> None:
    result = invoke("explain", "layer_id=3 was loaded late, though not a sparse attention thing")
    assert result.code == 1
    assert result.out.startswith(
        "Nothing in the catalogue matches this text.\n\nAlike, but not the same:\n  tamis explain "
    )
    told = json.loads(
        invoke("explain", "--json", "layer_id=3 was loaded late, though not a sparse attention thing").out
    )
    assert told["matches"] == []
    assert told["near_misses"][0]["slug"]


@pytest.mark.parametrize("arguments", [("",), ("  ",), ("-",), ()])
def test_nothing_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    result = piped(monkeypatch, b"\n", *arguments)
    assert result.code == 2
    assert result.err.startswith("error: there is nothing to explain")


def test_bytes_that_are_no_text_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    result = piped(monkeypatch, bytes(range(256)) * 2000 + b"\n" + LINE.encode() + b"\n\xff\xfe\x00")
    assert result.code == 0
    assert "(no-index-value, " in result.out


SGLANG = {
    "record": {
        "id": "d66172781ba25644", "repo": "sgl-project/sglang", "slug": "an-index-v-cache", "errorCode": None,
        "errorMessage": "layer_id={layer_id} does not have an index V cache (either dense, or in the K-only group). "
        "index_kv layers: {list(self.index_kv_layer_id_mapping.keys())}",
        "messagePattern": "layer_id=(.+?) does not have an index V cache \\(either dense, or in the K-only group\\)\\. "
        "index_kv layers: (.+?)",
        "errorType": "validation", "errorClass": "ValueError", "httpStatus": None, "severity": "error",
        "filePath": "python/memory_pool.py", "lineNumber": 2, "sourceCode": "a\nraise ValueError(\n",
        "sourceCodeStart": 1, "sourceCodeEnd": 3, "githubUrl": "https://github.com/x/y", "documentation": None,
        "triggerScenarios": None, "commonSituations": None, "solutions": [], "exampleFix": None,
        "handlingStrategy": None, "validationCode": None, "typeGuard": None, "tryCatchPattern": None,
        "preventionTips": [], "tags": [], "backgroundTag": None, "analyzedSha": None, "analyzedAt": None,
        "schemaVersion": 2,
    },
    "datasetVersion": "2026-08-28T06:17:29.519Z",
}  # fmt: skip


def test_another_catalogue_is_looked_through_instead(tmp_path: Path) -> None:
    """Its pattern is open at the end, as such data sets have them; where nothing is written, the source is shown."""
    data = tmp_path / "sglang.jsonl"
    data.write_text(json.dumps(SGLANG) + "\n")
    result = invoke("explain", "--catalog", str(data), f"2026-12-01 ERROR {LINE}")
    assert result.code == 0
    assert result.out.startswith("ValueError  (an-index-v-cache, id d66172781ba25644)\n")
    assert "Nobody has written down what it means. Where it is raised:\n    a\n    raise ValueError(" in result.out
    assert invoke("explain", "--catalog", str(data), "the model has no chat template").code == 1


def test_a_catalogue_that_is_none_is_named(tmp_path: Path) -> None:
    data = tmp_path / "x.jsonl"
    data.write_text("{}\n")
    result = invoke("explain", "--catalog", str(data), LINE)
    assert result.code == 2
    assert result.err.startswith(f"error: {data}: line 1: ")
