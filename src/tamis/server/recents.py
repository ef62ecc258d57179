"""The last requests, by the id that their answers carry, so that a session can be made of one."""

from collections import OrderedDict

from tamis.engine.async_engine import RequestHandle

_MOST = 64
"""Requests."""
_MOST_TOKENS = 1 << 20
"""Of their prompts together; the last request is kept whatever it has."""


class RecentRequests:
    """Requests of one prompt, each for its tenant only."""

    def __init__(self) -> None:
        self._handles: OrderedDict[tuple[str, str], tuple[RequestHandle, str]] = OrderedDict()

    def add(self, request_id: str, tenant: str, salt: str, handle: RequestHandle) -> None:
        """Remember one; of two with the same id the later."""
        self._handles[tenant, request_id] = (handle, salt)
        self._handles.move_to_end((tenant, request_id))
        tokens = sum(len(each.prompt_token_ids) for each, _ in self._handles.values())
        while len(self._handles) > 1 and (len(self._handles) > _MOST or tokens > _MOST_TOKENS):
            _, (oldest, _) = self._handles.popitem(last=False)
            tokens -= len(oldest.prompt_token_ids)

    def find(self, request_id: str, tenant: str) -> tuple[list[int], str] | None:
        """Tokens of prompt and reply, and the salt of its pages; None where it is not known any more."""
        found = self._handles.get((tenant, request_id))
        return None if found is None else (found[0].token_ids, found[1])
