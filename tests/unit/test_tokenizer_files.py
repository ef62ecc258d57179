import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from support.vocab import SPELLING, write_directory
from tamis.engine.tokenizer import Tokenizer
from tamis.errors import RequestError, TokenizerError, TokenRangeError
from tamis.models.hub import ModelSource

BOS, EOS = "<s>", "</s>"


def byte_backend(*, post: bool = False) -> Backend:
    """All bytes as tokens 0 to 255, then BOS and EOS; with `post` the post-processor puts BOS first."""
    backend = Backend(models.BPE(vocab={char: byte for byte, char in SPELLING.items()}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(BOS), AddedToken(EOS)])
    if post:
        backend.post_processor = processors.TemplateProcessing(f"{BOS} $A", None, [(BOS, 256)])
    return backend


def load(directory: Path) -> Tokenizer:
    return Tokenizer.from_source(ModelSource("test", directory, "directory"))


@pytest.mark.parametrize(
    ("post", "config", "prefix", "suffix"),
    [
        (False, None, [], []),
        (True, None, [256], []),
        (True, {}, [256], []),
        (True, {"bos_token": BOS, "add_bos_token": True}, [256], []),
        (True, {"bos_token": BOS, "add_bos_token": False}, [], []),
        (True, {"bos_token": BOS, "add_bos_token": None}, [256], []),
        (False, {"bos_token": BOS}, [], []),
        (False, {"bos_token": {"content": BOS}, "add_bos_token": True}, [256], []),
        (False, {"bos_token": BOS, "eos_token": EOS, "add_bos_token": True, "add_eos_token": True}, [256], [257]),
    ],
)
def test_what_is_added_to_a_text_is_what_the_files_say(
    tmp_path: Path, post: bool, config: dict[str, Any] | None, prefix: list[int], suffix: list[int]
) -> None:
    tokenizer = load(write_directory(tmp_path, byte_backend(post=post), config))
    assert tokenizer.encode("hi") == [*prefix, 104, 105, *suffix]
    assert tokenizer.encode("hi", add_special_tokens=False) == [104, 105]
    assert tokenizer.encode("") == [*prefix, *suffix]
    assert tokenizer.encode(f"{EOS}<s", add_special_tokens=False) == [257, 60, 115]
    assert tokenizer.encode(BOS, add_special_tokens=False, parse_special=False) == [60, 115, 62]


def test_special_tokens_come_from_the_config_then_from_the_map(tmp_path: Path) -> None:
    mapped = json.dumps({"bos_token": {"content": BOS}, "eos_token": BOS, "pad_token": EOS})
    tokenizer = load(write_directory(tmp_path, byte_backend(), {"eos_token": EOS}, special_tokens_map__json=mapped))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257, 257)
    assert tokenizer.eos_token_ids == (257,)
    assert tokenizer.special_tokens == {"bos_token": BOS, "eos_token": EOS, "pad_token": EOS}
    assert tokenizer.vocab_size == 258
    assert tokenizer.special_ids == {256, 257}


def test_tokens_only_the_config_knows_are_added(tmp_path: Path) -> None:
    listed = {
        "65": {"content": "A", "special": True},
        "257": {"content": EOS, "special": True},
        "258": {"content": "<tool>", "special": False},
        "259": {"content": "<|x|>", "special": True, "lstrip": True},
    }
    tokenizer = load(write_directory(tmp_path, byte_backend(), {"added_tokens_decoder": listed}))
    ids = tokenizer.encode("B<tool>  <|x|>A")
    assert ids == [66, 258, 259, 65]
    assert tokenizer.decode(ids) == "B<tool>"
    assert tokenizer.special_ids == {65, 256, 257, 259}


def test_settings_of_the_run_that_saved_the_file_are_ignored(tmp_path: Path) -> None:
    backend = byte_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    assert load(write_directory(tmp_path, backend)).encode("abcd") == [97, 98, 99, 100]


def test_chat_templates_are_found_in_all_their_places(tmp_path: Path) -> None:
    message = [{"role": "user", "content": "x"}]
    tools = [{"type": "function"}]
    config: dict[str, Any] = {"chat_template": "config {{ eos_token }}", "eos_token": EOS}
    tokenizer = load(write_directory(tmp_path / "a", byte_backend(), config))
    assert tokenizer.apply_chat_template(message) == f"config {EOS}"
    assert tokenizer.encode_chat(message) == [*b"config ", 257]

    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = load(write_directory(tmp_path / "b", byte_backend(), {"chat_template": named}))
    assert tokenizer.apply_chat_template(message) == "plain"
    assert tokenizer.apply_chat_template(message, tools=tools) == "tools"

    tokenizer = load(write_directory(tmp_path / "c", byte_backend(), config, chat_template__jinja="file"))
    assert tokenizer.apply_chat_template(message) == "file"
    extra = tmp_path / "c" / "additional_chat_templates"
    extra.mkdir()
    (extra / "tool_use.jinja").write_text("tool file")
    assert load(tmp_path / "c").apply_chat_template(message, tools=tools) == "tool file"
    assert not load(write_directory(tmp_path / "d", byte_backend())).has_chat_template


def test_a_chat_has_the_bos_of_its_template_and_no_other(tmp_path: Path) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}"
    config = {"bos_token": BOS, "add_bos_token": True, "chat_template": template}
    tokenizer = load(write_directory(tmp_path, byte_backend(), config))
    assert tokenizer.encode_chat([{"role": "user", "content": "x"}]) == [256, 120]


def test_a_directory_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"there is no tokenizer\.json") as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)


BROKEN = [
    ("tokenizer.json", "{", "malformed"),
    ("tokenizer.json", "{}", "malformed"),
    ("tokenizer_config.json", "{", "malformed"),
    ("tokenizer_config.json", "[]", "it holds a list, not an object"),
    ("tokenizer_config.json", "[" * 100_000, "nested too deeply"),
    ("special_tokens_map.json", "nope", "malformed"),
    ("tokenizer_config.json", '{"bos_token": 3}', "bos_token is 3, not a token"),
    ("tokenizer_config.json", '{"add_bos_token": true}', "add_bos_token is set, but the vocabulary has no bos_token"),
    ("tokenizer_config.json", '{"chat_template": 3}', "chat_template is neither text nor a list"),
    ("tokenizer_config.json", '{"chat_template": [{"name": "x"}]}', "chat_template is neither text nor a list"),
    ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', "added_tokens_decoder is not a table"),
    ("tokenizer_config.json", '{"added_tokens_decoder": {"300": {"content": "y!"}}}', "'y!' has id 300"),
    ("chat_template.jinja", b"\xff\xfe", "cannot be read"),
]


@pytest.mark.parametrize(("name", "content", "message"), BROKEN)
def test_a_malformed_file_is_refused_by_name(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    write_directory(tmp_path, byte_backend())
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(TokenizerError, match=message) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def write_backend(directory: Path, **parts: Any) -> Path:
    """A tokenizer.json of four one-letter tokens, with `parts` of it replaced."""
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2, "d": 3}, "merges": []}
    (directory / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, **parts}))
    return directory


CATASTROPHE = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("text", "parts", "message"),
    [
        ("a" * 30 + "b", {"pre_tokenizer": CATASTROPHE}, "retry-limit-in-match over"),
        ("z", {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}}, r"Missing \[UNK\]"),
        ("z", {"model": {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "[UNK]", "max_input_chars_per_word": 9,
                         "continuing_subword_prefix": "##"}}, r"Missing \[UNK\]"),
        ("z", {"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": None}}, "`unk_id` is missing"),
        ("z", {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "unk_token": "no"}}, "Unk token `no` not"),
    ],
)  # fmt: skip
def test_a_text_that_the_library_fails_on_is_an_error_of_the_tokenizer(
    tmp_path: Path, text: str, parts: dict[str, Any], message: str
) -> None:
    """Even where the library panics, which Python sees as something that is no Exception."""
    tokenizer = load(write_backend(tmp_path, **parts))
    assert tokenizer.encode("a") == [0]
    with pytest.raises(TokenizerError, match=rf"{tmp_path}: the tokenizer failed on this text: .*{message}"):
        tokenizer.encode(text)


@pytest.mark.parametrize(
    "piece", [{"SpecialToken": {"id": "X", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}]
)
def test_a_post_processor_that_the_library_panics_on_is_refused(tmp_path: Path, piece: dict[str, Any]) -> None:
    post = {"type": "TemplateProcessing", "single": [piece], "pair": [], "special_tokens": {}}
    with pytest.raises(TokenizerError, match=rf"^{tmp_path}: tokenizer\.json cannot be used: "):
        load(write_backend(tmp_path, post_processor=post))


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([1.5], TokenRangeError, "1.5 is not a token id"),
        ("ab", RequestError, "token_ids='ab' is not a list of token ids"),
        (None, RequestError, "token_ids=None is not a list of token ids"),
        (5, RequestError, "token_ids=5 is not a list of token ids"),
    ],
)
def test_only_token_ids_can_be_decoded(tmp_path: Path, ids: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        load(write_directory(tmp_path, byte_backend())).decode(ids)
    assert str(caught.value) == message


def test_a_decoder_that_cannot_work_token_by_token_is_refused(tmp_path: Path) -> None:
    backend = byte_backend()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="the decoder step WordPiece is not supported"):
        load(write_directory(tmp_path, backend))


@pytest.mark.parametrize(
    ("decoder", "tokens"),
    [
        (None, ["Hi", "there", "\u2581you"]),
        (decoders.Metaspace(), ["\u2581Hi", "\u2581there", "\u2581\u2581x"]),
        (decoders.Metaspace(prepend_scheme="never"), ["\u2581Hi", "\u2581there"]),
        (
            decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
            ["\u2581Hi", "<0xC3>", "<0xa9>", "<0xG>"],
        ),
        (decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse(), decoders.Strip(" ", 2)]), ["_", "___a", "_b"]),
    ],
)
def test_other_decoders_give_what_the_library_gives(
    tmp_path: Path, decoder: decoders.Decoder | None, tokens: list[str]
) -> None:
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.decoder = decoder
    tokenizer, ids = load(write_directory(tmp_path, backend)), list(range(len(tokens)))
    stream = tokenizer.text_decoder()
    assert tokenizer.decode(ids) == backend.decode(ids)
    assert "".join([*map(stream.push, ids), stream.finish()]) == backend.decode(ids)


def test_prompts_that_are_not_text_are_refused(tmp_path: Path) -> None:
    tokenizer = load(write_directory(tmp_path, byte_backend()))
    with pytest.raises(RequestError, match=r"the prompt's character 1 is '\\ud800', half a surrogate pair"):
        tokenizer.encode("a\ud800")
    with pytest.raises(RequestError, match="the prompt must be text, not bytes"):
        tokenizer.encode(b"a")  # type: ignore[arg-type]
    assert tokenizer.token_bytes(256) == b"<s>"
    assert (tokenizer.id_to_token(97), tokenizer.id_to_token(-1), tokenizer.token_to_id("zz")) == ("a", None, None)
