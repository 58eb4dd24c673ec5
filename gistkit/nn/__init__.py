"""``gistkit.nn``: drop-in classes for those who write the model themselves."""

from gistkit.nn.modules import BatchNorm2d, Conv2d, Dropout, Linear, MaxPool2d, ReLU, ReLUMaxPool2d

__all__ = ["BatchNorm2d", "Conv2d", "Dropout", "Linear", "MaxPool2d", "ReLU", "ReLUMaxPool2d"]
