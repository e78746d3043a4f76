"""Averages of checkpoints, of folders made here and of trainings that Trainer runs."""

from __future__ import annotations

import json
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dare
from dare.errors import DareWarning, InputError, RecipeError

WEIGHTS = "model.safetensors"


def checkpoint(folder, step, values, *, state=None, **others):
    """Write a checkpoint as Trainer leaves it."""
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    save_file({"w": np.array(values, np.float32), **others}, path / WEIGHTS)
    (path / "config.json").write_text(json.dumps({"step": step}))
    (path / "optimizer.pt").write_bytes(b"not read")
    (path / "trainer_state.json").write_text(
        json.dumps({"global_step": step}) if state is None else state
    )
    return path


@pytest.fixture
def run(tmp_path):
    """A folder with the checkpoints of steps 9, 10 and 100, in no order by name."""
    for step, values in {9: [0, 8, 16], 100: [6, 2, -4], 10: [3, 5, 0]}.items():
        checkpoint(tmp_path / "run", step, values)
    return tmp_path / "run"


def averaged(run, *args, **settings):
    output = run.parent / "averaged"
    report = dare.average_checkpoints(run, *args, output=output, verbose=False, **settings)
    assert dare.verify(output).ok
    return load_file(output / WEIGHTS)["w"].tolist(), report


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [3, 5, 4]),
        ({"last": 2}, [4.5, 3.5, -2]),
        ({"last": 7}, [3, 5, 4]),
        ({"until": 99}, [1.5, 6.5, 8]),
        ({"weights": [1, 1, 2]}, [3.75, 4.25, 2]),
        ({"last": 2, "weights": [3, 1]}, [3.75, 4.25, -1]),
        ({"decay": 0.5}, [3.75, 4.25, 2]),  # ½·(½·first + ½·second) + ½·third
        ({"decay": 0.75, "last": 2}, [3.75, 4.25, -1]),
    ],
)
def test_checkpoints_are_averaged_in_order_of_their_steps(run, settings, expected):
    assert averaged(run, **settings)[0] == expected


def test_the_rest_is_the_newest_checkpoints(tmp_path):
    for step in (1, 2):
        checkpoint(tmp_path / "run", step, [step], batches=np.array([step * 10]))
    averaged(tmp_path / "run")
    assert load_file(tmp_path / "averaged" / WEIGHTS)["batches"].tolist() == [20]
    assert json.loads((tmp_path / "averaged/config.json").read_text())["step"] == 2
    assert not (tmp_path / "averaged/optimizer.pt").exists()


def test_an_existing_output_is_replaced_only_on_demand(run):
    averaged(run)
    with pytest.raises(dare.OutputError, match="overwrite"):
        averaged(run)
    assert averaged(run, last=2, overwrite=True)[0] == [4.5, 3.5, -2]


@pytest.mark.parametrize("state", ["", '{"global_step": 100', '{"global_step": 99}', "[]"])
def test_a_checkpoint_that_is_half_written_is_refused(run, state):
    (run / "checkpoint-100/trainer_state.json").write_text(state)
    with pytest.raises(InputError, match=r"checkpoint-100.*set until"):
        averaged(run)
    assert averaged(run, until=99)[0] == [1.5, 6.5, 8]


def test_weights_that_end_early_are_refused(run):
    whole = (run / "checkpoint-10" / WEIGHTS).read_bytes()
    (run / "checkpoint-10" / WEIGHTS).write_bytes(whole[:-4])
    with pytest.raises(InputError, match="checkpoint-10"):
        averaged(run)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"last": 1}, "last = 1"),
        ({"weights": [1, 1]}, "2 given for 3"),
        ({"weights": [1, -1, 0]}, "above 0"),
        ({"weights": [1, 1, float("nan")]}, "above 0"),
        ({"decay": 1.0}, "decay = 1.0"),
        ({"decay": 0.5, "weights": [1, 1, 1]}, "both given"),
    ],
)
def test_what_is_no_average_is_refused(run, settings, words):
    with pytest.raises(RecipeError, match=words):
        averaged(run, **settings)


def test_too_few_checkpoints_are_refused(run):
    with pytest.raises(InputError, match="at least 2"):
        averaged(run, until=9)
    with pytest.raises(InputError, match="cannot be read"):
        averaged(run / "no")


def test_adapters_become_one_adapter(tmp_path):
    peft = pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    products = []
    for step in (1, 2, 3):
        config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
        model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), config)
        path = tmp_path / f"run/checkpoint-{step}"
        model.save_pretrained(path)
        (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        products.append(model.base_model.model[0].get_delta_weight("default").detach().numpy())
    dare.average_checkpoints(tmp_path / "run", last=2, output=tmp_path / "averaged")
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4))
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "averaged").base_model.model[0]
    found = loaded.get_delta_weight("default").detach().numpy()
    assert np.allclose(found, (products[1] + products[2]) / 2, atol=1e-6)
    assert loaded.r["default"] == 4


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_checkpoints_that_each_process_saved_its_part_of_are_averaged(tmp_path):
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    for step in (1, 2):
        path = tmp_path / f"run/checkpoint-{step}"
        path.mkdir(parents=True)
        state = {"model": {"w": torch.full((3,), float(step))}}
        dcp.save(state, checkpoint_id=path / "pytorch_model_fsdp_0", no_dist=True)
        (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    assert averaged(tmp_path / "run", allow_pickle=True)[0] == [1.5] * 3


# ---------------------------------------------------------------- with Trainer


@pytest.fixture
def train(tmp_path, capsys):
    """Train a tiny model in `tmp_path`, with callbacks; return its trainer."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5")
    pytest.importorskip("accelerate")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=16, num_hidden_layers=1, **sizes)
    rows = torch.arange(256).reshape(32, 8) % 16

    def train(steps, *callbacks, resume=None, model=None, **settings):
        transformers.set_seed(0)
        shown = {"report_to": [], "disable_tqdm": True, "use_cpu": True}
        every = {"save_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 0.01}
        trainer = transformers.Trainer(
            model or transformers.LlamaForCausalLM(config),
            transformers.TrainingArguments(
                tmp_path, max_steps=steps, **{**shown, **every, **settings}
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            callbacks=list(callbacks),
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return train


def weights_of(folder):
    return {name: w.astype(np.float64) for name, w in load_file(folder / WEIGHTS).items()}


def assert_is(folder, expected):
    """Compare weights, which are rounded once from sums in float32."""
    found = weights_of(folder)
    assert found.keys() == expected.keys()
    assert all(np.allclose(found[name], expected[name], rtol=0, atol=2e-7) for name in found)


def names(folder, kind):
    return sorted(path.name for path in folder.glob(f"{kind}-*"))


def test_the_last_checkpoints_are_averaged_when_the_training_ends(train, tmp_path):
    train(4, dare.averaging_callback(last=3, verbose=False))
    last = [weights_of(tmp_path / f"checkpoint-{step}") for step in (2, 3, 4)]
    mean = {name: sum(each[name] for each in last) / 3 for name in last[0]}
    assert any(np.abs(mean[name] - last[2][name]).max() > 1e-3 for name in mean)
    assert_is(tmp_path / "averaged", mean)
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "averaged")
    head = model.lm_head.weight.detach().numpy()
    assert np.allclose(head, mean["lm_head.weight"], rtol=0, atol=2e-7)


def test_an_average_is_kept_and_goes_on_when_the_training_does(train, tmp_path):
    train(3, dare.ema_callback(0.75, verbose=False))
    checkpoints = {step: weights_of(tmp_path / f"checkpoint-{step}") for step in (1, 2, 3)}
    assert_is(tmp_path / "ema-1", checkpoints[1])
    shutil.rmtree(tmp_path / "ema-3")  # as if the process had ended before it was made
    callback = dare.ema_callback(0.75, verbose=False)
    train(5, callback, resume=str(tmp_path / "checkpoint-3"), save_total_limit=2)
    assert names(tmp_path, "checkpoint") == ["checkpoint-4", "checkpoint-5"]
    assert names(tmp_path, "ema") == ["ema-4", "ema-5"]
    checkpoints |= {step: weights_of(tmp_path / f"checkpoint-{step}") for step in (4, 5)}
    expected = checkpoints.pop(1)
    for new in checkpoints.values():
        expected = {name: 0.75 * expected[name] + 0.25 * new[name] for name in new}
    assert_is(tmp_path / "ema-5", expected)
    assert dare.verify(tmp_path / "ema-5").ok


def test_files_of_others_in_an_average_are_kept(train, tmp_path):
    train(1, dare.ema_callback(verbose=False))
    (tmp_path / "ema-1/notes.txt").write_text("mine")
    callback = dare.ema_callback(verbose=False)
    train(2, callback, resume=str(tmp_path / "checkpoint-1"), save_total_limit=1)
    assert names(tmp_path, "checkpoint") == ["checkpoint-2"]
    assert (tmp_path / "ema-1/notes.txt").read_text() == "mine"


def begin(callback, step=0, *, model=None, **args):
    """Tell a callback that a training begins."""
    state = SimpleNamespace(global_step=step, is_world_process_zero=True)
    args = {"save_strategy": "steps", "save_total_limit": None, **args}
    callback.on_train_begin(SimpleNamespace(**args), state, None, model=model)


@pytest.mark.parametrize("args", [{"save_strategy": "no"}, {"save_total_limit": 2}])
def test_too_few_checkpoints_are_noticed_before_the_training(args):
    pytest.importorskip("transformers")
    with pytest.raises(RecipeError, match=next(iter(args))):
        begin(dare.averaging_callback(last=3), **args)
    begin(dare.averaging_callback(last=2), save_total_limit=2)


@pytest.mark.parametrize("settings", [{"last": 1}, {"weights": [1, 1]}, {"decay": 0.0}])
def test_what_is_no_average_is_noticed_before_the_training(settings):
    pytest.importorskip("transformers")
    with pytest.raises(RecipeError, match=next(iter(settings))):
        dare.averaging_callback(**settings)


def test_an_average_of_adapters_is_refused_before_the_training(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(RecipeError, match="average_checkpoints with decay"):
        begin(dare.ema_callback(), model=SimpleNamespace(peft_config={}), output_dir=tmp_path)
    with pytest.raises(RecipeError, match=r"decay = 1\.5"):
        dare.ema_callback(1.5)


def test_an_average_knows_nothing_of_steps_that_were_given_up(tmp_path):
    pytest.importorskip("transformers")
    for step, value in {10: 0, 20: 64, 25: 2}.items():
        checkpoint(tmp_path, step, [value])
    args = SimpleNamespace(output_dir=tmp_path)
    for begun, *steps in ((0, 10, 20), (10, 25)):
        callback = dare.ema_callback(0.5, verbose=False)
        begin(callback, begun, output_dir=tmp_path)
        for step in steps:
            state = SimpleNamespace(global_step=step, is_world_process_zero=True)
            callback.on_save(args, state, None)
            # Other processes leave the files to the first.
            callback.on_save(args, SimpleNamespace(global_step=1, is_world_process_zero=False))
    assert load_file(tmp_path / "ema-20" / WEIGHTS)["w"].tolist() == [32]
    assert load_file(tmp_path / "ema-25" / WEIGHTS)["w"].tolist() == [1]


def test_a_new_average_of_an_old_training_is_said(tmp_path):
    pytest.importorskip("transformers")
    checkpoint(tmp_path, 7, [1, 2])
    with pytest.warns(DareWarning, match="copy ema-7"):
        begin(dare.ema_callback(verbose=False), step=7, output_dir=tmp_path)
    assert load_file(tmp_path / "ema-7" / WEIGHTS)["w"].tolist() == [1, 2]


def test_without_transformers_a_callback_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match="pip install transformers"):
        dare.averaging_callback()
