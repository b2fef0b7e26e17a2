"""One table: our figures, the peers', the floor of the card, and the ratios.

    for i in 1 2 3; do
        minivllm bench throughput --preset W1 W3 W4 W5 | tail -1
        minivllm bench latency --preset W2 W6 | tail -1
        minivllm bench startup | tail -1
    done > benchmarks/results/h200.jsonl
    python benchmarks/run_peers_table.py benchmarks/results/h200.jsonl

Each line of the files that is a JSON object of `minivllm bench` counts as one process; a figure is
the median over processes. Peers' figures and targets stand in `peers.json`; runs of `--engine vllm`
or `transformers` on this machine get columns of their own. The table is Markdown.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

PEERS = Path(__file__).with_name("peers.json")
NO_PEERS = ("floor", "must", "moonshot")
Figures = dict[tuple[str, str], list[float]]  # (model, what is measured) -> a value a process
W6 = ("completed_share", "itl_p50_ms", "itl_p99_ms", "step_p50_ms", "ttft_p99_ms")


def read_records(paths: list[str]) -> list[dict[str, Any]]:
    """The JSON objects of all files; a SystemExit names what cannot be compared."""
    records = []
    for path in paths:
        for line in Path(path).read_text("utf-8").splitlines():
            if line.startswith("{"):
                records.append(json.loads(line))
    if not records:
        raise SystemExit("run_peers_table: no result in these files: append each run's last line")
    scaled = [record["command"] for record in records if record["scale"] != 1]
    if scaled:
        raise SystemExit(f"run_peers_table: scaled work is no figure: leave out `{scaled[0]}`")
    devices = {record["machine"]["device"] for record in records}
    if len(devices) > 1:
        raise SystemExit(f"run_peers_table: results of several machines: {', '.join(devices)}")
    return records


def figures_of(result: dict[str, Any]) -> dict[str, tuple[float, float | None]]:
    """What a result measures -> (value, floor of this machine), under the names of peers.json."""
    preset, floor_s = result.get("preset"), result.get("floor_s")

    def per_second(tokens: int) -> float | None:
        return tokens / floor_s if floor_s else None

    if preset in ("W1", "W3"):
        floor = per_second(result["output_tokens"])
        return {f"{preset} output tok/s": (result["output_tokens_per_s"], floor)}
    if preset == "W4":
        floor = per_second(result["prompt_tokens"])
        return {"W4 prompt tok/s": (result["prompt_tokens_per_s"], floor)}
    if preset == "W5":
        return {"W5 s": (result["seconds"], floor_s)}
    if preset == "W2":
        return {
            "W2 ms/token": (result["ms_per_token"], result["floor_ms_per_token"]),
            "W2 TTFT ms": (result["ttft_ms"], result["floor_ttft_ms"]),
        }
    if preset == "W6":
        return {f"W6 {name}": (result[name], None) for name in W6}
    if preset == "W7":
        names = ("warm", "cold")
        return {f"W7 {name} s": (result[name]["first_s"], None) for name in names}
    return {}


def collect(records: list[dict[str, Any]]) -> tuple[dict[str, Figures], Figures]:
    """Figures by engine, and the floors."""
    by_engine: dict[str, Figures] = defaultdict(lambda: defaultdict(list))
    floors: Figures = defaultdict(list)
    for record in records:
        for result in record["results"]:
            for name, (value, floor) in figures_of(result).items():
                by_engine[record["engine"]][record["model"], name].append(value)
                if floor is not None:
                    floors[record["model"], name].append(floor)
    return by_engine, floors


def higher_is_better(name: str) -> bool:
    return name.endswith("tok/s") or name.endswith("share")


def gain(ours: float, theirs: float, name: str) -> float:
    """How many times better ours is."""
    return ours / theirs if higher_is_better(name) else theirs / ours


def show(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(records: list[dict[str, Any]], peers: dict[str, Any]) -> list[str]:
    """The Markdown lines."""
    by_engine, floors = collect(records)
    ours = by_engine.get("minivllm", {})
    here = [engine for engine in by_engine if engine != "minivllm"]
    columns = [*peers["peers"], *(f"{engine}, this machine" for engine in here)]
    head = ["", "ours", "of the floor", "floor", "best peer", "ours : best peer", *columns]
    head += ["must", "moonshot", "verdict"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for (model, name), values in sorted(ours.items()):
        mine = statistics.median(values)
        known = peers["figures"].get(model, {}).get(name, {})
        others = {peer: known.get(peer) for peer in peers["peers"]}
        for engine in here:
            found = by_engine[engine].get((model, name))
            others[f"{engine}, this machine"] = statistics.median(found) if found else None
        floor = statistics.median(floors[model, name]) if floors[model, name] else None
        there = [value for value in others.values() if value is not None]
        best = (max if higher_is_better(name) else min)(there) if there else None
        must = known.get("must")
        cells = [
            f"{model} {name}",
            f"**{show(mine)}** ({len(values)})",
            "unknown" if floor is None else f"{gain(mine, floor, name):.0%}",
            show(floor),
            show(best),
            "-" if best is None else f"{gain(mine, best, name):.2f}",
            *(show(others[column]) for column in columns),
            show(must),
            show(known.get("moonshot")),
            "-" if must is None else "met" if gain(mine, must, name) >= 1 else "missed",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def circumstances(records: list[dict[str, Any]], peers: dict[str, Any]) -> list[str]:
    """What the figures are worth nothing without."""
    lines = [f"Machine: {records[0]['machine']['device']}. Median of the processes in brackets."]
    seen = set()
    for record in records:
        settings = ", ".join(f"{name}={value}" for name, value in record["engine_args"].items())
        if (record["command"], settings) in seen:
            continue
        seen.add((record["command"], settings))
        versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        lines.append(f"- `{record['command']}` ({record['date']}, commit {record['commit']}; "
                     f"{settings}; {versions})")  # fmt: skip
    lines.append(f"- Peers ({peers['date']}, {peers['machine']}): {peers['how']}")
    lines += [f"  - {peer} {what}" for peer, what in peers["peers"].items()]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", help="last lines of `minivllm bench`, one a process")
    records = read_records(parser.parse_args().files)
    peers = json.loads(PEERS.read_text("utf-8"))
    print("\n".join([*table(records, peers), "", *circumstances(records, peers)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
