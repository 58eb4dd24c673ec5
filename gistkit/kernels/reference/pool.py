"""Torch oracle of gistkit.kernels.pool; also what runs on CPU tensors."""
