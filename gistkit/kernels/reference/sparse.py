"""Torch oracle of gistkit.kernels.sparse; also what runs on CPU tensors."""
