"""Tensors stored by a code, and read back; merges of models in the format of the base."""

import json

import numpy as np

import dare
from dare.formats.recoding import LossMeter
from dare.inputs.arrays import array_source
from dare.inputs.quantised import read_quantised
from dare.inputs.sources import open_source
from dare.tensors.dtypes import BY_TORCH_NAME
from helpers import read_tensor, save


def reader(raw, first=0):
    """Return what reads merged elements in pieces, from one of their tensor on."""

    def read(size):
        for start in range(0, raw.size, size):
            yield first + start, raw[start : start + size]

    return read


def encoded(code, values, name="l.weight", at=()):
    """Store an array, in one run or in several; return the loss, and the arrays that it becomes."""
    kind = BY_TORCH_NAME[values.dtype.name]
    raw = np.ascontiguousarray(values).reshape(-1).view(kind.carrier)
    described = name, kind, values.shape
    room = {
        own: np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)
        for own, dtype, shape in code.stored(described)
    }

    def put(own, offset, data):
        room[own][offset : offset + data.size] = data

    ends = zip([0, *at], [*at, raw.size], strict=True)
    meters = [code.encode(described, reader(raw[a:b], a), put) for a, b in ends]
    return LossMeter(meter.sums for meter in meters).loss, {
        own: room[own].view(dtype.numpy_type).reshape(shape)
        for own, dtype, shape in code.stored(described)
    }


def decoded(arrays, name="l.weight"):
    """Return what stored arrays read as."""
    source = read_quantised(array_source(arrays, "x"), {})
    info = source.tensors[name]
    raw = np.frombuffer(read_tensor(source, name), info.dtype.numpy_type)
    return raw.reshape(info.shape)


def code_of(arrays, name="l.weight"):
    """Return how stored arrays are coded."""
    return read_quantised(array_source(arrays, "x"), {}).tensors[name].code


def write_model(folder, tensors, *, model_type="llama", layers=2, **settings):
    """Write a quantised model; `settings` are those of its quantisation."""
    save(folder / "model.safetensors", tensors)
    config = {"model_type": model_type, "num_hidden_layers": layers, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return folder


def merge(base, *models, output, **given):
    """Merge in the base's format, unless told otherwise."""
    usual = {"format": "input", "method": "linear", "verbose": False}
    return dare.merge(base=base, models=list(models), output=output, **{**usual, **given})


def stored(path):
    """Return the tensors of a model as they are stored."""
    with open_source(path) as source:
        return {
            name: np.frombuffer(read_tensor(source, name), i.dtype.numpy_type).reshape(i.shape)
            for name, i in source.tensors.items()
        }
