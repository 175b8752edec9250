"""Builds the GPT model where a layer spec does not reach: multi-token prediction.

Megatron's builder makes the specs of the prediction layers itself, from its own layers, whatever
spec the decoder has. This one gives them the same edits as the decoder's layers.
"""

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig, mtp_block_spec
from megatron.training.vocab_utils import calculate_padded_vocab_size

from .layer_specs import edit_layer_spec

# Fields of Megatron's model config that its GPT model takes under the same name.
_SAME_NAME = (
    "fp16_lm_cross_entropy",
    "parallel_output",
    "share_embeddings_and_output_weights",
    "position_embedding_type",
    "rotary_percent",
    "rotary_base",
    "rope_scaling",
    "rope_scaling_factor",
    "seq_len_interpolation_factor",
    "scatter_embedding_sequence_parallel",
)


@dataclass(kw_only=True)
class LongSeqGPTModelConfig(GPTModelConfig):
    """Megatron's GPT model config, built by :class:`LongSeqGPTModelBuilder`."""

    builder: ClassVar[str] = f"{__name__}.LongSeqGPTModelBuilder"


class LongSeqGPTModelBuilder(GPTModelBuilder):
    """Megatron's builder, with our layers in multi-token prediction too."""

    def build_model(
        self,
        pg_collection: Any,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> GPTModel:
        """Builds one chunk of the model; see Megatron's builder for the arguments."""
        config = self._model_config
        transformer = config.transformer
        if transformer.mtp_num_layers is None or isinstance(
            config.transformer_layer_spec, ModuleSpec
        ):
            return super().build_model(pg_collection, pre_process, post_process, vp_stage)
        layers = config.transformer_layer_spec(config, vp_stage=vp_stage)
        prediction = mtp_block_spec(config, layers, vp_stage=vp_stage)
        if prediction is not None:
            prediction = edit_layer_spec(copy.deepcopy(prediction), config)
        first, last = self._stage_ends(pg_collection, vp_stage)
        vocabulary = config.vocab_size
        if config.should_pad_vocab:
            vocabulary = calculate_padded_vocab_size(
                vocabulary,
                config.make_vocab_size_divisible_by,
                transformer.tensor_model_parallel_size,
            )
        return GPTModel(
            config=transformer,
            transformer_layer_spec=layers,
            mtp_block_spec=prediction,
            vocab_size=vocabulary,
            max_sequence_length=config.seq_length,
            pre_process=first if pre_process is None else pre_process,
            post_process=last if post_process is None else post_process,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
            **{name: getattr(config, name) for name in _SAME_NAME},
        )

    def _stage_ends(self, pg_collection: Any, vp_stage: int | None) -> tuple[bool, bool]:
        """Whether this chunk is the first and whether it is the last of the pipeline."""
        chunks = self._model_config.transformer.virtual_pipeline_model_parallel_size or 1
        chunk = vp_stage or 0
        rank, size = pg_collection.pp.rank(), pg_collection.pp.size()
        return rank == 0 and chunk == 0, rank == size - 1 and chunk == chunks - 1
