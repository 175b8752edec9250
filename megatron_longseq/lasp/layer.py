"""Linear attention as a layer of Megatron's: stands where ``SelfAttention`` stands in a layer spec.

    in_proj     rows of query, key, value, and what the preset has of gate z, beta, alpha
    conv1d      a short causal convolution of queries, keys and values
    operator    linear attention over the context-parallel ranks
    out_norm    and the output gate
    out_proj

Tensor parallelism splits heads; decays, states and first values go by the heads of the whole model.
Where Megatron's ``GatedDeltaNet`` has a parameter of a purpose, it has the same name, rows and
checkpoint key here; with the preset ``gdn`` these are all.

Legend: n tokens on this rank, b micro-batch, h hidden, p tensor-parallel size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..communication.collectives import Collectives
from ..communication.groups import GroupPlace
from ..errors import UserError
from ..packed_rows import PackedRows
from ..split_parameters import per_head
from .output_norms import HeadNorm, hidden_norm
from .parameters import LowRank, ShortConvolution
from .presets import (
    apply_map,
    initial_rates,
    initial_time_steps,
    logsigmoid_decay,
    softplus_decay,
    to_unit_length,
    wide,
)
from .requirements import heads_of
from .runtime import LinearRuntime, LinearState


@dataclass
class LinearAttentionSubmodules:
    """The linear layers of Megatron's that the layer is made of.

    Attributes:
        in_proj: column-parallel; for the second matrix of a product of two as well.
        out_proj: row-parallel.
    """

    in_proj: Any
    out_proj: Any


class LinearAttention(MegatronModule):
    """Linear attention of this rank's tokens to all earlier ones of the sequence.

    Args:
        config: Megatron's transformer config with this package's options.
        submodules: see :class:`LinearAttentionSubmodules`.
        layer_number: from 1, in the whole model.
        pg_collection: Megatron's process groups; ``tp`` and ``cp`` are read.
        attn_mask_type: causal, or none for both directions.
        runtime: shared by the model's layers.

    The other arguments are what Megatron's blocks give to any layer.

    Raises:
        UserError: the runtime was made for another group.
    """

    def __init__(
        self,
        config: Any,
        submodules: LinearAttentionSubmodules,
        layer_number: int,
        pg_collection: Any = None,
        *,
        runtime: LinearRuntime,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        name: str | None = None,
        cp_comm_type: str | None = None,
        pp_layer_offset: int | None = None,
    ) -> None:
        super().__init__(config=config)
        del cp_comm_type, pp_layer_offset  # of attention that exchanges keys; of inference
        # Not a submodule: it is shared by all layers, and holds groups and buffers, no state.
        self.runtime = runtime
        self.preset = runtime.preset
        self.layer_number = layer_number
        self.causal = attn_mask_type is AttnMaskType.causal
        self.tp_group = pg_collection.tp
        self.heads = heads_of(config)
        ranks = runtime.operator.place.size
        if pg_collection.cp.size() != ranks:
            raise UserError(
                f"linear attention was made for {ranks} context-parallel ranks, and this layer's "
                f"group has {pg_collection.cp.size()}; build both from the same process groups"
            )
        self._measure()
        self._build(config, submodules, name)
        recompute = config.recompute_granularity == "selective" and config.recompute_modules
        self._recomputes = "core_attn" in (recompute or ())
        self._decays: Tensor | None = None

    def _measure(self) -> None:
        """Sizes of the whole and of this rank's part."""
        heads, preset, tensor = self.heads, self.preset, self.tp_group.size()
        keys, values = heads.key * heads.key_width, heads.value * heads.value_width
        self.sections = {"query": keys, "key": keys, "value": values}
        if preset.gate != "none" and not preset.low_rank_gate:
            self.sections["z"] = values
        if preset.beta:
            self.sections["beta"] = heads.value
        if preset.decay in ("softplus", "logsigmoid") and not preset.per_channel:
            self.sections["alpha"] = heads.value
        self.local = {name: size // tensor for name, size in self.sections.items()}
        self.local_key_heads = heads.key // tensor
        self.local_value_heads = heads.value // tensor

    def _build(self, config: Any, submodules: LinearAttentionSubmodules, name: str | None) -> None:
        heads, preset = self.heads, self.preset
        values = self.sections["value"]

        def part_name(part: str) -> str | None:
            return None if name is None else f"{name}.{part}"

        def projection(source: int, target: int, part: str) -> torch.nn.Module:
            return build_module(
                submodules.in_proj,
                source,
                target,
                config=config,
                init_method=config.init_method,
                gather_output=False,
                bias=False,
                skip_bias_add=False,
                is_expert=False,
                tp_comm_buffer_name="fc1",
                tp_group=self.tp_group,
                name=part_name(part),
            )

        self.in_proj = projection(config.hidden_size, sum(self.sections.values()), "in_proj")
        qkv = [self.sections[part] for part in ("query", "key", "value")]
        self.conv1d: ShortConvolution | None = None
        if preset.convolution:
            self.conv1d = ShortConvolution(
                config, qkv, self.runtime.convolution, tp_group=self.tp_group
            )
        self._build_decay(config, projection)
        self.gate: LowRank | None = None
        if preset.gate != "none" and preset.low_rank_gate:
            self.gate = LowRank(
                config,
                heads.value_width,
                lambda rank: projection(rank, values, "gate.up"),
                tp_group=self.tp_group,
            )
        self.out_norm: HeadNorm | None = None
        if preset.norm == "head":
            self.out_norm = HeadNorm(config, heads.value_width, self.tp_group)
        elif preset.norm == "hidden":
            self._norm_sums = Collectives(
                GroupPlace.of(self.tp_group), "output norm", self.runtime.timeout_seconds
            )
        self.out_proj = build_module(
            submodules.out_proj,
            values,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="fc2",
            tp_group=self.tp_group,
            name=part_name("out_proj"),
        )

    def _build_decay(self, config: Any, projection: Callable) -> None:
        """What a decay from the input has of parameters."""
        heads, preset = self.heads, self.preset
        self.decay: LowRank | None = None
        self.dt_bias: torch.nn.Parameter | None = None
        self.A_log: torch.nn.Parameter | None = None
        if preset.decay not in ("softplus", "logsigmoid"):
            return
        count = heads.key * heads.key_width if preset.per_channel else heads.value
        if preset.per_channel:
            self.decay = LowRank(
                config,
                preset.decay_rank or heads.key_width,
                lambda rank: projection(rank, count, "decay.up"),
                tp_group=self.tp_group,
            )
        if preset.decay == "softplus":
            self.dt_bias = per_head(config, initial_time_steps(count), self.tp_group)
            self.A_log = per_head(config, initial_rates(heads.value), self.tp_group)
        else:
            self.dt_bias = per_head(config, torch.zeros(count), self.tp_group)

    # --- forward ------------------------------------------------------------------------------

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        inference_context: Any = None,
        rotary_pos_emb: Any = None,
        packed_seq_params: Any = None,
        attention_bias: Tensor | None = None,
        sequence_len_offset: Any = None,
        state: LinearState | None = None,
        output_state: bool = False,
        **_unused: Any,
    ) -> tuple[Tensor, ...]:
        """Linear attention of ``[n, b, h]``, or ``[n / p, b, h]`` under sequence parallelism.

        Args:
            hidden_states: this rank's tokens, normed.
            attention_mask: not read: the mask follows from the layer's ``attn_mask_type``.
            rotary_pos_emb: ``[n, 1, 1, d]``, or one for queries and one for keys; read by presets
                that rotate.
            packed_seq_params: documents,
                :class:`~megatron_longseq.packed_rows.PackedRows`; presets without a convolution.
            state: before the first token of the sequence; zeros if not given.
            output_state: return the state after the last token.

        Returns:
            The output, of the shape of ``hidden_states``; ``None``, Megatron's bias; and, if asked
            for, the state, as :func:`.linear_attention.linear_attention` returns it.

        Raises:
            UserError: something that linear attention does not know.
        """
        del attention_mask, sequence_len_offset
        documents = isinstance(packed_seq_params, PackedRows) and self.conv1d is None
        self._refuse(
            inference_context=inference_context,
            packed_seq_params=None if documents else packed_seq_params,
            attention_bias=attention_bias,
        )
        passage = self.runtime.passage
        if passage is not None:
            state, output_state = passage.entering.get(self.layer_number), True
        projected, _ = self.in_proj(hidden_states)
        decay = None if self.decay is None else self.decay(hidden_states)
        rows = None if state is None else state.rows
        query, key, value, log_decay, beta, gate, rows = self._rebuilt(
            self._inputs, projected, decay, rotary_pos_emb, rows, output_state
        )
        if self.gate is not None:
            gate = self.gate(hidden_states).transpose(0, 1)
        out, recurrent = self._attend(
            query,
            key,
            value,
            log_decay=self._constant(query) if self.preset.constant is not None else log_decay,
            beta=beta,
            initial_state=None if state is None else state.recurrent,
            output_final_state=output_state,
            documents=packed_seq_params,
        )
        result = self.out_proj(self._rebuilt(self._output, out, gate))
        if passage is not None:
            passage.leaving[self.layer_number] = LinearState(recurrent, rows)
            return result
        return (*result, LinearState(recurrent, rows)) if output_state else result

    def _attend(
        self, *tensors: Tensor, documents: PackedRows | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The operator; row by row where there are documents, which differ from row to row."""
        options |= {
            "scale": self.heads.key_width**-0.5 if self.preset.scaled else 1.0,
            "normalize": self.preset.norm == "denominator",
            "causal": self.causal,
        }
        if documents is None:
            return self.runtime.operator(*tensors, **options)
        if options["initial_state"] is not None or options["output_final_state"]:
            raise UserError("packed documents with a state before or after them: not supported")
        gates = {name: options.pop(name) for name in ("log_decay", "beta")}
        outs = []
        for row, boundaries in enumerate(documents.boundaries):
            here = slice(row, row + 1)
            # A constant decay has no rows.
            own = {n: g if g is None or g.dim() == 1 else g[here] for n, g in gates.items()}
            out, _ = self.runtime.operator(
                *(tensor[here] for tensor in tensors), cu_seqlens=boundaries, **own, **options
            )
            outs.append(out)
        return outs[0] if len(outs) == 1 else torch.cat(outs), None

    def _rebuilt(self, function: Callable, *arguments: Any) -> Any:
        """Calls it; with selective recompute its intermediate results are rebuilt in backward.

        The operator stands between two such calls and is not repeated: it keeps its inputs and one
        state per segment, and rebuilds the rest itself.
        """
        if not self._recomputes or not torch.is_grad_enabled():
            return function(*arguments)
        # There is no dropout here, so no random state to restore.
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)

    def _inputs(
        self,
        projected: Tensor,
        decay: Tensor | None,
        rotary_pos_emb: Any,
        rows: Tensor | None,
        output_rows: bool,
    ) -> tuple[Tensor | None, ...]:
        """From the projections ``[n, b, ..]`` to the operator's inputs ``[b, n, ..]``.

        Returns:
            Query, key, value, log decay, beta, the gate's argument, and the last rows.
        """
        preset, heads, local = self.preset, self.heads, self.local
        projected = projected.transpose(0, 1)
        channels = local["query"] + local["key"] + local["value"]
        qkv, *rest = projected.split([channels, *list(local.values())[3:]], -1)
        parts = dict(zip(list(local)[3:], rest, strict=True))
        last_rows = None
        if self.conv1d is not None:
            qkv, last_rows = self.conv1d(qkv, rows, output_rows)
        query, key, value = qkv.split([local["query"], local["key"], local["value"]], -1)
        query, key = (
            apply_map(preset.feature_map, x).unflatten(-1, (-1, heads.key_width))
            for x in (query, key)
        )
        if preset.unit_length:
            query, key = to_unit_length(query), to_unit_length(key)
        if preset.rotary:
            query, key = self._rotate(query, key, rotary_pos_emb)
        value = apply_map(preset.value_map, value).unflatten(-1, (-1, heads.value_width))
        beta = wide(parts["beta"]).sigmoid() if preset.beta else None
        gates = self._log_decay(parts.get("alpha"), decay)
        return query, key, value, gates, beta, parts.get("z"), last_rows

    def _log_decay(self, alpha: Tensor | None, decay: Tensor | None) -> Tensor | None:
        if decay is not None:
            # Of a key's channels; every state that the key writes to decays by them.
            width, states = self.heads.key_width, self.local_value_heads // self.local_key_heads
            alpha = decay.transpose(0, 1).unflatten(-1, (-1, width)).repeat_interleave(states, 2)
            bias = self.dt_bias.unflatten(-1, (-1, width)).repeat_interleave(states, 0)
        else:
            bias = self.dt_bias
        if alpha is None:
            return None
        if self.preset.decay == "softplus":
            return softplus_decay(alpha, self.A_log, bias)
        return logsigmoid_decay(alpha, bias)

    def _constant(self, like: Tensor) -> Tensor:
        """The constant log decays of this rank's heads ``[heads / p]``, at full precision.

        Not a buffer: Megatron would round it with the model's weights.
        """
        dtype = torch.promote_types(like.dtype, torch.float32)
        if self._decays is None or self._decays.device != like.device:
            decays = self.preset.log_decays(
                self.heads.value, self.layer_number - 1, self.config.num_layers
            )
            local = decays.chunk(self.tp_group.size())[self.tp_group.rank()]
            self._decays = local.to(like.device)
        return self._decays.to(dtype)

    def _rotate(self, query: Tensor, key: Tensor, rotary_pos_emb: Any) -> tuple[Tensor, Tensor]:
        config = self.config
        skipped = config.no_rope_freq and config.no_rope_freq[self.layer_number - 1]
        if skipped or rotary_pos_emb is None:
            return query, key
        if not isinstance(rotary_pos_emb, tuple):
            rotary_pos_emb = (rotary_pos_emb, rotary_pos_emb)
        rotated = (
            apply_rotary_pos_emb(x.transpose(0, 1), rows, config=config).transpose(0, 1)
            for x, rows in zip((query, key), rotary_pos_emb, strict=True)
        )
        query, key = rotated
        return query, key

    def _output(self, out: Tensor, gate: Tensor | None) -> Tensor:
        """``[b, n, heads / p, e]`` to ``[n, b, heads e / p]``: norm and gate."""
        if self.out_norm is not None:
            out = self.out_norm(out)
        elif self.preset.norm == "hidden":
            out = hidden_norm(out, self.sections["value"], self._norm_sums)
        out = out.flatten(2)
        if gate is not None:
            out = (wide(out) * apply_map(self.preset.gate, wide(gate))).to(out.dtype)
        return out.transpose(0, 1).contiguous()

    def _refuse(self, **given: Any) -> None:
        for name, value in given.items():
            if value is not None:
                raise UserError(
                    f"--longseq-linear-attention {self.preset.name}: its layer was given {name}, "
                    "which it does not know"
                )

    # --- what Megatron asks of a layer --------------------------------------------------------

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Describes every parameter by its place in the whole, whatever the layout.

        A column-parallel matrix of several sections is described section by section, as each
        section is split over the tensor-parallel ranks by itself.
        """
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        described = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            {"A_log": 0, "dt_bias": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            described |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        key = f"{prefix}in_proj.weight"
        described[key] = _split_tensor_factory(
            described[key], list(self.local.values()), list(self.local), 0
        )
        return described

    def backward_dw(self) -> None:
        """Computes the weight gradients that the linear layers have put off."""
        low_rank = [pair.up for pair in (self.decay, self.gate) if pair is not None]
        for module in (self.in_proj, *low_rank, self.out_proj):
            module.backward_dw()

    def describe(self) -> str:
        """For the start-up lines: preset, heads, what passes between ranks, and how."""
        operator, heads = self.runtime.operator, self.heads
        kernel = self.runtime.kernel(heads.key_width, heads.value_width, self.in_proj.weight)
        columns = heads.value_width + int(self.preset.norm == "denominator")
        state = self.local_value_heads * heads.key_width * columns * 4
        text = (
            f"linear attention {self.preset.name}, {heads.key} key and {heads.value} value heads "
            f"of {heads.key_width} and {heads.value_width}, kernel {kernel}"
        )
        if operator.place.size == 1:
            return text
        return (
            f"{text}; states of {state / 2**10:.4g} KiB per sequence over {operator.place.size} "
            f"ranks, {operator.layout}, schedule {operator.scan.schedule}"
        )
