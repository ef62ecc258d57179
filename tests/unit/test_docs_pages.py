"""Pages that are made from the program, and pages that must keep up with it."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer

import docs_pages
from tamis.cli.app import app
from tamis.errors.catalog import Catalog, load_catalog

DOCS = Path(docs_pages.__file__).parent
SERVER = DOCS.parent / "src/tamis/server"


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog()


def test_the_page_of_commands_is_what_help_says() -> None:
    kept = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert kept == docs_pages.cli_page(), "make docs writes it anew"


def test_the_page_of_commands_has_every_command_and_option() -> None:
    page = docs_pages.cli_page()
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        assert f"\n## tamis {name}\n" in page
        for parameter in command.params:
            shown = parameter.metavar if parameter.param_type_name == "argument" else parameter.opts[0]
            assert parameter.hidden or "--help" in parameter.opts or f"{shown}" in page, f"tamis {name} {shown}"


def test_every_record_is_on_a_page_with_all_that_was_written(catalog: Catalog) -> None:
    pages = docs_pages.error_pages(catalog)
    ids = re.compile(r"^- `([0-9a-f]{16})`", re.MULTILINE)
    where = {number: name for name, page in pages.items() for number in ids.findall(page)}
    assert set(where) == {record.id for record in catalog.records}
    assert set(pages) == {"index.md", *where.values()}
    for record in catalog.records:
        page = pages[where[record.id]]
        assert record.error_message in page
        assert f"`{record.error_class}`" in page
        for code in filter(None, (record.example_fix, record.validation_code)):
            assert code.strip("\n") in page
    for name in pages:
        assert name == "index.md" or f"]({name})" in pages["index.md"]


def test_a_page_has_the_name_that_a_person_gave(catalog: Catalog) -> None:
    fault = next(record for record in catalog.records if record.slug == "no-index-value")
    assert fault.id in docs_pages.error_pages(catalog)["no-index-value.md"]


def test_texts_of_records_cannot_become_markup() -> None:
    assert docs_pages._escaped("a <b> *c* [d] _e_ f_g") == r"a \<b> \*c\* \[d] \_e\_ f_g"
    assert docs_pages._code("a|b `c`") == "`` a\\|b `c` ``"


def test_the_api_page_names_every_path_and_every_code() -> None:
    page = (DOCS / "http.md").read_text(encoding="utf-8")
    routes = re.findall(r'@router\.\w+\(\s*"([^"]+)"', (SERVER / "app.py").read_text(encoding="utf-8"))
    assert len(routes) > 10
    for route in routes:
        shown = re.sub(r"\{name(:path)?\}", "NAME", route)
        assert re.search(rf"`(?:[A-Z]+ )?{re.escape(shown)}`", page), f"{route} is not on the page"
    told = r'(?:ApiError|_Rule)\(\s*\d+,\s*"([a-z_]+)"'
    codes = {code for path in SERVER.glob("*.py") for code in re.findall(told, path.read_text(encoding="utf-8"))}
    assert len(codes) > 15
    assert {code for code in codes if f"`{code}`" not in page} == set()


def test_the_drawings_are_there() -> None:
    for page in DOCS.glob("*.md"):
        for name in re.findall(r"\]\((_static/[^)]+)\)", page.read_text(encoding="utf-8")):
            assert (DOCS / name).read_text(encoding="utf-8").startswith("<svg "), f"{page.name}: {name}"
