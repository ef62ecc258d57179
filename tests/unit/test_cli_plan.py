import json
from pathlib import Path
from typing import Any

import pytest

from support.cli import invoke

GIB = 1 << 30


def llama_config(directory: Path, **changes: Any) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000, "hidden_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": True, "hidden_act": "silu",
    }  # fmt: skip
    path = directory / "config.json"
    path.write_text(json.dumps(config | changes))
    return path


def plan(*arguments: str) -> dict[str, Any]:
    result = invoke("plan", *arguments, "--json")
    assert (result.code, result.err) == (0, "")
    facts = json.loads(result.out)
    assert isinstance(facts, dict)
    return facts


def test_plan_counts_the_index_planes_of_the_released_model() -> None:
    """Field case A2."""
    facts = plan("minimax-m3", "--memory", "1GiB", "--page-size", "128", "--kv-dtype", "bf16")
    assert facts["bytes_per_token"] == {"main": 122_880, "index_k": 14_592, "index_kv": 0, "total": 137_472}
    assert facts["memory_bytes"] == GIB
    assert (facts["pages"], facts["tokens"]) == (61, 7_808)
    assert facts["bytes_per_page"] == facts["padding_page_bytes"] == 137_472 * 128


def test_plan_reports_what_a_budget_holds_on_a_dense_model(tmp_path: Path) -> None:
    """Field case F2."""
    facts = plan(str(llama_config(tmp_path)), "--memory", "4GiB", "--page-size", "128")
    assert facts["bytes_per_token"] == {"main": 114_688, "index_k": 0, "index_kv": 0, "total": 114_688}
    assert facts["tokens"] == 37_376


def test_plan_prints_the_figures_with_thousands_separators() -> None:
    result = invoke("plan", "minimax-m3", "--memory", "1GiB", "--page-size", "128")
    assert (result.code, result.err) == (0, "")
    rows = dict(line.split("  ", 1) for line in result.out.splitlines() if "  " in line)
    rows = {name.strip(): value.strip() for name, value in rows.items()}
    assert rows["main K and V in bf16"] == "122,880 bytes a token"
    assert rows["index K in bf16"] == "14,592 bytes a token"
    assert rows["all planes"] == "137,472 bytes a token"
    assert rows["page"] == "128 tokens, 17,596,416 bytes"
    assert rows["padding page, extra"] == "17,596,416 bytes"
    assert rows["pages that fit"] == "61"
    assert rows["tokens that fit"] == "7,808"
    assert "\x1b" not in result.out


def test_plan_without_memory_has_no_budget_lines() -> None:
    assert {"pages", "tokens", "memory_bytes"}.isdisjoint(plan("minimax-m3"))
    assert "fit" not in invoke("plan", "minimax-m3").out


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_plan_of_a_budget_below_one_page_shows_the_figures_and_fails_naming_both_numbers(form: list[str]) -> None:
    page = 137_472 * 128
    result = invoke("plan", "minimax-m3", "--memory", str(page - 1), "--page-size", "128", *form)
    assert result.code == 1
    assert result.told == (
        "error: --memory 17596415 is 17,596,415 bytes and holds no page: one takes 17,596,416 bytes (128 tokens)\n"
    )
    if form:
        facts = json.loads(result.out)
        assert (facts["pages"], facts["tokens"], facts["bytes_per_page"]) == (0, 0, page)
    else:
        assert "17,596,416 bytes" in result.out
    assert plan("minimax-m3", "--memory", str(page), "--page-size", "128")["tokens"] == 128


def test_plan_takes_the_page_size_of_the_engine_by_default(tmp_path: Path) -> None:
    assert plan("minimax-m3")["page_size"] == 32
    assert plan(str(llama_config(tmp_path)))["page_size"] == 32


def test_plan_by_storage_type() -> None:
    assert plan("minimax-m3", "--kv-dtype", "fp32")["bytes_per_token"]["total"] == 2 * 137_472
    fp8 = plan("minimax-m3", "--kv-dtype", "fp8_e4m3")
    assert (fp8["kv_dtype"], fp8["index_dtype"]) == ("fp8_e4m3", "bf16")
    assert fp8["bytes_per_token"]["total"] == 122_880 // 2 + 14_592
    assert plan("minimax-m3", "--index-dtype", "fp32")["bytes_per_token"]["index_k"] == 2 * 14_592


def test_plan_of_one_rank() -> None:
    """facts.md section 4: from four ranks on a KV head is whole, index K is on every rank."""
    assert plan("minimax-m3", "--tp-size", "4")["bytes_per_token"]["total"] == 45_312
    assert plan("minimax-m3", "--tp-size", "8")["bytes_per_token"]["total"] == 45_312
    stages = [plan("minimax-m3", "--pp-size", "7", "--pp-rank", str(rank)) for rank in range(7)]
    assert sum(stage["bytes_per_token"]["total"] for stage in stages) == 137_472
    assert [stage["layers"][0] for stage in stages[1:]] == [stage["layers"][1] for stage in stages[:-1]]
    assert (stages[0]["layers"][0], stages[-1]["layers"][1]) == (0, 60)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--page-size", "48"], "page_size=48 does not divide the sparse block_size=128"),
        (["--page-size", "0"], "page_size=0 does not divide the sparse block_size=128"),
        (["--kv-dtype", "int4"], "kv_dtype='int4' is not one of fp32, bf16, fp16, fp8_e4m3, fp8_e5m2"),
        (["--index-dtype", "x"], "index_dtype='x' is not one of fp32, bf16, fp16, fp8_e4m3, fp8_e5m2"),
        (["--memory", "much"], "'much'"),
        (["--pp-size", "61"], "60 layers cannot be split over 61 pipeline stages"),
        (["--pp-size", "2", "--pp-rank", "2"], "pp_rank=2 is not below pp_size=2"),
        (["--pp-size", "0"], "'--pp-size'"),
        (["--tp-size", "0"], "'--tp-size'"),
        (["--tp-size", "3"], "4 KV heads cannot be split over 3 ranks"),
    ],
)
def test_plan_refuses_in_one_line(arguments: list[str], message: str) -> None:
    result = invoke("plan", "minimax-m3", *arguments)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert message in result.err
    assert result.told.count("\n") == 1


def test_plan_of_a_model_that_does_not_exist(tmp_path: Path) -> None:
    result = invoke("plan", str(tmp_path / "nothing"))
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert "nothing" in result.err
    assert result.told.count("\n") == 1


def test_plan_of_a_page_size_of_zero_on_a_dense_model(tmp_path: Path) -> None:
    result = invoke("plan", str(llama_config(tmp_path)), "--page-size", "0")
    assert result.code == 2
    assert "page_size=0" in result.err
