"""A fixture for sweeps whose values must come out the same twice."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Sums over several threads may differ in the last bit from run to run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
