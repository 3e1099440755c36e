"""How good is each approximation of a layer's Hessian block? On three small nets trained on handwritten digits.

    python examples/hessian_ladder.py [--out docs/curvature] [--docs docs/curvature.md] [--quick] [--only ladder track]

``ladder``: exact blocks beside every rung, BackPACK's curvatures included. ``track``: how the H_A and H_G of K-BFGS and
KFAC come along in training. ``resnet32``: widest layers of a ResNet32 on 128 images, by estimates, in minutes on
two threads; the others take one. Pictures and tables go to --out; with --docs, also between the marks of that file.
"""

import argparse
import copy
import re
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    import backpack
    import torch
    from backpack.extensions import KFAC as BackpackKFAC
    from backpack.extensions import KFLR, KFRA, DiagHessian
    from sklearn.datasets import load_digits
    from torch import Tensor, nn
    from torch.nn.functional import cross_entropy, interpolate

    from kfqn_ext import KBFGS, Minibatch, unextend
    from kfqn_ext.curvature import CurvatureReport, curvature_ladder, estimate_curvature, plot_tracks, track_curvature
    from kfqn_ext.geometry import geometry_of
    from kfqn_ext.linalg.nearest import kron
    from kfqn_ext.optim import KFAC
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is not installed. In the checkout: pip install -e ".[examples]"') from None

Data = tuple[Tensor, Tensor]
Nets = dict[str, tuple[Callable[[], nn.Module], list[str]]]


def mlp() -> nn.Module:
    """Smooth activations, one location."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 10))


def cnn() -> nn.Module:
    """Piecewise linear, so that the exact block is the Gauss-Newton block."""
    layers = [nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(inplace=True)]
    layers += [nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(128, 10)]
    return nn.Sequential(*layers)


class BatchNormNet(nn.Module):
    """A convolution before BatchNorm, a skip connection, in-place operations."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.last = nn.Linear(96, 10)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.relu(self.conv1(x))
        h = self.norm(self.conv2(skip))
        h += skip
        return self.last(self.relu(h).flatten(1))


class ResidualBlock(nn.Module):
    """A basic block of a ResNet for 32 × 32 images."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.relu, self.stride, self.extra = nn.ReLU(inplace=True), stride, out - channels

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        h += nn.functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))
        return self.relu(h)


def resnet32() -> nn.Module:
    """16, 32 and 64 channels, five blocks each: 64 → 64 channels is its widest layer, 36,864 parameters."""
    stages = [(16, 16, 1), (16, 32, 2), (32, 64, 2)]
    blocks = [ResidualBlock(i if k == 0 else o, o, s if k == 0 else 1) for i, o, s in stages for k in range(5)]
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def digits() -> Data:
    """1,797 images, [n, 1, 8, 8], and their labels."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)


def train(model: nn.Module, optimizer: Any, data: Data, steps: int, batch: int, after: Callable[[], None]) -> float:
    """Train on random minibatches; the mean loss of the last ten."""
    losses = []
    for _ in range(steps):
        index = torch.randint(len(data[0]), (batch,))
        losses.append(float(optimizer.step(Minibatch(model, cross_entropy, data[0][index], data[1][index]))))
        after()
    return sum(losses[-10:]) / len(losses[-10:])


def backpack_rungs(model: nn.Module, x: Tensor, y: Tensor) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """BackPACK's KFAC, KFLR, KFRA and DiagHessian as matrices in the paper's order, by layer; and what did not run.

    They are scaled as BackPACK scales them: for a convolution |T| times ``algo_1``'s. There is no homogeneous
    coordinate: weight and bias are separate blocks.
    """
    rungs: dict[str, dict[str, Tensor]] = {name: {} for name, module in model.named_modules() if geometry_of(module)}
    failed = []
    for kind in (BackpackKFAC, KFLR, KFRA, DiagHessian):
        extension, stock = kind(), unextend(copy.deepcopy(model)).double().eval()
        for module in stock.modules():
            if isinstance(module, nn.ReLU):
                module.inplace = False  # BackPACK's hooks do not survive in-place operations
        try:
            torch.manual_seed(0)  # KFAC samples targets
            with backpack.backpack(extension):
                loss = backpack.extend(nn.CrossEntropyLoss())(backpack.extend(stock)(x.double()), y)
                loss.backward()
            for name in rungs:
                as_matrix = diagonal if kind is DiagHessian else separate_factors
                rungs[name][f"BackPACK {kind.__name__}"] = as_matrix(stock.get_submodule(name), extension.savefield)
        except Exception as error:  # noqa: BLE001  # whatever it is, the rung does not run on this net
            failed.append(f"BackPACK's {kind.__name__} does not run here ({type(error).__name__}).")
    return rungs, failed


def separate_factors(layer: Any, field: str) -> Tensor:
    """A ⊗ B for the weight and B for the bias, on the diagonal of one matrix."""
    B, A = getattr(layer.weight, field)
    blocks = [kron(A, B)] + ([] if layer.bias is None else [getattr(layer.bias, field)[0]])
    return torch.block_diag(*blocks)


def diagonal(layer: Any, field: str) -> Tensor:
    """The diagonal of weight and bias, columns of W = [weight, bias] stacked."""
    geometry = geometry_of(layer)
    assert geometry is not None
    bias = None if layer.bias is None else getattr(layer.bias, field)
    return torch.diag(geometry.matrix(getattr(layer.weight, field), bias).mT.flatten())


def ladder(out: Path, data: Data, quick: bool) -> str:
    """Train three nets with K-BFGS and compare all rungs on 128 digits."""
    nets: Nets = {
        "mlp": (mlp, ["5"] if quick else ["1", "3", "5"]),
        "cnn": (cnn, ["0"] if quick else ["0", "2", "5"]),
        "batchnorm": (BatchNormNet, ["conv1"] if quick else ["conv1", "conv2", "last"]),
    }
    x, y = (t[: 16 if quick else 128] for t in data)
    reports, text = dict[str, CurvatureReport](), list[str]()
    for name, (net, layers) in nets.items():
        torch.manual_seed(0)
        model = net()
        optimizer = KBFGS.as_printed(model, lr=0.1, damping=0.3, curvature_update_freq=1)
        loss = train(model, optimizer, data, 5 if quick else 150, 128, lambda: None)
        model.eval()
        rungs, failed = backpack_rungs(model, x, y)
        report = curvature_ladder(model, cross_entropy, x, y, layers, {"K-BFGS": optimizer}, extra=rungs.__getitem__)
        report.plot(out / f"ladder_{name}.png")
        print(f"\n===== {name}, loss {loss:.3f}\n{report}", *failed, sep="\n")
        reports[name] = report
        notes = [f"{layer.name}: {note}" for layer in report for note in layer.notes] + failed
        text.append(f"{name}: loss {loss:.3f} after training. {' '.join(notes)}".rstrip())
    tables = [
        ("Relative Frobenius error ‖M - B‖ / ‖B‖", "error", "{:.3g}", float),
        ("Error of the best multiple of M, √(1 - cosine²)", "cosine", "{:.3g}", off_axis),
        ("Angle between (M + λI)⁻¹g and Newton's (B + λI)⁻¹g, degrees", "angle", "{:.1f}", float),
        ("Share of Newton's decrease on the damped quadratic model", "share", "{:.2f}", float),
    ]
    parts = [f"{title}:\n\n{across(reports, *table)}" for title, *table in tables]
    return "\n\n".join([*parts, "\n".join(f"* {line}" for line in text)])


_LAYERS = 6  # of a table


def off_axis(cosine: float) -> float:
    return max(0.0, round(1 - cosine**2, 14)) ** 0.5


def across(reports: Mapping[str, CurvatureReport], quantity: str, form: str, function: Callable[[float], float]) -> str:
    """One number of every rung of every layer, as Markdown tables of at most so many layers."""
    columns = [(f"{net} {layer.name}", layer) for net, report in reports.items() for layer in report]
    tables = []
    for begin in range(0, len(columns), _LAYERS):
        rows: dict[tuple[str, str], dict[str, str]] = {}
        shown = dict(columns[begin : begin + _LAYERS])
        for title, layer in shown.items():
            for row in layer.rows:
                value = form.format(function(getattr(row, quantity))).replace("nan", "–")
                rows.setdefault((row.rung, row.label), {})[title] = value
        body = [[*names, *(cells.get(title, "") for title in shown)] for names, cells in rows.items()]
        tables.append(markdown([["rung", "paper", *shown], *body]))
    return "\n\n".join(tables)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|---|---|" + "---:|" * (len(rows[0]) - 2), *body])


def track(out: Path, data: Data, quick: bool) -> str:
    """H_A and H_G along training: K-BFGS with T = 1 and 20, and KFAC, on the CNN and before BatchNorm."""
    makers: dict[str, Callable[[nn.Module], Any]] = {
        "K-BFGS, T = 1": lambda model: KBFGS.as_printed(model, lr=0.1, damping=0.3, curvature_update_freq=1),
        "K-BFGS, T = 20": lambda model: KBFGS.as_printed(model, lr=0.1, damping=0.3, curvature_update_freq=20),
        "KFAC": lambda model: KFAC(model, recipe=KFAC.recipe_stable, momentum=0.9, lr=0.1, damping=0.3),
    }
    nets: Nets = {"cnn": (cnn, ["0"] if quick else ["0", "2"]), "batchnorm": (BatchNormNet, ["conv2"])}
    steps = {1, 3} if quick else {1, 2, 5, 10, 20, 40, 60, 80, 100, 140, 180, 200}
    parts = []
    for name, (net, layers) in nets.items():
        size = 4 if quick else 64 if name == "cnn" else 24  # BatchNorm couples data, which costs N times as much
        x, y = (t[:size] for t in data)
        tracks = {}
        for run, make in makers.items():
            torch.manual_seed(0)
            model = net()
            optimizer = make(model)
            tracker = track_curvature(optimizer, model, cross_entropy, x, y, layers, steps=steps, name=run)
            loss = train(model, optimizer, data, max(steps), 128, tracker)
            tracks[run] = tracker.reports
            print(f"{name}, {run}: loss {loss:.4f}")
        plot_tracks(tracks, out / f"track_{name}.png")
        parts.append(track_table(name, layers, tracks))
    return "\n\n".join(parts)


def track_table(net: str, layers: Sequence[str], tracks: Mapping[str, Any]) -> str:
    """The first, the middle and the last measurement of every run, beside gradient descent with the same λ."""
    aims = {"H_A": "H_A_error", "H_G": "H_G_error", "I/λ_G": "start_G_error", "H vs aim": "H_aim_error"}
    aims |= {"H vs (A⊗G+λI)⁻¹": "H_error"}
    exact = {"H vs (B+λI)⁻¹": "H_exact_error", "angle °": "angle", "share": "share"}
    beside = {f"I/λ: {title.removeprefix('H ')}": key for title, key in exact.items()}
    parts, whole = [["run", "layer, step", *aims]], [["run", "layer, step", *exact, *beside]]
    for layer in layers:
        for run, reports in tracks.items():
            for step, report in (reports[0], reports[len(reports) // 2], reports[-1]):
                held = next(row for row in report[layer].rows if row.label == "eq_18")
                plain = report[layer, "λ I (gradient descent)"]
                names = [run, f"{net} {layer}, {step}"]
                parts.append([*names, *_numbers(held, aims)])
                whole.append([*names, *_numbers(held, exact), *_numbers(plain, beside)])
    return f"{markdown(parts)}\n\n{markdown(whole)}"


def _numbers(row: Any, columns: Mapping[str, str]) -> list[str]:
    return [f"{getattr(row, key):.3g}".replace("nan", "–") for key in columns.values()]


def wide_layer(out: Path, data: Data, quick: bool) -> str:
    """Two of a ResNet32's widest layers on 128 images of 32 × 32 pixels, nothing of their 36,864² entries formed."""
    torch.manual_seed(0)
    batch, model, steps = (8 if quick else 128), resnet32(), (2 if quick else 40)
    images = interpolate(data[0], size=(32, 32), mode="bilinear", align_corners=False).expand(-1, 3, -1, -1)
    optimizer = KBFGS.as_printed(model, lr=0.3, damping=3.0, curvature_update_freq=1)
    loss = train(model, optimizer, (images, data[1]), steps, batch, lambda: None)
    model.eval()
    minibatch, probes, start = (images[:batch], data[1][:batch]), 2 if quick else 16, time.perf_counter()
    layers = ["17.conv1"] if quick else ["13.conv2", "17.conv1"]  # the first of the widest layers, and one near the end
    report = estimate_curvature(model, cross_entropy, *minibatch, layers, {"K-BFGS": optimizer}, probes=probes)
    seconds = time.perf_counter() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    report.plot(out / "resnet32.png")
    columns = ["error", "error_se", "cosine", "cosine_se", "angle", "share"]
    time_taken = f"{seconds:.0f} s on {torch.get_num_threads()} threads"
    facts = f"Loss {loss:.3f} after {steps} steps of K-BFGS; {time_taken}, peak memory {memory:.2f} GiB."
    print(report, facts, sep="\n")
    return f"{report.to_markdown(columns)}\n\n{facts}"


# With threads of each: small tensors are done before a second one has woken up.
PARTS = {"ladder": (ladder, 1), "track": (track, 1), "resnet32": (wide_layer, 2)}


def put_between_marks(docs: Path, part: str, text: str) -> None:
    """Replace what stands between ``<!-- part -->`` and ``<!-- end of part -->``."""
    begin, end = f"<!-- {part} -->", f"<!-- end of {part} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    old = docs.read_text()
    if not pattern.search(old):
        raise ValueError(f"{docs} has no marks {begin} … {end}.")
    docs.write_text(pattern.sub(lambda _: f"{begin}\n\n{text}\n\n{end}", old))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/curvature"), help="folder for pictures and tables")
    parser.add_argument("--docs", type=Path, help="file whose marks receive the tables")
    parser.add_argument("--quick", action="store_true", help="a few steps on a few images, to see that it runs")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=["ladder", "track"], help="which parts to run")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    data = digits()
    for part in args.only:
        run, threads = PARTS[part]
        torch.set_num_threads(threads)
        text = run(args.out, data, args.quick)
        (args.out / f"{part}.md").write_text(text + "\n")
        if args.docs is not None:
            put_between_marks(args.docs, part, text)
    print(f"Pictures and tables are in {args.out}.")


if __name__ == "__main__":
    main()
