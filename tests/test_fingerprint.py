"""Fingerprints: equal for equal bytes, and unlike for everything that a write may do."""

import pytest
import torch

from viewtrack.fingerprint import fingerprint, same_bytes

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.complex64,
]
SHAPES = [(), (1,), (3,), (256,), (257, 3), (128, 1024)]


def random(shape, dtype):
    torch.manual_seed(0)
    return (torch.rand(shape) * 100 - 50).to(dtype)


def raw(t):
    return t.view(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_any_changed_byte_shows(shape, dtype):
    t = random(shape, dtype)
    before = fingerprint(t)
    assert same_bytes(before, fingerprint(t.clone()))
    size = raw(t).numel()
    for place in {0, size // 3, size - 1}:
        changed = t.clone()
        raw(changed)[place] ^= 1
        assert not same_bytes(before, fingerprint(changed)), place


CHANGES = {
    "neg": lambda t: t.neg_(),
    "flip": lambda t: t.copy_(t.flip(0)),
    "roll": lambda t: t.copy_(t.roll(1, 0)),
    "sort": lambda t: t.copy_(t.sort(-1, descending=True)[0]),
    "double": lambda t: t.mul_(2),
    "zero": lambda t: t.zero_(),
    "transpose": lambda t: t.copy_(t.t().contiguous().view(t.shape)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(
    "t",
    [
        torch.tensor([[1.0, -1.0], [-1.0, 1.0]]) + 0.0,
        torch.arange(64.0).view(8, 8) - 31.5,
        torch.arange(1.0, 1 + 64 * 512).view(64, 512),
    ],
    ids=["signs", "small", "large"],
)
def test_what_cheap_hashes_miss_shows(t, change, dtype):
    t = t.to(dtype)
    before, was = fingerprint(t), t.clone()
    change(t)
    assert same_bytes(before, fingerprint(t)) is torch.equal(t, was)


def test_a_constant_of_even_size_is_not_any_constant():
    # Here an XOR of all words, as torch.hash_tensor has it, is 0 for both.
    assert not same_bytes(fingerprint(torch.ones(4096)), fingerprint(torch.full((4096,), 2.0)))


def test_views_and_strides_have_the_bytes_that_they_show():
    t = random((16, 16), torch.float32)
    assert same_bytes(fingerprint(t[:, ::2]), fingerprint(t[:, ::2].clone()))
    before = fingerprint(t[:, ::2])
    t[:, 1::2] = 0
    assert same_bytes(before, fingerprint(t[:, ::2]))
    t[3, 4] += 1
    assert not same_bytes(before, fingerprint(t[:, ::2]))


def test_the_number_of_threads_does_not_matter():
    t = random((512, 512), torch.float32)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        before = fingerprint(t)
        torch.set_num_threads(4)
        assert same_bytes(before, fingerprint(t))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "t", [torch.empty(3, device="meta"), torch.eye(3).to_sparse()], ids=["meta", "sparse"]
)
def test_what_has_no_bytes_is_like_everything(t):
    assert fingerprint(t) is None
    assert same_bytes(fingerprint(t), fingerprint(torch.ones(3)))


def test_no_mode_sees_it():
    seen = []

    class Log(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class LogFunctions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    t = torch.ones(300, requires_grad=True)
    with LogFunctions(), Log(), torch.autocast("cpu"):
        assert same_bytes(fingerprint(t), fingerprint(t))
    assert seen == []


def nested_of(shapes):
    return torch.nested.nested_tensor([random(shape, torch.float32) for shape in shapes])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_strided_nested_tensor_shows_its_bytes():
    nested = nested_of([(2, 3), (4, 3)])
    before = fingerprint(nested)
    assert same_bytes(before, fingerprint(nested.clone()))
    nested[1][3, 2] += 1
    assert not same_bytes(before, fingerprint(nested))
    assert same_bytes(fingerprint(nested_of([])), fingerprint(nested_of([])))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="torch 2.6 makes none of a part of a buffer"
)
def test_and_no_others():
    nested = nested_of([(2, 3), (4, 3)])
    sizes, strides = nested._nested_tensor_size(), nested._nested_tensor_strides()
    offsets = nested._nested_tensor_storage_offsets() + 1
    buffer = torch.zeros(20)
    part = torch._nested_view_from_buffer(buffer[1:-1], sizes, strides, offsets)
    before = fingerprint(part)
    buffer[0] = buffer[-1] = 1
    assert same_bytes(before, fingerprint(part))
    buffer[1] = 1
    assert not same_bytes(before, fingerprint(part))
