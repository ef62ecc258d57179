"""API keys: who may ask, and whose cached prompts are whose."""

import hashlib
import hmac
from collections.abc import Iterable

from tamis.server.errors import ApiError


class ApiKeys:
    """The keys a server takes; none: everybody is answered."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def check(self, authorization: bytes | None) -> str:
        """The tenant that an Authorization header names, "" where no keys are set. Raises ApiError (401)."""
        if not self._digests:
            return ""
        scheme, _, key = (authorization or b"").strip().partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            raise _refused("this server needs an API key: send it as 'Authorization: Bearer KEY'")
        digest = _digest(key.strip())
        if not any(hmac.compare_digest(digest, known) for known in self._digests):
            raise _refused("the API key is not one of this server's")
        return digest.hex()


def cache_salt(tenant: str, asked: str | None) -> str:
    """The salt of a request's cached pages: requests share pages only with the same key and the same `cache_salt`."""
    if not tenant and not asked:
        return ""
    return hashlib.sha256(f"{tenant}:{asked or ''}".encode()).hexdigest()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _refused(message: str) -> ApiError:
    headers = {"WWW-Authenticate": "Bearer"}
    return ApiError(401, "invalid_api_key", message, kind="authentication_error", headers=headers)
