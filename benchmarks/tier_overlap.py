"""Loading a prefix while its layers are already being computed, and from which length on loading is worth it."""

import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from measure import table  # first: it settles how torch's threads wait

from tamis import SamplingParams
from tamis.config import EngineConfig
from tamis.engine.build import build_engine
from tamis.engine.engine import Engine
from tamis.engine.runner import Runner
from tamis.kv import KVLayout, SparseKVPool
from tamis.kv.offload import OffloadConfig
from tamis.kv.tiers.base import Key, ReadPart, Tier
from tamis.kv.tiers.disk import DiskTier
from tamis.kv.tiers.host import HostTier
from tamis.models import resolve
from tamis.request import Request

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LENGTHS = (32, 64, 128, 256, 512, 1024)


class SlowTier(HostTier):
    """Host memory that takes its time for each layer."""

    def __init__(self, seconds: float) -> None:
        super().__init__(4 << 30)
        self.seconds = seconds

    def read(self, keys: Sequence[Key], layout: KVLayout, layers: Sequence[int] | None = None) -> Iterator[ReadPart]:
        """As HostTier, later."""
        for part in super().read(keys, layout, layers):
            if part.part == "main":
                time.sleep(self.seconds)
            yield part


class Bench:
    """Engines over one model, each with an empty pool of its own."""

    def __init__(self) -> None:
        first = build_engine(resolve(None), EngineConfig(kv_budget=1 << 22, dtype="fp32"), ())
        self.runner = first.runner
        self.layout = first.pool.layout

    def engine(self, tier: Tier | None = None, *, layerwise: bool = True) -> Engine:
        """One that loads whatever `tier` has."""
        runner = Runner(self.runner.model, SparseKVPool(self.layout, 256), self.runner.ops)
        engine = Engine(
            runner, max_batch_tokens=512, max_num_seqs=1, tiers=tier, fingerprint="benchmark",
            offload=OffloadConfig(layerwise=layerwise),
        )  # fmt: skip
        if engine.offload is not None:
            engine.offload.loader.rate.seconds = lambda _: 0.0  # type: ignore[method-assign]
        return engine

    def fill(self, tier: Tier, prompt: list[int]) -> None:
        """Have the pages of `prompt` in `tier`."""
        first_token(self.engine(tier), prompt)


def first_token(engine: Engine, prompt: list[int]) -> tuple[float, list[int]]:
    """Seconds to the first token, and all tokens. What is to be written has been, then."""
    began, tokens, seconds = time.perf_counter(), [], 0.0
    engine.add_request(Request(prompt, GREEDY))
    while engine.has_work:
        for event in engine.step():
            seconds = seconds or time.perf_counter() - began
            if event.token.token_id is not None:
                tokens.append(event.token.token_id)
    return seconds, tokens


def overlap(
    bench: Bench, text: list[int], prefix: int, new: int, layer_seconds: float, rounds: int
) -> dict[str, float]:
    """Median seconds to the first token of `new` tokens behind `prefix` ones, in each of the four ways."""
    begun, prompt = text[:prefix], text[: prefix + new]
    tier = SlowTier(0.0)
    bench.fill(tier, begun)
    tier.seconds = layer_seconds
    times: dict[str, list[float]] = {"layer by layer": [], "loaded first": [], "already there": [], "computed": []}
    replies: set[tuple[int, ...]] = set()
    for _ in range(rounds):
        for name, seconds in times.items():
            loads = name in ("layer by layer", "loaded first")
            engine = bench.engine(tier if loads else None, layerwise=name == "layer by layer")
            if name == "already there":
                first_token(engine, begun)
            found, reply = first_token(engine, prompt)
            seconds.append(found)
            replies.add(tuple(reply))
            moved = engine.stats.offload
            if loads and (moved is None or moved.loads != 1):
                raise SystemExit(f"{name}: nothing was loaded: {moved}")
    if len(replies) != 1:
        raise SystemExit(f"replies differ: {replies}")
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def break_even(bench: Bench, text: list[int], folder: Path, rounds: int) -> list[tuple[int, float, float]]:
    """(tokens, seconds loaded from disk, seconds computed) of prompts of several lengths."""
    found = []
    disk = DiskTier(folder)
    bench.fill(disk, text)
    for length in LENGTHS:
        prompt = text[: length + 1]
        pairs = [
            (first_token(bench.engine(disk), prompt)[0], first_token(bench.engine(), prompt)[0]) for _ in range(rounds)
        ]
        loaded, computed = (statistics.median(times) for times in zip(*pairs, strict=True))
        found.append((length, loaded, computed))
    disk.close()
    return found


def measure_engine(folder: Path, prefix: int, new: int, layer_seconds: float, rounds: int) -> dict[str, object]:
    """The built-in model: a tier that takes its time for each layer, then disk without a delay.

    The time to the first token where a step begins at once and waits layer by layer, where it waits for the whole load,
    and where there is nothing to load; replies must be the same.
    """
    bench = Bench()
    text = [3 + (place * place + 7 * place) % 4000 for place in range(max(*LENGTHS, prefix + new) + 512)]
    first_token(bench.engine(), text[:600])
    times = overlap(bench, text, prefix, new, layer_seconds, rounds)
    rows = break_even(bench, text, folder, rounds)
    bench.runner.close()
    layers = len(bench.layout.local_layers)
    hidden = times["loaded first"] - times["layer by layer"]
    possible = min(layers * layer_seconds, times["already there"])
    table(
        f"time to the first token: {prefix} tokens loaded in {layers} x {layer_seconds * 1000:g} ms, {new} computed",
        [["", "seconds"], *([name, f"{seconds:.3f}"] for name, seconds in times.items()),
         ["hidden", f"{hidden:.3f}"], ["that could be hidden at most", f"{possible:.3f}"]],
    )  # fmt: skip
    even = next((length for length, loaded, computed in rows if loaded < computed), None)
    table(
        f"from disk: loading is faster from {even} tokens on",
        [["tokens", "loaded s", "computed s"], *([str(n), f"{a:.3f}", f"{b:.3f}"] for n, a, b in rows)],
    )
    return {"overlap": times, "hidden_s": hidden, "hideable_s": possible, "break_even_tokens": even, "lengths": rows}
