r"""How byte-level BPE vocabularies cut text before merging, by the name a GGUF gives (`tokenizer.ggml.pre`).

A vocabulary only works with the splits its merges were learned on, so a name that is not listed is refused. The
patterns are those of the models' own tokenizer.json files, in Oniguruma syntax; each is applied to the pieces that the
one before left, and both its matches and the text between them become pieces.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tamis.errors import TokenizerError

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"


def _cl100k(digits: str, letters: str = r"\p{L}", not_marks: str = "") -> str:
    """The split of GPT-4's vocabulary, which Llama 3 and Qwen share but for the digits and combining marks."""
    word = rf"[^\r\n\p{{L}}\p{{N}}]?{letters}+"
    return rf"(?i:{_CONTRACTIONS})|{word}|{digits}| ?[^\s\p{{L}}{not_marks}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased_words(digits: str, ending: str) -> str:
    """The split of GPT-4o's vocabulary: a word may start with capitals and may not change back to them."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = (rf"[^\r\n\p{{L}}\p{{N}}]?{upper}{a}{lower}{b}{ending}" for a, b in (("*", "+"), ("+", "*")))
    return rf"{'|'.join(words)}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_LLAMA3 = _cl100k(r"\p{N}{1,3}")
_QWEN2 = _cl100k(r"\p{N}")
_QWEN35 = _cl100k(r"\p{N}", letters=r"[\p{L}\p{M}]", not_marks=r"\p{M}")
_GPT4O = _cased_words(r"\p{N}{1,3}", rf"(?i:{_CONTRACTIONS})?")
_TEKKEN = _cased_words(r"\p{N}", "")

# DeepSeek LLM lists the cased letters it knows of one by one: Unicode's own, without the mathematical ones and a
# few scripts.
_DEEPSEEK_LETTERS = (
    r"A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    r"\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    r"\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    r"\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    r"\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    r"\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    r"\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    r"\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    r"\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    r"\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
).encode("ascii").decode("unicode_escape")  # fmt: skip
_DEEPSEEK_PUNCTUATION = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", rf"\s?[{_DEEPSEEK_PUNCTUATION}]+", r"\s+$", _DEEPSEEK_CJK, r"\p{N}+",
)  # fmt: skip
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")
_UNNAMED = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")


@dataclass(frozen=True)
class PreTokenizer:
    """How one family of byte-level vocabularies reads text."""

    patterns: tuple[str, ...]
    """Splits, applied in turn."""
    ignore_merges: bool = False
    """A piece that is a token as it stands is that token, whatever the merges would make of it."""
    add_bos: bool = False
    """Whether texts start with BOS where the file does not say."""
    nfc: bool = False
    """Text is brought to Unicode NFC first."""


def _table() -> Mapping[str, PreTokenizer]:
    llama3 = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
    groups = (
        (llama3, "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2"),
        (PreTokenizer((_LLAMA3,)), "dbrx smaug-bpe glm4 chatglm-bpe"),
        (PreTokenizer((_QWEN2,), nfc=True), "qwen2"),
        (PreTokenizer((_QWEN35,), nfc=True), "qwen35"),
        (PreTokenizer((_QWEN2,)), "deepseek-r1-qwen stablelm2 megrez hunyuan grok-2"),
        (PreTokenizer((_GPT4O,)), "gpt-4o llama4 kanana2 minimax-m2 minimax-m3"),
        (PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True), "tekken"),
        (PreTokenizer((_GPT2,)), "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat exaone4"),
        (PreTokenizer((r"\p{N}", _GPT2)), "smollm starcoder refact command-r codeshell exaone minerva-7b"),
        (PreTokenizer(_DEEPSEEK_LLM), "deepseek-llm"),
        (PreTokenizer(_DEEPSEEK_CODER), "deepseek-coder"),
        (PreTokenizer(_DEEPSEEK_V3), "deepseek-v3 hunyuan-dense"),
        (PreTokenizer(_FALCON), "falcon"),
        (PreTokenizer(_UNNAMED), "default"),
    )
    return MappingProxyType({name: kind for kind, names in groups for name in names.split()})


PRE_TOKENIZERS = _table()
"""By the names GGUF files use."""


def pre_tokenizer(name: str, origin: str) -> PreTokenizer:
    """The pre-tokenizer called `name`. Raises TokenizerError naming it and the file (`origin`) where it is unknown."""
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        raise TokenizerError(f"{origin}: unknown pre-tokenizer tokenizer.ggml.pre={name!r}") from None
