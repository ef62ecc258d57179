"""The built wheel, installed by itself outside of the tree."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str, cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dist = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", str(dist), str(ROOT), cwd=dist)
    (built,) = dist.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    quiet = ("--disable-pip-version-check", "--quiet")
    run("-m", "pip", "install", *quiet, "--no-deps", "--no-index", "--target", str(target), str(wheel), cwd=target)
    return target


def test_the_wheel_holds_the_package_and_its_data_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"tamis/__init__.py", "tamis/py.typed", "tamis/models/configs/minimax-m3.json"} <= set(names)
    version = wheel.name.removesuffix("-py3-none-any.whl")
    assert {name.split("/")[0] for name in names} == {"tamis", f"{version}.dist-info"}
    source = ROOT / "src"
    files = (path for path in (source / "tamis").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert {str(path.relative_to(source)) for path in files} == {name for name in names if name.startswith("tamis/")}


def test_the_installed_package_runs_outside_of_the_tree(installed: Path, tmp_path: Path) -> None:
    where = run("-c", "import tamis; print(tamis.__file__)", cwd=tmp_path, PYTHONPATH=str(installed)).strip()
    assert Path(where).is_relative_to(installed)
    script = "import sys, tamis.cli; assert 'torch' not in sys.modules; sys.exit(tamis.cli.main())"
    assert run("-c", script, "--version", cwd=tmp_path, PYTHONPATH=str(installed)).startswith("tamis 0.")
    plan = run("-m", "tamis.cli", "plan", "minimax-m3", "--json", cwd=tmp_path, PYTHONPATH=str(installed))
    assert json.loads(plan)["bytes_per_token"]["total"] == 137_472


def test_the_wheel_installs_a_tamis_command(installed: Path, tmp_path: Path) -> None:
    (command,) = (installed / "bin").glob("tamis*")
    purelib = sysconfig.get_path("purelib")
    result = subprocess.run(
        [command, "--version"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{installed}{os.pathsep}{purelib}"},
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    assert result.stdout.startswith("tamis 0.")
