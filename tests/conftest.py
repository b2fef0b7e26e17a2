"""What every test file shares: one torch thread, Triton's interpreter where there is no GPU."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that wait for busy cores are 10 x slower

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # must be set before a kernel's file is imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not HAS_GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: compiled on a GPU, interpreted on a CPU."""
    return torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")
