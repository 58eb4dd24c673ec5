"""The bodies of ``gistkit train``, which compares one network trained plain, lossless and lossy on the same images, and
``gistkit accuracy``, which compares its accuracy under several schemes of rounding."""

from gistkit.training.accuracy import LAYOUTS, Accuracy, AccuracySettings
from gistkit.training.data import ImageSet, batches, open_images
from gistkit.training.device_images import DeviceImages, device_images
from gistkit.training.loop import Comparison, environment
from gistkit.training.result import RunResult, TrainResult, TrainSettings, plot_memory
from gistkit.training.schemes import Scheme, carry_out, plan_of, scheme, schemes
from gistkit.training.verdict import SchemeResult, difference, plot_accuracy
