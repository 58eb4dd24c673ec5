"""Whether compiled steps of many architectures have the bits of ``torch.compile``: small networks of Hugging Face's
transformers, of torchvision and of timm.

    python -m bench.architectures --out bench/results/NAME.jsonl [--only llama,tm_dla34] [--part 0/8] [--max-s 500]

Each takes three steps of SGD under bf16 autocast, from the same weights and batch, compiled plainly, by
``gistkit.compile`` and, where bits may differ, within 75 % of the step's peak. All rebuilds are made, whatever time
they take: more than in practice. Algorithms are deterministic and Inductor chooses no kernel by its time. Columns:

* ``tensors``: the losses and gradients of all steps; ``unequal``: how many of gistkit's differ, ``names``: of some.
* ``cosine``: of all gradients of the first step and plain's.
* ``kept_mib``, ``plain_mib``: what the graphs keep, and keep plainly. ``s``: the three steps with compilation.
* ``repeats``: where bits differ, whether plain ``torch.compile``'s own are those of its first run.

``--part K/N``: every N-th network from the K-th on, for processes side by side. A network that ``--out`` holds is not
run again.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import nn

import gistkit
from bench.rows import environment, read, utc
from gistkit.benchmark.measure import MIB
from gistkit.compiled import partitioner, records_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, TOKENS, WORDS, STEPS, NAMED = 16, 256, 1024, 3, 4
Batch = dict[str, Any]
Bits = dict[str, torch.Tensor]

_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_USUAL = dict(hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512, vocab_size=WORDS)
_HEADS = dict(_USUAL, num_key_value_heads=2)
_GPT = dict(n_layer=2, n_head=4, vocab_size=WORDS, **_IDS)
_T5 = dict(
    d_model=256, d_kv=64, d_ff=512, num_layers=2, num_heads=4, vocab_size=WORDS, decoder_start_token_id=0, **_IDS
)
_PAIR = dict(
    d_model=256, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=512, decoder_ffn_dim=512, vocab_size=WORDS, decoder_start_token_id=2, **_IDS,
)  # fmt: skip
_IMAGE = dict(hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512, image_size=96)
_DINO = dict(_IMAGE, image_size=98)

TRANSFORMERS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", "whole", _HEADS),
    "llama_masked": ("LlamaConfig", "LlamaForCausalLM", "masked", _HEADS),
    "llama_shown": ("LlamaConfig", "LlamaForCausalLM", "shown", _HEADS),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", "whole", _HEADS),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", "masked", dict(_HEADS, head_dim=64)),
    "mistral": ("MistralConfig", "MistralForCausalLM", "whole", _HEADS),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", "whole", dict(_HEADS, num_local_experts=4)),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", "whole", dict(_HEADS, head_dim=64, **_IDS)),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", "whole", dict(_HEADS, head_dim=64, **_IDS)),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", "whole", dict(_HEADS, **_IDS)),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", "whole", dict(_HEADS, **_IDS)),
    "cohere": ("CohereConfig", "CohereForCausalLM", "whole", dict(_HEADS, **_IDS)),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", "whole", dict(_HEADS, **_IDS)),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", "whole", dict(_GPT, n_embd=256)),
    "gptneox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", "whole", _USUAL),
    "bloom": ("BloomConfig", "BloomForCausalLM", "whole", dict(_GPT, hidden_size=256)),
    "opt": ("OPTConfig", "OPTForCausalLM", "whole", dict(_USUAL, ffn_dim=512, word_embed_proj_dim=256, **_IDS)),
    "falcon": ("FalconConfig", "FalconForCausalLM", "whole", dict(_USUAL, **_IDS)),
    "bert": ("BertConfig", "BertForMaskedLM", "masked", _USUAL),
    "bert_classes": ("BertConfig", "BertForSequenceClassification", "classes", _USUAL),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", "masked", dict(_USUAL, **_IDS)),
    "distilbert": ("DistilBertConfig", "DistilBertForMaskedLM", "masked",
                   dict(dim=256, n_layers=2, n_heads=4, hidden_dim=512, vocab_size=WORDS)),
    "electra": ("ElectraConfig", "ElectraForMaskedLM", "masked", dict(_USUAL, embedding_size=128)),
    "deberta": ("DebertaV2Config", "DebertaV2ForMaskedLM", "masked",
                dict(_USUAL, relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=32)),
    "albert": ("AlbertConfig", "AlbertForMaskedLM", "masked", dict(_USUAL, embedding_size=64, **_IDS)),
    "modernbert": ("ModernBertConfig", "ModernBertForMaskedLM", "masked",
                   dict(_USUAL, cls_token_id=1, sep_token_id=2, **_IDS)),
    "xlnet": ("XLNetConfig", "XLNetLMHeadModel", "whole", dict(_GPT, d_model=256, d_inner=512)),
    "t5": ("T5Config", "T5ForConditionalGeneration", "pairs", _T5),
    "t5_gated": ("T5Config", "T5ForConditionalGeneration", "pairs", dict(_T5, feed_forward_proj="gated-gelu")),
    "bart": ("BartConfig", "BartForConditionalGeneration", "pairs", _PAIR),
    "vit": ("ViTConfig", "ViTForImageClassification", "images", _IMAGE),
    "beit": ("BeitConfig", "BeitForImageClassification", "images", dict(_IMAGE, use_relative_position_bias=True)),
    "dinov2": ("Dinov2Config", "Dinov2ForImageClassification", "images", dict(_DINO, drop_path_rate=0.1)),
    "dinov2_swiglu": ("Dinov2Config", "Dinov2ForImageClassification", "images", dict(_DINO, use_swiglu_ffn=True)),
    "swin": ("SwinConfig", "SwinForImageClassification", "images",
             dict(image_size=112, embed_dim=48, depths=[2, 2], num_heads=[2, 4], window_size=7)),
    "convnextv2": ("ConvNextV2Config", "ConvNextV2ForImageClassification", "images",
                   dict(image_size=96, hidden_sizes=[48, 96, 96, 96], depths=[2, 1, 1, 1])),
    "resnet": ("ResNetConfig", "ResNetForImageClassification", "images",
               dict(depths=[1, 1, 1, 1], hidden_sizes=[64, 128, 256, 512])),
    "regnet": ("RegNetConfig", "RegNetForImageClassification", "images",
               dict(depths=[1, 1, 2, 1], hidden_sizes=[32, 64, 96, 128], groups_width=16)),
    "mobilevit": ("MobileViTConfig", "MobileViTForImageClassification", "images", dict(image_size=128)),
}  # fmt: skip
"""Of transformers: a configuration's class, a model's, the kind of batch, and sizes."""

TORCHVISION: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "resnet18": ((ROWS, 3, 96, 96), {}),
    "alexnet": ((ROWS, 3, 96, 96), {}),
    "squeezenet1_1": ((ROWS, 3, 96, 96), {}),
    "shufflenet_v2_x1_0": ((ROWS, 3, 96, 96), {}),
    "mnasnet0_5": ((ROWS, 3, 96, 96), {}),
    "googlenet": ((ROWS, 3, 96, 96), {"aux_logits": False, "init_weights": False}),
    "maxvit_t": ((2, 3, 224, 224), {}),
    "video.r3d_18": ((2, 3, 8, 56, 56), {}),
    "video.r2plus1d_18": ((2, 3, 8, 56, 56), {}),
    "segmentation.fcn_resnet50": ((4, 3, 64, 64), {"weights_backbone": None}),
    "segmentation.lraspp_mobilenet_v3_large": ((4, 3, 96, 96), {"weights_backbone": None}),
}
"""A network of ``torchvision.models``, the shape of its batch, and words."""

TIMM: dict[str, tuple[int, dict[str, Any]]] = {
    **dict.fromkeys(
        (
            "convmixer_768_32", "cspresnet50", "dla34", "efficientnetv2_rw_t", "ghostnet_100", "hrnet_w18_small",
            "inception_next_tiny", "mobilenetv4_conv_small", "mobileone_s0", "nfnet_l0", "poolformer_s12",
            "rdnet_tiny", "regnetx_004", "regnety_004", "repvgg_a0", "res2net50_26w_4s", "resnest14d", "resnet26d",
            "selecsls42b", "skresnet18", "starnet_s1", "tresnet_m", "vgg11_bn", "vovnet39a",
        ),
        (96, {}),
    ),
    **dict.fromkeys(("edgenext_xx_small", "fastvit_t8"), (128, {})),
    **dict.fromkeys(
        ("coatnet_pico_rw_224", "efficientformerv2_s0", "gmlp_ti16_224", "levit_128s", "mixer_s32_224", "pvt_v2_b0",
         "volo_d1_224"),
        (224, {}),
    ),
    **dict.fromkeys(("cait_xxs24_224", "deit3_small_patch16_224", "xcit_nano_12_p16_224"), (224, {"depth": 2})),
}  # fmt: skip
"""A network of timm, the height and width of its images, and words."""


class WithLoss(nn.Module):
    """A network that gives a loss: its own, or that of its last result, by the labels or its mean square."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, targets: torch.Tensor | None = None, **batch: torch.Tensor) -> torch.Tensor:
        if targets is None:
            return self.model(**batch).loss
        result = self.model(*batch.values())
        result = result["out"] if isinstance(result, dict) else result
        result = (result[-1] if isinstance(result, list | tuple) else result).float()
        return F.cross_entropy(result, targets) if result.dim() == 2 else result.square().mean()


def _transformers(name: str) -> tuple[nn.Module, Batch]:
    import transformers

    config, head, kind, words = TRANSFORMERS[name]
    made = getattr(transformers, config)(**words)
    model = getattr(transformers, head)(made)
    classes = torch.randint(2, (ROWS,))
    if kind == "images":
        size = words.get("image_size", 96)
        return model, {"pixel_values": torch.randn(ROWS, 3, size, size), "labels": classes}
    ids = torch.randint(5, WORDS - 1, (ROWS, TOKENS))
    batch: Batch = {"input_ids": ids, "labels": {"classes": classes, "pairs": ids[:, :32]}.get(kind, ids).clone()}
    if kind != "whole":
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][: ROWS // 2, -9:] = int(kind == "shown")
    return model, batch


def _images(model: nn.Module, shape: tuple[int, ...]) -> tuple[nn.Module, Batch]:
    x = torch.randn(shape)
    if len(shape) == 4:
        x, model = x.to(memory_format=torch.channels_last), model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, {"x": x, "targets": torch.randint(10, shape[:1])}


def _torchvision(name: str) -> tuple[nn.Module, Batch]:
    shape, words = TORCHVISION[name]
    room, _, last = f"torchvision.models.{name}".rpartition(".")
    return _images(getattr(importlib.import_module(room), last)(weights=None, num_classes=10, **words), shape)


def _timm(name: str) -> tuple[nn.Module, Batch]:
    size, words = TIMM[name]
    made = importlib.import_module("timm").create_model(name, num_classes=10, **words)
    return _images(made, (ROWS, 3, size, size))


MAKERS: tuple[tuple[str, dict[str, Any], Callable[[str], tuple[nn.Module, Batch]]], ...] = (
    ("", TRANSFORMERS, _transformers), ("tv_", TORCHVISION, _torchvision), ("tm_", TIMM, _timm),
)  # fmt: skip
CLASSES: dict[str, dict[str, Any]] = {
    "bitwise": {},
    "reassociated 75%": {"fidelity": "reassociated", "budget": "75%"},
}
NETWORKS = {prefix + name: (maker, name) for prefix, table, maker in MAKERS for name in table}


def network(name: str) -> tuple[nn.Module, Batch]:
    """A network that gives its loss, and its batch, the same in each call."""
    torch.manual_seed(0)
    maker, plain = NETWORKS[name]
    model, batch = maker(plain)
    return WithLoss(model).train().to(DEVICE), {key: x.to(DEVICE) for key, x in batch.items()}


def steps(name: str, prepare: Callable[[nn.Module], Any]) -> tuple[list[Bits], Any]:
    """Losses and gradients of three steps, and the model."""
    torch._dynamo.reset()
    model, batch = network(name)
    called, found = prepare(model), list[Bits]()
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    for index in range(STEPS):
        torch.manual_seed(index)
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = called(**batch)
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": loss.detach().clone(), **grads})
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    return found, called


def unequal(some: list[Bits], others: list[Bits]) -> list[str]:
    """Names of tensors whose bits differ, by step; NaN is NaN."""
    pairs = [(f"{i}.{n}", x, b.get(n)) for i, (a, b) in enumerate(zip(some, others, strict=True)) for n, x in a.items()]
    return [n for n, x, y in pairs if y is None or not torch.equal(torch.nan_to_num(x), torch.nan_to_num(y))]


def cosine(some: Bits, others: Bits) -> float:
    """Of the angle between all gradients of two steps."""
    x, y = (torch.cat([g.flatten().double() for n, g in sorted(b.items()) if n != "loss"]) for b in (some, others))
    return float(F.cosine_similarity(x, y, dim=0))


def row(name: str) -> dict[str, Any]:
    """One network's row."""
    plain, _ = steps(name, torch.compile)
    found: dict[str, Any] = {"kind": "architecture", "model": name, "tensors": sum(map(len, plain))}
    for label, words in CLASSES.items():
        began = time.perf_counter()
        try:
            ours, model = steps(name, partial(gistkit.compile, **words))
        except Exception as error:  # a budget that cannot be met, or what should not be
            found[label] = {"error": _described(error)}
            continue
        other, records = unequal(plain, ours), records_of(model) or []
        found[label] = {
            "unequal": len(other), "names": other[:NAMED], "cosine": round(cosine(plain[0], ours[0]), 5),
            "kept_mib": round(sum(r.kept_bytes for r in records) / MIB, 2),
            "plain_mib": round(sum(r.plain_bytes for r in records) / MIB, 2),
            "graphs": len(records), "s": round(time.perf_counter() - began, 1),
        }  # fmt: skip
        if other and label == "bitwise":
            found["repeats"] = not unequal(plain, steps(name, torch.compile)[0])
    return found


def _described(error: Exception) -> str:
    """An error's first words; of what a backend of torch.compile raised, its own."""
    inner = getattr(error, "inner_exception", error)
    return f"{type(inner).__name__}: {inner}"[:400]


def rows(
    names: list[str], max_s: float, made: Callable[[str], dict[str, Any]] = row, kind: str = "architecture"
) -> Iterator[dict[str, Any]]:
    """The rows of networks that a function makes, as long as there is time."""
    began = time.perf_counter()
    for name in names:
        if time.perf_counter() - began > max_s:
            print("no time is left for", name, "and those behind it", flush=True)
            return
        try:
            yield made(name)
        except Exception as error:  # a network that plain PyTorch or torch.compile does not take
            yield {"kind": kind, "model": name, "error": _described(error)}
        gc.collect()


def main(argv: list[str] | None = None) -> int:
    """Writes a row for each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(NETWORKS))
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--max-s", type=float, default=float("inf"))
    words = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch._inductor.config.deterministic = True
    torch._inductor.config.triton.autotune_pointwise = False  # block sizes decide where a product is rounded
    for fidelity in partitioner.SHARES:
        partitioner.SHARES[fidelity] = (float("inf"),)
    known = {found["model"] for found in read(words.out)} if words.out.exists() else set()
    part, parts = map(int, words.part.split("/"))
    names = [name for name in words.only.split(",")[part::parts] if name not in known]
    for found in rows(names, words.max_s):
        with words.out.open("a") as file:
            file.write(json.dumps({**found, **environment(DEVICE), "time_utc": utc()}) + "\n")
        print(found, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
