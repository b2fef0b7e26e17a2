"""One torch thread: OpenMP threads that wait for each other on busy cores are ten times slower."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

torch.set_num_threads(1)
