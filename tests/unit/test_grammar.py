import json
import math
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from llguidance import LLMatcher

from support.engines import complete, make_engine, model_of
from support.replies import BYTES, END_ID, accepts, allowed, grammars, walk
from support.vocab import byte_level, sentence_piece, sentence_piece_gguf
from tamis.engine import grammar as module
from tamis.engine.engine import Engine
from tamis.engine.gguf_tokenizer import read_gguf_tokenizer
from tamis.engine.grammar import Grammars, check_rule, json_rule
from tamis.engine.sampler import Sampled, SamplerRow, sample
from tamis.engine.tokenizer import Tokenizer
from tamis.errors import GrammarError, SamplingError, TokenizerError
from tamis.models.gguf_file import GGUFFile
from tamis.request import Completion, FinishReason, Request, SamplingParams

PIECES = [bytes([byte]) for byte in b'{}[]",:0123456789 -.abcdefgntrulsy\n'] + [b'{"', b'":', b'",', b"true", b"null"]
TOKENIZER = byte_level(PIECES)
END = len(PIECES)
"""The end token; the model's vocabulary of 50 goes on behind it."""

POINT = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": -5, "maximum": 99}, "b": {"enum": ["ab", "true", None, 7]},
                   "c": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
    "required": ["a", "b"],
    "additionalProperties": False,
}  # fmt: skip
TREE = {
    "$defs": {"node": {"type": "object", "properties": {"n": {"type": "string", "maxLength": 4},
                                                        "l": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]}},
                       "required": ["n", "l"], "additionalProperties": False},
              "leaf": {"type": "string", "pattern": "^[a-c]{1,3}$"}},
    "type": "array", "items": {"$ref": "#/$defs/node"}, "minItems": 1, "maxItems": 2,
}  # fmt: skip


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def lark(text: str) -> dict[str, Any]:
    return {"type": "grammar", "grammar": text}


def make(**changes: Any) -> Engine:
    return make_engine(context=400, **{"pages": 200, "tokenizer": TOKENIZER, "end_ids": [END], **changes})


def one(engine: Engine, sampling: SamplingParams, prompt: tuple[int, ...] = (3, 4, 5)) -> Completion:
    return complete(engine, [prompt], sampling)[0][0]


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 3.0, "seed": 1},
    {"temperature": 2.0, "seed": 2, "top_k": 2, "top_p": 0.5, "min_p": 0.2},
    {"temperature": 0, "frequency_penalty": 2.0, "presence_penalty": 1.0, "repetition_penalty": 1.9},
    {"temperature": 1.0, "seed": 3, "logit_bias": {0: 50.0, 8: -50.0}, "logprobs": 2},
    {"temperature": 1.0, "seed": 4, "ignore_eos": True},
]


@pytest.mark.parametrize("schema", [POINT, TREE], ids=["object", "array"])
@pytest.mark.parametrize("changes", SAMPLINGS, ids=lambda c: ",".join(c))
def test_replies_follow_their_schema(schema: Any, changes: dict[str, Any]) -> None:
    sampling = SamplingParams(max_tokens=380, response_format=schema_format(schema), **changes)
    for prompt in [(1, 2), (3, 4, 5), (6,)]:
        reply = one(make(), sampling, prompt)
        assert reply.finish_reason is FinishReason.STOP
        jsonschema.validate(json.loads(reply.text), schema)


def test_a_reply_ends_where_its_grammar_does() -> None:
    reply = one(make(), SamplingParams(temperature=0, response_format=lark('start: "ab" "cd"')))
    assert (reply.text, reply.finish_reason, reply.stop_reason) == ("abcd", FinishReason.STOP, None)
    assert END not in reply.token_ids
    exact = SamplingParams(temperature=0, max_tokens=4, response_format=lark('start: "ab" "cd"'))
    assert one(make(), exact).finish_reason is FinishReason.STOP
    short = SamplingParams(temperature=0, max_tokens=3, response_format=lark('start: "ab" "cd"'))
    assert (one(make(), short).text, one(make(), short).finish_reason) == ("abc", FinishReason.LENGTH)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_reply_may_end_where_its_grammar_allows_it(ignore_eos: bool) -> None:
    sampling = SamplingParams(
        temperature=0, ignore_eos=ignore_eos, logit_bias={END: 100.0}, response_format=lark('start: "a" "b"*')
    )
    reply = one(make(), sampling)
    assert (reply.text, reply.finish_reason, reply.token_ids[-1]) == ("a", FinishReason.STOP, END)


def test_stop_strings_and_length_still_end_a_reply() -> None:
    bound = lark('start: "a" "b"*')
    stopped = one(make(), SamplingParams(temperature=0, stop="bb", logit_bias={END: -99.0}, response_format=bound))
    assert (stopped.text, stopped.stop_reason) == ("a", "bb")
    long = one(make(), SamplingParams(temperature=0, max_tokens=9, logit_bias={END: -99.0}, response_format=bound))
    assert (long.text, long.finish_reason) == ("a" + "b" * 8, FinishReason.LENGTH)


def test_every_sample_follows_a_copy_of_its_own() -> None:
    sampling = SamplingParams(
        n=6, temperature=3.0, seed=5, max_tokens=100, response_format=lark('start: /[ab]{8}/ "c" /[ab]{4}/')
    )
    (replies,) = complete(make(), [(3, 4)], sampling)
    assert len({reply.text for reply in replies}) > 1
    assert all(len(reply.text) == 13 and reply.text[8] == "c" for reply in replies)


def test_other_rows_of_a_batch_change_nothing() -> None:
    bound = [
        SamplingParams(temperature=1.5, seed=seed, max_tokens=300, response_format=schema_format(POINT))
        for seed in range(6)
    ]
    free = [SamplingParams(temperature=1.5, seed=seed, max_tokens=20) for seed in range(6)]
    prompts = [(seed + 1, 2) for seed in range(6)]
    alone = [one(make(), params, prompt).token_ids for params, prompt in zip(bound + free, prompts * 2, strict=True)]
    together = complete(make(), prompts * 2, *bound, *free)
    assert [reply.token_ids for (reply,) in together] == alone


def test_a_reply_that_is_retracted_goes_on_in_its_grammar() -> None:
    """Where pages run out, a reply waits and goes on: same tokens, same state of grammar, penalties and numbers."""
    sampling = [
        SamplingParams(
            n=2, temperature=1.5, seed=seed, max_tokens=60, frequency_penalty=0.5, stop="}}",
            response_format=lark('start: /[ab]{20}/ "{" /[c-g]{20}/ "}" /[0-9]{8}/'),
        )
        for seed in range(6)
    ]  # fmt: skip
    prompts = [(seed + 1, 2, 3) for seed in range(6)]
    tight = make(pages=40)
    replies = complete(tight, prompts, *sampling)
    assert tight.stats.retractions > 0
    wanted = complete(make(), prompts, *sampling)
    assert [[r.token_ids for r in group] for group in replies] == [[r.token_ids for r in group] for group in wanted]
    assert all(len(reply.text) == 50 and reply.finish_reason is FinishReason.STOP for (reply, _) in replies)


def test_logprobs_are_the_models_own() -> None:
    row = SamplerRow(SamplingParams(temperature=0, logprobs=1), constraint=grammars().constraint(lark('start: "b"')))
    logits = torch.zeros(1, 257)
    logits[0, 7] = 9.0
    (result,) = sample(logits, [row])
    assert isinstance(result, Sampled) and result.logprobs is not None
    assert result.token_id == ord("b")
    assert result.logprobs.logprob == pytest.approx(-math.log(256 + math.exp(9)))
    assert next(iter(result.logprobs.top)) == 7
    assert logits[0, 7] == 9.0, "the model's logits stay as they are"


def test_a_bias_that_leaves_no_token_ends_only_its_own_reply() -> None:
    bound = SamplingParams(
        temperature=0, logit_bias={PIECES.index(b"a"): -math.inf}, response_format=lark('start: "a"')
    )
    free = SamplingParams(temperature=0, max_tokens=3)
    engine = make()
    first = engine.add_request(Request((1,), bound))
    second = engine.add_request(Request((2,), free))
    events = []
    while engine.has_work:
        events += engine.step()
    (failed,) = [event for event in events if event.request_id == first]
    assert isinstance(failed.error, SamplingError)
    assert "that model and grammar allow" in str(failed.error)
    assert [event.error for event in events if event.request_id == second] == [None] * 3


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "nonsense"}, "Invalid type: nonsense"),
        ({"type": "object", "properties": []}, "properties must be an object"),
        ({"$ref": "#/nope"}, "Pointer '/nope' does not exist"),
        ({"$ref": "http://example.com/x"}, "does not fetch resources"),
        ({"type": "string", "pattern": "("}, "regex parse error: ( ^ error: unclosed group"),
        ({"type": "string", "pattern": "a(?=b)"}, "look-around"),
        ({"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
        ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "minimum (5) is greater than maximum (1)"),
        ({"enum": []}, "anyOf is empty"),
        (False, 'Unimplemented keys: ["not"]'),
        ({"enum": [f"v{i}" for i in range(150_000)]}, "characters, more than 1048576"),
        ({"enum": [math.nan]}, "cannot be written as JSON"),
        ({"enum": [object()]}, "cannot be written as JSON"),
        ({"const": "\ud800"}, "failed to parse"),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_compiled_is_refused_before_any_work(schema: Any, message: str) -> None:
    engine = make()
    with pytest.raises(GrammarError) as caught:
        engine.add_request(Request((1,), SamplingParams(response_format=schema_format(schema))))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert not engine.has_work
    assert engine.pages_used == 0


def test_a_schema_nested_too_deeply_is_refused() -> None:
    for depth in (300, 100_000):
        schema: dict[str, Any] = {}
        for _ in range(depth):
            schema = {"items": schema}
        with pytest.raises((GrammarError, SamplingError), match=r"recursion limit|nested too deeply"):
            make().add_request(Request((1,), SamplingParams(response_format=schema_format(schema))))


def test_a_grammar_needs_a_tokenizer_and_an_end() -> None:
    bound = SamplingParams(response_format={"type": "json_object"})
    with pytest.raises(TokenizerError, match="no tokenizer: its output cannot be held to a response_format"):
        make_engine().add_request(Request((1,), bound))
    for end_ids in ([], [END + 5]):
        with pytest.raises(GrammarError, match=r"^test: the model has no end token"):
            make(end_ids=end_ids).add_request(Request((1,), bound))
    text = SamplingParams(temperature=0, max_tokens=2, response_format={"type": "text"})
    assert one(make(end_ids=[]), text).usage.completion_tokens == 2


def test_the_mask_is_exact() -> None:
    constraint = grammars().constraint(lark('start: "a" ("bc" | "bd" | /[0-9]/)?'))
    assert constraint is not None
    steps = []
    for token in b"abd":
        steps.append(allowed(constraint, 300))
        assert not constraint.done
        constraint.accept(token)
    assert steps == [{ord("a")}, {ord("b"), *b"0123456789", END_ID}, {ord("c"), ord("d")}]
    assert constraint.done


def test_tokens_the_tokenizer_does_not_have_are_never_drawn() -> None:
    engine = make()
    assert model_of(engine).config.vocab_size > TOKENIZER.vocab_size
    sampling = SamplingParams(temperature=9.0, seed=1, max_tokens=100, response_format=lark("start: /(?s:.){90}/"))
    assert max(one(engine, sampling).token_ids) < END


def test_after_a_token_that_was_not_allowed_the_reply_fails() -> None:
    constraint = grammars().constraint(lark('start: "abc"'))
    assert constraint is not None
    constraint.accept(ord("x"))
    assert not constraint.done
    with pytest.raises(GrammarError, match="cannot follow its grammar further"):
        constraint.mask(torch.zeros(257))


def test_a_reply_that_the_vocabulary_cannot_spell_fails() -> None:
    engine = make()
    engine.add_request(Request((1,), SamplingParams(response_format=lark('start: "a" /[xz]/'))))
    events = [event for _ in range(2) for event in engine.step()]
    assert [event.token.text for event in events] == ["a", ""]
    assert str(events[-1].error) == "the reply cannot follow its grammar further: no token of the vocabulary comes next"
    assert not engine.has_work


def test_a_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def compile_one(vocabulary: Any, text: str, **options: Any) -> LLMatcher:
        compiled.append(text)
        return LLMatcher(vocabulary, text, **options)

    monkeypatch.setattr(module, "LLMatcher", compile_one)
    engine = make()
    for _ in range(3):
        one(engine, SamplingParams(temperature=0, n=2, response_format=schema_format({"enum": ["a", "b"]})))
    assert len(compiled) == 1


def test_json_objects_are_objects_with_bounded_space() -> None:
    any_object = {"type": "json_object"}
    assert accepts(any_object, "{}")
    assert accepts(any_object, '{"a": [1, {"b": null}], "c": "\u00e9"}')
    assert accepts(any_object, '{\n    "a": true\n}')
    assert not any(accepts(any_object, text) for text in ("[]", "1", "{", '{"a":\n\n\n1}', "{" + " " * 9 + "}", "{}{}"))
    rng = random.Random(0)
    for _ in range(20):
        assert isinstance(json.loads(walk(any_object, rng)), dict)


def test_a_callers_own_settings_of_the_compiler_are_not_taken() -> None:
    schema = {"type": "object", "x-guidance": {"whitespace_pattern": "x*", "lenient": True}, "not": {}}
    with pytest.raises(GrammarError, match="Unimplemented keys"):
        check_rule(json_rule(schema))
    assert not accepts(schema_format({"type": "object", "x-guidance": {"whitespace_pattern": "x*"}}), "{x}")
    check_rule(json_rule(schema, lenient=True))


@pytest.mark.parametrize(
    "text", ["", "a", " a", "  b\n", "Hello, w\u00f6rld \U0001f600", "\n", '{\n  "x": 1}', "\u2581a"]
)
def test_texts_are_cut_into_tokens_that_spell_them(text: str) -> None:
    """A SentencePiece tokenizer puts a space before a text; a grammar's texts stand in the middle of one."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    for tokenizer in (BYTES, sentence_piece([*bytes_, "\u2581", "a", "b", "\u2581a", "Hello"], strip=True)):
        vocabulary = module._Vocabulary(tokenizer, [tokenizer.vocab_size - 1])
        found = vocabulary(text.encode())
        assert b"".join(tokenizer.token_bytes(token) for token in found) == text.encode()
    assert vocabulary(b"\xf0\x9f a") == [0xF0, 0x9F, 256 + 3]


def test_texts_are_cut_as_the_tokenizer_cuts_them_behind_other_text(tmp_path: Path) -> None:
    with GGUFFile(sentence_piece_gguf(tmp_path / "sp.gguf")) as file:
        tokenizer = Tokenizer(read_gguf_tokenizer(file))
    vocabulary = module._Vocabulary(tokenizer, [2])
    assert [tokenizer.id_to_token(token) for token in vocabulary("nan")] == ["n", "an"], "and not na, n"
    assert [tokenizer.id_to_token(token) for token in vocabulary(" the")] == ["\u2581the"]


def test_special_tokens_are_only_reached_by_name() -> None:
    constraint = Grammars(BYTES, [END_ID]).constraint(lark('start: "<|end|>"'))
    assert constraint is not None
    assert allowed(constraint) == {ord("<")}
