"""Your own models: folders, plans and jobs of the server, with real models."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_helpers import large, make_models, recipe_of, run_a_little, small
from starlette.applications import Starlette
from starlette.testclient import TestClient

import dare
from dare.errors import DareError, InputError
from dare.output.targets import MARK
from dare.output.verification import verify
from dare.recipe.document import request_from_document
from dare.web import jobs as web_jobs
from dare.web.guard import MOST_DEPTH, MOST_ITEMS
from dare.web.jobs import Jobs, QueuedJob
from dare.web.own import OutsideError, OwnModels, Roots
from helpers import is_alive, save, wait_until


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def output(models: Path, request: pytest.FixtureRequest) -> Path:
    return models / f"out-{request.node.name[5:60]}.safetensors"


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    jobs = Jobs()
    yield jobs
    jobs.close()


def ended(job: QueuedJob) -> QueuedJob:
    wait_until(lambda: job.state not in ("waiting", "running"), f"the end of job {job.number}")
    return job


def merge_of(models: Path, output: Path) -> dict[str, Any]:
    return {"kind": "merge", "recipe": large(models, output)}


@pytest.fixture(scope="module")
def undisturbed(models: Path) -> bytes:
    output = models / "undisturbed.safetensors"
    dare.merge(recipe_of(large(models, output)))
    return output.read_bytes()


# ---------------------------------------------------------------- jobs


def test_a_merge_runs_and_says_what_it_did(jobs, models, output):
    seen: set[tuple[str, int, int]] = set()
    job = jobs.add(merge_of(models, output))
    while job.state in ("waiting", "running"):
        seen.add((job.verb, job.done_bytes, job.total_bytes))
        time.sleep(0.002)
    assert job.state == "done", job.problem
    merging = sorted(done for verb, done, _ in seen if verb == "merging")
    assert len(merging) >= 2  # it says how far it is every tenth of a second
    assert merging[-1] > merging[0]
    assert job.result["sha256"] == verify(output).sha256
    assert job.result["resumed_chunks"] == 0
    assert [model["name"] for model in job.result["models"]] == ["large-one", "large-two"]
    assert job.result["models"][0]["drop_rate_realised"] == pytest.approx(0.9, abs=0.01)


def test_a_cancelled_merge_goes_on_where_it_stopped(jobs, models, output, undisturbed):
    job = jobs.add(merge_of(models, output))
    pid = run_a_little(job)
    jobs.cancel(job)
    os.kill(pid, signal.SIGCONT)
    assert ended(job).state == "stopped"
    assert job.problem is None
    assert not output.exists()
    assert output.with_name(f"{output.name}.partial").is_dir()
    again = ended(jobs.add(job.request))
    assert again.state == "done", again.problem
    assert 0 < again.result["resumed_chunks"] < 16
    assert output.read_bytes() == undisturbed


def test_one_job_runs_and_the_others_wait(jobs, models, output, undisturbed):
    first = jobs.add(merge_of(models, output))
    pid = run_a_little(first)
    check = {"kind": "verify", "path": str(models / "undisturbed.safetensors")}
    second, third = jobs.add(check), jobs.add(check)
    time.sleep(0.3)
    assert [job.state for job in jobs.all()] == ["running", "waiting", "waiting"]
    jobs.cancel(third)
    assert third.state == "stopped"
    os.kill(pid, signal.SIGCONT)
    assert [ended(job).state for job in (first, second, third)] == ["done", "done", "stopped"]
    assert second.result["ok"]


def test_a_crash_takes_nothing_else_down(jobs, models, output, undisturbed):
    job = jobs.add(merge_of(models, output))
    os.kill(run_a_little(job), signal.SIGKILL)
    assert ended(job).state == "failed"
    assert "SIGKILL" in job.problem
    assert "memory" in job.problem
    dare.merge(recipe_of(job.request["recipe"]))
    assert output.read_bytes() == undisturbed


def test_a_server_that_stops_interrupts_its_job(models, output, undisturbed, tmp_path):
    jobs = Jobs()
    job = jobs.add(merge_of(models, output))
    waiting = jobs.add(merge_of(models, output))
    pid = run_a_little(job)
    os.kill(pid, signal.SIGCONT)
    jobs.close()
    assert (job.state, waiting.state) == ("stopped", "stopped")
    assert not Path("/proc", str(pid)).exists()
    with pytest.raises(InputError, match="stopping"):
        jobs.add(merge_of(models, output))
    (tmp_path / "recipe.toml").write_text(recipe_of(job.request["recipe"]).to_toml())
    report = dare.merge(tmp_path / "recipe.toml")  # as the command does
    assert report.resumed_chunks > 0
    assert output.read_bytes() == undisturbed


SHORT = "import sys; sys.stdin.readline(); print('{\"result\": {}}')"


def test_jobs_that_wait_or_have_ended_are_bounded(jobs, models, output, monkeypatch):
    monkeypatch.setattr(web_jobs, "MOST_WAITING", 2)
    monkeypatch.setattr(web_jobs, "MOST_FINISHED", 3)
    first = jobs.add(merge_of(models, output))
    pid = run_a_little(first)
    monkeypatch.setattr(web_jobs, "COMMAND", [sys.executable, "-I", "-S", "-c", SHORT])
    waiting = [jobs.add({"kind": "verify"}) for _ in range(2)]
    with pytest.raises(InputError, match="2 jobs are waiting"):
        jobs.add({"kind": "verify"})
    assert jobs.all() == [first, *waiting]
    jobs.cancel(waiting.pop())
    assert jobs._queue.qsize() == 1
    jobs.cancel(first)
    os.kill(pid, signal.SIGCONT)
    later = [ended(job) for job in (first, *waiting)]
    for _ in range(4):
        later.append(ended(jobs.add({"kind": "verify"})))
    assert [job.number for job in jobs.all()] == [4, 5, 6, 7]
    assert [job.folder.exists() for job in later] == 2 * [False] + 4 * [True]
    assert jobs.find("7") is later[-1]
    with pytest.raises(InputError, match="no job '1'"):
        jobs.find("1")


SERVER = """
import json, sys, time
from dare.web.jobs import Jobs
jobs = Jobs()
job = jobs.add(json.loads(sys.argv[1]))
while not job.total_bytes: time.sleep(0.001)
print(job.pid, flush=True)
time.sleep(60)
"""


def test_a_server_that_is_killed_takes_its_job_along(models, output, undisturbed):
    request = merge_of(models, output)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, json.dumps(request)], stdout=subprocess.PIPE
    )
    with server:
        pid = int(server.stdout.readline())
        os.kill(pid, signal.SIGSTOP)  # so that it cannot be done before
        server.kill()
        server.wait()
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not is_alive(pid), "the end of the job")
    assert not output.exists()
    dare.merge(recipe_of(request["recipe"]))
    assert output.read_bytes() == undisturbed


# ---------------------------------------------------------------- roots


@pytest.fixture
def places(tmp_path: Path) -> tuple[Roots, Path, Path]:
    """Roots, the folder that they are, and one beside it."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside, outside):
        save(folder / "math" / "model.safetensors", {"w": np.zeros(4, np.float32)})
    return Roots([inside]), inside, outside


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "{outside}",
        "{outside}/math",
        "{inside}/../outside/math",
        "{inside}/math/../../outside",
        "{inside}-not",
        "..",
        "~/x",
        "math",
        "/",
        "",
        "s3://bucket/model",
        "https://host/model",
        "a\0b",
        "{inside}/a\0b",
    ],
)
def test_what_is_outside_is_refused(places, path):
    roots, inside, outside = places
    given = path.format(inside=inside, outside=outside)
    for find in (roots.find, roots.find_output):
        with pytest.raises(DareError if "\0" in path or not path else OutsideError):
            find(given)


def test_what_is_outside_is_refused_in_merges_and_layers_too(places):
    roots, inside, outside = places
    good, bad = (
        {"base": str(inside / "math"), "models": [str(folder / "math")]}
        for folder in (inside, outside)
    )
    nested = {"merges": {"m": bad}, "models": ["m"], "method": "sum"}
    layers = {"layers": [{**bad, "range": [0, 1]}], "models": [], "method": "passthrough"}
    for inner in (nested, layers):
        with pytest.raises(OutsideError):
            roots.admit(request_from_document({**good, **inner}, "recipe"))


def test_links_that_lead_out_are_refused(places):
    roots, inside, outside = places
    (inside / "link").symlink_to(outside / "math")
    (inside / "within").symlink_to(inside / "math")
    with pytest.raises(OutsideError, match=r"leads to .*outside"):
        roots.find(inside / "link")
    with pytest.raises(OutsideError):
        roots.find_output(inside / "link" / "out")
    assert roots.find(inside / "within") == inside / "within"
    with pytest.raises(OutsideError):
        roots.find_output(inside)
    with pytest.raises(InputError, match="is not a folder"):
        roots.find_output(inside / "not" / "there")
    shown = {entry["name"] for entry in roots.listing(str(inside))["entries"]}
    assert shown == {"math", "within"}


def test_a_folder_shows_what_can_be_opened_or_chosen(places):
    roots, inside, _ = places
    (inside / "recipe.toml").write_text("")
    (inside / "secret.txt").write_text("")
    (inside / ".hidden").mkdir()
    (inside / "<b>empty").mkdir()
    (inside / "lora").mkdir()
    (inside / "lora" / "adapter_config.json").write_text("{}")
    (inside / "out.partial").mkdir()
    (inside / "out.partial" / "dare-partial.txt").write_bytes(MARK)
    listed = roots.listing(str(inside))
    assert {entry["name"]: (entry["kind"], entry["holds"]) for entry in listed["entries"]} == {
        "<b>empty": ("folder", ""),
        "lora": ("model", "adapter"),
        "math": ("model", "safetensors"),
        "out.partial": ("interrupted", ""),
        "recipe.toml": ("recipe", ""),
    }
    assert listed["above"] is None
    size = (inside / "math" / "model.safetensors").stat().st_size
    assert next(e["nbytes"] for e in listed["entries"] if e["name"] == "math") == size
    assert roots.listing(None)["entries"][0]["path"] == str(inside)
    assert roots.listing(str(inside / "math"))["above"] == str(inside)


# ---------------------------------------------------------------- over the wire


@contextmanager
def serving(folder: Path) -> Iterator[TestClient]:
    """A client of a server that was given a folder."""
    own = OwnModels((folder,))
    with TestClient(Starlette(routes=own.routes)) as client:
        yield client
    own.close()


@pytest.fixture
def client(models: Path) -> Iterator[TestClient]:
    with serving(models) as client:
        yield client


def last_job(client: TestClient) -> dict[str, Any]:
    """The latest job, when it has ended."""
    jobs = "/api/own/jobs"
    wait_until(lambda: client.get(jobs).json()[-1]["state"] not in ("waiting", "running"))
    found: dict[str, Any] = client.get(jobs).json()[-1]
    return found


def plan(client, recipe, **more: Any) -> dict[str, Any]:
    return client.post("/api/own/plan", json={"recipe": recipe, **more}).json()


def test_a_plan_says_what_will_be_done_or_why_not(client, models, output):
    answer = plan(client, small(models, output))
    assert answer["facts"]["tensors"].endswith("merged")
    assert [model["name"] for model in answer["models"]] == ["add", "say"]
    assert (answer["drops"], answer["weighs"]) == ("dare", True)
    assert (answer["output"], answer["output_problem"]) == (str(output), None)
    written = tomllib.loads(answer["toml"])
    assert (written["base"], written["output"]) == (str(models / "base"), str(output))
    assert recipe_of(written) == recipe_of(small(models, output))
    recipe = small(models)
    recipe["models"]["merge_files"] = [str(models / "large-one.safetensors")]
    with pytest.raises(dare.MismatchError) as said:
        dare.plan(recipe_of(recipe))
    answer = plan(client, recipe)
    assert answer["error"] == str(said.value)
    assert recipe_of(tomllib.loads(answer["toml"])) == recipe_of(recipe)


def test_an_output_that_dare_did_not_write_is_not_replaced(client, models, output):
    output.write_bytes(b"mine")
    body = {"recipe": small(models, output), "overwrite": True}
    assert "was not made by dare" in plan(client, **body)["output_problem"]
    assert client.post("/api/own/jobs", json={**body, "kind": "merge"}).is_success
    assert last_job(client)["state"] == "failed"
    assert output.read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_file": "/tmp/elsewhere.safetensors"}, "is outside"),
        ({"base_file": "/etc"}, "is outside"),
        ({"base_file": "org/name"}, "is outside"),
        ({"merge_files": []}, "no models"),
        ({"cluster": "auto"}, "command line"),
        ({"require_signed": "signer.pem"}, "command line"),
        ({"chat_template": "/etc/passwd"}, "is outside"),
    ],
)
@pytest.mark.parametrize("address", ["plan", "jobs"])
def test_recipes_that_lead_out_are_refused(client, models, output, change, message, address):
    recipe = small(models, output.with_suffix(""))
    (recipe["models"] if "file" in str(change) else recipe).update(change)
    body = {"recipe": recipe, "kind": "merge"}
    answer = client.post(f"/api/own/{address}", json=body)
    assert answer.is_client_error or address == "plan"
    assert message in answer.json()["error"]
    assert client.get("/api/own/jobs").json() == []


@pytest.mark.parametrize(
    "body",
    [
        *(b"no JSON", b"[]", b"1", b"{", b"{}", b'{"recipe": 1}', b"[" * 100_000, b"\xff", b"NaN"),
        *(b'{"kind": NaN}', b'{"kind": 1e999}', b'{"kind": ' + b"9" * 5000 + b"}"),
        *(b'{"kind": "\\ud800"}', b'{"kind": "verify", "path": "\\ud800"}'),
    ],
)
def test_odd_requests_are_answered(client, body):
    answers = [client.post(f"/api/own/{name}", content=body) for name in ("jobs", "plan")]
    assert answers[0].status_code == 400
    assert all(answer.json()["error"] for answer in answers)


@pytest.mark.parametrize("number", ["7", "-1", "9" * 40, "9" * 5000, "٣", "0x1", "1_0", "1.0", "x"])
def test_there_are_no_other_jobs(client, number):
    assert client.post("/api/own/jobs", json={"kind": "draw"}).status_code == 400
    for name in ("cancel", "again"):
        answer = client.post(f"/api/own/jobs/{number}/{name}", json={})
        assert (answer.status_code, len(answer.text) < 200) == (400, True)
    assert client.get(f"/api/own/jobs/{number}/analysis").status_code == 400


def nested(depth: int) -> dict[str, Any]:
    return {"x": nested(depth - 1)} if depth > 1 else {}


def test_what_a_request_holds_is_bounded(client, models, output):
    recipe = small(models, output)
    recipe["models"]["merge_files"] = [str(models / "add")] * (MOST_ITEMS + 1)
    for address in ("plan", "jobs"):
        answer = client.post(f"/api/own/{address}", json={"kind": "merge", "recipe": recipe})
        assert answer.status_code == 400
        assert f"at most {MOST_ITEMS} entries" in answer.json()["error"]
    as_deep_as_may_be, deeper = ({"kind": "x", "y": nested(MOST_DEPTH - 1 + n)} for n in (0, 1))
    assert "no such job" in client.post("/api/own/jobs", json=as_deep_as_may_be).json()["error"]
    assert f"depth of {MOST_DEPTH}" in client.post("/api/own/jobs", json=deeper).json()["error"]


def test_a_recipe_is_read_and_a_name_that_is_no_text_is_shown(client, models, output):
    recipe = small(models, output, seed=7)
    path = models / "recipe.toml"
    path.write_text(recipe_of(recipe).to_toml())
    assert client.get("/api/own/recipe", params={"path": str(path)}).json() == {"recipe": recipe}
    assert client.get("/api/own/recipe", params={"path": "/etc/hosts"}).status_code == 403
    name = os.fsdecode(b"\xff.safetensors")
    try:
        (models / name).write_bytes(b"")
    except OSError:
        pytest.skip("this file system has no such names")
    answer = client.get("/api/own/folders", params={"path": str(models)})
    assert name in {entry["name"] for entry in answer.json()["entries"]}
    (models / name).unlink()


# What leads out of the folder `in`: each link in it, and what it leads to.
WAYS_OUT = {
    "weights": ("a/model.safetensors", "out/math/model.safetensors"),
    "component": ("a/unet/diffusion_pytorch_model.safetensors", "out/math/model.safetensors"),
    "link to a link": ("a/model.safetensors", "in/hop"),
    "shard": ("a/model-00001-of-00001.safetensors", "out/math/model.safetensors"),
    "index": ("a/model.safetensors.index.json", "out/index.json"),
    "configuration": ("a/config.json", "out/config.json"),
    "nothing": ("a/model.safetensors", "out/not-there"),
}


@pytest.fixture
def ways_out(tmp_path: Path) -> Iterator[tuple[Path, TestClient]]:
    """A folder `in`, beside one that is not given, and a server of it."""
    weights = {"w": np.zeros(4, np.float32)}
    for file in ("in/base", "in/a", "out/math"):
        save(tmp_path / file / "model.safetensors", weights)
    index = {"weight_map": {"w": "model-00001-of-00001.safetensors"}}
    (tmp_path / "out" / "index.json").write_text(json.dumps(index))
    (tmp_path / "out" / "config.json").write_text("{}")
    (tmp_path / "in" / "hop").symlink_to(tmp_path / "out" / "math" / "model.safetensors")
    with serving(tmp_path / "in") as client:
        yield tmp_path, client


@pytest.mark.parametrize("way", WAYS_OUT)
def test_no_link_leads_out_however_deep_it_lies(ways_out, way):
    home, client = ways_out
    link, target = (home / name for name in (f"in/{WAYS_OUT[way][0]}", WAYS_OUT[way][1]))
    if "component" in way:
        (home / "in" / "a" / "model_index.json").write_text('{"unet": ["diffusers", "UNet"]}')
    if way == "shard":
        shutil.copy(home / "out" / "index.json", home / "in" / "a" / "model.safetensors.index.json")
    link.unlink(missing_ok=True)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(target)
    model = str(home / "in" / "a")
    recipe = {
        "base": model,
        "models": [str(home / "in" / "base")],
        "output": str(home / "in" / "o"),
    }
    for address in ("plan", "jobs"):
        body = {"recipe": recipe, "kind": "merge"}
        answer = client.post(f"/api/own/{address}", json=body)
        assert (answer.status_code, "is outside" in answer.text) == (403, True)
    if way == "component":  # and the process of a job refuses it too
        assert client.post("/api/own/jobs", json={"kind": "analyze", "recipe": recipe}).is_success
        assert "is outside" in last_job(client)["problem"]


@pytest.mark.parametrize(
    "inner",
    [
        "recipe = '{out}/secret.toml'",
        "recipe = '{inside}/link.toml'",
        "recipe = '{inside}/../out/secret.toml'",
        "recipe = 'https://127.0.0.1:9/x.toml'",
        "recipe = {{base = '{out}/math', models = ['{inside}/a']}}",
        "recipe = {{base = '{inside}/a', models = [{{recipe = '{out}/secret.toml'}}]}}",
    ],
)
def test_no_recipe_inside_a_recipe_leads_out(ways_out, inner):
    home, client = ways_out
    (home / "out" / "secret.toml").write_text("base = 'secret'\nmodels = ['secret']")
    (home / "in" / "link.toml").symlink_to(home / "out" / "secret.toml")
    inner = inner.format(out=home / "out", inside=home / "in")
    text = f"base = '{home}/in/base'\nmodels = [{{{inner}}}]"
    (home / "in" / "outer.toml").write_text(text)
    answer = client.get("/api/own/recipe", params={"path": str(home / "in" / "outer.toml")})
    assert (answer.status_code, "'secret'" in answer.text) == (403, False)


def test_an_analysis(client, models):
    body = {"kind": "analyze", "recipe": small(models)}
    number = client.post("/api/own/jobs", json=body).json()["number"]
    found = last_job(client)
    assert (found["state"], found["result"]["verdict"]) == ("done", "no defect found")
    document = client.get(f"/api/own/jobs/{number}/analysis").json()
    assert document["schema"] == "dare-analysis/4"
    assert [model["name"] for model in document["models"]] == ["add", "say"]
