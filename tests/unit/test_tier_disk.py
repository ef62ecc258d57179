"""What only a directory of files can meet."""

import errno
import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from support.kv import small_layout
from support.tiers import make_items
from tamis.errors import TierError, TierReadError
from tamis.kv.tiers import files
from tamis.kv.tiers.disk import DiskTier
from tamis.kv.tiers.format import page_format
from tamis.kv.tiers.pins import pin_name

LAYOUT = small_layout()
SIZE = page_format(LAYOUT).blob_bytes
ITEMS = make_items(LAYOUT, 4)
KEYS = [key for key, _ in ITEMS]


def page(tmp_path: Path, number: int) -> Path:
    return tmp_path / "pages" / f"{KEYS[number].hex()}.kv"


def read(tier: DiskTier, *numbers: int) -> None:
    for _ in tier.read([KEYS[number] for number in numbers], LAYOUT):
        pass


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_the_index_is_rebuilt_from_the_files(tmp_path: Path) -> None:
    first = DiskTier(tmp_path, 4 * SIZE)
    for item in ITEMS[:3]:
        first.write([item])
    read(first, 0)
    first.close()
    second = DiskTier(tmp_path, 4 * SIZE)
    assert (second.stat().entries, second.stat().bytes) == (3, 3 * SIZE)
    second.write(ITEMS[3:])
    second.write(make_items(LAYOUT, 1, salt=b"x"))
    assert second.contains(KEYS) == [True, False, True, True], "last uses survive a restart"


def test_unreadable_files_are_set_aside_at_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    DiskTier(tmp_path).write(ITEMS)
    blob = ITEMS[0][1]
    page(tmp_path, 0).write_bytes(blob[:-1])
    page(tmp_path, 1).write_bytes(b"")
    page(tmp_path, 2).write_bytes(blob)
    (tmp_path / "pages" / "notes.txt").write_text("not a page")
    (tmp_path / "pages" / f"{'A' * 64}.kv").write_text("nor this")
    tier = DiskTier(tmp_path)
    assert tier.contains(KEYS) == [False, False, False, True]
    assert (tier.stat().entries, tier.stat().corrupt, tier.set_aside()) == (1, 3, 3)
    assert len([line for line in caplog.messages if line.endswith("; it is set aside")]) == 3
    assert (tmp_path / "pages" / "notes.txt").exists()
    assert tier.clean() == 3
    assert tier.set_aside() == 0


def test_another_users_page_is_a_miss_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Pages are for their owner only, and directories are shared."""
    DiskTier(tmp_path).write(ITEMS)
    real = os.open

    def refuse(path: Path, *rest: int) -> int:
        if Path(path) == page(tmp_path, 1):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        tier = DiskTier(tmp_path)
        assert [line.endswith("Permission denied") for line in caplog.messages] == [True]
        with pytest.raises(TierReadError, match="it is another user's"):
            read(tier, 0, 1)
    assert (tier.stat().errors, tier.stat().corrupt, tier.set_aside()) == (1, 0, 0)
    read(tier, 0, 1, 2, 3)


def test_two_processes_may_set_pages_aside_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other removes the oldest of those that were kept for whoever wants to look at them."""
    tier = DiskTier(tmp_path)
    tier.write(ITEMS)
    page(tmp_path, 0).write_bytes(b"spoiled")
    (tmp_path / "bad" / "old.kv").write_text("")
    listed = Path.iterdir

    def list_and_remove(self: Path) -> list[Path]:
        found = list(listed(self))
        (tmp_path / "bad" / "old.kv").unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "iterdir", list_and_remove)
    with pytest.raises(TierReadError):
        read(tier, 0)
    assert tier.stat().errors == 0
    assert tier.set_aside() == 1


def test_pages_of_another_version_stay_until_their_room_is_needed(tmp_path: Path) -> None:
    DiskTier(tmp_path).write(ITEMS[:1])
    newer = bytearray(ITEMS[1][1])
    newer[8] = 2
    page(tmp_path, 1).write_bytes(newer)
    os.utime(page(tmp_path, 1), (1, 1))
    tier = DiskTier(tmp_path, 2 * SIZE)
    assert (tier.stat().entries, tier.set_aside()) == (2, 0)
    tier.write(ITEMS[2:3])
    assert tier.contains(KEYS) == [True, False, True, False]


def test_links_pipes_and_folders_are_no_pages(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "kv")
    secret = tmp_path / "secret"
    secret.write_bytes(ITEMS[0][1])
    page(tmp_path / "kv", 0).symlink_to(secret)
    os.mkfifo(page(tmp_path / "kv", 1))
    page(tmp_path / "kv", 2).mkdir()
    assert list(tier.scan()) == []
    for number in range(3):
        with pytest.raises(TierReadError, match="it is no regular file"):
            read(tier, number)
    assert tier.contains(KEYS) == [False] * 4
    assert secret.read_bytes() == ITEMS[0][1]
    assert tier.clean() == 3
    assert secret.exists()


def test_few_files_set_aside_are_kept(tmp_path: Path) -> None:
    items = make_items(LAYOUT, 20)
    DiskTier(tmp_path).write(items)
    for path in (tmp_path / "pages").iterdir():
        path.write_bytes(b"spoiled")
    assert DiskTier(tmp_path).set_aside() == 16


def test_what_is_in_a_page_is_for_its_owner_only(tmp_path: Path) -> None:
    DiskTier(tmp_path).write(ITEMS[:1])
    assert stat.S_IMODE(page(tmp_path, 0).stat().st_mode) == 0o600


def test_names_are_given_to_whole_files_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written, synced, named, and the name synced: in this order."""
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def traced_fsync(descriptor: int) -> None:
        steps.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        assert steps[-1] == "folder" or os.fstat(descriptor).st_size == SIZE
        fsync(descriptor)

    def traced_replace(self: Path, target: Path) -> Path:
        steps.append("name")
        return replace(self, target)

    tier = DiskTier(tmp_path)
    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(Path, "replace", traced_replace)
    tier.write(ITEMS[:2])
    assert steps == ["file", "file", "name", "name", "folder"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("call", ["write", "fsync", "open"])
def test_a_disk_that_fails_while_writing_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    tier = DiskTier(tmp_path)
    tier.write(ITEMS[:1])
    real, calls = getattr(os, call), [0]

    def failing(*args: object, **more: object) -> object:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError(number, os.strerror(number))
        return real(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(TierError, match=rf"^kv tier disk:.* could not write: \[Errno {number}\]"):
            tier.write(ITEMS)
    assert tier.stat().errors == 1
    assert [path.suffix for path in (tmp_path / "tmp").iterdir()] == [".lock"]
    assert tier.contains(KEYS) == [True, False, False, False]
    tier.write(ITEMS)
    read(tier, 0, 1, 2, 3)


def test_short_writes_and_reads_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, preadv = os.write, os.preadv
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:1000]))
    monkeypatch.setattr(os, "preadv", lambda descriptor, rows, at: preadv(descriptor, [rows[0][:7]], at))
    tier = DiskTier(tmp_path)
    tier.write(ITEMS)
    assert page(tmp_path, 0).read_bytes() == ITEMS[0][1]
    read(tier, 0, 1, 2, 3)
    assert tier.stat().hits == 4


def test_a_disk_that_fails_while_reading_is_a_counted_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(tmp_path)
    tier.write(ITEMS)

    def failing(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        with pytest.raises(TierError, match=r"could not read: \[Errno 5\] Input/output error$"):
            read(tier, 0)
    assert (tier.stat().errors, tier.stat().corrupt, tier.stat().hits) == (1, 0, 0)
    read(tier, 0)  # it was not the page's fault


def test_more_pages_than_may_be_open_at_once_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MAX_OPEN", 1)
    tier = DiskTier(tmp_path)
    tier.write(ITEMS)
    before = open_files()
    read(tier, 3, 2, 1, 0)
    parts = tier.read(KEYS, LAYOUT)
    next(parts)
    assert open_files() == before + 1
    parts.close()  # type: ignore[attr-defined]
    assert open_files() == before


def test_pins_that_cannot_be_read_pin_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = DiskTier(tmp_path)
    tier.pin(KEYS[:1], "good")
    pins = tmp_path / "pins"
    good = (pins / pin_name("good")).read_text()
    bad = {
        "a": "", "b": "[", "c": "null", "d": '{"owner": 1, "keys": []}', "e": '{"owner": "e", "keys": ["00"]}',
        "f": good, "g": "[" * 100_000, "h": json.dumps({"owner": "h", "keys": "zz"}),
    }  # fmt: skip
    for owner, text in bad.items():
        (pins / pin_name(owner)).write_text(text)
    (pins / "notes.txt").write_text("no pins")
    assert tier.owners() == {"good": KEYS[:1]}
    assert len([line for line in caplog.messages if "pins" in line]) == len(bad)


def test_a_path_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match=rf"^kv tier disk:{tmp_path}/file/kv could not open its directory: "):
        DiskTier(tmp_path / "file" / "kv")
    with pytest.raises(TierError, match=rf"^{tmp_path}/none is not a directory of KV pages$"):
        DiskTier(tmp_path / "none", create=False)
    assert not (tmp_path / "none").exists()


def test_a_directory_that_is_gone_is_a_tier_without_pages(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "kv")
    tier.write(ITEMS)
    shutil.rmtree(tmp_path / "kv")
    assert tier.contains(KEYS) == [False] * 4
    with pytest.raises(TierReadError, match="it is not there"):
        read(tier, 0)
    with pytest.raises(TierError, match=r"could not write: .*No such file or directory"):
        tier.write(ITEMS)
    tier.close()


def test_what_a_living_process_is_writing_is_left_alone(tmp_path: Path) -> None:
    alive = DiskTier(tmp_path)
    own = next((tmp_path / "tmp").glob("*.lock")).stem
    (tmp_path / "tmp" / f"{own}-7").write_text("half a page")
    (tmp_path / "tmp" / "12345-0123456789abcdef-0").write_text("of a process that is no more")
    (tmp_path / "tmp" / "12345-0123456789abcdef.lock").write_text("")
    DiskTier(tmp_path).close()
    assert sorted(path.name for path in (tmp_path / "tmp").iterdir()) == sorted([f"{own}.lock", f"{own}-7"])
    alive.close()
    DiskTier(tmp_path).close()
    assert list((tmp_path / "tmp").iterdir()) == []
