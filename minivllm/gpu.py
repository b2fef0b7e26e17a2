"""The NVIDIA GPUs of this machine as the driver sees them, whether or not torch can use them.

`pynvml` (from the package nvidia-ml-py) is imported when asked, so a machine without it loses only
this report. Read by `minivllm doctor`. Chapter 9 names this file.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One GPU. Memory in bytes."""

    index: int
    name: str
    capability: tuple[int, int]
    total: int
    free: int


@dataclass(frozen=True)
class Driver:
    """What the NVIDIA driver reports. `obstacle` says why there is nothing to report."""

    version: str | None = None
    cuda: tuple[int, int] | None = None  # the newest CUDA runtime that it serves
    gpus: tuple[Gpu, ...] = ()
    obstacle: str | None = None


def read_driver() -> Driver:
    """Ask the driver once. Never raises: without a driver the answer says so."""
    try:
        import pynvml  # optional: without it only this report is missing
    except ImportError as error:
        return Driver(obstacle=f"pynvml does not import: {error}")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Driver(obstacle=f"no NVIDIA driver answers ({error})")
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()  # 13010 = 13.1
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            name = pynvml.nvmlDeviceGetName(handle)
            gpus.append(Gpu(index, str(name), (major, minor), int(memory.total), int(memory.free)))
        version = str(pynvml.nvmlSystemGetDriverVersion())
        return Driver(version, (cuda // 1000, cuda % 1000 // 10), tuple(gpus))
    except pynvml.NVMLError as error:
        return Driver(obstacle=f"the NVIDIA driver gave an error ({error})")
    finally:
        pynvml.nvmlShutdown()
