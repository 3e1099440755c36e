"""Networks as users write them: for each, the quantities against autograd, and a few steps of an optimizer."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
import torchvision
from backpack import backpack
from backpack import extend as backpack_extend
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from kfqn_ext.errors import UnsupportedLayerError
from kfqn_ext.extensions import KBFGSQuantities, extend, unextend
from kfqn_ext.geometry import LinearGeometry, register
from kfqn_ext.optim import KBFGS, Minibatch
from tests.optim.family import FAMILY, firsts
from tests.real import watch

F64 = torch.float64
Y = torch.arange(6) % 3


class Net(nn.Module):
    """A network with a forward pass of its own."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._function = forward

    def forward(self, *args: Any) -> Any:
        return self._function(self, *args)


def scalar(output: Any) -> Tensor:
    """A curved mean over data of whatever a model returns."""
    if isinstance(output, dict):
        output = sum(output[key].flatten(1).sum(1) for key in sorted(output))
    output = output if output.ndim else output.unsqueeze(0)
    return (output.sin() + output.square()).flatten(1).sum(1).mean() if output.ndim > 1 else output.square().mean()


def treatments(optimizer: Any) -> dict[str, str]:
    return {row.parameter: row.treatment for row in optimizer._planned.treatments}


def works(
    model: Any,
    *shape: int,
    momentum: tuple[str, ...] = (),
    layers: int | None = None,
    x: Tensor | None = None,
    dtype: torch.dtype = F64,
    tol: float = 1e-10,
) -> None:
    """Quantities equal autograd's; three steps change what is trainable, by the treatment that is expected."""
    model = model.to(dtype)
    x = torch.randn(shape, dtype=dtype) if x is None else x

    def run(m: Any) -> Tensor:
        return scalar(m(x))

    measured = watch.check(model, run, tol)
    assert layers is None or len(measured) == layers, measured
    optimizer = KBFGS(model, lr=1e-3, damping=1.0, curvature_update_freq=1)
    got = treatments(optimizer)
    assert {name for name, t in got.items() if t == "other"} == set(momentum)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            optimizer.step(Minibatch(model, lambda output, _: scalar(output), x, None))
    for name, p in model.named_parameters():
        moved = not torch.equal(p, before[name])
        assert moved == (p.grad is not None and bool(p.grad.any()) and p.requires_grad), name
        state = optimizer.state.get(p, {})
        if got[name] == "Kronecker" and p.grad is not None and p.ndim > 1:
            assert state["H_A"].isfinite().all() and "s_G" in state, name


# ------------------------------------------------------------------ in-place operations


def in_place_activation() -> None:
    works(
        nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.ReLU(True), nn.Flatten(), nn.Linear(36, 5), nn.ReLU(True), nn.Linear(5, 3)
        ),
        6, 2, 5, 5, layers=3,
    )  # fmt: skip


def in_place_sum() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        y += x
        z = net.b(y)
        z *= 2
        return z

    works(Net(forward, a=nn.Conv2d(4, 4, 3, padding=1), b=nn.Conv2d(4, 4, 3)), 6, 4, 5, 5, layers=2)


def in_place_on_a_view() -> None:
    """The output of a linear layer on more than two dimensions is a view, as is that of an unbatched convolution."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        y[..., :2] *= 3
        return net.b(y.mul_(2).relu_()).sigmoid_()

    works(Net(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 3)), 6, 2, 3, 5, layers=2)


def in_place_dropout() -> None:
    net = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5, inplace=True), nn.ReLU(True), nn.Linear(8, 3))
    works(net, 6, 5, layers=2)


# ------------------------------------------------------------------ what a layer is in a network


def module_used_twice() -> None:
    works(Net(lambda net, x: net.a(net.a(x).tanh()), a=nn.Linear(5, 5)), 6, 5, layers=1)
    works(Net(lambda net, x: net.a(x[:4]).sum(1) + net.a(x[2:]).sum(1), a=nn.Linear(5, 4)), 6, 5, layers=1)


def tied_weights() -> None:
    net = Net(lambda net, x: net.c(net.b(net.a(x).tanh())), a=nn.Linear(5, 5), b=nn.Linear(5, 5), c=nn.Linear(5, 3))
    net.b.weight = net.a.weight
    works(net, 6, 5, momentum=("a.weight", "a.bias", "b.bias"))


def embedding_tied_to_the_head() -> None:
    net = Net(
        lambda net, x: net.head(net.hidden(net.embed(x)).tanh()),
        embed=nn.Embedding(7, 5),
        hidden=nn.Linear(5, 5),
        head=nn.Linear(5, 7, bias=False),
    )
    net.head.weight = net.embed.weight
    works(net, x=torch.randint(7, (6, 4)), momentum=("embed.weight",))


def unused_layer() -> None:
    works(Net(lambda net, x: net.a(x), a=nn.Linear(5, 3), b=nn.Linear(5, 3)), 6, 5, layers=1)
    works(Net(lambda net, x: (net.b(x), net.a(x))[1], a=nn.Linear(5, 3), b=nn.Linear(5, 3)), 6, 5, layers=1)


def frozen_weight() -> None:
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    net[2].weight.requires_grad_(False)
    assert watch.check(net.double(), lambda m: scalar(m(torch.ones(6, 5, dtype=F64)))) == {"0"}
    optimizer, before = KBFGS(net, lr=0.1, damping=1.0, curvature_update_freq=1), net[2].weight.clone()
    bias = net[2].bias.detach().clone()
    with pytest.warns(UserWarning, match="Layer 2 has a gradient but was not measured"):
        optimizer.step(Minibatch(net, lambda output, _: scalar(output), torch.randn(6, 5, dtype=F64), None))
    assert torch.equal(net[2].weight, before) and not torch.equal(net[2].bias, bias)


def frozen_bias() -> None:
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    net[0].bias.requires_grad_(False)
    works(net, 6, 5, layers=2)


def frozen_first_layer() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(True), nn.Conv2d(3, 3, 3))
    net[0].requires_grad_(False)
    works(net, 6, 2, 6, 6, layers=1)


def subclass() -> None:
    class Named(nn.Linear):
        """Adds nothing to what it computes."""

    works(nn.Sequential(Named(5, 4), nn.Tanh(), nn.Linear(4, 3)), 6, 5, layers=2)


def subclass_with_its_own_forward() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, 2 * self.weight, self.bias)

    works(nn.Sequential(Doubled(5, 4), nn.Tanh(), nn.Linear(4, 3)), 6, 5, momentum=("0.weight", "0.bias"), layers=1)


def parametrized() -> None:
    for wrap in (parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal):
        net = nn.Sequential(wrap(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3))
        momentum = tuple(name for name, _ in net.named_parameters() if name.startswith("0."))
        works(net.double(), 6, 5, momentum=momentum, layers=1)


def old_weight_norm() -> None:
    for wrap in (torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # deprecated, and in use
            net = nn.Sequential(wrap(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3)).double()
        extend(net)
        optimizer = KBFGS(net, lr=0.01, damping=1.0, curvature_update_freq=1)
        assert all((t == "other") == name.startswith("0.") for name, t in treatments(optimizer).items())
        before = copy.deepcopy(net.state_dict())
        for _ in range(2):
            optimizer.step(Minibatch(net, lambda output, _: scalar(output), torch.randn(6, 5, dtype=F64), None))
        assert any(not torch.equal(v, before[k]) for k, v in net.state_dict().items() if k.startswith("0."))


def lazy_layers() -> None:
    net: Any = nn.Sequential(nn.LazyConv2d(3, 3), nn.Flatten(), nn.LazyLinear(3))
    with pytest.raises(UnsupportedLayerError, match="0.weight, .*lazy parameters.*Run one forward pass"):
        KBFGS(net)
    extend(net)  # extending before is fine
    net(torch.zeros(1, 2, 5, 5))
    works(net, 6, 2, 5, 5, layers=2)


def multihead_attention() -> None:
    net = Net(
        lambda net, x: net.out(net.attention(x, x, x, need_weights=False)[0]),
        attention=nn.MultiheadAttention(4, 2, batch_first=True),
        out=nn.Linear(4, 3),
    )
    works(
        net, 6, 3, 4, layers=1,
        momentum=tuple(name for name, _ in net.named_parameters() if name.startswith("attention.")),
    )  # fmt: skip


def transformer_layer() -> None:
    net = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
    momentum = tuple(name for name, _ in net.named_parameters() if not name.startswith("linear"))
    works(net, 6, 3, 4, momentum=momentum, layers=2)


def norms_and_embeddings() -> None:
    net = Net(
        lambda net, x: net.b(net.group(net.a(net.layer(net.embed(x))).transpose(1, 2)).flatten(1)),
        embed=nn.Embedding(7, 4),
        layer=nn.LayerNorm(4),
        a=nn.Linear(4, 6),
        group=nn.GroupNorm(2, 6),
        b=nn.Linear(18, 3),
    )
    others = ("embed.weight", "layer.weight", "layer.bias", "group.weight", "group.bias")
    works(net, x=torch.randint(7, (6, 3)), momentum=others, layers=2)


def batch_norm() -> None:
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True), nn.Flatten(), nn.Linear(36, 3)).double()
    works(net, 6, 2, 5, 5, momentum=("1.weight", "1.bias"), layers=2)
    optimizer = KBFGS(net, lr=0.01, damping=1.0, curvature_update_freq=1)
    seen = int(net[1].num_batches_tracked)
    for _ in range(2):
        optimizer.step(Minibatch(net, F.cross_entropy, torch.randn(6, 2, 5, 5, dtype=F64), Y))
    assert int(net[1].num_batches_tracked) == seen + 2  # once for each step, though each ran two passes


# ------------------------------------------------------------------ inputs and outputs


def unbatched_input() -> None:
    works(nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(True), nn.Conv2d(3, 2, 2)), 2, 5, 5, layers=2)
    works(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), 5, layers=2)


def keyword_input() -> None:
    works(Net(lambda net, x: net.a(input=net.b(input=x).relu_()), a=nn.Linear(4, 3), b=nn.Linear(5, 4)), 6, 5, layers=2)


def dict_output() -> None:
    net = Net(lambda net, x: {"p": net.a(x), "q": net.b(x).relu_()}, a=nn.Linear(5, 3), b=nn.Linear(5, 2))
    works(net, 6, 5, layers=2)


def functional_forward() -> None:
    """Concatenation, views and weighted sums: what breaks second-order propagation does not matter here."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y = torch.cat((0.5 * net.a(x) + 2 * net.b(x), x[:, :2]), 1)
        return net.c(y.view(-1, 2, 3)).transpose(1, 2).flatten(1)

    works(Net(forward, a=nn.Linear(5, 4), b=nn.Linear(5, 4), c=nn.Linear(3, 2)), 6, 5, layers=3)


def squeezed_output() -> None:
    works(Net(lambda net, x: net.b(net.a(x).tanh()).squeeze(-1), a=nn.Linear(5, 4), b=nn.Linear(4, 1)), 6, 5, layers=2)


def sequences() -> None:
    """Dimensions between the first and the last are locations."""
    for middle in ((3,), (2, 3), (2, 2, 2)):
        works(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), 6, *middle, 5, layers=2)


def border_pixels_left_over() -> None:
    works(nn.Sequential(nn.Conv2d(4, 6, 3, stride=3, padding=2, dilation=2)), 6, 4, 6, 6, layers=1)


def true_number_of_locations() -> None:
    """λ_A = √|T| √λ and λ_G = √λ / √|T| with the locations of the output, padding included."""
    for padding, T in ((0, 1), (1, 9)):
        net: Any = nn.Sequential(nn.Conv2d(2, 3, 3, padding=padding), nn.Flatten())
        optimizer = KBFGS.as_printed(net, lr=0.1, damping=4.0, curvature_update_freq=2)
        optimizer.step(Minibatch(net, lambda output, _: scalar(output), torch.randn(6, 2, 3, 3), None))
        d = optimizer.diagnostics()[0]
        assert d.A is not None and d.G is not None
        assert d.A.damping == pytest.approx(2 * T**0.5) and d.G.damping == pytest.approx(2 / T**0.5)


# ------------------------------------------------------------------ memory, layout, dtype


def frozen_layer_in_a_checkpoint() -> None:
    """Trained around, as adapters are; the forward pass outside of the context that the backward pass is in."""

    def run(checkpointed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        frozen, adapter, head = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4), nn.Linear(4, 3)

        def block(x: Tensor) -> Tensor:
            return (frozen(x) + adapter(x)).tanh()

        def forward(net: Any, x: Tensor) -> Tensor:
            return head(torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if checkpointed else block(x))

        model = extend(Net(forward, frozen=frozen, adapter=adapter, head=head))
        moments, loss = KBFGSQuantities(), scalar(model(torch.randn(6, 4)))
        with backpack(moments):
            loss.backward()
        assert frozen not in moments
        return [moments[layer].dh_bar for layer in (adapter, head)]

    for found, expected in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(found, expected)


def extended_by_backpack() -> None:
    """Its hooks take the place of ours: said at construction; ``unextend`` takes both kinds off."""
    model = backpack_extend(nn.Sequential(nn.Linear(4, 3)))
    with pytest.raises(ValueError, match=r"layers 0\b.*kfqn_ext.unextend\(model\)"):
        KBFGS(model, lr=0.1, damping=0.3)
    optimizer = KBFGS(unextend(model), lr=0.1, damping=0.3)
    optimizer.step(Minibatch(model, F.cross_entropy, torch.randn(6, 4), torch.arange(6) % 3))
    assert optimizer.inverses(model[0].weight) is not None


def checkpointing(reentrant: bool) -> Callable[[], None]:
    def check() -> None:
        def forward(net: Any, x: Tensor) -> Tensor:
            x = net.a(x)
            segment = torch.utils.checkpoint.checkpoint(
                lambda v: net.c(net.b(v.relu()).relu_()), x, use_reentrant=reentrant
            )
            return net.d(segment)

        net = Net(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 4), d=nn.Linear(4, 3)).double()
        plain = copy.deepcopy(net)
        plain._function = lambda net, x: net.d(net.c(net.b(net.a(x).relu()).relu_()))
        x = torch.randn(6, 5, dtype=F64)
        want = watch.watched(plain, lambda m: scalar(m(x)))
        moments = KBFGSQuantities()

        with backpack(moments):
            scalar(extend(net)(x)).backward()
        for name, module in watch.layers(net).items():
            ((seen, g),) = want[name]
            torch.testing.assert_close(moments[module].a_bar[:-1], seen.mean(0))
            torch.testing.assert_close(moments[module].dh_bar, g.sum(0))
        optimizers = [KBFGS(m, lr=0.05, damping=1.0, curvature_update_freq=1) for m in (net, plain)]
        for _ in range(3):
            for m, o in zip((net, plain), optimizers, strict=True):
                o.step(Minibatch(m, lambda output, _: scalar(output), x, None))
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, q)

    return check


def channels_last() -> None:
    net: Any = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True), nn.Conv2d(4, 4, 3, groups=2), nn.ReLU(True), nn.Flatten(),
        nn.Linear(16, 3),
    ).double()  # fmt: skip
    twin: Any = copy.deepcopy(net).to(memory_format=torch.channels_last)
    x = torch.randn(6, 3, 6, 6, dtype=F64)
    optimizers = [KBFGS(m, lr=0.05, damping=1.0, curvature_update_freq=1) for m in (net, twin)]
    for _ in range(3):
        optimizers[0].step(Minibatch(net, F.cross_entropy, x, Y))
        optimizers[1].step(Minibatch(twin, F.cross_entropy, x.to(memory_format=torch.channels_last), Y))
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q.contiguous())
    assert twin[0].weight.is_contiguous(memory_format=torch.channels_last)


def low_precision_parameters() -> None:
    """bfloat16: everything learned is float32, and training goes on."""
    net: Any = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(True), nn.Flatten(), nn.Linear(27, 3)).bfloat16()
    x = torch.randn(12, 2, 5, 5).bfloat16()
    optimizer = KBFGS(net, lr=0.1, damping=1.0, curvature_update_freq=1)
    losses = [float(optimizer.step(Minibatch(net, F.cross_entropy, x, torch.arange(12) % 3))) for _ in range(15)]
    assert losses[-1] < losses[0]
    assert optimizer.state[net[0].weight]["H_A"].dtype == optimizer.state[net[3].weight]["H_G"].dtype == torch.float32


def double_precision() -> None:
    works(nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU(True), nn.Flatten(), nn.Linear(12, 3)), 6, 2, 6, layers=2)


# ------------------------------------------------------------------ refused


def data_parallel() -> None:
    net = nn.Sequential(nn.Linear(5, 3))
    for build in (extend, KBFGS):
        with pytest.raises(UnsupportedLayerError, match="DataParallel.*one process for each device"):
            build(nn.DataParallel(net))


def replicas_of_data_parallel() -> None:
    """Wrapped after the optimizer was built: named in the forward pass."""
    layer = extend(nn.Linear(5, 3))
    replica = layer._replicate_for_data_parallel()
    replica.weight, replica.bias = layer.weight * 1, layer.bias * 1
    with pytest.raises(UnsupportedLayerError, match="DataParallel"):
        replica(torch.randn(6, 5))


def no_layer_at_all() -> None:
    with pytest.raises(UnsupportedLayerError, match="has no layer with a Kronecker block"):
        KBFGS(nn.Sequential(nn.LayerNorm(4)))


def transposed_convolution() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.ConvTranspose2d(3, 2, 2))
    works(net, 6, 2, 5, 5, momentum=("2.weight", "2.bias"), layers=1)


def own_layer() -> None:
    """``register`` teaches a layer; the identities hold at once."""

    class Scaled(nn.Module):
        """h = W (3 x): a linear layer of a scaled input."""

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(3, 5, dtype=F64)), None

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight)

    from kfqn_ext.geometry import base

    register(Scaled, LinearGeometry.of)
    try:
        net, x, moments = (
            extend(nn.Sequential(nn.Linear(5, 5, dtype=F64), Scaled())),
            torch.randn(6, 5, dtype=F64),
            None,
        )
        moments = KBFGSQuantities()
        with backpack(moments):
            scalar(net(x)).backward()
        torch.testing.assert_close(moments[net[1]].a_bar, net[0](x).detach().mean(0))
        assert treatments(KBFGS(net))["1.weight"] == "Kronecker"
    finally:
        del base._REGISTRY[Scaled]


# ------------------------------------------------------------------ torchvision


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "resnet": torchvision.models.resnet18,
    "vgg": torchvision.models.vgg11_bn,
    "mobilenet": torchvision.models.mobilenet_v3_small,
    "densenet": torchvision.models.densenet121,
    "efficientnet": torchvision.models.efficientnet_b0,
    "convnext": torchvision.models.convnext_tiny,
    "regnet": torchvision.models.regnet_y_400mf,
    "vit": torchvision.models.vit_b_16,
    "swin": torchvision.models.swin_t,
}


def covered(name: str) -> tuple[int, int, int, int]:
    """Kronecker layers, all Linear and Conv layers, parameters in blocks, parameters: no number is allocated."""
    with torch.device("cpu" if name == "regnet" else "meta"):  # RegNet computes its widths with tensors
        model = FAMILIES[name]()
    optimizer = KBFGS(model)
    rows = optimizer._planned.treatments
    inside = sum(torch.Size(row.shape).numel() for row in rows if row.treatment == "Kronecker")
    total = sum(torch.Size(row.shape).numel() for row in rows)
    return len(optimizer._planned.layers), len(watch.layers(model)), inside, total


class NarrowResNet(torchvision.models.ResNet):
    """An eighth of the channels: H_A of [4608²] would take minutes to factorize."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.fc = nn.Linear(64, 3)

    def _make_layer(self, block: Any, planes: int, *args: Any, **keywords: Any) -> nn.Sequential:
        if planes == 64:
            self.inplanes, self.conv1, self.bn1 = 8, nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
        return super()._make_layer(block, planes // 8, *args, **keywords)


def narrow_mobilenet() -> nn.Module:
    model: Any = torchvision.models.MobileNetV2(3, 0.25, [[1, 16, 1, 1], [3, 24, 2, 2]])
    last: Any = torchvision.models.mobilenetv2.Conv2dNormActivation(8, 16, 1, activation_layer=nn.ReLU6)
    model.features[-1], model.classifier[1] = last, nn.Linear(16, 3)
    return model


def narrow_vgg() -> nn.Module:
    with torch.device("meta"):  # its classifier of 25088 inputs is replaced
        model: Any = torchvision.models.VGG(nn.Identity(), 3)
    model.features = torchvision.models.vgg.make_layers([4, "M", 8, "M"], batch_norm=True)
    model.avgpool = nn.AdaptiveAvgPool2d(1)
    model.classifier = nn.Sequential(nn.Linear(8, 8), nn.ReLU(True), nn.Dropout(), nn.Linear(8, 3))
    return model


SMALL: dict[str, Callable[[], nn.Module]] = {
    "resnet": lambda: NarrowResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], 3),
    "vgg": narrow_vgg,
    "mobilenet": narrow_mobilenet,
    "densenet": lambda: torchvision.models.DenseNet(4, (2, 2), 8, num_classes=3),
    "efficientnet": lambda: torchvision.models.efficientnet.EfficientNet(
        [torchvision.models.efficientnet.MBConvConfig(2, 3, 1, 8, 8, 1, 1, 1)], 0.1, num_classes=3, last_channel=8
    ),
    "convnext": lambda: torchvision.models.convnext.ConvNeXt(
        [torchvision.models.convnext.CNBlockConfig(8, None, 2)], num_classes=3
    ),
    "regnet": lambda: torchvision.models.regnet.RegNet(
        torchvision.models.regnet.BlockParams([1, 1], [8, 8], [4, 4], [1.0, 1.0], [2, 1], 0.25), num_classes=3
    ),
    "vit": lambda: torchvision.models.VisionTransformer(16, 8, 1, 2, 8, 16, num_classes=3),
    "swin": lambda: torchvision.models.SwinTransformer([4, 4], 8, [1, 1], [2, 2], [2, 2], num_classes=3),
}


def torchvision_family(name: str) -> Callable[[], None]:
    """The family's code with little width: quantities of every layer that is called, two steps of two optimizers."""

    def check() -> None:
        model: Any = SMALL[name]().double()
        size = 16 if name in ("vit", "swin") else 32
        x, y = torch.randn(4, 3, size, size, dtype=F64), torch.arange(4) % 3
        state = torch.get_rng_state()

        def run(m: Any) -> Tensor:
            torch.set_rng_state(state)
            return F.cross_entropy(m(x), y)

        measured = watch.check(model, run, 1e-8)
        optimizers: list[Any] = [FAMILY[row].make(model, lr=1e-3) for row in firsts(lambda member: member.samples)]
        planned = {layer.name for layer in optimizers[0]._planned.layers.values()}
        # Swin's attention multiplies with the weights of these two layers without calling them.
        uncalled = {layer for layer in planned if name == "swin" and layer.endswith((".qkv", ".proj"))}
        assert measured == planned - uncalled and measured and bool(uncalled) == (name == "swin")
        for optimizer in optimizers:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                for _ in range(2):
                    optimizer.step(Minibatch(model, F.cross_entropy, x, y))
            warned = {str(w.message).split()[1] for w in said if "was not measured" in str(w.message)}
            assert warned == uncalled and len(said) == len(uncalled)
        assert all(p.isfinite().all() for p in model.parameters())

    return check
