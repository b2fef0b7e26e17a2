"""What is installed: the same requirements everywhere, and a wheel that holds all it needs."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_requirements_repeat_the_project_word_for_word():
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    required = [line.replace('"', "'") for line in lines if line and not line.startswith("#")]
    assert required == PROJECT["dependencies"]


def test_torch_and_triton_are_bounded_on_both_sides():
    """An unbounded torch fetches a build that nobody tried; triton must match it."""
    bounded = [d for d in PROJECT["dependencies"] if re.match(r"(torch|triton)>=[\d.]+,<[\d.]+", d)]
    assert len(bounded) == 2


def test_the_conda_file_leaves_everything_but_python_to_pip():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    assert environment["name"] == "minivllm"
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    python, pip, from_pip = environment["dependencies"]
    assert re.fullmatch(r"python=3\.1[12]", python) and pip == "pip"
    assert from_pip == {"pip": ["-r requirements.txt"]}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy without network and unpacked into an empty folder."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ("minivllm", "tests", "data"):  # the last two must stay out
        shutil.copytree(ROOT / folder, source / folder, ignore=ignore)
    build = "from setuptools.build_meta import build_wheel; build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = source.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def test_the_wheel_holds_the_package_and_nothing_else(installed: Path):
    there = {p.relative_to(installed / "minivllm") for p in (installed / "minivllm").rglob("*.*")}
    files = [p for p in (ROOT / "minivllm").rglob("*.*") if "__pycache__" not in p.parts]
    assert there == {p.relative_to(ROOT / "minivllm") for p in files}
    (info,) = installed.glob("*.dist-info")
    assert {p.name for p in installed.iterdir()} == {"minivllm", info.name}
    assert "minivllm = minivllm.cli:main" in (info / "entry_points.txt").read_text()
    assert list(info.rglob("LICENSE"))


def test_the_wheel_runs_from_an_empty_folder(installed: Path, tmp_path: Path):
    """From there and not from this checkout: code, command line and the demo's data."""
    code = "import minivllm, sys; from minivllm.cli import main; from minivllm.demo import *; "
    code += "print(minivllm.__file__, len(load_prompts())); sys.exit(main(['--version']))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(installed)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == [str(installed / "minivllm" / "__init__.py"), "10"]
    assert done.stdout.endswith(f"minivllm {PROJECT['version']}\n")
