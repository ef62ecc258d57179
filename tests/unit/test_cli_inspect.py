import json
from pathlib import Path
from typing import Any

import pytest

import tamis
from support.cli import invoke
from support.model_dirs import CONFIG
from tamis.kv import KVLayout


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    result = invoke("inspect", "minimax-m3", "--json")
    assert (result.code, result.err) == (0, "")
    value = json.loads(result.out)
    assert isinstance(value, dict)
    return value


def test_every_layer_is_listed_with_its_kind_planes_and_bytes(facts: dict[str, Any]) -> None:
    layers = facts["layers"]
    assert [layer["layer"] for layer in layers] == list(range(60))
    assert [layer["kind"] for layer in layers] == ["dense"] * 3 + ["sparse_k"] * 57
    assert layers[0]["planes"] == {"k": [4, 128], "v": [4, 128]}
    assert layers[3]["planes"] == {"k": [4, 128], "v": [4, 128], "index_k": [1, 128]}
    assert (layers[0]["bytes_per_token"], layers[3]["bytes_per_token"]) == (2_048, 2_304)
    assert layers[0]["mlp"] == {"kind": "dense", "intermediate_size": 12_288}
    assert layers[3]["mlp"] == {
        "kind": "moe", "num_experts": 128, "experts_per_token": 4, "intermediate_size": 3_072,
        "shared_intermediate_size": 3_072,
    }  # fmt: skip


def test_the_layers_add_up_to_the_total(facts: dict[str, Any]) -> None:
    assert sum(layer["bytes_per_token"] for layer in facts["layers"]) == facts["bytes_per_token"]["total"] == 137_472


def test_the_sparse_attention_settings_are_shown(facts: dict[str, Any]) -> None:
    sparse = facts["sparse_attention"]
    assert (sparse["block_size"], sparse["topk"], sparse["index_heads"], sparse["score_type"]) == (128, 16, 4, "max")


def test_layers_that_are_alike_are_folded_into_ranges() -> None:
    result = invoke("inspect", "minimax-m3")
    assert (result.code, result.err) == (0, "")
    cells = [line.split() for line in result.out.splitlines()]
    assert ["0-2", "dense", "4x128", "-", "-", "2,048", "each", "dense", "12,288"] in cells
    assert row(cells, "3-59")[:7] == ["3-59", "sparse_k", "4x128", "1x128", "-", "2,304", "each"]
    assert "137,472 bytes a token" in result.out
    assert "3 dense, 57 sparse_k" in result.out


def test_all_gives_a_line_to_every_layer() -> None:
    cells = [line.split() for line in invoke("inspect", "minimax-m3", "--all").out.splitlines()]
    assert [line[0] for line in cells if line[1:2] in (["dense"], ["sparse_k"])] == [str(layer) for layer in range(60)]


def test_layers_with_an_index_value_show_that_plane(tmp_path: Path) -> None:
    released = json.loads(config_file().read_text())
    text = released.get("text_config", released)
    sparse = text["sparse_attention_config"]
    sparse["sparse_disable_index_value"] = [int(layer != 3) for layer in range(60)]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(released))
    result = invoke("inspect", str(path), "--json")
    assert result.code == 0, result.err
    layers = json.loads(result.out)["layers"]
    assert (layers[3]["kind"], layers[4]["kind"]) == ("sparse_kv", "sparse_k")
    assert layers[3]["planes"]["index_v"] == [1, 128]
    assert layers[3]["bytes_per_token"] == 2_560
    rows = [line.split() for line in invoke("inspect", str(path)).out.splitlines()]
    assert row(rows, "3")[:6] == ["3", "sparse_kv", "4x128", "1x128", "1x128", "2,560"]
    assert row(rows, "4-59")[1] == "sparse_k"


def test_the_layout_is_checked_once_and_not_once_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check looks at every layer: one for each of 10,000 layers took 19 s."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 10_000}))
    checks: list[KVLayout] = []
    check = KVLayout.__post_init__

    def counted(layout: KVLayout) -> None:
        checks.append(layout)
        check(layout)

    monkeypatch.setattr(KVLayout, "__post_init__", counted)
    result = invoke("inspect", str(tmp_path / "config.json"))
    assert result.code == 0, result.err
    assert "0-9999" in result.out
    assert len(checks) == 1


def test_the_storage_type_changes_the_bytes() -> None:
    layers = json.loads(invoke("inspect", "minimax-m3", "--kv-dtype", "fp8_e5m2", "--json").out)["layers"]
    assert (layers[0]["bytes_per_token"], layers[3]["bytes_per_token"]) == (1_024, 1_280)


def row(rows: list[list[str]], first: str) -> list[str]:
    return next(cells for cells in rows if cells[:1] == [first])


def config_file() -> Path:
    return Path(tamis.__file__).parent / "models" / "configs" / "minimax-m3.json"
