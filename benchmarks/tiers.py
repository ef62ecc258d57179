#!/usr/bin/env python3
"""KV tiers: bytes a second in and out of each beside plain copies, and what layer-wise loading hides.

    python benchmarks/tiers.py [--pages 128] [--seconds 3] [--redis redis://127.0.0.1:6379] [--path DIRECTORY]
                               [--prefix 1024] [--new 256] [--layer-ms 20] [--rounds 3] [--document 6000]

Pages of SmolLM2-135M's shape in bf16, and of MiniMax-M3's first layers. A disk is read from the page cache, and again
after its files were dropped from it. What is read is checked before anything is timed. Then the built-in model with a
tier that takes 20 ms for each layer, and from which length of a prompt on the disk beats computing; and a server of it
that is asked about a long document, stopped, started and asked again. The last line is JSON.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from measure import interleaved, table  # first: it settles how torch's threads wait

import torch
from servers import GREEDY, one, tamis_server
from tier_overlap import measure_engine

from tamis.cli.traffic import Job, prompts, tokens_per_word
from tamis.config import LayerKind
from tamis.kv import INDEX, MAIN, KVLayout, PageBlob, SparseKVPool
from tamis.kv.tiers import encode_pages, page_keys
from tamis.kv.tiers.base import Key
from tamis.kv.tiers.disk import DiskTier
from tamis.kv.tiers.host import HostTier
from tamis.kv.tiers.spec import parse_tier
from tamis.kv.tiers.stored import StoredTier

LAYOUTS = {
    "smollm2": KVLayout((LayerKind.DENSE,) * 30, 3, 64, page_size=32),
    "m3, 12 layers": KVLayout((LayerKind.DENSE,) * 3 + (LayerKind.SPARSE_K,) * 9, 4, 128, 128, page_size=32),
}


def make_items(layout: KVLayout, count: int) -> tuple[list[tuple[Key, bytes]], PageBlob]:
    """Blobs of random pages, and the pages."""
    shapes = {
        (layer, plane): (count, *layout.row_shape(plane))
        for layer in layout.local_layers
        for plane in layout.planes(layer)
    }
    tensors = {
        (layer, plane): torch.randn(n, heads, layout.page_size, dim).to(layout.plane_dtype(plane))
        for (layer, plane), (n, heads, dim) in shapes.items()
    }
    pages = PageBlob(layout, count, tensors)
    keys = page_keys("benchmark", layout, b"", range(count * layout.page_size), layout.page_size)
    return list(zip(keys, encode_pages(layout, keys, pages), strict=True)), pages


def read(tier: StoredTier, keys: Sequence[Key], layout: KVLayout) -> None:
    for _ in tier.read(keys, layout):
        pass


def load(tier: StoredTier, keys: Sequence[Key], pool: SparseKVPool) -> None:
    """As the engine does it: into pages of a pool."""
    places = list(range(1, len(keys) + 1))
    for part in tier.read(keys, pool.layout):
        blob = PageBlob(pool.layout, len(keys), part.tensors)
        pool.import_pages(places, blob, [part.layer], INDEX if part.part == "index" else MAIN)


def check(tier: StoredTier, keys: Sequence[Key], pages: PageBlob) -> None:
    for part in tier.read(keys, pages.layout):
        for name, tensor in part.tensors.items():
            if not torch.equal(tensor, pages.tensors[name]):
                raise SystemExit(f"{tier.name}: wrong bytes in {name}")


def rewrite(tier: StoredTier, items: Sequence[tuple[Key, bytes]]) -> None:
    tier.delete([key for key, _ in items])
    tier.write(items)


def drop_from_cache(folder: Path) -> None:
    """Have the next read of these files come from the disk itself."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def cold(folder: Path, run: Callable[[], object]) -> Callable[[], object]:
    def dropped() -> object:
        drop_from_cache(folder)
        return run()

    return dropped


def copy_synced(source: Path, target: Path) -> None:
    """Every file on its own, and on the disk at the end."""
    for path in source.iterdir():
        shutil.copyfile(path, target / path.name)
        descriptor = os.open(target / path.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def read_files(folder: Path) -> None:
    for path in folder.iterdir():
        path.read_bytes()


def measure(name: str, layout: KVLayout, args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """GB a second of every tier and of plain copies."""
    items, pages = make_items(layout, args.pages)
    keys, size = [key for key, _ in items], sum(len(blob) for _, blob in items)
    pool = SparseKVPool(layout, args.pages)
    folder = folder / name.partition(",")[0]
    disk = DiskTier(folder / "kv")
    tiers: dict[str, StoredTier] = {"host": HostTier(4 * size), "disk": disk}
    tiers |= {"redis": parse_tier(args.redis).open()} if args.redis else {}
    (folder / "copies").mkdir()
    plain = folder / "kv" / "pages"
    runs: dict[str, Callable[[], object]] = {
        "encode": lambda: encode_pages(layout, keys, pages),
    }
    for kind, tier in tiers.items():
        tier.write(items)
        check(tier, keys, pages)
        runs |= {
            f"{kind} write": lambda tier=tier: rewrite(tier, items),  # type: ignore[misc]
            f"{kind} read": lambda tier=tier: read(tier, keys, layout),  # type: ignore[misc]
            f"{kind} load": lambda tier=tier: load(tier, keys, pool),  # type: ignore[misc]
        }
    runs |= {
        "disk read, cold": cold(plain, lambda: read(disk, keys, layout)),
        "files read": lambda: read_files(plain),
        "files read, cold": cold(plain, lambda: read_files(plain)),
        "files copied and synced": lambda: copy_synced(plain, folder / "copies"),
    }
    seconds = interleaved(runs, args.seconds)
    for tier in tiers.values():
        tier.delete(keys)
        tier.close()
    rates = {run: size / time / 1e9 for run, time in seconds.items()}
    table(
        f"{name}: {args.pages} pages, {size / 1e6:.0f} MB",
        [["", "GB/s"], *([run, f"{rate:.2f}"] for run, rate in rates.items())],
    )
    return rates


def restart(folder: Path, threads: int, tokens: int) -> dict[str, float]:
    """Seconds to the first token of a new document, of the same after a restart, and of another one (the control)."""
    per_word, found, replies = 0.0, {}, {}
    for names in (("cold",), ("after a restart", "another document")):
        with tamis_server(None, threads, 1, ["--kv-tier", f"disk:{folder}?size=10GiB"]) as target:
            per_word = per_word or asyncio.run(tokens_per_word(target, random.Random(0)))
            one(target, Job(next(prompts([64], 0, per_word, random.Random(1))), 8, GREEDY))
            for name in names:
                seed = 3 if name == "another document" else 2
                outcome = one(target, Job(next(prompts([tokens], 0, per_word, random.Random(seed))), 16, GREEDY))
                found[name], replies[name] = outcome.first, outcome.text
    if replies["cold"] != replies["after a restart"]:
        raise SystemExit(f"the reply changed: {replies}")
    rows = [[name, f"{seconds:.2f}", f"{found['cold'] / seconds:.1f}x"] for name, seconds in found.items()]
    table(f"a document of {tokens:,} tokens, from disk after a restart", [["", "first token s", "faster"], *rows])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=3.0, help="for all measurements of one layout")
    parser.add_argument("--redis", help="a server to measure too")
    parser.add_argument("--path", type=Path, help="where to write files; default: the directory for temporary ones")
    parser.add_argument("--prefix", type=int, default=1024, help="tokens that are loaded")
    parser.add_argument("--new", type=int, default=256, help="tokens behind them that are computed")
    parser.add_argument("--layer-ms", type=float, default=20.0, help="what the slow tier takes for a layer")
    parser.add_argument("--rounds", type=int, default=3, help="of the built-in model")
    parser.add_argument("--document", type=int, default=6000, help="tokens of the document that survives a restart")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=args.path) as folder:
        rates = {name: measure(name, layout, args, Path(folder)) for name, layout in LAYOUTS.items()}
        found = measure_engine(Path(folder) / "engine", args.prefix, args.new, args.layer_ms / 1000, args.rounds)
        found["restart"] = restart(Path(folder) / "restart", args.threads, args.document)
    print(json.dumps({"benchmark": "tiers", "pages": args.pages, "gb_s": rates, **found}))


if __name__ == "__main__":
    main()
