"""The house stands: imports point down, the towers stay apart, the control plane is plain."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from minivllm.course import house

ROOT = Path(__file__).parent.parent
CONTROL = ("base", "config", "request", "trace", "cache.", "sched.")


def test_no_import_breaks_the_rule():
    assert house.violations() == []


def test_every_room_of_the_drawing_has_a_file():
    assert set(house.rooms()) == set(house.modules())


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        ("cache/pool.py", "from minivllm.engine import llm", "(layer 6)"),
        ("cache/block.py", "from minivllm.cache.pool import BlockPool", "cache.pool (layer 2)"),
        ("sched/scheduler.py", "import minivllm.kernels.ops", "(control) imports kernels.ops"),
        ("models/decoder.py", "from minivllm.sched import plan", "(data) imports sched.plan"),
        ("runner/batch.py", "def f():\n    from minivllm.base import cdiv", "inside a function"),
        ("engine/engine.py", "from minivllm import LLM", "front door"),
        ("cache/new.py", "", "cache.new has no room"),
    ],
)
def test_each_breach_of_the_rule_is_found(tmp_path, file, text, sentence):
    """A package with one wrong import, whose targets exist: exactly that is reported."""
    for name in house.rooms():
        path = tmp_path / (name.replace(".", "/") + ".py")
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (tmp_path / file).write_text(text + "\n")
    found = house.violations(tmp_path)
    assert found and all(sentence in line for line in found)


def test_the_control_plane_is_plain_python():
    for name, imported in house.outside_imports().items():
        if name.startswith(CONTROL) or name in ("runner.scripted", "runner.simulated"):
            assert imported <= sys.stdlib_module_names, f"{name} imports {imported}"


def test_the_data_plane_has_never_seen_a_request():
    data = {name for name, room in house.rooms().items() if room.tower == "data"}
    assert [e for e in house.edges() if e.source in data and e.target == "request"] == []


def _modules_after(code: str) -> set[str]:
    """Names of all modules loaded in a fresh interpreter that ran `code`."""
    code += "\nimport sys; sys.stderr.write(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize(
    "code",
    [
        "import minivllm; minivllm.SamplingParams, minivllm.EngineConfig",
        "import minivllm.sched.scheduler, minivllm.runner.simulated, minivllm.runner.scripted",
        "from minivllm.cli import main\ntry: main(['generate', '--help'])\nexcept SystemExit: pass",
    ],
    ids=["package", "control plane", "help"],
)
def test_light_things_import_nothing_heavy(code):
    heavy = {"torch", "transformers", "triton", "numpy", "rich", "huggingface_hub", "tokenizers"}
    assert _modules_after(code) & heavy == set()


def test_importing_the_engine_leaves_transformers_and_triton_alone():
    assert _modules_after("from minivllm import LLM") & {"transformers", "triton"} == set()


def test_code_lines_are_those_with_code():
    source = '"""Doc.\n\nMore."""\n\n# comment\nx = """two\nlines"""\n\ndef f():\n    "doc"\n'
    source += "    return (\n        x  # why\n    )\n"
    assert house.code_lines(source) == 2 + 1 + 3


def test_the_line_table_adds_up(capsys):
    house.main([])
    lines = capsys.readouterr().out.splitlines()
    counts = [int(line.split()[-1]) for line in lines]
    assert counts[-1] == sum(counts[:-2])
    assert len(lines) == len(house.modules()) + 2


def test_the_map_has_one_sentence_for_each_file():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = re.findall(r"^\| (\d+) \| `(\S+)\.py` \| \S", text, re.MULTILINE)
    rooms = {name: room.layer for name, room in house.rooms().items() if name != "__main__"}
    assert {name.replace("/", "."): int(layer) for layer, name in drawn} == rooms
    assert len(drawn) == len(rooms), "a file is named twice"
