"""Tokens, texts and prompts equal those of transformers."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, GPT2Tokenizer, LlamaTokenizer, PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from support.vocab import SP_TOKENS, byte_level_gguf, sentence_piece_gguf, sentence_piece_scores
from tamis.engine.pre_tokenizers import PRE_TOKENIZERS
from tamis.engine.tokenizer import Tokenizer
from tamis.models.gguf_file import GGUFFile
from tamis.models.hub import ModelSource

TEXTS = [
    "Hello world",
    "def f(x):\n    return x**2  # comment\n\n\n\tif y: pass\r\n",
    "12345 6 7.89 1,000,000 \u00bd \u00b2\u00b3 \u2167 \u0661\u0662\u0663 007",
    "na\u00efve caf\u00e9 \u2014 \u201cquotes\u201d",
    "\u6771\u4eac\u30bf\u30ef\u30fc \uc548\ub155 \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "\U0001f30d\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7!",
    "   lead  and   trail   ",
    "\t\t\n \n  \r\n x \u00a0y\u3000z",
    "<|im_start|>user\nhi<|im_end|>\n a<|endoftext|>b <|im_start",
    "it's I'LL don't 'S they'VE",
    "a\u0301 e\u0301 \u0928\u093f",
    "",
    " ",
    "https://example.org/a?b=c&d=%20#e",
]


def load(path: Path) -> Tokenizer:
    return Tokenizer.from_source(ModelSource("test", path, "gguf" if path.is_file() else "directory"))


@pytest.fixture(scope="module")
def peer(builtin_gguf: Path) -> Any:
    """The built-in model's tokenizer in transformers, cutting text as its authors published (digits one by one)."""
    with GGUFFile(builtin_gguf) as file:
        tokens = file.get_list("tokenizer.ggml.tokens", str)
        merges = [tuple(merge.split(" ")) for merge in file.get_list("tokenizer.ggml.merges", str)]
        template = file.get("tokenizer.chat_template", str)
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    build: Any = GPT2Tokenizer
    tokenizer = build(
        vocab={token: i for i, token in enumerate(tokens)}, merges=merges, unk_token="<|endoftext|>", **names
    )
    tokenizer.add_special_tokens({"additional_special_tokens": tokens[:17]})
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.chat_template = template
    return tokenizer


def test_the_builtin_model_reads_and_writes_as_its_authors_meant(peer: Any, builtin_gguf: Path, tmp_path: Path) -> None:
    peer.save_pretrained(tmp_path)
    for tokenizer in (load(builtin_gguf), load(tmp_path)):
        for text in TEXTS:
            ids = tokenizer.encode(text)
            assert ids == peer.encode(text), text
            assert tokenizer.decode(ids) == peer.decode(ids, skip_special_tokens=True)
            assert tokenizer.decode(ids, skip_special_tokens=False) == peer.decode(ids)
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (peer.bos_token_id, peer.eos_token_id)


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "<b>A & B's</b> \u00e9 <|im_end|>"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
]
TEMPLATES = {
    "llama3": """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end_header|>\n\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end_header|>\n\n' }}
{%- endif %}""",
    "mistral": """{{ bos_token }}
    {% for message in messages[1:] %}
        {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
            {{- raise_exception('roles must alternate') }}
        {%- endif %}
        {%- if message['role'] == 'user' %}
            {{- '[INST] ' + message['content'] + ' [/INST]' }}
        {%- else %}
            {%- generation %}{{ message['content'] + eos_token }}{% endgeneration %}
        {%- endif %}
    {% endfor %}
    """,
    "tools": """{# answers with <tool_call> #}{% set ns = namespace(first=true) %}
{% if tools %}
  {% for tool in tools %}
{{ tool | tojson }}
  {% endfor %}
{% endif %}
{% for message in messages %}
  {% if ns.first %}{% set ns.first = false %}{% continue %}{% endif %}
{{ message | tojson(indent=2) }}
{% endfor %}{{ unknown_thing }}{{ pad_token }}""",
}


@pytest.mark.parametrize("name", [*TEMPLATES, "builtin"])
def test_chats_become_the_same_prompt(peer: Any, builtin_gguf: Path, tmp_path: Path, name: str) -> None:
    peer.save_pretrained(tmp_path)
    path = builtin_gguf
    if name != "builtin":
        path = tmp_path
        (path / "chat_template.jinja").write_text(TEMPLATES[name])
    tokenizer = load(path)
    function = {"type": "function", "function": {"name": "f", "description": "<x> & 'y' \u00e9"}}
    # Templates that cannot write tools get them as text: test_tool_prompt.
    tools = [function] if name == "tools" else None
    for generate in (True, False):
        options: dict[str, Any] = {"chat_template": TEMPLATES.get(name), "tools": tools}
        expected = peer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=generate, **options)
        assert tokenizer.apply_chat_template(CHAT, add_generation_prompt=generate, tools=tools) == expected
        assert tokenizer.encode_chat(CHAT, add_generation_prompt=generate, tools=tools) == peer.encode(
            expected, add_special_tokens=False
        )


def test_a_sentencepiece_vocabulary_gives_the_tokens_of_llama(tmp_path: Path) -> None:
    tokenizer = load(sentence_piece_gguf(tmp_path / "m.gguf"))
    scores = sentence_piece_scores()
    vocab = {token: i for i, token in enumerate([*SP_TOKENS, *scores])}
    merges = [
        (token[:cut], token[cut:])
        for token in sorted(scores, key=lambda token: -scores[token])
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    peer = LlamaTokenizer(vocab=vocab, merges=merges, add_bos_token=True)
    for text in ["the", "then and an xyz.", "na\u00efve \u6771 then\n\nthe", "a  a   a", "\u00e9\U0001f30d,"]:
        ids = tokenizer.encode(text)
        assert ids == peer.encode(text), text
        assert tokenizer.decode(ids) == peer.decode(ids, skip_special_tokens=True) == text


def test_qwen2_words_are_qwen2s() -> None:
    assert PRE_TOKENIZERS["qwen2"].patterns == (PRETOKENIZE_REGEX,)


@pytest.mark.parametrize("add_eos", [None, True])
@pytest.mark.parametrize("add_bos", [None, True, False])
def test_saved_settings_for_bos_and_eos_mean_what_they_mean_to_transformers(
    tmp_path: Path, add_bos: bool | None, add_eos: bool | None
) -> None:
    backend = load(byte_level_gguf(tmp_path / "m.gguf"))._backend
    settings = {"add_bos_token": add_bos, "add_eos_token": add_eos}
    given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    saved: Any = PreTrainedTokenizerFast
    saved(tokenizer_object=backend, bos_token="<think>", eos_token="<|end|>", **given).save_pretrained(tmp_path)
    assert load(tmp_path).encode("hi") == AutoTokenizer.from_pretrained(tmp_path).encode("hi")
