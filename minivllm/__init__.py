"""minivllm: a compact, complete LLM inference engine to read, run and measure.

Names are resolved on first use, so that `import minivllm` costs milliseconds and no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm.base import EngineDeadError, ModelError, UserError
    from minivllm.config import EngineConfig
    from minivllm.engine.llm import LLM
    from minivllm.request import RequestOutput, SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "EngineConfig",
    "EngineDeadError",
    "ModelError",
    "RequestOutput",
    "SamplingParams",
    "UserError",
]
_HOMES = {
    "LLM": "minivllm.engine.llm",
    "EngineConfig": "minivllm.config",
    "EngineDeadError": "minivllm.base",
    "ModelError": "minivllm.base",
    "RequestOutput": "minivllm.request",
    "SamplingParams": "minivllm.request",
    "UserError": "minivllm.base",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'minivllm' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
