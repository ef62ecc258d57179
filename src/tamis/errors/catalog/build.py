"""The catalogue of a package: what its source raises, joined with what people have written about it."""

import datetime
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from tamis.errors.catalog.catalog import REPO, Catalog
from tamis.errors.catalog.patterns import pattern_fault
from tamis.errors.catalog.record import ErrorRecord
from tamis.errors.catalog.scan import Scan, Site, scan
from tamis.errors.catalog.template import Template, record_id
from tamis.errors.catalog.written import WrittenRecord, read_records

_Key = tuple[str, str]
"""Class and skeleton."""
PACKAGE = Path(__file__).parents[2]
"""tamis's own source."""


@dataclass(frozen=True)
class Origin:
    """What the records say about where the source is from."""

    repo: str
    prefix: str = ""
    """The package's directory in the repository, with a slash behind it."""
    commit: str | None = None
    """The commit, where the source lies in a git repository."""
    made_at: str | None = None

    def url(self, name: str, first: int, last: int) -> str | None:
        """The excerpt on GitHub, where repository and commit are known."""
        if self.commit is None or "/" not in self.repo:
            return None
        return f"https://github.com/{self.repo}/blob/{self.commit}/{name}#L{first}-L{last}"


@dataclass(frozen=True)
class Built:
    """A catalogue, and what did not get into it."""

    catalog: Catalog
    problems: tuple[tuple[Path, str], ...]
    """Files that could not be read whole, and why."""
    unraised: tuple[ErrorRecord, ...]
    """Written records whose message the source does not raise."""
    refused: tuple[ErrorRecord, ...]
    """Records whose pattern could backtrack without end."""
    wordless: int
    """Places where an error is made with no words of its own: of another error's, or none."""


def build(path: Path, *, records: Path | None = None, repo: str | None = None) -> Built:
    """The catalogue of the package in the directory `path`, or of one file.

    `records`: a directory of record files; None: without written fields. Raises CatalogError where there is no such
    path, or a record file is not as it should be.
    """
    written = () if records is None else read_records(records)
    root = path if path.is_dir() else path.parent
    found = scan(path, root)
    return _joined(found, written, _origin(root.resolve(), repo or path.resolve().stem))


def build_own(*, with_commit: bool = False) -> Built:
    """tamis's own catalogue: only what is written, which is every error that users meet."""
    written = read_records()
    origin = _origin(PACKAGE, REPO) if with_commit else Origin(REPO, "src/tamis/")
    built = _joined(scan(PACKAGE, PACKAGE), written, origin)
    known = {record.id for entry in written for _, record in entry.records(REPO)}
    catalog = replace(built.catalog, records=tuple(r for r in built.catalog.records if r.id in known))
    return replace(built, catalog=catalog)


def _joined(found: Scan, written: Iterable[WrittenRecord], origin: Origin) -> Built:
    """One record for each class and wording, in the order of the source."""
    first: dict[_Key, Site] = {}
    for site in found.sites:
        first.setdefault((site.found.error_class, site.found.template.skeleton), site)
    told: dict[_Key, ErrorRecord] = {}
    unraised: list[ErrorRecord] = []
    for entry in written:
        for template, record in entry.records(origin.repo):
            key = (record.error_class, template.skeleton)
            place = first.get(key) or _elsewhere(found, entry, record)
            if place is None:
                unraised.append(record)
            else:
                told[key] = _placed(record, place, origin)
    for key, site in first.items():
        if key not in told and site.found.speaks:
            told[key] = _placed(_plain(site, origin.repo), site, origin)
    refused = tuple(record for record in told.values() if pattern_fault(record.message_pattern) is not None)
    wordless = sum(not site.found.speaks for site in found.sites)
    catalog = Catalog(_ordered(record for record in told.values() if record not in refused), origin.made_at)
    return Built(catalog, found.problems, tuple(unraised), refused, wordless)


def _ordered(records: Iterable[ErrorRecord]) -> tuple[ErrorRecord, ...]:
    """By place in the source, each slug once."""
    slugs: set[str] = set()
    ordered = sorted(records, key=lambda record: (record.file_path or "", record.line_number or 0, record.id))
    return tuple(replace(record, slug=_free_slug(record.slug, slugs)) for record in ordered)


def _elsewhere(found: Scan, entry: WrittenRecord, record: ErrorRecord) -> Site | None:
    """Where the record's class is made with a message from somewhere else, as the record says."""
    places = [site for site in found.sites if site.place in entry.raised_in]
    return next((site for site in places if site.found.error_class == record.error_class), None)


def _plain(site: Site, repo: str) -> ErrorRecord:
    """A record with nothing that people write."""
    template: Template = site.found.template
    return ErrorRecord(
        id=record_id(repo, site.found.error_class, template), repo=repo, slug=template.slug or "error",
        error_class=site.found.error_class, error_message=template.text, message_pattern=template.pattern,
    )  # fmt: skip


def _placed(record: ErrorRecord, site: Site, origin: Origin) -> ErrorRecord:
    text, first, last = site.source.excerpt(site.found.line)
    name = origin.prefix + site.source.name
    return replace(
        record, file_path=name, line_number=site.found.line, source_code=text, source_code_start=first,
        source_code_end=last, github_url=origin.url(name, first, last), analyzed_sha=origin.commit,
        analyzed_at=origin.made_at,
    )  # fmt: skip


def _free_slug(slug: str, taken: set[str]) -> str:
    """`slug`, with a number behind it where another record has it."""
    free, number = slug, 2
    while free in taken:
        free, number = f"{slug}-{number}", number + 1
    taken.add(free)
    return free


def _origin(root: Path, repo: str) -> Origin:
    """Of a package that git knows, its place in the repository and the commit."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    top, commit = _git(root, "rev-parse", "--show-toplevel"), _git(root, "rev-parse", "HEAD")
    if not top or not commit or not _git(root, "ls-files", "--", "."):
        return Origin(repo, f"{root.name}/", None, now)
    prefix = root.relative_to(Path(top).resolve()).as_posix()
    return Origin(repo, "" if prefix == "." else f"{prefix}/", commit, now)


def _git(directory: Path, *arguments: str) -> str | None:
    """What git answers; None where it does not know the directory or is not there."""
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
