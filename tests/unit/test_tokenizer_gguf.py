import itertools
import time
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.vocab import SP_TOKENS, byte_level_gguf, sentence_piece_gguf, sentence_piece_scores, write_gguf
from tamis.engine.pre_tokenizers import PRE_TOKENIZERS
from tamis.engine.tokenizer import Tokenizer
from tamis.errors import TokenizerError, TokenRangeError
from tamis.models.hub import ModelSource


def load(path: Path) -> Tokenizer:
    return Tokenizer.from_source(ModelSource("test", path, "gguf"))


def bytes_of(tokenizer: Tokenizer, text: str) -> list[bytes]:
    """The bytes of each token of `text`."""
    return [tokenizer.token_bytes(i) for i in tokenizer.encode(text, add_special_tokens=False)]


LETTERS = "I'LL pay 12345 euros!!\n\n  now"
WORDS = [
    ("smollm", LETTERS, "I|'|LL| pay| |1|2|3|4|5| euros|!!|\n\n | now"),
    ("gpt-2", LETTERS, "I|'|LL| pay| 12345| euros|!!|\n\n | now"),
    ("llama-bpe", LETTERS, "I|'LL| pay| |123|45| euros|!!\n\n| | now"),
    ("qwen2", LETTERS, "I|'LL| pay| |1|2|3|4|5| euros|!!\n\n| | now"),
    ("tekken", LETTERS, "I|'LL| pay| |1|2|3|4|5| euros|!!\n\n| | now"),
    ("minimax-m2", LETTERS, "I'LL| pay| |123|45| euros|!!\n\n| | now"),
    ("minimax-m3", "aBc fooBar HTTPServer x/\n", "a|Bc| foo|Bar| HTTPServer| x|/\n"),
    ("gpt-4o", "aBc fooBar HTTPServer's", "a|Bc| foo|Bar| HTTPServer's"),
    ("llama-bpe", "aBc fooBar HTTPServer's", "aBc| fooBar| HTTPServer|'s"),
    ("deepseek-llm", "Ab \u0936x 12, \u4e2d\u6587", "Ab| |\u0936|x| |12|,| |\u4e2d\u6587"),
    ("deepseek-coder", "Ab 12, \u4e2d\u6587", "Ab| |1|2|,| |\u4e2d\u6587"),
    ("deepseek-v3", "x=1234 \u4e2d\u6587ab", "x|=|123|4| |\u4e2d\u6587|ab"),
    ("qwen2", "e\u0301\u0928\u093f", "\u00e9\u0928|\u093f"),
    ("deepseek-r1-qwen", "e\u0301", "e|\u0301"),
    ("qwen35", "\u0928\u093f", "\u0928\u093f"),
    ("falcon", "a.b 12345`", "a|.|b| |123|45|`"),
    ("default", "a.b 12345", "a|.|b| |123|45"),
]


@pytest.mark.parametrize(("pre", "text", "words"), WORDS)
def test_each_pre_tokenizer_cuts_where_its_vocabulary_was_learned(
    tmp_path: Path, pre: str, text: str, words: str
) -> None:
    tokenizer = load(byte_level_gguf(tmp_path / "m.gguf", tokenizer__ggml__pre=pre))
    backend = tokenizer._backend
    normal = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    pieces = [normal[a:b] for _, (a, b) in backend.pre_tokenizer.pre_tokenize_str(normal)]
    assert "|".join(pieces) == words
    assert tokenizer.decode(tokenizer.encode(text)) == normal


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_is_well_formed_and_loses_nothing(tmp_path: Path, pre: str) -> None:
    tokenizer = load(byte_level_gguf(tmp_path / "m.gguf", tokenizer__ggml__pre=pre, tokenizer__ggml__bos_token_id=0))
    text = "Hello, w\u00f6rld's 3.14 \u4e2d\u6587 \U0001f30d\t\r\n\n  x \u00a0 \x00 _don't_ "
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_stay_inside_words(tmp_path: Path) -> None:
    path = byte_level_gguf(tmp_path / "m.gguf", [" paris", "12", "ab"])
    tokenizer = load(path)
    assert bytes_of(tokenizer, "ab paris12paris") == [b"ab", b" paris", b"1", b"2", *[c.encode() for c in "paris"]]


def test_control_tokens_are_special_and_user_defined_ones_are_text(tmp_path: Path) -> None:
    tokenizer = load(byte_level_gguf(tmp_path / "m.gguf"))
    ids = tokenizer.encode("a<|end|><think>")
    assert ids == [tokenizer.token_to_id("a"), 0, 1]
    assert tokenizer.special_ids == {0}
    assert tokenizer.decode(ids) == "a<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|end|><think>"
    literal = tokenizer.encode("<|end|><think>", parse_special=False)
    assert 0 not in literal
    assert 1 in literal
    assert tokenizer.decode(literal) == "<|end|><think>"


@pytest.mark.parametrize(
    ("values", "prefix", "suffix"),
    [
        ({}, [], []),
        ({"bos_token_id": 1}, [], []),
        ({"bos_token_id": 1, "add_bos_token": True}, [1], []),
        ({"bos_token_id": 1, "add_eos_token": True}, [], [0]),
        ({"bos_token_id": 1, "pre": "llama-bpe"}, [1], []),
        ({"bos_token_id": 1, "pre": "llama-bpe", "add_bos_token": False}, [], []),
        ({"pre": "llama-bpe"}, [], []),
    ],
)
def test_bos_and_eos_are_added_where_the_file_wants_them(
    tmp_path: Path, values: dict[str, Any], prefix: list[int], suffix: list[int]
) -> None:
    tokenizer = load(byte_level_gguf(tmp_path / "m.gguf", **{f"tokenizer__ggml__{k}": v for k, v in values.items()}))
    plain = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("hi") == [*prefix, *plain, *suffix]
    assert len(plain) == 2


def test_ends_of_text_turn_and_message_are_known(tmp_path: Path) -> None:
    path = byte_level_gguf(
        tmp_path / "m.gguf",
        tokenizer__ggml__eot_token_id=1,
        tokenizer__ggml__eom_token_id=0,
        tokenizer__chat_template="x",
    )
    tokenizer = load(path)
    assert tokenizer.eos_token_ids == (0, 1)
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.vocab_size) == (0, None, 259)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "y"}]) == "x"


def test_a_word_in_the_vocabulary_is_taken_whole_where_merges_are_ignored(tmp_path: Path) -> None:
    words = {"llama-bpe": [b"abc"], "smollm": [b"ab", b"c"]}
    for pre, expected in words.items():
        path = byte_level_gguf(tmp_path / "m.gguf", ["abc"], tokenizer__ggml__pre=pre, tokenizer__ggml__merges=["a b"])
        assert bytes_of(load(path), "abc") == expected


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"pre": "my-own"}, r"unknown pre-tokenizer tokenizer.ggml.pre='my-own'"),
    ({"model": "none"}, "the file has no tokenizer"),
    ({"model": "rwkv"}, "tokenizer.ggml.model='rwkv' is not supported"),
    ({"model": 7}, "tokenizer.ggml.model is not text"),
    ({"tokens": ["a", "b"]}, "tokenizer.ggml.token_type has 259 entries for 2 tokens"),
    ({"tokens": ["a"] * 259}, "tokenizer.ggml.tokens holds 'a' twice"),
    ({"merges": ["ab"]}, r"tokenizer.ggml.merges\[0\] is 'ab', not two tokens"),
    ({"merges": ["zz a"]}, "tokenizer.ggml.merges do not fit the tokens"),
    ({"merges": 1}, "tokenizer.ggml.merges is not a list of text"),
    ({"eos_token_id": 259}, "tokenizer.ggml.eos_token_id=259, and there are 259 tokens"),
    ({"eot_token_id": 999}, "tokenizer.ggml.eot_token_id=999, and there are 259 tokens"),
    ({"add_bos_token": True}, "tokenizer.ggml.add_bos_token is set, but there is no bos_token_id"),
]


@pytest.mark.parametrize(("values", "message"), BROKEN)
def test_metadata_that_makes_no_tokenizer_is_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    path = byte_level_gguf(tmp_path / "m.gguf", **{f"tokenizer__ggml__{k}": v for k, v in values.items()})
    with pytest.raises(TokenizerError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="the file has no tokenizer"):
        load(write_gguf(tmp_path / "m.gguf", general__name="x"))
    with pytest.raises(TokenizerError, match="a configuration alone has no tokenizer"):
        Tokenizer.from_source(ModelSource("x", tmp_path / "config.json", "config"))


def test_sentencepiece_scores_must_fit_the_tokens(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer.ggml.scores has 2 entries for"):
        load(sentence_piece_gguf(tmp_path / "m.gguf", tokenizer__ggml__scores=[0.0, 1.0]))


def sentence_piece_by_definition(text: str) -> list[str]:
    """SentencePiece BPE as defined: of all neighbours that make a token, join the best scored, leftmost first."""
    scores = sentence_piece_scores()
    parts = list("\u2581" + text.replace(" ", "\u2581")) if text else []
    while True:
        joined = [(scores.get(a + b, -float("inf")), -i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
        if not joined or max(joined)[0] == -float("inf"):
            break
        place = -max(joined)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    pieces = [[part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
    return [piece for group in pieces for piece in group]


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(sentence_piece_gguf(tmp_path_factory.mktemp("sp") / "m.gguf"))


@settings(derandomize=True, deadline=None, max_examples=150)
@given(text=st.text("thenad \u00e9xQ\u4e2d\n", max_size=20))
def test_sentencepiece_tokens_are_those_of_its_definition(sentence_piece: Tokenizer, text: str) -> None:
    ids = sentence_piece.encode(text, add_special_tokens=False)
    assert [sentence_piece.id_to_token(i) for i in ids] == sentence_piece_by_definition(text)
    assert sentence_piece.decode(ids) == text


def test_sentencepiece_texts_start_with_bos_and_keep_their_added_tokens(sentence_piece: Tokenizer) -> None:
    ids = sentence_piece.encode("<s>[INST]the")
    assert ids[:3] == [1, 1, SP_TOKENS.index("[INST]")]
    assert sentence_piece.id_to_token(ids[3]) == "\u2581the"
    assert sentence_piece.special_ids == {0, 1, 2}
    assert sentence_piece.decode(ids) == "[INST] the"
    assert sentence_piece.eos_token_ids == (2,)
    assert sentence_piece.special_tokens == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def test_a_sentencepiece_model_may_do_without_the_first_space(tmp_path: Path) -> None:
    tokenizer = load(sentence_piece_gguf(tmp_path / "m.gguf", tokenizer__ggml__add_space_prefix=False))
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("the", add_special_tokens=False)] == ["t", "he"]
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


def test_the_builtin_model_is_read_quickly_and_exactly(builtin_gguf: Path) -> None:
    started = time.perf_counter()
    tokenizer = load(builtin_gguf)
    assert time.perf_counter() - started < 2  # a quarter of a second on an idle machine
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.encode("The capital of France is Paris.") == [504, 3575, 282, 4649, 314, 7042, 30]
    everything = "".join(
        map(chr, [*range(0x20, 0x7F), *range(0xA0, 0x250), *range(0x4E00, 0x4E80), *range(0x1F300, 0x1F380)])
    )
    assert tokenizer.decode(tokenizer.encode(everything)) == everything
    assert tokenizer.decode([49152, 10**9]) == ""
    with pytest.raises(TokenRangeError, match="-1 is not a token id"):
        tokenizer.decode([-1])


def test_the_stored_header_is_what_the_gguf_library_wrote(tmp_path: Path) -> None:
    path = byte_level_gguf(tmp_path / "m.gguf", ["ab"])
    tokens = gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"].contents()
    tokenizer = load(path)
    assert [tokenizer.id_to_token(i) for i in range(tokenizer.vocab_size)] == tokens
