from __future__ import annotations

import pytest


@pytest.fixture
def one_thread():
    """Threads of torch cost more than they save on a machine that runs other tests, too."""
    import torch

    number = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(number)
