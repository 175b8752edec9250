"""The only file that knows Megatron versions.

Megatron promises a stable interface for ``megatron.core`` alone; ``megatron.training`` changed the
signature of ``pretrain()`` three times within half a year. Whatever this package uses of it goes
through here, so that supporting one more release is one more branch in this file.
"""

import functools
import traceback
from collections.abc import Callable
from typing import Any

from .errors import UserError

SUPPORTED = "0.19"
# Where Megatron-LM keeps the latest state of that release.
SUPPORTED_BRANCH = "core_r0.19.0"

# What the script of that release defines for its training loop, and what it calls before that.
SCRIPT_FUNCTIONS = ("train_valid_test_datasets_provider", "forward_step")
SCRIPT_CALLS = ("parse_and_validate_args", "gpt_config_from_args")
# Its pretrain_gpt.py as released: the same from core_v0.19.0 to the head of core_r0.19.0. Which
# releases and commits they are, and what was run on them, is in patches/tested.json.
SCRIPT_SHA256 = ("7283c4aeb5a00c694bbf2930527a184fc0d5f607f548c74707c71cc240d05fae",)


def is_supported(version: str) -> bool:
    """Says whether this package supports a Megatron version."""
    return version.startswith(SUPPORTED + ".")


def check_megatron_version() -> str:
    """Returns the installed Megatron version.

    Raises:
        UserError: it is not one that this package supports.
    """
    from megatron.core import __version__ as version

    if not is_supported(version):
        raise UserError(
            f"megatron-core {version} is installed; this release supports {SUPPORTED}.x: "
            f"pip install 'megatron-core~={SUPPORTED}.0'"
        )
    return version


def add_megatron_arguments(parser: Any) -> Any:
    """Adds all of Megatron's own flags to an argparse parser."""
    from megatron.training import arguments

    return arguments.add_megatron_arguments(parser)


def parse_and_validate(
    extra_arguments: Callable[[Any], Any], parse: Callable | None = None, **options: Any
) -> Any:
    """Parses ``sys.argv`` with Megatron's parser, checks it and sets Megatron's globals.

    Args:
        parse: the function to call instead of Megatron's of that name, and its other ``options``.

    Raises:
        UserError: this package or Megatron refuses the flags.
    """
    from megatron.training.arguments import parse_and_validate_args

    try:
        return (parse or parse_and_validate_args)(extra_args_provider=extra_arguments, **options)
    except AssertionError as error:
        # How Megatron refuses arguments. Some of these have no text: then the line says it.
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(f"Megatron refuses these flags: {str(error) or where.line}") from error


def model_config(
    args: Any,
    config_class: type,
    layer_spec: Callable,
    *,
    build: Callable | None = None,
    config: Any = None,
    model_config_class: type | None = None,
) -> Any:
    """Builds Megatron's ``GPTModelConfig`` with our transformer config class and layer spec.

    Args:
        build: the function to call instead of ``gpt_config_from_args``.
        config: the transformer config; default: made from ``args``.
        model_config_class: the subclass of ``GPTModelConfig`` that the caller asks for.

    Raises:
        UserError: the model is to be built by something that reads no layer spec of ours.
    """
    from megatron.training import argument_utils
    from megatron.training.models.gpt import GPTModelConfig

    from .config import with_options
    from .hybrid_stack import LongSeqHybridModelConfig
    from .model_builder import LongSeqGPTModelConfig

    if model_config_class not in (None, GPTModelConfig):
        raise UserError(
            f"the model is to be built by {model_config_class.builder}, which reads no layer spec, "
            "so that --longseq-.. options would have no effect; leave out the flag that chooses it "
            "(--modelopt-enabled)"
        )
    args.longseq_layer_pattern = args.hybrid_layer_pattern  # for the checks of the config
    if config is None:
        config = argument_utils.core_transformer_config_from_args(args, config_class)
        if args.multi_latent_attention and not isinstance(config, config_class):
            config = with_options(config, args)
    elif not isinstance(config, config_class):
        raise UserError(
            f"gpt_config_from_args is called with a {type(config).__name__}, which has no "
            f"--longseq-.. options; make it a {config_class.__name__}, or pass none"
        )
    if args.hybrid_layer_pattern is not None and build is None:
        model = argument_utils.hybrid_config_from_args(
            args, config=config, model_config_cls=LongSeqHybridModelConfig
        )
        _check_own_layers(args, config, model.hybrid_stack_spec is None)
        return model
    model = (build or argument_utils.gpt_config_from_args)(
        args, config=config, model_config_cls=LongSeqGPTModelConfig
    )
    if model.transformer_layer_spec is None:
        model.transformer_layer_spec = layer_spec
    _check_own_layers(args, config, model.transformer_layer_spec is layer_spec)
    return model


def _check_own_layers(args: Any, config: Any, own: bool) -> None:
    """Refuses methods of this package where a spec of the user's leaves them no layer."""
    stock = {
        "context-parallel": (config.longseq_context_parallel, "megatron"),
        "tensor-parallel": (config.longseq_tensor_parallel, "megatron"),
        "linear-attention": (config.longseq_linear_attention, "none"),
    }
    asked = [f"--longseq-{k} {value}" for k, (value, none) in stock.items() if value != none]
    if asked and not own:
        raise UserError(
            f"--spec {' '.join(args.spec)}: its layers are not this package's, so that "
            f"{' and '.join(asked)} would have no effect; leave one of the two out"
        )


def pretrain(args: Any, config: Any, datasets: Callable, forward_step: Callable) -> None:
    """Runs Megatron's training loop."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain as megatron_pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    provider = functools.partial(datasets)
    # Every rank builds its own part; Megatron asks the provider for this mark.
    provider.is_distributed = True  # type: ignore[attr-defined]
    container = pretrain_cfg_container_from_args(args, config)
    megatron_pretrain(container, provider, ModelType.encoder_or_decoder, forward_step)


def stock_layer_spec(config: Any, vp_stage: int | None) -> Any:
    """The spec that Megatron itself would use for this ``GPTModelConfig``."""
    from megatron.training.models.gpt import default_layer_spec

    return default_layer_spec(config, vp_stage)


def stock_hybrid_stack_spec() -> Any:
    """The spec of Megatron's own hybrid stack, of Transformer Engine's modules."""
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    return hybrid_stack_spec


def stock_final_norm(config: Any) -> Any:
    """The norm that Megatron puts behind the last layer for this transformer config."""
    from megatron.core.transformer import transformer_block

    return transformer_block.LayerNormImpl


def norm_of_transformer_engine() -> Any:
    """Builds Transformer Engine's norm by itself, where its own layers fuse it with what follows.

    The module has no ``_extra_state`` of its own: the fused layers save none for their norm, and a
    checkpoint of theirs could not be loaded into it.
    """
    import torch
    from megatron.core.extensions import transformer_engine

    def build(config: Any, hidden_size: int, eps: float = 1e-5) -> Any:
        norm = transformer_engine.TENorm(config=config, hidden_size=hidden_size, eps=eps)
        plain = {
            name: getattr(torch.nn.Module, name) for name in ("get_extra_state", "set_extra_state")
        }
        norm.__class__ = type(type(norm).__name__, (type(norm),), plain)
        return norm

    return build


def column_linear_of_transformer_engine() -> Any:
    """Transformer Engine's column-parallel linear layer, without a norm before it."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

    return TEColumnParallelLinear


def flops_of_sequence(args: Any) -> float:
    """Floating-point operations that Megatron counts for one sequence, forward and backward."""
    from megatron.training.training import num_floating_point_operations

    return float(num_floating_point_operations(args, 1))


def saved_common_state(folder: Any) -> Any:
    """What a distributed checkpoint holds once for all ranks: arguments, iteration, .."""
    from megatron.core.dist_checkpointing import load_common_state_dict

    return load_common_state_dict(str(folder))
