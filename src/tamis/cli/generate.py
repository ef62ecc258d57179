"""`tamis generate`: answer one prompt."""

from typing import TYPE_CHECKING, Any

import typer

from tamis.cli import EXIT_INTERRUPTED, local
from tamis.cli.options import (
    AsJson,
    Debug,
    EngineKVDtype,
    KVBudget,
    Logprobs,
    MaxBatchTokens,
    MaxTokens,
    MinP,
    Model,
    PageSize,
    Prompt,
    PromptFile,
    Quant,
    Quiet,
    Raw,
    Seed,
    Stop,
    System,
    Temperature,
    Threads,
    TopK,
    TopP,
    WeightDtype,
)
from tamis.cli.output import print_json
from tamis.cli.prompt import read_prompt
from tamis.cli.reply import Reply, closing_lines, figures
from tamis.errors import RequestError, TokenizerError
from tamis.names import DEFAULT_MODEL
from tamis.request import FinishReason, SamplingParams

if TYPE_CHECKING:
    from tamis.engine.llm import LLM


def generate(
    model: Model = None,
    prompt: Prompt = None,
    file: PromptFile = None,
    system: System = None,
    raw: Raw = False,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
    stop: Stop = None,
    logprobs: Logprobs = None,
    dtype: WeightDtype = "auto",
    kv_dtype: EngineKVDtype = "auto",
    page_size: PageSize = None,
    kv_budget: KVBudget = None,
    max_batch_tokens: MaxBatchTokens = 512,
    quant: Quant = "auto",
    threads: Threads = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    _debug: Debug = False,
) -> None:
    """Answer one prompt. The text goes to standard output, bars and figures to standard error."""
    asked: dict[str, Any] = {
        "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p,
        "seed": seed, "stop": tuple(stop or ()), "logprobs": logprobs,
    }  # fmt: skip
    sampling = {name: value for name, value in asked.items() if value is not None}
    SamplingParams(**sampling)  # refuse what is out of range before the model is loaded
    _check(raw=raw, system=system, logprobs=logprobs, as_json=as_json)
    text = read_prompt(prompt, file)
    settings = {"dtype": dtype, "kv_dtype": kv_dtype, "page_size": page_size, "kv_budget": kv_budget,
                "max_batch_tokens": max_batch_tokens, "quant": quant, "threads": threads}  # fmt: skip
    with local.load(model, settings, quiet=quiet) as llm:
        ids = _encode(llm, text, system, raw=raw)
        events = llm.stream(ids, llm.default_sampling(**sampling))
        if not quiet:
            local.say(local.room(llm))  # not before the request is accepted: an error is the only line
        reply = Reply(prompt_tokens=len(ids))
        reply.follow(events, show=_ignore if as_json else local.write)
        facts = figures(reply, llm.stats, llm.layout.bytes_per_page)
        if as_json:
            print_json({"model": model or DEFAULT_MODEL, "text": reply.text, **_tokens(llm, reply), **facts})
        elif not reply.text.endswith("\n"):
            local.write("\n")
        if not quiet:
            local.say(*closing_lines(facts))
    if reply.finish_reason is FinishReason.ABORT:
        raise typer.Exit(EXIT_INTERRUPTED)


def _check(*, raw: bool, system: str | None, logprobs: int | None, as_json: bool) -> None:
    if raw and system is not None:
        raise RequestError("--system needs the chat template, which --raw leaves out")
    if logprobs is not None and not as_json:
        raise RequestError("--logprobs needs --json: plain text has no place for them")


def _encode(llm: "LLM", text: str, system: str | None, *, raw: bool) -> list[int]:
    """The token ids of the prompt. Raises TokenizerError, naming the way out where there is no chat template."""
    if raw:
        return llm.encode(text)
    first = [] if system is None else [{"role": "system", "content": system}]
    try:
        return llm.tokenizer.encode_chat([*first, {"role": "user", "content": text}])
    except TokenizerError as error:
        if llm.tokenizer.has_chat_template:
            raise
        raise TokenizerError(f"{error}; --raw continues the prompt as it is") from error


def _tokens(llm: "LLM", reply: Reply) -> dict[str, Any]:
    """The generated ids, and their log-probabilities where they were asked for."""
    if not reply.logprobs:
        return {"token_ids": reply.token_ids}
    entries = [
        {
            "token_id": token,
            "token": llm.decode([token], skip_special_tokens=False),
            "logprob": entry.logprob,
            "top": {str(other): value for other, value in entry.top.items()},
        }
        for token, entry in zip(reply.token_ids, reply.logprobs, strict=True)
    ]
    return {"token_ids": reply.token_ids, "logprobs": entries}


def _ignore(_text: str) -> None:
    """JSON comes in one piece at the end."""
