"""The house that this package is: who may import whom, and how long each file is.

Read from the sources with `ast`, so nothing has to be imported. `tests/test_architecture.py` holds
the rule; `python -m minivllm.course.house` prints the line table, `--edges` what imports what.
"""

import argparse
import ast
import io
import tokenize
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parent.parent
SERVING_CORE = range(8)  # the layers without which no request is answered

# Layer, tower, files in reading order. A file imports lower layers, or files before it on its line.
# The two towers never import each other: they meet in the runner. This drawing is the rule.
HOUSE = """
 0  -        base gpu config
 1  -        request trace
 2  control  cache.block cache.prefix cache.pool cache.manager
 3  control  sched.plan sched.scheduler
 2  data     kernels.batch kernels.reference kernels.cpu kernels.attention kernels.cascade \
             kernels.fused kernels.sampling kernels.matvec kernels.ops
 3  data     layers.linear layers.embedding layers.norm_rope layers.attention
 4  data     models.checkpoint models.gguf models.hub models.chat_template models.tokenizer \
             models.weights models.model_config models.decoder models.latency
 5  bridge   runner.scripted runner.simulated runner.memory runner.batch runner.sampler \
             runner.graphs runner.runner runner.loader runner.tiny
 6  bridge   engine.detokenizer engine.engine engine.llm
 8  top      bench.workload bench.presets bench.roofline bench.kernels bench.engines bench.fresh \
             bench.open_loop bench.record bench.plot bench.bench
 9  top      course.house doctor watch demo
10  top      cli __main__
"""
# Who may import within a function, and why. The loaders of kernels: some machines lack triton. The
# command line: help should not wait for torch. The doctor: torch may be what is broken.
MAY_DEFER = {"kernels.ops", "models.latency", "cli", "doctor"}


class Room(NamedTuple):
    """Where a file lives."""

    layer: int
    tower: str
    line: int  # of the drawing
    place: int  # within the line


class Edge(NamedTuple):
    """One file imports another; names without the leading `minivllm.`, "" is the package itself."""

    source: str
    target: str
    deferred: bool  # inside a function


def rooms() -> dict[str, Room]:
    """The drawing as a table: file -> where it lives."""
    table: dict[str, Room] = {}
    for line, text in enumerate(HOUSE.strip().splitlines()):
        layer, tower, *names = text.split()
        table |= {name: Room(int(layer), tower, line, i) for i, name in enumerate(names)}
    return table


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Every source file but the `__init__.py`s: name -> path."""
    paths = sorted(path for path in package.rglob("*.py") if path.name != "__init__.py")
    return {".".join(path.relative_to(package).with_suffix("").parts): path for path in paths}


def _imports(path: Path) -> list[tuple[str, bool]]:
    """Every imported dotted name in a file, and whether a function does it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, functions) for n in ast.walk(f)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in inside) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(f"{node.module}.{a.name}", id(node) in inside) for a in node.names]
    return found


def edges(package: Path = PACKAGE) -> list[Edge]:
    """Who imports whom within the package."""
    known, result = modules(package), set()
    for source, path in known.items():
        for name, deferred in _imports(path):
            if name == "minivllm" or name.startswith("minivllm."):
                target = name.removeprefix("minivllm").removeprefix(".")
                while target and target not in known:  # drop the imported name, keep the file
                    target = target.rpartition(".")[0]
                result.add(Edge(source, target, deferred))
    return sorted(result)


def outside_imports(package: Path = PACKAGE) -> dict[str, set[str]]:
    """What each file imports from elsewhere: top-level names such as "torch"."""
    return {
        name: {found.split(".")[0] for found, _ in _imports(path)} - {"minivllm"}
        for name, path in modules(package).items()
    }


def violations(package: Path = PACKAGE) -> list[str]:
    """Every breach of the rule, as a sentence."""
    table, found = rooms(), []
    for name in modules(package):
        if name not in table:
            found.append(f"{name} has no room: draw it into HOUSE")
    for source, target, deferred in edges(package):
        if source not in table or (target and target not in table):
            continue
        here = table[source]
        if deferred and source not in MAY_DEFER:
            found.append(f"{source} imports {target or 'minivllm'} inside a function")
        if not target:
            if here.tower != "top":
                found.append(f"{source} imports the package's front door, which is for users")
            continue
        there = table[target]
        if {here.tower, there.tower} == {"control", "data"}:
            found.append(f"{source} ({here.tower}) imports {target} ({there.tower})")
        before = there.line == here.line and there.place < here.place
        if not (there.layer < here.layer or before):
            found.append(f"{source} (layer {here.layer}) imports {target} (layer {there.layer})")
    return found


def code_lines(source: str) -> int:
    """Lines of Python that hold code: no blank ones, no comments, no docstrings."""
    skip = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
            tokenize.ENDMARKER, tokenize.ENCODING}  # fmt: skip
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skip:
            lines.update(range(token.start[0], token.end[0] + 1))
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, holders) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            lines -= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return len(lines)


def line_table(package: Path = PACKAGE) -> list[tuple[int, str, int]]:
    """(layer, file, code lines), bottom of the house first; a file without a room comes last."""
    table = rooms()
    nowhere = Room(99, "-", 99, 0)
    ranked = sorted(modules(package).items(), key=lambda item: table.get(item[0], nowhere))
    return [
        (table.get(name, nowhere).layer, name, code_lines(path.read_text(encoding="utf-8")))
        for name, path in ranked
    ]


def main(arguments: list[str] | None = None) -> None:
    """Print the line table, or with `--edges` the imports."""
    parser = argparse.ArgumentParser(prog="python -m minivllm.course.house", description=__doc__)
    parser.add_argument("--edges", action="store_true", help="print who imports whom instead")
    if parser.parse_args(arguments).edges:
        for edge in edges():
            print(f"{edge.source} -> {edge.target or 'minivllm'}" + " (deferred)" * edge.deferred)
        return
    table = line_table()
    for layer, name, count in table:
        print(f"{layer:3}  {name.replace('.', '/') + '.py':26} {count:5}")
    core = sum(count for layer, _, count in table if layer in SERVING_CORE)
    print(f"     {'serving core (layers 0-7)':26} {core:5}")
    print(f"     {'everything':26} {sum(count for _, _, count in table):5}")


if __name__ == "__main__":
    main()
