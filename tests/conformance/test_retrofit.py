"""`tamis retrofit` and `tamis eval` from the command line, on a tiny model."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from support.cli import Result, invoke
from support.model_dirs import write_model
from support.tiny import build, m3_config, save
from support.untrained import with_random_branch, with_untrained_branch
from tamis.config import EngineConfig
from tamis.models import resolve
from tamis.retrofit import answers
from tamis.retrofit.evaluate import EvalConfig, evaluate
from tamis.retrofit.mass import Mass

CONTEXT, BLOCK, TOPK = 512, 8, 8
BLOCKS: dict[str, Any] = {"block_size": BLOCK, "topk": TOPK, "init_blocks": 1}
TRAIN = ("--context", str(CONTEXT), "--budget", str(BLOCK * TOPK), "--block-size", str(BLOCK), "--dense-budget", "0",
         "--written", "0", "--eval-windows", "0", "--threads", "1", "--quiet", "--json")  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are kept in a directory of the test's own."""
    monkeypatch.setattr(answers, "cache_dir", lambda: tmp_path / "cache")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama whose heads look at few tokens each: there is something to learn, and to miss."""
    return str(write_model(tmp_path_factory.mktemp("base"), max_position_embeddings=CONTEXT))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Random words to train on and others to measure with."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(400)]
    folder = tmp_path_factory.mktemp("text")
    for name, count in (("train.txt", 8000), ("held_out.txt", 800)):
        (folder / name).write_text(" ".join(rng.choices(words, k=count)))
    return folder / "train.txt", folder / "held_out.txt"


def mass_of(model: Path, held_out: Path) -> Mass:
    engine = EngineConfig(dtype="fp32", kernels="reference", max_num_seqs=16)
    config = EvalConfig(windows=4, trials=0, paths=(held_out,), engine=engine)
    found = evaluate(resolve(str(model)), config).attention_mass
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_training_captures_far_more_attention_than_no_training(
    base: str, text: tuple[Path, Path], tmp_path: Path
) -> None:
    wanted = ("--corpus", str(text[0]), "--windows", "40", "--index-head-dim", "32")
    done = invoke("retrofit", base, str(tmp_path / "trained"), *wanted, *TRAIN)
    assert done.code == 0, done.err
    facts = json.loads(done.out)
    assert (facts["sparse_layers"], facts["attended_tokens"]) == (2, BLOCK * TOPK)
    with_random_branch(base, tmp_path / "random", **BLOCKS)
    with_untrained_branch(base, tmp_path / "untrained", **BLOCKS)
    trained, untrained, guessed = (mass_of(tmp_path / name, text[1]) for name in ("trained", "untrained", "random"))
    # An untrained branch holds about 0.45 and a random one 0.10, of 0.96 that the best blocks hold.
    assert trained.captured > untrained.captured + 0.12 > guessed.captured + 0.3
    assert trained.captured < trained.oracle


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_trained_branch_is_a_model_that_runs_and_is_measured(
    base: str, text: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    trained = invoke("retrofit", base, str(out), "--corpus", str(text[0]), "--windows", "1", *TRAIN)
    assert trained.code == 0, trained.err
    done = invoke("eval", str(out), "--corpus", str(text[1]), "--windows", "1", "--trials", "3", "--plots",
                  str(tmp_path / "plots"), "--threads", "1", "--json", "--quiet")  # fmt: skip
    assert done.code == 0, done.err
    facts = json.loads(done.out)
    assert (facts["model"], facts["base"]) == (str(out), base)
    assert facts["perplexity"]["prose"]["tokens"] == CONTEXT - 1 - CONTEXT // 2
    assert facts["passkey"]["total"]["trials"] >= 3
    assert 0 < facts["attention_mass"]["captured"] <= facts["attention_mass"]["oracle"] <= 1
    assert (tmp_path / "plots" / "attention_mass.svg").is_file()
    shown = invoke("eval", str(out), "--corpus", str(text[1]), "--windows", "1", "--trials", "3", "--quiet",
                   "--threads", "1")  # fmt: skip
    for part in ("2 of 2 layers sparse", "prose, from position 256", "passkey found", "all sparse layers"):
        assert part in shown.out
    assert invoke("generate", str(out), "--prompt", "it was", "--max-tokens", "3", "--quiet").code == 0


@pytest.fixture(scope="module")
def models(base: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Models by what they are."""
    folder = tmp_path_factory.mktemp("models")
    save(build(m3_config()), folder / "m3")
    with_random_branch(base, folder / "branch", **BLOCKS)
    other = write_model(folder / "other", max_position_embeddings=CONTEXT, num_hidden_layers=3)
    facts = json.loads((folder / "branch" / "index_branch.json").read_text())
    stranger = folder / "stranger"
    stranger.mkdir()
    (stranger / "index_branch.json").write_text(json.dumps(facts | {"base": str(other)}))
    (stranger / "index_branch.safetensors").write_bytes((folder / "branch" / "index_branch.safetensors").read_bytes())
    return {"dense": base, "m3": str(folder / "m3"), "branch": str(folder / "branch"), "stranger": str(stranger)}


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ("m3", (), "is a minimax_m3"),
        ("branch", (), "has an index branch already; retrofit needs the dense model"),
        ("dense", ("--context", "1024"), "context=1024 is not between 64 and the model's 512"),
        ("dense", ("--dense-layers", "5"), "there is no layer 5; layers are 0 to 1"),
        ("dense", ("--dense-layers", "some"), "'some' is neither auto nor a list of layers"),
        ("dense", ("--budget", "60"), "budget=60 is no multiple of block_size=8"),
        ("nowhere", (), "'nowhere' is no directory, .gguf file, hub name or built-in model"),
    ],
    ids=str,
)  # fmt: skip
def test_retrofit_refuses_what_it_cannot_do_in_one_line(
    models: dict[str, str], text: tuple[Path, Path], tmp_path: Path, model: str, options: tuple[str, ...], said: str
) -> None:
    given = ("--corpus", str(text[0]), "--windows", "1", *TRAIN, *options)
    refused(invoke("retrofit", models.get(model, model), str(tmp_path / "out"), *given), said)


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ("m3", (), "has no index branch: eval compares a retrofitted model with its dense base"),
        ("dense", (), "has no index branch: eval compares a retrofitted model with its dense base"),
        ("stranger", (), "base_architecture.num_layers=2"),
        ("branch", ("--context", "1024"), "context=1024 is more than the 512 tokens of"),
        ("branch", ("--windows", "0", "--trials", "0"), "windows=0 and trials=0 leave nothing to measure"),
        ("branch", ("--trials", "-1"), "Invalid value for '--trials'"),
        ("nowhere", (), "'nowhere' is no directory, .gguf file, hub name or built-in model"),
    ],
    ids=str,
)  # fmt: skip
def test_eval_refuses_what_it_cannot_do_in_one_line(
    models: dict[str, str], text: tuple[Path, Path], model: str, options: tuple[str, ...], said: str
) -> None:
    refused(invoke("eval", models.get(model, model), "--corpus", str(text[1]), "--quiet", *options), said)


@pytest.mark.parametrize("command", ["retrofit", "eval"])
@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "the corpus is empty"), (b"  \n ", "the corpus is empty"), (b"\x7fELF\xff\x01", "is not UTF-8"),
     (b"text\0text", "is NUL"), (b"short", "")],
    ids=["empty", "blank", "binary", "NUL", "short"],
)  # fmt: skip
def test_a_bad_corpus_is_refused_in_one_line(
    models: dict[str, str], tmp_path: Path, command: str, content: bytes, said: str
) -> None:
    path = tmp_path / "corpus.txt"
    path.write_bytes(content)
    given = ("--corpus", str(path), "--windows", "1", "--quiet")
    if command == "retrofit":
        done = invoke("retrofit", models["dense"], str(tmp_path / "out"), *given, *TRAIN)
        assert not (tmp_path / "out" / "index_branch.json").exists()
    else:
        done = invoke("eval", models["branch"], *given)
    refused(done, said or "tokens")


def test_plots_that_cannot_be_written_are_refused_before_anything_is_measured(
    models: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    done = invoke("eval", models["branch"], "--plots", str(tmp_path / "file" / "plots"), "--quiet")
    refused(done, "Not a directory")


def refused(done: Result, said: str) -> None:
    assert done.code == 2
    assert said in done.told
    assert done.told.startswith("error: ") and len(done.told.splitlines()) == 1
    assert done.out == ""
