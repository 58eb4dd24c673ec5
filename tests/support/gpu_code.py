"""The Triton kernels that Inductor writes for a GPU, on a machine without one: the graphs of a step are traced on fake
CPU tensors, moved to "cuda" and lowered, and their code is read instead of run. Held to torch 2.13's private names."""

import copy
import functools
import inspect
import re
from types import SimpleNamespace

import torch
from torch._decomp import decompositions
from torch._dynamo import device_interface
from torch._guards import TracingContext
from torch._inductor import codecache, compile_fx, config, scheduler
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from gistkit.compiled.custom import options

DEVICE = torch.device("cuda:0")
H200 = DeviceProperties(
    type="cuda", index=0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32,
)  # fmt: skip


def pretend_gpu(monkeypatch):
    """Have PyTorch, Inductor and Triton take this machine for one with an H200, as far as writing code goes."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0)
    worker, interface = device_interface.CudaInterface.Worker, device_interface.CudaInterface
    torch.use_deterministic_algorithms(False)  # as most people train; tests/conftest.py sets it back
    monkeypatch.setattr(driver, "_active", target)
    monkeypatch.setattr(scheduler, "has_triton", lambda: True)
    monkeypatch.setattr(DeviceProperties, "create", lambda device: H200)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: H200)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(worker, "get_device_properties", staticmethod(lambda device=None: H200))
    monkeypatch.setattr(worker, "current_device", staticmethod(lambda: 0))
    monkeypatch.setattr(interface, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(interface, "get_compute_capability", staticmethod(lambda device=None: 90))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)  # it has images in channels_last
    system = {"device": {"name": "H200"}, "version": {}, "hash": ""}
    monkeypatch.setattr(codecache.CacheBase, "get_system", staticmethod(lambda: system))
    # cuDNN's convolutions give channels_last for channels_last
    monkeypatch.setattr(torch._C, "_conv_determine_backend_memory_format", _format_of_a_convolution)
    # On the CPU a batch norm's statistics are rounded to bf16 for backward; on a GPU they are not.
    source = inspect.getsource(decompositions.native_batch_norm_helper)
    here: dict = {}
    exec(source.replace('if input.device.type == "cpu":', "if False:"), vars(decompositions), here)
    code = here["native_batch_norm_helper"].__code__
    monkeypatch.setattr(decompositions.native_batch_norm_helper, "__code__", code)


def _format_of_a_convolution(x, weight, _):
    last = any(y.is_contiguous(memory_format=torch.channels_last) and y.stride(1) == 1 for y in (x, weight))
    return torch.channels_last if last else torch.contiguous_format


def kernels(make, loss, partitioner=None, *, forward=True):
    """The kernels of forward and those of backward of ``loss(*make())``, each as text without names of its own."""
    return tuple(map(_texts, sources(make, loss, partitioner, forward=forward)))


def sources(make, loss, partitioner=None, *, forward=True):
    """The code of forward and of backward of ``loss(*make())``, as Inductor writes it. ``forward``: whether that of
    forward is written; else it is empty."""
    found = {}

    def lower(graph, example_inputs, is_backward=False, **_):
        mode = next(v for n in graph.graph.nodes if (v := n.meta.get("val")) is not None and hasattr(v, "fake_mode"))
        compile_fx.view_to_reshape(graph)
        graph.recompile()
        written = forward or is_backward
        code, strides = _code(copy.deepcopy(graph), example_inputs, mode.fake_mode, is_backward, written)
        found[is_backward] = code
        if not is_backward:  # so that backward's inputs are laid out as forward's outputs are
            TracingContext.get().output_strides.extend(strides)

        def run(args):
            return graph(*args)

        run._boxed_call = True
        return run

    torch._dynamo.reset()
    words = options(partitioner.settings) if partitioner else {}
    with FakeTensorMode(allow_non_fake_inputs=True), config.patch(fx_graph_cache=False, **words):
        with torch._functorch.config.patch(enable_autograd_cache=False):
            backend = functools.partial(compile_fx.compile_fx, inner_compile=lower)
            torch.compile(loss, backend=backend)(*make()).backward()
    return found[False], found[True]


def reductions(texts):
    """Those kernels whose result depends on how their work is shared out."""
    return [text for text in texts if "reduction" in text.splitlines()[0]]


def _code(graph, inputs, mode, is_backward, written):
    with V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*inputs)
        compile_fx.record_original_output_strides(graph)
        compile_fx._recursive_post_grad_passes(graph, is_inference=False)
        for node in graph.graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = _moved(node.meta["val"], mode)
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": DEVICE}
        graph.recompile()
        inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
        lowering = GraphLowering(graph, example_inputs=inputs, is_backward=is_backward)
        with V.set_graph_handler(lowering):
            lowering.run(*inputs)
            code = lowering.codegen()[0] if written else ""
            strides = [_strides(x) for x in lowering.graph_outputs]
    return getattr(code, "value", code), strides


def _strides(x):
    strides = x.maybe_get_stride() if hasattr(x, "maybe_get_stride") else None
    return None if strides is None else tuple(int(s) for s in strides)


def _moved(x, mode):
    if isinstance(x, torch.Tensor):
        with mode:
            return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=DEVICE)
    return type(x)(_moved(item, mode) for item in x) if isinstance(x, tuple | list) else x


def _texts(code):
    """Heuristics, sizes, numbers of loads, and the body, in which all pointers have one name."""
    texts = []
    for source in re.findall(r"async_compile\.triton\('\w+', '''(.*?)'''", code, re.S):
        head = re.search(r"@triton_heuristics\.(\w+\(\s*(?:size_hints|config)=\{.*?\},.*?)filename", source, re.S)[1]
        loads = re.search(r"'num_load': \d+", source)[0]
        body = source[source.index("@triton.jit") :].split("\n", 2)[2]
        texts.append(" ".join(head.split()) + loads + "\n" + re.sub(r"\b(in_out|in|out)_ptr\d+\b", "p", body))
    return texts
