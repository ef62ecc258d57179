"""`/v1/kv/sessions`: prompts whose pages are kept in the KV tiers under a name."""

from starlette.requests import Request

from tamis.engine.front import Prompt
from tamis.engine.sessions import Session
from tamis.errors import SessionNotFoundError
from tamis.server.chat_plan import encode_chat
from tamis.server.context import Context
from tamis.server.replies import SessionDeletedReply, SessionReply, SessionsReply
from tamis.server.schema import SessionRequest, TokenizeRequest
from tamis.server.stream import aside
from tamis.units import show


async def save(context: Context, name: str, body: SessionRequest, request: Request) -> SessionReply:
    """Keep a prompt, or a request that was answered lately. Raises what `Sessions.save` raises."""
    context.check_model(body.model)
    tenant: str = request.scope["state"]["tenant"]

    def work() -> Session:
        prompt, salt = _prompt(context, body, request)
        return context.engine.sessions.save(name, prompt, salt=salt, tenant=tenant)

    return _reply(await aside(work))


async def sessions(context: Context, request: Request) -> SessionsReply:
    """All sessions of this API key. Raises what `Sessions.list` raises."""
    tenant: str = request.scope["state"]["tenant"]
    found = await aside(lambda: context.engine.sessions.list(tenant=tenant))
    return SessionsReply(object="list", data=[_reply(session) for session in found])


async def delete(context: Context, name: str, request: Request) -> SessionDeletedReply:
    """Let go of one. Raises what `Sessions.delete` raises."""
    tenant: str = request.scope["state"]["tenant"]
    await aside(lambda: context.engine.sessions.delete(name, tenant=tenant))
    return SessionDeletedReply(name=name, deleted=True)


def _prompt(context: Context, body: SessionRequest, request: Request) -> tuple[Prompt, str]:
    """What is to be kept, and the salt of its pages."""
    salt = context.salt(request, body.cache_salt)
    if body.request_id is not None:
        found = context.recent.find(body.request_id, request.scope["state"]["tenant"])
        if found is None:
            raise SessionNotFoundError(f"request_id={show(body.request_id)} is none of the last requests'")
        tokens, salt = found
        # One that filled the context: a prompt leaves room for a token.
        return tokens[: context.engine.limits.context_length - 1], salt
    if body.prompt is not None:
        return body.prompt, salt
    chat = TokenizeRequest(
        messages=body.messages, tools=body.tools, add_generation_prompt=body.add_generation_prompt,
        chat_template_kwargs=body.chat_template_kwargs,
    )  # fmt: skip
    return encode_chat(context, chat), salt


def _reply(session: Session) -> SessionReply:
    return SessionReply(name=session.name, tokens=session.tokens, pages=session.pages, bytes=session.bytes)
