"""Tool calls in a reply: which way a model writes them, and how to read and to demand them."""

from tamis.engine.tool_prompt import ToolStyle, tool_style
from tamis.server.call_parser import Delta, Tool, ToolCallParser
from tamis.server.hermes_calls import HermesCalls
from tamis.server.m3_calls import M3Calls

__all__ = ["Delta", "Tool", "ToolCallParser", "choose_parser"]


def choose_parser(template: str | None) -> type[ToolCallParser]:
    """The parser for a model with this chat template: MiniMax-M3's, else that of the Hermes format, which models that
    know no tools, or another format, are asked to write (engine/tool_prompt.py)."""
    return M3Calls if tool_style(template) is ToolStyle.M3 else HermesCalls
