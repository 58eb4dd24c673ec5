"""The body of ``gistkit train``: one network trained plain, lossless and lossy on the same images, and compared."""

from gistkit.training.data import Digits, ImageSet, batches, inputs, open_images
from gistkit.training.folder import ImageFolder
from gistkit.training.loop import Comparison, train
from gistkit.training.plots import plot_memory
from gistkit.training.result import RunResult, TrainResult, TrainSettings
