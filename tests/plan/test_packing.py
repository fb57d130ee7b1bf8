"""Values on the wire lie as the plan says, aligned, whatever the sender's tensor looks like."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.errors import RunError
from fxpipe.plan.packing import ALIGNMENT, Layout, Pack, contiguous_stride, is_dense
from fxpipe.plan.spec import TensorSpec


def spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch."))


@given(st.lists(st.integers(0, 4), max_size=4), st.randoms())
def test_dense_is_what_torch_allocates_for_permuted_tensors(shape: list[int], random: object) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    tensor = torch.zeros(shape).permute(order)
    assert contiguous_stride(shape) == torch.zeros(shape).stride()
    if 0 not in shape:
        assert is_dense(tensor.shape, tensor.stride())
    layout = Layout(spec(tensor))
    assert layout.empty("cpu").untyped_storage().nbytes() // tensor.itemsize == tensor.numel()


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(3, 4)[:, :2], False),
        (torch.zeros(3, 1).expand(3, 4), False),
        (torch.zeros(4, 3).t(), True),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.zeros(()), True),
        (torch.zeros(3)[1:], True),
    ],
)
def test_dense(tensor: torch.Tensor, dense: bool) -> None:
    assert is_dense(tensor.shape, tensor.stride()) == dense


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_layout_copies_only_what_lies_wrong(dtype: torch.dtype) -> None:
    right = torch.ones(4, 6).to(dtype)
    layout = Layout(spec(right))
    assert layout(right) is right
    for wrong in (torch.ones(6, 4).to(dtype).t(), torch.ones(4 * 6 + 1).to(dtype)[1:].view(4, 6)):
        moved = layout(wrong)
        assert torch.equal(moved, right)
        assert moved.stride() == right.stride()
        assert moved.data_ptr() % ALIGNMENT == 0


def test_another_shape_is_named() -> None:
    with pytest.raises(RunError, match=r"h0 is torch.float32\[2\], but the plan says torch.float32\[3\]"):
        Layout(spec(torch.ones(3)), "h0")(torch.ones(2))


def test_a_pack_holds_copies_aligned_with_their_strides() -> None:
    tensors = [torch.randn(3), torch.randn(4, 5).t(), torch.tensor(True), torch.ones(0), torch.ones(7).bfloat16()]
    pack = Pack([spec(t) for t in tensors])
    block = pack.pack(tensors)
    assert block.numel() == pack.bytes
    expected = [t.clone() for t in tensors]
    tensors[0].zero_()
    for view, tensor in zip(pack.unpack(block), expected, strict=True):
        assert torch.equal(view, tensor)
        assert view.stride() == tensor.stride()
        assert not tensor.numel() or view.data_ptr() % ALIGNMENT == 0


@given(st.lists(st.integers(2, 4), min_size=2, max_size=4), st.randoms(), st.data())
def test_what_has_gaps_keeps_the_order_of_its_dimensions(shape: list[int], random: object, data: st.DataObject) -> None:
    """As in what an operator makes of it: a later view may need that order."""
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    sliced = data.draw(st.integers(0, len(shape) - 1))
    tensor = torch.rand([n * 2 if d == sliced else n for d, n in enumerate(shape)]).narrow(sliced, 0, shape[sliced])
    tensor = tensor.permute(order)
    layout = Layout(spec(tensor))
    assert layout.stride == tensor.exp().stride()
    assert is_dense(layout.shape, layout.stride)
    assert torch.equal(layout(tensor), tensor)
