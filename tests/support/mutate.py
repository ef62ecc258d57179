"""Log lines as people paste them: messages of known errors with other values, cut, wrapped, buried, from a fixed seed.

A message template is what the catalogue calls `error_message`: literal text with `{expressions}` of an f-string. The
mutations were written before the matcher that they test.
"""

import json
import random
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SEED = 20261201
KEPT = 0.5, 0.85
"""What share of a message a cut leaves, at least and at most."""
SHORTEST = 28
"""Characters that a cut leaves at least."""


@dataclass(frozen=True)
class Fault:
    """One error of the catalogue, as far as a log shows it."""

    slug: str
    error_class: str
    template: str


@dataclass(frozen=True)
class Mutant:
    """A paste, and the slugs of the errors in it."""

    kind: str
    text: str
    slugs: tuple[str, ...]


def mutants(faults: Sequence[Fault], count: int, seed: int = SEED) -> list[Mutant]:
    """`count` pastes of these faults, each kind of paste equally often."""
    rng = random.Random(seed)
    order: list[Fault] = []
    while len(order) < count:
        order += rng.sample(list(faults), len(faults))
    found = []
    for number, fault in enumerate(order[:count]):
        kind = list(KINDS)[number % len(KINDS)]
        other = rng.choice([entry for entry in faults if entry.slug != fault.slug])
        slugs = (fault.slug, other.slug) if kind == "two errors" else (fault.slug,)
        found.append(Mutant(kind, KINDS[kind](rng, fault, other), slugs))
    return found


def fill(template: str, rng: random.Random) -> str:
    """A message of this template, with values that it could have."""
    return "".join(
        _value(part[1:-1], rng) if is_expression else part.replace("{{", "{").replace("}}", "}")
        for part, is_expression in split_template(template)
    )


def split_template(template: str) -> list[tuple[str, bool]]:
    """Literal text and `{expressions}` (True), in order; an expression may hold braces itself."""
    parts: list[tuple[str, bool]] = []
    at = depth = start = 0
    while at < len(template):
        char = template[at]
        if depth == 0 and template[at : at + 2] in ("{{", "}}"):
            at += 2
            continue
        if char == "{":
            if depth == 0:
                parts.append((template[start:at], False))
                start = at
            depth += 1
        elif char == "}" and depth:
            depth -= 1
            if depth == 0:
                parts.append((template[start : at + 1], True))
                start = at + 1
        at += 1
    return [part for part in (*parts, (template[start:], False)) if part[0]]


_WORDS = ("model.layers.7.self_attn.k_proj.weight", "lm_head.weight", "minimax-m3", "llama", "weather",
          "user", "session-9", "Q6_K", "yarn", "qwen2", "blk.3.attn_q", "tokenizer.json",
          "max_tokens", "temperature", "gpt2")  # fmt: skip
_PATHS = ("/srv/models/m3/model-00007-of-00046.safetensors", "C:\\models\\m3\\config.json", "/tmp/tier",
          "./config.json", "/home/ann/.cache/tamis/models/SmolLM2.gguf")  # fmt: skip
_FOREIGN = ("[Errno 2] No such file or directory", "Connection refused", "expected value at line 1 column 1",
            "timed out", "[Errno 28] No space left on device", "unexpected end of input")  # fmt: skip
_KINDS: tuple[tuple[str, Callable[[random.Random], str]], ...] = (
    (r"!r$", lambda rng: repr(rng.choice(_WORDS))),
    (r"shape", lambda rng: str(tuple(rng.randint(1, 4096) for _ in range(rng.randint(1, 4))))),
    (r"dtype", lambda rng: f"torch.{rng.choice(('float32', 'bfloat16', 'float16', 'int32'))}"),
    (r"path|file|director|folder", lambda rng: rng.choice(_PATHS)),
    (r"error|reason|why|detail|exc", lambda rng: rng.choice(_FOREIGN)),
    (r"list\(|sorted\(|_layers|ids\b", lambda rng: str(sorted(rng.sample(range(60), rng.randint(1, 5))))),
    (r"len\(|:,|_id\b|size|count|tokens|pages|bytes|limit|num|max|min|length|index|slot|rank|stage",
     lambda rng: str(rng.choice((rng.randint(0, 9), rng.randint(10, 5000), -1, 1 << 31)))),
    (r"name|key|kind|family|type|show\(", lambda rng: rng.choice(_WORDS)),
)  # fmt: skip


def _value(expression: str, rng: random.Random) -> str:
    for pattern, make in _KINDS:
        if re.search(pattern, expression):
            return make(rng)
    return rng.choice((str(rng.randint(0, 999)), rng.choice(_WORDS), f"{rng.random():.3f}"))


def _plain(rng: random.Random, fault: Fault, _other: Fault) -> str:
    return fill(fault.template, rng)


def _cut(rng: random.Random, fault: Fault, *, head: bool, tail: bool) -> str:
    message = fill(fault.template, rng)
    kept = max(min(SHORTEST, len(message)), int(len(message) * rng.uniform(*KEPT)))
    spare = len(message) - kept
    start = (rng.randint(spare // 4, spare - spare // 4) if tail else spare) if head else 0
    return message[start : start + kept]


def _stamped(rng: random.Random, fault: Fault, _other: Fault) -> str:
    message = fill(fault.template, rng)
    stamp = f"2026-{rng.randint(1, 12):02}-{rng.randint(1, 28):02} {rng.randint(0, 23):02}:07:{rng.randint(0, 59):02}"
    prefix = rng.choice((
        f"{stamp},{rng.randint(0, 999):03} ERROR request req-{rng.getrandbits(48):012x} failed: ",
        f"[{stamp}] [rank{rng.randint(0, 7)}] ERROR worker.py:{rng.randint(10, 900)}: ",
        f"{stamp.replace(' ', 'T')}Z host-{rng.randint(1, 40)} tamis[{rng.randint(100, 40000)}]: error: ",
        f"E1201 12:{rng.randint(10, 59)}:00.{rng.randint(0, 999999):06} {rng.randint(1, 9999)} pool.py:88] ",
    ))  # fmt: skip
    return prefix + message


def _frames(rng: random.Random, depth: int) -> str:
    calls = (("engine/engine.py", "step", "logits = self._runner.run(batch)"),
             ("engine/runner.py", "run", "return self._model(ids, step, rows)"),
             ("models/attention.py", "forward", "k, v = step.pool.get_index_kv_buffer(self.layer_id)"),
             ("kv/pool.py", "_check", "raise error"),
             ("server/gate.py", "__call__", "await self._app(scope, receive, send)"),
             ("engine/thread.py", "_run", "self._engine.step()"))  # fmt: skip
    chosen = [calls[rng.randrange(len(calls))] for _ in range(depth)]
    root = "/opt/venv/lib/python3.11/site-packages/tamis"
    return "".join(
        f'  File "{root}/{file}", line {rng.randint(20, 350)}, in {name}\n    {code}\n' for file, name, code in chosen
    )


def _traceback(rng: random.Random, fault: Fault, _other: Fault) -> str:
    head = "Traceback (most recent call last):\n"
    raised = f"{rng.choice(('tamis.errors.', ''))}{fault.error_class}: {fill(fault.template, rng)}\n"
    if rng.random() < 0.3:
        # A foreign cause comes first; it is not in the catalogue.
        cause = f"{head}{_frames(rng, 2)}KeyError: 'abc'\n"
        link = "\nThe above exception was the direct cause of the following exception:\n\n"
        return f"{cause}{link}{head}{_frames(rng, rng.randint(2, 6))}{raised}"
    return f"{head}{_frames(rng, rng.randint(2, 12))}{raised}"


def _two(rng: random.Random, fault: Fault, other: Fault) -> str:
    first = rng.choice((_traceback, _stamped, _plain))(rng, fault, other)
    second = rng.choice((_traceback, _stamped, _plain))(rng, other, fault)
    return f"{first}\n{second}"


def _as_json(rng: random.Random, fault: Fault, _other: Fault) -> str:
    error = {"message": fill(fault.template, rng), "type": "invalid_request_error", "param": None}
    return rng.choice(("", "HTTP/1.1 400 Bad Request\n\n", "data: ")) + json.dumps({"error": error})


def _container(rng: random.Random, fault: Fault, _other: Fault) -> str:
    red, end = "\x1b[31m", "\x1b[0m"
    lines = (f"{red}ERROR{end} {fill(fault.template, rng)}", f"{red}INFO{end} 10.0.0.3 GET /health 200 0.001s req-1")
    return "\n".join(f"tamis-{rng.randint(1, 3)}  | {line}" for line in lines)


def _wrapped(rng: random.Random, fault: Fault, _other: Fault) -> str:
    return textwrap.fill(f"error: {fill(fault.template, rng)}", rng.randint(50, 100), break_long_words=False)


def _quoted(rng: random.Random, fault: Fault, _other: Fault) -> str:
    return f'I ran `tamis serve` and got this:\n\n> {fault.error_class}("{fill(fault.template, rng)}")\n\nAny idea?\n'


def _command(rng: random.Random, fault: Fault, _other: Fault) -> str:
    return f"$ tamis generate --prompt hello\nerror: {fill(fault.template, rng)}\n$"


def _buried(rng: random.Random, fault: Fault, other: Fault) -> str:
    noise = unrelated(12, rng.randrange(1 << 30))
    return "\n".join([*noise[:6], _stamped(rng, fault, other), *noise[6:]])


KINDS: dict[str, Callable[[random.Random, Fault, Fault], str]] = {
    "values": _plain,
    "cut tail": lambda rng, fault, _other: _cut(rng, fault, head=False, tail=True),
    "cut head": lambda rng, fault, _other: _cut(rng, fault, head=True, tail=False),
    "cut both": lambda rng, fault, _other: _cut(rng, fault, head=True, tail=True),
    "stamped": _stamped,
    "traceback": _traceback,
    "two errors": _two,
    "json": _as_json,
    "container": _container,
    "wrapped": _wrapped,
    "quoted": _quoted,
    "command": _command,
    "buried": _buried,
}
"""How an error comes to be in a paste."""


def unrelated(count: int, seed: int = SEED) -> list[str]:
    """`count` lines that tell of no error of tamis, in an order of their own; near misses come as often as others."""
    rng = random.Random(seed)
    forms = [form for pair in zip(_NEAR, _FAR, strict=False) for form in pair] + list(_FAR[len(_NEAR) :])
    lines = [_vary(forms[number % len(forms)], rng) for number in range(count)]
    rng.shuffle(lines)
    return lines


def _vary(form: str, rng: random.Random) -> str:
    """`form` with other numbers, and now and then a prefix."""
    line = re.sub(r"\b\d+\b", lambda found: str(rng.randint(0, 10 ** len(found[0]) - 1)), form)
    return rng.choice(("", "", "2026-12-01 09:14:02,511 INFO ", "[rank3] ", "WARNING: ")) + line


_NEAR = (
    "layer_id=3 loaded in 2.1 s",
    "layer_id=7 does not have a bias, using zeros",
    "layer_id=4 is not a sparse matrix, converting",
    "layer_id=12 is sparse; index K in bf16",
    "layer_id=0 is not quantised; dense layers: [0, 1, 2]",
    "layer 3 is not in the K-only list of layers to export",
    "index_kv layers: [3, 5]; index_k layers: [1, 2]",
    "sparse layers: [1, 2], dense layers: [0]",
    "layer_id=5 has an index V cache and an index K cache",
    "KV pool layers by kind: dense [0, 1, 2], sparse_k [3, 4, 5]",
    "layer_id=9: wait_until took 0.4 ms",
    "layers 0 to 59 belong to this pipeline stage",
    "layer_id=60 skipped, it belongs to the next stage",
    "the page table has 12 pages of 32 tokens",
    "page 17 was freed by request 4",
    "KV pool: 4096 pages of 32 tokens = 131072 tokens, 2.0 GiB (137472 bytes a token, bf16)",
    "minimax-m3 in bf16 with cpu kernels: the device is a CPU",
    "KV tiers: host, disk",
    "tamis serves smollm2-135m at http://127.0.0.1:8000: layers 30 dense; 516352 tokens fit",
    "10.0.0.3 POST /v1/chat/completions 200 1.204s req-55",
    "10.0.0.3 POST /v1/completions 400 0.002s req-56",
    "request req-8 retracted: 3 pages go back to the free list",
    "temperature=0 is greedy",
    "max_tokens=256 was cut down to 200",
    "the prompt has 512 tokens, 480 of them from the prefix cache",
    "the tokenizer has 49152 tokens",
    "model.layers.3.self_attn.index_k_proj.weight read in 3 ms",
    "session manual saved: 12 pages",
    "loading weights: 46 of 46 files",
    "KV tier disk opened in 12 ms",
    "a slot is page * page_size + offset",
    "the request was sent to the wrong stage",
    "dtype bf16, kv_dtype bf16, page_size 32",
    "layer_id is an int from 0 to 59",
)  # fmt: skip
_FAR = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "KeyError: 'model.embed_tokens.weight.scale'",
    "IndexError: list index out of range",
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)",
    "ModuleNotFoundError: No module named 'flash_attn'",
    "AttributeError: 'NoneType' object has no attribute 'shape'",
    "ValueError: invalid literal for int() with base 10: 'abc'",
    "TypeError: unsupported operand type(s) for +: 'int' and 'str'",
    "ZeroDivisionError: division by zero",
    "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "OSError: [Errno 24] Too many open files",
    "PermissionError: [Errno 13] Permission denied: '/var/log/app.log'",
    "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
    "nginx: [emerg] bind() to 0.0.0.0:80 failed (98: Address already in use)",
    "kernel: Out of memory: Killed process 4321 (python3) total-vm:8123456kB",
    "systemd[1]: postgresql.service: Main process exited, code=exited, status=1/FAILURE",
    'FATAL:  password authentication failed for user "postgres"',
    "npm ERR! code ELIFECYCLE",
    "error[E0382]: borrow of moved value: `x`",
    "Segmentation fault (core dumped)",
    "make: *** [Makefile:12: all] Error 2",
    "fatal: not a git repository (or any of the parent directories): .git",
    "The quick brown fox jumps over the lazy dog",
    "I think we should meet at 9 and talk about the layers of the cake",
    "npm WARN deprecated request@2.88.2: request has been deprecated",
    "E: Unable to locate package redis-serverr",
    "curl: (7) Failed to connect to 127.0.0.1 port 8000 after 0 ms: Connection refused",
    "WARNING: Retrying (Retry(total=4)) after connection broken by 'ReadTimeoutError'",
    "NCCL WARN Call to connect returned Connection refused",
    "java.lang.NullPointerException: Cannot invoke \"String.length()\" because \"s\" is null",
    "panic: runtime error: index out of range [5] with length 3",
    "Uncaught TypeError: Cannot read properties of undefined (reading 'map')",
    "ssh: connect to host example.org port 22: Connection timed out",
    "pip: command not found",
    "assert x == y, 'values differ'",
    "200 OK",
    "epoch 3 step 400 loss 2.31 lr 1e-4",
    "the cat sat on the mat and the file is not here",
    "it is missing",
    "value is not valid",
    "size must be at least 4 and at most 9",
    "no such thing",
    "INFO: Uvicorn running on http://0.0.0.0:8000 (Press CTRL+C to quit)",
    "Killed",
    "ERROR: Could not find a version that satisfies the requirement torch==9.9",
)  # fmt: skip
