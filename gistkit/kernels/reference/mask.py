"""Torch oracle of gistkit.kernels.mask; also what runs on CPU tensors."""
