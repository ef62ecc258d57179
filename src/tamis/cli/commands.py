"""Commands whose help shows flags without a value: typer gives them the name of their type."""

from typing import Any

from typer.core import TyperCommand, TyperGroup


class _BareFlags:
    """Comes before a kind of command."""

    def get_params(self, ctx: Any) -> Any:
        """The command's parameters, --help among them."""
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(_BareFlags, TyperCommand):
    """A command."""


class Group(_BareFlags, TyperGroup):
    """A command with commands of its own."""
