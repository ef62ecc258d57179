import io
import sys
from pathlib import Path

import pytest

from support.cli import invoke
from tamis.cli.prompt import read_prompt
from tamis.errors import EmptyPromptError, RequestError


class Stdin(io.TextIOWrapper):
    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="ascii")


def test_the_prompt_is_taken_as_it_is() -> None:
    assert read_prompt(" two  spaces\n", None) == " two  spaces\n"


def test_a_file_is_read_as_utf8_without_its_byte_order_mark_and_with_its_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"\xef\xbb\xbfna\xc3\xafve\r\nline\n")
    assert read_prompt(None, str(path)) == "naïve\r\nline\n"


def test_a_dash_is_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin("schön".encode()))
    assert read_prompt(None, "-") == "schön"


def test_exactly_one_of_prompt_and_file_is_needed(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"^give the prompt with --prompt TEXT or --file PATH; --file - reads"):
        read_prompt(None, None)
    with pytest.raises(RequestError, match=r"^give the prompt with --prompt TEXT or --file PATH, not both$"):
        read_prompt("text", str(tmp_path))


def test_a_prompt_without_text_is_refused_with_its_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EmptyPromptError, match=r"^the prompt is empty: --prompt has no text$"):
        read_prompt("", None)
    path = tmp_path / "empty.txt"
    path.write_bytes(b"\xef\xbb\xbf")
    with pytest.raises(EmptyPromptError, match=r"empty\.txt has no text$"):
        read_prompt(None, str(path))
    monkeypatch.setattr(sys, "stdin", Stdin(b""))
    with pytest.raises(EmptyPromptError, match=r"standard input has no text$"):
        read_prompt(None, "-")


def test_a_binary_file_is_refused_with_the_place_of_the_first_bad_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(b"ok\x89PNG")
    with pytest.raises(RequestError, match=r"image\.png is not UTF-8 text: byte 2 is 0x89$"):
        read_prompt(None, str(path))
    monkeypatch.setattr(sys, "stdin", Stdin(b"\xff"))
    with pytest.raises(RequestError, match=r"^standard input is not UTF-8 text: byte 0 is 0xff$"):
        read_prompt(None, "-")


def test_a_file_without_end_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match=r"^/dev/zero has more than 67108864 bytes, too many for a prompt$"):
        read_prompt(None, "/dev/zero")
    monkeypatch.setattr("tamis.cli.prompt.MAX_BYTES", 3)
    monkeypatch.setattr(sys, "stdin", Stdin(b"four"))
    with pytest.raises(RequestError, match=r"^standard input has more than 3 bytes, too many for a prompt$"):
        read_prompt(None, "-")
    monkeypatch.setattr(sys, "stdin", Stdin(b"all"))
    assert read_prompt(None, "-") == "all"


def test_an_argument_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(RequestError, match=r"^the prompt is not UTF-8 text at character 1$"):
        read_prompt(b"a\xff".decode("utf-8", "surrogateescape"), None)


@pytest.mark.parametrize("name", ["missing.txt", "."])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, name: str) -> None:
    result = invoke("generate", "--file", str(tmp_path / name))
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"error: {tmp_path / name}: ")
    assert result.told.count("\n") == 1
