"""What is found in source code: messages in all the ways people write them, and what is done with bad files."""

from pathlib import Path
from textwrap import dedent

import pytest

from tamis.errors import CatalogError
from tamis.errors.catalog.build import build
from tamis.errors.catalog.scan import scan


def messages(tmp_path: Path, source: str, name: str = "module.py") -> list[tuple[str, str]]:
    """Class and message of each error in a module, those without words as ""."""
    path = tmp_path / name
    path.write_text(dedent(source), encoding="utf-8")
    found = [site.found for site in scan(path, tmp_path).sites]
    return [(one.error_class, one.template.text if one.speaks else "") for one in found]


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ('"plain words"', "plain words"),
        ('f"value {x} is odd"', "value {x} is odd"),
        ("f\"value {x!r:>4} and {d['k']}\"", "value {x!r:>4} and {d['k']}"),
        ('f"cut " f"in {x} " "pieces"', "cut in {x} pieces"),
        ('"braces {x} in plain text"', "braces {{x}} in plain text"),
        ('f"doubled {{x}} and {x}"', "doubled {{x}} and {x}"),
        ('"percent %s and %d%%" % (x, y + 1)', "percent {x} and {y + 1}%"),
        ('"named %(a)s value" % values', "named {a} value"),
        ('"format {} and {name:>3}".format(x, name=y)', "format {x} and {y}"),
        ('"sum " + str(x) + " of parts"', "sum {str(x)} of parts"),
        ('" ".join(["some words", f"and {x}"])', "some words and {x}"),
        ('textwrap.dedent("indented words")', "indented words"),
        ('f"neighbours {x}{y} touch"', "neighbours {x} touch"),
        ("CONSTANT", "a constant text"),
        ('x, "the second has words"', "the second has words"),
        ("message=f'by name {x}'", "by name {x}"),
    ],
)
def test_a_message_in_every_form(tmp_path: Path, expression: str, message: str) -> None:
    source = f'CONSTANT = "a constant text"\ndef f(x, y, d, values):\n    raise ValueError({expression})\n'
    assert messages(tmp_path, source) == [("ValueError", message)]


def test_a_choice_gives_two_messages(tmp_path: Path) -> None:
    source = """
        def f(x):
            raise ValueError("no value" if x is None else f"{x} is wrong")
    """
    assert messages(tmp_path, source) == [("ValueError", "no value"), ("ValueError", "{x} is wrong")]


def test_a_variable_is_what_it_was_set_to_last(tmp_path: Path) -> None:
    source = """
        def f(x):
            message = "never seen"
            message = f"first of {x}"
            if x:
                message = "the second"
                message += " in two parts"
            raise ValueError(message)

        def g(x):
            what, code = f"a pair of {x}", 3
            raise KeyError(what)
    """
    assert messages(tmp_path, source) == [
        ("ValueError", "the second in two parts"), ("ValueError", "the second"), ("ValueError", "first of {x}"),
        ("KeyError", "a pair of {x}"),
    ]  # fmt: skip


def test_helpers_are_followed_to_their_callers(tmp_path: Path) -> None:
    source = """
        class Reader:
            def corrupt(self, what):
                return OSError(f"{self.path}: {what}")

            def read(self, size):
                if size < 4:
                    raise self.corrupt("the header is cut off")
                raise self.corrupt(f"{size} bytes are too many")

        def check(value, error, name="value"):
            raise error(f"{name} is of type {type(value)}")

        def both(value):
            check(value, TypeError)
            check(value, KeyError, "key")
    """
    assert messages(tmp_path, source) == [
        ("OSError", "{self.path}: the header is cut off"),
        ("OSError", "{self.path}: {size} bytes are too many"),
        ("KeyError", "{name} is of type {type(value)}"),
        ("TypeError", "{name} is of type {type(value)}"),
    ]


def test_constructors_say_what_the_message_is(tmp_path: Path) -> None:
    source = """
        class ReadError(Exception):
            def __init__(self, key, why):
                super().__init__(f"page {key} cannot be read: {why}")

        class Lost(ReadError):
            pass

        class Coded(RuntimeError):
            def __init__(self, code, message):
                super().__init__(message)

        def f(key):
            raise ReadError(key, "it is not there")

        def g(key):
            raise Lost(key, why=f"it has {len(key)} bytes")

        def h(x):
            raise Coded(404, f"nothing like {x}")
    """
    assert messages(tmp_path, source) == [
        ("ReadError", "page {key} cannot be read: it is not there"),
        ("Lost", "page {key} cannot be read: it has {len(key)} bytes"),
        ("Coded", "nothing like {x}"),
    ]


def test_errors_that_say_nothing_of_their_own_are_counted(tmp_path: Path) -> None:
    source = """
        def f(error):
            raise ValueError(str(error))

        def g():
            raise NotImplementedError

        def h():
            raise KeyError()
    """
    (tmp_path / "module.py").write_text(dedent(source))
    built = build(tmp_path / "module.py")
    assert built.catalog.records == ()
    assert built.wordless == 1  # of the others there is no message at all


def test_nested_functions_classes_and_every_kind_of_block(tmp_path: Path) -> None:
    source = """
        class A:
            class B:
                def f(self):
                    try:
                        with open("x") as file:
                            for line in file:
                                while line:
                                    raise ValueError("in a loop")
                    except OSError as error:
                        match error.errno:
                            case 2:
                                raise ValueError("in a case") from error
                    else:
                        raise ValueError("in an else")
                    finally:
                        raise ValueError("in the end")

        async def g():
            async with x:
                raise ValueError("waited for")

        raise ValueError("at the top")
    """
    found = [message for _, message in messages(tmp_path, source)]
    assert found == ["in a loop", "in a case", "in an else", "in the end", "waited for", "at the top"]


def test_a_syntax_error_is_reported_and_the_raises_around_it_are_read(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("def f(x):\n    raise ValueError(f'good {x}')\n")
    broken = (
        "def g(x):\n    raise KeyError(\n        f'still {x} readable'\n    )\n\ndef (:\n    raise ValueError('cut\n"
    )
    (tmp_path / "broken.py").write_text(broken)
    built = build(tmp_path)
    assert [(r.error_class, r.error_message, r.line_number) for r in built.catalog.records] == [
        ("KeyError", "still {x} readable", 2), ("ValueError", "good {x}", 2)]  # fmt: skip
    ((path, fault),) = built.problems
    assert path.name == "broken.py"
    assert "syntax error at line 7" in fault
    assert "1 raises were read on their own" in fault


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"raise ValueError('x')\0", "binary"),
        (b"\xff\xfe\x00r\x00a", "binary"),
        (b"raise ValueError('\xe9')\n", "invalid or missing encoding"),
        (b"# coding: nothing\n", "unknown encoding"),
        (b"(" * 100_000, "syntax error"),
    ],
)
def test_what_is_no_source_is_reported_and_the_rest_goes_on(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "bad.py").write_bytes(content)
    (tmp_path / "good.py").write_text("raise ValueError('good words')\n")
    built = build(tmp_path)
    assert [record.error_message for record in built.catalog.records] == ["good words"]
    ((path, fault),) = built.problems
    assert path.name == "bad.py"
    assert words in fault


def test_a_file_that_cannot_be_read_is_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    (tmp_path / "bad.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "good.py").write_text("raise ValueError('good words')\n")
    built = build(tmp_path)
    assert [record.error_message for record in built.catalog.records] == ["good words"]
    ((path, fault),) = built.problems
    assert path.name == "bad.py"
    assert "No such file" in fault


def test_another_encoding_is_read_as_it_says(tmp_path: Path) -> None:
    source = "# -*- coding: latin-1 -*-\nraise ValueError('caf\xe9 is closed')\n"
    (tmp_path / "module.py").write_bytes(source.encode("latin-1"))
    (record,) = build(tmp_path).catalog.records
    assert record.error_message == "caf\xe9 is closed"


def test_lines_count_as_the_parser_counts_them(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_bytes(b"x = 'a\x0cb'\r\n\x0c\r\nraise ValueError('form feeds')\r\n")
    (record,) = build(tmp_path).catalog.records
    assert (record.line_number, record.source_code_start, record.source_code_end) == (3, 1, 3)
    assert record.source_code is not None and record.source_code.split("\n")[2] == "raise ValueError('form feeds')"


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="nowhere: no such file or directory"):
        build(tmp_path / "nowhere")


def test_the_line_is_that_of_the_raise(tmp_path: Path) -> None:
    source = "def f(x):\n    raise (\n        ValueError(\n            f'{x} is wrong'\n        )\n    )\n"
    (tmp_path / "module.py").write_text(source)
    (record,) = build(tmp_path).catalog.records
    assert record.line_number == 2


def test_the_same_message_twice_is_one_record(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        "def f(x):\n    raise ValueError(f'wrong {x}')\n    raise ValueError(f'wrong {x!r}')\n"
    )
    (record,) = build(tmp_path).catalog.records
    assert record.line_number == 2


def test_nothing_of_the_package_is_run(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("import pathlib\npathlib.Path('ran').touch()\nraise ValueError('at import')\n")
    assert len(build(tmp_path).catalog.records) == 1
    assert not Path("ran").exists()
