"""Beside every error that is printed stands the command that explains it, and never inside the error."""

import io
import logging
from pathlib import Path

import pytest

from support.cli import invoke
from tamis import errors
from tamis.errors.catalog import load_catalog
from tamis.errors.hint import HintingFormatter, hint_for
from tamis.server.errors import ApiError, to_api_error


def explained(hint: str | None) -> str:
    """The slug of the record that a hint names."""
    assert hint is not None
    command, _, number = hint.rpartition(" ")
    assert command == "tamis explain"
    record = load_catalog().by_id(number)
    assert record is not None
    return record.slug


def test_the_hint_is_no_part_of_the_error() -> None:
    error = errors.NotSparseLayerError("layer_id=0 is not a sparse attention layer; sparse layers: [1, 2]")
    assert explained(hint_for(error)) == "not-a-sparse-layer"
    assert "explain" not in str(error)


@pytest.mark.parametrize("error", [ValueError("x"), errors.ConfigError("nobody ever raised this"), KeyboardInterrupt()])
def test_what_is_not_in_the_catalogue_has_no_hint(error: BaseException) -> None:
    assert hint_for(error) is None


def test_the_command_line_prints_it_below_the_error(tmp_path: Path) -> None:
    result = invoke("plan", str(tmp_path / "nothing"))
    assert result.code == 2
    line, hint, end = result.err.split("\n")
    assert line.startswith("error: ")
    assert end == ""
    assert explained(hint.removeprefix("hint: "))
    assert invoke("explain", hint.rpartition(" ")[2]).code == 0
    assert invoke("explain", line).out == invoke("explain", hint.rpartition(" ")[2]).out


def test_a_catalogue_that_cannot_be_read_does_not_hide_the_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(error: BaseException) -> str:
        raise errors.CatalogError("a record file is not TOML")

    monkeypatch.setattr("tamis.errors.hint.hint_for", broken)
    result = invoke("plan", str(tmp_path / "nothing"))
    assert result.code == 2
    assert result.err.startswith("error: ")
    assert result.err.endswith("hint: the catalogue of errors cannot be read: a record file is not TOML\n")


def test_usage_errors_and_bugs_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def pull(model: str | None = None, progress: object = None) -> Path:
        raise ZeroDivisionError("by 0")

    monkeypatch.setattr("tamis.models.pull", pull)
    for arguments in (("fly",), ("pull",)):
        assert invoke(*arguments).err.count("\n") == 1


def test_an_error_object_of_the_server_carries_code_and_hint() -> None:
    error = errors.PromptTooLongError("the prompt has 900 tokens, more than the model's context of 512")
    told = to_api_error(error).body()["error"]
    assert told["code"] == "context_length_exceeded"
    assert told["message"] == str(error)
    assert explained(told["explain"]) == "prompt-too-long"


def test_an_error_that_the_server_makes_itself_has_one_too() -> None:
    told = ApiError(404, "model_not_found", "the model 'x' is not served here: this server has 'y'").body()["error"]
    assert explained(told["explain"]) == "http-model-not-served"
    assert ApiError(418, "teapot", "short and stout").body()["error"]["explain"] is None


@pytest.mark.parametrize("message", [" of  of " * 2000, "=" * 16_000, "x is x not " * 1500, "a: " * 5000])
def test_a_client_cannot_make_the_look_up_take_long(message: str) -> None:
    """Field names and values of a request are in messages; patterns are not run on them."""
    for kind in (errors.RequestError, errors.SamplingError, errors.GrammarError):
        assert hint_for(kind(f"{message}\x00")) is None


def test_a_logged_traceback_ends_with_the_hint() -> None:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(HintingFormatter("%(levelname)s %(message)s"))
    for error in (errors.EngineClosedError("the engine is closed"), ZeroDivisionError("by 0")):
        handler.emit(logging.LogRecord("x", logging.ERROR, "x", 1, "it failed", None, (type(error), error, None)))
    first, second = out.getvalue().split("ZeroDivisionError", 1)
    assert "tamis.errors.EngineClosedError: the engine is closed\ntamis explain " in first
    assert "tamis explain" not in second
