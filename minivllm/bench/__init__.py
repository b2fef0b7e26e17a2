"""Measuring the engine: workloads, floors, and the command `minivllm bench`."""
