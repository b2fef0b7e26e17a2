"""`minivllm doctor`: is this machine ready? Each part with a verdict and, where needed, a remedy.

Looking and judging are apart: `look()` reads the machine into plain `Facts`, `judge()` turns facts
into findings, so every verdict can be tested without the machine that earns it.

    ok       as it should be
    note     works; good to know
    problem  something will fail; the exit code is then 1
"""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minivllm.base import GIB, MIB, format_bytes
from minivllm.gpu import Driver, read_driver

TORCH, TRITON = ((2, 11), (2, 14)), ((3, 6), (3, 8))  # from, below: the versions that were tried
PACKAGES = ("numpy", "transformers", "tokenizers", "safetensors", "gguf", "huggingface_hub")
MIN_CAPABILITY = (8, 0)  # of a GPU that the Triton kernels are written for
REINSTALL = "run `pip install .` in the project's folder (or `make demo`) again"


@dataclass(frozen=True)
class Facts:
    """What `look()` found. Versions are None where the package is missing; memory in bytes."""

    python: tuple[int, int, int] = (3, 11, 0)
    system: str = "Linux"
    machine: str = "x86_64"
    torch: str | None = None
    torch_error: str | None = None  # why it does not import
    torch_cuda: str | None = None  # the CUDA runtime that torch was built for; None = CPU build
    torch_sees_gpu: bool = False
    threads: int = 1
    triton: str | None = None
    packages: dict[str, str | None] = field(default_factory=dict)
    toolkit: str | None = None  # of nvcc, which nothing here needs
    driver: Driver = field(default_factory=Driver)
    cpus: int = 1
    ram_total: int = 0  # 0 = unknown
    ram_free: int = 0
    model_path: str | None = None  # where the default model belongs; None = could not ask
    model_bytes: int | None = None  # None = not fetched
    model_expected: int = 0
    disk_free: int = 0


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    subject: str
    verdict: str  # "ok", "note" or "problem"
    detail: str
    remedy: str = ""


def _version(text: str | None) -> tuple[int, int]:
    """`"2.13.0+cpu"` -> `(2, 13)`."""
    numbers = re.findall(r"\d+", text or "")[:2]
    return (int(numbers[0]), int(numbers[1])) if len(numbers) == 2 else (0, 0)


def judge(facts: Facts) -> list[Finding]:
    """All findings, in the order in which one would mend things."""
    return [
        _python(facts),
        _platform(facts),
        _torch(facts),
        _cuda(facts),
        _triton(facts),
        *[_package(name, version) for name, version in facts.packages.items()],
        *_gpus(facts),
        _cpu(facts),
        _memory(facts),
        _model(facts),
        _disk(facts),
    ]


def _python(facts: Facts) -> Finding:
    shown = ".".join(map(str, facts.python))
    if facts.python < (3, 11):
        return Finding("Python", "problem", shown, "install Python 3.11 or 3.12")
    if facts.python >= (3, 13):
        return Finding("Python", "note", shown, "tried with 3.11 and 3.12 only: prefer those")
    return Finding("Python", "ok", shown)


def _platform(facts: Facts) -> Finding:
    shown = f"{facts.system} {facts.machine}"
    if facts.system == "Linux":
        return Finding("platform", "ok", shown)
    return Finding("platform", "note", shown, "no Triton here: everything runs on plain PyTorch")


def _torch(facts: Facts) -> Finding:
    if facts.torch is None or facts.torch_error:
        why = facts.torch_error or "not installed"
        return Finding("torch", "problem", f"does not import: {why}", REINSTALL)
    build = f"CUDA {facts.torch_cuda} build" if facts.torch_cuda else "CPU build"
    low, high = TORCH
    if low <= _version(facts.torch) < high:
        return Finding("torch", "ok", f"{facts.torch}, {build}")
    remedy = f"tried with {low[0]}.{low[1]} to {high[0]}.{high[1] - 1} only: {REINSTALL}"
    return Finding("torch", "note", f"{facts.torch}, {build}", remedy)


def _cuda(facts: Facts) -> Finding:
    """Do driver, CUDA runtime, toolkit and torch fit together?"""
    driver = facts.driver
    toolkit = f"; toolkit {facts.toolkit}" if facts.toolkit else "; no toolkit (none is needed)"
    if not driver.gpus:
        why = driver.obstacle or "the driver lists no GPU"
        return Finding("CUDA", "note", why, "nothing to do: the engine runs on the CPU")
    served = f"{driver.cuda[0]}.{driver.cuda[1]}" if driver.cuda else "unknown"
    shown = f"driver {driver.version}, serves CUDA up to {served}{toolkit}"
    if facts.torch_cuda is None:
        return Finding(
            "CUDA", "problem", f"{shown}; torch is a CPU build and cannot use the GPU",
            "install a CUDA build of torch by its own instructions, then `pip install .` again",
        )  # fmt: skip
    if facts.torch_sees_gpu:
        return Finding("CUDA", "ok", shown)
    if driver.cuda and driver.cuda[0] < _version(facts.torch_cuda)[0]:
        return Finding(
            "CUDA", "problem", f"{shown}; torch was built for CUDA {facts.torch_cuda}",
            f"update the driver, or install torch built for CUDA {driver.cuda[0]}.x",
        )  # fmt: skip
    return Finding(
        "CUDA", "problem", f"{shown}; yet torch sees no GPU",
        "check CUDA_VISIBLE_DEVICES, and that this user may open /dev/nvidia*",
    )  # fmt: skip


def _triton(facts: Facts) -> Finding:
    if facts.triton is None:
        remedy = "nothing to do: plain PyTorch computes every op"
        if facts.driver.gpus and facts.system == "Linux":
            remedy = f"the GPU runs the slower plain PyTorch ops: {REINSTALL}"
        return Finding("triton", "note", "not installed", remedy)
    low, high = TRITON
    if low <= _version(facts.triton) < high:
        return Finding("triton", "ok", facts.triton)
    remedy = f"tried with {low[0]}.{low[1]} to {high[0]}.{high[1] - 1} only: {REINSTALL}"
    return Finding("triton", "note", facts.triton, remedy)


def _package(name: str, version: str | None) -> Finding:
    if version is None:
        return Finding(name, "problem", "not installed", REINSTALL)
    return Finding(name, "ok", version)


def _gpus(facts: Facts) -> list[Finding]:
    findings = []
    for gpu in facts.driver.gpus:
        capability = f"compute capability {gpu.capability[0]}.{gpu.capability[1]}"
        shown = f"{gpu.name}, {capability}, {format_bytes(gpu.free)} of "
        shown += f"{format_bytes(gpu.total)} free"
        verdict, remedy = "ok", ""
        if gpu.capability < MIN_CAPABILITY:
            verdict, remedy = "note", "older than 8.0: it runs the slower plain PyTorch ops"
        elif gpu.free < gpu.total / 2:
            verdict = "note"
            remedy = "another process holds the rest: see `nvidia-smi`, or lower "
            remedy += "--gpu-memory-utilization"
        findings.append(Finding(f"GPU {gpu.index}", verdict, shown, remedy))
    return findings


def _cpu(facts: Facts) -> Finding:
    shown = f"{facts.cpus} usable, torch uses {facts.threads} threads"
    if facts.threads > facts.cpus:
        return Finding("CPU", "note", shown, f"too many threads: set OMP_NUM_THREADS={facts.cpus}")
    return Finding("CPU", "ok", shown)


def _memory(facts: Facts) -> Finding:
    if not facts.ram_total:
        return Finding("memory", "note", "unknown on this system")
    shown = f"{format_bytes(facts.ram_free)} of {format_bytes(facts.ram_total)} available"
    if facts.ram_free < 2 * GIB:
        remedy = "the default model wants about 2 GiB: close something, or lower "
        return Finding("memory", "problem", shown, remedy + "--kv-cache-memory-bytes")
    return Finding("memory", "ok", shown)


def _model(facts: Facts) -> Finding:
    if facts.model_path is None:
        return Finding("default model", "note", "not looked for", "mend torch first")
    if facts.model_bytes is None:
        return Finding(
            "default model", "note", f"not in {facts.model_path}", "run `minivllm fetch`"
        )
    if facts.model_bytes != facts.model_expected:
        shown = f"{facts.model_path} has {facts.model_bytes:,} bytes, not {facts.model_expected:,}"
        return Finding("default model", "problem", shown, "run `minivllm fetch` again")
    shown = f"{facts.model_path}, {format_bytes(facts.model_bytes)}"
    return Finding("default model", "ok", shown)


def _disk(facts: Facts) -> Finding:
    shown = f"{format_bytes(facts.disk_free)} free for models"
    if facts.model_bytes is None and facts.disk_free < 300 * MIB:
        remedy = "free 300 MiB there, or fetch elsewhere with --download-dir"
        return Finding("disk", "problem", shown, remedy)
    return Finding("disk", "ok", shown)


# -- looking -----------------------------------------------------------------------------------


def look(download_dir: str | None = None) -> Facts:
    """Read the machine. Takes some seconds, as torch must be imported."""
    ram_total, ram_free = _ram()
    cpus = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    return Facts(
        python=sys.version_info[:3],
        system=platform.system(),
        machine=platform.machine(),
        triton=_installed("triton"),
        packages={name: _installed(name) for name in PACKAGES},
        toolkit=_toolkit(),
        driver=read_driver(),
        cpus=len(cpus),
        ram_total=ram_total,
        ram_free=ram_free,
        disk_free=shutil.disk_usage(_existing(download_dir or "~")).free,
        **_look_at_torch(),
        **_look_for_model(download_dir),
    )


def _look_at_torch() -> dict[str, Any]:
    found: dict[str, Any] = {"torch": _installed("torch")}
    try:
        import torch  # heavy, and the one import that a broken machine fails at
    except Exception as error:  # whatever a broken installation raises belongs in the report
        return found | {"torch_error": f"{type(error).__name__}: {error}"}
    return found | {
        "torch_cuda": torch.version.cuda,
        "torch_sees_gpu": torch.cuda.is_available(),
        "threads": torch.get_num_threads(),
    }


def _look_for_model(download_dir: str | None) -> dict[str, Any]:
    try:
        from minivllm.models import hub  # imports torch, which may be what is broken
    except Exception:
        return {}
    model = Path(download_dir or hub.DEFAULT_CACHE).expanduser() / hub.GGUF_NAME
    return {
        "model_path": str(model),
        "model_bytes": model.stat().st_size if model.is_file() else None,
        "model_expected": hub.GGUF_BYTES,
    }


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _toolkit() -> str | None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release ([\d.]+)", said)
    return release[1] if release else "unknown"


def _ram() -> tuple[int, int]:
    """Total and available memory in bytes; (0, 0) where /proc does not tell."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return 0, 0
    kib = {name: int(value) for name, value in re.findall(r"(\w+):\s+(\d+) kB", text)}
    return kib.get("MemTotal", 0) * 1024, kib.get("MemAvailable", 0) * 1024


def _existing(name: str) -> Path:
    folder = Path(name).expanduser()
    while not folder.exists():
        folder = folder.parent
    return folder
