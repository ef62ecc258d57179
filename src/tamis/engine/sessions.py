"""Named sessions: prompts whose pages are kept in the KV tiers until they are let go, restarts included."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from tamis.engine.engine import Engine
from tamis.engine.sequence import EngineEvent, RequestState
from tamis.engine.thread import Delivery, EngineThread, take
from tamis.errors import SessionError, SessionNotFoundError, TierError
from tamis.kv.offload import KVOffload, SaveTicket
from tamis.request import PrefillProgress, SamplingParams
from tamis.units import show

Prompt = str | Sequence[int]
Prepare = Callable[[Prompt, SamplingParams, str], RequestState]
"""Of a prompt, its sampling and its salt: a request that can be run. Raises RequestError, TokenizerError."""

_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,64}")
"""Also one that a path can end with: . and .. would be taken for steps."""
_WAIT_S = 60.0
"""That a save may take once the prompt is computed."""


@dataclass(frozen=True)
class Session:
    """A prompt that is kept."""

    name: str
    tokens: int
    """Of its full pages: so many tokens of a prompt that begins alike need not be computed."""
    pages: int
    bytes: int


class Sessions:
    """The named sessions of one engine. All methods wait; any thread may call them.

    `tenant` keeps the names of one client apart from those of others. All raise SessionError where the engine has no
    KV tiers, or for what is no name, and TierError where the tiers fail.
    """

    def __init__(self, thread: EngineThread, prepare: Prepare) -> None:
        self._thread, self._prepare = thread, prepare

    def save(self, name: str, prompt: Prompt, *, salt: str = "", tenant: str = "") -> Session:
        """Compute `prompt`, or find it, write its full pages to the tiers and pin them under `name`.

        A session of that name is replaced, but stays where nothing could be written. Raises what `LLM.generate` raises
        for the prompt, SessionError where it fills no page, and TierError where not one could be written.
        """
        owner = self._owner(tenant, name)
        request = self._prepare(prompt, SamplingParams(max_tokens=1, temperature=0), salt)
        size = self._thread.engine.limits.page_size
        pages = len(request.prompt) // size
        if not pages:
            raise SessionError(
                f"session {name!r}: the prompt has {len(request.prompt)} tokens, less than a page of {size}"
            )
        self._compute(request)
        ticket = self._thread.call(partial(_save, request, pages, owner))
        if not ticket.done.wait(_WAIT_S):
            raise TierError(f"session {name!r}: the KV tiers did not take it within {_WAIT_S:g} s")
        if not ticket.pages:
            why = ticket.error or "the KV tiers do not have them afterwards"
            raise TierError(f"session {name!r}: none of its {pages} pages could be saved: {why}")
        return self._session(name, ticket.pages)

    def list(self, *, tenant: str = "") -> list[Session]:
        """All there are, by name; in the tiers, whichever process saved them under this layout."""
        start = self._start(tenant)
        owners = self._offload().tier.owners()
        found = {owner.removeprefix(start): len(set(keys)) for owner, keys in owners.items() if owner.startswith(start)}
        # A tenant's name may go on behind that of another.
        return [self._session(name, pages) for name, pages in sorted(found.items()) if _NAME.fullmatch(name)]

    def delete(self, name: str, *, tenant: str = "") -> None:
        """Let go of what it keeps. Raises SessionNotFoundError."""
        owner = self._owner(tenant, name)
        tier = self._offload().tier
        if owner not in tier.owners():
            raise SessionNotFoundError(f"there is no session {name!r}")
        tier.unpin(owner)

    def _offload(self) -> KVOffload:
        offload = self._thread.engine.offload
        if offload is None:
            raise SessionError("there are no KV tiers that could keep a session: kv_tiers=() (--kv-tier)")
        return offload

    def _start(self, tenant: str) -> str:
        """What the names begin with under which the tiers pin a tenant's sessions."""
        return f"session/{self._offload().identity}/{tenant}/"

    def _owner(self, tenant: str, name: str) -> str:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise SessionError(f"name={show(name)} is not a session's name: 1 to 64 letters, digits, dots, _ and -")
        return self._start(tenant) + name

    def _session(self, name: str, pages: int) -> Session:
        layout = self._thread.engine.pool.layout
        return Session(name, pages * layout.page_size, pages, pages * layout.bytes_per_page)

    def _compute(self, request: RequestState) -> None:
        """Have the prompt in the prefix cache. Raises the request's error, EngineClosedError, EngineDeadError."""
        mail: SimpleQueue[Delivery] = SimpleQueue()
        self._thread.submit([request], [mail.put])
        while True:
            item = take(mail)
            if isinstance(item, PrefillProgress):
                continue
            error: Any = item.error if isinstance(item, EngineEvent) else item
            if error is not None:
                raise error
            if isinstance(item, EngineEvent) and item.completion is not None:
                return


def _save(request: RequestState, pages: int, owner: str, engine: Engine) -> SaveTicket:
    assert engine.offload is not None
    return engine.offload.saver.save(request.tokens(request.samples[0]), pages, request.salt, owner)
