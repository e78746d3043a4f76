from __future__ import annotations

import pytest

from conftest import CLUSTER
from helpers import sha256

METHODS = {
    "dare+linear": ["--method", "dare+linear"],
    "trim+ties by model": ["--method", "trim+ties", "--scope", "model"],
    "slerp": ["--method", "slerp"],
    "tsv": ["--method", "tsv"],
}


@pytest.mark.parametrize("method", METHODS)
def test_three_nodes_give_the_bytes_of_one_thread(cluster, merge, tmp_path, method):
    status, said = cluster.dare(*merge, *METHODS[method], "--threads", "1")
    assert status == 0, said
    expected = sha256(tmp_path / "out.safetensors")
    (tmp_path / "out.safetensors").unlink()
    status, said = cluster.dare(*merge, *METHODS[method], "--cluster", CLUSTER, "--overwrite")
    assert status == 0, said
    assert sha256(tmp_path / "out.safetensors") == expected
    print(said)
