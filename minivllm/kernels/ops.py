"""One function per op of the model: what layers and runner call, whatever the device.

Chapter 5 reads this file.
"""

from minivllm.kernels.reference import (
    add_rms_norm,
    attention,
    rms_norm,
    rope_and_cache,
    sample,
    silu_mul,
    uniform,
)

__all__ = [
    "add_rms_norm",
    "attention",
    "rms_norm",
    "rope_and_cache",
    "sample",
    "silu_mul",
    "uniform",
]
