"""Fine-tunes in a live model: the weights that `apply_delta` writes, and the base again after."""

import copy
import gc
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hypothesis_arrays

import dare
from dare.deltas import live
from dare.errors import InputError
from dare.inputs.delta_files import part_names
from dare.inputs.sources import open_source
from dare.output.memory import OnDevice
from dare.tensors.chunks import CHUNK
from dare.tensors.dtypes import BY_TORCH_NAME, STORAGE_TYPES, WEIGHT_TYPES
from helpers import flip_bit, read_tensor, save

SCHEMES = [
    {"drop_rate": 0.9},
    {"drop_rate": 0.0},
    *({"bits": bits, "drop_rate": 0.5} for bits in (4, 2)),
    {"lossless": True},
]
RATES = st.just(0.0) | st.floats(1e-6, 0.99)
EVERY_SCHEME = pytest.mark.parametrize(
    "scheme", SCHEMES, ids=lambda scheme: "-".join(map(str, scheme.values()))
)


def numbers(shape, seed, dtype, base=0.0):
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    with np.errstate(over="ignore"):
        return np.asarray(np.asarray(base, np.float32) + values).astype(dtype)


def small_model(dtype=np.float32):
    """A base and a fine-tune of it: odd sizes, a single number, nothing at all, whole numbers."""
    shapes = {"a.weight": (7, 33), "b.weight": (129,), "scale": (), "none": (0, 3)}
    base = {name: numbers(shape, 1, dtype) for name, shape in shapes.items()}
    base["steps"] = np.arange(5)
    return base, moved(base, 2)


def large_model(elements):
    return {"w": numbers(elements, 1, np.float32)}, {"w": numbers(elements, 2, np.float32)}


def moved(arrays, seed):
    """Other weights; whole numbers as they are."""
    return {
        name: numbers(a.shape, seed, a.dtype, a) if name != "steps" else a
        for name, a in arrays.items()
    }


def write(folder: Path, base, tuned, **scheme) -> Path:
    """Save both, and the fine-tune as a delta file."""
    files = save(folder / "base.safetensors", base), save(folder / "tuned.safetensors", tuned)
    delta = folder / "tuned.delta.safetensors"
    dare.compress(*files, delta, overwrite=True, verbose=False, resume=False, **scheme)
    return delta


def load(folder: Path, base, tuned, **scheme):
    """A delta that is ready to be applied."""
    return dare.load_delta(write(folder, base, tuned, **scheme))


def written_model(folder: Path):
    """The bytes of what `apply_delta` makes of these files."""
    output = folder / "applied.safetensors"
    files = folder / "base.safetensors", folder / "tuned.delta.safetensors"
    how = {"overwrite": True, "verbose": False, "resume": False, "allow_not_finite": True}
    dare.apply_delta(*files, output, **how)
    with open_source(output) as source:
        return {name: read_tensor(source, name) for name in source.tensors}


def copies(arrays):
    return {name: array.copy() for name, array in arrays.items()}


def contents(model):
    """The bytes of all arrays, of NumPy or torch, or of a module."""
    arrays = model.state_dict() if isinstance(model, torch.nn.Module) else model
    return {name: stored_bytes(array) for name, array in arrays.items()}


def stored_bytes(array):
    if isinstance(array, torch.Tensor):
        array = array.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return array.tobytes()


def as_torch(array):
    kind = next(k for k in STORAGE_TYPES.values() if k.torch_name == array.dtype.name)
    raw = torch.from_numpy(array.copy().view(f"i{array.itemsize}"))
    return raw.view(getattr(torch, kind.torch_name))


def there_and_back(delta, model, expected):
    """Apply a delta and remove it; in between the model has the bytes that are expected."""
    before = contents(model)
    delta.apply_(model)
    assert contents(model) == expected
    delta.remove_(model)
    assert contents(model) == before


class Tied(torch.nn.Module):
    """An embedding that is the head as well, a layer, and a buffer."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(11, 6, dtype=dtype)
        self.layer = torch.nn.Linear(6, 6, dtype=dtype)
        self.lm_head = torch.nn.Linear(6, 11, bias=False, dtype=dtype)
        self.lm_head.weight = self.embed_tokens.weight
        self.register_buffer("steps", torch.arange(3))

    def forward(self, tokens):
        return self.lm_head(self.layer(self.embed_tokens(tokens)))


def state_as_numpy(module):
    """A module's tensors as they would be stored."""
    kinds = {kind.torch_name: kind.numpy_type for kind in STORAGE_TYPES.values()}
    return {
        name: np.frombuffer(stored_bytes(tensor), kinds[str(tensor.dtype).removeprefix("torch.")])
        .reshape(tensor.shape)
        .copy()
        for name, tensor in module.state_dict().items()
    }


def tied_files(folder, **scheme):
    """A module, the stored base, and a delta file of a fine-tune of it."""
    torch.manual_seed(0)
    module = Tied()
    tuned = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(torch.randn_like(parameter))
    base = state_as_numpy(module)
    return module, base, write(folder, base, state_as_numpy(tuned), **scheme)


# ---------------------------------------------------------------- the same bits


@EVERY_SCHEME
@pytest.mark.parametrize("kind", WEIGHT_TYPES, ids=lambda kind: kind.name)
def test_weights_are_those_that_apply_delta_writes_and_then_the_bases_again(tmp_path, kind, scheme):
    base, tuned = small_model(kind.numpy_type)
    delta = load(tmp_path, base, tuned, **scheme)
    expected = written_model(tmp_path)
    assert expected != contents(base)
    there_and_back(delta, copies(base), expected)


@given(
    data=st.data(),
    kind=st.sampled_from(WEIGHT_TYPES),
    scheme=st.one_of(
        st.fixed_dictionaries({"drop_rate": RATES, "seed": st.integers(0, 1 << 40)}),
        st.just({"lossless": True}),
    ),
    shape=hypothesis_arrays.array_shapes(min_dims=0, max_side=40),
)
def test_any_bytes_come_back(tmp_path_factory, data, kind, scheme, shape):
    whole = np.dtype(f"u{kind.itemsize}")
    anything = hypothesis_arrays.arrays(whole, shape)
    base, tuned = ({"w": data.draw(anything).view(kind.numpy_type)} for _ in range(2))
    folder = tmp_path_factory.mktemp("any")
    delta = load(folder, base, tuned, **scheme)
    model = copies(base)
    with delta.applied(model):
        assert "lossless" not in scheme or contents(model) == contents(tuned)
    assert contents(model) == contents(base)


# ---------------------------------------------------------------- torch


@EVERY_SCHEME
def test_a_module_with_a_tied_head(tmp_path, scheme):
    module, base, file = tied_files(tmp_path, **scheme)
    weights = module.embed_tokens.weight
    tokens = torch.arange(11)
    before = module(tokens)
    delta = dare.load_delta(file)
    delta.apply_(module)
    assert contents(module) == written_model(tmp_path)
    assert module.embed_tokens.weight is module.lm_head.weight is weights
    assert not torch.equal(module(tokens), before)
    delta.remove_(module)
    assert contents(module) == contents(base)
    assert torch.equal(module(tokens), before)
    assert weights.requires_grad


@pytest.mark.parametrize("kind", BY_TORCH_NAME.values(), ids=lambda kind: kind.name)
def test_torch_tensors_of_every_type(tmp_path, kind):
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 2, (2, 50)).astype(f"u{kind.itemsize}")
    base, tuned = ({"w": row.view(kind.numpy_type)} for row in raw)
    delta = load(tmp_path, base, tuned, lossless=True)
    model = {"w": as_torch(base["w"])}
    there_and_back(delta, model, contents(tuned))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("scheme", [{"drop_rate": 0.9}, {"bits": 2}, {"lossless": True}])
def test_tensors_that_are_not_contiguous(tmp_path, scheme, turned):
    rows = CHUNK // 100 + 3
    base = {"w": numbers((rows, 101), 1, np.float32)}
    tuned = {"w": numbers((rows, 101), 2, np.float32)}
    delta = load(tmp_path, base, tuned, **scheme)
    wide = np.zeros((rows, 202), np.float32)
    model = {"w": torch.from_numpy(wide)[:, ::2]}
    if turned:
        model = {"w": np.zeros((101, rows), np.float32).T}
    model["w"][...] = base["w"] if turned else torch.from_numpy(base["w"])
    there_and_back(delta, model, written_model(tmp_path))
    assert not wide[:, 1::2].any()


@EVERY_SCHEME
def test_tensors_on_a_device_are_changed_chunk_by_chunk(tmp_path, scheme, monkeypatch):
    base = {"w": numbers(2 * CHUNK + 9, 1, ml_dtypes.bfloat16)}
    tuned = {"w": base["w"].copy()}
    tuned["w"][CHUNK:] = numbers(CHUNK + 9, 2, ml_dtypes.bfloat16)  # the first chunk is the base's
    delta = load(tmp_path, base, tuned, **scheme)
    tensor = as_torch(base["w"])
    kind = STORAGE_TYPES["BF16"]

    class Elsewhere(OnDevice):
        """As if the tensor were on another device: what is read is a copy."""

        def read(self, start, count):
            return super().read(start, count).copy()

    def memory(array, _name):
        return kind, tuple(array.shape), Elsewhere(array.view(torch.int16), kind.carrier)

    monkeypatch.setattr(live, "memory_of", memory)
    model = {"w": tensor}
    there_and_back(delta, model, written_model(tmp_path))


def in_another(module):
    outer = torch.nn.Module()
    outer.add_module("model", module)
    return outer


def with_copies_in_its_state(module):
    module.register_state_dict_post_hook(
        lambda _module, state, _prefix, _metadata: state.update(
            {name: tensor.clone() for name, tensor in state.items()}
        )
    )
    return module


def that_gets_other_memory(module):
    """As `.to(device)` does."""
    module.layer.weight.data = module.layer.weight.data.clone()
    return module


@pytest.mark.parametrize("form", [in_another, with_copies_in_its_state, that_gets_other_memory])
def test_a_module_in_another_form(tmp_path, form):
    module, base, file = tied_files(tmp_path)
    delta = dare.load_delta(file)
    model = module if form is that_gets_other_memory else form(module)
    delta.apply_(model)
    assert contents(module) == written_model(tmp_path)
    delta.remove_(form(model) if form is that_gets_other_memory else model)
    assert contents(module) == contents(base)


def test_a_base_that_the_lossless_file_has_under_other_names(tmp_path):
    base, tuned = small_model()
    named = {f"model.{name}": array for name, array in base.items()}
    delta = load(tmp_path, named, tuned, lossless=True)
    there_and_back(delta, copies(named), contents({f"model.{name}": tuned[name] for name in tuned}))


# ---------------------------------------------------------------- what is refused


def refused(delta, model, match):
    before = contents(model)
    with pytest.raises(InputError, match=match):
        delta.apply_(model)
    assert contents(model) == before


def read_only(model):
    model["a.weight"].flags.writeable = False


def one_bit(model):
    model["b.weight"].view(np.uint32)[-1] ^= 1


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (one_bit, r"not the base .* 1 of 5 tensors differ, such as b\.weight\. Nothing"),
        (lambda m: m.update(scale=m["scale"].astype(np.float64)), 'scale, .* dtype="auto"'),
        (lambda m: m.update({"b.weight": np.zeros(128, np.float32)}), r"b\.weight is 128, not 129"),
        (lambda m: m.pop("a.weight"), r"the model has no a\.weight"),
        (lambda m: m.update(steps=m["steps"] + 1), "such as steps"),
        (lambda m: m.update(other=m["a.weight"]), r"a\.weight and other are one tensor in the"),
        (read_only, r"a\.weight: the array is read-only"),
        (lambda m: m.update({"b.weight": torch.empty(129, device="meta")}), "b.weight.*meta"),
        (lambda m: m.update({"b.weight": np.zeros(129, "U3")}), "b.weight.*<U3"),
    ],
    ids=["bit", "type", "shape", "missing", "unchanged", "tied", "read-only", "meta", "text"],
)
def test_a_model_that_is_not_the_base_is_refused(tmp_path, change, match):
    base, tuned = small_model()
    base["other"], tuned["other"] = base["a.weight"].copy(), 2 * tuned["a.weight"]
    model = copies(base)
    change(model)
    arrays = {name: array for name, array in model.items() if isinstance(array, np.ndarray)}
    before = contents(arrays)
    for scheme in SCHEMES:
        with pytest.raises(InputError, match=match):
            load(tmp_path, base, tuned, **scheme).apply_(model)
        assert contents(arrays) == before


def test_a_tensor_that_the_base_lacks_cannot_be_put_into_it(tmp_path):
    base, tuned = small_model()
    tuned |= {"new": np.ones(3, np.float32), "scale": np.ones(2, np.float32)}
    delta = load(tmp_path, base, tuned, lossless=True)
    refused(delta, copies(base), "the base has no new and 1 more of that shape and type")


SHARED = {
    "transposed": lambda: (w := torch.ones(6, 6), w.t()),
    "another shape": lambda: (w := torch.ones(6, 6), w.view(4, 9)),
    "another type": lambda: (w := torch.ones(6, 6), w.view(torch.int32)),
    "overlapping rows": lambda: ((w := torch.ones(9, 6))[:6], w[3:]),
    "part": lambda: (w := torch.ones(6, 6), w[2]),
    "a column": lambda: (w := np.ones((6, 6), np.float32), w[:, 5]),
    "backwards": lambda: (w := np.ones((6, 6), np.float32), w[::-1, ::-1]),
    "both libraries": lambda: (w := np.ones((6, 6), np.float32), torch.from_numpy(w.T)),
    "expanded": lambda: (torch.ones(6).expand(6, 6), torch.ones(2)),
    "sliding": lambda: (torch.ones(12).as_strided((6, 6), (1, 1)), torch.ones(2)),
    "broadcast": lambda: (
        np.ndarray((6, 6), np.float32, np.ones(6, np.float32), 0, (0, 4)),
        np.ones(2),
    ),
}


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("how", SHARED)
def test_memory_shared_in_part_is_refused_before_the_first_write(tmp_path, how, is_stored):
    base = {"w": np.ones((6, 6), np.float32)}
    model = dict(zip(("w", "v"), SHARED[how](), strict=True))
    if is_stored:
        second = np.asarray(model["v"])
        base["v"] = np.ascontiguousarray(second)
    tuned = {n: numbers(a.shape, 1, a.dtype, a) if n == "w" else a for n, a in base.items()}
    for scheme in ({"drop_rate": 0.5}, {"lossless": True}):
        delta = load(tmp_path, base, tuned, **scheme)
        refused(delta, model, "w")
        assert contents(model)["w"] == contents(base)["w"]


def test_memory_side_by_side_or_of_one_tensor_is_not_shared(tmp_path):
    base = {name: np.ones((6, 6), np.float32) for name in ("w", "v", "u")}
    tuned = {name: numbers((6, 6), 1, np.float32) for name in base}
    delta = load(tmp_path, base, tuned, lossless=True)
    wide = torch.ones(6, 12)
    model = {"w": wide[:, ::2], "v": wide[:, 1::2], "u": torch.ones(6, 6), "none": wide[:0]}
    model["alias"] = model["u"]
    delta.apply_(model)
    assert {n: stored_bytes(model[n]) for n in tuned} == contents(tuned)
    assert model["alias"] is model["u"]
    delta.remove_(model)
    assert wide.unique().tolist() == model["u"].unique().tolist() == [1]


def test_memory_that_is_shared_in_between_is_not_written_to(tmp_path):
    base = {name: np.ones((6, 6), np.float32) for name in ("w", "v")}
    tuned = {name: np.full((6, 6), 2, np.float32) for name in base}
    delta = load(tmp_path, base, tuned, lossless=True)
    model = copies(base)
    delta.apply_(model)
    own, model["v"] = model["v"], model["w"].T
    with pytest.raises(InputError, match="w and v"):
        delta.remove_(model)
    assert contents(model) == contents(tuned)
    model["v"] = own
    delta.remove_(model)
    assert contents(model) == contents(base)


def test_threads_wait_for_each_other(tmp_path):
    base = {"w": numbers(2 * CHUNK, 1, np.float32)}
    deltas, results = [], []
    for seed, scheme in enumerate(({"lossless": True}, {"drop_rate": 0.5}), start=2):
        (folder := tmp_path / str(seed)).mkdir()
        path = write(folder, base, {"w": numbers(2 * CHUNK, seed, np.float32)}, **scheme)
        deltas += [dare.load_delta(path)] * 2
        results += [written_model(folder)] * 2
    for _ in range(4):
        model, barrier = copies(base), threading.Barrier(4)

        def apply(number, model=model, barrier=barrier):
            barrier.wait()
            try:
                deltas[number].apply_(model)
            except InputError:
                return None
            return number

        with ThreadPoolExecutor(4) as pool:
            (first,) = (n for n in pool.map(apply, range(4)) if n is not None)
        assert contents(model) == results[first]
        deltas[first].remove_(model)
        assert contents(model) == contents(base)


def test_a_result_that_is_not_the_fine_tune_is_put_back(tmp_path):
    base, tuned = small_model()
    delta = load(tmp_path, base, tuned, lossless=True)
    wrong = replace(delta.notes.tensors["a.weight"], model="0" * 32)
    tensors = {**delta.notes.tensors, "a.weight": wrong}
    delta.notes = replace(delta.notes, tensors=tensors)
    refused(delta, model := copies(base), r"a\.weight")
    with pytest.raises(InputError, match="not applied"):
        delta.remove_(model)


@EVERY_SCHEME
def test_what_others_write_meanwhile_is_noticed(tmp_path, scheme, monkeypatch):
    base, tuned = small_model()
    delta = load(tmp_path, base, tuned, **scheme)
    model, whole = copies(base), delta._put

    def disturbed(target, chunk):
        saved = whole(target, chunk)
        if target.name == "b.weight":
            model["b.weight"][:] = 7
        return saved

    monkeypatch.setattr(delta, "_put", disturbed)
    with pytest.raises(InputError, match=r"b\.weight"):
        delta.apply_(model)
    assert stored_bytes(model["a.weight"]) == stored_bytes(base["a.weight"])


# ---------------------------------------------------------------- applied, and not


def test_applied_twice_and_never_applied(tmp_path):
    base, tuned = small_model()
    delta = load(tmp_path, base, tuned)
    model = copies(base)
    for _ in range(2):
        with pytest.raises(InputError, match="is not applied to this model"):
            delta.remove_(model)
        delta.apply_(model)
        after = contents(model)
        with pytest.raises(InputError, match="is already applied to this model"):
            delta.apply_(model)
        with pytest.raises(InputError, match="is not applied to this model"):
            delta.remove_(copies(model))
        assert contents(model) == after
        delta.remove_(model)
        assert contents(model) == contents(base)


def test_switching_between_fine_tunes(tmp_path):
    base, tuned = small_model()
    other = moved(tuned, 3)
    deltas = [
        load(tmp_path / "one", base, tuned),
        load(tmp_path / "two", base, other, bits=4),
        load(tmp_path / "three", base, other, lossless=True),
    ]
    wanted = [written_model(tmp_path / name) for name in ("one", "two", "three")]
    model = copies(base)
    for turn in (0, 1, 2, 0, 2, 1):
        with deltas[turn].applied(model):
            assert contents(model) == wanted[turn]
        assert contents(model) == contents(base)
    deltas[0].apply_(model)
    with pytest.raises(InputError, match="or another delta is applied to it"):
        deltas[1].apply_(model)
    assert contents(model) == wanted[0]


def test_a_delta_on_top_must_be_removed_first(tmp_path):
    base, tuned = small_model()
    higher = moved(tuned, 4)
    lower = load(tmp_path / "lower", base, tuned, lossless=True)
    upper = load(tmp_path / "upper", tuned, higher)
    model = copies(base)
    lower.apply_(model)
    upper.apply_(model)
    both = contents(model)
    with pytest.raises(InputError, match="changed since the delta was applied"):
        lower.remove_(model)
    assert contents(model) == both
    upper.remove_(model)
    lower.remove_(model)
    assert contents(model) == contents(base)


@EVERY_SCHEME
def test_training_in_between_is_noticed(tmp_path, scheme):
    module, _, file = tied_files(tmp_path, **scheme)
    delta = dare.load_delta(file)
    delta.apply_(module)
    with torch.no_grad():
        module.layer.bias.add_(1)
    trained = contents(module)
    with pytest.raises(InputError, match=r"layer\.bias changed since the delta was applied"):
        delta.remove_(module)
    assert contents(module) == trained


# ---------------------------------------------------------------- failures


def damage(delta, name, chunk):
    """Flip a bit in what is stored of a chunk."""
    (part, *_) = part_names(delta.notes, name)
    info = delta._file.stored.tensors[part]
    flip_bit(delta.path, 8 * info.position(delta._file.pieces[name][chunk].starts[0]) + 3)


@EVERY_SCHEME
def test_a_damaged_chunk_leaves_the_base_as_it_was(tmp_path, scheme):
    base, tuned = large_model(4 * CHUNK + 5)
    delta = load(tmp_path, base, tuned, **scheme)
    damage(delta, "w", 3)
    refused(delta, model := copies(base), "chunk 3 of w has changed since it was written")
    damage(delta, "w", 3)
    delta.apply_(model)
    assert contents(model) == written_model(tmp_path)


@EVERY_SCHEME
def test_only_a_lossless_delta_needs_its_file_to_be_removed(tmp_path, scheme):
    base = {"w": numbers(2 * CHUNK, 1, np.float32)}
    tuned = {"w": np.nextafter(base["w"], np.float32(9))}
    delta = load(tmp_path, base, tuned, **scheme)
    model = copies(base)
    delta.apply_(model)
    applied = contents(model)
    damage(delta, "w", 1)
    if "lossless" in scheme:
        with pytest.raises(InputError, match="chunk 1 of w has changed since it was written"):
            delta.remove_(model)
        assert contents(model) == applied
        damage(delta, "w", 1)
    delta.path.unlink()  # it is open
    delta.remove_(model)
    assert contents(model) == contents(base)


@pytest.mark.parametrize("scheme", [{}, {"lossless": True}])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_failure_puts_the_base_back_and_a_removal_can_be_finished(
    tmp_path, scheme, error, monkeypatch
):
    base = {name: numbers(50, 1, np.float32) for name in "abcd"}
    tuned = {name: numbers(50, 2, np.float32) for name in "abcd"}
    delta = load(tmp_path, base, tuned, **scheme)
    model = copies(base)

    def fails_at_c(method, call):
        whole = getattr(delta, method)

        def fail(target, *given):
            if target.name == "c":
                raise error
            return whole(target, *given)

        with monkeypatch.context() as patch:
            patch.setattr(delta, method, fail)
            with pytest.raises(error):
                call(model)

    fails_at_c("_put", delta.apply_)
    assert contents(model) == contents(base)
    delta.apply_(model)
    fails_at_c("_put_back", delta.remove_)
    delta.remove_(model)
    assert contents(model) == contents(base)
    with pytest.raises(ZeroDivisionError), delta.applied(model):
        raise ZeroDivisionError
    assert contents(model) == contents(base)


# ---------------------------------------------------------------- memory


def memory_of(work):
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    result = work()
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return after - before, result


@pytest.mark.parametrize(
    ("scheme", "share"),
    [
        ({"drop_rate": 0.9}, 0.1),
        ({"drop_rate": 0.9, "bits": 4}, 0.1),
        ({"lossless": True}, 0.0),
    ],
)
def test_memory_is_the_bases_and_a_tenth_for_the_one_that_is_applied(tmp_path, scheme, share):
    base = {"w": numbers(4 * CHUNK, 1, ml_dtypes.bfloat16)}
    tuned = {"w": (base["w"].astype(np.float32) * 1.01).astype(ml_dtypes.bfloat16)}
    file = write(tmp_path, base, tuned, **scheme)
    with dare.load_delta(file).applied(copies(base)):
        pass  # kernels are loaded, and threads have what they need
    loaded, deltas = memory_of(lambda: [dare.load_delta(file) for _ in range(10)])
    assert loaded < 10 * 30_000
    model = copies(base)
    applied, _ = memory_of(lambda: deltas[0].apply_(model))
    assert applied < (share + 0.01) * base["w"].nbytes + 2 * CHUNK  # lanes of the threads
    assert applied > 0.9 * share * base["w"].nbytes


def test_what_was_kept_for_a_module_that_is_gone_is_let_go(tmp_path):
    module, _, file = tied_files(tmp_path)
    delta = dare.load_delta(file)
    delta.apply_(module)
    assert len(delta._applied) == 1
    del module
    gc.collect()
    other = tied_files(tmp_path / "again")[0]
    with pytest.raises(InputError, match="not applied"):
        delta.remove_(other)
    assert delta._applied == {}
