"""The body of ``gistkit train``: one network trained plain, lossless and lossy on the same images, and compared."""

from gistkit.training.data import ImageSet, batches, open_images
from gistkit.training.loop import Comparison
from gistkit.training.result import RunResult, TrainResult, TrainSettings, plot_memory
