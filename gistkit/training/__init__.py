"""Body of `gistkit train`: data, training loop."""

from gistkit.training.plots import check_plot, plot_memory
from gistkit.training.train import Comparison, RunResult, TrainResult, TrainSettings

__all__ = ["Comparison", "RunResult", "TrainResult", "TrainSettings", "check_plot", "plot_memory"]
