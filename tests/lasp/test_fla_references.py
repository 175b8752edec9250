"""Linear attention equals flash-linear-attention's references in plain PyTorch.

They were written by others from the same papers, so that a mistake in our own recurrence, which
the other tests compare with, would show. They add up in fp32. The extra ``bench`` installs them.
"""

import pytest
import torch
from torch.nn.functional import normalize

from megatron_longseq import linear_attention

pytest.importorskip("fla.ops", reason="flash-linear-attention is not installed (extra bench)")

HEADS, TOKENS, WIDTH, VALUE_WIDTH = 2, 100, 16, 12  # a chunk of 64 tokens and a part of one
SCALE = 0.3


def heads_first(*tensors):
    return [tensor.transpose(1, 2) for tensor in tensors]


def linear(q, k, v, **_):
    from fla.ops.linear_attn.naive import naive_recurrent_linear_attn

    return naive_recurrent_linear_attn(q=q, k=k, v=v, scale=SCALE, output_final_state=True)


def constant(q, k, v, log_decay, state):
    per_token = log_decay.expand(*q.shape[:2], -1)
    return scalar(q, k, v, per_token, state)


def scalar(q, k, v, log_decay, state):
    from fla.ops.simple_gla.naive import naive_recurrent_simple_gla

    return naive_recurrent_simple_gla(
        q=q, k=k, v=v, g=log_decay, scale=SCALE, initial_state=state, output_final_state=True
    )


def retention(q, k, v, **_):
    from fla.ops.retention.naive import naive_retention

    # It scales by d ** -0.5.
    out = naive_retention(*heads_first(q * SCALE * WIDTH**0.5, k, v))
    return out.transpose(1, 2), None


def channel(q, k, v, log_decay, state):
    from fla.ops.gla.naive import naive_recurrent_gla

    return naive_recurrent_gla(
        q=q * SCALE * WIDTH**0.5,
        k=k,
        v=v,
        gk=log_decay,
        initial_state=state,
        output_final_state=True,
    )


def delta(q, k, v, beta, state):
    from fla.ops.delta_rule.naive import delta_rule_recurrence

    out, final = delta_rule_recurrence(
        *heads_first(q * SCALE * WIDTH**0.5, k, v, beta), initial_state=state
    )
    return out.transpose(1, 2), final


def gated_delta(q, k, v, log_decay, beta, state):
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    return naive_recurrent_gated_delta_rule(
        q=q,
        k=k,
        v=v,
        g=log_decay,
        beta=beta,
        scale=SCALE,
        initial_state=state,
        output_final_state=True,
    )


def kda(q, k, v, log_decay, beta, state):
    from fla.ops.kda.naive import naive_recurrent_kda

    return naive_recurrent_kda(
        q=q,
        k=k,
        v=v,
        g=log_decay,
        beta=beta,
        scale=SCALE,
        initial_state=state,
        output_final_state=True,
    )


def inputs(reference):
    """fp32 leaves by name."""
    torch.manual_seed(7)
    leaves = {
        "q": torch.randn(2, TOKENS, HEADS, WIDTH),
        "k": normalize(torch.randn(2, TOKENS, HEADS, WIDTH), dim=-1),
        "v": torch.randn(2, TOKENS, HEADS, VALUE_WIDTH),
    }
    if reference is retention:
        leaves["log_decay"] = torch.log1p(-(2.0 ** (-5.0 - torch.arange(HEADS))))
        return leaves
    shapes = {constant: (), scalar: (2, TOKENS), gated_delta: (2, TOKENS)}
    if reference in shapes:
        leaves["log_decay"] = -torch.rand(*shapes[reference], HEADS)
    if reference in (channel, kda):
        leaves["log_decay"] = -torch.rand(2, TOKENS, HEADS, WIDTH)
    if reference in (delta, gated_delta, kda):
        leaves["beta"] = torch.rand(2, TOKENS, HEADS)
    if reference is not linear:
        leaves["state"] = torch.randn(2, HEADS, WIDTH, VALUE_WIDTH)
    return leaves


def gradients(leaves, out, final):
    """Of a loss on the output and the final state, by the names of the leaves that have one."""
    torch.manual_seed(8)
    loss = (out * torch.randn(out.shape)).sum()
    if final is not None:
        loss = loss + (final * torch.randn(final.shape)).sum()
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {f"d {name}": one for name, one in zip(leaves, found, strict=True) if one is not None}


@pytest.mark.parametrize(
    "reference", [linear, constant, scalar, retention, channel, delta, gated_delta, kda]
)
def test_outputs_states_and_gradients_equal_those_of_flash_linear_attention(reference):
    leaves = {name: tensor.requires_grad_() for name, tensor in inputs(reference).items()}
    out, final = reference(**leaves)
    expected = {"out": out} | ({} if final is None else {"final": final})
    expected |= gradients(leaves, out, final)
    arguments = {"initial_state" if n == "state" else n: t for n, t in leaves.items()}
    out, state = linear_attention(**arguments, scale=SCALE, output_final_state=final is not None)
    found = {"out": out, "final": state} | gradients(leaves, out, state)
    for name, value in expected.items():
        error = (found[name] - value).abs().max() / value.abs().max()
        assert error < 1e-5, f"{name}: {error:.1e}"
