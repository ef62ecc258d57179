"""The HTTP server: OpenAI's API over an AsyncEngine. Names are loaded when they are first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tamis.server.app import create_app
    from tamis.server.config import ServerConfig
    from tamis.server.serve import serve

__all__ = ["ServerConfig", "create_app", "serve"]

_MODULES = {"ServerConfig": "config", "create_app": "app", "serve": "serve"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
