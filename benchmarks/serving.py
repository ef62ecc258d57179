#!/usr/bin/env python3
"""Throughput and waiting times of `tamis serve`, against llama.cpp's server and transformers in one run.

    python benchmarks/serving.py [--llama-server PATH] [--m3 GGUF] [--short]

The built-in model with prompts and replies of mixed lengths from 16 clients; the same with a MiniMax-M3-shaped GGUF and
a byte tokenizer, which is added here, at contexts of 8,000 tokens; what a shared prefix saves; what a running reply
notices of a long prompt. The servers run side by side and are asked in turn, from one process, with the same prompts.
transformers gets the first requests one at a time. An answer is checked and every reply counted. The last line is JSON.
"""

import argparse
import asyncio
import bisect
import json
import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from measure import limits, table  # first: it settles how torch's threads wait

import httpx
import torch
from byte_gguf import with_byte_tokenizer
from peers import ask_transformers
from servers import GREEDY, check_replies, llama_server, one, tamis_server

from tamis.cli.bench import percentile, summary
from tamis.cli.traffic import Job, Outcome, Target, ask, prompts, random_lengths, run, tokens_per_word
from tamis.models import pull


@dataclass(frozen=True)
class Load:
    """What is asked in one round: averages, lengths vary by `spread`."""

    clients: int
    requests: int
    prompt: int
    reply: int
    spread: float

    @property
    def context(self) -> int:
        """Tokens that the longest request may come to; the number of tokens a word has is not exact."""
        return int((self.prompt * 1.1 + self.reply) * (1 + self.spread)) + 64

    def warm_up(self, per_word: float, seed: int) -> Job:
        """A first request, which is not timed: memory is touched and threads are started."""
        return Job(next(prompts([64], 0, per_word, random.Random(seed))), 8, GREEDY)

    def jobs(self, per_word: float, seed: int) -> list[Job]:
        """The requests of one round; another seed gives prompts that have nothing in common with these."""
        rng = random.Random(seed)
        sizes = random_lengths(self.prompt, self.spread, self.requests, rng)
        replies = random_lengths(self.reply, self.spread, self.requests, rng)
        return [Job(text, n, GREEDY) for text, n in zip(prompts(sizes, 0, per_word, rng), replies, strict=True)]


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    rounds: int
    """Of `mixed`; `long` has one: its prompts alone take llama.cpp a quarter of an hour."""
    mixed: Load
    long: Load
    alone: int
    """Requests that transformers gets."""
    prefix: int
    prefixes: int
    """How often a prefix is tried."""
    watched: int
    """Tokens of a reply that is watched."""
    disturbing: int
    """Tokens of a prompt that comes meanwhile."""


FULL = Sizes(
    3, Load(16, 48, 384, 128, 0.9), Load(16, 16, 7900, 100, 0.0), alone=6, prefix=2000, prefixes=5, watched=1500,
    disturbing=7900,
)  # fmt: skip
SHORT = Sizes(
    1, Load(4, 6, 48, 16, 0.5), Load(2, 2, 300, 8, 0.0), alone=1, prefix=300, prefixes=2, watched=120, disturbing=600
)


def check_answer(target: Target) -> None:
    """The built-in model is served as itself."""
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": target.model, "messages": [question], "temperature": 0, "max_tokens": 16}
    reply = httpx.post(f"{target.url}/v1/chat/completions", json=body, timeout=300, trust_env=False).json()
    if "Paris" not in str(reply):
        raise SystemExit(f"{target.url} says {reply}")


def throughput(title: str, targets: Mapping[str, Target], load: Load, rounds: int, seed: int) -> dict[str, object]:
    """Medians over the rounds, by server: output tokens a second and milliseconds."""
    per_word = asyncio.run(tokens_per_word(targets["tamis"], random.Random(seed)))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in targets}
    for target in targets.values():
        one(target, load.warm_up(per_word, seed))
    for place in range(rounds):
        jobs = load.jobs(per_word, seed + 1 + place)
        for name, target in targets.items():
            outcomes, seconds = asyncio.run(run(target, jobs, load.clients))
            check_replies(outcomes, jobs)
            facts = summary(outcomes, seconds)
            found[name].append({
                "tokens_s": facts["output_tokens_per_second"], "first_p50": facts["first_token"]["p50"],
                "first_p95": facts["first_token"]["p95"], "between_p50": facts["between_tokens"]["p50"],
                "between_p95": facts["between_tokens"]["p95"], "prompt_tokens": facts["prompt_tokens"],
                "output_tokens": facts["output_tokens"],
            })  # fmt: skip
            print(f"{title}, round {place + 1}: {name} {found[name][-1]['tokens_s']:.1f} tokens/s", flush=True)
    medians = {name: {key: statistics.median(r[key] for r in rows) for key in rows[0]} for name, rows in found.items()}
    ours = medians["tamis"]["tokens_s"]
    rows = [["", "output tok/s", "tamis over it", "first p50 ms", "p95", "between p50 ms", "p95"]]
    for name, m in medians.items():
        times = [f"{m[key] * 1000:,.0f}" for key in ("first_p50", "first_p95", "between_p50", "between_p95")]
        rows.append([name, f"{m['tokens_s']:.1f}", f"{ours / m['tokens_s']:.2f}x", *times])
    table(f"{title}: {load.clients} clients, {load.requests} requests a round", rows)
    return {"rounds": found, "medians": medians}


def alone(gguf: Path, jobs: list[Job], threads: int, ours: float) -> dict[str, float]:
    """transformers on these requests, one at a time."""
    found = ask_transformers(gguf, jobs, threads)
    ratio = ours / found["tokens_s"]
    title = f"transformers, {len(jobs)} of the same requests, one at a time"
    table(title, [["", "output tok/s", "tamis over it"], ["transformers", f"{found['tokens_s']:.1f}", f"{ratio:.2f}x"]])
    return {**found, "ratio": ratio}


def shared_prefix(target: Target, tokens: int, times: int) -> dict[str, float]:
    """Seconds to the first token: of a new prompt, of one with the same prefix, of one with another (the control)."""
    per_word = asyncio.run(tokens_per_word(target, random.Random(1)))
    found: dict[str, list[float]] = {"new": [], "same prefix": [], "another prefix": []}
    for place in range(times):
        rng = random.Random(1000 + place)
        first, second = prompts([tokens + 50] * 2, tokens, per_word, rng)
        (other,) = prompts([tokens + 50], tokens, per_word, rng)
        for name, text in zip(found, (first, second, other), strict=True):
            found[name].append(one(target, Job(text, 2, GREEDY)).first)
    medians = {name: statistics.median(values) for name, values in found.items()}
    rows = [["", "first token ms", "of a new prompt's"]]
    rows += [[name, f"{s * 1000:,.0f}", f"{s / medians['new']:.2f}"] for name, s in medians.items()]
    table(f"a shared prefix of {tokens:,} tokens", rows)
    return medians


def disturbance(target: Target, tokens: int, reply: int) -> dict[str, float]:
    """95th percentile of the seconds between a reply's tokens, undisturbed and while a long prompt is read."""
    per_word = asyncio.run(tokens_per_word(target, random.Random(2)))
    short, long = (next(prompts([n], 0, per_word, random.Random(2000 + n))) for n in (20, tokens))
    jobs = [Job(short, reply, GREEDY), Job(long, 1, GREEDY)]

    async def both() -> list[Outcome]:
        async with target.client(2) as client:
            watched = asyncio.create_task(ask(client, target.model, jobs[0]))
            await asyncio.sleep(1.0)  # the reply is under way
            return [await ask(client, target.model, jobs[1]), await watched][::-1]

    outcomes = asyncio.run(both())
    check_replies(outcomes, jobs)
    watched, prefill = outcomes
    read = range(*(bisect.bisect(watched.arrivals, moment) for moment in (prefill.sent, prefill.arrivals[0])))
    gaps = watched.gaps
    disturbed = [gap for place, gap in enumerate(gaps) if place in read]
    calm = [gap for place, gap in enumerate(gaps) if place not in read]
    if not disturbed or not calm:
        raise SystemExit(f"the reply of {reply} tokens has no part without, or none with, the prompt beside it")
    found = {"calm": percentile(sorted(calm), 95), "disturbed": percentile(sorted(disturbed), 95)}
    rows = [["", "p95 between tokens ms"], *([name, f"{s * 1000:,.0f}"] for name, s in found.items())]
    table(f"a running reply while a prompt of {prefill.prompt_tokens:,} tokens is read in {prefill.first:.1f} s", rows)
    return {**found, "prompt_seconds": prefill.first, "gaps": len(disturbed)}


def builtin(args: argparse.Namespace, sizes: Sizes) -> dict[str, object]:
    """The built-in model."""
    gguf, load = pull(), sizes.mixed
    with servers(args, None, gguf, load) as targets:
        ours = targets["tamis"]
        check_answer(ours)
        found: dict[str, object] = {"throughput": throughput("built-in model", targets, load, sizes.rounds, 0)}
        found["prefix"] = shared_prefix(ours, sizes.prefix, sizes.prefixes)
        found["disturbance"] = disturbance(ours, sizes.disturbing, sizes.watched)
        rate = found["throughput"]["medians"]["tamis"]["tokens_s"]
        jobs = load.jobs(asyncio.run(tokens_per_word(ours, random.Random(0))), 1)[: sizes.alone]
    found["transformers"] = alone(gguf, jobs, args.threads, rate)
    return found


def sparse(args: argparse.Namespace, sizes: Sizes) -> dict[str, object]:
    """The M3-shaped model, with a byte tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        gguf = with_byte_tokenizer(args.m3, Path(folder) / "bytes.gguf")
        with servers(args, gguf, gguf, sizes.long) as targets:
            return throughput("M3-shaped model", targets, sizes.long, 1, 100)


@contextmanager
def servers(args: argparse.Namespace, model: Path | None, gguf: Path, load: Load) -> Iterator[dict[str, Target]]:
    """tamis, and llama.cpp where it is there, side by side: the one that is not asked takes no time."""
    with ExitStack() as stack:
        targets = {"tamis": stack.enter_context(tamis_server(model, args.threads, load.clients))}
        if args.llama_server is not None:
            peer = llama_server(args.llama_server, gguf, args.threads, load.clients, load.context)
            name, target = stack.enter_context(peer)
            targets[name] = target
        yield targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server, to be measured beside tamis")
    parser.add_argument("--m3", type=Path, help="a GGUF of a MiniMax-M3-shaped model with a vocabulary of 512 or more")
    parser.add_argument("--short", action="store_true", help="a minute, to see that all parts work")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    sizes = SHORT if args.short else FULL
    results: dict[str, object] = {"benchmark": "serving", "short": args.short, "limits": limits()}
    results["builtin"] = builtin(args, sizes)
    if args.m3 is not None:
        results["m3"] = sparse(args, sizes)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
