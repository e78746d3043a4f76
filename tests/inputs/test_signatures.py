"""Signatures: made here and verified by `model_signing`, the other way round, and refused."""

from __future__ import annotations

import base64
import datetime
import json
import os
import re
import shutil
import sys
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from writers import write_gguf

import dare
from dare.cli import main
from dare.errors import InputError, OutputError, RecipeError
from dare.inputs import signatures
from dare.output.targets import MANIFEST_NAME, MARK, MARK_NAME
from dare.run.cluster import task_request
from helpers import flip_bit, save

BASE = {"w": np.arange(6, dtype=np.float32), "v": np.ones(4, np.float32)}
MATH = {"w": np.arange(6, dtype=np.float32) * 2, "v": np.ones(4, np.float32)}
CODE = {"w": np.arange(6, dtype=np.float32) * 3, "v": np.zeros(4, np.float32)}
NO_ENCRYPTION = serialization.NoEncryption()


def spoil_end(path):
    """Change the last byte, which is of weights."""
    flip_bit(path, 8 * path.stat().st_size - 1)


def model_signing(*arguments):
    """Call the other program as its users do; return whether it was content."""
    (program,) = entry_points(group="console_scripts", name="model_signing")
    return CliRunner().invoke(program.load(), [str(a) for a in arguments]).exit_code == 0


def write_private(path, key, encryption=NO_ENCRYPTION):
    form = serialization.PrivateFormat.PKCS8
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, encryption))
    return path


def write_key(folder, name, curve=ec.SECP256R1):
    key = ec.generate_private_key(curve())
    write_private(folder / f"{name}-key.pem", key)
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    public = key.public_key().public_bytes(serialization.Encoding.PEM, form)
    (folder / f"{name}.pem").write_bytes(public)
    return key


def write_certificate(folder, name, key, issuer, issuer_key, *, is_authority):
    """Write a certificate of a key, as an authority or for signing."""
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    began = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    usage = dict.fromkeys(
        (
            *("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
            *("crl_sign", "encipher_only", "decipher_only"),
        ),
        False,
    )
    usage |= {"digital_signature": not is_authority, "key_cert_sign": is_authority}
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(began)
        .not_valid_after(began + datetime.timedelta(days=9))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
        .sign(issuer_key, hashes.SHA256())
    )
    (folder / f"{name}.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    return subject


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Keys `mine` and `other`, and `leaf` with a certificate of `authority`."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("mine", "other"):
        write_key(folder, name)
    authority, leaf = (write_key(folder, name, ec.SECP384R1) for name in ("authority", "leaf"))
    issuer = write_certificate(folder, "authority", authority, None, authority, is_authority=True)
    write_certificate(folder, "leaf", leaf, issuer, authority, is_authority=False)
    return folder


@pytest.fixture
def models(tmp_path, monkeypatch):
    """The folders base, math and code in the working folder."""
    monkeypatch.chdir(tmp_path)
    for name, arrays in (("base", BASE), ("math", MATH), ("code", CODE)):
        save(tmp_path / name / "model.safetensors", arrays)
        (tmp_path / name / "config.json").write_text("{}")
    return tmp_path


def merge(output, **settings):
    given = {"base": "base", "models": ["math", "code"], "method": "sum", "verbose": False}
    dare.merge(**given | settings, output=output)
    return Path(output)


def plan(signers, **settings):
    given = {"base": "base", "models": ["math", "code"], "verbose": False}
    return dare.plan(**given | settings, require_signed=signers)


def said(path, *signers):
    """The code and the subject of each problem."""
    found = dare.verify(path, sha256=False, signer=signers)
    assert found.ok == (found.problems == ())
    return [(problem.code, *problem.subjects) for problem in found.problems]


@pytest.fixture
def signed(models, keys):
    """An output in shards that is signed with the key `mine`."""
    output = merge("merged", shard_size=24)
    dare.sign(output, keys / "mine-key.pem")
    return output


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize("name", ["merged", "merged.safetensors"])
def test_the_other_program_verifies_what_is_signed_here(models, keys, name):
    output = merge(name)
    made = dare.sign(output, keys / "mine-key.pem")
    files = sum(path.is_file() for path in output.rglob("*")) - 1 if output.is_dir() else 1
    assert made.files == files
    assert json.loads(made.to_json())["signature"] == str(made.signature)
    found = dare.verify(output, signer=keys / "mine.pem")
    assert (found.ok, found.signed_by) == (True, str(keys / "mine.pem"))
    unasked = dare.verify(output)
    assert (unasked.signed_by, unasked.unchecked_signature) == (None, str(made.signature))
    assert f"dare verify {name} --signer" in dict(unasked.document().facts)["signature"]
    assert (found.unchecked_signature, "signature" in dict(found.document().facts)) == (None, False)
    check = ("verify", "key", output, "--signature", made.signature, "--public_key")
    assert model_signing(*check, keys / "mine.pem")
    assert not model_signing(*check, keys / "other.pem")
    spoil_end(next(iter(output.glob("*.safetensors")), output))
    assert not model_signing(*check, keys / "mine.pem")


@pytest.mark.parametrize("git", [[], ["--no-ignore-git-paths"]])
@pytest.mark.parametrize("name", ["merged", "merged.safetensors"])
def test_what_the_other_program_signs_is_verified_here(models, keys, name, git):
    output = merge(name)
    if output.is_dir():
        (output / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    made = signatures.signature_path(output)
    key = ("--private_key", keys / "mine-key.pem", "--signature", made)
    assert model_signing("sign", "key", output, *key, *git)
    assert said(output, keys / "mine.pem") == []
    assert said(output, keys / "other.pem") == [("bad_signature", made.name)]


def test_certificates_work_both_ways(models, keys, tmp_path):
    chain = [keys / "leaf.pem", keys / "authority.pem"]
    made = dare.sign("base", keys / "leaf-key.pem", certificate=chain).signature
    flags = ("--signature", made, "--certificate_chain", keys / "authority.pem")
    assert model_signing("verify", "certificate", "base", *flags)
    assert said("base", keys / "authority.pem") == []
    both = tmp_path / "both.pem"
    both.write_bytes(b"".join(path.read_bytes() for path in chain))
    dare.sign("base", keys / "leaf-key.pem", certificate=[both], overwrite=True)
    assert said("base", keys / "authority.pem") == []
    assert said("base", keys / "mine.pem") == [("bad_signature", "model.sig")]
    own = ("--private_key", keys / "leaf-key.pem", "--signing_certificate", keys / "leaf.pem")
    assert model_signing("sign", "certificate", "math", *own, *flags[2:], "--signature", "s.sig")
    shutil.move("s.sig", "math/model.sig")
    assert said("math", keys / "authority.pem") == []


def test_what_the_hubs_client_leaves_is_neither_signed_nor_missed(signed, keys):
    left = signed / ".cache" / "huggingface"
    left.mkdir(parents=True)
    (left / "x.metadata").write_text("")
    assert said(signed, keys / "mine.pem") == []
    save(left / "x.safetensors", BASE)
    assert said(signed, keys / "mine.pem") == [("not_covered", ".cache/huggingface/x.safetensors")]


def test_links_to_files_are_followed(models, keys):
    shutil.move("base", "blobs")
    Path("base").mkdir()
    for path in Path("blobs").iterdir():
        (Path("base") / path.name).symlink_to(path.absolute())
    dare.sign("base", keys / "mine-key.pem")
    assert said("base", keys / "mine.pem") == []
    spoil_end(Path("blobs/model.safetensors"))
    assert said("base", keys / "mine.pem") == [("signed_changed", "model.safetensors")]


# ---------------------------------------------------------------- refusals


def change(folder):
    spoil_end(folder / "model-00002-of-00002.safetensors")


def add(folder):
    (folder / "modeling.py").write_text("")


def add_hidden(folder):
    (folder / "deeper").mkdir()
    (folder / "deeper" / ".hidden").write_text("")


def link_a_folder(folder):
    (folder / "more").symlink_to(folder.parent / "math")


CHANGES = {
    "a bit": (change, ("signed_changed", "model-00002-of-00002.safetensors")),
    "a file less": (
        lambda folder: (folder / MANIFEST_NAME).unlink(),
        ("signed_missing", MANIFEST_NAME),
    ),
    "a file more": (add, ("not_covered", "modeling.py")),
    "a hidden file more": (add_hidden, ("not_covered", "deeper/.hidden")),
    "a link to a folder": (link_a_folder, ("not_covered", "more")),
    "no signature": (lambda folder: (folder / "model.sig").unlink(), ("not_signed", "model.sig")),
}


@pytest.mark.parametrize(("spoil", "problem"), CHANGES.values(), ids=CHANGES)
def test_what_differs_from_what_was_signed_is_named(signed, keys, spoil, problem):
    assert said(signed, keys / "mine.pem") == []
    spoil(signed)
    assert said(signed, keys / "other.pem", keys / "mine.pem")[0] == problem
    with pytest.raises(InputError, match=f"merged: {re.escape(problem[1])}: "):
        plan(keys / "mine.pem", models=[signed])


def test_anothers_key_is_refused(signed, keys):
    found = dare.verify(signed, signer=[keys / "other.pem"])
    assert [problem.code for problem in found.problems] == ["bad_signature"]
    assert found.signed_by is None
    assert str(keys / "other.pem") in found.problems[0].text
    assert said(signed, keys / "other.pem", keys / "mine.pem") == []


def test_a_model_that_dare_did_not_write_needs_only_the_signature(models, keys):
    assert said("base", keys / "mine.pem") == [("not_signed", "model.sig")]
    dare.sign("base", keys / "mine-key.pem")
    assert said("base", keys / "mine.pem") == []


def test_an_old_signature_does_not_outlive_its_output(signed, models, keys, capsys):
    with pytest.raises(OutputError, match=r"contains model\.sig"):
        merge("merged", shard_size=24, scale=0.5, overwrite=True)
    single = merge("one.safetensors")
    dare.sign(single, keys / "mine-key.pem")
    merge("one.safetensors", scale=0.5, overwrite=True)
    assert said(single, keys / "mine.pem") == [("signed_changed", "one.safetensors")]
    with pytest.raises(OutputError, match="--overwrite"):
        dare.sign(single, keys / "mine-key.pem")
    dare.sign(single, keys / "mine-key.pem", overwrite=True)
    assert said(single, keys / "mine.pem") == []


# ---------------------------------------------------------------- what may be merged


@pytest.fixture
def all_signed(models, keys):
    for name in ("base", "math", "code"):
        dare.sign(name, keys / "mine-key.pem")
    return models


def test_a_merge_of_signed_inputs_has_the_same_bytes(all_signed, keys):
    plain, asked = merge("plain"), merge("asked", require_signed=[keys / "mine.pem"])
    names = sorted(path.name for path in plain.iterdir())
    assert names == sorted(path.name for path in asked.iterdir())
    weights, again = (folder / "model.safetensors" for folder in (plain, asked))
    assert weights.read_bytes() == again.read_bytes()
    assert "require_signed" not in (asked / MANIFEST_NAME).read_text()


def test_every_input_must_be_signed(all_signed, keys):
    assert plan([keys / "other.pem", keys / "mine.pem"])
    Path("code/model.sig").unlink()
    spoil_end(Path("base/model.safetensors"))
    with pytest.raises(InputError) as caught:
        merge("out", require_signed=keys / "mine.pem")
    assert "base: model.safetensors: " in str(caught.value)
    assert "code: model.sig: " in str(caught.value)
    assert "math: " not in str(caught.value)
    assert not Path("out").exists()


def test_a_recipe_and_a_flag_ask_for_it(all_signed, keys, capsys):
    shutil.copy(keys / "other.pem", "signer.pem")
    recipe = Path("recipe.toml")
    text = 'base = "base"\nmodels = ["math"]\noutput = "out"\nrequire_signed = "signer.pem"\n'
    recipe.write_text(text)
    assert main(["plan", str(recipe)]) == main([str(recipe)]) == 1
    assert capsys.readouterr().err.count("signer.pem: ") == 4
    assert main(["plan", str(recipe), "--require-signed", str(keys / "mine.pem")]) == 0


def test_merges_inside_and_layers_are_asked_too_and_read_once(all_signed, keys, monkeypatch):
    checked = []

    def check(path, signers):
        checked.append(path.name)
        return whole(path, signers)

    whole = signatures.check_signature
    monkeypatch.setattr(signatures, "check_signature", check)
    inner = {"inner": {"base": "base", "models": ["math"], "method": "sum"}}
    assert plan(keys / "mine.pem", models=["inner", "code"], merges=inner)
    assert sorted(checked) == ["base", "code", "math"]
    Path("math/model.sig").unlink()
    with pytest.raises(InputError, match=r"math: model\.sig"):
        plan(keys / "mine.pem", models=["inner", "code"], merges=inner)


@pytest.mark.parametrize("lossless", [False, True])
def test_a_delta_file_and_its_base_must_be_signed(all_signed, keys, lossless):
    delta = all_signed / "math.delta.safetensors"
    dare.compress("base", "math", delta, lossless=lossless, verbose=False)
    how = {"require_signed": keys / "mine.pem", "verbose": False}
    with pytest.raises(InputError, match=r"math\.delta\.safetensors\.sig: There is no signature"):
        dare.apply_delta("base", delta, "restored", **how)
    dare.sign(delta, keys / "mine-key.pem")
    dare.apply_delta("base", delta, "restored", **how)
    assert Path("restored").is_dir()


def test_what_is_read_beside_a_file_must_be_signed(all_signed, keys):
    for name in ("base", "math"):
        dare.sign(f"{name}/model.safetensors", keys / "mine-key.pem")
    files = {"base": "base/model.safetensors", "models": ["math/model.safetensors"]}
    with pytest.raises(InputError, match=r"base/config\.json: is not signed"):
        plan(keys / "mine.pem", **files)
    for name in ("base", "math"):
        Path(f"{name}/config.json").unlink()
    assert plan(keys / "mine.pem", **files)
    write_gguf(Path("m.gguf"), CODE, split_max_tensors=1)
    first, second = "m-00001-of-00002.gguf", "m-00002-of-00002.gguf"
    dare.sign(first, keys / "mine-key.pem")
    with pytest.raises(InputError, match=rf"{second}: is not signed"):
        plan(keys / "mine.pem", **files | {"models": [first]})


@pytest.mark.parametrize("address", ["s3://bucket/math", "hf://org/name@main", "org/name"])
def test_a_model_elsewhere_is_refused_before_anything_is_fetched(address, all_signed, keys):
    elsewhere = pytest.raises(RecipeError, match=f"{address}: .*on this machine; download")
    with elsewhere:
        dare.sign(address, keys / "mine-key.pem")
    with elsewhere:
        plan(keys / "mine.pem", models=["math", address])
    with elsewhere:
        merge("out", models=["math", address], require_signed=keys / "mine.pem")


def test_a_cluster_is_not_asked_for_what_was_checked_here(all_signed, keys):
    planned = plan(keys / "mine.pem")
    assert planned.options.require_signed == (keys / "mine.pem",)
    assert task_request(planned.recipe, planned.options, 1 << 20).options.require_signed == ()


def test_arrays_have_no_signature(keys):
    with pytest.raises(RecipeError, match="require_signed: arrays"):
        dare.merge_arrays(BASE, [MATH], require_signed=keys / "mine.pem")


# ---------------------------------------------------------------- hostile bundles


def bundle(keys, statement, **envelope):
    """A bundle with a statement that is really signed with `mine`; fields may be others."""
    key = serialization.load_pem_private_key((keys / "mine-key.pem").read_bytes(), None)
    payload = json.dumps(statement).encode()
    kind = b"application/vnd.in-toto+json"
    text = b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)
    signature = base64.b64encode(key.sign(text, ec.ECDSA(hashes.SHA256()))).decode()
    parts = {"payload": base64.b64encode(payload).decode(), "payloadType": kind.decode()}
    parts |= {"signatures": [{"sig": signature, "keyid": ""}]}
    return {
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": {"publicKey": {}},  # without a hint, as older ones are
        "dsseEnvelope": parts | envelope,
    }


def statement(resources, ignored=(), **fields):
    digests = b"".join(bytes.fromhex(each["digest"]) for each in resources)
    serialization = {"method": "files", "hash_type": "sha256", "allow_symlinks": False}
    whole = hashes.Hash(hashes.SHA256())
    whole.update(digests)
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "m", "digest": {"sha256": whole.finalize().hex()}}],
        "predicateType": "https://model_signing/signature/v1.0",
        "predicate": {
            "serialization": {**serialization, "ignore_paths": list(ignored)},
            "resources": resources,
        },
        **fields,
    }


def resource(name, content=b"{}"):
    digest = hashes.Hash(hashes.SHA256())
    digest.update(content)
    return {"name": name, "algorithm": "sha256", "digest": digest.finalize().hex()}


def test_a_signature_covers_what_it_lists_and_nothing_else(models, keys, capsys):
    """Each of these verifies with the other program, if it is told to ignore the rest."""
    weights = resource("model.safetensors", Path("base/model.safetensors").read_bytes())
    config = resource("config.json")
    cases = {
        (): [],
        (".",): ["config.json", "model.safetensors"],
        ("model.safetensors",): ["model.safetensors"],
        ("config.json", "../base", "/"): ["config.json"],
    }
    for ignored, left in cases.items():
        listed = [each for each in (config, weights) if each["name"] not in left]
        text = json.dumps(bundle(keys, statement(listed, ignored)))
        Path("base/model.sig").write_text(text)
        assert said("base", keys / "mine.pem") == [("not_covered", name) for name in left]
    assert capsys.readouterr().out == ""  # although the package prints that they are old


@pytest.mark.parametrize("name", ["../math/config.json", "/etc/hostname", "sub/../../x", "\0", ""])
def test_names_that_lead_elsewhere_do_no_harm(models, keys, name):
    listed = [resource("config.json"), resource(name)]
    Path("base/model.sig").write_text(json.dumps(bundle(keys, statement(listed))))
    assert said("base", keys / "mine.pem")


def hostile():
    good = [resource("config.json")]
    yield "nothing", b""
    yield "not JSON", b"\x89PNG"
    yield "a list", b"[]"
    yield "a number", b"1"
    yield "no parts", b"{}"
    yield "deep", b"[" * 100_000
    yield "not text", b"\xff\xfe"
    yield "long numbers", b'{"mediaType": ' + b"9" * 100_000 + b"}"
    yield "huge", b" " * (signatures.MAX_SIGNATURE_BYTES + 1)
    yield "another payload type", {"payloadType": "text/plain"}
    yield "no payload", {"payload": ""}
    yield "no signature", {"signatures": []}
    yield "another payload", {"payload": base64.b64encode(b"{}").decode()}
    yield "another statement", statement(good, _type="x")
    yield "another predicate", statement(good, predicateType="x")
    yield "no subject", statement(good, subject=[])
    yield "another digest", statement(good, subject=[{"name": "m", "digest": {"sha256": "00"}}])
    yield "no predicate", statement(good, predicate={})


@pytest.mark.parametrize("content", [c for _, c in hostile()], ids=[n for n, _ in hostile()])
def test_hostile_bundles_are_refused_by_name(models, keys, content):
    if isinstance(content, dict):
        is_envelope = "predicate" not in content
        listed = statement([resource("config.json")]) if is_envelope else content
        content = json.dumps(bundle(keys, listed, **content if is_envelope else {})).encode()
    Path("base/model.sig").write_bytes(content)
    assert said("base", keys / "mine.pem") == [("bad_signature", "model.sig")]


def test_a_signature_is_a_file(models, keys):
    Path("base/model.sig").mkdir()
    assert said("base", keys / "mine.pem")[0] == ("not_signed", "model.sig")
    Path("base/model.sig").rmdir()
    os.mkfifo("base/model.sig")
    assert said("base", keys / "mine.pem")[0] == ("not_signed", "model.sig")


# ---------------------------------------------------------------- keys and places


def test_a_key_that_cannot_be_used_is_refused(models, keys, tmp_path):
    key = ec.generate_private_key(ec.SECP256R1())
    secret = serialization.BestAvailableEncryption(b"x")
    bad = [
        write_private(tmp_path / "locked.pem", key, secret),
        write_private(tmp_path / "bitcoin.pem", ec.generate_private_key(ec.SECP256K1())),
        keys / "mine.pem",
        keys / "none.pem",
    ]
    for path in bad:
        with pytest.raises(RecipeError, match=rf"{path.name}: cannot sign: .*P-256.*in PEM"):
            dare.sign("base", path)
    with pytest.raises(RecipeError, match=r"mine-key\.pem: cannot sign: .*does not match"):
        dare.sign("base", keys / "mine-key.pem", certificate=[keys / "leaf.pem"])
    assert not Path("base/model.sig").exists()
    dare.sign("base", keys / "mine-key.pem")
    for path in (keys / "mine-key.pem", keys / "none.pem", Path("base/config.json")):
        with pytest.raises(RecipeError, match=rf"{path.name}: .*public elliptic key"):
            dare.verify("base", signer=path)


def test_only_finished_models_are_signed_and_only_signatures_replaced(models, keys):
    with pytest.raises(InputError, match="no such file"):
        dare.sign("bse", keys / "mine-key.pem")
    Path("code/more").symlink_to("../math")
    with pytest.raises(InputError, match=r"code/more: .*a link to a folder"):
        dare.sign("code", keys / "mine-key.pem")
    (Path("base") / MARK_NAME).write_bytes(MARK)
    with pytest.raises(OutputError, match="not finished"):
        dare.sign("base", keys / "mine-key.pem")
    Path("math/model.sig").write_text("a letter")
    with pytest.raises(OutputError, match="not made by dare"):
        dare.sign("math", keys / "mine-key.pem", overwrite=True)


def test_without_the_package_its_extra_is_named(models, keys, monkeypatch):
    monkeypatch.setitem(sys.modules, "model_signing", None)
    for call in (
        lambda: dare.sign("base", keys / "mine-key.pem"),
        lambda: dare.verify("base", signer=keys / "mine.pem"),
        lambda: plan(keys / "mine.pem"),
    ):
        with pytest.raises(RecipeError, match=r"model-signing: pip install '\.\[sign\]'"):
            call()


def test_the_commands(models, keys, capsys):
    merge("merged.safetensors")
    key = str(keys / "mine-key.pem")
    assert main(["sign", "merged.safetensors", "--key", key, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["signature"], shown["files"]) == ("merged.safetensors.sig", 1)
    assert main(["sign", "merged.safetensors", "--key", key]) == 1
    assert "--overwrite" in capsys.readouterr().err
    verify = ["verify", "merged.safetensors", "--json", "--signer"]
    assert main([*verify, str(keys / "other.pem"), "--signer", str(keys / "mine.pem")]) == 0
    assert json.loads(capsys.readouterr().out)[0]["signed_by"] == str(keys / "mine.pem")
    assert main([*verify, str(keys / "other.pem")]) == 1
    assert json.loads(capsys.readouterr().out)[0]["problems"][0]["code"] == "bad_signature"
    assert main([*verify, str(keys / "none.pem")]) == 1
    assert main(["verify", "base", "--signer", str(keys / "mine.pem")]) == 1
    assert "Not signed as asked" in capsys.readouterr().out
