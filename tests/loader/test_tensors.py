import io
import pickle

import numpy as np
import pytest

from energon.loader.transport.pickling import BatchPickler

torch = pytest.importorskip("torch")

DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64,
    torch.int64, torch.uint8, torch.bool,
]  # fmt: skip


def crossed(value):
    """`value` after the way to the parent, and how many buffers went out of band."""
    file = io.BytesIO()
    pickler = BatchPickler(file)
    pickler.dump(value)
    buffers = [bytearray(buffer.raw()) for buffer in pickler.buffers]
    return pickle.loads(memoryview(file.getvalue()), buffers=buffers), len(buffers)


def same(first, second):
    assert first.dtype == second.dtype
    assert first.shape == second.shape
    assert first.requires_grad == second.requires_grad
    return torch.equal(
        first.detach().contiguous().view(-1).view(torch.uint8),
        second.detach().contiguous().view(-1).view(torch.uint8),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (7,), (50, 60)])
def test_every_type_and_shape_crosses(dtype, shape):
    tensor = (torch.rand(shape) * 9).to(dtype)
    assert same(crossed(tensor)[0], tensor)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.T,
        lambda t: t[::2],
        lambda t: t[3:5, 2:],
        lambda t: t[0, :1].expand(100),
        lambda t: t[0, :1].clone()[::2],
        lambda t: t.reshape(5, 4, 1, 5).contiguous(memory_format=torch.channels_last),
    ],
)
def test_views_keep_their_elements(view):
    tensor = view(torch.arange(100.0).reshape(20, 5))
    again, _ = crossed(tensor)
    assert torch.equal(again, tensor)


def test_views_of_one_storage_still_share_it():
    whole = torch.zeros(10_000)
    inputs, targets, again = whole[:-1], whole[1:], whole
    (inputs, targets, again), buffers = crossed([inputs, targets, again])
    again += 1
    assert inputs.sum() == 9_999
    assert targets.sum() == 9_999
    assert buffers == 1


def test_a_small_view_does_not_take_its_storage_along():
    again, buffers = crossed(torch.zeros(1_000_000)[10:20])
    assert again.untyped_storage().nbytes() == 40
    assert buffers == 0


def test_the_same_tensor_twice_is_one_tensor():
    tensor = torch.zeros(5)
    first, second = crossed([tensor, tensor])[0]
    assert first is second


def test_gradients_parameters_and_graphs():
    leaf = torch.ones(3, requires_grad=True)
    assert crossed(leaf)[0].requires_grad
    assert crossed(leaf * 2)[0].is_leaf
    parameter = crossed(torch.nn.Parameter(torch.ones(3), requires_grad=False))[0]
    assert type(parameter) is torch.nn.Parameter
    assert not parameter.requires_grad


def test_lazy_conjugates_are_resolved():
    tensor = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert torch.equal(crossed(tensor)[0], tensor.resolve_conj())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_torch_alone_knows_is_left_to_torch():
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(crossed(sparse)[0].to_dense(), torch.eye(3))
    assert crossed(torch.empty(3, device="meta"))[0].device.type == "meta"
    with_attribute = torch.ones(3)
    with_attribute.note = "x"
    assert crossed(with_attribute)[0].note == "x"


def test_a_received_tensor_can_be_written():
    tensor, _ = crossed(torch.from_numpy(np.arange(5000)))
    tensor += 1
    assert tensor[-1] == 5000
