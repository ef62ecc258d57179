import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from support.engines import greedy
from support.model_dirs import write_model
from tamis import LLM, SamplingParams
from tamis.engine.build import load_tokenizer
from tamis.errors import ConfigError, TokenizerError
from tamis.models.hub import ModelSource, resolve

PROMPTS = ["hello", "a", "what is the capital of france?", "one two three"]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def reference(model_path: str) -> list[tuple[int, ...]]:
    with LLM(model_path) as llm:
        return [llm.generate(prompt, greedy(16, ignore_eos=True))[0].token_ids for prompt in PROMPTS]


def test_a_directory_runs_with_its_defaults_and_end_ids(tmp_path: Path) -> None:
    path = write_model(
        tmp_path, generation={"temperature": 0.25, "top_p": 0.5, "do_sample": True, "eos_token_id": [2, 9]}
    )
    with LLM(str(path), kv_budget="1MiB") as llm:
        assert (llm.config.context_length, llm.layout.page_size, llm.layout.dtype) == (64, 32, torch.float32)
        assert llm.default_sampling() == SamplingParams(temperature=0.25, top_p=0.5)
        assert llm.pool.num_pages == (1 << 20) // llm.layout.bytes_per_page
        (free,) = llm.generate("hello", greedy(30, ignore_eos=True))
        (done,) = llm.generate("hello", greedy(30, logit_bias={9: 100.0}))
        assert (done.token_ids, done.stop_reason) == ((9,), 9)
        assert len(free.token_ids) == 30


@pytest.mark.parametrize("page_size", [1, 4, 32, 128])
@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_a_real_model_gives_the_same_tokens_in_any_chunks_and_pages(
    model_path: str, reference: list[tuple[int, ...]], page_size: int, chunk: int
) -> None:
    with LLM(model_path, page_size=page_size, max_batch_tokens=chunk) as llm:
        results = llm.generate(PROMPTS, greedy(16, ignore_eos=True))
    assert [done.token_ids for done in results] == reference


def test_a_directory_without_tokenizer_runs_on_token_ids(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_model(tmp_path)
    (path / "tokenizer.json").unlink()
    with LLM(str(path)) as llm:
        assert len(llm.generate([[5, 6]], greedy(3, ignore_eos=True))[0].token_ids) == 3
    assert f"{path} has no tokenizer: prompts must be token ids, replies have no text" in caplog.messages


@pytest.mark.parametrize("kind", [None, "none", "no_vocab"])
def test_a_gguf_without_tokenizer_has_none(tmp_path: Path, kind: str | None) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    if kind is not None:
        writer.add_tokenizer_model(kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert load_tokenizer(ModelSource("model", path, "gguf")) is None


def test_a_broken_tokenizer_is_an_error(model_path: str, tmp_path: Path) -> None:
    path = Path(shutil.copytree(model_path, tmp_path / "broken"))
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        LLM(str(path))


def test_settings_that_do_not_suit_are_refused(model_path: str) -> None:
    for settings, error, message in (
        ({"kv_budget": "1KB"}, ConfigError, "kv_budget is 1000 bytes, less than one page of 4096 bytes (32 tokens)"),
        ({"kv_budget": "many"}, ConfigError, "size 'many' is not a number of bytes such as 8GiB or 500MB"),
        ({"dtype": "int8"}, ConfigError, "dtype='int8' is not one of auto, fp32, bf16"),
        ({"device": "tpu"}, ConfigError, "device='tpu' is not one of auto, cpu"),
        ({"threads": 0}, ConfigError, "threads=0 must be a whole number of at least 1"),
        ({"kv_dtype": ["x"]}, ConfigError, "kv_dtype=['x'] is not one of auto, fp32, bf16, fp16, fp8_e4m3, fp8_e5m2"),
        ({"dtype": [1]}, ConfigError, "dtype=[1] is not one of auto, fp32, bf16"),
        ({"kernels": {}}, ConfigError, "kernels={} is not one of auto, cpu, reference"),
        ({"quant": []}, ConfigError, "quant=[] is not one of auto, none, int8, int4"),
        ({"kv_budget": 1.5}, ConfigError, "size 1.5 is not a number of bytes such as 8GiB or 500MB"),
        ({"page_size": "4"}, ConfigError, "page_size='4' must be a whole number of at least 1"),
    ):
        with pytest.raises(error) as caught:
            LLM(model_path, **settings)
        assert str(caught.value) == message


@pytest.mark.parametrize("model", [5, b"x", ["x"]])
def test_a_model_that_is_no_name_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(model)
    assert str(caught.value) == f"model={model!r} is not a name or a path"
    with pytest.raises(ConfigError, match="is not a name or a path"):
        resolve(model)


def test_threads_are_set_when_asked_for(model_path: str) -> None:
    before = torch.get_num_threads()
    try:
        LLM(model_path, threads=before + 1).close()
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
