"""A real case: BD-LoRA of peft under selective checkpointing trains on wrong gradients.

The forward of peft's BD-LoRA adds to the result of the base layer in place. With the matmuls saved
by selective checkpointing that result is what the cache keeps. Llama's projections have no bias, so
it reaches the cache through `aten._unsafe_view`, and torch's own check does not see it: no error,
and gradients are wrong as soon as LoRA's B is not zero any more. The guard names the line in peft.

Needs `transformers` and `peft` (the `compat` extra); the model is tiny and has random weights.

    python examples/compat_peft_bdlora.py
"""

import functools

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts, noop_context_fn

import viewtrack as vt

aten = torch.ops.aten
MATMULS = [aten.mm.default, aten.addmm.default, aten.bmm.default]


def make_model() -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import BdLoraConfig
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            use_cache=False,
        )
    )
    projections = ["q_proj", "k_proj", "v_proj"]
    blocks = BdLoraConfig(target_modules_bd_b=projections, nblocks=2)
    lora = LoraConfig(r=4, target_modules=projections, use_bdlora=blocks, lora_dropout=0.0)
    model = get_peft_model(llama, lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at the start, and not after a step of training
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def gradients(context_fn) -> torch.Tensor:
    """The gradients of all adapters, after one step with checkpointed layers."""
    model = make_model()
    options = {"use_reentrant": False, "context_fn": context_fn}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(options)
    else:  # transformers before 5
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    model.enable_input_require_grads()
    model.train()
    tokens = torch.arange(24).view(2, 12) % 64
    model(input_ids=tokens, labels=tokens).loss.backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(grads)


def main() -> None:
    right = gradients(noop_context_fn)
    stock = functools.partial(create_selective_checkpoint_contexts, MATMULS)
    off = (gradients(stock) - right).norm() / right.norm()
    print(f"torch's selective checkpointing: no error, gradients off by {off:.1%}")
    for name, contexts in (
        ("guarded", functools.partial(vt.checkpoint.create_selective_checkpoint_contexts, MATMULS)),
        ("torch's, watched from outside", vt.checkpoint.guard(stock)),
    ):
        try:
            gradients(contexts)
        except vt.MutatedTensorError as error:
            write = error.writes[0]
            print(f"{name}: {write.op} at {write.filename}:{write.lineno} in {write.function}")


if __name__ == "__main__":
    main()
