"""Which files go beside the weights, what changes in them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dare.errors import InputError, RecipeError
from dare.inputs.directory import (
    Changes,
    chat_template_of,
    choose_chat_template,
    collect,
)
from dare.tensors.dtypes import STORAGE_TYPES

BF16, F32, F8 = STORAGE_TYPES["BF16"], STORAGE_TYPES["F32"], STORAGE_TYPES["F8_E4M3"]


def fill(folder, files):
    """Write files: JSON, or text as it is."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.fixture
def model(tmp_path):
    config = {"torch_dtype": "float32", "vocab_size": 10, "eos_token_id": 3}
    generation = {"eos_token_id": [3, 4]}
    return fill(tmp_path / "model", {"config.json": config, "generation_config.json": generation})


def content(files, name):
    found = files[name]
    return json.loads(found if isinstance(found, bytes) else found.read_bytes())


# ---------------------------------------------------------------- which files

TAKEN = (
    *("LICENSE", "NOTICE.txt", "added_tokens.json", "additional_chat_templates/tool_use.jinja"),
    *("chat_template.jinja", "config.json", "preprocessor_config.json", "tokenizer.json"),
    *("tokenizer.model", "vocab.txt"),
)
LEFT = (
    *(".git/config", "README.md", "dare-manifest.json", "model-00001-of-00002.safetensors"),
    *("model.safetensors", "model.safetensors.index.json", "optimizer.pt", "pytorch_model.bin"),
    "training_args.bin",
)


def test_known_files_are_taken_and_nothing_else(tmp_path):
    for name in (*TAKEN, *LEFT, "data_config.json", "odd\nname"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    found = collect(tmp_path)
    assert tuple(found.files) == TAKEN
    assert all(path == (tmp_path / name).resolve() for name, path in found.files.items())
    (note,) = found.notes
    assert note.code == "not_copied"
    assert note.text.endswith(f"{tmp_path}: data_config.json, 'odd\\nname'")


def test_the_tokenizer_may_come_from_elsewhere(model, tmp_path):
    fill(model, {"tokenizer.json": {}, "vocab.txt": "a"})
    other = fill(tmp_path / "other", {"tokenizer.json": {"other": 1}, "config.json": {}})
    found = collect(model, tokenizer=other, replaced={"added_tokens.json": b"{}"})
    assert set(found.files) == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "added_tokens.json",
    }
    assert content(found.files, "tokenizer.json") == {"other": 1}
    assert content(found.files, "config.json")["vocab_size"] == 10
    assert any("vocab.txt" in note.text for note in found.notes)  # left behind, and said so


def test_custom_code_is_taken_where_it_is_used_and_never_without_a_word(model):
    fill(model, {"modeling_x.py": "import os", "setup.py": ""})
    assert "modeling_x.py" not in collect(model).files
    assert [note.code for note in collect(model).notes] == ["not_copied"]
    fill(model, {"config.json": {"auto_map": {"AutoModel": "modeling_x.X"}}})
    found = collect(model)
    assert {"modeling_x.py", "setup.py"} <= set(found.files)
    (note,) = found.notes
    assert note.code == "custom_code"
    assert "modeling_x.py" in note.text
    assert "trust_remote_code=True" in note.text


def test_folders_of_sentence_transformers(model):
    modules = [{"path": path} for path in ("", "1_Pooling", "2_Dense", "3")]
    fill(model, {"modules.json": modules})
    fill(model / "1_Pooling", {"config.json": {"mean": True}, ".hidden": "", "sub/more.json": "{}"})
    fill(model / "2_Dense", {"model.safetensors": "w", "pytorch_model.bin": "p"})
    fill(model / "unnamed", {"config.json": {}})
    found = collect(model)
    assert [name for name in found.files if "/" in name] == [
        "1_Pooling/config.json",
        "1_Pooling/sub/more.json",
        "2_Dense/model.safetensors",
    ]
    assert [(note.code, note.subjects) for note in found.notes] == [
        ("copied_weights", ("2_Dense",)),
        ("not_copied", ()),
    ]


# ---------------------------------------------------------------- what changes


INSIDE = {"torch_dtype": "float16", "deep": {"dtype": "auto"}}
SIZES = {"type_vocab_size": 10, "audio_config": {"vocab_size": 7}}


@pytest.mark.parametrize(
    ("before", "changes", "after"),
    [
        (
            {"dtype": "float32", "text_config": INSIDE, "rope": {"dtype": "int8"}},
            Changes(dtype=BF16),
            {
                "dtype": "bfloat16",
                "text_config": {"torch_dtype": "bfloat16", "deep": {"dtype": "bfloat16"}},
                "rope": {"dtype": "int8"},
            },
        ),
        (
            {"vocab_size": 99, "text_config": {"vocab_size": 10}, **SIZES},
            Changes(vocab_size=(10, 12)),
            {"vocab_size": 12, "text_config": {"vocab_size": 12}, **SIZES},
        ),
    ],
)
def test_type_and_vocabulary_size_are_updated_wherever_they_stand(model, before, changes, after):
    fill(model, {"config.json": before})
    assert content(collect(model, changes).files, "config.json") == after


def test_a_type_that_no_model_can_have_is_left_out_of_the_configuration(model):
    found = collect(model, Changes(dtype=F8))
    assert found.files["config.json"] == model / "config.json"
    (note,) = found.notes
    assert (note.code, note.subjects) == ("kept_type", ("config.json",))


def test_token_ids_are_those_of_the_output(model):
    found = collect(model, Changes(token_ids={3: 3, 4: 7}))
    assert found.files["config.json"] == model / "config.json"
    assert content(found.files, "generation_config.json") == {"eos_token_id": [3, 7]}
    with pytest.raises(RecipeError, match=r"generation_config\.json: eos_token_id = 4 is a token"):
        collect(model, Changes(token_ids={3: 3, 4: None}))


# ---------------------------------------------------------------- chat templates


def test_a_chat_template_is_found_wherever_it_is_kept(tmp_path):
    assert chat_template_of(fill(tmp_path / "none", {"config.json": {}})) is None
    several = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    for expected, files in {
        "jinja": {"chat_template.jinja": "jinja"},
        "json": {"chat_template.json": {"chat_template": "json"}},
        "config": {"tokenizer_config.json": {"chat_template": "config"}},
        "d": {"tokenizer_config.json": {"chat_template": several}},
    }.items():
        assert chat_template_of(fill(tmp_path / expected, files)) == expected


def test_a_chat_template_is_put_in_place_of_all_others(model):
    old = {"chat_template": "old"}
    fill(model, {"tokenizer_config.json": {**old, "k": 1}, "chat_template.json": old})
    fill(model, {"additional_chat_templates/tool.jinja": "old"})
    found = collect(model, Changes(chat_template="{{ new }}"))
    assert "chat_template.json" not in found.files
    assert "additional_chat_templates/tool.jinja" not in found.files
    assert content(found.files, "tokenizer_config.json") == {"k": 1}
    assert found.files["chat_template.jinja"] == b"{{ new }}"


def test_which_chat_template(tmp_path):
    plain = fill(tmp_path / "plain", {"config.json": {}})
    one, same, other = (
        fill(tmp_path / name, {"chat_template.jinja": text})
        for name, text in (("one", "{1}"), ("same", "{1}"), ("other", "{2}"))
    )
    models: dict[str, Path | None] = {"one": one, "other": other, "plain": plain, "file": None}
    assert choose_chat_template("auto", one, models) == (None, ())
    assert choose_chat_template("auto", plain, {"plain": plain, "file": None}) == (None, ())
    template, (note,) = choose_chat_template("auto", plain, {"one": one, "same": same})
    assert (template, note.code, note.subjects) == ("{1}", "borrowed_template", (str(plain),))
    assert "one, same" in note.text
    template, (note,) = choose_chat_template("auto", plain, models)
    assert template is None
    assert (note.code, "one, other" in note.text) == ("different_templates", True)
    assert choose_chat_template("other", one, models) == ("{2}", ())
    assert choose_chat_template("{{ x }}", one, models) == ("{{ x }}", ())
    (tmp_path / "cut").write_text("{% for m in messages %}{{ m")
    cut, folder = str(tmp_path / "cut"), str(one)
    for broken in ("{{ x", "{% if x %}{{ x", "{\ud800}", "{{\udcff}}", cut, folder):
        with pytest.raises(RecipeError, match=r"chat_template|cut: "):
            choose_chat_template(broken, one, models)
    for whole in ("{", "{{ '{%' }}", "{% raw %}{{{% endraw %}", "{# x #}{{ '}}' }}"):
        assert choose_chat_template(whole, one, models) == (whole, ())
    assert choose_chat_template(str(other / "chat_template.jinja"), one, models) == ("{2}", ())
    for name in ("plain", "file"):
        with pytest.raises(RecipeError, match="that model has no chat template"):
            choose_chat_template(name, one, models)
    with pytest.raises(RecipeError, match=r"is not a file, not .*did you mean 'other'"):
        choose_chat_template("othr", one, models)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("link", ["tokenizer.json", "1_Pooling"])
def test_a_link_out_of_the_directory_is_refused(model, tmp_path, link):
    fill(tmp_path / "secret", {"config.json": {}})
    fill(model, {"modules.json": [{"path": "1_Pooling"}]})
    (model / link).symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match=rf"{link}: is a link to .*secret, outside"):
        collect(model)


def test_a_snapshot_of_the_hubs_cache_is_read(tmp_path):
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / "0a1b"
    (snapshot / "1_Pooling").mkdir(parents=True)
    fill(repo / "blobs", {"aa": '{"vocab_size": 3}', "bb": '[{"path": "1_Pooling"}]', "cc": "{}"})
    (snapshot / "config.json").symlink_to("../../blobs/aa")
    (snapshot / "modules.json").symlink_to("../../blobs/bb")
    (snapshot / "1_Pooling" / "config.json").symlink_to("../../../blobs/cc")
    found = collect(snapshot, Changes(vocab_size=(3, 4)))
    assert content(found.files, "config.json") == {"vocab_size": 4}
    assert found.files["1_Pooling/config.json"] == repo / "blobs" / "cc"


@pytest.mark.parametrize("path", ["..", "../x", "/etc", "a/../../b", ".git", 3, None])
def test_a_module_cannot_lead_out_of_the_directory(model, path):
    fill(model, {"modules.json": [{"path": path}]})
    with pytest.raises(InputError, match=r"modules.json: .*folder"):
        collect(model)


def test_a_folder_without_end_is_refused(model, monkeypatch):
    fill(model, {"modules.json": [{"path": "1_Pooling"}]})
    fill(model / "1_Pooling", {"a": "", "b": "", "c": ""})
    monkeypatch.setattr("dare.inputs.directory.MAX_MODULE_FILES", 2)
    with pytest.raises(InputError, match="1_Pooling: has more than 2 files"):
        collect(model)
    (model / "1_Pooling" / "again").symlink_to(".")
    monkeypatch.setattr("dare.inputs.directory.MAX_MODULE_FILES", 1000)
    with pytest.raises(InputError, match="again: is a link to a folder"):
        collect(model)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must be a JSON object"),
        ("[" * 10**5, "not valid JSON"),
        ('{"torch_dtype": "float32", "x": "\\ud800"}', "cannot be written again"),
    ],
)
def test_a_broken_configuration_is_an_error(model, text, message):
    fill(model, {"config.json": text})
    with pytest.raises(InputError, match=message):
        collect(model, Changes(dtype=BF16))


def test_a_huge_file_is_copied_but_never_parsed(model, monkeypatch):
    monkeypatch.setattr("dare.inputs.directory.MAX_JSON_BYTES", 100)
    fill(model, {"vocab.json": " " * 101})
    assert collect(model).files["vocab.json"] == model / "vocab.json"
    fill(model, {"config.json": " " * 101})
    with pytest.raises(InputError, match=r"config\.json: larger than 100 bytes"):
        collect(model)
