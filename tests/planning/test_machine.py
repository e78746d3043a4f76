"""How much memory a plan takes by default: what a method cannot do without, if it is there."""

from __future__ import annotations

import pytest

from dare import Request, plan
from dare.analysis import analyzing
from dare.errors import RecipeError
from dare.planning import cost as machine
from dare.recipe.options import DEFAULT_MEMORY
from helpers import save_hollow

GIB = 1 << 30
SHAPE = (128256, 2048)
"""The embedding of a model of a billion parameters."""


@pytest.fixture
def files(tmp_path):
    shapes = {"up_proj.weight": SHAPE}
    names = ("base", "a", "b", "c")
    return [save_hollow(tmp_path / f"{name}.safetensors", shapes) for name in names]


def plan_of(files, free=None, **settings):
    base, *models = files
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "available_memory", lambda: free)
        made = plan(Request.of(base=base, models=models, verbose=False, **settings))
        assert made.cost.max_memory > 0  # which is kept
        return made


@pytest.mark.parametrize("method", ["tsv", "star+linear"])
def test_a_matrix_stage_gets_what_it_needs_on_a_laptop(files, method):
    made = plan_of(files, 12 * GIB, method=method, threads=1)
    assert DEFAULT_MEMORY < made.cost.least_memory == made.cost.max_memory < 12 * GIB
    assert made.cost.buffer_bytes == made.cost.max_memory
    assert made.cost.threads == 1
    told = made.to_dict()
    assert told["max_memory_bytes"] == made.cost.least_memory
    (text,) = [note["text"] for note in told["notes"] if note["code"] == "more_memory"]
    assert "up_proj.weight" in text
    assert f"{made.cost.least_memory / 1e9:.2f} GB" in text
    assert text in " ".join(str(made).split())  # it is wrapped


def test_no_thread_idles_where_half_of_what_is_free_is_enough(files):
    costs = [plan_of(files, free * GIB, method="tsv", threads=3).cost for free in (64, 18)]
    assert [cost.threads for cost in costs] == [3, 1]
    assert 3 * costs[1].least_memory / 2 < costs[0].max_memory < 32 * GIB
    assert costs[1].max_memory == max(9 * GIB, costs[1].least_memory)


def test_what_the_machine_does_not_have_is_refused_with_the_figure(files):
    needed = plan_of(files, 12 * GIB, method="tsv").cost.least_memory
    assert plan_of(files, needed, method="tsv").cost.max_memory == needed
    with pytest.raises(RecipeError) as caught:
        plan_of(files, needed - 1, method="tsv")
    text = str(caught.value)
    for part in ("tsv", "up_proj.weight", f"{needed / 1e9:.2f} GB", f"max_memory = {needed}"):
        assert part in text
    assert plan_of(files, 0, method="tsv", max_memory=needed).cost.threads == 1  # as it was said
    assert plan_of(files, None, method="tsv").cost.max_memory == needed  # nobody knows what is free


@pytest.mark.parametrize("method", ["dare+linear", "trim+ties"])
def test_other_stages_take_a_gibibyte_at_most_and_ask_nobody(files, method):
    made = plan_of(files, 0, method=method)
    assert made.cost.buffer_bytes <= made.cost.max_memory == DEFAULT_MEMORY
    assert "more_memory" not in {note.code for note in made.notes}


def test_an_analysis_goes_by_the_same_rule(files, monkeypatch):
    monkeypatch.setattr(analyzing, "workspace_bytes", lambda _sources: 2 * GIB)
    monkeypatch.setattr(machine, "available_memory", lambda: GIB)
    base, model, *_ = files
    with pytest.raises(RecipeError, match=r"memory: one thread needs 2\.15 GB.* 1\.07 GB free"):
        analyzing.analyze(base, [model], verbose=False)
    with pytest.raises(RecipeError, match=r"max_memory = 1\.0 MB: one thread needs"):
        analyzing.analyze(base, [model], max_memory="1MB", verbose=False)


# ---------------------------------------------------------------- what is free


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


SYSTEM = {"proc/meminfo": "MemTotal: 16000 kB\nMemFree: 100 kB\nMemAvailable:    9000 kB\n"}
NEW = {
    "proc/self/cgroup": "0::/outer/inner\n",
    "sys/fs/cgroup/outer/memory.max": "5000\n",
    "sys/fs/cgroup/outer/memory.current": "3000\n",
    "sys/fs/cgroup/outer/memory.stat": "anon 100\nactive_file 700\ninactive_file 400\n",
    "sys/fs/cgroup/outer/inner/memory.max": "max\n",
}
OLD = {
    "proc/self/cgroup": "7:cpu:/x\n4:memory:/box\n0::/\n",
    "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "6000\n",
    "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "5500\n",
    "sys/fs/cgroup/memory/box/memory.stat": "total_inactive_file 100\ninactive_file 9\n",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (SYSTEM, 9000 * 1024),
        ({**SYSTEM, **NEW}, 5000 - 3000 + 700 + 400),
        ({**SYSTEM, **OLD}, 6000 - 5500 + 100),
        ({**SYSTEM, **NEW, "sys/fs/cgroup/outer/memory.current": "9999"}, 0),
        ({**SYSTEM, "proc/self/cgroup": "nonsense"}, 9000 * 1024),
    ],
)
def test_what_is_free_is_what_the_system_and_the_container_leave(tmp_path, files, expected):
    assert machine.available_memory(write(tmp_path, files)) == expected
