"""The most bytes alive at a kernel of a compiled graph, by its kernels as data."""

from gistkit.planning.fused_kernels import Kernel, peak


def test_kernels_that_read_one_tensor_run_together():
    """The gradients of two norms behind a sum. Both norms' inputs and both results are there at once, though each of
    the convolutions that read the results could run before the other norm's input is made."""
    gradient, inputs, results, ends = 0, (1, 2), (3, 4), (5, 6)
    kernels = []
    for x, result, end in zip(inputs, results, ends, strict=True):
        kernels.append(Kernel({x: 100}, frozenset()))
        kernels.append(Kernel({result: 100}, frozenset({gradient, x}), True, True))
        kernels.append(Kernel({end: 1}, frozenset({result})))
    assert peak(kernels, {gradient: 100}, {5, 6}, {99}, joins=True) == 500
    assert peak(kernels, {gradient: 100}, {5, 6}, {99}) == 201
    apart = [k._replace(reads=k.reads - {gradient}) for k in kernels]
    # the second norm's input is made where the first result is freed
    assert peak(apart, {gradient: 100}, {5, 6}, {99}, joins=True) == 202


def test_kernels_that_wait_for_each_other_stay_apart():
    first = Kernel({1: 100}, frozenset({0}), True, True)
    library = Kernel({2: 100}, frozenset({1}))
    second = Kernel({3: 100}, frozenset({0, 2}), True, True)
    assert peak([first, library, second], {0: 100}, {3}, {99}, joins=True) == 300
