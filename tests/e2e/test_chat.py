"""`tamis chat` in a terminal, with the built-in model."""

from support.terminal import CTRL_C, CTRL_D, terminal

CHAT = ["-m", "tamis.cli", "chat", "--temperature", "0", "--kv-budget", "64MiB", "--threads", "1"]


def test_ctrl_c_stops_the_reply_and_not_the_program() -> None:
    with terminal(*CHAT) as screen:
        screen.wait_for("/help shows the commands.")
        screen.wait_for("> ")
        screen.type("My name is Ada. Tell me a long story about a drum sieve.\n")
        screen.wait_for("sieve.\r\n")
        screen.wait_for(" ")  # the reply has begun
        screen.type(CTRL_C)
        assert "Traceback" not in screen.wait_for("stopped)")
        screen.wait_for("> ")
        screen.press_until(CTRL_C, "(Ctrl-D or /exit leaves)")
        screen.wait_for("> ")
        screen.type("/clear\n")
        screen.wait_for("(forgotten)")
        screen.wait_for("> ")
        screen.type("What is the capital of France? Answer in one word.\n")
        screen.wait_for("Paris")
        screen.wait_for("tokens/s)")
        screen.wait_for("> ")
        screen.type(CTRL_D)
        assert screen.end() == 0
    assert "Traceback" not in screen.screen
