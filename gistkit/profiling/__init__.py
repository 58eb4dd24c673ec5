"""Measures steps: seconds by task, the rates of a device."""

from gistkit.profiling.calibration import calibrate, checked_device
from gistkit.profiling.calibrations import cache_folder, calibrated, keep_calibration, kept_calibration
from gistkit.profiling.measure import Work
from gistkit.profiling.task_timer import all_tensors, device_name, step_times
