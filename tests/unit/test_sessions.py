import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from support.engines import greedy, make_engine
from support.offload import IMPATIENT, FaultyTier, Gate
from support.serving import eventually
from tamis.engine.llm import LLM
from tamis.errors import EmptyPromptError, SessionError, SessionNotFoundError, TierError
from tamis.kv.tiers.base import Blob, Key
from tamis.kv.tiers.disk import DiskTier
from tamis.kv.tiers.host import HostTier
from tamis.kv.tiers.stack import TierStack

PROMPT = [3 + place % 40 for place in range(41)]


@pytest.fixture
def tier() -> FaultyTier:
    return FaultyTier(HostTier(30_000))


@pytest.fixture
def llm(tier: FaultyTier) -> Iterator[LLM]:
    with LLM.from_engine(make_engine(tiers=tier)) as llm:
        yield llm


def cached(llm: LLM, prompt: list[int]) -> int:
    return llm.generate([prompt], greedy(2))[0].usage.cached_tokens


def test_a_prompt_is_kept_listed_and_let_go(llm: LLM, tier: FaultyTier) -> None:
    session = llm.sessions.save("doc", PROMPT)
    assert (session.name, session.tokens, session.pages) == ("doc", 40, 10)
    assert session.bytes == 10 * llm.layout.bytes_per_page
    assert llm.sessions.list() == [session]
    assert [entry.pinned for entry in tier.scan()] == [True] * 10
    llm.sessions.delete("doc")
    assert llm.sessions.list() == []
    assert not any(entry.pinned for entry in tier.scan())
    with pytest.raises(SessionNotFoundError, match="there is no session 'doc'"):
        llm.sessions.delete("doc")


def test_what_is_kept_outlives_what_comes_after_it_and_the_engine(llm: LLM, tier: FaultyTier) -> None:
    llm.sessions.save("doc", PROMPT)
    for seed in range(20):
        llm.generate([[4 + seed] * 40], greedy(1))
    llm.close()
    with LLM.from_engine(make_engine(tiers=tier)) as again:
        assert [session.name for session in again.sessions.list()] == ["doc"]
        assert cached(again, PROMPT) == 40


def test_names_of_tenants_are_their_own(llm: LLM) -> None:
    llm.sessions.save("doc", PROMPT, tenant="a", salt="a")
    llm.sessions.save("doc", PROMPT[:20], tenant="b", salt="b")
    assert [session.tokens for session in llm.sessions.list(tenant="a")] == [40]
    assert llm.sessions.list() == []
    with pytest.raises(SessionNotFoundError):
        llm.sessions.delete("doc")
    llm.sessions.delete("doc", tenant="a")
    assert [session.tokens for session in llm.sessions.list(tenant="b")] == [20]


def test_a_session_of_another_model_is_not_ours(llm: LLM, tier: FaultyTier) -> None:
    llm.sessions.save("doc", PROMPT)
    with LLM.from_engine(make_engine(tiers=tier, page_size=2)) as other:
        assert other.sessions.list() == []


def test_a_second_save_replaces_the_first(llm: LLM, tier: FaultyTier) -> None:
    llm.sessions.save("doc", PROMPT)
    llm.sessions.save("doc", [9] * 9)
    assert [session.tokens for session in llm.sessions.list()] == [8]
    assert sum(entry.pinned for entry in tier.scan()) == 2


def test_what_was_computed_before_is_saved_as_well(llm: LLM, tier: FaultyTier) -> None:
    """Also pages that a tier has lost since they were written."""
    llm.generate([PROMPT], greedy(2))
    llm.sessions.save("other", [9] * 9)  # what was computed has been written by then
    tier.delete(list(tier.keys))
    assert llm.sessions.save("doc", PROMPT).pages == 10
    assert len(tier.keys) >= 10


def test_names_of_a_tenant_that_goes_on_behind_another_are_not_shown_to_it(llm: LLM) -> None:
    llm.sessions.save("doc", PROMPT, tenant="/b")
    llm.sessions.save("doc", PROMPT, tenant="a/b")
    assert llm.sessions.list(tenant="") == llm.sessions.list(tenant="a") == []
    assert [session.name for session in llm.sessions.list(tenant="a/b")] == ["doc"]


def test_a_save_that_fails_leaves_the_session_that_was_there(llm: LLM, tier: FaultyTier) -> None:
    llm.sessions.save("doc", PROMPT)
    kept = llm.sessions.list()

    def fail() -> None:
        raise TierError("the disk is full")

    for verb in ("on_write", "on_pin"):
        setattr(tier, verb, fail)
        with pytest.raises(TierError, match="the disk is full"):
            llm.sessions.save("doc", [9 + len(verb)] * 9)
        assert llm.sessions.list() == kept
        setattr(tier, verb, lambda: None)
    assert all(entry.pinned for entry in tier.scan() if entry.key in set(*tier.owners().values()))


def test_one_tier_of_two_is_enough_to_save_and_the_lasting_one_must_be_it(tmp_path: Path) -> None:
    """A session survives a restart, or nobody is told that it was saved."""

    class Broken(HostTier):
        def write(self, items: Sequence[tuple[Key, Blob]]) -> None:
            raise TierError("it is down")

        def pin(self, keys: Sequence[Key], owner: str, *, replace: bool = False) -> None:
            raise TierError("it is down")

        def unpin(self, owner: str) -> None:
            raise TierError("it is down")

    disk = DiskTier(tmp_path, 1 << 20)
    with LLM.from_engine(make_engine(tiers=TierStack([FaultyTier(Broken(30_000)), disk]))) as llm:
        assert llm.sessions.save("doc", PROMPT).pages == 10
        assert llm.sessions.save("doc", PROMPT[:20]).pages == 5
        assert [session.tokens for session in llm.sessions.list()] == [20]
    with LLM.from_engine(make_engine(tiers=TierStack([HostTier(30_000), FaultyTier(Broken(30_000))]))) as llm:
        with pytest.raises(TierError, match="session 'doc': none of its 10 pages could be saved"):
            llm.sessions.save("doc", PROMPT)
        assert llm.sessions.list() == []


def test_sessions_saved_and_deleted_at_once_are_there_or_not(llm: LLM, tier: FaultyTier) -> None:
    """The same name by several, others beside it: no pin is lost, none is left over."""
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(6):
                llm.sessions.save(f"own{number}", [3 + number] * 20)
                llm.sessions.save("shared", PROMPT[: 12 + 4 * (turn % 3)])
                if turn % 2:
                    with contextlib.suppress(SessionNotFoundError):
                        llm.sessions.delete("shared")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert {f"own{number}" for number in range(4)} <= {session.name for session in llm.sessions.list()}


@pytest.mark.parametrize(
    "name", ["", "a/b", "..x/", "x" * 65, "a b", 5, None, ".", "..", "é", "a\n", "x" * 10_000, b"a", "a\0b"]
)
def test_a_name_is_a_name(llm: LLM, name: str) -> None:
    with pytest.raises(SessionError, match="is not a session's name"):
        llm.sessions.save(name, PROMPT)


def test_what_cannot_be_kept_is_said(llm: LLM, tier: FaultyTier) -> None:
    with pytest.raises(SessionError, match="session 'doc': the prompt has 3 tokens, less than a page of 4"):
        llm.sessions.save("doc", [3, 4, 5])
    with pytest.raises(EmptyPromptError):
        llm.sessions.save("doc", [])

    def fail() -> None:
        raise TierError("the disk is full")

    tier.on_write = fail
    with pytest.raises(TierError, match="session 'doc': none of its 10 pages could be saved: the disk is full"):
        llm.sessions.save("doc", PROMPT)
    assert llm.sessions.list() == []


def test_whoever_waits_for_a_session_is_told_when_the_engine_is_closed(tier: FaultyTier) -> None:
    gate = Gate()
    tier.on_write = gate
    engine = make_engine(tiers=tier, offload=IMPATIENT)
    assert engine.offload is not None
    saver, llm = engine.offload.saver, LLM.from_engine(engine)
    told: list[BaseException] = []

    def save() -> None:
        try:
            llm.sessions.save("doc", PROMPT)
        except TierError as error:
            told.append(error)

    first = threading.Thread(target=lambda: llm.generate([[9] * 30], greedy(1)))
    first.start()
    assert gate.reached.wait(20)
    waiting = threading.Thread(target=save)
    waiting.start()
    eventually(lambda: any(path.ticket is not None for path in list(saver._paths)))
    llm.close()
    gate.open.set()
    waiting.join(20)
    first.join(20)
    assert "none of its 10 pages could be saved: the engine was closed" in str(told[0])


def test_without_tiers_there_are_no_sessions() -> None:
    with LLM.from_engine(make_engine()) as llm, pytest.raises(SessionError, match="there are no KV tiers"):
        llm.sessions.list()
