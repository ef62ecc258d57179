"""Tokenizers from GGUF metadata (the keys under `tokenizer.`)."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tamis.engine.pre_tokenizers import PreTokenizer, pre_tokenizer
from tamis.engine.tokenizer_parts import TokenizerParts
from tamis.errors import ConfigError, TokenizerError
from tamis.models.gguf_file import GGUFFile

_SPACE = "\u2581"
"""How SentencePiece vocabularies spell a space."""
_SPECIAL_KEYS = MappingProxyType(
    {
        "bos_token": "tokenizer.ggml.bos_token_id",
        "eos_token": "tokenizer.ggml.eos_token_id",
        "unk_token": "tokenizer.ggml.unknown_token_id",
        "pad_token": "tokenizer.ggml.padding_token_id",
    }
)
_SENTENCE_PIECE_IDS = MappingProxyType({"unk_token": 0, "bos_token": 1, "eos_token": 2})
"""What SentencePiece takes where nothing is said."""


class TokenType(IntEnum):
    """Entries of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class _Vocabulary:
    tokens: list[str]
    types: list[int]
    """As long as `tokens`; all normal where the file does not say."""
    ids: dict[str, int]

    def of_type(self, *kinds: TokenType) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in kinds]


def read_gguf_tokenizer(file: GGUFFile) -> TokenizerParts:
    """The tokenizer in `file`: byte-level BPE ("gpt2") or SentencePiece BPE ("llama").

    Raises TokenizerError naming the file where it has none or one of another kind, where its pre-tokenizer is unknown,
    and where its lists do not fit together. A byte-level vocabulary that names no pre-tokenizer gets "default".
    """
    try:
        kind = file.find("tokenizer.ggml.model", str)
        if kind is None or kind in ("none", "no_vocab"):
            raise TokenizerError(f"{file.path}: the file has no tokenizer")
        if kind == "gpt2":
            return _byte_level(file)
        if kind == "llama":
            return _sentence_piece(file)
    except ConfigError as error:
        raise TokenizerError(str(error)) from error
    raise TokenizerError(f"{file.path}: the tokenizer tokenizer.ggml.model={kind!r} is not supported")


def _byte_level(file: GGUFFile) -> TokenizerParts:
    vocabulary = _vocabulary(file)
    pre = pre_tokenizer(file.find("tokenizer.ggml.pre", str) or "default", str(file.path))
    merges = _merges(file)
    backend = Tokenizer(_bpe(file, vocabulary, merges, ignore_merges=pre.ignore_merges))
    backend.pre_tokenizer = _splitter(pre)
    backend.decoder = decoders.ByteLevel()
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    return _finish(file, backend, vocabulary, default_ids={}, add_bos=pre.add_bos)


def _splitter(pre: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    splits: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns
    ]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, to_bytes])


def _sentence_piece(file: GGUFFile) -> TokenizerParts:
    vocabulary = _vocabulary(file)
    scores = file.get_list("tokenizer.ggml.scores", float)
    _check_length(file, "scores", scores, vocabulary.tokens)
    unknown = file.find(_SPECIAL_KEYS["unk_token"], int)
    unknown_token = _token(file, vocabulary, 0 if unknown is None else unknown, "unknown_token_id")
    has_bytes = TokenType.BYTE in vocabulary.types
    model = _bpe(
        file,
        vocabulary,
        _score_merges(vocabulary, scores),
        unk_token=unknown_token,
        fuse_unk=True,
        byte_fallback=has_bytes,
    )
    backend = Tokenizer(model)
    # A prompt's first word is spelled like any other, with a space before it.
    prefixed = file.find("tokenizer.ggml.add_space_prefix", bool) is not False
    prepend = [normalizers.Prepend(_SPACE)] if prefixed else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return _finish(file, backend, vocabulary, default_ids=_SENTENCE_PIECE_IDS, add_bos=True)


def _vocabulary(file: GGUFFile) -> _Vocabulary:
    tokens = file.get_list("tokenizer.ggml.tokens", str)
    if not tokens:
        raise TokenizerError(f"{file.path}: tokenizer.ggml.tokens is empty")
    types = file.find_list("tokenizer.ggml.token_type", int) or [TokenType.NORMAL] * len(tokens)
    _check_length(file, "token_type", types, tokens)
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for token_id, token in enumerate(tokens) if ids[token] != token_id)
        raise TokenizerError(f"{file.path}: tokenizer.ggml.tokens holds {twice!r} twice")
    return _Vocabulary(tokens, types, ids)


def _check_length(file: GGUFFile, name: str, values: list[int] | list[float], tokens: list[str]) -> None:
    if len(values) != len(tokens):
        raise TokenizerError(f"{file.path}: tokenizer.ggml.{name} has {len(values)} entries for {len(tokens)} tokens")


def _merges(file: GGUFFile) -> list[tuple[str, str]]:
    merges = []
    for place, merge in enumerate(file.get_list("tokenizer.ggml.merges", str)):
        # A token may itself hold a space, but no token starts with one.
        head, _, right = merge[1:].partition(" ")
        if not right:
            raise TokenizerError(f"{file.path}: tokenizer.ggml.merges[{place}] is {merge!r}, not two tokens")
        merges.append((merge[:1] + head, right))
    return merges


def _score_merges(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """The merges that make SentencePiece's choices: the pair whose joint token scores highest goes first."""
    ids = vocabulary.ids
    by_score: defaultdict[float, list[tuple[int, int, str, str]]] = defaultdict(list)
    for token, kind, score in zip(vocabulary.tokens, vocabulary.types, scores, strict=True):
        if kind not in (TokenType.NORMAL, TokenType.UNUSED):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                by_score[score].append((ids[left], ids[right], left, right))
    return [(left, right) for score in sorted(by_score, reverse=True) for _, _, left, right in sorted(by_score[score])]


def _bpe(file: GGUFFile, vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: str | bool) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary.ids, merges=merges, **options)
    except Exception as error:
        # The library raises bare Exceptions; what can be wrong here is a merge of tokens that are not there.
        raise TokenizerError(f"{file.path}: tokenizer.ggml.merges do not fit the tokens: {error}") from error


def _finish(
    file: GGUFFile, backend: Tokenizer, vocabulary: _Vocabulary, *, default_ids: Mapping[str, int], add_bos: bool
) -> TokenizerParts:
    """Special tokens and the rest that all kinds have in common."""
    backend.add_special_tokens(_added(vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN), special=True))
    backend.add_tokens(_added(vocabulary.of_type(TokenType.USER_DEFINED), special=False))
    specials = {}
    for name, key in _SPECIAL_KEYS.items():
        token_id = file.find(key, int)
        token_id = default_ids.get(name) if token_id is None else token_id
        if token_id is not None:
            specials[name] = _token(file, vocabulary, token_id, key)
    bos, eos = specials.get("bos_token"), specials.get("eos_token")
    return TokenizerParts(
        backend=backend,
        origin=str(file.path),
        special_tokens=specials,
        eos_token_ids=_end_ids(file, vocabulary, eos),
        prefix_ids=_affix(file, vocabulary, "bos", bos, default=add_bos and bos is not None),
        suffix_ids=_affix(file, vocabulary, "eos", eos, default=False),
        chat_templates=_chat_templates(file),
    )


def _added(tokens: list[str], *, special: bool) -> list[AddedToken]:
    return [AddedToken(token, normalized=False, special=special) for token in tokens if token]


def _token(file: GGUFFile, vocabulary: _Vocabulary, token_id: int, key: str) -> str:
    if not 0 <= token_id < len(vocabulary.tokens):
        raise TokenizerError(f"{file.path}: {key}={token_id}, and there are {len(vocabulary.tokens)} tokens")
    return vocabulary.tokens[token_id]


def _end_ids(file: GGUFFile, vocabulary: _Vocabulary, eos: str | None) -> tuple[int, ...]:
    """The end of a text, of a turn (eot) and of a message (eom), where there are such tokens."""
    ends = [] if eos is None else [vocabulary.ids[eos]]
    for key in ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"):
        token_id = file.find(key, int)
        if token_id is not None:
            ends.append(vocabulary.ids[_token(file, vocabulary, token_id, key)])
    return tuple(dict.fromkeys(ends))


def _affix(file: GGUFFile, vocabulary: _Vocabulary, name: str, token: str | None, *, default: bool) -> tuple[int, ...]:
    """The BOS or EOS that goes with every text, if the file or `default` wants it."""
    key = f"tokenizer.ggml.add_{name}_token"
    wanted = file.find(key, bool)
    if not (default if wanted is None else wanted):
        return ()
    if token is None:
        raise TokenizerError(f"{file.path}: {key} is set, but there is no {name}_token_id")
    return (vocabulary.ids[token],)


def _chat_templates(file: GGUFFile) -> dict[str, str]:
    default = file.find("tokenizer.chat_template", str)
    templates = {} if default is None else {"default": default}
    for name in file.find_list("tokenizer.chat_templates", str) or []:
        template = file.find(f"tokenizer.chat_template.{name}", str)
        if template is not None:
            templates[name] = template
    return templates
