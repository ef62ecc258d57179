"""Arguments and options of the commands: names, metavars and help, so that signatures stay readable."""

import logging
from typing import Annotated, Any

import typer

from tamis.names import DEFAULT_MODEL, DENSE_MODEL, SHIPPED_CONFIG, SPARSE_MODEL


def _set_debug(context: typer.Context, wanted: bool) -> bool:
    if wanted and not context.obj.debug:
        context.obj.debug = True
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
        logging.getLogger("tamis").setLevel(logging.DEBUG)
    return wanted


def _option(names: str, metavar: str, text: str, **more: Any) -> Any:
    return typer.Option(*names.split(), metavar=metavar, help=text, **more)


def _flag(names: str, text: str, **more: Any) -> Any:
    return typer.Option(*names.split(), help=text, **more)


_BUILT_IN = f"Default: {DEFAULT_MODEL}."

# Every command
Model = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help=f"A built-in name, a directory, a .gguf file or a hub name. {_BUILT_IN}"),
]
ModelOrConfig = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help=f"A built-in name ({SPARSE_MODEL}, {DENSE_MODEL}, {SHIPPED_CONFIG}), a directory, a config.json, a .gguf "
        f"file or a hub name. {_BUILT_IN}",
    ),
]
Debug = Annotated[bool, _flag("--debug", "Show tracebacks and logs.", callback=_set_debug, is_eager=True)]
AsJson = Annotated[bool, _flag("--json", "Print one JSON object.")]
Quiet = Annotated[bool, _flag("--quiet -q", "Nothing but errors and warnings on standard error.")]

# The KV pool
_STORAGE = "fp32, bf16, fp16, fp8_e4m3 or fp8_e5m2."
KVDtype = Annotated[str, _option("--kv-dtype --dtype", "DTYPE", f"Main K and V: {_STORAGE}")]
IndexDtype = Annotated[
    str | None, _option("--index-dtype", "DTYPE", "Index planes. Default: as K and V; bf16 where those are fp8.")
]
PageSize = Annotated[
    int | None, _option("--page-size", "TOKENS", "Tokens a page; must divide the sparse block. Default: 32 at most.")
]

# Planning: what may be a list gives a table with a row for each combination
_LIST = "May be a list: 1,4,8."
Memory = Annotated[str | None, _option("--memory", "SIZE", "Memory for the usable pages, written 8GiB or 500MB.")]
DeviceMemory = Annotated[
    str | None,
    _option("--device-memory", "SIZE", "Memory of a rank for everything: weights, scratch, the pool with its padding "
            "page."),
]  # fmt: skip
KVDtypes = Annotated[str, _option("--kv-dtype --dtype", "DTYPE", f"Main K and V: {_STORAGE} May be a list.")]
PageSizes = Annotated[
    str | None,
    _option("--page-size", "TOKENS", f"Tokens a page; must divide the sparse block. Default: 32 at most. {_LIST}"),
]
TensorRanks = Annotated[str, _option("--tp-size", "N", f"Ranks that share heads, MLPs and vocabulary. {_LIST}")]
Stages = Annotated[str, _option("--pp-size", "N", f"Pipeline stages. {_LIST}")]
Stage = Annotated[
    int | None,
    _option("--pp-rank", "I", "The pipeline stage to plan for, from 0. Default: the one with the least room."),
]
PlanWeightDtype = Annotated[
    str, _option("--weight-dtype", "DTYPE", "Weights: fp32, bf16, or auto: fp32 where the checkpoint is, else bf16.")
]
RequestTokens = Annotated[
    str | None,
    _option("--request-tokens", "N", f"Length of a request, prompt and reply. {_LIST} Default: several lengths."),
]
PlanTier = Annotated[
    list[str] | None,
    _option("--kv-tier", "TIER", "Count what fits here too: host:8GiB, disk:/path?size=100GiB, ...; may be given "
            "several times. Nothing is opened."),
]  # fmt: skip

# The prompt and the sampling
Prompt = Annotated[str | None, _option("--prompt -p", "TEXT", "The prompt.")]
PromptFile = Annotated[str | None, _option("--file -f", "PATH", "Read it from a UTF-8 file; - is standard input.")]
System = Annotated[str | None, _option("--system", "TEXT", "System message, for the chat template.")]
Raw = Annotated[bool, _flag("--raw", "Continue the prompt as it is, without the chat template.")]
MaxTokens = Annotated[int, _option("--max-tokens -n", "N", "Tokens to generate at most.")]
Temperature = Annotated[float, _option("--temperature -t", "T", "0 is greedy.")]
ReplyTokens = Annotated[
    int | None, _option("--max-tokens -n", "N", "Tokens of a reply at most. Default: what the context has room for.")
]
ChatTemperature = Annotated[
    float | None, _option("--temperature -t", "T", "0 is greedy. Default: the model's, else 1.")
]
TopP = Annotated[
    float | None, _option("--top-p", "P", "Keep the most probable tokens that together reach P. Default: the model's.")
]
TopK = Annotated[int | None, _option("--top-k", "K", "Keep the K most probable tokens. Default: the model's.")]
MinP = Annotated[
    float | None, _option("--min-p", "P", "Drop tokens less probable than P times the best. Default: the model's.")
]
Seed = Annotated[int | None, _option("--seed", "N", "Same seed, same text.")]
Stop = Annotated[list[str] | None, _option("--stop", "TEXT", "End before this text; may be given several times.")]
Logprobs = Annotated[
    int | None,
    _option("--logprobs", "N", "With --json: log-probabilities, and those of the N best tokens."),
]

# The engine
WeightDtype = Annotated[str, _option("--dtype", "DTYPE", "Weights: auto, fp32 or bf16.")]
EngineKVDtype = Annotated[str, _option("--kv-dtype", "DTYPE", f"K and V: auto (as the weights), {_STORAGE}")]
KVBudget = Annotated[
    str | None,
    _option("--kv-budget", "SIZE", "Memory for the KV pool, written 8GiB. Default: half of what is free, at most "
            "a full context for each reply that may run at once."),
]  # fmt: skip
KVTier = Annotated[
    list[str] | None,
    _option("--kv-tier", "TIER", "Keep pages here too: host:8GiB, disk:/path?size=100GiB, redis://HOST or fsspec:URL; "
            "may be given several times, the fastest first."),
]  # fmt: skip
KVTierOptional = Annotated[bool, _flag("--kv-tier-optional", "Go on without a tier that cannot be opened.")]
KVWriteThrough = Annotated[
    bool, _flag("--kv-write-through", "Write pages to the tiers as they are computed, not when their request ends.")
]
MaxBatchTokens = Annotated[int, _option("--max-batch-tokens", "N", "Tokens computed in one step at most.")]
Quant = Annotated[
    str,
    _option("--quant", "FORMAT", "Store weights in int8, int4 or as they are (none). auto: as the checkpoint does."),
]
Threads = Annotated[int | None, _option("--threads", "N", "CPU threads. Default: as many as torch takes.")]

# The server
Host = Annotated[str, _option("--host", "ADDRESS", "Listen on this address only; 0.0.0.0 is every one.")]
Port = Annotated[int, _option("--port", "N", "Listen on this port; 0: any that is free.")]
ServedName = Annotated[str | None, _option("--name", "NAME", "What requests call the model. Default: its own name.")]
ApiKey = Annotated[
    list[str] | None,
    _option("--api-key", "KEY", "Answer only who sends it; may be given several times. Others on this machine can see "
            "a command's arguments: TAMIS_API_KEY in the environment does the same."),
]  # fmt: skip
CorsOrigin = Annotated[
    list[str] | None,
    _option("--cors-origin", "ORIGIN", "Web pages from here may call the server; may be given several times; *: any."),
]
MaxBody = Annotated[str, _option("--max-body", "SIZE", "The largest body of one request.")]
MaxQueue = Annotated[int, _option("--max-queue", "N", "Requests that wait at most; more are answered 503.", min=1)]
MaxSeqs = Annotated[int, _option("--max-seqs", "N", "Replies that run at once at most.", min=1)]
Drain = Annotated[float, _option("--drain", "SECONDS", "How long running requests may go on once the server stops.")]

# Measuring a server
BenchUrl = Annotated[str, _option("--url", "URL", "Where the server is.")]
BenchClients = Annotated[int, _option("--clients -c", "N", "Requests under way at once.", min=1)]
BenchRequests = Annotated[int, _option("--requests -r", "N", "Requests in all.", min=1)]
BenchPrompt = Annotated[int, _option("--prompt-tokens", "N", "Tokens of a prompt, on average and roughly.", min=1)]
BenchMaxTokens = Annotated[int, _option("--max-tokens -n", "N", "Tokens of a reply, on average.", min=1)]
BenchSpread = Annotated[float, _option("--spread", "SHARE", "Lengths vary by this share of the average, up and down.")]
BenchPrefix = Annotated[int, _option("--prefix-tokens", "N", "Tokens that all prompts begin with, roughly.", min=0)]
BenchModel = Annotated[str | None, _option("--model", "NAME", "Default: the first that the server lists.")]
ClientKey = Annotated[str | None, _option("--api-key", "KEY", "Default: TAMIS_API_KEY in the environment.")]
RequestTimeout = Annotated[float, _option("--timeout", "SECONDS", "To wait for the server, each time.", min=0.1)]
IgnoreEos = Annotated[
    bool, _flag("--ignore-eos/--stop-at-eos", "Ask for replies of just the length given; not every server can.")
]
