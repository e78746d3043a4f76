"""Whole merges: the same bytes always, nothing lost, nothing changed that should not be."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import deserialize, safe_open
from safetensors.numpy import load_file

import dare
from dare import Request, keep_mask
from dare.tensors.dtypes import WEIGHT_TYPES
from helpers import entry, file_bytes, save, save_shards, sha256, write_recipe

BF16 = ml_dtypes.bfloat16


def llama_like(generator, dtype=BF16, rows=700):
    """Odd sizes, several blocks and chunks, a scalar, an empty tensor and an integer one."""
    shapes = {
        "model.embed_tokens.weight": (rows, 2000),
        "model.layers.0.mlp.up_proj.weight": (333, 77),
        "model.layers.0.self_attn.q_proj.weight": (601, 1000),
        "model.layers.10.input_layernorm.weight": (5,),
        "model.norm.weight": (),
        "nothing": (0, 4),
    }
    arrays = {
        name: np.asarray(0.02 * generator.standard_normal(shape)).astype(dtype)
        for name, shape in shapes.items()
    }
    return arrays | {"position_ids": np.arange(6).reshape(2, 3)}


def tuned(generator, base, size=0.001):
    return {
        name: value
        if value.dtype == np.int64
        else np.asarray(
            value.astype(np.float32) + size * generator.standard_normal(value.shape)
        ).astype(value.dtype)
        for name, value in base.items()
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A base and three fine-tunes, as single files and in shards."""
    folder = tmp_path_factory.mktemp("models")
    generator = np.random.default_rng(1)
    base = llama_like(generator)
    arrays = {"base": base} | {f"m{number}": tuned(generator, base) for number in range(3)}
    for name, shards in zip(arrays, (2, 7, 1, 3), strict=True):
        save(folder / f"{name}.safetensors", arrays[name])
        save_shards(folder / f"{name}-sharded", arrays[name], shards)
    return folder


METHODS = {
    "dare+linear": {},
    "dare+ties": {"ties": {"keep_ratio": 0.5}},
    "dare+trim+sum": {"dare": {"rescale": "l1"}},
}


def recipe(models, output, method="dare+linear", layout=".safetensors", count=3, **settings):
    return Request.of(
        base=models / f"base{layout}",
        models=[models / f"m{number}{layout}" for number in range(count)],
        output=output,
        method=method,
        stages=METHODS.get(method, {}),
        verbose=False,
        **settings,
    )


@pytest.mark.parametrize("method", METHODS)
def test_one_recipe_has_one_sha256(models, tmp_path, method):
    found = set()
    for layout in (".safetensors", "-sharded"):
        for threads in (1, 2, 7):
            for max_memory in ("64MiB", "1GiB"):
                output = tmp_path / "out.safetensors"
                given = recipe(
                    models, output, method, layout, threads=threads, max_memory=max_memory
                )
                dare.merge(given, overwrite=True)
                found.add(sha256(output))
    assert len(found) == 1


@pytest.mark.parametrize("method", [*METHODS, "dare+slerp"])
def test_the_reference_backend_writes_the_same_bytes(models, tmp_path, method):
    fast, slow = tmp_path / "fast.safetensors", tmp_path / "slow.safetensors"
    for output, backend in ((fast, "cpu"), (slow, "reference")):
        dare.merge(recipe(models, output, method, count=2), backend=backend)
    assert sha256(fast) == sha256(slow)


def test_what_is_merged_is_what_the_formula_says(models, tmp_path):
    output = tmp_path / "out.safetensors"
    report = dare.merge(recipe(models, output))
    merged, base = load_file(output), load_file(models / "base.safetensors")
    for name, original in base.items():
        if original.dtype != BF16:
            assert (merged[name] == original).all()
            continue
        origin = original.astype(np.float32).reshape(-1)
        total = np.zeros_like(origin)
        for number in range(3):
            values = load_file(models / f"m{number}.safetensors")[name].astype(np.float32)
            keep = keep_mask(name, origin.size, 0.9, seed=42 + number)
            weight = np.float32(1 / 3 * (1.0 / (1.0 - 0.9)))
            total += weight * np.where(keep, values.reshape(-1) - origin, np.float32(0))
        expected = np.where(total == 0, original.reshape(-1), (origin + total).astype(BF16))
        assert (merged[name].reshape(-1).view(np.uint16) == expected.view(np.uint16)).all()
    assert report.models[0].drop_rate_realised == pytest.approx(0.9, abs=0.002)


def test_the_report_counts_what_is_there(models, tmp_path):
    asked = recipe(models, tmp_path / "out.safetensors", delta_threshold=0.003)
    report = dare.merge(asked)
    assert report.bytes_read == dare.plan(asked).cost.bytes_read
    base = load_file(models / "base.safetensors")
    for number, model in enumerate(report.models):
        values = load_file(models / f"m{number}.safetensors")
        deltas = {
            name: np.abs(values[name].astype(np.float32) - base[name].astype(np.float32))
            for name in base
            if base[name].dtype == BF16
        }
        assert model.over_threshold == sum(
            int((delta > np.float32(0.003)).sum()) for delta in deltas.values()
        )
        assert model.largest_delta == max(delta.max(initial=0) for delta in deltas.values())
        assert model.elements == sum(delta.size for delta in deltas.values())
        kept = sum(
            int(keep_mask(name, delta.size, 0.9, 42 + number).sum())
            for name, delta in deltas.items()
        )
        assert model.drop_rate_realised == 1 - kept / model.elements
    assert json.loads(report.to_json())["bytes_read"] == report.bytes_read
    assert "dropped" in str(report)


@pytest.mark.parametrize(
    ("dtype", "patterns"),
    [
        (BF16, [0x8000, 0x7F81, 0x0001, 0x3F80, 0x7F80]),
        (np.float16, [0x8000, 0x7C01, 0x0001, 0x3C00, 0x7C00]),
        (np.float32, [0x80000000, 0x7F800001, 0x00000001, 0x3F800001, 0x7F800000]),
        (np.float64, [1 << 63, 0x7FF0000000000001, 1, 0x3FF0000000000001, 0x7FF0000000000000]),
        (ml_dtypes.float8_e4m3fn, [0x80, 0x7F, 0x01, 0x38, 0x7E]),
        (ml_dtypes.float8_e5m2, [0x80, 0x7D, 0x01, 0x3C, 0x7C]),
    ],
)
def test_where_everything_is_dropped_the_base_is_there_bit_for_bit(dtype, patterns):
    width = f"u{np.dtype(dtype).itemsize}"
    base = np.array(patterns * 20, width).view(dtype)
    how = {"drop_rate": 1 - 2**-45, "allow_not_finite": True, "verbose": False}
    merged, _ = dare.merge_arrays({"w": base}, [{"w": np.zeros_like(base)}], **how)
    assert (merged["w"].view(width) == base.view(width)).all()


# ---------------------------------------------------------------- nothing dropped

UNCHANGING = {
    "dare+linear": {"drop_rate": 0.0},
    "dare+sum": {"drop_rate": 0.0, "rescale": "l1"},
    "dare+ties": {"drop_rate": 0.0},
    "darex+sum": {"drop_rate": 0.0},
    "della+linear": {"drop_rate": 0.0},
    "trim+linear": {"keep_ratio": 1.0},
    "dare+trim+ties": {"drop_rate": 0.0, "keep_ratio": 1.0},
    "sum": {},
    "linear": {"normalize": True},
    "ties": {},
    "breadcrumbs+sum": {"keep_middle": 1.0, "drop_largest": 0.0},
    "nm+linear": {"n": 4, "m": 4},
    "fourier+sum": {"radius": 0.0},
}


def any_bits(kind, seed):
    """Values of any magnitude, and those at which changes overflow."""
    bits = np.random.default_rng(seed).integers(0, 256, 4000 * kind.itemsize, np.uint8)
    values = bits.view(kind.numpy_type)
    largest = ml_dtypes.finfo(kind.numpy_type).max
    some = np.array([-largest, largest, 0.0, -0.0], kind.numpy_type)
    values = np.concatenate([some if seed else -some, values])
    with np.errstate(invalid="ignore"):  # signalling NaN
        is_finite = np.isfinite(values.astype(np.float64))
    return np.where(is_finite, values, some[2])


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("kind", WEIGHT_TYPES, ids=lambda kind: kind.name)
def test_with_nothing_dropped_one_model_is_there_bit_for_bit(kind, backend):
    base, model = {"w": any_bits(kind, 0)}, {"w": any_bits(kind, 1)}
    for method, settings in UNCHANGING.items():
        how = {"method": method, "backend": backend, "verbose": False, **settings}
        merged, report = dare.merge_arrays(base, [model], **how)
        assert merged["w"].tobytes() == model["w"].tobytes(), method
        assert report.digests.output == report.digests.models[0]
        assert (report.overflowed, report.nans) == (0, 0)
        assert report.models[0].drop_rate_realised in (0, None)
        assert len(report.tensors) == 1


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("own", "given"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float64", "float16")]
)
def test_the_one_model_with_weight_is_there_in_any_type(own, given, backend):
    values = np.random.default_rng(2).standard_normal((3, 90, 50))
    base, model, other = (np.asarray(v, t) for v, t in zip(values, (own, given, own), strict=True))
    for method, settings in UNCHANGING.items():
        weight = 3 if "normalize" in settings else 1
        for models, weights in (([model], [weight]), ([other, model], [0, weight])):
            how = {"method": method, "backend": backend, "verbose": False, **settings}
            merged, report = dare.merge_arrays(
                {"w": base}, [{"w": each} for each in models], weights=weights, **how
            )
            assert merged["w"].tobytes() == model.astype("f4").astype(own).tobytes(), method
            delta = np.abs(model.astype("f4") - base.astype("f4")).max()
            assert report.models[-1].largest_delta == delta


def test_nan_and_its_payload_are_the_models_too():
    bits = np.array([0x7F800001, 0xFFC00123, 0xFF800000, 0x3F800001], np.uint32)
    base, model = {"w": np.ones(4, np.float32)}, {"w": bits.view(np.float32)}
    settings = {"drop_rate": 0.0, "allow_not_finite": True, "verbose": False}
    merged, report = dare.merge_arrays(base, [model], **settings)
    assert merged["w"].view(np.uint32).tolist() == bits.tolist()
    assert report.nans == 2


def test_where_only_one_model_has_a_tensor_the_sum_is_its_own():
    base = {name: np.full(3, 0.1, np.float32) for name in ("a", "b")}
    models = [{"a": np.full(3, 0.7, np.float32)}, {"b": np.full(3, 0.7, np.float32)}]
    merged, _ = dare.merge_arrays(base, models, method="sum", on_missing="base", verbose=False)
    assert {name: set(array.tolist()) for name, array in merged.items()} == {
        name: {float(np.float32(0.7))} for name in base
    }


def test_float64_is_noted_once_where_it_is_computed_with(tmp_path):
    base = {name: np.ones(3) for name in "ab"}
    model = {name: np.full(3, 1.001) for name in "ab"}
    given = write_recipe(tmp_path, base, [model], stages={"dare": {"drop_rate": 0.5}})
    (notice,) = dare.plan(given).warnings
    assert (notice.code, notice.severity) == ("float64", "note")
    assert "2 tensors" in notice.text
    assert notice in dare.merge(given).warnings
    mixed = write_recipe(tmp_path / "mixed", base, [model | {"b": model["b"].astype(np.float32)}])
    assert [notice.code for notice in dare.plan(mixed).warnings] == ["float64"]
    copied = write_recipe(tmp_path / "copied", base, [model], stages={"dare": {"drop_rate": 0.0}})
    assert dare.plan(copied).warnings == ()


def test_float8_is_for_the_matrices_of_layers(tmp_path):
    names = {
        "model.embed_tokens.weight": (8, 4),
        "model.layers.0.mlp.up_proj.weight": (8, 4),
        "model.layers.0.mlp.up_proj.bias": (8,),
        "model.layers.0.input_layernorm.weight": (4,),
        "lm_head.weight": (8, 4),
    }
    base = {name: np.full(shape, 0.3, BF16) for name, shape in names.items()}
    model = {name: (array * 1.5).astype(BF16) for name, array in base.items()}
    given = write_recipe(tmp_path, base, [model], method="sum", dtype="F8_E4M3")
    report = dare.merge(given)
    with safe_open(given.recipe.output, "np") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in names}
    assert kinds.pop("model.layers.0.mlp.up_proj.weight") == "F8_E4M3"
    assert set(kinds.values()) == {"BF16"}
    (notice,) = (n for n in report.warnings if n.code == "plain_float8")
    for words, text in (
        ("1 matrix", notice.text),
        ("4 tensors", notice.text),
        ("BF16", notice.remedy),
    ):
        assert words in text
    base = {"w": np.full(8, 0.25, ml_dtypes.float8_e4m3fn)}  # which stays as it is
    given = write_recipe(tmp_path / "own", base, [{"w": base["w"] + base["w"]}], method="sum")
    report = dare.merge(given)
    with safe_open(given.recipe.output, "np") as file:
        assert file.get_slice("w").get_dtype() == "F8_E4M3"
    assert [n.code for n in report.warnings if "float8" in n.code] == []


def test_a_directory_of_shards_holds_the_same_model(models, tmp_path):
    whole, shards = tmp_path / "whole.safetensors", tmp_path / "shards"
    first = dare.merge(recipe(models, whole))
    second = dare.merge(recipe(models, shards, shard_size="1MB"))
    assert first.digests.output == second.digests.output
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) == 5  # ids | embedding | mlp | attention | the rest
    assert dare.verify(shards).ok
    merged = load_file(whole)
    for file in files:
        for name, array in load_file(shards / file).items():
            assert array.tobytes() == merged[name].tobytes()


def test_other_models_do_not_change_a_models_mask(tmp_path):
    base = {"w": np.zeros(1000, np.float32)}
    one, none = {"w": np.ones(1000, np.float32)}, {"w": np.zeros(1000, np.float32)}
    alone, _ = dare.merge_arrays(base, [one], method="dare+sum", verbose=False)
    among, _ = dare.merge_arrays(base, [one, none, none], method="dare+sum", verbose=False)
    assert (alone["w"] == among["w"]).all()


# ---------------------------------------------------------------- other types, values that are none


SUB_BYTE = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E8M0": 8, "F8_E4M3FNUZ": 8}


def _write_sub_byte(path: Path, dtype: str, filled: int, *, weight: float, alone: bool) -> Path:
    """A model with a weight, and tensors of more than a chunk that cannot be computed with."""
    shape = [1100, 1024]
    nbytes = 1100 * 1024 * SUB_BYTE[dtype] // 8
    names = ["a.packed", "base.packed"] if alone else ["a.packed"]
    data = bytes(range(256)) * (nbytes // 256)
    data = data[:-1] + bytes([filled])
    header = {
        name: entry(dtype, shape, n * nbytes, (n + 1) * nbytes) for n, name in enumerate(names)
    }
    end = nbytes * len(names)
    header["w"] = entry("F32", [2], end, end + 8)
    content = data * len(names) + np.full(2, weight, np.float32).tobytes()
    path.write_bytes(file_bytes(header, content))
    return path


@pytest.mark.parametrize("dtype", SUB_BYTE)
def test_types_that_cannot_be_computed_with_are_copied_or_refused(tmp_path, dtype):
    base = _write_sub_byte(tmp_path / "base.safetensors", dtype, 7, weight=0, alone=True)
    same = _write_sub_byte(tmp_path / "same.safetensors", dtype, 7, weight=1, alone=False)
    other = _write_sub_byte(tmp_path / "other.safetensors", dtype, 8, weight=1, alone=False)
    given = dare.Request.of(
        base=base, models=[same], method="sum", output=tmp_path / "o", verbose=False
    )
    dare.merge(given)
    stored = dict(deserialize(base.read_bytes()))
    merged = dict(deserialize((tmp_path / "o" / "model.safetensors").read_bytes()))
    for name in ("a.packed", "base.packed"):
        assert merged[name] == stored[name]
    assert np.frombuffer(merged["w"]["data"], np.float32).tolist() == [1, 1]
    assert dare.verify(tmp_path / "o").ok
    with pytest.raises(dare.MismatchError, match=rf"a\.packed: .*{dtype}.*other"):
        dare.merge(base=base, models=[other], method="sum", output=tmp_path / "p", verbose=False)
    assert not list(tmp_path.glob("p*"))
    delta, again = tmp_path / "d.safetensors", tmp_path / "again.safetensors"
    dare.compress(base, other, delta, lossless=True, verbose=False)
    dare.apply_delta(base, delta, again, verbose=False)
    assert again.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(
    ("kind", "base", "model", "settings", "counts"),
    [
        (np.float32, [0, 0, 0, 0], [np.nan, np.inf, -np.inf, 1], {"scale": 0.5}, (1, 2)),
        (np.float16, [60000] * 10, [65000] * 10, {"scale": 2.0}, (0, 10)),
    ],
)
def test_what_is_not_finite_is_counted_if_it_is_allowed(
    tmp_path, kind, base, model, settings, counts
):
    base, model = {"w": np.array(base, kind)}, {"w": np.array(model, kind)}
    settings |= {"method": "sum", "allow_not_finite": True}
    report = dare.merge(write_recipe(tmp_path, base, [model], **settings))
    assert (report.nans, report.overflowed) == counts
    assert ("overflow", "severe") in [(w.code, w.severity) for w in report.warnings]
    assert f"{counts[1]} merged values" in str(report)
    assert np.isnan(report.models[0].largest_delta) == bool(counts[0])


def test_mixed_storage_types_are_merged_in_float32(tmp_path):
    base = {"w": np.array([1.0, 2.0], np.float32)}
    models = [{"w": np.array([2.0, 2.0], np.float16)}, {"w": np.array([1.0, 4.0], BF16)}]
    given = write_recipe(tmp_path, base, models, method="sum")
    dare.merge(given)
    assert load_file(given.recipe.output)["w"].tolist() == [2.0, 4.0]
