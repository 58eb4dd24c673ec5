"""A stand-in for the module ``cudnn`` (nvidia-cudnn-frontend) on a CPU: the names, keywords and order of calls that
gistkit uses, some plans of which numeric notes leave some out, and results by PyTorch's operators, read and written by
address as cuDNN does."""

import ctypes
import enum
import math
from types import SimpleNamespace
from typing import ClassVar

import torch

from gistkit.kernels import cudnn_convolutions

data_type = enum.Enum("data_type", "FLOAT HALF BFLOAT16 NOT_SET")
heur_mode = enum.Enum("heur_mode", "A B FALLBACK OPENSOURCE")
NOTES = "TENSOR_CORE DOWN_CONVERT_INPUTS REDUCED_PRECISION_REDUCTION FFT NONDETERMINISTIC WINOGRAD"
NOTES += " WINOGRAD_TILE_4x4 WINOGRAD_TILE_6x6 WINOGRAD_TILE_13x13 STRICT_NAN_PROP"
numerical_note = enum.Enum("numerical_note", NOTES)
KINDS = {data_type.FLOAT: torch.float32, data_type.HALF: torch.float16, data_type.BFLOAT16: torch.bfloat16}
# name, notes, workspace in maps of x; in the order of the heuristics
PLANS = (
    ("eng9_k2=4", ("TENSOR_CORE",), 2),
    ("eng7_k2=1_k13=0", (), 1),
    ("eng7_k2=5_k13=0", (), 1),
    ("eng5", ("WINOGRAD",), 0),
    ("eng20", ("NONDETERMINISTIC",), 0),
    ("eng0", (), 0),
)
SLOW = "eng0"  # adds in another order: half of the channels, rows or filters after the other


class cudnnGraphNotSupportedError(RuntimeError):
    pass


def _setter(name):
    def set_to(self, value):
        setattr(self, name, value)
        return self

    return set_to


class _Tensor:
    def __init__(self, dim=None, stride=None, data_type=None):
        self.dim, self.stride, self.data_type, self.is_output = dim, stride, data_type, False

    set_output, set_data_type = _setter("is_output"), _setter("data_type")
    set_dim, set_stride = _setter("dim"), _setter("stride")

    def at(self, address):
        """The tensor over the memory there."""
        assert type(address) is int and address % 16 == 0
        kind = KINDS[self.data_type]
        size = (1 + sum((n - 1) * s for n, s in zip(self.dim, self.stride, strict=True))) * kind.itemsize
        memory = (ctypes.c_char * size).from_address(address)
        return torch.frombuffer(memory, dtype=kind).as_strided(self.dim, self.stride)


def create_handle():
    return SimpleNamespace()


def set_stream(handle, stream):
    raise AssertionError("a CPU has no streams")


class pygraph:
    ran: ClassVar[list] = []  # (part, plan) of all that was executed

    def __init__(self, *, io_data_type, intermediate_data_type, compute_data_type, handle):
        assert intermediate_data_type is compute_data_type is data_type.FLOAT and handle is not None
        self.stage, self.barred = "open", set()

    def tensor(self, *, dim, stride, data_type):
        assert type(dim) is type(stride) is list
        return _Tensor(dim, stride, data_type)

    def _conv(self, part, first, second, pre_padding, post_padding, stride, dilation):
        assert pre_padding == post_padding
        self.part, self.operands, self.made = part, (first, second), _Tensor()
        self.options = stride, pre_padding, dilation
        return self.made

    def conv_fprop(self, *, image, weight, **options):
        return self._conv("forward", image, weight, **options)

    def conv_wgrad(self, *, image, loss, **options):
        return self._conv("weight", image, loss, **options)

    def conv_dgrad(self, *, loss, filter, **options):
        return self._conv("input", loss, filter, **options)

    def validate(self):
        assert self.stage == "open" and self.made.is_output and self.made.dim and self.made.stride
        self.stage = "valid"

    def build_operation_graph(self):
        assert self.stage == "valid"
        self.stage = "built"

    def create_execution_plans(self, modes):
        assert self.stage == "built" and modes == [heur_mode.A, heur_mode.FALLBACK]
        self.stage = "planned"

    def deselect_numeric_notes(self, notes):
        assert self.stage == "planned"
        self.barred |= {n.name for n in notes}

    def get_execution_plan_count(self):
        return len(PLANS)

    def get_plan_name_at_index(self, index):
        return PLANS[index][0]

    def build_plan_at_index(self, index):
        if self.barred.intersection(PLANS[index][1]):
            raise cudnnGraphNotSupportedError("Deselecting execution plan")

    def get_workspace_size_plan_at_index(self, index):
        of_x = self.made if self.part == "input" else self.operands[0]
        return PLANS[index][2] * math.prod(of_x.dim) * KINDS[of_x.data_type].itemsize

    def execute_plan_at_index(self, pack, workspace=None, index=0, handle=None):
        assert handle is not None and set(pack) == {*self.operands, self.made}
        nbytes, name = self.get_workspace_size_plan_at_index(index), PLANS[index][0]
        assert (workspace is None) == (nbytes == 0)
        if nbytes:
            ctypes.memset(workspace, 0xFF, nbytes)
        first, second = (t.at(pack[t]) for t in self.operands)
        with torch.no_grad():
            self.made.at(pack[self.made]).copy_(self._result(first, second, name == SLOW))
        pygraph.ran.append((self.part, name))

    def _result(self, first, second, split):
        over = {"forward": 1, "weight": 0, "input": (1, 0)}[self.part]
        axes = over if isinstance(over, tuple) else (over, over)
        n, m = first.shape[axes[0]], second.shape[axes[1]]
        grouped = self.part == "input" and self.made.dim[1] != second.shape[1]
        if not split or n < 2 or n != m or grouped:
            return self._of(first, second)
        halves = [(0, n // 2), (n // 2, n - n // 2)]
        pairs = [
            [t.narrow(axis, *half).contiguous() for t, axis in zip((first, second), axes, strict=True)]
            for half in halves
        ]
        parts = [self._of(*pair) for pair in pairs]
        return parts[0] + parts[1]

    def _of(self, first, second):
        stride, padding, dilation = self.options
        made, aten = self.made, torch.ops.aten
        if self.part == "forward":
            groups = first.shape[1] // second.shape[1]
            return aten.convolution(first, second, None, stride, padding, dilation, False, [0, 0], groups)
        if self.part == "weight":
            x, dy, shape = first, second, made.dim
            groups = x.shape[1] // shape[1]
            weight = torch.zeros(shape, dtype=x.dtype)
            mask = [False, True, False]
        else:
            dy, weight, shape = first, second, made.dim
            groups = shape[1] // weight.shape[1]
            x = torch.zeros(shape, dtype=dy.dtype)
            mask = [True, False, False]
        found = aten.convolution_backward(dy, x, weight, None, stride, padding, dilation, False, [0, 0], groups, mask)
        return found[1] if self.part == "weight" else found[0]


def installed(monkeypatch, module):
    """Have gistkit find ``module`` (this one, by ``sys.modules[__name__]``) as ``cudnn``, and run it on a CPU."""
    import sys

    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setattr(cudnn_convolutions, "DEVICES", ("cpu",))
    monkeypatch.setattr(cudnn_convolutions, "_LOCAL", cudnn_convolutions._Local())
    for name in ("gistkit.kernels", "gistkit.kernels.cudnn_convolutions", "gistkit.profiling.engines",
                 "gistkit.runtime.calls.engines", "gistkit.runtime.program.match_plan"):  # fmt: skip
        monkeypatch.setattr(f"{name}.engines_missing", lambda: "")
    monkeypatch.setattr(pygraph, "ran", [])
    return pygraph.ran
