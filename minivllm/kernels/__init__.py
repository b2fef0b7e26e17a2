"""Every op twice: in plain PyTorch and in Triton, under one signature."""
