"""Other libraries hold the state of a loader."""

from itertools import islice

import pytest

from energon.loader.savable import SavableDataLoader
from tests.loader.fake_pipeline import fake, in_order


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.slow
def test_torch_distributed_checkpoint_loads_it_on_other_ranks(tmp_path):
    torch = pytest.importorskip("torch")
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    loader = SavableDataLoader(fake(lanes=4))
    seen = list(islice(loader, 6))
    checkpoint.save({"loader": loader}, checkpoint_id=tmp_path, no_dist=True)
    for rank in range(2):
        resumed = SavableDataLoader(fake(lanes=4, rank=rank, world_size=2))
        checkpoint.load({"loader": resumed}, checkpoint_id=tmp_path, no_dist=True)
        seen += islice(resumed, 3)
    assert sorted(seen) == sorted(in_order(4, 3))
    assert torch.utils is not None


def test_torch_save_needs_no_pickled_classes(tmp_path):
    torch = pytest.importorskip("torch")
    loader = SavableDataLoader(fake())
    list(islice(loader, 3))
    torch.save({"loader": loader.state_dict()}, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed = SavableDataLoader(fake())
    resumed.load_state_dict(loaded["loader"])
    assert next(iter(resumed)) == (0, 3)
