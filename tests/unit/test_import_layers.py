import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import tamis

ROOT = Path(tamis.__file__).parent
LEVELS = {"cli": 6, "": 5, "server": 5, "retrofit": 5, "integrations": 5, "engine": 4, "models": 3, "kv": 2,
          "kernels": 1, "request": 0, "config": 0, "metrics": 0, "errors": 0, "progress": 0, "units": 0,
          "cache": 0, "names": 0}  # fmt: skip
"""The layers of CONTRIBUTING.md, top to bottom. "" is the package's own file with the public names."""
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def part(module: str) -> str:
    """ "tamis.kv.pool" -> "kv"; "tamis" -> "" """
    return module.split(".")[1] if "." in module else ""


def imported(source: str, place: Path) -> set[str]:
    """tamis modules that the file at `place`, under the package, imports: anywhere in it, for type checking too."""
    package = ["tamis", *place.parts[:-1]]
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from tamis import kv` imports a module.
            found |= {f"tamis.{alias.name}" for alias in node.names} if module == "tamis" else {module}
    return {name for name in found if name == "tamis" or name.startswith("tamis.")}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_go_only_down(path: Path) -> None:
    own = path.parts[0].removesuffix(".py")
    assert own in LEVELS, f"{own} has no place in the order of layers"
    for module in imported((ROOT / path).read_text(encoding="utf-8"), path):
        other = part(module)
        assert other in LEVELS, f"{module} is not a layer: import names from where they are defined"
        below = LEVELS[other] < LEVELS[own] or (LEVELS[other] == 0 == LEVELS[own])
        assert other == own or below, f"{path} imports {module}, which is not below it"


def test_the_reader_of_imports_sees_every_form() -> None:
    source = (
        "import tamis.cli.app\nfrom tamis import engine\nfrom ..models import x\nfrom .pool import y\n"
        "from .. import kernels\nimport torch\ndef f():\n    from tamis.server import z\n"
    )
    assert imported(source, Path("kv/example.py")) == {
        "tamis.cli.app", "tamis.engine", "tamis.models", "tamis.kv.pool", "tamis.kernels", "tamis.server"}  # fmt: skip


@pytest.mark.parametrize(
    "steps",
    [
        {"import tamis.kernels": ("tamis.engine", "tamis.models", "tamis.kv", "numba"),
         "import tamis.kv": ("tamis.engine", "tamis.models", "numba")},
        {"import tamis": ("torch", "tamis.engine", "tamis.kv"),
         "tamis.SamplingParams(), tamis.TamisError, tamis.__version__": ("torch", "tamis.engine")},
    ],
    ids=["kernels, kv", "tamis"],
)  # fmt: skip
def test_an_import_loads_no_more_than_it_needs(steps: dict[str, tuple[str, ...]]) -> None:
    code = ["import sys"]
    for statement, absent in steps.items():
        code += [statement, f"print([name for name in {absent!r} if name in sys.modules])"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["[]"] * len(steps)


def modules() -> list[str]:
    return [
        "tamis",
        *(info.name for info in pkgutil.walk_packages([str(ROOT)], "tamis.") if "__main__" not in info.name),
    ]


@pytest.mark.parametrize("name", modules())
def test_every_public_name_exists(name: str) -> None:
    module = importlib.import_module(name)
    public = getattr(module, "__all__", [])
    assert len(set(public)) == len(public)
    for entry in public:
        assert getattr(module, entry, None) is not None, f"{name}.__all__ names {entry}, which does not exist"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'tamis' has no attribute 'nothing'"):
        tamis.nothing  # noqa: B018
    assert "LLM" in dir(tamis)
