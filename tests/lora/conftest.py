"""Small matrices: threads of BLAS that wait for each other take longer than the products."""

import pytest

from dare.kernels.linalg import one_blas_thread


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_blas_thread():
        yield
