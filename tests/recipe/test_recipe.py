from __future__ import annotations

import math
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from dare.api import load_recipe
from dare.errors import RecipeError
from dare.recipe.document import request_from_document as from_document
from dare.recipe.entries import OTHER_NAMES, OUR_NAMES, in_our_form
from dare.recipe.options import RunOptions
from dare.recipe.recipe import ModelEntry, Recipe, Request, TensorRule
from dare.recipe.settings import with_settings
from dare.stages import ALIASES

WRONG_WEIGHTS = ([], ["x"], [math.nan], [1.0, math.inf], "x")
FILES = """
[models]
base_file = "base.safetensors"
merge_files = ["math.safetensors", "code.safetensors"]
"""


def load(folder: Path, text: str, files: str = FILES) -> Recipe:
    path = folder / "recipe.toml"
    path.write_text(text + files)
    return load_recipe(path).recipe


def recipe(**settings) -> Recipe:
    return Request.of(
        **{"base": "b.safetensors", "models": ["m.safetensors", "n.safetensors"], **settings}
    ).recipe


def chain(given: Recipe) -> list[tuple[str, dict[str, object]]]:
    return [(stage.name, settings) for stage, settings in given.chain]


# ---------------------------------------------------------------- TOML


def test_everything_but_the_files_has_a_default(tmp_path):
    found = load(tmp_path, "")
    assert found == recipe(base="base.safetensors", models=["math.safetensors", "code.safetensors"])
    assert (found.method, found.seed, found.scale, found.dtype) == ("dare+linear", 42, 1.0, None)
    assert (found.on_missing, found.on_extra) == ("error", "error")
    assert (found.on_mismatch, found.on_integer_mismatch) == ("error", "error")
    assert found.output is None


def test_a_full_recipe_is_read(tmp_path):
    text = """
method = "dare+ties"
seed = 7
scale = 0.5
dtype = "bfloat16"
on_missing = "base"
max_memory = "512MiB"
shard_size = "5GB"
threads = 3
[dare]
drop_rate = 0.5
rescale = "l1"
delta_threshold = 0.5
verbose = false
embedding_drop_rate = 0.25
[ties]
divide_by = "count"
[[tensors]]
match = "*norm*"
drop_rate = 0.0
[[tensors]]
match = ["*.q", "*.k"]
divide_by = "weights"
"""
    files = """
[models]
base_file = "base"
merge_files = [{file = "a", weight = 2.0, seed = 0, drop_rate = 0.25}, "b"]
"""
    load(tmp_path, text, files)
    assert load_recipe(tmp_path / "recipe.toml") == Request.of(
        base="base",
        models=[ModelEntry(file="a", weight=2.0, seed=0, settings={"drop_rate": 0.25}), "b"],
        method="dare+ties",
        seed=7,
        scale=0.5,
        dtype="BF16",
        on_missing="base",
        max_memory=536_870_912,
        shard_size=5_000_000_000,
        threads=3,
        delta_threshold=0.5,  # which may stand in [dare], like the next two
        verbose=False,
        embedding_drop_rate=0.25,
        stages={
            "dare": {"drop_rate": 0.5, "rescale": "l1"},
            "ties": {"divide_by": "count"},
        },
        tensors=[
            TensorRule(match="*norm*", settings={"drop_rate": 0.0}),
            TensorRule(match=("*.q", "*.k"), settings={"divide_by": "weights"}),
        ],
    )


def test_a_path_is_a_model_and_a_home_directory_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    for models in ("~/m.safetensors", Path("~/m.safetensors")):
        assert recipe(models=models).models == (ModelEntry(file="/home/me/m.safetensors"),)


# ---------------------------------------------------------------- there and back

rates = st.floats(0, 0.999)
shares = st.floats(0.001, 1)
tables = {
    "dare": {"drop_rate": rates, "rescale": st.sampled_from([True, False, "l1"])},
    "trim": {"keep_ratio": shares},
    "ties": {"keep_ratio": shares, "divide_by": st.sampled_from(["weights", "count"])},
}
finite = st.floats(allow_nan=False, allow_infinity=False)
words = st.text('aé*?.[]\n"', max_size=5)
paths = st.text("aé ./'\"\\\n\t#=[]", min_size=1, max_size=8)
token = st.just("zero") | st.fixed_dictionaries({"model": st.just("base"), "id": st.integers(0, 9)})
given_fields = {
    "output": paths,
    "seed": st.integers(0, 2**70),
    "scale": finite,
    "dtype": st.sampled_from([None, "F16", "BF16"]),
    "on_extra": st.sampled_from(["error", "drop", "average", "first"]),
    "tokens": st.dictionaries(words.filter(bool), token),
    "delta_threshold": st.floats(0, 1e30),
    "verbose": st.booleans(),
    "max_memory": st.integers(1, 2**40),
    "threads": st.none() | st.integers(1, 99),
}


def settings_of(stage):
    return st.fixed_dictionaries({}, optional=tables[stage])


@st.composite
def recipes(draw):
    method = draw(st.sampled_from(["dare+linear", "dare_linear", "dare+ties", "trim+sum", "ties"]))
    names = [name for name in ALIASES.get(method, method).split("+") if name in tables]
    stages = {name: draw(settings_of(name).filter(bool)) for name in names if draw(st.booleans())}
    own = settings_of(names[0]) if names[0] != "ties" else st.just({})
    weight, seed = st.none() | finite, st.none() | st.integers(0, 2**70)
    entry = st.builds(ModelEntry, file=paths, weight=weight, seed=seed, settings=own)
    rule = st.builds(TensorRule, match=words | st.lists(words, max_size=2), settings=own)
    given = given_fields | ({"embedding_drop_rate": st.none() | rates} if "dare" in method else {})
    return Request.of(
        base=draw(paths),
        models=draw(st.lists(entry, min_size=1, max_size=3)),
        method=method,
        stages=stages,
        tensors=draw(st.lists(rule, max_size=2)),
        **draw(st.fixed_dictionaries({}, optional=given)),
    )


@profile(max_examples=25)
@given(recipes())
def test_a_recipe_survives_toml(asked):
    found = from_document(tomllib.loads(asked.to_toml()), "recipe")
    assert found == asked
    assert chain(found.recipe) == chain(asked.recipe)
    assert found.recipe.seeds() == asked.recipe.seeds()
    assert found.recipe.weights() == asked.recipe.weights()


def test_a_parameter_that_is_none_survives_toml():
    asked = recipe(method="ties", stages={"ties": {"keep_ratio": None}})
    assert chain(from_document(tomllib.loads(asked.to_toml()), "recipe").recipe) == chain(asked)


def test_a_copy_with_other_stages_has_their_chain():
    asked = recipe(stages={"dare": {"drop_rate": 0.5}})
    assert chain(asked)[0][1]["drop_rate"] == 0.5
    copy = asked.changed(stages={"dare": {"drop_rate": 0.25}})
    assert chain(copy)[0][1]["drop_rate"] == 0.25
    assert asked.model_copy(update={"stages": {"dare": {"drop_rate": 0.25}}}) == copy


# ---------------------------------------------------------------- what is refused

M, N = "m.safetensors", "n.safetensors"
REFUSED = [
    # names that are not known
    ({"outptu": "o"}, r"^outptu: .*'output'"),
    ({"drop_rate": 0.5}, r"drop_rate.*\bdare\b"),
    *(({name: 4}, rf"^{name}: .*merge\(…, {name}=…\)") for name in RunOptions.fields()),
    # values out of range
    ({"models": [5]}, "models.0 = 5"),
    ({"seed": -1}, "seed = -1: "),
    ({"seed": True}, "seed = True"),
    ({"scale": math.inf}, "scale = inf"),
    ({"on_missing": "skip"}, "on_missing = 'skip': "),
    ({"shard_size": 0}, "shard_size = 0: "),
    ({"embedding_drop_rate": 1.5}, "^embedding_drop_rate = 1.5: "),
    ({"embedding_drop_rate": [0.1, 0.2]}, "embedding_drop_rate"),  # which have no layers
    ({"base": 5}, "base"),
    ({"base": "~no-such-user/b"}, "base"),
    ({"base": ""}, "base = '': .*empty"),
    ({"models": [""]}, "file = '': .*empty"),
    ({"output": ""}, "output = '': .*empty"),
    ({"vocabulary": ""}, "vocabulary: there is no model ''"),
    ({"pad_to_multiple_of": 10**12}, "pad_to_multiple_of = 1000000000000: .*65536"),
    # parameters of stages
    ({"stages": {"dare": {"drop_rate": -0.1}}}, r"\[dare\] drop_rate = -0.1: "),
    ({"stages": {"dare": {"rescale": "l2"}}}, r"\[dare\] rescale = 'l2'"),
    ({"stages": {"dare": 0.9}}, "stages.dare = 0.9"),
    *(
        (
            {"method": stage, "stages": {stage: {parameter: value}}},
            rf"\[{stage}\] {parameter} = {value!r}: ",
        )
        for stage, parameter, values in (
            ("trim", "keep_ratio", (0, 1.1)),
            ("ties", "keep_ratio", (-1,)),
            ("ties", "divide_by", ("n",)),
            ("slerp", "t", (-0.1, 1.1, math.nan)),
            ("slerp", "on", ("models",)),
        )
        for value in values
    ),
    # a drop rate of 1, with the reason
    *(
        (settings, r"drop_rate = 1 .*below 1")
        for settings in (
            {"models": [ModelEntry(file="m", settings={"drop_rate": 1})]},
            {"tensors": [TensorRule(match="*", settings={"drop_rate": 1.0})]},
        )
    ),
    # methods
    *(({"method": method}, r"there is no stage .*`dare methods`") for method in ("", "dare+")),
    ({"method": "linear+ties"}, r"dare[+]linear"),
    *(({"method": method}, r"dare[+]linear") for method in ("dare+trim", "dare+linear+trim")),
    ({"method": "dare+dare+linear"}, "dare"),  # what is kept would be rescaled twice
    ({"method": "trim+ties", "stages": {"ties": {"keep_ratio": 0.5}}}, "keep_ratio"),
    # models and rules
    ({"models": [ModelEntry(file="a", settings={"drop_rate": 2})]}, "model a: drop_rate = 2"),
    (
        {"method": "dare+ties", "models": [ModelEntry(file="a", settings={"divide_by": "count"})]},
        "model a: divide_by is not a parameter here.*drop_rate",
    ),
    (
        {"models": [M, N, "o"], "tensors": [TensorRule(match="mlp", method="slerp")]},
        "slerp merges 2 models, but 3 are given",
    ),
    (
        {
            "method": "linear",
            "tensors": [TensorRule(match="mlp", method="slerp")],
            "stages": {"trim": {"scope": "model"}},
        },
        "'linear' is linear; method 'slerp' is slerp",
    ),
    # tokens
    ({"vocabulary": "p"}, r"vocabulary: there is no model 'p'"),
    ({"vocabulary": "unoin"}, r"did you mean 'union'\?\); there are m, n, error, base"),
    ({"tokens": {"<x>": {"model": "co"}}}, r"tokens\.<x>: there is no model 'co'.*m, n"),
    ({"tokens": {"": "zero"}}, "tokens: .*no characters"),
    ({"tokens": {"<x>": {}}}, 'needs a model or "zero"'),
    ({"tokens": {"<x>": {"model": "m", "zero": True}}}, 'needs a model or "zero"'),
    ({"tokens": {"<x>": {"model": "m", "token": "a", "id": 1}}}, "by token or by id"),
    ({"tokens": {"<x>": {"zero": True, "id": 1}}}, "by token or by id"),
    ({"tokens": {"<x>": {"modl": "m"}}}, r"tokens\.<x>: modl: not known \(did you"),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED)
def test_what_cannot_be_meant_is_refused_with_its_place_and_remedy(settings, words):
    with pytest.raises(RecipeError, match=words):
        Recipe(**{"base": "b.safetensors", "models": [M, N], **settings})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"verbose": "yes"}, "verbose = 'yes': "),
        ({"max_memory": "1 lot"}, "max_memory = '1 lot': .*'1GiB'"),
        ({"max_memory": "9" * 400}, "max_memory = "),
        ({"threads": 0}, "threads"),
        ({"cluster": ""}, "cluster"),
        ({"device": "gpu9"}, "device"),
        ({"backend": "gpu9"}, "device"),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises(RecipeError, match=words):
        RunOptions(**options)


@pytest.mark.parametrize("entry", [{"wieght": 1.0}, *({"weight": w} for w in WRONG_WEIGHTS)])
def test_the_entry_of_a_model_is_checked(entry):
    with pytest.raises(RecipeError, match=r"^(wieght: .*'weight'|weight = )"):
        ModelEntry(file="m", **entry)


# ---------------------------------------------------------------- methods


@pytest.mark.parametrize(
    ("method", "stages"),
    [
        ("dare_linear", ["dare", "linear"]),
        ("dare_task_arithmetic", ["dare", "sum"]),
        ("task_arithmetic", ["sum"]),
        ("average", ["linear"]),
        ("dare", ["dare", "linear"]),
        ("ties", ["ties"]),
        ("dare+trim+ties", ["dare", "trim", "ties"]),
    ],
)
def test_methods_are_known_by_the_names_people_use(method, stages):
    found = recipe(method=method)
    assert [name for name, _ in chain(found)] == stages
    assert f'method = "{"+".join(stages)}"' in found.to_toml() or found.method == "dare+linear"


def test_keep_ratio_puts_trim_before_ties_where_it_is_given():
    assert chain(recipe(method="dare+ties", stages={"ties": {"keep_ratio": 0.2}})) == [
        ("dare", {"drop_rate": 0.9, "rescale": True}),
        ("trim", {"keep_ratio": 0.2, "scope": "tensor", "rescale": False}),
        ("ties", {"keep_ratio": 0.2, "divide_by": "weights", "vote": "sum", "weighted": True}),
    ]
    models = [ModelEntry(file="a", settings={"keep_ratio": 0.5}), "b"]
    found = recipe(method="ties", models=models)
    assert [name for name, _ in chain(found)] == ["trim", "ties"]
    assert [found.settings_for("w", model)[0]["keep_ratio"] for model in (0, 1)] == [0.5, 1.0]
    rule = TensorRule(match="mlp", method="ties", settings={"keep_ratio": 0.5})
    found = recipe(method="dare+ties", tensors=[rule])
    assert [name for name, _ in chain(found)] == ["dare", "ties"]
    assert [stage.name for stage, _ in found.chain_for("mlp")] == ["trim", "ties"]
    assert found.settings_for("mlp", 0)[0]["keep_ratio"] == 0.5


# ---------------------------------------------------------------- models and tensors


def test_model_i_uses_seed_plus_i_unless_it_has_its_own():
    models = ["a", ModelEntry(file="b", seed=0), "c"]
    assert recipe(models=models, seed=7).seeds() == (7, 0, 9)


@pytest.mark.parametrize(
    ("method", "weights"),
    [
        ("linear", (0.25, 2.0, 0.25, 0.25)),
        ("sum", (1.0, 2.0, 1.0, 1.0)),
        ("ties", (1.0, 2.0, 1.0, 1.0)),
    ],
)
def test_a_weight_that_is_not_given_is_the_methods_own(method, weights):
    models = ["a", ModelEntry(file="b", weight=2.0), "c", "d"]
    assert recipe(models=models, method=method).weights() == weights


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("math.safetensors", "math"),
        ("models/math/model.safetensors", "math"),
        ("models/math/adapter_model.safetensors", "math"),
        ("models/math", "math"),
        ("model.safetensors", "model"),
        ("models/qwen-2.5", "qwen-2.5"),
        ("runs/low.pt", "low"),
    ],
)
def test_a_model_is_called_by_its_file_or_directory(file, name):
    assert ModelEntry(file=file).name == name


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["a/math", "b/math", "code"], ["a/math", "b/math", "code"]),
        (["x/a/math", "y/a/math.safetensors"], ["x/a/math", "y/a/math"]),
        (["a/math/model.safetensors", "math"], ["a/math", "math"]),
        (["org/math@v1", "other/math"], ["org/math", "other/math"]),
        (["s3://one/math", "s3://two/math"], ["one/math", "two/math"]),
        (["a/math", "b/math", "a/math"], ["math (1)", "b/math", "math (3)"]),
    ],
)
def test_models_of_one_name_have_their_folders_before_it(files, names):
    found = recipe(models=files)
    assert list(found.names) == names
    numbers = [found.number_of(name, "") for name in names if name != "math"]
    assert numbers == [1 + n for n, name in enumerate(names) if name != "math"]


def test_a_name_of_two_models_is_refused_with_those_to_write():
    found = recipe(models=["x/a/math", "x/b/math"])
    with pytest.raises(RecipeError, match=r"copy_from: 2 models .* write a/math, b/math"):
        found.number_of("math", "copy_from")
    assert [found.number_of(word, "") for word in ("b/math", "x/b/math", "base")] == [2, 2, 0]


def test_without_a_model_its_tokens_are_not_asked_for():
    rows = {"<x>": {"model": "math"}, "<y>": "zero"}
    found = recipe(models=["math", "code"], vocabulary="math", tokens=rows)
    left = with_settings(found, {"include.math": False})
    assert (left.vocabulary, list(left.tokens)) == ("union", ["<y>"])
    kept = with_settings(found, {"include.code": False})
    assert (kept.vocabulary, list(kept.tokens)) == ("math", ["<x>", "<y>"])


def drop_rates(found: Recipe, tensor: str) -> list[float]:
    return [found.settings_for(tensor, model)[0]["drop_rate"] for model in range(len(found.models))]


def test_a_rule_wins_over_the_embedding_rate_over_the_model_over_the_stage():
    found = recipe(
        stages={"dare": {"drop_rate": 0.1}},
        models=["a", ModelEntry(file="b", settings={"drop_rate": 0.2})],
        embedding_drop_rate=0.3,
        tensors=[
            TensorRule(match="*.bias", settings={"drop_rate": 0.4}),
            TensorRule(match=["embed.*", "x.bias"], settings={"drop_rate": 0.5}),
        ],
    )
    assert drop_rates(found, "w") == [0.1, 0.2]
    assert drop_rates(found, "lm_head.weight") == [0.3, 0.3]
    assert drop_rates(found, "y.bias") == [0.4, 0.4]
    assert drop_rates(found, "lm_head.bias") == [0.4, 0.4]
    assert drop_rates(found, "embed.weight") == [0.5, 0.5]
    assert drop_rates(found, "x.bias") == [0.5, 0.5]


def test_a_rule_may_set_parameters_of_the_combine_stage():
    rule = TensorRule(match="w", settings={"divide_by": "count"})
    found = recipe(method="dare+ties", tensors=[rule])
    assert found.joint_settings_for("w")[0]["divide_by"] == "count"
    assert found.joint_settings_for("v")[0]["divide_by"] == "weights"


def test_a_rule_may_name_a_method_and_the_last_one_that_matches_counts():
    found = recipe(
        method="linear",
        stages={"slerp": {"t": 0.25}, "dare": {"drop_rate": 0.5}},
        tensors=[
            TensorRule(match="*", settings={"t": 0.75}),
            TensorRule(contains="mlp", method="slerp", settings={"on": "deltas"}),
            TensorRule(contains="up", method="DARE_TIES", weight=3.0, settings={"drop_rate": 0.1}),
            TensorRule(contains="up.bias", method="dare+sum"),
        ],
    )
    assert list(found.chains) == ["linear", "slerp", "dare+ties", "dare+sum"]
    names = ("norm", "mlp", "mlp.up", "mlp.up.bias")
    assert [found.method_for(name) for name in names] == list(found.chains)
    assert found.joint_settings_for("mlp")[0] == {"t": 0.75, "on": "deltas"}
    assert [found.settings_for(name, 0) for name in names[:2]] == [(), ()]
    assert [found.settings_for(name, 0)[0]["drop_rate"] for name in names[2:]] == [0.1, 0.5]
    # linear has 1/n, slerp no weights, ties the rule's, and sum 1: that rule's method is replaced.
    assert [found.weight_for(name, 1) for name in names] == [0.5, 1.0, 3.0, 1.0]
    assert from_document(tomllib.loads(found.to_toml()), "recipe").recipe == found


def test_a_weight_is_the_last_rules_and_for_the_methods_that_take_one():
    rules = [
        TensorRule(match="mlp", method="slerp"),
        TensorRule(match="m*", weight=0.75),
        TensorRule(match="m.up", model="b", weight=0.5),
    ]
    found = recipe(models=[ModelEntry(file="a", weight=0.25), "b"], method="sum", tensors=rules)
    names = ("norm", "m", "m.up", "mlp")
    assert [found.weight_for(name, 0) for name in names] == [0.25, 0.75, 0.75, 1.0]
    assert [found.weight_for(name, 1) for name in names] == [1.0, 0.75, 0.5, 1.0]


def test_every_method_of_a_recipe_must_interpolate():
    found = recipe(method="karcher", tensors=[TensorRule(match="mlp", method="slerp")])
    assert found.interpolates
    assert not found.changed(method="linear").interpolates


# ---------------------------------------------------------------- what the files are called

OURS = {"base": "b", "models": ["m", {"file": "n", "weight": 2.0}], "output": "o"}
SEEDS = {"models": {"base_file": "b", "merge_files": OURS["models"], "output_file": "o"}}


def test_a_recipe_is_written_in_our_form_and_kept_in_manifests_in_the_other():
    assert from_document(OURS, "recipe") == from_document(SEEDS, "recipe")
    asked = from_document({**OURS, "seed": 1, "dare": {"drop_rate": 0.5}}, "recipe")
    assert asked.recipe.models == (ModelEntry(file="m"), ModelEntry(file="n", weight=2.0))
    assert asked.to_tables() == {**OURS, "seed": 1, "dare": {"drop_rate": 0.5}}
    assert list(asked.to_tables()) == ["base", "models", "output", "seed", "dare"]
    assert asked.to_document() == {**SEEDS, "seed": 1, "dare": {"drop_rate": 0.5}}
    assert list(asked.to_document()) == ["seed", "models", "dare"]
    assert in_our_form(SEEDS) == OURS


@pytest.mark.parametrize("name", [name for others in OTHER_NAMES.values() for name in others])
def test_every_other_name_is_understood_in_a_recipe(name):
    document = {name if key == OUR_NAMES[name] else key: OURS[key] for key in OURS}
    assert from_document(document, "recipe") == from_document(OURS, "recipe")
    assert from_document({"models": document}, "recipe") == from_document(OURS, "recipe")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"base": "b", "models": {"merge_files": ["m"]}}, r"^recipe: base .*\[models\]"),
        ({"base": "b", "base_file": "b", "models": ["m"]}, "^recipe: base and base_file: "),
        ({"base": "b"}, "^recipe: models is missing"),
        ({"models": {"base_file": "b"}}, r"^recipe: \[models\] merge_files is missing"),
        ({"bass": "b", "models": ["m"]}, "^recipe: bass: .*'base'"),
        ({"base": "b", "models": [{"fil": "m"}]}, "^recipe: models, number 1: fil: "),
        ({"base": "b", "merge": [5]}, "^recipe: merge, number 1: "),
        ({"dare": {"drop_rate": 0.5, "base": "b"}}, r"^recipe: \[dare\] base: "),
        ({"base": "b", "models": ["m"], "tensors": [{"match": [5]}]}, "number 1: match"),
        ({"base": "b", "models": ["m"], "stages": {"dare": {}}}, "^recipe: stages: "),
        *(
            ({"base": "b", "models": ["m", "n"], "tensors": [{"contains": "mlp", **rule}]}, words)
            for rule, words in (
                ({"method": "slurp"}, r"\[\[tensors\]\], number 1: .*did you mean 'slerp'"),
                ({"method": "slerp", "model": "m"}, "number 1: .* leave model or method out"),
                ({"method": "slerp", "drop_rate": 0.5}, "'mlp': drop_rate .* known: on, t"),
                ({"method": "slerp", "t": 2}, "containing 'mlp': t = 2"),
                ({"method": "slerp", "weight": 0.5}, "containing 'mlp': slerp takes no weights"),
                ({"t": 0.5}, "containing 'mlp': t is not a parameter here"),
                ({"method": "sum", "t": 0.5}, "containing 'mlp': t is not a parameter here"),
            )
        ),
    ],
)
def test_messages_name_files_as_the_recipe_does(document, message):
    with pytest.raises(RecipeError, match=message):
        from_document(document, "recipe")


# ---------------------------------------------------------------- options


def test_a_file_says_how_a_merge_runs_and_the_recipe_is_the_same_whatever_it_says(tmp_path):
    text = 'threads = 3\nmax_memory = "1GiB"\ncluster = "auto"\nscratch = "s"\n'
    plain = load(tmp_path, "")
    assert load(tmp_path, text + "[dare]\nverbose = false\n") == plain
    request = load_recipe(tmp_path / "recipe.toml")
    given = {"threads": 3, "max_memory": 1 << 30, "cluster": "auto", "scratch": Path("s")}
    assert request.options == RunOptions(**given, verbose=False)
    assert from_document(tomllib.loads(request.to_toml()), "again") == request
    changed = request.changed(threads=1, seed=7)
    assert (changed.options.threads, changed.options.max_memory) == (1, 1 << 30)
    assert changed.recipe == plain.changed(seed=7)
