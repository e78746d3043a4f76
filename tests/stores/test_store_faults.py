"""What servers do wrong: each fault is overcome, or told in words that help."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest

from dare.errors import InputError, install_command
from dare.stores import reading
from dare.stores.locations import to_path
from dare.stores.objects import StoreFile
from file_server import etag_of

CONTENT = bytes(range(256)) * 1000


@pytest.fixture
def path(web, quick):
    web.content["d/w.safetensors"] = CONTENT
    return to_path(f"{web.url}/d/w.safetensors?sig=topsecret")


def whole(path):
    file = StoreFile(path)
    into = bytearray(file.size)
    assert file.read_at(memoryview(into), 0) == file.size
    file.close()
    return bytes(into)


def refusal(path):
    """What is said of a file that cannot be read."""
    with pytest.raises(InputError) as caught:
        whole(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert "topsecret" not in text
    cause = caught.value
    while cause is not None:  # nor does a traceback have it
        assert "topsecret" not in str(cause)
        cause = cause.__cause__
    return text.removeprefix(f"{path}: ")


def always(web, answer):
    web.faults["w.safetensors"] = answer


def once(web, answer):
    """A fault at the second request; return the list of all."""
    seen = []

    def fault(handler):
        seen.append(handler.headers["Range"])
        return len(seen) == 2 and answer(handler)

    web.faults["w.safetensors"] = fault
    return seen


# ---------------------------------------------------------------- faults that pass


def cut(handler):
    """Half of what was announced, and then nothing."""
    begin, end = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
    handler.send_response(206)
    handler.send_header("Content-Length", str(end - begin + 1))
    handler.send_header("Content-Range", f"bytes {begin}-{end}/{len(CONTENT)}")
    handler.send_header("ETag", f'"{etag_of(CONTENT)}"')
    handler.end_headers()
    handler.wfile.write(CONTENT[begin : (begin + end) // 2])
    handler.hang_up()
    return True


def wrong_range(handler):
    begin = int(handler.headers["Range"].removeprefix("bytes=").split("-")[0])
    span = f"bytes {begin}-{begin + 9}/{len(CONTENT)}"
    handler.answer(206, {"Content-Range": span}, CONTENT[begin : begin + 10])
    return True


def hang(handler):
    time.sleep(0.5)
    handler.hang_up()
    return True


PASSING = {
    "500": lambda handler: handler.refuse(500),
    "429": lambda handler: handler.refuse(429),
    "truncated": cut,
    "wrong range": wrong_range,
    "hang": hang,
    "hang up": lambda handler: handler.hang_up() or True,
}


@pytest.mark.parametrize("fault", PASSING)
def test_a_fault_that_passes_is_overcome(web, path, fault):
    asked = once(web, PASSING[fault])
    assert whole(path) == CONTENT
    assert len(asked) == 3


# ---------------------------------------------------------------- faults that stay


@pytest.mark.parametrize(
    ("fault", "reason"),
    {
        "500": r"2 tries.*\(500\)",
        "hang": "2 tries.*0.3 s",
        "hang up": "2 tries",
        "truncated": "stopped",
        "wrong range": "range requested",
    }.items(),
)
def test_a_fault_that_stays_is_told(web, path, fault, reason):
    always(web, PASSING[fault])
    text = refusal(path)
    assert re.search(reason, text)
    assert "check the address and the network" in text
    assert len(text) < 250


@pytest.mark.parametrize(
    ("answer", "remedy"),
    {
        "gone": (lambda handler: handler.refuse(404), "no such file"),
        "forbidden": (
            lambda handler: handler.refuse(403, b"<Code>Denied</Code> for key topsecret"),
            r"\(403 Denied\).*address that contains its password",
        ),
        "whole": (
            lambda handler: bool(handler.answer(200, {}, CONTENT)) or True,
            "download the file",
        ),
    }.values(),
)
def test_what_is_refused_for_good_is_told(web, path, answer, remedy):
    always(web, answer)
    assert re.search(remedy, refusal(path))


def test_nobody_listens(web, path):
    assert "check the address" in refusal(to_path("http://127.0.0.1:9/w.safetensors"))


def test_without_obstore_it_says_what_to_install(web, path, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert install_command("stores") in refusal(path)


# ---------------------------------------------------------------- S3 in words


def test_a_bucket_in_another_region(web, quick, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", web.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "topsecret")
    bucket = to_path("s3://bucket/w.safetensors")
    malformed = b"<Code>AuthorizationHeaderMalformed</Code><Region>eu-west-1</Region>"
    always(web, lambda handler: handler.refuse(400, malformed))
    assert re.search("eu-west-1; set AWS_REGION", refusal(bucket))
    always(web, lambda handler: handler.refuse(301))
    assert "set AWS_REGION" in refusal(bucket)
    always(web, lambda handler: handler.refuse(403, b"<Code>SignatureDoesNotMatch</Code>"))
    assert re.search("403 SignatureDoesNotMatch.*set AWS_PROFILE", refusal(bucket))


@pytest.mark.parametrize("lack", ["keys", "boto3", "profile", "secret"])
def test_without_credentials_it_says_where_they_were_sought(web, quick, monkeypatch, lack):
    """Whoever answers, store or metadata server: the store is not blamed."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    for name in ("AWS_ENDPOINT_URL", "AWS_METADATA_ENDPOINT"):
        monkeypatch.setenv(name, web.url)
    if lack == "boto3":
        monkeypatch.setattr(reading, "find_spec", lambda _name: None)
    elif lack != "keys":
        variable = {"profile": "AWS_PROFILE", "secret": "AWS_ACCESS_KEY_ID"}[lack]
        monkeypatch.setenv(variable, "unknown")
    always(web, lambda handler: handler.refuse(412))
    found = refusal(to_path("s3://bucket/w.safetensors"))
    assert re.search("no credentials.*environment.*~/.aws.*AWS_PROFILE", found)


@pytest.mark.parametrize(
    ("endpoint", "allow", "is_allowed"),
    [
        ("http://127.0.0.1:1", "", True),
        ("http://localhost:1", "", True),
        ("http://127.0.0.1.example:1", "", False),
        ("http://192.0.2.1", "", False),
        ("http://192.0.2.1", "true", True),
        ("https://192.0.2.1", "", True),
    ],
)
def test_keys_do_not_go_over_the_net_in_the_clear(monkeypatch, endpoint, allow, is_allowed):
    reading.forget()
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", allow)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    bucket = to_path("s3://bucket/key")
    if is_allowed:
        reading.locate(bucket)
        return
    with pytest.raises(InputError, match="use https, or set AWS_ALLOW_HTTP=true"):
        reading.locate(bucket)


# ---------------------------------------------------------------- passwords, folders, the end


def test_passwords_and_signatures_are_sent(web, quick):
    web.content["w.safetensors"] = CONTENT
    web.password = "Basic bWU6cEBzcw=="
    host = web.url.removeprefix("http://")
    assert whole(to_path(f"http://me:p%40ss@{host}/w.safetensors")) == CONTENT
    web.password, web.key = "", "a=1&b=2%2F3"
    assert whole(to_path(f"{web.url}/w.safetensors?a=1&b=2%2F3")) == CONTENT


def test_names_with_spaces_and_signs(web):
    web.content["a b/ü+%.safetensors"] = CONTENT
    assert whole(to_path(f"{web.url}/a%20b/%C3%BC+%25.safetensors")) == CONTENT


def test_folders_on_the_web_are_known_by_the_usual_names(web):
    web.content |= {"d/config.json": b"{}", "d/model.safetensors": CONTENT, "d/odd": b""}
    folder = to_path(f"{web.url}/d")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (folder.is_dir(), folder.is_file(), folder.exists()) == (True, False, True)
    assert (folder / "config.json").stat().st_size == 2
    assert (folder / "odd").is_file()
    assert not (folder / "tokenizer.json").exists()
    assert not to_path(f"{web.url}/nowhere").exists()
    assert not to_path(f"{web.url}/w.safetensors").is_dir()
    with pytest.raises(FileNotFoundError):
        to_path(f"{web.url}/nowhere").stat()


def test_what_was_seen_of_a_folder_is_not_asked_for_again(web):
    web.content["d/config.json"] = b"{}"
    folder = to_path(f"{web.url}/d")
    assert folder.is_dir()
    asked = len(web.asked)
    assert (folder / "config.json").exists()
    assert not (folder / "model.safetensors").exists()
    assert len(web.asked) == asked
    web.content["d/model.safetensors"] = CONTENT
    reading.forget()
    assert (folder / "model.safetensors").exists()


def test_a_forbidden_folder_is_not_taken_for_an_empty_one(web, quick):
    web.key = "right"
    with pytest.raises(InputError, match=r"/d: .*\(403\)"):
        to_path(f"{web.url}/d?wrong").is_dir()


def test_a_process_ends_at_once_while_a_server_hangs(web):
    web.content["w.safetensors"] = CONTENT
    web.faults["w.safetensors"] = lambda handler: bool(time.sleep(20))
    program = (
        "import sys; from dare.stores import reading; from dare.stores.locations import to_path\n"
        "reading.END_SECONDS = 0.2\n"
        f"path = to_path('{web.url}/w.safetensors')\n"
        "asked = [reading.ask_range(path, 0, 10) for _ in range(100)]; sys.exit(1)"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True)
    assert (done.returncode, done.stderr) == (1, b"")
    assert time.monotonic() - started < 10
