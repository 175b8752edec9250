"""The presets of linear attention: decays by the whole model's heads and layers, maps, choices."""

import math

import pytest
import torch

from megatron_longseq.errors import UserError
from megatron_longseq.lasp.presets import (
    PRESETS,
    alibi_slopes,
    apply_map,
    choose_preset,
    initial_rates,
    initial_time_steps,
    logsigmoid_decay,
    softplus_decay,
    to_unit_length,
)


def test_slopes_of_a_power_of_two_are_a_geometric_sequence():
    assert alibi_slopes(8).tolist() == [2.0**-h for h in range(1, 9)]
    assert alibi_slopes(1).tolist() == [2.0**-8]


def test_slopes_of_other_head_counts_continue_with_every_second_of_twice_as_many():
    assert alibi_slopes(6).tolist() == pytest.approx([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])
    for heads in range(1, 20):
        slopes = alibi_slopes(heads)
        assert len(set(slopes.tolist())) == heads and slopes.min() > 0 and slopes.max() < 1


def test_lightning_fades_from_the_first_layer_to_the_last():
    first, middle, last = (PRESETS["lightning"].log_decays(4, layer, 5) for layer in (0, 2, 4))
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], dtype=torch.float64)
    assert torch.allclose(first, -slopes * (1 + 1e-5), rtol=1e-14)
    assert torch.allclose(middle, -slopes * (0.5 + 1e-5), rtol=1e-14)
    assert torch.allclose(last, -slopes * 1e-5, rtol=1e-9)
    assert torch.equal(PRESETS["lightning"].log_decays(4, 0, 1), first)


def test_lightning_fla_is_another_model():
    found = PRESETS["lightning-fla"].log_decays(4, 1, 4)
    assert torch.allclose(found, -torch.arange(4).double() * 2 * 0.75, rtol=1e-14)
    assert PRESETS["lightning-fla"].scaled != PRESETS["lightning"].scaled


def test_retention_decays_stay_below_one_for_many_heads():
    found = PRESETS["retention"].log_decays(64, 3, 4)
    assert found[0].item() == pytest.approx(math.log(1 - 2**-5), rel=1e-14)
    assert found.max() < 0 and found[50].item() == pytest.approx(-(2.0**-55), rel=1e-12)


def test_decays_from_the_input_match_their_formulas():
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    a_log, bias = torch.randn(4).double(), torch.randn(4, 5).double()
    expected = -a_log.exp()[None, None, :, None] * torch.log(1 + torch.exp(x + bias))
    assert torch.allclose(softplus_decay(x, a_log, bias), expected, rtol=1e-12)
    per_head = softplus_decay(x[..., 0], a_log, bias[:, 0])
    assert torch.allclose(per_head, expected[..., 0], rtol=1e-12)
    expected = -torch.log(1 + torch.exp(-(x + bias))) / 16
    assert torch.allclose(logsigmoid_decay(x, bias), expected, rtol=1e-12)


def test_decays_of_half_precision_inputs_are_computed_in_single_precision():
    x = torch.randn(1, 2, 3).bfloat16()
    half = torch.zeros(3).bfloat16()
    assert softplus_decay(x, half, half).dtype == logsigmoid_decay(x, half).dtype == torch.float32
    assert to_unit_length(x).dtype == torch.bfloat16


def test_maps_that_a_denominator_divides_by_are_not_negative():
    x = torch.linspace(-3, 3, 7)
    assert (apply_map("elu", x) > 0).all() and (apply_map("relu", x) >= 0).all()
    assert torch.equal(apply_map("identity", x), x)


def test_first_gates_spread_over_the_published_ranges():
    rates = initial_rates(16).exp()
    steps = torch.nn.functional.softplus(initial_time_steps(16))
    assert rates.min() > 1 and rates.max() < 16
    assert steps.min() > 1e-3 and steps.max() < 1e-1
    assert (rates.diff() > 0).all() and (steps.diff() > 0).all()


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_consistent(name):
    preset = choose_preset(name)
    assert (preset.constant is not None) == (preset.decay == "constant")
    assert not (preset.beta and preset.norm == "denominator")
    assert preset.decay in ("softplus", "logsigmoid") or not preset.per_channel


def test_parts_that_are_given_take_the_place_of_the_presets_own():
    assert choose_preset("linear").norm == "denominator"
    assert choose_preset("linear", feature_map="identity").norm == "head"
    assert choose_preset("gdn", output_gate="none").gate == "none"
    assert choose_preset("gla", output_norm="hidden").norm == "hidden"


@pytest.mark.parametrize(
    ("name", "parts", "message"),
    [
        ("gdn", {"feature_map": "elu"}, "--longseq-feature-map elu: gdn has a map of its own"),
        ("gdn", {"output_norm": "denominator"}, "--longseq-output-norm denominator"),
        (
            "linear",
            {"feature_map": "silu", "output_norm": "denominator"},
            "the map of queries and keys is silu",
        ),
        ("mamba", {}, "--longseq-linear-attention mamba: unknown; there are linear"),
    ],
)
def test_parts_that_do_nothing_or_cannot_work_are_refused_by_name(name, parts, message):
    with pytest.raises(UserError, match=message):
        choose_preset(name, **parts)
