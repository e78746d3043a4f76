"""Dicts of a GPU's tensors, merged where they are; here this machine plays the GPUs."""

import ctypes
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import cuda_on_host
import dare
from dare import api
from dare.checks.sample import SampledModels
from dare.errors import InputError, NotFiniteError
from dare.inputs.arrays import stored
from dare.inputs.sources import TensorOnGpu
from dare.kernels import OnGpu, core, cuda, reference
from dare.tensors.chunks import CHUNK

pytestmark = pytest.mark.usefixtures("gpu_on_host")

METHODS = {
    "dare+linear": {"drop_rate": 0.7, "embedding_drop_rate": 0.5},
    "dare+ties": {"drop_rate": 0.5, "weight": [1.0, -0.5, 0.25]},
    "trim+ties": {"keep_ratio": 0.3},
    "breadcrumbs+ties": {},
    "linear": {"dtype": "F32", "scale": 0.7},
    "darex+sum": {"drop_rate": 0.9},
    "della+ties": {},
    "karcher": {},
    "dare+sum": {"drop_rate": 0.5, "weight": [1.0, 0.0, 2.0]},
}
ALL_THERE = {"dare+linear", "dare+ties", "trim+ties", "breadcrumbs+ties", "linear", "darex+sum"}
HERE = {"scalar", "short", "steps"}  # what the processor merges or copies
if not cuda_on_host.IS_REAL:  # a real one puts every tensor at an even address
    HERE.add("odd")


class OnFirst(torch.Tensor):
    """A tensor that says it is on a GPU, as the machine plays one."""

    device = torch.device("cuda:0")


class OnSecond(torch.Tensor):
    """One that says it is on another."""

    device = torch.device("cuda:1")


def sent(tensor, kind=OnFirst):
    if cuda_on_host.IS_REAL:
        return tensor.to(kind.device)
    return tensor.as_subclass(kind)


def plain(tensor):
    return torch.Tensor.cpu(tensor).as_subclass(torch.Tensor)


def put(models, kind=OnFirst):
    """Models with the same tensors on a GPU; what was one tensor still is."""
    every = {id(tensor): sent(tensor, kind) for model in models for tensor in model.values()}
    return [{name: every[id(tensor)] for name, tensor in model.items()} for model in models]


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    """The streams that were waited for."""
    waits = Mock()
    if not cuda_on_host.IS_REAL:
        monkeypatch.setattr(torch.cuda, "current_stream", waits)
    return waits


@pytest.fixture(scope="module")
def models():
    random = torch.Generator().manual_seed(5)
    base = {
        "embed.weight": torch.randn(300, 40, generator=random).bfloat16(),
        "long": torch.randn(CHUNK + 3000, generator=random).bfloat16(),
        "wide": torch.randn(70, 801, generator=random),
        "turned": torch.randn(40, 60, generator=random).bfloat16().T,
        "odd": torch.randn(5000, generator=random).bfloat16()[1:4000],
        "short": torch.randn(100, generator=random).bfloat16(),
        "scalar": torch.tensor(0.5),
        "empty": torch.empty(0, 4),
        "steps": torch.arange(600),
    }
    base["lm_head.weight"] = base["embed.weight"]
    tuned = []
    for _ in range(3):
        model = {
            name: tensor + (0.01 * torch.randn(tensor.shape, generator=random)).to(tensor.dtype)
            for name, tensor in base.items()
            if name not in ("steps", "lm_head.weight")
        }
        model["lm_head.weight"] = model["embed.weight"]
        tuned.append(model | {"steps": base["steps"]})
    return [base, *tuned]


def merged(models, **settings):
    base, *tuned = models
    return dare.merge_arrays(base, tuned, verbose=False, **settings)


def assert_same(found, expected):
    """The same bytes, and the same report but for its time and what it says of devices."""
    (ours, report), (theirs, wanted) = found, expected
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape)
        assert stored(plain(ours[name]), name)[2].tobytes() == stored(tensor, name)[2].tobytes()
    ours, theirs = (replace(each, seconds=0, notes=()).to_dict() for each in (report, wanted))
    assert str(ours) == str(theirs)  # NaN is not equal to itself


@pytest.fixture
def traffic(monkeypatch):
    """The bytes that are read of tensors and sent to the GPU, and devices; no sample is read."""
    read, fetch, send = TensorOnGpu.read, cuda.Kernels.fetch, cuda.Kernels.send
    seen = SimpleNamespace(read=[], sent=[], devices=[])

    def reading(tensor, start, into):
        seen.read.append(into.nbytes)
        read(tensor, start, into)

    def fetching(kernels, wanted):
        pairs = list(wanted)
        seen.read.append(sum(into.nbytes for _, into in pairs))
        fetch(kernels, pairs)

    def sending(kernels, raw, place):
        seen.sent.append(raw.nbytes)
        send(kernels, raw, place)

    def unsampled(plan):
        seen.devices.append(plan.device)
        return SampledModels()

    monkeypatch.setattr(TensorOnGpu, "read", reading)
    monkeypatch.setattr(cuda.Kernels, "fetch", fetching)
    monkeypatch.setattr(cuda.Kernels, "send", sending)
    monkeypatch.setattr(api, "take_sample", unsampled)
    return seen


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0", "cpu"])
@pytest.mark.parametrize("method", METHODS)
def test_the_bytes_and_the_report_are_those_of_the_processor(models, method, device, traffic):
    settings = {"method": method, **METHODS[method]}
    found = merged(put(models), device=device, **settings)
    assert {str(tensor.device) for tensor in found[0].values()} == {"cuda:0"}
    taken = traffic.devices.pop()
    read, sent = sum(traffic.read), sum(traffic.sent)
    if device == "auto":
        assert taken == ("auto:0" if method in ALL_THERE else "auto")
    else:
        assert taken == device.removesuffix(":0") + ":0" * (device != "cpu")
    if method in ALL_THERE and device != "cpu":
        assert read == sum(model[name].nbytes for model in models for name in HERE)
        small = (t.nbytes for n, t in found[0].items() if t.nbytes <= core.SHORT_BYTES)
        assert sent == found[0]["steps"].nbytes + sum(small)
    assert_same(found, merged(models, device="cpu", **settings))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", ["dare+ties", "trim+ties"])
def test_what_is_not_finite_is_merged_by_the_processor(models, method, value, traffic):
    """In a chunk after the first, in the base or in a model."""
    base, one, *others = ({**model} for model in models)
    for model, name in ((base, "wide"), (one, "long")):
        model[name] = model[name].clone()
        model[name].view(-1)[-7] = value
    odd = [base, one, *others]
    settings = {"method": method, "allow_not_finite": True}
    assert_same(merged(put(odd), **settings), merged(odd, **settings))
    assert traffic.devices == ["auto:0", "auto"]
    one["long"][-7] = np.nan  # an infinity may be dropped
    odd[0] = models[0]
    with pytest.raises(NotFiniteError) as refused:
        merged(put(odd), method=method)
    with pytest.raises(NotFiniteError) as expected:
        merged(odd, method=method)
    assert str(refused.value) == str(expected.value)


@cuda_on_host.on_host_only
@pytest.mark.parametrize("device", ["auto", "cuda:0"])
def test_tensors_on_several_devices_go_through_the_host(models, device, traffic):
    base, one, *others = put(models)
    (one,) = put([models[1]], OnSecond)
    base = {**base, "wide": models[0]["wide"]}
    found = merged([base, one, *others], device=device, method="dare+ties")
    assert traffic.devices == [device]
    assert {str(tensor.device) for tensor in found[0].values()} == {"cpu", "cuda:0"}
    assert_same(found, merged(models, method="dare+ties"))


@cuda_on_host.on_host_only
def test_a_gpu_that_does_not_have_the_tensors_gets_no_addresses(models, traffic):
    found = merged(put(models), device="cuda:1", method="trim+ties")
    assert traffic.devices == ["cuda:1"]
    assert_same(found, merged(models, method="trim+ties"))


@cuda_on_host.on_host_only
@pytest.mark.parametrize("missing", ["package", "gpu"])
def test_by_default_the_processor_merges_where_no_gpu_can_be_used(
    models, missing, traffic, monkeypatch
):
    if missing == "package":
        monkeypatch.setitem(sys.modules, "cuda.core", None)
    else:
        monkeypatch.setattr(cuda_on_host.Device, "get_all_devices", list)
    assert_same(merged(put(models), method="dare+ties"), merged(models, method="dare+ties"))
    assert traffic.devices == ["auto", "auto"]


def test_more_models_than_a_kernel_takes_are_merged_by_the_processor(models, traffic):
    many = [models[0], *models[1:] * 3]
    settings = {"method": "dare+linear", "device": "cuda"}
    assert_same(merged(put(many), **settings), merged(many, method="dare+linear"))


def test_one_kernel_is_told_of_masks_rows_and_rules_alike(models, traffic):
    """Settings by tensor, some of which the GPU cannot do."""
    rules = [
        {"match": "wide", "method": "della+ties"},
        {"match": "turned", "drop_rate": 0.25},
        {"match": "odd", "method": "karcher"},
    ]
    settings = {"method": "dare+linear", "tensors": rules}
    found = merged(put(models), device="cuda", **settings)
    assert_same(found, merged(models, **settings))


@cuda_on_host.on_host_only
def test_what_was_asked_of_the_tensors_before_is_waited_for(models, waits):
    merged(put(models), method="linear")
    assert {call.args for call in waits.call_args_list} == {(0,)}


def test_nothing_here_can_read_elements_of_a_gpu():
    elements = OnGpu(0, 4096, np.dtype(np.int16), 100)
    part = elements[10:30]
    assert (part.address, part.size, part.nbytes) == (4096 + 20, 20, 40)
    for read in (core.decode, core.encode):
        with pytest.raises((AttributeError, TypeError, ctypes.ArgumentError)):
            read(elements, np.empty(100, np.float32))
    for function in (core.digests, reference.digests):
        with pytest.raises((AttributeError, TypeError, ctypes.ArgumentError)):
            function([elements])
    with pytest.raises((AttributeError, TypeError, ctypes.ArgumentError)):
        list(elements)
    with pytest.raises((AttributeError, TypeError, ctypes.ArgumentError)):
        np.empty(100, np.int16)[:] = elements


def test_arrays_of_other_libraries_are_refused_with_the_remedy():
    class Foreign:
        def __dlpack__(self):
            raise NotImplementedError

    with pytest.raises(InputError, match=r"base: w: .*Foreign.*; give torch\.from_dlpack\(array\)"):
        dare.merge_arrays({"w": Foreign()}, [{"w": np.ones(2)}])
