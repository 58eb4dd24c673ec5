"""The torch oracle of every kernel, by the same names; also what runs on CPU tensors."""
