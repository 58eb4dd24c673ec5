"""The most bytes alive at a kernel of a compiled graph, by its kernels as data."""

from hypothesis import example, given
from hypothesis import strategies as st

from gistkit.planning.fused_kernels import Kernel, peak


def test_kernels_that_read_one_tensor_run_together():
    """The gradients of two norms behind a sum. Both norms' inputs are there at once, and both results overwrite them,
    though each of the convolutions that read the results could run before the other norm's input is made."""
    gradient, inputs, results, ends = 0, (1, 2), (3, 4), (5, 6)
    kernels = []
    for x, result, end in zip(inputs, results, ends, strict=True):
        kernels.append(Kernel({x: 100}, frozenset()))
        kernels.append(Kernel({result: 100}, frozenset({gradient, x}), True, True))
        kernels.append(Kernel({end: 1}, frozenset({result})))
    assert peak(kernels, {gradient: 100}, {5, 6}, {99}, joins=True) == 300
    reducing = [k._replace(pointwise=False) if k.fusible else k for k in kernels]  # what sums overwrites nothing
    assert peak(reducing, {gradient: 100}, {5, 6}, {99}, joins=True) == 500
    assert peak(kernels, {gradient: 100}, {5, 6}, {99}) == 201
    apart = [k._replace(reads=k.reads - {gradient}) for k in kernels]
    # the second norm's input is made where the first result is freed
    assert peak(apart, {gradient: 100}, {5, 6}, {99}, joins=True) == 202


def test_sums_of_one_gradient_run_together_however_far_apart():
    """What the gradient is a sum of is there until the later one, which waits for a tensor that is computed again."""
    total = Kernel({2: 100}, frozenset({0, 1}), True, True)
    first = Kernel({3: 1}, frozenset({2}), False, True)
    again = [Kernel({i + 1: 100}, frozenset({i})) for i in range(9, 60)]
    second = Kernel({4: 1}, frozenset({2, 60}), False, True)
    kernels = [total, first, *again, second]
    start = {0: 100, 1: 100, 9: 100}
    assert peak(kernels, start, {3, 4}, {99}, joins=True) == 400
    assert peak([total, first, *again, second._replace(made={4: 7})], start, {3, 4, 9}, {99}, joins=True) == 401


def test_kernels_that_wait_for_each_other_stay_apart():
    first = Kernel({1: 100}, frozenset({0}), True, True)
    library = Kernel({2: 100}, frozenset({1}))
    second = Kernel({3: 100}, frozenset({0, 2}), True, True)
    assert peak([first, library, second], {0: 100}, {3}, {99}, joins=True) == 300


def test_a_sum_runs_with_the_kernel_that_reads_it_first():
    """Both of its operands are there while what the other operand of that kernel is made of is computed."""
    total = Kernel({2: 100}, frozenset({0, 1}), True, True)
    again = [Kernel({3: 100}, frozenset({9})), Kernel({4: 100}, frozenset({3}))]
    norm = Kernel({5: 100}, frozenset({2, 4}), False, True)
    kernels = [total, *again, norm]
    assert peak(kernels, {0: 100, 1: 100, 9: 100}, {5}, {99}, joins=True) == 400
    assert peak(kernels, {0: 100, 1: 100, 9: 100}, {5}, {99}) == 300
    assert peak([total, *again, norm._replace(fusible=False)], {0: 100, 1: 100, 9: 100}, {5}, {99}, joins=True) == 300


def test_what_reads_more_than_eight_overwrites_nothing():
    for count, most in ((8, 800), (9, 1000)):
        kernel = Kernel({-1: 100}, frozenset(range(count)), True, True)
        assert peak([kernel], dict.fromkeys(range(count), 100), {-1}, {99}) == most


def test_what_a_library_needs_counts_while_it_runs():
    convolution = Kernel({1: 100}, frozenset({0}), passing=50)
    assert peak([convolution], {0: 100}, {1}, {99}) == 250
    later = Kernel({2: 30}, frozenset({1}))
    assert peak([convolution, later._replace(passing=80)], {0: 100}, {2}, {99}) == 250  # 100 + 30 + 80 behind it


@example([{-1}, {0}, {1}, {0}, {0, 3}, {1, 4}, {2, 3}])
@example([{-1}, {0}, {0, 1}, {0}, {3}, {0, 4}, {1}, {3, 6}, {0, 1}])
@given(st.lists(st.sets(st.integers(0, 9), min_size=1, max_size=3), min_size=4, max_size=12))
def test_no_kernel_is_lost(reads):
    """Whatever runs together, nothing waits for itself. All results stay, so all of them are there at the end."""
    kernels = [Kernel({i: 100}, frozenset(min(r, i - 1) for r in read), False, True) for i, read in enumerate(reads)]
    assert peak(kernels, {-1: 100}, range(-1, len(kernels)), {99}, joins=True) == 100 * (len(kernels) + 1)
