"""Tokenizers from a model directory: tokenizer.json and the files around it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tamis.engine.tokenizer_parts import TokenizerParts, library_errors
from tamis.errors import ConfigError, ModelNotFoundError, TokenizerError
from tamis.models.json_fields import read_json_object

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_PROBE = "a"


def read_tokenizer_files(directory: Path) -> TokenizerParts:
    """The tokenizer of a model directory.

    tokenizer.json holds the vocabulary; tokenizer_config.json and special_tokens_map.json name the special tokens and
    may add to it; chat_template.jinja wins over a template in the config. Raises TokenizerError naming the directory or
    file where tokenizer.json is missing or one of them is malformed.
    """
    backend = _backend(directory)
    config = _read_json(directory / "tokenizer_config.json")
    _add_configured_tokens(backend, config, directory)
    specials = {
        **_special_texts(_read_json(directory / "special_tokens_map.json"), directory / "special_tokens_map.json"),
        **_special_texts(config, directory / "tokenizer_config.json"),
    }
    with library_errors(f"{directory}: tokenizer.json cannot be used"):
        prefix, suffix = _affixes(backend)
    eos = backend.token_to_id(specials["eos_token"]) if "eos_token" in specials else None
    return TokenizerParts(
        backend=backend,
        origin=str(directory),
        special_tokens=specials,
        eos_token_ids=() if eos is None else (eos,),
        prefix_ids=_configured_affix(prefix, "bos_token", config, specials, backend, directory),
        suffix_ids=_configured_affix(suffix, "eos_token", config, specials, backend, directory),
        chat_templates=_chat_templates(directory, config),
    )


def _backend(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(f"{directory}: there is no tokenizer.json")
    with library_errors(f"{path}: malformed"):
        backend = Tokenizer.from_file(str(path))
    # Settings of the run that saved the file, not of the model.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(path: Path) -> Mapping[str, Any]:
    """The JSON object in `path`; empty where there is no such file."""
    if not path.exists():
        return {}
    try:
        return read_json_object(path).values
    except (ConfigError, ModelNotFoundError) as error:
        raise TokenizerError(str(error)) from error


def _content(value: Any, what: str) -> str:
    """A token that is given as text, or as an object with its text under "content"."""
    text = value.get("content") if isinstance(value, Mapping) else value
    if not isinstance(text, str):
        raise TokenizerError(f"{what} is {value!r}, not a token")
    return text


def _special_texts(values: Mapping[str, Any], path: Path) -> dict[str, str]:
    return {name: _content(values[name], f"{path}: {name}") for name in _SPECIAL_NAMES if values.get(name) is not None}


def _add_configured_tokens(backend: Tokenizer, config: Mapping[str, Any], directory: Path) -> None:
    """Add what `added_tokens_decoder` knows and tokenizer.json does not, under the same ids."""
    path = directory / "tokenizer_config.json"
    listed = config.get("added_tokens_decoder") or {}
    known = backend.get_added_tokens_decoder()
    try:
        entries = sorted((int(key), value) for key, value in listed.items())
    except (AttributeError, TypeError, ValueError):
        raise TokenizerError(f"{path}: added_tokens_decoder is not a table of tokens by id") from None
    for token_id, value in entries:
        text = _content(value, f"{path}: added_tokens_decoder[{token_id}]")
        special = isinstance(value, Mapping) and value.get("special") is True
        if token_id in known and known[token_id].special >= special:
            continue
        options = {
            key: bool(value[key])
            for key in ("lstrip", "rstrip", "single_word", "normalized")
            if isinstance(value, Mapping) and key in value
        }
        add = backend.add_special_tokens if special else backend.add_tokens
        with library_errors(f"{path}: added token {text!r}"):
            add([AddedToken(text, special=special, **options)])
        if backend.token_to_id(text) != token_id:
            found = backend.token_to_id(text)
            raise TokenizerError(f"{path}: added token {text!r} has id {token_id}, but tokenizer.json makes it {found}")


def _affixes(backend: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What tokenizer.json's post-processor puts before and after a text."""
    plain = backend.encode(_PROBE, add_special_tokens=False).ids
    full = backend.encode(_PROBE, add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start]), tuple(full[start + len(plain) :])
    return (), ()


def _configured_affix(
    affix: tuple[int, ...],
    name: str,
    config: Mapping[str, Any],
    specials: Mapping[str, str],
    backend: Tokenizer,
    directory: Path,
) -> tuple[int, ...]:
    """`affix`, corrected by add_bos_token or add_eos_token where tokenizer_config.json has an opinion."""
    wanted = config.get(f"add_{name}")
    if not isinstance(wanted, bool):
        return affix
    token_id = backend.token_to_id(specials[name]) if name in specials else None
    if not wanted:
        return tuple(other for other in affix if other != token_id)
    if token_id is None:
        raise TokenizerError(f"{directory}: add_{name} is set, but the vocabulary has no {name}")
    return affix if token_id in affix else (token_id, *affix)


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    templates = _configured_templates(config.get("chat_template"), directory / "tokenizer_config.json")
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read_text(path)
    if (path := directory / "chat_template.jinja").is_file():
        templates["default"] = _read_text(path)
    return templates


def _configured_templates(value: Any, path: Path) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        templates = {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError):
        templates = {None: None}
    if not all(isinstance(text, str) for item in templates.items() for text in item):
        raise TokenizerError(f"{path}: chat_template is neither text nor a list of {{name, template}}")
    return templates


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: cannot be read: {error}") from error
