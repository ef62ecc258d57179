from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support import tiny
from tamis.config import SparseAttentionConfig
from tamis.errors import ConfigError, CorruptFileError
from tamis.kernels.reference import ReferenceOps
from tamis.models import ModelSource, load_config, resolve
from tamis.progress import NoProgress, NotedProgress
from tamis.retrofit.checkpoint import read_tensors, write_tensors
from tamis.retrofit.choose import choose_block_size, choose_dense, measure, selection_of
from tamis.retrofit.repair import repair
from tamis.retrofit.selection import Selection, block_max, block_sum
from tamis.retrofit.settings import RetrofitSettings
from tamis.retrofit.student import block_loss, captured, token_loss
from tamis.retrofit.teacher import LayerView, Teacher, hide_future, next_token_losses, reach
from tamis.retrofit.train import Run

SETTINGS = RetrofitSettings(
    dense_budget=2,
    windows=6,
    steps_per_window=2,
    queries=24,
    budget=16,
    block_sizes=(4,),
    context=96,
    learning_rate=0.1,
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    path = tmp_path_factory.mktemp("base")
    model = tiny.build(tiny.llama_config("llama"))
    with torch.no_grad():
        for layer in model.model.layers:  # sharper attention, as trained models have
            layer.self_attn.q_proj.weight.mul_(2)
    return resolve(str(tiny.save(model, path)))


@pytest.fixture
def teacher(source: ModelSource) -> Teacher:
    return Teacher(source, dtype=torch.float32)


def windows(count: int = 6, length: int = 96) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, tiny.VOCAB, (length,), generator=generator) for _ in range(count)]


def make_run(
    teacher: Teacher, folder: Path, settings: RetrofitSettings = SETTINGS, progress: NotedProgress | None = None
) -> Run:
    settings = settings.resolve(teacher.config)
    plan = {"settings": settings.record()}
    return Run(teacher, settings, windows(settings.windows), folder, plan, progress or NoProgress(), 0.0)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_the_teacher_is_the_dense_model(tmp_path: Path, kind: str) -> None:
    oracle = tiny.build(tiny.llama_config(kind))
    tiny.save(oracle, tmp_path)
    teacher = Teacher(resolve(str(tmp_path)), dtype=torch.float32)
    ids = windows(1)[0]
    hidden = teacher.visit(ids, lambda view: None)
    expected = torch.nn.functional.cross_entropy(
        tiny.oracle_logits(oracle, ids.tolist())[9:-1], ids[10:], reduction="none"
    )
    torch.testing.assert_close(next_token_losses(teacher.model, hidden, ids, 10), expected, rtol=1e-4, atol=1e-4)


def test_what_a_layer_shows_is_its_own_attention(teacher: Teacher) -> None:
    seen: list[LayerView] = []
    teacher.visit(windows(1)[0], seen.append)
    positions = torch.tensor([0, 40, 95])
    for view in seen:
        probabilities = view.probabilities(positions)
        torch.testing.assert_close(probabilities.sum(-1), torch.ones(4, 3))
        heads = torch.einsum("hgnt,thd->nhgd", probabilities.reshape(2, 2, 3, -1), view.v)
        torch.testing.assert_close(heads.flatten(1, 2), view.attended[positions], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("init", "local"), [(0, 1), (1, 1), (2, 3)])
def test_blocks_are_chosen_as_the_kernels_choose(init: int, local: int) -> None:
    selection, blocks = Selection(4, 6, init, local), 20
    positions = torch.tensor([0, 3, 4, 17, 50, 79])
    scores = torch.randn(2, len(positions), blocks, generator=torch.Generator().manual_seed(0))
    scores = scores.masked_fill(torch.arange(blocks) > positions[:, None] // 4, -torch.inf)
    config = SparseAttentionConfig(2, 16, 4, 6, init, local)
    picks = ReferenceOps().select_blocks(scores, positions, config)
    expected = torch.zeros_like(scores, dtype=torch.bool)
    for head, row, slot in (picks >= 0).nonzero().tolist():
        expected[head, row, picks[head, row, slot]] = True
    assert torch.equal(selection.choose(scores, positions), expected)


def test_a_student_with_the_teachers_logits_has_nothing_to_learn() -> None:
    positions = torch.arange(20, 60)
    scores = torch.randn(2, len(positions), reach(positions, 64), generator=torch.Generator().manual_seed(0))
    hide_future(scores, positions)
    teaching = scores.softmax(-1)
    assert float(token_loss(scores, teaching)) == pytest.approx(0, abs=1e-5)
    selection = Selection(4, 5)
    # Where one token of a block has all its mass, the block's best score is the logarithm of that.
    best = torch.where(torch.arange(scores.shape[-1]) % 4 == 0, scores, -torch.inf)
    peaked = best.softmax(-1)
    assert float(block_loss(best, peaked, positions, selection)) == pytest.approx(0, abs=1e-5)
    assert float(block_loss(-best.nan_to_num(neginf=torch.inf), peaked, positions, selection)) > 0.5
    mass, oracle = captured(best, peaked, positions, selection)
    assert mass == pytest.approx(oracle, abs=1e-6)


def test_forced_blocks_teach_nothing() -> None:
    positions = torch.tensor([9])
    selection = Selection(4, 3, init_blocks=1, local_blocks=1)
    scores = torch.zeros(1, 1, 12, requires_grad=True)
    teaching = torch.tensor([[[0.5, 0, 0, 0, 0.1, 0.1, 0.1, 0, 0.2, 0, 0, 0]]])
    loss = block_loss(hide_future(scores + 0, positions), teaching, positions, selection)
    (gradient,) = torch.autograd.grad(loss, scores)
    assert not gradient[..., :4].any()
    assert not gradient[..., 8:].any()


def test_blocks_at_the_end_may_be_short() -> None:
    values = torch.arange(10.0)
    assert block_max(values, 4).tolist() == [3, 7, 9]
    assert block_sum(values, 4).tolist() == [6, 22, 17]


def test_a_random_branch_learns_what_the_layers_attend_to(teacher: Teacher, tmp_path: Path) -> None:
    run = make_run(teacher, tmp_path, replace(SETTINGS, windows=20, steps_per_window=4, token_share=1.0))
    for learner in run.learners.values():
        for weight in (learner.student.q_proj, learner.student.k_proj):
            torch.nn.init.normal_(weight.data, std=weight.shape[1] ** -0.5, generator=torch.Generator().manual_seed(0))
    run.train()
    losses, gaps = [sum(entry["loss"]) for entry in run.state.history], run.gaps()
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    assert sum(gaps[-3:]) < 0.95 * sum(gaps[:3])


class Break(NoProgress):
    """Stops the run from outside after so many windows."""

    def __init__(self, after: int) -> None:
        self.left = after

    def note(self, text: str) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(teacher: Teacher, tmp_path: Path) -> None:
    whole = make_run(teacher, tmp_path / "a")
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        make_run(teacher, tmp_path / "b", progress=Break(3)).train()
    second = make_run(teacher, tmp_path / "b")
    second.resume()
    assert second.state.done == 3
    second.train()
    assert second.state.history == whole.state.history
    for one, other in zip(whole.learners.values(), second.learners.values(), strict=True):
        for name, value in one.state().items():
            torch.testing.assert_close(other.state()[name], value, rtol=0, atol=0, msg=name)


def test_another_plan_cannot_go_on(teacher: Teacher, tmp_path: Path) -> None:
    make_run(teacher, tmp_path).save()
    with pytest.raises(ConfigError, match=r"made with another seed 0, now 1; --restart begins anew"):
        make_run(teacher, tmp_path, replace(SETTINGS, seed=1)).resume()


def test_the_same_seed_gives_the_same_weights_and_another_others(teacher: Teacher, tmp_path: Path) -> None:
    runs = [
        make_run(teacher, tmp_path / str(i), replace(SETTINGS, windows=2, seed=seed))
        for i, seed in enumerate((0, 0, 1))
    ]
    for run in runs:
        run.train()
    first, again, other = (run.learners[1].student.q_proj for run in runs)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_run_without_progress_stops_early(teacher: Teacher, tmp_path: Path) -> None:
    run = make_run(teacher, tmp_path, replace(SETTINGS, windows=40, patience=2, learning_rate=1e-6))
    run.train()
    assert 4 <= run.state.done < 40


def test_a_full_disk_leaves_the_checkpoint_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint.safetensors"
    write_tensors(path, {"a": torch.ones(2)}, {"done": 1})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tamis.retrofit.checkpoint.os.fsync", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_tensors(path, {"a": torch.zeros(2)}, {"done": 2})
    assert caught.value.filename == str(path)
    assert read_tensors(path)[1] == {"done": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_checkpoint_that_is_cut_short_is_named(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    write_tensors(path, {"a": torch.ones(2)}, {})
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CorruptFileError, match=r"checkpoint\.safetensors: cannot be read"):
        read_tensors(path)


def test_layers_and_block_sizes_are_chosen_by_what_they_lose(teacher: Teacher, tmp_path: Path) -> None:
    run = make_run(teacher, tmp_path, replace(SETTINGS, block_sizes=(4, 8), budget=24))
    losses = measure(teacher, run.learners, run.settings, windows(2), NoProgress())
    assert set(losses) == {4, 8}
    for by_layer in losses.values():
        for loss in by_layer.values():
            assert loss["mass"] <= loss["oracle"] <= 1
            assert 0 < loss["oracle_loss"] < loss["loss"] * 1.5
    made_up = {4: {0: {"loss": 1.0}, 1: {"loss": 3.0}, 2: {"loss": 2.0}}, 8: {i: {"loss": 2.0} for i in range(3)}}
    assert choose_block_size(made_up) == 8
    assert choose_dense(made_up[4], replace(SETTINGS, dense_budget=2), 3) == (1, 2)
    assert choose_dense(made_up[4], replace(SETTINGS, dense_layers=(0,)), 3) == (0,)


def test_an_index_value_repairs_some_of_the_loss(teacher: Teacher, tmp_path: Path) -> None:
    settings = replace(SETTINGS, index_value=True, windows=60, steps_per_window=1, value_rate=0.01)
    run = make_run(teacher, tmp_path, settings)
    selection, o_proj, rope = selection_of(run.settings, 4), teacher.attention(1).o_proj, teacher.rope(96)
    left: list[float] = []

    def learn(view: LayerView) -> None:
        if view.layer == 1:
            left.append(repair(run.learners[1], selection, run.settings, view, o_proj, rope, len(left) % 2))

    for _ in range(30):  # the same two texts: a random model has little that holds for others
        for window in windows(2):
            teacher.visit(window, learn)
    assert left[0] == pytest.approx(1)
    assert sum(left[-2:]) < 1.9


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"context": 4096}, "context=4096 is not between 64 and the model's 2048"),
        ({"budget": 18}, "budget=18 is no multiple of block_size=4"),
        ({"budget": 8}, "leaves no block of 4"),
        ({"budget": 96}, "budget=96 is not below context=96"),
        ({"index_head_dim": 8}, "index_head_dim=8 is less than rotary_dim=16"),
        ({"dense_layers": (3,)}, "there is no layer 3"),
        ({"dense_budget": 3}, "leave none to train"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"windows": 0}, "windows=0 must be a whole number of at least 1"),
        ({"written_share": 2.0}, "written_share=2.0"),
        ({"block_sizes": ()}, "block_sizes="),
    ],
)
def test_settings_that_cannot_be_trained_are_named(source: ModelSource, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(SETTINGS, **change).resolve(load_config(source))
