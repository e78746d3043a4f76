"""Evaluators of all kinds: what they are given, what they return, and every way to fail."""

from __future__ import annotations

import math
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import dare
from dare.errors import EvaluationError, InputError, OutputError, RecipeError
from dare.recipe.options import RunOptions
from dare.recipe.settings import with_settings
from dare.studies.evaluators import check_evaluator, open_scorer
from dare.studies.evaluators.functions import compare_items, find, read_scores
from dare.studies.results import Scored
from helpers import is_alive, listing, wait_until, write_recipe

PYTHON = shlex.quote(sys.executable)
BASE = {"a": np.zeros(4, np.float32), "b": np.ones((2, 1), ml_dtypes.bfloat16)}
TUNED = {"a": np.array([1, 2, 3, 4], np.float32), "b": np.full((2, 1), 2, ml_dtypes.bfloat16)}


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return write_recipe(tmp_path / "models", BASE, [TUNED], method="sum").recipe


@pytest.fixture
def scorer_of(recipe):
    """Opens scorers, and closes them."""
    opened = []

    def open_one(evaluator, **settings):
        opened.append(open_scorer(evaluator, recipe, **settings))
        return opened[-1]

    yield open_one
    for scorer in opened:
        scorer.close()


def write_module(text, name="own.py"):
    path = Path(name)
    path.write_text(textwrap.dedent(text))
    return path


def raised(action):
    with pytest.raises(EvaluationError) as caught:
        action()
    return caught.value


# ---------------------------------------------------------------- what is returned


@pytest.mark.parametrize(
    ("returned", "scores"),
    [
        (1, {"score": 1.0}),
        (Fraction(1, 4), {"score": 0.25}),
        (np.float32(0.5), {"score": 0.5}),
        (np.array([[3]]), {"score": 3.0}),
        (ml_dtypes.bfloat16(0.5), {"score": 0.5}),
        ({"add": 1, "sort": np.int64(2)}, {"add": 1.0, "sort": 2.0}),
        ({"add": 1, "items": {}}, {"add": 1.0}),
        ({"items": {"a": 1, "b": 0, "/c": 1, "d/e/f": 3}}, {"score": 2 / 3, "d": 3.0}),
        ({"add": 9, "items": {"add/1": 1}}, {"add": 9.0}),
    ],
)
def test_numbers_become_scores(returned, scores):
    scored = read_scores(returned)
    assert scored.scores == scores
    assert all(type(value) is float for value in scored.scores.values())
    assert list(scored.scores) == list(scores)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "score must be a number, not None"),
        ("0.5", "score must be a number, not '0.5'"),
        (True, "score is True; return 1 or 0 instead"),
        (np.zeros(2), "score must be one number, not array([0., 0.])"),
        (1j, "score must be a number, not 1j"),
        (math.nan, "score must be a finite number, not nan"),
        (10**400, "must be a finite number, not"),
        ({"add": -math.inf}, "add must be a finite number, not -inf"),
        ({}, "there are no scores; return a number, or numbers by name"),
        ({"": 1}, "the name of a score must be text, not ''"),
        ({"a": 1, "items": {7: 1}}, "the id of an item must be text, not 7"),
        ({"a": 1, "items": {"x/1": math.nan}}, "item x/1 must be a finite number, not nan"),
        ({"a": 1, "items": [1, 2]}, "items must be a table of numbers by id"),
        ({"a": "x" * 99}, f"a must be a number, not '{'x' * 59}…"),
    ],
)
def test_what_is_no_number_is_refused(returned, message):
    assert message in str(raised(lambda: read_scores(returned)))


FIRST = {"add": 0.5}, {"add/1": 1.0, "add/2": 0.0}


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (FIRST, None),
        (({"add": 1.0}, {"add/2": 1.0, "add/1": 1.0}), None),
        (({"add": 1.0}, {"add/1": 1.0}), "1 item of 2 missing (add/2)"),
        (
            ({"sum": 1.0}, {"add/1": 1.0, "add/2": 1.0, "add/3": 1.0}),
            "1 item new (add/3); 1 score of 1 missing (add); 1 score new (sum)",
        ),
    ],
)
def test_other_items_than_at_first_or_than_asked_for_are_told(now, said):
    of_first = said and f"they are not those of the first candidate: {said}"
    assert compare_items(Scored(*FIRST), Scored(*now)) == of_first
    if said is None or "score" in said:
        assert read_scores({"items": now[1]}, now[1]).items == now[1]
    else:
        with pytest.raises(EvaluationError) as caught:
            read_scores({"items": now[1]}, FIRST[1])
        assert f"they are not those asked for: {said}" in str(caught.value)


# ---------------------------------------------------------------- commands


SCORE = """
import json, sys
from safetensors import safe_open
print("scoring", sys.argv[1])
total = float(safe_open(sys.argv[1], "np").get_tensor("a").sum())
print(json.dumps({"total": total}), end="\\n\\n \\n")
"""


def test_a_command_is_given_a_file_and_its_last_line_is_read(scorer_of, recipe, tmp_path):
    write_module(SCORE, "score.py")
    scorer = scorer_of(f"{PYTHON} score.py {{model}}", work=tmp_path / "a 'folder")
    assert not scorer.takes_items
    digest = scorer.make(recipe)
    assert digest == dare.merge(recipe).digests.output
    scored = scorer.score()
    assert (scored.scores, scored.items) == ({"total": 10.0}, {})
    assert scored.output.startswith("scoring /")
    assert 0 < scored.seconds < 60
    assert scorer.make(with_settings(recipe, {"scale": 0.0})) != digest
    assert scorer.score().scores == {"total": 0.0}
    assert len(listing(tmp_path / "a 'folder")) == 1, "the first is gone"
    scorer.close()
    assert listing(tmp_path / "a 'folder") == []


def test_a_command_is_given_a_directory_if_the_base_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, weights in (("base", BASE), ("tuned", TUNED)):
        folder = tmp_path / name
        write_recipe(folder, weights, [weights])
        (folder / "base.safetensors").rename(folder / "model.safetensors")
        (folder / "model0.safetensors").unlink()
        (folder / "config.json").write_text('{"model_type": "own"}')
    recipe = dare.Recipe(base="base", models=["tuned"], method="sum")
    scorer = open_scorer("ls {model}; echo '{\"x\": 1}'", recipe)
    scorer.make(recipe)
    output = scorer.score().output.splitlines()
    scorer.close()
    assert {"config.json", "model.safetensors"} <= set(output)


def test_a_command_is_given_items(scorer_of, recipe):
    write_module(
        """
        import json, sys
        ids = ["a/1", "a/2", "b/1"] if sys.argv[2] == "all" else json.load(open(sys.argv[2]))[:2]
        print(json.dumps({"items": {name: len(name) + int(name[-1]) for name in ids}}))
        """,
        "score.py",
    )
    scorer = scorer_of(f"{PYTHON} score.py {{model}} {{items}}")
    assert scorer.takes_items
    scorer.make(recipe)
    assert scorer.score().scores == {"a": 4.5, "b": 4.0}
    assert scorer.score(["b/1"]).items == {"b/1": 4.0}
    assert scorer.score(["a/2", "b/1"]).scores == {"a": 5.0, "b": 4.0}
    error = raised(lambda: scorer.score(["a/1", "a/2", "b/1"]))
    assert "different items; they are not those asked for: 1 item of 3 missing" in str(error)
    assert error.output == '{"items": {"a/1": 4, "a/2": 5}}'


@pytest.mark.parametrize(
    ("command", "message", "output"),
    [
        ("echo {model} >/dev/null; exit 3", "ended with status 3", ""),
        ("kill -SEGV $$ # {model}", "was stopped by SIGSEGV", ""),
        ("sh -c 'kill -KILL $$'; exit $? # {model}", "status 137 (SIGKILL, which", "Killed"),
        ("true {model}", "printed nothing; its last line must be a JSON object of numbers", ""),
        ("echo '{\"x\": 1}' >&2; true {model}", "printed nothing", '{"x": 1}'),
        ("echo '{\"x\": NaN}'; true {model}", "x must be a finite number, not nan", '{"x": NaN}'),
        ("echo 0.5; true {model}", "must be a JSON object of numbers, not '0.5'", "0.5"),
        ("printf '[%.0s' $(seq 9999); true {model}", "its last line must be a JSON object", None),
        ("echo '{\"x\": 1}'; echo bye {model}", "not 'bye ", None),
    ],
)
def test_a_command_that_fails_says_how(scorer_of, recipe, command, message, output):
    scorer = scorer_of(command)
    scorer.make(recipe)
    error = raised(scorer.score)
    assert str(error).startswith(f"{command!r}: ")
    assert message in str(error)
    assert output is None or error.output == output
    scorer.make(recipe)
    assert "there is no candidate" not in str(raised(scorer.score))


def test_ten_megabytes_are_no_trouble(scorer_of, recipe):
    scorer = scorer_of("yes 0123456789abcde | head -c 10000000; echo; echo '{\"x\": 1}' # {model}")
    scorer.make(recipe)
    scored = scorer.score()
    assert scored.scores == {"x": 1.0}
    assert scored.output.splitlines() == ["0123456789abcde"] * 38 + ["", '{"x": 1}']


def test_a_command_that_takes_too_long_is_ended_with_its_children(scorer_of, recipe):
    scorer = scorer_of("sleep 60 & echo $!; echo $$; sleep 60 # {model}", time_limit=1)
    scorer.make(recipe)
    started = time.monotonic()
    error = raised(scorer.score)
    assert time.monotonic() - started < 30
    assert "took longer than 1 s and was stopped" in str(error)
    pids = error.output.split()
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_alive, pids)))


def test_a_command_has_so_many_threads_and_is_not_held_up_by_a_child(scorer_of, recipe):
    command = 'sleep 60 & echo "{\\"pid\\": $!, \\"threads\\": $OMP_NUM_THREADS}" # {model}'
    scorer = scorer_of(command, options=RunOptions(threads=3))
    scorer.make(recipe)
    started = time.monotonic()
    scores = scorer.score().scores
    assert time.monotonic() - started < 30
    assert scores["threads"] == 3
    wait_until(lambda: not is_alive(int(scores["pid"])))


def test_a_folder_that_cannot_be_written_is_named(scorer_of, recipe, tmp_path):
    (tmp_path / "file").write_text("")
    scorer = scorer_of("true {model}", work=tmp_path / "file")
    with pytest.raises(OutputError, match="file: candidates cannot be written there: File exists"):
        scorer.make(recipe)


# ---------------------------------------------------------------- what cannot work


@pytest.mark.parametrize(
    ("evaluator", "message"),
    [
        ("python score.py", "is not an evaluator. Write module:function or"),
        ("", "is not an evaluator"),
        ("own:", "is not an evaluator"),
        ("true ${model}", "${model} is a variable of the shell; write {model}"),
        ("true {model} {item}", "{item} is not known (did you mean 'items'?); there are"),
        ("nosuch:f", "nosuch: there is no module 'nosuch', neither in "),
        ("lm_eval:", "names no task"),
        ("lm_eval:x@nowhere", "there is no folder 'nowhere'"),
    ],
)
def test_what_cannot_work_is_refused_at_once(recipe, evaluator, message):
    for attempt in (check_evaluator, lambda text: open_scorer(text, recipe)):
        with pytest.raises(RecipeError) as caught:
            attempt(evaluator)
        assert message in str(caught.value)


@pytest.fixture
def modules(monkeypatch, tmp_path):
    """Modules that are imported here, and forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    write_module(
        """
        number = 1
        def tensors(tensors, items=None, *more, rate=3, **others): ...
        def nothing(): ...
        def other(tensor): ...
        def more(tensors, rate): ...
        class Own:
            def score(self, path): ...
            def __call__(self, model, items): ...
        own = Own()
        def load_model(base): ...
        """
    )
    write_module("1 / 0", "broken.py")
    write_module("import nosuch", "needing.py")
    write_module("raise SystemExit(5)", "leaving.py")
    write_module("def f(path): ...", "json.py")
    yield
    for name in set(sys.modules) - known:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("evaluator", "message"),
    [
        ("own.sub:f", "own.sub: there is no module 'own.sub'"),
        ("nosuch.py:f", "nosuch.py: no such file"),
        ("brokn.py:f", "did you mean 'broken.py'?"),
        ("own:tensor", "own: has no function 'tensor' (did you mean 'tensors'?)"),
        ("own:number", "own:number: is not a function"),
        ("own:nothing", "own:nothing: takes no parameters; the first must be tensors, model or"),
        ("own:other", "its first parameter is 'tensor' (did you mean 'tensors'?), not tensors,"),
        ("own:more", "there is no value for its parameter 'rate'"),
        ("broken:f", "broken: cannot be imported: ZeroDivisionError: division by zero (/"),
        ("needing:f", "needing: cannot be imported: ModuleNotFoundError: No module named 'nosuch'"),
        ("leaving:f", "leaving: cannot be imported: SystemExit: 5"),
        ("json.py:f", "json.py: there is another module called 'json' (/"),
    ],
)
def test_what_is_no_function_that_scores_is_refused(modules, evaluator, message):
    with pytest.raises(RecipeError) as caught:
        find(evaluator)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("evaluator", "form", "takes_items"),
    [
        ("own:tensors", "tensors", True),
        ("own.py:tensors", "tensors", True),
        ("./own.py:own.score", "path", False),
        ("own:own", "model", True),
    ],
)
def test_parameters_say_what_a_function_takes(modules, evaluator, form, takes_items):
    found = find(evaluator)
    assert (found.form, found.takes_items) == (form, takes_items)
    assert found.load_model.__name__ == "load_model"


def test_what_a_shell_can_do_is_allowed():
    check_evaluator("cd . && A=$(ls) OMP_NUM_THREADS=1 env true {model}")
    check_evaluator("if test -e ${HOME}; then awk '{ print }' {model}; fi")


def test_a_crash_or_a_hang_at_import_is_told(recipe, monkeypatch):
    write_module("import os; print('bye'); os._exit(7)")
    error = raised(lambda: check_evaluator("own:f"))
    assert (str(error), error.output) == ("own:f: its process ended with status 7", "bye")
    monkeypatch.setattr("dare.studies.evaluators.functions.READY_SECONDS", 0.5)
    write_module("import time; time.sleep(60)")
    error = raised(lambda: open_scorer("own:f", recipe, time_limit=0.1))
    assert str(error) == "own:f: took longer than 0.5 s and was stopped"


# ---------------------------------------------------------------- functions


DOING = """
    import ctypes, os, subprocess, sys, time
    from itertools import count
    from pathlib import Path

    number = count()
    exec(Path(__file__).with_name("first").read_text())

    def score(tensors, items=None):
        print("before")
        known = globals() | {"tensors": tensors, "items": items}
        exec(Path(__file__).with_name("how").read_text(), known)
        return known.get("returned", 1)
"""
"""An evaluator that does what a file says: many tests share the process that it runs in."""

WITHOUT_MODELS = """
    from types import SimpleNamespace

    form = SimpleNamespace(candidate={}, make=lambda recipe: "0", close=lambda: None)
    made = SimpleNamespace(make_form=lambda *given: form)
    sys.modules["dare.studies.candidates"] = made
"""
"""What is put in place of candidates where only the process matters: it starts three times as
fast."""


class Doing:
    """A scorer whose evaluator does what it is told."""

    def __init__(self, folder, first, **settings):
        self.folder = folder
        (folder / "doing.py").write_text(textwrap.dedent(DOING))
        (folder / "first").write_text(textwrap.dedent(first))
        self.recipe = write_recipe(folder / "models", BASE, [TUNED], method="sum").recipe
        self.scorer = open_scorer(f"{folder}/doing.py:score", self.recipe, **settings)
        self.name = f"{folder}/doing.py:score: "

    def score(self, how, items=None, **settings):
        (self.folder / "how").write_text(textwrap.dedent(how))
        self.digest = self.scorer.make(with_settings(self.recipe, settings))
        return self.scorer.score(items)

    def error(self, how, items=None):
        error = raised(lambda: self.score(how, items))
        assert str(error).startswith(self.name)
        return str(error).removeprefix(self.name), error.output


@pytest.fixture(scope="module")
def doing(tmp_path_factory):
    shared = Doing(tmp_path_factory.mktemp("doing"), "")
    yield shared
    shared.scorer.close()


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    shared = Doing(
        tmp_path_factory.mktemp("process"),
        WITHOUT_MODELS,
        time_limit=3,
        options=RunOptions(threads=3),
    )
    yield shared
    shared.scorer.close()


def test_a_function_is_given_arrays(doing):
    how = """
        shapes = {name: (value.dtype.name, value.shape) for name, value in tensors.items()}
        assert shapes == {"a": ("float32", (4,)), "b": ("bfloat16", (2, 1))}, shapes
        assert not any(value.flags.writeable for value in tensors.values())
        print("scoring", items)
        ids = ["a/1", "b/1"] if items is None else items
        returned = {"items": {name: tensors[name[0]].astype(float).sum() for name in ids}}
    """
    assert doing.scorer.takes_items
    scored = doing.score(how)
    assert doing.digest == dare.merge(doing.recipe).digests.output
    assert scored.items == {"a/1": 10.0, "b/1": 4.0}
    assert scored.scores == {"a": 10.0, "b": 4.0}
    assert (scored.output, scored.seconds > 0) == ("before\nscoring None", True)
    assert doing.score(how, ["b/1"], scale=0.0).items == {"b/1": 2.0}
    assert doing.score(how, ("a/1",), scale=0.5).items == {"a/1": 5.0}
    half = doing.recipe.changed(dtype="F16")
    doing.scorer.make(half)
    (doing.folder / "how").write_text("returned = tensors['a'].itemsize")
    assert doing.scorer.score().scores == {"score": 2.0}
    assert doing.score(how).items == {"a/1": 10.0, "b/1": 4.0}


def test_after_an_error_or_a_crash_another_candidate_can_be_made(doing):
    lack = "there is no candidate to score; make one first"
    with pytest.raises(InputError, match=r"nowhere\.safetensors"):
        doing.scorer.make(doing.recipe.changed(models=("nowhere.safetensors",)))
    assert lack in str(raised(doing.scorer.score))
    assert doing.score("").scores == {"score": 1.0}
    assert doing.error("os._exit(3)") == ("its process ended with status 3", "before")
    assert lack in str(raised(doing.scorer.score))
    assert doing.score("returned = tensors['a'].sum()").scores == {"score": 10.0}


@pytest.mark.parametrize(
    ("how", "message", "output"),
    [
        ("raise ValueError('no\\nno')", "failed: ValueError: no\\nno (<str", "before"),
        ("raise SystemExit('no')", "the evaluator failed: SystemExit: no (", "before"),
        ("raise KeyboardInterrupt", "it failed: KeyboardInterrupt", "before\nTraceback"),
        ("raise MemoryError", "the evaluator failed: MemoryError", "before\nTraceback"),
        ("os._exit(0)", "its process ended with status 0", "before"),
        ("ctypes.string_at(0)", "its process was stopped by SIGSEGV", "before\nFatal Python error"),
        ("time.sleep(60)", "took longer than 3 s and was stopped", "before"),
        ("returned = float('nan')", "score must be a finite number, not nan", "before"),
    ],
)
def test_whatever_a_function_does_costs_one_candidate(process, how, message, output):
    found, printed = process.error(how)
    assert message in found
    assert printed.startswith(output)
    scored = process.score("print('after')")
    assert (scored.scores, scored.output) == ({"score": 1.0}, "before\nafter")


def test_a_process_that_is_killed_between_requests_is_noticed(process):
    for action in (process.scorer.score, lambda: process.scorer.make(process.recipe)):
        os.kill(int(process.score("returned = os.getpid()").scores["score"]), signal.SIGKILL)
        assert "its process was stopped by SIGKILL, which the system" in str(raised(action))
    threads = process.score("returned = int(os.environ['OPENBLAS_NUM_THREADS'])")
    assert threads.scores == {"score": 3.0}


def test_a_function_may_print_what_it_likes_and_leave_a_copy_of_its_process(process):
    how = """
        os.write(1, b'{"value": 3}\\n' * 1000)
        print("x" * 10_000_000)
        subprocess.run(["echo", '{"value": 4}'])
        os.write(2, b"the end")
        if os.fork() == 0:
            returned = 7.0
        else:
            os.wait()
    """
    assert process.score(how).scores == {"score": 1.0}
    scored = process.score(how)
    assert scored.scores == {"score": 1.0}
    assert scored.output.splitlines()[-2:] == ['{"value": 4}', "the end"]


def test_children_that_a_function_starts_end_with_it(process):
    how = """
        child = subprocess.Popen(["sleep", "60"])
        forked = os.fork()
        if not forked:
            time.sleep(60)
            os._exit(0)
        print(child.pid, forked, os.getpid(), flush=True)
        os._exit(5)
    """
    message, output = process.error(how)
    assert message == "its process ended with status 5"
    pids = output.split()[1:]
    assert len(pids) == 3
    wait_until(lambda: not any(map(is_alive, pids)))


def test_a_file_for_a_function_goes_away_even_if_that_crashes(scorer_of, recipe, tmp_path):
    Path("deeper").mkdir()
    write_module("from safetensors import safe_open", "deeper/beside.py")
    Path("dare").mkdir()
    Path("dare/__init__.py").write_text("1 / 0  # is not what is imported")
    write_module(
        """
        import os, beside
        def score(path):
            print(path, flush=True)
            total = beside.safe_open(path, "np").get_tensor("a").sum()
            return os._exit(4) if total == 20 else total
        """,
        "deeper/own_scores.py",
    )
    work = tmp_path / "work"
    scorer = scorer_of("deeper/own_scores.py:score", work=work)
    scorer.make(recipe)
    first = scorer.score()
    assert first.scores == {"score": 10.0}
    scorer.make(with_settings(recipe, {"scale": 2.0}))
    assert not Path(first.output).exists()
    assert len(listing(work)) == 1
    assert raised(scorer.score).output.startswith(str(work))
    assert listing(work) == []


HANGING = """
    import os
    from pathlib import Path
    Path("p").write_text(str(os.getpid()))
    os.rename("p", "pid")
    while True: pass
"""
LOOKING = "from dare.studies.evaluators import check_evaluator; check_evaluator('own:score')"
RUNNING = (
    "from dare.run.processes import Watched; Watched(['sh', '-c', "
    "'echo $$ >p; mv p pid; sleep 60; true']).pump(lambda: False, None)"
)


@pytest.mark.parametrize("code", [LOOKING, RUNNING])
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_evaluators_end_with_us(tmp_path, monkeypatch, code, ending):
    monkeypatch.chdir(tmp_path)
    write_module(HANGING)
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as searching:
        try:
            wait_until(Path("pid").exists)
            pid = Path("pid").read_text().strip()
            assert is_alive(pid)
            searching.send_signal(ending)
            _, printed = searching.communicate(timeout=30)
        finally:
            searching.kill()
    assert (ending == signal.SIGKILL) != (b"KeyboardInterrupt" in printed)
    wait_until(lambda: not is_alive(pid))


# ---------------------------------------------------------------- functions in this process


def test_a_callable_runs_here(scorer_of, recipe):
    seen = []

    def own(tensors, items=None):
        seen.append(items)
        return {"items": {"a/1": tensors["a"].sum()}}

    scorer = scorer_of(own)
    assert scorer.takes_items
    assert scorer.make(recipe) == dare.merge(recipe).digests.output
    assert scorer.score().scores == {"a": 10.0}
    assert scorer.score(["a/1"]).items == {"a/1": 10.0}
    assert seen == [None, ["a/1"]]
    assert "returned different items" in str(raised(lambda: scorer.score(["a/2"])))


def test_a_callable_has_no_time_limit_and_may_take_no_items(recipe):
    with pytest.raises(RecipeError, match='"module:function"'):
        open_scorer(lambda path: 1, recipe, time_limit=1)
    with pytest.raises(RecipeError, match="the time limit is 0 s; it must be more than 0"):
        open_scorer("own:score", recipe, time_limit=0)
    with pytest.raises(RecipeError, match="lambda>: its first parameter is 'weights'"):
        open_scorer(lambda weights: 1, recipe)
    with closing(open_scorer(lambda tensors: 1, recipe)) as scorer:
        scorer.make(recipe)
        assert "cannot score a part of the items" in str(raised(lambda: scorer.score(["a"])))


LOADED = []


def load_model(base):
    """What an evaluator's module may define."""
    LOADED.append(base.name)
    if not base.name.startswith("base"):
        raise KeyError(base.name)
    return {"a": np.zeros(4, np.float32), "b": np.zeros((2, 1), np.float32)}


def test_candidates_are_written_into_a_live_model(scorer_of, recipe, monkeypatch):
    models = []

    def own(model):
        models.append(model)
        return {name: value.sum() for name, value in model.items()}

    LOADED.clear()
    scorer = scorer_of(own)
    assert scorer.make(recipe) == dare.merge(recipe).digests.output
    assert scorer.score().scores == {"a": 10.0, "b": 4.0}
    scorer.make(with_settings(recipe, {"scale": 0.0}))
    assert scorer.score().scores == {"a": 0.0, "b": 2.0}
    assert (LOADED, models[0]) == (["base.safetensors"], models[1])
    error = raised(lambda: open_scorer(own, recipe.changed(base=recipe.models[0].file)))
    assert "the model to score could not be made: KeyError: 'model0.safetensors'" in str(error)
    assert "raise KeyError(base.name)" in error.output
    monkeypatch.delattr(sys.modules[__name__], "load_model")
    with pytest.raises(RecipeError, match="is a file, but transformers builds a model from a fol"):
        open_scorer(own, recipe)
