"""A pipeline stage that frees the graph of its output, while the output itself is still sent on.

``Tensor.detach_`` does that for any tensor but a view. Here the output is one, as that of most
models is: the last op of the stage is a ``permute``.
"""

import torch

import viewtrack as vt


class Stage(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(x).sigmoid().permute(1, 0)


def main():
    out = Stage()(torch.randn(4, 16))
    info = vt.view_info(out)
    print(f"the output is a view: {info is not None}, of {tuple(info.base.shape)}")
    del info  # it holds the base

    try:
        out.detach_()
    except RuntimeError as error:
        print(f"stock torch: {str(error).partition('.')[0]}")

    vt.detach_(out)
    print(f"detached: requires_grad={out.requires_grad}, view={out._is_view()}")


if __name__ == "__main__":
    main()
