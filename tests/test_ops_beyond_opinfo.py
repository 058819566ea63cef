"""Ops that torch's OpInfo database lacks: fused and out= ops, running statistics, odd layouts.

Each is called with four floats that it may write, or view, or both.
"""

from __future__ import annotations

import pytest
import torch

from viewtrack.testing import compare, compare_below

aten = torch.ops.aten


def ones():
    return torch.ones(4)


def zeros():
    return torch.zeros(4)


def coo(x):
    return torch.sparse_coo_tensor(torch.tensor([[0, 1, 1, 0], [0, 0, 1, 0]]), x, (2, 2))


def observed(scale, zero_point):
    on, low, high = torch.tensor([1]), torch.zeros(1), torch.ones(1)
    torch.fused_moving_avg_obs_fake_quant(
        torch.rand(4), on, on, low, high, scale.detach(), zero_point, 0.1, 0, 255, 0
    )
    return low, high, scale, zero_point


CALLS = {
    "split_copy_out": lambda x: aten.split_copy.Tensor_out(torch.ones(8), 4, out=[x, zeros()]),
    "unbind_copy_out": lambda x: aten.unbind_copy.int_out(torch.ones(2, 4), 0, out=[x, zeros()]),
    "split_with_sizes_copy": lambda x: aten.split_with_sizes_copy.out(
        torch.ones(8), [4, 4], 0, out=[x, zeros()]
    ),
    "foreach_out": lambda x: aten._foreach_add.Scalar_out([ones()], 1, out=[x]),
    "foreach_zero": lambda x: torch._foreach_zero_([x]),
    "foreach_copy": lambda x: torch._foreach_copy_([x], [ones()]),
    "foreach_lerp": lambda x: torch._foreach_lerp_([x], [ones()], 0.5),
    "foreach_addcmul": lambda x: torch._foreach_addcmul_([x], [ones()], [ones()], 0.5),
    "fused_adam": lambda x: torch._fused_adam_(
        [x],
        [ones()],
        [zeros()],
        [zeros()],
        [],
        [torch.tensor(1.0)],
        lr=0.1,
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.0,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    ),
    "fused_sgd": lambda x: torch._fused_sgd_(
        [x],
        [ones()],
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=0.1,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
    ),
    "fused_adagrad": lambda x: torch._fused_adagrad_(
        [x],
        [ones()],
        [zeros()],
        [torch.tensor(1.0)],
        lr=0.1,
        lr_decay=0.0,
        weight_decay=0.0,
        eps=1e-8,
        maximize=False,
    ),
    "amp": lambda x: torch._amp_foreach_non_finite_check_and_unscale_(
        [x], torch.zeros(1), torch.ones(1)
    ),
    "amp_update": lambda x: torch._amp_update_scale_(
        x[:1], torch.zeros(1, dtype=torch.int32), torch.zeros(1), 2.0, 0.5, 100
    ),
    "bn_legit": lambda x: torch._native_batch_norm_legit(
        torch.ones(2, 4), None, None, x, ones(), True, 0.1, 1e-5
    ),
    "bn_out": lambda x: aten.native_batch_norm.out(
        torch.rand(2, 4),
        None,
        None,
        None,
        None,
        True,
        0.1,
        1e-5,
        out=torch.zeros(2, 4),
        save_mean=x,
        save_invstd=zeros(),
    ),
    "bn_update": lambda x: torch.batch_norm_update_stats(torch.rand(2, 4), x, ones(), 0.1),
    "detach_": lambda x: x.detach_(),
    "rrelu": lambda x: aten.rrelu_with_noise_(x, zeros(), 0.1, 0.3, True),
    "rrelu_eval": lambda x: aten.rrelu_with_noise(x, zeros(), 0.1, 0.3, False),
    "rrelu_noise": lambda x: aten.rrelu_with_noise(torch.rand(4), x, 0.1, 0.3, True),
    "inst_norm": lambda x: torch.instance_norm(
        torch.rand(2, 4, 3), None, None, x, ones(), True, 0.1, 1e-5, False
    ),
    "embedding_renorm": lambda x: torch.embedding_renorm_(
        x.view(2, 2), torch.tensor([0]), 0.1, 2.0
    ),
    "stack_out": lambda x: torch.stack([torch.ones(2), torch.ones(2)], out=x.view(2, 2)),
    "cat_out": lambda x: torch.cat([torch.ones(2), torch.ones(2)], out=x),
    "max_out": lambda x: torch.max(torch.rand(4, 3), 1, out=(x, torch.zeros(4, dtype=torch.long))),
    "lu_out": lambda x: torch.linalg.lu_factor(
        torch.rand(2, 2), out=(x.view(2, 2), torch.zeros(2, dtype=torch.int32))
    ),
    "svd_out": lambda x: torch.linalg.svdvals(torch.rand(4, 4), out=x),
    "resize": lambda x: torch.zeros(0).set_(x).resize_(2),
    "swapaxes_": lambda x: x.view(2, 2).swapaxes_(0, 1),
    "unsq_": lambda x: x.unsqueeze_(0),
    "t_": lambda x: x.view(2, 2).t_(),
    "as_strided_": lambda x: x.as_strided_((2,), (1,)),
    "normal_": lambda x: x.normal_(),
    "copy_": lambda x: x.copy_(ones()),
    "masked_scatter": lambda x: x.masked_scatter_(x > 0, ones()),
    "index": lambda x: x.index_put_((torch.tensor([0]),), torch.ones(1), True),
    "floor_divide_": lambda x: x.floor_divide_(2),
    "ctor": lambda x: torch.sparse_coo_tensor(torch.tensor([[0, 1]]), x[:2], (4,)),
    "sparse_values": lambda x: (
        torch.sparse_coo_tensor(torch.tensor([[0, 1]]), x[:2], (4,)).coalesce().values().add_(1)
    ),
    "sparse__values": lambda x: (
        torch.sparse_coo_tensor(torch.tensor([[0, 1]]), x[:2], (4,))._values().add_(1)
    ),
    "csr": lambda x: (
        torch.sparse_csr_tensor(torch.tensor([0, 1, 2]), torch.tensor([0, 1]), x[:2], (2, 2))
        .values()
        .mul_(2)
    ),
    "sparse_softmax": lambda x: torch.sparse.softmax(coo(x), 0).to_dense(),
    "sparse_log_softmax": lambda x: torch.sparse.log_softmax(coo(x), 1).to_dense(),
    "sparse_sparse_mm": lambda x: torch.sparse.mm(coo(x), coo(x)).to_dense(),
    "sparse_pow": lambda x: (coo(x).coalesce().pow(2) / 2).to_dense(),
    "csr_to_dense": lambda x: x.view(2, 2).to_sparse_csr().to_dense(),
    "csr_to_csc": lambda x: x.view(2, 2).to_sparse_csr().to_sparse_csc().values(),
    "csc_mm": lambda x: x.view(2, 2).to_sparse_csc() @ torch.ones(2, 2),
    "observer": lambda x: observed(x[:1], torch.zeros(1, dtype=torch.int32)),
    "data_set": lambda x: setattr(x, "data", ones()),
    "complex": lambda x: torch.view_as_complex(x.view(2, 2)).conj().mul_(2),
    "imag": lambda x: torch.view_as_complex(x.view(2, 2)).conj().imag.add_(1),
    "neg": lambda x: torch._neg_view(x).add_(1),
    "quant": lambda x: torch.quantize_per_tensor(x, 1.0, 0, torch.quint8).dequantize(),
    "nested": lambda x: torch.nested.nested_tensor([x[:2], x[2:]]).mul_(2) and None,
    "jag": lambda x: (
        torch.nested.nested_tensor_from_jagged(x.view(4, 1), torch.tensor([0, 2, 4])).mul_(2)
        and None
    ),
    "to": lambda x: x.to(torch.float32).add_(1),
    "pad": lambda x: torch.nn.functional.pad(x, (0, 0)),
    "drop_eval": lambda x: torch.nn.functional.dropout(x, 0.5, False).add_(1),
    "cow": lambda x: torch._lazy_clone(x).add_(1),
}


@pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "requires grad"])
@pytest.mark.parametrize("variant", ["in-place", "in-place on a view"])
@pytest.mark.parametrize("fn", CALLS.values(), ids=CALLS.keys())
def test_as_on_stock_torch(fn, variant, requires_grad):
    x = torch.rand(4, requires_grad=requires_grad)
    assert compare(fn, (x,), variant=variant) == []
    assert compare_below(fn, (x,), variant=variant) == []
