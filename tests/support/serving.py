"""A server over a tiny model, listening on a free port, in a thread of the test process."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import tokenizers
from openai import OpenAI
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from support.engines import model_of
from support.model_dirs import write_model
from tamis.engine.async_engine import AsyncEngine
from tamis.engine.engine import Engine
from tamis.engine.token_text import BYTE_ALPHABET
from tamis.server.config import ServerConfig
from tamis.server.serve import Server, address_of, listen

SPECIAL = ("<pad>", "<s>", "</s>")
BYTES = len(SPECIAL)
"""The id of byte 0."""
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}bot: {% endif %}"
)
MODEL = "tiny"


def write_byte_model(directory: Path, template: str = TEMPLATE, *, context: int = 2048, **changes: Any) -> Path:
    """A random Llama whose tokens are the 256 bytes behind SPECIAL."""
    spelling = {byte: char for char, byte in BYTE_ALPHABET.items()}
    vocab = {token: place for place, token in enumerate((*SPECIAL, *(spelling[byte] for byte in range(256))))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return write_model(directory, vocab_size=len(vocab), max_position_embeddings=context, **changes)


def byte_ids(text: str) -> list[int]:
    """The tokens of `text` in `write_byte_model`'s vocabulary."""
    return [BYTES + byte for byte in text.encode()]


class Brake:
    """Holds an engine's steps back until it is let go."""

    def __init__(self, engine: Engine) -> None:
        self.entered, self._open = threading.Event(), threading.Event()
        model = model_of(engine)
        self._forward = model.forward
        model.forward = self._wait  # type: ignore[method-assign, assignment]

    def let_go(self) -> None:
        """Steps run from now on."""
        self._open.set()

    def _wait(self, *arguments: Any) -> Tensor:
        self.entered.set()
        assert self._open.wait(timeout=60)
        return self._forward(*arguments)


def eventually(happened: Callable[[], bool], seconds: float = 20) -> None:
    """Wait until `happened`; fail where it does not."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def all_pages_back(engine: AsyncEngine) -> bool:
    """Whether no request runs or waits and none holds a page."""
    stats = engine.stats
    return stats.running == stats.waiting == stats.pages_used == 0


@dataclass
class Running:
    """A server that takes requests."""

    url: str
    engine: AsyncEngine
    server: Server
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread = field(repr=False)

    def openai(self, **settings: Any) -> OpenAI:
        """The official client, without its retries."""
        return OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, "timeout": 30, **settings})

    def http(self, **settings: Any) -> httpx.Client:
        """A plain client."""
        return httpx.Client(base_url=self.url, timeout=30, **settings)

    def stop(self) -> None:
        """Ask the server to end, as SIGTERM does, and wait until it has."""
        self.server.should_exit = True
        self.thread.join(timeout=60)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def serving(engine: AsyncEngine, config: ServerConfig | None = None, *, model_name: str = MODEL) -> Iterator[Running]:
    """Run a server over `engine`, which is closed at the end."""
    config = config or ServerConfig(port=0, drain=10)
    sock = listen(config)
    ready = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve(sockets=[sock])

    server = Server(engine, config, model_name=model_name, ready=ready.set)
    thread = threading.Thread(target=lambda: asyncio.run(run()), name="server")
    thread.start()
    try:
        assert ready.wait(timeout=30)
        running = Running(address_of(sock), engine, server, loops[0], thread)
        yield running
    finally:
        server.should_exit = True
        thread.join(timeout=60)
        sock.close()
    assert not thread.is_alive()
