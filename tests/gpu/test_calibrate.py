"""Calibration and the times of a step on a CUDA device: the link, the tensor cores, events."""

from gistkit.profiling.calibration import calibrate


def test_a_cuda_device():
    found = calibrate("cuda")
    assert found.has_link and found.async_counts
    assert 1 < found.d2h_gbps < 1000 and 1 < found.h2d_gbps < 1000
    # Both at once never move more than either could alone, and never less than half of the slower one.
    assert min(found.d2h_gbps, found.h2d_gbps) / 2 < found.both_gbps <= found.d2h_gbps + found.h2d_gbps
    assert 50 < found.memory_gbps < 50_000
    assert found.flops["bfloat16"] > found.flops["float32"] / 4
    assert 1e-7 < found.launch_s < 1e-3
    assert 0.3 < found.codec_slowdown < 3
    assert 0 <= found.link_interference < 1
