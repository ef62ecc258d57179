"""`tamis chat`: a conversation in the terminal, with a model in this process."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tamis.cli import local
from tamis.cli.conversation import Conversation
from tamis.cli.options import (
    ChatTemperature,
    Debug,
    EngineKVDtype,
    KVBudget,
    MaxBatchTokens,
    MinP,
    Model,
    PageSize,
    Quant,
    Quiet,
    ReplyTokens,
    Seed,
    Stop,
    System,
    Threads,
    TopK,
    TopP,
    WeightDtype,
)
from tamis.cli.reply import Reply
from tamis.errors import RequestError, TokenizerError
from tamis.errors.hint import hint_for
from tamis.request import FinishReason, SamplingParams, TokenEvent

if TYPE_CHECKING:
    from tamis.engine.llm import LLM

PROMPT = "> "
HELP = (
    "/clear   forget what was said",
    "/exit    leave, as Ctrl-D does",
    "/help    show this",
    "Ctrl-C stops a reply; what was said of it is remembered. A line that ends in \\ goes on in the next one.",
)


def chat(
    model: Model = None,
    system: System = None,
    max_tokens: ReplyTokens = None,
    temperature: ChatTemperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
    stop: Stop = None,
    dtype: WeightDtype = "auto",
    kv_dtype: EngineKVDtype = "auto",
    page_size: PageSize = None,
    kv_budget: KVBudget = None,
    max_batch_tokens: MaxBatchTokens = 512,
    quant: Quant = "auto",
    threads: Threads = None,
    quiet: Quiet = False,
    _debug: Debug = False,
) -> None:
    """Talk with a model. Ctrl-C stops a reply, Ctrl-D leaves; where input is no terminal, each line is a message."""
    asked: dict[str, Any] = {
        "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed,
        "stop": tuple(stop or ()),
    }  # fmt: skip
    changes = {name: value for name, value in asked.items() if value is not None} | {"max_tokens": max_tokens}
    SamplingParams(**changes)  # refuse what is out of range before the model is loaded
    settings = {"dtype": dtype, "kv_dtype": kv_dtype, "page_size": page_size, "kv_budget": kv_budget,
                "max_batch_tokens": max_batch_tokens, "quant": quant, "threads": threads}  # fmt: skip
    with local.load(model, settings, quiet=quiet) as llm:
        if not llm.tokenizer.has_chat_template:
            raise TokenizerError("the model has no chat template; tamis generate --raw continues a text as it is")
        keyboard = _Keyboard()
        if not quiet:
            local.say(local.room(llm), *(["/help shows the commands."] if keyboard.is_terminal else []))
        _Chat(llm, llm.default_sampling(**changes), system, quiet=quiet).run(keyboard)


class _Keyboard:
    """Lines from a terminal, which can be edited and recalled, or from a file or a pipe."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if self.is_terminal:
            with contextlib.suppress(ImportError):  # not every Python has it; input() uses it where it is loaded
                import readline  # noqa: F401

    def message(self) -> str | None:
        """The next message, None at the end. Raises RequestError where it is not UTF-8 text, KeyboardInterrupt."""
        lines: list[str] = []
        while (line := self._line(PROMPT if not lines else "")) is not None:
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                break
        return "\n".join(lines) if lines else None

    def _line(self, prompt: str) -> str | None:
        try:
            if self.is_terminal:
                text = input(prompt)
                text.encode()  # bytes that are not UTF-8 may come as half surrogate pairs
                return text
            # As bytes, so that one bad line does not spoil the reader for the next.
            raw = sys.stdin.buffer.readline()
            return raw.decode().rstrip("\r\n") if raw else None
        except EOFError:
            print()
            return None
        except UnicodeError as error:
            raise RequestError(f"the message is not UTF-8 text: {error}") from error


class _Chat:
    """Reads messages and answers them until there are no more."""

    def __init__(self, llm: "LLM", sampling: SamplingParams, system: str | None, *, quiet: bool) -> None:
        self._llm, self._sampling, self._quiet = llm, sampling, quiet
        self._conversation = Conversation(llm, sampling, system)

    def run(self, keyboard: _Keyboard) -> None:
        """Answer until the end of input or /exit. A message that is refused is one line, and the next may be better."""
        going = True
        while going:
            try:
                going = self._next(keyboard)
            except RequestError as error:
                hint = hint_for(error)
                local.say(f"error: {error}", *([] if hint is None else [f"hint: {hint}"]))
            except KeyboardInterrupt:  # at the prompt, where there is no reply to stop
                local.say("", "(Ctrl-D or /exit leaves)")

    def _next(self, keyboard: _Keyboard) -> bool:
        """Read one message and do as it says; False: leave."""
        message = keyboard.message()
        command = None if message is None else message.strip()
        if command is None or command == "/exit":
            return False
        if command == "/help":
            local.say(*HELP)
        elif command == "/clear":
            self._conversation.clear()
            local.say("(forgotten)")
        elif command.startswith("/") and " " not in command and "\n" not in command:
            raise RequestError(f"there is no command {command}; /help shows them")
        elif command:
            assert message is not None
            self._answer(message)
        return True

    def _answer(self, message: str) -> None:
        ids, forgotten = self._conversation.prompt(message)
        events = self._llm.stream(ids, self._sampling)
        if forgotten:
            local.say(f"(the context is full: the oldest {forgotten} of the remembered turns are left out)")
        reply, started = Reply(prompt_tokens=len(ids)), time.perf_counter()
        times: list[float] = []
        reply.follow(_timed(events, times), show=local.write)
        if not reply.text.endswith("\n"):
            local.write("\n")
        stopped = reply.finish_reason is FinishReason.ABORT
        if reply.text or not stopped:
            self._conversation.add(message, reply.text, forgotten)
        if not self._quiet:
            local.say(self._figures(reply, started, times, stopped=stopped))

    def _figures(self, reply: Reply, started: float, times: list[float], *, stopped: bool) -> str:
        parts = [f"{reply.prompt_tokens:,} + {len(reply.token_ids):,} of {self._conversation.room:,} tokens"]
        if times:
            parts.append(f"{times[0] - started:.1f} s to the first")
        if len(times) > 2 and times[-1] > times[0]:
            parts.append(f"{(len(times) - 1) / (times[-1] - times[0]):,.1f} tokens/s")
        return f"({', '.join([*parts, *(['stopped'] if stopped else [])])})"


def _timed(events: Iterator[TokenEvent], times: list[float]) -> Iterator[TokenEvent]:
    """The same events; the moment of each token is added to `times`."""
    for event in events:
        if event.token_id is not None:
            times.append(time.perf_counter())
        yield event
