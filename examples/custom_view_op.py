"""A custom view op, sliding windows over a signal, in a small convolutional language model.

`windows` is one op for autograd, for dispatch modes and for `torch.compile`, and its result is a
view as native ones are: it shares memory and version counter with the signal, and gradients stay
right when either of them is edited in place. The model does that: it takes the mean out of each
frame of its input, in place and through non-overlapping windows, and then convolves the input
through overlapping ones. `torch.library.custom_op` forbids both.

    python examples/custom_view_op.py                       # train, check, compile with aot_eager
    python examples/custom_view_op.py --backend inductor    # the same with code generation

The text is the language reference that Python itself ships for `help()`.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from viewtrack import library

FRAME, TAPS = 8, 5


@library.view_op("demo::windows(Tensor(a) x, SymInt size, SymInt step) -> Tensor(a)")
def windows(x: Tensor, size: int, step: int) -> Tensor:
    """All windows of the last dimension: ``[..., time]`` to ``[..., number, size]``."""
    number = (x.shape[-1] - size) // step + 1
    *strides, stride = x.stride()
    shape = (*x.shape[:-1], number, size)
    return x.as_strided(shape, (*strides, step * stride, stride), x.storage_offset())


class Model(nn.Module):
    """Predicts each character of a text from the `TAPS` before it."""

    def __init__(self, window=windows, channels: int = 32) -> None:
        super().__init__()
        self.window = window
        self.embed = nn.Embedding(128, channels)
        self.taps = nn.Parameter(torch.randn(channels, TAPS, 64) / (channels * TAPS) ** 0.5)
        self.head = nn.Linear(64, 128)

    def forward(self, text: Tensor) -> Tensor:
        signal = self.embed(text).transpose(1, 2) * 1.0  # [batch, channels, time]
        frames = self.window(signal, FRAME, FRAME)
        frames.sub_(frames.mean(-1, keepdim=True))  # an edit of `signal`, through a view of it
        context = self.window(signal, TAPS, 1)
        return self.head(F.relu(torch.einsum("bcnk,ckh->bnh", context, self.taps)))

    def loss(self, text: Tensor) -> Tensor:
        predicted = self(text[:, :-1])
        return F.cross_entropy(predicted.flatten(0, 1), text[:, TAPS:].flatten())


def batches(count: int, length: int = 64, size: int = 16):
    text = "".join(topics.values()).encode("ascii", "ignore")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    for _ in range(count):
        starts = torch.randint(len(data) - length - 1, (size,))
        yield torch.stack([data[start : start + length + 1] for start in starts])


def gradients(model: Model, loss, text: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss(text).backward()
    return [p.grad.clone() for p in model.parameters()]


def apart(ours: list[Tensor], others: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(ours, others, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--backend", default="aot_eager", help="of torch.compile")
    args = parser.parse_args()
    torch.manual_seed(0)

    signal = torch.arange(8.0)
    view = windows(signal, 4, 4)
    view.mul_(10)
    print(f"view of the signal: {view._base is signal}, versions {signal._version} {view._version}")

    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step, text in enumerate(batches(args.steps)):
        loss = model.loss(text)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step:3d}  loss {loss.item():.4f}")

    [text] = batches(1)
    ours = gradients(model, model.loss, text)
    native = Model(window=lambda x, size, step: x.unfold(-1, size, step))
    native.load_state_dict(model.state_dict())
    print(
        f"gradients against native unfold: {apart(ours, gradients(native, native.loss, text)):.1e}"
    )

    compiled = torch.compile(model.loss, backend=args.backend, fullgraph=True)
    print(f"gradients when compiled: {apart(ours, gradients(model, compiled, text)):.1e}")


if __name__ == "__main__":
    main()
