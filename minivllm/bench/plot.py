"""The ladder as a picture: what each rung brought, and how far the floor still is.

matplotlib is imported when a plot is asked for: the figures do not need it. Chapter 10 shows one.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any

from minivllm.base import UserError

INK, BAR, FLOOR = "#222222", "#3b6ea5", "#c2571a"
FLOOR_IN_SIGHT = 8  # times the highest bar


def check_plotting() -> None:
    """Say before a long measurement, and not after it, that there can be no plot.

    Raises:
        UserError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "a plot needs matplotlib, which is not installed: pip install 'minivllm[bench]', or "
            "leave --plot out"
        )


def plot_ladder(ladder: Sequence[dict[str, Any]], title: str, path: str) -> None:
    """Write a PNG: one panel a batch size, one bar a rung.

    Args:
        ladder: the entries that `bench.ladder` returns.
        title: what was run, and where.
        path: of the PNG.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    check_plotting()
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy, and optional
    from matplotlib.figure import Figure

    batches = sorted({entry["requests"] for entry in ladder})
    figure = Figure(figsize=(5.2 * len(batches), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for i, requests in enumerate(batches):
        axes = figure.add_subplot(1, len(batches), i + 1)
        _panel(axes, [entry for entry in ladder if entry["requests"] == requests])
        axes.set_title("one request" if requests == 1 else f"{requests} requests", color=INK)
    figure.suptitle(title, fontsize=10, color=INK)
    try:
        figure.savefig(path, dpi=150, format="png")
    except OSError as error:
        raise UserError(f"cannot write the plot {path}: {error.strerror}") from None


def _panel(axes: Any, entries: Sequence[dict[str, Any]]) -> None:
    """One batch size: bars with their value and their gain over the rung below."""
    values = [entry["tokens_per_s"] for entry in entries]
    axes.bar([entry["rung"] for entry in entries], values, color=BAR, width=0.6)
    for i, value in enumerate(values):
        gain = f"\n×{value / values[i - 1]:.2f}" if i else ""
        axes.annotate(f"{value:,.0f}{gain}", (i, value), ha="center", va="bottom", color=INK,
                      xytext=(0, 2), textcoords="offset points", fontsize=9)  # fmt: skip
    floor, top = entries[0]["floor_tokens_per_s"], max(values)
    if floor is not None and floor > FLOOR_IN_SIGHT * top:  # drawn, it would flatten every bar
        axes.text(0.02, 0.97, f"floor {floor:,.0f}, far above", transform=axes.transAxes,
                  va="top", color=FLOOR, fontsize=9)  # fmt: skip
    elif floor is not None:
        top = max(top, floor)
        axes.axhline(floor, color=FLOOR, linestyle="--", linewidth=1.2)
        axes.annotate(f"floor {floor:,.0f}", (0, floor), xycoords=("axes fraction", "data"),
                      va="bottom", color=FLOOR, fontsize=9, xytext=(4, 2),
                      textcoords="offset points")  # fmt: skip
    axes.set_ylim(0, 1.2 * top)
    axes.set_ylabel("output tokens/s")
    axes.tick_params(axis="x", labelrotation=15)
    axes.spines[["top", "right"]].set_visible(False)
