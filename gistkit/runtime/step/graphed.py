"""Steps as one CUDA graph. A replay costs the host one launch, where an eager step of gistkit issues some thousand:
what a plan costs the host, reruns and sub-batches above all, is paid in the capture alone."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_map_only

from gistkit.capture import uncollected
from gistkit.errors import GistError
from gistkit.runtime.attach import compressed_forward
from gistkit.runtime.program.match_plan import check_capture
from gistkit.runtime.signature import autocast_now, state_kinds
from gistkit.runtime.step.step import ABSENT, check_step, step

WARM_UP = 4
"""Steps before the capture: in the first ones kernels are compiled, the plan is made, and rebuilds and reruns are
compared with what they replace."""
AGAIN = "make a new GraphedStep, or run this one by gistkit.step"


class Replayed:
    """``work(*given)``, which trains ``model`` by one forward and backward: ``warm_up`` times as it is, then captured
    and replayed. ``given`` and what comes back are tensors, nested at will. On a CPU every call is ``work`` itself.

    A replay adds to ``.grad`` as the work itself would. Random numbers come from PyTorch's default generator, which a
    replay moves on likewise. Other steps may come between: a replay reads no gradient, and writes its own tensors."""

    def __init__(self, model: torch.nn.Module, work: Callable[..., Any], warm_up: int = WARM_UP) -> None:
        self._model, self._work, self._warm_up = model, work, warm_up
        forward = compressed_forward(model)
        if forward is not None:
            forward.engine.replayed()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._kind: Any = None
        self._modules: tuple = ()
        self._done = 0
        self.graph_bytes = 0
        """Bytes of the graph's pool; 0 before the capture."""
        self.bare = False
        """Whether the work is to do without what waits for the device: just before the capture and in it."""

    def __call__(self, *given: Any) -> Any:
        leaves, spec = tree_flatten(given)
        kind, modules = (spec, autocast_now(), *map(_kind, leaves)), state_kinds(self._model)
        if self._graph is None:
            self._done = self._done + 1 if (kind, modules) == (self._kind, self._modules) else 1
            self._kind, self._modules = kind, modules
            device = device_of(leaves)
            if self._done < self._warm_up or device is None:
                self.bare = False
                return self._work(*given)
            if self._done == self._warm_up:
                return self._watched(given)
            with torch.cuda.device(device):
                self._capture(given, device)
        self._check(kind, modules)
        with torch.cuda.device(self._given[0].device):
            for own, t in zip(self._given, (t for t in leaves if isinstance(t, torch.Tensor)), strict=True):
                own.copy_(t, non_blocking=True)
            earlier = self._earlier()
            assert self._graph is not None
            self._graph.replay()
            self._leave(earlier)
            return tree_map_only(torch.Tensor, torch.clone, self._found)

    def _watched(self, given: tuple) -> Any:
        """The last step before the capture. Raise GistError where it waits for the device: in the capture that would
        also leave PyTorch's generator unusable."""
        mode, self.bare = torch.cuda.get_sync_debug_mode(), True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that not every wait is detected
            torch.cuda.set_sync_debug_mode("error")
        before = self._state()
        try:
            found = self._work(*given)
        except RuntimeError as error:
            self._done -= 1
            if "synchronizing CUDA operation" not in str(error):
                raise
            raise GistError(
                "a step with a CUDA graph must not wait for the device, and this one does; leave out .item(), .cpu(), "
                "prints and tensors made from Python's numbers on the way, or run gistkit.step"
            ) from error
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        if self._state() != before:
            self._done -= 1
            raise GistError(
                "a step with a CUDA graph must leave parameters and buffers where they are, and this one puts others "
                "in their place; change them in place (add_, copy_), or run gistkit.step"
            )
        return found

    def _capture(self, given: tuple, device: torch.device) -> None:
        """Raise GistError where the work does what no graph can hold."""
        forward = compressed_forward(self._model)
        if forward is not None:
            check_capture(forward.engine.plan, ready=True)
        own = tree_map_only(torch.Tensor, torch.clone, given)
        self._given = [t for t in tree_flatten(own)[0] if isinstance(t, torch.Tensor)]
        if any(t.requires_grad for t in self._given):
            raise ValueError(
                "a captured step must have a batch without gradients, got a tensor that needs one; detach it"
            )
        elsewhere = next((t.device for t in self._given if t.device != device), None)
        if elsewhere is not None:  # the kernels' arguments would hold its values
            raise ValueError(
                f"a captured step must have its whole batch on {device}, got a tensor on {elsewhere}; move it there"
            )
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._addresses = self._state()
        earlier = [p.grad for p in self._parameters]
        self._model.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        torch.clear_autocast_cache()  # a replay would read the casts of an earlier forward's weights
        gc.collect()  # an earlier graph in a cycle of garbage would end within the capture, which forbids that
        torch.cuda.empty_cache()  # for the graph's own pool
        before_bytes = torch.cuda.memory_reserved()
        try:
            # a loader's thread may pin memory meanwhile
            with uncollected(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._found = self._work(*own)
            self._grads = [p.grad for p in self._parameters]
        except (GistError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            cause = str(error).strip().splitlines()[0]
            raise GistError(
                f"the step cannot be captured into a CUDA graph: {cause}; let go of outputs and losses of earlier "
                "forwards, or run gistkit.step"
            ) from error
        finally:
            torch.clear_autocast_cache()
            for parameter, grad in zip(self._parameters, earlier, strict=True):
                parameter.grad = grad
        self._graph, self.graph_bytes = graph, torch.cuda.memory_reserved() - before_bytes

    def _check(self, kind: tuple, modules: tuple) -> None:
        """Raise ValueError where a replay would not be this step."""
        if modules != self._modules:
            model = self._model
            other = [name for name, m in model.named_modules() if m.training is not model.training]
            frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
            raise ValueError(
                "a captured step must find the modules that it was captured with, in their modes, and the same "
                f"parameters frozen; got model.training={model.training}, parts in the other mode {other}, frozen "
                f"{frozen}; put it back, or {AGAIN}"
            )
        if kind != self._kind:
            pairs = zip(kind[1:], self._kind[1:], strict=False)
            got, expected = next((pair for pair in pairs if pair[0] != pair[1]), (kind[0], self._kind[0]))
            raise ValueError(
                "a captured step must be called with what it was captured with (autocast, shape, strides, dtype and "
                f"device of each tensor, other values): {expected}, got {got}; {AGAIN}, or leave such batches out "
                "(drop_last=True)"
            )
        if self._state() != self._addresses:
            raise ValueError(
                f"a captured step must find parameters and buffers where they were, and some have moved (model.to, "
                f"assignments to .data, parts or buffers put in place of others); {AGAIN}"
            )

    def _state(self) -> list[int]:
        return [t.data_ptr() for t in (*self._model.parameters(), *self._model.buffers())]

    def _earlier(self) -> list[torch.Tensor | None]:
        """The gradients that are there, those in the graph's own tensors copied: a replay writes there."""
        pairs = zip(self._parameters, self._grads, strict=True)
        return [g.clone() if (g := p.grad) is not None and g is own else g for p, own in pairs]

    def _leave(self, earlier: list[torch.Tensor | None]) -> None:
        sums, added = [], []
        for parameter, own, before in zip(self._parameters, self._grads, earlier, strict=True):
            if before is None or own is None:
                parameter.grad = own if before is None else before
            else:
                parameter.grad = before
                sums.append(before)
                added.append(own)
        if sums:
            torch._foreach_add_(sums, added)


class GraphedStep(Replayed):
    """:func:`gistkit.step` whose calls, behind the first ``warm_up``, are replays of one CUDA graph.

    Example::

        plan = gistkit.plan(model, images, labels, loss_fn=F.cross_entropy, budget="12GiB", cuda_graph=True)
        gistkit.compress(model, plan)
        step = gistkit.GraphedStep(model, F.cross_entropy)
        for images, labels in batches:  # all of one shape: drop_last=True
            optimizer.zero_grad()
            loss = step(images, labels)
            optimizer.step()

    ``model``: compressed with or without a plan, or plain. ``step(inputs, targets, *others)`` takes and returns what
    ``gistkit.step`` does, adds to ``.grad`` as it does, and gives its bits; the other arguments are its own, too. On a
    GPU the first ``warm_up`` calls are ``gistkit.step`` itself, the next one captures. On a CPU all calls are
    ``gistkit.step``.

    **What is fixed by the capture**: shapes, dtypes and devices of inputs and targets, autocast, the modules' modes,
    which parameters are trained, the way through Python code, and what ``loss_fn`` reads from Python. Parameters,
    buffers, random numbers and the values of the batch are read anew by every replay. With ``verify`` a loss function
    of one's own is compared with its parts in the warm-up only.

    **Memory**: the graph holds a pool of its own, ``graph_bytes`` by PyTorch's allocator, as long as this object lives.
    It has the step's peak without parameters, buffers and batch, and what is lost to the sizes of the allocator's
    blocks; the batch is there a second time. Gradients lie in it, and the next replay writes them anew: clone those
    that are to be kept beyond ``zero_grad()``.

    Raises TypeError and ValueError as ``gistkit.step``, and TypeError for ``DistributedDataParallel``; ValueError for
    a batch, autocast, modules, modes or trained parameters other than the captured ones, a batch that is not wholly on
    the GPU, and where parameters or buffers have moved; :class:`gistkit.PlanMismatchError` for a plan with transfers to
    the host, with sparse forms under a budget, or with reruns that draw random numbers (dropout);
    :class:`gistkit.GistError` for a step that waits for the device or puts other tensors in place of its buffers.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[..., torch.Tensor],
        *,
        sub_batches: int | None = None,
        reduction: str | None = None,
        per_sub_batch_norm: bool = False,
        verify: bool = True,
        warm_up: int = WARM_UP,
    ) -> None:
        check_step(model, loss_fn, sub_batches, reduction, per_sub_batch_norm, verify, name="GraphedStep")
        if isinstance(model, DistributedDataParallel):
            raise TypeError("GraphedStep: model must be no DistributedDataParallel; run its steps without a graph")
        if type(warm_up) is not int or warm_up < WARM_UP:
            raise ValueError(
                f"GraphedStep: warm_up must be an int of at least {WARM_UP}, as plans are made and checked in these "
                f"steps, got {warm_up!r}; leave it out"
            )

        def work(inputs: Any, *targets: Any) -> torch.Tensor:
            words = {"sub_batches": sub_batches, "reduction": reduction, "per_sub_batch_norm": per_sub_batch_norm}
            return step(model, loss_fn, inputs, *targets, verify=verify and not self.bare, **words)

        super().__init__(model, work, warm_up)

    def __call__(self, inputs: Any, targets: Any = ABSENT, *others: Any) -> torch.Tensor:
        """Forward and backward; the batch's loss, detached."""
        return super().__call__(inputs, *(() if targets is ABSENT else (targets, *others)))


def device_of(leaves: list[Any]) -> torch.device | None:
    """The CUDA device of the first tensor on one; None on a CPU."""
    return next((t.device for t in leaves if isinstance(t, torch.Tensor) and t.is_cuda), None)


def _kind(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else leaf
