"""One function per op of the model: what layers and runner call, whatever the device.

Each is the Triton kernel where its tensors are on a GPU that can run it, and the plain PyTorch twin
everywhere else (or everywhere, with MINIVLLM_KERNELS=torch in the environment). The choice is made
once a device and logged with its reason; shapes and meaning of the arguments stand in
`reference.py`. Importing this file does not import triton.

Chapter 5 reads this file.
"""

import logging
import os
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from minivllm.kernels import cpu, reference
from minivllm.kernels.batch import Batch

logger = logging.getLogger("minivllm")

MIN_CAPABILITY = (8, 0)  # Ampere: the first with bf16 and asynchronous copies


class Backend(NamedTuple):
    """Who computes the ops on one device, and why."""

    name: str  # "triton" or "torch"
    reason: str
    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    silu_mul: Callable[..., Tensor]
    rope_and_cache: Callable[..., Tensor]
    attention: Callable[..., Tensor]
    uniform: Callable[..., Tensor]
    sample: Callable[..., Tensor]


@cache
def choose(device: torch.device) -> Backend:
    """The backend for tensors on this device; asks the device once."""
    obstacle = why_not_triton(device)
    backend = _torch_backend(obstacle) if obstacle else _triton_backend()
    logger.info("Kernels on %s: %s (%s)", device, backend.name, backend.reason)
    return backend


def why_not_triton(device: torch.device) -> str | None:
    """What keeps the Triton kernels from running on this device; None if nothing does."""
    if os.environ.get("MINIVLLM_KERNELS") == "torch":  # the lowest rung of `minivllm bench ladder`
        return "MINIVLLM_KERNELS=torch asks for it"
    if device.type != "cuda":
        return f"device type {device.type}; the Triton kernels need an NVIDIA GPU"
    if torch.version.cuda is None:
        return "this PyTorch is not built for CUDA"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return "compute capability {}.{}; the kernels need {}.{}".format(
            *capability, *MIN_CAPABILITY
        )
    try:
        import triton  # noqa: F401  optional: absent on macOS and Windows
    except ImportError as error:
        return f"triton does not import: {error}"
    return None


def _torch_backend(reason: str) -> Backend:
    return Backend(
        "torch",
        reason,
        rms_norm=reference.rms_norm,
        add_rms_norm=reference.add_rms_norm,
        silu_mul=reference.silu_mul,
        rope_and_cache=cpu.rope_and_cache,
        attention=cpu.attention,
        uniform=reference.uniform,
        sample=reference.sample,
    )


def _triton_backend() -> Backend:
    import triton  # here, not above: these four imports fail where triton is absent

    from minivllm.kernels import cascade, fused, sampling

    return Backend(
        "triton",
        f"NVIDIA GPU, triton {triton.__version__}",
        rms_norm=fused.rms_norm,
        add_rms_norm=fused.add_rms_norm,
        silu_mul=fused.silu_mul,
        rope_and_cache=fused.rope_and_cache,
        attention=cascade.attention,
        uniform=sampling.uniform,
        sample=sampling.sample,
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis."""
    return choose(x.device).rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual)."""
    return choose(x.device).add_rms_norm(x, residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return choose(gate_up.device).silu_mul(gate_up)


def rope_and_cache(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """Split q, k, v; norm and rotate q and k; write K and V to their slots; return q."""
    return choose(qkv.device).rope_and_cache(
        qkv, positions, cos_sin, q_norm, k_norm, eps, k_cache, v_cache, slot_mapping
    )


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal attention of each row's new tokens over its paged context, themselves included."""
    return choose(q.device).attention(q, k_cache, v_cache, batch, scale, sliding_window)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in (0, 1) a row from (seed, position) alone."""
    return choose(seeds.device).uniform(seeds, positions)


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor
) -> Tensor:
    """Draw one token a row among those that top_k, top_p and min_p keep."""
    return choose(logits.device).sample(logits, temperature, top_k, top_p, min_p, u)
