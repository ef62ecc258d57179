import pytest

from support.replies import cuts
from tamis.server.reasoning import MARKERS, Markers, ReasoningSplitter, opens_reasoning, reasoning_markers

M3, COMMON = MARKERS


def split(pieces: list[str], markers: Markers | None, inside: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(markers, inside=inside)
    told = [*(splitter.feed(piece) for piece in pieces), splitter.finish()]
    assert splitter.finish() == ("", "")
    return "".join(part.reasoning for part in told), "".join(part.content for part in told)


@pytest.mark.parametrize("markers", MARKERS, ids=["m3", "common"])
@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("BEGIN\nLet me see. 1 < 2 \n\nEND\n\nTwo.", False, "Let me see. 1 < 2", "Two."),
        (" \nBEGINa ENDb", False, "a", "b"),
        ("hm </thin </ think> END so", True, "hm </thin </ think>", "so"),
        ("BEGIN hm\n END so ", True, "hm", "so "),
        ("BEGINEND\n\nHi", False, "", "Hi"),
        ("no thinking BEGINaEND b", False, "", "no thinking BEGINaEND b"),
        ("  indented", False, "", "  indented"),
        ("BEGINnever ends </mm:thin </thin ", False, "never ends </mm:thin </thin", ""),
        ("never ends EN", True, "never ends EN", ""),
        ("BEGINa END \n", False, "a", ""),
        ("BEGINaENDb END c BEGINdEND", False, "a", "b END c BEGINdEND"),
        ("<", False, "", "<"),
        ("<", True, "<", ""),
        (" ", False, "", " "),
        ("", False, "", ""),
        ("BEGI", False, "", "BEGI"),
        ("BEGIN", False, "", ""),
        ("BEGIN Gedanken \u00fcber \U0001f600 END\u00e9", False, "Gedanken \u00fcber \U0001f600", "\u00e9"),
    ],
)  # fmt: skip
def test_a_reply_is_divided_the_same_however_it_is_cut(
    markers: Markers, text: str, inside: bool, reasoning: str, content: str
) -> None:
    def spell(text: str) -> str:
        return text.replace("BEGIN", markers.begin).replace("END", markers.end)

    for pieces in cuts(spell(text)):
        assert split(pieces, markers, inside) == (spell(reasoning), spell(content)), pieces


def test_nothing_is_held_back_longer_than_a_marker_may_begin() -> None:
    splitter = ReasoningSplitter(COMMON)
    assert splitter.feed("<think>I wonder ") == ("I wonder", "")
    assert splitter.feed("a</th") == (" a", "")
    assert splitter.feed("ere") == ("</there", "")
    assert splitter.feed(" </think> Yes") == ("", "Yes")
    assert splitter.feed(" \n") == ("", " \n")


def test_a_model_without_markers_only_answers() -> None:
    text = "<think>a</think> b"
    assert split([text], None, False) == ("", text)


def test_which_markers_a_template_writes() -> None:
    assert reasoning_markers("x{{ '</mm:think>' }}") == M3
    assert reasoning_markers("{% if '</think>' in content %}") == COMMON
    assert reasoning_markers("{{ messages }}") is None
    assert reasoning_markers(None) is None
    assert opens_reasoning("<|im_start|>assistant\n<think>\n", COMMON)
    assert not opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n", COMMON)
    assert not opens_reasoning("<think>", None)
