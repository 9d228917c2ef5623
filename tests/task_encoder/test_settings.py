from __future__ import annotations

import numpy as np
import pytest

from energon.errors import ConfigError
from energon.task_encoder.train_plan import TrainSettings, ValidationSettings


@pytest.mark.parametrize("kind", [TrainSettings, ValidationSettings])
@pytest.mark.parametrize("name", ["batch_size", "packing_buffer_size"])
def test_what_is_no_whole_number_is_refused_by_name(kind, name):
    with pytest.raises(ConfigError, match=f"{name} must be a whole number or None, got '8'"):
        kind(**{"batch_size": 8, name: "8"})


def test_any_whole_number_will_do():
    assert TrainSettings(batch_size=np.int64(8), shuffle_buffer_size=np.int32(4)).batch_size == 8
