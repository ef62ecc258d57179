"""`evaluate` on tiny models: what must come out, what is kept, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.branches import random_branch, write_branch
from support.model_dirs import write_model
from tamis.config import EngineConfig, LayerKind
from tamis.engine.build import build_engine
from tamis.errors import ConfigError, ModelNotFoundError, WeightError
from tamis.models import ModelSource, resolve
from tamis.progress import NoProgress
from tamis.retrofit import answers
from tamis.retrofit.eval_plots import write_plots
from tamis.retrofit.evaluate import EvalConfig, Evaluation, evaluate

CONTEXT = 512
SPARSE = (LayerKind.SPARSE_K, LayerKind.SPARSE_K)
TEXT = "it was a dark and stormy night, and nobody knew why the rain had stopped at half past 3. "


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are kept in a directory of the test's own."""
    monkeypatch.setattr(answers, "cache_dir", lambda: tmp_path / "cache")


def tiny(tmp_path: Path, **branch: Any) -> ModelSource:
    """A two-layer Llama with a random branch: by default 8 blocks of 8 in both layers."""
    base = write_model(tmp_path / "base", max_position_embeddings=CONTEXT)
    changes = {"layer_kinds": SPARSE, "block_size": 8, "topk": 8} | branch
    source = resolve(str(base))
    return resolve(str(write_branch(tmp_path / "branch", random_branch(source, **changes))))


def config(tmp_path: Path, **changes: Any) -> EvalConfig:
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 20)
    engine = EngineConfig(dtype="fp32", kernels="reference", max_num_seqs=16)
    return replace(EvalConfig(windows=2, trials=4, paths=(text,), engine=engine), **changes)


def measure(tmp_path: Path, **branch: Any) -> Evaluation:
    return evaluate(tiny(tmp_path, **branch), config(tmp_path))


def test_a_branch_that_attends_to_everything_is_its_dense_base(tmp_path: Path) -> None:
    measured = measure(tmp_path, topk=CONTEXT // 8)
    (found,) = measured.perplexity.values()
    assert found.change == pytest.approx(0.0, abs=1e-5)
    assert found.same_greedy == 1.0
    assert found.first_position == CONTEXT // 2
    assert found.tokens == 2 * (CONTEXT - 1 - CONTEXT // 2)
    assert measured.attention_mass is not None and measured.passkey is not None
    assert measured.attention_mass.captured == pytest.approx(1.0, abs=1e-5)
    assert measured.passkey.total.dense == measured.passkey.total.sparse


def test_a_branch_that_leaves_out_blocks_is_measured(tmp_path: Path) -> None:
    measured = measure(tmp_path)
    (found,) = measured.perplexity.values()
    assert found.sparse != found.dense and found.same_greedy < 1
    assert measured.attended_tokens == 64 and measured.sparse_layers == [0, 1]
    assert measured.attention_mass is not None
    assert measured.attention_mass.captured < measured.attention_mass.oracle < 1
    assert set(measured.attention_mass.by_layer) == {0, 1}
    # Before 64 tokens every block is attended to.
    early = found.by_position[0]
    assert (early.start, early.end) == (0, 64)
    assert early.sparse == pytest.approx(early.dense, rel=1e-5)
    assert json.loads(json.dumps(measured.as_json()))["perplexity"]["prose"]["tokens"] == found.tokens


def test_plots_are_written_and_the_same_numbers_give_the_same_bytes(tmp_path: Path) -> None:
    measured = measure(tmp_path)
    first = write_plots(measured, tmp_path / "plots")
    assert sorted(path.stem for path in first) == [
        "attention_mass", "passkey_dense", "passkey_sparse", "perplexity_prose",
    ]  # fmt: skip
    again = write_plots(measured, tmp_path / "again")
    for path, other in zip(first, again, strict=True):
        assert path.read_text().startswith("<?xml") and path.read_bytes() == other.read_bytes()


def test_answers_of_the_dense_base_are_kept_for_the_next_branch(tmp_path: Path, monkeypatch: Any) -> None:
    first = measure(tmp_path)
    built: list[ModelSource] = []

    def count(source: ModelSource, *more: Any) -> Any:
        built.append(source)
        return build_engine(source, *more)

    monkeypatch.setattr(answers, "build_engine", count)
    second = evaluate(tiny(tmp_path, topk=9), config(tmp_path))
    assert [source.branch is None for source in built] == [False]
    assert second.perplexity["prose"].dense == first.perplexity["prose"].dense
    assert second.perplexity["prose"].sparse != first.perplexity["prose"].sparse


class Interrupted(NoProgress):
    """Ctrl-C after so many answers."""

    def __init__(self, answers: int) -> None:
        self.left = answers
        self.measuring = False

    def start(self, task: str, total: int | None, unit: str) -> None:
        self.measuring = task.startswith("measuring")

    def advance(self, amount: int) -> None:
        self.left -= self.measuring
        if self.left < 0:
            raise KeyboardInterrupt


def test_an_interrupted_evaluation_goes_on_where_it_was(tmp_path: Path) -> None:
    source, settings = tiny(tmp_path), config(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        evaluate(source, settings, Interrupted(1))
    assert len(list((tmp_path / "cache" / "eval").iterdir())) == 2
    measured = evaluate(source, settings)
    for kept in (tmp_path / "cache" / "eval").iterdir():
        kept.unlink()
    assert evaluate(source, settings) == measured


def test_a_cache_that_cannot_be_written_to_costs_time_only(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("not a directory")
    assert measure(tmp_path).perplexity["prose"].tokens


def test_what_cannot_be_measured_is_refused_by_name(tmp_path: Path) -> None:
    source = tiny(tmp_path)
    with pytest.raises(ConfigError, match="base has no index branch: eval compares"):
        evaluate(replace(source, name="base", branch=None), config(tmp_path))
    with pytest.raises(ConfigError, match=f"context=1024 is more than the {CONTEXT} tokens of"):
        evaluate(source, config(tmp_path, context=1024))
    with pytest.raises(ConfigError, match="context=15 must be a whole number of at least 16"):
        config(tmp_path, context=15)
    with pytest.raises(ConfigError, match="windows=0 and trials=0 leave nothing to measure"):
        config(tmp_path, windows=0, trials=0)
    with pytest.raises(ConfigError, match="trials=-1 must be a whole number of at least 0"):
        config(tmp_path, trials=-1)
    with pytest.raises(ConfigError, match=r"passkey retrieval needs .* tokens at least"):
        evaluate(source, config(tmp_path, context=64))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "the corpus is empty"), (b"\xff\xfe\x00", "is not UTF-8"), (b"ab\0cd", "is NUL"),
     (b"too short", "the prose to measure with has fewer than 511 tokens")],
    ids=["empty", "binary", "NUL", "short"],
)  # fmt: skip
def test_a_bad_corpus_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        evaluate(tiny(tmp_path), config(tmp_path, paths=(path,)))


def test_a_corpus_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"nowhere\.txt"):
        evaluate(tiny(tmp_path), config(tmp_path, paths=(tmp_path / "nowhere.txt",)))


def test_a_branch_of_another_base_is_refused(tmp_path: Path) -> None:
    source = tiny(tmp_path, base_fingerprint="0" * 64)
    with pytest.raises((ConfigError, WeightError), match="fingerprint"):
        evaluate(source, config(tmp_path))
