"""Small tokenizers and GGUF files that hold nothing but a tokenizer."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from tamis.engine.gguf_tokenizer import TokenType
from tamis.engine.token_text import BYTE_ALPHABET
from tamis.engine.tokenizer import Tokenizer
from tamis.engine.tokenizer_parts import TokenizerParts

SPELLING = {byte: char for char, byte in BYTE_ALPHABET.items()}
END = "<|end|>"


def spell(data: bytes) -> str:
    """Bytes as a byte-level vocabulary spells them."""
    return "".join(SPELLING[byte] for byte in data)


def byte_level(pieces: Sequence[bytes]) -> Tokenizer:
    """A byte-level tokenizer whose token i is `pieces[i]`; the last token is the special END."""
    return _tokenizer([spell(piece) for piece in pieces], decoders.ByteLevel())


def sentence_piece(pieces: Sequence[str], *, strip: bool = True) -> Tokenizer:
    """A tokenizer decoding as SentencePiece does, with the tokens `pieces` and the special END after them."""
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _tokenizer(pieces, decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps))


def _tokenizer(pieces: Sequence[str], decoder: decoders.Decoder) -> Tokenizer:
    backend = Backend(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    backend.add_special_tokens([AddedToken(END, normalized=False)])
    backend.decoder = decoder
    return Tokenizer(TokenizerParts(backend, "test"))


def write_gguf(path: Path, **values: Any) -> Path:
    """A GGUF file with the metadata `values` ("." written as "__") and no tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        name = key.replace("__", ".")
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_gguf(path: Path, words: Sequence[str] = ("zq",), **values: Any) -> Path:
    """A byte-level GGUF vocabulary: END (control), "<think>" (user-defined), all bytes, and `words` built by merges."""
    tokens = [END, "<think>", *(SPELLING[byte] for byte in range(256))]
    types = [TokenType.CONTROL, TokenType.USER_DEFINED, *[TokenType.NORMAL] * 256]
    merges = []
    for word in words:
        spelled = spell(word.encode())
        for end in range(2, len(spelled) + 1):
            if spelled[:end] not in tokens:
                tokens.append(spelled[:end])
                types.append(TokenType.NORMAL)
                merges.append(f"{spelled[: end - 1]} {spelled[end - 1]}")
    defaults: dict[str, Any] = {
        "tokenizer__ggml__model": "gpt2",
        "tokenizer__ggml__pre": "smollm",
        "tokenizer__ggml__tokens": tokens,
        "tokenizer__ggml__token_type": [int(kind) for kind in types],
        "tokenizer__ggml__merges": merges,
        "tokenizer__ggml__eos_token_id": 0,
    }
    return write_gguf(path, **{**defaults, **values})


SP_WORDS = ("\u2581the", "\u2581then", "\u2581a", "he", "\u2581an", "and", "\u2581\u2581", "en", "na", "\u00e9")
SP_TOKENS = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "[INST]")
SP_TYPES = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256, TokenType.USER_DEFINED)


def sentence_piece_scores() -> dict[str, float]:
    """Tokens and scores of a tiny SentencePiece BPE vocabulary, all prefixes of its words included."""
    letters = sorted({char for word in SP_WORDS for char in word} | set("xyz.,\n"))
    pieces = [word[:end] for word in SP_WORDS for end in range(2, len(word) + 1)]
    return {piece: -float(i) for i, piece in enumerate(dict.fromkeys([*pieces, *letters]))}


def sentence_piece_gguf(path: Path, **values: Any) -> Path:
    """A SentencePiece GGUF vocabulary: SP_TOKENS, then the tokens of `sentence_piece_scores`."""
    scores = sentence_piece_scores()
    defaults: dict[str, Any] = {
        "tokenizer__ggml__model": "llama",
        "tokenizer__ggml__tokens": [*SP_TOKENS, *scores],
        "tokenizer__ggml__scores": [*[0.0] * len(SP_TOKENS), *scores.values()],
        "tokenizer__ggml__token_type": [int(kind) for kind in SP_TYPES] + [1] * len(scores),
    }
    return write_gguf(path, **{**defaults, **values})


def write_directory(directory: Path, backend: Backend, config: Mapping[str, Any] | None = None, **texts: str) -> Path:
    """A model directory: tokenizer.json, tokenizer_config.json, and `texts` by file name ("." written as "__")."""
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in texts.items():
        (directory / name.replace("__", ".")).write_text(text)
    return directory
