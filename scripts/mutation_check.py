"""Break ten invariants on purpose, one at a time: each must turn the suite red.

    python scripts/mutation_check.py [number ...]

A mutation replaces exact text in a temporary copy of the repository and runs the test files that
should notice. If the text is gone, the mutation fails loudly: mend it together with the code. The
same files run once without any mutation first, because red means nothing where green is not green.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Edit(NamedTuple):
    """One exact replacement; the old text must be there exactly once."""

    file: str
    old: str
    new: str


class Mutation(NamedTuple):
    """A fault, how to make it, and which test files must find it."""

    fault: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]


CONTROL = ("test_control_plane.py", "test_trace.py", "test_properties.py")
MUTATIONS = [
    Mutation(
        "free the head first",
        (
            Edit(
                "minivllm/cache/pool.py",
                "for block in reversed(blocks):",
                "for block in blocks:",
            ),
        ),
        CONTROL,
    ),
    Mutation(
        "drop the parent from the prefix key",
        (
            Edit(
                "minivllm/cache/prefix.py",
                "key = PrefixKey(parent, tuple(token_ids[start : start + block_size]), None, salt)",
                "key = PrefixKey(ROOT, tuple(token_ids[start : start + block_size]), None, salt)",
            ),
            Edit(
                "minivllm/cache/manager.py",
                "table.parent, tuple(tokens[i * size : (i + 1) * size]), None, request.salt",
                "ROOT, tuple(tokens[i * size : (i + 1) * size]), None, request.salt",
            ),
        ),
        CONTROL,
    ),
    Mutation(
        "off by one at a full block",
        (
            Edit(
                "minivllm/cache/manager.py",
                "num_full = min(request.num_computed_tokens, len(tokens)) // size",
                "num_full = min(request.num_computed_tokens + 1, len(tokens)) // size",
            ),
        ),
        CONTROL,
    ),
    Mutation(
        "do not recompute the last token",
        (
            Edit(
                "minivllm/cache/manager.py",
                "max_blocks = (len(request.token_ids) - 1) // self.block_size",
                "max_blocks = len(request.token_ids) // self.block_size",
            ),
        ),
        CONTROL,
    ),
    Mutation(
        "padding writes slot 0, and so does a request",
        (
            Edit(
                "minivllm/cache/pool.py",
                "for block in self.blocks[NULL_BLOCK + 1 :]:",
                "for block in self.blocks[NULL_BLOCK:]:",
            ),
        ),
        CONTROL,
    ),
    Mutation(
        "seed by batch row",
        (
            Edit(
                "minivllm/runner/sampler.py",
                "u = ops.uniform(seeds, positions)",
                "u = ops.uniform(rows, positions)",
            ),
        ),
        ("test_engine_cases.py", "test_sampler.py"),
    ),
    Mutation(
        "a fixed stop window",
        (
            Edit(
                "minivllm/engine/detokenizer.py",
                "num_certain = len(text) - max(stop.num_matched for stop in self._stops)",
                "num_certain = max(0, len(text) - max(len(s.string) - 1 for s in self._stops))",
            ),
        ),
        ("test_detokenizer.py",),
    ),
    Mutation(
        "top-p drops the crossing token",
        (
            Edit(
                "minivllm/kernels/reference.py",
                "crossing = (reached < aim).sum(-1, keepdim=True).clamp(max=size - 1)",
                "crossing = ((reached < aim).sum(-1, keepdim=True) - 1).clamp(0, size - 1)",
            ),
        ),
        ("test_sampler.py", "test_reference_ops.py"),
    ),
    Mutation(
        "the budget counts cached tokens",
        (
            Edit(
                "minivllm/sched/scheduler.py",
                "            kv.commit(request)\n            budget -= num_new\n",
                "            kv.commit(request)\n"
                "            budget = max(0, budget - num_cached - num_new)\n",
            ),
        ),
        CONTROL,
    ),
    Mutation(
        "K and V swapped in the cache write",
        (
            Edit(
                "minivllm/kernels/cpu.py",
                "k_cache.view(-1, head_dim).index_copy_(0, rows, k.reshape(",
                "k_cache.view(-1, head_dim).index_copy_(0, rows, v.reshape(",
            ),
            Edit(
                "minivllm/kernels/cpu.py",
                "v_cache.view(-1, head_dim).index_copy_(0, rows, v.reshape(",
                "v_cache.view(-1, head_dim).index_copy_(0, rows, k.reshape(",
            ),
        ),
        ("test_engine_cases.py", "test_decoder.py"),
    ),
]


def copy_repository(folder: Path) -> Path:
    """The working tree without what a test run needs not."""
    copy = folder / "copy"
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info")
    for name in ("minivllm", "tests", "scripts", "data"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def run_tests(copy: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """pytest's exit status and the first failing test (or what went wrong instead)."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=no", "-p",
               "no:cacheprovider", "-m", "not slow and not weights and not gpu",
               *(f"tests/{name}" for name in tests)]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    output = run.stdout + run.stderr
    first = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", output, re.MULTILINE)
    return run.returncode, first.group(1) if first else output.strip()[-200:]


def apply(copy: Path, mutation: Mutation) -> list[tuple[Path, str]]:
    """Make the edits; returns what to write back."""
    originals = []
    for edit in mutation.edits:
        path = copy / edit.file
        text = path.read_text(encoding="utf-8")
        if text.count(edit.old) != 1:
            raise SystemExit(
                f"mutation «{mutation.fault}»: the old text stands {text.count(edit.old)} times in "
                f"{edit.file}, not once; bring the mutation up to date:\n{edit.old}"
            )
        originals.append((path, text))
        path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")
    return originals


def main(chosen: list[int]) -> int:
    mutations = [(i, m) for i, m in enumerate(MUTATIONS, 1) if not chosen or i in chosen]
    with tempfile.TemporaryDirectory() as name:
        copy = copy_repository(Path(name))
        for _, mutation in mutations:  # before anything is run: is every old text still there?
            for path, text in reversed(apply(copy, mutation)):
                path.write_text(text, encoding="utf-8")
        every_test = tuple(sorted({test for _, m in mutations for test in m.tests}))
        status, first = run_tests(copy, every_test)
        print(f"   without a mutation: {'green' if status == 0 else f'red ({first})'}", flush=True)
        if status != 0:
            return 1
        survivors = 0
        for number, mutation in mutations:
            start = time.perf_counter()
            originals = apply(copy, mutation)
            status, first = run_tests(copy, mutation.tests)
            for path, text in reversed(originals):
                path.write_text(text, encoding="utf-8")
            red = status == 1  # 2 and more: pytest itself failed
            survivors += not red
            colour = "red  " if red else "GREEN" if status == 0 else f"({status})"
            seconds = time.perf_counter() - start
            print(f"{number:2} {colour} {mutation.fault:45} {first} ({seconds:.0f} s)", flush=True)
    print(f"{len(mutations) - survivors} of {len(mutations)} mutations turn the suite red")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main([int(argument) for argument in sys.argv[1:]]))
