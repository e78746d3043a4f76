import numpy as np
import pytest
from combining import BACKENDS, combine, few_deltas
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_change_is_at_most_t(backend):
    stages = {"nearswap": {"t": 1.0}, "dare": {"drop_rate": 0.5}}
    given = {"backend": backend, "stages": {"nearswap": stages["nearswap"]}}
    assert combine("nearswap", [-3, -1, 0.5, 2, np.inf], **given).tolist() == [-1, -1, 0.5, 1, 1]
    assert np.isnan(combine("nearswap", [np.nan], **given)).all()
    # At p = 0.5 what is kept becomes 1.5, and 1.5 is above 1.
    found = combine("dare+nearswap+sum", [0.75] * 64, backend=backend, stages=stages)
    assert set(found.tolist()) == {0, 1}


@given(few_deltas(), st.sampled_from([0.0, 0.5, 3.0]))
def test_each_model_is_limited_by_itself(deltas, t):
    found = combine("nearswap", *deltas, stages={"nearswap": {"t": t}})
    assert (found == np.clip(deltas, -t, t).sum(axis=0)).all()
