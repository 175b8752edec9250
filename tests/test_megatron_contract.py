"""Every place where this package leans on Megatron, one claim each.

When a new release moves one, that claim fails by its name; ``docs/megatron-hooks.md`` lists the
same names with the code that uses them. Claims that begin with ``defect`` fail when Megatron has
repaired what this package mends: then the mend can go.
"""

import inspect
from pathlib import Path

import pytest


def parameters(function):
    return list(inspect.signature(function).parameters)


def parser_takes_an_extra_arguments_provider():
    from megatron.training.arguments import parse_and_validate_args

    return "extra_args_provider" in parameters(parse_and_validate_args)


def the_provider_gets_the_whole_parser_before_it_parses():
    from megatron.training.arguments import parse_args

    source = inspect.getsource(parse_args)
    provider, parse = source.index("extra_args_provider(parser)"), source.index("parse_args()")
    return source.index("add_megatron_arguments(parser)") < provider < parse


def a_config_class_of_ours_is_filled_from_the_arguments():
    from megatron.training.argument_utils import core_transformer_config_from_args

    source = inspect.getsource(core_transformer_config_from_args)
    return "config_class" in parameters(core_transformer_config_from_args) and (
        "dataclasses.fields(config_class)" in source
    )


def the_model_config_takes_a_spec_and_hooks():
    import dataclasses

    from megatron.training.models.gpt import GPTModelConfig

    names = {field.name for field in dataclasses.fields(GPTModelConfig)}
    return {
        "transformer",
        "transformer_layer_spec",
        "pre_wrap_hooks",
        "post_wrap_hooks",
        "vocab_size",
    } <= names


def the_spec_callable_is_given_the_virtual_stage():
    from megatron.training.models.gpt import GPTModelBuilder

    return 'vp_stage" in inspect.signature(transformer_layer_spec)' in inspect.getsource(
        GPTModelBuilder.build_model
    )


def the_stock_spec_comes_from_default_layer_spec():
    from megatron.training.models.gpt import default_layer_spec

    return parameters(default_layer_spec) == ["config", "vp_stage"]


def a_block_spec_holds_layers_and_the_final_norm():
    import dataclasses

    from megatron.core.transformer import transformer_block

    fields = {f.name for f in dataclasses.fields(transformer_block.TransformerBlockSubmodules)}
    return {"layer_specs", "layer_norm"} <= fields and hasattr(transformer_block, "LayerNormImpl")


def torchs_norm_refuses_sequence_parallelism():
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    return "sequence parallel not supported" in inspect.getsource(WrappedTorchNorm)


def gradients_of_marked_weights_are_summed_over_the_tensor_group():
    from megatron.core.distributed import finalize_model_grads

    return "sequence_parallel" in inspect.getsource(inspect.getmodule(finalize_model_grads))


def pretrain_takes_the_container_data_and_forward_step():
    from megatron.training import pretrain

    return parameters(pretrain)[:4] == [
        "cfg_container",
        "train_valid_test_dataset_provider",
        "model_type",
        "forward_step_func",
    ]


def the_data_provider_is_asked_whether_it_is_distributed():
    from megatron.training import training

    return '"is_distributed"' in inspect.getsource(training.build_train_valid_test_data_loaders)


def the_training_loop_tells_the_iteration():
    from megatron.training import training

    return "args.curr_iteration = iteration" in inspect.getsource(training.train)


def batches_are_broadcast_and_cut_by_megatron():
    from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank

    return {"is_hybrid_cp", "cp_group"} <= set(parameters(get_batch_on_this_cp_rank)) and {
        "has_cu_seqlens",
        "broadcast_src_rank",
        "mtp_on_this_rank",
        "is_pipeline_last_stage",
    } <= set(parameters(get_batch_on_this_tp_rank))


def a_context_parallel_rank_holds_a_zigzag_of_the_sequence():
    import torch
    from megatron.core.utils import get_batch_on_this_cp_rank

    from megatron_longseq.token_layout import zigzag_tokens

    world, length = torch.distributed.group.WORLD, 48
    batch = {"tokens": torch.arange(length)[None]}
    part = get_batch_on_this_cp_rank(batch, False, cp_group=world)["tokens"][0]
    return torch.equal(part, zigzag_tokens(world.rank(), world.size(), length))


def the_local_attention_cannot_split_a_sequence():
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    return "context_parallel_size == 1" in inspect.getsource(DotProductAttention.__init__)


def weights_describe_their_place_in_the_whole():
    import dataclasses

    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    names = {field.name for field in dataclasses.fields(ShardedTensor)}
    return {
        "key",
        "local_shape",
        "global_shape",
        "global_offset",
        "prepend_axis_num",
    } <= names and "build_fn" in {f.name for f in dataclasses.fields(ShardedTensorFactory)}


def gradient_buffers_know_their_parameters_and_buckets():
    from megatron.core.distributed.param_and_grad_buffer import (
        _ParamAndGradBucket,
        _ParamAndGradBuffer,
    )

    buffer, bucket = inspect.getsource(_ParamAndGradBuffer), inspect.getsource(_ParamAndGradBucket)
    return all(f"self.{n}" in buffer for n in ("param_index_map", "buckets", "grad_data")) and all(
        f"self.{name}" in bucket for name in ("grad_data", "offset")
    )


def checkpoints_tell_the_arguments_of_their_run():
    from megatron.core.dist_checkpointing import load_common_state_dict

    return parameters(load_common_state_dict) == ["checkpoint_dir"]


def the_null_tokenizer_ends_documents_with_its_last_id():
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    return NullTokenizer(257).eod == 256


def defect_pretrain_cannot_be_told_that_there_is_no_gpu():
    from megatron.training import initialize, training

    return (
        "allow_no_cuda" in parameters(initialize.initialize_megatron)
        and "initialize_megatron(" in inspect.getsource(training.pretrain)
        and "allow_no_cuda" not in inspect.getsource(training.pretrain)
    )


def defect_warming_up_kernels_draws_random_numbers():
    from megatron.training import initialize, training

    return "torch.rand(" in inspect.getsource(
        initialize._warmup_jit_function
    ) and "set_jit_fusion_options(" in inspect.getsource(training.pretrain)


def defect_the_wheel_cannot_compile_the_helpers_it_ships():
    from megatron.core import datasets
    from megatron.core.datasets import helpers_cpp

    folder = Path(datasets.__file__).parent
    return helpers_cpp is not None and not (folder / "Makefile").exists()


def defect_token_counts_of_experts_stay_tensors_off_a_gpu():
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    uses = Path(token_dispatcher.__file__).read_text().count("= maybe_move_tensor_to_cpu(")
    return uses > 3 and "tensor.is_cuda" in inspect.getsource(moe_utils.maybe_move_tensor_to_cpu)


def the_builder_of_a_model_is_named_by_its_config():
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelConfig

    return isinstance(GPTModelConfig.builder, str) and (
        "model_config_cls" in parameters(gpt_config_from_args)
    )


def hierarchical_groups_are_heads_then_ring():
    from megatron.core import parallel_state

    source = inspect.getsource(parallel_state.create_hierarchical_groups)
    return "hierarchical_group_sizes" in source and callable(
        parallel_state.get_hierarchical_context_parallel_groups
    )


def distributed_optimizer_source(name):
    import ast

    from megatron.core.optimizer import distrib_optimizer

    # From the file: the functions themselves have been replaced in this process.
    tree = ast.parse(Path(distrib_optimizer.__file__).read_text())
    cls = next(
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "DistributedOptimizer"
    )
    return next(ast.unparse(f) for f in cls.body if getattr(f, "name", "") == name)


def defect_a_new_optimizer_has_no_steps_to_agree_on():
    source = distributed_optimizer_source("state_dict")
    return "assert len(steps) == 1" in source and "['step'].item()" in source


def defect_optimizer_state_is_copied_with_gradients_on_and_needs_a_step():
    source = distributed_optimizer_source("_set_main_param_and_optimizer_states")
    return "no_grad" not in source and "tensors[key]" in source


def defect_all_parameters_share_one_step():
    return "s['step'] = step" in distributed_optimizer_source("load_state_dict")


def embedding_and_output_layer_are_of_the_classes_that_metp_replaces():
    from megatron.core.models.common.embeddings.language_model_embedding import (
        LanguageModelEmbedding,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel

    embedding = inspect.getsource(LanguageModelEmbedding.__init__)
    model = inspect.getsource(GPTModel.__init__)
    return (
        "self.word_embeddings = tensor_parallel.VocabParallelEmbedding(" in embedding
        and "self.embedding = LanguageModelEmbedding(" in model
        and "tensor_parallel.ColumnParallelLinear" in model
    )


def the_model_takes_its_inputs_in_this_order():
    from megatron.core.models.gpt.gpt_model import GPTModel

    names = parameters(GPTModel.forward)
    return names[1:8] == [
        "input_ids",
        "position_ids",
        "attention_mask",
        "decoder_input",
        "labels",
        "inference_context",
        "packed_seq_params",
    ] and {"inference_params", "padding_mask", "output_processor"} <= set(names)


def an_output_processor_gets_hidden_states_before_there_are_logits():
    from megatron.core.models.gpt.gpt_model import GPTModel

    source = inspect.getsource(GPTModel._postprocess)
    asked = source.index("if output_processor is not None:")
    call = source[asked : source.index("config=self.config,", asked)]
    names = ("hidden_states", "output_layer", "output_weight", "labels")
    return asked < source.index("logits, _ = self.output_layer(") and all(
        f"{name}=" in call for name in names
    )


def hooks_before_wrapping_get_the_list_of_chunks():
    from megatron.training.models import dist_utils

    source = inspect.getsource(dist_utils)
    return "_model = pre_wrap_hook(model_list)" in source


def the_mlp_of_a_layer_comes_from_a_builder():
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.transformer_layer import TransformerLayer

    source = inspect.getsource(TransformerLayer.__init__)
    call = source[source.index("self.mlp = submodules.mlp(") :].split(")\n", 1)[0]
    return all(f"{n}=" in call for n in ("config", "pg_collection", "is_mtp_layer", "name")) and {
        "submodules",
        "ffn_hidden_size",
        "tp_group",
        "name",
    } <= set(parameters(MLP.__init__))


def linear_layers_and_core_attention_are_built_by_plain_calls():
    from megatron.core.transformer.attention import Attention, SelfAttention

    return (
        "self.linear_qkv = submodules.linear_qkv(" in inspect.getsource(SelfAttention.__init__)
        and "self.linear_proj = submodules.linear_proj(" in inspect.getsource(Attention.__init__)
        and "self.core_attention = submodules.core_attention("
        in inspect.getsource(Attention.__init__)
        and "self.get_query_key_value_tensors(" in inspect.getsource(Attention.forward)
    )


def rows_of_query_key_and_value_lie_by_key_value_head():
    from megatron.core.transformer.attention import SelfAttention

    source = inspect.getsource(SelfAttention.get_query_key_value_tensors)
    return "num_qkv_heads_per_group = num_query_heads_per_group + 2" in source and (
        "(query, key, value) = torch.split(mixed_qkv, split_arg_list, dim=3)" in source
    )


def rotary_embeddings_cover_the_tokens_of_all_tensor_parallel_ranks():
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    return "*= transformer_config.tensor_model_parallel_size" in inspect.getsource(
        RotaryEmbedding.get_rotary_seq_len
    )


def layers_under_sequence_parallelism_draw_from_the_ranks_own_generator():
    from megatron.core.transformer.transformer_block import TransformerBlock

    source = inspect.getsource(TransformerBlock.forward)
    return "if self.config.sequence_parallel:" in source and (
        "rng_context = tensor_parallel.get_cuda_rng_tracker().fork()" in source
    )


def tensor_and_context_parallel_ranks_are_ordered_tensor_first():
    from megatron.core.parallel_state import RankGenerator

    ranks = RankGenerator(tp=2, ep=1, dp=1, pp=1, cp=2, order="tp-cp-ep-dp-pp")
    return ranks.get_ranks("tp-cp") == [[0, 1, 2, 3]] and ranks.get_ranks("tp") == [[0, 1], [2, 3]]


def gathered_parameters_are_waited_for_by_the_module_that_owns_them():
    from megatron.core.distributed import DistributedDataParallel

    source = inspect.getsource(DistributedDataParallel._make_forward_pre_hook)
    return "module.parameters(recurse=False)" in source and "finish_param_sync(" in source


def a_gradient_in_main_grad_is_not_added_again():
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.tensor_parallel import layers

    hook = inspect.getsource(DistributedDataParallel._make_backward_post_hook)
    stock = inspect.getsource(layers.LinearWithGradAccumulationAndAsyncCommunication.backward)
    return all("grad_added_to_main_grad" in s and "zero_out_wgrad" in s for s in (hook, stock))


def gradients_of_query_and_key_norms_are_summed_by_name():
    from megatron.core.distributed import finalize_model_grads

    source = inspect.getsource(inspect.getmodule(finalize_model_grads))
    return '"q_layernorm" in name or "k_layernorm" in name' in source


def checkpoint_keys_of_local_layers_are_those_of_transformer_engine():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec().submodules.sharded_state_dict_keys_map == {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }


def a_layer_builds_and_calls_its_self_attention_with_these_arguments():
    from megatron.core.transformer.transformer_layer import TransformerLayer

    built = inspect.getsource(TransformerLayer.__init__)
    called = inspect.getsource(TransformerLayer)
    given = ("pg_collection", "cp_comm_type", "pp_layer_offset")
    return all(f'attention_optional_kwargs["{name}"]' in built for name in given) and (
        "rotary_pos_emb=rotary_pos_emb,\n" in called
        and "packed_seq_params=packed_seq_params,\n" in called
    )


def a_pattern_of_linear_layers_gives_every_layer_its_own_checkpoint_keys():
    from megatron.core.transformer.transformer_block import TransformerBlock

    source = inspect.getsource(TransformerBlock.sharded_state_dict)
    return "isinstance(self.config.linear_attention_freq, list)" in source


def a_matrix_of_several_sections_is_described_section_by_section():
    from megatron.core.ssm.utils import _split_tensor_factory

    expected = ["orig_sh_ten", "split_sections", "split_names", "split_dim"]
    return parameters(_split_tensor_factory) == expected


def the_gated_delta_net_has_these_sections():
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    sections = '["query", "key", "value", "z", "beta", "alpha"]'
    return sections in inspect.getsource(GatedDeltaNet)


def defect_recomputing_norms_compiles_an_extension():
    from megatron.core.tensor_parallel import random

    source = inspect.getsource(random._get_share_storage)
    return "load_inline(" in source and "if _share_storage_ext is None:" in source


def defect_no_fp8_is_taken_for_a_wish_for_fp8():
    from megatron.core.tensor_parallel import random

    # From the file: the function itself has been replaced in this process.
    return "self.fp8 = fp8 is not None" in Path(random.__file__).read_text() and (
        "def __init__(self, fp8=False):" in Path(random.__file__).read_text()
    )


CLAIMS = [
    parser_takes_an_extra_arguments_provider,
    the_provider_gets_the_whole_parser_before_it_parses,
    a_config_class_of_ours_is_filled_from_the_arguments,
    the_model_config_takes_a_spec_and_hooks,
    the_spec_callable_is_given_the_virtual_stage,
    the_stock_spec_comes_from_default_layer_spec,
    a_block_spec_holds_layers_and_the_final_norm,
    torchs_norm_refuses_sequence_parallelism,
    gradients_of_marked_weights_are_summed_over_the_tensor_group,
    pretrain_takes_the_container_data_and_forward_step,
    the_data_provider_is_asked_whether_it_is_distributed,
    the_training_loop_tells_the_iteration,
    batches_are_broadcast_and_cut_by_megatron,
    a_context_parallel_rank_holds_a_zigzag_of_the_sequence,
    the_local_attention_cannot_split_a_sequence,
    the_builder_of_a_model_is_named_by_its_config,
    hierarchical_groups_are_heads_then_ring,
    weights_describe_their_place_in_the_whole,
    gradient_buffers_know_their_parameters_and_buckets,
    checkpoints_tell_the_arguments_of_their_run,
    the_null_tokenizer_ends_documents_with_its_last_id,
    embedding_and_output_layer_are_of_the_classes_that_metp_replaces,
    the_model_takes_its_inputs_in_this_order,
    an_output_processor_gets_hidden_states_before_there_are_logits,
    hooks_before_wrapping_get_the_list_of_chunks,
    the_mlp_of_a_layer_comes_from_a_builder,
    linear_layers_and_core_attention_are_built_by_plain_calls,
    rows_of_query_key_and_value_lie_by_key_value_head,
    rotary_embeddings_cover_the_tokens_of_all_tensor_parallel_ranks,
    layers_under_sequence_parallelism_draw_from_the_ranks_own_generator,
    tensor_and_context_parallel_ranks_are_ordered_tensor_first,
    gathered_parameters_are_waited_for_by_the_module_that_owns_them,
    a_gradient_in_main_grad_is_not_added_again,
    gradients_of_query_and_key_norms_are_summed_by_name,
    checkpoint_keys_of_local_layers_are_those_of_transformer_engine,
    defect_pretrain_cannot_be_told_that_there_is_no_gpu,
    defect_warming_up_kernels_draws_random_numbers,
    defect_the_wheel_cannot_compile_the_helpers_it_ships,
    defect_token_counts_of_experts_stay_tensors_off_a_gpu,
    defect_a_new_optimizer_has_no_steps_to_agree_on,
    defect_optimizer_state_is_copied_with_gradients_on_and_needs_a_step,
    defect_all_parameters_share_one_step,
    a_layer_builds_and_calls_its_self_attention_with_these_arguments,
    a_pattern_of_linear_layers_gives_every_layer_its_own_checkpoint_keys,
    a_matrix_of_several_sections_is_described_section_by_section,
    the_gated_delta_net_has_these_sections,
    defect_recomputing_norms_compiles_an_extension,
    defect_no_fp8_is_taken_for_a_wish_for_fp8,
]


def all_claims():
    import traceback

    found = {}
    for claim in CLAIMS:
        try:
            found[claim.__name__] = claim()
        except Exception:
            found[claim.__name__] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def found(megatron_ranks):
    """What each claim answers, if all ranks agree on it."""
    answers = megatron_ranks.run(all_claims, world_size=3, backend="gloo")
    return {
        name: next((rank[name] for rank in answers if rank[name] is not True), True)
        for name in answers[0]
    }


@pytest.mark.parametrize("claim", [claim.__name__ for claim in CLAIMS])
def test_megatron_still_does_what_we_lean_on(claim, found):
    assert found[claim] is True, found[claim]


def test_the_documentation_lists_the_same_claims():
    page = Path("docs/megatron-hooks.md").read_text()
    missing = [claim.__name__ for claim in CLAIMS if f"`{claim.__name__}`" not in page]
    assert not missing
