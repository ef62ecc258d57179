"""SamplingParams: what it accepts, and what it refuses by name."""

from typing import Any

import pytest

from support.engines import END, complete, expected_greedy, greedy, make_engine
from tamis.errors import SamplingError
from tamis.request import SamplingParams


def test_none_means_none() -> None:
    """As in vLLM."""
    params = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None)
    assert (params.stop_strings, params.stop_ids, params.biases) == ((), (), {})
    prompt = [5, 6]
    given: dict[str, Any] = {"stop": None, "stop_token_ids": None, "logit_bias": None}
    ((done,),) = complete(make_engine(), [prompt], greedy(6, **given))
    assert list(done.token_ids) == expected_greedy(prompt, 6, ends=(END,))
    sampled = SamplingParams(seed=1, max_tokens=6)
    ((one,),) = complete(make_engine(), [prompt], sampled)
    ((other,),) = complete(make_engine(), [prompt], SamplingParams(seed=1, max_tokens=6, **given))
    assert one == other


def test_collections_may_be_lists_or_tuples() -> None:
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == SamplingParams(stop=("a", "b")).stop_strings == ("a", "b")
    assert SamplingParams(stop_token_ids=[3]).stop_ids == SamplingParams(stop_token_ids=(3,)).stop_ids == (3,)
    assert SamplingParams(logit_bias={3: 1}).biases == {3: 1}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": 5}, "stop=5 must be a string or a list of strings"),
        ({"stop": b"a"}, "stop=b'a' must be a string or a list of strings"),
        ({"stop": {"a": 1}}, "stop={'a': 1} must be a string or a list of strings"),
        ({"stop": ["a", 3]}, "stop=['a', 3] must be a string or a list of strings"),
        ({"stop": ["a", ""]}, "stop holds an empty string"),
        ({"stop": ["a"] * 65}, "stop holds 65 strings, at most 64 are looked for"),
        ({"stop_token_ids": 5}, "stop_token_ids=5 must be a list of token ids"),
        ({"stop_token_ids": "5"}, "stop_token_ids='5' must be a list of token ids"),
        ({"stop_token_ids": [5, "6"]}, "stop_token_ids holds '6', which is not a token id"),
        ({"stop_token_ids": [True]}, "stop_token_ids holds True, which is not a token id"),
        ({"logit_bias": [1]}, "logit_bias=[1] must map token ids to numbers"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias has the key '5', which is not a token id"),
        ({"logit_bias": {5: "1"}}, "logit_bias of token 5 is '1', which is not a number"),
        ({"logit_bias": {5: 10**400}}, f"logit_bias of token 5 is {10**400}, which is not a number"),
        ({"temperature": None}, "temperature=None must be a finite number"),
        ({"temperature": 10**400}, f"temperature={10**400} must be a finite number"),
        ({"top_p": float("nan")}, "top_p=nan must be a finite number"),
        ({"top_k": None}, "top_k=None must be a whole number"),
        ({"n": True}, "n=True must be a whole number"),
        ({"max_tokens": 2.0}, "max_tokens=2.0 must be a whole number"),
        ({"seed": 2**63}, f"seed={2**63} must be between {-(2**63)} and {2**63 - 1}"),
        ({"ignore_eos": 1}, "ignore_eos=1 must be true or false"),
        ({"skip_special_tokens": None}, "skip_special_tokens=None must be true or false"),
        ({"response_format": "json"}, "response_format='json' must be an object with a type"),
        ({"response_format": {}}, "response_format has the type None, not text, json_object or json_schema"),
        ({"response_format": {"type": ["x"]}},
         "response_format has the type ['x'], not text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}},
         "response_format of type json_schema has no schema under json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "{}"}}},
         "response_format of type json_schema has no schema under json_schema.schema"),
        ({"response_format": {"type": "grammar", "grammar": {}}},
         "response_format of type grammar has no text under grammar"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SamplingError) as caught:
        SamplingParams(**fields)
    assert str(caught.value) == message


def test_what_was_checked_is_what_is_used() -> None:
    """The caller may change its lists and dicts afterwards."""
    stop, ids, bias, schema = ["a"], [3], {3: 1.0}, {"type": "object"}
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias, response_format=wanted)
    stop[0], ids[0], bias[3], schema["type"] = "", -1, float("nan"), "nonsense"
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a",), (3,), {3: 1.0})
    assert params.response_format == {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    with pytest.raises(SamplingError, match=r"must be a string or a list of strings$"):
        SamplingParams(stop=(text for text in "ab"))  # type: ignore[arg-type]
