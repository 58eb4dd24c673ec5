"""The zoo against the published parameter counts and shapes, and what a wrong model name answers."""

import sys

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gistkit import zoo
from gistkit.zoo.resnet import BasicBlock, ResNet

# With 1000 classes, and of the small-image form with 10. torchvision's documentation gives the former; of the networks
# that it lacks they were summed by hand from the papers' tables (ResNet-1202: He et al., section 4.2, 19.4 M).
PARAMETERS = {
    "vgg16": (138_357_544, 14_982_474), "vgg19": (143_667_240, 20_292_170), "alexnet": (61_100_840, 2_472_266),
    "resnet18": (11_689_512, 11_173_962), "resnet34": (21_797_672, 21_282_122), "resnet50": (25_557_032, 23_520_842),
    "resnet101": (44_549_160, 42_512_970), "resnet152": (60_192_808, 58_156_618), "squeezenet": (1_248_424, 729_034),
    "googlenet": (6_998_552, 5_976_122), "overfeat": (145_920_872, None), "vgg101": (236_294_184, 112_919_114),
    "vgg116": (248_241_704, 124_866_634), "vgg216": (358_125_864, 234_750_794), "vgg316": (468_010_024, 344_634_954),
    "vgg416": (577_894_184, 454_519_114), "nin": (7_595_176, 966_986), "resnet20": (334_072, 269_722),
    "resnet509": (None, 5_203_034), "resnet1202": (None, 19_421_274),
}  # fmt: skip
# One of each family and size class is enough where the numbers are real: the deep ones only repeat its blocks.
TRAINED = ("alexnet", "nin", "resnet18", "squeezenet", "googlenet")


# Which image sizes work is up to stem and head, which these share with shallower ones of their family.
DEEP = {*("resnet101", "resnet152", "resnet509", "resnet1202"), *("vgg101", "vgg116", "vgg216", "vgg316", "vgg416")}


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@torch.no_grad()
def output_shape(model: nn.Module, *shape: int) -> torch.Size:
    """Of a model on the meta device; in inference, where a batch norm there takes half the time."""
    return model.eval()(torch.empty(*shape, device="meta")).shape


def test_fcn_count_and_shape():
    """The paper gives 134 M for FCN-VGG16: VGG's convolutions, its first two linear layers as such, and the scores."""
    convolutions = 138_357_544 - (25088 + 1) * 4096 - (4096 + 1) * 4096 - (4096 + 1) * 1000
    count = convolutions + (25088 + 1) * 4096 + (4096 + 1) * 4096 + (4096 + 1) * 21
    assert count // 10**6 == 134
    with torch.device("meta"):
        model = zoo.fcn()
        assert parameters(model) == count + 21 * 21 * 64 * 64
        for height, width in ((500, 375), (32, 33)):
            assert output_shape(model, 2, 3, height, width) == (2, 21, height, width)
    with pytest.raises(ValueError, match="image_size must be at least 32 for fcn, got 31; resize the images"):
        zoo.fcn(image_size=31)


def test_option_a_shortcut_takes_every_second_pixel_and_pads_with_zeros():
    x = torch.arange(2 * 16 * 5 * 5.0).reshape(2, 16, 5, 5)
    y = ResNet(BasicBlock, (1, 1, 1), 10).get_submodule("layer2.0.downsample")(x)
    assert torch.equal(y[:, :16], x[:, :, ::2, ::2])
    assert y.shape == (2, 32, 3, 3) and y[:, 16:].count_nonzero() == 0


def test_overfeat_reads_6x6_at_231_and_refuses_what_its_pools_would_empty():
    with FakeTensorMode():
        assert zoo.overfeat().get_submodule("features")(torch.empty(1, 3, 231, 231)).shape == (1, 1024, 6, 6)
        assert zoo.overfeat(10, 71)(torch.empty(1, 3, 71, 71)).shape == (1, 10)
        with pytest.raises(RuntimeError, match="too small"):
            zoo.overfeat(10, 71)(torch.empty(1, 3, 70, 70))
    with pytest.raises(ValueError, match="image_size must be at least 71 for overfeat, got 70; resize the images"):
        zoo.overfeat(image_size=70)


def test_small_vggs_tell_images_apart_from_the_start():
    """By He's initialisation alone, which cannot do without batch norm, the cosines are 0.99."""
    torch.manual_seed(0)
    model = zoo.vgg16(num_classes=10, image_size=32)
    with torch.no_grad():
        y = model.features(torch.randn(8, 3, 32, 32)).flatten(1)
    cosines = nn.functional.cosine_similarity(y[:, None], y[None], dim=2)
    assert (cosines.sum() - 8) / 56 < 0.92 and 0.5 < y.square().mean().sqrt() < 2


def test_deep_vgg_counts_by_hand():
    """vDNN: each 100 convolutions more are 20 in every group, as wide as the group."""
    one = [width * (width * 9 + 1) for width in (64, 128, 256, 512, 512)]
    counts = {name: count for name, (count, _) in PARAMETERS.items()}
    assert counts["vgg101"] == counts["vgg19"] + 16 * sum(one) + sum(one[3:])
    for hundreds, name in enumerate(("vgg116", "vgg216", "vgg316", "vgg416"), 1):
        assert counts[name] == counts["vgg16"] + hundreds * 20 * sum(one)


@pytest.mark.parametrize("name", sorted(PARAMETERS.keys() - DEEP))
def test_parameter_counts_and_output_shapes(name):
    count, small = PARAMETERS[name]
    with torch.device("meta"):
        model = zoo.MODELS[name]()
        assert parameters(model) == count
        for size in (33, 64) if small else ():
            other = zoo.MODELS[name](num_classes=10, image_size=size)
            assert parameters(other) == small
            assert output_shape(other, 2, 3, size, size) == (2, 10)
        image = 231 if name == "overfeat" else 224  # the papers'
        assert output_shape(model, 2, 3, image, image) == (2, 1000)
        model = zoo.MODELS[name](num_classes=7, image_size=96)
        assert output_shape(model, 2, 3, 96, 96) == (2, 7)
    if small:
        with pytest.raises(ValueError, match="image_size must be at least 32, got 31"):
            zoo.MODELS[name](image_size=31)


@pytest.mark.parametrize("name", sorted(DEEP))
def test_parameter_counts_of_deep_networks(name):
    """Once each, as making them takes seconds, and with as many layers as their names say."""
    count, small = PARAMETERS[name]
    with torch.device("meta"):
        model = zoo.MODELS[name]() if count else zoo.MODELS[name](num_classes=10)
    assert parameters(model) == (count or small)
    shortcuts = "downsample"  # which no name counts
    layers = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear) and shortcuts not in n]
    assert f"{len(layers)}" == name.removeprefix("resnet").removeprefix("vgg")


@pytest.mark.parametrize("name", TRAINED)
def test_a_seed_fixes_the_parameters_and_gradients_reach_the_first_layer(name):
    torch.manual_seed(0)
    model = zoo.load(name, num_classes=10, image_size=32)
    torch.manual_seed(0)
    again = zoo.load(name, num_classes=10, image_size=32)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    loss = nn.functional.cross_entropy(model(torch.randn(2, 3, 32, 32)), torch.tensor([1, 8]))
    loss.backward()
    first = next(model.parameters())
    assert torch.isfinite(loss) and first.grad is not None and first.grad.count_nonzero() > 0


def test_names_are_torchvisions():
    with FakeTensorMode():
        vgg, alex, res, squeeze = zoo.vgg16(), zoo.alexnet(), zoo.resnet50(), zoo.squeezenet()
    assert {"features.28.weight", "classifier.6.bias"} <= set(vgg.state_dict())
    assert {"features.10.weight", "classifier.1.weight", "classifier.6.bias"} <= set(alex.state_dict())
    assert {"features.3.squeeze.bias", "features.12.expand3x3.weight", "classifier.1.bias"} <= set(squeeze.state_dict())
    keys = {"conv1.weight", "bn1.running_var", "layer1.0.downsample.1.bias", "layer4.2.conv3.weight", "fc.bias"}
    assert keys <= set(res.state_dict())
    assert len(vgg.state_dict()) == 32 and len(alex.state_dict()) == 16 and len(res.state_dict()) == 320
    assert res.get_submodule("layer2.0.conv2").stride == (2, 2) and res.get_submodule("layer2.0.conv1").stride == (1, 1)


def test_pooled_sizes_of_nin_round_up_as_in_caffe():
    sizes = []
    with FakeTensorMode():
        model = zoo.nin()
        for module in model.modules():
            if isinstance(module, nn.MaxPool2d):
                module.register_forward_hook(lambda _m, _x, y: sizes.append(y.shape[-1]))
        model(torch.empty(1, 3, 224, 224))
    assert sizes == [27, 13, 6]


FACTORIES = """
import torch
def both(num_classes, image_size): return torch.nn.Linear(image_size, num_classes)
def keyword(weights=None, **kwargs):
    assert set(kwargs) == {"num_classes"}
    return torch.nn.Linear(1, kwargs["num_classes"])
def neither(): return torch.nn.Linear(3, 4)
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    (tmp_path / "zoo_factories.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(tmp_path)
    yield "zoo_factories"
    sys.modules.pop("zoo_factories", None)


def test_factories_get_the_arguments_that_they_take(factories):
    def shape(name):
        model = zoo.load(f"{factories}:{name}", num_classes=7, image_size=40)
        assert isinstance(model, nn.Linear)
        return model.in_features, model.out_features

    assert shape("both") == (40, 7)
    assert shape("keyword") == (1, 7)
    assert shape("neither") == (3, 4)
