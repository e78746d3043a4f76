"""A model that becomes a delta file and a model again, by every way there is."""

from __future__ import annotations

import json
import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_deltas import put_together, take_apart

import dare
from dare.deltas.restoring import open_delta
from dare.demo.merges import BASE, TUNED
from dare.errors import DareError, InputError, MismatchError, RecipeError
from dare.inputs.delta_files import DeltaSource
from dare.inputs.opening import open_model
from dare.inputs.sources import open_source
from dare.recipe.document import request_from_document
from dare.recipe.settings import with_files
from dare.tensors.chunks import CHUNK
from helpers import listing, read_elements, save, save_shards, sha256

warnings.simplefilter("ignore", dare.DareWarning)

TYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
NAME = "math.delta.safetensors"
QUIET = {"verbose": False, "threads": 1}


def weights(seed, *shape, scale=1.0, dtype=np.float32):
    values = np.random.default_rng(seed).standard_normal(shape) * scale
    return np.asarray(values).astype(dtype)


def tuned_as(base, seed, scale):
    """Other weights; whole numbers as they are."""
    return {
        name: (w.astype(np.float32) + weights(seed, *w.shape, scale=scale)).astype(w.dtype)
        if name != "positions"
        else w
        for name, w in base.items()
    }


def pair(dtype=np.float32, tuned_dtype=None):
    """A base and a fine-tune: two matrices, a vector, one tensor that is unchanged, integers."""
    base = {
        "embed.weight": weights(1, 40, 12),
        "layer.weight": weights(2, 33, 31),
        "layer.bias": weights(3, 9),
    }
    tuned = {name: w + weights(9, *w.shape, scale=0.1) for name, w in base.items()}
    same = {"frozen.weight": weights(4, 8, 8, dtype=dtype), "positions": np.arange(5)}
    return tuple(
        {name: w.astype(kind) for name, w in arrays.items()} | same
        for arrays, kind in ((base, dtype), (tuned, tuned_dtype or dtype))
    )


@pytest.fixture
def models(tmp_path):
    base, tuned = pair(ml_dtypes.bfloat16)
    return save(tmp_path / "base.safetensors", base), save(tmp_path / "math.safetensors", tuned)


def compress(folder, base, tuned, **asked):
    """Save both and compress; return the base's file, the model's and the report."""
    files = save(folder / "base.safetensors", base), save(folder / "math.safetensors", tuned)
    return *files, dare.compress(*files, folder / NAME, overwrite=True, **asked, **QUIET)


def tensors_of(path):
    source = open_source(path)
    with source:
        return {name: read_elements(source, name) for name in source.tensors}


def floats_of(path):
    """The weights of a file in bfloat16."""
    return {
        name: raw.view(ml_dtypes.bfloat16).astype(np.float32)
        for name, raw in tensors_of(path).items()
        if name != "positions"
    }


def data_of(path):
    """A file without its header."""
    content = path.read_bytes()
    return content[8 + int.from_bytes(content[:8], "little") :]


def merge(base, models, output, method, **settings):
    recipe = dare.Request.of(
        base=base, models=models, output=output, method=method, **settings, **QUIET
    )
    return dare.merge(recipe)


def apply(base, delta, output, **settings):
    dare.apply_delta(base, delta, output, **settings, **QUIET)
    return output


# ---------------------------------------------------------------- native values


@settings(max_examples=10)
@given(
    st.sampled_from(sorted(TYPES)),
    st.sampled_from(sorted(TYPES)),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99]) | st.floats(0, 0.999),
    st.integers(0, 2**40),
    st.sampled_from([(0,), (1,), (127,), (128,), (3, 43), (20, 30), ()]),
)
# Where nothing is dropped a merge copies the model, and base + (model - base) is rounded twice.
@example("F32", "F16", 0.0, 42, (20, 30))
@example("F64", "F32", 0.0, 42, (20, 30))
@example("F32", "BF16", 1e-30, 42, (20, 30))  # the mask keeps all, and a merge copies nothing
def test_native_values_give_what_merging_the_model_gives(
    tmp_path_factory, base_type, tuned_type, rate, seed, shape
):
    folder = tmp_path_factory.mktemp("delta")
    base = {"w": weights(1, *shape, dtype=TYPES[base_type]), "v": weights(2, 5)}
    tuned = {"w": weights(3, *shape, dtype=TYPES[tuned_type]), "v": weights(4, 5)}
    *files, _ = compress(folder, base, tuned, drop_rate=rate, seed=seed)
    applied = apply(files[0], folder / NAME, folder / "applied.safetensors")
    stages = {"dare": {"drop_rate": rate}}
    merged = folder / "merged.safetensors"
    merge(files[0], files[1:], merged, "dare+sum", stages=stages, seed=seed)
    assert data_of(applied) == data_of(merged)
    if base_type == tuned_type or rate == 0:
        assert sha256(applied) == sha256(merged)
    live, delta = {name: array.copy() for name, array in base.items()}, folder / NAME
    with dare.load_delta(delta).applied(live):
        for name, raw in tensors_of(applied).items():
            assert live[name].tobytes() == raw.tobytes()
    assert all(live[name].tobytes() == array.tobytes() for name, array in base.items())


@pytest.mark.parametrize("tuned_type", [np.float32, np.float16])
@pytest.mark.parametrize("rates", [{"[ef]*": 0.0}, {"e*": 0.0, "layer.b*": 0.3}])
@pytest.mark.parametrize("bits", ["native", 4])
def test_tensors_that_the_file_does_not_drop_are_whole(tmp_path, tuned_type, rates, bits):
    asked = {"drop_rate": 0.5, "drop_rates": rates, "bits": bits}
    *files, _ = compress(tmp_path, *pair(np.float32, tuned_type), **asked)
    apply(files[0], tmp_path / NAME, tmp_path / "a.safetensors")
    merge(files[0], [tmp_path / NAME], tmp_path / "b.safetensors", "dare+sum")
    live = {name: raw.copy() for name, raw in pair(np.float32)[0].items()}
    dare.load_delta(tmp_path / NAME).apply_(live)
    outputs = [tensors_of(tmp_path / f"{name}.safetensors") for name in ("a", "b")]
    if bits == "native":
        settings = {"drop_rate": 0.5}
        rules = [dare.TensorRule(match=n, settings={"drop_rate": r}) for n, r in rates.items()]
        stages = {"stages": {"dare": settings}, "tensors": rules}
        merge(files[0], files[1:], tmp_path / "c.safetensors", "dare+sum", **stages)
        outputs.append(tensors_of(tmp_path / "c.safetensors"))
    for output in outputs:
        assert {n: raw.tobytes() for n, raw in output.items()} == {
            name: raw.tobytes() for name, raw in live.items()
        }


def test_a_chunk_of_another_type_is_not_the_bases(tmp_path):
    base, tuned = {"w": np.zeros(4, np.float32)}, {"w": np.ones(4, np.float16)}
    file, *_ = compress(tmp_path, base, tuned, drop_rate=0.0)
    notes, parts = take_apart((tmp_path / NAME).read_bytes())
    del parts["values:w"]
    kind, shape, rows = parts["index"]
    parts["index"] = (kind, shape, (-1).to_bytes(8, "little", signed=True) + rows[8:])
    (tmp_path / NAME).write_bytes(put_together(notes, parts, sound=True))
    with pytest.raises(InputError, match=r"damaged: w has the base's values, in another type"):
        apply(file, tmp_path / NAME, tmp_path / "a.safetensors")


def test_large_tensors_are_stored_chunk_by_chunk(tmp_path):
    base = {"w": weights(1, 2 * CHUNK + 77, dtype=np.float16)}
    tuned = {"w": base["w"].copy()}
    tuned["w"][CHUNK : 2 * CHUNK] += np.float16(0.5)  # the first and the last chunk are unchanged
    for bits in ("native", 2):
        path, _, report = compress(tmp_path, base, tuned, bits=bits)
        file = open_delta(tmp_path / NAME)
        assert [piece.kept for piece in file.pieces["w"]] == [-1, report.kept, -1]
        with DeltaSource(file, open_source(path), rescales=True) as source:
            whole = read_elements(source, "w")
            for start, count in ((0, 10), (CHUNK - 3, 9), (5, 2 * CHUNK + 60), (2 * CHUNK, 77)):
                part = read_elements(source, "w", start, count)
                assert part.tolist() == whole[start : start + count].tolist()


# ---------------------------------------------------------------- values in few bits


def test_the_measured_error_is_that_of_the_file(models, tmp_path):
    base, tuned = map(floats_of, models)
    for asked in ({"drop_rate": 0.5}, {"bits": 2}, {"bits": 4}):
        report = dare.compress(*models, tmp_path / NAME, overwrite=True, **asked, **QUIET)
        source = open_model(tmp_path / NAME, base=open_model(models[0]))
        with source:
            read = {name: read_elements(source, name) for name in base}
        off = change = 0.0
        for name, w in base.items():
            delta = (tuned[name] - w).astype(np.float64)
            found = read[name] if source.delta_of(name).is_change else np.zeros(delta.size)
            off += np.square(found - delta).sum()
            change += np.square(delta).sum()
        assert report.relative_error == pytest.approx(np.sqrt(off / change), rel=1e-5)


def test_changes_that_are_not_finite_are_not_rounded(tmp_path):
    base, tuned = {"w": np.zeros(9, np.float32)}, {"w": np.ones(9, np.float32)}
    tuned["w"][3] = np.nan
    with pytest.raises(MismatchError, match=r"w: has changes that are NaN .*--lossless"):
        compress(tmp_path, base, tuned, bits=4, drop_rate=0.0)
    assert listing(tmp_path) == ["base.safetensors", "math.safetensors"]
    file, *_ = compress(tmp_path, base, tuned, drop_rate=0.0)
    given = file, tmp_path / NAME, tmp_path / "a.safetensors"
    with pytest.raises(InputError, match=r"1 of 9 elements of w is NaN .*allow_not_finite = true"):
        apply(*given)
    apply(*given, allow_not_finite=True)
    assert np.isnan(tensors_of(tmp_path / "a.safetensors")["w"][3])


# ---------------------------------------------------------------- lossless


@given(
    st.sampled_from([*sorted(TYPES), "I64", "BOOL"]),
    st.sampled_from(["same", "near", "far", "other shape", "other type", "missing"]),
    st.integers(0, 50),
)
def test_lossless_gives_the_models_own_file(tmp_path_factory, dtype, how, elements):
    folder = tmp_path_factory.mktemp("delta")
    kind = TYPES.get(dtype) or {"I64": np.int64, "BOOL": np.bool_}[dtype]
    base = weights(1, elements).astype(kind)
    tuned = {
        "same": base,
        "near": np.where(weights(2, elements) > 1, weights(3, elements).astype(kind), base),
        "far": weights(4, elements).astype(kind),
        "other shape": weights(5, elements + 2).astype(kind),
        "other type": weights(6, elements).astype(np.int32),
        "missing": weights(7, 3),
    }[how]
    name = "v" if how == "missing" else "w"
    tuned = {name: tuned, "more": weights(8, 3)}
    *files, _ = compress(folder, {"w": base}, tuned, lossless=True)
    apply(files[0], folder / NAME, folder / "again.safetensors")
    assert sha256(folder / "again.safetensors") == sha256(files[1])
    assert dare.verify(folder / "again.safetensors").ok


def test_lossless_gives_a_folder_back_as_it_was(tmp_path):
    base, tuned = pair(np.float16)
    save_shards(tmp_path / "base", base, 2)
    save_shards(tmp_path / "math", tuned, 3)
    for folder, text in (("base", "{}"), ("math", '{"model_type": "x"}')):
        (tmp_path / folder / "config.json").write_text(text)
        (tmp_path / folder / "tokenizer.json").write_text("the same in both")
    report = dare.compress(
        tmp_path / "base", tmp_path / "math", tmp_path / NAME, lossless=True, **QUIET
    )
    assert report.bits_per_parameter > 0
    notes = open_delta(tmp_path / NAME).notes
    assert {name: file.kind for name, file in notes.files.items() if file.kind != "header"} == {
        "config.json": "whole",
        "model.safetensors.index.json": "whole",
        "tokenizer.json": "base",
    }
    apply(tmp_path / "base", tmp_path / NAME, tmp_path / "again")
    added = {"dare-manifest.json"}
    assert set(listing(tmp_path / "again")) == {*listing(tmp_path / "math")} | added
    for name in listing(tmp_path / "math"):
        assert sha256(tmp_path / "again" / name) == sha256(tmp_path / "math" / name), name
    assert dare.verify(tmp_path / "again").ok
    with pytest.raises(DareError, match="3 weight files"):
        apply(tmp_path / "base", tmp_path / NAME, tmp_path / "x.safetensors")


def test_a_lossless_file_is_read_as_the_model(models, tmp_path):
    dare.compress(*models, tmp_path / NAME, lossless=True, **QUIET)
    for method in ("dare+linear", "ties", "trim+sum"):
        outputs = [tmp_path / f"{name}-{method}.safetensors" for name in "md"]
        for model, output in zip((models[1], tmp_path / NAME), outputs, strict=True):
            merge(models[0], [model], output, method)
        assert sha256(outputs[0]) == sha256(outputs[1])


# ---------------------------------------------------------------- merging from delta files


@pytest.fixture
def three(tmp_path):
    base, _ = pair(ml_dtypes.bfloat16)
    files = [
        save(tmp_path / f"{name}.safetensors", tuned_as(base, seed, 0.05))
        for seed, name in enumerate(("math", "code", "law"), start=20)
    ]
    return save(tmp_path / "base.safetensors", base), files


def compressed(base, models, **asked):
    deltas = [model.with_suffix(".delta.safetensors") for model in models]
    for number, (model, delta) in enumerate(zip(models, deltas, strict=True)):
        dare.compress(base, model, delta, **{"seed": 42 + number, **asked}, **QUIET)
    return deltas


@pytest.mark.parametrize(
    "method",
    ["dare+linear", "dare+sum", "dare+ties", "dare+trim+ties", "darex+linear", "dare+della+linear"],
)
def test_merging_delta_files_gives_the_file_that_merging_the_models_gives(three, tmp_path, method):
    base, models = three
    deltas = compressed(base, models, drop_rate=0.9)
    whole = merge(base, models, tmp_path / "a.safetensors", method)
    from_deltas = merge(base, deltas, tmp_path / "b.safetensors", method)
    assert sha256(tmp_path / "a.safetensors") == sha256(tmp_path / "b.safetensors")
    assert from_deltas.bytes_read < 0.6 * whole.bytes_read
    assert from_deltas.digests.models == whole.digests.models
    again = dare.load_recipe(tmp_path / "b.safetensors")  # the models will do as well
    again = with_files(again.recipe, base, models, tmp_path / "c.safetensors")
    dare.merge(again, verbose=False)
    assert sha256(tmp_path / "c.safetensors") == sha256(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    "method", ["linear", "sum+svc", "ties", "trim+ties", "della+linear", "nm+sum"]
)
@pytest.mark.parametrize("rate", [0.7, 0.9])
def test_a_chain_that_does_not_drop_takes_what_is_left_divided_by_what_was_kept(
    three, tmp_path, method, rate
):
    base, models = three
    deltas = compressed(base, models, drop_rate=rate)
    merge(base, deltas, tmp_path / "a.safetensors", method)
    stages = {"dare": {"drop_rate": rate}}
    merge(base, models, tmp_path / "b.safetensors", f"dare+{method}", stages=stages)
    assert data_of(tmp_path / "a.safetensors") == data_of(tmp_path / "b.safetensors")


@pytest.mark.parametrize(
    ("method", "of_models", "tables"),
    [
        ("slerp", "dare+slerp", {}),
        ("della+linear", "dare+della+linear", {}),  # whose own rate stays
        ("darex+sum", "darex+sum", {"darex": {"drop_rate": 0.7}}),
    ],
)
def test_a_rules_method_makes_up_for_a_drop_as_it_would_alone(
    three, tmp_path, method, of_models, tables
):
    base, models = three[0], three[1][:2]
    deltas = compressed(base, models, drop_rate=0.7)
    given = {"match": "embed.*"}
    rules = [dare.TensorRule(**given, method=method)]
    merge(base, deltas, tmp_path / "a.safetensors", "dare+linear", tensors=rules)
    rules = [dare.TensorRule(**given, method=of_models)]
    tables = {"dare": {"drop_rate": 0.7}, **tables}
    merge(base, models, tmp_path / "b.safetensors", "dare+linear", tensors=rules, stages=tables)
    assert data_of(tmp_path / "a.safetensors") == data_of(tmp_path / "b.safetensors")


def test_rates_and_seeds_are_the_files_unless_the_recipe_says_others(three, tmp_path):
    base, models = three
    deltas = [
        *compressed(base, models[:1], drop_rate=0.5, seed=7),
        *compressed(base, models[1:2], drop_rate=0.8, seed=99, embedding_drop_rate=0.3),
    ]
    report = merge(base, deltas, tmp_path / "a.safetensors", "dare+linear")
    assert [model.seed for model in report.models] == [7, 99]
    own = [
        dare.ModelEntry(file=models[0], seed=7, settings={"drop_rate": 0.5}),
        dare.ModelEntry(file=models[1], seed=99, settings={"drop_rate": 0.8}),
    ]
    rule = dare.TensorRule(match="embed.*", model="code", settings={"drop_rate": 0.3})
    merge(base, own, tmp_path / "b.safetensors", "dare+linear", tensors=(rule,))
    assert data_of(tmp_path / "a.safetensors") == data_of(tmp_path / "b.safetensors")
    assert dare.load_recipe(tmp_path / "a.safetensors").recipe.models[0].settings == {
        "drop_rate": 0.5
    }

    for asked, words in (
        ({"seed": 5}, "seed = 7, and the recipe has drop_rate = 0.5 and seed = 5"),
        ({"stages": {"dare": {"drop_rate": 0.9}}}, "drop_rate = 0.5 .* drop_rate = 0.9"),
        ({"method": "trim+dare+linear"}, "would drop by another mask"),
        ({"stages": {"dare": {"rescale": "l1"}}}, "would drop by another mask"),
    ):
        with pytest.raises(MismatchError, match=words) as error:
            merge(
                base, deltas[:1], tmp_path / "x.safetensors", **{"method": "dare+linear", **asked}
            )
        assert str(error.value).count("delta file") == 1  # once, not for each tensor


def test_delta_files_stand_beside_models_and_others_of_their_kind(three, tmp_path):
    base, models = three
    (native,) = compressed(base, models[:1], drop_rate=0.6)
    dare.compress(base, models[1], tmp_path / "code.delta.safetensors", bits=4, seed=3, **QUIET)
    mixed = [native, tmp_path / "code.delta.safetensors", models[2]]
    merge(base, mixed, tmp_path / "a.safetensors", "linear")
    opened, weights_of_base = open_model(base), floats_of(base)
    expected = {name: w.astype(np.float64) for name, w in weights_of_base.items()}
    for path in mixed:
        source = open_model(path, base=opened)
        with source:
            for name in expected:
                raw = read_elements(source, name)
                if not source.delta_of(name).is_change:
                    raw = raw.view(ml_dtypes.bfloat16).astype(np.float32) - weights_of_base[name]
                expected[name] += raw / 3
    for name, found in floats_of(tmp_path / "a.safetensors").items():
        assert found == pytest.approx(expected[name], rel=2**-8, abs=1e-3)


def test_the_recipe_that_is_advised_for_delta_files_runs(tmp_path):
    add, sort = (tmp_path / f"{name}.delta.safetensors" for name in ("add", "sort"))
    for seed, delta in ((1, add), (2, sort)):
        model = TUNED[delta.name.partition(".")[0]]
        dare.compress(BASE, model, delta, seed=seed, **QUIET)
    for models, dropped in (((add, sort), [True, True]), ((add, TUNED["say"]), [True, False])):
        analysis = dare.analyze(BASE, models)
        assert [model.was_dropped for model in analysis.models] == dropped
        document = {**dare.advise(analysis).recipe, "verbose": False}
        document["output"] = str(tmp_path / "advised.safetensors")
        dare.merge(request_from_document(document, "advice"), overwrite=True)


# ---------------------------------------------------------------- tied tensors


def test_a_tied_head_is_stored_once_and_read_under_both_names(tmp_path):
    embedding = weights(1, 30, 16)
    tuned = embedding + weights(2, 30, 16, scale=0.1)
    folders = []
    for name, table in (("base", embedding), ("math", tuned)):
        folder = tmp_path / name
        tensors = {"model.embed_tokens.weight": table, "lm_head.weight": table.copy()}
        save(folder / "model.safetensors", tensors)
        (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
        folders.append(folder)
    dare.compress(*folders, tmp_path / NAME, drop_rate=0.5, **QUIET)
    assert open_delta(tmp_path / NAME).notes.tensors["lm_head.weight"].tied_to is not None
    apply(folders[0], tmp_path / NAME, tmp_path / "a")
    merge(folders[0], folders[1:], tmp_path / "b", "dare+sum", stages={"dare": {"drop_rate": 0.5}})
    found = tensors_of(tmp_path / "a")
    assert found["lm_head.weight"].tobytes() == found["model.embed_tokens.weight"].tobytes()
    assert sha256(tmp_path / "a" / "model.safetensors") == sha256(
        tmp_path / "b" / "model.safetensors"
    )


# ---------------------------------------------------------------- what is asked for


def test_rates_by_name(models, tmp_path):
    asked = {"drop_rate": 0.9, "embedding_drop_rate": 0.2, "drop_rates": {"*.bias": 0.0}}
    dare.compress(*models, tmp_path / NAME, **asked, **QUIET)
    rates = {n: t.drop_rate for n, t in open_delta(tmp_path / NAME).notes.tensors.items()}
    assert rates == {
        "embed.weight": 0.2,
        "frozen.weight": 0.9,
        "layer.bias": 0.0,
        "layer.weight": 0.9,
        "positions": 0.0,
    }


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, (2, 0.0)),
        ({"bits": 4}, (4, 0.0)),
        ({"bits": "native"}, ("native", 0.5)),
        ({"drop_rate": 0.3}, ("native", 0.3)),
        ({"bits": 3}, "bits = 3: .*native, 4, 2"),
        ({"bits": 8}, "bits = 8: .*native, 4, 2"),
        ({"drop_rate": 1.0}, "drop_rate = 1 "),
    ],
)
def test_what_is_not_given_is_filled_in_and_what_is_not_known_refused(
    models, tmp_path, asked, expected
):
    if isinstance(expected, str):
        with pytest.raises(RecipeError, match=expected):
            dare.compress(*models, tmp_path / NAME, **asked, **QUIET)
        return
    report = dare.compress(*models, tmp_path / NAME, **asked, **QUIET)
    assert (report.bits, report.drop_rate) == expected


def test_a_file_that_lost_much_says_so(models, tmp_path):
    codes = [
        {notice.code for notice in dare.compress(*models, path, **asked, **QUIET).warnings}
        for path, asked in (
            (tmp_path / NAME, {"bits": 4}),
            (tmp_path / f"2{NAME}", {"drop_rate": 0.99}),
        )
    ]
    assert ["lossy" in found for found in codes] == [False, True]


@pytest.mark.parametrize(
    ("bits", "codes", "scale", "expected"),
    [
        # 0.25 as a bfloat16 is 3e80, and -0.25, which stands for odd numbers, is be80
        (8, "80ff007f", "803e", [-32.0, -0.25, 0.0, 31.75]),
        (1, "05", "80be", [-0.25, 0.25, -0.25, 0.25]),
    ],
)
def test_files_of_earlier_versions_with_other_bits_are_read(tmp_path, bits, codes, scale, expected):
    given = {"w": np.zeros(4, np.float32)}, {"w": np.ones(4, np.float32)}
    base, *_ = compress(tmp_path, *given, bits=4, drop_rate=0.0)
    notes, parts = take_apart((tmp_path / NAME).read_bytes())
    notes["bits"] = bits
    stored = bytes.fromhex(codes)
    parts["values:w"] = ("U8", (len(stored),), stored)
    parts["scales:w"] = ("BF16", (1,), bytes.fromhex(scale))
    (tmp_path / NAME).write_bytes(put_together(notes, parts, sound=True))
    apply(base, tmp_path / NAME, tmp_path / "a.safetensors")
    assert tensors_of(tmp_path / "a.safetensors")["w"].tolist() == expected


def test_manifests_tell_no_folder(tmp_path):
    base = {"q.weight": weights(1, 96, 64)}
    change = weights(2, 96, 4) @ weights(3, 4, 64)
    folder = tmp_path / "secret" / "place"
    _, model, report = compress(folder, base, {"q.weight": base["q.weight"] + 0.01 * change})
    (found,) = [notice for notice in report.warnings if notice.code == "fits_lora"]
    assert str(model) in found.remedy  # a command to type here
    for path in (folder / NAME, folder / f"{NAME}.manifest.json"):
        assert b"secret" not in path.read_bytes()


def test_integers_that_differ_need_lossless(models, tmp_path):
    base, tuned = models[0], pair(ml_dtypes.bfloat16)[1]
    changed = save(tmp_path / "other.safetensors", {**tuned, "positions": np.arange(1, 6)})
    with pytest.raises(MismatchError, match=r"positions: .* use --lossless"):
        dare.compress(base, changed, tmp_path / NAME, **QUIET)
    dare.compress(base, changed, tmp_path / NAME, lossless=True, **QUIET)
    apply(base, tmp_path / NAME, tmp_path / "a.safetensors")
    assert sha256(tmp_path / "a.safetensors") == sha256(changed)


# ---------------------------------------------------------------- the vectors of the documentation


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        (
            {"drop_rate": 0.5},
            {
                "values:w": "0000903e0000f83e0000243f00004c3f0000c83f0000c23f0000f63f",
                "index": "070000000000000070db25d83eacd20d169d02729aa6d9f7",
            },
        ),
        ({"drop_rate": 0.5, "bits": 2}, {"values:w": "8408", "scales:w": "12bd"}),
    ],
)
def test_what_is_written_is_what_the_page_has_byte_by_byte(tmp_path, asked, parts):
    """docs/delta-files.md has these values, so that others can test their programs."""
    base = np.arange(16, dtype=np.float32) / 8
    change = np.array([(5 * i % 16 - 8) / 64 for i in range(16)], np.float32)
    compress(tmp_path, {"w": base}, {"w": base + change}, **asked)
    notes, stored = take_apart((tmp_path / NAME).read_bytes())
    found = {name: data for name, (*_, data) in stored.items()}
    assert {name: found[name].hex() for name in parts} == parts
    assert set(found) == {*parts, "index"}
    assert notes["version"] == 1
    assert notes["base"] == "921c61c90f8aeac8f0aa1443921318b8"
    assert notes["model"] == "fcb4df45cde6d424860bbab50c9a28cd"
    assert notes["sample"] == "5fda3c1dd55a63dbbc475d2cc079861c"
    kept = np.flatnonzero(dare.keep_mask("w", 16, 0.5, seed=42))
    assert kept.tolist() == [2, 3, 5, 7, 12, 13, 15]
    if "bits" not in asked:
        values = np.frombuffer(found["values:w"], np.float32)
        assert values.tolist() == (base + change)[kept].tolist()
