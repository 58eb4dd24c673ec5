"""Measures steps: seconds by task, the rates of a device."""

from gistkit.profiling.calibration import (
    cache_folder,
    calibrate,
    card_at_hand,
    checked_device,
    keep_calibration,
    write_cached,
)
from gistkit.profiling.measure import Work, all_tensors, device_name, step_times
