"""The Containerfile fits the tree and the command it starts."""

import json
import re
from pathlib import Path

from support.cli import invoke

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "Containerfile").read_text().replace("\\\n", " ").splitlines()


def arguments(instruction: str) -> list[str]:
    """What stands behind each `instruction`."""
    return [line.removeprefix(instruction).strip() for line in LINES if line.startswith(f"{instruction} ")]


def test_what_is_copied_is_there_and_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {name for line in arguments("COPY") if "--from" not in line for name in line.split()[:-1]}
    assert copied == kept
    assert not [name for name in copied if not (ROOT / name).exists()]


def test_the_command_has_these_options_and_listens_where_health_is_asked() -> None:
    (entry,), (command,) = arguments("ENTRYPOINT"), arguments("CMD")
    assert json.loads(entry) == ["tamis"]
    name, *options = json.loads(command)
    usage = invoke(name, "--help")
    assert usage.code == 0
    assert all(option in usage.out for option in options if option.startswith("--"))
    (port,) = arguments("EXPOSE")
    assert re.search(rf"--port .*\[default: {port}\]", re.sub(r"\s+", " ", usage.out))
    assert f":{port}/health" in arguments("HEALTHCHECK")[0]
