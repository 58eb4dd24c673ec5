"""Torch oracle of gistkit.kernels.narrow; also what runs on CPU tensors."""
